"""Every command runs on every store: a runner has a store, runs commands on it, and has a client to inspect it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waypost import Waypost
from waypost.cli.main import main
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

STORES = ("memory", "sqlite", "valkey", "postgres")
_numbers = itertools.count()


class CommandRunner:
    """Runs commands on one store."""

    def __init__(self, url: str, namespace: str, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        self.url = url
        self.namespace = namespace
        self.folder = folder
        self._capture = capture
        self.post = Waypost(url, namespace=namespace)
        #: The standard error of the last command.
        self.stderr = ""

    @property
    def options(self) -> list[str]:
        """The arguments that name the store."""
        return ["--url", self.url, "--namespace", self.namespace]

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command on the store, and return its output."""
        return self.run_bare(*arguments, *self.options, code=code)

    def run_bare(self, *arguments: str, code: int = 0) -> str:
        """Run a command without the store's arguments, and return its output."""
        self._capture.readouterr()
        try:
            ended = main(arguments)
        except SystemExit as end:
            ended = int(end.code or 0)
        out, self.stderr = self._capture.readouterr()
        assert ended == code, f"{arguments} ended with {ended}: {out}{self.stderr}"
        assert "Traceback" not in self.stderr
        return out

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run a command with --json, and return its one document."""
        return json.loads(self.run(*arguments, "--json", code=code))

    def refused(self, *arguments: str, code: int = 2) -> str:
        """Run a command that must fail, and return the last line of its error."""
        assert self.run(*arguments, code=code) == ""
        return self.stderr.splitlines()[-1]

    def bury(self, queue: str, *bodies: object, reason: str = "rejected", error: str | None = None) -> list[str]:
        """Make dead letters, and return their ids."""
        ids = [self.post.publish(queue, body).id for body in bodies]
        for _ in bodies:
            with self.post.receive(queue) as message:
                assert message is not None
                message.dead(reason, error)
        return ids


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    with ValkeyServer(appendonly=True, appendfsync="no") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAYPOST_URL", "WAYPOST_NAMESPACE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def make_runner(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> CommandRunner:
    namespace = fresh_namespace()
    match kind:
        case "memory":
            url = f"memory://cli-{next(_numbers)}"
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'cli.db'}"
        case _:
            url = request.getfixturevalue(f"{kind}_server").url
    if kind == "postgres":
        migrate(url, namespace=namespace)
    return CommandRunner(url, namespace, capsys, tmp_path)


@pytest.fixture(params=STORES)
def cli(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], clean: None
) -> Iterator[CommandRunner]:
    """A runner on each store."""
    made = make_runner(request.param, request, tmp_path, capsys)
    with made.post:
        yield made


@pytest.fixture
def sqlite_cli(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], clean: None
) -> Iterator[CommandRunner]:
    """A runner on SQLite, for tests that do not depend on the store."""
    made = make_runner("sqlite", request, tmp_path, capsys)
    with made.post:
        yield made
