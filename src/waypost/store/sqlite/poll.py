"""Poll: whether a claim of any of these queues may return messages, for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waypost.policy import DEFAULT_POLICY, SLEEPER_TTL_MS
from waypost.store.port import Idle, Registration
from waypost.store.sqlite import schedules, workers
from waypost.store.sqlite.queue_records import as_list, read_policy
from waypost.store.sqlite.step import Step
from waypost.store.sqlite.turns import limited_until
from waypost.store.sqlite.turns import needs_claim as needs_claim_for_groups
from waypost.values import Polled, PolledQueue

_POLL = """
    SELECT q.number, q.policy, q.paused, q.ready, q.dead_kept, s.until_ms,
        (SELECT min(m.ready_ms) FROM {message} m INDEXED BY {message:delayed}
            WHERE m.queue = q.number AND m.state = {DELAYED}),
        (SELECT min(m.lease_end_ms) FROM {message} m INDEXED BY {message:leased}
            WHERE m.queue = q.number AND m.state = {LEASED}),
        (SELECT min(m.expires_ms) FROM {message} m INDEXED BY {message:expires}
            WHERE m.queue = q.number AND m.expires_ms IS NOT NULL AND m.state <> {LEASED} AND m.state < {DEAD})
    FROM json_each(?) j LEFT JOIN {queue} q ON q.name = json_extract(j.value, '$[0]')
        LEFT JOIN {sleeper} s ON s.queue = q.number AND s.name = json_extract(j.value, '$[1]')
    ORDER BY j.key"""
_OLDEST_DEAD = "SELECT min(ended_ms) FROM {message} INDEXED BY {message:dead} WHERE queue = ? AND state = {DEAD}"
_RENEW = """
    UPDATE {sleeper} SET until_ms = ? WHERE (queue, name) IN (
        SELECT json_extract(j.value, '$[0]'), json_extract(j.value, '$[1]') FROM json_each(?) j)"""
_KNOWN = """
    UPDATE {queue} SET sleepers_known_until = ? WHERE number IN (
        SELECT json_extract(j.value, '$[0]') FROM json_each(?) j)"""


def poll(step: Step, idle: Sequence[Idle], registration: Registration | None, record: bytes) -> Polled:
    """Poll all of these queues, and renew the registrations of their sleepers."""
    elected = requested = None
    if registration is not None:
        workers.heartbeat(step, registration.heartbeat.name, record, registration.ttl_ms)
        requested = workers.requested(step, registration.heartbeat.name)
        if registration.role is not None:
            elected = schedules.elect(step, registration.role, registration.heartbeat.name, registration.role_ttl_ms)
    named = as_list([(one.queue, one.sleeper) for one in idle])
    rows = step.execute(_POLL, (named,)).fetchall() if idle else []
    renewed: list[tuple[int, str]] = []
    queues = [_polled(step, one, row, renewed) for one, row in zip(idle, rows, strict=True)]
    if renewed:
        until_ms, which = step.now + SLEEPER_TTL_MS, as_list(renewed)
        step.execute(_RENEW, (until_ms, which))
        step.execute(_KNOWN, (until_ms, which))
    return Polled(queues, step.now, elected, requested)


def _polled(step: Step, idle: Idle, row: tuple[Any, ...], renewed: list[tuple[int, str]]) -> PolledQueue:
    number, policy_text, paused, ready, dead_kept, until, due, end, expiry = row
    due = min((at for at in (due, expiry) if at is not None), default=None)
    if number is None:
        return PolledQueue(idle.sleeper is not None, None, None, DEFAULT_POLICY.lease_ms)
    now, policy = step.now, read_policy(policy_text)
    if policy.grouped:
        records = step.queue_for_reading(idle.queue)
        if records.groups is not None and records.groups.takes_turns:
            ready = needs_claim_for_groups(records)
            due = min((at for at in (due, limited_until(records)) if at is not None), default=None)
    if paused:
        ready, due, end = 0, expiry, None
    needs_claim = ready > 0 or any(at is not None and at <= now for at in (due, end))
    # A claim shortens leases from before the clock was set back.
    needs_claim = needs_claim or (end is not None and policy.lease_ms is not None and end - now > policy.lease_ms)
    if not needs_claim and policy.dead_keep_ms is not None and dead_kept:
        oldest = step.execute(_OLDEST_DEAD, (number,)).fetchone()[0]
        needs_claim = oldest is not None and oldest <= now - policy.dead_keep_ms
    if idle.sleeper is not None:
        needs_claim = needs_claim or until is None or until <= now
        if until is not None and now < until < now + SLEEPER_TTL_MS // 2:
            renewed.append((number, idle.sleeper))
    return PolledQueue(needs_claim, _from_now(due, now), _from_now(end, now), policy.lease_ms)


def _from_now(at: int | None, now: int) -> int | None:
    return None if at is None else max(0, at - now)
