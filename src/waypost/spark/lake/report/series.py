"""What the charts show, computed: steps of time, rates, percentiles, and the sums for the table. No drawing here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from waypost.spark.lake.percentiles import BUCKET_OF_ZERO, percentile, value_of
from waypost.spark.lake.report.gold import MINUTE_MS, Gold
from waypost.spark.lake.tables import MEASURES, MINUTE_EVENTS

#: A chart with more points than this shows nothing more, and the page grows.
POINTS_MAX = 400
#: Steps that people can read off an axis.
STEP_MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7 * 1440, 30 * 1440)
#: Queues with charts of their own, those with the most messages; the table lists more.
CHARTED_MAX = 24
LISTED_MAX = 200
RATES = ("published", "done", "retried", "expired", "dead")
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
COUNTS = (*MINUTE_EVENTS, "woken")
#: Bars of a distribution, ten for each power of ten.
BARS_PER_DECADE = 10
#: Causes and reasons with a colour of their own. A program may give as many reasons as it has messages.
STACKS_MAX = 8
OTHERS = "all others"
#: The name of the sum of all queues: no queue can be called so.
ALL = ""


@dataclass(slots=True)
class View:
    """The figures and series of a queue, or of all of them together."""

    name: str
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    redelivered: int = 0
    rates: dict[str, list[float]] = field(default_factory=dict)
    percentiles: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    overall: dict[str, dict[str, float]] = field(default_factory=dict)
    distribution: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    redeliveries: dict[str, list[int]] = field(default_factory=dict)
    dead_letters: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data of a page: the steps of time, and a view of all queues and of each."""

    step_ms: int
    times: tuple[int, ...]
    views: tuple[View, ...]
    unlisted: int = 0


def step_for(first_ms: int, last_ms: int) -> int:
    """The step of time that keeps a chart readable."""
    minutes = (last_ms - first_ms) // MINUTE_MS + 1
    chosen = next((step for step in STEP_MINUTES if minutes / step <= POINTS_MAX), None)
    if chosen is None:
        chosen = STEP_MINUTES[-1] * math.ceil(minutes / POINTS_MAX / STEP_MINUTES[-1])
    return chosen * MINUTE_MS


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
    edges = range(0, max(counts) + 1) if counts else range(0)
    return {
        "from": [0.0, *(10 ** (edge / BARS_PER_DECADE) for edge in edges)],
        "share": [nothing / whole, *(counts.get(edge, 0) / whole for edge in edges)],
    }


def build_data(gold: Gold) -> ReportData:
    """Return the data of a page from the gold tables."""
    span = gold.span_ms
    if span is None:
        return ReportData(MINUTE_MS, (), (View(ALL),))
    step = step_for(*span)
    times = tuple(range(span[0] // step * step, span[1] + 1, step))
    place = {at: index for index, at in enumerate(times)}
    minutes = gold.grouped("minutes", step, (), COUNTS)
    names = _by_size(minutes)
    views = {name: View(name) for name in (ALL, *names[:LISTED_MAX])}
    charted = {ALL, *names[:CHARTED_MAX]}
    seconds = step / 1000
    for row in minutes:
        for name in {ALL, row["queue"]} & views.keys():
            view = views[name]
            for count in COUNTS:
                view.totals[count] += row[count]
            for rate in RATES if name in charted else ():
                view.rates.setdefault(rate, [0.0] * len(times))[place[row["at_ms"]]] += row[rate] / seconds
    _measure(views, charted, gold.grouped("histograms", step, ("measure", "bucket"), ("count",)), place)
    for table, kind in (("redeliveries", "cause"), ("dead_letters", "reason")):
        for row in gold.grouped(table, step, (kind,), ("count",)):
            for name in {ALL, row["queue"]} & views.keys():
                if table == "redeliveries":
                    views[name].redelivered += row["count"]
                if name in charted:
                    stacks: dict[str, list[int]] = getattr(views[name], table)
                    stack = stacks.setdefault(row[kind] or "unknown", [0] * len(times))
                    stack[place[row["at_ms"]]] += row["count"]
    for view in views.values():
        view.redeliveries, view.dead_letters = _largest(view.redeliveries), _largest(view.dead_letters)
    return ReportData(step, times, tuple(views.values()), max(0, len(names) - LISTED_MAX))


def _largest(stacks: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The largest of them, and the rest as one."""
    names = sorted(stacks, key=lambda name: (-sum(stacks[name]), name))
    kept = {name: stacks[name] for name in names[:STACKS_MAX]}
    rest = [stacks[name] for name in names[STACKS_MAX:]]
    return kept | ({OTHERS: [sum(column) for column in zip(*rest, strict=True)]} if rest else {})


def _by_size(minutes: Iterable[Mapping[str, Any]]) -> list[str]:
    """The queues, those with the most going on first."""
    sizes: dict[str, int] = defaultdict(int)
    for row in minutes:
        sizes[row["queue"]] += row["published"] + row["claimed"]
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def _measure(
    views: Mapping[str, View], charted: set[str], rows: Iterable[Mapping[str, Any]], place: Mapping[int, int]
) -> None:
    """Percentiles over time and over all, and distributions."""
    steps: dict[tuple[str, str], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    whole: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        if row["measure"] not in MEASURES or not row["count"]:
            continue
        for name in {ALL, row["queue"]} & views.keys():
            key, bucket = (name, row["measure"]), row["bucket"]
            whole[key][bucket] += row["count"]
            if name in charted:
                steps[key][row["at_ms"]][bucket] += row["count"]
    for (name, measure), counts in whole.items():
        views[name].overall[measure] = {mark: percentile(counts, share) or 0.0 for mark, share in SHARES.items()}
        if name in charted:
            views[name].distribution[measure] = bars(counts.items())
    for (name, measure), by_step in steps.items():
        lines: dict[str, list[float | None]] = {mark: [None] * len(place) for mark in SHARES}
        for at, counts in by_step.items():
            for mark, share in SHARES.items():
                lines[mark][place[at]] = round(percentile(counts, share) or 0.0, 3)
        views[name].percentiles[measure] = lines
