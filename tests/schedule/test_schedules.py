"""Schedules as a program sees them: saved, listed, paused, triggered, declared, fired by a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import AsyncWaypost, CatchUp, Message, Waypost
from waypost.codec import open_envelope
from waypost.errors import ConfigurationError, InvalidHeaders, InvalidSchedule, InvalidTime, UnknownSchedule
from waypost.operations.flow import Sleep
from waypost.operations.schedules import derived_key, make_spec
from waypost.schedule.loop import BackgroundLoop
from waypost.schedule.scheduler import Tick
from waypost.values import StoredSchedule


@pytest.mark.promise("CRON-5", "CRON-7")
def test_a_schedule_is_saved_under_its_stable_key_and_listed_with_its_next_fires(harness: Harness) -> None:
    saved = harness.save_schedule(
        "rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", missed=CatchUp(10), body={"kind": "daily"},
        priority=7, group="finance", headers={"origin": "test"},
    )  # fmt: skip
    assert saved.key == "rollup::cron:0 9 * * *:Europe/Madrid"
    assert harness.save_schedule("ping", queue="pings", every=60).key == "ping::every:60000"
    listed = harness.schedules(count=3)
    assert {schedule.queue: schedule.name for schedule in listed} == {"reports": "rollup", "pings": "ping"}
    (rollup,) = harness.schedules("reports", count=3)
    assert [rollup.local(at).hour for at in rollup.next_fires] == [9, 9, 9]
    assert (rollup.body, rollup.missed, rollup.priority, rollup.group) == ({"kind": "daily"}, CatchUp(10), 7, "finance")
    assert (rollup.paused, rollup.fires, rollup.missed_fires, rollup.declared) == (False, 0, 0, False)


@pytest.mark.promise("CRON-5")
def test_saving_again_changes_nothing_and_a_given_key_keeps_one_schedule(harness: Harness) -> None:
    first = harness.save_schedule("rollup", queue="reports", every=30, key="the one")
    assert len(first.next_fires) == 1
    assert harness.save_schedule("rollup", queue="reports", every=30, key="the one") == first
    changed = harness.save_schedule("rollup", queue="reports", cron="@daily", key="the one")
    assert (changed.cron, changed.every) == ("@daily", None)
    assert [schedule.key for schedule in harness.schedules()] == ["the one"]


@pytest.mark.promise("CRON-7")
def test_a_schedule_is_paused_resumed_and_removed_by_name_or_key(harness: Harness) -> None:
    saved = harness.save_schedule("rollup", queue="reports", every=3600)
    assert harness.pause_schedule("rollup") is True
    assert harness.pause_schedule(saved.key, queue="reports") is False
    (paused,) = harness.schedules()
    assert (paused.paused, paused.next_fires) == (True, [])
    assert harness.resume_schedule("rollup") is True
    (resumed,) = harness.schedules()
    assert resumed.next_fire == saved.next_fire
    assert harness.remove_schedule("rollup") is True
    assert harness.remove_schedule("rollup") is False
    assert harness.schedules() == []


@pytest.mark.promise("CRON-7")
def test_a_trigger_publishes_now_with_the_name_and_the_moment(harness: Harness) -> None:
    saved = harness.save_schedule("rollup", queue="reports", cron="@yearly", body=[1, 2], headers={"origin": "test"})
    published = harness.trigger_schedule("rollup")
    with harness.receive("reports", wait=5) as message:
        assert message.id == published.id
        assert message.body == [1, 2]
        assert message.headers["waypost-schedule"] == "rollup"
        assert message.headers["origin"] == "test"
        assert isinstance(message.instant, datetime)
    assert harness.schedules()[0].next_fire == saved.next_fire
    names = [event.schedule for event in harness.history("reports", published.id) if event.event == "published"]
    assert names == [saved.key]


@pytest.mark.promise("CRON-7")
def test_an_unknown_or_ambiguous_name_is_an_error(harness: Harness) -> None:
    for change in (harness.pause_schedule, harness.resume_schedule, harness.trigger_schedule):
        with pytest.raises(UnknownSchedule, match="no schedule 'nothing'"):
            change("nothing")
    harness.save_schedule("twice", queue="a", every=60)
    harness.save_schedule("twice", queue="b", every=60)
    with pytest.raises(UnknownSchedule, match="several"):
        harness.remove_schedule("twice")
    assert harness.remove_schedule("twice", queue="a") is True


@pytest.mark.promise("CRON-7", "CRON-1")
def test_declared_functions_run_by_their_schedules_and_are_saved_when_a_worker_starts(harness: Harness) -> None:
    ran: list[Any] = []
    instants: list[datetime | None] = []

    @cast(Waypost, harness.post).every(0.1, body="tick")
    async def heartbeat(body: str, message: Message[str]) -> None:
        ran.append(body)
        instants.append(message.instant)

    @cast(Waypost, harness.post).cron("0 9 * * *", tz="Europe/Madrid", missed="once", queue="reports", name="rollup")
    def report() -> None:
        ran.append("report")

    assert harness.schedules() == []
    with harness.working():
        until(lambda: ran.count("tick") >= 5, "five ticks")
    found = {schedule.name: schedule for schedule in harness.schedules()}
    assert (found["heartbeat"].queue, found["heartbeat"].key, found["heartbeat"].declared) == (
        "heartbeat", "heartbeat", True,
    )  # fmt: skip
    assert (found["rollup"].queue, found["rollup"].missed, found["rollup"].tz) == ("reports", "once", "Europe/Madrid")
    assert "report" not in ran
    assert len(set(instants)) == len(instants)
    assert found["heartbeat"].fires >= 5


@pytest.mark.promise("CRON-1", "CRON-7")
def test_a_worker_works_when_a_declared_schedule_is_over(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []
    # An earlier release of the program declared it with another rule.
    harness.save_schedule("rollup", queue="reports", cron="@yearly", key="rollup")

    @cast(Waypost, harness.post).cron("@daily", end=datetime(2020, 1, 1, tzinfo=UTC), queue="reports", name="rollup")
    def report(body: str) -> None:
        ran.append(body)

    @cast(Waypost, harness.post).every(60, end=datetime(2020, 1, 1, tzinfo=UTC))
    def heartbeat() -> None: ...

    with caplog.at_level(logging.WARNING, "waypost"), harness.working():
        harness.publish("reports", "by hand")
        until(lambda: ran, "the message was handled")
    found = {schedule.name: (schedule.next_fires, schedule.declared) for schedule in harness.schedules()}
    assert found == {"rollup": ([], True), "heartbeat": ([], True)}
    over = [record.__dict__["schedule"] for record in caplog.records if getattr(record, "event", "") == "schedule_over"]
    assert sorted(over) == ["heartbeat", "rollup"]
    with pytest.raises(InvalidSchedule, match="would never fire"):
        harness.save_schedule("once more", queue="reports", every=60, end=datetime(2020, 1, 1, tzinfo=UTC))


@pytest.mark.promise("CRON-7")
def test_a_schedule_saved_while_a_worker_runs_is_fired_by_it(harness: Harness) -> None:
    ran: list[int] = []

    @harness.handler("reports")
    def handle(body: int) -> None:
        ran.append(body)

    with harness.working():
        harness.save_schedule("soon", queue="reports", every=0.05, body=7, max_fires=3, missed=CatchUp(3))
        until(lambda: len(ran) == 3, "three fires")
    (over,) = harness.schedules()
    assert (over.fires, over.next_fires) == (3, [])


@pytest.mark.promise("CRON-7")
def test_a_schedule_that_no_program_declares_any_more_is_named_and_kept(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.done(harness.post._run(_save_declared(harness, "old")))

    @cast(Waypost, harness.post).every(3600, queue="reports", name="new")
    def new() -> None: ...

    with caplog.at_level(logging.WARNING, "waypost"), harness.working():
        pass
    left = [vars(record) for record in caplog.records]
    assert [fields["schedule"] for fields in left if fields.get("event") == "schedule_left"] == ["old"]
    assert [schedule.key for schedule in harness.schedules()] == ["new", "old"]


@pytest.mark.promise("STORE-7")
def test_a_worker_that_declares_schedules_starts_beside_one_of_a_newer_release(harness: Harness) -> None:
    newer = StoredSchedule("newer", "v1", msgspec.msgpack.encode({"name": "newer", "planted": 1}), False, None, None)
    context = harness.post._context
    call = context.store.save_schedule("reports", newer, version=None, next_ms=None)
    harness.done(harness.post._run(context.attempt(call)))

    @cast(Waypost, harness.post).every(3600, queue="reports", name="new")
    def new() -> None: ...

    with harness.working():
        pass
    assert [schedule.key for schedule in harness.schedules()] == ["new"]
    assert harness.remove_schedule("newer") is True


@pytest.mark.promise("STORE-7")
def test_a_worker_starts_although_a_newer_release_has_fired_its_schedule(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    @cast(Waypost, harness.post).every(3600, queue="reports", name="tick")
    def tick() -> None: ...

    with harness.working():
        pass
    context = harness.post._context
    listing = harness.done(harness.post._run(context.attempt(context.store.schedules("reports"))))
    (found,) = listing.schedules
    newer = msgspec.structs.replace(found, version="v1", state=msgspec.msgpack.encode({"planted": 1}))
    call = context.store.save_schedule("reports", newer, version=found.version, next_ms=found.next_ms)
    harness.done(harness.post._run(context.attempt(call)))
    caplog.clear()
    with harness.working():
        pass
    assert "schedule_unreadable" in [getattr(one, "event", None) for one in caplog.records]


def _save_declared(harness: Harness, name: str) -> Any:
    from waypost.operations.schedules import save

    return save(harness.post._context, "reports", name, make_spec(name, every=3600, declared=True))


@pytest.mark.promise("TIMER-1", "PUB-6")
def test_a_message_that_is_rescheduled_comes_again_with_its_key_and_body(harness: Harness) -> None:
    harness.publish("checks", {"n": 1}, key="check:1", headers={"a": "b"}, priority=8, group="g")
    with harness.receive("checks", wait=5) as message:
        next_id = message.reschedule(0.01)
    with harness.receive("checks", wait=5) as again:
        assert (again.id, again.key, again.body) == (next_id, "check:1", {"n": 1})
        assert (again.headers, again.priority, again.group) == ({"a": "b"}, 8, "g")
    assert harness.ledger("checks").done == 2


@pytest.mark.promise("TIMER-1", "PUB-6")
def test_a_newer_message_of_its_key_goes_before_one_that_was_rescheduled(harness: Harness) -> None:
    harness.publish("checks", 1, key="check")
    with harness.receive("checks", wait=5) as message:
        message.reschedule(3600)
        # The next one is published while this one runs: that one counts.
        newer = harness.publish("checks", 2, key="check", on_conflict="replace")
    with harness.receive("checks", wait=5) as again:
        assert (again.id, again.body) == (newer.id, 2)
    until(lambda: harness.ledger("checks").done == 2, "both done")
    assert harness.ledger("checks").delayed == 0


@pytest.mark.promise("TIMER-1")
def test_timers_are_listed_before_a_time(harness: Harness) -> None:
    harness.publish("checks", 1, delay=60)
    harness.publish("checks", 2, delay=7200)
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert [timer.body for timer in harness.timers("checks", before=soon)] == [1]
    assert [timer.body for timer in harness.timers("checks")] == [1, 2]


@pytest.mark.promise("TIMER-4")
def test_a_promoter_runs_in_a_worker_or_alone(url: str, namespace: str) -> None:
    ticks: list[Any] = []
    stop = threading.Event()
    with Waypost(url, namespace=namespace) as post:
        post.publish("checks", 1, delay=0.05)
        thread = threading.Thread(target=post.run_promoter, args=(stop,), kwargs={"on_tick": ticks.append})
        thread.start()
        until(lambda: post.ledger("checks").ready == 1, "the promotion")
        stop.set()
        thread.join(10)
        assert sum(tick.promoted for tick in ticks) == 1
        assert ticks[0].election == "elected"
        assert {event.cause for event in post.journal("checks").events if event.event == "promoted"} == {"due"}


@pytest.mark.promise("CRON-1", "CRON-2")
@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [
        ({}, InvalidSchedule, "either cron"),
        ({"cron": "@daily", "every": 5}, InvalidSchedule, "either cron"),
        ({"cron": "61 * * * *"}, InvalidSchedule, "minutes: 61"),
        ({"cron": "0 0 30 2 *"}, InvalidSchedule, "never occurs"),
        ({"cron": "@daily", "tz": "Mars/Olympus"}, InvalidSchedule, "time zone 'Mars/Olympus'"),
        ({"every": 0}, InvalidSchedule, "from a millisecond"),
        ({"every": 0.0004}, InvalidSchedule, "from a millisecond"),
        ({"every": float("nan")}, InvalidSchedule, "number of seconds"),
        ({"every": True}, InvalidSchedule, "number of seconds"),
        ({"every": 5, "tz": "Europe/Madrid"}, InvalidSchedule, "no time zone"),
        ({"every": 5, "missed": "all"}, InvalidSchedule, "CatchUp"),
        ({"every": 5, "max_fires": 0}, InvalidSchedule, "max_fires"),
        ({"every": 5, "jitter": -1}, InvalidSchedule, "jitter"),
        ({"every": 5, "grace": "x"}, InvalidSchedule, "grace"),
        ({"every": 5, "start": datetime(2026, 1, 1)}, InvalidTime, "time zone"),  # noqa: DTZ001
        (
            {"every": 5, "start": datetime(2027, 1, 1, tzinfo=UTC), "end": datetime(2026, 1, 1, tzinfo=UTC)},
            InvalidSchedule, "before its start",
        ),
        ({"every": 5, "end": datetime(2020, 1, 1, tzinfo=UTC)}, InvalidSchedule, "never fire"),
        ({"every": 5, "headers": {"a": 1}}, InvalidHeaders, "must be text"),
        ({"every": 5, "missed": CatchUp(500), "body": "x" * 20_000}, InvalidSchedule, "one step may publish"),
    ],
)  # fmt: skip
def test_an_invalid_rule_is_refused_when_it_is_saved(rule: dict[str, Any], error: type[Exception], match: str) -> None:
    with Waypost("memory://refused") as post:
        with pytest.raises(error, match=match):
            post.save_schedule("bad", queue="reports", **rule)
        assert post.schedules() == []


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("count", [0, 513, 1.5, True])
def test_a_catch_up_has_a_bound(count: Any) -> None:
    with pytest.raises(InvalidSchedule, match="from 1 to 512"):
        CatchUp(count)


@pytest.mark.promise("CRON-5")
def test_keys_are_made_of_name_and_rule() -> None:
    assert derived_key(make_spec("a", cron=" 0  9 * * * ", tz="z")) == "a::cron:0 9 * * *:UTC"
    assert derived_key(make_spec("a", every=timedelta(milliseconds=1500))) == "a::every:1500"


@pytest.mark.promise("CRON-7")
def test_a_name_is_declared_once() -> None:
    post = Waypost("memory://declared")

    @post.every(5)
    def tick() -> None: ...

    with pytest.raises(ConfigurationError, match="schedule 'tick' already"):
        post.every(5)(tick)
    with pytest.raises(InvalidSchedule, match="minutes: 99"):
        post.cron("99 * * * *")(tick)


@pytest.mark.promise("CRON-7", "SEE-3")
def test_the_redact_hook_sees_what_a_schedule_publishes() -> None:
    def redact(queue: str, body: Any, headers: dict[str, str]) -> tuple[Any, dict[str, str]]:
        return "(hidden)", {"schedule": headers["waypost-schedule"]}

    with Waypost("memory://redacted", redact=redact) as post:
        post.configure("reports", journal="full")
        post.save_schedule("rollup", queue="reports", cron="@daily", body={"secret": 1})
        published = post.trigger_schedule("rollup")
        (event,) = [event for event in post.history("reports", published.id) if event.event == "published"]
        assert event.body is not None
        envelope = open_envelope(event.body)
        assert (envelope.data, envelope.headers) == (b"(hidden)", {"schedule": "rollup"})


class StubTicker:
    """A scheduler whose tick sleeps for long, and whose end may fail."""

    role = "scheduler"

    def __init__(self, *, fails: bool = False) -> None:
        self.candidate: Any = None
        self.context: Any = None
        self._fails = fails
        self.ticking = threading.Event()

    def tick(self) -> Any:
        self.ticking.set()
        if not self._fails:
            yield Sleep(3600)
        return Tick("leading", _sleep_seconds=0.01)

    def hand_over(self) -> Any:
        yield Sleep(0)
        if self._fails:
            raise RuntimeError("a bug")

    def refresh(self) -> None: ...
    def listen(self, wake: Callable[[], None]) -> None: ...


@pytest.mark.promise("CRON-7")
@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_whose_tick_hangs_is_cancelled_and_one_that_fails_is_logged(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncWaypost("memory://") as post:
            executor = await post.store.connect_async(start_timeout=5)
            ticker = StubTicker(fails=fails)
            loop = BackgroundLoop(executor, ticker)
            loop.start()
            task = loop._task
            assert task is not None
            while not ticker.ticking.is_set():  # noqa: ASYNC110 - another kind of event
                await asyncio.sleep(0.001)
            await loop.stop(timeout=20 if fails else 0.01)
            assert task.done()
            assert task.cancelled() is not fails

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [vars(record).get("event") for record in caplog.records] == (["scheduler_ended"] if fails else [])


@pytest.mark.promise("CRON-7", "TIMER-4")
@pytest.mark.parametrize("role", ["scheduler", "promoter"])
def test_a_loop_on_an_event_loop_runs_until_it_is_cancelled_and_hands_over(url: str, namespace: str, role: str) -> None:
    async def main() -> None:
        async with AsyncWaypost(url, namespace=namespace) as post:
            await post.save_schedule("tick", queue="ticks", every=0.05)
            await post.publish("later", 1, delay=0.05)
            ticks: list[Any] = []
            run = post.run_scheduler if role == "scheduler" else post.run_promoter
            running = asyncio.create_task(run(on_tick=ticks.append))
            queue = "ticks" if role == "scheduler" else "later"
            # What a tick has done is in the store before the tick is reported.
            while not ticks or (await post.ledger(queue)).ready == 0:  # noqa: ASYNC110 - the store sends no event
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert ticks[0].election == "elected"
            executor = await post.store.connect_async(start_timeout=5)
            assert (await executor.run(post.store.elect(role, "next", 1_000))).leader == "next"
            await executor.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.promise("CRON-7")
def test_a_worker_may_run_without_a_scheduler() -> None:
    with Waypost("memory://alone") as post:

        @post.every(0.01)
        def heartbeat() -> None: ...

        with post.worker(scheduler=False):
            until(post.schedules, "the schedule is saved")
        assert post.schedules()[0].fires == 0


@pytest.mark.promise("CRON-7")
def test_a_queue_has_a_bound_of_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.operations.schedules.SCHEDULES_MAX", 2)
    with Waypost("memory://bounded") as post:
        for name in ("a", "b", "a"):
            post.save_schedule(name, queue="reports", every=60)
        with pytest.raises(InvalidSchedule, match="the limit"):
            post.save_schedule("c", queue="reports", every=60)
