"""Polls of idle workers: many queues in one step, registrations that are renewed, and what a poll carries."""

from __future__ import annotations

import pytest

from waypost.policy import POLL_QUEUES_MAX, SLEEPER_TTL_MS
from waypost.store.port import Heartbeat, Idle, Registration
from waypost.testing.bench import Bench
from waypost.values import Elected, PolledQueue

NOTHING = PolledQueue(False, None, None, 60_000)
HALF_TTL_SECONDS = SLEEPER_TTL_MS / 1000 / 2


def needs_claim(bench: Bench, sleeper: str | None = None, queue: str = "orders") -> bool:
    """Return whether a poll of one queue reports that a claim is needed."""
    return bench.poll(Idle(queue, sleeper)).queues[0].needs_claim


class TestPolls:
    """One poll for all idle queues of a worker."""

    @pytest.mark.promise("WAKE-5")
    def test_an_empty_queue_needs_no_claim(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        assert bench.poll(Idle("orders", "a")).queues == [NOTHING]

    @pytest.mark.promise("WAKE-5")
    def test_an_unused_queue_needs_a_claim_only_to_register_a_sleeper(self, bench: Bench) -> None:
        found = bench.poll(Idle("never"), Idle("never", "a")).queues
        assert found == [NOTHING, PolledQueue(True, None, None, 60_000)]

    @pytest.mark.promise("WAKE-5")
    def test_ready_messages_need_a_claim_and_a_poll_takes_none_of_them(self, bench: Bench) -> None:
        bench.publish()
        before = bench.ledger()
        assert needs_claim(bench)
        assert bench.ledger() == before
        bench.claim_one()
        assert not needs_claim(bench)

    @pytest.mark.promise("WAKE-5", "TIMER-2")
    def test_a_poll_returns_the_next_due_time_and_needs_a_claim_when_it_has_come(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        bench.publish(delay=60)
        assert bench.poll(Idle("orders")).queues == [PolledQueue(False, 60_000, None, 60_000)]
        bench.after(59.999)
        assert bench.poll(Idle("orders")).queues[0].next_due_ms == 1
        bench.after(0.001)
        assert bench.poll(Idle("orders")).queues == [PolledQueue(True, 0, None, 60_000)]

    @pytest.mark.promise("WAKE-5", "LEASE-4")
    def test_a_poll_returns_the_next_lease_end_and_needs_a_claim_when_it_has_come(self, bench: Bench) -> None:
        bench.configure(lease=5)
        bench.publish()
        bench.claim_one()
        assert bench.poll(Idle("orders")).queues == [PolledQueue(False, None, 5_000, 5_000)]
        bench.after(5)
        assert bench.poll(Idle("orders")).queues == [PolledQueue(True, None, 0, 5_000)]

    @pytest.mark.promise("WAKE-5", "LEASE-7")
    def test_a_poll_returns_the_length_of_leases(self, bench: Bench) -> None:
        bench.configure(lease=None)
        assert bench.poll(Idle("orders")).queues == [PolledQueue(False, None, None, None)]

    @pytest.mark.promise("LEASE-4", "WAKE-5")
    def test_a_lease_that_would_end_too_late_after_a_step_back_of_the_clock_needs_a_claim(self, bench: Bench) -> None:
        bench.publish()
        bench.claim_one()
        assert not needs_claim(bench)
        bench.clock.step(-3600)
        assert needs_claim(bench)
        bench.claim()
        assert not needs_claim(bench)

    @pytest.mark.promise("WAKE-5", "QUEUE-1")
    def test_a_paused_queue_needs_no_claim(self, bench: Bench) -> None:
        bench.publish()
        bench.publish(delay=1)
        bench.pause()
        bench.claim(sleeper="a")
        bench.after(2)
        assert bench.poll(Idle("orders", "a")).queues == [NOTHING]
        bench.resume()
        assert needs_claim(bench)

    @pytest.mark.promise("WAKE-5", "DEAD-1")
    def test_dead_letters_whose_time_is_over_need_a_claim(self, bench: Bench) -> None:
        bench.configure(dead_keep=10)
        bench.publish()
        bench.settle(bench.claim_one(), "dead")
        assert not needs_claim(bench)
        bench.after(10)
        assert needs_claim(bench)
        bench.claim()
        assert not needs_claim(bench)

    @pytest.mark.promise("WAKE-2", "WAKE-5")
    def test_polls_keep_a_sleeper_registered(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        for _ in range(6):
            bench.after(HALF_TTL_SECONDS - 5)
            assert not needs_claim(bench, "a")
        assert bench.stats().sleepers == 1
        bench.publish()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-1", "WAKE-5")
    def test_a_sleeper_whose_wake_up_was_lost_needs_a_claim(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        bench.publish()
        assert bench.woken == {"orders": ["a"]}
        bench.claim_one()
        assert needs_claim(bench, "a")
        bench.claim(sleeper="a")
        assert not needs_claim(bench, "a")

    @pytest.mark.promise("WAKE-2")
    def test_a_sleeper_whose_registration_is_over_is_not_registered_by_a_poll(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        bench.after(SLEEPER_TTL_MS / 1000)
        assert needs_claim(bench, "a")
        assert bench.stats().sleepers == 0

    @pytest.mark.promise("WAKE-2")
    def test_a_poll_renews_only_the_sleepers_that_it_names(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        bench.claim(sleeper="b")
        bench.after(HALF_TTL_SECONDS + 5)
        assert not needs_claim(bench, "a")
        bench.after(HALF_TTL_SECONDS)
        assert not needs_claim(bench, "a")
        assert needs_claim(bench, "b")

    @pytest.mark.promise("WAKE-5")
    def test_many_queues_are_answered_in_their_order(self, bench: Bench) -> None:
        queues = [f"queue-{number}" for number in range(POLL_QUEUES_MAX + 44)]
        for queue in queues[::75]:
            bench.publish(queue=queue)
        found = bench.poll(*(Idle(queue) for queue in queues)).queues
        assert [one.needs_claim for one in found] == [number % 75 == 0 for number in range(len(queues))]

    @pytest.mark.promise("WAKE-5")
    def test_a_poll_of_nothing_is_answered(self, bench: Bench) -> None:
        assert bench.poll().queues == []

    @pytest.mark.promise("SEE-4", "WAKE-5")
    def test_a_poll_carries_a_heartbeat(self, bench: Bench) -> None:
        bench.claim(sleeper="a")
        for _ in range(2):
            polled = bench.poll(
                Idle("orders", "a"), registration=Registration(Heartbeat("worker-1", "host", 7), 30_000)
            )
            assert (polled.queues, polled.elected) == ([NOTHING], None)
            (worker,) = bench.run(bench.store.workers())
            assert (worker.name, worker.pid, worker.seen_ms) == ("worker-1", 7, polled.at_ms)
            assert worker.until_ms == polled.at_ms + 30_000
            bench.after(20)
        bench.after(10)
        assert bench.run(bench.store.workers()) == []

    @pytest.mark.promise("TIMER-4", "WAKE-5")
    def test_a_poll_carries_a_candidacy(self, bench: Bench) -> None:
        first = Registration(Heartbeat("first"), 30_000, "scheduler", 15_000)
        second = Registration(Heartbeat("second"), 30_000, "scheduler", 15_000)
        assert bench.poll(registration=first).elected == Elected("first", 1, 15_000)
        bench.after(5)
        assert bench.poll(registration=second).elected == Elected("first", 1, 10_000)
        assert bench.run(bench.store.elect("scheduler", "first", 15_000)) == Elected("first", 1, 15_000)
        bench.after(15)
        assert bench.poll(registration=second).elected == Elected("second", 2, 15_000)
        assert bench.poll(registration=Registration(Heartbeat("third"), 30_000)).elected is None
