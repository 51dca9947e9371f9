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
from waypost.operations.waves import Wave, free_room, split_drafts
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed
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
        return await drive_async(self._executor, _publish(self._context, self.queue, records))

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
    confirmations: dict[str, Confirmation] = {}
    drafts: list[Draft] = []
    for record in records:
        try:
            drafts.append(_draft(context, queue, record))
        except InvalidInput as error:
            confirmations[record.id] = Refused("rejected", error_text(error))
    wave = Wave(queue, split_drafts(drafts), in_order=True)
    stored: set[str] = set()
    full: dict[str | None, QueueFull] = {}
    failure = f"queue {queue} of the target has reached its max_pending"
    try:
        policy = yield from context.policy(queue)
        room = None if policy.overload == "drop_oldest" else (yield from free_room(context, queue))
        gets_on = True
        # One `send` takes a bounded number of chunks, and tries full groups: go on while there are others to send.
        while gets_on and None not in full and any(draft.group not in full for draft in wave.left()):
            answered = yield from wave.send(context, None if room is None else room - len(stored))
            stored.update(draft.id for chunk, _ in answered for draft in chunk)
            gets_on = bool(answered) or not wave.refusals.keys() <= full.keys()
            full |= wave.refusals
    except WaypostError as error:
        failure = error_text(error)
    for draft in drafts:
        if draft.id not in stored:
            refusal = full.get(draft.group) if draft.group else None
            confirmations[draft.id] = (
                Unconfirmed(failure) if refusal is None else Unconfirmed(error_text(refusal), True)
            )
    return [confirmations.get(record.id) for record in records]


def _draft(context: ClientContext, queue: str, record: RelayRecord) -> Draft:
    key = None if record.key is None else check_text("key", record.key, KEY_CHARACTERS_MAX)
    return Draft(
        record.id, record.envelope, key=key, priority=record.priority, group=record.group, forwarded=True, capped=True,
        journal_copy=journal_copy(context.redact, queue, record.id, record.envelope),
    )  # fmt: skip
