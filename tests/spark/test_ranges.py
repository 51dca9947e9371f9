"""Runs between two times, and days that are made anew from bronze."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec import structs

from tests.spark.lakes import live, plant, rows, tables
from tests.spark.shop import Shop
from waypost.cli.main import main
from waypost.errors import ConfigurationError, InvalidInput
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.lake import rebuild as rebuilding
from waypost.spark.lake import silver
from waypost.spark.lake.audit import audit
from waypost.spark.lake.compaction import remove_old_rows
from waypost.spark.lake.gold import replace_days
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    GOLD,
    GOLD_DEAD_LETTERS,
    GOLD_MINUTES,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
)
from waypost.times import to_datetime

pytestmark = pytest.mark.xdist_group("spark")
DAY_MS = 86_400_000
#: Noon, so that days are far from the times of the events.
NOON = datetime(2020, 3, 1, 12, tzinfo=UTC)
REFUSED = "2020-03-01 cannot be rebuilt: events before 2020-03-02 were deleted"
CLOSED = (SILVER_DELIVERIES, SILVER_MESSAGES)


def move(shop: Shop, days: int) -> None:
    """Move the events that are not dated yet to the noon of a day: each a millisecond after the one before."""
    noon = int((NOON + timedelta(days=days)).timestamp() * 1000)
    newest = int(datetime(2021, 1, 1, tzinfo=UTC).timestamp() * 1000)
    plant(shop, "UPDATE wp_journal SET at_ms = ? + number WHERE at_ms > ?", noon, newest)


def loaded(made: Pipeline, queue: str = "orders") -> list[int]:
    return sorted(row["number"] for row in rows(made, BRONZE_JOURNAL) if row["queue"] == queue)


@pytest.mark.promise("SPARK-4")
def test_a_run_ends_before_a_time_and_begins_new_queues_at_one(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    for day in range(4):
        orders.post.publish_many("orders", range(10))
        move(orders, day)
    begin, end = NOON.replace(hour=0) + timedelta(days=1), NOON.replace(hour=0) + timedelta(days=3)
    made = pipeline(orders)
    made.run(since=begin, until=end)
    assert loaded(made) == list(range(11, 31))
    assert made.lake.state.left_out == {"orders": 10}
    # The next run continues, whatever it is given as its beginning; and a range that is loaded is not loaded again.
    made.run(since=begin, until=end)
    made.run(since=end + timedelta(days=30))
    assert loaded(made) == list(range(11, 41))
    with pytest.raises(ConfigurationError, match="begins after event 10, and 2020-03-01T00:00:00Z is earlier"):
        made.run(since=begin - timedelta(days=1))
    assert made.lake.state.seen["orders"].not_seen == 10
    # What was left out is not called lost.
    found = audit(made)
    assert found.is_clean
    assert found.queues["orders"].undecided == found.not_seen == 10


@pytest.mark.promise("SPARK-4")
def test_a_beginning_is_kept_although_nothing_was_loaded(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    orders.post.publish_many("orders", range(5))
    move(orders, 0)
    made = pipeline(orders)
    made.run(since=NOON + timedelta(days=1))
    assert loaded(made) == []
    orders.post.publish_many("orders", range(3))
    orders.post.publish("mails", 1)
    pipeline(orders).run()
    assert (loaded(made), loaded(made, "mails")) == ([6, 7, 8], [1])


@pytest.mark.promise("SPARK-4")
def test_a_beginning_may_be_repeated_although_events_are_out_of_order(orders: Shop, tmp_path: Path) -> None:
    """Which event a time means is found by halving: when the journal has grown, it may be another one."""
    for day in range(3):
        orders.post.publish_many("orders", range(10))
        move(orders, day)
    begin = NOON.replace(hour=0) + timedelta(days=1)
    # An event with a time of the second day, as of a clock that was ahead, among those of the first.
    later = int((NOON + timedelta(days=1)).timestamp() * 1000)
    plant(orders, "UPDATE wp_journal SET at_ms = ? WHERE number = 9", later)
    made = Pipeline(cast("Any", None), str(tmp_path / "lake"), store=orders.url, partitions=1)
    made.prepare()

    def begin_at(at: datetime) -> int:
        with orders.bulk() as bulk:
            made.lake.refresh(to_write=True)
            made._begin(bulk, {"orders": bulk.bounds("orders")[1]}, int(at.timestamp() * 1000))
            return bulk.first_since("orders", int(at.timestamp() * 1000))

    assert begin_at(begin) == 11
    assert made.lake.state.left_out == {"orders": 10}
    orders.post.publish_many("orders", range(5))
    assert begin_at(begin) == 9
    for at in (begin, begin + timedelta(hours=1), begin + timedelta(days=300)):
        begin_at(at)
    assert (made.lake.state.left_out, made.lake.state.offsets) == ({"orders": 10}, {"orders": 10})
    with pytest.raises(ConfigurationError, match="begins after event 10, and 2020-03-01T00:00:00Z is earlier"):
        begin_at(begin - timedelta(days=1))


def test_times_of_a_run_have_a_zone_and_an_order(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(orders)
    with pytest.raises(InvalidInput, match="since is a datetime with a time zone"):
        made.run(since=datetime(2020, 3, 1))  # noqa: DTZ001
    with pytest.raises(InvalidInput, match="must be before its end"):
        made.run(since=NOON, until=NOON)
    with pytest.raises(InvalidInput, match=r"a day is a datetime\.date"):
        made.rebuild(NOON)


# ---- days -----------------------------------------------------------------------------------------------------------


def make_days(shop: Shop, made: Pipeline, days: int = 2) -> None:
    """Messages whose lives begin on one day and end on others."""
    for day in range(days):
        live(shop, 14)
        move(shop, day)
        made.run()


def damage(made: Pipeline, day: str) -> None:
    """Spoil the rows of a day in silver and gold, as a fault in a release would have written them."""
    lake = made.lake
    changes = {}
    for table in (*CLOSED, *GOLD):
        found = lake.rows(table)
        column = {SILVER_DELIVERIES.name: "ended_ms", SILVER_MESSAGES.name: "last_ms"}.get(table.name, "minute")
        of_day = [
            (value if isinstance(value, datetime) else to_datetime(value)).strftime("%Y-%m-%d") == day
            for value in found.column(column).to_pylist()
        ]
        spoiled = found.filter(pa.array(of_day))
        assert spoiled.num_rows
        if table in GOLD:
            changes[table.name] = Change(
                (), tuple(file for file in lake.data_files(table) if file.partition["date"] == day)
            )
            continue
        kept = found.filter(pa.array([not one for one in of_day]))
        names = pa.array(["spoiled"] * spoiled.num_rows)
        spoiled = spoiled.set_column(spoiled.schema.get_field_index("key"), "key", names)
        # Half of the rows are missing, the others are wrong and there twice.
        half = spoiled.slice(0, spoiled.num_rows // 2)
        written = [
            write_rows(lake.files, table.name, part.cast(found.schema), table.statistics)
            for part in (kept, pa.concat_tables([half, half]))
        ]
        changes[table.name] = Change(tuple(file for files in written for file in files), tuple(lake.data_files(table)))
    lake.commit("damage", changes, lake.state)


@pytest.mark.promise("SPARK-4")
def test_a_day_is_made_anew_from_bronze_in_one_step(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(orders)
    # A queue that is removed from the store keeps its history.
    orders.post.publish_many("gone", range(4))
    with orders.post.receive("gone", wait=20):
        move(orders, 0)
    orders.post.purge("gone")
    move(orders, 1)
    made.run()
    assert orders.post.remove_queue("gone")
    make_days(orders, made, days=1)
    # An id that ended on one day is published again on the next.
    ended = next(event.message_id for event in orders.events() if event.event == "done")
    again = orders.post.publish("orders", "again", priority=9).id
    with orders.post.receive("orders", wait=20) as message:
        assert message is not None
        assert message.id == again
    assert plant(orders, "UPDATE wp_journal SET message_id = ? WHERE message_id = ?", ended, again) == 3
    live(orders, 14)
    move(orders, 1)
    made.run()
    opened = (SILVER_OPEN_DELIVERIES, SILVER_OPEN_MESSAGES)
    wanted, now = tables(made), [rows(made, table) for table in opened]
    assert [row["state"] for row in wanted[SILVER_MESSAGES.name] if row["message_id"] == ended] == ["done", "done"]
    # A day that is right stays as it is; so do open rows.
    step = made.lake.step
    rebuilt = made.rebuild(date(2020, 3, 2))
    assert (rebuilt.day, rebuilt.step, made.lake.step) == ("2020-03-02", step + 1, step + 1)
    assert rebuilt.events == sum(to_datetime(row["at_ms"]).day == 2 for row in wanted[BRONZE_JOURNAL.name])
    assert rebuilt.rows[GOLD_MINUTES.name] == 2
    assert tables(made) == wanted
    assert [rows(made, table) for table in opened] == now
    # Rows that a fault in a release has spoiled; ended messages that it has not marked, and an open one that it lost.
    damage(made, "2020-03-02")
    lake, found = made.lake, made.lake.rows(SILVER_OPEN_MESSAGES)
    marks = pc.is_in(found.column("last_event"), pa.array(silver.CLOSING))
    lost = next(row["message_id"] for row in wanted[SILVER_MESSAGES.name] if row["state"] == "dead")
    assert pc.any(marks).as_py()
    left = found.filter(pc.and_(pc.invert(marks), pc.not_equal(found.column("message_id"), lost)))
    written = write_rows(lake.files, SILVER_OPEN_MESSAGES.name, left, SILVER_OPEN_MESSAGES.statistics)
    change = Change(tuple(written), lake.data_files(SILVER_OPEN_MESSAGES))
    lake.commit("damage", {SILVER_OPEN_MESSAGES.name: change}, lake.state)
    assert tables(made) != wanted
    for day in (1, 2):
        made.rebuild(date(2020, 3, day))
    assert tables(made) == wanted
    assert {row["queue"] for row in wanted[GOLD_MINUTES.name]} == {"orders", "gone"}
    # A day without events.
    assert made.rebuild(date(2020, 2, 1)).events == 0


@pytest.mark.promise("SPARK-4")
def test_steps_of_others_during_a_rebuild_are_kept(
    orders: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = pipeline(orders), pipeline(orders)
    make_days(orders, made)
    damage(made, "2020-03-02")
    planned: list[int] = []
    plan = rebuilding.plan_day

    def plan_while_others_run(*arguments: Any) -> Any:
        found = plan(*arguments)
        planned.append(len(planned))
        live(orders, 10)
        # The first time events of the same day are loaded meanwhile, then those of another one.
        move(orders, 1 if len(planned) == 1 else 5)
        other.run()
        return found

    monkeypatch.setattr(rebuilding, "plan_day", plan_while_others_run)
    made.rebuild(date(2020, 3, 2))
    assert len(planned) == 2
    monkeypatch.undo()
    whole = pipeline(orders, "whole")
    whole.run()
    assert tables(made) == tables(whole)


@pytest.mark.promise("SPARK-4")
def test_a_rebuild_that_others_always_disturb_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = (Lake(str(tmp_path / "lake")) for _ in range(2))
    made.create()
    row = {"queue": "orders", "minute": NOON, "reason": "rejected", "count": 1}
    rows = pa.Table.from_pylist([row], schema=GOLD_DEAD_LETTERS.arrow(GOLD_DEAD_LETTERS.columns))

    def replace(lake: Lake) -> dict[str, Change]:
        return {GOLD_DEAD_LETTERS.name: replace_days(lake, GOLD_DEAD_LETTERS, rows, ["2020-03-01"])}

    def plan_beside_others(pipeline: Any, day: rebuilding.Day) -> rebuilding.Plan:
        changes = replace(made)
        other.refresh(to_write=True)
        other.commit("other", replace(other), other.state)
        return rebuilding.Plan(changes, rebuilding.Rebuilt(day.name, 0, 0, {}), {})

    replace(made)
    monkeypatch.setattr(rebuilding, "check_bronze", lambda *arguments: None)
    monkeypatch.setattr(rebuilding, "plan_day", plan_beside_others)
    made.commit("run", replace(made), made.state)
    with pytest.raises(StepConflict, match="was changed by other processes 5 times while it was rebuilt"):
        rebuilding.rebuild_day(cast("Any", SimpleNamespace(lake=made)), date(2020, 3, 1))


@pytest.mark.promise("SPARK-4")
def test_a_day_whose_events_were_deleted_is_refused_and_later_ones_keep_what_bronze_has_lost(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    made = pipeline(orders)
    make_days(orders, made)
    remove_old_rows(made.lake, 1, date(2020, 3, 3))
    wanted = tables(made)
    with pytest.raises(InvalidInput, match=REFUSED):
        made.rebuild(date(2020, 3, 1))
    made.rebuild(date(2020, 3, 2))
    assert tables(made) == wanted
    # A lake of an older release does not say what was deleted; that gold has more days does.
    made.lake.commit("other", {}, structs.replace(made.lake.state, deleted_before_ms=0))
    with pytest.raises(InvalidInput, match=REFUSED):
        made.rebuild(date(2020, 3, 1))


@pytest.mark.promise("SPARK-4", "FACE-2")
@pytest.mark.usefixtures("running_session")
def test_the_commands_take_times_and_days(orders: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = str(tmp_path / "a lake")
    for day in range(3):
        orders.post.publish_many("orders", range(10))
        move(orders, day)
    place = ["--store", orders.url, "--lake", lake]
    assert main(["pipeline", "run", *place, "--from", "2020-03-02", "--to", "2020-03-03T00:00:00Z", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events_added"], found["offsets"]["orders"]["lag_events"]) == (10, 10)
    assert main(["pipeline", "run", *place]) == 0
    assert "orders: 10 events not seen, left out by --from" in capsys.readouterr().out
    assert main(["pipeline", "rebuild", "--lake", lake, "--day", "2020-03-03", "--day", "2020-03-02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(day["day"], day["events"]) for day in found["days"]] == [("2020-03-02", 10), ("2020-03-03", 10)]
    assert found["days"][1]["step"] == Lake(lake).step
    assert main(["pipeline", "rebuild", "--lake", lake, "--day", "2020-03-02"]) == 0
    assert capsys.readouterr().out == "2020-03-02: 1 row of silver and gold from 10 events\n"
    for arguments, error in (
        (["run", *place, "--from", "2020-03-02", "--to", "2020-03-01"], "must be before --to"),
        (["run", *place, "--follow", "--to", "2020-03-01"], "give one of them"),
        (["rebuild", "--lake", str(tmp_path / "none"), "--day", "2020-03-01"], "is new"),
    ):
        assert main(["pipeline", *arguments]) == 2
        assert error in capsys.readouterr().err
    for arguments, error in (
        (["run", *place, "--from", "2020-03-01T00:00:00"], "needs its zone"),
        (["rebuild", "--lake", lake, "--day", "yesterday"], "a day looks like 2026-03-06"),
    ):
        with pytest.raises(SystemExit):
            main(["pipeline", *arguments])
        assert error in capsys.readouterr().err
