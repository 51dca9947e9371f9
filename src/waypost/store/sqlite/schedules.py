"""Schedules, each with its queue; leaders; and timers of queues without claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waypost.store.port import Draft, FireStep
from waypost.store.sqlite.claim import promote_due
from waypost.store.sqlite.expires import lapse, next_moment
from waypost.store.sqlite.publish import publish
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.store.sqlite.step import Step
from waypost.values import Elected, Fired, FireStatus, Promoted, Published, Saved, ScheduleList, StoredSchedule

_COLUMNS = "s.key, s.version, s.spec, s.paused, s.next_ms, s.due_ms, s.fires, s.missed, s.last_ms, s.state"
_ONE = f"SELECT {_COLUMNS} FROM {{schedule}} s WHERE s.queue = ? AND s.key = ?"
_ALL = f"SELECT {_COLUMNS} FROM {{schedule}} s WHERE s.queue = ? ORDER BY s.key"
#: A new or changed schedule gets a higher number than any before; a removed one is noticed when it is to be fired.
_CHANGE = """
    INSERT INTO {meta} (name, value) VALUES ('schedule change', 1)
    ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value"""
_SAVE = """
    INSERT INTO {schedule} (queue, key, version, spec, paused, next_ms, due_ms, state, change)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET version = excluded.version, spec = excluded.spec, paused = excluded.paused,
        next_ms = excluded.next_ms, due_ms = excluded.due_ms, state = excluded.state, change = excluded.change"""
_MOVE = """
    UPDATE {schedule} SET next_ms = ?, due_ms = ?, fires = fires + ?, missed = missed + ?,
        last_ms = coalesce(?, last_ms), state = coalesce(?, state), version = coalesce(?, version)
    WHERE queue = ? AND key = ?"""
_IS_RUNNING = """
    SELECT 1 FROM {message} WHERE queue = ? AND id = ? AND state <> {DEAD}
        AND (expires_ms IS NULL OR expires_ms > ? OR state = {LEASED})"""
_REMOVE = "DELETE FROM {schedule} WHERE queue = ? AND key = ?"
_SCHEDULED = """
    SELECT q.name, max(s.change) FROM {schedule} s JOIN {queue} q ON q.number = s.queue GROUP BY q.name"""
_LEADER = "SELECT name, token, until_ms FROM {leader} WHERE role = ?"
_LEADER_SET = """
    INSERT INTO {leader} (role, name, token, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET name = excluded.name, token = excluded.token, until_ms = excluded.until_ms"""
_OLDEST_DUE = "SELECT min(ready_ms) FROM {message} INDEXED BY {message:delayed} WHERE queue = ? AND state = {DELAYED}"


def _read(row: tuple[Any, ...]) -> StoredSchedule:
    key, version, spec, paused, next_ms, due_ms, fires, missed, last_ms, state = row
    return StoredSchedule(
        key, version, bytes(spec), bool(paused), next_ms, due_ms, fires, missed, last_ms, bytes(state or b"")
    )


def _find(records: QueueRecords, key: str) -> StoredSchedule | None:
    row = records.step.execute(_ONE, (records.number, key)).fetchone()
    return None if row is None else _read(row)


def save_schedule(records: QueueRecords, schedule: StoredSchedule, version: str | None, next_ms: int | None) -> Saved:
    """Write a schedule if it is still as the caller read it; its counters are kept."""
    found = _find(records, schedule.key)
    if (None if found is None else (found.version, found.next_ms)) != (None if version is None else (version, next_ms)):
        return Saved("conflict", found)
    records.make()
    step = records.step
    change = step.execute(_CHANGE).fetchone()[0]
    s = schedule
    step.execute(_SAVE, (records.number, s.key, s.version, s.spec, int(s.paused), s.next_ms, s.due_ms, s.state, change))
    return Saved("saved", _find(records, schedule.key))


def remove_schedule(records: QueueRecords, key: str) -> bool:
    """Remove a schedule; return whether there was one."""
    return records.step.execute(_REMOVE, (records.number, key)).rowcount > 0


def schedules(records: QueueRecords) -> ScheduleList:
    """Return the schedules of a queue."""
    return ScheduleList(records.now, [_read(row) for row in records.step.execute(_ALL, (records.number,))])


def scheduled(step: Step) -> dict[str, int]:
    """Return the queues that have schedules, and a number that grows when one of them is saved."""
    return dict(step.execute(_SCHEDULED).fetchall())


def fire_schedule(records: QueueRecords, step: FireStep, drafts: Sequence[Draft], operation: str) -> Fired:
    """Publish the fires of a schedule and advance it, if it is unchanged since the caller read it and is due."""
    found = _find(records, step.key)
    status: FireStatus = "fired"
    paused = found is not None and found.paused and not step.by_hand
    if found is None or paused or (found.version, found.next_ms) != (step.version, step.expected_ms):
        status = "conflict"
    elif records.now < step.last_due_ms:
        status = "early"
    elif records.now > step.valid_until_ms:
        status = "stale"
    elif step.after_run is not None and _is_running(records, step.after_run.run_id):
        status = "running" if step.after_run.state is None else "skipped"
    if status not in ("fired", "skipped"):
        return Fired(status, records.now, found)
    state, last_ms, fires = step.state, step.last_ms, 0 if step.by_hand else len(drafts)
    if status == "skipped" and step.after_run is not None:
        after = step.after_run
        state, last_ms, fires = after.state, None, 0
        if after.skipped:
            records.note(
                "skipped", operation, schedule=step.key, cause="overlap", reason=after.run_id, due_ms=after.instant_ms,
                size=after.skipped,
            )  # fmt: skip
    else:
        publish(records, drafts, operation, schedule=step.key)
    moved = (step.next_ms, step.due_ms, fires, step.missed, last_ms, state, step.new_version)
    records.step.execute(_MOVE, (*moved, records.number, step.key))
    return Fired(status, records.now, _find(records, step.key))


def _is_running(records: QueueRecords, run_id: str) -> bool:
    """Return whether the message of a run is waiting, leased or waiting for a retry, and has not lapsed."""
    return records.step.execute(_IS_RUNNING, (records.number, run_id, records.now)).fetchone() is not None


def trigger_schedule(records: QueueRecords, key: str, draft: Draft, operation: str) -> Published | None:
    """Publish a schedule's message now, in addition to its regular fires; None if there is no such schedule."""
    if _find(records, key) is None:
        return None
    return publish(records, [draft], operation, schedule=key)[0]


def elect(step: Step, role: str, name: str, ttl_ms: int) -> Elected:
    """Become or stay the leader, unless another one leads; return the leader."""
    leader, token, until = step.execute(_LEADER, (role,)).fetchone() or ("", 0, 0)
    if leader not in ("", name) and until > step.now:
        if until - step.now > 4 * ttl_ms:
            # The clock was set back: do not wait for a dead leader until the clock reaches the old time.
            until = step.now + ttl_ms
            step.execute(_LEADER_SET, (role, leader, token, until))
        return Elected(leader, token, until - step.now)
    if leader != name or until <= step.now:
        token += 1
    step.execute(_LEADER_SET, (role, name, token, step.now + ttl_ms))
    return Elected(name, token, ttl_ms)


def resign(step: Step, role: str, name: str) -> bool:
    """Resign, so that another one can lead at once."""
    leader, token, until = step.execute(_LEADER, (role,)).fetchone() or ("", 0, 0)
    if leader != name or until <= step.now:
        return False
    step.execute(_LEADER_SET, (role, "", token, 0))
    return True


def promote(records: QueueRecords) -> Promoted:
    """Make due timers ready and end messages that have lapsed, as a claim does; paused timers accumulate."""
    oldest = records.step.execute(_OLDEST_DUE, (records.number,)).fetchone()[0]
    before = records.numbers["delayed"]
    if not records.paused and oldest is not None and oldest <= records.now:
        promote_due(records, None)
    promoted = before - records.numbers["delayed"]
    lapse(records, None)
    lag = 0 if oldest is None else max(0, records.now - oldest)
    return Promoted(promoted, records.numbers["delayed"], lag, next_moment(records))
