"""Workers in the register of their store, and whether they consume."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import RegisteredWorker, Waypost, __version__
from waypost.errors import InvalidInput
from waypost.schedule.loop import BackgroundLoop
from waypost.store.port import Heartbeat
from waypost.testing.servers import ValkeyServer
from waypost.times import to_ms
from waypost.worker.poller import Poller

pytestmark = pytest.mark.promise("SEE-4")
#: Heartbeats come every fifth of a second then, and the store forgets a worker after three of them.
WINDOW = 0.3


@contextmanager
def working(harness: Harness, window: float = WINDOW) -> Iterator[Any]:
    worker = harness.post.worker(health_window=window)
    harness.done(worker.start())
    try:
        yield worker
    finally:
        harness.done(worker.stop(5.0))


def listed(harness: Harness) -> RegisteredWorker | None:
    """The one worker, if it is listed."""
    found: list[RegisteredWorker] = harness.workers()
    assert len(found) <= 1
    return found[0] if found else None


def record(harness: Harness) -> RegisteredWorker:
    """The one worker, listed: on a busy machine a heartbeat may come after the last one has expired."""
    found: RegisteredWorker = until(lambda: listed(harness))
    return found


def test_a_worker_is_listed_while_it_works_and_removed_as_soon_as_it_stops(harness: Harness) -> None:
    @harness.handler("orders", concurrency=3)
    async def handle(number: int) -> None: ...

    @harness.handler("mails")
    def send(number: int) -> None: ...

    assert harness.workers() == []
    # With the default window the next heartbeat would come in ten seconds, and the record would stay for thirty.
    with working(harness, 15) as worker:
        found: RegisteredWorker = until(lambda: listed(harness))
        assert (found.name, found.host, found.pid) == (worker.name, socket.gethostname(), os.getpid())
        assert (found.version, found.state, found.status, found.reasons) == (__version__, "running", "green", [])
        assert [(queue.name, queue.concurrency) for queue in found.queues] == [("orders", 3), ("mails", 10)]
        assert found.started_at == found.seen_at == found.expires_at - timedelta(seconds=30)
        assert (found.processes, found.unlisted) == (1, 0)
    assert harness.workers() == []


def test_the_record_of_a_worker_follows_its_work(harness: Harness) -> None:
    @harness.handler("orders", concurrency=3)
    async def handle(number: int) -> None: ...

    harness.publish_many("orders", range(5))
    with working(harness):
        first = until(lambda: listed(harness))
        # A message counts as handled a little before it is settled, and a record may be of that moment.
        until(lambda: (record(harness).queues[0].handled, record(harness).queues[0].in_flight) == (5, 0))
        last = record(harness)
    assert last.started_at == first.started_at <= last.seen_at
    claimed = last.queues[0].last_claim_at
    assert claimed is not None
    assert first.started_at - timedelta(seconds=1) < claimed <= last.seen_at
    assert last.queues[0].in_flight == 0


def test_quiet_and_stopping_are_reported_at_once(harness: Harness) -> None:
    begun, ending = threading.Event(), threading.Event()

    @harness.handler("orders")
    def handle(number: int) -> None:
        begun.set()
        assert ending.wait(20)

    harness.publish("orders", 1)
    worker = harness.post.worker()
    harness.done(worker.start())
    until(begun.is_set)
    worker.quiet()
    until(lambda: record(harness).state == "quiet")
    worker.request_stop(20.0)
    until(lambda: record(harness).state == "stopping")
    assert record(harness).queues[0].in_flight == 1
    ending.set()
    harness.done(worker.stop(20.0))
    assert harness.workers() == []


def test_a_worker_stops_when_it_is_requested_through_the_store(harness: Harness) -> None:
    begun, ending = threading.Event(), threading.Event()

    @harness.handler("orders", concurrency=1)
    def handle(number: int) -> None:
        begun.set()
        assert ending.wait(20)

    harness.publish_many("orders", [1, 2])
    worker = harness.post.worker(health_window=WINDOW)
    harness.done(worker.start())
    until(begun.is_set)
    until(lambda: harness.stop_worker(worker.name))
    until(lambda: record(harness).state == "stopping")
    assert record(harness).requested is None, "it does what was requested"
    ending.set()
    # It drains as after a signal, without a call of this process: what runs ends, what has not begun goes back.
    until(lambda: not worker.is_running)
    assert harness.workers() == []
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.ready, ledger.leased) == (1, 1, 0)
    assert harness.page("orders", "ready").messages[0].deliveries == 0
    harness.done(worker.stop(5.0))


def test_a_worker_that_is_requested_to_be_quiet_claims_no_more(harness: Harness) -> None:
    @harness.handler("orders")
    def handle(number: int) -> None: ...

    with working(harness) as worker:
        until(lambda: harness.quiet_worker(worker.name))
        until(lambda: record(harness).state == "quiet")
        harness.publish("orders", 1)
        assert worker.is_running
        assert harness.ledger("orders").ready == 1


def test_a_request_for_an_earlier_worker_of_the_same_name_stops_no_other(harness: Harness) -> None:
    handled = threading.Event()

    @harness.handler("orders")
    def handle(number: int) -> None:
        handled.set()

    worker = harness.post.worker(health_window=WINDOW)
    # Its record is there, as if it had been killed before, with a request that it did not see.
    store = harness.post.store
    executor = store.connect(start_timeout=5)
    try:
        executor.run(store.heartbeat(Heartbeat(worker.name), 60_000))
        assert executor.run(store.request_worker(worker.name, "stop"))
        until(lambda: executor.run(store.time()) > to_ms(record(harness).seen_at))
        harness.done(worker.start())
        try:
            first = until(lambda: record(harness).pid == os.getpid() and record(harness))
            until(lambda: record(harness).seen_at > first.seen_at)
            harness.publish("orders", 1)
            until(handled.is_set)
            assert (record(harness).requested, worker.is_running) == (None, True)
        finally:
            harness.done(worker.stop(5.0))
    finally:
        executor.close()


def test_nothing_is_requested_of_a_worker_that_is_not_there(harness: Harness) -> None:
    assert harness.stop_worker("absent") is False
    assert harness.quiet_worker("absent") is False
    with pytest.raises(InvalidInput, match="name of a worker"):
        harness.stop_worker("")


def test_a_worker_with_a_blocked_event_loop_still_reports_that_it_is_stuck(
    harness: Harness, url: str, namespace: str
) -> None:
    go_on = threading.Event()
    ends: list[bool] = []

    @harness.handler("orders")
    async def handle(number: int) -> None:
        ends.append(go_on.wait(60))

    # Another client reads the register: in async mode the client's own calls run on the loop that is blocked.
    with working(harness) as worker, Waypost(url, namespace=namespace) as other:

        def reasons(status: str) -> Any:
            return next((one.reasons for one in other.workers() if one.status == status), None)

        other.publish("orders", 1)
        until(lambda: worker.health().status == "red")
        (reason,) = until(lambda: reasons("red"))
        assert reason.startswith("queue orders: there was free capacity, but no claim succeeded for")
        go_on.set()
        until(lambda: worker.health().status == "green")
        until(lambda: reasons("green") == [])
    assert ends == [True]


def test_a_worker_at_full_concurrency_is_healthy(harness: Harness) -> None:
    go_on = threading.Event()

    @harness.handler("orders", concurrency=2)
    def handle(number: int) -> None:
        assert go_on.wait(20)

    harness.publish_many("orders", range(5))
    with working(harness) as worker:
        until(lambda: worker.health().queues[0].running == 2)
        since = record(harness).seen_at
        until(lambda: record(harness).seen_at > since + timedelta(seconds=3 * WINDOW))
        # A heartbeat may be late on a busy machine; a loop with overdue claims would stay red.
        assert until(lambda: worker.health().status == "green")
        assert worker.health().queues[0].running == 2
        go_on.set()
        until(lambda: harness.ledger("orders").done == 5)


def test_a_worker_of_a_paused_or_empty_queue_is_healthy(harness: Harness) -> None:
    @harness.handler("orders")
    def handle(number: int) -> None: ...

    @harness.handler("empty")
    def handle_none(number: int) -> None: ...

    harness.pause("orders")
    harness.publish("orders", 1)
    with working(harness) as worker:
        since = until(lambda: listed(harness)).seen_at
        until(lambda: record(harness).seen_at > since + timedelta(seconds=3 * WINDOW))
        assert until(lambda: worker.health().status == "green")
        assert record(harness).status == "green"
    assert harness.ledger("orders").ready == 1


def test_a_worker_that_does_not_run_is_unhealthy(harness: Harness) -> None:
    @harness.handler("orders")
    def handle(number: int) -> None: ...

    worker = harness.post.worker()
    assert worker.health().reasons == ["the worker is not running"]
    harness.done(worker.start())
    assert worker.health().status == "green"
    harness.done(worker.stop())
    assert worker.health().status == "red"


def test_a_problem_is_reported_in_the_workers_record(harness: Harness) -> None:
    @harness.handler("orders")
    def handle(number: int) -> None: ...

    with working(harness) as worker:
        notes = getattr(worker, "_worker", worker).health_notes
        notes.append(lambda: "wake channel down: polling")
        until(lambda: worker.health().status == "degraded")
        until(lambda: record(harness).status == "degraded")
        assert record(harness).reasons == ["wake channel down: polling"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_refused_heartbeat_does_no_harm_and_is_tried_again(
    mode: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    with ValkeyServer() as server, redis.Redis(port=server.port, password=server.password) as raw, Harness(
        mode, server.url, namespace=namespace
    ) as harness:  # fmt: skip

        @harness.handler("orders")
        async def handle(number: int) -> None: ...

        raw.set(f"{{{namespace}}}:workers", "not ours")
        with working(harness) as worker:
            harness.publish("orders", 1)
            until(lambda: harness.ledger("orders").done == 1)
            until(lambda: worker.health().status == "degraded")
            assert "was not put there by waypost" in worker.health().reasons[0]
            assert raw.get(f"{{{namespace}}}:workers") == b"not ours"
            raw.delete(f"{{{namespace}}}:workers")
            until(lambda: worker.health().status == "green")
            assert record(harness).name == worker.name
    failures = [entry for entry in caplog.records if vars(entry).get("event") == "poll_failed"]
    assert [entry.levelname for entry in failures if entry.levelname == "WARNING"] == ["WARNING"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_on_the_callers_own_client_is_listed_too(mode: str, valkey_url: str, namespace: str) -> None:
    redis = pytest.importorskip("redis", reason="needs redis-py")
    kind = redis.Redis if mode == "sync" else redis.asyncio.Redis
    client = kind.from_url(valkey_url.replace("valkey://", "redis://"))
    with Harness(mode, None, client=client, namespace=namespace) as harness:

        @harness.handler("orders")
        async def handle(number: int) -> None: ...

        with working(harness) as worker:
            assert until(lambda: listed(harness)).name == worker.name
        assert harness.workers() == []
        harness.done(client.close() if mode == "sync" else client.aclose())


@pytest.mark.promise("CRON-7")
def test_a_heartbeat_after_the_scheduler_has_handed_over_does_not_win_the_lead_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pollers = list[Poller]()
    start, stop = Poller.start, BackgroundLoop.stop

    def note_and_start(poller: Poller) -> None:
        pollers.append(poller)
        start(poller)

    async def stop_and_send_a_heartbeat(part: BackgroundLoop) -> None:
        await stop(part)
        (poller,) = pollers
        before = poller.answered
        poller.heartbeat_now()
        await asyncio.to_thread(until, lambda: poller.answered > before)

    monkeypatch.setattr(Poller, "start", note_and_start)
    monkeypatch.setattr(BackgroundLoop, "stop", stop_and_send_a_heartbeat)

    def tick() -> None: ...

    harness.post.every(3600.0, queue="ticks")(tick)

    def elect() -> str:
        executor = harness.post.store.connect(start_timeout=5)
        try:
            leader: str = executor.run(harness.post.store.elect("scheduler", "the test", 1)).leader
        finally:
            executor.close()
        return leader

    with working(harness):
        until(lambda: elect() != "the test")
    assert elect() == "the test"
