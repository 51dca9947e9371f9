"""Idle workers: one poll for all queues of a worker, and what it finds that no wake-up announced."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from tests.unit.clients import begin_operation
from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Waypost, lease_clock
from waypost.operations import receive
from waypost.operations.receive import Nap, safety_poll_seconds
from waypost.store.port import BlockingWaits, Executor, Idle
from waypost.values import Claimed, PolledQueue
from waypost.views import Observed
from waypost.wake.port import Listening, OnNotification, State, Topic
from waypost.wake.wakeups import BLOCKING_WAITS_MAX, NO_WAKEUPS, Wakeups
from waypost.worker import waiter as waiters
from waypost.worker.executor_adapters import ThreadedExecutor
from waypost.worker.poller import Liveness, Poller
from waypost.worker.wait_machine import WaitState
from waypost.worker.waiter import Waiter, WaitPlan

QUEUES = [f"orders-{number}" for number in range(30)]
#: The interval of polls, which also carry the heartbeat.
POLL_SECONDS = 0.3


class Deaf:
    """A channel that seems to work, on which every notification is lost."""

    kind = "deaf"
    state: State = "working"

    class Listener:
        """A listener that receives nothing."""

        working = True

        def close(self) -> None: ...

    def send(self, topic: Topic, notifications: Sequence[str]) -> None: ...

    def listen(self, topic: Topic, name: str | None, on_notification: OnNotification) -> Listening:
        return self.Listener()

    def flush(self, timeout: float) -> bool:
        return True


class Scene:
    """A worker that receives no notification, and a client that publishes."""

    def __init__(self, harness: Harness, other: Waypost, polls: list[Observed]) -> None:
        self.harness = harness
        self.other = other
        self.polls = polls
        self.started: list[Any] = []

    def handled(self, *queues: str) -> None:
        for queue in queues:

            @self.harness.handler(queue)
            async def handle(body: Any) -> None:
                self.started.append(body)

    def asleep(self, *queues: str) -> None:
        for queue in queues:
            until(lambda q=queue: self.other.stats(q).sleepers == 1, "a sleeper")  # type: ignore[misc]

    def polled(self, times: int) -> None:
        """Wait for `times` polls: each carries a heartbeat."""
        for _ in range(times):
            (seen,) = [worker.seen_at for worker in self.other.workers()] or [datetime.min.replace(tzinfo=UTC)]
            until(lambda s=seen: any(one.seen_at > s for one in self.other.workers()), "a poll")  # type: ignore[misc]


@pytest.fixture(params=["sync", "async"])
def scene(request: pytest.FixtureRequest, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", POLL_SECONDS)
    polls: list[Observed] = []

    def on_event(event: Observed) -> None:
        if event.event == "polled":
            polls.append(event)

    with (
        Harness(request.param, url, namespace=namespace, wake=Deaf(), on_event=on_event) as harness,
        Waypost(url, namespace=namespace, wake="poll") as other,
    ):
        yield Scene(harness, other, polls)
        for queue in other.queues():
            assert other.ledger(queue).balance == 0


def working(scene: Scene) -> Any:
    return scene.harness.working(health_window=POLL_SECONDS * 1.5)


@pytest.mark.promise("WAKE-5", "SEE-4")
def test_one_poll_is_for_all_idle_queues_and_claims_from_none(scene: Scene) -> None:
    scene.handled(*QUEUES)
    with working(scene) as worker:
        scene.asleep(*QUEUES)
        scene.polled(1)  # calls under way have ended by then
        before = len(scene.polls)
        scene.polled(3)
        assert len(scene.polls) == before
        assert worker.health().status == "green"
        scene.asleep(*QUEUES)


@pytest.mark.promise("WAKE-1", "WAKE-5")
def test_a_lost_wake_up_costs_one_poll_on_each_queue_it_was_lost_on(scene: Scene) -> None:
    scene.handled(*QUEUES)
    with working(scene):
        scene.asleep(*QUEUES)
        scene.polled(1)  # calls under way have ended by then
        before = len(scene.polls)
        for queue in QUEUES[:3]:
            scene.other.publish(queue, queue)
        until(lambda: sorted(scene.started) == sorted(QUEUES[:3]), "all starts")
        scene.asleep(*QUEUES)
        # One empty claim after the message, and none on the other queues.
        assert {event.queue for event in scene.polls[before:]} <= set(QUEUES[:3])


@pytest.mark.promise("TIMER-2", "WAKE-5")
def test_a_poll_reports_timers_published_since(scene: Scene) -> None:
    scene.handled(*QUEUES)
    with working(scene):
        scene.asleep(*QUEUES)
        scene.other.publish(QUEUES[7], "timer", delay=3 * POLL_SECONDS)
        assert until(lambda: scene.started == ["timer"], "the start of the timer")


@pytest.mark.promise("LEASE-4", "WAKE-5")
def test_a_lease_that_began_since_the_last_poll_is_known_before_it_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", 600.0)
    queue = QUEUES[0]
    scene.other.configure(queue, lease=0.6)
    scene.handled(*QUEUES)
    with working(scene):
        scene.asleep(*QUEUES)
        context = scene.other._context
        for _ in range(50):
            scene.other.publish(queue, "abandoned")
            operation = begin_operation(context, queue)
            claimed = scene.other._connected().run(context.store.claim(queue, 1, operation, worker="gone"))
            if claimed.leases:
                break
            # The worker was first, which the publish wakes.
            until(lambda: scene.started == ["abandoned"], "the handler of the worker")
            scene.started.clear()
            scene.asleep(*QUEUES)
        assert len(claimed.leases) == 1
        until(lambda: scene.started == ["abandoned"], "the redelivery")


@pytest.mark.promise("QUEUE-1", "WAKE-5")
def test_a_paused_queue_is_not_claimed_from_at_every_poll(scene: Scene) -> None:
    scene.other.publish(QUEUES[0], 1)
    scene.other.pause(QUEUES[0])
    scene.handled(QUEUES[0])
    with working(scene):
        scene.asleep(QUEUES[0])
        scene.polled(1)
        before = len(scene.polls)
        scene.polled(3)
        assert len(scene.polls) == before
        scene.other.resume(QUEUES[0])
        until(lambda: scene.started == [1], "the start")


@pytest.mark.promise("TIMER-3", "WAKE-5")
def test_without_a_channel_polls_of_many_queues_become_one(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "UNWOKEN_POLL_SECONDS", POLL_SECONDS)
    polls: list[Observed] = []
    with Harness("sync", url, namespace=namespace, wake="poll", on_event=polls.append) as harness:
        scene = Scene(harness, harness.post, polls)
        scene.handled(*QUEUES)
        with working(scene):
            until(lambda: len(harness.workers()) == 1)
            until(lambda: _is_quiet(scene), "an end of the claims")
            harness.publish(QUEUES[3], 1)
            assert until(lambda: scene.started == [1], "the start")


def _is_quiet(scene: Scene) -> bool:
    before = sum(event.event == "polled" for event in scene.polls)
    scene.polled(2)
    return sum(event.event == "polled" for event in scene.polls) == before


@pytest.mark.promise("WAKE-2", "WAKE-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_blocking_wait_is_unblocked_when_its_registration_is_gone(
    mode: str, valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = pytest.importorskip("redis", reason="needs redis-py")
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", POLL_SECONDS)
    with (
        redis.Redis.from_url(valkey_url.replace("valkey://", "redis://")) as raw,
        Harness(mode, valkey_url, namespace=namespace) as harness,
    ):
        started: list[int] = []

        @harness.handler("orders")
        async def handle(number: int) -> None:
            started.append(number)

        with harness.working():
            for number in range(2):
                until(
                    lambda: any(name.startswith(b"!") for name in _sleepers(raw, namespace)),
                    "a blocking wait",
                )
                raw.delete(f"{{{namespace}:orders}}:sleepers")
                until(lambda: harness.stats("orders").sleepers == 1, "a new registration")
                harness.publish("orders", number)
                assert until(lambda n=number: n in started, "the start")  # type: ignore[misc]


def _sleepers(raw: Any, namespace: str) -> list[bytes]:
    return list(raw.zrange(f"{{{namespace}:orders}}:sleepers", 0, -1))


# ---- the waiter alone: no store, no clock ----------------------------------------------------------------------------


class Silent:
    """A poller that only records the idle queues."""

    def __init__(self) -> None:
        self.target: dict[Any, Idle] = {}

    def add(self, target: Any, idle: Idle, seconds: float) -> None:
        self.target[target] = idle

    def remove(self, target: Any) -> None:
        self.target.pop(target, None)


def in_blocking_wait(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Waiter, list[str], Silent], Any]) -> None:
    """A consumer in a blocking wait, on an event loop of its own."""
    monkeypatch.setattr(waiters, "UNBLOCK_SECONDS", 0.01)
    done: list[str] = []

    async def run() -> None:
        poller = Silent()

        class Observed(Waiter):
            def _unblock(self) -> None:
                done.append("unblocked")

        context: Any = type("Link", (), {"wakeups": NO_WAKEUPS, "store": type("Store", (), {"blocking_waits": None})})
        waiter = Observed(context, None, "orders", Liveness(), lambda: True, poller)  # type: ignore[arg-type]
        waiter._blocking_waits = cast("BlockingWaits", object())
        claim = waiter.start_wait("a", planned(waiter))
        claim.sent(lambda: done.append("given up"))
        claim.started(waits=True)
        await scenario(waiter, done, poller)

    asyncio.run(run())


def planned(waiter: Waiter) -> WaitPlan:
    nap = Nap()
    nap.only_to_be_safe = True
    plan = waiter.plan_wait(Claimed([], None, None, None, False, 0, 60_000), nap)
    assert plan is not None
    return plan


@pytest.mark.promise("LEASE-2", "WAKE-5")
def test_a_poll_that_finds_it_in_its_wait_shows_that_its_claim_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        later = lease_clock.now() + 100
        claim = waiter._claim
        assert claim is not None
        waiter.polled(PolledQueue(False, None, None, 60_000, blocked=False), later, later)
        assert claim.not_before < later
        waiter.polled(PolledQueue(False, None, None, 60_000, blocked=True), later, later)
        assert claim.not_before == later
        assert (done, len(poller.target)) == ([], 1)
        waiter.end_wait(found=False)
        assert not poller.target

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("WAKE-1")
def test_a_wait_whose_connection_is_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        now = time.monotonic()
        waiter.polled(PolledQueue(True, None, None, 60_000), now, now)
        assert done == ["unblocked"]
        await asyncio.to_thread(until, lambda: "given up" in done)

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("WAKE-1")
def test_a_check_of_an_earlier_wait_does_not_give_up_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        now = time.monotonic()
        waiter.polled(PolledQueue(True, None, None, 60_000), now, now)
        waiter.end_wait(found=False)
        claim = waiter.start_wait("a", planned(waiter))
        claim.sent(lambda: done.append("the next given up"))
        timer_ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(waiters.UNBLOCK_SECONDS, timer_ended.set_result, None)
        await timer_ended
        assert done == ["unblocked"]

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("WAKE-5")
def test_after_a_useless_wait_it_pauses_once_and_waits_again_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        for pause in (1.0, 2.0, 4.0):
            waiter.end_wait(found=False)
            assert planned(waiter).pause_seconds == pause
            # A message came meanwhile, and it is idle again.
            plan = planned(waiter)
            assert plan.pause_seconds == 0
            waiter.start_wait("a", plan)
        waiter.end_wait(found=True)
        waiter.start_wait("a", planned(waiter))
        waiter.end_wait(found=False)
        assert planned(waiter).pause_seconds == 1.0

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("TIMER-2")
def test_it_is_unblocked_before_a_timer_that_a_poll_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        now = time.monotonic()
        waiter.polled(PolledQueue(False, 3_600_000, None, 60_000, blocked=True), now, now)
        waiter.polled(PolledQueue(False, 260, None, 60_000, blocked=True), now, now)
        assert await asyncio.to_thread(until, lambda: done == ["unblocked"])

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("TIMER-2", "WAKE-5")
@pytest.mark.parametrize("notified", [True, False])
def test_no_wait_follows_a_sleep_that_was_ended_by_work_or_a_timer_of_its_own(
    monkeypatch: pytest.MonkeyPatch, notified: bool
) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        waiter.end_wait(found=True)
        waiter._is_idle = lambda: False  # a handler runs
        plan = planned(waiter)
        asleep = asyncio.create_task(waiter.sleep(60.0, then_wait=plan, poll_seconds=15.0, sleeper="a"))
        await asyncio.sleep(0)
        assert waiter.machine.state is WaitState.SLEEPING_UNTIL_IDLE
        assert len(poller.target) == 1
        waiter._is_idle = lambda: True
        waiter.notify() if notified else waiter.wake_at(time.monotonic() + 30)
        assert await asleep is None
        assert not poller.target

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("WAKE-2")
def test_a_wait_follows_the_sleep_as_soon_as_no_handler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(waiter: Waiter, done: list[str], poller: Silent) -> None:
        waiter.end_wait(found=True)
        waiter._is_idle = lambda: False
        asleep = asyncio.create_task(waiter.sleep(60.0, then_wait=planned(waiter)))
        await asyncio.sleep(0)
        assert waiter.machine.state is WaitState.SLEEPING_UNTIL_IDLE
        waiter._is_idle = lambda: True
        waiter.interrupt()
        plan = await asleep
        assert plan is not None
        assert 59 < plan.seconds <= 60

    in_blocking_wait(monkeypatch, scenario)


@pytest.mark.promise("WAKE-1")
@pytest.mark.parametrize("in_threads", [True, False])
def test_there_are_no_blocking_waits_where_calls_run_in_threads(in_threads: bool) -> None:
    """With a blocking client of the caller a wait would hold one of its few threads."""

    async def run() -> None:
        executor: Any = ThreadedExecutor(cast("Executor", None)) if in_threads else None
        wakeups = Wakeups(None, "shop", by_store=True)
        context: Any = type(
            "Context", (), {"wakeups": wakeups, "store": type("Store", (), {"blocking_waits": object()})}
        )
        waiter = Waiter(context, executor, "orders", Liveness(), lambda: True, cast("Poller", Silent()))
        waiter.open()
        nap = Nap()
        nap.only_to_be_safe = True
        assert (waiter.plan_wait(Claimed([], None, None, None, False, 0, 60_000), nap) is None) is in_threads
        waiter.close()
        assert [wakeups.reserve_blocking_wait() for _ in range(BLOCKING_WAITS_MAX)] == [True] * BLOCKING_WAITS_MAX

    asyncio.run(run())


@pytest.mark.promise("WAKE-5", "TIMER-3", "LEASE-4")
def test_the_safety_poll_is_longer_where_wake_ups_arrive_and_never_longer_than_a_lease() -> None:
    assert safety_poll_seconds(60_000, woken=True) == 15
    assert safety_poll_seconds(60_000, woken=False) == 5
    assert safety_poll_seconds(None, woken=True) == 15
    assert safety_poll_seconds(2_000, woken=True) == safety_poll_seconds(2_000, woken=False) == 2


@pytest.mark.promise("WAKE-5")
def test_queues_that_became_idle_at_different_times_are_soon_polled_together() -> None:
    """On a clock of its own: a thousand queues that became idle within 15 seconds share a call after two rounds."""

    async def polls() -> list[int]:
        poller = Poller(None, None, None, window=30)  # type: ignore[arg-type]
        for number in range(1_000):
            poller.add(object(), Idle(str(number)), 15.0)  # type: ignore[arg-type]
        for number, rested in enumerate(poller._entries.values()):
            rested.due += number * 0.015
        return [len(poller.take_due(max(poller.next_due(), time.monotonic()))[0]) for _ in range(5)]

    assert asyncio.run(polls())[-2:] == [1_000, 1_000]


@pytest.mark.promise("WAKE-5")
def test_a_queue_that_becomes_idle_between_two_heartbeats_needs_no_poll_of_its_own() -> None:
    """On a clock of its own: from the next heartbeat on each call carries both, as rarely as the safety poll allows."""

    async def polls() -> list[tuple[float, int, bool]]:
        poller = Poller(None, None, None, window=30)  # type: ignore[arg-type]
        began = time.monotonic()
        poller.take_due(began)
        poller._started_ms = 1
        poller.add(object(), Idle("orders"), 15.0)  # type: ignore[arg-type]
        (rested,) = poller._entries.values()
        rested.due += 0.1
        seen, now = [], began
        for round in range(100):
            if round % 10 == 9:
                # It has claimed in the meantime, and is idle again.
                rested.due = now + 25.0
            now = poller.next_due()
            due, heartbeats = poller.take_due(now)
            seen.append((now - began, len(due), heartbeats))
        return seen

    seen = asyncio.run(polls())
    assert {(queues, heartbeats) for _, queues, heartbeats in seen} == {(1, True)}
    pauses = [later[0] - earlier[0] for earlier, later in itertools.pairwise(seen)]
    assert max(pauses) <= 15.0
    assert min(pauses) >= 0.97 * 15.0


@pytest.mark.promise("WAKE-5", "SEE-4")
def test_workers_that_are_started_together_do_not_poll_together() -> None:
    async def second_polls() -> list[float]:
        pollers = [Poller(None, None, None, window=30) for _ in range(200)]  # type: ignore[arg-type]
        now = time.monotonic()
        for poller in pollers:
            poller.take_due(now)
        return [poller.next_due() - now for poller in pollers]

    seconds = asyncio.run(second_polls())
    assert max(seconds) <= 15.0
    assert max(seconds) - min(seconds) > 5.0
