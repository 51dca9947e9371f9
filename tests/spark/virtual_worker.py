"""A worker on a manual clock: a real store journals a history of hours in seconds, the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Self

from waypost import Waypost
from waypost.identity import Session
from waypost.store.opening import open_store
from waypost.testing.clock import ClockTime, ManualClock
from waypost.values import Lease, Settlement


@dataclass(frozen=True, slots=True)
class Planned:
    """A message: when it is published, in seconds from the beginning, and with what."""

    at: float
    body: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    #: It is published by triggering this schedule.
    schedule: str | None = None


#: What a handler does: how many seconds it runs, and how it ends, as the fields of a settlement.
Handled = tuple[float, dict[str, Any]]
#: Gets the planned message, the number of its delivery, and how many were under way.
Handler = Callable[[Planned, int], Handled]


class VirtualWorker:
    """One queue of a store, and a worker with some slots that does not renew its leases."""

    def __init__(
        self,
        url: str,
        queue: str = "orders",
        *,
        slots: int = 4,
        clock: ManualClock | None = None,
        namespace: str = "wp",
    ) -> None:
        self.clock = clock or ManualClock()
        self.url, self.queue, self.slots = url, queue, slots
        self.post = Waypost(url, namespace=namespace, clock=self.clock)
        self._store = open_store(url, namespace=namespace, clock=self.clock, replay_ttl_ms=300_000, durability="server")
        self._session = Session(ClockTime(self.clock))
        self._planned: dict[str, Planned] = {}

    def __enter__(self) -> Self:
        self.post.open()
        self._executor = self._store.connect(start_timeout=20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.close()
        self.post.close()

    def run(self, plan: Iterable[Planned], handler: Handler, *, until: float | None = None) -> None:
        """Publish and handle, until nothing is left or for so many seconds."""
        begin = self.clock()
        left = sorted(plan, key=lambda one: one.at, reverse=True)
        ends: list[tuple[int, int, Lease, dict[str, Any]]] = []
        count = 0
        while True:
            now = self.clock()
            self._settle(ends, now)
            self._publish(left, begin, now)
            claimed = self._claim(self.slots - len(ends))
            for lease in claimed.leases:
                seconds, how = handler(self._planned[lease.id], lease.deliveries)
                count += 1
                heappush(ends, (now + round(seconds * 1000), count, lease, how))
            moments = [begin + round(left[-1].at * 1000)] if left else []
            moments += [ends[0][0]] if ends else []
            full = len(ends) >= self.slots
            moments += [now + ms for ms in (claimed.next_due_ms, claimed.next_lease_ms) if ms is not None and not full]
            if not moments or (until is not None and min(moments) > begin + until * 1000):
                return
            self.clock.advance_ms(max(1, min(moments) - now))

    def _settle(self, ends: list[tuple[int, int, Lease, dict[str, Any]]], now: int) -> None:
        settlements = []
        while ends and ends[0][0] <= now:
            _, _, lease, how = heappop(ends)
            settlements.append(Settlement(lease.id, lease.token, lease.nonce, **how))
        if settlements:
            self._executor.run(self._store.settle(self.queue, settlements, self._session.operation(self.queue)))

    def _publish(self, left: list[Planned], begin: int, now: int) -> None:
        batch: list[Planned] = []
        while left and begin + round(left[-1].at * 1000) <= now:
            batch.append(left.pop())
        for one in batch:
            if one.schedule is not None:
                self._planned[self.post.trigger_schedule(one.schedule).id] = one
        for options in _distinct([one.options for one in batch if one.schedule is None]):
            alike = [one for one in batch if one.schedule is None and one.options == options]
            published = self.post.publish_many(self.queue, [one.body for one in alike], **options)
            for one, result in zip(alike, published, strict=True):
                self._planned[result.id] = one

    def _claim(self, limit: int) -> Any:
        call = self._store.claim(self.queue, max(0, limit), self._session.operation(self.queue), worker="w1")
        return self._executor.run(call)


def _distinct(options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in options:
        if one not in found:
            found.append(one)
    return found
