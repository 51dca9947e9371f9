"""Deliveries of an overloaded queue whose workers crash and are started again, as a store would journal them."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

from waypost.spark.insight.history import Delivery

LEASE_MS = 60_000
RUN_MS = 2_000
#: Workers crash so often, and are started again after this time.
CRASH_EVERY_MS = 90_000
RESTART_MS = 20_000


def overloaded_deliveries(
    *, workers: int = 2, slots: int = 2, seconds: int = 900, load: float = 1.1, crashes: bool = True, seed: int = 0
) -> list[Delivery]:
    """Return the deliveries of messages that come a little faster than all workers together can run them."""
    random, found = Random(seed), list[Delivery]()
    gap = RUN_MS / (workers * slots) / load
    waiting: list[tuple[int, int, str, int]] = []  # given back first, then by age: order, ready, id, claim
    pending = [(round(number * gap), 1, f"m{number:06}", 1) for number in range(round(seconds * 1000 / gap))]
    pending.sort(reverse=True)
    back: list[tuple[int, str, int]] = []
    #: Each slot: when it is free, its worker's number and life, and when that worker crashes.
    free = [(0, worker, 0, slot) for worker in range(workers) for slot in range(slots)]
    crash_at = {
        (worker, life): 30_000 + worker * 45_000 + life * (CRASH_EVERY_MS + RESTART_MS) if crashes else 2**60
        for worker in range(workers) for life in range(1 + seconds * 1000 // CRASH_EVERY_MS)
    }  # fmt: skip
    while (pending or waiting or back) and free:
        now, worker, life, slot = heappop(free)
        if now >= seconds * 1000:
            break
        if now >= crash_at[worker, life]:
            heappush(free, (crash_at[worker, life] + RESTART_MS, worker, life + 1, slot))
            continue
        while pending and pending[-1][0] <= now:
            ready, order, name, claim = pending.pop()
            heappush(waiting, (order, ready, name, claim))
        while back and back[0][0] <= now:
            ready, name, claim = heappop(back)
            heappush(waiting, (0, ready, name, claim))
        if not waiting:
            upcoming = [pending[-1][0]] if pending else []
            upcoming += [back[0][0]] if back else []
            heappush(free, (max(now + 1, min(upcoming)), worker, life, slot))
            continue
        _, ready, name, claim = heappop(waiting)
        run = round(RUN_MS * random.uniform(0.5, 1.5))
        holder, crash = f"host:{worker}:{life}", crash_at[worker, life]
        if now + run > crash:
            heappush(back, (now + LEASE_MS, name, claim + 1))
            found.append(Delivery(name, claim, holder, 5, None, None if claim == 1 else "expired", now, now - ready,
                                  "expired", now + LEASE_MS, LEASE_MS))  # fmt: skip
            heappush(free, (crash + RESTART_MS, worker, life + 1, slot))
            continue
        found.append(Delivery(name, claim, holder, 5, None, None if claim == 1 else "expired", now, now - ready, "done",
                              now + run, run))  # fmt: skip
        heappush(free, (now + run, worker, life, slot))
    return found
