"""Messages that lapse, through clients and workers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost.errors import InvalidInput, InvalidTime, MessageRemoved


@pytest.mark.promise("PUB-10", "CHAIN-1")
def test_a_message_that_lapsed_reaches_no_handler_and_ends_the_wait_for_its_result(harness: Harness) -> None:
    handled: list[str] = []
    past = datetime.now(UTC) - timedelta(days=1)

    @harness.handler("orders")
    async def handle(body: str) -> None:
        handled.append(body)

    late = harness.publish("orders", "late", key="a", expires=past)
    many = harness.publish_many("orders", ["late", "late"], expires=past)
    harness.publish("orders", "kept", expires=timedelta(days=1))
    with harness.working():
        with pytest.raises(MessageRemoved):
            harness.wait_result(late, timeout=20)
        until(lambda: harness.ended("orders") == 4)
    assert handled == ["kept"]
    assert harness.ledger("orders").dropped == 3
    causes = [harness.history("orders", one.id)[-1].cause for one in (late, *many)]
    assert causes == ["lapsed"] * 3


@pytest.mark.promise("PUB-10", "WAKE-5")
def test_an_idle_worker_ends_what_lapses_while_it_waits_for_a_chain(harness: Harness) -> None:
    first = harness.publish("mails", "first", chain=True)

    @harness.handler("orders")
    async def handle(body: str) -> None:
        raise AssertionError("its chain has not ended")

    harness.publish("orders", "second", after=first, expires=0.5)
    with harness.working():
        until(lambda: harness.ledger("orders").dropped == 1)
    assert harness.ledger("mails").ready == 1


@pytest.mark.promise("PUB-10", "PUB-8")
def test_an_expiry_before_the_due_time_is_refused_before_anything_is_written(harness: Harness) -> None:
    now = datetime.now(UTC)
    wrong = (
        {"expires": 5, "delay": 5}, {"expires": now, "at": now + timedelta(seconds=1)},
        {"expires": 60, "at": now + timedelta(hours=1)}, {"expires": now, "delay": 60},
    )  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidInput, match="lies before the message is due"):
            harness.publish("orders", 1, **options)
    for expires in (0, -1, float("nan"), True, "5", datetime.now()):  # noqa: DTZ005
        with pytest.raises(InvalidTime):
            harness.publish("orders", 1, expires=expires)
    assert harness.queues() == []
