"""Workers in the register of their store, and whether they consume."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.worker.stage import Stage, until
from waypost import RegisteredWorker, Waypost, __version__
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.promise("SEE-4")
#: Beats come every fifth of a second then, and the store forgets after three of them.
WINDOW = 0.3


@contextmanager
def working(stage: Stage, window: float = WINDOW) -> Iterator[Any]:
    worker = stage.post.worker(health_window=window)
    stage.done(worker.start())
    try:
        yield worker
    finally:
        stage.done(worker.stop(5.0))


def listed(stage: Stage) -> RegisteredWorker | None:
    """The one worker, if it is listed."""
    found: list[RegisteredWorker] = stage.workers()
    assert len(found) <= 1
    return found[0] if found else None


def record(stage: Stage) -> RegisteredWorker:
    """The one worker, listed: on a busy machine a beat may come after the time of the last one is over."""
    found: RegisteredWorker = until(lambda: listed(stage))
    return found


def test_a_worker_is_listed_while_it_works_and_gone_at_once_when_it_stopped(stage: Stage) -> None:
    @stage.handler("orders", concurrency=3)
    async def handle(number: int) -> None: ...

    @stage.handler("mails")
    def send(number: int) -> None: ...

    assert stage.workers() == []
    # With the default window the next beat would come in ten seconds, and the record would stay for thirty.
    with working(stage, 15) as worker:
        found: RegisteredWorker = until(lambda: listed(stage))
        assert (found.name, found.host, found.pid) == (worker.name, socket.gethostname(), os.getpid())
        assert (found.version, found.state, found.status, found.reasons) == (__version__, "running", "green", [])
        assert [(queue.name, queue.concurrency) for queue in found.queues] == [("orders", 3), ("mails", 10)]
        assert found.started_ms == found.seen_ms == found.until_ms - 30_000
        assert (found.processes, found.unlisted) == (1, 0)
    assert stage.workers() == []


def test_a_record_follows_what_the_worker_does(stage: Stage) -> None:
    @stage.handler("orders", concurrency=3)
    async def handle(number: int) -> None: ...

    stage.publish_many("orders", range(5))
    with working(stage):
        first = until(lambda: listed(stage))
        until(lambda: record(stage).queues[0].handled == 5)
        last = record(stage)
    assert last.started_ms == first.started_ms <= last.seen_ms
    claimed = last.queues[0].last_claim_ms
    assert claimed is not None
    assert first.started_ms - 1_000 < claimed <= last.seen_ms
    assert last.queues[0].in_flight == 0


def test_quiet_and_stopping_are_told_at_once(stage: Stage) -> None:
    begun, ending = threading.Event(), threading.Event()

    @stage.handler("orders")
    def handle(number: int) -> None:
        begun.set()
        assert ending.wait(20)

    stage.publish("orders", 1)
    worker = stage.post.worker()
    stage.done(worker.start())
    until(begun.is_set)
    worker.quiet()
    until(lambda: record(stage).state == "quiet")
    worker.request_stop(20.0)
    until(lambda: record(stage).state == "stopping")
    assert record(stage).queues[0].in_flight == 1
    ending.set()
    stage.done(worker.stop(20.0))
    assert stage.workers() == []


def test_a_blocked_event_loop_does_not_keep_the_worker_from_telling_that_it_is_stuck(
    stage: Stage, url: str, namespace: str
) -> None:
    go_on = threading.Event()
    ends: list[bool] = []

    @stage.handler("orders")
    async def handle(number: int) -> None:
        ends.append(go_on.wait(60))

    # Somebody else looks on: in one of the colours the client's own calls are on the loop that is blocked.
    with working(stage) as worker, Waypost(url, namespace=namespace) as other:

        def told(status: str) -> Any:
            return next((one.reasons for one in other.workers() if one.status == status), None)

        other.publish("orders", 1)
        until(lambda: worker.health().status == "red")
        (reason,) = until(lambda: told("red"))
        assert reason.startswith("queue orders: there was room, but no claim succeeded for")
        go_on.set()
        until(lambda: worker.health().status == "green")
        until(lambda: told("green") == [])
    assert ends == [True]


def test_a_worker_whose_places_are_all_taken_is_well(stage: Stage) -> None:
    go_on = threading.Event()

    @stage.handler("orders", concurrency=2)
    def handle(number: int) -> None:
        assert go_on.wait(20)

    stage.publish_many("orders", range(5))
    with working(stage) as worker:
        until(lambda: worker.health().queues[0].running == 2)
        since = record(stage).seen_ms
        until(lambda: record(stage).seen_ms > since + 3_000 * WINDOW)
        # A beat may be late on a busy machine; a loop that owed claims would stay red.
        assert until(lambda: worker.health().status == "green")
        assert worker.health().queues[0].running == 2
        go_on.set()
        until(lambda: stage.ledger("orders").done == 5)


def test_a_worker_of_a_paused_queue_or_of_an_empty_one_is_well(stage: Stage) -> None:
    @stage.handler("orders")
    def handle(number: int) -> None: ...

    @stage.handler("empty")
    def handle_none(number: int) -> None: ...

    stage.pause("orders")
    stage.publish("orders", 1)
    with working(stage) as worker:
        since = until(lambda: listed(stage)).seen_ms
        until(lambda: record(stage).seen_ms > since + 3_000 * WINDOW)
        assert until(lambda: worker.health().status == "green")
        assert record(stage).status == "green"
    assert stage.ledger("orders").ready == 1


def test_a_worker_that_does_not_run_is_red(stage: Stage) -> None:
    @stage.handler("orders")
    def handle(number: int) -> None: ...

    worker = stage.post.worker()
    assert worker.health().reasons == ["the worker is not running"]
    stage.done(worker.start())
    assert worker.health().status == "green"
    stage.done(worker.stop())
    assert worker.health().status == "red"


def test_what_is_amiss_is_told_with_the_record(stage: Stage) -> None:
    @stage.handler("orders")
    def handle(number: int) -> None: ...

    with working(stage) as worker:
        notes = getattr(worker, "_worker", worker).health_notes
        notes.append(lambda: "wake channel down: polling")
        until(lambda: worker.health().status == "degraded")
        until(lambda: record(stage).status == "degraded")
        assert record(stage).reasons == ["wake channel down: polling"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_beat_that_is_refused_harms_nothing_and_is_tried_again(
    colour: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    with ValkeyServer() as server, redis.Redis(port=server.port) as raw, Stage(
        colour, server.url, namespace=namespace
    ) as stage:  # fmt: skip

        @stage.handler("orders")
        async def handle(number: int) -> None: ...

        raw.set(f"{{{namespace}}}:workers", "not ours")
        with working(stage) as worker:
            stage.publish("orders", 1)
            until(lambda: stage.ledger("orders").done == 1)
            until(lambda: worker.health().status == "degraded")
            assert "was not put there by waypost" in worker.health().reasons[0]
            assert raw.get(f"{{{namespace}}}:workers") == b"not ours"
            raw.delete(f"{{{namespace}}}:workers")
            until(lambda: worker.health().status == "green")
            assert record(stage).name == worker.name
    told = [entry for entry in caplog.records if vars(entry).get("event") == "poll_failed"]
    assert [entry.levelname for entry in told if entry.levelname == "WARNING"] == ["WARNING"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_worker_on_the_callers_own_client_is_listed_too(colour: str, valkey_url: str, namespace: str) -> None:
    redis = pytest.importorskip("redis", reason="needs redis-py")
    kind = redis.Redis if colour == "sync" else redis.asyncio.Redis
    client = kind.from_url(valkey_url.replace("valkey://", "redis://"))
    with Stage(colour, None, client=client, namespace=namespace) as stage:

        @stage.handler("orders")
        async def handle(number: int) -> None: ...

        with working(stage) as worker:
            assert until(lambda: listed(stage)).name == worker.name
        assert stage.workers() == []
        stage.done(client.close() if colour == "sync" else client.aclose())
