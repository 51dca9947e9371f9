"""Idempotency keys: a write that is sent again with the same key gets the first answer and does not run again.

Answers are records in the store that the write is about, for an hour: a repeat to another server, or after a restart,
is answered too. The record is made before the write runs. A server that ends in between leaves it without an answer:
then a repeat is refused, because nothing says whether the write ran.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from waypost import AsyncWaypost
from waypost.errors import WaypostError
from waypost.web.documents import Done
from waypost.web.problems import Problem

log = logging.getLogger("waypost.web")

KIND = "waypost-web-answers"
KEPT_SECONDS = 3600.0
KEPT_MAX = 10_000
KEY_CHARACTERS_MAX = 128

Place = tuple[str, ...]


class KeptProblem(Struct, frozen=True):
    """A problem that a write ended with."""

    status: int
    kind: str
    detail: str
    more: dict[str, Any] = {}


class Kept(Struct, frozen=True):
    """A write under a key: a hash of what was sent, who runs it, and its answer once there is one."""

    request: str
    owner: str
    answer: Any = None
    problem: KeptProblem | None = None


async def run_once(
    post: AsyncWaypost,
    key: str | None,
    place: Place,
    request: bytes,
    kind: type[Done],
    run: Callable[[], Awaitable[Done]],
) -> Done:
    """Run a write, or return what it answered before under this key. `place` names user, write and target."""
    if key is None:
        return await run()
    if not 1 <= len(key) <= KEY_CHARACTERS_MAX or not key.isprintable():
        raise Problem(422, "invalid-key", f"an idempotency key has 1 to {KEY_CHARACTERS_MAX} printable characters")
    name = sha256(msgspec.json.encode([*place, key])).hexdigest()
    begun = Kept(sha256(request).hexdigest(), secrets.token_hex(8))
    saved = await post.save_record(
        KIND, name, msgspec.json.encode(begun), version=0, ttl=KEPT_SECONDS, keep=KEPT_MAX
    )  # fmt: skip
    if not saved.saved:
        assert saved.record is not None
        return repeated(msgspec.json.decode(saved.record.data, type=Kept), begun.request, kind)
    try:
        done = await run()
    except Problem as problem:
        # What was not done may run once the reason is gone. What may have been done must not run again.
        outcome = problem.more.get("outcome", "not done" if problem.status < 500 else "unknown")
        if outcome == "not done":
            await keep(post, name, None)
        else:
            failed = KeptProblem(problem.status, problem.kind, problem.detail, problem.more)
            await keep(post, name, msgspec.structs.replace(begun, problem=failed))
        raise
    await keep(post, name, msgspec.structs.replace(begun, answer=msgspec.to_builtins(done)))
    return done


async def keep(post: AsyncWaypost, name: str, kept: Kept | None) -> None:
    """Save the answer of a write, or forget the write. A failure must not hide what the write answered."""
    try:
        data = None if kept is None else msgspec.json.encode(kept)
        await post.save_record(KIND, name, data, ttl=KEPT_SECONDS, keep=KEPT_MAX)
    except WaypostError as error:
        log.warning("the answer to a write was not kept: a repeat of it is refused: %s", error,
                    extra={"event": "web_answer_not_kept"})  # fmt: skip


def repeated(kept: Kept, request: str, kind: type[Done]) -> Done:
    """What a repeat is answered with."""
    if kept.request != request:
        raise Problem(422, "key-reused", "this idempotency key was used for another request: take a new one")
    if kept.problem is not None:
        failed = kept.problem
        raise Problem(failed.status, failed.kind, failed.detail, **failed.more)
    if kept.answer is None:
        raise Problem(
            409, "still-running", "a write with this idempotency key still runs, or its server ended before it "
            "answered: ask again soon, and see in the list of actions whether it was done before you take a new key",
            headers={"Retry-After": "1"},
        )  # fmt: skip
    return msgspec.convert(kept.answer, kind)
