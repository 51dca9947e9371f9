"""The recorded history of one queue, in the form that the model serves: arrivals, workers, and what it draws from.

Everything is found from deliveries: a message was claimable `wait_ms` before it was claimed, and a worker that lets
messages wait has no free slot. So the number of slots is what each worker used while messages waited, from its first
claim to its last end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import heappop, heappush, nsmallest
from random import Random
from typing import Final, NamedTuple

from waypost.policy import DEFAULT_POLICY, PRIORITY_DEFAULT, UNWOKEN_POLL_SECONDS, PolicyRecord
from waypost.spark.insight.queue_model import UNKNOWN, Arrival, Attempt, AttemptEnd, Capacity, Settings, Surroundings

#: Recorded waits beside free slots that are kept to draw from, and attempts after each error.
DRAWN_MAX: Final = 10_000
#: Attempts after an error of a type are drawn from if there are so many of them, otherwise those of all types.
DRAWN_OF_TYPE_MIN: Final = 20
#: A worker that ended this shortly before the history is taken to go on.
GOES_ON_MS: Final = 60_000
#: A worker is taken to be there for so long after its last end: it had to look for work to learn that there is none.
IDLE_MS: Final = 1_000
#: A message that is claimable for longer than a moment finds no free slot. Below this time of waiting in all, a worker
#: was never full. While messages wait, the slots are in use for the usual share of the time and fewer hardly ever;
#: otherwise no more than the slots are in use for the full share of it.
MOMENT_MS: Final = 100
WAITING_MS_MIN: Final = 1_000
USUAL_SHARE: Final = 0.6
FEWER_SHARE: Final = 0.1
FULL_SHARE: Final = 0.9
#: A worker with a free slot sees a message after this time at the latest: the poll without notifications, and a fifth.
PICKUP_MS_MAX: Final = round(UNWOKEN_POLL_SECONDS * 1200)
#: A dependence of run times on the load is used from these on: deliveries, at a level, levels, the effect, and by how
#: many of its standard errors the slope differs from 0.
SLOWDOWN_RUNS_MIN: Final = 200
SLOWDOWN_LEVEL_RUNS_MIN: Final = 20
SLOWDOWN_LEVELS_MIN: Final = 3
SLOWDOWN_EFFECT_MIN: Final = 1.2
SLOWDOWN_SIGNIFICANCE_MIN: Final = 5.0
#: The share of the longest runs that stands for what is beyond the lease.
TAIL_SHARE: Final = 0.1
_FINISHED: Final = frozenset(("done", "dropped", "cancelled", "replaced"))


class Delivery(NamedTuple):
    """A delivery that has ended, with the columns of `silver/deliveries` that the model needs."""

    message_id: str
    claim: int
    worker: str | None
    priority: int | None
    group: str | None
    cause: str | None
    claimed_ms: int
    wait_ms: int
    outcome: str
    ended_ms: int
    run_ms: int
    reason: str | None = None
    error_type: str | None = None
    #: The type of the message; None where messages were not ingested, because the journal does not have it.
    type_name: str | None = None


#: The columns of `silver/deliveries` among them.
RECORDED: Final = Delivery._fields[:-1]


@dataclass(frozen=True, slots=True)
class TypeRuns:
    """What was recorded of the messages of a type; None for those whose type is not known. Times are milliseconds."""

    type_name: str | None
    messages: int
    deliveries: int
    failed: int
    run_p50_ms: float
    run_p95_ms: float
    run_p999_ms: float
    wait_p95_ms: float


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a history: how many slots there were when, and a typical worker."""

    capacity: tuple[Capacity, ...]
    #: The most workers at once, and the slots of a typical one.
    count: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a queue over a period."""

    queue: str
    arrivals: tuple[Arrival, ...]
    #: For each recorded claim, when its message became claimable and how long it waited.
    ready_ms: tuple[int, ...]
    wait_ms: tuple[int, ...]
    workers: Workers
    surroundings: Surroundings
    policy: PolicyRecord = DEFAULT_POLICY
    #: Whether leases were renewed, as far as the run times say.
    renews: bool = True
    pauses: tuple[tuple[int, int], ...] = ()
    #: When messages became claimable that no worker had claimed when the history ended.
    backlog_ms: tuple[int, ...] = ()
    #: The part of the claims whose messages waited while a worker was missing that had crashed.
    crash_share: float = 0.0
    #: By the types of messages, the one with the longest runs first; empty if no type is known.
    types: tuple[TypeRuns, ...] = ()

    @property
    def begin_ms(self) -> int:
        """When the first delivery was claimed: earlier claims are not known."""
        return min((ready + wait for ready, wait in zip(self.ready_ms, self.wait_ms, strict=True)), default=0)

    @property
    def end_ms(self) -> int:
        """When the last delivery was claimed."""
        return max((ready + wait for ready, wait in zip(self.ready_ms, self.wait_ms, strict=True)), default=0)

    def present(self) -> Settings:
        """The settings of the history itself."""
        return Settings(self.workers.capacity, self.policy, renews=self.renews, pauses=self.pauses)


def build_history(
    queue: str,
    deliveries: Iterable[Delivery],
    *,
    policy: PolicyRecord = DEFAULT_POLICY,
    pauses: Sequence[tuple[int, int]] = (),
    never_claimed_ms: Sequence[int] = (),
) -> History:
    """Return the history of a queue from its ended deliveries, in any order."""
    recorded = list(deliveries)
    # In these queues messages wait beside free slots too.
    holds_groups = policy.order is not None or policy.limits_groups
    is_limited = policy.rate_count is not None or policy.max_running is not None or holds_groups
    workers, slots = find_workers(recorded, is_limited=is_limited)
    rows = sorted(without_claims_ahead(recorded, slots), key=lambda row: (row.message_id, row.claim))
    loads = _Load(rows)
    slowdown = find_slowdown([(loads.at_claim(row), row.run_ms) for row in rows if row.outcome == "done"])
    arrivals, followers, followers_by_type = _arrivals(rows, loads)
    lease = policy.lease_ms or DEFAULT_POLICY.lease_ms or 0
    renews = find_renewals(rows, lease)
    claims = sorted(rows, key=lambda row: (row.claimed_ms, row.message_id))
    return History(
        queue, tuple(sorted(arrivals, key=lambda one: one.ready_ms)),
        tuple(row.claimed_ms - row.wait_ms for row in claims), tuple(row.wait_ms for row in claims), workers,
        Surroundings(
            () if policy.rate_count is not None or holds_groups else _pickups(claims, loads, workers.capacity),
            followers,
            () if renews else _long_runs(rows, lease), lease, slowdown, followers_by_type,
        ),
        policy, renews, tuple(pauses), tuple(sorted(never_claimed_ms)),
        find_crash_share(rows, lease) if renews else 0.0, find_types(rows),
    )  # fmt: skip


# ---- messages -----------------------------------------------------------------------------------------------


def _arrivals(
    rows: Sequence[Delivery], loads: _Load
) -> tuple[list[Arrival], dict[str | None, Sequence[Attempt]], dict[tuple[str, str | None], Sequence[Attempt]]]:
    """Return messages with their attempts, and the attempts that followed an error: by it, and by type and error.

    Rows are in order.
    """
    found: list[Arrival] = []
    followers: dict[str | None, list[Attempt]] = defaultdict(list)
    by_type: dict[tuple[str, str | None], list[Attempt]] = defaultdict(list)
    attempts: list[Attempt] = []
    for number, row in enumerate(rows):
        # After a redrive its counts begin anew: it is another message to the queue.
        is_first = number == 0 or rows[number - 1].message_id != row.message_id or row.cause == "redriven"
        if is_first:
            attempts, first = [], row
        following = rows[number + 1] if number + 1 < len(rows) else None
        goes_on = following is not None and following.message_id == row.message_id and following.cause != "redriven"
        attempt = _attempt(row, following if goes_on else None, loads.at_claim(row))
        if attempts and attempts[-1].end == "failed":
            error = attempts[-1].error
            if len(followers[error]) < DRAWN_MAX:
                followers[error].append(attempt)
            if row.type_name is not None and len(by_type[row.type_name, error]) < DRAWN_MAX:
                by_type[row.type_name, error].append(attempt)
        attempts.append(attempt)
        if not goes_on:
            priority = PRIORITY_DEFAULT if first.priority is None else first.priority
            ready = first.claimed_ms - first.wait_ms
            found.append(Arrival(ready, tuple(attempts), priority, first.group, first.type_name))
    of_types: dict[tuple[str, str | None], Sequence[Attempt]] = {
        key: pool for key, pool in by_type.items() if len(pool) >= DRAWN_OF_TYPE_MIN
    }
    return found, dict(followers), of_types


def find_types(rows: Iterable[Delivery]) -> tuple[TypeRuns, ...]:
    """Return what was recorded by the types of messages; nothing if no type is known."""
    by_type: dict[str | None, list[Delivery]] = defaultdict(list)
    for row in rows:
        by_type[row.type_name].append(row)
    if not by_type.keys() - {None}:
        return ()
    found = []
    for name, own in by_type.items():
        runs, waits = sorted(row.run_ms for row in own if row.outcome == "done"), sorted(row.wait_ms for row in own)
        found.append(
            TypeRuns(
                name, len({row.message_id for row in own}), len(own), sum(row.error_type is not None for row in own),
                _share_of(runs, 0.5), _share_of(runs, 0.95), _share_of(runs, 0.999), _share_of(waits, 0.95),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.run_p95_ms, one.type_name or "")))


def _share_of(ordered: Sequence[int], share: float) -> float:
    """Return the value that this share of the values does not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _attempt(row: Delivery, following: Delivery | None, load: int) -> Attempt:
    pause = UNKNOWN if following is None else max(0, following.claimed_ms - following.wait_ms - row.ended_ms)
    end: AttemptEnd = "done"
    if row.outcome == "retried" or (row.outcome == "dead" and row.reason == "retries_exhausted"):
        end = "failed"
    elif row.outcome == "dead":
        end = "dead"
    elif row.outcome in ("snoozed", "released", "expired"):
        end = row.outcome  # type: ignore[assignment]
    elif row.outcome not in _FINISHED:
        end = "dead"
    return Attempt(row.run_ms, end, pause, row.error_type, load)


# ---- workers ------------------------------------------------------------------------------------------------


class _Load:
    """How many deliveries were under way, at any time and at each claim."""

    def __init__(self, rows: Iterable[Delivery]) -> None:
        self.times, self.counts = count_under_way(rows)

    def at(self, at_ms: float) -> int:
        """How many were under way after everything that happened at a time."""
        place = bisect_right(self.times, at_ms)
        return self.counts[place - 1] if place else 0

    def at_claim(self, row: Delivery) -> int:
        """How many were under way when a delivery began, itself included."""
        return max(1, self.at(row.claimed_ms))


def count_under_way(rows: Iterable[Delivery]) -> tuple[list[int], list[int]]:
    """Return times, and how many deliveries were under way from each on. At equal times ends come before claims."""
    changes: dict[int, int] = defaultdict(int)
    for row in rows:
        changes[row.claimed_ms] += 1
        changes[max(row.ended_ms, row.claimed_ms + 1)] -= 1
    times, counts, now = sorted(changes), [], 0
    for at in times:
        now += changes[at]
        counts.append(now)
    return times, counts


def group_by_worker(rows: Iterable[Delivery]) -> dict[str, list[Delivery]]:
    """Return the deliveries of each worker."""
    found: dict[str, list[Delivery]] = defaultdict(list)
    for row in rows:
        found[row.worker or ""].append(row)
    return found


def find_workers(rows: Sequence[Delivery], *, is_limited: bool = False) -> tuple[Workers, dict[str, int]]:
    """Return how many slots there were when, and the slots of each worker.

    A worker has what it used, from its first claim to its last end. If its queue has limits of its own, messages wait
    beside free slots too.
    """
    by_worker = group_by_worker(rows)
    if not rows:
        return Workers((Capacity(-math.inf, 0),), 0, 0), {}
    end = max(row.ended_ms for row in rows)
    waiting = _WaitingClock(() if is_limited else rows)
    own_slots = {name: find_slots(own, waiting) for name, own in by_worker.items()}
    changes: dict[float, tuple[int, int]] = defaultdict(lambda: (0, 0))
    sizes: Counter[int] = Counter()
    for name, own in by_worker.items():
        slots, newest = own_slots[name], max(own, key=lambda row: row.ended_ms)
        first, last = min(row.claimed_ms for row in own), newest.ended_ms
        has_crashed = newest.outcome == "expired"
        if has_crashed:
            last = max(max(row.claimed_ms, row.ended_ms if row.outcome != "expired" else 0) for row in own)
        sizes[slots] += len(own)
        count, workers = changes[first]
        changes[first] = count + slots, workers + 1
        if has_crashed or last < end - GOES_ON_MS:
            gone = last + IDLE_MS
            count, workers = changes[gone]
            changes[gone] = count - slots, workers - 1
    capacity, slots, workers, most = [], 0, 0, 0
    for at in sorted(changes):
        slots, workers = slots + changes[at][0], workers + changes[at][1]
        most = max(most, workers)
        capacity.append(Capacity(at, slots))
    return Workers(tuple(capacity), most, sizes.most_common(1)[0][0]), own_slots


def find_crash_share(rows: Sequence[Delivery], lease_ms: int) -> float:
    """Return the part of the claims whose messages waited within a lease of the crash of a worker.

    A worker has crashed if the lease of its newest delivery expired: those that are only slow go on.
    """
    spans: list[tuple[int, int]] = []
    for own in group_by_worker(rows).values():
        newest = max(own, key=lambda row: row.ended_ms)
        if newest.outcome == "expired":
            # The lease may have been renewed for long before the crash.
            spans.append((newest.ended_ms - lease_ms, newest.ended_ms))
    if not spans:
        return 0.0
    spans.sort()
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    affected = 0
    for row in rows:
        # All spans are of one length, so they end in the order in which they begin.
        begun = bisect_right(begins, row.claimed_ms)
        over = bisect_right(ends, row.claimed_ms - row.wait_ms)
        affected += row.wait_ms > MOMENT_MS and begun > over
    return affected / len(rows)


def without_claims_ahead(rows: Iterable[Delivery], slots: Mapping[str, int]) -> Iterator[Delivery]:
    """Return deliveries as if a worker claimed a message when it can start it.

    A worker claims a little ahead. What it holds meanwhile still waits: here that is part of its wait, not of its run.
    """
    for name, own in group_by_worker(rows).items():
        ends: list[int] = []
        for row in sorted(own, key=lambda row: (row.claimed_ms, row.claim)):
            while ends and ends[0] <= row.claimed_ms:
                heappop(ends)
            # It starts when so many of those before it have ended that a slot is free.
            over = len(ends) - slots[name] + 1
            start = min(nsmallest(over, ends)[-1], row.ended_ms) if over > 0 else row.claimed_ms
            heappush(ends, row.ended_ms)
            shift = start - row.claimed_ms
            yield row._replace(claimed_ms=start, wait_ms=row.wait_ms + shift, run_ms=max(0, row.run_ms - shift))


class _WaitingClock:
    """A clock that only runs while a message has been claimable for more than a moment."""

    def __init__(self, rows: Iterable[Delivery]) -> None:
        changes: dict[int, int] = defaultdict(int)
        for row in rows:
            if row.wait_ms > MOMENT_MS:
                changes[row.claimed_ms - row.wait_ms + MOMENT_MS] += 1
                changes[row.claimed_ms] -= 1
        self._times, self._sums, self._runs = sorted(changes), [], []
        waiting, total, before = 0, 0, 0
        for at in self._times:
            total += at - before if waiting else 0
            waiting, before = waiting + changes[at], at
            self._sums.append(total)
            self._runs.append(waiting > 0)

    def at(self, at_ms: int) -> int:
        """Return how long messages had been waiting until a time, in milliseconds."""
        place = bisect_right(self._times, at_ms) - 1
        if place < 0:
            return 0
        return self._sums[place] + (at_ms - self._times[place] if self._runs[place] else 0)


def find_slots(own: Sequence[Delivery], waiting: _WaitingClock) -> int:
    """Return how many deliveries a worker runs at once.

    While messages wait, a worker is full: what it has under way then most of the time, and hardly ever less, are its
    slots. More of them are claims ahead. If there is no such number, it is what the worker seldom exceeds; if messages
    never wait, the most that it ever used.
    """
    times, counts = count_under_way(own)
    full: Counter[int] = Counter()
    for at, until, count in zip(times, times[1:], counts, strict=False):
        full[count] += waiting.at(until) - waiting.at(at)
    whole = sum(full.values())
    if whole < WAITING_MS_MIN:
        return max(counts)
    usual = max(full, key=lambda count: full[count])
    fewer = sum(lasted for count, lasted in full.items() if count < usual)
    if usual and full[usual] >= USUAL_SHARE * whole and fewer <= FEWER_SHARE * whole:
        return usual
    seen = 0
    for count in sorted(full):
        seen += full[count]
        if seen >= FULL_SHARE * whole:
            return max(1, count)
    return max(counts)


def slots_at(capacity: Sequence[Capacity], at_ms: float) -> int:
    """Return how many slots there were at a time."""
    place = bisect_right(capacity, at_ms, key=lambda one: one.from_ms)
    return capacity[place - 1].slots if place else 0


def _pickups(claims: Sequence[Delivery], loads: _Load, capacity: Sequence[Capacity]) -> tuple[int, ...]:
    """Return the waits of messages that found a free slot."""
    found = []
    for row in claims:
        ready = row.claimed_ms - row.wait_ms
        # The load before this message itself: it may have been claimed in the millisecond in which it became ready.
        slots = slots_at(capacity, ready)
        is_free = loads.at(ready - 1) < slots and loads.at(row.claimed_ms - 1) < slots
        if is_free and row.wait_ms <= PICKUP_MS_MAX:
            found.append(row.wait_ms)
    if len(found) > DRAWN_MAX:
        found = Random(0).sample(found, DRAWN_MAX)
    return tuple(found)


# ---- run times ----------------------------------------------------------------------------------------------


def find_slowdown(runs: Sequence[tuple[int, int]]) -> float:
    """Return by which part of a run alone each further delivery under way prolongs it; 0 unless the data is clear.

    Each run is given with the number of deliveries under way when it began.
    """
    levels = Counter(load for load, _ in runs)
    usable = {load for load, count in levels.items() if count >= SLOWDOWN_LEVEL_RUNS_MIN}
    chosen = [(load, run) for load, run in runs if load in usable]
    count = len(chosen)
    if count < SLOWDOWN_RUNS_MIN or len(usable) < SLOWDOWN_LEVELS_MIN:
        return 0.0
    mean_load, mean_run = sum(load for load, _ in chosen) / count, sum(run for _, run in chosen) / count
    spread = sum((load - mean_load) ** 2 for load, _ in chosen)
    slope = sum((load - mean_load) * (run - mean_run) for load, run in chosen) / spread
    alone = mean_run + slope * (1 - mean_load)
    if slope <= 0 or alone <= 0:
        return 0.0
    rest = sum((run - mean_run - slope * (load - mean_load)) ** 2 for load, run in chosen)
    error = math.sqrt(rest / max(1, count - 2) / spread)
    effect = (alone + slope * (max(usable) - 1)) / (alone + slope * (min(usable) - 1))
    if slope < SLOWDOWN_SIGNIFICANCE_MIN * error or effect < SLOWDOWN_EFFECT_MIN:
        return 0.0
    return slope / alone


def find_renewals(rows: Sequence[Delivery], lease_ms: int) -> bool:
    """Return whether workers renewed their leases: runs come close to the lease, end there, and none goes beyond."""
    ended = [row.run_ms for row in rows if row.outcome != "expired"]
    expired = sum(row.outcome == "expired" for row in rows)
    longest = max(ended, default=0)
    return not (expired and 0.8 * lease_ms < longest <= 1.05 * lease_ms)


def _long_runs(rows: Sequence[Delivery], lease_ms: int) -> tuple[int, ...]:
    """Return how long runs may be that the lease cut off: beyond it they go on as the longest of the others do."""
    runs = sorted(row.run_ms for row in rows if row.outcome == "done")
    tail = runs[int(len(runs) * (1 - TAIL_SHARE)) :]
    return tuple(lease_ms + run - tail[0] for run in tail[:DRAWN_MAX])


# ---- other traffic ------------------------------------------------------------------------------------------


def scale_traffic(
    arrivals: Sequence[Arrival], factors: Mapping[int | str | None, float], *, seed: int = 0
) -> tuple[Arrival, ...]:
    """Return arrivals with more or less traffic: a factor for all, for days of the week, and for types of messages.

    Days are numbers (0 is Monday, in UTC), types are texts.
    A copy of a message comes between it and the next one, so bursts stay bursts.
    """
    random, found = Random(seed), []
    for number, one in enumerate(arrivals):
        factor = factors.get(None, 1.0)
        if len(factors) > 1 or None not in factors:
            factor *= factors.get(datetime.fromtimestamp(one.ready_ms / 1000, UTC).weekday(), 1.0)
            factor *= 1.0 if one.type_name is None else factors.get(one.type_name, 1.0)
        copies = int(factor) + (random.random() < factor - int(factor))
        gap = arrivals[number + 1].ready_ms - one.ready_ms if number + 1 < len(arrivals) else 0
        for copy in range(copies):
            shift = int(gap * random.random()) if copy else 0
            found.append(replace(one, ready_ms=one.ready_ms + shift))
    return tuple(sorted(found, key=lambda one: one.ready_ms))
