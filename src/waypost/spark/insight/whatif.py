"""What other settings would do: scenarios, and whether the model may be believed at all.

The model first serves the history under its own settings. If its 95th percentile of waits is not within 15 % of the
recorded one, it does not know what the waits of this queue depend on, and gives no number for other settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

from msgspec import Struct, structs

from waypost.errors import InvalidInput
from waypost.percentiles import bucket_of, percentile
from waypost.policy import (
    CONCURRENCY_MAX,
    Constant,
    Exponential,
    Linear,
    NoRetry,
    PolicyRecord,
    RetryPolicy,
    policy_changes,
)
from waypost.spark.insight.history import History, TypeRuns, scale_traffic
from waypost.spark.insight.queue_model import Arrival, Capacity, Served, Settings, serve

#: The model may be off by this part of the recorded 95th percentile, or by this time: no one adds workers for that.
FIT_PART: Final = 0.15
FIT_MS: Final = 10.0
#: From this part of the claims on, waits after crashes of workers decide about the 95th percentile.
CRASH_SHARE_MAX: Final = 0.05
#: With fewer recorded claims a percentile says little.
CLAIMS_MIN: Final = 200
#: Samples of days, and the part of them that is left out at each end of an interval.
SAMPLES: Final = 400
SAMPLES_LEFT_OUT: Final = 0.05
#: A history of fewer days is cut into this many blocks instead.
DAYS_MIN: Final = 4
BLOCKS: Final = 12
DAY_MS: Final = 86_400_000
#: Where the types of messages come from.
TYPES_NEEDED: Final = (
    "The journal does not have the types of messages: ingest them (`waypost pipeline ingest`; the queue needs "
    "journal=full)"
)
#: The most workers that are tried to reach a target.
WORKERS_MAX: Final = 4_096
DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
#: How traffic of a type of messages is given.
TYPE_PREFIX: Final = "type:"
RETRIES: Final[dict[str, type[Any]]] = {
    "exponential": Exponential, "linear": Linear, "constant": Constant, "none": NoRetry,
}  # fmt: skip


class Scenario(Struct, frozen=True):
    """Settings to try. None leaves what the history has."""

    workers: int | None = None
    concurrency: int | None = None
    #: Settings of `configure`, as texts and numbers: lease, max_deliveries, max_running, rate.
    policy: dict[str, Any] = {}
    #: As `parse_retry` reads it.
    retry: str | None = None
    #: As `parse_traffic` reads it.
    traffic: str = "1x"
    #: Find the fewest workers for this target, as `parse_target` reads it, instead.
    target: str | None = None


class Fit(Struct, frozen=True):
    """How well the model repeats what was recorded, at the 95th percentile of waits."""

    model_ms: float | None
    observed_ms: float | None
    claims: int
    #: Why the model is not to be believed; None if it fits.
    problem: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether results may be given."""
        return self.problem is None

    @property
    def text(self) -> str:
        """Return the comparison as a sentence."""
        if self.model_ms is None or self.observed_ms is None:
            return self.problem or "nothing to compare"
        compared = f"model p95 {format_ms(self.model_ms)}, observed {format_ms(self.observed_ms)}"
        return compared if self.problem is None else f"{compared}: {self.problem}"


class TypeWaits(Struct, frozen=True):
    """The waits of the messages of a type; None for those whose type is not known."""

    type_name: str | None
    claims: int
    p50_ms: float
    p95_ms: float


class Outcome(Struct, frozen=True):
    """What the model says of one scenario. Times are in milliseconds."""

    scenario: Scenario
    workers: int
    slots: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    #: Between these is the 95th percentile in nine of ten samples of the days.
    p95_low_ms: float
    p95_high_ms: float
    claims: int
    done: int
    dead: int
    failed: int
    expired: int
    waiting_max: int
    #: The part of the time that slots were in use.
    busy: float
    #: How long until the messages that wait now are claimed and none waits, if messages arrive as before; None: not
    #: within the length of the history.
    backlog_gone_ms: float | None = None
    #: Whether a target was reached.
    reached: bool | None = None
    #: By the types of messages, where they are known.
    types: tuple[TypeWaits, ...] = ()


class Answer(Struct, frozen=True):
    """The answer for a queue: how well the model fits, and outcomes if it does."""

    queue: str
    fit: Fit
    #: Workers and slots of each that the history shows, and messages that wait now.
    workers: int
    concurrency: int
    backlog: int
    from_ms: int
    to_ms: int
    #: Whether run times depend on how many deliveries are under way, by which part for each further one.
    slowdown: float
    outcomes: tuple[Outcome, ...] = ()
    #: What to know when reading the outcomes.
    notes: tuple[str, ...] = ()
    #: What was recorded by the types of messages; empty if no type is known.
    types: tuple[TypeRuns, ...] = ()


# ---- texts --------------------------------------------------------------------------------------------------


def format_ms(milliseconds: float) -> str:
    """Return a duration as people read it."""
    for limit, unit, name in ((1000, 1, "ms"), (100_000, 1000, "s"), (6_000_000, 60_000, "min")):
        if milliseconds < limit:
            value = milliseconds / unit
            return f"{value:.0f} {name}" if value >= 10 or name == "ms" else f"{value:.1f} {name}"
    return f"{milliseconds / 3_600_000:.1f} h"


def parse_retry(text: str) -> RetryPolicy:
    """Return a retry policy from a text such as `exponential:attempts=5,first=2` or `none`."""
    name, _, rest = text.strip().partition(":")
    kind = RETRIES.get(name.strip().lower())
    if kind is None:
        raise InvalidInput(f"a retry policy is one of {', '.join(RETRIES)}, as in exponential:attempts=5, not {text!r}")
    given: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in rest.split(","))):
        option, separator, value = part.partition("=")
        known = [field.name for field in structs.fields(kind)]
        if not separator or option not in known:
            raise InvalidInput(f"{name} takes {', '.join(known) or 'no options'} as NAME=VALUE, not {part!r}")
        try:
            given[option] = int(value) if option == "attempts" else float(value.removesuffix("s"))
        except ValueError:
            raise InvalidInput(f"{option} of {name} is a number, not {value!r}") from None
    policy: RetryPolicy = kind(**given)
    return policy


def parse_traffic(text: str) -> dict[int | str | None, float]:
    """Return factors of traffic: None for all, a number for a day of the week, a text for a type of messages.

    They are given as `2x`, `friday=2x`, `type:shop.Order=2x` or `1.5x,monday=3x`.
    """
    factors: dict[int | str | None, float] = {}
    for part in text.split(","):
        day, separator, value = part.strip().rpartition("=")
        number: int | str | None = None
        if day.startswith(TYPE_PREFIX):
            number = day.removeprefix(TYPE_PREFIX)
        elif separator:
            found = [place for place, name in enumerate(DAYS) if len(day) >= 3 and name.startswith(day.lower())]
            if not found:
                raise InvalidInput(
                    f"traffic of a day is as in friday=2x, not {part.strip()!r}; of a type as in type:shop.Order=2x"
                )
            number = found[0]
        try:
            factor = float(value.strip().lower().removesuffix("x"))
        except ValueError:
            raise InvalidInput(f"traffic is a factor, as in 2x or friday=2x, not {part.strip()!r}") from None
        if not 0 < factor <= 1000:
            raise InvalidInput(f"traffic is a factor from 0 to 1000, not {value}")
        factors[number] = factor
    return factors


def parse_target(text: str) -> tuple[float, float]:
    """Return a share and milliseconds from a target such as `p95 wait < 5s`."""
    parts = text.replace("<", " < ").split()
    units = {"ms": 1.0, "s": 1000.0, "min": 60_000.0, "m": 60_000.0, "h": 3_600_000.0}
    try:
        share = float(parts[0].lower().removeprefix("p")) / 100
        rest = [part for part in parts[1:] if part not in ("wait", "<")]
        value = "".join(rest)
        unit = next(unit for unit in sorted(units, key=len, reverse=True) if value.endswith(unit))
        limit = float(value.removesuffix(unit)) * units[unit]
    except (ValueError, IndexError, StopIteration):
        raise InvalidInput(f"a target is as in 'p95 wait < 5s', not {text!r}") from None
    if "<" not in parts or not 0 < share < 1 or limit <= 0:
        raise InvalidInput(f"a target is as in 'p95 wait < 5s', not {text!r}")
    return share, limit


# ---- the fit ------------------------------------------------------------------------------------------------


def share_of(values: Iterable[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def check_fit(history: History, *, seed: int = 0) -> Fit:
    """Serve the history under its own settings and compare."""
    claims = len(history.wait_ms)
    if history.policy.lease_ms is None:
        return Fit(None, None, claims, "with lease=None the journal has no run times")
    if claims < CLAIMS_MIN:
        return Fit(None, None, claims, f"only {claims:,} claims were recorded, and {CLAIMS_MIN} are needed")
    observed = share_of(history.wait_ms, 0.95)
    if history.crash_share > CRASH_SHARE_MAX:
        return Fit(
            None, observed, claims,
            f"{history.crash_share:.0%} of the messages waited after a worker had crashed; when workers would crash "
            "under other settings is not known: choose days without crashes (--from, --to)",
        )  # fmt: skip
    served = serve(history.arrivals, history.present(), history.surroundings, seed=seed)
    if served.claims < (1 - FIT_PART) * claims:
        return Fit(None, observed, claims, f"the model makes {served.claims:,} claims of {claims:,} that were recorded")
    model = share_of(served.wait_ms, 0.95)
    if abs(model - observed) > max(FIT_PART * observed, FIT_MS):
        return Fit(
            model, observed, claims,
            "that is too far apart. Its waits depend on something that the journal does not have: workers that were "
            "frozen or that serve other queues too",
        )  # fmt: skip
    return Fit(model, observed, claims)


# ---- scenarios ----------------------------------------------------------------------------------------------


def settings_of(history: History, scenario: Scenario, workers: int | None = None) -> Settings:
    """Return the settings of a scenario. With its own number of workers they are there from the first claim on."""
    policy: PolicyRecord = history.policy.changed(policy_changes(scenario.policy))
    retry = None if scenario.retry is None else parse_retry(scenario.retry)
    present = history.present()
    count = scenario.workers if workers is None else workers
    capacity = present.capacity
    if count is not None or scenario.concurrency is not None:
        slots = slots_of(history, scenario, count)
        capacity = (Capacity(history.begin_ms, slots),)
    return replace(present, capacity=capacity, policy=policy, retry=retry)


def slots_of(history: History, scenario: Scenario, workers: int | None = None) -> int:
    """Return how many messages run at once in a scenario."""
    count = workers or scenario.workers or history.workers.count
    return count * (scenario.concurrency or history.workers.concurrency)


def run_scenario(history: History, scenario: Scenario, *, seed: int = 0) -> Outcome:
    """Serve the history under other settings; with a target, under the fewest workers that reach it."""
    arrivals = scale_traffic(history.arrivals, parse_traffic(scenario.traffic), seed=seed)
    if scenario.target is None:
        return _outcome(history, arrivals, scenario, scenario.workers, seed)
    share, limit_ms = parse_target(scenario.target)

    def reaches(workers: int) -> bool:
        served = serve(arrivals, settings_of(history, scenario, workers), history.surroundings, seed=seed)
        return served.claims > 0 and share_of(served.wait_ms, share) < limit_ms

    workers = 1
    while workers < WORKERS_MAX and not reaches(workers):
        workers *= 2
    low, high = workers // 2, workers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return structs.replace(_outcome(history, arrivals, scenario, high, seed), reached=reaches(high))


def check_types(history: History, factors: Mapping[int | str | None, float]) -> None:
    """Refuse more traffic of a type that the history does not have."""
    known = [one.type_name for one in history.types if one.type_name is not None]
    for name in factors:
        if isinstance(name, str) and name not in known:
            there = f"the types are {', '.join(known[:20])}" if known else f"no type is known. {TYPES_NEEDED}"
            raise InvalidInput(f"no message of type {name!r} was recorded in queue {history.queue}; {there}")


def _outcome(
    history: History, arrivals: Sequence[Arrival], scenario: Scenario, workers: int | None, seed: int
) -> Outcome:
    settings = settings_of(history, scenario, workers)
    served = serve(arrivals, settings, history.surroundings, seed=seed)
    if not served.claims:
        raise InvalidInput("no message is claimed under these settings: give at least one worker")
    slots = max(one.slots for one in settings.capacity)
    length = max(1.0, served.end_ms - history.begin_ms)
    low, high = interval(served)
    waits = sorted(served.wait_ms)
    p50, p95, p99 = (waits[max(0, math.ceil(share * len(waits)) - 1)] for share in (0.5, 0.95, 0.99))
    return Outcome(
        scenario, workers or history.workers.count, slots, p50, p95, p99, min(low, p95), max(high, p95), served.claims,
        served.counts["done"], served.counts["dead"], served.counts["failed"], served.counts["expired"],
        served.waiting_max, min(1.0, served.busy_ms / (slots * length)),
        time_to_drain(history, arrivals, settings, seed=seed), types=waits_by_type(history, arrivals, served),
    )  # fmt: skip


def waits_by_type(history: History, arrivals: Sequence[Arrival], served: Served) -> tuple[TypeWaits, ...]:
    """Return the waits by the types of messages, in the order of the history."""
    if not history.types:
        return ()
    waits: dict[str | None, list[float]] = {}
    for message, wait in zip(served.message, served.wait_ms, strict=True):
        waits.setdefault(arrivals[message].type_name, []).append(wait)
    return tuple(
        TypeWaits(one.type_name, len(own), share_of(own, 0.5), share_of(own, 0.95))
        for one in history.types
        if (own := waits.get(one.type_name))
    )


def interval(served: Served, share: float = 0.95) -> tuple[float, float]:
    """Return between which values a percentile of waits is if other days of the same kind had come.

    Days are drawn with repetition. A history of few days is cut into blocks.
    """
    first, last = served.ready_ms[0], max(served.ready_ms)
    length = DAY_MS if last - first >= DAYS_MIN * DAY_MS else max(1.0, (last - first) / BLOCKS)
    blocks: dict[int, dict[int, int]] = {}
    for ready, wait in zip(served.ready_ms, served.wait_ms, strict=True):
        counts = blocks.setdefault(int((ready - first) // length), {})
        bucket = bucket_of(round(wait))
        counts[bucket] = counts.get(bucket, 0) + 1
    days, random, found = list(blocks.values()), Random(0), []
    for _ in range(SAMPLES):
        merged: dict[int, int] = {}
        for day in random.choices(days, k=len(days)):
            for bucket, count in day.items():
                merged[bucket] = merged.get(bucket, 0) + count
        found.append(percentile(merged, share) or 0.0)
    found.sort()
    left_out = int(SAMPLES * SAMPLES_LEFT_OUT)
    return found[left_out], found[-1 - left_out]


def time_to_drain(history: History, arrivals: Sequence[Arrival], settings: Settings, *, seed: int = 0) -> float | None:
    """Return how long until what waits now is claimed and nothing waits, if messages arrive as in the history."""
    if not history.backlog_ms or not arrivals:
        return 0.0 if not history.backlog_ms else None
    now = history.end_ms
    random = Random(seed)
    waiting = [
        replace(arrivals[int(random.random() * len(arrivals))], ready_ms=min(ready, now))
        for ready in history.backlog_ms
    ]
    # At the same time of the day as then, if the history has whole days.
    period = history.end_ms - history.begin_ms
    shift = period if period < DAY_MS else math.ceil(period / DAY_MS) * DAY_MS
    again = [replace(one, ready_ms=one.ready_ms + shift) for one in arrivals if one.ready_ms + shift > now]
    slots = settings.capacity[-1].slots
    later = replace(settings, capacity=(Capacity(now, slots),), pauses=())
    served = serve([*waiting, *again], later, history.surroundings, seed=seed, until_claimed=len(waiting))
    gone = served.all_claimed_ms
    # After the last of the messages that were repeated it is no answer: more would have come.
    return None if gone is None or gone > max(one.ready_ms for one in again or waiting) else max(0.0, gone - now)


def answer(history: History, outcomes: Mapping[int, Outcome], fit: Fit) -> Answer:
    """Return what is known of a queue: outcomes, by the place of their scenario, only if the model fits."""
    notes = []
    used = max((one.slots for one in history.workers.capacity), default=0)
    if history.surroundings.slowdown and any(one.slots > used for one in outcomes.values()):
        notes.append(f"runs take longer the more of them are under way; above {used} at once that is an extrapolation")
    if history.policy.group_rate_count is not None:
        notes.append("the model does not know the rate of groups: waits may be longer")
    if not history.renews:
        notes.append("leases were not renewed: a run that is longer than its lease is delivered again")
    return Answer(
        history.queue, fit, history.workers.count, history.workers.concurrency, len(history.backlog_ms),
        history.begin_ms, history.end_ms, round(history.surroundings.slowdown, 4),
        tuple(outcomes[place] for place in sorted(outcomes)) if fit.is_good else (), tuple(notes), history.types,
    )  # fmt: skip


def check_scenario(scenario: Scenario) -> Scenario:
    """Return a scenario whose parts can be understood, or raise `InvalidInput`."""
    for name, value, most in (
        ("workers", scenario.workers, WORKERS_MAX), ("concurrency", scenario.concurrency, CONCURRENCY_MAX),
    ):  # fmt: skip
        if value is not None and not 1 <= value <= most:
            raise InvalidInput(f"{name} is from 1 to {most:,}, not {value}")
    policy_changes(scenario.policy)
    parse_traffic(scenario.traffic)
    if scenario.retry is not None:
        parse_retry(scenario.retry)
    if scenario.target is not None:
        parse_target(scenario.target)
        if scenario.workers is not None:
            raise InvalidInput("a target finds the number of workers: give one of them")
    return scenario
