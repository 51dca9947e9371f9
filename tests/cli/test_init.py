"""`waypost init`: each project is generated, its tests pass, and its worker handles an order on a real store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CommandRunner
from tests.waiting import WAIT_SECONDS_MAX
from waypost.cli.commands.init import FILES, URLS, next_commands

pytestmark = pytest.mark.promise("FACE-6")

ROOT = Path(__file__).parents[2]
PLACE_ORDER = {
    False: ["app.py"],
    True: ["-c", "import app\nwith app.post: print(app.place_order(app.Order(id=7, amount=20)))"],
}


def in_folder(folder: Path, *arguments: str, **environment: str) -> str:
    """Run Python in the folder of a project, and return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WAYPOST_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX, check=False,
        env=kept | {"PYTHONPATH": str(ROOT / "src")} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("store", "fastapi"), [("sqlite", False), ("sqlite", True), ("valkey", False), ("postgres", True)]
)
def test_a_project_is_tested_and_runs(
    store: str, fastapi: bool, sqlite_cli: CommandRunner, request: pytest.FixtureRequest
) -> None:
    folder = sqlite_cli.folder / "the shop"
    printed = sqlite_cli.run_bare("init", str(folder), "--store", store, *(["--fastapi"] if fastapi else []))
    assert sorted(one.name for one in folder.iterdir()) == sorted(FILES)
    assert "waypost worker app --reload" in printed
    assert not any(re.search(r"\$\w", (folder / name).read_text()) for name in FILES)
    assert URLS[store] in (folder / ".env.example").read_text()
    assert "3 passed" in in_folder(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    url = URLS["sqlite"] if store == "sqlite" else request.getfixturevalue(f"{store}_server").url
    if store == "postgres":
        sqlite_cli.run_bare("migrate", url)
    assert "queued" in in_folder(folder, *PLACE_ORDER[fastapi], WAYPOST_URL=url)
    worker = ("-m", "waypost.cli.main", "worker", "app", "--until-empty", "--json")
    assert json.loads(in_folder(folder, *worker, WAYPOST_URL=url))["total"]["handled"] == 1


@pytest.mark.parametrize("store", URLS)
@pytest.mark.parametrize("fastapi", [False, True])
def test_what_to_install_and_three_commands_follow(store: str, fastapi: bool) -> None:
    commands = next_commands(Path("the shop"), store, fastapi=fastapi)
    assert len(commands) == 4
    assert commands[0] == "cd 'the shop' && pip install -r requirements.txt"
    assert next_commands(Path(), store, fastapi=fastapi)[1:] == commands[1:]


def test_nothing_is_overwritten(sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sqlite_cli.folder / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    sqlite_cli.run_bare("init", str(folder), code=2)
    assert f"{folder} already has README.md, and nothing is overwritten" in sqlite_cli.stderr
    assert [one.name for one in folder.iterdir()] == ["README.md"]
    (sqlite_cli.folder / "file").write_text("")
    sqlite_cli.run_bare("init", str(sqlite_cli.folder / "file" / "shop"), code=4)
    assert "cannot be written" in sqlite_cli.stderr
    (sqlite_cli.folder / "here").mkdir()
    monkeypatch.chdir(sqlite_cli.folder / "here")
    document = json.loads(sqlite_cli.run_bare("init", "--json"))
    assert document["commands"][:2] == ["pip install -r requirements.txt", "python app.py"]
    assert sorted(document["files"]) == sorted(one.name for one in Path().iterdir())
