"""`waypost worker --processes N`: what the supervisor of the processes does when one cannot be started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from waypost.cli.commands.worker import Supervisor


def test_a_process_that_cannot_be_started_does_not_end_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor(["worker", "shop"], 2)
    started: list[int] = []

    def start(slot: int) -> Any:
        if slot in started or (started and slot == 1):
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(slot)
        return SimpleNamespace(pid=7)

    monkeypatch.setattr(supervisor, "_start", start)
    supervisor._fill_slots()
    assert [child.slot for child in supervisor._children] == [0]
    assert list(supervisor._vacant) == [1]
    assert "could not be started (Resource temporarily unavailable); trying again" in capsys.readouterr().err


def test_a_supervisor_whose_first_process_cannot_be_started_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(slot: int) -> Any:
        raise BlockingIOError("Resource temporarily unavailable")

    supervisor = Supervisor(["worker", "shop"], 2)
    monkeypatch.setattr(supervisor, "_start", start)
    with pytest.raises(BlockingIOError):
        supervisor._fill_slots()
