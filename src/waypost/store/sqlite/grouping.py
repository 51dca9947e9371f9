"""The groups of one queue inside one step: how many messages each has, which join the line, how many sleepers to wake.

A queue with turns between groups (see `memory/groups.py`) has a row for each group in `group`, and each of its messages
has a `rank`. `rank` is NULL in other queues: such a message is in no index of groups and in no count. If it is not
NULL, the row of the message's group counts it, whatever the queue's settings are now. So counts are correct while a
queue is converted.

The messages of a group are claimed by rank, position and id. Ranks are the priorities, the highest first; before them
are the messages that were leased when the queue became ordered, and after them the messages that joined an ordered
group. So no ready message is rewritten when a queue becomes ordered: these come first, in the order in which they would
have been claimed.

Changes are collected here and written by one statement for all groups that change in the same way: usually a single
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct, structs

from waypost.policy import GROUP_RATE_PARTS, GROUP_STRIDE, PolicyRecord
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY, WAITING
from waypost.values import TurnLimit

if TYPE_CHECKING:
    from waypost.store.sqlite.queue_records import QueueRecords, Record

#: The messages without a group, as a row of `group`.
NO_GROUP = ""
#: The rank of messages that joined an ordered group, and of messages that were leased when the queue became ordered.
RANK_ORDERED, RANK_FIRST = 0, -100
#: The rank of a message that is not in an ordered group, in SQL: its priority, the highest first.
RANK_BY_PRIORITY = "-1 - priority"
#: `holds` of a delayed message with a place in an ordered group: it holds the group, or others may pass it.
HOLDS, HAS_PLACE = 1, 2
#: The count in which a message of each state is: ready, leased, others.
_COUNTS = {READY: 0, LEASED: 1, DELAYED: 2, WAITING: 2}

_COUNT = """
    INSERT INTO {group} (queue, name, ready, leased, others) SELECT ?1, j.value, ?2, ?3, ?4 FROM json_each(?5) j WHERE 1
    ON CONFLICT (queue, name) DO UPDATE SET
        ready = ready + excluded.ready, leased = leased + excluded.leased, others = others + excluded.others"""
#: The same for groups with new messages, which join the line.
_ADD_AND_JOIN = """
    INSERT INTO {group} (queue, name, ready, leased, others, turn)
    SELECT ?1, j.value, ?2, ?3, ?4, ?5 + ?6 FROM json_each(?7) j WHERE 1
    ON CONFLICT (queue, name) DO UPDATE SET
        ready = ready + excluded.ready, leased = leased + excluded.leased, others = others + excluded.others,
        turn = coalesce(turn, ?5 + ?6 / weight)"""
#: The same for groups in which a lease ended, in one pass: they are rarely in line.
_COUNT_AND_JOIN = """
    UPDATE {group} SET ready = ready + ?2, leased = leased + ?3, others = others + ?4,
        turn = coalesce(turn, ?5 + ?6 / weight)
    WHERE queue = ?1 AND name IN (SELECT value FROM json_each(?7))"""
_JOIN = """
    UPDATE {group} SET turn = ?2 + ?3 / weight
    WHERE queue = ?1 AND name IN (SELECT value FROM json_each(?4)) AND turn IS NULL"""
#: Groups with a limit of leases in their own settings.
_JOIN_LIMITED = f"{_JOIN} AND max_running IS NOT NULL"
_JOIN_ALL = "UPDATE {group} SET turn = ?2 + ?3 / weight WHERE queue = ?1 AND turn IS NULL AND ready > 0"
_SAVE = "UPDATE {queue} SET grouping = ? WHERE number = ?"
#: Rows that hold no information, as in the predicate of the index of these.
EMPTY = """
    ready = 0 AND leased = 0 AND others = 0 AND turn IS NULL AND limited_until IS NULL AND claims IS NULL AND own = 0"""
#: The columns of a group, in the order of the fields of `GroupRow`.
GROUP_COLUMNS = (
    "g.name, g.turn, g.ready, g.leased, g.others, g.weight, g.paused, g.max_running, g.rate_count, g.rate_per_ms, "
    "g.max_pending, g.claims, g.limited_until"
)
#: The first delayed message that holds a group.
HELD_BY = """(
    SELECT m.id FROM {message} m INDEXED BY {message:held}
    WHERE m.queue = g.queue AND m."group" = g.name AND m.holds > 0 AND m.holds = 1
    ORDER BY m.rank, m.position, m.id LIMIT 1)"""
_NAMED = f"""
    SELECT {GROUP_COLUMNS}, {HELD_BY} FROM {{group}} g
    WHERE g.queue = ? AND g.name IN (SELECT value FROM json_each(?))"""

_encode = msgspec.json.Encoder().encode
_decode_claims = msgspec.json.Decoder(dict[int, int]).decode


class GroupingRecord(Struct, omit_defaults=True):
    """The data of a queue about its groups as a whole, stored in its row."""

    #: The number of the last turn.
    turn: int = 0
    #: The conversion in progress, and the last id that it has converted.
    conversion: Literal["join", "unorder", "leave"] | None = None
    converted_to: str = ""
    #: If an order was set again before the previous one was converted back: messages with positions up to this one have
    #: the rank of their priority.
    reordered_to: int = 0
    #: The time of the last claim that found a group at its rate: an earlier time means that the clock was set back.
    clock_ms: int = 0
    #: Whether the times until which groups are limited may be wrong, because settings have changed.
    check_limits: bool = False
    #: How many groups have settings of their own; how many of these limit leases, and how many pending messages.
    own: int = 0
    own_running: int = 0
    own_pending: int = 0


_decode = msgspec.json.Decoder(GroupingRecord).decode


class GroupRow(Struct):
    """A group, as in its row."""

    name: str
    turn: int | None
    ready: int
    leased: int
    others: int
    weight: int
    paused: int
    max_running: int | None
    rate_count: int | None
    rate_per_ms: int | None
    max_pending: int | None
    claims: bytes | None
    limited_until: int | None
    #: The first delayed message that holds it, if it was read.
    held_by: str | None = None

    def most_running(self, policy: PolicyRecord) -> int | None:
        """Return the limit of its leases, apart from its order."""
        return None if self.name == NO_GROUP else self.max_running or policy.group_max_running

    def most_pending(self, policy: PolicyRecord) -> int | None:
        """Return how many ready, delayed and waiting messages it may have."""
        return None if self.name == NO_GROUP else self.max_pending or policy.group_max_pending

    def rate(self, policy: PolicyRecord) -> tuple[int, int] | None:
        """Return how many of its messages may be claimed in how many milliseconds."""
        if self.name == NO_GROUP:
            return None
        if self.rate_count is not None and self.rate_per_ms is not None:
            return self.rate_count, self.rate_per_ms
        if policy.group_rate_count is not None and policy.group_rate_per_ms is not None:
            return policy.group_rate_count, policy.group_rate_per_ms
        return None

    def claims_in_window(self, now: int, per_ms: int) -> dict[int, int]:
        """Return how many of its messages were claimed in each part of the window, by the part's last millisecond."""
        if self.claims is None:
            return {}
        claimed = {at: number for at, number in _decode_claims(self.claims).items() if at + per_ms > now}
        if any(at > end_of_part(now, per_ms) for at in claimed):
            # The clock was set back. The whole window counts from now on, not only when the clock has reached the old
            # time.
            claimed = {end_of_part(now, per_ms): sum(claimed.values())}
            self.claims = _encode(claimed)
        return claimed

    def count_claim(self, policy: PolicyRecord, now: int) -> None:
        """Count a claimed message for its rate."""
        rate = self.rate(policy)
        if rate is not None:
            claimed = self.claims_in_window(now, rate[1])
            end = end_of_part(now, rate[1])
            claimed[end] = claimed.get(end, 0) + 1
            self.claims = _encode(claimed)

    def limit_at(self, policy: PolicyRecord, now: int) -> tuple[TurnLimit | None, int | None]:
        """Return the limit that it is at, if any, and when its rate allows the next message."""
        most = self.most_running(policy)
        if most is not None and self.leased >= most:
            return "max_running", None
        until = self.rate_until(policy, now)
        return (None, None) if until is None else ("rate", until)

    def rate_until(self, policy: PolicyRecord, now: int) -> int | None:
        """Return when its rate allows the next message; None if it allows one now."""
        rate = self.rate(policy)
        if rate is None or self.claims is None:
            return None
        count, per_ms = rate
        claimed = self.claims_in_window(now, per_ms)
        used = sum(claimed.values())
        for at, number in sorted(claimed.items()):
            if used < count:
                break
            used -= number
            if used < count:
                return at + per_ms
        return None

    def can_go_on(self, policy: PolicyRecord, now: int) -> bool:
        """Return whether a claim may lease a message of it now."""
        if self.paused or self.ready <= 0 or self.limit_at(policy, now)[0] is not None:
            return False
        if policy.order is None or self.name == NO_GROUP:
            return True
        return self.leased <= 0 and (policy.on_failure == "pass" or self.held_by is None)

    def waits_for_rate(self, policy: PolicyRecord, now: int) -> bool:
        """Return whether only its rate holds it back, and no claim has returned yet until when."""
        if self.limited_until is not None or self.paused or self.ready <= 0:
            return False
        if policy.order is not None and (self.leased > 0 or (policy.on_failure != "pass" and self.held_by is not None)):
            return False
        return self.limit_at(policy, now)[0] == "rate"


def end_of_part(now: int, per_ms: int) -> int:
    """Return the last millisecond of the part of a rate's window that contains a time."""
    part_ms = -(-per_ms // GROUP_RATE_PARTS)
    return now - now % part_ms + part_ms - 1


class Grouping:
    """The groups of a queue that takes turns between groups, or is being converted."""

    __slots__ = ("_before", "_changes", "_join", "_join_limited", "freed", "fresh", "records", "state")

    def __init__(self, records: QueueRecords, data: bytes | None) -> None:
        self.records = records
        self.state = GroupingRecord() if data is None else _decode(data)
        self._before = None if data is None else structs.replace(self.state)
        #: The changes of each group's counts: ready, leased, others.
        self._changes: dict[str, list[int]] = {}
        self._join: set[str] = set()
        self._join_limited: set[str] = set()
        #: In the current step: ordered groups with messages that became ready, and groups that may be able to continue.
        self.fresh: set[str] = set()
        self.freed: set[str] = set()

    @property
    def takes_turns(self) -> bool:
        """Whether claims choose by turns: only when all messages have a rank."""
        return self.records.policy.grouped and self.state.conversion != "join"

    @property
    def counts_all(self) -> bool:
        """Whether all messages are counted: not while the queue is converted."""
        return self.records.policy.grouped and self.state.conversion in (None, "unorder")

    @property
    def has_caps(self) -> bool:
        """Whether any group has a limit of pending messages."""
        return self.records.policy.group_max_pending is not None or self.state.own_pending > 0

    # ---- messages ------------------------------------------------------------------------------------------

    def is_ordered(self, group: str | None) -> bool:
        """Whether a group is ordered."""
        return self.records.policy.order is not None and group is not None

    def rank_of(self, priority: int, group: str | None) -> int:
        """Return the rank of a message that joins its group."""
        return RANK_ORDERED if self.is_ordered(group) else -1 - priority

    def keeps_place(self, record: Record) -> bool:
        """Whether a message returns to its place in an ordered group."""
        return record.rank is not None and record.position != 0 and self.is_ordered(record.group)

    def joined(self, record: Record) -> None:
        """Set the rank of a message that got a new position and is counted: that of a message that joins its group."""
        if record.rank is not None:
            record.rank = self.rank_of(record.priority, record.group)

    def is_worth_waking(self, record: Record) -> bool:
        """Whether to wake a sleeper for a message that became ready: an ordered group hands out only one."""
        if not self.is_ordered(record.group):
            return True
        name = record.group or NO_GROUP
        known = name in self.fresh
        self.fresh.add(name)
        return not known

    def add(self, record: Record) -> None:
        """Count a new message."""
        if self.records.policy.grouped:
            record.rank = self.rank_of(record.priority, record.group)
            self.count(record.group, record.state, 1)

    def add_ready(self, groups: Sequence[str | None]) -> int:
        """Count new messages of these groups that are ready; return how many sleepers to wake for them."""
        counts, changes = Counter(groups), self._changes
        for group, number in counts.items():
            name = group or NO_GROUP
            change = changes.get(name)
            if change is None:
                changes[name] = [number, 0, 0]
            else:
                change[0] += number
            self._join.add(name)
        if self.records.policy.order is None:
            return len(groups)
        fresh = {group for group in counts if group is not None} - self.fresh
        self.fresh |= fresh
        return counts[None] + len(fresh)

    def move(self, record: Record, state: int) -> None:
        """Count a message that changes its state, or becomes a dead letter."""
        before = record.state
        if record.rank is not None:
            self.count(record.group, before, -1)
        if before == LEASED or (state == DEAD and record.holds == HOLDS):
            self.release(record.group)
        if state != DELAYED:
            record.holds = 0
        elif not record.holds and self.keeps_place(record):
            record.holds = HAS_PLACE
        if state == DEAD or not self.records.policy.grouped:
            record.rank = None
        elif record.rank is None:
            # A message that was ready before the queue was converted has its place before those that join now.
            ready = before == READY and state != READY
            record.rank = -1 - record.priority if ready else self.rank_of(record.priority, record.group)
        if record.rank is not None:
            self.count(record.group, state, 1)

    def remove(self, record: Record) -> None:
        """Count a message that is removed from the queue."""
        if record.state == LEASED or record.holds == HOLDS:
            self.release(record.group)
        if record.rank is not None:
            self.count(record.group, record.state, -1)

    def count(self, group: str | None, state: int, by: int) -> None:
        """Count messages of a group in a state; a group with more ready messages joins the line."""
        place = _COUNTS.get(state)
        if place is None:
            return
        name = group or NO_GROUP
        self._changes.setdefault(name, [0, 0, 0])[place] += by
        if state == READY and by > 0:
            self._join.add(name)

    def release(self, group: str | None) -> None:
        """Record that a lease or a hold in a group has ended: the group may be able to continue."""
        policy = self.records.policy
        if group is None or not policy.grouped:
            return
        if policy.order is not None or policy.group_max_running is not None:
            self.freed.add(group)
            self._join.add(group)
        elif self.state.own_running:
            self.freed.add(group)
            self._join_limited.add(group)

    def end_leases(self, groups: Sequence[str | None]) -> None:
        """Count leased messages of these groups that are done and removed."""
        changes, policy = self._changes, self.records.policy
        releases = policy.order is not None or policy.group_max_running is not None or self.state.own_running > 0
        for group, number in Counter(groups).items():
            name = group or NO_GROUP
            change = changes.get(name)
            if change is None:
                changes[name] = [0, -number, 0]
            else:
                change[1] -= number
            if releases:
                self.release(group)

    # ---- writing -------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """Put a group into line; it has a row."""
        self._join.add(name)

    def join_all(self) -> None:
        """Put all groups with ready messages into the line."""
        self.flush()
        self.records.step.execute(_JOIN_ALL, (self.records.number, self.state.turn, GROUP_STRIDE))

    def flush(self) -> None:
        """Write all changes of groups, so that the next read finds them."""
        execute, number = self.records.step.execute, self.records.number
        if self._changes:
            alike: dict[tuple[int, ...], list[str]] = {}
            join = self._join
            for name, change in self._changes.items():
                if any(change):
                    alike.setdefault((*change, name in join), []).append(name)
            for (*counts, joins), names in alike.items():
                if joins:
                    # A group with a leased message has a row.
                    statement = _COUNT_AND_JOIN if counts[1] < 0 else _ADD_AND_JOIN
                    execute(statement, (number, *counts, self.state.turn, GROUP_STRIDE, _as_list(names)))
                    join.difference_update(names)
                else:
                    execute(_COUNT, (number, *counts, _as_list(names)))
            self._changes.clear()
        if self._join:
            execute(_JOIN, (number, self.state.turn, GROUP_STRIDE, _as_list(self._join)))
            self._join.clear()
        if self._join_limited:
            execute(_JOIN_LIMITED, (number, self.state.turn, GROUP_STRIDE, _as_list(self._join_limited)))
            self._join_limited.clear()

    def save(self) -> None:
        """Write all collected changes."""
        self.flush()
        if self.state != self._before:
            self.records.step.execute(_SAVE, (_encode(self.state), self.records.number))

    # ---- reading -------------------------------------------------------------------------------------------

    def rows(self, names: Iterable[str]) -> list[GroupRow]:
        """Return the existing rows of these groups."""
        self.records.flush_messages()
        self.flush()
        found = self.records.step.execute(_NAMED, (self.records.number, _as_list(names))).fetchall()
        return [GroupRow(*row) for row in found]

    def worth_waking(self) -> int:
        """Return how many sleepers to wake for groups that can continue after the step ended leases or holds in them.

        Groups with messages that became ready in the same step are already counted. One more if only their rate holds
        some of them back, and no claim has returned until when: the claim of that sleeper does.
        """
        names = self.freed - self.fresh
        policy, now = self.records.policy, self.records.now
        if not names or not policy.grouped:
            return 0
        always = policy.order is not None or policy.group_max_running is not None
        rows = [row for row in self.rows(names) if always or row.max_running is not None]
        able = [row.can_go_on(policy, now) for row in rows]
        return sum(able) + any(row.waits_for_rate(policy, now) for row, can in zip(rows, able, strict=True) if not can)


def _as_list(names: Iterable[Any]) -> str:
    return _encode(list(names)).decode()
