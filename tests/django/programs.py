"""Django projects in processes of their own, each on a database of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit, urlunsplit

import psycopg

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "tests" / "django" / "inside"
SHOP = ROOT / "examples" / "django_shop"


@contextmanager
def new_database(url: str) -> Iterator[str]:
    """Create a PostgreSQL database for the length of a block; its URL."""
    name = f"django_{token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program, without that of the project of this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **more}


def run_inside(python: str, folder: Path, database_url: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the project on a database, a SQLite file in `folder` if the URL is empty."""
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(INSIDE / "pytest.ini"),
        "--rootdir", str(INSIDE), "--confcutdir", str(INSIDE), str(INSIDE), *more,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env=environment(FOLDER=str(folder), DATABASE_URL=database_url), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip


def manage(folder: Path, database_url: str, *arguments: str, project: Path = SHOP) -> subprocess.Popen[bytes]:
    """Start a command of the example project, or of a copy; its output is in files of `folder`."""
    with open(folder / f"{arguments[0]}.log", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-u", "manage.py", *arguments], cwd=project, stdout=output, stderr=output,
            start_new_session=True,
            env=environment(SHOP_FOLDER=str(folder), SHOP_DATABASE_URL=database_url),
        )  # fmt: skip
