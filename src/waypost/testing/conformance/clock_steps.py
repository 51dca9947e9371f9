"""A store's clock that is set forward or back by an hour: queues go on, and timers, leases and windows end."""

from __future__ import annotations

import pytest

from waypost.policy import OnConflict
from waypost.testing.bench import Bench

HOUR = 3600.0
STEPS = pytest.mark.parametrize("hours", [-1, 1])


class TestClockSteps:
    """Stored times are compared with a clock that may have been set since they were written."""

    @STEPS
    @pytest.mark.promise("QUEUE-3")
    def test_a_queue_with_a_rate_goes_on_within_one_window(self, bench: Bench, hours: int) -> None:
        bench.configure(rate="10/m", lease=600)
        bench.publish_count(40)
        assert len(bench.claim(50)) == 10
        bench.clock.step(hours * HOUR)
        claimed = bench.claimed(50)
        if hours < 0:
            # Claims from before the step count for one more window, and not for the hour.
            assert (claimed.leases, claimed.next_rate_ms) == ([], 60_000)
            bench.after(60)
            claimed = bench.claimed(50)
        assert len(claimed.leases) == 10
        assert bench.claim(50) == []
        bench.after(60)
        assert len(bench.claim(50)) == 10

    @pytest.mark.promise("QUEUE-3")
    def test_a_window_that_was_half_used_before_a_step_back_is_whole_again_after_one_window(self, bench: Bench) -> None:
        bench.configure(rate="10/m", lease=600)
        bench.publish_count(40)
        assert len(bench.claim(5)) == 5
        bench.clock.step(-HOUR)
        assert len(bench.claim(50)) == 5
        bench.after(60)
        assert len(bench.claim(50)) == 10

    @pytest.mark.promise("LEASE-4")
    def test_the_lease_of_a_crashed_worker_ends_one_lease_after_a_step_back(self, bench: Bench) -> None:
        bench.configure(lease=30)
        lost, kept = bench.publish_count(2)
        bench.claim(1, worker="crashed")
        alive = bench.claim_one(worker="alive")
        bench.clock.step(-HOUR)
        claimed = bench.claimed(5)
        assert claimed.leases == []
        assert claimed.next_lease_ms == 30_000
        bench.after(20)
        assert bench.extend(alive) == "ok"
        bench.after(10)
        assert [(lease.id, lease.token) for lease in bench.claim(5)] == [(lost, 2)]
        assert bench.settle(alive) == "done"
        assert kept == alive.id
        assert bench.ledger().balance == 0

    @pytest.mark.promise("LEASE-4")
    def test_a_lease_longer_than_the_queues_is_left_alone(self, bench: Bench) -> None:
        bench.configure(lease=600)
        bench.publish()
        bench.claim_one()
        bench.configure(lease=10)
        assert bench.claimed(5).next_lease_ms == 600_000
        bench.after(599)
        assert bench.claim(5) == []
        bench.after(1)
        assert bench.claim_one().token == 2

    @pytest.mark.promise("LEASE-4")
    def test_a_step_forward_ends_leases_and_the_token_still_fences(self, bench: Bench) -> None:
        bench.configure(lease=30)
        bench.publish()
        first = bench.claim_one()
        bench.clock.step(HOUR)
        second = bench.claim_one()
        assert second.token == 2
        assert (bench.extend(first), bench.settle(first), bench.settle(second)) == ("lost", "lost", "done")

    @pytest.mark.promise("TIMER-2")
    def test_a_timer_follows_the_stores_clock(self, bench: Bench) -> None:
        bench.publish(delay=60)
        bench.clock.step(-HOUR)
        bench.after(HOUR)
        assert bench.claim() == []
        bench.after(60)
        bench.claim_one()
        bench.publish(delay=60)
        bench.clock.step(HOUR)
        bench.claim_one()

    @pytest.mark.parametrize("extended", [False, True])
    @pytest.mark.parametrize("rule", ["replace", "extend"])
    @pytest.mark.promise("PUB-6")
    def test_a_message_behind_its_key_is_no_timer_because_the_clock_was_set_back(
        self, bench: Bench, rule: OnConflict, extended: bool
    ) -> None:
        bench.configure(lease=30)
        bench.publish(key="k")
        first = bench.claim_one()
        next_one = bench.publish(key="k", on_conflict=rule)
        bench.after(5)
        if extended:
            assert bench.publish(key="k", on_conflict="extend").id == next_one.id
        bench.clock.step(-HOUR)
        assert bench.settle(first) == "done"
        assert bench.claim_one().id == next_one.id
        assert bench.ledger().balance == 0

    @pytest.mark.promise("PUB-6")
    def test_a_message_behind_its_key_waits_for_its_own_delay_after_a_step_back(self, bench: Bench) -> None:
        bench.publish(key="k")
        first = bench.claim_one()
        bench.publish(key="k", on_conflict="replace", delay=60)
        bench.clock.step(-HOUR)
        assert bench.settle(first) == "done"
        bench.after(HOUR + 59)
        assert bench.claim() == []
        bench.after(1)
        bench.claim_one()

    @pytest.mark.promise("CHAIN-2")
    def test_a_message_that_waits_for_a_chain_is_no_timer_because_the_clock_was_set_back(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        waiting = bench.publish(after_chains=[chain])
        bench.deliver_all()
        bench.clock.step(-HOUR)
        assert bench.settle(bench.claim_one()) == "done"
        bench.deliver_all()
        assert bench.claim_one().id == waiting.id
        assert bench.ledger().balance == 0

    @pytest.mark.promise("CRON-6")
    def test_a_leader_that_is_gone_is_replaced_one_lease_after_a_step_back(self, bench: Bench) -> None:
        store = bench.store
        assert bench.run(store.elect("scheduler", "first", 15_000)).leader == "first"
        bench.clock.step(-HOUR)
        waits = bench.run(store.elect("scheduler", "second", 15_000))
        assert (waits.leader, waits.remaining_ms) == ("first", 15_000)
        bench.after(15)
        assert bench.run(store.elect("scheduler", "second", 15_000)).leader == "second"

    @pytest.mark.promise("CRON-6")
    def test_a_small_step_back_does_not_change_the_time_of_a_leader(self, bench: Bench) -> None:
        store = bench.store
        assert bench.run(store.elect("scheduler", "first", 15_000)).leader == "first"
        bench.clock.step(-45)
        waits = bench.run(store.elect("scheduler", "second", 15_000))
        assert (waits.leader, waits.remaining_ms) == ("first", 60_000)
        bench.clock.step(-0.001)
        waits = bench.run(store.elect("scheduler", "second", 15_000))
        assert (waits.leader, waits.remaining_ms) == ("first", 15_000)

    @pytest.mark.promise("CRON-6")
    def test_a_leader_that_lives_goes_on_leading_after_a_step(self, bench: Bench) -> None:
        store = bench.store
        token = bench.run(store.elect("scheduler", "first", 15_000)).token
        bench.clock.step(-HOUR)
        again = bench.run(store.elect("scheduler", "first", 15_000))
        assert (again.leader, again.token, again.remaining_ms) == ("first", token, 15_000)

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.promise("WAKE-2")
    def test_a_sleeper_is_woken_after_a_step_back_though_a_worker_had_promised_to_poll_again(
        self, bench: Bench, count: int
    ) -> None:
        bench.claim(1, worker="gone", poll_soon_ms=50)
        bench.claim(1, worker="idle", sleeper="idle-1")
        bench.clock.step(-HOUR)
        # For one message a store may read fewer sleepers, and not meet the promise at all.
        bench.publish_drafts([bench.draft() for _ in range(count)])
        assert bench.woken == {"orders": ["idle-1"]}

    @STEPS
    @pytest.mark.promise("SEE-5")
    def test_counts_of_a_minute_go_on_after_a_step(self, bench: Bench, hours: int) -> None:
        bench.publish_count(3)
        bench.clock.step(hours * HOUR)
        bench.publish_count(2)
        bench.clock.step(-hours * HOUR)
        bench.publish()
        minutes = {minute.at_ms: minute.counts["published"] for minute in bench.stats(minutes=120).minutes}
        here = bench.now_ms // 60_000 * 60_000
        assert minutes[here] == 4
        if hours < 0:
            assert minutes[here - 3_600_000] == 2
        assert bench.ledger().balance == 0
