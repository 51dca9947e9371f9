"""Claim: promote due messages, reclaim expired leases, lease messages, and return when to claim again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from types import NoneType
from typing import Any

from waypost.identity import Operation
from waypost.policy import (
    BURY_MAX,
    POLL_SOON_MS_MAX,
    PRIORITY_MAX,
    PROMOTE_MAX,
    RECLAIM_MAX,
    SLEEPER_TTL_MS,
    UNIQUE_NUMBERS,
)
from waypost.store.sqlite.check import OTHERS_SOUND, is_sound, usable
from waypost.store.sqlite.expires import lapse, next_moment
from waypost.store.sqlite.grouping import Grouping
from waypost.store.sqlite.groups import convert
from waypost.store.sqlite.known import KnownLeases
from waypost.store.sqlite.moves import bury, end, ends_otherwise, make_claimable, to_head, trim_dead
from waypost.store.sqlite.queue_records import COLUMNS, QueueRecords, Record, as_list, consecutive, is_scattered
from waypost.store.sqlite.schema import DELAYED, LEASED, READY
from waypost.store.sqlite.turns import Turns, join_again, next_allowed
from waypost.store.sqlite.wake import POLLS_SOON
from waypost.values import REDELIVERY_CAUSES, Claimed, Lease

UNTIL_CLAIMED = UNIQUE_NUMBERS["until_claimed"]
_DUE = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:delayed}}
    WHERE m.queue = ? AND m.state = {DELAYED} AND m.ready_ms <= ? ORDER BY m.ready_ms, m.id LIMIT ?"""
_EXPIRED = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:leased}}
    WHERE m.queue = ? AND m.state = {LEASED} AND m.lease_end_ms <= ? ORDER BY m.lease_end_ms, m.id LIMIT ?"""
_READY = f"""
    SELECT {COLUMNS}, e.data
    FROM {{message}} m INDEXED BY {{message:ready}} CROSS JOIN {{envelope}} e ON e.seq = m.seq
    WHERE m.queue = ? AND m.state = {READY} ORDER BY m.priority DESC, m.position, m.id LIMIT ?"""
_LEASE_SET = """
    UPDATE {message} SET state = {LEASED}, token = token + 1, deliveries = deliveries + 1,
        nonce = ?, worker = ?, claimed_ms = ?, lease_end_ms = ?, lease_ms = ?"""
_LEASE = f"{_LEASE_SET} WHERE seq BETWEEN ? AND ?"
_LEASE_LISTED = f"{_LEASE_SET} WHERE seq IN (SELECT value FROM json_each(?))"
_FREE_KEYS = f"""
    UPDATE {{message}} SET freed_key = key, key = NULL
    WHERE seq IN (SELECT value FROM json_each(?)) AND key_mode = {UNTIL_CLAIMED} AND key IS NOT NULL"""
_DATA_LISTED = "SELECT e.seq, e.data FROM json_each(?) j CROSS JOIN {envelope} e ON e.seq = j.value"
_ROWS_LISTED = f"""
    SELECT {COLUMNS}, e.data FROM json_each(?) j CROSS JOIN {{message}} m ON m.seq = j.value
    CROSS JOIN {{envelope}} e ON e.seq = m.seq ORDER BY j.key"""
_ROW_WITH_LENGTH = f"""
    SELECT {COLUMNS}, CASE typeof(e.data) WHEN 'blob' THEN length(e.data) END
    FROM {{message}} m LEFT JOIN {{envelope}} e ON e.seq = m.seq WHERE m.seq = ?"""
#: The columns that a claim needs of messages that it only leases; the other columns must have valid values.
_READY_PLAIN = f"""
    SELECT m.seq, m.id, m.priority, m.ready_ms, m.published_ms, m.size, m.token, m.deliveries, m.attempts,
        coalesce(m.key, m.freed_key), m."group", m.cause, m.chain, {OTHERS_SOUND}, m.key_mode, e.data
    FROM {{message}} m INDEXED BY {{message:ready}} CROSS JOIN {{envelope}} e ON e.seq = m.seq
    WHERE m.queue = ? AND m.state = {READY} ORDER BY m.priority DESC, m.position, m.id LIMIT ?"""
_STILL_LEASED = f"""
    SELECT {COLUMNS}, e.data
    FROM json_each(?) j CROSS JOIN {{message}} m INDEXED BY {{message:id}} CROSS JOIN {{envelope}} e ON e.seq = m.seq
    WHERE m.queue = ? AND m.id = j.value AND m.state = {LEASED} AND m.nonce = ? ORDER BY j.key"""
_REARM = "UPDATE {message} SET nonce = ?, lease_end_ms = ? WHERE seq = ?"
_DELIVERIES = Record.__struct_fields__.index("deliveries")
_RATE_OLD = "DELETE FROM {rate} WHERE queue = ? AND at_ms <= ? RETURNING count"
_RATE_FIRST = "SELECT min(at_ms) FROM {rate} WHERE queue = ?"
_RATE_LAST = "SELECT max(at_ms) FROM {rate} WHERE queue = ?"
_RATE_CLEAR = "DELETE FROM {rate} WHERE queue = ?"
_CAP_LEASES = """
    UPDATE {message} SET lease_end_ms = ?2 + lease_ms WHERE seq IN (
        SELECT seq FROM {message} INDEXED BY {message:leased}
        WHERE queue = ?1 AND state = {LEASED} AND lease_end_ms > ?2 + ?3 AND lease_end_ms > ?2 + lease_ms LIMIT ?4)"""
_RATE_ADD = """
    INSERT INTO {rate} (queue, at_ms, count) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET count = count + excluded.count"""
_SLEEPER_OUT = "DELETE FROM {sleeper} WHERE queue = ? AND name = ?"
_SLEEPER_IN = "INSERT INTO {sleeper} (queue, name, until_ms) VALUES (?, ?, ?)"
_SLEEPERS_OLD = "DELETE FROM {sleeper} WHERE queue = ? AND until_ms <= ?"


def claim(
    records: QueueRecords,
    limit: int,
    operation: Operation,
    nonce: bytes,
    worker: str,
    sleeper: str | None,
    poll_soon_ms: int | None,
    bytes_max: int,
    known: KnownLeases,
) -> tuple[Claimed, list[str]]:
    """Lease up to `limit` messages; a claim that gets fewer registers its worker as a sleeper in the same step."""
    step, now = records.step, records.now
    operation_id = str(operation)
    if sleeper is not None and records.may_have_sleepers:
        step.execute(_SLEEPER_OUT, (records.number, sleeper))
    if poll_soon_ms is not None and records.may_have_sleepers:
        step.execute(_SLEEPER_OUT, (records.number, POLLS_SOON + worker))
    leases: list[Lease] = []
    next_rate_ms, more = None, False
    if not records.paused:
        convert(records)
        promote_due(records, operation_id)
        _reclaim(records, operation_id)
        if lapse(records, operation_id):
            limit = 0  # The next claim ends more of them; none is handed out before.
        if records.groups is not None and records.groups.takes_turns:
            join_again(records, records.groups)
        leases, more = _lease(records, _room(records, limit), bytes_max, nonce, worker, operation_id, known)
        next_rate_ms = _next_rate(records)
        if next_rate_ms is None and records.groups is not None and records.groups.takes_turns:
            next_rate_ms = next_allowed(records, records.groups)
    else:
        lapse(records, operation_id)
    trim_dead(records)
    if sleeper is not None and len(leases) < limit and not more:
        step.execute(_SLEEPERS_OLD, (records.number, now))
        records.may_have_sleepers = True
        step.execute(_SLEEPER_IN, (records.number, sleeper, now + SLEEPER_TTL_MS))
        records.numbers["sleepers_known_until"] = now + SLEEPER_TTL_MS
    if poll_soon_ms and len(leases) < limit and not more:
        records.may_have_sleepers = True
        step.execute(_SLEEPER_IN, (records.number, POLLS_SOON + worker, now + min(poll_soon_ms, POLL_SOON_MS_MAX)))
    return _claimed(records, leases, next_rate_ms, more), [lease.id for lease in leases]


def claim_again(records: QueueRecords, ids: list[str], held: bytes, nonce: bytes) -> Claimed:
    """Return the result of a repeated claim: the leases that still have its nonce, renewed; nothing is counted."""
    rows = records.step.execute(_STILL_LEASED, (as_list(ids), records.number, held)).fetchall()
    leases = []
    for row in rows:
        record = Record(*row[:-1])
        record.nonce, record.lease_end_ms = nonce, records.now + record.lease_ms
        records.step.execute(_REARM, (nonce, record.lease_end_ms, record.seq))
        records.moments_changed = True
        leases.append(_lease_of(record, row[-1]))
    return _claimed(records, leases, None, bool(leases))


def _claimed(records: QueueRecords, leases: list[Lease], next_rate_ms: int | None, more: bool) -> Claimed:
    return Claimed(
        leases, next_moment(records), records.next_lease(), next_rate_ms, records.paused, 0, records.policy.lease_ms,
        more, damaged=tuple(records.damaged), grouped=records.policy.grouped,
    )  # fmt: skip


def promote_due(records: QueueRecords, operation: str | None) -> None:
    """Make due timers ready, a bounded number."""
    due_in = records.next_due()
    if due_in is None or due_in > 0:
        return
    for row in usable(records, records.step.execute(_DUE, (records.number, records.now, PROMOTE_MAX)).fetchall()):
        record = records.hold(row)
        make_claimable(records, record, record.ready_ms)
        records.note("promoted", operation, record, cause="due")
    records.flush_and_forget()


def _reclaim(records: QueueRecords, operation: str) -> None:
    at_start, now, lease_ms = records.at_start, records.now, records.policy.lease_ms
    last_ms = now + (lease_ms or 0) + 1 if at_start is None else at_start.lease_end_last_ms
    if last_ms is None:
        return
    if lease_ms is not None and (type(last_ms) is not int or last_ms > now + lease_ms):
        # A lease that ends later than now plus its own length was given before the clock was set back.
        records.step.execute(_CAP_LEASES, (records.number, now, lease_ms, RECLAIM_MAX))
        records.moments_changed = True
    elif at_start is not None and at_start.lease_end_ms is not None and at_start.lease_end_ms > now:
        return
    rows = usable(records, records.step.execute(_EXPIRED, (records.number, records.now, RECLAIM_MAX)).fetchall())
    expired = [records.hold(row) for row in rows]
    records.load_holders([record.key for record in expired if record.key is not None])
    for record in expired:
        if ends_otherwise(records, record, operation, "expired"):
            continue
        records.count_up("expired")
        records.note_run("expired", operation, record)
        to_head(records, record, record.lease_end_ms or 0, "expired")
    records.flush_and_forget()


def _room(records: QueueRecords, limit: int) -> int:
    """Return how many may be leased now."""
    policy, room = records.policy, limit
    if policy.max_running is not None:
        room = min(room, max(0, policy.max_running - records.numbers["leased"]))
    if policy.rate_count is not None and policy.rate_per_ms is not None:
        old = records.step.execute(_RATE_OLD, (records.number, records.now - policy.rate_per_ms)).fetchall()
        records.numbers["rate_sum"] -= sum(count for (count,) in old)
        allowed = policy.rate_count - records.numbers["rate_sum"]
        last = records.step.execute(_RATE_LAST, (records.number,)).fetchone()[0]
        if last is not None and last > records.now:
            # The clock was set back. The whole window counts from now on, not only when the clock has reached the old
            # time.
            records.step.execute(_RATE_CLEAR, (records.number,))
            records.step.execute(_RATE_ADD, (records.number, records.now, records.numbers["rate_sum"]))
        room = min(room, max(0, allowed))
    return room


def _next_rate(records: QueueRecords) -> int | None:
    """Return the time until the rate allows another message; None if it allows one now."""
    policy = records.policy
    if policy.rate_count is None or policy.rate_per_ms is None or records.numbers["rate_sum"] < policy.rate_count:
        return None
    first: int = records.step.execute(_RATE_FIRST, (records.number,)).fetchone()[0]
    return first + policy.rate_per_ms - records.now


def _lease(
    records: QueueRecords, room: int, bytes_max: int, nonce: bytes, worker: str, operation: str, known: KnownLeases
) -> tuple[list[Lease], bool]:
    """Lease messages in order, up to the first that does not fit; return also whether there is one."""
    if records.groups is not None and records.groups.takes_turns:
        return _lease_in_turn(records, records.groups, room, bytes_max, nonce, worker, operation, known)
    if records.policy.lease_ms is not None and records.groups is None:
        found = _fitting_plain(records, room, bytes_max)
        if found is not None:
            rows, more = found
            return (_lease_plain(records, rows, nonce, worker, operation, known) if rows else []), more
    leases: list[Lease] = []
    buried: int | None = 0
    left, more = bytes_max, False
    # A round removes its messages from the ready ones, so the next one continues after them.
    while len(leases) < room and buried is not None and not more:
        first, left, more = _fitting(records, room - len(leases), left, started=bool(leases))
        if not first:
            break
        rows = usable(records, first)
        buried = _lease_round(records, rows, buried, leases, nonce, worker, operation)
        more = more and buried is not None
        records.flush_and_forget()
    _count_rate(records, len(leases))
    return leases, more


def _lease_in_turn(
    records: QueueRecords,
    groups: Grouping,
    room: int,
    left: int,
    nonce: bytes,
    worker: str,
    operation: str,
    known: KnownLeases,
) -> tuple[list[Lease], bool]:
    """The same in a queue that takes turns between groups."""
    leases: list[Lease] = []
    buried = 0
    limit = records.policy.max_deliveries
    while True:
        groups.flush()
        turns = Turns(records, groups, room - len(leases), left, started=bool(leases))
        turns.plan()
        data = _bodies(records, turns.rows)
        if len(data) < len(turns.rows) or (turns.rows and not _are_plain(turns.rows, limit)):
            turns = Turns(records, groups, room - len(leases), left, started=bool(leases))
            turns.plan(is_sound=lambda row, data=data: row[0] in data and _are_plain([row], limit))  # type: ignore[misc]
            data = _bodies(records, turns.rows)
        left = turns.left
        turns.write(counted=records.policy.lease_ms is not None)
        if turns.rows and records.policy.lease_ms is None:
            seqs = as_list([row[0] for row in turns.rows])
            rows = records.step.execute(_ROWS_LISTED, (seqs,)).fetchall()
            _lease_round(records, rows, 0, leases, nonce, worker, operation)
            records.flush_and_forget()
            _count_rate(records, len(rows))
        elif turns.rows:
            rows = [(*row, data[row[0]]) for row in turns.rows]
            leases += _lease_plain(records, rows, nonce, worker, operation, known)
        if turns.odd is None:
            return leases, turns.more
        (row,) = records.step.execute(_ROW_WITH_LENGTH, (turns.odd,)).fetchall()
        if usable(records, [row]):
            if buried == BURY_MAX:
                return leases, False
            buried += 1
            bury(records, records.hold(row[:-1]), "max_deliveries", operation)
            records.flush_and_forget()


def _bodies(records: QueueRecords, rows: list[tuple[Any, ...]]) -> dict[int, bytes]:
    """Return the envelopes of these messages by their rows, for those with valid values."""
    found = records.step.execute(_DATA_LISTED, (as_list([row[0] for row in rows]),)) if rows else ()
    return {seq: data for seq, data in found if type(data) is bytes}


def _count_rate(records: QueueRecords, leased: int) -> None:
    if leased and records.policy.rate_count is not None:
        records.step.execute(_RATE_ADD, (records.number, records.now, leased))
        records.numbers["rate_sum"] += leased


def _fitting_plain(records: QueueRecords, room: int, left: int) -> tuple[list[tuple[Any, ...]], bool] | None:
    """Return the first ready messages that fit, and whether one did not; None if one needs more than a lease."""
    rows: list[tuple[Any, ...]] = []
    more = False
    for row in records.step.execute(_READY_PLAIN, (records.number, room)):
        data = row[-1]
        if type(data) is not bytes:
            return None
        left -= len(data)
        if left < 0 and rows:
            more = True
            break
        rows.append(row)
    return None if rows and not _are_plain(rows, records.policy.max_deliveries) else (rows, more)


def _are_plain(rows: list[tuple[Any, ...]], deliveries_max: int | None) -> bool:
    """Return whether all can be leased and have valid values: the same checks as `is_sound`, but column by column."""
    columns = list(zip(*rows, strict=True))
    priorities, tokens, deliveries, causes, others = columns[2], columns[6], columns[7], columns[11], columns[13]
    return (
        all(set(map(type, values)) == {int} for values in columns[2:9])
        and all(set(map(type, values)) <= {str, NoneType} for values in columns[9:13])
        and set(others) == {1}
        and (deliveries_max is None or max(deliveries) < deliveries_max)
        and 0 <= min(priorities) <= max(priorities) <= PRIORITY_MAX
        and (
            not any(tokens)
            or all(cause in REDELIVERY_CAUSES for token, cause in zip(tokens, causes, strict=True) if token)
        )
    )


def _lease_plain(
    records: QueueRecords, rows: list[tuple[Any, ...]], nonce: bytes, worker: str, operation: str, known: KnownLeases
) -> list[Lease]:
    """Lease messages that need no further decision, all at once."""
    now, policy, count = records.now, records.policy, len(rows)
    assert policy.lease_ms is not None
    end_ms = now + policy.lease_ms
    seqs, ids, priorities, ready, _, sizes, tokens, deliveries, attempts, keys, groups, causes, chains, _, modes, _ = (
        zip(*rows, strict=True)
    )
    leased = (nonce, worker, now, end_ms, policy.lease_ms)
    _lease_rows(records, leased, seqs)
    if any(modes):
        records.step.execute(_FREE_KEYS, (as_list(seqs),))
    records.new_leases_end_ms = end_ms
    numbers = records.numbers
    numbers["ready"] -= count
    numbers["leased"] += count
    if not any(tokens):
        numbers["first_claims"] += count
    else:
        for token, cause in zip(tokens, causes, strict=True):
            numbers[f"again_{cause}" if token else "first_claims"] += 1
    records.count_up("claims", count)
    tokens = tuple([token + 1 for token in tokens])
    deliveries = tuple([number + 1 for number in deliveries])
    if not any(keys) and not any(chains):
        fields = (seqs, tokens, priorities, groups, deliveries, attempts, sizes, repeat(now), repeat(worker))
        known.keep(nonce, ids, zip(*fields, strict=False))
    waits = [now - ready_ms for ready_ms in ready]
    records.count_waits(sum(waits) if min(waits) >= 0 else sum(max(0, wait) for wait in waits), max(0, *waits))
    records.note_many(
        "claimed", operation, ids, key=keys, group=groups, priority=priorities, token=tokens, deliveries=deliveries,
        attempts=attempts, worker=worker, cause=causes,
        wait_ms=waits, size=sizes, chain_id=chains,
    )  # fmt: skip
    _count_rate(records, count)
    return [
        Lease(
            id, token + 1, nonce, delivered + 1, failed, priority, key, group, published_ms, ready_ms, now, end_ms,
            data, chain,
        )
        for (
            _, id, priority, ready_ms, published_ms, _, token, delivered, failed, key, group, _, chain, _, _, data,
        ) in rows
    ]  # fmt: skip


def _fitting(records: QueueRecords, room: int, left: int, *, started: bool) -> tuple[list[tuple[Any, ...]], int, bool]:
    """Return the first ready messages that fit, and whether one did not; None if one needs more than a lease."""
    rows: list[tuple[Any, ...]] = []
    limit = records.policy.max_deliveries
    for row in records.step.execute(_READY, (records.number, room)):
        if not is_sound(row):
            rows.append(row)  # to be set aside
            continue
        if limit is None or row[_DELIVERIES] < limit:
            left -= len(row[-1])
            if left < 0 and started:
                return rows, left, True
            started = True
        rows.append(row)
    return rows, left, False


def _lease_round(
    records: QueueRecords,
    rows: list[tuple[Any, ...]],
    buried: int | None,
    leases: list[Lease],
    nonce: bytes,
    worker: str,
    operation: str,
) -> int | None:
    """Lease these messages, or bury those above their limit; return how many were buried so far, None to stop."""
    now, policy, numbers = records.now, records.policy, records.numbers
    claims = total_wait = longest_wait = 0
    leased: list[int] = []
    freed: list[int] = []
    lease_end_ms = None if policy.lease_ms is None else now + policy.lease_ms
    for row in rows:
        record = records.hold(row[:-1])
        if policy.max_deliveries is not None and record.deliveries >= policy.max_deliveries:
            if buried is None or buried == BURY_MAX:
                buried = None
                break
            buried += 1
            bury(records, record, "max_deliveries", operation)
            continue
        claims += 1
        wait = max(0, now - record.ready_ms)
        total_wait += wait
        longest_wait = max(longest_wait, wait)
        numbers["first_claims" if record.token == 0 else f"again_{record.cause}"] += 1
        record.token += 1
        record.deliveries += 1
        record.nonce, record.worker, record.claimed_ms, record.lease_end_ms = nonce, worker, now, lease_end_ms
        records.note("claimed", operation, record, worker=worker, wait_ms=now - record.ready_ms, cause=record.cause)
        leases.append(_lease_of(record, row[-1]))
        if lease_end_ms is None:
            end(records, record, "done", operation, cause="at_most_once")
            continue
        if record.key_mode == UNTIL_CLAIMED:
            freed.append(record.seq)
        if records.groups is None:
            records.move(record, LEASED)
            leased.append(record.seq)
        else:
            # The message may get its rank here, so its whole row is written.
            record.lease_ms = policy.lease_ms or 0
            records.move(record, LEASED)
            records.touch(record)
    if claims:
        records.count_up("claims", claims)
        records.count_waits(total_wait, longest_wait)
    if leased:
        _lease_rows(records, (nonce, worker, now, lease_end_ms, policy.lease_ms), leased)
    if freed:
        records.step.execute(_FREE_KEYS, (as_list(freed),))
    return buried


def _lease_rows(records: QueueRecords, written: tuple[Any, ...], seqs: Sequence[int]) -> None:
    ranges = consecutive(seqs)
    if is_scattered(ranges):
        records.step.execute(_LEASE_LISTED, (*written, as_list(seqs)))
    else:
        records.step.execute_many(_LEASE, [(*written, first, last) for first, last in ranges])


def _lease_of(r: Record, envelope: bytes) -> Lease:
    return Lease(
        r.id, r.token, r.nonce, r.deliveries, r.attempts, r.priority, r.published_key, r.group,
        r.published_ms, r.ready_ms, r.claimed_ms or 0, r.lease_end_ms, envelope, r.chain,
    )  # fmt: skip
