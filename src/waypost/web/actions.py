"""What can be changed through the API and the pages: each write once, with its scope and its form as a command.

A write says in a sentence what it did, and each can be shown as a command line and as Python before it is made.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from waypost import CatchUp
from waypost.client.internals import edit_schedule_async
from waypost.errors import WaypostError
from waypost.formatting import Placeholder, format_call, format_count
from waypost.policy import parse_rate
from waypost.views import Policy
from waypost.web import documents
from waypost.web.access import Scope
from waypost.web.figures import settings_document
from waypost.web.problems import Problem
from waypost.web.reading import Place, schedule_document

#: A redrive at a rate must end within a request.
PACED_SECONDS_MAX = 20.0

Run = Callable[[Place, str, Any], Awaitable[documents.Done]]


class Forms(Struct, frozen=True):
    """A write in the forms that can be copied: a command line, and a call in Python."""

    command: str
    python: str


class Action(Struct, frozen=True):
    """One write. `path` is below the store; the queue of a schedule's write is in its request."""

    name: str
    method: str
    path: str
    scope: Scope
    request: type[documents.Request]
    answer: type[documents.Done]
    summary: str
    run: Run
    forms: Callable[[str, Any], Forms]
    #: The scope of a request, where it depends on what the request is about; besides `scope`.
    scope_of: Callable[[Place, Any], Awaitable[Scope]] | None = None


def command(*arguments: object) -> str:
    """A command line, quoted for a shell."""
    return shlex.join(["waypost", *(str(argument) for argument in arguments)])


def option(name: str, value: object) -> tuple[str, ...]:
    """An option of a command. A value that begins with a dash would be read as another option."""
    return (f"{name}={value}",) if str(value).startswith("-") else (name, str(value))


# ---- queues --------------------------------------------------------------------------------------------------


async def pause(place: Place, queue: str, request: documents.Nothing) -> documents.Done:
    """Hand out nothing until a resume."""
    changed = await place.post.pause(queue)
    return documents.Done(changed=changed, text=f"{queue} is paused" if changed else f"{queue} was paused already")


async def resume(place: Place, queue: str, request: documents.Nothing) -> documents.Done:
    """Hand out messages again."""
    changed = await place.post.resume(queue)
    return documents.Done(changed=changed, text=f"{queue} is resumed" if changed else f"{queue} was not paused")


async def configure(place: Place, queue: str, request: documents.SettingsChange) -> documents.SettingsDone:
    """Change settings, or only show what would change."""
    wanted = changed_settings(request)
    if not wanted:
        raise Problem(422, "nothing-to-change", "name at least one setting")
    before = await place.post.policy(queue)
    planned = before.changed(wanted)
    changes = settings_changes(before, planned)
    if request.dry_run or not changes:
        text = f"{format_count(len(changes), 'setting')} of {queue} would change" if changes else "nothing would change"
        return documents.SettingsDone(changed=False, text=text, changes=changes, dry_run=request.dry_run)
    after = await place.post.configure(queue, **wanted)
    # What another user changed meanwhile is no part of this change, nor of its undo.
    named = wanted.keys() | {one.name for one in changes}
    changes = [one for one in settings_changes(before, after) if one.name in named]
    text = f"changed {', '.join(one.name for one in changes)} of {queue}"
    return documents.SettingsDone(changed=True, text=text, changes=changes, dry_run=False)


def changed_settings(request: documents.SettingsChange) -> Any:
    """The settings that a request names."""
    given = {name: getattr(request, name) for name in request.__struct_fields__ if name != "dry_run"}
    return {name: value for name, value in given.items() if value is not UNSET}


def settings_changes(before: Policy, after: Policy) -> list[documents.SettingChange]:
    """The settings that differ."""
    old, new = settings_document(before), settings_document(after)
    return [
        documents.SettingChange(name=name, before=getattr(old, name), after=getattr(new, name))
        for name in old.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    ]


async def redrive(place: Place, queue: str, request: documents.RedriveRequest) -> documents.RedriveDone:
    """Send dead letters again."""
    if bool(request.ids) + (request.reason is not None) + request.all != 1:
        raise Problem(422, "no-choice", "say which dead letters: ids, or a reason, or all")
    limit = min(request.limit, len(request.ids)) if request.ids else request.limit
    if request.rate is not None:
        count, per_ms = parse_rate(request.rate)
        possible = int(PACED_SECONDS_MAX * 1000 * count / per_ms)
        if possible < 1:
            raise Problem(422, "too-slow", f"at {request.rate} not one dead letter is sent within a request: use the "
                          f"command `{redrive_forms(queue, request).command}`")  # fmt: skip
        limit = min(limit, possible)
    chosen: Any = {"ids": request.ids[:limit]} if request.ids else {"reason": request.reason, "limit": limit}
    redriven = await place.post.redrive(queue, rate=request.rate, **chosen)
    moved, left = len(redriven.moved), len(redriven.duplicates)
    text = f"{format_count(moved, 'dead letter')} sent again"
    if left:
        text += f", {left:,} stay because their key is in use"
    more = redriven.more or len(request.ids) > limit
    return documents.RedriveDone(
        changed=moved > 0, text=text + ("; there are more" if more else ""), moved=moved, duplicates=left, more=more
    )


async def purge(place: Place, queue: str, request: documents.PurgeRequest) -> documents.PurgeDone:
    """Remove messages for good."""
    check_confirmed(queue, request.confirm)
    removed = await place.post.purge(queue, request.state)
    text = f"removed {format_count(removed, 'message')} ({request.state}) of {queue}"
    return documents.PurgeDone(changed=removed > 0, text=text, removed=removed)


async def remove(place: Place, queue: str, request: documents.RemoveRequest) -> documents.Done:
    """Remove an empty queue."""
    check_confirmed(queue, request.confirm)
    changed = await place.post.remove_queue(queue)
    return documents.Done(changed=changed, text=f"{queue} is removed" if changed else f"there is no queue {queue}")


def check_confirmed(queue: str, confirm: str) -> None:
    """Refuse what cannot be undone unless the name of the queue was typed."""
    if confirm != queue:
        raise Problem(422, "not-confirmed", f"this cannot be undone: give the name of the queue, {queue!r}, in confirm")


CANCEL_TEXTS = {
    "cancelled": "the message is cancelled",
    "requested": "the message is running: its handler was asked to stop",
    "finished": "the message had finished already",
    "unknown": "there is no such message",
}


async def cancel(place: Place, queue: str, request: documents.CancelRequest) -> documents.CancelDone:
    """Cancel a message."""
    if (request.id is None) == (request.key is None):
        raise Problem(422, "no-choice", "say which message: its id, or its key")
    status = await place.post.cancel(queue, request.id, key=request.key)
    changed = status in ("cancelled", "requested")
    return documents.CancelDone(changed=changed, text=CANCEL_TEXTS[status], status=status)


async def reschedule(place: Place, queue: str, request: documents.RescheduleRequest) -> documents.RescheduleDone:
    """Give a timer another due time."""
    if (request.delay is None) == (request.at is None):
        raise Problem(422, "no-choice", "say when: delay, or at")
    if (request.id is None) == (request.key is None):
        raise Problem(422, "no-choice", "say which timer: its id, or its key")
    if request.at is not None and request.at.tzinfo is None:
        raise Problem(422, "invalid-time", "at needs a time zone, as in 2026-03-06T09:00:00Z")
    named = request.key or request.id
    when: Any = {"at": request.at} if request.at is not None else {"delay": timedelta(seconds=request.delay or 0)}
    status = await place.post.reschedule(queue, request.id, key=request.key, **when)
    if status == "unknown":
        raise Problem(404, "unknown-timer", f"{queue} has no timer {named!r}")
    if status == "due":
        raise Problem(409, "timer-due", f"the timer {named!r} is due already, and was not moved")
    chosen: Any = {"key": request.key} if request.key is not None else {"id": request.id}
    try:
        found = (await place.post.page(queue, "delayed", limit=1, **chosen)).messages
    except WaypostError:
        # The timer is moved: an error of this read would say that it is not.
        return documents.RescheduleDone(changed=True, text=f"{named} is moved", status=status, due_at=None)
    due = found[0].ready_at if found else None
    text = f"{named} is due now" if due is None else f"{named} is moved to {due:%Y-%m-%d %H:%M:%S} UTC"
    return documents.RescheduleDone(changed=True, text=text, status=status, due_at=due)


# ---- workers -------------------------------------------------------------------------------------------------


async def stop_worker(place: Place, queue: str, request: documents.WorkerReference) -> documents.Done:
    """Request a worker to stop."""
    return await request_worker(request.name, await place.post.stop_worker(request.name), "stops")


async def quiet_worker(place: Place, queue: str, request: documents.WorkerReference) -> documents.Done:
    """Request a worker to claim no more."""
    return await request_worker(request.name, await place.post.quiet_worker(request.name), "claims no more")


async def request_worker(name: str, found: bool, what: str) -> documents.Done:
    """What a request to a worker did."""
    if not found:
        raise Problem(404, "unknown-worker", f"there is no worker {name}: it has stopped, or was never there")
    return documents.Done(changed=True, text=f"{name} {what} after its next heartbeat, within 15 seconds")


# ---- schedules -------------------------------------------------------------------------------------------------


async def save_schedule(place: Place, queue: str, request: documents.ScheduleSave) -> documents.ScheduleDone:
    """Save a schedule."""
    rule: Any = {
        name: getattr(request, name)
        for name in (
            "cron", "every", "tz", "exclude", "overlap", "grace", "start", "end", "max_fires", "jitter", "body",
            "priority", "group", "expires",
        )
    }  # fmt: skip
    rule["missed"] = CatchUp(request.missed) if isinstance(request.missed, int) else request.missed
    rule["headers"] = request.headers
    known = request.key is not None and any(one.key == request.key for one in await place.post.schedules(request.queue))
    if request.keep_body:
        if not known:
            raise Problem(404, "unknown-schedule", f"{request.queue} has no schedule with the key {request.key!r}")
        del rule["body"], rule["headers"]
    if known:
        # What a form does not have, as a retry policy, stays as it is.
        saved = await edit_schedule_async(place.post, request.name, request.queue, request.key, rule)
    else:
        saved = await place.post.save_schedule(request.name, queue=request.queue, key=request.key, **rule)
    return documents.ScheduleDone(
        changed=True, text=f"schedule {request.name} is saved", schedule=schedule_document(saved)
    )


async def pause_schedule(place: Place, queue: str, request: documents.ScheduleReference) -> documents.Done:
    """Fire a schedule no more until it is resumed."""
    changed = await place.post.pause_schedule(request.key, queue=request.queue)
    text = f"schedule {request.key} is paused" if changed else f"schedule {request.key} was paused already"
    return documents.Done(changed=changed, text=text)


async def resume_schedule(place: Place, queue: str, request: documents.ScheduleReference) -> documents.Done:
    """Fire a schedule again."""
    changed = await place.post.resume_schedule(request.key, queue=request.queue)
    text = f"schedule {request.key} is resumed" if changed else f"schedule {request.key} was not paused"
    return documents.Done(changed=changed, text=text)


async def trigger_schedule(place: Place, queue: str, request: documents.ScheduleReference) -> documents.TriggerDone:
    """Publish the message of a schedule now."""
    published = await place.post.trigger_schedule(request.key, queue=request.queue)
    return documents.TriggerDone(
        changed=True, text=f"published message {published.id}", queue=published.queue or request.queue, id=published.id
    )


async def backfill_schedule(place: Place, queue: str, request: documents.BackfillRequest) -> documents.BackfillDone:
    """Publish the messages of a schedule for an interval of the past, or count them."""
    for name in ("start", "end"):
        if getattr(request, name).tzinfo is None:
            raise Problem(422, "invalid-time", f"{name} needs a time zone, as in 2026-03-06T09:00:00Z")
    found = await place.post.backfill(
        request.key, request.start, request.end, queue=request.queue, dry_run=request.dry_run
    )
    verb = "would publish" if found.dry_run else "published"
    text = f"{verb} {format_count(found.published, 'message')} of the schedule {request.key}"
    text += f", and skipped {format_count(found.skipped, 'instant')} that had fired" if found.skipped else ""
    text += f"; {found.left:,} are left to the scheduler, which has not come to them yet" if found.left else ""
    return documents.BackfillDone(
        changed=found.published > 0 and not found.dry_run, text=text, published=found.published, skipped=found.skipped,
        left=found.left, first=found.first, last=found.last, dry_run=found.dry_run,
    )  # fmt: skip


async def remove_schedule(place: Place, queue: str, request: documents.ScheduleReference) -> documents.Done:
    """Remove a schedule."""
    changed = await place.post.remove_schedule(request.key, queue=request.queue)
    text = f"schedule {request.key} is removed" if changed else f"there is no schedule {request.key}"
    return documents.Done(changed=changed, text=text)


# ---- the same as commands --------------------------------------------------------------------------------------


def configure_forms(queue: str, request: documents.SettingsChange) -> Forms:
    """Settings as options of `waypost configure`."""
    wanted = changed_settings(request)
    arguments = [f"{name}={'none' if value is None else value}" for name, value in wanted.items()]
    return Forms(command("configure", queue, *arguments), format_call("configure", queue, **wanted))


def redrive_forms(queue: str, request: documents.RedriveRequest) -> Forms:
    """A redrive as a command."""
    arguments: list[object] = [*request.ids]
    arguments += option("--reason", request.reason) if request.reason is not None else []
    arguments += ["--all"] if request.all else []
    arguments += ["--rate", request.rate] if request.rate is not None else []
    chosen = {"ids": request.ids or None, "reason": request.reason, "rate": request.rate}
    options = {name: value for name, value in chosen.items() if value is not None}
    return Forms(command("dead", "redrive", queue, *arguments), format_call("redrive", queue, **options))


def purge_forms(queue: str, request: documents.PurgeRequest) -> Forms:
    """A purge as a command."""
    return Forms(command("purge", queue, "--state", request.state), format_call("purge", queue, request.state))


def cancel_forms(queue: str, request: documents.CancelRequest) -> Forms:
    """A cancel as a command."""
    if request.key is not None:
        key = option("--key", request.key)
        return Forms(command("cancel", queue, *key), format_call("cancel", queue, key=request.key))
    return Forms(command("cancel", queue, request.id), format_call("cancel", queue, request.id))


def reschedule_forms(queue: str, request: documents.RescheduleRequest) -> Forms:
    """A move of a timer as a command."""
    when = ("--at", request.at.isoformat()) if request.at is not None else ("--delay", request.delay or 0)
    target = ("--id", request.id) if request.key is None else (request.key,)
    options: dict[str, object] = {} if request.key is None else {"key": request.key}
    options |= {"at": request.at} if request.at is not None else {"delay": request.delay or 0}
    given = (queue, request.id) if request.key is None else (queue,)
    return Forms(command("timers", "reschedule", queue, *target, *when), format_call("reschedule", *given, **options))


def worker_forms(action: str, method: str) -> Callable[[str, Any], Forms]:
    """A request to a worker as a command."""
    return lambda queue, request: Forms(command("workers", action, request.name), format_call(method, request.name))


def schedule_forms(action: str, method: str) -> Callable[[str, Any], Forms]:
    """A write on a schedule as a command."""

    def forms(queue: str, request: documents.ScheduleReference) -> Forms:
        arguments = ("schedules", action, request.key, "--queue", request.queue)
        return Forms(command(*arguments), format_call(method, request.key, queue=request.queue))

    return forms


def backfill_forms(queue: str, request: documents.BackfillRequest) -> Forms:
    """A backfill as a command."""
    arguments: list[object] = ["schedules", "backfill", request.key, "--queue", request.queue]
    arguments += ["--from", request.start.isoformat(), "--to", request.end.isoformat()]
    python = format_call("backfill", request.key, request.start, request.end, queue=request.queue)
    return Forms(command(*arguments), python)


SCHEDULE_DEFAULTS = {
    field.name: field.default for field in msgspec.structs.fields(documents.ScheduleSave) if field.name != "headers"
}


def save_forms(queue: str, request: documents.ScheduleSave) -> Forms:
    """A save of a schedule as a command; the body is not written out, because the log of actions must not have it."""
    arguments: list[object] = ["schedules", "save", request.name, "--queue", request.queue]
    rule: dict[str, object] = {"every": request.every}
    if request.cron is not None:
        rule = {"cron": request.cron, "tz": request.tz}
    for name, value in rule.items():
        arguments += [f"--{name}", value]
    for day in request.exclude:
        arguments += ["--exclude", day.isoformat()]
    options: dict[str, object] = {"queue": request.queue} | rule
    if request.exclude:
        options["exclude"] = request.exclude
    for name in (
        "key", "missed", "overlap", "grace", "jitter", "start", "end", "max_fires", "priority", "group", "expires",
    ):  # fmt: skip
        value = getattr(request, name)
        if value != SCHEDULE_DEFAULTS[name]:
            text = value.isoformat() if isinstance(value, datetime) else value
            arguments += option(f"--{name.replace('_', '-')}", text)
            options[name] = CatchUp(value) if name == "missed" and isinstance(value, int) else value
    if not request.keep_body and request.body is not None:
        arguments += ["--body", "BODY"]
        options["body"] = Placeholder("body")
    return Forms(command(*arguments), format_call("save_schedule", request.name, **options))


def plain_forms(argument: str, method: str) -> Callable[[str, Any], Forms]:
    """A write that needs the queue alone, as a command."""
    return lambda queue, request: Forms(command(argument, queue), format_call(method, queue))


QUEUE, SCHEDULES = "/queues/{queue}", "/schedules"
ACTIONS: dict[str, Action] = {
    action.name: action
    for action in (
        Action("pause", "POST", f"{QUEUE}/pause", "operate", documents.Nothing, documents.Done,
               "Hand out nothing of a queue until it is resumed.", pause, plain_forms("pause", "pause")),
        Action("resume", "POST", f"{QUEUE}/resume", "operate", documents.Nothing, documents.Done,
               "Hand out messages of a queue again.", resume, plain_forms("resume", "resume")),
        Action("configure", "PATCH", f"{QUEUE}/settings", "admin", documents.SettingsChange, documents.SettingsDone,
               "Change settings of a queue, for every client, at once.", configure, configure_forms),
        Action("redrive", "POST", f"{QUEUE}/redrive", "operate", documents.RedriveRequest, documents.RedriveDone,
               "Send dead letters again, with fresh counts.", redrive, redrive_forms),
        Action("purge", "POST", f"{QUEUE}/purge", "admin", documents.PurgeRequest, documents.PurgeDone,
               "Remove all messages of a state for good.", purge, purge_forms),
        Action("cancel", "POST", f"{QUEUE}/cancel", "operate", documents.CancelRequest, documents.CancelDone,
               "Cancel a message.", cancel, cancel_forms),
        Action("reschedule", "POST", f"{QUEUE}/reschedule", "operate", documents.RescheduleRequest,
               documents.RescheduleDone, "Give a timer another due time.", reschedule, reschedule_forms),
        Action("stop_worker", "POST", "/workers/stop", "operate", documents.WorkerReference, documents.Done,
               "Request a worker to stop. What runs may end, what has not begun goes back to its queue.", stop_worker,
               worker_forms("stop", "stop_worker")),
        Action("quiet_worker", "POST", "/workers/quiet", "operate", documents.WorkerReference, documents.Done,
               "Request a worker to claim no more, and to go on with what it has.", quiet_worker,
               worker_forms("quiet", "quiet_worker")),
        Action("remove", "POST", f"{QUEUE}/remove", "admin", documents.RemoveRequest, documents.Done,
               "Remove a queue that is empty.", remove, plain_forms("remove", "remove_queue")),
        Action("save_schedule", "PUT", SCHEDULES, "admin", documents.ScheduleSave, documents.ScheduleDone,
               "Save a schedule.", save_schedule, save_forms),
        Action("pause_schedule", "POST", f"{SCHEDULES}/pause", "operate", documents.ScheduleReference, documents.Done,
               "Fire a schedule no more until it is resumed.", pause_schedule,
               schedule_forms("pause", "pause_schedule")),
        Action("resume_schedule", "POST", f"{SCHEDULES}/resume", "operate", documents.ScheduleReference,
               documents.Done, "Fire a schedule again from its next instant on.", resume_schedule,
               schedule_forms("resume", "resume_schedule")),
        Action("trigger_schedule", "POST", f"{SCHEDULES}/trigger", "operate", documents.ScheduleReference,
               documents.TriggerDone, "Publish the message of a schedule now.", trigger_schedule,
               schedule_forms("trigger", "trigger_schedule")),
        Action("backfill_schedule", "POST", f"{SCHEDULES}/backfill", "operate", documents.BackfillRequest,
               documents.BackfillDone, "Publish the fires of an interval of the past that have not fired.",
               backfill_schedule, backfill_forms),
        Action("remove_schedule", "POST", f"{SCHEDULES}/remove", "admin", documents.ScheduleReference, documents.Done,
               "Remove a schedule. What it has published stays.", remove_schedule,
               schedule_forms("remove", "remove_schedule")),
    )
}  # fmt: skip


def queue_of(action: Action, request: Any, queue: str) -> str | None:
    """The queue that a write concerns."""
    return queue or getattr(request, "queue", None)
