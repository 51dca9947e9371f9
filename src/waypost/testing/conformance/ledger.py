"""The ledger: the state of every message at any moment, and the cause of every redelivery."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from waypost.policy import CHANGES_KEPT
from waypost.testing.bench import QUEUE, Bench
from waypost.values import MINUTE_COUNTERS, ChangeRecord
from waypost.views import Stats


class TestLedger:
    """The sums."""

    @pytest.mark.promise("SEE-5")
    def test_all_counts_of_a_new_queue_are_zero(self, bench: Bench) -> None:
        stats = bench.stats(queue="never-used")
        assert stats.ledger.balance == 0
        assert stats.ledger.published == 0
        assert (stats.paused, stats.sleepers, stats.oldest_ready_ms, stats.next_due_ms) == (False, 0, None, None)

    @pytest.mark.promise("SEE-5")
    def test_the_ledger_balances_after_every_step_of_a_full_life(self, bench: Bench) -> None:
        bench.configure(lease=10, max_deliveries=2, dead_max=1)
        steps: list[Callable[[], object]] = [
            lambda: bench.publish_count(6),
            lambda: bench.publish(key="k", delay=5),
            lambda: bench.publish(key="k", on_conflict="replace"),
            lambda: bench.settle(bench.claim_one(), "retry"),
            lambda: bench.settle(bench.claim_one(), "snooze", after=1),
            lambda: bench.settle(bench.claim_one(), "release"),
            lambda: bench.settle(bench.claim_one(), "dead"),
            lambda: bench.settle(bench.claim_one(), "drop"),
            lambda: bench.settle(bench.claim_one()),
            bench.redrive,
            lambda: bench.claim(2),
            lambda: bench.after(10),
            lambda: bench.claim(9),
            lambda: bench.after(10),
            lambda: bench.claim(9),
            lambda: bench.after(10),
            lambda: bench.claim(9),
            lambda: bench.purge("dead"),
            lambda: bench.purge("ready"),
            lambda: bench.purge("delayed"),
        ]
        for step in steps:
            step()
            bench.check_queue("orders")
        assert bench.ledger().published == 8

    @pytest.mark.promise("SEE-5", "SEE-3")
    def test_messages_that_a_claim_ends_without_a_lease_are_counted_although_the_journal_is_off(
        self, bench: Bench
    ) -> None:
        bench.configure(lease=10, journal="off")
        published = bench.publish()
        bench.claim_one()
        assert bench.cancel(published.id) == "requested"
        bench.after(10)
        assert bench.claim() == []
        assert (bench.ledger().cancelled, bench.ledger().balance) == (1, 0)

    @pytest.mark.promise("LEASE-15", "SEE-3")
    def test_the_order_holds_although_a_claim_only_promotes_and_the_journal_is_off(self, bench: Bench) -> None:
        bench.configure(journal="off", max_running=1)
        later, earlier = reversed(bench.session.message_ids(2))
        bench.publish()
        bench.claim_one()
        bench.publish(id=later, delay=5)
        bench.after(5)
        assert bench.claim() == []
        # Its id is older, which must not count.
        bench.publish(id=earlier)
        bench.configure(max_running=None)
        assert [lease.id for lease in bench.claim(5)] == [later, earlier]

    @pytest.mark.promise("SEE-5")
    def test_every_redelivery_has_a_cause(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "snooze")
        bench.settle(bench.claim_one(), "release")
        bench.claim_one()
        bench.after(10)
        bench.settle(bench.claim_one(), "dead")
        bench.redrive()
        bench.settle(bench.claim_one())
        ledger = bench.ledger()
        assert ledger.redelivered == {"expired": 1, "released": 1, "retried": 1, "snoozed": 1, "redriven": 1}
        assert (ledger.claims, ledger.first_claims, ledger.unexplained) == (6, 1, 0)
        assert (ledger.expired, ledger.released, ledger.retried, ledger.snoozed) == (1, 1, 1, 1)

    @pytest.mark.promise("SEE-5", "DEAD-2")
    def test_purged_waiting_messages_count_as_cancelled(self, bench: Bench) -> None:
        bench.publish_count(3)
        bench.publish_count(2, delay=60)
        first = bench.purge("ready", limit=2)
        assert (first.removed, first.more) == (2, True)
        assert bench.purge("ready").removed == 1
        assert bench.purge("delayed").removed == 2
        assert bench.purge("delayed").removed == 0
        assert bench.ledger().cancelled == 5
        assert {event.cause for event in bench.events("cancelled")} == {"purge"}

    @pytest.mark.promise("SEE-5", "SEE-2")
    def test_ages_are_measured_by_the_stores_clock(self, bench: Bench) -> None:
        bench.publish()
        bench.after(2)
        bench.claim_one()
        bench.publish()
        bench.after(3)
        bench.publish(delay=7)
        stats = bench.stats()
        assert (stats.oldest_ready_ms, stats.oldest_leased_ms) == (3_000, 3_000)
        assert (stats.next_due_ms, stats.next_lease_ms) == (7_000, 57_000)
        assert (stats.at_ms, stats.queue) == (bench.now_ms, "orders")

    @pytest.mark.promise("SEE-5", "SEE-2")
    @pytest.mark.parametrize("priority", [0, 8, 9])
    def test_the_oldest_message_counts_whatever_its_priority(self, bench: Bench, priority: int) -> None:
        bench.publish(priority=priority)
        bench.after(4)
        bench.publish()
        bench.after(1)
        assert bench.stats().oldest_ready_ms == 5_000

    @pytest.mark.promise("SEE-5")
    def test_the_journal_and_the_ledger_agree(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish_count(5)
        first, second, third, *_ = bench.claim(5)
        bench.settle(first)
        bench.settle(second, "dead")
        bench.settle(third, "drop")
        bench.after(10)
        bench.claim(5)
        ledger = bench.ledger()
        counted = {
            "published": ledger.published, "claimed": ledger.claims, "done": ledger.done, "dead": ledger.dead,
            "dropped": ledger.dropped, "expired": ledger.expired,
        }  # fmt: skip
        assert {name: len(bench.events(name)) for name in counted} == counted


class TestMinutes:
    """Counters of each of the last 1,440 minutes."""

    @pytest.mark.promise("SEE-5")
    def test_each_minute_has_its_own_counts(self, bench: Bench) -> None:
        start = bench.now_ms
        bench.publish_count(3)
        bench.after(60)
        bench.settle(bench.claim_one())
        minutes = bench.stats(minutes=10).minutes
        assert [minute.at_ms for minute in minutes] == [start, start + 60_000]
        assert minutes[0].counts == {name: 3 if name == "published" else 0 for name in MINUTE_COUNTERS}
        waited = dict.fromkeys(("wait_ms", "wait_ms_max"), 60_000)
        once = dict.fromkeys(("claims", "done", "runs"), 1)
        assert minutes[1].counts == dict.fromkeys(MINUTE_COUNTERS, 0) | waited | once

    @pytest.mark.promise("SEE-5")
    def test_only_the_requested_minutes_are_returned(self, bench: Bench) -> None:
        for _ in range(4):
            bench.publish()
            bench.after(60)
        assert bench.stats().minutes == []
        assert len(bench.stats(minutes=3).minutes) == 2
        assert len(bench.stats(minutes=100).minutes) == 4

    @pytest.mark.promise("SEE-5")
    def test_a_day_is_kept_and_no_more(self, bench: Bench) -> None:
        bench.publish()
        bench.after(1_439 * 60)
        bench.publish()
        assert len(bench.stats(minutes=1_440).minutes) == 2
        bench.after(60)
        bench.publish()
        assert len(bench.stats(minutes=1_440).minutes) == 2
        assert len(bench.stats(minutes=10_000).minutes) == 2

    @pytest.mark.promise("SEE-5")
    def test_every_counter_counts(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish(key="k")
        bench.publish(key="k")
        bench.claim_one()
        bench.after(10)
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "dead")
        bench.publish_count(2)
        done, dropped = bench.claim(2)
        bench.settle(done)
        bench.settle(dropped, "drop")
        (minute,) = bench.stats(minutes=1).minutes
        assert minute.counts == {
            "published": 3, "duplicates": 1, "claims": 5, "done": 1, "retried": 1, "dead": 1, "expired": 1,
            "dropped": 1, "redriven": 0, "cancelled": 0, "replaced": 0, "runs": 4, "wait_ms": 0, "wait_ms_max": 0,
            "run_ms": 0, "run_ms_max": 0,
        }  # fmt: skip
        bench.redrive()
        bench.publish(key="other", delay=5)
        bench.publish(key="other", delay=5, on_conflict="replace")
        bench.purge("delayed")
        bench.cancel(bench.publish().id)
        (minute,) = bench.stats(minutes=1).minutes
        counts = {name: minute.counts[name] for name in ("redriven", "cancelled", "replaced")}
        assert counts == {"redriven": 1, "cancelled": 2, "replaced": 1}

    @pytest.mark.promise("SEE-5")
    def test_waits_and_runs_are_summed_and_the_longest_is_kept(self, bench: Bench) -> None:
        bench.configure(lease=60)
        bench.publish_count(2)
        bench.after(1)
        first, second = bench.claim(2)
        bench.after(2)
        bench.settle(first)
        bench.after(1)
        bench.settle(second, "retry", after=0.5)
        bench.after(1)
        third = bench.claim_one()
        bench.after(4)
        bench.settle(third, "dead", reason="rejected")
        (minute,) = bench.stats(minutes=1).minutes
        waits = {name: minute.counts[name] for name in ("claims", "wait_ms", "wait_ms_max")}
        assert waits == {"claims": 3, "wait_ms": 2_500, "wait_ms_max": 1_000}
        runs = {name: minute.counts[name] for name in ("runs", "run_ms", "run_ms_max")}
        assert runs == {"runs": 3, "run_ms": 2_000 + 3_000 + 4_000, "run_ms_max": 4_000}
        bench.after(60)
        assert bench.stats(minutes=1).minutes == []

    @pytest.mark.promise("SEE-5")
    def test_a_release_and_a_lease_that_expired_are_no_runs(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        released = bench.claim_one()
        bench.after(3)
        bench.settle(released, "release")
        bench.claim_one()
        bench.after(10)
        last = bench.claim_one()
        bench.cancel(last.id)
        bench.after(10)
        assert bench.claim() == []
        (minute,) = bench.stats(minutes=1).minutes
        counts = {name: minute.counts[name] for name in ("claims", "expired", "cancelled", "runs", "run_ms")}
        assert counts == {"claims": 3, "expired": 1, "cancelled": 1, "runs": 0, "run_ms": 0}

    @pytest.mark.promise("SEE-5")
    def test_a_message_without_a_lease_has_a_wait_and_no_run(self, bench: Bench) -> None:
        bench.configure(lease=None)
        bench.publish_count(2)
        bench.after(2)
        assert len(bench.claim(2)) == 2
        (minute,) = bench.stats(minutes=1).minutes
        counts = {name: minute.counts[name] for name in ("done", "runs", "wait_ms", "wait_ms_max", "run_ms")}
        assert counts == {"done": 2, "runs": 0, "wait_ms": 4_000, "wait_ms_max": 2_000, "run_ms": 0}

    @pytest.mark.promise("SEE-5")
    def test_the_backlog_computed_backwards_is_the_one_that_was_observed(self, bench: Bench) -> None:
        bench.configure(lease=90, max_deliveries=2, max_pending=12, overload="drop_oldest")
        steps: list[Callable[[], object]] = [
            lambda: bench.publish_count(6),
            lambda: bench.publish(key="k", delay=500),
            lambda: bench.publish(key="k", on_conflict="replace"),
            lambda: bench.settle(bench.claim_one(), "retry"),
            lambda: bench.settle(bench.claim_one(), "dead"),
            lambda: bench.settle(bench.claim_one(), "drop"),
            bench.redrive,
            lambda: bench.claim(2),
            lambda: bench.settle(bench.claim_one()),
            lambda: bench.publish_count(8),
            lambda: bench.claim(9),
            lambda: bench.cancel(bench.publish().id),
            lambda: bench.purge("ready", limit=2),
            lambda: bench.settle_batch([bench.settlement(one) for one in bench.claim(3)]),
        ]
        observed = []
        for step in steps:
            ledger = bench.ledger()
            observed.append(ledger.ready + ledger.delayed + ledger.waiting + ledger.leased)
            step()
            bench.after(60)
        ledger = bench.ledger()
        observed.append(ledger.ready + ledger.delayed + ledger.waiting + ledger.leased)
        stats = Stats.from_record(bench.stats(minutes=60))
        # A minute that counts nothing is not listed, and its backlog is that of the next one.
        by_minute = {(one.at - stats.at) // timedelta(minutes=1): one.messages for one in stats.backlog}
        assert len(by_minute) > 10
        assert {place: observed[place - 1] for place in by_minute} == by_minute


class TestChanges:
    """Changes of the settings, for charts."""

    @pytest.mark.promise("SEE-5", "QUEUE-2")
    def test_changes_are_kept_with_their_time(self, bench: Bench) -> None:
        start = bench.now_ms
        bench.configure(lease=30, max_deliveries=3)
        bench.after(60)
        bench.run(bench.store.pause(QUEUE))
        bench.run(bench.store.pause(QUEUE))
        bench.run(bench.store.resume(QUEUE))
        bench.configure(lease=30)
        bench.configure(rate=None)
        expected = [
            ChangeRecord(start, "configured", "lease_ms=30000 max_deliveries=3"),
            ChangeRecord(start + 60_000, "paused", ""),
            ChangeRecord(start + 60_000, "resumed", ""),
        ]
        assert bench.stats(minutes=5).changes == expected
        assert bench.stats(minutes=1).changes == expected[1:]
        assert bench.stats().changes == []

    @pytest.mark.promise("SEE-5")
    def test_the_number_of_kept_changes_is_bounded(self, bench: Bench) -> None:
        for lease in range(1, CHANGES_KEPT + 4):
            bench.configure(lease=lease)
        changes = bench.stats(minutes=1).changes
        assert [change.text for change in changes] == [
            f"lease_ms={lease * 1000}" for lease in range(4, CHANGES_KEPT + 4)
        ]

    @pytest.mark.promise("SEE-5", "QUEUE-8")
    def test_they_go_with_the_queue(self, bench: Bench) -> None:
        bench.configure(lease=5)
        bench.remove()
        bench.after(1)
        bench.publish()
        assert bench.stats(minutes=5).changes == []
