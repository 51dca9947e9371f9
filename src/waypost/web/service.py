"""What the API and the pages share for each request: who makes it, which store it means, and how a write is run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from waypost.checks import check_queue
from waypost.errors import InvalidName, WaypostError
from waypost.formatting import printable
from waypost.views import LoggedAction
from waypost.web.access import Access, Caller, address_of
from waypost.web.actions import Action, queue_of
from waypost.web.documents import Done
from waypost.web.idempotency import run_once
from waypost.web.problems import Problem, problem_of
from waypost.web.reading import Place
from waypost.web.undo import undo_of

log = logging.getLogger("waypost.web")

#: The largest request: a schedule with its body.
REQUEST_BYTES_MAX = 256 * 1024
#: How long it may take to arrive: a client that sends a byte now and then must not hold a connection for ever.
REQUEST_SECONDS_MAX = 20.0
#: How long a write waits for its entry in the log of actions.
LOGGED_SECONDS = 2.0
T = TypeVar("T")


class Service:
    """The stores, who may do what, and what was done."""

    def __init__(self, places: Mapping[str, Place], access: Access, *, read_only: bool) -> None:
        self.places = dict(places)
        self.access = access
        self.read_only = read_only

    def place(self, name: str) -> Place:
        """The store of a name, or a `Problem`."""
        found = self.places.get(name)
        if found is None:
            raise Problem(404, "unknown-store", f"this server shows no store {name!r}")
        return found

    def may(self, caller: Caller, scope: str) -> bool:
        """Whether a user may do what a scope is for, here."""
        return caller.user.may(scope) and (scope in ("read", "bodies") or not self.read_only)

    async def require(self, request: Request, scope: str) -> Caller:
        """Return who makes a request, or raise a `Problem` if it may not."""
        caller = await self.access.caller_of(request)
        if caller is None:
            if self.access.is_local_only:
                raise Problem(403, "local-only", "without a secret only clients of this machine are served: set "
                              "WAYPOST_WEB_SECRET, or give create_app() a secret or auth")  # fmt: skip
            raise Problem(
                401, "not-signed-in", "send a bearer token, or sign in", headers={"WWW-Authenticate": "Bearer"}
            )
        if not caller.user.may(scope):
            raise Problem(
                403, "missing-scope", f"this needs the scope {scope!r}, which {caller.user.name} does not have"
            )
        if not self.may(caller, scope):
            raise Problem(403, "read-only", "this server is read-only")
        return caller

    async def act(
        self, action: Action, request: Request, caller: Caller, place: Place, queue: str, content: Any
    ) -> Done:
        """Run a write once for its idempotency key, and log who did what."""
        target = queue_of(action, content, queue)
        if target is not None:
            check_name(target)
        if action.scope_of is not None:
            await self.require(request, await action.scope_of(place, content))
        key = request.headers.get("idempotency-key") or getattr(request.state, "idempotency_key", None)
        sent = msgspec.json.encode(content)
        if hasattr(content, "by"):
            content = msgspec.structs.replace(content, by=caller.user.name)

        async def run() -> Done:
            done, outcome = None, "failed"
            try:
                done = await action.run(place, queue, content)
                outcome = done.text
            except Problem as problem:
                outcome = problem.detail
                raise
            except WaypostError as error:
                outcome = str(error)
                raise problem_of(error) from error
            finally:
                log_action(caller, request, action, place, target, outcome)
                if not getattr(content, "dry_run", False):
                    await keep_action(caller, request, action, place, queue, content, done, outcome)
            await place.watch.changed(target if action.name != "remove" else None)
            return done

        target_of = (caller.user.name, action.name, queue)
        return await run_once(place.post, key, target_of, sent, action.answer, run)


def log_action(caller: Caller, request: Request, action: Action, place: Place, queue: str | None, outcome: str) -> None:
    """One line for each write: who, from where, what, and what became of it."""
    user = printable(caller.user.name)
    log.info(
        "%s: %s of %s in store %s: %s", user, action.name, queue, place.name, printable(outcome),
        extra={
            "event": "web_action", "user": user, "via": caller.via, "address": address_of(request),
            "action": action.name, "queue": queue, "store": place.name, "outcome": outcome,
        },
    )  # fmt: skip


async def keep_action(
    caller: Caller, request: Request, action: Action, place: Place, queue: str, content: Any, done: Done | None,
    outcome: str,
) -> None:  # fmt: skip
    """Append a write to the log of actions in the store. A failure must not hide what the write did."""
    if getattr(content, "header", None) is not None:
        # Not all who read the log may see headers.
        content = msgspec.structs.replace(content, header="HEADER")
    forms = action.forms(queue, content)
    entry = LoggedAction(
        user=printable(caller.user.name),
        via="web",
        action=action.name,
        queue=queue_of(action, content, queue),
        ok=done is not None,
        text=outcome,
        command=forms.command,
        python=forms.python,
        undo=None if done is None else undo_of(action.name, content, done),
        origin=address_of(request),
        bulk=getattr(done, "bulk", None),
    )
    try:
        async with asyncio.timeout(LOGGED_SECONDS):
            await place.post.log_action(entry)
    except (WaypostError, TimeoutError) as error:
        log.warning(
            "an action is only in this log, not in the store: %s", error, extra={"event": "web_action_not_kept"}
        )


def check_name(queue: str) -> str:
    """Return the name of a queue, or raise a `Problem`."""
    try:
        return check_queue(queue)
    except InvalidName as error:
        raise Problem(422, "invalid-name", str(error)) from None


async def read_body(request: Request) -> bytes:
    """The body of a request, refused as soon as it is too large."""
    limit = Problem(413, "too-large", f"a request has at most {REQUEST_BYTES_MAX:,} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) > REQUEST_BYTES_MAX:
        raise limit
    parts, size = [], 0
    try:
        async with asyncio.timeout(REQUEST_SECONDS_MAX):
            async for part in request.stream():
                size += len(part)
                if size > REQUEST_BYTES_MAX:
                    raise limit
                parts.append(part)
    except TimeoutError:
        raise Problem(408, "too-slow", f"the request did not arrive within {REQUEST_SECONDS_MAX:.0f} seconds") from None
    return b"".join(parts)


def convert(given: Any, kind: type[T], *, strict: bool = True) -> T:
    """Return what was sent as its type, or raise a `Problem` that names the field."""
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid-input", str(error)) from None


@asynccontextmanager
async def as_problems() -> AsyncIterator[None]:
    """Turn every error into a `Problem`; one that was not expected is logged and says nothing of itself."""
    try:
        yield
    except Problem:
        raise
    except WaypostError as error:
        raise problem_of(error) from error
    except Exception as error:
        log.exception("a request failed", extra={"event": "web_request_failed"})
        raise Problem(500, "internal", "an error in waypost; the log of the server has it") from error
