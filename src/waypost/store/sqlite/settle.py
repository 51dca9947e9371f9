"""Settle and extend leases, cancel messages, and move timers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from waypost.store.port import Hold, Target, cut_error, error_to_keep, forwarded_draft
from waypost.store.sqlite.grouping import HOLDS
from waypost.store.sqlite.known import KnownLease, KnownLeases
from waypost.store.sqlite.moves import bury, end, ends_otherwise, make_claimable, to_head
from waypost.store.sqlite.publish import publish
from waypost.store.sqlite.queue_records import QueueRecords, Record, as_list, consecutive
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY
from waypost.store.sqlite.wake import waking
from waypost.values import (
    FAILURE_REASONS,
    CancelStatus,
    ExtendStatus,
    PriorityStatus,
    RescheduleStatus,
    Settlement,
    SettleStatus,
    chain_id,
)

#: How many rows of a range are leased by one claim, and the sum of their tokens.
_HELD = """
    SELECT count(*), coalesce(sum(token), 0) FROM {message}
    WHERE seq BETWEEN ? AND ? AND queue = ? AND state = {LEASED} AND nonce = ?"""
#: Messages that are leased, and whether they have neither key nor chain.
_HELD_BY_IDS = """
    SELECT m.id, m.nonce, coalesce(m.key, m.freed_key, m.chain) IS NULL, m.seq, m.token, m.priority, m."group",
        m.deliveries, m.attempts, m.size, m.claimed_ms, m.worker
    FROM json_each(?) j CROSS JOIN {message} m INDEXED BY {message:id}
    WHERE m.queue = ? AND m.id = j.value AND m.state = {LEASED}"""
_RESULT_SET = """
    INSERT INTO {result} (queue, id, data, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET data = excluded.data, until_ms = excluded.until_ms"""
_RESULT_KEPT = "SELECT 1 FROM {result} WHERE queue = ? AND id = ? AND until_ms > ?"
_COMPLETED_KEPT = "SELECT 1 FROM {completed} INDEXED BY {completed:id} WHERE queue = ? AND id = ? LIMIT 1"
_WINDOW_KEPT = "SELECT 1 FROM {window} WHERE queue = ? AND key = ? AND until_ms > ?"
_EXTEND = "UPDATE {message} SET lease_end_ms = ? WHERE seq = ?"
_CANCEL_REQUEST = "UPDATE {message} SET cancel_requested = 1 WHERE seq = ?"
_PRIORITY = "UPDATE {message} SET priority = ? WHERE seq = ?"


def held(records: QueueRecords, id: str, token: int, nonce: bytes) -> Record | None:
    """Return the message if this token and nonce still hold its lease."""
    record = records.messages.get(id)
    if record is None or record.state != LEASED or record.token != token or record.nonce != nonce:
        return None
    return record


def settle(
    records: QueueRecords,
    settlements: Sequence[Settlement],
    operation: str,
    wake: dict[str, list[str]],
    known: KnownLeases,
) -> list[SettleStatus]:
    """Settle deliveries in order; `wake` collects the names to wake in other queues."""
    if _settle_plain(records, settlements, operation, known):
        return ["done"] * len(settlements)
    records.load([settlement.id for settlement in settlements])
    records.load_holders([record.key for record in records.messages.values() if record.key is not None])
    statuses: list[SettleStatus] = []
    for settlement in settlements:
        known.drop(settlement.nonce, settlement.id)
        record = held(records, settlement.id, settlement.token, settlement.nonce)
        if record is None:
            statuses.append("lost")
        elif settlement.outcome == "done":
            _done(records, record, settlement, operation, wake)
            statuses.append("done")
        else:
            statuses.append(_not_done(records, record, settlement, operation))
    return statuses


def _settle_plain(records: QueueRecords, settlements: Sequence[Settlement], operation: str, known: KnownLeases) -> bool:
    """End deliveries in bulk if all are done and still held, with nothing else to do; return whether they are."""
    if records.policy.completed_max or not settlements or records.is_awaited:
        return False
    if records.groups is not None and not records.groups.counts_all:
        return False
    for settlement in settlements:
        if settlement.outcome != "done" or settlement.result is not None or settlement.then:
            return False
    ids = [settlement.id for settlement in settlements]
    if len(set(ids)) != len(ids):
        return False
    records.flush_messages()
    leases = _known(records, settlements, ids, known) or _searched(records, settlements, ids)
    if leases is None:
        return False
    now, count = records.now, len(ids)
    seqs, tokens, priorities, groups, deliveries, attempts, sizes, claimed, workers = zip(*leases, strict=True)
    records.remove_rows(seqs)
    if records.groups is not None:
        records.groups.end_leases(groups)
    records.numbers["leased"] -= count
    records.count_up("done", count)
    ran = [now - claimed_ms for claimed_ms in claimed]
    records.count_runs(count, sum(ran) if min(ran) >= 0 else sum(max(0, one) for one in ran), max(0, *ran))
    records.note_many(
        "done", operation, ids, group=groups, priority=priorities, token=tokens, deliveries=deliveries,
        attempts=attempts, worker=workers, run_ms=ran, size=sizes,
    )  # fmt: skip
    return True


def _known(
    records: QueueRecords, settlements: Sequence[Settlement], ids: list[str], known: KnownLeases
) -> list[KnownLease] | None:
    """Return the leases of these settlements, if all are of one claim of this process, and still held."""
    nonce = settlements[0].nonce
    leases = known.find(nonce, ids)
    if leases is None:
        return None
    for settlement, lease in zip(settlements, leases, strict=True):
        if settlement.token != lease[1] or settlement.nonce != nonce:
            return None
    ranges = consecutive([lease[0] for lease in leases])
    if len(ranges) > 1 + len(leases) // 4:
        return None  # a search by id is faster
    held = [records.step.execute(_HELD, (*span, records.number, nonce)).fetchone() for span in ranges]
    # Tokens only grow: their sum is equal only if each is.
    if sum(count for count, _ in held) != len(ids) or sum(tokens for _, tokens in held) != sum(x[1] for x in leases):
        return None
    known.forget(nonce, ids)
    return leases


def _searched(records: QueueRecords, settlements: Sequence[Settlement], ids: list[str]) -> list[KnownLease] | None:
    """Return the leases of these settlements, if all are still held and have neither key nor chain."""
    rows = records.step.execute(_HELD_BY_IDS, (as_list(ids), records.number)).fetchall()
    if len(rows) != len(ids):
        return None
    leases: list[KnownLease] = []
    for settlement, (id, nonce, is_alone, *lease) in zip(settlements, rows, strict=True):
        held = id == settlement.id and lease[1] == settlement.token and nonce == settlement.nonce
        if not held or not is_alone or type(lease[7]) is not int:
            return None
        leases.append(tuple(lease))
    return leases


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
    if record.state == DELAYED and records.groups is not None and records.groups.is_ordered(record.group):
        record.holds = HOLDS
    return status


def extend(records: QueueRecords, holds: Sequence[Hold]) -> list[ExtendStatus]:
    """Renew leases: only the lease end changes, so the other indexes of the row are not written."""
    records.load([hold.id for hold in holds])
    statuses: list[ExtendStatus] = []
    renewed: list[tuple[int, int]] = []
    for hold in holds:
        record = held(records, hold.id, hold.token, hold.nonce)
        if record is None:
            statuses.append("lost")
            continue
        # The lease length of its claim: its worker renews by that, whatever the queue's lease is now.
        renewed.append((records.now + record.lease_ms, record.seq))
        statuses.append("cancel" if record.cancel_requested else "ok")
    records.step.execute_many(_EXTEND, renewed)
    return statuses


def cancel(records: QueueRecords, targets: Sequence[Target], operation: str) -> list[CancelStatus]:
    """Cancel by id or key: a waiting message at once, a running one when its lease is next renewed."""
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
    """Change the due times of timers; a time in the past means now."""
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


def change_priority(records: QueueRecords, ids: Sequence[str], priority: int, operation: str) -> list[PriorityStatus]:
    """Change the priority of messages; a ready message becomes the last of its new priority."""
    return [_change_priority_of(records, id, priority, operation) for id in ids]


def _change_priority_of(records: QueueRecords, id: str, priority: int, operation: str) -> PriorityStatus:
    record = records.find(id)
    if record is None or record.state == DEAD:
        return "unknown"
    if record.state not in (READY, DELAYED) or record.priority == priority:
        return "unchanged"
    if records.policy.order is not None and record.group is not None:
        return "unchanged"
    record.priority = priority
    records.step.execute(_PRIORITY, (priority, record.seq))
    if record.state == READY:
        make_claimable(records, record, min(record.ready_ms, records.now))
    records.note("postponed", operation, record, cause="priority", due_ms=record.ready_ms)
    return "changed"
