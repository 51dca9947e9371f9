"""Lists as files: CSV for a spreadsheet, or JSON, sent while they are read, up to a limit that is stated."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from waypost.values import MINUTE_COUNTERS
from waypost.web import action_pages, chart_views, documents, reading, search, timer_views
from waypost.web.problems import Problem
from waypost.web.service import Service, check_name, convert

#: The most rows of one file.
EXPORT_MAX = 10_000
FORMATS = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
#: A cell that begins with one of these would be a formula in a spreadsheet.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")

#: Where a filter fits little: so many pages are read for one file, and for so long.
PAGES_MAX = 1_000
READ_SECONDS_MAX = 60.0


class Cut(Struct, frozen=True):
    """In place of a row: the file ends here although there may be more, and why."""

    text: str


Row = dict[str, Any]
Rows = AsyncIterator[Row | Cut]


def row_of(document: documents.Answer, without: tuple[str, ...] = ()) -> Row:
    """A document as a row: its fields, times as text."""
    built: Row = msgspec.to_builtins(document)
    return {name: value for name, value in built.items() if name not in without}


async def export_queues(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """All queues."""
    given = convert(dict(query) | {"limit": documents.PAGE_LIMIT_MAX}, documents.QueuesQuery, strict=False)
    while True:
        page = await reading.queues(place, given)
        for queue in page.queues:
            alerts = "; ".join(alert.text for alert in queue.alerts)
            yield row_of(queue, ("alerts", "recent")) | {"alerts": alerts}
        if page.next is None:
            return
        given = msgspec.structs.replace(given, cursor=page.next)


async def export_messages(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """The messages of a queue that a filter finds."""
    rest = dict(query)
    queue = check_name(rest.pop("queue", ""))
    given = convert(rest | {"limit": documents.PAGE_LIMIT_MAX}, documents.MessagesQuery, strict=False)
    pages, seconds = 0, 0.0
    while True:
        if pages >= PAGES_MAX or seconds > READ_SECONDS_MAX:
            yield Cut(f"cut after a search of {seconds:.0f} seconds: there may be more")
            return
        start = time.monotonic()
        page = await reading.messages(place, queue, given, bodies=bodies)
        pages, seconds = pages + 1, seconds + time.monotonic() - start
        for message in page.messages:
            row = row_of(message, ("body", "headers"))
            yield row | {"headers": message.headers, "size": message.body.size, "body": message.body.text}
        if page.next is None:
            return
        given = msgspec.structs.replace(given, cursor=page.next)


async def export_timers(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """Timers by due time."""
    given = convert(dict(query) | {"limit": documents.PAGE_LIMIT_MAX}, documents.TimersQuery, strict=False)
    while True:
        page = await timer_views.next_timers(place, given)
        for timer in page.timers:
            yield row_of(timer)
        if page.next is None:
            return
        given = msgspec.structs.replace(given, cursor=page.next)


async def export_schedules(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """Schedules with their next fires."""
    for schedule in (
        await reading.schedules(place, convert(dict(query), documents.SchedulesQuery, strict=False))
    ).schedules:
        yield row_of(schedule)


async def export_workers(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """Workers, a row for each of their queues."""
    convert(dict(query), documents.Nothing)
    for worker in (await reading.workers(place)).workers:
        row = row_of(worker, ("queues", "reasons")) | {"reasons": "; ".join(worker.reasons)}
        for queue in worker.queues:
            yield row | {f"queue_{name}": value for name, value in row_of(queue).items()}
        if not worker.queues:
            yield row


async def export_minutes(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """The counters of one to four queues by minute, with the backlog at its beginning."""
    found = await chart_views.charts(place, convert(dict(query), documents.ChartsQuery, strict=False))
    for one in found.queues:
        backlog = {point.at: point.messages for point in one.backlog}
        for minute in one.minutes:
            row = {"queue": one.queue, "at": msgspec.to_builtins(minute.at), "backlog": backlog.get(minute.at)}
            yield row | minute.counts | row_of(minute, ("at", "counts"))


async def export_actions(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """The log of actions, the newest first."""
    convert(dict(query), documents.Nothing)
    given = documents.ActionsQuery(limit=documents.PAGE_LIMIT_MAX)
    while True:
        page = await action_pages.logged_actions(place, given)
        for action in page.actions:
            yield row_of(action, ("undo",)) | {"undo": None if action.undo is None else action.undo.text}
        if page.next is None:
            return
        given = msgspec.structs.replace(given, cursor=page.next)


async def export_search(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """What a search finds, from its beginning on."""
    given = convert(dict(query), documents.SearchQuery, strict=False)
    seconds = 0.0
    while True:
        start = time.monotonic()
        page = await search.search(place, given, bodies=bodies)
        seconds += time.monotonic() - start
        for found in page.found:
            yield row_of(found)
        if page.next is None:
            return
        if seconds > READ_SECONDS_MAX:
            yield Cut(f"cut after {page.searched:,} of {page.total:,} messages were searched: there may be more")
            return
        given = msgspec.structs.replace(given, cursor=page.next)


async def export_dead(place: reading.Place, query: Mapping[str, str], *, bodies: bool) -> Rows:
    """The dead letters of a queue by reason and error, a row for each group."""
    rest = dict(query)
    queue = check_name(rest.pop("queue", ""))
    convert(rest, documents.Nothing)
    found = await reading.dead_groups(place, queue)
    for group in found.groups:
        samples = " ".join(group.samples)
        yield {"queue": queue} | row_of(group, ("samples", "over_time")) | {"samples": samples}
    if found.searched < found.total:
        yield Cut(f"of {found.searched:,} of {found.total:,} dead letters, the oldest")


LISTS: dict[str, Callable[..., Rows]] = {
    "queues": export_queues, "messages": export_messages, "timers": export_timers, "schedules": export_schedules,
    "workers": export_workers, "minutes": export_minutes, "actions": export_actions, "search": export_search,
    "dead": export_dead,
}  # fmt: skip


def columns_of(kind: type[Struct], *more: str, without: tuple[str, ...] = (), prefix: str = "") -> list[str]:
    """The fields of a document as columns."""
    return [*(prefix + name for name in kind.__struct_fields__ if name not in without), *more]


#: The columns of each list in CSV, whatever its rows are.
COLUMNS: dict[str, list[str]] = {
    "queues": columns_of(documents.Queue, "alerts", without=("alerts", "recent")),
    "messages": columns_of(documents.Message, "headers", "size", "body", without=("body", "headers")),
    "timers": columns_of(documents.Timer),
    "schedules": columns_of(documents.Schedule),
    "workers": [
        *columns_of(documents.Worker, "reasons", without=("queues", "reasons")),
        *columns_of(documents.WorkerQueue, prefix="queue_"),
    ],
    "minutes": [
        *("queue", "at", "backlog"),
        # Times are columns of their own, in seconds.
        *(name for name in MINUTE_COUNTERS if "_ms" not in name),
        *columns_of(documents.Minute, without=("at", "counts")),
    ],
    "actions": columns_of(documents.Action, "undo", without=("undo",)),
    "search": columns_of(documents.Found),
    "dead": ["queue", *columns_of(documents.DeadGroup, "samples", without=("samples", "over_time"))],
}


def cell(value: Any) -> str:
    """A value in a cell of CSV. Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, datetime):
        return value.isoformat()
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def csv_lines(*lines: list[str]) -> bytes:
    """Lines of CSV (RFC 4180)."""
    out = io.StringIO()
    csv.writer(out).writerows(lines)
    return out.getvalue().encode(errors="replace")


async def as_csv(rows: Rows, columns: list[str]) -> AsyncIterator[bytes]:
    """Rows as CSV. A last line says so if there is more."""
    number = 0
    yield csv_lines(columns)
    async for row in rows:
        if isinstance(row, Cut):
            yield csv_lines([row.text])
            return
        if number == EXPORT_MAX:
            yield csv_lines([f"cut after {EXPORT_MAX:,} rows: there are more"])
            return
        number += 1
        yield csv_lines([cell(row.get(name)) for name in columns])


async def as_json(rows: Rows) -> AsyncIterator[bytes]:
    """Rows as one JSON document, which says whether there is more."""
    number, truncated = 0, b"false"
    yield b'{"limit":%d,"rows":[' % EXPORT_MAX
    async for row in rows:
        if number == EXPORT_MAX or isinstance(row, Cut):
            truncated = b"true"
            break
        yield (b"," if number else b"") + msgspec.json.encode(row)
        number += 1
    yield b'],"truncated":%s}' % truncated


async def begun(rows: Rows) -> Rows:
    """The same rows, of which the first was read: what is wrong with a request is answered as a problem."""
    try:
        first = await anext(rows)
    except StopAsyncIteration:
        first = None

    async def all_rows() -> Rows:
        if first is not None:
            yield first
            async for row in rows:
                yield row

    return all_rows()


async def export(service: Service, request: Request) -> Response:
    """A list as a file."""
    caller = await service.require(request, "read")
    place = service.place(request.path_params["store"])
    name, query = request.path_params["list"], dict(request.query_params)
    form = query.pop("format", "csv")
    if name not in LISTS or form not in FORMATS:
        raise Problem(404, "unknown-export", f"lists are {', '.join(LISTS)}, and formats {' and '.join(FORMATS)}")
    rows = await begun(LISTS[name](place, query, bodies=service.may(caller, "bodies")))
    content = as_csv(rows, COLUMNS[name]) if form == "csv" else as_json(rows)
    file = "-".join(part for part in (query.get("queue"), query.get("state"), name) if part)
    headers = {"content-disposition": f'attachment; filename="{safe_name(file)}.{form}"'}
    return StreamingResponse(content, media_type=FORMATS[form], headers=headers)


def safe_name(text: str) -> str:
    """A name of a file without characters that mean something."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "_" for one in text)[:100]
