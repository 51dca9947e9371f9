"""What clients return has datetimes in UTC and timedeltas, and one form in JSON."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import waypost
from tests.unit.clients import MODES, open_client
from waypost import Constant, Exponential, Linear, Observed, Retry, Snooze, Waypost
from waypost.errors import InvalidPolicy
from waypost.outbox.relay.target import RelayRecord
from waypost.policy import format_rate, parse_rate
from waypost.schedule.promoter import PromoterTick
from waypost.schedule.scheduler import Tick
from waypost.testing.clock import ManualClock
from waypost.times import to_datetime
from waypost.values import QueueHealth
from waypost.views import Event, Policy, RegisteredWorker, Stats, to_json
from waypost.worker.sync_worker import SyncWorker
from waypost.worker.worker import Worker

SECOND = timedelta(seconds=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=[(mode, store) for mode in MODES for store in ("memory", "sqlite")], ids="-".join)
def post(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Any]:
    mode, store = request.param
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'queues.db'}"
    with open_client(mode, url, clock=clock) as client:
        yield client


# ---- names -------------------------------------------------------------------------------------------------------


#: What the parts of waypost call among themselves, and the store, whose contract has milliseconds.
INNER = {"from_record", "heartbeat", "plain_done", "settlement", "store"}


def public_classes() -> set[type]:
    """The exported classes, those that callbacks and methods get or return, and the classes of their public parts."""
    begin: list[Any] = [getattr(waypost, name) for name in waypost.__all__]
    begin += [Worker, SyncWorker, Tick, PromoterTick, RelayRecord]
    found: set[type] = set()
    while begin:
        one = begin.pop()
        begin += typing.get_args(one)
        kind = typing.get_origin(one) or one
        if isinstance(kind, type) and kind.__module__.startswith("waypost") and kind not in found:
            found.add(kind)
            begin += [hint for _, hint in public_parts(kind)]
    return found


def public_parts(kind: type) -> Iterator[tuple[str, Any]]:
    """The names of a class that programs use, parameters included, with the types of what they read."""
    for name in dir(kind):
        if name in INNER or (name.startswith("_") and name != "__init__"):
            continue
        member = inspect.getattr_static(kind, name)
        function = member.fget if isinstance(member, property) else member
        yield name, None
        if isinstance(function, types.FunctionType):
            for parameter, text in function.__annotations__.items():
                yield parameter, resolve(text, function.__globals__) if parameter == "return" else None
    for name, text in getattr(kind, "__annotations__", {}).items():
        if not name.startswith("_"):
            yield name, resolve(text, vars(sys.modules[kind.__module__]))


def resolve(text: Any, names: dict[str, Any]) -> Any:
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": text}), dict(names))["it"]
    except (NameError, TypeError):
        return None  # imported for type checkers only, or a variable of a class


@pytest.mark.promise("FACE-1")
def test_no_public_name_is_a_number_of_milliseconds() -> None:
    classes = public_classes()
    assert {Stats, Event, Policy, RegisteredWorker, QueueHealth, Tick} <= classes
    named = {(kind.__name__, name) for kind in classes for name, _ in public_parts(kind) if name.endswith("_ms")}
    assert named == set()


# ---- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1")
def test_a_message_and_its_events_have_datetimes_in_utc_and_timedeltas(post: Any, clock: ManualClock) -> None:
    began = to_datetime(clock())
    published = post.publish("orders", 1, delay=timedelta(seconds=5))
    (timer,) = post.timers("orders", before=began + 6 * SECOND)
    assert (timer.published_at, timer.ready_at, timer.claimed_at) == (began, began + 5 * SECOND, None)
    assert timer.ready_at.tzinfo is UTC
    clock.advance(7)
    with post.receive("orders") as message:
        assert (message.published_at, message.ready_at) == (began, began + 5 * SECOND)
        assert message.claimed_at == began + 7 * SECOND
        (leased,) = post.messages("orders", "leased")
        assert (leased.claimed_at, leased.lease_end_at) == (began + 7 * SECOND, began + 67 * SECOND)
        assert (leased.token, leased.cancel_requested, leased.size > 0) == (message.token, False, True)
        clock.advance(0.25)
    events = {event.event: event for event in post.history(published)}
    assert events["published"].due_at == began + 5 * SECOND
    assert events["claimed"].wait_time == 2 * SECOND
    assert (events["done"].run_time, events["done"].at) == (0.25 * SECOND, began + 7.25 * SECOND)
    assert post.journal("orders").events == post.history(published)


@pytest.mark.promise("FACE-1", "SEE-5")
def test_stats_have_ages_and_times_to_the_next_moment(post: Any, clock: ManualClock) -> None:
    assert post.stats("orders").oldest_ready_age is None
    post.publish("orders", 1, priority=9)
    clock.advance(2)
    post.publish("orders", 2, delay=30)
    with post.receive("orders"):
        clock.advance(3)
        post.publish("orders", 3)
        clock.advance(1)
        stats = post.stats("orders", minutes=1)
        assert (stats.oldest_ready_age, stats.oldest_leased_age) == (SECOND, 4 * SECOND)
        assert (stats.next_due_in, stats.next_lease_end_in) == (26 * SECOND, 56 * SECOND)
        assert stats.at == to_datetime(clock())
        assert stats.minutes[-1].at == stats.at.replace(second=0, microsecond=0)


@pytest.mark.promise("QUEUE-2")
def test_the_policy_of_a_queue_is_read_by_the_names_by_which_it_is_set(post: Any) -> None:
    before = post.policy("orders")
    assert (before.lease, before.rate, before.dead_keep, before.completed) == (60 * SECOND, None, None, 0)
    changed = post.configure("orders", lease=timedelta(seconds=1.5), rate="10/500ms", dead_keep=3600, completed=5)
    assert (changed.lease, changed.rate, changed.dead_keep, changed.completed) == (
        1.5 * SECOND, "10/500ms", 3600 * SECOND, 5,
    )  # fmt: skip
    assert before.changed({"lease": 1.5, "rate": "10/500ms", "dead_keep": 3600, "completed": 5}) == changed
    with pytest.raises(InvalidPolicy, match="lease"):
        before.changed({"lease": -1})
    assert post.configure("orders", **msgspec.structs.asdict(before)) == before
    assert post.configure("orders", lease=None).lease is None


@pytest.mark.parametrize("rate", ["1/ms", "10/500ms", "5/s", "5/90s", "100/m", "7/2h", "999999999/999999h"])
def test_a_rate_is_written_as_it_is_read(rate: str) -> None:
    assert format_rate(*parse_rate(rate)) == rate
    assert format_rate(None, None) is None


def test_a_rate_has_the_largest_unit_that_fits() -> None:
    assert format_rate(*parse_rate("60/60000ms")) == "60/m"


@pytest.mark.promise("CRON-5")
def test_a_schedule_has_timedeltas_and_can_be_saved_with_them(post: Any, clock: ManualClock) -> None:
    saved = post.save_schedule("beat", queue="orders", every=timedelta(minutes=1), jitter=2, grace=timedelta(seconds=9))
    assert (saved.every, saved.jitter, saved.grace) == (60 * SECOND, 2 * SECOND, 9 * SECOND)
    assert saved.next_fires[0] >= to_datetime(clock()) + 60 * SECOND
    again = post.save_schedule("beat", queue="orders", every=saved.every, jitter=saved.jitter, grace=saved.grace)
    assert again.key == saved.key


def test_outcomes_have_their_pause_as_a_timedelta() -> None:
    assert Snooze(5).after == Snooze(timedelta(seconds=5)).after == Retry(5).after == 5 * SECOND
    assert Retry().after is None


def test_retry_policies_take_timedeltas_and_may_return_one(post: Any, clock: ManualClock) -> None:
    minute = timedelta(minutes=1)
    assert Constant(pause=minute, jitter=0).delay(1) == 60
    assert Linear(step=minute, cap=timedelta(seconds=90), jitter=0).delay(2) == 90
    assert Exponential(first=minute, cap=timedelta(hours=1), total_cap=minute, jitter=0).delay(2) is None
    with pytest.raises(InvalidPolicy, match="pause"):
        Constant(pause=timedelta(seconds=-1))

    class Own:
        def delay(self, attempt: int, error: BaseException | None = None) -> timedelta:
            return minute

    post.publish("orders", 1)
    with pytest.raises(ZeroDivisionError), post.receive("orders", retry=Own()):
        raise ZeroDivisionError
    (waiting,) = post.timers("orders")
    assert waiting.ready_at == to_datetime(clock()) + minute


@pytest.mark.promise("SEE-1")
def test_an_observed_event_computes_its_times_and_shows_them(tmp_path: Path) -> None:
    seen: list[Observed] = []
    before = datetime.now(UTC) - SECOND
    with Waypost("memory://", on_event=seen.append) as post:
        post.publish("orders", 1)
        with post.receive("orders"):
            pass
    (claimed,) = (event for event in seen if event.event == "claimed")
    assert before < claimed.at < datetime.now(UTC) + SECOND
    assert claimed.wait_time is not None
    assert claimed.wait_time >= timedelta(0)
    assert claimed.run_time is None
    text = repr(claimed)
    assert text.startswith("Observed(event='claimed', outcome='success', queue='orders', at=datetime.datetime(")
    assert "wait_time=datetime.timedelta(" in text
    assert "_ms" not in text


# ---- JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-2")
def test_json_has_times_as_text_and_durations_in_seconds_with_the_unit_in_the_name() -> None:
    at = datetime(2026, 3, 6, 7, 0, 0, 250_000, tzinfo=UTC)
    event = Event("orders", 1, at, "done", token=2**60, run_time=timedelta(milliseconds=1_250), body=b"\xff")
    fields = to_json(event)
    assert (fields["at"], fields["run_time_seconds"]) == ("2026-03-06T07:00:00.250Z", 1.25)
    assert (fields["token"], fields["body"]) == (str(2**60), {"base64": "/w=="})
    # A duration that is not known has the same name.
    assert fields["wait_time_seconds"] is None
    assert "wait_time" not in fields
    health = to_json([QueueHealth("orders", 1, 0, 0, 0, timedelta(seconds=3))])
    assert health == [{
        "name": "orders", "concurrency": 1, "running": 0, "in_flight": 0, "handled": 0, "last_claim_age_seconds": 3.0,
    }]  # fmt: skip
    tick = to_json(Tick("leading", fires=1, lateness=timedelta(milliseconds=20), _sleep_seconds=0.5))
    assert tick == {
        "election": "leading", "fires": 1, "missed": 0, "lateness_seconds": 0.02, "sleep_seconds": 0.5,
        "overlaps": 0,
    }  # fmt: skip
    assert to_json({"at": at.replace(microsecond=0), 1: (None, True, 1.5, "text")}) == {
        "at": "2026-03-06T07:00:00Z", "1": [None, True, 1.5, "text"],
    }  # fmt: skip


@pytest.mark.promise("FACE-2")
def test_everything_that_a_client_returns_can_be_written_as_json(post: Any) -> None:
    published = post.publish("orders", 1)
    post.save_schedule("beat", queue="orders", every=60)
    values = [
        published, post.stats("orders", minutes=1), post.policy("orders"), post.history(published),
        post.journal("orders"), post.schedules(), post.workers(), post.ledger("orders"),
    ]  # fmt: skip
    text = msgspec.json.encode(to_json(values)).decode()
    assert '"every_seconds":60.0' in text
    assert '"lease_seconds":60.0' in text
    assert "_ms" not in text
