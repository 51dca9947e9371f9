"""Schedules: when a rule fires, before it is saved; and the form in which one is added or changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from waypost import CatchUp
from waypost import Schedule as ClientSchedule
from waypost.client.internals import preview_schedule
from waypost.errors import WaypostError
from waypost.web import counted, documents, forms, reading
from waypost.web.actions import ACTIONS
from waypost.web.problems import Problem
from waypost.web.service import convert

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: Fires that the form of a schedule shows before it is saved.
PREVIEWED = 10


def preview(query: documents.PreviewQuery, now: datetime) -> documents.SchedulePreview:
    """When a rule fires from now on, in UTC and in its zone; or what is wrong with it."""
    try:
        found = preview_schedule(
            now, query.count, cron=query.cron or None, every=query.every, tz=query.tz, start=query.start, end=query.end,
            exclude=[date.fromisoformat(day) for day in query.exclude.replace(",", " ").split()],
        )  # fmt: skip
    except (WaypostError, ValueError) as error:
        return documents.SchedulePreview(valid=False, error=str(error), fires=[])
    fires: list[documents.Fire] = []
    offset = None
    for at, local in found:
        changes = offset is not None and local.utcoffset() != offset
        offset = local.utcoffset()
        text = local.isoformat(sep=" ", timespec="seconds")
        fires.append(documents.Fire(at=at, local=text, offset_changes=changes))
    return documents.SchedulePreview(valid=True, error=None, fires=fires)


async def store_now(place: reading.Place) -> datetime:
    """The store's time, by a queue that was read; else that of this machine."""
    if not place.watch.readings:
        await place.watch.refresh()
    return place.watch.store_now() or datetime.now(UTC)


async def read_preview(place: reading.Place, query: documents.PreviewQuery) -> documents.SchedulePreview:
    """The preview of a rule."""
    return preview(query, await store_now(place))


def fields_of(known: ClientSchedule | None, given: Mapping[str, str], *, bodies: bool) -> list[forms.Field]:
    """The form of a schedule: as it is, or as it was sent last; empty for a new one."""
    values = dict(given)
    if known is not None and not given:
        values = known_values(known)
    found = []
    for field in forms.schedule_fields():
        if field.name == "body" and known is not None and (not bodies or values.get("keep_body") == "true"):
            found.append(forms.Field("keep_body", "hidden", "true"))
            continue
        if known is not None and field.name in ("queue", "name"):
            field = msgspec.structs.replace(field, kind="fixed")
        found.append(msgspec.structs.replace(field, value=values.get(field.name, field.value)))
    if known is not None:
        found.append(forms.Field("key", "hidden", known.key))
    return found


def known_values(known: ClientSchedule) -> dict[str, str]:
    """A saved schedule as the fields of its form."""
    missed = known.missed
    every = None if known.every is None else known.every.total_seconds()
    values = {
        "name": known.name, "queue": known.queue, "cron": known.cron, "every": every, "tz": known.tz,
        "missed": missed.max_catchup if isinstance(missed, CatchUp) else missed,
        "exclude": ", ".join(day.isoformat() for day in known.exclude) or None, "overlap": known.overlap,
        "grace": known.grace.total_seconds(), "jitter": known.jitter.total_seconds(),
        "start": None if known.start is None else known.start.isoformat(),
        "end": None if known.end is None else known.end.isoformat(),
        "max_fires": known.max_fires, "priority": known.priority, "group": known.group,
        "expires": None if known.expires is None else known.expires.total_seconds(),
    }  # fmt: skip
    found = {name: f"{value:g}" if isinstance(value, float) else f"{value}" for name, value in values.items()
             if value is not None}  # fmt: skip
    try:
        found["body"] = msgspec.json.encode(known.body).decode()
    except (TypeError, msgspec.MsgspecError):
        found["keep_body"] = "true"
    if known.headers:
        # Not in the form: they stay with the body.
        found["keep_body"] = "true"
    return found


#: The interval that the form of a backfill begins with.
BACKFILLED = timedelta(days=1)


async def show_backfill(visit: Visit, given: Mapping[str, str]) -> Response:
    """The form of a backfill; with an interval, how many messages it would publish, and the button that does."""
    action, known = ACTIONS["backfill_schedule"], await find_schedule(visit, given)
    if known is None:
        raise Problem(422, "no-choice", "name the schedule: its queue and its key")
    planned, shortcuts, wrong, choice = None, None, None, dict[str, str]()
    now = (await store_now(visit.here)).replace(microsecond=0)
    interval = {"start": now - BACKFILLED, "end": now}
    if "start" in given and "end" in given:
        try:
            interval = {name: forms.read_time(given[name]) for name in interval}
            wanted = documents.BackfillRequest(queue=known.queue, key=known.key, dry_run=True, **interval)
            async with reading.answered():
                planned = await action.run(visit.here, "", wanted)
            shortcuts = action.forms("", wanted)
            choice = {name: at.isoformat() for name, at in interval.items()}
        except (Problem, WaypostError) as error:
            wrong = error.detail if isinstance(error, Problem) else str(error)
    return visit.draw(
        "backfill.html", title=f"Backfill {known.name}", known=known, planned=planned, shortcuts=shortcuts, wrong=wrong,
        interval=interval, counted=counted.pack(choice),
    )  # fmt: skip


async def find_schedule(visit: Visit, given: Mapping[str, str]) -> ClientSchedule | None:
    """The schedule that a form is about; none for a new one."""
    key, queue = given.get("key"), given.get("queue")
    if not key or not queue:
        return None
    async with reading.answered():
        found = [one for one in await visit.here.post.schedules(queue) if one.key == key]
    if not found:
        raise Problem(404, "unknown-schedule", f"{queue} has no schedule with the key {key!r}")
    return found[0]


async def show_form(visit: Visit, sent: Mapping[str, str] | None = None) -> Response:
    """The form of a schedule; after `sent`, with when it would fire and the command that saves it."""
    action = ACTIONS["save_schedule"]
    given = dict(visit.request.query_params) if sent is None else dict(sent)
    known = await find_schedule(visit, given)
    planned, shortcuts, wrong = None, None, None
    if sent is not None:
        try:
            content = convert(forms.to_document(action, given), documents.ScheduleSave)
            query = documents.PreviewQuery(
                cron=content.cron, every=content.every, tz=content.tz, start=content.start, end=content.end,
                exclude=",".join(day.isoformat() for day in content.exclude), count=PREVIEWED,
            )  # fmt: skip
            planned = await read_preview(visit.here, query)
            shortcuts = action.forms("", content) if planned.valid else None
        except Problem as problem:
            wrong = problem.detail
    show_body = known is not None and await visit.here.may_show_bodies(known.queue, allowed=visit.bodies)
    fields = fields_of(known, given if sent is not None else {}, bodies=show_body)
    title = "New schedule" if known is None else f"Schedule {known.name}"
    return visit.draw(
        "schedule_form.html", title=title, fields=fields, preview=planned, shortcuts=shortcuts, wrong=wrong,
        known=known,
    )  # fmt: skip
