"""Run the tests of the Django project with Django 6, which needs Python 3.12 or newer.

    python scripts/django6.py

It makes an environment of its own in `.django6`, once for each state of the requirements, and prints one line for each
database: `sqlite: 52 passed in 4.10s (Django 6.0.1, Python 3.13.1)`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from glob import glob
from os.path import expanduser
from pathlib import Path

from tests.django.programs import new_database, run_inside
from waypost.testing.postgres import PostgresServer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".django6"
PYTHON = FOLDER / "bin" / "python"
PYTHONS = ("python3.13", "python3.12", "python3.14")
#: The release that is tested; the rest is what pyproject.toml asks for.
DJANGO = "django>=6,<6.1"
REQUIREMENTS = (f"{ROOT}[postgres,django]", DJANGO, "pytest>=9,<9.2")


def main() -> int:
    """Make the environment if it is not there, and run the tests; return the exit code."""
    make_environment()
    versions = run_python("import django, sys; print(f'Django {django.__version__}, Python {sys.version.split()[0]}')")
    codes = [run_tests("sqlite", "", versions)]
    with PostgresServer() as server, new_database(server.url) as url:
        codes.append(run_tests("postgres", url, versions))
    return max(codes)


def make_environment() -> None:
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr(REQUIREMENTS).encode()).hexdigest()
    stamp = FOLDER / "ready"
    if stamp.exists() and stamp.read_text() == digest:
        return
    found = find_python()
    if found is None:
        sys.exit("django6: Django 6 needs Python 3.12 or newer, and there is none; install python3.12")
    print(f"django6: making .django6 with {found}", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([found, "-m", "venv", str(FOLDER)], check=True)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
    subprocess.run(install, check=True)
    # The tests import the source itself.
    subprocess.run([str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", "waypost"], check=True)
    stamp.write_text(digest)


def find_python() -> str | None:
    """Return a Python that is new enough and starts: a name alone may be that of a version manager."""
    installed = sorted(glob(expanduser("~/.pyenv/versions/3.1[2-9]*/bin/python3")))
    for path in (*map(shutil.which, PYTHONS), *reversed(installed)):
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def run_python(code: str) -> str:
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run_tests(name: str, database_url: str, versions: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = run_inside(str(PYTHON), Path(folder), database_url)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    print(f"{name}: {lines[-1]} ({versions})", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
