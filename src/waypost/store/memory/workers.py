"""The workers with a recent heartbeat."""

from __future__ import annotations

from waypost import policy
from waypost.store.register import registered
from waypost.values import Requested, WorkerRecord, WorkerRequest


class Register:
    """Records by worker, each with its arrival and expiry, and what was requested of workers."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, int, int]] = {}
        self._requests: dict[str, Requested] = {}

    def heartbeat(self, now: int, name: str, record: bytes, ttl_ms: int) -> int:
        """Keep a worker until its expiry; if there are too many, remove those that expire first. Returns store time."""
        self._records[name] = (record, now, now + ttl_ms)
        for gone in [name for name, (_, _, until) in self._records.items() if until <= now]:
            self.unregister(gone)
        if len(self._records) > policy.WORKERS_MAX:
            others = (other for other in self._records if other != name)
            self.unregister(min(others, key=lambda other: (self._records[other][2], other)))
        return now

    def unregister(self, name: str) -> bool:
        """Remove a worker at once; return whether it was registered."""
        self._requests.pop(name, None)
        return self._records.pop(name, None) is not None

    def request(self, now: int, name: str, request: WorkerRequest) -> bool:
        """Request something of a worker; return whether there is one of this name."""
        if self._records.get(name, (b"", 0, 0))[2] <= now:
            return False
        self._requests[name] = Requested(request, now)
        return True

    def requested(self, name: str) -> Requested | None:
        """Return what was requested of a worker last."""
        return self._requests.get(name)

    def workers(self, now: int) -> list[WorkerRecord]:
        """Return the workers that have not expired, by name."""
        found = []
        for name, (record, at, until) in sorted(self._records.items()):
            if until > now:
                known = self._requests.get(name)
                request = (None, None) if known is None else (known.request, known.at_ms)
                found.append(registered(name, record, at, until, *request))
        return found
