"""Chains at their home, messages that wait for them, and clients that wait for an end."""

from __future__ import annotations

from waypost.policy import ENDED_TTL_MS, NO_END_MS, WAITER_TTL_MS
from waypost.store.port import add_wakes
from waypost.store.sqlite.moves import bury, make_claimable, wake_waiters
from waypost.store.sqlite.queue_records import QueueBook
from waypost.store.sqlite.schema import STATES, WAITING
from waypost.store.sqlite.step import Step
from waypost.store.sqlite.wake import waking
from waypost.values import ChainState, Notice, Watched, split_chain_id

_CHAIN = """
    SELECT failed_member, failed, last, until_ms,
        (SELECT count(*) FROM {member} m WHERE m.queue = c.queue AND m.chain = c.id)
    FROM {chain} c WHERE queue = ? AND id = ?"""
_MEMBER_COUNT = """
    INSERT INTO {member} (queue, chain, name, count) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET count = count + excluded.count"""
_MEMBERS_EVEN = "DELETE FROM {member} WHERE queue = ? AND chain = ? AND count = 0"
_CHAIN_WENT_ON = """
    UPDATE {chain} SET last = ?, failed_member = ?, failed = ?, until_ms = ? WHERE queue = ? AND id = ?"""
_WATCHER = "INSERT INTO {watcher} (queue, chain, name) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_WATCHERS_OUT = "DELETE FROM {watcher} WHERE queue = ? AND chain = ? RETURNING name"
_BLOCKER_OUT = "DELETE FROM {blocker} WHERE seq = ? AND chain = ?"
_BLOCKED = "SELECT 1 FROM {blocker} WHERE seq = ? LIMIT 1"
_WAITER = """
    INSERT INTO {waiter} (queue, id, name, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET until_ms = excluded.until_ms"""
_RESULT = "SELECT data FROM {result} WHERE queue = ? AND id = ? AND until_ms > ?"
_ENDED = "SELECT how FROM {ending} WHERE queue = ? AND id = ? AND until_ms > ?"


def carry(step: Step) -> dict[str, list[str]]:
    """Act on the news that a step made, and on the news that come of it; whom to wake for all of it, by queue."""
    wake: dict[str, list[str]] = {}
    while step.notices:
        notices, step.notices = step.notices, []
        for notice in notices:
            book = step.book(notice.queue)
            _, names = waking(book, lambda b=book, n=notice: _arrive(b, n))  # type: ignore[misc]
            add_wakes(wake, {book.name: names} if names else {})
    expectant, step.expectant = step.expectant, {}
    return add_wakes(wake, expectant)


def _arrive(book: QueueBook, notice: Notice) -> None:
    if notice.kind == "completed":
        _unblock(book, notice)
        return
    first = split_chain_id(notice.chain)[1]
    state = _state(book, first)
    if notice.kind == "watch":
        if not state.known:
            _complete(book, notice.chain, notice.member, "unknown chain")
        elif state.is_finished:
            _complete(book, notice.chain, notice.member, None if state.failed is None else state.failed[1])
        else:
            book.step.execute(_WATCHER, (book.number, first, notice.member))
    elif state.known and not state.is_finished:
        _count_end(book, first, notice)


def _state(book: QueueBook, first: str) -> ChainState:
    row = book.step.execute(_CHAIN, (book.number, first)).fetchone()
    if row is None:
        return ChainState(False)
    failed_member, failed, last, until_ms, open_members = row
    state = ChainState(True, open_members, None if failed is None else (failed_member, failed), last)
    return ChainState(False) if state.is_finished and until_ms <= book.now else state


def _count_end(book: QueueBook, first: str, notice: Notice) -> None:
    execute, number = book.step.execute, book.number
    execute(_MEMBER_COUNT, (number, first, notice.member, -1))
    book.step.execute_many(_MEMBER_COUNT, [(number, first, begun, 1) for begun in notice.begun])
    execute(_MEMBERS_EVEN, (number, first))
    finished = notice.failed is not None or _state(book, first).open == 0
    until_ms = book.now + ENDED_TTL_MS if finished else NO_END_MS
    failed_member = None if notice.failed is None else notice.member
    execute(_CHAIN_WENT_ON, (notice.member, failed_member, notice.failed, until_ms, number, first))
    if finished:
        for (watcher,) in execute(_WATCHERS_OUT, (number, first)).fetchall():
            _complete(book, notice.chain, watcher, notice.failed)
        wake_waiters(book, f"chain/{first}")


def _complete(book: QueueBook, chain: str, watcher: str, failed: str | None) -> None:
    queue = split_chain_id(watcher)[0]
    book.step.notices.append(Notice("", "completed", queue, chain, watcher, failed=failed))


def _unblock(book: QueueBook, notice: Notice) -> None:
    record = book.find(split_chain_id(notice.member)[1])
    if record is None or record.state != WAITING:
        return
    if book.step.execute(_BLOCKER_OUT, (record.seq, notice.chain)).rowcount == 0:
        return
    if notice.failed is not None:
        record.error_type, record.error = "ChainFailed", f"chain {notice.chain}: {notice.failed}"
        bury(book, record, "blocker_failed", None)
    elif book.step.execute(_BLOCKED, (record.seq,)).fetchone() is None:
        make_claimable(book, record, max(record.ready_ms, book.now))
        book.note("promoted", None, record, cause="unblocked")


def watch(step: Step, queue: str, message_id: str, waiter: str | None) -> Watched:
    """How a message stands, and for `waiter` a wake-up when it ends."""
    book = step.look(queue)
    record = book.find(message_id)
    if record is not None:
        state = STATES[record.state]
        if state == "dead":
            return Watched("dead", "dead", record.reason, record.error_type, record.error)
        _wait(book, message_id, waiter)
        return Watched(state)
    found = step.execute(_RESULT, (book.number, message_id, step.now)).fetchone()
    if found is not None:
        return Watched(None, "done", result=bytes(found[0]))
    found = step.execute(_ENDED, (book.number, message_id, step.now)).fetchone()
    return Watched(None, None if found is None else found[0])


def watch_chain(step: Step, queue: str, message_id: str, waiter: str | None) -> ChainState:
    """How a chain stands, and for `waiter` a wake-up when it is finished."""
    book = step.look(queue)
    state = _state(book, message_id)
    if state.known and not state.is_finished:
        _wait(book, f"chain/{message_id}", waiter)
    return state


def _wait(book: QueueBook, id: str, waiter: str | None) -> None:
    if waiter is not None:
        book.sweep("waiter", 1)
        book.step.execute(_WAITER, (book.number, id, waiter, book.now + WAITER_TTL_MS))
