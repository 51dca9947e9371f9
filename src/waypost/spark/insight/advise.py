"""Advice for the queues of a lake: found, applied, kept, and judged at the next run.

    from waypost import Waypost
    from waypost.spark.insight.advise import advise

    with Waypost("valkey://127.0.0.1:6379") as post:
        found = advise("lake", post)
        for advice in found.advice:
            print(advice.title, advice.call)

What was advised and applied is in the Delta table `insight/advice`: one row for each record, never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import pyarrow as pa
from msgspec import Struct, structs

from waypost.client.base import process_user
from waypost.client.internals import edit_schedule
from waypost.errors import InvalidInput
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.table import Change
from waypost.spark.insight.advice import Advice, Facts, Measured, Rule
from waypost.spark.insight.facts import read_bodies, read_facts, read_steps
from waypost.spark.insight.lake_history import Window, read_types
from waypost.spark.insight.queue_rows import read_together
from waypost.spark.insight.rules import BY_KIND, RULES
from waypost.spark.insight.rules.poison import KIND as POISON
from waypost.spark.insight.simulate import place_of
from waypost.spark.lake.lake import Lake, retry_conflicts
from waypost.spark.lake.tables import LakeTable
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place
from waypost.views import ActionUndo, LoggedAction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waypost import Waypost

STEPS: Final = "_insight"
#: `advised` and `applied` have the advice; `judged` says what became of it. Times are the store's, by its newest event.
ADVICE: Final = LakeTable(
    "insight/advice",
    {
        "at_ms": "BIGINT",
        "recorded_ms": "BIGINT",
        "record": "STRING",
        "id": "STRING",
        "kind": "STRING",
        "queue": "STRING",
        "subject": "STRING",
        "title": "STRING",
        "measured": "DOUBLE",
        "expected": "DOUBLE",
        "sample": "BIGINT",
        "call": "STRING",
        "undo": "STRING",
        "verdict": "STRING",
        "advice": "STRING",
    },
    statistics=("at_ms",),
)
#: How far a measure may be above what was expected.
TOLERANCE: Final = 0.1
#: Claims are enough for a verdict about a part of them if so many would have had the problem before.
FOUND_BEFORE_MIN: Final = 5
Verdict = Literal["came true", "did not come true", "solved", "still holds", "too early"]
FINAL: Final = ("came true", "did not come true", "solved")


class Judgement(Struct, frozen=True):
    """What became of past advice: what was measured then, expected, and measured since."""

    id: str
    title: str
    at_ms: int
    was_applied: bool
    verdict: Verdict
    before: float
    expected: float
    after: float | None
    sample: int


class Advised(Struct, frozen=True):
    """The result of a run."""

    queues: tuple[str, ...]
    advice: tuple[Advice, ...]
    #: The ids of advice that was applied now.
    applied: tuple[str, ...]
    judged: tuple[Judgement, ...]
    #: By their ids, why the store refused settings that were advised.
    refused: dict[str, str] = {}


def advise(
    lake: Lake | str,
    post: Waypost,
    *,
    queues: Iterable[str] | None = None,
    since_ms: int = 0,
    until_ms: int = 2**53,
    target: str | None = None,
    apply: bool = False,
    spark: SparkSession | None = None,
    place: Place | None = None,
) -> Advised:
    """Return advice for queues of a lake; with `apply` settings are changed through `post`, which is journalled.

    `target` ("p95 wait < 5s") is for the number of workers. Bodies are compared if there is a Spark session and the
    messages of the queue were ingested.
    """
    root = Lake(lake) if isinstance(lake, str) else lake
    names = choose_queues(root, queues)
    records = open_records(root)
    past = latest(records)
    jitter: dict[str, dict[str, float]] = {}
    for schedule in post.schedules():
        jitter.setdefault(schedule.queue, {})[schedule.key] = schedule.jitter.total_seconds()
    judged: list[Judgement] = []
    found: list[Advice] = []
    now_ms: dict[str, int] = {}
    steps = read_steps(root)
    with open_bulk(place or place_of(root)) as bulk:
        for name, its_rows in read_together(root, names, since_ms, until_ms):
            window = Window(name, since_ms, until_ms)
            facts = read_facts(
                its_rows, window, bulk.run(bulk.store.policy(name)), steps=steps, schedules=jitter.get(name, {}),
                target=target, bodies=None if spark is None else read_bodies(spark, root, window),
                types=read_types(root, name),
            )  # fmt: skip
            now_ms[name] = facts.now_ms
            found += find_advice(facts)
            for row in past.values():
                if row["queue"] != name:
                    continue
                since, begin = facts, row["at_ms"] + 1
                if spark is not None and row["kind"] == POISON and since_ms < begin:
                    since = replace(facts, bodies=read_bodies(spark, root, Window(name, begin, until_ms)))
                judged.append(judge(row, since))
    rows = [judged_row(one, past[one.id], now_ms) for one in judged if one.verdict in FINAL]
    over = {one.id for one in judged if one.verdict in FINAL}
    rows += [
        make_row("advised", one, now_ms[one.queue])
        for one in found if one.id in over or not _is_same(past.get(one.id), one)
    ]  # fmt: skip
    # Before anything is changed, and then after each change: an error leaves a record of what was done.
    append_rows(records, rows)
    applied: list[str] = []
    refused: dict[str, str] = {}
    for one in found if apply else ():
        if one.can_be_applied:
            try:
                apply_advice(post, one, partial(_record_applied, records, now_ms[one.queue]))
            except InvalidInput as error:
                refused[one.id] = str(error)  # such as a setting that an earlier release on this store does not know
            else:
                applied.append(one.id)
    return Advised(tuple(names), tuple(found), tuple(applied), tuple(judged), refused)


def choose_queues(lake: Lake, queues: Iterable[str] | None) -> list[str]:
    """Return the queues to look at; one that the lake does not have is an error."""
    known = sorted(lake.state.seen)
    wanted = known if queues is None else sorted(set(queues))
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"the lake {lake.files.address} has no queue {name}: run `waypost pipeline run` first")
    return wanted


def find_advice(facts: Facts, rules: Sequence[Rule] = RULES) -> list[Advice]:
    """Return the advice of all rules for a queue, each by what was recorded since its settings were changed."""
    return [advice for rule in rules for advice in rule.find(facts.since_change(rule.fields))]


# ---- applying -----------------------------------------------------------------------------------------------


def apply_advice(post: Waypost, advice: Advice, record: Callable[[Advice], None]) -> None:
    """Make the changes that advice names: the journal and the log of actions have them, with the undo.

    `record` is called with what was changed: all of it, or after an error what was changed before that.
    """
    done = structs.replace(advice, settings={}, before={}, group="", jitter={}, jitter_before={})
    try:
        if advice.settings:
            post.configure(advice.queue, **advice.settings)
            done = structs.replace(done, settings=advice.settings, before=advice.before)
        if advice.group:
            post.pause_group(advice.queue, advice.group)
            done = structs.replace(done, group=advice.group)
        for key, seconds in advice.jitter.items():
            edit_schedule(post, key, queue=advice.queue, key=key, rule={"jitter": seconds})
            before = {**done.jitter_before, key: advice.jitter_before[key]}
            done = structs.replace(done, jitter={**done.jitter, key: seconds}, jitter_before=before)
    finally:
        if done.can_be_applied:
            record(done)
            post.log_action(_logged(done))


def _logged(done: Advice) -> LoggedAction:
    undo = "; ".join(done.undo.splitlines())
    if done.jitter:
        action, how = "save_schedule", ActionUndo(f"Set the jitter back: {undo}")
    elif done.group:
        action, how = "pause_group", ActionUndo(f"Resume the group: {undo}")
    else:
        action, how = "configure", ActionUndo.of("configure", done.before)
    return LoggedAction(
        user=process_user(), via="advice", action=action, queue=done.queue, ok=True, text=done.title,
        python="" if done.jitter else "; ".join(done.call.splitlines()), command=done.call if done.jitter else "",
        undo=how,
    )  # fmt: skip


# ---- records ------------------------------------------------------------------------------------------------


def open_records(lake: Lake) -> Lake:
    """Return the table of past advice."""
    found = Lake(lake.files.address, steps=STEPS, tables=(ADVICE,))
    found.create()
    found.refresh(to_write=True)
    return found


def latest(records: Lake) -> dict[str, dict[str, Any]]:
    """Return by its id the newest record of advice that has not been judged yet."""
    found: dict[str, dict[str, Any]] = {}
    order = {"judged": 0, "advised": 1, "applied": 2}
    rows = records.arrow(ADVICE).to_pylist()
    for row in sorted(rows, key=lambda row: (row["recorded_ms"], row["at_ms"], order[row["record"]])):
        if row["record"] == "judged":
            found.pop(row["id"], None)
        else:
            found[row["id"]] = row
    return found


def append_rows(records: Lake, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add records to the table, in one commit."""
    if not rows:
        return
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=ADVICE.arrow(ADVICE.columns))

    def commit() -> None:
        files = write_rows(records.files, ADVICE.name, table, ADVICE.statistics)
        records.commit("advise", {ADVICE.name: Change(tuple(files))}, records.state)

    retry_conflicts(records, commit)


def make_row(record: str, advice: Advice, at_ms: int) -> dict[str, Any]:
    """Return a record of advice, for `append_rows`."""
    return {
        "at_ms": at_ms, "recorded_ms": time.time_ns() // 1_000_000, "record": record, "id": advice.id,
        "kind": advice.kind, "queue": advice.queue, "subject": advice.subject, "title": advice.title,
        "measured": advice.measured, "expected": advice.expected, "sample": advice.sample, "call": advice.call,
        "undo": advice.undo, "verdict": None, "advice": msgspec.json.encode(advice).decode(),
    }  # fmt: skip


def _record_applied(records: Lake, at_ms: int, advice: Advice) -> None:
    append_rows(records, [make_row("applied", advice, at_ms)])


def _is_same(row: Mapping[str, Any] | None, advice: Advice) -> bool:
    """Return whether the newest record is of the same change, so that nothing is to be recorded."""
    return row is not None and row["call"] == advice.call


def judge(row: Mapping[str, Any], facts: Facts) -> Judgement:
    """Return what became of past advice, by what was recorded since."""
    rule, was_applied = BY_KIND.get(row["kind"]), row["record"] == "applied"
    after: Measured | None = None
    if rule is not None:
        since = facts.after(row["at_ms"] + 1)
        after = rule.measure(since.since_change(rule.fields), row["subject"])
    verdict: Verdict = "too early"
    is_enough = after is not None and (
        rule is None or not rule.is_share or after.sample * row["measured"] >= FOUND_BEFORE_MIN
    )
    if after is not None and is_enough and _has_news(row, facts, was_applied=was_applied):
        if after.value <= row["expected"] * (1 + TOLERANCE):
            verdict = "came true" if was_applied else "solved"
        else:
            verdict = "did not come true" if was_applied else "still holds"
    return Judgement(
        row["id"], row["title"], row["at_ms"], was_applied, verdict, row["measured"], row["expected"],
        None if after is None else after.value, 0 if after is None else after.sample,
    )  # fmt: skip


def _has_news(row: Mapping[str, Any], facts: Facts, *, was_applied: bool) -> bool:
    """Return whether anything was recorded since: applied settings are judged by what came after them."""
    return facts.now_ms > row["at_ms"] or not was_applied


def judged_row(one: Judgement, row: Mapping[str, Any], now_ms: Mapping[str, int]) -> dict[str, Any]:
    """Return the record of a judgement."""
    return {
        **row, "record": "judged", "at_ms": now_ms[row["queue"]], "recorded_ms": time.time_ns() // 1_000_000,
        "measured": one.after, "sample": one.sample, "verdict": one.verdict,
    }  # fmt: skip
