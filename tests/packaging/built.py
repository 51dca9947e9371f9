"""The sdist and the wheel as a release makes them, and programs that use the wheel in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What the README shows, in one program: publish and receive on a file.
FIRST_MESSAGE = """
from waypost import Waypost

with Waypost("sqlite:///first.db") as post:
    print(post.publish("orders", {"id": 7}, key="order:7").status)
    with post.receive("orders", wait=5) as message:
        print(message.body)
    print(post.ledger("orders").done)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build in `folder` with the tools of this environment, without a network; return sdist and wheel."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_installed(python: Path, folder: Path, version: str) -> None:
    """Run the command and a first message with the Python of an environment that has the wheel."""

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run(str(python.parent / "waypost"), "--version").split()[:2] == ["waypost", version]
    # Python 3.12.0 to 3.12.3 take `?1` for a named parameter and warn; later ones do not.
    warnings = ("-W", "error", "-W", "ignore:Binding:DeprecationWarning")
    assert run(str(python), *warnings, "-c", FIRST_MESSAGE).splitlines() == ["queued", "{'id': 7}", "1"]
