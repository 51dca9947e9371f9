"""Clients whose machine's clock is wrong: all times are the store's, so it does no harm."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost.times import to_ms

DAY = 86_400
#: By how many seconds the clock is off, one after the other at each reading.
WRONG = {"a day behind": (-DAY,), "a day ahead": (DAY,), "jumping": (-DAY, DAY, 0, 3 * DAY, -3600)}
TOLERANCE_MS = 300_000


@pytest.fixture(params=WRONG)
def right_ms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make the clock of this process wrong, and return a right one."""
    offs = itertools.cycle(WRONG[request.param])
    real_ns, real = time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + next(offs) * 1_000_000_000)
    monkeypatch.setattr(time, "time", lambda: real() + next(offs))
    return lambda: real_ns() // 1_000_000


def harness_of(mode: str, url: str, namespace: str, right_ms: Callable[[], int]) -> Harness:
    """Return a client. Stores without a server of their own get the right time."""
    clock: dict[str, Any] = {} if url.startswith(("valkey", "postgresql")) else {"clock": right_ms}
    return Harness(mode, url, namespace=namespace, **clock)


@pytest.mark.promise("LEASE-1", "TIMER-2", "LEASE-3")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_whose_clock_is_wrong_claims_nothing_early_and_loses_no_lease(
    mode: str, url: str, namespace: str, right_ms: Callable[[], int]
) -> None:
    with harness_of(mode, url, namespace, right_ms) as harness:
        harness.configure("orders", lease=2)

        @harness.handler("orders", result_ttl=60)
        async def handle(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return seconds

        began = right_ms()
        timers = [harness.publish("orders", 0, delay=0.4) for _ in range(3)]
        timers.append(harness.publish("orders", 0, at=datetime.fromtimestamp((right_ms() + 400) / 1000, UTC)))
        # Longer than its lease: it has to be renewed in time.
        long = harness.publish("orders", 2.5)
        with harness.working():
            assert harness.wait_result(long, timeout=60) == 2.5
            until(lambda: harness.ledger("orders").done == 5)
        ledger = harness.ledger("orders")
        events = harness.journal("orders", 0, 1000).events
        ended = right_ms()
    assert (ledger.claims, ledger.expired, ledger.balance, ledger.unexplained) == (5, 0, 0, 0)
    due = {event.message_id: event.due_at for event in events if event.event == "published"}
    claimed = {event.message_id: event.at for event in events if event.event == "claimed"}
    for timer in timers:
        moment = due[timer.id]
        assert moment is not None
        assert moment <= claimed[timer.id]
    assert all(began - TOLERANCE_MS <= to_ms(event.at) <= ended + TOLERANCE_MS for event in events)
    assert all(abs(to_ms(moment) - began) <= TOLERANCE_MS for moment in due.values() if moment is not None)
