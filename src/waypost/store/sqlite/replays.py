"""The first results of operations, stored compactly, for repeats of these operations.

A step writes one row: the newest operation of a session is in the row of its last result; the expiry of a session is
written ahead and moved only when it comes too close; and old results are deleted several at a time.

A batch of 512 results usually has a single status and ids with a common prefix; runs and a shared prefix make it about
6 bytes a message. A session without a call for the replay time is deleted with all its results.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from waypost.identity import MARK_BYTES, Operation
from waypost.policy import REPLAY_MAX, STAMP_AHEAD_MS
from waypost.store.port import Woken
from waypost.store.repeats import is_repeat
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.values import (
    CancelStatus,
    ExtendStatus,
    Fired,
    PriorityStatus,
    Published,
    Purged,
    Redriven,
    RescheduleStatus,
    SettleStatus,
    SideEffect,
)

T = TypeVar("T")

#: Sessions that one step may delete: each has at most `REPLAY_MAX + RESULTS_SWEPT` results.
SESSIONS_SWEPT = 2
#: Old results of a session are deleted after this number of its operations.
RESULTS_SWEPT = 16
#: How far ahead the expiry of a session is written, as a part of the time for which results are kept.
AHEAD_PART = 1 / 8

_SESSION = """
    SELECT (SELECT max(number) FROM {replay} WHERE queue = ?1 AND session = ?2),
        (SELECT until_ms FROM {session} WHERE queue = ?1 AND session = ?2)"""
_RESULT = "SELECT result FROM {replay} WHERE queue = ? AND session = ? AND number = ?"
_RESULT_KEEP = "INSERT OR REPLACE INTO {replay} (queue, session, number, result) VALUES (?, ?, ?, ?)"
_RESULTS_OLD = "DELETE FROM {replay} WHERE queue = ? AND session = ? AND number <= ?"
_SESSION_KEEP = """
    INSERT INTO {session} (queue, session, newest, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET newest = max(newest, excluded.newest), until_ms = excluded.until_ms"""
_SESSIONS_SILENT = """
    SELECT queue, session FROM {session} INDEXED BY {session:until} WHERE until_ms < ? ORDER BY until_ms LIMIT ?"""
_SESSION_FORGET = "DELETE FROM {session} WHERE queue = ? AND session = ?"
_RESULTS_FORGET = "DELETE FROM {replay} WHERE queue = ? AND session = ?"


def replayed(records: QueueRecords, operation: Operation) -> bytes | None:
    """Return the first result of this operation, None if it is new; raises if its result may have been deleted."""
    window_ms = records.step.replay_ttl_ms
    if window_ms is None:
        return None
    if records.session != operation.session:
        newest, until_ms = records.step.execute(_SESSION, (records.number, operation.session)).fetchone()
        records.session, records.session_newest, records.session_until_ms = (
            operation.session, newest or 0, until_ms or 0,
        )  # fmt: skip
    newest, kept = records.session_newest, None
    if newest - REPLAY_MAX < operation.number <= newest:
        place = (records.number, operation.session, operation.number)
        kept = records.step.execute(_RESULT, place).fetchone()
    mark = None if kept is None else bytes(kept[0][:MARK_BYTES])
    is_known = is_repeat(
        records.name, operation, records.now, window_ms=window_ms, known=mark, newest=newest, removed_ms=records.mark.ms
    )
    return bytes(kept[0][MARK_BYTES:]) if is_known and kept is not None else None


def remember(records: QueueRecords, operation: Operation, result: bytes) -> None:
    """Store a result after the mark of its operation, and delete results that can no longer be repeated."""
    step, key = records.step, (records.number, operation.session)
    if step.replay_ttl_ms is None:
        return
    number = operation.number
    if number % RESULTS_SWEPT == 0:
        step.execute(_RESULTS_OLD, (*key, number - REPLAY_MAX))
    step.execute(_RESULT_KEEP, (*key, number, operation.mark + result))
    records.session_newest = max(records.session_newest, number)
    kept_ms = step.replay_ttl_ms + STAMP_AHEAD_MS
    ahead_ms = int(kept_ms * AHEAD_PART)
    if 0 <= records.session_until_ms - records.now - kept_ms <= ahead_ms:
        return
    records.session_until_ms = records.now + kept_ms + ahead_ms
    step.execute(_SESSION_KEEP, (*key, number, records.session_until_ms))
    silent = step.execute(_SESSIONS_SILENT, (records.now, SESSIONS_SWEPT)).fetchall()
    if silent:
        step.execute_many(_SESSION_FORGET, silent)
        step.execute_many(_RESULTS_FORGET, silent)


# ---- the formats of results ------------------------------------------------------------------------------------


class Form(Struct, Generic[T], frozen=True):
    """How the result of one verb is stored."""

    pack: Callable[[T], bytes]
    unpack: Callable[[bytes], T]


def _form(plain: type[Any], into: Callable[[T], Any], back: Callable[[Any], T]) -> Form[T]:
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(plain).decode
    return Form(lambda result: encode(into(result)), lambda data: back(decode(data)))


Runs = list[tuple[str, int]]


def _runs(texts: Iterable[str]) -> Runs:
    return [(text, len(list(same))) for text, same in groupby(texts)]


def _unrolled(runs: Runs) -> list[Any]:
    return [text for text, count in runs for _ in range(count)]


Ids = tuple[str, list[str]]


def _ids(ids: Sequence[str]) -> Ids:
    prefix = os.path.commonprefix(ids)
    cut = len(prefix)
    return prefix, [id[cut:] for id in ids]


def _whole(ids: Ids) -> list[str]:
    return [ids[0] + rest for rest in ids[1]]


Wake = dict[str, list[str]]
Also = tuple[SideEffect, ...]

PUBLISHED: Form[Woken[list[Published]]] = _form(
    tuple[Ids, Runs, Wake, str, Also],
    lambda woken: (
        _ids([p.id for p in woken.result]), _runs(p.status for p in woken.result), woken.wake,
        woken.result[0].queue if woken.result else "", woken.also,
    ),
    lambda kept: Woken(
        [Published(id, status, kept[3]) for id, status in zip(_whole(kept[0]), _unrolled(kept[1]), strict=True)],
        kept[2], kept[4],
    ),
)  # fmt: skip
#: The nonce and messages of the leases, the side effects of the claim, and whom to wake for these.
CLAIMED: Form[tuple[bytes, list[str], Also, Wake]] = _form(
    tuple[bytes, Ids, Also, Wake],
    lambda claimed: (claimed[0], _ids(claimed[1]), *claimed[2:]),
    lambda kept: (kept[0], _whole(kept[1]), *kept[2:]),
)


def _statuses() -> Form[Woken[list[Any]]]:
    return _form(
        tuple[Runs, Wake, Also],
        lambda woken: (_runs(woken.result), woken.wake, woken.also),
        lambda kept: Woken(_unrolled(kept[0]), *kept[1:]),
    )


SETTLED: Form[Woken[list[SettleStatus]]] = _statuses()
EXTENDED: Form[list[ExtendStatus]] = _form(list[tuple[str, int]], _runs, _unrolled)
CANCELLED: Form[Woken[list[CancelStatus]]] = _statuses()
RESCHEDULED: Form[Woken[list[RescheduleStatus]]] = _statuses()
PRIORITY_CHANGED: Form[Woken[list[PriorityStatus]]] = _statuses()
REDRIVEN: Form[Woken[Redriven]] = _form(Woken[Redriven], lambda woken: woken, lambda kept: kept)
PURGED: Form[Woken[Purged]] = _form(Woken[Purged], lambda woken: woken, lambda kept: kept)
FIRED: Form[Woken[Fired]] = _form(Woken[Fired], lambda woken: woken, lambda kept: kept)
SKIPPED: Form[Woken[str | None]] = _form(Woken[str | None], lambda woken: woken, lambda kept: kept)
TRIGGERED: Form[Woken[Published | None]] = _form(Woken[Published | None], lambda woken: woken, lambda kept: kept)
