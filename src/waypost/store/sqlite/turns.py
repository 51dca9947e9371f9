"""Which messages a claim takes next in a queue that takes turns between groups.

Groups in line are read in their order, as many as the claim may need, each with its first message by one lookup. What
is taken from which group is decided in memory (as `memory/groups.py` says), and written at the end.
"""

from __future__ import annotations

import heapq
from typing import Any

from msgspec import Struct

from waypost.policy import GROUP_STRIDE, GROUPS_SKIPPED_MAX
from waypost.store.sqlite.check import OTHERS_SOUND
from waypost.store.sqlite.grouping import GROUP_COLUMNS, HELD_BY, Grouping, GroupRow, end_of_part
from waypost.store.sqlite.queue_records import QueueRecords, as_list
from waypost.store.sqlite.schema import READY

#: What a claim needs of a message, with the length of its envelope in place of that: see `claim.py`.
_FIELDS = f"""
    m.seq, m.id, m.priority, m.ready_ms, m.published_ms, m.size, m.token, m.deliveries, m.attempts, m.key, m."group",
    m.cause, m.chain, {OTHERS_SOUND}, CASE typeof(e.data) WHEN 'blob' THEN length(e.data) END"""
_FIELDS_COUNT, _DELIVERIES = 15, 7
_HEAD = f"""
    SELECT m.seq FROM {{message}} m INDEXED BY {{message:group}}
    WHERE m.queue = g.queue AND m."group" IS nullif(g.name, '') AND m.state = {READY} AND m.rank IS NOT NULL
    ORDER BY m.rank, m.position, m.id LIMIT 1"""


def _line(held: str, behind: str) -> str:
    return f"""
    SELECT {_FIELDS}, line.* FROM (
        SELECT {GROUP_COLUMNS}, {held}, ({_HEAD}) AS head FROM {{group}} g INDEXED BY {{group:turn}}
        WHERE g.queue = ? AND g.turn IS NOT NULL{behind} ORDER BY g.turn, g.name LIMIT ?) line
    LEFT JOIN {{message}} m ON m.seq = line.head LEFT JOIN {{envelope}} e ON e.seq = m.seq"""


#: The groups of the line with their first messages: from its start, and behind a group; with what holds each.
_FIRST, _NEXT = _line("NULL", ""), _line("NULL", " AND (g.turn, g.name) > (?, ?)")
_FIRST_HELD, _NEXT_HELD = _line(HELD_BY, ""), _line(HELD_BY, " AND (g.turn, g.name) > (?, ?)")
_MORE = f"""
    SELECT {_FIELDS}
    FROM {{message}} m INDEXED BY {{message:group}} LEFT JOIN {{envelope}} e ON e.seq = m.seq
    WHERE m.queue = ? AND m."group" IS ? AND m.state = {READY} AND m.rank IS NOT NULL
    ORDER BY m.rank, m.position, m.id LIMIT ? OFFSET ?"""
_MOVE_ON = """
    UPDATE {group} SET turn = ?2, ready = ready - ?3, leased = leased + ?3
    WHERE queue = ?1 AND name IN (SELECT value FROM json_each(?4))"""
_MOVE_ON_RATED = """
    UPDATE {group} SET turn = ?2, ready = ready - ?3, leased = leased + ?3,
        claims = ?5, claims_until = ?6, limited_until = ?7
    WHERE queue = ?1 AND name = ?4"""
_LIMITED_DUE = f"""
    SELECT {GROUP_COLUMNS} FROM {{group}} g INDEXED BY {{group:limited}}
    WHERE g.queue = ? AND g.limited_until IS NOT NULL AND g.limited_until <= ? ORDER BY g.limited_until LIMIT ?"""
_LIMITED = f"""
    SELECT {GROUP_COLUMNS} FROM {{group}} g INDEXED BY {{group:limited}}
    WHERE g.queue = ? AND g.limited_until IS NOT NULL"""
_UNLIMITED = """
    UPDATE {group} SET limited_until = NULL WHERE queue = ? AND name IN (SELECT value FROM json_each(?))"""
_NEXT_ALLOWED = """
    SELECT min(limited_until) FROM {group} INDEXED BY {group:limited} WHERE queue = ? AND limited_until IS NOT NULL"""
_CLAIMS_OLD = """
    UPDATE {group} SET claims = NULL, claims_until = NULL WHERE queue = ?1 AND name IN (
        SELECT name FROM {group} INDEXED BY {group:until}
        WHERE queue = ?1 AND claims_until IS NOT NULL AND claims_until <= ?2 ORDER BY claims_until LIMIT ?3)
    RETURNING name"""
_IN_LINE = "SELECT 1 FROM {group} INDEXED BY {group:turn} WHERE queue = ? AND turn IS NOT NULL LIMIT 1"
#: How much longer than its window the claims of a rate are kept: the window may become longer.
_CLAIMS_KEPT_MS = 3_600_000


class _Turn(Struct):
    """A group in line, and what is known of its messages."""

    group: GroupRow
    #: Its next messages that are read; taken ones are removed.
    rows: list[tuple[Any, ...]]
    taken: int = 0
    #: Its time and its claims before: what is not changed is not written.
    limited_before: int | None = None
    claims_before: bytes | None = None


class Turns:
    """The choice of a claim: up to `room` messages, and `left` bytes."""

    def __init__(self, records: QueueRecords, groups: Grouping, room: int, left: int, *, started: bool) -> None:
        self._records = records
        self._groups = groups
        self._room = room
        self._started = started
        self._line: list[tuple[int, str, _Turn]] = []
        #: The last group of the line that was read, and whether it was the last one there.
        self._read_to: tuple[int, str] | None = None
        self._read_all = False
        self._changed: dict[str, _Turn] = {}
        self._turn = groups.state.turn
        self.left = left
        self.rows: list[tuple[Any, ...]] = []
        #: Whether there are messages that did not fit, or groups that were not reached.
        self.more = False
        #: The row of a message that is next and cannot be leased.
        self.odd: int | None = None

    def plan(self, *, each_is_sound: Any = None) -> None:
        """Choose the messages, up to the first that does not fit or cannot be leased; `each_is_sound` checks each."""
        policy, now, room = self._records.policy, self._records.now, self._room
        limit, skipped = policy.max_deliveries, 0
        while len(self.rows) < room:
            turn = self._next()
            if turn is None:
                return
            group = turn.group
            row = self._head(turn) if group.can_go_on(policy, now) else None
            if row is None:
                skipped += 1
                self._take_out(turn)
                if skipped >= GROUPS_SKIPPED_MAX:
                    self.more = True
                    return
                continue
            size = row[-1]
            unsound = size is None or (each_is_sound is not None and not each_is_sound(row))
            if unsound or (limit is not None and type(row[_DELIVERIES]) is int and row[_DELIVERIES] >= limit):
                self.odd = row[0]
                return
            self.left -= size
            if self.left < 0 and (self._started or self.rows):
                self.more = True
                return
            heapq.heappop(self._line)
            self.rows.append(turn.rows.pop(0))
            self._took(turn)

    def _next(self) -> _Turn | None:
        """Return the group whose turn it is."""
        while not self._read_all and (not self._line or self._read_to is None or self._line[0][:2] > self._read_to):
            self._read()
        return self._line[0][2] if self._line else None

    def _read(self) -> None:
        policy = self._records.policy
        holds = policy.order is not None and policy.on_failure != "pass"
        limit = max(1, self._room - len(self.rows))
        parameters: tuple[Any, ...]
        if self._read_to is None:
            query, parameters = (_FIRST_HELD if holds else _FIRST), (self._records.number, limit)
        else:
            query, parameters = (_NEXT_HELD if holds else _NEXT), (self._records.number, *self._read_to, limit)
        found = self._records.step.execute(query, parameters).fetchall()
        for row in found:
            group = GroupRow(*row[_FIELDS_COUNT:-1])
            turn = _Turn(group, [] if row[0] is None else [row[:_FIELDS_COUNT]], 0, group.limited_until, group.claims)
            place = (group.turn or 0, group.name)
            self._read_to = place if self._read_to is None else max(self._read_to, place)
            heapq.heappush(self._line, (*place, turn))
        self._read_all = len(found) < limit

    def _head(self, turn: _Turn) -> tuple[Any, ...] | None:
        """Return the next message of a group."""
        if not turn.rows and turn.taken:
            share = (self._room - len(self.rows)) // len(self._line) + 1
            place = (self._records.number, turn.group.name or None)
            turn.rows = self._records.step.execute(_MORE, (*place, share, turn.taken)).fetchall()
        return turn.rows[0] if turn.rows else None

    def _took(self, turn: _Turn) -> None:
        group, policy, now = turn.group, self._records.policy, self._records.now
        turn.taken += 1
        self._changed[group.name] = turn
        group.count_claim(policy, now)
        self._turn = group.turn or 0
        group.turn = self._turn + GROUP_STRIDE // group.weight
        group.ready -= 1
        if policy.lease_ms is not None:
            group.leased += 1
        if group.can_go_on(policy, now):
            heapq.heappush(self._line, (group.turn, group.name, turn))
        else:
            self._leave(turn)

    def _take_out(self, turn: _Turn) -> None:
        heapq.heappop(self._line)
        self._leave(turn)

    def _leave(self, turn: _Turn) -> None:
        """A group that cannot go on leaves the line; note when its rate allows the next message."""
        group = turn.group
        limit, until = group.limit_at(self._records.policy, self._records.now)
        group.turn = None
        if limit == "rate" and group.ready > 0:
            group.limited_until = until
        self._changed[group.name] = turn

    def write(self, *, counted: bool) -> None:
        """Write the line as it is after this claim; `counted`: the moves of the messages are not counted elsewhere."""
        records, groups = self._records, self._groups
        groups.state.turn = self._turn
        alike: dict[tuple[int | None, int], list[str]] = {}
        for name, turn in self._changed.items():
            group, taken = turn.group, turn.taken if counted else 0
            rate = group.rate(records.policy)
            if (group.limited_until, group.claims) == (turn.limited_before, turn.claims_before):
                alike.setdefault((group.turn, taken), []).append(name)
            else:
                until = None if rate is None else end_of_part(records.now, rate[1]) + rate[1] + _CLAIMS_KEPT_MS
                records.step.execute(
                    _MOVE_ON_RATED,
                    (
                        records.number, group.turn, taken, name, group.claims,
                        None if group.claims is None else until, group.limited_until,
                    ),
                )  # fmt: skip
        for (number, taken), names in alike.items():
            records.step.execute(_MOVE_ON, (records.number, number, taken, as_list(names)))
        groups.forget(
            name for name, turn in self._changed.items() if turn.group.turn is None and turn.group.leased <= 0
        )


def join_again(records: QueueRecords, groups: Grouping) -> None:
    """Put the groups into the line whose rate allows the next message by now, or whose time cannot be right."""
    policy, now, execute = records.policy, records.now, records.step.execute
    state = groups.state
    if state.check_limits or now < state.clock_ms:
        rows = execute(_LIMITED, (records.number,)).fetchall()
        state.check_limits = False
    else:
        rows = execute(_LIMITED_DUE, (records.number, now, GROUPS_SKIPPED_MAX)).fetchall()
    names = []
    for row in rows:
        group = GroupRow(*row)
        rate, until = group.rate(policy), group.limited_until or 0
        # Further ahead than a window: the clock was set back.
        if until <= now or rate is None or until > end_of_part(now, rate[1]) + rate[1]:
            names.append(group.name)
    if names:
        execute(_UNLIMITED, (records.number, as_list(names)))
        for name in names:
            groups.join(name)
    if policy.group_rate_count is not None or state.own:
        groups.forget(name for (name,) in execute(_CLAIMS_OLD, (records.number, now, GROUPS_SKIPPED_MAX)).fetchall())


def next_allowed(records: QueueRecords, groups: Grouping) -> int | None:
    """Return the time until the first rate of a group allows its next message."""
    groups.flush()
    until: int | None = records.step.execute(_NEXT_ALLOWED, (records.number,)).fetchone()[0]
    if until is None:
        return None
    groups.state.clock_ms = records.now
    return max(0, until - records.now)


def needs_claim(records: QueueRecords) -> bool:
    """Return whether a claim may find something, or has groups to put into the line."""
    execute = records.step.execute
    if execute(_IN_LINE, (records.number,)).fetchone() is not None:
        return True
    until: int | None = execute(_NEXT_ALLOWED, (records.number,)).fetchone()[0]
    return until is not None and until <= records.now
