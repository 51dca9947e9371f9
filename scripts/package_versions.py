"""Install the built wheel on each supported Python, and run a first message with it.

    python -m scripts.package_versions

It makes an environment of its own for each, in a folder that is removed, and prints one line for each:
`3.12.1: ok`. A Python that is not on this machine is named, and is no failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from glob import glob
from os.path import expanduser
from pathlib import Path

from tests.packaging.built import PROJECT, build, check_installed

CLASSIFIER = "Programming Language :: Python :: "


def main() -> int:
    """Try each Python that the classifiers name; return the exit code."""
    versions = [one.removeprefix(CLASSIFIER) for one in PROJECT["classifiers"] if one.startswith(CLASSIFIER)]
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        _, wheel = build(Path(folder))
        for version in versions:
            found = find_python(version)
            if found is None:
                print(f"{version}: not on this machine", flush=True)
                continue
            check_version(found, wheel, Path(folder) / version)
            print(f"{version}: ok ({found})", flush=True)
            tried += 1
    return 0 if tried else 1


def check_version(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel with what it needs, and use it."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True)
    check_installed(own, folder, PROJECT["version"])


def find_python(version: str) -> str | None:
    """Return a Python of a version that starts: a name alone may be that of a version manager."""
    installed = sorted(glob(expanduser(f"~/.pyenv/versions/{version}.*/bin/python3")))
    for path in (shutil.which(f"python{version}"), *reversed(installed)):
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    return None


if __name__ == "__main__":
    sys.exit(main())
