"""One queue as a model: what each verb means, in plain Python.

Other stores implement the same behaviour. This file is simple rather than fast; where they differ from it, they are
wrong: the conformance suite and the state machine compare them step by step.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, cast

from msgspec import structs

from waypost.errors import InvalidPolicy, WaypostError
from waypost.identity import Operation
from waypost.policy import (
    ARRIVAL_TTL_MS,
    BURY_MAX,
    CHANGES_KEPT,
    CLAIM_BYTES_MAX,
    DEFAULT_POLICY,
    FAILURE_EVENTS,
    HEAD_OFFSET,
    LAPSE_MAX,
    LEASE_NEEDED,
    MINUTES_KEPT,
    NO_END_MS,
    POLL_SOON_MESSAGES_MAX,
    POLL_SOON_MS_MAX,
    PROMOTE_MAX,
    RECLAIM_MAX,
    REMOVED_TTL_MS,
    REPLAY_MAX,
    SLEEPER_TTL_MS,
    STAMP_AHEAD_MS,
    GroupSettings,
    PolicyRecord,
)
from waypost.store.memory import chains, groups
from waypost.store.memory.records import ChainRecord, Holder, Record, Replays, run_of
from waypost.store.port import (
    Draft,
    Hold,
    SideEffects,
    Target,
    cut_error,
    error_to_keep,
    format_changes,
    queue_full,
    read_cursor,
)
from waypost.store.repeats import id_in_use, is_repeat
from waypost.values import (
    FAILURE_REASONS,
    MINUTE_COUNTERS,
    NOT_RUNS,
    REDELIVERY_CAUSES,
    CancelStatus,
    ChangeRecord,
    CheckPage,
    Claimed,
    Damage,
    EventName,
    EventRecord,
    ExtendStatus,
    Lease,
    Ledger,
    MessageState,
    MinuteRecord,
    Notice,
    PolledQueue,
    PriorityStatus,
    Published,
    PublishStatus,
    Purged,
    Redriven,
    RescheduleStatus,
    Settlement,
    SettleStatus,
    StatsRecord,
    StoredSchedule,
    Watched,
    chain_id,
    is_side_effect,
)

#: What a repair does with a message that no claim could reach.
AT_HEAD = "ready at the head of its priority"
#: Ends after which a key is free at once, even inside its window.
FREES_WINDOW = frozenset(("dead", "cancelled", "dropped", "replaced"))
#: Why a message is claimable again that was claimed since it joined its ordered group: it keeps its place there.
CLAIMED_BEFORE = frozenset(("expired", "released", "retried", "snoozed"))
#: Expired sessions that one step may delete.
SESSIONS_SWEPT = 2
#: The order in which each state is listed.
ORDERS: dict[MessageState, Callable[[Record], tuple[int | str, ...]]] = {
    "ready": lambda r: (-r.priority, r.position, r.id),
    "delayed": lambda r: (r.ready_ms, r.id),
    "waiting": lambda r: (r.id,),
    "leased": lambda r: (r.lease_end_ms or 0, r.id),
    "dead": lambda r: (r.ended_ms or 0, r.id),
}
#: How many values each order has.
LENGTHS: dict[MessageState, int] = {"ready": 3, "delayed": 2, "waiting": 1, "leased": 2, "dead": 2, "done": 1}


def _comparable(place: list[int | str]) -> list[tuple[bool, int | str]]:
    return [(isinstance(value, str), value) for value in place]


def _passes_cap(draft: Draft) -> bool:
    """Return whether it is part of a settle, so that it is never refused."""
    return draft.forwarded and not draft.capped


class QueueModel:
    """A queue. Every method is one atomic step at store time `now`."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Whether it exists: a claim of a name without a queue registers its sleeper, and creates no queue.
        self.made = False
        #: When a queue with this name was last removed, by which operation, and until when that is kept.
        self.removed_ms = 0
        self.removed_mark = b""
        self.removed_until = 0
        self.policy = DEFAULT_POLICY
        self.paused = False
        self.replays: dict[bytes, Replays] = {}
        self.sleepers: dict[str, int] = {}
        #: Until when the record of sleepers is valid; after it every worker is woken once.
        self.sleepers_known_until = 0
        #: Workers that poll again soon, and until when: until then no sleeper is woken for a few messages.
        self.polling_soon: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.minutes: dict[int, Counter[str]] = {}
        self.changes: list[ChangeRecord] = []
        self.journal: deque[EventRecord] = deque()
        self.journal_first = 1
        self.journal_last = 0
        self.readers: dict[str, int] = {}
        #: The side effects of the current step.
        self.also = SideEffects()
        self.messages: dict[str, Record] = {}
        self.results: dict[str, tuple[bytes, int]] = {}
        self.chains: dict[str, ChainRecord] = {}
        #: Clients that wait for the end of a message, and ends that a client waited for.
        self.awaited: dict[str, dict[str, int]] = {}
        self.ends: dict[str, tuple[Watched, int]] = {}
        #: Notices of the current step, which the store delivers to their queues.
        self.notices: list[Notice] = []
        #: Waiters that the current step wakes.
        self.waiters_to_wake: list[str] = []
        self.completed: deque[Record] = deque()
        self.keys: dict[str, Holder] = {}
        self.windows: dict[str, tuple[str, int]] = {}
        self.arrivals: dict[str, int] = {}
        self.schedules: dict[str, StoredSchedule] = {}
        self.sequence = 0
        #: The number of messages that became claimable in the current step: this many sleepers are woken.
        self.freshly_ready = 0
        self.rate_log: list[tuple[int, int]] = []
        #: The groups of a queue that takes turns between them: see `groups.py`. Their places in line, the place of
        #: the last turn, when the rates of others allow the next message, and what was claimed by these rates.
        self.line: dict[str, int] = {}
        self.turn = 0
        self.limited: dict[str, int] = {}
        self.group_claims: dict[str, dict[int, int]] = {}
        self.group_settings: dict[str, GroupSettings] = {}
        #: In the current step: ordered groups with messages that became ready, and groups that may go on.
        self.fresh_groups: set[str] = set()
        self.freed_groups: set[str] = set()

    # ---- publish -----------------------------------------------------------------------------------------

    def publish(
        self, now: int, drafts: Sequence[Draft], operation: Operation | None, *, schedule: str | None = None
    ) -> list[Published]:
        lapsed = self._lapsed_of(now, {draft.key for draft in drafts if draft.key is not None})
        if lapsed:
            # A message that has lapsed does not keep its key from the next one. If that is refused, nothing happens.
            before = deepcopy(self.__dict__)
            for record in lapsed:
                self._end(now, record, "dropped", operation, cause="lapsed")
            try:
                return self._publish(now, drafts, operation, schedule)
            except WaypostError:
                self.__dict__.update(before)
                raise
        return self._publish(now, drafts, operation, schedule)

    def _lapsed_of(self, now: int, keys: set[str]) -> list[Record]:
        """Return the messages of these keys that have lapsed, the earliest first."""
        found = [r for r in self.messages.values() if r.key in keys and self.has_key(r) and r.has_lapsed(now)]
        return sorted(found, key=lambda r: (r.expires_ms, r.id))

    def _publish(
        self, now: int, drafts: Sequence[Draft], operation: Operation | None, schedule: str | None
    ) -> list[Published]:
        plans = [self._plan(now, draft) for draft in drafts]
        for draft, (action, _) in zip(drafts, plans, strict=True):
            if action in ("new", "park", "replace") and draft.id in self.messages:
                raise id_in_use(self.name, draft.id)
        self._make_room(now, drafts, plans, operation)
        results = [
            self._store(now, draft, action, holder_id, operation, schedule)
            for draft, (action, holder_id) in zip(drafts, plans, strict=True)
        ]
        self._count_over_cap(
            sum(
                _passes_cap(draft) and action in ("new", "park")
                for draft, (action, _) in zip(drafts, plans, strict=True)
            )
        )
        return results

    def _plan(self, now: int, draft: Draft) -> tuple[str, str]:
        """Return what to do with a draft, and the id of the message that it concerns. Changes nothing."""
        if draft.forwarded and (draft.id in self.messages or self.arrivals.get(draft.id, 0) > now):
            return "arrived", draft.id
        if draft.key is None:
            return "new", draft.id
        holder = self.keys.get(draft.key)
        if holder is None:
            holder_id, until = self.windows.get(draft.key, ("", 0))
            if until <= now:
                return "new", draft.id
            return ("conflict" if draft.on_conflict == "error" else "duplicate"), holder_id
        standing = holder.parked or holder.owner
        if draft.on_conflict == "keep":
            return "duplicate", standing
        if draft.on_conflict == "error":
            return "conflict", standing
        if holder.parked is None and self.messages[holder.owner].state == "leased":
            return "park", holder.owner
        return draft.on_conflict, standing

    def _key_in_use(self, now: int, key: str, letter: str) -> bool:
        """Return whether this key is in use: by an unfinished message, inside a window, or by another dead letter."""
        holder_id, until = self.windows.get(key, ("", 0))
        return key in self.keys or (until > now and holder_id != letter)

    def has_key(self, record: Record) -> bool:
        """Return whether an unfinished message has its key, or waits for it. One may have given it up at its claim."""
        holder = None if record.key is None else self.keys.get(record.key)
        return holder is not None and record.id in (holder.owner, holder.parked)

    def _make_room(
        self, now: int, drafts: Sequence[Draft], plans: list[tuple[str, str]], operation: Operation | None
    ) -> None:
        added = [
            draft
            for draft, (action, _) in zip(drafts, plans, strict=True)
            if action in ("new", "park") and not _passes_cap(draft)
        ]
        # One that replaces a message of another group is one more in its own.
        moved = [
            draft
            for draft, (action, holder_id) in zip(drafts, plans, strict=True)
            if action == "replace" and not _passes_cap(draft) and self.messages[holder_id].group != draft.group
        ]
        concerned = {holder_id for _, holder_id in plans}
        doomed = groups.over_caps(self, added + moved, concerned) if self.policy.grouped else []
        doomed += self._over_cap(len(added), len(doomed), concerned | {record.id for record in doomed})
        for record in doomed:
            self._end(now, record, "dropped", operation, cause="overload")

    def _over_cap(self, added: int, dropped: int, concerned: set[str]) -> list[Record]:
        """Return what must be dropped so that the queue has no more than `max_pending`; raises `QueueFull`."""
        cap = self.policy.max_pending
        if cap is None or added == 0:
            return []
        pending = self._pending()
        # A much lower cap is reached step by step, so that no publish has to drop a whole queue.
        over = min(pending - dropped + added - cap, added + BURY_MAX)
        if over <= 0:
            return []
        if self.policy.overload == "drop_oldest":
            if self.policy.grouped:
                droppable = groups.longest_first(self, over, concerned)
            else:
                droppable = [r for r in self._ready() if r.id not in concerned]
                droppable.sort(key=lambda r: (r.priority, r.position, r.id))
            if len(droppable) >= over:
                return droppable[:over]
        raise queue_full(self.name, pending, cap)

    def _pending(self) -> int:
        return self.count("ready") + self.count("delayed") + self.count("waiting")

    def _count_over_cap(self, added: int) -> None:
        """Count how many of the messages that were just accepted regardless of the cap exceed it."""
        if added and self.policy.max_pending is not None:
            self.counts["over_cap"] += min(added, max(0, self._pending() - self.policy.max_pending))

    def _store(
        self, now: int, draft: Draft, action: str, holder_id: str, operation: Operation | None, schedule: str | None
    ) -> Published:
        status: PublishStatus
        if draft.forwarded and action != "arrived":
            # Also if its key is in use: that answer is final, and must not change when it is sent again.
            self.arrivals = {id: until for id, until in self.arrivals.items() if until > now}
            self.arrivals[draft.id] = now + ARRIVAL_TTL_MS
        if action in ("duplicate", "conflict", "arrived"):
            self.count_up(now, "duplicates")
            self.note(now, "duplicate", operation, None, message_id=holder_id, key=draft.key)
            if draft.forwarded and draft.chain is not None and action != "arrived":
                # Another message, not of this chain, replaces it: its branch ends here.
                chains.notify_chain(self, draft.chain, draft.id, 0, (), "duplicate")
            return Published(holder_id, "conflict" if action == "conflict" else "duplicate", self.name)
        due = draft.at_ms if draft.at_ms is not None else now + draft.delay_ms
        if action == "extend":
            record = self.messages[holder_id]
            if record.state != "waiting":
                if record.cause not in CLAIMED_BEFORE:
                    record.position = 0  # never claimed: it joins its group again when it is due
                self.make_claimable(now, record, max(due, now))
            else:
                record.ready_ms = due if due > now else record.published_ms
            self.note(now, "postponed", operation, record, due_ms=max(due, now))
            return Published(record.id, "extended", self.name)

        record = Record(
            draft.id, draft.envelope, draft.key, draft.group, draft.priority, now, max(due, now),
            chain=draft.chain, blockers=draft.after, expires_ms=draft.expiry(now), unique=draft.unique,
        )  # fmt: skip
        cause: str | None = "forwarded" if draft.forwarded else None
        status = "delayed" if due > now else "queued"
        if action == "park":
            record.state, cause = "waiting", "parked"
            self.keys[draft.key or ""].parked = record.id
            status = "replaced" if draft.on_conflict == "replace" else "extended"
        elif action == "replace":
            cause, status = "replace", "replaced"
            old = self.messages[holder_id]
            holder = self.keys[draft.key or ""]
            if old.state == "waiting":
                record.state, holder.parked = "waiting", record.id
            else:
                holder.owner = record.id
            self._end(now, old, "replaced", operation, cause="publish")
        elif draft.key is not None:
            self.keys[draft.key] = Holder(record.id)
        elif record.blockers:
            record.state, cause = "waiting", "blocked"
        if draft.key is not None and draft.window_ms:
            self.windows = {key: window for key, window in self.windows.items() if window[1] > now}
            self.windows[draft.key] = (record.id, now + draft.window_ms)
        self.messages[record.id] = record
        chains.begin(self, now, record)
        if record.state != "waiting":
            self.make_claimable(now, record, record.ready_ms)
        self.count_up(now, "published")
        body = None
        if self.policy.journal == "full":
            body = draft.envelope if draft.journal_copy is None else draft.journal_copy
        self.note(
            now, "published", operation, record, cause=cause, due_ms=record.ready_ms if due > now else None, body=body,
            schedule=schedule,
        )  # fmt: skip
        return Published(record.id, status, self.name)

    # ---- claim -------------------------------------------------------------------------------------------

    def claim(
        self,
        now: int,
        limit: int,
        operation: Operation,
        nonce: bytes,
        worker: str,
        sleeper: str | None,
        poll_soon_ms: int | None = None,
        bytes_max: int = CLAIM_BYTES_MAX,
    ) -> tuple[Claimed, list[str]]:
        if sleeper is not None:
            self.sleepers.pop(sleeper, None)
        if poll_soon_ms is not None:
            self.polling_soon.pop(worker, None)
        leases: list[Lease] = []
        next_rate_ms, more = None, False
        if not self.paused:
            self.promote(now, operation)
            self._cap_leases(now)
            self._reclaim(now, operation)
            self.lapse(now, operation)
            groups.join_again(self, now)
            leases, more = self._lease(now, self._room(now, limit), bytes_max, operation, nonce, worker)
            next_rate_ms = self.next_rate(now)
            if next_rate_ms is None:
                next_rate_ms = groups.next_allowed(self, now)
        else:
            self.lapse(now, operation)
        self._trim_dead(now)
        if sleeper is not None and len(leases) < limit and not more:
            # It took all messages and could take more; a claim of nothing only unregisters the sleeper.
            self.sleepers = {name: until for name, until in self.sleepers.items() if until > now}
            self.sleepers[sleeper] = now + SLEEPER_TTL_MS
            self.sleepers_known_until = now + SLEEPER_TTL_MS
        if poll_soon_ms and len(leases) < limit and not more:
            self.polling_soon = {name: until for name, until in self.polling_soon.items() if until > now}
            self.polling_soon[worker] = now + min(poll_soon_ms, POLL_SOON_MS_MAX)
        return self._claimed(now, leases, next_rate_ms, more), [lease.id for lease in leases]

    def claim_again(self, now: int, ids: Iterable[str], held: bytes, nonce: bytes) -> Claimed:
        """The answer to a repeated claim: what is still leased under its nonce, armed anew, nothing counted.

        From here on the leases belong to this attempt alone: another process may have got the first answer.
        """
        leases = []
        for message_id in ids:
            record = self.messages.get(message_id)
            if record is not None and record.state == "leased" and record.nonce == held:
                record.nonce = nonce
                record.lease_end_ms = now + record.lease_ms
                leases.append(self._lease_of(record))
        return self._claimed(now, leases, None, bool(leases))

    def _claimed(self, now: int, leases: list[Lease], next_rate_ms: int | None, more: bool) -> Claimed:
        return Claimed(
            leases, self.next_moment(now), self.next_lease(now), next_rate_ms, self.paused, 0, self.policy.lease_ms,
            more, grouped=self.policy.grouped,
        )  # fmt: skip

    def poll(self, now: int, sleeper: str | None) -> PolledQueue:
        """Return whether a claim may return something. Renews the registration of a sleeper."""
        next_due, next_lease = self.next_moment(now), self.next_lease(now)
        if self.paused:
            next_due, next_lease = self.next_lapse(now), None
        ready = groups.needs_claim(self, now) if self.policy.grouped else self.count("ready") > 0
        needs_claim = next_due == 0 or next_lease == 0 or (ready and not self.paused)
        needs_claim = needs_claim or self._has_old_dead(now)
        # A claim shortens leases from before the clock was set back to their own length.
        needs_claim = needs_claim or (next_lease or 0) > (self.policy.lease_ms or math.inf)
        if sleeper is not None:
            until = self.sleepers.get(sleeper, 0)
            needs_claim = needs_claim or until <= now
            if now < until < now + SLEEPER_TTL_MS // 2:
                self.sleepers[sleeper] = self.sleepers_known_until = now + SLEEPER_TTL_MS
        if self.policy.grouped and not self.paused:
            allowed = groups.next_allowed(self, now)
            next_due = min((moment for moment in (next_due, allowed) if moment is not None), default=None)
        return PolledQueue(needs_claim, next_due, next_lease, self.policy.lease_ms)

    def _has_old_dead(self, now: int) -> bool:
        keep = self.policy.dead_keep_ms
        return keep is not None and any((r.ended_ms or 0) <= now - keep for r in self._in("dead"))

    def promote(self, now: int, operation: Operation | None) -> None:
        due = sorted((r for r in self._in("delayed") if r.ready_ms <= now), key=lambda r: (r.ready_ms, r.id))
        for record in due[:PROMOTE_MAX]:
            self.make_claimable(now, record, record.ready_ms)
            self.note(now, "promoted", operation, record, cause="due")

    def lapse(self, now: int, operation: Operation | None) -> None:
        """End messages whose expiry is over, the earliest first."""
        lapsed = sorted((r for r in self.messages.values() if r.has_lapsed(now)), key=lambda r: (r.expires_ms, r.id))
        for record in lapsed[:LAPSE_MAX]:
            self._end(now, record, "dropped", operation, cause="lapsed")

    def _cap_leases(self, now: int) -> None:
        """Return whether a lease is from before the clock was set back: it ends later than its own length from now."""
        for record in self._in("leased"):
            record.lease_end_ms = min(record.lease_end_ms or 0, now + record.lease_ms)

    def _reclaim(self, now: int, operation: Operation) -> None:
        expired = [r for r in self._in("leased") if (r.lease_end_ms or 0) <= now]
        expired.sort(key=lambda r: (r.lease_end_ms or 0, r.id))
        for record in expired[:RECLAIM_MAX]:
            if self._ends_otherwise(now, record, operation, "expired"):
                continue
            self.count_up(now, "expired")
            self.note(now, "expired", operation, record, **run_of(now, record))
            groups.released(self, record)
            deadline = record.lease_end_ms or 0
            self._to_head(record, deadline, "expired")

    def _room(self, now: int, limit: int) -> int:
        """Return how many may be leased now."""
        policy, room = self.policy, limit
        if policy.max_running is not None:
            room = min(room, max(0, policy.max_running - self.count("leased")))
        if policy.rate_count is not None and policy.rate_per_ms is not None:
            self.rate_log = [(at, n) for at, n in self.rate_log if at > now - policy.rate_per_ms]
            if self.rate_log and self.rate_log[-1][0] > now:
                # The clock was set back. The whole window counts from now on, not until the clock reaches the old time.
                self.rate_log = [(now, sum(n for _, n in self.rate_log))]
            room = min(room, max(0, policy.rate_count - sum(n for _, n in self.rate_log)))
        return room

    def next_rate(self, now: int) -> int | None:
        """Return the time until the rate allows another message; None if it allows one now."""
        policy = self.policy
        if policy.rate_count is None or policy.rate_per_ms is None:
            return None
        used_up = sum(n for _, n in self.rate_log) >= policy.rate_count
        return self.rate_log[0][0] + policy.rate_per_ms - now if used_up else None

    def _lease(
        self, now: int, room: int, bytes_max: int, operation: Operation, nonce: bytes, worker: str
    ) -> tuple[list[Lease], bool]:
        """Lease messages in order, up to the first that does not fit; return also whether there is one."""
        leases: list[Lease] = []
        buried, left, more = 0, bytes_max, False
        candidates = self._candidates(now)
        while len(leases) < room and (record := next(candidates, None)) is not None:
            if record.has_lapsed(now):
                self._end(now, record, "dropped", operation, cause="lapsed")
                continue
            if self.policy.max_deliveries is not None and record.deliveries >= self.policy.max_deliveries:
                if buried == BURY_MAX:
                    break
                buried += 1
                self.bury(now, record, "max_deliveries", operation)
                continue
            left -= len(record.envelope)
            if left < 0 and leases:
                more = True
                break
            self.count_up(now, "claims")
            self._time(now, "wait_ms", now - record.ready_ms)
            self.count_up(now, "first_claims" if record.token == 0 else f"again_{record.cause}")
            record.token += 1
            record.deliveries += 1
            record.nonce, record.worker, record.claimed_ms = nonce, worker, now
            self.note(
                now, "claimed", operation, record,
                worker=worker, wait_ms=now - record.ready_ms, cause=record.cause,
            )  # fmt: skip
            if record.key is not None and record.unique == "until_claimed":
                self._release_key(now, record, record.key, "claimed", operation)
            if self.policy.lease_ms is None:
                record.lease_end_ms = None
                leases.append(self._lease_of(record))
                self._end(now, record, "done", operation, cause="at_most_once")
            else:
                record.state, record.lease_ms = "leased", self.policy.lease_ms
                record.lease_end_ms = now + record.lease_ms
                leases.append(self._lease_of(record))
            if self.policy.grouped:
                groups.took(self, now, record)
        if leases and self.policy.rate_count is not None:
            self.rate_log.append((now, len(leases)))
        return leases, more

    def _candidates(self, now: int) -> Iterator[Record]:
        """Return the messages in the order in which they are claimed; the next one only after the last was taken."""
        if self.policy.grouped:
            return iter(lambda: cast(Record, groups.next_in_turn(self, now)), None)
        return iter(sorted(self._ready(), key=ORDERS["ready"]))

    @staticmethod
    def _lease_of(r: Record) -> Lease:
        return Lease(
            r.id, r.token, r.nonce, r.deliveries, r.attempts, r.priority, r.key, r.group,
            r.published_ms, r.ready_ms, r.claimed_ms or 0, r.lease_end_ms, r.envelope, r.chain,
        )  # fmt: skip

    # ---- settle, extend, cancel --------------------------------------------------------------------------

    def held(self, id: str, token: int, nonce: bytes) -> Record | None:
        """Return the message if this token and nonce still hold its lease: the fence."""
        record = self.messages.get(id)
        if record is None or record.state != "leased" or record.token != token or record.nonce != nonce:
            return None
        return record

    def settle(self, now: int, settlement: Settlement, operation: Operation) -> SettleStatus:
        record = self.held(settlement.id, settlement.token, settlement.nonce)
        if record is None:
            return "lost"
        outcome = settlement.outcome
        if outcome == "done":
            if settlement.result is not None:
                self.results = {id: kept for id, kept in self.results.items() if kept[1] > now}
                self.results[record.id] = (settlement.result, now + settlement.result_ttl_ms)
            begun = tuple(chain_id(one.queue, one.id) for one in settlement.then)
            self._end(now, record, "done", operation, begun=begun)
            return "done"
        if record.cancel_requested:
            self._end(now, record, "cancelled", operation, cause=outcome)
            return "cancelled"
        if outcome in ("retry", "dead"):
            record.error_type = settlement.error_type
            record.error = error_to_keep(self.policy, settlement.error)
        if outcome == "dead":
            if settlement.reason in FAILURE_REASONS:
                record.attempts += 1
            self.bury(now, record, settlement.reason or "rejected", operation)
            return "dead"
        if outcome == "drop":
            self._end(now, record, "dropped", operation, cause="drop")
            return "dropped"
        if self._ends_otherwise(now, record, operation, outcome):
            return "replaced"
        status: SettleStatus
        if outcome == "release":
            status = "released"
            record.deliveries -= 1
            self.count_up(now, status)
            self.note(now, status, operation, record, **run_of(now, record))
            groups.released(self, record)
            self._to_head(record, now, status)
            return status
        if outcome == "retry":
            status = "retried"
            record.attempts += 1
        else:
            status = "snoozed"
            record.deliveries -= 1
        record.ready_ms, record.cause = now + settlement.after_ms, status
        self.count_up(now, status)
        self._count_run(now, record)
        self.note(
            now, status, operation, record, due_ms=record.ready_ms,
            reason=settlement.reason, error_type=settlement.error_type,
            error=cut_error(settlement.error) if status == "retried" else None,
            **run_of(now, record),
        )  # fmt: skip
        groups.released(self, record)
        self.make_claimable(now, record, record.ready_ms)
        record.holds = record.state == "delayed" and groups.is_ordered(self, record)
        return status

    def extend(self, now: int, hold: Hold) -> ExtendStatus:
        record = self.held(hold.id, hold.token, hold.nonce)
        if record is None:
            return "lost"
        # The length at the claim: its worker renews by that, whatever the queue's lease is now.
        record.lease_end_ms = now + record.lease_ms
        return "cancel" if record.cancel_requested else "ok"

    def cancel(self, now: int, target: Target, operation: Operation) -> CancelStatus:
        if target.key is not None:
            holder = self.keys.get(target.key)
            if holder is None:
                return "finished" if self.windows.get(target.key, ("", 0))[1] > now else "unknown"
            if holder.parked is not None:
                self._end(now, self.messages[holder.parked], "cancelled", operation, cause="parked")
            return self._cancel_one(now, self.messages[holder.owner], operation)
        record = self.messages.get(target.id or "")
        if record is not None:
            return self._cancel_one(now, record, operation)
        kept = self.results.get(target.id or "")
        if any(r.id == target.id for r in self.completed) or (kept is not None and kept[1] > now):
            return "finished"
        return "unknown"

    def _cancel_one(self, now: int, record: Record, operation: Operation) -> CancelStatus:
        if record.state == "dead":
            return "finished"
        if record.state == "leased":
            if not record.cancel_requested:
                record.cancel_requested = True
                self.note(now, "cancel_requested", operation, record)
            return "requested"
        self._end(now, record, "cancelled", operation, cause="request")
        return "cancelled"

    def reschedule(self, now: int, target: Target, due_ms: int, operation: Operation) -> RescheduleStatus:
        """Give a timer another due time; now if that is over."""
        holder = None if target.key is None else self.keys.get(target.key)
        record = self.messages.get(target.id or "" if holder is None else holder.owner)
        if record is None or record.state == "dead":
            return "unknown"
        if record.state != "delayed":
            return "due"
        self.make_claimable(now, record, max(due_ms, now))
        self.note(now, "postponed", operation, record, due_ms=record.ready_ms)
        return "moved"

    def change_priority(self, now: int, id: str, priority: int, operation: Operation) -> PriorityStatus:
        """Give a message another priority; a ready one goes to the end of it."""
        record = self.messages.get(id)
        if record is None or record.state == "dead":
            return "unknown"
        if record.state not in ("ready", "delayed") or record.priority == priority or groups.is_ordered(self, record):
            return "unchanged"
        record.priority = priority
        if record.state == "ready":
            self.make_claimable(now, record, min(record.ready_ms, now))
        self.note(now, "postponed", operation, record, cause="priority", due_ms=record.ready_ms)
        return "changed"

    # ---- dead letters ------------------------------------------------------------------------------------

    def redrive(self, now: int, limit: int, operation: Operation, ids: Sequence[str], reason: str | None) -> Redriven:
        dead = sorted(self._in("dead"), key=lambda r: (r.ended_ms or 0, r.id))
        chosen = [r for r in dead if (not ids or r.id in ids) and (reason is None or r.reason == reason)]
        if reason is None and not ids:
            # Without a filter, letters that stay dead as duplicates would be chosen again and again.
            chosen = [r for r in chosen if r.reason != "duplicate"]
        moved, duplicates = [], []
        for record in chosen[:limit]:
            if record.key is not None and self._key_in_use(now, record.key, record.id):
                record.reason = "duplicate"
                duplicates.append(record.id)
                continue
            if record.key is not None:
                self._forget_window(record)
                self.keys[record.key] = Holder(record.id)
            record.deliveries = record.attempts = 0
            record.reason = record.error_type = record.error = record.ended_ms = None
            record.ready_ms, record.cause, record.cancel_requested = now, "redriven", False
            record.position = 0
            self.count_up(now, "redriven")
            self.note(now, "redriven", operation, record)
            self.make_claimable(now, record, now)
            moved.append(record.id)
        self._count_over_cap(len(moved))
        return Redriven(moved, duplicates, len(chosen) > limit)

    def replace_dead(self, now: int, message_id: str, draft: Draft, operation: Operation) -> Published | None:
        letter = self.messages.get(message_id)
        if letter is None or letter.state != "dead":
            return None
        # The message takes over what the letter has: how long its key is in use, and the key itself.
        windows = dict(self.windows)
        self._forget_window(letter)
        try:
            (published,) = self.publish(now, [structs.replace(draft, unique=letter.unique)], operation)
        except WaypostError:
            self.windows = windows
            raise
        if published.status in ("queued", "delayed"):
            del self.messages[letter.id]
            self.note(now, "dead_trimmed", operation, letter, cause="edited")
        else:
            self.windows = windows
        return published

    def purge(self, now: int, state: MessageState, limit: int, operation: Operation, ids: Sequence[str] = ()) -> Purged:
        if state == "done":
            removed = min(limit, len(self.completed))
            for _ in range(removed):
                self.completed.popleft()
            return Purged(removed, bool(self.completed))
        chosen = sorted((r for r in self._in(state) if not ids or r.id in ids), key=self._order(state))
        for record in chosen[:limit]:
            if state == "dead":
                del self.messages[record.id]
                self._forget_window(record)
                self.note(now, "dead_trimmed", operation, record, cause="purge")
            else:
                self._end(now, record, "cancelled", operation, cause="purge")
        return Purged(min(limit, len(chosen)), len(chosen) > limit)

    def bury(self, now: int, record: Record, reason: str, operation: Operation | None) -> None:
        record.reason = reason
        record.ended_ms = now
        self._end(now, record, "dead", operation)
        self._trim_dead(now)

    def _trim_dead(self, now: int) -> None:
        dead = sorted(self._in("dead"), key=lambda r: (r.ended_ms or 0, r.id))
        surplus = 0 if self.policy.dead_max is None else max(0, len(dead) - self.policy.dead_max)
        keep = self.policy.dead_keep_ms
        old = 0 if keep is None else sum((r.ended_ms or 0) <= now - keep for r in dead)
        for record in dead[: min(RECLAIM_MAX, max(surplus, old))]:
            del self.messages[record.id]
            self._forget_window(record)
            self.note(now, "dead_trimmed", None, record, cause="dead_max" if surplus else "dead_keep")

    # ---- how a message moves -----------------------------------------------------------------------------

    def make_claimable(self, now: int, record: Record, ready_ms: int) -> None:
        """Put a message at the end of its priority, or among the timers if it is not due.

        In an ordered group it keeps its place, if it has one.
        """
        record.ready_ms = ready_ms
        if ready_ms > now:
            record.state = "delayed"
            return
        if not (groups.is_ordered(self, record) and record.position):
            self.sequence += 1
            record.position = self.sequence
        self._is_ready(record)

    def _to_head(self, record: Record, ready_ms: int, cause: str) -> None:
        """Put a message before all others of its priority, in the order of `ready_ms`; back into an ordered group."""
        record.cause, record.ready_ms = cause, ready_ms
        if not (groups.is_ordered(self, record) and record.position):
            record.position = ready_ms - HEAD_OFFSET
        self._is_ready(record)

    def _is_ready(self, record: Record) -> None:
        record.state, record.holds = "ready", False
        group = groups.name_of(record)
        # An ordered group hands out one, however many became ready.
        if not groups.is_ordered(self, record) or group not in self.fresh_groups:
            self.freshly_ready += 1
        if groups.is_ordered(self, record):
            self.fresh_groups.add(group)
        groups.join(self, group)

    def _ends_otherwise(self, now: int, record: Record, operation: Operation, cause: str) -> bool:
        """End a delivery that would be returned, if it was cancelled or its key has a successor."""
        if record.cancel_requested:
            self._end(now, record, "cancelled", operation, cause=cause)
            return True
        holder = None if record.key is None else self.keys.get(record.key)
        if holder is not None and holder.owner == record.id and holder.parked is not None:
            self._end(now, record, "replaced", operation, cause=cause)
            return True
        return False

    def _end(
        self,
        now: int,
        record: Record,
        how: EventName,
        operation: Operation | None,
        *,
        cause: str | None = None,
        begun: tuple[str, ...] = (),
    ) -> None:
        """End a message: count and journal it, and free its key or pass it to the successor."""
        self.count_up(now, how)
        if record.state == "leased" and cause not in NOT_RUNS:
            self._count_run(now, record)
        details = run_of(now, record) if record.state == "leased" else {}
        self.note(
            now, how, operation, record, cause=cause,
            reason=record.reason if how == "dead" else None,
            error_type=record.error_type if how == "dead" else None,
            error=cut_error(record.error) if how == "dead" else None, **details,
        )  # fmt: skip
        if record.state == "leased" or record.holds:
            groups.released(self, record)
            record.holds = False
        record.expires_ms = None
        if how == "dead":
            record.state = "dead"
        else:
            self.messages.pop(record.id, None)
        if how == "done" and self.policy.completed_max:
            record.state, record.ended_ms = "done", now
            self.completed.append(record)
            while len(self.completed) > self.policy.completed_max:
                self.completed.popleft()
        chains.ended(self, now, record, how, begun)
        if record.key is not None:
            self._release_key(now, record, record.key, how, operation)

    def _release_key(self, now: int, record: Record, key: str, how: str, operation: Operation | None) -> None:
        if how in FREES_WINDOW:
            self._forget_window(record)
        holder = self.keys.get(key)
        if holder is None:
            return
        if holder.parked == record.id:
            holder.parked = None
        elif holder.owner == record.id:
            if holder.parked is None:
                del self.keys[key]
                if how == "dead" and record.unique == "live_or_dead":
                    # As in the window of a finished message: there is nothing to replace or to extend.
                    self.windows[key] = (record.id, NO_END_MS)
                return
            heir = self.messages[holder.parked]
            holder.owner, holder.parked = heir.id, None
            self.make_claimable(now, heir, heir.ready_after_wait(now))
            self.note(now, "promoted", operation, heir, cause="unparked")

    def _forget_window(self, record: Record) -> None:
        """End the window of a message: that of a publish, or that of a dead letter."""
        if record.key is not None and self.windows.get(record.key, ("", 0))[0] == record.id:
            del self.windows[record.key]

    def check(self, now: int, *, mend: bool) -> CheckPage:
        """Put messages in an invalid state at the head of their priority; set counters to what is stored."""
        damages = []
        for record in list(self.messages.values()):
            if record.state in ORDERS:
                continue
            found = f"its state is {record.state}, so no claim can reach it"
            if mend:
                record.nonce, record.cancel_requested = b"", False
                gave_up = record.unique == "until_claimed" and record.token > 0
                owner = None if record.key is None or gave_up else self.keys.setdefault(record.key, Holder(record.id))
                if owner is not None and owner.owner != record.id:
                    record.key = None
                cause = record.cause if record.cause in REDELIVERY_CAUSES else "expired"
                self._to_head(record, now, cause)
                record.cause = cause if record.token else None
                self.note(now, "promoted", None, record, cause="mended")
                self.note(now, "configured", None, None, cause=f"mended stranded {record.id}: {AT_HEAD}")
            damages.append(Damage(self.name, "stranded", record.id, found, AT_HEAD if mend else None))
        damages += groups.check(self, now, mend=mend)
        balance = self.ledger().balance
        if balance:
            if mend:
                self.counts["dropped" if balance > 0 else "published"] += abs(balance)
                self.note(now, "configured", None, None, cause=f"mended counters: the ledger was off by {balance}")
            done = "counted anew" if mend else None
            damages.append(Damage(self.name, "counters", None, f"the ledger is off by {balance}", done))
        return CheckPage(len(self.messages), damages, None)

    # ---- removal -----------------------------------------------------------------------------------------

    def left(self, now: int) -> dict[str, int]:
        """Return what prevents the removal of this queue."""
        states: tuple[MessageState, ...] = ("ready", "delayed", "waiting", "leased", "dead")
        counts: dict[str, int] = {state: self.count(state) for state in states}
        counts |= {
            "schedules": len(self.schedules),
            "chains": sum(not chain.state().is_finished for chain in self.chains.values()),
            "readers": len(self.readers),
            "damaged": len(self.messages) - sum(counts.values()),
        }
        return {name: count for name, count in counts.items() if count}

    def successor(self, now: int, mark: bytes) -> QueueModel:
        """What is remembered of this queue after its removal; a new queue of the same name goes on from it.

        Operations and arrivals, until none can be repeated any more; and the last number of the journal.
        """
        model = type(self)(self.name)
        model.removed_ms, model.removed_mark, model.removed_until = now, mark, now + REMOVED_TTL_MS
        model.replays, model.arrivals = self.replays, self.arrivals
        model.journal_last, model.journal_first = self.journal_last, self.journal_last + 1
        return model

    def is_wanted(self, now: int) -> bool:
        """Return whether anything must be kept for this name, whether it is a queue or not."""
        waited_for = self.removed_until > now or any(until > now for until in self.sleepers.values())
        return self.made or waited_for or bool(self.messages) or any(r.until_ms > now for r in self.replays.values())

    def set_paused(self, now: int, paused: bool) -> bool:
        """Return whether this changed anything."""
        if self.paused == paused:
            return False
        self.paused = paused
        event: EventName = "paused" if paused else "resumed"
        self.note(now, event, None, None)
        self._keep_change(now, event, "")
        return True

    def configure(self, now: int, changes: Mapping[str, Any]) -> PolicyRecord:
        """Change the policy. A change that changes nothing is journalled, and not marked on charts."""
        before, text = self.policy, format_changes(changes)
        after = before.changed(changes)
        if after.grouped and after.lease_ms is None and any(own.limits for own in self.group_settings.values()):
            raise InvalidPolicy(LEASE_NEEDED)
        self.policy = after
        if before.grouped or self.policy.grouped:
            groups.configured(self, ordered_before=before.order is not None)
        self.note(now, "configured", None, None, cause=text)
        if self.policy != before:
            self._keep_change(now, "configured", text)
        return self.policy

    def _keep_change(self, now: int, event: EventName, text: str) -> None:
        self.changes = [*self.changes, ChangeRecord(now, event, text)][-CHANGES_KEPT:]

    # ---- messages by state, and figures --------------------------------------------------------------

    def _in(self, state: MessageState) -> list[Record]:
        return [r for r in self.messages.values() if r.state == state]

    def _ready(self) -> list[Record]:
        return self._in("ready")

    def count(self, state: MessageState) -> int:
        return sum(r.state == state for r in self.messages.values())

    def next_due_at(self) -> int | None:
        return min((r.ready_ms for r in self._in("delayed")), default=None)

    def next_due(self, now: int) -> int | None:
        due = self.next_due_at()
        return None if due is None else max(0, due - now)

    def next_moment(self, now: int) -> int | None:
        """Return the time until the next timer is due or the next message lapses."""
        moments = (self.next_due(now), self.next_lapse(now))
        return min((moment for moment in moments if moment is not None), default=None)

    def next_lapse(self, now: int) -> int | None:
        """Return the time until the next message lapses."""
        ends = (r.expires_ms for r in self.messages.values() if r.can_lapse)
        return min((max(0, end - now) for end in ends if end is not None), default=None)

    def next_lease(self, now: int) -> int | None:
        return min((max(0, (r.lease_end_ms or 0) - now) for r in self._in("leased")), default=None)

    def listing(self, state: MessageState, cursor: str | None = None) -> list[tuple[Record, list[int | str]]]:
        """Return the messages of a state behind a cursor, in their order, each with its own place in the listing."""
        if state == "done":
            places: Any = [(record, [at]) for at, record in enumerate(self.completed)]
        else:
            order = self._order(state)
            places = [(record, list(order(record))) for record in sorted(self._in(state), key=order)]
        length = LENGTHS[state] + (state == "ready" and self.policy.grouped)
        after = read_cursor(cursor, length)
        if after is None:
            return cast("list[tuple[Record, list[int | str]]]", places)
        # Numbers before texts: a cursor of another listing may have the one in place of the other.
        behind = _comparable(after)
        return [(record, place) for record, place in places if _comparable(place) > behind]

    def _order(self, state: MessageState) -> Callable[[Record], tuple[int | str, ...]]:
        """Return the order of a listing. Ready messages of a queue that takes turns are listed by group.

        In what order the groups are listed is left to each store.
        """
        if state == "ready" and self.policy.grouped:
            return lambda record: (groups.name_of(record), *groups.place(self, record))
        return ORDERS[state]

    def _oldest_ready(self, now: int) -> int | None:
        """Return the longest wait among the first messages of each priority, and of reclaimed ones.

        Of a queue that takes turns between groups: of all, where other stores read some.
        """
        if self.policy.grouped:
            return max((now - record.ready_ms for record in self._ready()), default=None)
        heads: dict[tuple[int, bool], Record] = {}
        for record, _ in self.listing("ready"):
            heads.setdefault((record.priority, record.position < 0), record)
        return max((now - record.ready_ms for record in heads.values()), default=None)

    def ledger(self) -> Ledger:
        c = self.counts
        return Ledger(
            c["published"], c["redriven"],
            self.count("ready"), self.count("delayed"), self.count("waiting"), self.count("leased"),
            c["done"], c["dead"], c["dropped"], c["cancelled"], c["replaced"], self.count("dead"),
            c["claims"], c["first_claims"], {cause: c[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
            c["expired"], c["released"], c["retried"], c["snoozed"], c["duplicates"], c["transferred"],
            c["over_cap"],
        )  # fmt: skip

    def stats(self, now: int, minutes: int) -> StatsRecord:
        first = now // 60_000 - min(minutes, MINUTES_KEPT) + 1
        return StatsRecord(
            self.name, now, self.ledger(), self.paused,
            self._oldest_ready(now),
            max((now - (r.claimed_ms or 0) for r in self._in("leased")), default=None),
            self.next_due(now), self.next_lease(now),
            sum(until > now for until in self.sleepers.values()),
            self.journal_first, self.journal_last, dict(self.readers),
            [
                MinuteRecord(minute * 60_000, {name: counts[name] for name in MINUTE_COUNTERS})
                for minute, counts in sorted(self.minutes.items())
                if minute >= first
            ],
            changes=[change for change in self.changes if change.at_ms // 60_000 >= first],
        )  # fmt: skip

    def count_up(self, now: int, name: str) -> None:
        self.counts[name] += 1
        if name in MINUTE_COUNTERS:
            self._minute(now)[name] += 1

    def _minute(self, now: int) -> Counter[str]:
        """The counters of the current minute; older ones than are kept are removed."""
        minute = now // 60_000
        for old in [m for m in self.minutes if m <= minute - MINUTES_KEPT]:
            del self.minutes[old]
        return self.minutes.setdefault(minute, Counter())

    def _time(self, now: int, name: str, ms: int) -> None:
        """Add a wait or a run time to the minute, as a sum and as a maximum. A clock that was set back adds nothing."""
        minute = self._minute(now)
        minute[name] += max(0, ms)
        minute[f"{name}_max"] = max(minute[f"{name}_max"], ms)

    def _count_run(self, now: int, record: Record) -> None:
        self.count_up(now, "runs")
        self._time(now, "run_ms", now - (record.claimed_ms or 0))

    # ---- the journal -------------------------------------------------------------------------------------

    def note(
        self, now: int, event: EventName, operation: Operation | None, record: Record | None, **details: Any
    ) -> None:
        """Append one event, in the same step as the change."""
        if record is not None and is_side_effect(event, details.get("cause"), leased=record.state == "leased"):
            self.also.add(self.name, event, record.id, record.token, details.get("reason") or details.get("cause"))
        level = self.policy.journal
        if level == "off" or (level == "failures" and event not in FAILURE_EVENTS):
            return
        if record is not None:
            details = {
                "message_id": record.id, "key": record.key, "group": record.group, "priority": record.priority,
                "token": record.token, "claims": record.token, "deliveries": record.deliveries,
                "attempts": record.attempts, "size": len(record.envelope), "chain_id": record.chain,
            } | details  # fmt: skip
        self.journal_last += 1
        details["operation_id"] = None if operation is None else str(operation)
        self.journal.append(EventRecord(self.name, self.journal_last, now, event, **details))

    def cut_journal(self, now: int) -> None:
        """Trim the journal to about its cap at the end of a step, read or not."""
        kept = self.journal_last - self.journal_first + 1
        if kept >= self.policy.journal_max + self.policy.journal_slack:
            self._trim_journal(now, self.journal_last - self.policy.journal_max + 1, hard=True)

    def _trim_journal(self, now: int, first: int, *, hard: bool) -> None:
        unread_from = min(self.readers.values(), default=first - 1) + 1
        before = self.journal_first
        while self.journal and self.journal[0].number < first:
            self.journal.popleft()
        self.journal_first = first
        if hard and unread_from < first:
            cut = max(before, unread_from)
            self.note(now, "trimmed", None, None, cause="hard_cap", reason=f"{cut}-{first - 1}", size=first - cut)

    def trim_journal(self, now: int, up_to: int) -> int:
        """Delete events up to a number, except those that a registered reader has not read. Returns the first kept."""
        read_to = min(self.readers.values(), default=self.journal_last)
        first = min(up_to, read_to, self.journal_last) + 1
        if first > self.journal_first:
            self._trim_journal(now, first, hard=False)
        return self.journal_first

    def reader(self, name: str, read_to: int | None) -> int:
        """Register a reader, or move it forward; return its position."""
        position = self.readers.get(name, self.journal_first - 1)
        self.readers[name] = max(position, min(read_to, self.journal_last)) if read_to is not None else position
        return self.readers[name]

    # ---- operations, sleepers ----------------------------------------------------------------------------

    def replayed(self, now: int, operation: Operation, window_ms: int) -> object | None:
        """Return the first result of this operation, None if it is new; raises if it may be forgotten."""
        replays = self.replays.get(operation.session)
        known, newest = (None, 0) if replays is None else (replays.results.get(operation.number), replays.newest)
        mark = None if known is None else known[0]
        is_known = is_repeat(
            self.name, operation, now, window_ms=window_ms, known=mark, newest=newest, removed_ms=self.removed_ms
        )
        return known[1] if is_known and known is not None else None

    def remember(self, now: int, operation: Operation, result: object, window_ms: int) -> None:
        """Keep a result for longer than it can be repeated, and delete expired sessions."""
        replays = self.replays.pop(operation.session, None) or Replays()
        self.replays[operation.session] = replays
        replays.newest = max(replays.newest, operation.number)
        replays.until_ms = now + window_ms + STAMP_AHEAD_MS
        replays.results[operation.number] = (operation.mark, result)
        replays.results.pop(operation.number - REPLAY_MAX, None)
        for session in list(islice(self.replays, SESSIONS_SWEPT)):
            if self.replays[session].until_ms < now:
                del self.replays[session]

    def wake(self, now: int, count: int) -> list[str]:
        """Take up to `count` sleepers out of the memory, the last to fall asleep first; `*` if the memory is gone."""
        if count == 0 or self.paused:
            return []
        if count <= POLL_SOON_MESSAGES_MAX and any(
            now < until <= now + POLL_SOON_MS_MAX for until in self.polling_soon.values()
        ):
            return []
        if self.sleepers_known_until <= now:
            self.sleepers.clear()
            self.sleepers_known_until = now + SLEEPER_TTL_MS
            return ["*"]
        asleep = sorted(((until, name) for name, until in self.sleepers.items() if until > now), reverse=True)
        names = [name for _, name in asleep[:count]]
        for name in names:
            del self.sleepers[name]
        return names
