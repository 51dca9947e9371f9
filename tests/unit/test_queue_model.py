"""The model of a queue: small cases whose results are computed by hand."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from waypost.policy import ByException, Constant, Exponential, NoRetry, PolicyRecord, parse_rate
from waypost.spark.insight.queue_model import (
    Arrival,
    Attempt,
    Capacity,
    Served,
    Settings,
    Surroundings,
    serve,
    with_jitter_of,
)

pytestmark = pytest.mark.promise("SPARK-10")


def messages(times: list[int], run_ms: int = 10) -> list[Arrival]:
    return [Arrival(at, (Attempt(run_ms),)) for at in times]


def waits(served: Served) -> list[tuple[int, float]]:
    """Which message was claimed, and how long it had waited, claim by claim."""
    return list(zip(served.message, served.wait_ms, strict=True))


def test_one_slot_with_equal_run_times_serves_as_the_formula_for_such_queues() -> None:
    """Arrivals by chance and one slot with constant runs: the mean wait is run x load / (2 x (1 - load))."""
    random, at, times = Random(5), 0.0, []
    for _ in range(200_000):
        at += random.expovariate(1 / 1000)
        times.append(round(at))
    served = serve(messages(times, 800), Settings.of(1))
    assert sum(served.wait_ms) / served.claims == pytest.approx(800 * 0.8 / (2 * 0.2), rel=0.03)
    assert served.counts["done"] == 200_000


def test_messages_wait_for_a_free_slot_in_the_order_of_their_age() -> None:
    served = serve(messages([0, 1, 2, 3]), Settings.of(2))
    assert waits(served) == [(0, 0), (1, 0), (2, 8), (3, 8)]
    assert served.waiting_max == 2
    assert served.busy_ms == 40


def test_a_higher_priority_is_claimed_first() -> None:
    arrivals = [Arrival(0, (Attempt(10),)), Arrival(1, (Attempt(10),), priority=1), Arrival(2, (Attempt(10),), 9)]
    assert waits(serve(arrivals, Settings.of(1))) == [(0, 0), (2, 8), (1, 19)]


def test_a_failed_message_is_claimable_after_the_pause_of_the_retry_policy() -> None:
    arrivals = [Arrival(0, (Attempt(10, "failed"), Attempt(10, "failed"), Attempt(10)))]
    served = serve(arrivals, Settings.of(1, retry=Exponential(first=1, factor=3, jitter=0)))
    assert list(served.ready_ms) == [0, 1010, 4020]
    assert served.counts == {"done": 1, "dead": 0, "failed": 2, "expired": 0}


def test_the_recorded_pause_is_kept_without_a_policy() -> None:
    arrivals = [Arrival(0, (Attempt(10, "failed", 70), Attempt(10)))]
    assert list(serve(arrivals, Settings.of(1)).ready_ms) == [0, 80]


def test_a_policy_without_retries_ends_messages_at_their_first_failure() -> None:
    arrivals = [Arrival(0, (Attempt(10, "failed", 70, "ValueError"), Attempt(10)))]
    assert serve(arrivals, Settings.of(1, retry=NoRetry())).counts["dead"] == 1
    by_error = ByException((ValueError, NoRetry()), otherwise=Constant())
    assert serve(arrivals, Settings.of(1, retry=by_error)).counts["dead"] == 1
    other = ByException((KeyError, NoRetry()), otherwise=Constant())
    assert serve(arrivals, Settings.of(1, retry=other)).counts["done"] == 1


def test_attempts_that_were_never_made_are_drawn_from_those_after_the_same_error() -> None:
    arrivals = [Arrival(0, (Attempt(10, "failed", error="OSError"),))]
    settings = Settings.of(1, retry=Constant(pause=1, attempts=4, jitter=0))
    assert serve(arrivals, settings).counts == {"done": 0, "dead": 1, "failed": 4, "expired": 0}
    around = Surroundings(followers={"OSError": (Attempt(5),)})
    assert serve(arrivals, settings, around).counts == {"done": 1, "dead": 0, "failed": 1, "expired": 0}


def test_after_a_crash_the_message_waits_for_the_end_of_its_lease() -> None:
    arrivals = [Arrival(0, (Attempt(60_000, "expired"), Attempt(10)))]
    for lease_ms in (30_000, 60_000):
        served = serve(arrivals, Settings.of(1, policy=PolicyRecord(lease_ms=lease_ms)))
        assert list(served.ready_ms) == [0, lease_ms]
        assert served.counts["done"] == served.counts["expired"] == 1


def test_a_message_given_back_comes_before_all_others_of_its_priority() -> None:
    arrivals = [Arrival(0, (Attempt(10, "released"), Attempt(10))), *messages([1, 2])]
    assert [message for message, _ in waits(serve(arrivals, Settings.of(1)))] == [0, 0, 1, 2]


def of_groups(groups: str, run: int = 10) -> list[Arrival]:
    return [Arrival(0, (Attempt(run),), group=None if name == "-" else name) for name in groups]


def claimed_groups(arrivals: list[Arrival], **policy: Any) -> str:
    served = serve(arrivals, Settings.of(1, policy=PolicyRecord(**policy)))
    return "".join(arrivals[message].group or "-" for message in served.message)


def test_claims_take_turns_between_groups_and_messages_without_one_share_a_turn() -> None:
    arrivals = of_groups("aaaabb--c")
    assert claimed_groups(arrivals) == "aaaabb--c"
    assert claimed_groups(arrivals, fair=True) == "-abc-abaa"


def test_an_ordered_group_runs_one_at_a_time_and_waits_for_a_failed_message() -> None:
    arrivals = [
        Arrival(0, (Attempt(10, "failed", 50), Attempt(10)), group="a"),
        *of_groups("ab"),
    ]  # fmt: skip
    served = serve(arrivals, Settings.of(3, policy=PolicyRecord(order="group")))
    assert starts(served) == [(0, 0), (2, 0), (0, 60), (1, 70)]
    passing = serve(arrivals, Settings.of(3, policy=PolicyRecord(order="group", on_failure="pass")))
    assert starts(passing) == [(0, 0), (2, 0), (1, 10), (0, 60)]


def test_slots_stay_free_because_of_a_limit_of_each_group() -> None:
    served = serve(of_groups("aaab"), Settings.of(4, policy=PolicyRecord(group_max_running=2)))
    assert starts(served) == [(0, 0), (3, 0), (1, 0), (2, 10)]


def starts(served: Served) -> list[tuple[int, float]]:
    """Which message was claimed when, claim by claim."""
    found = zip(served.message, served.ready_ms, served.wait_ms, strict=True)
    return [(message, ready + wait) for message, ready, wait in found]


def test_without_renewals_a_run_longer_than_the_lease_is_delivered_again_while_its_slot_is_in_use() -> None:
    settings = Settings.of(1, policy=PolicyRecord(lease_ms=30, max_deliveries=3), renews=False)
    served = serve(messages([0], 100), settings)
    assert list(served.ready_ms) == [0, 30, 130]
    assert list(served.wait_ms) == [0, 70, 70]
    assert served.counts["dead"] == 1
    assert (
        serve(messages([0], 100), Settings.of(1, policy=PolicyRecord(lease_ms=100), renews=False)).counts["done"] == 1
    )


def test_a_longer_lease_lets_runs_end_that_the_recorded_one_cut_off() -> None:
    arrivals = [Arrival(0, (Attempt(30, "expired"), Attempt(20)))]
    around = Surroundings(long_runs_ms=(40,), recorded_lease_ms=30)
    longer = Settings.of(1, policy=PolicyRecord(lease_ms=50), renews=False)
    assert serve(arrivals, longer, around).counts == {"done": 1, "dead": 0, "failed": 0, "expired": 0}
    same = Settings.of(1, policy=PolicyRecord(lease_ms=30), renews=False)
    assert serve(arrivals, same, around).counts == {"done": 1, "dead": 0, "failed": 0, "expired": 1}


def test_a_message_is_dead_after_the_most_deliveries_of_its_queue() -> None:
    arrivals = [Arrival(0, tuple(Attempt(10, "expired") for _ in range(9)))]
    served = serve(arrivals, Settings.of(1, policy=PolicyRecord(lease_ms=10, max_deliveries=4)))
    assert (served.claims, served.counts["dead"]) == (4, 1)
    snoozed = [Arrival(0, (Attempt(10, "snoozed", 5), Attempt(10, "released"), Attempt(10)))]
    assert serve(snoozed, Settings.of(1, policy=PolicyRecord(max_deliveries=1))).counts["done"] == 1


def test_limits_of_the_queue_hold_back_what_slots_would_take() -> None:
    two = serve(messages([0] * 6), Settings.of(10, policy=PolicyRecord(max_running=2)))
    assert [wait for _, wait in waits(two)] == [0, 0, 10, 10, 20, 20]
    count, per_ms = parse_rate("2/100ms")
    rated = serve(messages([0] * 5), Settings.of(10, policy=PolicyRecord(rate_count=count, rate_per_ms=per_ms)))
    assert [wait for _, wait in waits(rated)] == [0, 0, 100, 100, 200]


def test_slots_come_and_go_and_a_pause_stops_claims() -> None:
    later = Settings((Capacity(50, 1), Capacity(65, 2)))
    assert [wait for _, wait in waits(serve(messages([0] * 4), later))] == [50, 60, 65, 70]
    paused = Settings.of(1, pauses=((5, 100),))
    assert [wait for _, wait in waits(serve(messages([0, 1]), paused))] == [0, 99]


def test_a_message_that_finds_a_free_slot_waits_as_recorded() -> None:
    served = serve(messages([0, 1]), Settings.of(1), Surroundings(pickup_ms=(3,)))
    assert waits(served) == [(0, 3), (1, 12)]


def test_runs_take_longer_the_more_of_them_are_under_way() -> None:
    arrivals = [Arrival(0, (Attempt(10, load=1),)), Arrival(0, (Attempt(20, load=2),))]
    assert serve(arrivals, Settings.of(2), Surroundings(slowdown=1.0)).busy_ms == 10 + 20
    assert serve(arrivals, Settings.of(1), Surroundings(slowdown=1.0)).busy_ms == 10 + 10


def test_it_finds_when_the_first_messages_were_claimed_and_none_waits() -> None:
    assert serve(messages([0, 0, 0, 15]), Settings.of(1), until_claimed=3).all_claimed_ms == 30
    assert serve(messages([0]), Settings.of(0), until_claimed=1).all_claimed_ms is None


def test_jitter_is_drawn_from_the_seed_and_stays_within_its_bounds() -> None:
    policy = Constant(pause=10, jitter=0.2, attempts=2**31)
    drawn = [with_jitter_of(policy, Random(3))(1, None) for _ in range(2)]
    assert drawn[0] == drawn[1]
    many = with_jitter_of(policy, Random(3))
    pauses = [many(1, None) or 0.0 for _ in range(1000)]
    assert 8_000 <= min(pauses) < 8_100 < 11_900 < max(pauses) <= 12_000
