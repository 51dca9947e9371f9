"""The workers with a recent heartbeat."""

from __future__ import annotations

from waypost import policy
from waypost.store.register import registered
from waypost.values import WorkerRecord


class Register:
    """Records by worker, each with its arrival and expiry."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, int, int]] = {}

    def heartbeat(self, now: int, name: str, record: bytes, ttl_ms: int) -> int:
        """Keep a worker until its expiry; if there are too many, remove those that expire first. Returns store time."""
        self._records[name] = (record, now, now + ttl_ms)
        for gone in [name for name, (_, _, until) in self._records.items() if until <= now]:
            del self._records[gone]
        if len(self._records) > policy.WORKERS_MAX:
            others = (other for other in self._records if other != name)
            del self._records[min(others, key=lambda other: (self._records[other][2], other))]
        return now

    def unregister(self, name: str) -> bool:
        """Remove a worker at once; return whether it was registered."""
        return self._records.pop(name, None) is not None

    def workers(self, now: int) -> list[WorkerRecord]:
        """Return the workers that have not expired, by name."""
        return [
            registered(name, record, at, until)
            for name, (record, at, until) in sorted(self._records.items())
            if until > now
        ]
