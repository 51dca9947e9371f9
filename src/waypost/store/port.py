"""The contract of a store: one verb, one atomic step.

A `Store` only translates: each verb turns its arguments into a `Call`, and touches nothing. An `Executor` (or its
async sibling) runs calls on a connection. So sync and async share everything that can be wrong. Verbs are
batch-first: one message is a batch of one. `operation` makes a repeated call return its first answer.

Callers keep to the limits of `policy`: at most `CHUNK_MESSAGES_MAX` items a call, and no id and no key twice in one
publish. Every verb that can make work claimable answers, next to its result, which sleepers to wake.

A claim that got less than it asked for registers its `sleeper`: it has room for more. With `linger_ms` it promises to
look again so soon that until then nobody is woken for a few messages; 0 ends the promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from waypost.errors import InvalidInput
from waypost.identity import Operation
from waypost.message import (
    CancelStatus,
    Claimed,
    Continuation,
    ExtendStatus,
    JournalPage,
    MessageState,
    Page,
    Published,
    Purged,
    Redriven,
    Settlement,
    SettleStatus,
    Stats,
    TracePage,
)
from waypost.policy import CHUNK_MESSAGES_MAX, OnConflict, Policy

T = TypeVar("T")


class Draft(Struct, frozen=True, gc=False):
    """A message on its way into a store. `at_ms` is absolute and wins over `delay_ms`, which starts at the store."""

    id: str
    envelope: bytes
    key: str | None = None
    #: 0: the key is taken while its message is unfinished (`live`); otherwise also for so long after the publish.
    window_ms: int = 0
    on_conflict: OnConflict = "keep"
    delay_ms: int = 0
    at_ms: int | None = None
    priority: int = 5
    group: str | None = None
    #: What the journal keeps at level `full` in place of the envelope (the redact hook's work).
    journal_copy: bytes | None = None
    #: A continuation: the queue remembers its arrival, so that it is stored once however often it is sent.
    forwarded: bool = False


class Hold(Struct, frozen=True, gc=False):
    """The fence of one lease, as `extend` shows it."""

    id: str
    token: int
    nonce: bytes


class Target(Struct, frozen=True, gc=False):
    """What to cancel: a message id, or a key."""

    id: str | None = None
    key: str | None = None


def check_chunk(items: Sequence[object]) -> None:
    """Refuse more than one step may carry: a longer one would hold up every other client of the store."""
    if len(items) > CHUNK_MESSAGES_MAX:
        raise InvalidInput(f"{len(items)} items in one step, the limit is {CHUNK_MESSAGES_MAX}; send them in parts")


def check_purge(state: MessageState) -> MessageState:
    """Refuse to purge what is held: its handler runs, and the next of its key would run beside it."""
    if state == "leased":
        raise InvalidInput("leased messages cannot be purged: cancel them, which asks their handlers to stop")
    return state


class Woken(Struct, Generic[T], frozen=True):
    """A result, and whom to wake for it by queue: names, or `*` when the store has no memory of who sleeps."""

    result: T
    wake: dict[str, list[str]]


def forwarded_draft(next_one: Continuation) -> Draft:
    """A continuation as its target queue receives it."""
    return Draft(
        next_one.id,
        next_one.envelope,
        key=next_one.key,
        delay_ms=next_one.delay_ms,
        priority=next_one.priority,
        group=next_one.group,
        forwarded=True,
    )


def told(changes: Mapping[str, Any]) -> str:
    """Policy changes as the journal tells them."""
    return " ".join(f"{name}={value}" for name, value in sorted(changes.items()))


class Call(Generic[T]):
    """One step for an executor of the same store. `name` is the verb, for logs and errors."""

    name: str


class Executor(Protocol):
    """Runs calls; every error is one of `waypost.errors`. Safe to use from several threads."""

    def run(self, call: Call[T]) -> T: ...
    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]: ...
    def close(self) -> None: ...


class AsyncExecutor(Protocol):
    """The same for an event loop."""

    async def run(self, call: Call[T]) -> T: ...
    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]: ...
    async def close(self) -> None: ...


class Store(Protocol):
    """The verbs. See `memory.py` for what each means, told as plainly as we can."""

    kind: str
    namespace: str

    def connect(self, *, start_timeout: float) -> Executor: ...
    async def connect_async(self, *, start_timeout: float) -> AsyncExecutor: ...

    # the way of a message
    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]: ...
    def claim(
        self,
        queue: str,
        limit: int,
        operation: Operation,
        *,
        worker: str,
        sleeper: str | None = None,
        linger_ms: int | None = None,
        replay: bool = False,
    ) -> Call[Claimed]: ...
    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation
    ) -> Call[Woken[list[SettleStatus]]]: ...
    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]: ...
    def cancel(self, queue: str, targets: Sequence[Target], operation: Operation) -> Call[list[CancelStatus]]: ...

    # chains: what a settle sent on, and has not arrived yet (stores that span queues in one step have none)
    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation]]: ...
    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]: ...
    def result(self, queue: str, message_id: str) -> Call[bytes | None]: ...

    # looking
    def peek(
        self,
        queue: str,
        state: MessageState,
        limit: int,
        *,
        cursor: str | None = None,
        id: str | None = None,
        key: str | None = None,
        group: str | None = None,
        reason: str | None = None,
    ) -> Call[Page]: ...
    def stats(self, queue: str, *, minutes: int = 0) -> Call[Stats]: ...
    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]: ...
    def queues(self) -> Call[list[str]]: ...

    # running a queue
    def redrive(
        self, queue: str, limit: int, operation: Operation, *, ids: Sequence[str] = (), reason: str | None = None
    ) -> Call[Woken[Redriven]]: ...
    def purge(self, queue: str, state: MessageState, limit: int, operation: Operation) -> Call[Purged]: ...
    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[Policy]]: ...
    def policy(self, queue: str) -> Call[Policy]: ...
    def pause(self, queue: str) -> Call[bool]: ...
    def resume(self, queue: str) -> Call[Woken[bool]]: ...

    # the journal
    def journal(self, queue: str, after: int, limit: int) -> Call[JournalPage]: ...
    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]: ...
    def journal_forget(self, queue: str, name: str) -> Call[bool]: ...
    def journal_trim(self, queue: str, up_to: int) -> Call[int]: ...
