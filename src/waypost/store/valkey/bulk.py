"""The journal and the messages of a Valkey store, read in bulk.

A journal entry is one field with the events of one step side by side (`lua/base.lua` and `lua/moves.lua` write them).
Most items have a fixed length, and most runs of items share the texts at their end: such runs are decoded as a whole
by numpy. Rare items (duplicates, events of the queue itself) are decoded by the store's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from waypost.identity import SESSION_BYTES, operation_id
from waypost.store.bulk.columns import (
    batch_of,
    constant,
    envelope_columns,
    events_batch,
    fixed_texts,
    numbers,
    stored_batch,
)
from waypost.store.bulk.reader import BulkConnection, PageSize, Span
from waypost.store.bulk.tables import JOURNAL
from waypost.store.known_events import unknown_event
from waypost.store.valkey import packing
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.scripts import CAUSES, EVENTS, EXPIRY_ASIDE, KEY_NAMES
from waypost.values import EventRecord, MessageState, Stored

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore

#: Bytes of journal in one reply, about: enough to read in bulk without blocking the server for long.
PAGE_BYTES = 2_000_000
PAGE_ENTRIES_MAX = 4096
FIRST_PAGE_ENTRIES = 16
FIRST_PAGE_MESSAGES = 16
MESSAGES_A_PAGE = 1000

ENTRY_HEAD = 22
PLAIN = np.dtype([("kind", "S1"), ("size", ">u4"), ("priority", "u1"), ("id", "S24")])
STATE = np.dtype(
    [
        ("kind", "S1"), ("event", "u1"), ("cause", "u1"), ("id", "S24"), ("status", "S1"), ("token", ">u4"),
        ("nonce", "S12"), ("claimed", ">u8"), ("lease", ">u4"), ("deliveries", ">u4"), ("attempts", ">u4"),
        ("flags", "u1"), ("came_by", "u1"), ("published", ">u8"), ("priority", "u1"), ("ready", ">u8"), ("size", ">u4"),
        ("key", ">u2"), ("group", ">u2"), ("worker", "u1"),
    ]
)  # fmt: skip
#: Where the lengths of key, group and worker, and the flags, stand in an item.
_LENGTHS_AT = STATE.itemsize - 5
_FLAGS_AT = STATE.fields["flags"][1] if STATE.fields else 0
_P, _S, _SHARED, _FAILED, _FULL = b"pSsXP"

_EVENT_NAMES = pa.array([None, *EVENTS])
_CAUSE_NAMES = pa.array([None, *CAUSES])


def _codes(names: Sequence[str]) -> Any:
    return np.array([EVENTS.index(name) + 1 for name in names if name in EVENTS], dtype=np.uint8)


_ENDS = _codes(sorted(packing.ENDS_LEASE))
_MAY_END = _codes(sorted(packing.MAY_END_LEASE))
_HAS_DUE_TIME = _codes(sorted(packing.HAS_DUE_TIME))
_PUBLISHED, _CLAIMED, _DEAD, _TRIMMED = _codes(["published", "claimed", "dead", "dead_trimmed"])
_PURGE, _UNBLOCKED = CAUSES.index("purge") + 1, CAUSES.index("unblocked") + 1


class _Run:
    """Items of one entry that lie side by side and share the texts at their end."""

    __slots__ = ("body", "count", "entry", "failure", "first", "tail")

    def __init__(
        self, first: int, count: int, entry: int, tail: bytes = b"", failure: bytes = b"", body: bytes | None = None
    ) -> None:
        self.first = first
        self.count = count
        self.entry = entry
        self.tail = tail
        self.failure = failure
        self.body = body


class JournalPage:
    """Entries as the server gives them, split into runs."""

    def __init__(self, queue: str, entries: Sequence[Any]) -> None:
        self.queue = queue
        self.at: list[int] = []
        self.operations: list[str | None] = []
        self.plain: list[_Run] = []
        self.plain_pieces: list[bytes] = []
        self.states: list[_Run] = []
        self.state_pieces: list[bytes] = []
        self.others: list[EventRecord] = []
        for entry_id, (_, data, *_) in entries:  # fields behind the first are of a later release
            self._add(int(entry_id.partition(b"-")[0]), data)

    def _add(self, last: int, data: bytes) -> None:
        nonce = data[8:20]
        count = int.from_bytes(data[20:22], "big")
        before = len(self.plain), len(self.states)
        entry = len(self.at)
        if not self._cut(data, last - count + 1, count, entry):
            del self.plain[before[0] :], self.plain_pieces[before[0] :]
            del self.states[before[1] :], self.state_pieces[before[1] :]
            self.others += packing.unpack_entry(self.queue, last, data)
            return
        self.at.append(int.from_bytes(data[:8], "big"))
        operation = None
        if any(nonce):
            operation = operation_id(nonce[:SESSION_BYTES], int.from_bytes(nonce[SESSION_BYTES:], "big"))
        self.operations.append(operation)

    def _cut(self, data: bytes, number: int, left: int, entry: int) -> bool:
        """Cut an entry into runs; False if it holds items that only the store's own decoder reads."""
        at, tail = ENTRY_HEAD, b""
        while left:
            kind = data[at]
            if kind == _P:
                count = _run_length(data[at : at + PLAIN.itemsize * left : PLAIN.itemsize], b"p")
                end = at + PLAIN.itemsize * count
                self.plain.append(_Run(number, count, entry))
                self.plain_pieces.append(data[at:end])
            elif kind == _SHARED:
                count = _run_length(data[at : at + STATE.itemsize * left : STATE.itemsize], b"s")
                end = at + STATE.itemsize * count
                self.states.append(_Run(number, count, entry, tail))
                self.state_pieces.append(data[at:end])
            elif kind in (_S, _FAILED, _FULL):
                count = 1
                piece = b"P\x01" + data[at + 1 : at + 91] if kind == _FULL else data[at : at + STATE.itemsize]
                end = at + STATE.itemsize - (kind == _FULL)
                tail_end = end + _tail_length(piece, data, end)
                tail, end = data[end:tail_end], tail_end
                run = _Run(number, 1, entry, tail)
                if kind == _FAILED:
                    length = int.from_bytes(data[end : end + 2], "big")
                    run.failure = data[end + 2 : end + 2 + length]
                    end += 2 + length
                elif kind == _FULL:
                    length = int.from_bytes(data[end : end + 4], "big")
                    end += 4
                    if length:  # one more than the body's own, so that 0 means none
                        run.body = data[end : end + length - 1]
                        end += length - 1
                self.states.append(run)
                self.state_pieces.append(piece)
            else:
                return False
            at, number, left = end, number + count, left - count
        return True

    def batches(self, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the events with numbers in (after, to]; within one, numbers rise."""
        if self.plain:
            yield from _within(self._plain_batch(columns), self._numbers(self.plain), after, to)
        if self.states:
            yield from _within(self._state_batch(columns), self._numbers(self.states), after, to)
        others = [event for event in self.others if after < event.number <= to]
        if others:
            yield events_batch(others, columns)

    @staticmethod
    def _numbers(runs: Sequence[_Run]) -> Any:
        counts = np.array([run.count for run in runs])
        firsts = np.array([run.first for run in runs], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        return np.repeat(firsts - starts, counts) + np.arange(counts.sum())

    def _shared(self, runs: Sequence[_Run], columns: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
        """What all items of an entry share: the row's entry and time, and the columns made of them."""
        entries = np.repeat(np.array([run.entry for run in runs]), np.array([run.count for run in runs]))
        at = np.array(self.at, dtype=np.int64)[entries]
        arrays = {
            "queue": constant(self.queue, len(entries)),
            "number": numbers(self._numbers(runs), pa.int64()),
            "at_ms": numbers(at, pa.int64()),
        }
        if "operation_id" in columns:
            arrays["operation_id"] = pa.array(self.operations, pa.string()).take(pa.array(entries))
        return entries, at, arrays

    def _plain_batch(self, columns: Sequence[str]) -> Any:
        rows = np.frombuffer(b"".join(self.plain_pieces), dtype=PLAIN)
        _, _, arrays = self._shared(self.plain, columns)
        zeros = np.zeros(len(rows), dtype=np.int64)
        arrays["event"] = constant("published", len(rows))
        arrays["message_id"] = fixed_texts(rows["id"], 24)
        arrays["priority"] = numbers(rows["priority"], pa.int32())
        arrays["size"] = numbers(rows["size"], pa.int64())
        for name in ("token", "claims", "deliveries", "attempts"):
            arrays[name] = numbers(zeros, JOURNAL.arrow_type(name))
        return batch_of(JOURNAL, columns, arrays, len(rows))

    def _state_batch(self, columns: Sequence[str]) -> Any:
        runs = self.states
        rows = np.frombuffer(b"".join(self.state_pieces), dtype=STATE)
        entries, at, arrays = self._shared(runs, columns)
        event, cause, status = rows["event"], rows["cause"], rows["status"]
        if event.max() > len(EVENTS) or cause.max() > len(CAUSES):
            raise unknown_event(self.queue, int(self._numbers(runs)[-1]))
        token, ready = rows["token"], rows["ready"].astype(np.int64)
        was_leased = status == b"L"
        ran = np.isin(event, _ENDS) | (np.isin(event, _MAY_END) & was_leased)
        claimed = event == _CLAIMED
        due = np.isin(event, _HAS_DUE_TIME) | ((event == _PUBLISHED) & (ready > at))
        arrays["event"] = _EVENT_NAMES.take(pa.array(event))
        arrays["cause"] = _CAUSE_NAMES.take(pa.array(cause))
        arrays["message_id"] = fixed_texts(rows["id"], 24)
        arrays["token"] = arrays["claims"] = numbers(token, pa.int64())
        for name in ("priority", "deliveries", "attempts", "size"):
            arrays[name] = numbers(rows[name], JOURNAL.arrow_type(name))
        arrays["due_ms"] = numbers(ready, pa.int64(), ~due)
        arrays["wait_ms"] = numbers(at - ready, pa.int64(), ~claimed)
        arrays["run_ms"] = numbers(at - rows["claimed"].astype(np.int64), pa.int64(), ~ran)
        if "operation_id" in columns:
            # An event that only follows from others is in the entry of an operation that was not about it.
            follows = ((event == _DEAD) & (status == b"W")) | (cause == _UNBLOCKED)
            follows |= (event == _TRIMMED) & (cause != _PURGE)
            index = pa.array(entries, mask=follows)
            arrays["operation_id"] = pa.array(self.operations, pa.string()).take(index)
        arrays |= self._texts(rows, ran | claimed, columns)
        return batch_of(JOURNAL, columns, arrays, len(rows))

    def _texts(self, rows: Any, holds: Any, columns: Sequence[str]) -> dict[str, Any]:
        """The texts that runs share, spread over their rows."""
        runs, counts = self.states, np.array([run.count for run in self.states])
        index = np.repeat(np.arange(len(runs)), counts)
        starts = np.cumsum(counts) - counts
        tails = [
            _tail_texts(run.tail, *lengths)
            for run, lengths in zip(
                runs,
                zip(*(rows[name][starts].tolist() for name in ("key", "group", "worker", "flags")), strict=True),
                strict=True,
            )
        ]
        single = len(runs) == len(index)

        def spread(values: Sequence[str | None], missing: Any = None) -> Any:
            array = pa.array(values, pa.string())
            return array if single and missing is None else array.take(pa.array(index, mask=missing))

        arrays: dict[str, Any] = {}
        for place, name in enumerate(("key", "group", "worker", "chain_id")):
            if name in columns:
                arrays[name] = spread([texts[place] for texts in tails], ~holds if name == "worker" else None)
        if "reason" in columns or "error_type" in columns:
            parted = [packing.split_failure(run.failure) for run in runs]
            arrays["reason"] = spread([reason for reason, _, _ in parted])
            arrays["error_type"] = spread([kind for _, kind, _ in parted])
        if any(run.body is not None for run in runs):
            bodies = [run.body for run, count in zip(runs, counts.tolist(), strict=True) for _ in range(count)]
            arrays |= envelope_columns(bodies, columns)
        return arrays


def _run_length(kinds: bytes, kind: bytes) -> int:
    return len(kinds) - len(kinds.lstrip(kind))


def _tail_length(piece: bytes, data: bytes, end: int) -> int:
    key, group = int.from_bytes(piece[_LENGTHS_AT : _LENGTHS_AT + 2], "big"), piece[_LENGTHS_AT + 2 : _LENGTHS_AT + 4]
    texts = key + int.from_bytes(group, "big") + piece[_LENGTHS_AT + 4]
    return packing.tail_length(data, end, texts, piece[_FLAGS_AT])


def _tail_texts(tail: bytes, key: int, group: int, worker: int, flags: int) -> tuple[str | None, ...]:
    worker_at = key + group
    chain_at = worker_at + worker
    return (
        tail[:key].decode() or None,
        tail[key:worker_at].decode() or None,
        tail[worker_at:chain_at].decode() or None,
        packing.chain_in(tail, chain_at) if flags & packing.OF_A_CHAIN else None,
    )


def _within(batch: Any, rows: Any, after: int, to: int) -> Iterator[Any]:
    """The part of a batch whose numbers are wanted: entries at the ends may hold more."""
    if rows[0] <= after or rows[-1] > to:
        batch = batch.filter(pa.array((rows > after) & (rows <= to)))
    if batch.num_rows:
        yield batch


# ---- reading -------------------------------------------------------------------------------------------------


_PLACES: dict[str, int] = {
    "ready": KEY_NAMES.index("ready"), "delayed": KEY_NAMES.index("due"), "waiting": KEY_NAMES.index("waiting"),
    "leased": KEY_NAMES.index("leases"), "dead": KEY_NAMES.index("dead"),
}  # fmt: skip
_MESSAGES, _STATES, _ERRORS = KEY_NAMES.index("messages"), KEY_NAMES.index("state"), KEY_NAMES.index("errors")
_JOURNAL = KEY_NAMES.index("journal")


class ValkeyBulkReader:
    """A Valkey store. Each reply is a page; the server is never asked for more than a few megabytes at once."""

    def __init__(self, store: ValkeyStore, connection: BulkConnection) -> None:
        self._store = store
        self._run = connection.run

    def close(self) -> None:
        """It has opened nothing."""

    def _run_command(
        self, queue: str, key: bytes, *arguments: bytes, decode: Callable[[Any], Any] = lambda reply: reply
    ) -> Any:
        call: ValkeyCall[Any] = ValkeyCall(
            arguments[0].decode().lower(), queue, command(arguments[0], key, *arguments[1:]), decode, key=key, place=key
        )
        return self._run(call)

    def journal(self, queue: str, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Events with numbers in (after, to]. An entry is known by the number of its last event."""
        key = self._store.keys_of(queue)[_JOURNAL]
        # Trimmed events no longer exist, although the server may not have deleted them yet.
        after = max(after, self._run(self._store.journal(queue, after, 1)).first_kept - 1)
        start = after + 1
        page = PageSize(FIRST_PAGE_ENTRIES, PAGE_ENTRIES_MAX, PAGE_BYTES)
        while start <= to:
            entries = self._run_command(queue, key, b"XRANGE", b"%d-0" % start, b"+", b"COUNT", b"%d" % page.rows)
            if not entries:
                return
            last = int(entries[-1][0].partition(b"-")[0])
            yield from JournalPage(queue, entries).batches(after, to, columns)
            start = last + 1
            page.learn(len(entries), sum(len(fields[1]) for _, fields in entries))

    def unnumbered(self, queue: str) -> set[str]:
        """Return nothing: an event has its number when it is written."""
        return set()

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """Parts of a state by what it is ordered by: of equal size when they are cut, and none overlaps another."""
        key = self._store.keys_of(queue)[_PLACES[state]]
        total = self._run_command(queue, key, b"ZCARD")
        bounds: list[str] = []
        for part in range(1, min(parts, total)):
            rank = b"%d" % (total * part // parts)
            found = self._run_command(queue, key, b"ZRANGE", rank, rank, b"WITHSCORES")
            if found and (not bounds or found[1].decode() != bounds[-1]):
                bounds.append(found[1].decode())
        return [
            Span(queue, state, low, high, total // (len(bounds) + 1))
            for low, high in zip([None, *bounds], [*bounds, None], strict=True)
        ]

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """The messages of a span as they are when their page is read."""
        keys = self._store.keys_of(span.queue)
        key = keys[_PLACES[span.state]]
        low = b"-inf" if span.low is None else span.low.encode()
        high = b"+inf" if span.high is None else b"(" + span.high.encode()
        known: set[bytes] = set()
        page = PageSize(FIRST_PAGE_MESSAGES, MESSAGES_A_PAGE, PAGE_BYTES)
        limit = page.rows
        while True:
            found = self._run_command(
                span.queue, key, b"ZRANGEBYSCORE", low, high, b"WITHSCORES", b"LIMIT", b"0", b"%d" % limit
            )
            scores = dict(zip(found[::2], found[1::2], strict=True))
            fresh = [message_id for message_id in scores if message_id not in known]
            if fresh:
                stored = self._stored(span, keys, fresh, scores)
                if stored:
                    page.learn(len(stored), sum(len(message.envelope) for message in stored))
                    yield stored_batch(span.queue, stored, columns)
            if len(scores) < limit:
                return
            # The next page begins with the last score again: others may share it.
            last = found[-1]
            known = {message_id for message_id, score in scores.items() if score == last}
            limit = page.rows + len(known)
            low = last

    def _stored(
        self, span: Span, keys: Sequence[bytes], ids: Sequence[bytes], scores: dict[bytes, bytes]
    ) -> list[Stored]:
        values = self._run_command(span.queue, keys[_MESSAGES], b"HMGET", *ids)
        states = self._run_command(span.queue, keys[_STATES], b"HMGET", *ids)
        failures = self._run_command(span.queue, keys[_ERRORS], b"HMGET", *ids)
        expiring = [id for id, packed in zip(ids, states, strict=True) if packed and packing.lapses(packed)]
        if expiring:
            scores = dict(scores)
            key = keys[0].removesuffix(b"queue") + b"expires"
            for id, expiry in zip(expiring, self._run_command(span.queue, key, b"ZMSCORE", *expiring), strict=True):
                if expiry is not None:
                    scores[id] += b" %d" % (int(float(expiry)) % EXPIRY_ASIDE)
        stored = []
        for message_id, value, packed, failure in zip(ids, values, states, failures, strict=True):
            if value is None:
                continue  # it was removed after the page was listed
            if packed is not None:
                if packing.STATUS.get(packed[:1]) == span.state:
                    stored.append(packing.unpack_stored(span.state, scores[message_id], value, packed, failure or b""))
            elif span.state == "ready":
                # A plain message that was never claimed has no state of its own: it follows from its value.
                published = int.from_bytes(value[:8], "big")
                head = (message_id.decode(), span.state, None, None, value[8], 0, 0, 0, published, published)
                stored.append(Stored(*head, value[packing.VALUE_HEAD :]))
        return stored
