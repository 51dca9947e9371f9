"""Chains, stored with their first queue; messages that wait for chains; and clients that wait for an end."""

from __future__ import annotations

from msgspec import structs

from waypost.policy import ENDED_TTL_MS, LINKS_MAX, NO_END_MS, WAITER_TTL_MS
from waypost.store.port import add_wakes
from waypost.store.sqlite.moves import bury, make_claimable, wake_waiters
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.store.sqlite.schema import STATES, WAITING
from waypost.store.sqlite.step import Step
from waypost.store.sqlite.wake import waking
from waypost.values import ChainState, Links, Notice, Watched, split_chain_id

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
_MEMBERS = "SELECT name FROM {member} WHERE queue = ? AND chain = ? AND count > 0 ORDER BY name LIMIT ?"
_WATCHERS = "SELECT name FROM {watcher} WHERE queue = ? AND chain = ? ORDER BY name LIMIT ?"
_BLOCKERS = "SELECT chain FROM {blocker} WHERE seq = ? ORDER BY chain LIMIT ?"
_BLOCKER_OUT = "DELETE FROM {blocker} WHERE seq = ? AND chain = ?"
_BLOCKED = "SELECT 1 FROM {blocker} WHERE seq = ? LIMIT 1"
_WAITER = """
    INSERT INTO {waiter} (queue, id, name, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET until_ms = excluded.until_ms"""
_RESULT = "SELECT data FROM {result} WHERE queue = ? AND id = ? AND until_ms > ?"
_ENDED = "SELECT how FROM {ending} WHERE queue = ? AND id = ? AND until_ms > ?"


def deliver_notices(step: Step) -> dict[str, list[str]]:
    """Apply the notices of a step and the notices that these cause; return the sleepers to wake, by queue."""
    wake: dict[str, list[str]] = {}
    while step.notices:
        notices, step.notices = step.notices, []
        for notice in notices:
            records = step.queue_for_writing(notice.queue)
            _, names = waking(records, lambda b=records, n=notice: _arrive(b, n))  # type: ignore[misc]
            add_wakes(wake, {records.name: names} if names else {})
    waiters_to_wake, step.waiters_to_wake = step.waiters_to_wake, {}
    return add_wakes(wake, waiters_to_wake)


def _arrive(records: QueueRecords, notice: Notice) -> None:
    if notice.kind == "completed":
        _unblock(records, notice)
        return
    first = split_chain_id(notice.chain)[1]
    state = _state(records, first)
    if notice.kind == "watch":
        if not state.known:
            _complete(records, notice.chain, notice.member, "unknown chain")
        elif state.is_finished:
            _complete(records, notice.chain, notice.member, None if state.failed is None else state.failed[1])
        else:
            records.step.execute(_WATCHER, (records.number, first, notice.member))
    elif state.known and not state.is_finished:
        _count_end(records, first, notice)


def _state(records: QueueRecords, first: str) -> ChainState:
    row = records.step.execute(_CHAIN, (records.number, first)).fetchone()
    if row is None:
        return ChainState(False)
    failed_member, failed, last, until_ms, open_members = row
    state = ChainState(True, open_members, None if failed is None else (failed_member, failed), last)
    return ChainState(False) if state.is_finished and until_ms <= records.now else state


def _count_end(records: QueueRecords, first: str, notice: Notice) -> None:
    execute, number = records.step.execute, records.number
    execute(_MEMBER_COUNT, (number, first, notice.member, -1))
    records.step.execute_many(_MEMBER_COUNT, [(number, first, begun, 1) for begun in notice.begun])
    execute(_MEMBERS_EVEN, (number, first))
    finished = notice.failed is not None or _state(records, first).open == 0
    until_ms = records.now + ENDED_TTL_MS if finished else NO_END_MS
    failed_member = None if notice.failed is None else notice.member
    execute(_CHAIN_WENT_ON, (notice.member, failed_member, notice.failed, until_ms, number, first))
    if finished:
        for (watcher,) in execute(_WATCHERS_OUT, (number, first)).fetchall():
            _complete(records, notice.chain, watcher, notice.failed)
        wake_waiters(records, f"chain/{first}")


def _complete(records: QueueRecords, chain: str, watcher: str, failed: str | None) -> None:
    queue = split_chain_id(watcher)[0]
    records.step.notices.append(Notice("", "completed", queue, chain, watcher, failed=failed))


def _unblock(records: QueueRecords, notice: Notice) -> None:
    record = records.find(split_chain_id(notice.member)[1])
    if record is None or record.state != WAITING:
        return
    if records.step.execute(_BLOCKER_OUT, (record.seq, notice.chain)).rowcount == 0:
        return
    if notice.failed is not None:
        record.error_type, record.error = "ChainFailed", f"chain {notice.chain}: {notice.failed}"
        bury(records, record, "blocker_failed", None)
    elif records.step.execute(_BLOCKED, (record.seq,)).fetchone() is None:
        make_claimable(records, record, record.ready_after_wait(records.now))
        records.note("promoted", None, record, cause="unblocked")


def watch(step: Step, queue: str, message_id: str, waiter: str | None) -> Watched:
    """Return the state of a message, and register `waiter` to be woken when it ends."""
    records = step.queue_for_reading(queue)
    record = records.find(message_id)
    if record is not None:
        state = STATES[record.state]
        if state == "dead":
            return Watched("dead", "dead", record.reason, record.error_type, record.error)
        _wait(records, message_id, waiter)
        return Watched(state)
    found = step.execute(_RESULT, (records.number, message_id, step.now)).fetchone()
    if found is not None:
        return Watched(None, "done", result=bytes(found[0]))
    found = step.execute(_ENDED, (records.number, message_id, step.now)).fetchone()
    return Watched(None, None if found is None else found[0])


def watch_chain(step: Step, queue: str, message_id: str, waiter: str | None) -> ChainState:
    """Return the state of a chain, and register `waiter` to be woken when it ends."""
    records = step.queue_for_reading(queue)
    state = _state(records, message_id)
    if state.known and not state.is_finished:
        _wait(records, f"chain/{message_id}", waiter)
    return state


def links(step: Step, queue: str, message_id: str) -> Links:
    """Return the relations of a message to chains."""
    records = step.queue_for_reading(queue)
    record, state = records.find(message_id), _state(records, message_id)

    def names(statement: str, *place: object) -> tuple[str, ...]:
        return tuple(name for (name,) in step.execute(statement, (*place, LINKS_MAX)))

    found = Links() if record is None else Links(record.chain, names(_BLOCKERS, record.seq))
    if not state.known:
        return found
    place = records.number, message_id
    return structs.replace(found, begun=state, members=names(_MEMBERS, *place), watchers=names(_WATCHERS, *place))


def _wait(records: QueueRecords, id: str, waiter: str | None) -> None:
    if waiter is not None:
        records.sweep("waiter", 1)
        records.step.execute(_WAITER, (records.number, id, waiter, records.now + WAITER_TTL_MS))
