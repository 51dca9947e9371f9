"""The overlap rule: what happens at an instant while the run before has not ended."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from tests.schedule.test_backfill import counts, fill
from tests.schedule.test_command import run_command
from tests.schedule.test_scheduler import QUEUE, World, world_of
from tests.waiting import until
from waypost import AsyncWaypost, CatchUp, Waypost
from waypost.errors import InvalidSchedule
from waypost.identity import Session
from waypost.operations import schedules as operations
from waypost.operations.flow import drive
from waypost.policy import Overlap
from waypost.schedule.scheduler import DEPUTY_ROLE, RUN_POLL_SECONDS_MAX, Scheduler, Tick
from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.store.sqlite import SqliteStore
from waypost.testing.clock import ClockTime, ManualClock
from waypost.values import Lease, Settlement


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    store = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "runs.db", clock=clock)
    world = world_of(cast(Store, store), clock)
    yield world
    world.executor.close()


class Runs:
    """A worker's part: claims the message of a run, and settles it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._session = Session(ClockTime(world.clock))

    def start(self) -> Lease:
        claim = self._world.store.claim(QUEUE, 1, self._session.operation(QUEUE), worker="w")
        (lease,) = self._world.executor.run(claim).leases
        return lease

    def end(self, lease: Lease, outcome: Any = "done", **more: Any) -> None:
        settled = Settlement(lease.id, lease.token, lease.nonce, outcome, **more)
        call = self._world.store.settle(QUEUE, [settled], self._session.operation(QUEUE))
        assert self._world.executor.run(call).result != ["lost"]


def skipped_events(world: World) -> list[Any]:
    page = world.executor.run(world.store.journal(QUEUE, 0, 1_000))
    return [event for event in page.events if event.event == "skipped"]


def begin(world: World, overlap: Overlap, **more: Any) -> tuple[Scheduler, Runs]:
    """A schedule every ten seconds whose first run has been published and claimed; the lease is long."""
    world.executor.run(world.store.configure(QUEUE, {"lease_ms": 10_000_000}))
    world.save(every=10.0, overlap=overlap, **more)
    scheduler = world.scheduler(ttl_ms=10_000_000)
    world.clock.advance(10)
    assert tick_all(world, scheduler).fires == 1
    return scheduler, Runs(world)


def tick_all(world: World, scheduler: Scheduler) -> Tick:
    """Tick until there is nothing to do; return what all these ticks did."""
    done = world.tick(scheduler)
    while done.sleep <= timedelta(milliseconds=2):
        more = world.tick(scheduler)
        fires, overlaps = done.fires + more.fires, done.overlaps + more.overlaps
        done = structs.replace(more, fires=fires, overlaps=overlaps, missed=done.missed + more.missed)
    return done


def advance_and_tick(world: World, scheduler: Scheduler) -> Tick:
    world.clock.advance(RUN_POLL_SECONDS_MAX)
    return tick_all(world, scheduler)


@pytest.mark.promise("CRON-8")
def test_runs_may_overlap_by_default(world: World) -> None:
    scheduler, _ = begin(world, "allow")
    for _ in range(3):
        world.clock.advance(10)
        assert tick_all(world, scheduler).fires == 1
    assert world.stored().overlap == "allow"


@pytest.mark.promise("CRON-8", "PUB-10")
@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
def test_a_schedule_goes_on_when_its_run_has_lapsed(world: World, overlap: Overlap) -> None:
    scheduler, _ = begin(world, overlap, expires=15)
    world.clock.advance(10)
    assert tick_all(world, scheduler).fires == 0
    world.clock.advance(10)
    # No worker and no promoter has ended it.
    assert tick_all(world, scheduler).fires == 1
    assert world.executor.run(world.store.stats(QUEUE)).ledger.dropped == 0


@pytest.mark.promise("CRON-8", "SEE-3")
def test_skip_omits_instants_until_the_run_has_ended(world: World) -> None:
    scheduler, runs = begin(world, "skip")
    run = runs.start()
    for _ in range(2):
        world.clock.advance(10)
        tick = tick_all(world, scheduler)
        assert (tick.fires, tick.missed, tick.overlaps) == (0, 0, 1)
    runs.end(run, "retry", after_ms=25_000)  # a run that waits for its retry goes on
    world.clock.advance(10)
    assert tick_all(world, scheduler).overlaps == 1
    world.clock.advance(20)
    tick_all(world, scheduler)
    runs.end(runs.start())
    world.clock.advance(10)
    assert tick_all(world, scheduler).fires == 1
    schedule = world.stored()
    assert (schedule.fires, schedule.skipped_fires, schedule.missed_fires) == (2, 4, 1)
    events = skipped_events(world)
    assert [event.due_ms - world.start_ms for event in events] == [20_000, 30_000, 40_000, 60_000]
    assert {(event.schedule, event.cause, event.reason) for event in events} == {(schedule.key, "overlap", run.id)}
    reported = [event for event in world.events if event.event == "fired" and event.reason == "overlap"]
    assert [event.outcome for event in reported] == ["skipped"] * 4


@pytest.mark.promise("CRON-8", "CRON-6")
def test_one_standby_fires_what_waits_for_a_run_in_place_of_its_dead_leader(world: World) -> None:
    leader, runs = begin(world, "queue_one")
    run = runs.start()
    world.clock.advance(10)
    tick_all(world, leader)  # it lets the fire wait, and dies
    deputy, other = world.scheduler("b", ttl_ms=10_000_000), world.scheduler("c", ttl_ms=10_000_000)
    for _ in range(40):  # as long as the run goes on, the deputy sees whether it has ended
        world.clock.advance(0.1)
        assert world.tick(deputy).fires == 0
        tick = world.tick(other)
        assert tick.fires == 0
    assert tick.sleep > timedelta(seconds=RUN_POLL_SECONDS_MAX - 1), "the other one does not"
    assert world.executor.run(world.store.elect(DEPUTY_ROLE, "d", 1)).leader == "b"
    runs.end(run)
    fires = 0
    for _ in range(round(RUN_POLL_SECONDS_MAX * 10) + 1):
        world.clock.advance(0.1)
        assert world.tick(other).fires == 0
        fires += world.tick(deputy).fires
    assert fires == 1
    # It goes on in the place of the leader: it fires, or lets wait, one instant after the other.
    run = runs.start()
    world.clock.advance(2)
    assert sum(advance_and_tick(world, deputy).overlaps for _ in range(4)) == 1
    runs.end(run)
    assert advance_and_tick(world, deputy).fires == 1


@pytest.mark.promise("CRON-8")
def test_queue_one_fires_the_newest_instant_when_the_run_ends(world: World) -> None:
    scheduler, runs = begin(world, "queue_one", grace=1)
    run = runs.start()
    for _ in range(3):
        world.clock.advance(10)
        tick_all(world, scheduler)
    schedule = world.stored()
    assert schedule.waiting_fire is not None
    assert (schedule.fires, schedule.skipped_fires) == (1, 2)
    assert round(schedule.waiting_fire.timestamp() * 1000) - world.start_ms == 40_000
    world.clock.advance(5)
    assert tick_all(world, scheduler).fires == 0
    runs.end(run, "dead", reason="rejected")
    world.clock.advance(RUN_POLL_SECONDS_MAX)
    assert tick_all(world, scheduler).fires == 1, "it waited, so its grace does not matter"
    assert world.instants() == [40_000]
    schedule = world.stored()
    assert (schedule.fires, schedule.waiting_fire, schedule.skipped_fires) == (2, None, 2)
    world.clock.advance(3)
    assert tick_all(world, scheduler).overlaps == 1, "the run of the one that waited goes on"
    assert [event.due_ms - world.start_ms for event in skipped_events(world)] == [20_000, 30_000]


@pytest.mark.promise("CRON-8", "CRON-6")
def test_a_fire_that_waits_is_fired_once_by_the_scheduler_that_takes_over(world: World) -> None:
    first, runs = begin(world, "queue_one")
    run = runs.start()
    world.clock.advance(10)
    tick_all(world, first)
    second = world.scheduler("b")
    runs.end(run)
    drive(world.executor, first.hand_over())
    fired = [tick_all(world, scheduler).fires for scheduler in (second, first, second, first)]
    assert sum(fired) == 1
    assert world.instants() == [20_000]


@pytest.mark.promise("CRON-8")
def test_a_trigger_and_a_backfill_ignore_the_rule_and_backfill_has_what_was_skipped(world: World) -> None:
    scheduler, runs = begin(world, "skip")
    run = runs.start()
    world.clock.advance(10)
    assert tick_all(world, scheduler).overlaps == 1
    drive(world.executor, operations.trigger(world.context, "rollup", None))
    assert counts(fill(world, 1, 20)) == (0, 1, 0)
    world.clock.advance(1)
    assert counts(fill(world, 1, 21)) == (1, 1, 0)
    runs.end(run)
    world.clock.advance(9)
    assert tick_all(world, scheduler).fires == 1


@pytest.mark.promise("CRON-8")
@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
def test_a_skipped_fire_does_not_use_up_max_fires(world: World, overlap: Overlap) -> None:
    scheduler, runs = begin(world, overlap, max_fires=2)
    run = runs.start()
    for _ in range(3):
        world.clock.advance(10)
        assert tick_all(world, scheduler).fires == 0
    runs.end(run)
    fired = 0
    for _ in range(4):
        world.clock.advance(10)
        fired += tick_all(world, scheduler).fires
        if world.instants():
            runs.end(runs.start())
    assert fired == 1
    assert (world.stored().fires, world.stored().next_fires) == (2, [])


@pytest.mark.promise("CRON-8")
def test_the_rule_survives_a_pause_and_a_changed_body(world: World) -> None:
    scheduler, runs = begin(world, "skip")
    run = runs.start()
    drive(world.executor, operations.pause(world.context, "rollup", None))
    drive(world.executor, operations.resume(world.context, "rollup", None))
    world.save(every=10.0, overlap="skip", body={"other": 1})
    scheduler.refresh()
    world.clock.advance(10)
    assert tick_all(world, scheduler).overlaps == 1
    runs.end(run)
    world.clock.advance(10)
    assert tick_all(world, scheduler).fires == 1


@pytest.mark.promise("CRON-8")
def test_a_fire_that_waits_fires_at_once_when_runs_may_overlap_from_now_on(world: World) -> None:
    scheduler, runs = begin(world, "queue_one")
    run = runs.start()
    world.clock.advance(10)
    assert tick_all(world, scheduler).overlaps == 1
    world.save(every=10.0, overlap="allow")
    scheduler.refresh()
    assert advance_and_tick(world, scheduler).fires == 1
    stored = world.stored()
    assert (stored.waiting_fire, stored.fires, stored.skipped_fires) == (None, 2, 0)
    runs.end(run)
    assert advance_and_tick(world, scheduler).fires == 0


@pytest.mark.promise("CRON-8")
def test_a_fire_that_waited_does_not_set_back_the_last_fire(world: World) -> None:
    scheduler, runs = begin(world, "queue_one")
    runs.start()
    world.clock.advance(10)
    assert tick_all(world, scheduler).overlaps == 1
    for seconds in (1, 3, 3, 2.5):  # it is tried less and less often
        world.clock.advance(seconds)
        tick_all(world, scheduler)
    world.save(every=10.0, overlap="allow")
    scheduler.refresh()
    world.clock.advance(0.5)
    assert tick_all(world, scheduler).fires == 1
    newest = world.stored()
    assert newest.waiting_fire is not None
    assert advance_and_tick(world, scheduler).fires == 1
    waited = world.stored()
    assert (waited.waiting_fire, waited.fires, waited.last_fire) == (None, 3, newest.last_fire)


@pytest.mark.promise("CRON-8")
def test_wrong_rules_are_refused_and_a_declared_handler_skips() -> None:
    with pytest.raises(InvalidSchedule, match='overlap is "allow", "skip" or "queue_one", not \'wait\''):
        operations.make_spec("x", every=1, overlap=cast(Any, "wait"))
    with pytest.raises(InvalidSchedule, match='CatchUp publishes several messages at once, which overlap="skip"'):
        operations.make_spec("x", every=1, overlap="skip", missed=CatchUp(2))
    assert operations.make_spec("x", every=1).overlap == "allow"
    assert operations.make_spec("x", every=1, declared=True).overlap == "skip"
    assert operations.make_spec("x", every=1, declared=True, missed=CatchUp(2)).overlap == "allow"
    post = AsyncWaypost("memory://declared-overlap")

    @post.every(timedelta(minutes=5), overlap="queue_one")
    async def tidy() -> None: ...

    @post.cron("@daily")
    async def rollup() -> None: ...

    assert {one.key: one.spec.overlap for one in post._declared.values()} == {"tidy": "queue_one", "rollup": "skip"}


@pytest.mark.promise("CRON-8", "FACE-2")
def test_the_command_saves_the_rule_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    save = ["save", "rollup", "--queue", "reports", "--url", url]
    run_command(capsys, *save, "--every", "60", "--overlap", "skip")
    run_command(capsys, *save, "--jitter", "5")
    with Waypost(url) as post:
        assert post.schedules()[0].overlap == "skip"
    assert "CatchUp" in run_command(capsys, *save, "--missed", "3", code=2)
    run_command(capsys, *save, "--every", "60", "--reset")
    with Waypost(url) as post:
        assert post.schedules()[0].overlap == "allow"


@pytest.mark.promise("CRON-8")
def test_a_scheduler_waits_for_the_end_of_a_run_on_every_store(url: str, namespace: str) -> None:
    with Waypost(url, namespace=namespace) as post:
        post.save_schedule("one", queue="runs", every=0.2, overlap="queue_one", missed="once")
        scheduler, executor = Scheduler(post._context), post._connected()

        def schedule() -> Any:
            drive(executor, scheduler.tick())
            return post.schedules("runs")[0]

        until(lambda: schedule().skipped_fires >= 2, "two instants that were skipped")
        assert schedule().fires == 1
        with post.receive("runs", wait=20) as message:
            assert message is not None
        until(lambda: schedule().fires == 2, "the fire that waited")
        assert post.ledger("runs").published == 2
        assert [event.schedule for event in post.journal("runs").events if event.event == "skipped"][:1] == [
            schedule().key
        ]
