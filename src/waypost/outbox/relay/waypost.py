"""Another waypost store as a target: each message keeps its id and envelope, and arrives exactly once.

The target queue records arrivals, as it does for chains, so that a repeat within a day is not stored twice. Keys are
only sent with the relay's `key=`: a message whose key is in use in the target queue would count as a duplicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from waypost.checks import check_namespace, check_queue, check_text
from waypost.errors import InvalidInput, QueueFull, WaypostError
from waypost.identity import Session
from waypost.message import error_text
from waypost.operations.flow import ClientContext, Flow, drive_async
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed, split_batch
from waypost.policy import KEY_CHARACTERS_MAX, START_TIMEOUT_SECONDS
from waypost.redaction import Redact, journal_copy
from waypost.store.opening import open_store
from waypost.store.port import AsyncExecutor, Draft, Store
from waypost.wake.opening import open_wakeups

#: How long a call is repeated, in seconds, before the relay takes over.
RETRY_BUDGET = 5.0


class WaypostTarget:
    """A queue of another store."""

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        namespace: str = "wp",
        start_timeout: float = START_TIMEOUT_SECONDS,
        redact: Redact | None = None,
    ) -> None:
        self._redact = redact
        self.queue = check_queue(queue)
        self.store: Store = open_store(
            url, namespace=check_namespace(namespace), clock=None, durability="server",
            replay_ttl_ms=int((2 * RETRY_BUDGET + 60) * 1000),
        )  # fmt: skip
        self.description = f"queue {queue} of a {self.store.kind} store"
        self._start_timeout = start_timeout
        self._wakeups = open_wakeups(self.store, None, start_timeout)
        self._executor: AsyncExecutor | None = None
        self._context: ClientContext | None = None

    def is_queue_of(self, store: Store, queue: str) -> bool:
        """Whether the target is this queue: a relay to itself would send the same messages forever."""
        return self.queue == queue and store_identity(self.store) == store_identity(store)

    async def open(self) -> None:
        """Connect."""
        session = Session()
        self._context = ClientContext(
            self.store, session=session, worker="relay", retry_budget=RETRY_BUDGET, wakeups=self._wakeups,
            redact=self._redact,
        )  # fmt: skip
        self._executor = await self.store.connect_async(start_timeout=self._start_timeout)

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Publish a batch in order, in chunks that are each atomic."""
        assert self._context is not None
        assert self._executor is not None
        confirmations: list[Confirmation] = []
        for chunk in split_batch(records):
            outcome = await drive_async(self._executor, _publish(self._context, self.queue, chunk))
            confirmations += outcome
            if any(isinstance(one, Unconfirmed) for one in outcome):
                # Keep the order: do not send what follows.
                waits = Unconfirmed("an earlier message is not stored yet")
                return confirmations + [waits] * (len(records) - len(confirmations))
        return confirmations

    async def close(self) -> None:
        """Close the connections."""
        executor, self._executor, self._context = self._executor, None, None
        if executor is not None:
            with contextlib.suppress(WaypostError):
                await executor.close()
            self._wakeups.flush()


def store_identity(store: Store) -> tuple[object, ...]:
    """Return what is equal for two clients of one store."""
    return store.kind, store.namespace, store.place


def _publish(context: ClientContext, queue: str, records: Sequence[RelayRecord]) -> Flow[list[Confirmation]]:
    drafts: list[Draft] = []
    confirmations: list[Confirmation] = []
    for record in records:
        try:
            drafts.append(_draft(context, queue, record))
            confirmations.append(None)
        except InvalidInput as error:
            confirmations.append(Refused("rejected", error_text(error)))
    results = iter((yield from _store(context, queue, _split_by_key(drafts))))
    return [next(results) if one is None else one for one in confirmations]


def _draft(context: ClientContext, queue: str, record: RelayRecord) -> Draft:
    key = None if record.key is None else check_text("key", record.key, KEY_CHARACTERS_MAX)
    return Draft(
        record.id, record.envelope, key=key, priority=record.priority, group=record.group, forwarded=True, capped=True,
        journal_copy=journal_copy(context.redact, queue, record.id, record.envelope),
    )  # fmt: skip


def _split_by_key(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Split drafts so that no key occurs twice in one step."""
    parts: list[list[Draft]] = [[]]
    keys: set[str] = set()
    for draft in drafts:
        if draft.key is not None and draft.key in keys:
            parts.append([])
            keys = set()
        if draft.key is not None:
            keys.add(draft.key)
        parts[-1].append(draft)
    return parts if parts[0] else []


def _store(context: ClientContext, queue: str, parts: list[list[Draft]]) -> Flow[list[Confirmation]]:
    """Publish parts in order, as far as the queue has room; stop at the first failure."""
    confirmations: list[Confirmation] = []
    count = sum(map(len, parts))
    for part in parts:
        try:
            room = yield from _free_capacity(context, queue)
            fits = part[:room]
            if fits:
                yield from _publish_part(context, queue, fits)
            confirmations += [None] * len(fits)
            if len(fits) < len(part):
                raise QueueFull(f"queue {queue} of the target has reached its max_pending")
        except WaypostError as error:
            return confirmations + [Unconfirmed(error_text(error))] * (count - len(confirmations))
    return confirmations


def _publish_part(context: ClientContext, queue: str, drafts: Sequence[Draft]) -> Flow[None]:
    # Arrivals are recorded, so even a late repeat stores nothing twice.
    yield from context.operate_and_wake(
        queue, lambda operation: context.store.publish(queue, drafts, operation), fenced=True
    )


def _free_capacity(context: ClientContext, queue: str) -> Flow[int | None]:
    """Return how many more messages the queue may hold, None for no limit.

    The store enforces the cap; the relay checks it first so that the part of a batch that fits arrives.
    """
    policy = yield from context.policy(queue)
    if policy.max_pending is None or policy.overload == "drop_oldest":
        return None
    ledger = (yield from context.attempt(context.store.stats(queue))).ledger
    return max(0, policy.max_pending - ledger.ready - ledger.delayed - ledger.waiting)
