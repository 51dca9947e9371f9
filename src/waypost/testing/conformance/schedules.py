"""Schedules: saved by compare-and-set, each instant fired once. Leaders: one at a time. Promotion: as claims do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from waypost.errors import QueueFull
from waypost.identity import Operation
from waypost.policy import PROMOTE_MAX
from waypost.store.port import AfterRun, Draft, FireStep
from waypost.testing.bench import QUEUE, Bench
from waypost.values import Fired, Promoted, Saved, StoredSchedule

KEY = "rollup::every:60000"


def save(
    bench: Bench,
    key: str = KEY,
    *,
    version: str = "v1",
    seen: StoredSchedule | None = None,
    queue: str = QUEUE,
    **more: Any,
) -> Saved:
    """Save a schedule that fires in a minute, over the version that was read."""
    given: dict[str, Any] = {
        "spec": b"\0spec\xff", "paused": False, "next_ms": bench.now_ms + 60_000, "due_ms": bench.now_ms + 60_000,
    } | more  # fmt: skip
    schedule = StoredSchedule(key, version, **given)
    seen_version, seen_next = (None, None) if seen is None else (seen.version, seen.next_ms)
    return bench.run(bench.store.save_schedule(queue, schedule, version=seen_version, next_ms=seen_next))


def saved(bench: Bench, key: str = KEY, **more: Any) -> StoredSchedule:
    """Save a schedule, and return it as listed."""
    found = save(bench, key, **more).schedule
    assert found is not None
    return found


def listed(bench: Bench, queue: str = QUEUE) -> list[StoredSchedule]:
    return bench.run(bench.store.schedules(queue)).schedules


def fire(
    bench: Bench,
    seen: StoredSchedule,
    drafts: Sequence[Draft] | None = None,
    *,
    operation: Operation | None = None,
    valid_ms: int = 1_000_000,
    **more: Any,
) -> Fired:
    """Fire the instant that was read, with one message by default; the next one is a minute later."""
    assert seen.next_ms is not None
    given: dict[str, Any] = {
        "key": seen.key, "version": seen.version, "expected_ms": seen.next_ms, "last_due_ms": seen.due_ms,
        "valid_until_ms": (seen.due_ms or 0) + valid_ms, "last_ms": seen.next_ms, "missed": 0,
        "next_ms": seen.next_ms + 60_000, "due_ms": seen.next_ms + 60_000,
    } | more  # fmt: skip
    chosen = [bench.draft()] if drafts is None else drafts
    call = bench.store.fire_schedule(QUEUE, FireStep(**given), chosen, operation or bench.operation())
    woken = bench.run(call)
    bench.woken, bench.also = dict(woken.wake), woken.also
    return woken.result


def promote(bench: Bench) -> Promoted:
    bench.operation()
    woken = bench.run(bench.store.promote(QUEUE))
    bench.woken, bench.also = dict(woken.wake), woken.also
    return woken.result


class TestSaving:
    """A schedule is written only over the version that the caller read."""

    @pytest.mark.promise("CRON-5")
    def test_a_schedule_comes_back_as_it_was_saved(self, bench: Bench) -> None:
        schedule = saved(bench, due_ms=bench.now_ms + 61_234)
        assert listed(bench) == [schedule]
        assert (schedule.spec, schedule.version, schedule.due_ms) == (b"\0spec\xff", "v1", bench.now_ms + 61_234)
        assert (schedule.fires, schedule.missed, schedule.last_ms) == (0, 0, None)

    @pytest.mark.promise("CRON-7")
    def test_a_listing_is_in_the_order_of_the_keys_and_has_the_stores_time(self, bench: Bench) -> None:
        for key in ("b", "ä", "a"):
            save(bench, key)
        listing = bench.run(bench.store.schedules(QUEUE))
        assert [schedule.key for schedule in listing.schedules] == ["a", "b", "ä"]
        assert listing.at_ms == bench.now_ms
        assert listed(bench, "elsewhere") == []

    @pytest.mark.promise("CRON-5")
    def test_of_two_clients_that_saw_no_schedule_one_saves_it(self, bench: Bench) -> None:
        first = saved(bench)
        second = save(bench, version="v2")
        assert (second.status, second.schedule) == ("conflict", first)
        assert listed(bench) == [first]

    @pytest.mark.promise("CRON-5")
    def test_a_save_over_another_version_or_another_next_fire_changes_nothing(self, bench: Bench) -> None:
        first = saved(bench)
        second = saved(bench, version="v2", seen=first)
        assert save(bench, version="v3", seen=first).status == "conflict"
        bench.after(60)
        assert fire(bench, second).status == "fired"
        assert save(bench, version="v3", seen=second).status == "conflict"
        assert listed(bench)[0].version == "v2"

    @pytest.mark.promise("CRON-5")
    def test_a_save_keeps_what_was_counted(self, bench: Bench) -> None:
        first = saved(bench)
        bench.after(60)
        fired = fire(bench, first, missed=3).schedule
        assert fired is not None
        changed = saved(bench, version="v2", seen=fired, spec=b"other", paused=True)
        assert (changed.fires, changed.missed, changed.last_ms) == (1, 3, first.next_ms)
        assert (changed.spec, changed.paused) == (b"other", True)

    @pytest.mark.promise("CRON-7")
    def test_a_removed_schedule_is_gone_and_a_second_removal_reports_it(self, bench: Bench) -> None:
        seen = saved(bench)
        assert bench.run(bench.store.remove_schedule(QUEUE, KEY)) is True
        assert bench.run(bench.store.remove_schedule(QUEUE, KEY)) is False
        bench.after(60)
        assert fire(bench, seen).schedule is None
        assert bench.ids("ready") == []

    @pytest.mark.promise("CRON-7")
    def test_a_removal_touches_no_other_schedule(self, bench: Bench) -> None:
        places = [(queue, key) for queue in (QUEUE, "mails") for key in (KEY, "another")]
        for queue, key in places:
            stored = StoredSchedule(key, "v1", b"a rule", False, bench.now_ms + 60_000, bench.now_ms + 60_000)
            bench.run(bench.store.save_schedule(queue, stored, version=None, next_ms=None))
        assert bench.run(bench.store.remove_schedule(QUEUE, KEY)) is True
        left = {
            (queue, found.key)
            for queue in (QUEUE, "mails")
            for found in bench.run(bench.store.schedules(queue)).schedules
        }
        assert left == {*places} - {(QUEUE, KEY)}

    @pytest.mark.promise("CRON-6")
    def test_a_save_changes_the_change_number_of_its_queue(self, bench: Bench) -> None:
        def scheduled() -> dict[str, int]:
            bench.run(bench.store.schedules_changed(QUEUE))
            return bench.run(bench.store.scheduled())

        seen = saved(bench)
        before = scheduled()[QUEUE]
        save(bench, version="v2", seen=seen)
        changed = scheduled()[QUEUE]
        assert changed != before
        bench.run(bench.store.remove_schedule(QUEUE, KEY))
        bench.after(0.001)
        save(bench, version="v3")
        assert scheduled()[QUEUE] not in (before, changed)

    @pytest.mark.promise("CRON-5", "STORE-6")
    def test_schedules_of_queues_and_namespaces_are_independent(self, bench: Bench) -> None:
        save(bench)
        save(bench, queue="elsewhere", version="other")
        stranger = bench.another_client(namespace=f"{bench.namespace}x")
        assert listed(stranger) == []
        assert listed(bench, "elsewhere")[0].version == "other"


class TestFires:
    """The messages of a fire and the schedule's next state are written in one step, once."""

    @pytest.mark.promise("CRON-6")
    def test_a_fire_publishes_and_moves_on(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(60)
        drafts = [bench.draft(b"one"), bench.draft(b"two")]
        fired = fire(bench, seen, drafts, missed=2)
        assert fired.status == "fired"
        assert fired.at_ms == bench.now_ms
        assert fired.schedule is not None
        assert (fired.schedule.next_ms, fired.schedule.fires, fired.schedule.missed) == (bench.now_ms + 60_000, 2, 2)
        assert fired.schedule.last_ms == seen.next_ms
        assert listed(bench) == [fired.schedule]
        assert [lease.id for lease in bench.claim(5)] == [draft.id for draft in drafts]
        bench.check_invariants()

    @pytest.mark.promise("CRON-6")
    def test_of_two_schedulers_that_saw_the_same_instant_one_fires(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(60)
        first = fire(bench, seen)
        second = fire(bench, seen)
        assert (first.status, second.status) == ("fired", "conflict")
        assert second.schedule == first.schedule
        assert len(bench.ids("ready")) == 1

    @pytest.mark.promise("CRON-6")
    def test_nothing_fires_early_by_the_clock_of_the_store(self, bench: Bench) -> None:
        seen = saved(bench, due_ms=bench.now_ms + 61_000)
        bench.after(60.999)
        assert fire(bench, seen).status == "early"
        bench.after(0.001)
        assert fire(bench, seen).status == "fired"

    @pytest.mark.promise("CRON-4", "CRON-6")
    def test_a_decision_that_is_too_old_changes_nothing(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(62)
        stale = fire(bench, seen, valid_ms=1_999)
        assert (stale.status, stale.schedule) == ("stale", seen)
        assert fire(bench, seen, valid_ms=2_000).status == "fired"

    @pytest.mark.promise("CRON-6")
    def test_a_changed_rule_and_a_paused_schedule_do_not_fire(self, bench: Bench) -> None:
        seen = saved(bench)
        paused = saved(bench, version="v2", seen=seen, paused=True)
        bench.after(60)
        assert fire(bench, seen).status == "conflict"
        assert fire(bench, paused).status == "conflict"
        assert bench.ids("ready") == []

    @pytest.mark.promise("CRON-6")
    def test_a_repeat_of_a_fire_gets_the_first_answer(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(60)
        operation, drafts = bench.operation(), [bench.draft()]
        first = fire(bench, seen, drafts, operation=operation)
        again = fire(bench, seen, drafts, operation=operation)
        assert (first.status, again.status, again.at_ms) == ("fired", "fired", first.at_ms)
        assert len(bench.ids("ready")) == 1

    @pytest.mark.promise("CRON-4")
    def test_a_step_may_only_count_what_was_missed(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(600)
        fired = fire(bench, seen, [], missed=9, last_ms=None)
        assert fired.status == "fired"
        assert fired.schedule is not None
        assert (fired.schedule.fires, fired.schedule.missed, fired.schedule.last_ms) == (0, 9, None)
        assert bench.ids("ready") == []

    @pytest.mark.promise("CRON-6")
    def test_there_is_no_next_fire_after_the_last_one(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(60)
        fired = fire(bench, seen, next_ms=None, due_ms=None)
        assert fired.schedule is not None
        assert (fired.schedule.next_ms, fired.schedule.due_ms) == (None, None)
        resaved = save(bench, version="v2", seen=fired.schedule)
        assert resaved.status == "saved"

    @pytest.mark.promise("CRON-4", "CRON-6")
    def test_a_step_may_fire_the_first_of_several_due_instants(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(200)
        first = fire(bench, seen)
        assert (first.status, fire(bench, seen).status) == ("fired", "conflict")
        assert first.schedule is not None
        assert first.schedule.due_ms == (seen.due_ms or 0) + 60_000 < bench.now_ms
        assert fire(bench, first.schedule).status == "fired"
        assert len(bench.ids("ready")) == 2

    @pytest.mark.promise("CRON-6", "PUB-7")
    def test_a_full_queue_delays_the_fire_and_loses_nothing(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        bench.publish()
        seen = saved(bench)
        bench.after(60)
        with pytest.raises(QueueFull):
            fire(bench, seen)
        assert listed(bench) == [seen]
        bench.settle(bench.claim_one())
        assert fire(bench, seen).status == "fired"

    @pytest.mark.promise("CRON-6", "PUB-7")
    def test_a_fire_drops_the_oldest_under_drop_oldest_and_journals_it(self, bench: Bench) -> None:
        bench.configure(max_pending=1, overload="drop_oldest")
        old = bench.publish()
        seen = saved(bench)
        bench.after(60)
        assert fire(bench, seen).status == "fired"
        assert [event.message_id for event in bench.events("dropped")] == [old.id]
        assert bench.ledger().dropped == 1

    @pytest.mark.promise("CRON-6", "QUEUE-1")
    def test_a_paused_queue_lets_fires_gather(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.pause()
        bench.after(60)
        assert fire(bench, seen).status == "fired"
        assert bench.claim() == []
        bench.resume()
        assert len(bench.claim()) == 1

    @pytest.mark.promise("CRON-7", "SEE-3")
    def test_the_journal_names_the_schedule(self, bench: Bench) -> None:
        bench.configure(journal="full")
        other = bench.publish(priority=7)
        seen = saved(bench)
        bench.after(60)
        drafts = [bench.draft(b"x", priority=3, group="shop"), bench.draft()]
        fire(bench, seen, drafts)
        bench.run(bench.store.trigger_schedule(QUEUE, KEY, bench.draft(), bench.operation()))
        published_events = {event.message_id: event for event in bench.events("published")}
        assert published_events[other.id].schedule is None
        assert [published_events[draft.id].schedule for draft in drafts] == [KEY, KEY]
        assert (published_events[drafts[0].id].group, published_events[drafts[0].id].priority) == ("shop", 3)
        assert published_events[drafts[0].id].body == drafts[0].envelope
        assert [event.schedule for event in published_events.values()].count(KEY) == 3

    @pytest.mark.promise("CRON-6", "WAKE-2")
    def test_a_fire_wakes_as_many_as_it_publishes(self, bench: Bench) -> None:
        for name in ("a", "b", "c"):
            bench.claim(sleeper=name)
        seen = saved(bench)
        bench.after(30)
        for name in ("a", "b", "c"):
            bench.claim(sleeper=name)
        bench.after(30)
        fire(bench, seen, [bench.draft(), bench.draft()])
        assert len(bench.woken[QUEUE]) == 2

    @pytest.mark.promise("PUB-10", "CRON-7")
    def test_the_expiry_of_a_fire_counts_from_when_it_is_made(self, bench: Bench) -> None:
        seen = saved(bench)
        bench.after(100)
        late, plain, triggered = bench.draft(expires=30), bench.draft(), bench.draft(expires=5)
        fire(bench, seen, [late, plain])
        bench.run(bench.store.trigger_schedule(QUEUE, KEY, triggered, bench.operation()))
        expiries = [bench.stored(one.id).expires_ms for one in (late, plain, triggered)]
        assert expiries == [bench.now_ms + 30_000, None, bench.now_ms + 5_000]
        bench.after(30)
        assert [lease.id for lease in bench.claim(5)] == [plain.id]
        assert bench.ledger().dropped == 2
        bench.check_invariants()

    @pytest.mark.promise("CRON-7")
    def test_a_trigger_publishes_now_and_moves_nothing(self, bench: Bench) -> None:
        seen = saved(bench)
        operation, draft = bench.operation(), bench.draft()
        for _ in range(2):
            published = bench.run(bench.store.trigger_schedule(QUEUE, KEY, draft, operation)).result
            assert published is not None
            assert (published.id, published.status) == (draft.id, "queued")
        assert bench.ids("ready") == [draft.id]
        assert listed(bench) == [seen]

    @pytest.mark.promise("CRON-7")
    def test_an_unknown_schedule_cannot_be_triggered(self, bench: Bench) -> None:
        assert bench.run(bench.store.trigger_schedule(QUEUE, KEY, bench.draft(), bench.operation())).result is None
        assert bench.ids("ready") == []


class TestScheduleState:
    """What schedulers remember of a schedule is written with its fires and its saves, and not read by the store."""

    @pytest.mark.promise("CRON-8")
    def test_a_state_is_kept_by_fires_that_bring_none_and_written_by_saves(self, bench: Bench) -> None:
        seen = saved(bench, state=b"\0one\xff")
        assert (seen.state, listed(bench)) == (b"\0one\xff", [seen])
        bench.after(60)
        kept = fire(bench, seen).schedule
        assert kept is not None
        assert (kept.state, kept.spec, kept.version) == (b"\0one\xff", b"\0spec\xff", "v1")
        bench.after(60)
        written = fire(bench, kept, state=b"a longer state than before").schedule
        assert written is not None
        assert (written.state, written.spec) == (b"a longer state than before", b"\0spec\xff")
        changed = saved(bench, version="v2", seen=written, state=b"", paused=True)
        assert (changed.state, changed.paused, changed.spec, changed.fires) == (b"", True, b"\0spec\xff", 2)
        assert listed(bench) == [changed]

    @pytest.mark.promise("CRON-8")
    def test_of_two_steps_that_do_not_move_the_next_fire_one_happens(self, bench: Bench) -> None:
        seen = saved(bench)
        drafts = [bench.draft(), bench.draft()]
        by_hand: dict[str, Any] = {
            "last_due_ms": 0, "last_ms": None, "next_ms": seen.next_ms, "due_ms": seen.due_ms, "by_hand": True,
        }  # fmt: skip
        first = fire(bench, seen, drafts, new_version="version 2", state=b"s", **by_hand)
        assert first.status == "fired"
        assert first.schedule is not None
        assert (first.schedule.version, first.schedule.state) == ("version 2", b"s")
        assert (first.schedule.next_ms, first.schedule.due_ms) == (seen.next_ms, seen.due_ms)
        assert (first.schedule.fires, first.schedule.last_ms, first.schedule.spec) == (0, None, b"\0spec\xff")
        again = fire(bench, seen, new_version="v3", state=b"t", **by_hand)
        assert (again.status, again.schedule) == ("conflict", first.schedule)
        assert bench.ids("ready") == [draft.id for draft in drafts]
        assert {event.schedule for event in bench.events("published")} == {KEY}
        bench.check_invariants()

    @pytest.mark.promise("CRON-8")
    def test_a_step_by_hand_publishes_for_a_paused_schedule_and_for_one_that_has_ended(self, bench: Bench) -> None:
        paused = saved(bench, paused=True)
        by_hand: dict[str, Any] = {"last_due_ms": 0, "last_ms": None, "by_hand": True}
        done = fire(
            bench, paused, new_version="v2", state=b"s", next_ms=paused.next_ms, due_ms=paused.due_ms, **by_hand
        )
        assert done.status == "fired"
        assert done.schedule is not None
        assert done.schedule.paused
        ended = saved(bench, "ended", next_ms=None, due_ms=None)
        step = FireStep(ended.key, ended.version, None, 0, 2**50, None, 0, None, None, b"s", "v2", by_hand=True)
        call = bench.store.fire_schedule(QUEUE, step, [bench.draft()], bench.operation())
        result = bench.run(call).result
        assert result.status == "fired"
        assert result.schedule is not None
        assert (result.schedule.next_ms, result.schedule.state) == (None, b"s")
        assert len(bench.ids("ready")) == 2


class TestOverlap:
    """A fire that must come after a run: the run has ended when its message is final."""

    @staticmethod
    def run_then(bench: Bench) -> tuple[StoredSchedule, Draft]:
        """Fire once; return the schedule, due again, and the draft of its run."""
        run, seen = bench.draft(), saved(bench)
        bench.after(60)
        fired = fire(bench, seen, [run]).schedule
        assert fired is not None
        bench.after(60)
        return fired, run

    @staticmethod
    def after(run: Draft, **more: Any) -> AfterRun:
        given: dict[str, Any] = {"state": b"skipped", "skipped": 2, "instant_ms": 1_234_567} | more
        return AfterRun(run.id, **given)

    @pytest.mark.promise("CRON-8", "SEE-3")
    def test_a_fire_is_skipped_while_its_run_waits_and_journalled_with_the_reason(self, bench: Bench) -> None:
        seen, run = self.run_then(bench)
        skipped = fire(bench, seen, after_run=self.after(run), state=b"fired", missed=1)
        assert skipped.status == "skipped"
        assert skipped.schedule is not None
        assert (skipped.schedule.next_ms, skipped.schedule.due_ms) == (bench.now_ms + 60_000, bench.now_ms + 60_000)
        assert (skipped.schedule.fires, skipped.schedule.missed) == (1, 1)
        assert (skipped.schedule.last_ms, skipped.schedule.state) == (seen.last_ms, b"skipped")
        assert listed(bench) == [skipped.schedule]
        assert bench.ids("ready") == [run.id]
        (event,) = bench.events("skipped")
        assert (event.schedule, event.cause, event.reason) == (KEY, "overlap", run.id)
        assert (event.due_ms, event.size, event.message_id) == (1_234_567, 2, None)
        bench.check_invariants()

    @pytest.mark.promise("CRON-8")
    def test_without_a_state_to_go_on_with_nothing_changes_while_it_runs(self, bench: Bench) -> None:
        seen, run = self.run_then(bench)
        waiting = fire(bench, seen, after_run=self.after(run, state=None), state=b"fired", new_version="v9")
        assert (waiting.status, waiting.schedule) == ("running", seen)
        bench.settle(bench.claim_one())
        done = fire(bench, seen, after_run=self.after(run, state=None), state=b"fired", new_version="v9")
        assert done.status == "fired"
        assert done.schedule is not None
        assert (done.schedule.state, done.schedule.version) == (b"fired", "v9")
        assert bench.events("skipped") == []

    @pytest.mark.promise("CRON-8")
    def test_a_fire_that_is_kept_for_later_is_not_journalled_as_skipped(self, bench: Bench) -> None:
        seen, run = self.run_then(bench)
        kept = fire(bench, seen, after_run=self.after(run, skipped=0))
        assert (kept.status, bench.events("skipped")) == ("skipped", [])
        assert kept.schedule is not None
        assert kept.schedule.state == b"skipped"

    @pytest.mark.promise("CRON-8", "PUB-10")
    @pytest.mark.parametrize("running", [False, True])
    def test_a_run_that_has_lapsed_has_ended_before_any_step_ends_it(self, bench: Bench, running: bool) -> None:
        run, seen = bench.draft(expires=30), saved(bench)
        bench.configure(lease=600)
        bench.after(60)
        fired = fire(bench, seen, [run]).schedule
        assert fired is not None
        if running:
            bench.claim_one()
        bench.after(60)
        # A claimed one does not lapse.
        expected = "skipped" if running else "fired"
        assert fire(bench, fired, after_run=self.after(run), state=b"fired").status == expected
        bench.check_invariants()

    @pytest.mark.promise("CRON-8")
    @pytest.mark.parametrize("ended", ["done", "dead", "cancelled"])
    def test_a_run_has_ended_when_its_message_is_final(self, bench: Bench, ended: str) -> None:
        seen, run = self.run_then(bench)
        if ended == "cancelled":
            bench.cancel(run.id)
        elif ended == "done":
            bench.settle(bench.claim_one())
        else:
            bench.settle(bench.claim_one(), "dead", reason="rejected")
        assert fire(bench, seen, after_run=self.after(run), state=b"fired").status == "fired"

    @pytest.mark.promise("CRON-8")
    @pytest.mark.parametrize("state", ["leased", "retry", "redriven"])
    def test_a_run_that_is_handled_waits_for_a_retry_or_was_redriven_has_not_ended(
        self, bench: Bench, state: str
    ) -> None:
        seen, run = self.run_then(bench)
        lease = bench.claim_one()
        if state == "retry":
            bench.settle(lease, "retry", after=30)
        elif state == "redriven":
            bench.settle(lease, "dead", reason="rejected")
            bench.redrive()
        assert fire(bench, seen, after_run=self.after(run), state=b"fired").status == "skipped"

    @pytest.mark.promise("CRON-8", "CRON-6")
    def test_a_repeat_of_a_skipped_fire_gets_the_first_answer(self, bench: Bench) -> None:
        seen, run = self.run_then(bench)
        operation, drafts = bench.operation(), [bench.draft()]
        first = fire(bench, seen, drafts, operation=operation, after_run=self.after(run))
        bench.settle(bench.claim_one())
        again = fire(bench, seen, drafts, operation=operation, after_run=self.after(run))
        assert (first.status, again.status, again.at_ms) == ("skipped", "skipped", first.at_ms)
        assert bench.ids("ready") == []
        assert len(bench.events("skipped")) == 1


class TestLeaders:
    """One leader in each role, until its lease ends or it resigns."""

    @pytest.mark.promise("TIMER-4")
    def test_the_first_leads_and_the_second_learns_for_how_long(self, bench: Bench) -> None:
        first = bench.run(bench.store.elect("scheduler", "a", 10_000))
        assert (first.leader, first.token, first.remaining_ms) == ("a", 1, 10_000)
        bench.after(4)
        second = bench.run(bench.store.elect("scheduler", "b", 10_000))
        assert (second.leader, second.token, second.remaining_ms) == ("a", 1, 6_000)
        assert bench.run(bench.store.elect("promoter", "b", 10_000)).leader == "b"

    @pytest.mark.promise("TIMER-4")
    def test_a_leader_goes_on_under_its_token_and_another_gets_a_greater_one(self, bench: Bench) -> None:
        bench.run(bench.store.elect("scheduler", "a", 10_000))
        bench.after(9.999)
        assert bench.run(bench.store.elect("scheduler", "a", 10_000)).token == 1
        bench.after(10)
        election = bench.run(bench.store.elect("scheduler", "b", 10_000))
        assert (election.leader, election.token) == ("b", 2)
        assert bench.run(bench.store.elect("scheduler", "a", 10_000)).leader == "b"

    @pytest.mark.promise("TIMER-4")
    def test_a_leader_whose_lease_ended_leads_anew(self, bench: Bench) -> None:
        bench.run(bench.store.elect("scheduler", "a", 10_000))
        bench.after(10)
        assert bench.run(bench.store.resign("scheduler", "a")) is False
        assert bench.run(bench.store.elect("scheduler", "a", 10_000)).token == 2

    @pytest.mark.promise("TIMER-4")
    def test_a_leader_that_resigns_is_followed_at_once(self, bench: Bench) -> None:
        bench.run(bench.store.elect("scheduler", "a", 10_000))
        assert bench.run(bench.store.resign("scheduler", "b")) is False
        assert bench.run(bench.store.resign("scheduler", "a")) is True
        follower = bench.run(bench.store.elect("scheduler", "b", 10_000))
        assert (follower.leader, follower.token) == ("b", 2)


class TestPromotion:
    """Timers that are due become ready without a claim."""

    @pytest.mark.promise("TIMER-4")
    def test_a_promotion_returns_the_number_lag_and_rest_of_due_timers(self, bench: Bench) -> None:
        late, soon = bench.publish(delay=10), bench.publish(delay=4)
        far = bench.publish(delay=60)
        bench.after(12)
        assert promote(bench) == Promoted(2, 1, 8_000, 48_000)
        assert bench.ids("ready") == [soon.id, late.id]
        assert bench.ids("delayed") == [far.id]
        assert [event.cause for event in bench.events("promoted")] == ["due", "due"]
        assert promote(bench) == Promoted(0, 1, 0, 48_000)
        bench.check_invariants()

    @pytest.mark.promise("TIMER-4", "WAKE-2")
    def test_a_promotion_wakes_as_many_as_it_made_ready(self, bench: Bench) -> None:
        bench.publish_count(2, delay=10)
        for name in ("a", "b", "c"):
            bench.claim(sleeper=name)
        bench.after(10)
        promote(bench)
        assert len(bench.woken[QUEUE]) == 2

    @pytest.mark.promise("TIMER-4", "QUEUE-1")
    def test_a_paused_queue_and_an_unknown_one_promote_nothing(self, bench: Bench) -> None:
        assert bench.run(bench.store.promote("nowhere")).result == Promoted(0, 0, 0, None)
        assert bench.run(bench.store.remove_schedule("nowhere", KEY)) is False
        assert "nowhere" not in bench.run(bench.store.queues())
        bench.publish(delay=1)
        bench.pause()
        bench.after(3)
        assert promote(bench) == Promoted(0, 1, 2_000, 0)
        assert bench.woken == {}

    @pytest.mark.promise("TIMER-4")
    def test_promotions_are_bounded(self, bench: Bench) -> None:
        bench.publish_count(PROMOTE_MAX + 3, delay=1)
        bench.after(1)
        assert promote(bench).promoted == PROMOTE_MAX
        assert promote(bench).promoted == 3
