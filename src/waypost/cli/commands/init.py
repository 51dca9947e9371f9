"""`waypost init`: write a small project: an application with a handler and a schedule, its tests, a compose file."""

from __future__ import annotations

import argparse
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from waypost.cli.exit_codes import FAILED, USAGE, CommandError
from waypost.cli.options import add_command
from waypost.cli.output import write, write_json

#: The URL of each store in the project; those of servers are the ones that its compose file starts.
URLS = {
    "sqlite": "sqlite:///shop.db",
    "postgres": "postgresql://shop:shop@127.0.0.1:5432/shop",
    "valkey": "valkey://127.0.0.1:6379",
}
#: The files of a project and their templates; those in FOR_FASTAPI have another one for it.
FILES = {
    "app.py": "app.py",
    "test_app.py": "app_tests.py",
    "compose.yaml": "compose.yaml",
    "README.md": "README.md",
    "requirements.txt": "requirements.txt",
    ".env.example": "env",
    ".gitignore": "gitignore",
}
FOR_FASTAPI = ("app.py", "test_app.py")
POST_ORDER = """curl -d '{"id": 7, "amount": 20}' -H 'content-type: application/json' 127.0.0.1:8000/orders"""


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "init", run, "write a small project to begin with", store=False,
        json_text="the files and the next commands, as one JSON document",
        more="An application with a handler, a schedule and a publisher, its tests, a compose file for Valkey and "
        "PostgreSQL, a README. It overwrites nothing.",
        examples=("waypost init shop", "waypost init shop --store postgres --fastapi"),
    )  # fmt: skip
    parser.add_argument("folder", nargs="?", default=".", help="where to write it; it is created (this folder)")
    parser.add_argument("--store", choices=tuple(URLS), default="sqlite", help="the store of the project (sqlite)")
    parser.add_argument("--fastapi", action="store_true", help="orders come in through a FastAPI application")


def run(options: argparse.Namespace) -> int:
    """Write the project and return the exit code."""
    folder = Path(options.folder)
    existing = [name for name in FILES if (folder / name).exists() or (folder / name).is_symlink()]
    if existing:
        raise CommandError(
            f"{folder} already has {', '.join(existing)}, and nothing is overwritten: name a new folder, as in "
            "`waypost init shop`",
            USAGE,
        )
    commands = next_commands(folder, options.store, fastapi=options.fastapi)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in make_files(options.store, fastapi=options.fastapi).items():
            with open(folder / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise CommandError(f"{error.filename or folder} cannot be written: {error.strerror or error}", FAILED) from None
    if options.json:
        write_json({"folder": str(folder), "files": list(FILES), "commands": commands})
        return 0
    write(f"{folder}: {', '.join(FILES)}")
    write("\nnext (the worker and the live view keep running: start each in a terminal of its own):")
    for command in commands:
        write(f"  {command}")
    return 0


def make_files(store: str, *, fastapi: bool) -> dict[str, str]:
    """Return the files of a project by name."""
    extras = ["cli", *([] if store == "sqlite" else [store]), *(["fastapi"] if fastapi else [])]
    values = {
        "url": URLS[store],
        "extras": ",".join(extras),
        "packages": "\n".join(["pytest", *(["httpx", "uvicorn"] if fastapi else [])]),
        "publish": f"`{POST_ORDER if fastapi else 'python app.py'}`",
        "commands": "\n".join(next_commands(Path(), store, fastapi=fastapi)[1:]),
    }
    folder = files("waypost.cli") / "project"
    made = {}
    for name, template in FILES.items():
        chosen = f"fastapi_{template}" if fastapi and name in FOR_FASTAPI else template
        made[name] = Template((folder / f"{chosen}.tmpl").read_text(encoding="utf-8")).substitute(values)
    return made


def next_commands(folder: Path, store: str, *, fastapi: bool) -> list[str]:
    """Return what to install, and the three commands to go on with."""
    publish = ["uvicorn app:app", POST_ORDER] if fastapi else ["python app.py"]
    worker = "waypost worker app --reload"
    if store == "sqlite":
        commands = [publish[0], worker, publish[1] if fastapi else f"waypost watch {URLS[store]}"]
    else:
        start = f"docker compose up -d --wait {store}"
        migrate = f" && waypost migrate {URLS[store]}" if store == "postgres" else ""
        commands = [f"{start}{migrate}", worker, publish[0]]
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    return [f"{change}pip install -r requirements.txt", *commands]
