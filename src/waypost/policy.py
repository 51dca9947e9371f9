"""The settings of queues and handlers: every default and limit, with what would break without it.

No clock and no I/O. `PolicyRecord` is stored with its queue, the same for all clients. Retry policies
belong to the handler's process and only compute numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast, get_args

from msgspec import Struct, structs

from waypost.checks import check_choice, check_count, check_number, check_seconds, show
from waypost.errors import InvalidPolicy, InvalidSchedule
from waypost.times import Duration

OnConflict = Literal["keep", "replace", "extend", "error"]
#: How long a message has its key: while it is unfinished, until it is first claimed, or also while it is a dead letter.
#: Stores keep the number of each: append only.
Unique = Literal["live", "until_claimed", "live_or_dead"]
UNIQUE_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(get_args(Unique))}
Overload = Literal["raise", "block", "drop_oldest"]
#: `server`: as durable as the configuration of the server. `fsync`: a write is confirmed when it is on the disk.
Durability = Literal["server", "fsync"]
JournalLevel = Literal["off", "failures", "all", "full"]
#: `group`: the messages of a group are handed out one at a time, in the order in which they became ready.
Order = Literal["group"]
#: What a message that failed does to its ordered group until it is tried again: hold it, or let the next one pass.
OnFailure = Literal["hold", "pass"]

# ---- limits: everything has one, so that no caller and no accident can hurt the store ----------------------

#: Larger bodies would block every other client of the store; they belong in object storage.
BODY_BYTES_MAX = 1024 * 1024
#: Recursive decoders elsewhere fail on deep nesting; refuse it when it is published.
JSON_DEPTH_MAX = 64
HEADERS_MAX = 64
HEADER_BYTES_MAX = 8 * 1024
#: One script or transaction handles at most this many messages or bytes: a longer one would block other clients.
CHUNK_MESSAGES_MAX = 512
CHUNK_BYTES_MAX = 4 * 1024 * 1024
#: A claim returns at most this many bytes, but at least one message: over a slow link the leases of a longer reply
#: would end before it arrives. A client requests less if the link is slow or the lease short.
CLAIM_BYTES_MAX = 4 * 1024 * 1024
#: What a client requests before it has measured its link.
CLAIM_BYTES_FIRST = 256 * 1024
#: A reply should arrive within this part of a lease.
CLAIM_LEASE_PART = 0.25
#: A caller's batch is cut into chunks; this bounds what one call may hold in memory.
BATCH_MAX = 1_000_000
KEY_CHARACTERS_MAX = 512
GROUP_CHARACTERS_MAX = 128
WORKER_CHARACTERS_MAX = 128
#: Error texts are cut here: a traceback of megabytes must not end up in the store.
ERROR_CHARACTERS_MAX = 8 * 1024
#: The end of a traceback that is kept with the last error, and the longest of its lines.
TRACEBACK_CHARACTERS_MAX = 4 * 1024
TRACEBACK_LINE_CHARACTERS_MAX = 300
#: What the journal keeps of an error's text: a million events with whole texts would be gigabytes.
JOURNAL_ERROR_CHARACTERS_MAX = 500
REASON_CHARACTERS_MAX = 64
PAGE_MAX = 1_000
#: A longer lease would only delay the detection of a crash, and does not fit into the four bytes of its field.
LEASE_MS_MAX = 30 * 86_400_000
PRIORITY_MIN, PRIORITY_MAX, PRIORITY_DEFAULT = 0, 9, 5

#: A script reads at most this many entries, and about `CHUNK_BYTES_MAX` of bodies, when it searches: a
#: filter with few matches must not block the server. The client continues from there; others are served in between.
SCANNED_MAX = 2_000
#: A claim promotes and reclaims at most this many, so that a backlog cannot make it long.
PROMOTE_MAX = 512
RECLAIM_MAX = 256
#: Messages past their expiry that one claim or promotion ends.
LAPSE_MAX = 256
#: Messages above their delivery limit that one claim may move to the dead letters while it searches for others.
BURY_MAX = 256
#: For each kind of side effect, a reply names at most this many messages and counts the others. Enough for all expired
#: leases and all new dead letters of a claim.
SIDE_EFFECTS_MAX = max(RECLAIM_MAX, BURY_MAX, LAPSE_MAX)
#: Results of this many operations are kept per session and queue, to answer repeats after a lost reply.
REPLAY_MAX = 128
#: How far the time in an operation may be ahead of the store's: nodes of a Cluster differ, and clocks are set back
#: slightly. Results are kept longer by this time than operations may be repeated.
STAMP_AHEAD_MS = 5_000
#: How long after its first attempt an operation may be repeated, unless a client sets it.
REPLAY_TTL_MS = 300_000
SLEEPER_TTL_MS = 60_000
#: Queues per poll: the longest step of an idle worker, which still takes only a few milliseconds.
POLL_QUEUES_MAX = 256
#: Instants of one backfill, unless the caller allows more, and the most that it can allow: all are held in memory.
BACKFILL_INSTANTS = 10_000
BACKFILL_INSTANTS_MAX = 1_000_000
#: How long an unblock is kept that comes before the blocking read that it is meant for.
UNBLOCK_TTL_MS = 10_000
#: The largest shared record. Larger ones would make a page of them slow.
RECORD_BYTES_MAX = 64 * 1024
#: Shared records of one kind that a store keeps at most; beyond it the oldest are removed.
RECORDS_MAX = 10_000
#: Entries that the log of actions keeps.
ACTIONS_MAX = 1_000
#: Shared records that one save may remove, because they expired or are too many.
RECORDS_SWEPT_MAX = 20
#: The most shared records that one read returns.
RECORDS_PAGE_MAX = 200
#: The number of workers that a store lists; beyond it, those that expire first are removed.
WORKERS_MAX = 2_000
#: Events or messages that one batch of a pipeline may have: far more than is sensible, so it only finds mistakes.
LAKE_BATCH_ROWS_MAX = 10**12
#: Days for which a lake may keep rows: a thousand years, since dates begin in the year 1.
LAKE_KEEP_DAYS_MAX = 365_000
#: The maximum size of a worker's report, so that the list of all workers can be read at once.
WORKER_BYTES_MAX = 16 * 1024
#: Expired workers that one heartbeat may remove.
WORKERS_SWEPT_MAX = 100
#: The longest time for which a worker may announce its next poll: after a crash nothing is polled until it ends.
POLL_SOON_MS_MAX = 100
#: A step that makes more messages ready wakes sleepers although a worker polls soon: one alone would be slow.
POLL_SOON_MESSAGES_MAX = 8
#: A continuation that cannot be delivered for this long is dead, `undeliverable`.
OUTGOING_TTL_MS = 12 * 3_600_000
#: How long a queue remembers which continuations arrived: longer than any of them can be resent.
ARRIVAL_TTL_MS = 24 * 3_600_000
#: Arrivals that one step deletes at most: more than a step can add, so that they do not accumulate.
ARRIVALS_FORGOTTEN_MAX = 800
#: How long the record of a removed queue is kept: longer than any operation may be repeated, so that a late repeat
#: cannot run again, and long enough for readers of the journal, whose numbers continue.
REMOVED_TTL_MS = 30 * 86_400_000
#: How long the notice of an ended message or chain is resent to a queue that cannot be reached.
COMPLETION_TTL_MS = 30 * 86_400_000
#: The expiry of records that do not expire: a chain is kept while any of its messages is unfinished. (The largest
#: integer that is exact in Lua.)
NO_END_MS = 2**53 - 1
#: How often it is checked that the chains of a waiting message still exist, on stores that can lose one queue
#: without another: a lost chain would never end.
BLOCKER_CHECK_MS = 3_600_000
#: How many of them one claim checks.
BLOCKER_CHECKS_MAX = 8
#: A chain that has ended is kept as long as a result.
ENDED_TTL_MS = 3_600_000
#: A waiting client registers again before this time, so that the records of clients that have ended expire.
WAITER_TTL_MS = 60_000
#: How many chains one message may wait for.
BLOCKERS_MAX = 1_000
#: The links of a message to chains are listed up to this number of each kind: a chain may have thousands of messages.
LINKS_MAX = 100
MINUTES_KEPT = 1_440
#: Changes of settings, pauses and resumes that are kept of a queue, to be marked on charts.
CHANGES_KEPT = 32
#: A journal is trimmed when it exceeds its cap by this fraction.
JOURNAL_SLACK_PART = 64
#: What the journal keeps at level `failures`.
FAILURE_EVENTS = frozenset(
    (
        "retried", "expired", "dead", "dropped", "cancelled", "dead_trimmed", "trimmed", "configured", "paused",
        "resumed", "skipped",
    )
)  # fmt: skip
#: A group's place among the groups moves by this number, divided by its weight, with each message that is handed out.
#: Divisible by most small weights, and small enough that turns stay exact in Lua for decades.
GROUP_STRIDE = 5_040
GROUP_WEIGHT_MAX = 100
#: A group's rate is counted in this many parts of its window, so that its record stays small.
GROUP_RATE_PARTS = 64
#: Groups of a queue that may be paused or have settings of their own: their records are kept without messages.
GROUPS_KEPT_MAX = 10_000
#: Ready messages of an ordered queue that are read to find the oldest: those that are tried again keep their places,
#: before others that have waited longer.
OLDEST_READ_MAX = 64
#: Groups that cannot go on and that one claim may take out of the turns while it searches for one that can.
GROUPS_SKIPPED_MAX = 512
#: Reclaimed and released messages come before all others of their priority: their position is the lease end minus this.
HEAD_OFFSET = 2**48

# ---- defaults of a client ---------------------------------------------------------------------------------

START_TIMEOUT_SECONDS = 3.0
RETRY_BUDGET_SECONDS = 120.0
#: A store remembers each call for twice this time, so that its repeat is answered.
RETRY_BUDGET_SECONDS_MAX = 7 * 86_400.0
BACKOFF_FIRST_SECONDS = 0.01
BACKOFF_MAX_SECONDS = 5.0
BLOCK_TIMEOUT_SECONDS = 1.0
RESULT_TTL_SECONDS = 3600.0
#: The poll interval of idle queues while notifications are proven to arrive. If it were longer, a lost notification
#: would be noticeable; if it were shorter, a thousand idle workers would be a load.
SAFETY_POLL_SECONDS = 15.0
#: The same without a working wake-up channel.
UNWOKEN_POLL_SECONDS = 5.0
#: A worker reports to the store with each poll, and is removed from the list after three times this interval.
HEARTBEAT_SECONDS = SAFETY_POLL_SECONDS
HEARTBEATS_PER_TTL = 3
#: A worker that could have claimed and did not for this long is red. Two polls: one may be late.
HEALTH_WINDOW_SECONDS = 2 * SAFETY_POLL_SECONDS
#: How many calls of a handler may run at the same time in one worker.
CONCURRENCY_MAX = 10_000
POLL_FIRST_SECONDS = 0.05

# ---- schedules ----------------------------------------------------------------------------------------------

#: How late an instant may be fired without being missed: a dead leader is replaced well within it.
GRACE_SECONDS = 60.0
#: The clock of a store has no finer resolution.
INTERVAL_MS_MIN = 1
INTERVAL_MS_MAX = 10 * 366 * 86_400_000
#: A leader's lease: after this time without a renewal another one takes over.
LEADER_TTL_MS = 15_000

RATE = re.compile(r"(\d{1,9})/(\d{0,6})(ms|s|m|h)")
UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


class PolicyRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a queue: kept in the store, the same for every client.

    Milliseconds here; `configure` takes seconds and validates. A change takes effect at the next call.
    """

    #: None means at most once: a claim removes the message. A crash then loses it.
    lease_ms: int | None = 60_000
    #: Without it a message that kills its worker would kill workers forever.
    max_deliveries: int | None = 10
    #: None: publishers may fill the store.
    max_pending: int | None = None
    overload: Overload = "raise"
    #: Across all workers.
    max_running: int | None = None
    #: At most `rate_count` claims in any `rate_per_ms`.
    rate_count: int | None = None
    rate_per_ms: int | None = None
    journal: JournalLevel = "all"
    #: Without it the history would fill the store.
    journal_max: int = 1_000_000
    #: None keeps dead letters until they are purged.
    dead_max: int | None = None
    dead_keep_ms: int | None = None
    #: How many completed messages are kept for listings.
    completed_max: int = 0
    #: Whether web pages show the bodies, headers and results of this queue to no user.
    hide_bodies: bool = False
    #: Whether errors are kept without their tracebacks. False by default, so that an earlier release can read the rest.
    no_tracebacks: bool = False
    order: Order | None = None
    on_failure: OnFailure = "hold"
    #: Whether claims take turns between groups. A queue with an order or a limit per group does, too.
    fair: bool = False
    group_max_running: int | None = None
    group_rate_count: int | None = None
    group_rate_per_ms: int | None = None
    group_max_pending: int | None = None

    def changed(self, changes: Mapping[str, Any]) -> PolicyRecord:
        """This policy with store-level changes applied; raises `InvalidPolicy` if it contradicts itself."""
        policy = structs.replace(self, **changes)
        if policy.lease_ms is None and (policy.order or policy.limits_groups):
            raise InvalidPolicy(LEASE_NEEDED)
        return policy

    @property
    def grouped(self) -> bool:
        """Whether claims take turns between the groups of this queue."""
        return self.fair or self.order is not None or self.limits_groups

    @property
    def limits_groups(self) -> bool:
        """Whether each group has a limit."""
        limits = (self.group_max_running, self.group_rate_count, self.group_max_pending)
        return any(limit is not None for limit in limits)

    @property
    def journal_slack(self) -> int:
        """How far the journal may exceed its cap before it is trimmed, so that trimming is rare and cheap."""
        return max(CHUNK_MESSAGES_MAX, self.journal_max // JOURNAL_SLACK_PART)


DEFAULT_POLICY = PolicyRecord()
#: Fields that the release before does not know, whose processes may run beside those of this one: they can be set when
#: the upgrade is finished. None: the release before, 0.1, stops for the upgrade.
NEW_SETTINGS: frozenset[str] = frozenset()
#: The fields of a policy that are about groups.
GROUP_FIELDS = frozenset(
    (
        "order", "on_failure", "fair", "group_max_running", "group_rate_count", "group_rate_per_ms",
        "group_max_pending",
    )
)  # fmt: skip
#: The text of an error that every store raises.
LEASE_NEEDED = (
    "order and limits per group need a lease: with lease=None a message is gone once it is claimed, so its end is not "
    "known; set a lease, or remove order, group_max_running, group_rate and group_max_pending, and the limits of "
    "single groups"
)
#: What `completed=True` keeps.
COMPLETED_DEFAULT = 1_000


def policy_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the keywords of `configure` (seconds, "100/m", True) into validated fields of `PolicyRecord`."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        match name:
            case "lease":
                changes["lease_ms"] = None if value is None else _lease_ms(value)
            case (
                "max_deliveries" | "max_pending" | "max_running" | "dead_max"
                | "group_max_running" | "group_max_pending"
            ):  # fmt: skip
                changes[name] = None if value is None else _positive(name, value)
            case "overload":
                changes[name] = check_choice(name, value, ("raise", "block", "drop_oldest"), InvalidPolicy)
            case "rate":
                count, per = (None, None) if value is None else parse_rate(value)
                changes["rate_count"], changes["rate_per_ms"] = count, per
            case "group_rate":
                count, per = (None, None) if value is None else parse_rate(value, name)
                changes["group_rate_count"], changes["group_rate_per_ms"] = count, per
            case "order":
                changes[name] = None if value is None else check_choice(name, value, get_args(Order), InvalidPolicy)
            case "on_failure":
                changes[name] = check_choice(name, value, get_args(OnFailure), InvalidPolicy)
            case "journal":
                changes[name] = check_choice(name, value, ("off", "failures", "all", "full"), InvalidPolicy)
            case "journal_max":
                changes[name] = _positive(name, value)
            case "dead_keep":
                changes["dead_keep_ms"] = None if value is None else _positive_ms(name, value)
            case "completed":
                if isinstance(value, bool) or value is None:
                    changes["completed_max"] = COMPLETED_DEFAULT if value else 0
                else:
                    changes["completed_max"] = check_count(name, value, 0, 2**40, InvalidPolicy)
            case "hide_bodies" | "fair":
                if not isinstance(value, bool):
                    raise InvalidPolicy(f"{name} must be True or False, not {show(value)}")
                changes[name] = value
            case "tracebacks":
                if not isinstance(value, bool):
                    raise InvalidPolicy(f"tracebacks must be True or False, not {show(value)}")
                changes["no_tracebacks"] = not value
            case _:
                raise InvalidPolicy(
                    f"unknown queue setting {name!r}; known are lease, max_deliveries, max_pending, overload, "
                    "max_running, rate, journal, journal_max, dead_max, dead_keep, completed, hide_bodies, "
                    "tracebacks, order, on_failure, fair, group_max_running, group_rate, group_max_pending"
                )
    return changes


class GroupSettings(Struct, frozen=True):
    """The settings of a single group, kept in the store. None: as the queue has it."""

    weight: int = 1
    max_running: int | None = None
    rate_count: int | None = None
    rate_per_ms: int | None = None
    max_pending: int | None = None
    paused: bool = False

    @property
    def limits(self) -> bool:
        """Whether it has a limit of its own."""
        return any(limit is not None for limit in (self.max_running, self.rate_count, self.max_pending))


DEFAULT_GROUP = GroupSettings()
#: As `NEW_SETTINGS`, for the settings of single groups.
NEW_GROUP_SETTINGS: frozenset[str] = frozenset()


def new_settings(changes: Mapping[str, Any]) -> frozenset[str]:
    """Return the changed settings of a queue that the release before does not know."""
    return NEW_SETTINGS.intersection(changes)


def new_group_settings(changes: Mapping[str, Any]) -> frozenset[str]:
    """Return the changed settings of a group that the release before does not know."""
    return NEW_GROUP_SETTINGS.intersection(changes)


def group_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the keywords of `configure_group` into validated fields of `GroupSettings`."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        match name:
            case "weight":
                changes[name] = check_count(name, value, 1, GROUP_WEIGHT_MAX, InvalidPolicy)
            case "max_running" | "max_pending":
                changes[name] = None if value is None else _positive(name, value)
            case "rate":
                changes["rate_count"], changes["rate_per_ms"] = (None, None) if value is None else parse_rate(value)
            case _:
                raise InvalidPolicy(
                    f"unknown group setting {name!r}; known are weight, max_running, rate and max_pending"
                )
    return changes


def parse_rate(value: str, name: str = "rate") -> tuple[int, int]:
    """Read "100/m", "5/s" or "10/500ms" as (count, window in milliseconds)."""
    match = RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidPolicy(f'{name} must look like "100/m", "5/s" or "10/500ms", not {show(value)}')
    count, times, unit = int(match[1]), int(match[2] or 1), UNIT_MS[match[3]]
    if count < 1 or times < 1:
        raise InvalidPolicy(f"{name} must be at least one per window, not {show(value)}; use pause to stop a queue")
    return count, times * unit


def format_rate(count: int | None, per_ms: int | None) -> str | None:
    """Return a rate as `parse_rate` reads it, with the largest unit that fits; None for none."""
    if count is None or per_ms is None:
        return None
    unit = next(unit for unit in ("h", "m", "s", "ms") if per_ms % UNIT_MS[unit] == 0)
    times = per_ms // UNIT_MS[unit]
    return f"{count}/{times if times > 1 else ''}{unit}"


def _positive(name: str, value: Any) -> int:
    return check_count(name, value, 1, 2**40, InvalidPolicy)


def _positive_ms(name: str, value: Any) -> int:
    return round(check_seconds(name, value, least=0.001, error=InvalidPolicy) * 1000)


def _lease_ms(value: Any) -> int:
    milliseconds = _positive_ms("lease", value)
    if milliseconds > LEASE_MS_MAX:
        raise InvalidPolicy("lease must be at most 30 days; renew a shorter one instead, so that a crash is noticed")
    return milliseconds


# ---- retry policies ------------------------------------------------------------------------------------------


class RetryPolicy(Protocol):
    """Decides about retries after failures. Any object with `delay` is one."""

    def delay(self, attempt: int, error: BaseException | None = None) -> Duration | None:
        """The pause in seconds, or as a timedelta, after failure number `attempt` (the first is 1); None: no more."""


class _Bounded(Struct, frozen=True, kw_only=True):
    """What the ready-made policies share. Durations are given in seconds or as timedeltas and kept in seconds."""

    #: The number of attempts, including the first.
    attempts: int = 10
    #: A thousand messages that failed together must not all be retried at the same time.
    jitter: float = 0.2
    #: No more retries once the sum of the delays (without jitter) would exceed this; None: only `attempts` counts.
    total_cap: Duration | None = None

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts, 1, 2**31, InvalidPolicy)
        check_number("jitter", self.jitter, 0, 1, InvalidPolicy)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "factor":
                check_number(name, value, 0, 1e9, InvalidPolicy)
            elif name not in ("attempts", "jitter") and value is not None:
                structs.force_setattr(self, name, check_seconds(name, value, error=InvalidPolicy))

    def _spread(self, seconds: float) -> float:
        return max(0.0, seconds * (1 + random.uniform(-self.jitter, self.jitter)))

    def _base(self, attempt: int) -> float:
        raise NotImplementedError

    def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
        """Seconds before the next try after failure number `attempt`, or None: no more."""
        if attempt >= self.attempts:
            return None
        pause = self._base(attempt)
        if self.total_cap is not None:
            waited = sum(self._base(earlier) for earlier in range(1, attempt))
            if waited + pause > cast("float", self.total_cap):
                return None
        return self._spread(pause)


class Exponential(_Bounded, frozen=True, kw_only=True):
    """1 s, 2 s, 4 s … up to `cap`. The default."""

    first: Duration = 1.0
    factor: float = 2.0
    cap: Duration = 300.0

    def _base(self, attempt: int) -> float:
        first, cap = cast("float", self.first), cast("float", self.cap)
        try:
            return min(cap, first * float(self.factor) ** (attempt - 1))
        except OverflowError:
            return cap if first else 0.0


class Linear(_Bounded, frozen=True, kw_only=True):
    """`step`, 2 × `step`, 3 × `step` … up to `cap`."""

    step: Duration = 5.0
    cap: Duration = 300.0

    def _base(self, attempt: int) -> float:
        return min(cast("float", self.cap), cast("float", self.step) * attempt)


class Constant(_Bounded, frozen=True, kw_only=True):
    """The same delay every time."""

    pause: Duration = 5.0

    def _base(self, attempt: int) -> float:
        return cast("float", self.pause)


class NoRetry(Struct, frozen=True):
    """No retries: the first failure is final."""

    def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
        """Always None."""
        return None


class ByException:
    """The policy of the first rule whose class matches the error, `otherwise` if none does.

        ByException((ConnectionError, Exponential()), ((ValueError, KeyError), NoRetry()), otherwise=Linear())

    A message has one count of attempts, for all classes of errors.
    """

    __slots__ = ("_rules", "otherwise")

    def __init__(
        self,
        *rules: tuple[type[BaseException] | tuple[type[BaseException], ...], RetryPolicy],
        otherwise: RetryPolicy | None = None,
    ) -> None:
        self.otherwise: RetryPolicy = Exponential() if otherwise is None else otherwise
        for rule in rules:
            if not isinstance(rule, tuple) or len(rule) != 2:
                raise InvalidPolicy(f"a rule is (exception class, retry policy), not {show(rule)}")
            kinds = rule[0] if isinstance(rule[0], tuple) else (rule[0],)
            if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
                raise InvalidPolicy(f"a rule is (exception class, retry policy), not {show(rule)}")
            check_retry(rule[1])
        self._rules = rules
        check_retry(self.otherwise)

    @property
    def policies(self) -> list[RetryPolicy]:
        """All the policies that may decide."""
        return [*(policy for _, policy in self._rules), self.otherwise]

    def delay(self, attempt: int, error: BaseException | None = None) -> Duration | None:
        """The pause after failure number `attempt` by the policy that fits the error, or None: no more."""
        for kinds, policy in self._rules:
            if isinstance(error, kinds):
                return policy.delay(attempt, error)
        return self.otherwise.delay(attempt, error)


#: The policies that a message can carry, by the name of their kind: numbers only, no code.
_NUMERIC: dict[str, type[Exponential] | type[Linear] | type[Constant] | type[NoRetry]] = {
    "exponential": Exponential, "linear": Linear, "constant": Constant, "none": NoRetry,
}  # fmt: skip
_KIND_NAMES = {kind: name for name, kind in _NUMERIC.items()}


def check_message_retry(policy: RetryPolicy) -> RetryPolicy:
    """Return a retry policy that a message can carry unchanged, or raise `InvalidPolicy`."""
    if type(policy) not in _KIND_NAMES:
        raise InvalidPolicy(
            f"retry of a message is Exponential, Linear, Constant or NoRetry, whose numbers travel with it, not "
            f"{show(policy)}: code and exception classes do not travel; give such a policy to the handler"
        )
    return policy


def pack_retry(policy: RetryPolicy) -> dict[str, Any]:
    """Return a numeric retry policy as plain values, for an envelope."""
    check_message_retry(policy)
    return {"kind": _KIND_NAMES[type(policy)], **structs.asdict(cast("Struct", policy))}  # type: ignore[index]


def unpack_retry(packed: Mapping[str, Any]) -> RetryPolicy:
    """Return the policy that `pack_retry` packed; LookupError or TypeError if a newer release did."""
    numbers = {name: value for name, value in packed.items() if name != "kind"}
    # MessagePack and JSON may write a whole number as a float and the reverse.
    if isinstance(numbers.get("attempts"), float):
        numbers["attempts"] = int(numbers["attempts"])
    return _NUMERIC[packed["kind"]](**numbers)


def parse_retry(text: str) -> RetryPolicy:
    """Read `exponential`, `linear:attempts=5,step=2` or `none` as a retry policy."""
    name, _, rest = text.strip().partition(":")
    kind = _NUMERIC.get(name.strip())
    if kind is None:
        raise InvalidPolicy(f"a retry policy is {', '.join(_NUMERIC)}, with settings after a colon, not {show(text)}")
    numbers: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in rest.split(","))):
        key, _, value = (part.strip() for part in setting.partition("="))
        if key not in kind.__struct_fields__:
            known = f"it has {', '.join(kind.__struct_fields__)}" if kind.__struct_fields__ else "it has none"
            raise InvalidPolicy(f"a retry policy {name} has no setting {show(key)}; {known}")
        try:
            numbers[key] = int(value) if key == "attempts" else float(value)
        except ValueError:
            raise InvalidPolicy(f"{key} of a retry policy is a number, not {show(value)}") from None
    return kind(**numbers)


def format_retry(policy: RetryPolicy) -> str:
    """Return a numeric policy as `parse_retry` reads it, with the settings that are not the defaults."""
    name, default = _KIND_NAMES[type(policy)], structs.asdict(type(policy)())  # type: ignore[index,arg-type]
    given = structs.asdict(cast("Struct", policy))
    changed = [f"{key}={value:g}" for key, value in given.items() if value is not None and value != default[key]]
    return f"{name}:{','.join(changed)}" if changed else name


def attempts_allowed(policy: RetryPolicy) -> int | None:
    """Return the maximum number of attempts of a retry policy; None if it has none, such as a custom one."""
    if isinstance(policy, NoRetry):
        return 1
    if isinstance(policy, _Bounded):
        return policy.attempts
    if isinstance(policy, ByException):
        allowed = [attempts_allowed(one) for one in policy.policies]
        return None if None in allowed else max(one for one in allowed if one is not None)
    return None


class CatchUp(Struct, frozen=True):
    """After missed fires, fire the newest `max_catchup` instants, in order, in one step."""

    max_catchup: int

    def __post_init__(self) -> None:
        # All of them are published in one step.
        check_count("max_catchup", self.max_catchup, 1, CHUNK_MESSAGES_MAX, InvalidSchedule)


#: `skip`: only the newest instant, and only within the grace. `once`: the newest, however late.
Missed = Literal["skip", "once"] | CatchUp
#: At an instant while the last run has not ended. `allow`: fire. `skip`: do not. `queue_one`: fire when the run ends.
Overlap = Literal["allow", "skip", "queue_one"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


def check_retry(policy: RetryPolicy) -> RetryPolicy:
    """Return a retry policy unchanged, or raise `InvalidPolicy`."""
    if isinstance(policy, type) or not callable(getattr(policy, "delay", None)):
        raise InvalidPolicy(f"a retry policy is an object with a method delay(attempt, error), not {show(policy)}")
    return policy


def check_priority(priority: int) -> int:
    """Return a priority unchanged, or raise `InvalidInput`."""
    return check_count("priority", priority, PRIORITY_MIN, PRIORITY_MAX)
