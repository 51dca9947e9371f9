"""The charts of queues: their last day from the store's counters, one queue or up to four side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from msgspec import structs
from starlette.responses import Response

from waypost.charts import TimeChart, with_one_scale
from waypost.web import documents, lake, reading
from waypost.web.charts import Axis, make_backlog_chart, make_chart, make_spread_chart, make_times_chart
from waypost.web.figures import history_document
from waypost.web.problems import Problem
from waypost.web.service import check_name

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: What a chart can show, in minutes.
CHART_MINUTES = {"60": "1 h", "360": "6 h", "1440": "24 h"}
#: Queues that are compared with each other.
COMPARED_MAX = 4
FLOW, FAILURES = ("published", "done"), ("retried", "expired", "dead")


async def charts(place: reading.Place, query: documents.ChartsQuery) -> documents.Charts:
    """The history of some queues, side by side."""
    names = list(dict.fromkeys(name for name in query.queues.split(",") if name))
    if not 1 <= len(names) <= COMPARED_MAX:
        raise Problem(422, "invalid-input", f"name one to {COMPARED_MAX} queues, with a comma between them")
    async with reading.answered():
        known = set(await place.post.queues())
        for name in names:
            if check_name(name) not in known:
                raise Problem(404, "unknown-queue", f"there is no queue {name!r} in this store")
        found = await place.post.stats_many(names, query.minutes)
    histories = [history_document(stats) for stats in found]
    if place.lake is not None:
        histories = await with_percentiles(place.lake, histories, query.minutes)
    return documents.Charts(queues=histories, minutes=query.minutes)


async def with_percentiles(
    place: str, histories: Sequence[documents.QueueHistory], minutes: int
) -> list[documents.QueueHistory]:
    """The same with what the lake knows of this time."""
    axis = Axis.until(histories[0].at, minutes)
    names = sorted(one.queue for one in histories)
    spreads = await lake.read_percentiles(place, names, axis.start, axis.step, axis.count)
    return [
        structs.replace(one, percentiles=spreads.queues.get(one.queue, []), lake_problem=spreads.problem)
        for one in histories
    ]


def draw_charts(found: Sequence[documents.QueueHistory], length: int) -> list[list[TimeChart]]:
    """The charts of some queues: a row for each measure, a chart for each queue, with one scale in a row."""
    kinds: tuple[str, ...] = ("Published and done", "Failures", "Backlog", "Waits until claimed", "Run times")
    if any(one.percentiles for one in found):
        kinds += ("Waits, percentiles", "Run times, percentiles")
    return [with_one_scale([draw_chart(kind, one, length) for one in found]) for kind in kinds]


def draw_chart(kind: str, one: documents.QueueHistory, length: int) -> TimeChart:
    """One chart of a queue."""
    at, changes = one.at, one.changes
    match kind:
        case "Backlog":
            return make_backlog_chart(
                one.backlog, at, length, title=kind, changes=changes, known_from=one.backlog_known_from
            )
        case "Waits until claimed":
            return make_times_chart(one.minutes, "wait", at, length, title=kind, changes=changes)
        case "Run times":
            return make_times_chart(one.minutes, "run", at, length, title=kind, changes=changes)
        case "Waits, percentiles":
            return make_spread_chart(one.percentiles, "wait", at, length, title=kind, changes=changes)
        case "Run times, percentiles":
            return make_spread_chart(one.percentiles, "run", at, length, title=kind, changes=changes)
    names = FLOW if kind == "Published and done" else FAILURES
    return make_chart(one.minutes, names, at, length, title=kind, changes=changes)


async def show_charts(visit: Visit) -> Response:
    """The last hours of one queue, or of up to four side by side."""
    given = visit.request.query_params
    wanted = list(dict.fromkeys(name.strip() for name in given.getlist("queue") if name.strip()))[:COMPARED_MAX]
    minutes = given.get("minutes", "1440")
    length = int(minutes) if minutes in CHART_MINUTES else 1_440
    names = (await visit.here.watch.list_names())[: documents.PAGE_LIMIT_MAX]
    chosen = wanted or names[:1]
    found: list[documents.QueueHistory] = []
    if chosen:
        query = documents.ChartsQuery(queues=",".join(chosen), minutes=length)
        found = (await charts(visit.here, query)).queues
    rows = draw_charts(found, length) if found else []
    return visit.draw(
        "charts.html", title="Charts", saved=await visit.saved_filters(),
        found=found, rows=rows, chosen=chosen, names=names,
        chart_minutes=CHART_MINUTES, minutes=str(length), most=COMPARED_MAX,
        hours=[hourly(one, length) for one in found],
        charts_url=lambda queues, minutes: (
            visit.url(".", "charts", minutes=minutes) + "&" + urlencode([("queue", name) for name in queues])
        ),
    )  # fmt: skip


class Hour(documents.Answer, frozen=True, kw_only=True):
    """A row of the table beside the charts: one hour, or ten minutes of one hour."""

    at: datetime
    published: int
    done: int
    retried: int
    dead: int
    backlog: int | None


def hourly(one: documents.QueueHistory, length: int) -> list[Hour]:
    """The figures of a queue as a table, newest first, for those who do not see the charts."""
    step = timedelta(minutes=60 if length > 360 else 30 if length > 60 else 10)
    rows: dict[datetime, dict[str, int]] = {}
    for minute in one.minutes:
        begin = minute.at - timedelta(seconds=minute.at.timestamp() % step.total_seconds())
        counts = rows.setdefault(begin, {})
        for name, count in minute.counts.items():
            counts[name] = counts.get(name, 0) + count
    found = []
    for begin, counts in sorted(rows.items(), reverse=True):
        later = (point.messages for point in one.backlog if point.at >= begin + step)
        backlog = next(later, one.backlog[-1].messages if one.backlog else None)
        unknown = one.backlog_known_from is not None and begin + step <= one.backlog_known_from
        picked = {name: counts.get(name, 0) for name in ("published", "done", "retried", "dead")}
        found.append(Hour(at=begin, backlog=None if unknown else backlog, **picked))
    return found
