"""Settle and extend leases, cancel messages, and move timers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from waypost.store.port import Hold, Target, cut_error, error_to_keep, forwarded_draft
from waypost.store.sqlite.moves import bury, end, ends_otherwise, make_claimable, to_head
from waypost.store.sqlite.publish import publish
from waypost.store.sqlite.queue_records import QueueRecords, Record
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED
from waypost.store.sqlite.wake import waking
from waypost.values import (
    FAILURE_REASONS,
    CancelStatus,
    ExtendStatus,
    RescheduleStatus,
    Settlement,
    SettleStatus,
    chain_id,
)

_RESULT_SET = """
    INSERT INTO {result} (queue, id, data, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET data = excluded.data, until_ms = excluded.until_ms"""
_RESULT_KEPT = "SELECT 1 FROM {result} WHERE queue = ? AND id = ? AND until_ms > ?"
_COMPLETED_KEPT = "SELECT 1 FROM {completed} INDEXED BY {completed:id} WHERE queue = ? AND id = ? LIMIT 1"
_WINDOW_KEPT = "SELECT 1 FROM {window} WHERE queue = ? AND key = ? AND until_ms > ?"
_EXTEND = "UPDATE {message} SET lease_end_ms = ? WHERE seq = ?"
_CANCEL_REQUEST = "UPDATE {message} SET cancel_requested = 1 WHERE seq = ?"


def held(records: QueueRecords, id: str, token: int, nonce: bytes) -> Record | None:
    """The fence: the message in hand, if this token and nonce still hold its lease."""
    record = records.messages.get(id)
    if record is None or record.state != LEASED or record.token != token or record.nonce != nonce:
        return None
    return record


def settle(
    records: QueueRecords, settlements: Sequence[Settlement], operation: str, wake: dict[str, list[str]]
) -> list[SettleStatus]:
    """Settle deliveries in order; `wake` gathers whom to wake in other queues."""
    records.load([settlement.id for settlement in settlements])
    records.load_holders([record.key for record in records.messages.values() if record.key is not None])
    statuses: list[SettleStatus] = []
    for settlement in settlements:
        record = held(records, settlement.id, settlement.token, settlement.nonce)
        if record is None:
            statuses.append("lost")
        elif settlement.outcome == "done":
            _done(records, record, settlement, operation, wake)
            statuses.append("done")
        else:
            statuses.append(_not_done(records, record, settlement, operation))
    return statuses


def _done(
    records: QueueRecords, record: Record, settlement: Settlement, operation: str, wake: dict[str, list[str]]
) -> None:
    if settlement.result is not None:
        records.sweep("result", 1)
        until_ms = records.now + settlement.result_ttl_ms
        records.step.execute(_RESULT_SET, (records.number, record.id, settlement.result, until_ms))
    end(records, record, "done", operation, begun=tuple(chain_id(one.queue, one.id) for one in settlement.then))
    for next_one in settlement.then:
        records.numbers["transferred"] += 1
        target = records.step.queue_for_writing(next_one.queue)
        drafts = [forwarded_draft(next_one)]
        if target is records:
            publish(records, drafts, operation)
            continue
        _, names = waking(target, lambda t=target, d=drafts: publish(t, d, operation))  # type: ignore[misc]
        if names:
            wake.setdefault(target.name, []).extend(names)


def _not_done(records: QueueRecords, record: Record, settlement: Settlement, operation: str) -> SettleStatus:
    outcome = settlement.outcome
    if record.cancel_requested:
        end(records, record, "cancelled", operation, cause=outcome)
        return "cancelled"
    if outcome in ("retry", "dead"):
        record.error_type = settlement.error_type
        record.error = error_to_keep(records.policy, settlement.error)
    if outcome == "dead":
        if settlement.reason in FAILURE_REASONS:
            record.attempts += 1
        bury(records, record, settlement.reason or "rejected", operation)
        return "dead"
    if outcome == "drop":
        end(records, record, "dropped", operation, cause="drop")
        return "dropped"
    if ends_otherwise(records, record, operation, outcome):
        return "replaced"
    if outcome == "release":
        record.deliveries -= 1
        records.count_up("released")
        records.note_run("released", operation, record)
        to_head(records, record, records.now, "released")
        return "released"
    status: Literal["retried", "snoozed"]
    if outcome == "retry":
        record.attempts += 1
        records.count_up("retried")
        records.count_run(record)
        status = record.cause = "retried"
    else:
        record.deliveries -= 1
        records.count_up("snoozed")
        records.count_run(record)
        status = record.cause = "snoozed"
    ready_ms = records.now + settlement.after_ms
    records.note_run(
        status, operation, record,
        due_ms=ready_ms, reason=settlement.reason, error_type=settlement.error_type,
        error=cut_error(settlement.error) if status == "retried" else None,
    )  # fmt: skip
    make_claimable(records, record, ready_ms)
    return status


def extend(records: QueueRecords, holds: Sequence[Hold]) -> list[ExtendStatus]:
    """Renew leases: only the lease end changes, so the rest of the row's indexes stay as they are."""
    records.load([hold.id for hold in holds])
    statuses: list[ExtendStatus] = []
    renewed: list[tuple[int, int]] = []
    for hold in holds:
        record = held(records, hold.id, hold.token, hold.nonce)
        if record is None:
            statuses.append("lost")
            continue
        # The length at the claim: its worker renews by that, whatever the queue's lease is now.
        renewed.append((records.now + record.lease_ms, record.seq))
        statuses.append("cancel" if record.cancel_requested else "ok")
    records.step.execute_many(_EXTEND, renewed)
    return statuses


def cancel(records: QueueRecords, targets: Sequence[Target], operation: str) -> list[CancelStatus]:
    """Cancel by id or key: waiting messages at once, a running one by a flag that its next renewal finds."""
    return [_cancel_target(records, target, operation) for target in targets]


def _cancel_target(records: QueueRecords, target: Target, operation: str) -> CancelStatus:
    number, now = records.number, records.now
    if target.key is not None:
        holder = records.holder(target.key)
        if holder is None:
            kept = records.step.execute(_WINDOW_KEPT, (number, target.key, now)).fetchone()
            return "unknown" if kept is None else "finished"
        if holder.parked is not None:
            end(records, holder.parked, "cancelled", operation, cause="parked")
        return _cancel_one(records, holder.owner, operation)
    id = target.id or ""
    record = records.find(id)
    if record is not None:
        return _cancel_one(records, record, operation)
    finished = (
        records.step.execute(_COMPLETED_KEPT, (number, id)).fetchone()
        or records.step.execute(_RESULT_KEPT, (number, id, now)).fetchone()
    )
    return "finished" if finished else "unknown"


def _cancel_one(records: QueueRecords, record: Record, operation: str) -> CancelStatus:
    if record.state == DEAD:
        return "finished"
    if record.state == LEASED:
        if not record.cancel_requested:
            record.cancel_requested = 1
            records.step.execute(_CANCEL_REQUEST, (record.seq,))
            records.note("cancel_requested", operation, record)
        return "requested"
    end(records, record, "cancelled", operation, cause="request")
    return "cancelled"


def reschedule(records: QueueRecords, targets: Sequence[Target], due_ms: int, operation: str) -> list[RescheduleStatus]:
    """Give timers another due time; now if that is over."""
    return [_reschedule_target(records, target, max(due_ms, records.now), operation) for target in targets]


def _reschedule_target(records: QueueRecords, target: Target, ready_ms: int, operation: str) -> RescheduleStatus:
    record: Record | None
    if target.key is not None:
        holder = records.holder(target.key)
        record = None if holder is None else holder.owner
    else:
        record = records.find(target.id or "")
    if record is None or record.state == DEAD:
        return "unknown"
    if record.state != DELAYED:
        return "due"
    make_claimable(records, record, ready_ms)
    records.note("postponed", operation, record, due_ms=ready_ms)
    return "moved"
