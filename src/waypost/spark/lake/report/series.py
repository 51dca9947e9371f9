"""What the report shows, computed: steps of time, counts, backlogs, percentiles, and sums by queue. No drawing here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from waypost.charts import TimeRange
from waypost.spark.lake.percentiles import BUCKET_OF_ZERO, percentile, value_of
from waypost.spark.lake.report.gold import MINUTE_MS, Gold, OpenMessages, WorkerStep, with_steps
from waypost.spark.lake.tables import MEASURES, MINUTE_EVENTS

#: A chart with more points than this shows nothing more, and the page grows. Charts of one queue have fewer.
POINTS_MAX, QUEUE_POINTS_MAX = 190, 48
#: Steps that people can read off an axis.
STEP_MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7 * 1440, 30 * 1440)
#: Queues with charts of their own, as far as the size of the page allows; the table lists more.
CHARTED_MAX = 60
LISTED_MAX = 200
FLOW = ("published", "done")
FAILURES = ("retried", "expired", "dead")
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
COUNTS = (*MINUTE_EVENTS, "woken")
#: What ends a message, for good or until it is redriven.
ENDS = ("done", "dead", "dropped", "cancelled", "replaced")
#: Bars of a distribution, ten for each power of ten.
BARS_PER_DECADE = 10
#: Causes and reasons with a color of their own. A program may give as many reasons as it has messages.
STACKS_MAX = 6
OTHERS = "all others"
#: The name of the sum of all queues: no queue can be called so.
ALL = ""
#: Rows of the table of dead letters.
LETTERS_MAX = 40
WORKERS_MAX = 24
NO_TIME = TimeRange(0, MINUTE_MS, 0)


@dataclass(slots=True)
class View:
    """The figures and series of a queue, or of all of them together."""

    name: str
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    #: Redeliveries by cause, over all time.
    causes: dict[str, int] = field(default_factory=dict)
    #: Counts in each step.
    counts: dict[str, list[float]] = field(default_factory=dict)
    backlog: list[float] = field(default_factory=list)
    #: How many messages of the backlog no worker may claim yet, at the end.
    not_ready: int = 0
    #: How long the oldest message was ready at the end of each step, in milliseconds.
    oldest: list[float | None] = field(default_factory=list)
    percentiles: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    overall: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    distribution: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    redeliveries: dict[str, list[float]] = field(default_factory=dict)
    dead_letters: dict[str, list[float]] = field(default_factory=dict)

    @property
    def redelivered(self) -> int:
        """How many claims were not the first of their message."""
        return sum(self.causes.values())

    @property
    def failed(self) -> int:
        """How many messages died, lost their lease, or were published and not claimed."""
        unserved = 0 if self.totals["claimed"] else self.totals["published"]
        return self.totals["dead"] + self.totals["expired"] + unserved

    @property
    def size(self) -> int:
        """How much went on."""
        return self.totals["published"] + self.totals["claimed"]


@dataclass(frozen=True, slots=True)
class Letters:
    """Dead letters of one queue with the same reason and error."""

    queue: str
    reason: str
    error_type: str | None
    count: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data of a page: the steps of time, a view of all queues, and one of each."""

    time: TimeRange
    all: View
    #: The queues: those in which something failed, then those with the most messages.
    queues: tuple[View, ...] = ()
    #: The steps of the series of single queues.
    queue_time: TimeRange = NO_TIME
    letters: tuple[Letters, ...] = ()
    workers: tuple[WorkerStep, ...] = ()
    worker_step_ms: int = MINUTE_MS
    unlisted: int = 0
    #: Whether the backlog began with 0; otherwise it is at least what is shown.
    is_whole: bool = True
    #: The end of what is known, within the last step.
    end_ms: int = 0
    #: Its beginning, within the first step.
    begin_ms: int = 0
    #: How many of the queues that are not listed have failures.
    unlisted_failed: int = 0
    #: Whether it is known since when messages are ready.
    is_ready_known: bool = True


def even_out(data: ReportData, time: TimeRange, values: Sequence[float]) -> list[float]:
    """Return counts of steps in which the first and the last are as those of whole steps: less of them may be known.

    They become at most as large as the step beside them, so that the only message of an hour makes no peak.
    """
    found = list(values)
    for place, beside in ((0, 1), (len(found) - 1, len(found) - 2)) if len(found) > 2 else ():
        start = time.start_ms + place * time.step_ms
        known = min(start + time.step_ms, data.end_ms) - max(start, data.begin_ms)
        whole = found[place] * time.step_ms / max(1, known)
        found[place] = max(found[place], min(whole, found[beside]))
    return found


def step_for(first_ms: int, last_ms: int, most: int = POINTS_MAX) -> int:
    """The step of time that keeps a chart readable."""
    minutes = (last_ms - first_ms) // MINUTE_MS + 1
    chosen = next((step for step in STEP_MINUTES if minutes / step <= most), None)
    if chosen is None:
        chosen = STEP_MINUTES[-1] * math.ceil(minutes / most / STEP_MINUTES[-1])
    return chosen * MINUTE_MS


def time_range(gold: Gold, most: int) -> TimeRange:
    """Return the steps of a report; empty if nothing is known."""
    span = gold.span_ms
    if span is None:
        return NO_TIME
    step = step_for(*span, most) if gold.step_ms == MINUTE_MS else gold.step_ms
    while (span[1] - span[0]) / step > most:
        step *= 2
    start = span[0] // step * step
    return TimeRange(start, step, (span[1] - start) // step + 1)


def bars(buckets: Iterable[tuple[int, int]]) -> dict[str, list[float]]:
    """A histogram in bars wide enough to see: where each begins (0 for the first), and its share of all."""
    counts: dict[int, int] = defaultdict(int)
    nothing = 0
    for bucket, count in buckets:
        if bucket == BUCKET_OF_ZERO:
            nothing += count
        else:
            counts[math.floor(math.log10(value_of(bucket)) * BARS_PER_DECADE + 1e-9)] += count
    whole = nothing + sum(counts.values())
    if whole == 0:
        return {"from": [], "share": []}
    edges = range(max(counts) + 1) if counts else range(0)
    return {
        "from": [0.0, *(10 ** (edge / BARS_PER_DECADE) for edge in edges)],
        "share": [nothing / whole, *(counts.get(edge, 0) / whole for edge in edges)],
    }


def build_data(gold: Gold) -> ReportData:
    """Return the data of a page from the gold tables."""
    time = time_range(gold, POINTS_MAX)
    if time.count == 0:
        return ReportData(time, View(ALL))
    queue_time, span = time_range(gold, QUEUE_POINTS_MAX), gold.span_ms
    found = [_totals(row) for row in gold.grouped("minutes", None, ("queue",), COUNTS)]
    found.sort(key=lambda view: (-view.size, view.name))
    every = {view.name: view for view in found}
    for row in gold.grouped("redeliveries", None, ("queue", "cause"), ("count",)):
        if row["queue"] in every:
            every[row["queue"]].causes[row["cause"] or "unknown"] = row["count"]
    listed = choose(found)
    whole = View(ALL)
    for view in found:
        for name, count in view.totals.items():
            whole.totals[name] += count
        for cause, count in view.causes.items():
            whole.causes[cause] = whole.causes.get(cause, 0) + count
    by_name = {view.name: view for view in listed}
    names = list(by_name)
    _add_counts([whole], gold.grouped("minutes", time.step_ms, (), COUNTS), time)
    _add_counts(listed, gold.grouped("minutes", queue_time.step_ms, ("queue",), COUNTS, names), queue_time)
    _add_overall(whole, gold.grouped("histograms", None, ("measure", "bucket"), ("count",)))
    for view in listed:
        _add_overall(view, ())
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in gold.grouped("histograms", None, ("queue", "measure", "bucket"), ("count",), names):
        rows[row["queue"]].append(row)
    for name, measured in rows.items():
        _add_overall(by_name[name], measured)
    _add_percentiles(whole, gold.grouped("histograms", time.step_ms, ("measure", "bucket"), ("count",)), time)
    for name in names[:CHARTED_MAX]:
        measured = gold.grouped("histograms", queue_time.step_ms, ("measure", "bucket"), ("count",), [name])
        _add_percentiles(by_name[name], measured, queue_time)
    _add_oldest(whole, listed, gold, time, queue_time)
    for table, kind in (("redeliveries", "cause"), ("dead_letters", "reason")):
        stacks: dict[str, list[float]] = getattr(whole, table)
        for row in gold.grouped(table, time.step_ms, (kind,), ("count",)):
            stack = stacks.setdefault(row[kind] or "unknown", [0.0] * time.count)
            stack[_place(time, row["at_ms"])] += row["count"]
        setattr(whole, table, _largest(stacks))
    return ReportData(
        time, whole, tuple(listed), queue_time, _letters(gold), gold.workers, gold.worker_step_ms,
        max(0, len(found) - LISTED_MAX), gold.is_whole, gold.end_ms, time.start_ms if span is None else span[0],
        unlisted_failed=sum(1 for view in found if view.failed and view.name not in by_name),
        is_ready_known=gold.open_messages is not None,
    )  # fmt: skip


def choose(found: Sequence[View]) -> list[View]:
    """Return the queues that a page has room for: those with failures first, then those with the most messages."""
    failed = sorted((view for view in found if view.failed), key=lambda view: (-view.failed, -view.size, view.name))
    first = failed[: LISTED_MAX // 2]
    names = {view.name for view in first}
    return [*first, *(view for view in found if view.name not in names)][:LISTED_MAX]


def _place(time: TimeRange, at_ms: int) -> int:
    return min(time.count - 1, max(0, (at_ms - time.start_ms) // time.step_ms))


def _totals(row: Mapping[str, Any]) -> View:
    view = View(row["queue"])
    view.totals = {name: row[name] for name in COUNTS}
    return view


def _add_counts(views: Sequence[View], rows: Iterable[Mapping[str, Any]], time: TimeRange) -> None:
    """Counts in each step, and the backlog at its end."""
    by_name = {view.name: view for view in views}
    change = {view.name: [0.0] * time.count for view in views}
    for view in views:
        view.counts = {name: [0.0] * time.count for name in (*FLOW, *FAILURES, "claimed")}
    for row in rows:
        name, place = row.get("queue", ALL), _place(time, row["at_ms"])
        for count, values in by_name[name].counts.items():
            values[place] += row[count]
        change[name][place] += row["published"] + row["redriven"] - sum(row[end] for end in ENDS)
    for view in views:
        level, levels = 0.0, []
        for value in change[view.name]:
            level += value
            levels.append(level)
        # Messages that were there before the history began: at least as many as ended without having begun.
        before = max(0.0, -min(levels, default=0.0))
        view.backlog = [value + before for value in levels]


def _add_overall(view: View, rows: Iterable[Mapping[str, Any]]) -> None:
    """Percentiles over all time, and distributions."""
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        if row["measure"] in MEASURES and row["count"]:
            counts[row["measure"]][row["bucket"]] += row["count"]
    for measure, buckets in counts.items():
        view.overall[measure] = {mark: percentile(buckets, share) or 0.0 for mark, share in SHARES.items()}
        view.samples[measure] = sum(buckets.values())
        view.distribution[measure] = bars(buckets.items())


def _add_percentiles(view: View, rows: Iterable[Mapping[str, Any]], time: TimeRange) -> None:
    """Percentiles in each step."""
    steps: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for row in rows:
        if row["measure"] in MEASURES and row["count"]:
            steps[row["measure"]][_place(time, row["at_ms"])][row["bucket"]] += row["count"]
    for measure, by_step in steps.items():
        lines: dict[str, list[float | None]] = {mark: [None] * time.count for mark in SHARES}
        for place, counts in by_step.items():
            for mark, share in SHARES.items():
                lines[mark][place] = round(percentile(counts, share) or 0.0, 3)
        view.percentiles[measure] = lines


def _add_oldest(whole: View, views: Sequence[View], gold: Gold, time: TimeRange, queue_time: TimeRange) -> None:
    """How long the oldest message was ready: what was claimed later had waited before, and some wait still."""
    longest: dict[str, list[float]] = {view.name: [0.0] * queue_time.count for view in views}
    overall = [0.0] * time.count
    for row in longest_waits(gold, time.step_ms, ()):
        overall[_place(time, row["at_ms"])] = value_of(row["bucket_max"])
    for row in longest_waits(gold, queue_time.step_ms, ("queue",)):
        if row["queue"] in longest:
            longest[row["queue"]][_place(queue_time, row["at_ms"])] = value_of(row["bucket_max"])
    known, end_ms = gold.open_messages or OpenMessages(), gold.end_ms
    for view in views:
        view.not_ready = known.not_ready.get(view.name, 0)
        since = known.ready_since_ms.get(view.name)
        view.oldest = _back_in_time(longest[view.name], queue_time, end_ms, since)
    whole.oldest = _back_in_time(overall, time, end_ms, min(known.ready_since_ms.values(), default=None))


def longest_waits(gold: Gold, step_ms: int, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return the longest wait in each step of time and by columns, as its bucket."""
    import pyarrow.compute as compute

    table = gold.tables["histograms"]
    waits = with_steps(
        table.filter(compute.and_(compute.equal(table["measure"], "wait"), compute.greater(table["count"], 0))), step_ms
    )
    found: list[dict[str, Any]] = (
        waits.group_by(["at_ms", *by], use_threads=False).aggregate([("bucket", "max")]).to_pylist()
    )
    return found


def _back_in_time(longest: Sequence[float], time: TimeRange, end_ms: int, since_ms: int | None) -> list[float | None]:
    """Return how long the oldest message was ready in each step, from the waits of messages that were claimed in it.

    The last step is over at `end_ms`, the end of what is known.
    """
    waiting = 0.0 if since_ms is None else max(0.0, end_ms - since_ms)
    found: list[float | None] = [None] * len(longest)
    for place in reversed(range(len(longest))):
        waiting = max(longest[place], waiting)
        found[place] = waiting if waiting >= 1 else 0.0
        start_ms = time.start_ms + place * time.step_ms
        waiting = max(0.0, waiting - (min(start_ms + time.step_ms, end_ms) - start_ms))
    return found


def _largest(stacks: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The largest of them, and the rest as one."""
    names = sorted(stacks, key=lambda name: (-sum(stacks[name]), name))
    kept = {name: stacks[name] for name in names[:STACKS_MAX]}
    rest = [stacks[name] for name in names[STACKS_MAX:]]
    return kept | ({OTHERS: [sum(column) for column in zip(*rest, strict=True)]} if rest else {})


def _letters(gold: Gold) -> tuple[Letters, ...]:
    """Dead letters by queue, reason and error, the most frequent first."""
    import pyarrow.compute as compute

    table = gold.tables["dead_letters"]
    if table.num_rows == 0:
        return ()
    keys = ["queue", "reason", "error_type"]
    rows = table.filter(compute.greater(table["count"], 0)).group_by(keys, use_threads=False)
    found = rows.aggregate([("count", "sum"), ("at_ms", "max")]).to_pylist()
    made = [
        Letters(row["queue"], row["reason"] or "unknown", row["error_type"], row["count_sum"], row["at_ms_max"])
        for row in found
    ]
    return tuple(sorted(made, key=lambda one: (-one.count, one.queue, one.reason, one.error_type or "")))
