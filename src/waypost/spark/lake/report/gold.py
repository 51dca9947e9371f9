"""What a report shows, read: gold, and what only other tables of a lake know. Needs pyarrow and deltalake only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from waypost.errors import InvalidInput, MissingExtra
from waypost.urls import redact_url

if TYPE_CHECKING:
    from waypost.spark.lake.lake import Lake

MINUTE_MS = 60_000
#: Messages that the audit could not account for; a page lists no more of them.
LISTED_MAX = 20
#: A shorter history is read by seconds, from its events.
SHORT_MS = 15 * MINUTE_MS
#: Steps of a short history, and how many of them there may be.
SHORT_STEPS = (1_000, 2_000, 5_000, 10_000, 15_000)
SHORT_POINTS_MAX = 120
#: Rows that are read of a table which is not gold; if there are more, the report does without.
ROWS_MAX = 4_000_000
#: Workers are read of this time before the end.
WORKERS_MS = 86_400_000
WORKER_POINTS = 150
#: The table of `waypost pipeline advise`, which few lakes have.
ADVICE_TABLE = "insight/advice"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the audit. `not_seen` are events that were trimmed before they were read: never called lost."""

    published: int
    unaccounted: int
    #: Claims or ends that nothing explains.
    unexplained: int
    #: Changes that the journal has beyond what the store has counted.
    overcounted: int
    #: Messages whose end may be among the events not seen.
    undecided: int
    not_seen: int
    listed: tuple[str, ...]
    at_ms: int
    #: There were too many findings to count them all.
    at_least: bool
    #: Messages in the store that no event explains.
    unrecorded: int = 0
    #: Messages of ordered groups that were claimed too early.
    out_of_order: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is missing, unexplained, unrecorded or out of order."""
        faults = (self.unaccounted, self.unexplained, self.overcounted, self.unrecorded, self.out_of_order)
        return not any(faults)

    @property
    def whole(self) -> bool:
        """Whether the audit could see everything."""
        return self.not_seen == 0


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """Advice of `waypost pipeline advise` that has not been judged yet."""

    queue: str
    title: str
    call: str
    undo: str
    is_applied: bool


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What ended in a worker within a step of time."""

    worker: str
    at_ms: int
    first_ms: int
    last_ms: int
    deliveries: int
    failed: int
    expired: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a history comes from: the store without its secrets, its namespace, and the lake."""

    store: str = ""
    namespace: str = ""
    lake: str = ""


@dataclass(frozen=True, slots=True)
class OpenMessages:
    """By queue, what is known of the messages that have not ended and are not being handled."""

    #: Since when the oldest message is ready that nothing has claimed yet.
    ready_since_ms: Mapping[str, int] = field(default_factory=dict)
    #: How many no worker may claim yet: they are not due, or wait for other messages.
    not_ready: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gold:
    """The tables as Arrow has them, each with its minute as `at_ms`, and the audit if there was one."""

    tables: Mapping[str, Any]
    verdict: Verdict | None
    #: The step of `at_ms`: a minute, or seconds of a short history.
    step_ms: int = MINUTE_MS
    source: Source = field(default_factory=Source)
    advice: tuple[AdviceRow, ...] = ()
    workers: tuple[WorkerStep, ...] = ()
    worker_step_ms: int = MINUTE_MS
    #: None if there are too many to read.
    open_messages: OpenMessages | None = field(default_factory=OpenMessages)
    #: Whether the lake has the whole history of its queues, so that a backlog begins with 0.
    is_whole: bool = True

    @property
    def span_ms(self) -> tuple[int, int] | None:
        """The first and the last step that anything is known of."""
        import pyarrow.compute as compute

        found = [compute.min_max(table["at_ms"]).as_py() for table in self.tables.values() if table.num_rows]
        if not found:
            return None
        return min(pair["min"] for pair in found), max(pair["max"] for pair in found)

    @property
    def end_ms(self) -> int:
        """The end of the last step that anything is known of; steps of a chart may be longer, and end later."""
        span = self.span_ms
        return 0 if span is None else span[1] + self.step_ms

    def grouped(
        self,
        name: str,
        step_ms: int | None,
        by: Sequence[str],
        counts: Sequence[str],
        queues: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of a table added up by step of time and by columns, in their order; without a step over all time."""
        import pyarrow as pa
        import pyarrow.compute as compute

        table = self.tables[name]
        if queues is not None:
            table = table.filter(compute.is_in(table["queue"], pa.array(list(queues), pa.string())))
        if table.num_rows == 0:
            return []
        keys = list(by)
        if step_ms is not None:
            table, keys = with_steps(table, step_ms), ["at_ms", *by]
        added = table.group_by(keys, use_threads=False).aggregate([(count, "sum") for count in counts])
        rows: list[dict[str, Any]] = added.sort_by([(key, "ascending") for key in keys]).to_pylist()
        return [{key: row[key] for key in keys} | {count: row[f"{count}_sum"] or 0 for count in counts} for row in rows]


def with_steps(table: Any, step_ms: int) -> Any:
    """Return a table with its `at_ms` rounded down to a step."""
    import pyarrow as pa
    import pyarrow.compute as compute

    step = pa.scalar(step_ms, pa.int64())
    at = compute.multiply(compute.divide(table["at_ms"], step), step)
    return table.set_column(table.schema.get_field_index("at_ms"), "at_ms", at)


def open_lake(place: str) -> Lake:
    """The lake at a place."""
    try:
        from waypost.spark.lake.lake import Lake
    except ImportError:
        raise MissingExtra('a report reads Parquet: pip install "waypost[spark]"') from None
    lake = Lake(place)
    if not lake.files.exists("gold/minutes"):
        raise InvalidInput(f"there is no gold/minutes in {place}: run `waypost pipeline run` with --lake {place} first")
    return lake


def read(lake: Lake, place: str = "") -> Gold:
    """The gold tables of a lake, and what the report shows besides them; `place` is how its commands name the lake."""
    import pyarrow as pa

    try:
        tables: Mapping[str, Any] = {name: _with_milliseconds(rows) for name, rows in _read_gold(lake).items()}
        verdict, step = _verdict(lake), MINUTE_MS
        span = Gold(tables, None).span_ms
        workers: tuple[WorkerStep, ...] = ()
        worker_step = MINUTE_MS
        if span is not None and span[1] - span[0] < SHORT_MS:
            step, tables = _read_seconds(lake, tables)
            span = Gold(tables, None).span_ms
        if span is not None:
            workers, worker_step = _read_workers(lake, span[0], span[1] + step)
        return Gold(
            tables, verdict, step, _source(lake, place), read_advice(lake), workers, worker_step,
            _read_open(lake, 0 if span is None else span[1] + step),
            is_whole=not lake.state.left_out and not any(seen.not_seen for seen in lake.state.seen.values()),
        )  # fmt: skip
    except InvalidInput:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        raise InvalidInput(f"a table of {lake.files.address} is not what the pipeline writes: {error}") from error


def _source(lake: Lake, place: str) -> Source:
    """Where the history comes from, without secrets."""
    source = lake.state.source
    if source is None:
        return Source(lake=place or lake.files.address)
    store = redact_url(source.url) if source.url else f"${source.url_env}"
    return Source(store, source.namespace, place or lake.files.address)


def _read_gold(lake: Lake) -> dict[str, Any]:
    from waypost.spark.lake.tables import GOLD

    return {table.name.removeprefix("gold/"): lake.rows(table) for table in GOLD}


def _with_milliseconds(rows: Any) -> Any:
    """Return rows with their minute as milliseconds."""
    import pyarrow as pa
    import pyarrow.compute as compute

    at = compute.cast(compute.cast(rows["minute"], pa.timestamp("ms", "UTC")), pa.int64())
    return rows.drop_columns(["minute"]).append_column("at_ms", at)


def _read_seconds(lake: Lake, by_minute: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return the tables of a short history by seconds, from its events, and the step; by minutes if there are none."""
    import pyarrow as pa
    import pyarrow.compute as compute

    from waypost.spark.lake.gold import TABLE_BUILDERS, counted_sums
    from waypost.spark.lake.sums import SUM_COLUMNS, sum_events
    from waypost.spark.lake.tables import BRONZE_JOURNAL

    if not 0 < sum(file.rows for file in lake.data_files(BRONZE_JOURNAL)) <= ROWS_MAX:
        return MINUTE_MS, by_minute
    events = lake.arrow(BRONZE_JOURNAL, list(SUM_COLUMNS))
    bounds = compute.min_max(events["at_ms"]).as_py()
    length = bounds["max"] - bounds["min"] + 1
    step = next((step for step in SHORT_STEPS if length / step <= SHORT_POINTS_MAX), SHORT_STEPS[-1])
    sums = counted_sums(lake, sum_events(events, step))
    tables = {table.name.removeprefix("gold/"): _with_milliseconds(build(sums)) for table, build, _ in TABLE_BUILDERS}
    # Events do not show how late a timer was; gold does.
    late = by_minute["histograms"].filter(compute.equal(by_minute["histograms"]["measure"], "late"))
    if late.num_rows:
        # Within the time of the events, which may begin later in that minute.
        at = compute.max_element_wise(late["at_ms"], pa.scalar(bounds["min"] // step * step, pa.int64()))
        late = late.set_column(late.schema.get_field_index("at_ms"), "at_ms", at)
        tables["histograms"] = pa.concat_tables([tables["histograms"], late.select(tables["histograms"].column_names)])
    return step, tables


def _read_workers(lake: Lake, start_ms: int, end_ms: int) -> tuple[tuple[WorkerStep, ...], int]:
    """Return what each worker did in the last day, in steps of time, and the step."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.dataset as dataset

    from waypost.spark.lake.tables import SILVER_DELIVERIES

    start_ms = max(start_ms, end_ms - WORKERS_MS)
    step = max(1_000, (end_ms - start_ms) // WORKER_POINTS // 1_000 * 1_000)
    files = [file for file in lake.data_files(SILVER_DELIVERIES) if file.may_hold("ended_ms", start_ms, end_ms)]
    if not 0 < sum(file.rows for file in files) <= ROWS_MAX:
        return (), step
    rows = lake.arrow(
        SILVER_DELIVERIES, ["worker", "claimed_ms", "ended_ms", "outcome"],
        (dataset.field("ended_ms") >= start_ms) & (dataset.field("ended_ms") < end_ms),
    )  # fmt: skip
    rows = rows.filter(compute.is_valid(rows["worker"]))
    at = compute.multiply(compute.divide(rows["ended_ms"], pa.scalar(step, pa.int64())), pa.scalar(step, pa.int64()))
    outcome = rows["outcome"]
    failed = compute.is_in(outcome, pa.array(["retried", "dead"]))
    table = pa.table(
        {
            "worker": rows["worker"], "at_ms": at, "first_ms": compute.coalesce(rows["claimed_ms"], rows["ended_ms"]),
            "last_ms": rows["ended_ms"], "failed": failed.cast(pa.int64()),
            "expired": compute.equal(outcome, "expired").cast(pa.int64()),
        }
    )  # fmt: skip
    found = table.group_by(["worker", "at_ms"], use_threads=False).aggregate(
        [("first_ms", "min"), ("last_ms", "max"), ("failed", "sum"), ("expired", "sum"), ("last_ms", "count")]
    )
    return tuple(
        WorkerStep(
            row["worker"], row["at_ms"], max(row["first_ms_min"], start_ms), row["last_ms_max"],
            row["last_ms_count"], row["failed_sum"] or 0, row["expired_sum"] or 0,
        )
        for row in found.sort_by([("worker", "ascending"), ("at_ms", "ascending")]).to_pylist()
    ), step  # fmt: skip


def _read_open(lake: Lake, end_ms: int) -> OpenMessages | None:
    """Return what is known of messages that have not ended at the end of the history; None if they are too many."""
    import pyarrow as pa
    import pyarrow.compute as compute

    from waypost.spark.lake.tables import SILVER_OPEN_MESSAGES

    count = sum(file.rows for file in lake.data_files(SILVER_OPEN_MESSAGES))
    if not 0 < count <= ROWS_MAX:
        return OpenMessages() if count == 0 else None
    columns = ["queue", "message_id", "state", "last_event", "due_ms", "last_ms", "last_number"]
    rows = lake.arrow(SILVER_OPEN_MESSAGES, columns)
    keys = ["queue", "message_id"]
    newest = rows.group_by(keys).aggregate([("last_number", "max")]).rename_columns([*keys, "last_number"])
    rows = rows.join(newest, [*keys, "last_number"], join_type="inner")
    # A timer is promoted by a claim: without a worker it stays delayed after it was due. Only the due time of a
    # publish is known, not that of a retry.
    is_timer = compute.and_kleene(
        compute.equal(rows["last_event"], "published"), compute.equal(rows["state"], "delayed")
    )
    is_due = compute.fill_null(compute.and_kleene(is_timer, compute.less_equal(rows["due_ms"], end_ms)), False)
    ready = compute.or_(compute.equal(rows["state"], "ready"), is_due)
    since = compute.if_else(is_due, rows["due_ms"], rows["last_ms"])
    oldest = pa.table({"queue": rows["queue"], "since_ms": since}).filter(ready)
    oldest = oldest.group_by("queue").aggregate([("since_ms", "min")])
    held = compute.and_not(compute.is_in(rows["state"], pa.array(["delayed", "waiting"])), is_due)
    not_ready = rows.filter(held).group_by("queue").aggregate([("message_id", "count")])
    return OpenMessages(
        {row["queue"]: row["since_ms_min"] for row in oldest.to_pylist()},
        {row["queue"]: row["message_id_count"] for row in not_ready.to_pylist()},
    )


def read_advice(lake: Lake) -> tuple[AdviceRow, ...]:
    """Return the advice that has not been judged yet, newest first."""
    if not lake.files.exists(ADVICE_TABLE):
        return ()
    from waypost.spark.insight.advise import ADVICE, STEPS, latest
    from waypost.spark.lake.lake import Lake as Records

    found = latest(Records(lake.files.address, steps=STEPS, tables=(ADVICE,)))
    rows = sorted(found.values(), key=lambda row: (-row["recorded_ms"], row["id"]))
    return tuple(
        AdviceRow(row["queue"], row["title"], row["call"] or "", row["undo"] or "", row["record"] == "applied")
        for row in rows
    )


def _verdict(lake: Lake) -> Verdict | None:
    content = lake.files.read("audit.json")
    if content is None:
        return None
    try:
        result = json.loads(content)
        return Verdict(
            published=int(result["published"]),
            unaccounted=int(result["unaccounted_count"]),
            unexplained=int(result["duplicates_unexplained_count"]),
            overcounted=sum(sum(queue["overcounted"].values()) for queue in result["queues"].values()),
            undecided=int(result["undecided"]),
            not_seen=int(result["not_seen"]),
            listed=tuple(
                f"{one['queue']} {one['message_id']}: {one['fault']}"
                for kind in ("unaccounted", "duplicates_unexplained", "unrecorded", "out_of_order")
                for one in result.get(kind, ())[:LISTED_MAX]
            ),
            at_ms=int(result["at_ms"]),
            at_least=bool(result["has_more"]),
            # An audit of an older release did not look for these.
            unrecorded=int(result.get("unrecorded_count", 0)),
            out_of_order=int(result.get("out_of_order_count", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = lake.files.path("audit.json")
        raise InvalidInput(f"{place} is not what `waypost pipeline audit` writes: {error!r}") from error
