"""Every command is tried on every store: a desk has a store, a client to look behind, and runs commands on it."""

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


class Desk:
    """A store, and commands on it."""

    def __init__(self, url: str, namespace: str, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        self.url = url
        self.namespace = namespace
        self.folder = folder
        self._capture = capture
        self.post = Waypost(url, namespace=namespace)
        #: What the last command wrote to its second stream.
        self.stderr = ""

    @property
    def place(self) -> list[str]:
        """Which store, as arguments."""
        return ["--url", self.url, "--namespace", self.namespace]

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command on the store; what it wrote."""
        return self.run_bare(*arguments, *self.place, code=code)

    def run_bare(self, *arguments: str, code: int = 0) -> str:
        """Run a command as it is; what it wrote."""
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
        """Run a command with --json; the one document that it wrote."""
        return json.loads(self.run(*arguments, "--json", code=code))

    def refused(self, *arguments: str, code: int = 2) -> str:
        """Run a command that cannot be meant; the sentence that says so."""
        assert self.run(*arguments, code=code) == ""
        return self.stderr.splitlines()[-1]

    def bury(self, queue: str, *bodies: object, reason: str = "rejected", error: str | None = None) -> list[str]:
        """Make dead letters; their ids."""
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


def make_desk(kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    namespace = fresh_namespace()
    match kind:
        case "memory":
            url = f"memory://desk-{next(_numbers)}"
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'desk.db'}"
        case _:
            url = request.getfixturevalue(f"{kind}_server").url
    if kind == "postgres":
        migrate(url, namespace=namespace)
    return Desk(url, namespace, capsys, tmp_path)


@pytest.fixture(params=STORES)
def desk(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], clean: None
) -> Iterator[Desk]:
    """A desk on each store."""
    made = make_desk(request.param, request, tmp_path, capsys)
    with made.post:
        yield made


@pytest.fixture
def desk_of(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], clean: None
) -> Iterator[Desk]:
    """A desk on SQLite, for what does not depend on the store."""
    made = make_desk("sqlite", request, tmp_path, capsys)
    with made.post:
        yield made
