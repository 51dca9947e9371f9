"""Backfill: the instants of a past interval are published once, and those that fired are skipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.schedule.test_command import run_command
from tests.schedule.test_scheduler import QUEUE, World, thaw, world_of
from tests.worker.harness import Harness
from waypost import Backfilled, CatchUp, Waypost
from waypost.errors import InvalidInput, InvalidSchedule, InvalidTime, QueueFull, StoreFailed, UnknownSchedule
from waypost.identity import Session
from waypost.operations import schedules as operations
from waypost.operations.backfill import backfill
from waypost.operations.flow import Sleep, drive
from waypost.policy import CHUNK_MESSAGES_MAX, Overlap
from waypost.schedule.rule import Spec, pack_spec
from waypost.schedule.scheduler import RUN_POLL_SECONDS_MAX
from waypost.schedule.state import (
    RANGES_MAX,
    RULES_MAX,
    FiredInstants,
    State,
    add_range,
    after_change,
    pack_state,
    read_state,
)
from waypost.store.memory import MemoryStore
from waypost.store.port import Store, Target
from waypost.store.sqlite import SqliteStore
from waypost.testing.clock import ClockTime, ManualClock
from waypost.times import to_datetime
from waypost.values import StoredSchedule


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    store = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "past.db", clock=clock)
    world = world_of(cast(Store, store), clock)
    yield world
    world.executor.close()


def fill(world: World, start: float, end: float, name: str = "rollup", **options: Any) -> Backfilled:
    """Backfill an interval, in seconds after the start of the world."""
    begin, until = (to_datetime(world.start_ms + round(seconds * 1000)) for seconds in (start, end))
    return drive(world.executor, backfill(world.new_context("filler"), name, None, begin, until, **options))


def counts(done: Backfilled) -> tuple[int, int, int]:
    return done.published, done.skipped, done.left


@pytest.mark.promise("CRON-8")
def test_the_past_of_a_new_schedule_is_published_once(harness: Harness) -> None:
    harness.save_schedule("rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", body={"kind": "daily"})
    start, end = datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)
    planned = harness.backfill("rollup", start, end, dry_run=True)
    assert (planned.published, planned.skipped, planned.left, planned.dry_run) == (5, 0, 0, True)
    assert harness.ledger("reports").published == 0
    steps: list[int] = []
    done = harness.backfill("rollup", start, end, queue="reports", progress=steps.append)
    assert (counts(done), done.key, steps) == ((5, 0, 0), "rollup::cron:0 9 * * *:Europe/Madrid", [5])
    # Clocks go forward on 29 March: nine o'clock in Madrid is an hour earlier in UTC from then on.
    assert [message.instant.hour for message in harness.messages("reports")] == [8, 8, 7, 7, 7]
    assert counts(harness.backfill("rollup", start, end)) == (0, 5, 0)
    assert counts(harness.backfill("rollup", start - timedelta(days=2), end + timedelta(days=1))) == (3, 5, 0)
    assert harness.ledger("reports").published == 8
    (schedule,) = harness.schedules()
    assert (schedule.fires, schedule.backfilled, schedule.last_fire) == (0, 8, None)


@pytest.mark.promise("CRON-8", "CRON-4")
def test_instants_that_fired_are_skipped_and_missed_ones_are_published(world: World) -> None:
    world.save(every=10.0, missed="skip", grace=5)
    scheduler = world.scheduler(ttl_ms=10_000_000)
    for _ in range(3):
        world.clock.advance(10)
        world.tick(scheduler)
    world.clock.advance(40)  # 40, 50 and 60 are missed
    world.tick(scheduler)
    world.clock.advance(18)  # 80 is missed, and nothing fires in its place
    world.tick(scheduler)
    world.clock.advance(2)
    world.tick(scheduler)
    assert world.instants() == [10_000, 20_000, 30_000, 70_000, 90_000]
    assert counts(fill(world, 1, 90)) == (4, 4, 0)
    assert world.instants()[5:] == [40_000, 50_000, 60_000, 80_000]
    assert counts(fill(world, 1, 90)) == (0, 8, 0)
    world.clock.advance(10)
    assert world.tick(scheduler).fires == 1
    assert world.stored().fires == 6


@pytest.mark.promise("CRON-8")
def test_what_the_scheduler_has_yet_to_fire_is_left_to_it(world: World) -> None:
    world.save(every=10.0, missed=CatchUp(10))
    world.clock.advance(25)
    assert counts(fill(world, -20, 25)) == (3, 0, 2)
    assert world.instants() == [-20_000, -10_000, 0]
    world.tick(world.scheduler())
    assert world.instants()[3:] == [10_000, 20_000]
    assert counts(fill(world, -20, 25)) == (0, 5, 0)


@pytest.mark.promise("CRON-8", "CRON-7")
def test_the_instants_of_a_pause_can_be_published_during_it_and_after_it(world: World) -> None:
    world.save(every=10.0)
    scheduler = world.scheduler(ttl_ms=10_000_000)
    world.clock.advance(10)
    world.tick(scheduler)
    drive(world.executor, operations.pause(world.context, "rollup", None))
    world.clock.advance(25)
    assert counts(fill(world, 0, 31)) == (3, 1, 0)
    assert world.instants() == [10_000, 0, 20_000, 30_000]
    world.clock.advance(20)
    drive(world.executor, operations.resume(world.context, "rollup", None))
    scheduler.refresh()
    world.clock.advance(5)
    assert world.tick(scheduler).fires == 1
    assert world.instants()[4:] == [60_000]
    assert counts(fill(world, 0, 60)) == (2, 4, 0)
    assert sorted(world.instants()) == [0, 10_000, 20_000, 30_000, 40_000, 50_000, 60_000]


@pytest.mark.promise("CRON-8", "CRON-5")
def test_what_fired_by_an_earlier_rule_is_skipped_where_the_new_rule_has_it_too(world: World) -> None:
    key = world.save(every=10.0).key
    scheduler = world.scheduler(ttl_ms=10_000_000)
    for _ in range(4):
        world.clock.advance(10)
        world.tick(scheduler)
    spec = operations.make_spec("rollup", every=20.0, start=to_datetime(world.start_ms))
    drive(world.executor, operations.save(world.context, QUEUE, key, spec))
    assert counts(fill(world, 0, 40)) == (1, 1, 0)
    finer = structs.replace(spec, every_ms=5_000)
    drive(world.executor, operations.save(world.context, QUEUE, key, finer))
    assert counts(fill(world, 0, 40)) == (4, 4, 0)
    assert sorted(world.instants()) == [0, 5_000, 10_000, 15_000, 20_000, 25_000, 30_000, 35_000, 40_000]


@pytest.mark.promise("CRON-8")
def test_a_schedule_of_the_first_release_counts_all_up_to_its_last_fire_as_fired(world: World) -> None:
    world.save(every=10.0)
    (stored,) = world.executor.run(world.store.schedules(QUEUE)).schedules
    scheduler = world.scheduler(ttl_ms=10_000_000)
    world.clock.advance(10)
    world.tick(scheduler)
    (fired,) = world.executor.run(world.store.schedules(QUEUE)).schedules
    older = structs.replace(fired, version="older", state=b"")
    world.executor.run(world.store.save_schedule(QUEUE, older, version=stored.version, next_ms=fired.next_ms))
    assert counts(fill(world, -100, 10)) == (0, 11, 0)


@pytest.mark.promise("CRON-8")
def test_an_interval_that_makes_no_sense_is_refused_with_the_way_out(world: World) -> None:
    world.save(every=1.0)
    world.clock.advance(60)
    with pytest.raises(InvalidSchedule, match=r"a backfill ends after its start: .* is not after"):
        fill(world, 30, 30)
    with pytest.raises(InvalidSchedule, match=r"lies in the future \(the store's time is"):
        fill(world, 0, 61)
    with pytest.raises(InvalidSchedule, match=r"more than 40 instants .* choose a shorter interval, or raise limit"):
        fill(world, -41, 0, limit=40)
    assert counts(fill(world, -40, 0, limit=40, dry_run=True)) == (40, 0, 0)
    with pytest.raises(InvalidSchedule, match="limit"):
        fill(world, 0, 1, limit=0)
    with pytest.raises(InvalidInput, match="dry_run"):
        fill(world, 0, 1, dry_run="yes")
    with pytest.raises(UnknownSchedule, match="there is no schedule 'nothing'"):
        fill(world, 0, 1, name="nothing")
    with pytest.raises(InvalidTime, match="start must carry a time zone"):
        drive(world.executor, backfill(world.context, "rollup", None, datetime(2026, 1, 1), datetime.now(UTC)))  # noqa: DTZ001
    assert world.instants() == []


@pytest.mark.promise("CRON-8")
def test_a_long_interval_goes_in_parts(world: World) -> None:
    world.save(every=1.0)
    steps: list[int] = []
    count = 2 * CHUNK_MESSAGES_MAX + 10
    assert counts(fill(world, -count, 0, progress=steps.append)) == (count, 0, 0)
    assert steps == [CHUNK_MESSAGES_MAX, 2 * CHUNK_MESSAGES_MAX, count]
    (stored,) = world.executor.run(world.store.schedules(QUEUE)).schedules
    assert len(read_state(stored).fired) == 1


def drive_counting_pauses(world: World, flow: Any) -> tuple[Backfilled, int]:
    pauses, step = 0, next(flow)
    while True:
        paused = isinstance(step, Sleep)
        pauses += paused
        try:
            step = flow.send(None if paused else world.executor.run(step))
        except StopIteration as ended:
            return ended.value, pauses


@pytest.mark.promise("CRON-8")
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_long_search_lets_others_run_on_the_event_loop(dry_run: bool) -> None:
    clock = ManualClock()
    world = world_of(cast(Store, MemoryStore(clock=clock)), clock)
    world.save(cron="* * * * * *")
    begin, until = to_datetime(world.start_ms - 2_000_000), to_datetime(world.start_ms)
    flow = backfill(world.context, "rollup", QUEUE, begin, until, dry_run=dry_run)
    done, pauses = drive_counting_pauses(world, flow)
    assert done.published == 2_000
    assert pauses >= 2_000 // CHUNK_MESSAGES_MAX


@pytest.mark.promise("CRON-8", "PUB-7")
def test_a_full_queue_ends_a_backfill_and_a_rerun_goes_on(world: World) -> None:
    world.executor.run(world.store.configure(QUEUE, {"max_pending": 7}))
    world.save(every=1.0)
    with pytest.raises(QueueFull, match=r"has published 7 messages: run it again when there is room"):
        fill(world, -10, 0)
    assert world.instants() == [-1000 * number for number in range(10, 3, -1)]
    world.executor.run(world.store.configure(QUEUE, {"max_pending": 100}))
    assert counts(fill(world, -10, 0)) == (3, 7, 0)


@pytest.mark.promise("CRON-8", "CRON-6")
def test_two_backfills_and_a_scheduler_at_once_publish_each_instant_once(world: World) -> None:
    world.save(every=1.0)
    scheduler = world.scheduler(ttl_ms=10_000_000)
    world.tick(scheduler)
    # A client stops before its step reaches the store; meanwhile another one and the scheduler do theirs.
    begin, until = to_datetime(world.start_ms - 10_000), to_datetime(world.start_ms - 2_000)
    stopped = backfill(world.new_context("slow"), "rollup", QUEUE, begin, until)
    step: Any = next(stopped)
    while getattr(step, "name", "") != "fire_schedule":
        step = stopped.send(world.executor.run(step))
    assert counts(fill(world, -6, 0)) == (6, 0, 0)
    world.clock.advance(1)
    assert world.tick(scheduler).fires == 0  # its record was changed: it fires in the next tick
    assert world.tick(scheduler).fires == 1
    assert counts(thaw(world, stopped, step)) == (4, 4, 0)
    assert Counter(Counter(world.instants()).values()) == {1: 11}


@pytest.mark.promise("CRON-8")
def test_a_rule_that_changes_during_its_backfill_ends_it(world: World) -> None:
    key = world.save(every=1.0).key
    begin, until = to_datetime(world.start_ms - 10_000), to_datetime(world.start_ms)
    flow = backfill(world.new_context("slow"), "rollup", QUEUE, begin, until)
    step: Any = next(flow)
    while getattr(step, "name", "") != "fire_schedule":
        step = flow.send(world.executor.run(step))
    spec = operations.make_spec("rollup", every=2.0)
    drive(world.executor, operations.save(world.context, QUEUE, key, spec))
    with pytest.raises(StoreFailed, match="was changed by others during its backfill; 0 messages were published"):
        flow.send(world.executor.run(step))
    assert world.instants() == []


@pytest.mark.promise("CRON-8")
def test_what_is_remembered_is_bounded() -> None:
    ranges: list[tuple[int, int]] = []
    for number in range(RANGES_MAX + 5):
        ranges = add_range(ranges, 100 * number, 100 * number + 10)
    assert len(ranges) == RANGES_MAX
    assert ranges[0] == (0, 510)
    assert add_range([(0, 10), (12, 20)], 11, 11) == [(0, 20)]
    state = State()
    for number in range(RULES_MAX + 3):
        state = after_change(structs.replace(state, since_ms=0), 10, Spec("", every_ms=number + 1))
    assert len(state.past) == RULES_MAX
    assert state.fired_until_ms == 10, "of a rule that is forgotten all counts as fired"
    stored = StoredSchedule(
        "key", "v", pack_spec(Spec("", every_ms=10_007)), False, None, None, state=pack_state(state)
    )
    assert [instant in FiredInstants(read_state(stored), stored) for instant in (1, 10, 11)] == [True, True, False]
    same = State()
    for number in range(3 * RULES_MAX):
        last_ms = 10 * number
        same = after_change(structs.replace(same, since_ms=last_ms), last_ms, Spec("", every_ms=number % 2 + 1))
    assert (len(same.past), same.fired_until_ms) == (2, None), "rules with the same instants are remembered once"
    assert len(pack_state(structs.replace(state, fired=ranges))) < 8_192


@pytest.mark.promise("CRON-8", "CRON-6")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tick", "fill", "pause", "resume", "save", "end"]), st.integers(0, 30), st.integers(1, 40)
        ),
        min_size=3, max_size=25,
    ),
    st.sampled_from([("skip", "allow"), ("once", "allow"), (CatchUp(3), "allow"), ("skip", "skip"), ("once", "skip"),
                     ("skip", "queue_one"), ("once", "queue_one")]),
)  # fmt: skip
@example([("tick", 10, 1), ("tick", 10, 1), ("fill", 5, 2)], ("skip", "queue_one"))
@example(
    [("tick", 10, 1), ("tick", 10, 1), ("pause", 0, 1), ("resume", 30, 1), ("end", 0, 1), ("tick", 5, 1),
     ("tick", 0, 1), ("end", 0, 1), ("tick", 8, 1), ("tick", 0, 1)],
    ("skip", "queue_one"),
)  # fmt: skip
def test_fires_runs_pauses_and_backfills_in_any_order_publish_each_instant_once(
    steps: list[tuple[str, int, int]], rule: tuple[Any, Overlap]
) -> None:
    missed, overlap = rule
    clock = ManualClock()
    world = world_of(cast(Store, MemoryStore(clock=clock)), clock)
    world.save(every=1.0, missed=missed, grace=2, overlap=overlap)
    session, seen = Session(ClockTime(clock)), Counter[int]()

    def end_runs() -> None:
        """Cancel all that was published, so that no run goes on."""
        seen.update(world.instants())
        ready = world.executor.run(world.store.peek(QUEUE, "ready", 1_000)).messages
        world.executor.run(world.store.cancel(QUEUE, [Target(one.id) for one in ready], session.operation(QUEUE)))

    scheduler = world.scheduler(ttl_ms=10_000_000)
    for what, seconds, length in steps:
        clock.advance(seconds / 10)
        now = (clock() - world.start_ms) / 1000
        if what == "tick":
            world.tick(scheduler)
        elif what == "fill":
            fill(world, now - length, now)
        elif what == "save":
            world.save(every=1.0, missed=missed, grace=2, overlap=overlap, body=seconds)
        elif what == "end":
            end_runs()
        else:
            change = operations.pause if what == "pause" else operations.resume
            drive(world.executor, change(world.context, "rollup", None))
    drive(world.executor, operations.resume(world.context, "rollup", None))
    scheduler.refresh()
    world.tick(scheduler)
    world.tick(scheduler)
    now = (clock() - world.start_ms) / 1000
    fill(world, -50, now)
    for _ in range(2):
        # Whatever waits for the end of a run fires now.
        end_runs()
        clock.advance(RUN_POLL_SECONDS_MAX)
        world.tick(scheduler)
        world.tick(scheduler)
    end_runs()
    assert set(seen.values()) <= {1}
    wanted = {1_000 * second for second in range(-50, int(now) + 1) if second < now}
    assert wanted <= set(seen), "no instant of the past is left out"


@pytest.mark.promise("CRON-8", "FACE-2")
def test_the_command_counts_publishes_and_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'past.db'}"
    with Waypost(url) as post:
        post.save_schedule("rollup", queue="reports", cron="0 9 * * *")
    given = ["backfill", url, "rollup", "--from", "2026-03-01", "--to", "2026-03-08"]
    assert run_command(capsys, *given, "--dry-run") == (
        "would publish 7 messages, 2026-03-01T09:00:00 to 2026-03-07T09:00:00 UTC; skipped 0 that had fired\n"
    )
    assert json.loads(run_command(capsys, *given, "--json"))["published"] == 7
    assert run_command(capsys, *given) == "published 0 messages; skipped 7 that had fired\n"
    assert "more than 3 instants" in run_command(capsys, *given, "--limit", "3", code=2)
    with Waypost(url) as post:
        assert post.ledger("reports").published == 7
        logged = post.actions().actions
    assert [(one.action, one.queue, one.ok) for one in logged] == [("backfill_schedule", "reports", True)] * 2
