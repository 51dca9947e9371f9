"""Which messages a claim takes next in a queue that takes turns between groups.

Groups in line are read in their order, as many as the claim may need, each with its first message by one lookup. From
which groups messages are claimed is decided in memory (as in `memory/groups.py`), and written at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Any

from waypost.policy import GROUP_STRIDE, GROUPS_SKIPPED_MAX
from waypost.store.sqlite.check import OTHERS_SOUND
from waypost.store.sqlite.grouping import EMPTY, GROUP_COLUMNS, HELD_BY, Grouping, GroupRow, end_of_part
from waypost.store.sqlite.queue_records import QueueRecords, as_list
from waypost.store.sqlite.schema import READY

#: The columns that a claim needs of a message: as in `claim.py`, without its body.
_FIELDS = f"""
    m.seq, m.id, m.priority, m.ready_ms, m.published_ms, m.size, m.token, m.deliveries, m.attempts,
    coalesce(m.key, m.freed_key), m."group", m.cause, m.chain, {OTHERS_SOUND}, m.key_mode"""
_FIELDS_COUNT, _SIZE, _DELIVERIES = 15, 5, 7
_HEAD = f"""
    SELECT m.seq FROM {{message}} m INDEXED BY {{message:group}}
    WHERE m.queue = g.queue AND m."group" IS nullif(g.name, '') AND m.state = {READY} AND m.rank IS NOT NULL
    ORDER BY m.rank, m.position, m.id LIMIT 1"""
#: The columns that a claim needs of a group, and further ones if groups have rates or settings of their own.
_PLAIN_COLUMNS = "g.turn, g.name, g.ready, g.leased"
_COUNT_OF_PLAIN = 4


def _line(columns: str, held: str, behind: str) -> str:
    return f"""
    SELECT {_FIELDS}, line.* FROM (
        SELECT ({_HEAD}) AS head, {held}, {columns} FROM {{group}} g INDEXED BY {{group:turn}}
        WHERE g.queue = ? AND g.turn IS NOT NULL{behind} ORDER BY g.turn, g.name LIMIT ?) line
    LEFT JOIN {{message}} m ON m.seq = line.head"""


#: Statements that read the groups of the line with their first messages, by whether all columns and what holds each
#: group are read, and by whether the line is read from its start or after a group.
_LINE = {
    (whole, holds, behind): _line(
        f"{_PLAIN_COLUMNS}, {GROUP_COLUMNS}" if whole else _PLAIN_COLUMNS,
        HELD_BY if holds else "NULL",
        " AND (g.turn, g.name) > (?, ?)" if behind else "",
    )
    for whole in (False, True)
    for holds in (False, True)
    for behind in (False, True)
}
_MORE = f"""
    SELECT {_FIELDS}
    FROM {{message}} m INDEXED BY {{message:group}}
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
        WHERE queue = ?1 AND claims_until IS NOT NULL AND claims_until <= ?2 ORDER BY claims_until LIMIT ?3)"""
#: Groups of which nothing must be remembered.
_SWEEP = f"""
    DELETE FROM {{group}} WHERE queue = ?1 AND name IN (
        SELECT name FROM {{group}} INDEXED BY {{group:empty}} WHERE queue = ?1 AND {EMPTY} LIMIT ?2)"""
_IN_LINE = "SELECT 1 FROM {group} INDEXED BY {group:turn} WHERE queue = ? AND turn IS NOT NULL LIMIT 1"
#: How much longer than its window the claims of a rate are kept: the window may be changed to a longer one.
_CLAIMS_KEPT_MS = 3_600_000


class _Turn:
    """A group in line, and its messages that are read."""

    __slots__ = ("before", "claimed", "group", "name", "room", "rows", "step", "turn")

    def __init__(self, turn: int, name: str, room: int, head: tuple[Any, ...] | None, group: GroupRow | None) -> None:
        self.turn: int | None = turn
        self.name = name
        #: How many of its messages a claim may lease, as far as rates allow it.
        self.room = room
        #: Its next messages that are read; claimed ones are removed.
        self.rows = [] if head is None else [head]
        self.claimed = 0
        #: Its whole row, if groups have rates or settings of their own; and the values that are not written if
        #: unchanged.
        self.group = group
        self.before = None if group is None else (group.limited_until, group.claims)
        self.step = GROUP_STRIDE if group is None else GROUP_STRIDE // group.weight


class Turns:
    """The messages that a claim chooses: up to `room` messages, and `left` bytes."""

    def __init__(self, records: QueueRecords, groups: Grouping, room: int, left: int, *, started: bool) -> None:
        policy = records.policy
        self._records = records
        self._groups = groups
        self._room = room
        self._started = started
        self._ordered = policy.order is not None
        self._holds = self._ordered and policy.on_failure != "pass"
        self._rated = policy.group_rate_count is not None or groups.state.own > 0
        self._line: list[tuple[int, str, _Turn]] = []
        #: The last group of the line that was read, and whether it was the last one there.
        self._read_to: tuple[int, str] | tuple[()] = ()
        self._read_all = False
        self._changed: dict[str, _Turn] = {}
        self._turn = groups.state.turn
        self.left = left
        self.rows: list[tuple[Any, ...]] = []
        #: Whether there are messages that did not fit, or groups that were not reached.
        self.more = False
        #: The row of a message that is next and cannot be leased.
        self.odd: int | None = None

    def plan(self, *, is_sound: Callable[[tuple[Any, ...]], bool] | None = None) -> None:
        """Choose the messages, up to the first that does not fit or cannot be leased; `is_sound` checks each."""
        room, rows, line, rated = self._room, self.rows, self._line, self._rated
        limit, skipped = self._records.policy.max_deliveries, 0
        while len(rows) < room:
            while not self._read_all and (not line or line[0][:2] > self._read_to):
                self._read()
            if not line:
                return
            turn = line[0][2]
            if turn.room <= 0 or (rated and not self._rate_allows(turn)) or not (turn.rows or self._has_more(turn)):
                heappop(line)
                self._remove(turn)
                skipped += 1
                if skipped >= GROUPS_SKIPPED_MAX:
                    self.more = True
                    return
                continue
            row = turn.rows[0]
            deliveries, size = row[_DELIVERIES], row[_SIZE]
            unsound = (
                type(size) is not int or type(deliveries) is not int or (is_sound is not None and not is_sound(row))
            )
            if unsound or (limit is not None and deliveries >= limit):
                self.odd = row[0]
                return
            self.left -= size
            if self.left < 0 and (self._started or rows):
                self.more = True
                return
            rows.append(turn.rows.pop(0))
            self._take(turn)

    def _read(self) -> None:
        limit = max(1, self._room - len(self.rows))
        query = _LINE[self._rated, self._holds, bool(self._read_to)]
        found = self._records.step.execute(query, (self._records.number, *self._read_to, limit)).fetchall()
        most = self._records.policy.group_max_running
        for row in found:
            turn, name, ready, leased = row[_FIELDS_COUNT + 2 : _FIELDS_COUNT + 2 + _COUNT_OF_PLAIN]
            group = GroupRow(*row[_FIELDS_COUNT + 2 + _COUNT_OF_PLAIN :]) if self._rated else None
            room = ready
            if name:
                own_most = most if group is None else group.max_running or most
                if own_most is not None:
                    room = min(room, own_most - leased)
                if self._ordered:
                    room = 0 if row[_FIELDS_COUNT + 1] is not None else min(room, 1 - leased)
            if group is not None and group.paused:
                room = 0
            head = None if row[0] is None else row[:_FIELDS_COUNT]
            heappush(self._line, (turn, name, _Turn(turn, name, room, head, group)))
        if found:
            self._read_to = (found[-1][_FIELDS_COUNT + 2], found[-1][_FIELDS_COUNT + 3])
        self._read_all = len(found) < limit

    def _has_more(self, turn: _Turn) -> bool:
        """Read the next messages of a group of which some are claimed."""
        if turn.claimed:
            share = (self._room - len(self.rows)) // len(self._line) + 1
            place = (self._records.number, turn.name or None)
            turn.rows = self._records.step.execute(_MORE, (*place, share, turn.claimed)).fetchall()
        return bool(turn.rows)

    def _rate_allows(self, turn: _Turn) -> bool:
        return turn.group is None or turn.group.rate_until(self._records.policy, self._records.now) is None

    def _take(self, turn: _Turn) -> None:
        """Claim a message of the first group in line: the group gets its next turn, or leaves the line."""
        group = turn.group
        turn.claimed += 1
        turn.room -= 1
        self._turn = turn.turn or 0
        turn.turn = self._turn + turn.step
        if group is not None:
            group.ready -= 1
            group.count_claim(self._records.policy, self._records.now)
        if turn.room > 0 and (group is None or self._rate_allows(turn)):
            self._changed[turn.name] = turn
            heapreplace(self._line, (turn.turn, turn.name, turn))
        else:
            heappop(self._line)
            self._remove(turn)

    def _remove(self, turn: _Turn) -> None:
        """Remove a group from the line that cannot hand out a message; store when its rate allows the next one."""
        turn.turn = None
        self._changed[turn.name] = turn
        group, policy, now = turn.group, self._records.policy, self._records.now
        if group is not None and group.ready > 0:
            most = group.most_running(policy)
            leased = group.leased + (turn.claimed if policy.lease_ms is not None else 0)
            until = group.rate_until(policy, now)
            if until is not None and (most is None or leased < most):
                group.limited_until = until

    def write(self, *, counted: bool) -> None:
        """Write the line as it is after this claim; `counted`: the moves of the messages are not counted elsewhere."""
        records, groups = self._records, self._groups
        groups.state.turn = self._turn
        alike: dict[tuple[int | None, int], list[str]] = {}
        for name, turn in self._changed.items():
            group, claimed = turn.group, turn.claimed if counted else 0
            if group is None or (group.limited_until, group.claims) == turn.before:
                alike.setdefault((turn.turn, claimed), []).append(name)
            else:
                rate, until = group.rate(records.policy), None
                if rate is not None and group.claims is not None:
                    until = end_of_part(records.now, rate[1]) + rate[1] + _CLAIMS_KEPT_MS
                records.step.execute(
                    _MOVE_ON_RATED,
                    (records.number, turn.turn, claimed, name, group.claims, until, group.limited_until),
                )
        for (number, claimed), names in alike.items():
            records.step.execute(_MOVE_ON, (records.number, number, claimed, as_list(names)))


def join_again(records: QueueRecords, groups: Grouping) -> None:
    """Put the groups into line whose rate allows the next message by now, or whose time cannot be correct."""
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
        # Later than a window from now: the clock was set back.
        if until <= now or rate is None or until > end_of_part(now, rate[1]) + rate[1]:
            names.append(group.name)
    if names:
        execute(_UNLIMITED, (records.number, as_list(names)))
        for name in names:
            groups.join(name)
    if policy.group_rate_count is not None or state.own:
        execute(_CLAIMS_OLD, (records.number, now, GROUPS_SKIPPED_MAX))
    execute(_SWEEP, (records.number, GROUPS_SKIPPED_MAX))


def next_allowed(records: QueueRecords, groups: Grouping) -> int | None:
    """Return the time until the first rate of a group allows its next message."""
    groups.flush()
    until: int | None = records.step.execute(_NEXT_ALLOWED, (records.number,)).fetchone()[0]
    if until is None:
        return None
    groups.state.clock_ms = records.now
    return max(0, until - records.now)


def needs_claim(records: QueueRecords) -> bool:
    """Return whether a claim may find messages, or has groups to put into line."""
    if records.step.execute(_IN_LINE, (records.number,)).fetchone() is not None:
        return True
    until = limited_until(records)
    return until is not None and until <= records.now


def limited_until(records: QueueRecords) -> int | None:
    """Return when the first rate of a group allows its next message."""
    until: int | None = records.step.execute(_NEXT_ALLOWED, (records.number,)).fetchone()[0]
    return until
