"""A model of one queue: recorded arrivals and run times, served under other settings.

A discrete-event model in plain Python. Messages become claimable at their recorded times, take a free slot in the order
of a store (priority, then what was given back, then age), run as long as they were recorded to run and end as they were
recorded to end. The rules that decide are those of the product: `PolicyRecord` for limits, and the retry policy's own
`delay` for pauses. Tests compare it with runs of the real worker.

What it does not know: how long a round trip takes (waits of messages that found a free slot are drawn from recorded
ones), workers that are frozen, limits that several queues share, and of groups their weights, rates and pauses.
"""

from __future__ import annotations

import builtins
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any, Final, Literal

from msgspec import structs

from waypost.policy import DEFAULT_POLICY, PRIORITY_DEFAULT, Exponential, PolicyRecord, RetryPolicy
from waypost.times import Duration

#: How an attempt ended.
AttemptEnd = Literal["done", "failed", "dead", "snoozed", "released", "expired"]
#: A pause that was not recorded: the history ends before the next attempt.
UNKNOWN: Final = -1
#: What can happen: an attempt ends; its lease ends while its handler goes on, or after a crash; a slot is free; a
#: message is claimable; a worker with a free slot sees it; the number of slots changes; the rate allows a claim.
_END, _LEASE_END, _EXPIRED, _FREE, _DUE, _SEEN, _SLOTS, _RATE = range(8)
#: A position after all recorded attempts: the one that was drawn counts.
_PAST_ALL: Final = 2**40


@dataclass(frozen=True, slots=True)
class Attempt:
    """One recorded delivery: how long it ran, how it ended, and the pause before the next one if it was recorded."""

    run_ms: int
    end: AttemptEnd = "done"
    pause_ms: int = UNKNOWN
    error: str | None = None
    #: How many deliveries of the queue were under way when it began, itself included.
    load: int = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded message: when it became claimable for the first time, and its attempts."""

    ready_ms: int
    attempts: tuple[Attempt, ...]
    priority: int = PRIORITY_DEFAULT
    group: str | None = None
    #: The type of the message, where it is known.
    type_name: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many messages may run at once from a time on."""

    from_ms: float
    slots: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What a queue is served with. `retry=None` keeps the recorded pauses and ends."""

    capacity: tuple[Capacity, ...]
    policy: PolicyRecord = DEFAULT_POLICY
    retry: RetryPolicy | None = None
    #: Whether workers renew their leases: then a run may be longer than the lease.
    renews: bool = True
    #: Times in which the queue was paused.
    pauses: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, slots: int, **more: Any) -> Settings:
        """Return settings with the same number of slots at all times."""
        return cls((Capacity(-math.inf, slots),), **more)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the model draws from: recorded waits beside free slots, and runs longer than the lease."""

    #: Waits of messages that found a free slot, in milliseconds.
    pickup_ms: Sequence[int] = ()
    #: By error type, attempts that followed a failure with it. They stand for attempts that were never made.
    followers: dict[str | None, Sequence[Attempt]] = field(default_factory=dict)
    #: Recorded runs longer than the recorded lease.
    long_runs_ms: Sequence[int] = ()
    recorded_lease_ms: int = 60_000
    #: By how much a run takes longer for each further delivery that is under way.
    slowdown: float = 0.0
    #: The same as `followers` by the type of the message and the error, where enough of them are known.
    followers_by_type: dict[tuple[str, str | None], Sequence[Attempt]] = field(default_factory=dict)


NO_SURROUNDINGS: Final = Surroundings()


@dataclass(slots=True)
class Served:
    """What the model did. The arrays have one element for each claim, in their order."""

    ready_ms: array[float] = field(default_factory=lambda: array("d"))
    wait_ms: array[float] = field(default_factory=lambda: array("d"))
    message: array[int] = field(default_factory=lambda: array("q"))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("done", "dead", "failed", "expired"), 0))
    #: The sum of the time that slots were taken.
    busy_ms: float = 0.0
    #: When the last run ended.
    end_ms: float = -math.inf
    waiting_max: int = 0
    #: When the last message of those that `until_claimed` counts was claimed for the first time; None if never.
    all_claimed_ms: float | None = None

    @property
    def claims(self) -> int:
        """How many claims there were."""
        return len(self.wait_ms)


def serve(
    arrivals: Sequence[Arrival],
    settings: Settings,
    surroundings: Surroundings = NO_SURROUNDINGS,
    *,
    seed: int = 0,
    until_claimed: int = 0,
) -> Served:
    """Serve arrivals, given in the order of their times, and return what happened.

    With `until_claimed` it ends when the first so many arrivals have been claimed and no message waits.
    """
    return _Server(arrivals, settings, surroundings, seed).run(until_claimed)


def with_jitter_of(policy: RetryPolicy, random: Random) -> Callable[[int, str | None], float | None]:
    """Return the pauses of a retry policy in milliseconds, with its jitter drawn from a seed."""
    jitter = getattr(policy, "jitter", 0.0)
    plain: RetryPolicy = structs.replace(policy, jitter=0.0) if jitter else policy  # type: ignore[type-var]

    def pause(attempt: int, error: str | None) -> float | None:
        found: Duration | None = plain.delay(attempt, _error_of(error))
        if found is None:
            return None
        seconds = found.total_seconds() if isinstance(found, timedelta) else found
        return max(0.0, seconds * 1000 * (1 + random.uniform(-jitter, jitter) if jitter else 1.0))

    return pause


def _error_of(name: str | None) -> BaseException | None:
    """Return an error of a type by its recorded name, if it is one of Python's own."""
    kind = getattr(builtins, (name or "").removeprefix("builtins."), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind()
        except TypeError:
            return None
    return None


class Turns:
    """The waiting messages of a queue that takes turns between its groups: the next one, as a store chooses it.

    Groups that may have something to hand out are in line, each with a number; the smallest one is next. One that joins
    or goes on gets the number after the last turn. All groups have the same weight.
    """

    def __init__(self, arrivals: Sequence[Arrival], policy: PolicyRecord) -> None:
        self._groups = [one.group or "" for one in arrivals]
        self._is_ordered = policy.order is not None
        # Messages without a group have neither order nor limits.
        self._priorities = [0 if self._is_ordered and one.group else one.priority for one in arrivals]
        self._limit = 1 if self._is_ordered else policy.group_max_running
        self._holds = self._is_ordered and policy.on_failure == "hold"
        #: For each group its messages by priority, the highest first: what was given back, and the others by age.
        self._lines: dict[str, dict[int, tuple[deque[int], deque[int]]]] = {}
        self._line: list[tuple[int, str]] = []
        self._is_in_line: set[str] = set()
        self._leased: dict[str, int] = {}
        self._held: dict[str, set[int]] = {}
        self._turn = 0

    def add(self, message: int, *, at_head: bool, is_again: bool) -> None:
        """A message is ready. One that was given back, or is tried again in an ordered group, keeps its place."""
        group, levels = self._groups[message], self._lines.setdefault(self._groups[message], {})
        priority = self._priorities[message]
        if priority not in levels:
            levels[priority] = deque(), deque()
            self._lines[group] = levels = dict(sorted(levels.items(), reverse=True))
        keeps_place = at_head or (is_again and self._is_ordered and bool(group))
        levels[priority][0 if keeps_place else 1].append(message)
        self._join(group)

    def end_lease(self, message: int) -> None:
        """The lease of a message has ended: its group may go on."""
        group = self._groups[message]
        self._leased[group] = max(0, self._leased.get(group, 0) - 1)
        self._join(group)

    def hold(self, message: int) -> None:
        """A message of an ordered group is delayed: nothing of its group overtakes it."""
        if self._holds and self._groups[message]:
            self._held.setdefault(self._groups[message], set()).add(message)

    def release(self, message: int) -> None:
        """A delayed message is ready again."""
        self._held.get(self._groups[message], set()).discard(message)

    def has_next(self) -> bool:
        """Whether a group can go on. Those that cannot leave the line until something of them changes."""
        while self._line and not self._can_go_on(self._line[0][1]):
            self._is_in_line.discard(heappop(self._line)[1])
        return bool(self._line)

    def take(self) -> int:
        """Return the next message of the group whose turn it is, after `has_next`."""
        self._turn, group = heappop(self._line)
        self._is_in_line.discard(group)
        given_back, by_age = next(level for level in self._lines[group].values() if level[0] or level[1])
        message = (given_back or by_age).popleft()
        self._leased[group] = self._leased.get(group, 0) + 1
        self._join(group)
        return message

    def _join(self, group: str) -> None:
        if group not in self._is_in_line and self._has_waiting(group):
            self._is_in_line.add(group)
            heappush(self._line, (self._turn + 1, group))

    def _has_waiting(self, group: str) -> bool:
        return any(given_back or by_age for given_back, by_age in self._lines.get(group, {}).values())

    def _can_go_on(self, group: str) -> bool:
        if not self._has_waiting(group):
            return False
        if not group:
            return True
        is_limited = self._limit is not None and self._leased.get(group, 0) >= self._limit
        return not is_limited and not self._held.get(group)


class _Server:
    """The state of one run of the model."""

    def __init__(self, arrivals: Sequence[Arrival], settings: Settings, surroundings: Surroundings, seed: int) -> None:
        self.arrivals, self.settings, self.surroundings = arrivals, settings, surroundings
        self.random = Random(seed)
        self.retry = None if settings.retry is None else with_jitter_of(settings.retry, self.random)
        self.default_retry = with_jitter_of(Exponential(), self.random)
        count = len(arrivals)
        self.position, self.deliveries, self.failures = [0] * count, [0] * count, [0] * count
        self.since: list[float] = [one.ready_ms for one in arrivals]
        #: Attempts of messages that need more of them than were recorded.
        self.drawn: dict[int, Attempt] = {}
        #: For each priority, the highest first: messages that were given back, and the others by age.
        self.levels = {
            priority: (deque[int](), deque[int]())
            for priority in sorted({one.priority for one in arrivals}, reverse=True)
        }
        #: In place of these where the queue takes turns between groups.
        self.turns = Turns(arrivals, settings.policy) if settings.policy.grouped else None
        self.waiting = self.running = self.limit = 0
        #: What will happen: when, in which order, to which message, and what.
        self.later = [(at, number, slots, _SLOTS) for number, (at, slots) in enumerate(_slot_changes(settings))]
        heapify(self.later)
        self.order = len(self.later)
        self.rate_log: deque[float] = deque()
        self.rate_awaited = False
        self.unclaimed = self.first_ones = 0
        self.served = Served()

    def run(self, until_claimed: int) -> Served:
        self.unclaimed = self.first_ones = until_claimed
        arrivals, later, served = self.arrivals, self.later, self.served
        number, count = 0, len(arrivals)
        while number < count or later:
            if number < count and (not later or arrivals[number].ready_ms <= later[0][0]):
                now: float = arrivals[number].ready_ms
            else:
                now = later[0][0]
            while later and later[0][0] <= now:
                _, _, message, what = heappop(later)
                self.happen(now, message, what)
            while number < count and arrivals[number].ready_ms <= now:
                self.become_claimable(now, number)
                number += 1
            if self.waiting:
                if self.running < self.limit:
                    self.claim(now)
                if self.waiting > served.waiting_max:
                    served.waiting_max = self.waiting
            if until_claimed and self.unclaimed == 0 and not self.waiting:
                served.all_claimed_ms = now
                break
        return served

    def push(self, at: float, message: int, what: int) -> None:
        heappush(self.later, (at, self.order, message, what))
        self.order += 1

    def happen(self, now: float, message: int, what: int) -> None:
        if self.turns is not None and what in (_END, _EXPIRED, _LEASE_END):
            self.turns.end_lease(message)
        if what == _END:
            self.running -= 1
            self.served.end_ms = now
            self.end(now, message)
        elif what == _DUE:
            self.become_claimable(now, message)
        elif what == _SEEN:
            self.wait(message)
        elif what == _FREE:
            self.running -= 1
            self.served.end_ms = now
        elif what == _EXPIRED:
            self.end(now, message)
        elif what == _LEASE_END:
            self.served.counts["expired"] += 1
            self.since[message] = now
            self.wait(message, at_head=True)
        elif what == _SLOTS:
            cap = self.settings.policy.max_running
            self.limit = message if cap is None else min(message, cap)
        else:
            self.rate_awaited = False

    # ---- waiting and claiming ------------------------------------------------------------------------------

    def become_claimable(self, now: float, message: int) -> None:
        """A message is due. A worker that has a free slot still needs a moment to see it."""
        self.since[message] = now
        if self.turns is not None:
            self.turns.release(message)
        pickup = self.surroundings.pickup_ms
        if pickup and self.running < self.limit and not self.waiting:
            self.push(now + pickup[int(self.random.random() * len(pickup))], message, _SEEN)
        else:
            self.wait(message)

    def wait(self, message: int, *, at_head: bool = False) -> None:
        self.waiting += 1
        if self.turns is not None:
            self.turns.add(message, at_head=at_head, is_again=self.position[message] > 0)
        else:
            self.levels[self.arrivals[message].priority][0 if at_head else 1].append(message)

    def claim(self, now: float) -> None:
        """Give free slots to waiting messages: by priority, first what was given back, then by age; or by turns."""
        if self.turns is not None:
            while self.running < self.limit and self.turns.has_next() and self.rate_allows(now):
                self.hand_out(now, self.turns.take())
            return
        for given_back, by_age in self.levels.values():
            while given_back or by_age:
                if self.running >= self.limit or not self.rate_allows(now):
                    return
                self.hand_out(now, (given_back or by_age).popleft())

    def hand_out(self, now: float, message: int) -> None:
        """Start a message, or bury it if it has had all its deliveries."""
        served, max_deliveries = self.served, self.settings.policy.max_deliveries
        self.waiting -= 1
        if max_deliveries is not None and self.deliveries[message] >= max_deliveries:
            served.counts["dead"] += 1
            if self.turns is not None:
                self.turns.end_lease(message)
            return
        if message < self.first_ones and self.position[message] == self.deliveries[message] == 0:
            self.unclaimed -= 1
        self.deliveries[message] += 1
        since = self.since[message]
        served.ready_ms.append(since)
        served.wait_ms.append(now - since)
        served.message.append(message)
        self.running += 1
        self.begin(now, message)

    def rate_allows(self, now: float) -> bool:
        """Whether the rate allows another claim, as a store counts: at most so many in any window."""
        policy, log = self.settings.policy, self.rate_log
        if policy.rate_count is None or policy.rate_per_ms is None:
            return True
        while log and log[0] <= now - policy.rate_per_ms:
            log.popleft()
        if len(log) < policy.rate_count:
            log.append(now)
            return True
        if not self.rate_awaited:
            self.rate_awaited = True
            self.push(log[0] + policy.rate_per_ms, 0, _RATE)
        return False

    # ---- attempts ------------------------------------------------------------------------------------------

    def attempt_of(self, message: int) -> Attempt:
        attempts, position = self.arrivals[message].attempts, self.position[message]
        return attempts[position] if position < len(attempts) else self.drawn[message]

    def begin(self, now: float, message: int) -> None:
        attempt, around = self.attempt_of(message), self.surroundings
        run: float = attempt.run_ms
        if around.slowdown:
            run *= (1 + around.slowdown * (self.running - 1)) / (1 + around.slowdown * (attempt.load - 1))
        lease = self.settings.policy.lease_ms
        if lease is not None and attempt.end == "expired":
            if self.settings.renews:
                # It was a crash: the slot is gone, by what is known of workers, and the message waits for its lease.
                self.running -= 1
                self.push(now + lease, message, _EXPIRED)
                return
            run = lease
            if around.long_runs_ms and lease > around.recorded_lease_ms:
                found = around.long_runs_ms[int(self.random.random() * len(around.long_runs_ms))]
                if found <= lease:
                    run = found
                    self.position[message], self.drawn[message] = _PAST_ALL, Attempt(found)
        elif lease is not None and run > lease and not self.settings.renews:
            self.push(now + lease, message, _LEASE_END)
            self.push(now + run, message, _FREE)
            self.served.busy_ms += run
            return
        self.served.busy_ms += run
        self.push(now + run, message, _END)

    def end(self, now: float, message: int) -> None:
        attempt, counts = self.attempt_of(message), self.served.counts
        match attempt.end:
            case "done":
                counts["done"] += 1
            case "failed":
                self.fail(now, message, attempt)
            case "dead":
                counts["dead"] += 1
            case "snoozed":
                self.deliveries[message] -= 1
                self.next_attempt(message, attempt)
                self.delay(now + max(0, attempt.pause_ms), message)
            case "released":
                self.deliveries[message] -= 1
                self.next_attempt(message, attempt)
                self.since[message] = now
                self.wait(message, at_head=True)
            case "expired":
                counts["expired"] += 1
                self.next_attempt(message, attempt)
                self.since[message] = now
                self.wait(message, at_head=True)

    def fail(self, now: float, message: int, attempt: Attempt) -> None:
        """A handler failed: the retry policy decides, or what was recorded."""
        counts = self.served.counts
        counts["failed"] += 1
        self.failures[message] += 1
        if self.retry is not None:
            pause = self.retry(self.failures[message], attempt.error)
        elif attempt.pause_ms != UNKNOWN:
            pause = attempt.pause_ms
        elif self.position[message] + 1 >= len(self.arrivals[message].attempts):
            pause = None  # it was the last attempt
        else:
            pause = self.default_retry(self.failures[message], attempt.error)
        if pause is None:
            counts["dead"] += 1
            return
        self.next_attempt(message, attempt)
        self.delay(now + pause, message)

    def delay(self, until: float, message: int) -> None:
        """A message is due later. In an ordered group it holds the others."""
        if self.turns is not None:
            self.turns.hold(message)
        self.push(until, message, _DUE)

    def next_attempt(self, message: int, attempt: Attempt) -> None:
        """Go on to the next recorded attempt, or draw one of those that followed such an error."""
        self.position[message] += 1
        if self.position[message] < len(self.arrivals[message].attempts):
            return
        pool: Sequence[Attempt] | None = None
        if attempt.end == "failed":
            type_name, around = self.arrivals[message].type_name, self.surroundings
            pool = None if type_name is None else around.followers_by_type.get((type_name, attempt.error))
            pool = pool or around.followers.get(attempt.error)
        if pool:
            self.drawn[message] = pool[int(self.random.random() * len(pool))]
        else:
            # A snooze, a release or a crash is followed by a run like the longest known part of it.
            self.drawn[message] = attempt if attempt.end == "failed" else Attempt(attempt.run_ms)


def _slot_changes(settings: Settings) -> list[tuple[float, int]]:
    """When the number of slots changes, and to what: none while the queue is paused."""
    changes = sorted((one.from_ms, one.slots) for one in settings.capacity)
    for begin, end in settings.pauses:
        within = [slots for at, slots in changes if at <= end]
        after = within[-1] if within else 0
        changes = [(at, slots) for at, slots in changes if not begin <= at <= end]
        changes = sorted([*changes, (begin, 0), (end, after)])
    return changes
