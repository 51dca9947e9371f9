"""Wake-ups: as many sleepers as there are messages, and all of them when none is registered."""

from __future__ import annotations

import pytest

from waypost.policy import POLL_SOON_MESSAGES_MAX, POLL_SOON_MS_MAX, SLEEPER_TTL_MS
from waypost.testing.bench import Bench


def put_to_sleep(bench: Bench, *names: str) -> None:
    """Register workers as sleepers by their own empty claims, in this order."""
    for name in names:
        assert bench.claim(sleeper=name) == []
        bench.after(0.001)


class TestWakeUps:
    """The sleepers that a step names."""

    @pytest.mark.promise("WAKE-2")
    def test_all_sleepers_are_woken_when_none_is_registered(self, bench: Bench) -> None:
        bench.publish()
        assert bench.woken == {"orders": ["*"]}

    @pytest.mark.promise("WAKE-2")
    def test_all_sleepers_are_woken_once_not_for_every_message(self, bench: Bench) -> None:
        bench.publish()
        bench.publish()
        assert bench.woken == {}

    @pytest.mark.promise("WAKE-2")
    def test_all_sleepers_are_woken_again_when_the_registrations_ran_out(self, bench: Bench) -> None:
        bench.publish()
        bench.after(SLEEPER_TTL_MS / 1000)
        bench.publish()
        assert bench.woken == {"orders": ["*"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_publish_wakes_as_many_sleepers_as_it_has_messages(self, bench: Bench) -> None:
        put_to_sleep(bench, "a", "b", "c")
        bench.publish_drafts([bench.draft(), bench.draft()])
        assert bench.woken == {"orders": ["c", "b"]}
        bench.publish_drafts([bench.draft(), bench.draft()])
        assert bench.woken == {"orders": ["a"]}
        bench.publish()
        assert bench.woken == {}

    @pytest.mark.promise("WAKE-2")
    def test_the_last_to_fall_asleep_is_woken_first(self, bench: Bench) -> None:
        put_to_sleep(bench, "z", "a")
        bench.publish()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_that_finds_work_registers_no_sleeper(self, bench: Bench) -> None:
        put_to_sleep(bench, "b", "a")
        bench.publish()
        assert len(bench.claim(sleeper="b")) == 1
        bench.publish()
        assert bench.woken == {}
        assert bench.stats().sleepers == 0

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_below_its_limit_registers_its_sleeper(self, bench: Bench) -> None:
        bench.publish()
        assert len(bench.claim(2, sleeper="a")) == 1
        assert bench.stats().sleepers == 1
        bench.publish()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_that_reached_its_limit_registers_no_sleeper(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.publish_count(3)
        assert len(bench.claim(2, sleeper="a")) == 2
        assert bench.stats().sleepers == 0

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_with_limit_zero_unregisters_its_sleeper(self, bench: Bench) -> None:
        put_to_sleep(bench, "a", "b")
        assert bench.claim(0, sleeper="a") == []
        assert bench.stats().sleepers == 1
        bench.publish_drafts([bench.draft(), bench.draft()])
        assert bench.woken == {"orders": ["b"]}

    @pytest.mark.promise("WAKE-5")
    def test_a_claim_returns_the_length_of_leases(self, bench: Bench) -> None:
        assert bench.claimed(1).lease_ms == 60_000
        bench.configure(lease=5)
        bench.publish()
        assert bench.claimed(1).lease_ms == 5_000
        bench.configure(lease=None)
        assert bench.claimed(1).lease_ms is None

    @pytest.mark.promise("WAKE-2")
    def test_a_sleeper_that_sleeps_again_counts_once(self, bench: Bench) -> None:
        put_to_sleep(bench, "a", "b", "a")
        assert bench.stats().sleepers == 2
        bench.publish_drafts([bench.draft() for _ in range(5)])
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("WAKE-2")
    @pytest.mark.parametrize(
        ("age_ms", "woken"),
        [(SLEEPER_TTL_MS - 1, ["young", "old"]), (SLEEPER_TTL_MS, ["young"]), (SLEEPER_TTL_MS + 1000, ["young"])],
    )
    def test_a_sleeper_is_forgotten_after_its_time(self, bench: Bench, age_ms: int, woken: list[str]) -> None:
        began = bench.now_ms
        put_to_sleep(bench, "old")
        bench.after(SLEEPER_TTL_MS / 1000 - 1)
        put_to_sleep(bench, "young")
        bench.clock.advance_ms(began + age_ms - bench.now_ms)
        bench.publish_drafts([bench.draft() for _ in range(5)])
        assert bench.woken == {"orders": woken}

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_without_a_sleeper_name_registers_none(self, bench: Bench) -> None:
        bench.claim()
        assert bench.stats().sleepers == 0

    @pytest.mark.promise("WAKE-2")
    def test_duplicates_wake_no_sleeper(self, bench: Bench) -> None:
        bench.publish(key="k", delay=60)
        put_to_sleep(bench, "a")
        bench.publish(key="k")
        assert bench.woken == {}
        assert bench.stats().sleepers == 1

    @pytest.mark.promise("TIMER-2")
    def test_a_new_earliest_timer_wakes_one(self, bench: Bench) -> None:
        put_to_sleep(bench, "a", "b", "c", "d")
        bench.publish(delay=60)
        assert bench.woken == {"orders": ["d"]}
        bench.publish(delay=90)
        assert bench.woken == {}
        bench.publish_drafts([bench.draft(delay=30), bench.draft(delay=20)])
        assert bench.woken == {"orders": ["c"]}

    @pytest.mark.promise("TIMER-2", "PUB-5")
    def test_a_timer_brought_forward_wakes_one(self, bench: Bench) -> None:
        bench.publish(key="k", delay=60)
        put_to_sleep(bench, "b", "a")
        bench.publish(key="k", delay=30, on_conflict="extend")
        assert bench.woken == {"orders": ["a"]}
        bench.publish(key="k", delay=50, on_conflict="extend")
        assert bench.woken == {}

    @pytest.mark.promise("WAKE-2")
    @pytest.mark.parametrize(("outcome", "after"), [("release", 0), ("retry", 0), ("retry", 5), ("snooze", 5)])
    def test_a_message_that_a_settle_returns_to_the_queue_wakes_one(
        self, bench: Bench, outcome: str, after: float
    ) -> None:
        bench.publish()
        lease = bench.claim_one()
        put_to_sleep(bench, "b", "a")
        bench.settle(lease, outcome, after=after)  # type: ignore[arg-type]
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2")
    @pytest.mark.parametrize("outcome", ["done", "dead", "drop"])
    def test_a_message_that_a_settle_ends_wakes_no_sleeper(self, bench: Bench, outcome: str) -> None:
        bench.publish()
        lease = bench.claim_one()
        put_to_sleep(bench, "a")
        bench.settle(lease, outcome)  # type: ignore[arg-type]
        assert bench.woken == {}

    @pytest.mark.promise("WAKE-2", "PUB-6")
    def test_a_generation_that_takes_over_wakes_one(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        put_to_sleep(bench, "b", "a")
        bench.publish(key="k", on_conflict="replace")
        assert bench.woken == {}
        bench.settle(lease)
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2", "DEAD-2")
    def test_a_redrive_wakes_as_many_as_it_moved(self, bench: Bench) -> None:
        bench.publish_count(2)
        for lease in bench.claim(2):
            bench.settle(lease, "dead")
        put_to_sleep(bench, "c", "b", "a")
        bench.redrive()
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("WAKE-2", "QUEUE-3")
    def test_a_settle_that_frees_a_slot_wakes_one_for_it(self, bench: Bench) -> None:
        bench.configure(max_running=1)
        bench.publish_count(3)
        lease = bench.claim_one()
        put_to_sleep(bench, "b", "a")
        bench.settle(lease)
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("QUEUE-1")
    def test_a_paused_queue_wakes_no_sleeper_and_resume_wakes_for_its_backlog(self, bench: Bench) -> None:
        bench.pause()
        put_to_sleep(bench, "c", "b", "a")
        bench.publish_count(2)
        assert bench.woken == {}
        assert bench.resume()
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("QUEUE-1")
    def test_a_resume_that_changes_nothing_wakes_no_sleeper(self, bench: Bench) -> None:
        bench.configure(max_running=1)
        bench.publish_count(2)
        bench.claim_one()
        put_to_sleep(bench, "a")
        assert not bench.resume()
        assert bench.woken == {}

    @pytest.mark.promise("QUEUE-1")
    def test_resume_wakes_one_for_the_timers(self, bench: Bench) -> None:
        bench.pause()
        bench.publish(delay=60)
        put_to_sleep(bench, "b", "a")
        bench.resume()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("QUEUE-1")
    def test_resume_wakes_one_more_for_the_timers_beside_the_backlog(self, bench: Bench) -> None:
        bench.pause()
        bench.publish()
        bench.publish(delay=60)
        put_to_sleep(bench, "c", "b", "a")
        bench.resume()
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("QUEUE-2")
    def test_a_changed_setting_wakes_for_the_backlog_and_one_more_for_the_timers(self, bench: Bench) -> None:
        bench.configure(max_running=1)
        bench.publish_count(2)
        bench.publish(delay=60)
        bench.claim_one()
        put_to_sleep(bench, "c", "b", "a")
        bench.configure(max_running=10)
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("QUEUE-1", "LEASE-4")
    def test_resume_wakes_one_for_the_end_of_a_lease(self, bench: Bench) -> None:
        bench.publish()
        bench.claim_one()
        bench.pause()
        put_to_sleep(bench, "b", "a")
        bench.resume()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("QUEUE-2", "QUEUE-3")
    def test_a_raised_limit_wakes_the_workers_that_waited_for_it(self, bench: Bench) -> None:
        bench.configure(max_running=1)
        bench.publish_count(3)
        bench.claim_one()
        put_to_sleep(bench, "c", "b", "a")
        bench.configure(max_running=10)
        assert bench.woken == {"orders": ["a", "b"]}

    @pytest.mark.promise("WAKE-2")
    def test_sleepers_of_one_queue_are_not_woken_for_another(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.publish(queue="billing")
        assert "orders" not in bench.woken
        assert bench.stats().sleepers == 1

    @pytest.mark.promise("CHAIN-2", "WAKE-2")
    def test_a_continuation_wakes_a_sleeper_of_its_target(self, bench: Bench) -> None:
        bench.claim(queue="billing", sleeper="clerk")
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing")])
        bench.deliver_outgoing()
        assert bench.woken == {"billing": ["clerk"]}

    @pytest.mark.promise("CHAIN-2", "WAKE-2")
    @pytest.mark.parametrize("delay", [0, 60, 61, 59])
    def test_a_continuation_wakes_no_more_sleepers_for_a_timer_that_its_target_has(
        self, bench: Bench, delay: int
    ) -> None:
        bench.publish(queue="billing", delay=60)
        for name in ("clerk", "other clerk"):
            assert bench.claim(queue="billing", sleeper=name) == []
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing", delay=delay)])
        bench.deliver_outgoing()
        assert len(bench.woken.get("billing", [])) == (1 if delay < 60 else 0)


class TestPollSoon:
    """No sleeper is woken for a few messages while a worker has promised to poll soon."""

    @pytest.mark.promise("WAKE-2")
    def test_no_sleeper_is_woken_for_a_few_messages_while_a_worker_polls_again_soon(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.publish()
        bench.claim(10, poll_soon_ms=20)
        bench.publish_count(2)
        assert bench.woken == {}
        bench.after(0.02)
        assert len(bench.claim(10, sleeper="b")) == 2
        bench.publish()
        assert bench.woken == {"orders": ["b"]}

    @pytest.mark.promise("WAKE-2")
    def test_many_messages_wake_sleepers_though_a_worker_polls_again_soon(self, bench: Bench) -> None:
        put_to_sleep(bench, "a", "b")
        bench.claim(10, poll_soon_ms=20)
        bench.publish_drafts([bench.draft() for _ in range(POLL_SOON_MESSAGES_MAX + 1)])
        assert bench.woken == {"orders": ["b", "a"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_claim_that_reached_its_limit_does_not_count_as_polling_soon(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.claim(10, poll_soon_ms=20)
        bench.publish_count(2)
        assert len(bench.claim(1, poll_soon_ms=20)) == 1
        bench.publish()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_promise_to_poll_soon_can_be_withdrawn(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.claim(10, poll_soon_ms=50)
        bench.claim(10, poll_soon_ms=0)
        bench.publish()
        assert bench.woken == {"orders": ["a"]}

    @pytest.mark.promise("WAKE-2")
    def test_a_promise_to_poll_soon_is_short_and_registers_no_sleeper(self, bench: Bench) -> None:
        put_to_sleep(bench, "a")
        bench.claim(10, poll_soon_ms=60_000)
        assert bench.stats().sleepers == 1
        bench.after(POLL_SOON_MS_MAX / 1000)
        bench.publish()
        assert bench.woken == {"orders": ["a"]}
