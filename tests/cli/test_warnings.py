"""Warnings about a server: once a day by commands, at each start by what keeps running, always by doctor."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import CommandRunner
from waypost.cli.warning_days import FILE, OncePerDay, read_days
from waypost.store.valkey import executor
from waypost.testing.bench import fresh_namespace
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.promise("FACE-6")


@pytest.fixture(scope="module")
def unsafe_server() -> Iterator[ValkeyServer]:
    """A server that forgets everything when it restarts."""
    with ValkeyServer(appendonly=False) as server:
        yield server


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "waypost"


def record(problem: str, store: str = "valkey://127.0.0.1:6379") -> logging.LogRecord:
    return logging.makeLogRecord({"event": "durability", "store": store, "problem": problem})


def test_a_command_warns_of_a_server_once_a_day(
    unsafe_server: ValkeyServer,
    state: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warnings_of(*arguments: str, code: int = 0) -> int:
        """Run a command as a new process would, and return how many warnings it gives."""
        monkeypatch.setattr(executor, "_warned", set())
        caplog.clear()
        cli.run(*arguments, code=code)
        return sum(getattr(one, "event", "") == "durability" for one in caplog.records)

    cli = CommandRunner(unsafe_server.url, fresh_namespace(), capsys, tmp_path)
    with cli.post:
        assert [warnings_of("queues"), warnings_of("queues"), warnings_of("stats")] == [1, 0, 0]
        yesterday = dict.fromkeys(read_days(state), "2001-01-01")
        (state / FILE).write_text(json.dumps(yesterday))
        assert [warnings_of("queues"), warnings_of("queues")] == [1, 0]
        relay = ("relay", "--queue", "orders", "--until-empty", "--to", f"sqlite:///{tmp_path / 'target.db'}#copies")
        assert [warnings_of(*relay), warnings_of(*relay)] == [1, 1]
        for _ in range(2):
            assert warnings_of("doctor", code=1) == 0
            assert "appendonly" in cli.run("doctor", code=1)
    days = (state / FILE).read_text()
    assert unsafe_server.password not in days
    assert "127.0.0.1" not in days
    assert stat.S_IMODE((state / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_each_problem_of_each_store_is_warned_of(tmp_path: Path) -> None:
    once = OncePerDay(tmp_path)
    given = [record("a"), record("b"), record("a", "valkey://other"), record("a"), logging.makeLogRecord({})]
    assert [once.filter(one) for one in given] == [True, True, True, False, True]
    assert len(read_days(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["no folder", "a file instead of the folder", "no JSON", "another JSON", "bytes"])
def test_a_command_warns_each_time_if_it_cannot_remember(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "waypost"
    if damage == "a file instead of the folder":
        folder.write_text("")
    elif damage != "no folder":
        folder.mkdir()
        (folder / FILE).write_bytes({"no JSON": b"{", "another JSON": b"[1]", "bytes": b"\xff\xfe"}[damage])
    once = OncePerDay(None if damage == "no folder" else folder)
    assert once.filter(record("a"))
    repeated = damage in ("no folder", "a file instead of the folder")
    assert once.filter(record("a")) == repeated
