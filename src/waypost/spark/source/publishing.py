"""Rows to messages, each once: what makes a row the same row, and how it is sent.

A task may run twice, at once or one after the other, and a batch may be run again after a crash. So a message's id is
made of what its row is, not of when it was sent, and the queue remembers for a day which ids have arrived
(`ARRIVAL_TTL_MS`), as it does for the messages of chains. A second sending changes nothing, whatever became of the
first: waiting, done or dead.

The row is known by its key where there is one, else by its place in its partition, which is as stable as the query's
plan.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from waypost import codec
from waypost.checks import DUE_MS_MAX, check_message_timeout, check_text, expiry_ms
from waypost.errors import InvalidBody, InvalidInput, InvalidTime, QueueFull
from waypost.identity import ALPHABET, ID_CHARACTERS, PAIRS, encode, make_triples
from waypost.operations.flow import ClientContext, Flow, Sleep
from waypost.operations.waves import Wave, free_room
from waypost.policy import (
    CHUNK_BYTES_MAX,
    CHUNK_MESSAGES_MAX,
    GROUP_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    PRIORITY_DEFAULT,
    check_priority,
    parse_retry,
)
from waypost.redaction import find_redact, journal_copy
from waypost.spark.source.bodies import find_non_finite, make_converter
from waypost.spark.source.diverting import Aside, Refused
from waypost.spark.source.options import WriteOptions
from waypost.store.port import Draft
from waypost.times import to_datetime
from waypost.values import Published

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

#: How soon a full queue or group is tried again.
FULL_FIRST_SECONDS, FULL_MAX_SECONDS = 0.01, 0.5
WRITTEN_STAYS = "What was written stays; the write may be repeated, and nothing is published twice"
#: Keys that a task remembers, to collapse and count rows with equal keys. The store finds those of later rows.
KEYS_REMEMBERED_MAX = 200_000
#: How much of a key an error shows.
KEY_QUOTED_MAX = 100
#: Rows that one block of an id's counter names: five characters of it, a pair and a triple.
_BLOCK_BITS = 25
_TO_OURS = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", ALPHABET.encode())
_NO_HEAD = codec.encode_head()
#: The columns of a row, as `Rows` takes them.
ROW_COLUMNS = ("body", "key", "delay", "due", "priority", "group", "headers", "expires", "retry", "timeout")
_raw_json = msgspec.json.Decoder(msgspec.Raw)


class RowIds:
    """Message ids of one partition of one write, the same for every attempt.

    `made_ms` is when the write was planned, where that is the same for every attempt: then ids sort by time as others
    do.
    """

    def __init__(self, write: str, partition: int, made_ms: int | None = None) -> None:
        self.write = write
        self.partition = partition
        self._time = "" if made_ms is None else encode(made_ms, 9)
        self._block = -1
        self._prefix = ""
        self._triples = make_triples()

    def _digest(self, *parts: object) -> str:
        text = "\0".join((self.write, *map(str, parts)))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=15).digest()
        return base64.b32encode(digest).translate(_TO_OURS).decode()

    def of_key(self, key: str) -> str:
        """The id of a row that has a key."""
        return (self._time + self._digest("key", key))[:ID_CHARACTERS]

    def of_row(self, row: int) -> str:
        """The id of a row by its place in the partition, counted from 0."""
        block = row >> _BLOCK_BITS
        if block != self._block:
            self._block = block
            self._prefix = (self._time + self._digest("row", self.partition, block))[: ID_CHARACTERS - 5]
        return self._prefix + PAIRS[row >> 15 & 1023] + self._triples[row & 32767]


class _Unreadable:
    """In place of a value that Python has no form of, such as a time in the year 10000."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _values(column: Any) -> list[Any]:
    """Return the values of an Arrow array. One that cannot be read does not hide the others."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError, pa.ArrowException):
        return [_value(one) for one in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return _Unreadable(str(error))


class Rows:
    """The rows of one partition as drafts, in order."""

    def __init__(
        self,
        options: WriteOptions,
        ids: RowIds,
        body_type: DataType | None = None,
        diverted: Aside | None = None,
    ) -> None:
        self._options = options
        self._ids = ids
        self._row = 0
        self._heads: dict[tuple[object, ...], bytes] = {}
        self._redact = None if options.redact is None else find_redact(options.redact)
        self._convert = None if body_type is None else make_converter(body_type, options.nan)
        self._diverted = diverted

    def drafts(self, batch: Any) -> Iterator[Draft]:
        """The drafts of one record batch. A row that cannot be published is put aside, or is an error that names it."""
        names = batch.schema.names
        columns = {name: _values(batch.column(index)) for index, name in enumerate(names)}
        empty: list[Any] = [None] * batch.num_rows
        rows = zip(
            *(columns.get(name, empty) for name in ROW_COLUMNS),
            strict=True,
        )
        make = self._plain_draft if set(names) == {"body"} else self._draft
        refused: list[Refused] = []
        for index, values in enumerate(rows):
            row, self._row = self._row, self._row + 1
            try:
                draft = make(row, *values)
            except InvalidInput as error:
                if self._diverted is None:
                    raise type(error)(self._describe(row, values[1], error)) from None
                refused.append(Refused(index, row, str(error)))
            else:
                yield draft
        if refused and self._diverted is not None:
            self._diverted.add(batch, refused)

    def _describe(self, row: int, key: Any, error: InvalidInput) -> str:
        quoted = "" if not isinstance(key, str) else f", key {key[:KEY_QUOTED_MAX]!r}"
        return f"partition {self._ids.partition}, row {row} (the first is 0){quoted}: {error}"

    def _plain_draft(self, row: int, body: Any, *_: Any) -> Draft:
        """Return the draft of a row that has nothing but a body, which most have."""
        message_id = self._ids.of_row(row)
        envelope = codec.make_envelope(message_id, self._encoded(body), _NO_HEAD)
        copy = journal_copy(self._redact, self._options.queue, message_id, envelope)
        return Draft(message_id, envelope, journal_copy=copy, forwarded=True, capped=True)

    def _draft(
        self, row: int, body: Any, key: Any, delay: Any, due: Any, priority: Any, group: Any, headers: Any,
        expires: Any, retry: Any, timeout: Any,
    ) -> Draft:  # fmt: skip
        message_id = self._ids.of_row(row) if key is None else self._ids.of_key(key)
        envelope = codec.make_envelope(message_id, self._encoded(body), self._head(headers, retry, timeout))
        copy = journal_copy(self._redact, self._options.queue, message_id, envelope)
        return Draft(
            message_id,
            envelope,
            None if key is None else check_text("key", key, KEY_CHARACTERS_MAX),
            0 if key is None else self._options.window_ms,
            "keep" if key is None else self._options.on_conflict,  # type: ignore[arg-type]
            _delay_ms(delay, due),
            _due_ms(due),
            PRIORITY_DEFAULT if priority is None else check_priority(priority),
            None if group is None else check_text("group", group, GROUP_CHARACTERS_MAX),
            copy,
            forwarded=True,
            capped=True,
            expires_ms=0 if expires is None else _expires_ms(expires, _delay_ms(delay, due), _due_ms(due)),
            unique="live" if key is None else self._options.unique,
        )

    def _encoded(self, body: Any) -> codec.Encoded:
        if body is None:
            raise InvalidBody("the body is null; leave such rows out with where(body is not null)")
        if isinstance(body, _Unreadable):
            raise InvalidBody(f"the body cannot be read: {body.reason}")
        if self._options.is_json and isinstance(body, str | bytes):
            data = body.encode() if isinstance(body, str) else body
            try:
                _raw_json.decode(data)
            except msgspec.DecodeError as error:
                raise InvalidBody(f"bodyFormat is json, and a body is not: {error}") from None
            encoded = codec.encode_body(data)  # its limits are those of any body
            return codec.Encoded(codec.JSON, encoded.data, None)
        if self._convert is not None:
            body = self._convert(body)
        try:
            return codec.encode_body(body, faithful=False)  # columns arrive as JSON has them
        except InvalidBody:
            place = find_non_finite(body)
            if place is None:
                raise
            raise InvalidBody(
                f"{place} is NaN or infinity, which JSON does not have: set the option nan to null or string"
            ) from None

    def _head(self, headers: Sequence[tuple[str, str]] | None, retry: str | None, timeout: Any) -> bytes:
        if not headers and retry is None and timeout is None:
            return _NO_HEAD
        given = (tuple(headers or ()), retry, timeout)
        head = self._heads.get(given)
        if head is None:
            if len(self._heads) > 1000:
                self._heads.clear()
            head = self._heads[given] = codec.encode_head(
                headers=dict(given[0]),
                retry=None if retry is None else parse_retry(retry),
                timeout=None if timeout is None else check_message_timeout(float(timeout)),
            )
        return head


def _delay_ms(delay: Any, due: Any) -> int:
    if delay is None:
        return 0
    if isinstance(delay, _Unreadable):
        raise InvalidTime(f"the delay cannot be read: {delay.reason}")
    if due is not None:
        raise InvalidTime("a row has both a delay and a due time; one of them must be null")
    seconds = float(delay)
    if not 0 <= seconds * 1000 < DUE_MS_MAX / 2:
        raise InvalidTime(f"a delay is a number of seconds from 0 on, not {delay}")
    return round(seconds * 1000)


def _due_ms(due: Any) -> int | None:
    if due is None:
        return None
    if isinstance(due, _Unreadable):
        raise InvalidTime(f"the due time cannot be read: {due.reason}")
    at_ms = due if isinstance(due, int) else round(due.timestamp() * 1000)
    if not 0 <= at_ms < DUE_MS_MAX:
        raise InvalidTime(f"a due time of {at_ms} milliseconds since 1970 is out of range")
    return int(at_ms)


def _expires_ms(expires: Any, delay_ms: int, due_ms: int | None) -> int:
    if isinstance(expires, _Unreadable):
        raise InvalidTime(f"the expiry cannot be read: {expires.reason}")
    if hasattr(expires, "timestamp"):
        return expiry_ms(to_datetime(round(expires.timestamp() * 1000)), delay_ms, due_ms)
    return expiry_ms(float(expires), delay_ms, due_ms)


# ---- sending ---------------------------------------------------------------------------------------------------


class SentKeys:
    """The rows with a key that a task has sent. Rows with equal keys are one message, so the first alone is sent."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        #: How many rows were not sent, because a row with the same key was.
        self.collapsed = 0

    def is_new(self, draft: Draft) -> bool:
        """Return whether no row before had the same key, as far as they are remembered."""
        if draft.key is None:
            return True
        if draft.id in self._ids:
            self.collapsed += 1
            return False
        if len(self._ids) < KEYS_REMEMBERED_MAX:
            self._ids.add(draft.id)
        return True


def chunks(drafts: Iterable[Draft], sent: SentKeys | None = None) -> Iterator[list[Draft]]:
    """Drafts in steps that a store takes: no id and no key twice, not too many, not too large.

    An id that comes twice in one step is one row to us (two rows of the same key), so the first stands for both.
    """
    sent = sent or SentKeys()
    chunk: dict[str, Draft] = {}
    size = 0
    for draft in drafts:
        if not sent.is_new(draft):
            continue
        if draft.id in chunk:
            sent.collapsed += 1
            continue
        length = len(draft.envelope)
        if chunk and (len(chunk) == CHUNK_MESSAGES_MAX or size + length > CHUNK_BYTES_MAX):
            yield list(chunk.values())
            chunk, size = {}, 0
        chunk[draft.id] = draft
        size += length
    if chunk:
        yield list(chunk.values())


def publish_wave(
    context: ClientContext, wave: Wave, block_seconds: float, *, is_first: bool = False
) -> Flow[Counter[str]]:
    """Publish all drafts of a wave as soon as there is room; return how many messages there were of each status.

    Raises `QueueFull` when for so long there was no room for any of them, or at once if the queue's `overload` is
    `raise`. `is_first`: no earlier attempt can have sent these rows, so one that has arrived already has the key of
    another row of this write.
    """
    counts: Counter[str] = Counter()
    deadline, pause = context.monotonic() + block_seconds, FULL_FIRST_SECONDS
    while wave:
        room = yield from wait_for_room(context, wave.queue, len(wave), block_seconds)
        answered = yield from wave.send(context, room)
        for drafts, published in answered:
            _count(counts, drafts, published, is_first)
        policy = yield from context.policy(wave.queue)
        is_late = not answered and context.monotonic() >= deadline
        if wave.refusals and (policy.overload == "raise" or is_late):
            full = next(iter(wave.refusals.values()))
            raise QueueFull(f"{full}. {len(wave):,} rows of this task have no room. {WRITTEN_STAYS}", group=full.group)
        if answered:
            deadline, pause = context.monotonic() + block_seconds, FULL_FIRST_SECONDS
        else:
            yield Sleep(pause)
            pause = min(pause * 2, FULL_MAX_SECONDS)
    return counts


def _count(counts: Counter[str], drafts: Sequence[Draft], published: Sequence[Published], is_first: bool) -> None:
    for draft, one in zip(drafts, published, strict=True):
        is_collapsed = is_first and one.status == "duplicate" and one.id == draft.id
        counts["collapsed" if is_collapsed else one.status] += 1


def wait_for_room(context: ClientContext, queue: str, wanted: int, seconds: float) -> Flow[int]:
    """Wait while a queue that has `max_pending` is full; how many of the wanted messages it has room for, at least one.

    Raises `QueueFull` when there is no room in time, or at once if the queue's `overload` is `raise`.
    """
    deadline = context.monotonic() + seconds
    pause = FULL_FIRST_SECONDS
    while True:
        room = yield from free_room(context, queue)
        if room is None or room >= wanted:
            return wanted
        policy = yield from context.policy(queue)
        if room > 0 and policy.overload != "raise":
            return room
        if policy.overload == "raise" or context.monotonic() >= deadline:
            cap = policy.max_pending or 0
            raise QueueFull(
                f"queue {queue} holds {cap - room:,} messages and its limit is {cap:,}: {wanted:,} more have no room. "
                f"{WRITTEN_STAYS}"
            )
        yield Sleep(pause)
        pause = min(pause * 2, FULL_MAX_SECONDS)
