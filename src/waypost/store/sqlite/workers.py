"""The list of workers: one row for each, written by itself; expired rows are deleted by heartbeats."""

from __future__ import annotations

from waypost import policy
from waypost.policy import WORKERS_SWEPT_MAX
from waypost.store.register import registered
from waypost.store.sqlite.step import Step
from waypost.values import Requested, WorkerRecord, WorkerRequest

_UPDATE = "UPDATE {worker} SET record = ?, at_ms = ?, until_ms = ? WHERE name = ?"
_INSERT = "INSERT INTO {worker} (record, at_ms, until_ms, name) VALUES (?, ?, ?, ?)"
_SWEEP = """
    DELETE FROM {worker} WHERE rowid IN (
        SELECT rowid FROM {worker} INDEXED BY {worker:until} WHERE until_ms <= ? ORDER BY until_ms LIMIT ?)"""
_CUT = """
    DELETE FROM {worker} WHERE rowid IN (
        SELECT rowid FROM {worker} INDEXED BY {worker:until} WHERE name <> ? AND until_ms > 0 ORDER BY until_ms, name
        LIMIT max(0, (SELECT count(*) FROM {worker}) - ?))"""
_UNREGISTER = "DELETE FROM {worker} WHERE name = ?"
_WORKERS = """
    SELECT name, record, at_ms, until_ms, request, request_ms FROM {worker} WHERE until_ms > ? ORDER BY name LIMIT ?"""
_REQUEST = "UPDATE {worker} SET request = ?, request_ms = ? WHERE name = ? AND until_ms > ?"
_REQUESTED = "SELECT request, request_ms FROM {worker} WHERE name = ? AND request IS NOT NULL"


def heartbeat(step: Step, name: str, record: bytes, ttl_ms: int) -> int:
    """Store a worker until its expiry; if there are too many, delete those that expire first. Returns store time."""
    row = (record, step.now, step.now + ttl_ms, name)
    known = step.execute(_UPDATE, row).rowcount > 0
    # After its own renewal: so a worker that is late keeps the request that was made to it.
    step.execute(_SWEEP, (step.now, WORKERS_SWEPT_MAX))
    if not known:
        step.execute(_INSERT, row)
        step.execute(_CUT, (name, policy.WORKERS_MAX))
    return step.now


def unregister(step: Step, name: str) -> bool:
    """Remove a worker at once; return whether it was registered."""
    return step.execute(_UNREGISTER, (name,)).rowcount > 0


def request(step: Step, name: str, wanted: WorkerRequest) -> bool:
    """Request something of a worker; return whether there is one of this name."""
    return step.execute(_REQUEST, (wanted, step.now, name, step.now)).rowcount > 0


def requested(step: Step, name: str) -> Requested | None:
    """Return the last request to a worker."""
    row = step.execute(_REQUESTED, (name,)).fetchone()
    return None if row is None else Requested(*row)


def workers(step: Step) -> list[WorkerRecord]:
    """Return the workers that have not expired, by name."""
    return [registered(*row) for row in step.execute(_WORKERS, (step.now, policy.WORKERS_MAX))]
