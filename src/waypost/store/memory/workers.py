"""The register of workers with a recent heartbeat."""

from __future__ import annotations

from waypost import policy
from waypost.store.register import registered
from waypost.values import RegisteredWorker


class Register:
    """Records by worker, each with when it came and until when it counts."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, int, int]] = {}

    def heartbeat(self, now: int, name: str, record: bytes, ttl_ms: int) -> int:
        """Remember a worker for a while. A full register forgets whose time ends first. The store's time."""
        self._records[name] = (record, now, now + ttl_ms)
        for gone in [name for name, (_, _, until) in self._records.items() if until <= now]:
            del self._records[gone]
        if len(self._records) > policy.WORKERS_MAX:
            others = (other for other in self._records if other != name)
            del self._records[min(others, key=lambda other: (self._records[other][2], other))]
        return now

    def unregister(self, name: str) -> bool:
        """Forget a worker at once; whether it was known."""
        return self._records.pop(name, None) is not None

    def workers(self, now: int) -> list[RegisteredWorker]:
        """Those whose time has not ended, by name."""
        return [
            registered(name, record, at, until)
            for name, (record, at, until) in sorted(self._records.items())
            if until > now
        ]
