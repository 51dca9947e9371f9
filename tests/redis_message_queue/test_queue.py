"""The public behaviours of redis-message-queue, shown by the adapter."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.redis_message_queue.queues import Queue, Queues
from tests.waiting import until
from waypost import AsyncWaypost, Waypost, WaypostError
from waypost.redis_message_queue import (
    ConfigurationError,
    EventOperation,
    GatewayContractError,
    GracefulInterruptHandler,
    QueueBackpressureError,
    QueueDrainedError,
    QueueEvent,
    RedisGateway,
    RedisMessageQueue,
    RedisMessageQueueError,
    RetryBudgetExhaustedError,
)

pytestmark = pytest.mark.promise("FACE-4")

#: A wait of nothing: what is there is claimed, and an empty queue gives None at once.
NOW: dict[str, Any] = {"message_wait_interval_seconds": 0}


def brief(queues: Queues, **more: Any) -> RedisGateway:
    """Return a gateway whose claims do not wait."""
    given = {"message_visibility_timeout_seconds": 300, "max_delivery_count": 10, **NOW, **more}
    return RedisGateway(redis_client=queues.url, **given)


def operations(events: list[QueueEvent]) -> list[tuple[str, str]]:
    return [(str(event.operation), str(event.outcome)) for event in events]


def end_by(stop: type[BaseException], message: object) -> None:
    raise stop


@contextmanager
def held(queue: Queue) -> Iterator[Any]:
    """Hold a message of a queue with a short lease. A claim whose answer came too late is given back: claim again."""
    while True:
        with queue.block() as message:
            if message is not None:
                yield message
                return


def fail(message: Any) -> None:
    raise ValueError(f"cannot handle {message}")


# ---- publish and deduplication ---------------------------------------------------------------------------------------


def check_quickstart(queue: Queue, events: list[QueueEvent]) -> None:
    assert queue.publish("order:1234") is True
    assert queue.publish("order:1234") is False
    assert queue.publish({"user": "alice", "a": 1}) is True
    assert queue.publish({"a": 1, "user": "alice"}) is False
    assert [queue.process(), queue.process(), queue.process()] == ["order:1234", '{"a": 1, "user": "alice"}', None]
    assert operations(events) == [
        ("publish", "success"), ("publish_dedup_hit", "success"), ("publish", "success"),
        ("publish_dedup_hit", "success"), ("claim", "success"), ("ack", "success"), ("claim", "success"),
        ("ack", "success"), ("claim_empty", "skipped"),
    ]  # fmt: skip
    # Handled, and within its window still a duplicate.
    assert queue.publish("order:1234") is False


def test_publish_process_and_deduplicate(queues: Queues) -> None:
    events: list[QueueEvent] = []
    check_quickstart(queues.make(gateway=brief(queues), on_event=events.append), events)


def test_publish_process_and_deduplicate_on_valkey(on_valkey: Queues) -> None:
    events: list[QueueEvent] = []
    check_quickstart(on_valkey.make(gateway=brief(on_valkey), on_event=events.append), events)


def test_keys_of_the_callers_own(queues: Queues) -> None:
    queue = queues.make(get_deduplication_key=lambda message: message["order_id"])
    assert queue.publish({"order_id": "7", "n": 1}) is True
    assert queue.publish({"order_id": "7", "n": 2}) is False
    long = queues.make(get_deduplication_key=lambda message: "x" * 10_000)
    assert [long.publish("a"), long.publish("b")] == [True, False]
    literal = queues.make("literal", get_deduplication_key=None)
    assert [literal.publish("a"), literal.publish("a"), literal.publish("b")] == [True, False, True]
    wrong = queues.make("wrong", get_deduplication_key=lambda message: 7)
    with pytest.raises(TypeError, match="must return text"):
        wrong.publish("a")
    empty = queues.make("wrong", get_deduplication_key=lambda message: "")
    with pytest.raises(ConfigurationError, match="not empty"):
        empty.publish("a")


def test_without_deduplication_each_publish_counts(queues: Queues) -> None:
    queue = queues.make(deduplication=False)
    assert [queue.publish("a"), queue.publish("a")] == [True, True]
    assert queue.post("ledger", "q").ready == 2


def test_what_is_no_message_is_refused(queues: Queues) -> None:
    queue = queues.make()
    for wrong in (7, None, [1], {1: "x"}):
        with pytest.raises(TypeError):
            queue.publish(wrong)
    with pytest.raises(ValueError, match="Out of range float"):
        queue.publish({"n": float("nan")})


def test_async_callbacks_belong_to_the_async_queue(queues: Queues) -> None:
    events: list[QueueEvent] = []

    async def on_event(event: QueueEvent) -> None:
        events.append(event)

    async def get_key(message: Any) -> str:
        return "one"

    if queues.mode == "sync":
        with pytest.raises(TypeError, match="async RedisMessageQueue"):
            queues.make(on_event=on_event)
        with pytest.raises(TypeError, match="async RedisMessageQueue"):
            queues.make(get_deduplication_key=get_key).publish("a")
        return
    queue = queues.make(on_event=on_event, get_deduplication_key=get_key)
    assert [queue.publish("a"), queue.publish("b")] == [True, False]
    assert operations(events) == [("publish", "success"), ("publish_dedup_hit", "success")]


# ---- handling --------------------------------------------------------------------------------------------------------


def test_a_failure_removes_the_message_and_is_raised(queues: Queues) -> None:
    events: list[QueueEvent] = []
    queue = queues.make(gateway=brief(queues), on_event=events.append)
    queue.publish("a")
    with pytest.raises(ValueError, match="cannot handle a"):
        queue.process(fail)
    assert queue.process() is None
    assert queue.dead() == []
    assert operations(events)[1:] == [
        ("claim", "success"), ("failed", "failure"), ("nack", "success"), ("claim_empty", "skipped"),
    ]  # fmt: skip
    failed = events[2]
    assert (failed.exception_type, str(failed.error)) == ("ValueError", "cannot handle a")
    assert failed.message_id == events[0].message_id
    assert failed.lease_token_hash
    assert failed.duration_ms is not None


def test_failed_and_completed_messages_are_kept_if_wanted(queues: Queues) -> None:
    events: list[QueueEvent] = []
    queue = queues.make(
        gateway=brief(queues), enable_completed_queue=True, enable_failed_queue=True, max_completed_length=1,
        max_failed_length=1, on_event=events.append,
    )  # fmt: skip
    for text in "abcd":
        queue.publish(text)
    queue.process()
    queue.process()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot handle"):
            queue.process(fail)
    assert ("completed", "success") in operations(events)
    assert [letter.body for letter in queue.dead()] == ["d"]
    assert queue.dead()[0].error_type == "ValueError"
    assert [one.body for one in queue.post("page", "q", "done").messages] == ["b"]
    # They can be handled again.
    assert len(queue.post("redrive", "q").moved) == 1
    assert queue.process() == "d"


def test_a_stop_gives_the_message_back(queues: Queues) -> None:
    queue = queues.make(gateway=brief(queues))
    queue.publish("a")
    for stop in (KeyboardInterrupt, SystemExit):
        with pytest.raises(stop):
            queue.process(partial(end_by, stop))
    assert queue.process() == "a"
    assert queue.post("ledger", "q").done == 1


def check_redelivery(queues: Queues) -> None:
    """A consumer that does not come back: its message is handled by another, and its own settle changes nothing."""
    events: list[QueueEvent] = []
    late: list[QueueEvent] = []
    short = brief(queues, message_visibility_timeout_seconds=0.5, max_delivery_count=2)
    queue = queues.make(gateway=short, on_event=late.append)
    other = queues.make(gateway=short, on_event=events.append)
    queue.publish("a")
    with held(queue) as message:
        assert message == "a"
        assert until(other.process, "the redelivery") == "a"
    assert ("claim_reclaim", "success") in operations(events)
    assert operations(late)[-2:] == [("ack", "skipped"), ("stale_lease_ack", "skipped")]
    assert queue.post("ledger", "q").done == 1


def test_a_consumer_that_does_not_come_back_loses_nothing(queues: Queues) -> None:
    check_redelivery(queues)


def test_a_consumer_that_does_not_come_back_loses_nothing_on_valkey(on_valkey: Queues) -> None:
    check_redelivery(on_valkey)


def test_past_its_deliveries_a_message_is_a_dead_letter(queues: Queues) -> None:
    events: list[QueueEvent] = []
    short = brief(queues, message_visibility_timeout_seconds=0.5, max_delivery_count=1, dead_letter_queue="poison")
    queue = queues.make(gateway=short, on_event=events.append)
    queue.publish("a")
    with held(queue) as message:
        assert message == "a"
        until(lambda: queue.process() is None and queue.dead(), "the dead letter")
    (letter,) = queue.dead()
    assert (letter.body, letter.reason, letter.deliveries) == ("a", "max_deliveries", 1)
    assert [event.destination_queue for event in events if event.operation == EventOperation.DLQ] == ["poison"]


def test_a_heartbeat_keeps_the_message(queues: Queues) -> None:
    events: list[QueueEvent] = []
    queue = queues.make(visibility_timeout_seconds=3, heartbeat_interval_seconds=1, on_event=events.append)
    queue.publish("a")
    if queues.mode == "async":
        # Its events need a running loop, which this test holds only inside of calls.
        queues.run(_renewed(queue, events))
    else:
        with queue.block() as message:
            assert message == "a"
            until(lambda: ("lease_renew", "success") in operations(events), "a renewal")
    assert queue.post("ledger", "q").done == 1


async def _renewed(queue: Queue, events: list[QueueEvent]) -> None:
    import asyncio

    async with queue.queue.process_message() as message:
        assert message == "a"
        async with asyncio.timeout(90):
            while ("lease_renew", "success") not in operations(events):  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)


def test_a_lost_lease_is_reported(queues: Queues) -> None:
    lost = threading.Event()
    queue = queues.make(visibility_timeout_seconds=3, heartbeat_interval_seconds=1, on_heartbeat_failure=lost.set)
    queue.publish("a")

    def lose(message: Any) -> None:
        """Let the store give the message to another consumer, whatever the renewals do."""
        (held,) = queue.queue.post._blocks._queues["q"].held()
        queue.queue.post._blocks._renewer._lose(queue.queue.post._blocks._queues["q"], held, "extend")

    if queues.mode == "sync":
        queue.process(lose)
    else:
        queues.run(_lost(queue, lose, lost))
    assert lost.is_set()


async def _lost(queue: Queue, lose: Any, lost: threading.Event) -> None:
    import asyncio

    async with queue.queue.process_message() as message:
        lose(message)
        async with asyncio.timeout(90):
            while not lost.is_set():  # noqa: ASYNC110 - set by a callback
                await asyncio.sleep(0.01)


def test_without_a_visibility_timeout_a_message_is_delivered_at_most_once(queues: Queues) -> None:
    queue = queues.make(visibility_timeout_seconds=None)
    queue.publish("a")
    with queue.block() as message:
        assert message == "a"
        assert queue.post("ledger", "q").done == 1
    queue.publish("b")
    with pytest.raises(ValueError, match="cannot handle b"):
        queue.process(fail)


def test_a_plain_gateway_changes_no_settings_of_its_queue(queues: Queues) -> None:
    chosen = {"message_visibility_timeout_seconds": 60, "max_delivery_count": 4, "max_pending_length": 9}
    consumer = queues.make(gateway=brief(queues, **chosen, pending_overload_policy="drop_oldest"))
    consumer.publish("a")
    before = consumer.post("policy", "q")
    for plain in (queues.make(gateway=RedisGateway(redis_client=queues.url, **NOW)), queues.make()):
        plain.publish("b")
        assert consumer.post("policy", "q") == before
    assert (before.lease, before.max_deliveries, before.max_pending) == (timedelta(seconds=60), 4, 9)
    # Without an end the message comes back: no claim has removed it.
    with pytest.raises(KeyboardInterrupt):
        plain.process(partial(end_by, KeyboardInterrupt))
    assert {consumer.process(), consumer.process()} == {"a", "b"}


def check_default_lease(queues: Queues) -> None:
    for plain in (queues.make("of_queue"), queues.make("of_gateway", gateway=RedisGateway(redis_client=queues.url))):
        name = plain.queue._options.name
        plain.publish("a")
        assert plain.post("policy", name).lease == timedelta(seconds=300)
    # 60 seconds is also what waypost has by default, and here a consumer chose it.
    queues.make("chosen", visibility_timeout_seconds=60).publish("a")
    other = queues.make("chosen")
    other.publish("b")
    assert other.post("policy", "chosen").lease == timedelta(seconds=60)


def test_only_a_new_queue_gets_the_lease_of_the_other_package(queues: Queues) -> None:
    check_default_lease(queues)


def test_only_a_new_queue_gets_the_lease_of_the_other_package_on_valkey(on_valkey: Queues) -> None:
    check_default_lease(on_valkey)


@pytest.mark.parametrize("operation", [EventOperation.CLAIM, EventOperation.FAILED])
def test_a_stop_during_a_callback_does_not_keep_the_message(queues: Queues, operation: EventOperation) -> None:
    stop = KeyboardInterrupt if queues.mode == "sync" else asyncio.CancelledError

    def on_event(event: QueueEvent) -> None:
        if event.operation == operation:
            raise stop

    async def on_event_async(event: QueueEvent) -> None:
        on_event(event)

    queue = queues.make(
        gateway=brief(queues), enable_failed_queue=True,
        on_event=on_event if queues.mode == "sync" else on_event_async,
    )  # fmt: skip
    queue.publish("a")
    with pytest.raises(stop):
        queue.process(fail)
    ledger = queue.post("ledger", "q")
    expected = (1, 0) if operation == EventOperation.CLAIM else (0, 1)
    assert (ledger.ready, ledger.dead) == expected


# ---- backpressure ----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses(queues: Queues) -> None:
    events: list[QueueEvent] = []
    queue = queues.make(max_pending_length=2, on_event=events.append)
    queue.publish("a")
    queue.publish("b")
    with pytest.raises(QueueBackpressureError, match="max_pending_length"):
        queue.publish("c")
    assert operations(events)[-1] == ("publish", "failure")
    assert events[-1].exception_type == "QueueBackpressureError"
    # A consumer that names no limit leaves it as it is.
    assert queues.make().process() == "a"
    assert queue.publish("c") is True


def test_a_full_queue_drops_its_oldest_message(queues: Queues) -> None:
    queue = queues.make(max_pending_length=2, pending_overload_policy="drop_oldest")
    for text in "abc":
        assert queue.publish(text) is True
    assert [queue.process(), queue.process()] == ["b", "c"]


def test_a_full_queue_blocks_until_there_is_room_or_the_time_is_over(queues: Queues) -> None:
    blocking: dict[str, Any] = {"max_pending_length": 1, "pending_overload_policy": "block"}
    queue = queues.make(**blocking, pending_overload_block_timeout_seconds=0.05)
    queue.publish("a")
    with pytest.raises(QueueBackpressureError):
        queue.publish("b")
    patient = queues.make(**blocking, pending_overload_block_timeout_seconds=60)
    with Waypost(queues.url, namespace=queues.namespace) as post:
        room = threading.Timer(0.1, lambda: post.purge("q"))
        room.start()
        try:
            assert patient.publish("c") is True
        finally:
            room.join()


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_a_drained_queue_publishes_and_claims_no_more(queues: Queues) -> None:
    queue = queues.make()
    queue.publish("a")
    assert queue.drain(timeout=0) is True
    assert queue.publish("b") is True
    # A handler that runs is not waited for, even if it drains the queue itself.
    with queue.block() as message:
        assert message == "a"
        assert queue.drain(timeout=25) is True
    assert queue.close() is True
    with pytest.raises(QueueDrainedError, match="queue is drained"):
        queue.publish("c")
    assert queue.process() is None
    # The state is that of the object: another one goes on.
    assert queues.make().process() == "b"


@pytest.fixture
def interrupt() -> Iterator[GracefulInterruptHandler]:
    handler = GracefulInterruptHandler([signal.SIGUSR1])
    yield handler
    handler.reset()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_signal_ends_the_wait_after_the_current_message(queues: Queues, interrupt: GracefulInterruptHandler) -> None:
    queue = queues.make(interrupt=interrupt)
    queue.publish("a")
    handled: list[Any] = []
    while not interrupt.is_interrupted():
        with queue.block() as message:
            if message is not None:
                os.kill(os.getpid(), signal.SIGUSR1)
                handled.append(message)
    assert handled == ["a"]
    queue.publish("b")
    assert queue.process() is None
    # The second signal has its default effect.
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_signal_that_has_a_handler_keeps_it(interrupt: GracefulInterruptHandler) -> None:
    with pytest.raises(ValueError, match="has a handler already"):
        GracefulInterruptHandler([signal.SIGUSR1])
    with pytest.raises(ValueError, match="at least one"):
        GracefulInterruptHandler([])
    interrupt.reset()
    GracefulInterruptHandler([signal.SIGUSR1]).reset()


# ---- events and errors -----------------------------------------------------------------------------------------------


def test_a_callback_that_fails_harms_nothing(queues: Queues) -> None:
    def on_event(event: QueueEvent) -> None:
        raise RuntimeError("broken")

    queue = queues.make(gateway=brief(queues), on_event=on_event)
    with pytest.warns(RuntimeWarning, match="broken"):
        assert queue.publish("a") is True
    with pytest.warns(RuntimeWarning, match="broken"):
        assert queue.process() == "a"


def test_a_store_that_is_away_is_an_error_of_the_tree(queues: Queues) -> None:
    gateway = RedisGateway(redis_client="valkey://127.0.0.1:1", retry_budget_seconds=0)
    events: list[QueueEvent] = []
    queue = queues.make(gateway=gateway, on_event=events.append)
    with pytest.raises(RetryBudgetExhaustedError) as raised:
        queue.publish("a")
    assert isinstance(raised.value, RedisMessageQueueError | ConnectionError)
    assert isinstance(raised.value, WaypostError)
    with pytest.raises(RetryBudgetExhaustedError):
        queue.process()
    assert operations(events) == [("publish", "failure"), ("claim", "failure")]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"client": None}, ConfigurationError, "either client= or gateway="),
        ({"gateway": object()}, GatewayContractError, "RedisGateway"),
        ({"client": "memory://", "deduplication": 1}, TypeError, "must be a bool"),
        ({"client": "memory://", "no_such": 1}, TypeError, "no argument 'no_such'"),
        ({"client": "memory://", "max_failed_length": 5}, ConfigurationError, "enable_failed_queue"),
        ({"client": "memory://", "max_completed_length": 5}, ConfigurationError, "enable_completed_queue"),
        ({"client": "memory://", "heartbeat_interval_seconds": 150}, ConfigurationError, "less than half"),
        (
            {"client": "memory://", "visibility_timeout_seconds": None, "heartbeat_interval_seconds": 1},
            ConfigurationError, "needs a visibility_timeout_seconds",
        ),
        (
            {"client": "memory://", "visibility_timeout_seconds": None, "max_delivery_count": 3},
            ConfigurationError, "needs a visibility_timeout_seconds",
        ),
        (
            {"client": "memory://", "visibility_timeout_seconds": None, "enable_failed_queue": True},
            ConfigurationError, "needs a visibility_timeout_seconds",
        ),
        ({"client": "memory://", "pending_overload_policy": "block"}, ConfigurationError, "max_pending_length"),
        ({"client": "ftp://x"}, ConfigurationError, "scheme"),
        (
            {"gateway": RedisGateway(redis_client="memory://"), "max_delivery_count": 3},
            ConfigurationError, "on the gateway",
        ),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RedisMessageQueue("q", **given)


def test_names_with_hash_tags_lose_their_braces(queues: Queues) -> None:
    assert queues.make("{orders}").publish("a") is True
    assert queues.make("orders").process() == "a"
    with pytest.raises(ConfigurationError, match="queue name"):
        queues.make("not a name")


# ---- clients ---------------------------------------------------------------------------------------------------------


def test_the_callers_own_redis_client_decides_about_bytes(on_valkey: Queues) -> None:
    kind: Any = redis.Redis if on_valkey.mode == "sync" else redis.asyncio.Redis
    for decodes, expected in ((True, "a"), (False, b"a")):
        client = kind.from_url(on_valkey.url.replace("valkey://", "redis://"), decode_responses=decodes)
        queue = on_valkey.make("text" if decodes else "raw", client=client)
        assert queue.publish("a") is True
        assert queue.process() == expected
        on_valkey.run(client.close() if on_valkey.mode == "sync" else client.aclose())


def test_the_store_of_a_client_of_waypost_is_used(queues: Queues) -> None:
    kind: Any = Waypost if queues.mode == "sync" else AsyncWaypost
    post = kind(queues.url)
    queue = queues.make(client=post)
    queues.run(post.publish("q", {"of": "another program"}))
    assert queue.process() == '{"of": "another program"}'
    # A drain of the queue is none of the client.
    queue.drain()
    assert queues.run(post.publish("q", "b")).status == "queued"
    queues.run(post.close())
