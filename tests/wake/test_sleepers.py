"""Workers and waiting calls that sleep until they are woken: here no safety poll would come in time.

The safety poll is so long that a test whose worker or call is not woken fails by its timeout.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.clients import begin_operation
from tests.waiting import until
from tests.worker.harness import Harness
from waypost import AsyncWaypost, Retry, Waypost
from waypost.errors import ChainFailed, MessageDead, MessageRemoved
from waypost.operations import receive, wait
from waypost.testing.servers import ValkeyServer
from waypost.values import Claimed, Published
from waypost.views import Observed
from waypost.worker.consumer import Consumer

STORES = ("memory", "sqlite", "valkey", "postgres")
LONG_SECONDS = 600.0
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_poll_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", LONG_SECONDS)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://sleeping-{next(_numbers)}"
        case "sqlite":
            return f"sqlite:///{folder / 'orders.db'}"
        case "valkey":
            server: ValkeyServer = request.getfixturevalue("valkey")
            return server.url
    return str(request.getfixturevalue("prepared").url)


class Scene:
    """A worker's client and another one that publishes. They share the store and nothing else."""

    def __init__(self, harness: Harness, other: Waypost) -> None:
        self.harness = harness
        self.other = other
        self.polls: list[Observed] = []
        self.started: list[Any] = []

    def asleep(self, count: int = 1) -> None:
        """Wait until `count` workers sleep."""
        assert until(lambda: self.other.stats("orders").sleepers == count, f"{count} sleepers")

    def count(self) -> int:
        return len(self.polls)


@pytest.fixture(params=["sync", "async"])
def scene(request: pytest.FixtureRequest, url: str, namespace: str) -> Iterator[Scene]:
    polls: list[Observed] = []

    def on_event(event: Observed) -> None:
        if event.event == "polled":
            polls.append(event)

    with (
        Harness(request.param, url, namespace=namespace, on_event=on_event) as harness,
        Waypost(url, namespace=namespace) as other,
    ):
        made = Scene(harness, other)
        made.polls = polls
        yield made
        for queue in other.queues():
            assert other.ledger(queue).balance == 0


def handled(scene: Scene, **options: Any) -> None:
    @scene.harness.handler("orders", **options)
    async def handle(body: Any) -> None:
        scene.started.append(body)


@pytest.mark.promise("WAKE-1", "WAKE-5")
def test_a_sleeping_worker_starts_what_is_published(scene: Scene) -> None:
    handled(scene)
    with scene.harness.working():
        for number in range(5):
            scene.asleep()
            scene.other.publish("orders", number)
            assert until(lambda n=number: n in scene.started, "the start")  # type: ignore[misc]
    assert scene.started == list(range(5))


@pytest.mark.promise("WAKE-5", "TIMER-2")
def test_an_idle_worker_sends_its_store_nothing(scene: Scene) -> None:
    handled(scene)
    with scene.harness.working():
        scene.asleep()
        scene.other.publish("orders", 1)
        assert until(lambda: scene.started == [1] and scene.other.ledger("orders").done == 1)
        scene.asleep()
        before = scene.count()
        # Long enough for many polls, if there were any.
        scene.other.publish("elsewhere", 1, delay=0.6)
        assert until(lambda: scene.other.stats("elsewhere").next_due_in == timedelta(0), "the time")
        assert scene.count() == before


@pytest.mark.promise("WAKE-2", "WAKE-5")
def test_a_worker_that_is_woken_and_has_no_room_any_more_wakes_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, room = threading.Event(), Consumer._room
    started: list[int] = []

    def no_room_when_full(self: Consumer) -> int:
        # The worker of the scene: it has another concurrency.
        return 0 if full.is_set() and self.handler.concurrency == 3 else room(self)

    monkeypatch.setattr(Consumer, "_room", no_room_when_full)
    handled(scene, concurrency=3)

    @scene.other.handler("orders", concurrency=1)
    def handle(body: int) -> None:
        started.append(body)

    worker = scene.other.worker()
    worker.start()
    try:
        scene.asleep()
        with scene.harness.working():
            scene.asleep(2)
            # So that the publish names the worker of the scene; a notification for all reaches both.
            name = scene.other._context.wakeups.sleeper(worker.name)
            scene.other._run(receive.unregister(scene.other._context, "orders", name))
            scene.asleep(1)
            full.set()
            scene.other.publish("orders", 1)
            assert until(lambda: [*started, *scene.started] == [1], "the start")
            full.clear()
    finally:
        worker.stop(5)


@pytest.mark.promise("TIMER-2", "WAKE-5")
def test_timers_start_at_their_time_with_no_polls_in_between(scene: Scene) -> None:
    handled(scene)
    with scene.harness.working():
        scene.asleep()
        scene.other.publish("orders", "timer", delay=0.7)
        assert until(lambda: scene.started == ["timer"], "the start of the timer")
        # One claim when it was woken for the new timer, and a few around the due time.
        assert scene.count() <= 8


@pytest.mark.promise("TIMER-2", "PUB-5")
def test_a_timer_that_comes_before_the_one_slept_for_is_on_time(scene: Scene) -> None:
    handled(scene)
    scene.other.publish("orders", "late", delay=3600)
    with scene.harness.working():
        scene.asleep()
        scene.other.publish("orders", "soon", delay=0.3)
        assert until(lambda: scene.started == ["soon"], "the earlier timer")
        scene.other.publish("orders", "moved", key="k", delay=3600)
        scene.asleep()
        scene.other.publish("orders", "moved", key="k", delay=0.3, on_conflict="extend")
        assert until(lambda: "moved" in scene.started, "the timer that was brought forward")


@pytest.mark.promise("QUEUE-1", "WAKE-5")
def test_resume_wakes_the_sleepers_of_a_paused_queue(scene: Scene) -> None:
    handled(scene)
    scene.other.pause("orders")
    with scene.harness.working():
        scene.asleep()
        scene.other.publish("orders", 1)
        assert scene.started == []
        scene.other.resume("orders")
        assert until(lambda: scene.started == [1], "the start")


@pytest.mark.promise("WAKE-5", "LEASE-8")
@pytest.mark.parametrize("after", [0, 0.3])
def test_a_message_given_back_by_another_client_is_claimed_on_time(scene: Scene, after: float) -> None:
    handled(scene)
    scene.other.publish("orders", "again")
    with scene.other.receive("orders") as message:
        assert message is not None
        with scene.harness.working():
            scene.asleep()
            scene.other.publish("orders", "first")
            assert until(lambda: scene.started == ["first"])
            scene.asleep()
            message.retry(after=after)
            message_end(scene.other, message)
            assert until(lambda: "again" in scene.started, "the retry")


def message_end(post: Waypost, message: Any) -> None:
    """Settle the message now, as the end of the block would."""
    from waypost.operations.flow import drive

    settlement = message.settlement(Retry(after=0), None) if message.outcome is None else message.settlement(None, ANY)
    drive(post._connected(), receive.settle(post._context, message.queue, [message], [settlement]))


class _Any:
    def delay(self, attempts: int, error: BaseException) -> float:
        return 0.0


ANY: Any = _Any()


@pytest.mark.promise("LEASE-4", "WAKE-5")
def test_an_expired_lease_is_reclaimed_without_a_safety_poll(scene: Scene) -> None:
    handled(scene)
    scene.other.configure("orders", lease=1.5)
    scene.other.publish("orders", "orphan")
    executor, context = scene.other._connected(), scene.other._context
    claimed = executor.run(scene.other.store.claim("orders", 1, begin_operation(context, "orders"), worker="dead"))
    assert len(claimed.leases) == 1
    with scene.harness.working():
        assert until(lambda: scene.started == ["orphan"], "the takeover")
        # One claim that learns of the lease, one or two because wake-ups began to work, and a few around its end.
        assert scene.count() <= 12


@pytest.mark.promise("LEASE-4", "WAKE-5")
@pytest.mark.parametrize(("lease_ms", "most"), [(1_000, 1.0), (60_000, 60.0), (None, LONG_SECONDS), (1, 0.05)])
def test_sleepers_poll_often_enough_to_see_every_lease_before_it_ends(lease_ms: int | None, most: float) -> None:
    nap = receive.Nap()
    for _ in range(10):
        seconds = nap.seconds(Claimed([], None, None, None, False, 0, lease_ms), None, woken=True)
        assert most * 0.8 <= seconds <= most


@pytest.mark.promise("LEASE-12", "WAKE-1")
@pytest.mark.parametrize("by", ["id", "key"])
def test_a_cancel_reaches_a_running_handler_long_before_its_next_renewal(scene: Scene, by: str) -> None:
    scene.other.configure("orders", lease=LONG_SECONDS)
    ended = threading.Event()

    @scene.harness.handler("orders")
    async def hang(body: Any) -> None:
        scene.started.append(body)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with scene.harness.working():
        scene.asleep()
        published = scene.other.publish("orders", 1, key="k")
        assert until(lambda: scene.started, "the start")
        target = {"id": published.id} if by == "id" else {"key": "k"}
        assert scene.other.cancel("orders", **target) == "requested"
        assert ended.wait(20), "the handler was not cancelled"
        assert until(lambda: scene.other.ledger("orders").cancelled == 1)


@pytest.mark.promise("WAKE-1", "FACE-1")
def test_a_call_that_waits_for_a_message_is_woken(scene: Scene) -> None:
    received: list[Any] = []

    def wait() -> None:
        with scene.harness.receive("orders", wait=60) as message:
            received.append(message.body)

    for number in range(3):
        thread = threading.Thread(target=wait)
        thread.start()
        scene.asleep()
        scene.other.publish("orders", number)
        thread.join(20)
        assert received == list(range(number + 1))
    assert scene.other.stats("orders").sleepers == 0


@pytest.mark.promise("WAKE-2")
def test_a_call_that_timed_out_is_no_longer_a_sleeper(scene: Scene) -> None:
    def claims() -> int:
        before = scene.count()
        with scene.harness.receive("orders", wait=0.1) as message:
            assert message is None
        assert scene.other.stats("orders").sleepers == 0
        return scene.count() - before

    # The first calls subscribe, and claim once more after that.
    assert until(lambda: claims() == 2, "a call that claims when it begins and when it ends")


@pytest.mark.promise("WAKE-2", "LEASE-11")
def test_a_stopped_worker_is_no_longer_a_sleeper(scene: Scene) -> None:
    handled(scene)
    with scene.harness.working():
        scene.asleep()
    assert scene.other.stats("orders").sleepers == 0


@pytest.mark.promise("WAKE-2")
def test_a_worker_with_free_slots_is_woken_while_it_works(scene: Scene) -> None:
    release = threading.Event()

    @scene.harness.handler("orders", concurrency=5)
    def handle(body: Any) -> None:
        scene.started.append(body)
        release.wait(20)

    with scene.harness.working():
        for number in range(5):
            scene.asleep()
            scene.other.publish("orders", number)
            assert until(lambda n=number: n in scene.started, "the start beside the others")  # type: ignore[misc]
        assert until(lambda: scene.other.stats("orders").sleepers == 0, "no room, no sleeper")
        release.set()


def forget_sleepers(post: Waypost, namespace: str) -> None:
    """Remove all sleepers from the store."""
    store: Any = post.store
    match store.kind:
        case "memory":
            model = store._queues["orders"]
            model.sleepers.clear()
            model.sleepers_known_until = 0
        case "sqlite":
            import sqlite3
            from contextlib import closing

            with closing(sqlite3.connect(store.path)) as connection, connection:
                prefix = store.spelling.prefix
                connection.execute(f'DELETE FROM "{prefix}_sleeper"')
                connection.execute(f'UPDATE "{prefix}_queue" SET sleepers_known_until = 0')
        case "valkey":
            from tests.servers.valkey_setups import client_of

            with client_of(store.source.place) as client:
                client.delete(f"{{{namespace}:orders}}:sleepers")
        case "postgres":
            import psycopg

            with psycopg.connect(store.source._url, autocommit=True) as session:
                session.execute(f'DELETE FROM "{namespace}_sleeper"')


@pytest.mark.promise("WAKE-2")
def test_nothing_is_missed_when_the_memory_of_sleepers_is_lost(scene: Scene, namespace: str) -> None:
    handled(scene)
    with scene.harness.working():
        for number in range(3):
            scene.asleep()
            forget_sleepers(scene.other, namespace)
            scene.other.publish("orders", number)
            assert until(lambda n=number: n in scene.started, "the start")  # type: ignore[misc]


# ---- any store with any channel --------------------------------------------------------------------------------------

CHANNELS = ("valkey", "postgres", "nats", "local", "own")


@pytest.mark.promise("WAKE-4")
@pytest.mark.parametrize("channel", CHANNELS)
def test_any_store_works_with_any_channel(
    channel: str, url: str, namespace: str, request: pytest.FixtureRequest
) -> None:
    from waypost.wake.hub import Hub

    wake: Any = {"local": "local", "own": Hub()}.get(channel)
    if wake is None:
        wake = request.getfixturevalue(channel).url
    started: list[int] = []
    with (
        Waypost(url, namespace=namespace, wake=wake) as post,
        Waypost(url, namespace=namespace, wake=wake) as other,
    ):

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            for number in range(3):
                assert until(lambda: other.stats("orders").sleepers == 1, "a sleeper")
                other.publish("orders", number)
                assert until(lambda n=number: n in started, "the start")  # type: ignore[misc]


@pytest.mark.promise("WAKE-4", "TIMER-3")
def test_without_a_channel_workers_poll_soon_and_then_more_rarely(url: str, namespace: str) -> None:
    polls: list[float] = []

    def on_event(event: Observed) -> None:
        if event.event == "polled":
            polls.append(time.monotonic())

    started: list[int] = []
    with Waypost(url, namespace=namespace, wake="poll", on_event=on_event) as post:

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: len(polls) >= 5, "five polls")
            pauses = [later - earlier for earlier, later in itertools.pairwise(polls)]
            assert pauses[0] < pauses[3]
            post.publish("orders", 1)
            assert until(lambda: started == [1], "the start")
        assert post.stats("orders").sleepers == 0
        assert post.wakeups.kind == "poll"


@pytest.mark.promise("WAKE-3")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_clients_and_workers_of_a_process_share_one_subscription(
    mode: str, valkey: ValkeyServer, namespace: str
) -> None:
    from tests.servers.valkey_setups import client_of

    make: Any = Waypost if mode == "sync" else AsyncWaypost
    clients = [make(valkey.url, namespace=namespace) for _ in range(3)]
    assert len({id(client.wakeups.channel) for client in clients}) == 1
    with client_of(valkey) as client:
        before = len(client.client_list(_type="pubsub"))
        harnesses = [Harness(mode, valkey.url, namespace=namespace) for _ in range(3)]
        for harness in harnesses:
            harness.__enter__()
            harness.handler("orders")(lambda body: None)
        workers = [harness.post.worker() for harness in harnesses]
        for harness, worker in zip(harnesses, workers, strict=True):
            harness.done(worker.start())
        assert until(lambda: harnesses[0].stats("orders").sleepers == 3, "three sleepers")
        assert len(client.client_list(_type="pubsub")) <= max(1, before)
        for harness, worker in zip(harnesses, workers, strict=True):
            harness.done(worker.stop(5))
            harness.__exit__()


def waiting_for(
    scene: Scene, published: Published, what: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Thread, list[object]]:
    """A client that sleeps until the end of a message or chain, and its result."""
    monkeypatch.setattr(wait, "SAFETY_POLL_SECONDS", LONG_SECONDS)
    asleep = threading.Event()
    sleep = wait._EndWait.sleep

    def noted(end_wait: wait._EndWait, what: str) -> Any:
        try:
            return sleep(end_wait, what)
        finally:
            asleep.set()

    monkeypatch.setattr(wait._EndWait, "sleep", noted)
    ended: list[object] = []

    def wait_for_it() -> None:
        call = scene.harness.wait_result if what == "result" else scene.harness.wait_chain
        try:
            ended.append(call(published, timeout=LONG_SECONDS))
        except Exception as error:
            ended.append(error)

    waiting = threading.Thread(target=wait_for_it, daemon=True)
    waiting.start()
    assert asleep.wait(20)
    return waiting, ended


def let_a_lease_end(scene: Scene) -> None:
    """Claim the message, and let its lease end."""
    assert scene.other.receive("orders", wait=0, renew=False).__enter__() is not None
    assert until(lambda: scene.other.stats("orders").next_lease_end_in == timedelta(0), "the end of the lease")


@pytest.mark.promise("WAKE-1", "CHAIN-1", "LEASE-5")
@pytest.mark.parametrize("way", ["buried", "cancelled", "dropped", "triggered", "replaced", "at most once"])
def test_a_waiting_call_is_woken_when_another_step_ends_its_message(
    scene: Scene, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.other.configure("orders", lease=0.3, max_deliveries=1)
    published = scene.other.publish("orders", 1, key="a")
    waiting, ended = waiting_for(scene, published, "result", monkeypatch)
    expected: type = MessageRemoved
    match way:
        case "buried":
            let_a_lease_end(scene)
            with scene.other.receive("orders", wait=0) as message:
                assert message is None
            expected = MessageDead
        case "cancelled":
            let_a_lease_end(scene)
            assert scene.other.cancel("orders", id=published.id) == "requested"
            with scene.other.receive("orders", wait=0) as message:
                assert message is None
        case "dropped":
            scene.other.configure("orders", max_pending=1, overload="drop_oldest")
            scene.other.publish("orders", 2)
        case "triggered":
            scene.other.configure("orders", max_pending=1, overload="drop_oldest")
            scene.other.save_schedule("rollup", queue="orders", every=3600, body=2)
            scene.other.trigger_schedule("rollup")
        case "replaced":
            scene.other.publish("orders", 2, key="a", on_conflict="replace")
        case "at most once":
            scene.other.configure("orders", lease=None)
            with scene.other.receive("orders", wait=0) as message:
                assert message is not None
            expected = type(None)
    waiting.join(20)
    assert [type(one) for one in ended] == [expected]


@pytest.mark.promise("WAKE-1", "CHAIN-1")
@pytest.mark.parametrize("way", ["id", "key", "purge"])
@pytest.mark.parametrize("what", ["result", "chain"])
def test_a_waiting_call_is_woken_when_its_message_is_removed(
    scene: Scene, way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = scene.other.publish("orders", 1, key="a", chain=what == "chain")
    waiting, ended = waiting_for(scene, published, what, monkeypatch)
    match way:
        case "id":
            assert scene.other.cancel("orders", id=published.id) == "cancelled"
        case "key":
            assert scene.other.cancel("orders", key="a") == "cancelled"
        case "purge":
            assert scene.other.purge("orders", state="ready") == 1
    waiting.join(20)
    assert [type(error) for error in ended] == [MessageRemoved if what == "result" else ChainFailed]
