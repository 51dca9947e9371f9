"""Sending many drafts whose arrival the queue remembers: relays, Spark writes and backfills.

A repeat of such a draft stores nothing twice, so drafts that were refused or got no reply are simply sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Final, TypeAlias

from waypost.errors import OutcomeUnknown, QueueFull, StoreUnavailable, WaypostError
from waypost.operations.flow import REFUSALS, ClientContext, Flow, Sending, Sleep, Together
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.store.port import Draft
from waypost.values import Published

#: Chunks that are sent before replies are read.
WAVE_CHUNKS: Final = 8
#: Chunks in one `send`, so that it ends soon even if each of very many groups has a chunk of its own.
SEND_CHUNKS_MAX: Final = 64

#: Drafts that were sent in one step, and the result of each.
Answered: TypeAlias = tuple[list[Draft], list[Published]]


def split_drafts(drafts: Iterable[Draft]) -> Iterator[list[Draft]]:
    """Yield drafts in steps that a store accepts, in order: not too many, not too large, no id and no key twice."""
    chunk: list[Draft] = []
    size, known = 0, set[str]()
    for draft in drafts:
        names = {draft.id} if draft.key is None else {draft.id, f"key {draft.key}"}
        size += len(draft.envelope)
        if chunk and (len(chunk) == CHUNK_MESSAGES_MAX or size > CHUNK_BYTES_MAX or names & known):
            yield chunk
            chunk, size, known = [], len(draft.envelope), set()
        chunk.append(draft)
        known |= names
    if chunk:
        yield chunk


def free_room(context: ClientContext, queue: str) -> Flow[int | None]:
    """Return how many more messages the `max_pending` of a queue allows, which may be less than 0; None: any number.

    The store decides in the end. Drafts that are sent after this check usually fit, and cause no drops in a queue that
    drops its oldest.
    """
    policy = yield from context.policy(queue)
    if policy.max_pending is None:
        return None
    ledger = (yield from context.attempt(context.store.stats(queue))).ledger
    return policy.max_pending - ledger.ready - ledger.delayed - ledger.waiting


class Wave:
    """Drafts that are being sent to a queue. Drafts for which there is no room yet stay here.

    The drafts of a full group are held separately, so that the others are sent without them. Drafts of one group stay
    in order.
    """

    def __init__(self, queue: str, chunks: Iterable[list[Draft]], *, in_order: bool = False) -> None:
        """`in_order`: a chunk is sent after the reply to the one before.

        For groups that have an order, or drop their oldest messages, this is so in any case.
        """
        self.queue = queue
        #: Why drafts remain: the refusals of the last `send`, by group; None is the queue itself.
        self.refusals: dict[str | None, QueueFull] = {}
        self._in_order = in_order
        self._waiting = deque(chunks)
        self._held: dict[str, list[Draft]] = {}

    def left(self) -> Iterator[Draft]:
        """Yield the drafts that are not stored yet."""
        for drafts in (*self._waiting, *self._held.values()):
            yield from drafts

    def __len__(self) -> int:
        return sum(map(len, self._waiting)) + sum(map(len, self._held.values()))

    def remove_keys(self, keys: Set[str]) -> int:
        """Remove the drafts that have one of these keys; return how many there were."""
        self._release_held()
        return len(_remove(self._waiting, lambda draft: draft.key in keys))

    def send(self, context: ClientContext, room: int | None) -> Flow[list[Answered]]:
        """Send up to `room` drafts (None: any number), refused ones again; return the drafts with results.

        Of a full group as many are sent as it has room for.
        """
        policy = yield from context.policy(self.queue)
        self._release_held()
        self.refusals = {}
        ready = self._next_chunks(len(self) if room is None else room)
        drops_oldest = policy.overload == "drop_oldest"
        orders_groups = policy.order is not None or (policy.grouped and drops_oldest)
        has_groups = orders_groups and any(draft.group is not None for chunk in ready for draft in chunk)
        together = 1 if self._in_order or has_groups else WAVE_CHUNKS
        answered: list[Answered] = []
        under_way: dict[Sending[Any], list[Draft]] = {}
        yield from context.know_time()
        try:
            while ready or under_way:
                while ready and len(under_way) < together:
                    chunk = ready.popleft()
                    under_way[self._sending(context, chunk)] = chunk
                pause: Sleep | None = None
                for sending, answer in (yield from _send_together(under_way)):
                    if isinstance(answer, (StoreUnavailable, OutcomeUnknown, *REFUSALS)):
                        pause = sending.failed("publish", answer) or pause
                        continue
                    if isinstance(answer, Exception) and not isinstance(answer, QueueFull):
                        raise answer
                    chunk = under_way.pop(sending)
                    sending.end()
                    if isinstance(answer, QueueFull):
                        self._refuse(chunk, answer, ready, drops_oldest=drops_oldest)
                    else:
                        answered.append((chunk, context.wake_and_report(answer)))
                if pause is not None:
                    yield pause
        finally:
            for sending in under_way:
                sending.end()
            self._waiting.extendleft(reversed([*under_way.values(), *ready]))
        return answered

    def _sending(self, context: ClientContext, chunk: list[Draft]) -> Sending[Any]:
        # Their arrivals are remembered: a repeat stores nothing twice, however late it comes.
        return Sending(
            context, self.queue, lambda operation: context.store.publish(self.queue, chunk, operation), fenced=True
        )

    def _release_held(self) -> None:
        """Let the drafts of full groups be sent again, after the others."""
        for held in self._held.values():
            self._waiting.extend(split_drafts(held))
        self._held = {}

    def _next_chunks(self, room: int) -> deque[list[Draft]]:
        chosen: deque[list[Draft]] = deque()
        while self._waiting and room > 0 and len(chosen) < SEND_CHUNKS_MAX:
            chunk = self._waiting.popleft()
            if len(chunk) > room:
                self._waiting.appendleft(chunk[room:])
                chunk = chunk[:room]
            room -= len(chunk)
            chosen.append(chunk)
        return chosen

    def _refuse(self, chunk: list[Draft], full: QueueFull, ready: deque[list[Draft]], *, drops_oldest: bool) -> None:
        """Hold what there is no room for, and let the rest of a refused chunk be sent next."""
        if full.group is None and drops_oldest and len(chunk) > 1:
            # The same of a queue: a chunk is stored whole, and may need more room than can be made by dropping.
            ready.extendleft(reversed(_halves(chunk)))
            return
        if full.group is None:
            self.refusals[None] = full
            self._waiting.extendleft(reversed([chunk, *ready]))
            ready.clear()
            return
        group = full.group
        of_group = [draft for draft in chunk if draft.group == group]
        if not of_group or (drops_oldest and len(of_group) > 1):
            # A group takes as many as it has room for and ready ones to drop, which is not known here.
            ready.extendleft(reversed(_halves(chunk)))
            return
        self.refusals[group] = full
        fitting = {draft.id for draft in of_group[: min(full.room, len(of_group) - 1)]}
        rest = deque([chunk])
        held = _remove(rest, lambda draft: draft.group == group and draft.id not in fitting)
        for later in (ready, self._waiting):
            held += _remove(later, lambda draft: draft.group == group)
        # Before those of an earlier refusal, which had left only drafts before them.
        self._held[group] = held + self._held.get(group, [])
        for drafts in rest:
            # Where many groups are full, each refusal concerns fewer drafts than the one before.
            is_one_group = all(draft.group == drafts[0].group for draft in drafts)
            ready.extendleft([drafts] if is_one_group else reversed(_halves(drafts)))


def _send_together(under_way: dict[Sending[Any], list[Draft]]) -> Flow[list[tuple[Sending[Any], Any]]]:
    """Send some chunks in one flush; return the answer to each, which may be an error."""
    try:
        answers: list[Any] = yield Together([sending.call() for sending in under_way])
    except WaypostError as failure:
        answers = [failure] * len(under_way)
    return list(zip(under_way, answers, strict=True))


def _remove(chunks: deque[list[Draft]], is_meant: Callable[[Draft], bool]) -> list[Draft]:
    """Remove drafts from chunks, and return them."""
    chosen: list[Draft] = []
    for _ in range(len(chunks)):
        kept: list[Draft] = []
        for draft in chunks.popleft():
            (chosen if is_meant(draft) else kept).append(draft)
        if kept:
            chunks.append(kept)
    return chosen


def _halves(drafts: list[Draft]) -> list[list[Draft]]:
    middle = len(drafts) // 2
    return [drafts[:middle], drafts[middle:]]
