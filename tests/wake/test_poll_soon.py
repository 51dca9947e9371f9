"""When a worker polls again soon instead of falling asleep, on a clock that the test controls."""

from __future__ import annotations

import pytest

from waypost.policy import POLL_SOON_MS_MAX
from waypost.values import Lease
from waypost.worker.waiter import LATE_COMMIT_POLL_SECONDS, POLL_SOON_SECONDS_MAX, PollSoon, count_arrivals


class Scenario:
    """Claims one after the other, whose durations the test chooses."""

    def __init__(self, *, late_commits: bool = False) -> None:
        self.now = 100.0
        self.poll_soon = PollSoon(lambda: self.now, late_commits=late_commits)

    def claim(
        self,
        found: int,
        *,
        took: float = 0.001,
        after: float = 0.0,
        may_sleep: bool = True,
        arrivals: tuple[int, float] = (0, 0.0),
    ) -> bool:
        self.now += after
        polls_soon = self.poll_soon.begin(may_sleep)
        self.now += took
        self.poll_soon.end(found, arrivals=arrivals)
        return polls_soon


def leases(*ready_ms: int, claimed_ms: int) -> list[Lease]:
    """Return leases of one claim that became ready at these times."""
    return [Lease(f"m{n}", 1, b"", 1, 0, 4, None, None, at, at, claimed_ms, None, b"") for n, at in enumerate(ready_ms)]


@pytest.mark.promise("WAKE-2")
def test_a_worker_sleeps_between_rare_messages() -> None:
    scenario = Scenario()
    assert not any(scenario.claim(1, after=0.005) for _ in range(100))
    assert scenario.poll_soon.poll_soon_ms is None


@pytest.mark.promise("WAKE-2")
def test_a_worker_sleeps_between_rare_messages_also_if_claims_are_slow() -> None:
    """At 200 messages a second a poll a few milliseconds later would cost more than the wake-up saves."""
    scenario = Scenario()
    assert not any(scenario.claim(1, took=0.003, after=0.002) for _ in range(100))


@pytest.mark.promise("WAKE-2")
def test_a_worker_whose_claims_do_not_keep_up_polls_again_soon() -> None:
    scenario = Scenario()
    polled_soon = [scenario.claim(4, took=0.012, after=0.002) for _ in range(100)]
    assert all(polled_soon[50:])


@pytest.mark.promise("WAKE-2")
def test_a_busy_worker_polls_again_soon_and_reports_when() -> None:
    scenario = Scenario()
    polled_soon = [scenario.claim(2, after=0.002) for _ in range(100)]
    assert not polled_soon[0]
    assert all(polled_soon[50:])
    assert 0 < scenario.poll_soon.seconds <= POLL_SOON_SECONDS_MAX
    assert scenario.poll_soon.poll_soon_ms is not None
    # Until its next claim is committed: this claim, the pause, and the next claim.
    seconds = scenario.poll_soon.seconds + 2 * scenario.poll_soon.claim_seconds
    assert seconds * 1000 < scenario.poll_soon.poll_soon_ms <= POLL_SOON_MS_MAX


@pytest.mark.promise("WAKE-2")
def test_one_of_many_workers_knows_a_busy_queue_by_what_came_while_it_was_woken() -> None:
    """It gets fifty messages a second itself; they came at a thousand a second."""
    scenario = Scenario()
    polled_soon = [scenario.claim(4, after=0.08, arrivals=(3, 0.003)) for _ in range(10)]
    assert not any(polled_soon[:2])
    assert all(polled_soon[6:])


@pytest.mark.promise("WAKE-2")
def test_a_single_burst_is_no_busy_queue() -> None:
    scenario = Scenario()
    for _ in range(10):
        assert not scenario.claim(3, after=1.0, arrivals=(2, 0.001))
        assert not scenario.claim(2, arrivals=(2, 0.001))
        assert not scenario.claim(0)


@pytest.mark.promise("WAKE-2")
def test_workers_that_share_a_busy_queue_go_on_polling() -> None:
    scenario = Scenario()
    for _ in range(100):
        scenario.claim(2, after=0.002)
    assert all(scenario.claim(1, after=0.003) for _ in range(100))
    assert not any(Scenario().claim(1, after=0.003) for _ in range(100))


def test_arrivals_are_what_became_ready_after_the_first_at_another_time() -> None:
    assert count_arrivals(leases(claimed_ms=1_000)) == (0, 0.0)
    assert count_arrivals(leases(990, claimed_ms=1_000)) == (0, 0.0)
    assert count_arrivals(leases(990, 990, 990, claimed_ms=1_000)) == (0, 0.01)
    assert count_arrivals(leases(997, 992, 992, 1_000, claimed_ms=1_000)) == (2, 0.008)
    assert count_arrivals(leases(1_000, 1_001, claimed_ms=1_000)) == (1, 0.001)


@pytest.mark.promise("WAKE-2")
def test_a_worker_that_finds_nothing_falls_asleep_and_withdraws_its_promise_to_poll() -> None:
    scenario = Scenario()
    for _ in range(100):
        scenario.claim(2, after=0.002)
    assert scenario.claim(0)
    assert not scenario.claim(0)
    assert scenario.poll_soon.poll_soon_ms == 0
    assert not scenario.claim(0)
    assert scenario.poll_soon.poll_soon_ms is None


@pytest.mark.promise("WAKE-5")
def test_after_polling_soon_the_first_sleeps_are_short() -> None:
    scenario = Scenario()
    for _ in range(100):
        scenario.claim(2, after=0.002)
    scenario.claim(0)
    scenario.claim(0)
    assert [scenario.poll_soon.nap(5.0) for _ in range(4)] == [*LATE_COMMIT_POLL_SECONDS, 5.0, 5.0]
    assert [Scenario().poll_soon.nap(5.0) for _ in range(2)] == [5.0, 5.0]


@pytest.mark.promise("WAKE-5")
def test_where_commits_become_visible_late_all_work_is_followed_by_polls() -> None:
    scenario = Scenario(late_commits=True)
    assert scenario.poll_soon.nap(5.0) == 5.0
    scenario.claim(1, after=1.0)
    assert [scenario.poll_soon.nap(5.0) for _ in range(3)] == [*LATE_COMMIT_POLL_SECONDS, 5.0]


@pytest.mark.promise("TIMER-3")
def test_a_worker_that_cannot_be_woken_does_not_poll_soon() -> None:
    scenario = Scenario()
    assert not any(scenario.claim(5, after=0.001, may_sleep=False) for _ in range(100))


def test_a_late_answer_is_no_slow_store_and_a_slow_store_is_learned() -> None:
    scenario = Scenario()
    for _ in range(20):
        scenario.claim(1, took=0.002, after=0.1)
    scenario.claim(1, took=36.0)
    assert scenario.poll_soon.claim_seconds < 0.004
    for _ in range(60):
        scenario.claim(1, took=0.3, after=0.1)
    assert scenario.poll_soon.claim_seconds == pytest.approx(0.3, rel=0.05)
