"""Timers: a message with a due time. Never early, in order, bounded per claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from waypost.checks import DUE_MS_MAX
from waypost.policy import PROMOTE_MAX
from waypost.testing.bench import Bench


class TestTimers:
    """Messages with a due time."""

    @pytest.mark.promise("TIMER-1", "TIMER-2")
    def test_a_timer_is_never_early_and_never_late(self, bench: Bench) -> None:
        published = bench.publish(delay=10)
        bench.after(9.999)
        assert bench.claim() == []
        bench.after(0.001)
        assert bench.claim_one().id == published.id

    @pytest.mark.promise("TIMER-1")
    def test_an_absolute_time_is_kept_to_the_millisecond(self, bench: Bench) -> None:
        published = bench.publish(at_ms=bench.now_ms + 1_234)
        assert published.status == "delayed"
        assert bench.stored(published.id).ready_ms == bench.now_ms + 1_234
        bench.after(1.233)
        assert bench.claim() == []
        bench.after(0.001)
        assert bench.claim_one().id == published.id

    @pytest.mark.promise("TIMER-1")
    @pytest.mark.parametrize("early_ms", [0, 1, 86_400_000])
    def test_a_time_in_the_past_is_due_now(self, bench: Bench, early_ms: int) -> None:
        published = bench.publish(at_ms=bench.now_ms - early_ms)
        assert published.status == "queued"
        lease = bench.claim_one()
        assert (lease.id, lease.ready_ms) == (published.id, bench.now_ms)

    @pytest.mark.promise("TIMER-1")
    def test_an_absolute_time_wins_over_a_delay(self, bench: Bench) -> None:
        published = bench.publish(at_ms=bench.now_ms + 5_000, delay=60)
        assert bench.stored(published.id).ready_ms == bench.now_ms + 5_000

    @pytest.mark.promise("TIMER-1")
    def test_years_ahead_is_fine(self, bench: Bench) -> None:
        published = bench.publish(at_ms=DUE_MS_MAX)
        assert bench.stored(published.id).ready_ms == DUE_MS_MAX
        assert bench.claimed().next_due_ms == DUE_MS_MAX - bench.now_ms
        bench.after(50 * 365 * 86_400)
        assert bench.claim() == []

    @pytest.mark.promise("TIMER-1")
    def test_timers_are_listed_by_due_time_counted_and_found_by_key(self, bench: Bench) -> None:
        late = bench.publish(delay=30, key="late")
        soon = bench.publish(delay=10, key="soon")
        assert bench.ids("delayed") == [soon.id, late.id]
        assert bench.ledger().delayed == 2
        assert bench.ids("delayed", key="late") == [late.id]
        assert bench.ids("delayed", key="never") == []

    @pytest.mark.promise("TIMER-1")
    def test_timers_are_cancelled_and_moved_by_key(self, bench: Bench) -> None:
        bench.publish(delay=10, key="a")
        moved = bench.publish(delay=10, key="b")
        assert bench.cancel(key="a") == "cancelled"
        bench.publish(key="b", delay=20, on_conflict="extend")
        bench.after(19.999)
        assert bench.claim() == []
        bench.after(0.001)
        assert [lease.id for lease in bench.claim(5)] == [moved.id]

    @pytest.mark.promise("TIMER-4")
    def test_due_timers_become_ready_in_the_order_of_their_times(self, bench: Bench) -> None:
        third = bench.publish(delay=3)
        first = bench.publish(delay=1)
        second = bench.publish(delay=2)
        bench.after(3)
        assert [lease.id for lease in bench.claim(3)] == [first.id, second.id, third.id]

    @pytest.mark.promise("TIMER-4", "PUB-9")
    def test_a_due_timer_keeps_its_priority(self, bench: Bench) -> None:
        low = bench.publish(delay=1, priority=1)
        high = bench.publish(delay=2, priority=8)
        usual = bench.publish()
        bench.after(2)
        assert [lease.id for lease in bench.claim(3)] == [high.id, usual.id, low.id]

    @pytest.mark.promise("TIMER-4")
    def test_promotions_are_bounded_per_claim_and_none_is_forgotten(self, bench: Bench) -> None:
        count = PROMOTE_MAX + 20
        ids = bench.publish_count(count, delay=1)
        bench.after(1)
        first = bench.claim(1)
        assert len(bench.events("promoted")) == PROMOTE_MAX
        assert bench.ledger().delayed == 20
        rest = bench.claim_all()
        assert sorted(lease.id for lease in first + rest) == sorted(ids)

    @pytest.mark.promise("TIMER-2", "WAKE-5")
    def test_a_claim_returns_the_time_until_the_next_timer(self, bench: Bench) -> None:
        bench.publish(delay=10)
        assert bench.claimed().next_due_ms == 10_000
        bench.after(4)
        assert bench.claimed().next_due_ms == 6_000
        bench.publish(delay=1)
        assert bench.stats().next_due_ms == 1_000

    @pytest.mark.promise("TIMER-1", "SEE-3")
    def test_the_journal_has_the_due_time_and_the_promotion(self, bench: Bench) -> None:
        published = bench.publish(delay=10)
        due = bench.now_ms + 10_000
        bench.after(12)
        bench.claim_one()
        events = bench.events(message_id=published.id)
        assert [event.event for event in events] == ["published", "promoted", "claimed"]
        assert events[0].due_ms == due
        assert (events[1].cause, events[1].at_ms) == ("due", bench.now_ms)
        assert events[2].wait_ms == 2_000


class TestReschedule:
    """Another due time for a timer."""

    @pytest.mark.promise("TIMER-1", "QUEUE-8")
    def test_a_listing_goes_on_where_it_was_when_its_last_timer_was_moved(self, bench: Bench) -> None:
        ids = [bench.publish(delay=10 + number).id for number in range(6)]
        page = bench.run(bench.store.peek("orders", "delayed", 3))
        assert [stored.id for stored in page.messages] == ids[:3]
        assert bench.reschedule(ids[2], delay=600) == "moved"
        rest = bench.run(bench.store.peek("orders", "delayed", 9, cursor=page.cursor))
        assert [stored.id for stored in rest.messages] == [*ids[3:], ids[2]]

    @pytest.mark.promise("TIMER-1", "QUEUE-8")
    def test_a_listing_of_timers_due_together_goes_on_where_it_was_when_its_last_one_is_gone(
        self, bench: Bench
    ) -> None:
        ids = sorted(bench.publish(delay=10).id for _ in range(7))
        remove: Callable[[str], object]
        for remove in (bench.cancel, lambda id: bench.reschedule(id, delay=600)):
            page = bench.run(bench.store.peek("orders", "delayed", 3))
            first = [stored.id for stored in page.messages]
            assert first == ids[:3]
            remove(first[-1])
            rest = bench.run(bench.store.peek("orders", "delayed", 9, cursor=page.cursor))
            assert [stored.id for stored in rest.messages if stored.ready_ms == page.messages[0].ready_ms] == ids[3:]
            ids.remove(first[-1])

    @pytest.mark.promise("TIMER-1")
    def test_a_timer_without_a_key_is_moved_by_its_id(self, bench: Bench) -> None:
        later, sooner = bench.publish(delay=10).id, bench.publish(delay=20).id
        assert bench.reschedule(sooner, delay=5) == "moved"
        assert bench.reschedule(later, at_ms=bench.now_ms + 30_000) == "moved"
        bench.after(5)
        assert bench.claim_one().id == sooner
        bench.after(24.999)
        assert bench.claim() == []
        bench.after(0.001)
        assert bench.claim_one().id == later
        assert [event.due_ms for event in bench.events("postponed")] == [bench.now_ms - 25_000, bench.now_ms]

    @pytest.mark.promise("TIMER-1")
    def test_a_timer_is_moved_by_its_key(self, bench: Bench) -> None:
        id = bench.publish(delay=10, key="k").id
        assert bench.reschedule(key="k", delay=60) == "moved"
        assert bench.stored(id).ready_ms == bench.now_ms + 60_000

    @pytest.mark.promise("TIMER-1", "WAKE-1")
    def test_a_time_that_is_over_makes_it_ready_and_wakes_a_worker(self, bench: Bench) -> None:
        id = bench.publish(delay=10).id
        assert bench.claim(sleeper="anna") == []
        assert bench.reschedule(id, at_ms=bench.now_ms - 5_000) == "moved"
        assert bench.woken == {"orders": ["anna"]}
        lease = bench.claim_one()
        assert (lease.id, lease.ready_ms) == (id, bench.now_ms)
        bench.check_queue("orders")

    @pytest.mark.promise("TIMER-2", "WAKE-1")
    def test_a_timer_that_becomes_the_first_wakes_a_worker(self, bench: Bench) -> None:
        bench.publish(delay=10)
        moved = bench.publish(delay=20).id
        assert bench.claim(sleeper="anna") == []
        assert bench.reschedule(moved, delay=15) == "moved"
        assert bench.woken == {}
        assert bench.reschedule(moved, delay=5) == "moved"
        assert bench.woken == {"orders": ["anna"]}

    @pytest.mark.promise("TIMER-1")
    def test_a_message_that_waits_for_a_retry_is_a_timer_and_keeps_its_counts(self, bench: Bench) -> None:
        bench.publish()
        first = bench.claim_one()
        bench.settle(first, "retry", after=100)
        assert bench.reschedule(first.id) == "moved"
        second = bench.claim_one()
        assert (second.id, second.attempts, second.deliveries, second.token) == (first.id, 1, 2, first.token + 1)
        assert bench.ledger().unexplained == 0

    @pytest.mark.promise("TIMER-1")
    def test_what_is_no_timer_is_left_alone(self, bench: Bench) -> None:
        ready = bench.publish(key="k").id
        assert bench.reschedule(ready, delay=5) == "due"
        assert bench.reschedule(key="k", delay=5) == "due"
        lease = bench.claim_one()
        assert bench.reschedule(ready, delay=5) == "due"
        bench.settle(lease, "dead")
        assert bench.reschedule(ready, delay=5) == "unknown"
        assert bench.reschedule("0" * 24, delay=5) == "unknown"
        assert bench.reschedule(key="none", delay=5) == "unknown"
        assert bench.events("postponed") == []

    @pytest.mark.promise("TIMER-1", "LEASE-6")
    def test_a_repeat_returns_the_first_answer_and_moves_nothing(self, bench: Bench) -> None:
        id = bench.publish(delay=10).id
        operation = bench.operation()
        assert bench.reschedule(id, delay=60, operation=operation) == "moved"
        bench.after(1)
        assert bench.reschedule(id, delay=60, operation=operation) == "moved"
        assert bench.stored(id).ready_ms == bench.now_ms + 59_000
        assert len(bench.events("postponed")) == 1
