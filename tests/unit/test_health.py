"""Health: when the claim of a loop is overdue, and what that means for its worker, on a clock set by the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from waypost import Waypost
from waypost.errors import ConfigurationError, ForeignData
from waypost.policy import (
    HEALTH_WINDOW_SECONDS,
    HEARTBEAT_SECONDS,
    HEARTBEATS_PER_TTL,
    SAFETY_POLL_SECONDS,
    WORKER_BYTES_MAX,
)
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.register import fitting, pack, registered
from waypost.values import Health, WorkerState
from waypost.worker.health import Served, check_window, judge
from waypost.worker.poller import Liveness, heartbeat_interval

pytestmark = pytest.mark.promise("SEE-4")
WINDOW = 15.0


def handle(body: Any) -> None:
    """A handler."""


@dataclass
class Consumer:
    """A claim loop in a given state."""

    queue: str = "orders"
    handled: int = 0
    running: int = 0
    in_flight: int = 0
    concurrency: int = 3
    liveness: Liveness = field(default_factory=Liveness)


def judged(
    *consumers: Consumer, state: WorkerState = "running", silent: float = 0.0, notes: tuple[str, ...] = ()
) -> Health:
    served = cast("tuple[Served, ...]", consumers)
    return judge(served, state, window=WINDOW, answered=time.monotonic() - silent, notes=notes)


def owing(seconds: float, queue: str = "orders") -> Consumer:
    """Return a loop whose claim has been overdue for `seconds`."""
    consumer = Consumer(queue)
    consumer.liveness.owes_from = time.monotonic() - seconds
    return consumer


def test_a_loop_that_claimed_within_the_window_is_green() -> None:
    assert judged(owing(WINDOW - 1)).status == "green"


def test_a_loop_whose_claim_is_overdue_for_longer_than_the_window_is_red_and_named() -> None:
    health = judged(owing(0, "mails"), owing(WINDOW + 5))
    assert health.status == "red"
    assert health.reasons == ["queue orders: there was free capacity, but no claim succeeded for 20 s"]


def test_an_answered_claim_makes_it_green_again() -> None:
    consumer = owing(WINDOW + 5)
    assert judged(consumer).status == "red"
    consumer.liveness.claimed()
    assert judged(consumer).status == "green"


def test_no_claim_is_overdue_at_full_concurrency_or_during_a_planned_sleep() -> None:
    liveness = Liveness()
    liveness.owes_none_for(float("inf"))
    assert liveness.late_seconds(time.monotonic() + 10_000) == 0
    liveness.owes_now()
    assert liveness.late_seconds(time.monotonic() + 100) >= 100
    liveness.owes_none_for(60)
    assert liveness.late_seconds(time.monotonic() + 50) == 0
    assert liveness.late_seconds(time.monotonic() + 100) > 30


def test_an_answered_poll_counts_as_a_claim_that_found_nothing() -> None:
    consumer = owing(WINDOW + 5)
    consumer.liveness.polled(15)
    assert judged(consumer).status == "green"
    assert consumer.liveness.last_claim is not None
    assert consumer.liveness.late_seconds(time.monotonic() + 14) == 0
    assert consumer.liveness.late_seconds(time.monotonic() + 20) > 4


def test_a_failed_claim_is_overdue_since_its_first_attempt() -> None:
    consumer = owing(10)
    before = consumer.liveness.owes_from
    consumer.liveness.owes_now()
    assert consumer.liveness.owes_from == before


def test_a_store_that_did_not_answer_within_the_window_is_the_one_reason() -> None:
    health = judged(owing(WINDOW + 5), silent=WINDOW + 7)
    assert (health.status, health.reasons) == ("red", ["the store has not answered for 22 s"])


def test_a_claim_counts_as_a_reply_of_the_store() -> None:
    consumer = Consumer()
    consumer.liveness.claimed()
    assert judged(consumer, silent=WINDOW + 7).status == "green"


def test_a_quiet_or_stopping_worker_has_no_overdue_claims() -> None:
    assert judged(owing(1_000), state="quiet").status == "green"
    assert judged(owing(1_000), state="stopping").status == "green"
    assert judged(owing(1_000), state="stopping", silent=1_000).status == "red"


def test_a_problem_that_does_not_stop_work_makes_a_worker_degraded() -> None:
    note = "wake channel down: polling"
    health = judged(owing(0), notes=(note,))
    assert (health.status, health.reasons) == ("degraded", [note])
    worse = judged(owing(WINDOW + 1), notes=(note,))
    assert worse.status == "red"
    assert worse.reasons[-1] == note


def test_each_queue_is_reported_with_its_figures() -> None:
    consumer = Consumer(handled=7, running=2, in_flight=3)
    assert judged(consumer).queues[0].last_claim_age is None
    consumer.liveness.claimed()
    (queue,) = judged(consumer).queues
    assert (queue.name, queue.concurrency, queue.running, queue.in_flight, queue.handled) == ("orders", 3, 2, 3, 7)
    assert queue.last_claim_age is not None


@pytest.mark.parametrize("window", [0, -1, float("inf"), float("nan"), True, "15"])
def test_an_invalid_window_is_refused(window: Any) -> None:
    with pytest.raises(ConfigurationError, match="health_window must be seconds"):
        check_window(window)
    with Waypost("memory://") as post:
        post.handler("orders")(handle)
        with pytest.raises(ConfigurationError, match="health_window"):
            post.worker(health_window=window)


def test_by_default_each_poll_carries_a_heartbeat_and_the_window_is_two_polls() -> None:
    assert heartbeat_interval(HEALTH_WINDOW_SECONDS) == HEARTBEAT_SECONDS == SAFETY_POLL_SECONDS == 15
    assert HEARTBEAT_SECONDS * HEARTBEATS_PER_TTL == 45
    assert HEALTH_WINDOW_SECONDS == 2 * SAFETY_POLL_SECONDS
    # Heartbeats stay within a shorter window too, since they prove that the store answers.
    assert heartbeat_interval(3) == 2


def test_a_record_keeps_to_its_limit_and_counts_the_queues_it_omits() -> None:
    queues = tuple(ServedQueue(f"queue-{number}-{'x' * 60}", 10, 1, 2, 3) for number in range(1_000))
    heartbeat = fitting(Heartbeat("a", queues=queues))
    assert 0 < len(heartbeat.queues) < 1_000
    assert len(heartbeat.queues) + heartbeat.unlisted == 1_000
    assert WORKER_BYTES_MAX - 200 < len(pack(heartbeat)) <= WORKER_BYTES_MAX
    small = Heartbeat("a", queues=queues[:3])
    assert fitting(small) is small


def test_a_record_of_a_newer_release_can_be_read_and_foreign_bytes_are_named() -> None:
    import msgspec

    queues = [["orders", 1, 2, 3, 4, "new"]]
    newer = msgspec.msgpack.encode(["a", "host", 7, "9.0", "resting", "blue", [], 1, 5, queues, 0, "new"])
    worker = registered("a", newer, 1_000, 2_000)
    assert (worker.version, worker.state, worker.queues[0].last_claim_ms) == ("9.0", "resting", 996)
    with pytest.raises(ForeignData, match="the record of worker a"):
        registered("a", b"\xc1what", 1_000, 2_000)
