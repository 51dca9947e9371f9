"""Bulk actions of the web server: started and changed by requests, carried on in the background, one server at a time.

The server of a started app looks for unfinished bulk actions every few seconds. A mounted app is not notified when its
server starts: there it begins when a page of dead letters or actions is read or a bulk action is started, and ends some
time after the last of these, once no bulk action is left to carry on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from waypost.errors import WaypostError
from waypost.formatting import format_call
from waypost.views import BulkAction
from waypost.web import documents
from waypost.web.access import Scope
from waypost.web.actions import ACTIONS, Action, Forms, check_confirmed, command, option
from waypost.web.dead_letters import filter_scope, filters_of
from waypost.web.problems import Problem
from waypost.web.reading import Place, answered

log = logging.getLogger("waypost.web")

#: How often a server looks for bulk actions that no other one carries on.
POLL_SECONDS = 3.0
#: One turn of an action, so that several get their turns.
TURN_SECONDS = 1.0
#: Without a lifespan: how long after the last request it goes on looking, if no action is unfinished.
IDLE_SECONDS = 120.0
#: Bulk actions that are read at once.
LISTED = 50
#: What stands for a header that may not be seen.
HIDDEN = "(hidden)"
#: States in which a server has something to do.
ACTIVE = ("running", "pausing", "cancelling")

#: The fields of a start, as options of the command.
START_FIELDS = (
    "state", "reason", "error_type", "error", "group", "key_prefix", "type_name", "header", "died_before", "died_after",
    "published_before", "published_after", "delay", "at", "priority", "rate",
)  # fmt: skip


class BulkRunner:
    """Carries on the bulk actions of the stores of one server; that of a read-only server does nothing."""

    def __init__(self, *, read_only: bool = False) -> None:
        self._read_only = read_only
        self._places: list[Place] = []
        self._task: asyncio.Task[None] | None = None
        self._wanted_until = 0.0
        self._wake = asyncio.Event()
        #: Stores that had an unfinished bulk action when they were last read.
        self._active: set[str] = set()

    def serve(self, place: Place) -> None:
        """Carry on the bulk actions of this store too."""
        self._places.append(place)

    def start(self, *, forever: bool = False) -> None:
        """Begin to look for bulk actions, in the event loop that runs; go on for some time."""
        if self._read_only:
            return
        self._wanted_until = float("inf") if forever else max(self._wanted_until, time.monotonic() + IDLE_SECONDS)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._wake = asyncio.Event()
            self._task = loop.create_task(self._run())

    def notify(self) -> None:
        """Look at once: a bulk action was started or resumed."""
        self.start()
        self._wake.set()

    async def close(self) -> None:
        """End it; what is unfinished is carried on by another server."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            worked = False
            for place in self._places:
                try:
                    worked = await self._turn(place) or worked
                except WaypostError as error:
                    log.debug("bulk actions of store %s cannot be carried on now: %s", place.name, error)
                except Exception:
                    log.exception("a bulk action failed", extra={"event": "web_bulk_failed"})
            if not worked and not self._active and time.monotonic() > self._wanted_until:
                return
            if not worked:
                await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _turn(self, place: Place) -> bool:
        """Give each unfinished action of a store its turn; whether one of them moved."""
        found = await unfinished(place)
        (self._active.add if found else self._active.discard)(place.name)
        worked = False
        for action in reversed(found):
            try:
                after = await place.post.run_bulk(action.id, seconds=TURN_SECONDS)
            except WaypostError as error:
                log.debug("bulk action %s cannot be carried on now: %s", action.id, error)
                continue
            except Exception:
                log.exception("a bulk action failed", extra={"event": "web_bulk_failed", "bulk": action.id})
                continue
            if (after.steps, after.done, after.state) != (action.steps, action.done, action.state):
                worked = True
                await place.watch.changed(action.queue)
        return worked


async def unfinished(place: Place) -> list[BulkAction]:
    """The bulk actions of a store that a server has something to do for, the newest first."""
    found: list[BulkAction] = []
    cursor = None
    while True:
        page = await place.post.bulk_actions(cursor=cursor, limit=LISTED)
        found += [action for action in page.actions if action.state in ACTIVE]
        cursor = page.cursor
        if cursor is None:
            return found


# ---- documents -------------------------------------------------------------------------------------------------


def bulk_document(action: BulkAction, *, show_header: bool) -> documents.BulkAction:
    """A bulk action as the API shows it; a header by which it chooses only if that may be seen."""
    fields = {name: getattr(action, name) for name in documents.BulkAction.__struct_fields__ if name != "text"}
    if not show_header and "header" in action.filters:
        fields["filters"] = {**action.filters, "header": HIDDEN}
    return documents.BulkAction(**fields, text=progress_text(action))


async def may_show_header(place: Place, action: BulkAction, *, bodies: bool) -> bool:
    """Whether the header by which a bulk action chooses may be seen, if it has one."""
    return "header" not in action.filters or await place.may_show_bodies(action.queue, allowed=bodies)


def progress_text(action: BulkAction) -> str:
    """How far a bulk action is, in a sentence."""
    verb = {
        "redrive": "sent again", "purge": "removed", "cancel": "cancelled", "reschedule": "moved",
        "prioritize": "with the new priority",
    }[action.verb]  # fmt: skip
    text = f"{action.done:,} {verb}"
    if action.searched and not action.has_ended:
        text += f", searched {action.searched:,} of {max(action.searched, action.total):,}"
    if action.left:
        text += f", {action.left:,} stay dead because their key is in use"
    if action.unknown:
        text += f", up to {action.unknown:,} more of which a server that ended has left no count"
    if action.state in ("running", "pausing", "cancelling") and not action.carried and action.rate is None:
        text += "; no server works on it right now"
    return text + (f"; {action.error}" if action.error else "")


async def bulk_actions(place: Place, query: documents.ActionsQuery, *, bodies: bool) -> documents.BulkActions:
    """A page of bulk actions."""
    async with answered():
        page = await place.post.bulk_actions(cursor=query.cursor, limit=query.limit)
        found = [
            bulk_document(one, show_header=await may_show_header(place, one, bodies=bodies)) for one in page.actions
        ]
    return documents.BulkActions(bulk_actions=found, next=page.cursor)


async def bulk_action(place: Place, id: str, *, bodies: bool) -> documents.BulkAction:
    """One bulk action."""
    async with answered():
        found = await place.post.bulk_action(id)
        return bulk_document(found, show_header=await may_show_header(place, found, bodies=bodies))


# ---- writes ----------------------------------------------------------------------------------------------------


async def bulk_redrive(place: Place, queue: str, request: documents.BulkRedrive) -> documents.BulkDone:
    """Save a redrive; the servers of this store carry it on."""
    started = await place.post.start_bulk(
        queue, "redrive", rate=request.rate, user=request.by or None, via="web",
        **await filters_of(place, queue, request),
    )  # fmt: skip
    return begun(place, started, "sending dead letters again")


async def bulk_purge(place: Place, queue: str, request: documents.BulkPurge) -> documents.BulkDone:
    """Save a purge; the servers of this store carry it on."""
    check_confirmed(queue, request.confirm)
    filters = await filters_of(place, queue, request)
    started = await place.post.start_bulk(queue, "purge", user=request.by or None, via="web", **filters)
    return begun(place, started, "removing dead letters")


async def bulk_cancel(place: Place, queue: str, request: documents.BulkCancel) -> documents.BulkDone:
    """Save a cancel of many messages; the servers of this store carry it on."""
    check_confirmed(queue, request.confirm)
    started = await place.post.start_bulk(
        queue, "cancel", state=request.state, rate=request.rate, user=request.by or None, via="web",
        **await filters_of(place, queue, request),
    )  # fmt: skip
    return begun(place, started, "cancelling messages")


async def bulk_reschedule(place: Place, queue: str, request: documents.BulkReschedule) -> documents.BulkDone:
    """Save a move of many timers; the servers of this store carry it on."""
    if (request.delay is None) == (request.at is None):
        raise Problem(422, "no-choice", "say when: delay, or at")
    if request.at is not None and request.at.tzinfo is None:
        raise Problem(422, "invalid-time", "at needs a time zone, as in 2026-03-06T09:00:00Z")
    started = await place.post.start_bulk(
        queue, "reschedule", delay=request.delay, at=request.at, rate=request.rate, user=request.by or None, via="web",
        **await filters_of(place, queue, request),
    )  # fmt: skip
    return begun(place, started, "moving timers")


async def bulk_prioritize(place: Place, queue: str, request: documents.BulkPrioritize) -> documents.BulkDone:
    """Save a change of many priorities; the servers of this store carry it on."""
    started = await place.post.start_bulk(
        queue, "prioritize", state=request.state, priority=request.priority, rate=request.rate, user=request.by or None,
        via="web", **await filters_of(place, queue, request),
    )  # fmt: skip
    return begun(place, started, "changing priorities")


def begun(place: Place, started: BulkAction, what: str) -> documents.BulkDone:
    """The answer to the start of a bulk action."""
    place.bulk.notify()
    text = f"{what} has begun, and goes on when this page is closed"
    return documents.BulkDone(
        changed=True, text=text, bulk=started.id, bulk_action=bulk_document(started, show_header=True)
    )


async def change_bulk(place: Place, queue: str, request: documents.BulkChange) -> documents.BulkDone:
    """Pause, resume or cancel a bulk action."""
    changed = await place.post.change_bulk(request.id, request.change)
    place.bulk.notify()
    text = f"the bulk action is {changed.state}: {progress_text(changed)}"
    # The scope to change it is not the one to see headers.
    document = bulk_document(changed, show_header=False)
    return documents.BulkDone(changed=True, text=text, bulk=changed.id, bulk_action=document)


async def change_scope(place: Place, request: documents.BulkChange) -> Scope:
    """What a change of a bulk action needs: the scope that its start needs."""
    return "admin" if (await place.post.bulk_action(request.id)).verb in ("purge", "cancel") else "operate"


async def edit_dead(place: Place, queue: str, request: documents.EditRequest) -> documents.EditDone:
    """Send a dead letter again with another body or other headers."""
    given: dict[str, Any] = {} if request.keep_body else {"body": request.body}
    published = await place.post.replace_dead(queue, request.id, headers=request.headers, **given)
    if published is None:
        raise Problem(404, "unknown-letter", f"{queue} has no dead letter {request.id} any more")
    if published.status not in ("queued", "delayed"):
        text = f"the letter stays dead: its key is in use by message {published.id}"
        return documents.EditDone(changed=False, text=text, id=published.id)
    return documents.EditDone(changed=True, text=f"message {published.id} takes its place", id=published.id)


def bulk_forms(verb: str) -> Callable[[str, Any], Forms]:
    """The start of a bulk action as a command."""

    def forms(queue: str, request: documents.DeadFilter) -> Forms:
        arguments: list[object] = []
        options: dict[str, object] = {}
        for name in START_FIELDS:
            value = getattr(request, name, None)
            if value is not None:
                written = value.isoformat() if hasattr(value, "isoformat") else value
                arguments += option(f"--{name.replace('_name', '').replace('_', '-')}", written)
                options[name] = value
        return Forms(
            command("bulk", "start", queue, verb, *arguments), format_call("start_bulk", queue, verb, **options)
        )

    return forms


def change_forms(queue: str, request: documents.BulkChange) -> Forms:
    """A change of a bulk action as a command."""
    return Forms(command("bulk", request.change, request.id), format_call("change_bulk", request.id, request.change))


def edit_forms(queue: str, request: documents.EditRequest) -> Forms:
    """An edit as a command; the body is not written out, because the log of actions must not have it."""
    arguments = [] if request.keep_body else ["--body", "BODY"]
    given = "" if request.keep_body else ", body"
    return Forms(
        command("dead", "edit", queue, request.id, *arguments), f"post.replace_dead({queue!r}, {request.id!r}{given})"
    )  # fmt: skip


BULK_ACTIONS: tuple[Action, ...] = (
    Action("bulk_redrive", "POST", "/queues/{queue}/bulk/redrive", "operate", documents.BulkRedrive, documents.BulkDone,
           "Send dead letters again, in the background.", bulk_redrive, bulk_forms("redrive"),
           filter_scope),
    Action("bulk_purge", "POST", "/queues/{queue}/bulk/purge", "admin", documents.BulkPurge, documents.BulkDone,
           "Remove dead letters for good, in the background.", bulk_purge, bulk_forms("purge"),
           filter_scope),
    Action("bulk_cancel", "POST", "/queues/{queue}/bulk/cancel", "admin", documents.BulkCancel, documents.BulkDone,
           "Cancel messages that are not running, in the background.", bulk_cancel, bulk_forms("cancel"),
           filter_scope),
    Action("bulk_reschedule", "POST", "/queues/{queue}/bulk/reschedule", "operate", documents.BulkReschedule,
           documents.BulkDone, "Give timers another due time, in the background.", bulk_reschedule,
           bulk_forms("reschedule"), filter_scope),
    Action("bulk_prioritize", "POST", "/queues/{queue}/bulk/prioritize", "operate", documents.BulkPrioritize,
           documents.BulkDone, "Give messages another priority, in the background.", bulk_prioritize,
           bulk_forms("prioritize"), filter_scope),
    Action("change_bulk", "POST", "/bulk", "operate", documents.BulkChange, documents.BulkDone,
           "Pause, resume or cancel a bulk action; a purge or a cancel with the scope `admin`.", change_bulk,
           change_forms, change_scope),
    Action("edit_dead", "POST", "/queues/{queue}/edit", "operate", documents.EditRequest, documents.EditDone,
           "Send a dead letter again with another body.", edit_dead, edit_forms),
)  # fmt: skip
ACTIONS.update({action.name: action for action in BULK_ACTIONS})
