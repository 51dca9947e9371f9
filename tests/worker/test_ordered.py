"""Ordered groups in a worker: a settle and the next claim travel together, and nothing of the promises is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Waypost
from waypost.errors import OutcomeUnknown
from waypost.operations.receive import settle_and_claim
from waypost.store.port import AsyncExecutor, Call

COUNT = 30


class CountingExecutor:
    """Counts the round trips of a worker by what they carry; `fails` may lose the answers to some of them."""

    def __init__(self, executor: AsyncExecutor) -> None:
        self._executor = executor
        self.trips = Counter[str]()
        #: The answers of how many flushes are to be lost, and of which calls.
        self.lose: list[tuple[bool, bool]] = []

    async def run(self, call: Call[Any]) -> Any:
        self.trips[call.name] += 1
        return await self._executor.run(call)

    async def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        chosen = list(calls)
        self.trips["+".join(call.name for call in chosen)] += 1
        answers: list[Any] = await self._executor.run_many(chosen)
        if self.lose and [call.name for call in chosen] == ["settle", "claim"]:
            lost = self.lose.pop()
            return [OutcomeUnknown("lost") if gone else one for one, gone in zip(answers, lost, strict=True)]
        return answers

    async def close(self) -> None:
        await self._executor.close()


@pytest.fixture
def harness(url: str, namespace: str) -> Iterator[Harness]:
    with Harness("async", url, namespace=namespace) as made:
        yield made
        for queue in made.queues():
            made.check(queue)


@pytest.fixture
def counted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[CountingExecutor]:
    """The executors of workers that start from now on."""
    store, made = harness.post._store, list[CountingExecutor]()
    connect = store.connect_async

    async def connect_counted(**options: Any) -> CountingExecutor:
        made.append(CountingExecutor(await connect(**options)))
        return made[-1]

    monkeypatch.setattr(store, "connect_async", connect_counted)
    return made


def fill(harness: Harness, groups: int) -> None:
    harness.configure("orders", order="group")
    harness.publish_many("orders", list(range(COUNT)), group=lambda body: f"g{body % groups}")


@pytest.mark.promise("QUEUE-5")
def test_a_message_of_an_ordered_group_takes_one_round_trip(harness: Harness, counted: list[CountingExecutor]) -> None:
    fill(harness, 1)
    handled: list[int] = []

    @harness.handler("orders", concurrency=5)
    async def handle(body: int) -> None:
        handled.append(body)

    with harness.working():
        until(lambda: harness.ended("orders") == COUNT, "the end of all messages")
    assert handled == list(range(COUNT))
    trips = sum((executor.trips for executor in counted), Counter[str]())
    assert trips["settle+claim"] == COUNT
    assert trips["settle"] == 0


@pytest.mark.promise("QUEUE-5", "LEASE-6")
@pytest.mark.parametrize("lost", [(True, True), (True, False), (False, True)], ids=["both", "settle", "claim"])
def test_lost_answers_change_neither_the_order_nor_how_often_a_message_is_handled(
    harness: Harness, counted: list[CountingExecutor], lost: tuple[bool, bool]
) -> None:
    fill(harness, 2)
    handled: list[int] = []

    @harness.handler("orders", concurrency=5)
    async def handle(body: int) -> None:
        handled.append(body)
        if body == 4:
            counted[-1].lose += [lost] * 3

    with harness.working():
        until(lambda: harness.ended("orders") == COUNT, "the end of all messages")
    assert [body for body in handled if body % 2 == 0] == list(range(0, COUNT, 2))
    assert [body for body in handled if body % 2] == list(range(1, COUNT, 2))
    assert not counted[-1].lose
    assert harness.ledger("orders").claims == COUNT


@pytest.mark.promise("QUEUE-5", "LEASE-11")
def test_a_worker_that_is_quiet_settles_what_it_has_and_claims_no_more(harness: Harness) -> None:
    fill(harness, 1)
    handled: list[int] = []

    @harness.handler("orders", concurrency=5)
    async def handle(body: int) -> None:
        handled.append(body)
        if body == 3:
            worker.quiet()

    worker = harness.post.worker()
    harness.done(worker.start())
    until(lambda: harness.ended("orders") == len(handled) >= 4, "the end of four messages")
    harness.done(worker.stop(5))
    assert handled[:4] == [0, 1, 2, 3]
    assert harness.ledger("orders").ready == COUNT - len(handled)
    assert harness.ledger("orders").leased == 0


@pytest.mark.promise("QUEUE-5")
def test_a_worker_that_runs_until_a_queue_is_empty_ends_after_the_last_message_of_an_ordered_group(
    harness: Harness,
) -> None:
    fill(harness, 3)
    handled: list[int] = []

    @harness.handler("orders", concurrency=2)
    async def handle(body: int) -> None:
        handled.append(body)

    harness.run()
    assert sorted(handled) == list(range(COUNT))
    assert harness.ended("orders") == COUNT


@pytest.mark.promise("LEASE-10", "LEASE-11")
def test_outcomes_that_a_claim_took_along_are_returned_if_it_is_cancelled_before_it_is_sent() -> None:
    answers: list[tuple[str, object]] = []
    with Waypost("memory://cancelled-claims") as post:
        # A client that does not know the store's time asks for it first.
        flow = settle_and_claim(
            post._context, "orders", [], lambda answer, operation: answers.append((type(answer).__name__, operation)), 1
        )
        first: Any = next(flow)
        assert first.name == "time"
        with pytest.raises(asyncio.CancelledError):
            flow.throw(asyncio.CancelledError())
    assert answers == [("CancelledError", None)]
