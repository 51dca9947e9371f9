"""The scheduler and the promoter, tick by tick: on a manual clock, in any order of steps, on every kind of store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from waypost.codec import encode_body, make_envelope
from waypost.errors import InvalidSchedule, OutcomeUnknown, SchemaTooNew, StoreUnavailable
from waypost.identity import Session
from waypost.message import StoredMessage
from waypost.operations import schedules as operations
from waypost.operations.flow import ClientContext, Together, drive
from waypost.policy import CatchUp, Missed
from waypost.schedule.promoter import Promoter, PromoterTick
from waypost.schedule.rule import pack_spec
from waypost.schedule.schedule import Schedule, describe
from waypost.schedule.scheduler import (
    DEPUTY_ROLE,
    NOTIFIED_POLLS,
    POLL_SECONDS,
    READ_SECONDS,
    STANDBY_NOTIFIED_SECONDS,
    STANDBY_SPREAD_SECONDS,
    Scheduler,
    Tick,
)
from waypost.store.memory import MemoryStore
from waypost.store.port import Call, Draft, Executor, Store
from waypost.testing.clock import START_MS, ClockTime, ManualClock
from waypost.values import StoredSchedule
from waypost.views import Observed
from waypost.wake.hub import Hub
from waypost.wake.wakeups import Wakeups

QUEUE = "reports"


class World:
    """A store with a manual clock, and any number of schedulers."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.executor: Executor = store.connect(start_timeout=5)
        self.events: list[Observed] = []
        self.woken: list[dict[str, list[str]]] = []
        self.wakeups = Wakeups(Hub(), store.namespace)
        self.context = self.new_context("author")

    def new_context(self, name: str) -> ClientContext:
        # Their monotonic clocks have nothing to do with the store's but the pace.
        return ClientContext(
            self.store, session=Session(ClockTime(self.clock)), worker=name, retry_budget=0, wake=self.woken.append,
            wakeups=self.wakeups, on_event=self.events.append, monotonic=lambda: (self.clock() - START_MS) / 1000 + 77,
        )  # fmt: skip

    def scheduler(self, name: str = "a", **options: Any) -> Scheduler:
        return Scheduler(self.new_context(name), **options)

    def tick(self, scheduler: Scheduler) -> Tick:
        return drive(self.executor, scheduler.tick())

    def save(self, name: str = "rollup", **rule: Any) -> Schedule:
        spec = operations.make_spec(name, **rule)
        return drive(self.executor, operations.save(self.context, QUEUE, operations.derived_key(spec), spec))

    def instants(self) -> list[int]:
        """Return the instants of all published messages, in milliseconds after the start."""
        page = self.executor.run(self.store.peek(QUEUE, "ready", 1_000))
        found = []
        for stored in page.messages:
            instant = StoredMessage[Any](QUEUE, stored).instant
            assert instant is not None
            found.append(round(instant.timestamp() * 1000) - self.start_ms)
        return found

    start_ms = 0

    def stored(self) -> Schedule:
        (one,) = self.executor.run(self.store.schedules(QUEUE)).schedules
        return describe(QUEUE, one)


def world_of(store: Store, clock: ManualClock) -> World:
    world = World(store, clock)
    world.start_ms = clock()
    return world


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    if request.param == "memory":
        store = cast(Store, MemoryStore(clock=clock))
    else:
        from waypost.store.sqlite import SqliteStore

        store = cast(Store, SqliteStore(tmp_path / "loop.db", clock=clock))
    made = world_of(store, clock)
    yield made
    made.executor.close()


def thaw(world: World, frozen: Any, step: Any) -> Any:
    """Resume a tick that was frozen before a step, and run it to its end."""
    try:
        while True:
            done = world.executor.run_many(step.calls) if isinstance(step, Together) else world.executor.run(step)
            step = frozen.send(done)
    except StopIteration as stopped:
        return stopped.value


@pytest.mark.promise("CRON-7")
def test_a_leader_sleeps_until_the_next_fire_and_fires_it(world: World) -> None:
    world.save(every=1.0)
    scheduler = world.scheduler()
    first = world.tick(scheduler)
    assert first.election == "elected"
    assert first.fires == 0
    assert first.sleep == timedelta(seconds=1.001)
    world.clock.advance(1.001)
    second = world.tick(scheduler)
    assert (second.election, second.fires, second.missed, second.lateness) == (
        "leading",
        1,
        0,
        timedelta(milliseconds=1),
    )
    assert world.instants() == [1_000]


@pytest.mark.promise("CRON-1", "CRON-7")
@pytest.mark.parametrize("missed", ["skip", "once", CatchUp(3)])
def test_intervals_of_parts_of_a_second_all_fire(world: World, missed: Missed) -> None:
    world.save(every=0.3, missed=missed)
    scheduler = world.scheduler()
    until = world.clock() + 6_010
    while world.clock() <= until:
        tick = world.tick(scheduler)
        world.clock.advance(max(0.001, round(tick.sleep.total_seconds(), 3)))
    assert world.instants() == [300 * number for number in range(1, 21)]
    assert world.stored().missed_fires == 0


@pytest.mark.promise("CRON-6")
def test_any_number_of_schedulers_fire_each_instant_once_and_one_leads(world: World) -> None:
    world.save(every=1.0)
    schedulers = [world.scheduler(name) for name in "abcdef"]
    elections: Counter[str] = Counter()
    for _ in range(20):
        world.clock.advance(1)
        for scheduler in schedulers:
            elections[world.tick(scheduler).election] += 1
    assert world.instants() == [1_000 * number for number in range(1, 21)]
    assert elections["elected"] == 1
    assert world.stored().fires == 20


@pytest.mark.promise("CRON-6")
def test_two_schedulers_that_both_lead_fire_each_instant_once(world: World) -> None:
    world.save(every=1.0)
    old, new = world.scheduler("old", ttl_ms=3_000), world.scheduler("new", ttl_ms=3_000)
    world.tick(old)
    # The old one is frozen in the middle of its tick, before its fire reaches the store.
    world.clock.advance(1)
    frozen = old.tick()
    step = next(frozen)
    world.clock.advance(4)
    assert world.tick(new).election == "elected"
    world.clock.advance(1)
    assert world.tick(new).fires == 1
    # It thaws, and goes on with what it had decided.
    thawed: Tick = thaw(world, frozen, step)
    assert thawed.fires == 0
    counted = Counter(world.instants())
    assert set(counted.values()) == {1}
    assert world.stored().fires == len(counted)


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("windows", [1, 3, 5])
@pytest.mark.parametrize(
    ("missed", "expected"),
    [("skip", lambda n: [n]), ("once", lambda n: [n]), (CatchUp(2), lambda n: list(range(max(1, n - 1), n + 1)))],
)
def test_after_an_outage_within_the_grace(
    world: World, missed: Missed, expected: Callable[[int], list[int]], windows: int
) -> None:
    world.save(every=10.0, missed=missed)
    world.clock.advance(windows * 10 + 5)
    tick = world.tick(world.scheduler())
    assert world.instants() == [10_000 * number for number in expected(windows)]
    assert tick.missed == windows - len(expected(windows))
    assert world.stored().missed_fires == tick.missed


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("windows", [1, 3, 5])
@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("once", 1), (CatchUp(4), 4)])
def test_after_an_outage_beyond_the_grace(world: World, missed: Missed, count: int, windows: int) -> None:
    world.save(cron="0 * * * *", missed=missed, grace=60)
    first = world.stored().next_fire
    assert first is not None
    world.clock.advance_ms(round(first.timestamp() * 1000) + (windows - 1) * 3_600_000 + 61_000 - world.clock())
    world.tick(world.scheduler())
    assert len(world.instants()) == min(count, windows)
    again = world.tick(world.scheduler("b", ttl_ms=1_000))
    assert again.fires == 0


@pytest.mark.promise("CRON-1", "CRON-6")
def test_max_fires_and_end_are_kept_and_a_schedule_that_is_over_stays_listed(world: World) -> None:
    end = datetime.fromtimestamp(world.clock() / 1000 + 2.5, UTC)
    world.save("bounded", every=1.0, max_fires=3, missed=CatchUp(10))
    world.save("ended", every=1.0, end=end, missed=CatchUp(10))
    world.clock.advance(10)
    scheduler = world.scheduler()
    assert world.tick(scheduler).fires == 5
    world.clock.advance(10)
    assert world.tick(scheduler).fires == 0
    found = drive(world.executor, operations.schedules(world.context, None, 3))
    assert [(one.name, one.fires, one.next_fires) for one in found] == [("bounded", 3, []), ("ended", 2, [])]


@pytest.mark.promise("CRON-5")
def test_saving_again_moves_nothing_and_another_rule_does(world: World) -> None:
    first = world.save(every=10.0)
    world.clock.advance(4)
    assert world.save(every=10.0) == first
    changed = world.save(every=10.0, body={"report": 1})
    assert (changed.next_fire, changed.body) == (first.next_fire, {"report": 1})
    spec = operations.make_spec("rollup", every=7.0)
    moved = drive(world.executor, operations.save(world.context, QUEUE, first.key, spec))
    assert moved.next_fire is not None
    assert round(moved.next_fire.timestamp() * 1000) == world.clock() + 7_000


@pytest.mark.promise("CRON-7")
def test_a_schedule_that_is_saved_changed_paused_or_removed_is_noticed(world: World) -> None:
    scheduler = world.scheduler()
    world.tick(scheduler)
    # One instant lies before the next poll, and only one.
    key = world.save(every=0.75 * POLL_SECONDS).key
    world.clock.advance(POLL_SECONDS)
    assert world.tick(scheduler).fires == 1
    assert drive(world.executor, operations.set_paused(world.context, key, None, True)) is True
    world.clock.advance(5)
    assert world.tick(scheduler).fires == 0
    assert drive(world.executor, operations.set_paused(world.context, "rollup", QUEUE, False)) is True
    assert drive(world.executor, operations.set_paused(world.context, "rollup", QUEUE, False)) is False
    world.clock.advance(POLL_SECONDS)
    tick = world.tick(scheduler)
    assert (tick.fires, tick.missed) == (1, 0)
    assert drive(world.executor, operations.remove(world.context, key, None)) is True
    assert drive(world.executor, operations.remove(world.context, key, None)) is False
    world.clock.advance(5)
    assert world.tick(scheduler).fires == 0


class LosesReplies:
    """Passes calls to an executor, and loses the first reply to a save."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.lost = 0

    def run(self, call: Any) -> Any:
        reply = self._executor.run(call)
        if call.name == "save_schedule" and not self.lost:
            self.lost += 1
            raise OutcomeUnknown("the connection was lost")
        return reply

    def run_many(self, calls: Any) -> Any:
        return self._executor.run_many(calls)

    def close(self) -> None: ...


@pytest.mark.promise("CRON-4", "PUB-8")
def test_a_changed_body_is_not_more_than_one_step_may_publish(world: World) -> None:
    world.save(every=10.0, missed=CatchUp(512))
    body = "x" * 10_000
    with pytest.raises(InvalidSchedule, match=r"CatchUp\(512\) of a message of .* more than one step may publish"):
        drive(world.executor, operations.change(world.context, QUEUE, "rollup", None, {"body": body}))
    drive(world.executor, operations.change(world.context, QUEUE, "rollup", None, {"missed": CatchUp(100)}))
    drive(world.executor, operations.change(world.context, QUEUE, "rollup", None, {"body": body}))
    assert world.stored().body == body


@pytest.mark.promise("CRON-7")
@pytest.mark.parametrize("change", ["save", "pause"])
def test_a_change_whose_reply_is_lost_is_reported_as_made(world: World, change: str) -> None:
    spec = operations.make_spec("rollup", every=10.0)
    if change == "pause":
        world.save(every=10.0)
    world.context.retry_budget = 60
    executor = LosesReplies(world.executor)
    world.events.clear()
    if change == "save":
        saved = drive(cast(Executor, executor), operations.save(world.context, QUEUE, "rollup", spec))
        assert saved == world.stored()
    else:
        assert drive(cast(Executor, executor), operations.pause(world.context, "rollup", None)) is True
    assert executor.lost == 1
    (event,) = [event for event in world.events if event.event == f"schedule_{change}d"]
    assert event.outcome == "success"


@pytest.mark.promise("CRON-6", "PUB-7")
def test_a_full_queue_delays_fires_and_fires_past_the_grace_are_missed(world: World) -> None:
    world.executor.run(world.store.configure(QUEUE, {"max_pending": 1}))
    world.save(every=10.0, grace=15)
    scheduler = world.scheduler(ttl_ms=600_000)
    world.tick(scheduler)
    world.clock.advance(10)
    assert world.tick(scheduler).fires == 1
    world.clock.advance(10)
    held = world.tick(scheduler)
    assert (held.fires, held.missed) == (0, 0)
    assert held.sleep >= timedelta(seconds=0.5)
    world.clock.advance(20)
    session = Session(ClockTime(world.clock))
    claimed = world.executor.run(world.store.claim(QUEUE, 1, session.operation(QUEUE), worker="w"))
    assert len(claimed.leases) == 1
    tick = world.tick(scheduler)
    assert (tick.fires, tick.missed) == (1, 2)
    assert world.instants() == [40_000]


@pytest.mark.promise("CRON-4", "CRON-6", "PUB-7")
def test_an_outage_with_more_instants_than_the_queue_holds_is_caught_up_in_parts(world: World) -> None:
    world.executor.run(world.store.configure(QUEUE, {"max_pending": 2}))
    world.save(every=10.0, missed=CatchUp(5))
    scheduler, session = world.scheduler(ttl_ms=600_000), Session(ClockTime(world.clock))
    world.tick(scheduler)
    world.clock.advance(50)
    fired: list[int] = []
    for _ in range(20):
        world.tick(scheduler)
        fired += world.instants()
        claim = world.store.claim(QUEUE, 2, session.operation(QUEUE), worker="w")
        world.executor.run(claim)
        world.clock.advance(1)
    assert fired == [10_000, 20_000, 30_000, 40_000, 50_000, 60_000]
    assert world.stored().fires == 6


@pytest.mark.promise("CRON-7")
def test_ticks_report_fires_misses_and_lateness(world: World) -> None:
    seen: list[Tick] = []
    world.save(every=1.0, missed="once")
    scheduler = world.scheduler(on_tick=seen.append)
    world.tick(scheduler)
    world.clock.advance(3.2)
    world.tick(scheduler)
    assert [(tick.election, tick.fires, tick.missed, tick.lateness) for tick in seen] == [
        ("elected", 0, 0, timedelta(0)),
        ("leading", 1, 2, timedelta(milliseconds=200)),
    ]
    fired = [event for event in world.events if event.event == "fired"]
    assert [(event.count, event.missed, event.wait_time) for event in fired] == [(1, 2, timedelta(milliseconds=200))]
    ticks = [event for event in world.events if event.event == "scheduler_tick"]
    assert [(event.reason, event.count) for event in ticks] == [("elected", 0), ("leading", 1)]


@pytest.mark.promise("CRON-7", "TIMER-4")
def test_a_leader_that_hands_over_is_replaced_at_once(world: World) -> None:
    first, second = world.scheduler("a"), world.scheduler("b")
    world.tick(first)
    waiting = world.tick(second)
    assert waiting.election == "following"
    assert waiting.sleep == timedelta(seconds=15.001)
    drive(world.executor, first.hand_over())
    assert world.tick(world.scheduler("c")).election == "elected"


@pytest.mark.promise("CRON-7")
def test_an_idle_leader_sends_less_than_a_command_a_second(world: World) -> None:
    sent = 0

    class Counting:
        def run(self, call: Any) -> Any:
            nonlocal sent
            sent += 1
            return world.executor.run(call)

        def run_many(self, calls: Any) -> list[Any]:
            nonlocal sent
            chosen = list(calls)
            sent += len(chosen)
            return world.executor.run_many(chosen)

        def close(self) -> None: ...

    for number in range(5):
        world.save(f"yearly {number}", cron="@yearly")
    scheduler = world.scheduler()
    drive(Counting(), scheduler.tick())
    sent, began = 0, world.clock()
    while world.clock() < began + 120_000:
        world.clock.advance(drive(Counting(), scheduler.tick()).sleep.total_seconds() + 0.001)
    assert sent < 120


def calls_of(world: World, flow: Any) -> list[str]:
    """Run a flow; return the names of its calls."""
    names: list[str] = []

    class Named:
        def run(self, call: Any) -> Any:
            names.append(call.name)
            return world.executor.run(call)

        def run_many(self, calls: Any) -> list[Any]:
            return [self.run(call) for call in calls]

        def close(self) -> None: ...

    drive(Named(), flow)
    return names


@pytest.mark.promise("CRON-7")
def test_schedules_are_read_again_when_they_changed_and_now_and_then(world: World) -> None:
    world.save("yearly", cron="@yearly")
    scheduler = world.scheduler()
    assert "schedules" in calls_of(world, scheduler.tick())
    for _ in range(2):
        world.clock.advance(POLL_SECONDS)
        names = calls_of(world, scheduler.tick())
        assert "scheduled" in names
        assert "schedules" not in names
    world.clock.advance(READ_SECONDS)
    assert "schedules" in calls_of(world, scheduler.tick())


def with_field(data: bytes) -> bytes:
    """Return a packed record with a field more, as a newer release may write it."""
    return msgspec.msgpack.encode((msgspec.msgpack.decode(data) if data else {}) | {"planted": 1})


@pytest.mark.promise("CRON-6", "STORE-7")
@pytest.mark.parametrize("change", [
    lambda stored: structs.replace(stored, spec=b"\xc1"),
    lambda stored: structs.replace(stored, spec=with_field(stored.spec)),
    lambda stored: structs.replace(stored, state=with_field(stored.state)),
], ids=["spec", "field of the spec", "field of the state"])  # fmt: skip
def test_a_schedule_that_a_newer_release_changed_is_left_to_it(
    world: World, change: Callable[[StoredSchedule], StoredSchedule]
) -> None:
    world.save(every=1.0)
    scheduler = world.scheduler()
    world.tick(scheduler)
    (stored,) = world.executor.run(world.store.schedules(QUEUE)).schedules
    newer = change(stored)
    world.executor.run(world.store.save_schedule(QUEUE, newer, version=stored.version, next_ms=stored.next_ms))
    scheduler.refresh()
    world.tick(scheduler)
    world.clock.advance(1)
    assert world.tick(scheduler).fires == 0
    assert world.instants() == []
    assert drive(world.executor, operations.schedules(world.context, None, 1)) == []
    other_rule = operations.make_spec("rollup", every=2.0)
    with pytest.raises(SchemaTooNew):
        drive(world.executor, operations.save(world.context, QUEUE, stored.key, other_rule))
    # What does not need its rule works, and leaves what is saved as it is.
    assert drive(world.executor, operations.pause(world.context, stored.key, None)) is True
    (left,) = world.executor.run(world.store.schedules(QUEUE)).schedules
    assert (left.spec, left.state) == (newer.spec, newer.state)
    assert drive(world.executor, operations.remove(world.context, stored.key, None)) is True


@pytest.mark.promise("CRON-6")
def test_a_leader_that_cannot_reach_the_store_does_not_try_again_to_resign(world: World) -> None:
    scheduler = world.scheduler()
    world.tick(scheduler)
    assert scheduler.candidate.leading
    flow = scheduler.hand_over()
    assert cast("Call[Any]", next(flow)).name == "resign"
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("away"))


@pytest.mark.promise("CRON-6")
def test_an_unreachable_store_ends_no_schedule(world: World) -> None:
    world.save(every=1.0)
    scheduler = world.scheduler()
    world.tick(scheduler)

    class Away:
        def run(self, call: Any) -> Any:
            raise StoreUnavailable("away")

        def run_many(self, calls: Any) -> list[Any]:
            return [StoreUnavailable("away") for _ in calls]

        def close(self) -> None: ...

    world.clock.advance(1)
    with pytest.raises(StoreUnavailable):
        drive(Away(), scheduler.tick())
    world.clock.advance(0.5)
    assert world.tick(scheduler).fires == 1
    assert world.instants() == [1_000]


@pytest.mark.promise("CRON-6")
def test_a_schedule_that_cannot_be_served_does_not_stop_the_others(world: World) -> None:
    world.save("fine", every=1.0)
    broken = operations.make_spec("broken", cron="* * * * * *")
    unknown = structs.replace(broken, tz="Mars/Olympus")
    due = world.clock() + 1_000
    stored = StoredSchedule("broken", "v1", pack_spec(unknown), False, due, due)
    world.executor.run(world.store.save_schedule(QUEUE, stored, version=None, next_ms=None))
    newer = StoredSchedule("newer", "v1", b"\xc1", False, due, due)
    world.executor.run(world.store.save_schedule(QUEUE, newer, version=None, next_ms=None))

    scheduler = world.scheduler()
    world.tick(scheduler)
    world.clock.advance(1)
    tick = world.tick(scheduler)
    assert tick.fires == 1
    assert tick.sleep > timedelta(seconds=0.2)
    assert [one.name for one in drive(world.executor, operations.schedules(world.context, None, 1))] == [
        "broken",
        "fine",
    ]
    assert drive(world.executor, operations.remove(world.context, "newer", None)) is True
    held = [event for event in world.events if event.event == "fired" and event.outcome == "failure"]
    assert [(event.key, event.error_type) for event in held] == [("broken", "waypost.errors.InvalidSchedule")]
    world.clock.advance(1)
    assert world.tick(scheduler).fires == 1


@pytest.mark.promise("CRON-7")
def test_a_schedule_whose_zone_is_unknown_here_is_still_listed(world: World) -> None:
    unknown = structs.replace(operations.make_spec("broken", cron="* * * * * *"), tz="Mars/Olympus")
    due = world.clock() + 1_000
    stored = StoredSchedule("broken", "v1", pack_spec(unknown), False, due, due)
    world.executor.run(world.store.save_schedule(QUEUE, stored, version=None, next_ms=None))
    assert world.stored().next_fires == [datetime.fromtimestamp(due / 1000, UTC)]


@pytest.mark.promise("TIMER-4")
def test_a_promoter_makes_ready_wakes_and_reports(world: World) -> None:
    seen: list[PromoterTick] = []
    session = Session(ClockTime(world.clock))
    ids = session.message_ids(2)
    drafts = [
        Draft(id, make_envelope(id, encode_body(1)), delay_ms=delay)
        for id, delay in zip(ids, (500, 60_000), strict=True)
    ]
    world.executor.run(world.store.publish(QUEUE, drafts, session.operation(QUEUE)))
    world.executor.run(world.store.claim(QUEUE, 1, session.operation(QUEUE), worker="w", sleeper="w"))
    promoter = Promoter(world.new_context("p"), on_tick=seen.append)
    follower = Promoter(world.new_context("q"), on_tick=seen.append)
    first = drive(world.executor, promoter.tick())
    assert first.sleep == timedelta(seconds=0.501)
    world.clock.advance(0.501)
    drive(world.executor, promoter.tick())
    drive(world.executor, follower.tick())
    assert [(tick.election, tick.promoted, tick.depth, tick.oldest_lag) for tick in seen] == [
        ("elected", 0, 2, timedelta(0)),
        ("leading", 1, 1, timedelta(milliseconds=1)),
        ("following", 0, 0, timedelta(0)),
    ]
    assert world.woken == [{QUEUE: ["w"]}]
    ticks = [(event.reason, event.count, event.depth) for event in world.events if event.event == "promoter_tick"]
    assert ticks == [("elected", 0, 2), ("leading", 1, 1), ("following", 0, 0)]


#: One step of a random sequence.
ACTIONS = ("tick a", "tick b", "tick c", "freeze a", "thaw a", "save", "pause", "resume", "pass")


@pytest.mark.promise("CRON-6")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 4_000)), min_size=5, max_size=60),
    st.sampled_from(["skip", "once", CatchUp(3)]),
)
def test_no_instant_fires_twice_under_any_sequence_of_steps(actions: list[tuple[str, int]], missed: Missed) -> None:
    clock = ManualClock()
    world = world_of(cast(Store, MemoryStore(clock=clock)), clock)
    world.save(every=1.0, missed=missed)
    schedulers = {name: world.scheduler(name, ttl_ms=2_000) for name in "abc"}
    frozen: Any = None
    step: Any = None
    for action, ms in actions:
        clock.advance(ms / 1000)
        what, _, who = action.partition(" ")
        if what == "tick" and not (who == "a" and frozen is not None):
            world.tick(schedulers[who])
        elif what == "freeze" and frozen is None:
            frozen = schedulers["a"].tick()
            step = next(frozen, None)
            frozen = None if step is None else frozen
        elif what == "thaw" and frozen is not None:
            thaw(world, frozen, step)
            frozen = None
        elif what == "save":
            world.save(every=1.0, missed=missed, body=ms)
        elif what in ("pause", "resume"):
            drive(world.executor, operations.set_paused(world.context, "rollup", QUEUE, what == "pause"))
    counted = Counter(world.instants())
    assert set(counted.values()) <= {1}
    assert all(instant % 1_000 == 0 for instant in counted)
    assert max(counted, default=0) <= clock() - world.start_ms
    assert world.stored().fires == len(counted)


# ---- standbys --------------------------------------------------------------------------------------------------------


class Counting:
    """An executor that counts its calls."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.names: Counter[str] = Counter()

    def run(self, call: Any) -> Any:
        self.names[call.name] += 1
        return self._inner.run(call)

    def run_many(self, calls: Any) -> Any:
        chosen = list(calls)
        self.names.update(call.name for call in chosen)
        return self._inner.run_many(chosen)

    def close(self) -> None: ...


@pytest.mark.promise("CRON-6", "CRON-7")
def test_a_standby_fires_what_its_leader_has_not_fired_after_a_second_and_stands_for_election(world: World) -> None:
    world.save(every=10)
    leader, standby = world.scheduler("a"), world.scheduler("b", by_polls=True)
    assert world.tick(leader).election == "elected"
    assert world.tick(standby).election == "following"
    world.clock.advance(10.9)  # the leader is gone
    assert world.tick(standby).fires == 0
    world.clock.advance(0.7)
    tick = world.tick(standby)
    assert (tick.election, tick.fires) == ("following", 1)
    assert world.instants() == [10_000]
    world.clock.advance(10)
    assert world.tick(standby).fires == 1
    assert world.instants() == [10_000, 20_000]


@pytest.mark.promise("CRON-6")
def test_a_standby_leads_once_the_lease_of_its_leader_has_ended(world: World) -> None:
    world.save(every=10)
    leader, standby = world.scheduler("a"), world.scheduler("b", by_polls=True)
    world.tick(leader)
    world.tick(standby)
    for _ in range(3):
        world.clock.advance(11)
        tick = world.tick(standby)
    assert tick.election in ("elected", "leading")
    assert world.tick(leader).election == "following"


@pytest.mark.promise("CRON-6", "CRON-8", "WAKE-5")
def test_of_standbys_with_a_live_leader_one_tries_a_fire_each_second_and_the_others_each_half_minute(
    world: World,
) -> None:
    world.save(every=1)
    leader, *standbys = (world.scheduler(name, by_polls=bool(number)) for number, name in enumerate("abcd"))
    world.tick(leader)
    counted = [Counting(world.executor) for _ in standbys]
    for standby, counting in zip(standbys, counted, strict=True):
        drive(cast(Executor, counting), standby.tick())
        counting.names.clear()
    for _ in range(1_100):
        world.clock.advance(0.1)
        world.tick(leader)
        for standby, counting in zip(standbys, counted, strict=True):
            assert drive(cast(Executor, counting), standby.tick()).fires == 0
    first, *others = sorted(counted, key=lambda one: -one.names["fire_schedule"])
    assert 60 <= first.names["fire_schedule"] <= 112
    assert first.names["elect"] <= 7
    for other in others:
        assert other.names["fire_schedule"] <= 4
        assert other.names["elect"] <= 3
    assert len(world.instants()) == len(set(world.instants())) == 110


@pytest.mark.promise("CRON-8", "CRON-6")
@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_of_each_second_misses_nothing_when_its_leader_dies(world: World, seed: int) -> None:
    world.save(every=1)
    leader, *standbys = (world.scheduler(name, by_polls=bool(number)) for number, name in enumerate("abc"))
    lateness = timedelta(0)
    for number in range(400):
        world.clock.advance_ms(100)
        if number <= 150 + 3 * seed:  # then it is dead, and its lease goes on for 15 seconds
            world.tick(leader)
        for standby in standbys:
            lateness = max(lateness, world.tick(standby).lateness)
    assert world.instants() == [1_000 * second for second in range(1, 41)]
    assert world.stored().missed_fires == 0
    assert timedelta(0) < lateness < timedelta(seconds=2)


@pytest.mark.promise("CRON-8", "CRON-6")
@pytest.mark.parametrize("by_polls", [False, True])
def test_standbys_fire_in_time_what_was_saved_after_they_started_when_its_leader_dies(
    world: World, by_polls: bool
) -> None:
    leader, *standbys = (world.scheduler(name, by_polls=by_polls and number > 0) for number, name in enumerate("abc"))
    for scheduler in (leader, *standbys):
        scheduler.listen(lambda: None)
        world.tick(scheduler)
    world.clock.advance(5)
    world.save(every=2)  # the leader is dead, and its lease goes on
    lateness = timedelta(0)
    for _ in range(95):
        world.clock.advance(0.1)
        lateness = max([lateness, *(world.tick(standby).lateness for standby in standbys)])
    assert world.instants() == [7_000, 9_000, 11_000, 13_000]
    assert timedelta(0) < lateness < timedelta(seconds=2)


@pytest.mark.promise("CRON-8", "WAKE-1")
def test_a_standby_of_schedules_that_change_all_the_time_polls_a_bounded_number_of_times(world: World) -> None:
    leader, standby = world.scheduler("a", ttl_ms=10_000_000), world.scheduler("b", by_polls=True)
    woken: list[None] = []
    standby.listen(lambda: woken.append(None))
    world.tick(leader)
    world.tick(standby)
    counting = Counting(world.executor)
    changes = 300
    for number in range(changes):
        world.save(every=1_000 + number)
        world.clock.advance(1)
        drive(cast(Executor, counting), standby.tick())
    assert len(woken) == changes
    assert counting.names["scheduled"] <= NOTIFIED_POLLS + changes / STANDBY_NOTIFIED_SECONDS + 1
    world.clock.advance(STANDBY_NOTIFIED_SECONDS + STANDBY_SPREAD_SECONDS)
    before = counting.names["schedules"]
    drive(cast(Executor, counting), standby.tick())
    assert counting.names["schedules"] == before + 1, "it reads the last change too"


@pytest.mark.promise("CRON-8", "CRON-6")
def test_a_leader_that_returns_ends_the_work_of_the_standby_in_its_place(world: World) -> None:
    world.save(every=10)
    leader, standby = world.scheduler("a", ttl_ms=60_000), world.scheduler("b", by_polls=True)
    world.tick(leader)
    world.tick(standby)
    world.clock.advance(12)
    assert world.tick(standby).fires == 1
    world.clock.advance(8)
    assert world.tick(standby).fires == 1, "it fires in time from then on"
    for _ in range(20):  # the leader was frozen; it fires and renews its lease again
        world.clock.advance(1)
        world.tick(leader)
        world.tick(standby)
    world.clock.advance(10)
    assert world.tick(standby).fires == 0, "the leader has a moment again"
    assert world.tick(leader).fires == 1


@pytest.mark.promise("CRON-8")
def test_a_deputy_that_stops_hands_over(world: World) -> None:
    world.save(every=1)
    leader, standby = world.scheduler("a", ttl_ms=600_000), world.scheduler("b", by_polls=True)
    world.tick(leader)
    world.tick(standby)
    for _ in range(30):
        world.clock.advance(0.1)
        world.tick(leader)
        world.tick(standby)
    assert world.executor.run(world.store.elect(DEPUTY_ROLE, "c", 1_000)).leader == "b"
    drive(world.executor, standby.hand_over())
    assert world.executor.run(world.store.elect(DEPUTY_ROLE, "c", 1_000)).leader == "c"


@pytest.mark.promise("CRON-8")
def test_schedules_of_a_full_queue_do_not_keep_a_deputy_from_others(world: World) -> None:
    world.save("first", every=1)
    world.save("second", every=1)
    spec = operations.make_spec("other", every=1)
    drive(world.executor, operations.save(world.context, "other", operations.derived_key(spec), spec))
    world.executor.run(world.store.configure(QUEUE, {"max_pending": 1}))
    leader, standby = world.scheduler("a", ttl_ms=600_000), world.scheduler("b", by_polls=True)
    for _ in range(30):
        world.clock.advance(0.1)
        world.tick(leader)
        world.tick(standby)

    def fired() -> int:
        return len(world.executor.run(world.store.peek("other", "ready", 1_000)).messages)

    before = fired()
    for _ in range(100):  # the leader has died, and its lease does not end for long
        world.clock.advance(0.1)
        world.tick(standby)
    assert fired() - before >= 7, "the first one after two seconds, then each"


@pytest.mark.promise("CRON-7", "WAKE-5")
def test_a_standby_elected_by_polls_leads_when_a_poll_elects_it(world: World) -> None:
    leader, standby = world.scheduler("a"), world.scheduler("b", by_polls=True)
    world.tick(leader)
    assert world.tick(standby).election == "following"
    world.clock.advance(3600)
    assert world.tick(standby).election == "following"
    standby.candidate.update(world.executor.run(world.store.elect("scheduler", "b", 15_000)))
    assert world.tick(standby).election == "elected"
    assert world.tick(standby).election == "leading"
    assert world.tick(leader).election == "following"
