"""Groups: overload, settings and their changes on a live queue, listings, repairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from waypost.errors import InvalidPolicy
from waypost.policy import (
    BURY_MAX,
    CHUNK_MESSAGES_MAX,
    DEFAULT_GROUP,
    GROUPS_KEPT_MAX,
    HEAD_OFFSET,
    LEASE_NEEDED,
    PRIORITY_MAX,
    GroupSettings,
    PolicyRecord,
)
from waypost.store.port import format_changes, group_cursor, not_grouped, queue_full, read_cursor, too_many_groups
from waypost.store.sqlite.grouping import (
    GROUP_COLUMNS,
    HAS_PLACE,
    HELD_BY,
    NO_GROUP,
    RANK_BY_PRIORITY,
    RANK_FIRST,
    RANK_ORDERED,
    Grouping,
    GroupRow,
)
from waypost.store.sqlite.queue_records import COLUMNS, QueueRecords, Record
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY
from waypost.values import Damage, GroupPage, GroupRecord

if TYPE_CHECKING:
    from waypost.store.sqlite.step import Step

IN_LINE = "put in line"
#: Messages that `configure` and each later claim convert: more would block other writers for too long.
CONVERTED_MAX = 3_000

#: The ready messages of a group in the order of claims, and those of one rank.
_OF_GROUP = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:group}}
    WHERE m.queue = ? AND m."group" IS ? AND m.state = {READY} AND m.rank IS NOT NULL"""
_IN_ORDER = f"{_OF_GROUP} ORDER BY m.rank, m.position, m.id LIMIT ?"
_OF_RANK = f"{_OF_GROUP} AND m.rank = ? ORDER BY m.position, m.id LIMIT ?"
_LONGEST = "SELECT name, ready FROM {group} WHERE queue = ? AND ready > 0 ORDER BY ready DESC, name LIMIT ?"

_SETTINGS_SET = """
    INSERT INTO {group} (queue, name, own, weight, max_running, rate_count, rate_per_ms, max_pending, paused)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (queue, name) DO UPDATE SET own = excluded.own, weight = excluded.weight, paused = excluded.paused,
        max_running = excluded.max_running, rate_count = excluded.rate_count, rate_per_ms = excluded.rate_per_ms,
        max_pending = excluded.max_pending, limited_until = NULL"""
_SETTINGS_COUNT = """
    SELECT count(*), count(max_running), count(max_pending) FROM {group} WHERE queue = ? AND own = 1"""
_LIMITED_BY_OWN = """
    SELECT EXISTS (
        SELECT 1 FROM {group} WHERE queue = ? AND coalesce(max_running, rate_count, max_pending) IS NOT NULL)"""
_LISTED = f"""
    SELECT {GROUP_COLUMNS}, {HELD_BY}, (
        SELECT m.ready_ms FROM {{message}} m INDEXED BY {{message:group}}
        WHERE m.queue = g.queue AND m."group" IS nullif(g.name, '') AND m.state = {READY} AND m.rank IS NOT NULL
        ORDER BY m.rank, m.position, m.id LIMIT 1)
    FROM {{group}} g WHERE g.queue = ?"""
_IS_LISTED = "(g.ready > 0 OR g.leased > 0 OR g.others > 0 OR g.own = 1)"
_PAGE = f"{_LISTED} AND g.name > ? AND {_IS_LISTED} ORDER BY g.name LIMIT ?"
_FIRST_PAGE = _PAGE.replace("g.name > ?", "g.name >= ?")
_ONE = f"{_LISTED} AND g.name = ? AND {_IS_LISTED}"
#: The leased messages of groups. No index has them by group.
_LEASED = f"""
    SELECT "group", id FROM {{message}} INDEXED BY {{message:leased}}
    WHERE queue = ? AND state = {LEASED} AND "group" IS NOT NULL"""
_UNHOLD = f"UPDATE {{message}} SET holds = {HAS_PLACE} WHERE seq = ?"

#: Conversion: the last id of a part, the messages to count or to stop counting, and their changes.
_PART = "SELECT id FROM {message} INDEXED BY {message:id} WHERE queue = ? AND id > ? ORDER BY id LIMIT 1 OFFSET ?"
_IN_PART = "queue = ?1 AND id > ?2 AND (?3 IS NULL OR id <= ?3)"
_COUNT_PART = f"""
    SELECT "group", state, count(*) FROM {{message}} INDEXED BY {{message:id}}
    WHERE {_IN_PART} AND state < {DEAD} AND (rank IS NULL) = ?4 GROUP BY "group", state"""
_RANK_PART = f"""
    UPDATE {{message}} SET rank = {RANK_BY_PRIORITY}, position = CASE state WHEN {DELAYED} THEN 0 ELSE position END
    WHERE {_IN_PART} AND state < {DEAD} AND rank IS NULL"""
_UNORDER_PART = f"""
    UPDATE {{message}} SET rank = {RANK_BY_PRIORITY}
    WHERE {_IN_PART} AND state = {READY} AND rank <> {RANK_BY_PRIORITY}"""
_REORDER_PART = f"""
    UPDATE {{message}} SET rank = {RANK_BY_PRIORITY}
    WHERE {_IN_PART} AND rank = {RANK_ORDERED} AND position <> 0 AND position <= ?4"""
_UNRANK_PART = f"UPDATE {{message}} SET rank = NULL WHERE {_IN_PART} AND rank IS NOT NULL"
_LEASED_UNCOUNTED = f"""
    SELECT "group", count(*) FROM {{message}} INDEXED BY {{message:leased}}
    WHERE queue = ? AND state = {LEASED} AND "group" IS NOT NULL AND rank IS NULL GROUP BY "group\""""
_LEASED_FIRST = f"""
    UPDATE {{message}} INDEXED BY {{message:leased}} SET rank = {RANK_FIRST}, position = claimed_ms - {HEAD_OFFSET}
    WHERE queue = ? AND state = {LEASED} AND "group" IS NOT NULL"""
_UNHOLD_ALL = "UPDATE {message} INDEXED BY {message:held} SET holds = 0, position = 0 WHERE queue = ? AND holds > 0"
_LINE_CLEAR = """
    UPDATE {group} SET turn = NULL, limited_until = NULL, claims = NULL, claims_until = NULL WHERE queue = ?"""
_GROUPS_CLEAR = "DELETE FROM {group} WHERE queue = ? AND own = 0"
_COUNTS_CLEAR = "UPDATE {group} SET ready = 0, leased = 0, others = 0 WHERE queue = ?"
_GROUPING_CLEAR = "UPDATE {queue} SET grouping = NULL WHERE number = ?"

_COUNTED = f"""
    SELECT "group", sum(state = {READY}), sum(state = {LEASED}), count(*) FROM {{message}} INDEXED BY {{message:id}}
    WHERE queue = ? AND state < {DEAD} AND rank IS NOT NULL GROUP BY "group\""""
_COUNTS = "SELECT name, ready, leased, others FROM {group} WHERE queue = ?"
_AWAY = f"""
    SELECT {GROUP_COLUMNS}, {HELD_BY} FROM {{group}} g
    WHERE g.queue = ? AND g.turn IS NULL AND g.limited_until IS NULL AND g.ready > 0 ORDER BY g.name"""


# ---- limits ----------------------------------------------------------------------------------------------


def over_group_caps(records: QueueRecords, added: Sequence[str | None], spared: set[str]) -> list[Record]:
    """Return what must be dropped so that no group exceeds its `max_pending`; raises `QueueFull`."""
    groups = _groups_of(records)
    counts = Counter(group for group in added if group is not None)
    rows = {row.name: row for row in groups.rows(counts)}
    doomed: list[Record] = []
    for group, number in sorted(counts.items()):
        row = rows.get(group)
        cap = (row and row.max_pending) or records.policy.group_max_pending
        pending = 0 if row is None else row.ready + row.others
        if cap is None or pending + number <= cap:
            continue
        over = min(pending + number - cap, number + BURY_MAX)
        choice = _droppable(records, group, over, spared) if records.policy.overload == "drop_oldest" else []
        if len(choice) < over:
            raise queue_full(records.name, pending, cap, group)
        doomed += choice
    return doomed


def oldest_of_longest(records: QueueRecords, count: int, spared: set[str]) -> list[Record]:
    """Return what a full queue drops, fewer if there are not enough: one by one the oldest of the longest group."""
    groups = _groups_of(records)
    records.flush_messages()
    groups.flush()
    rows = records.step.execute(_LONGEST, (records.number, count + len(spared))).fetchall()
    lengths = dict(rows)
    for id in spared:
        record = records.messages.get(id)
        if record is not None and record.state == READY and (record.group or NO_GROUP) in lengths:
            lengths[record.group or NO_GROUP] -= 1
    chosen_counts: Counter[str] = Counter()
    order: list[str] = []
    lengths = {name: length for name, length in lengths.items() if length > 0}
    while lengths and len(order) < count:
        longest = min(lengths, key=lambda name: (-lengths[name], name))
        order.append(longest)
        chosen_counts[longest] += 1
        lengths[longest] -= 1
        if not lengths[longest]:
            del lengths[longest]
    choices = {name: iter(_droppable(records, name or None, number, spared)) for name, number in chosen_counts.items()}
    chosen = (next(choices[name], None) for name in order)
    return [record for record in chosen if record is not None]


def _droppable(records: QueueRecords, group: str | None, count: int, spared: set[str]) -> list[Record]:
    """Return the first ready messages of a group that an overload may drop: by lowest priority, then age."""
    records.flush_messages()
    chosen: list[Record] = []
    for row in _by_priority(records, group, count + len(spared)):
        if row[1] not in spared and len(chosen) < count:
            chosen.append(records.hold(row))
    return chosen


def _by_priority(records: QueueRecords, group: str | None, limit: int) -> Iterator[tuple[Any, ...]]:
    place = (records.number, group)
    if _groups_of(records).is_ordered(group):
        yield from records.step.execute(_IN_ORDER, (*place, limit)).fetchall()
        return
    for rank in (*(-1 - priority for priority in range(PRIORITY_MAX + 1)), RANK_ORDERED, RANK_FIRST):
        rows = records.step.execute(_OF_RANK, (*place, rank, limit)).fetchall()
        yield from rows
        limit -= len(rows)
        if limit <= 0:
            return


# ---- settings of single groups ---------------------------------------------------------------------------


def configure_group(records: QueueRecords, group: str, changes: Mapping[str, Any]) -> bool:
    """Change the settings of a single group; return whether anything changed."""
    groups = _groups_of(records)
    row = next(iter(groups.rows([group])), None)
    before = DEFAULT_GROUP if row is None else _settings(row)
    after = structs.replace(before, **changes)
    if after.limits and records.policy.lease_ms is None:
        raise InvalidPolicy(LEASE_NEEDED)
    if after == before:
        return False
    own = after != DEFAULT_GROUP
    if own and before == DEFAULT_GROUP and groups.state.own >= GROUPS_KEPT_MAX:
        raise too_many_groups(records.name)
    records.step.execute(
        _SETTINGS_SET,
        (
            records.number, group, int(own), after.weight, after.max_running, after.rate_count, after.rate_per_ms,
            after.max_pending, int(after.paused),
        ),
    )  # fmt: skip
    _count_settings(records, groups)
    # Not the names of the queue's own settings, with which readers of the journal would confuse them.
    text = format_changes({f"own_{name}": value for name, value in changes.items()})
    records.note("configured", None, group=group, cause=text)
    groups.join(group)
    return True


def has_limited_groups(records: QueueRecords) -> bool:
    """Return whether single groups have limits of their own, even while the queue takes no turns."""
    return bool(records.step.execute(_LIMITED_BY_OWN, (records.number,)).fetchone()[0])


def worth_configuring(records: QueueRecords, group: str) -> int:
    """Return how many sleepers to wake for a group that was resumed or configured."""
    for row in _groups_of(records).rows([group]):
        if row.can_go_on(records.policy, records.now):
            return 1 if records.policy.order else row.ready
        return int(row.waits_for_rate(records.policy, records.now))
    return 0


def skip_held(records: QueueRecords, group: str, operation: str) -> str | None:
    """Let the next message of a group pass the delayed message that holds it; return the id of that message."""
    groups = _groups_of(records)
    held_by = next((row.held_by for row in groups.rows([group])), None)
    if held_by is None or records.policy.order is None or records.policy.on_failure == "pass":
        return None
    record = records.find(held_by)
    assert record is not None
    records.step.execute(_UNHOLD, (record.seq,))
    record.holds = HAS_PLACE
    groups.release(group)
    records.note("skipped", operation, record, cause="held")
    return held_by


def _groups_of(records: QueueRecords) -> Grouping:
    if records.groups is None or not records.policy.grouped:
        raise not_grouped(records.name)
    return records.groups


def _settings(row: GroupRow) -> GroupSettings:
    return GroupSettings(
        row.weight, row.max_running, row.rate_count, row.rate_per_ms, row.max_pending, bool(row.paused)
    )


def _count_settings(records: QueueRecords, groups: Grouping) -> None:
    state = groups.state
    found = records.step.execute(_SETTINGS_COUNT, (records.number,)).fetchone()
    state.own, state.own_running, state.own_pending = found


# ---- listing ---------------------------------------------------------------------------------------------


def page(records: QueueRecords, limit: int, cursor: str | None, group: str | None) -> GroupPage:
    """Return groups by name."""
    _groups_of(records)
    after = read_cursor(cursor, 1)
    execute, number = records.step.execute, records.number
    if group is not None:
        rows = execute(_ONE, (number, group)).fetchall() if after is None or group > str(after[0]) else []
    elif after is None:
        rows = execute(_FIRST_PAGE, (number, "", limit + 1)).fetchall()
    else:
        rows = execute(_PAGE, (number, str(after[0]), limit + 1)).fetchall()
    leased: dict[str, str] = {}
    if records.policy.order is not None and records.numbers["leased"] <= CHUNK_MESSAGES_MAX:
        # Of several messages of a group, the first by id.
        leased = dict(sorted(execute(_LEASED, (number,)).fetchall(), reverse=True))
    found = [_record(records, GroupRow(*row[:-1]), row[-1], leased.get(row[0])) for row in rows[:limit]]
    return GroupPage(found, group_cursor(rows[limit - 1][0]) if len(rows) > limit else None)


def _record(records: QueueRecords, row: GroupRow, ready_ms: int | None, leased: str | None) -> GroupRecord:
    policy, now = records.policy, records.now
    limited_by, limited_until = row.limit_at(policy, now)
    holds = row.held_by is not None and policy.order is not None and policy.on_failure != "pass"
    held_by = row.held_by if holds else leased
    cap = row.most_pending(policy)
    return GroupRecord(
        row.name or None, row.ready, row.others, row.leased, None if ready_ms is None else now - ready_ms,
        bool(row.paused), held_by, "delayed" if holds else "leased" if held_by is not None else None,
        limited_by, limited_until, cap is not None and row.ready + row.others >= cap,
        row.weight, row.max_running, row.rate_count, row.rate_per_ms, row.max_pending,
    )  # fmt: skip


# ---- changed settings of the queue -----------------------------------------------------------------------


def configured(records: QueueRecords, before: PolicyRecord) -> None:
    """Convert the messages to changed settings: a long queue part by part, in this step and in later claims."""
    after, number, execute = records.policy, records.number, records.step.execute
    if not before.grouped and not after.grouped:
        return
    records.flush_messages()
    groups = records.groups = records.groups or Grouping(records, None)
    state = groups.state
    if before.order is not None and after.order is None:
        execute(_UNHOLD_ALL, (number,))
    if after.order is not None and before.order is None:
        # They were claimed before all messages that are ready, so they return to places before them.
        for group, count in execute(_LEASED_UNCOUNTED, (number,)).fetchall():
            groups.count(group, LEASED, count)
        execute(_LEASED_FIRST, (number,))
    # Those of the order before that are not converted have ranks behind those of all that came since.
    is_set_again = after.order is not None and before.order is None and state.conversion is not None
    if is_set_again:
        state.reordered_to = records.numbers["sequence"]
    elif after.order is None:
        state.reordered_to = 0
    if not after.grouped:
        execute(_LINE_CLEAR, (number,))
        state.turn, state.clock_ms, state.conversion, state.converted_to = 0, 0, "leave", ""
    elif not before.grouped or is_set_again or (state.conversion == "join" and before.order != after.order):
        _count_settings(records, groups)
        state.conversion, state.converted_to = "join", ""
    elif before.order is not None and after.order is None:
        state.conversion, state.converted_to = "unorder", ""
    state.check_limits = True
    convert(records)
    if groups.takes_turns:
        groups.join_all()


def convert(records: QueueRecords) -> None:
    """Convert the next messages of a queue whose settings have changed."""
    groups, execute = records.groups, records.step.execute
    if groups is None or groups.state.conversion is None:
        return
    records.flush_messages()
    state, number = groups.state, records.number
    row = execute(_PART, (number, state.converted_to, CONVERTED_MAX - 1)).fetchone()
    last = None if row is None else row[0]
    part = (number, state.converted_to, last)
    if state.conversion == "unorder":
        execute(_UNORDER_PART, part)
    else:
        joins = state.conversion == "join"
        for group, of_state, count in execute(_COUNT_PART, (*part, int(joins))).fetchall():
            groups.count(group, of_state, count if joins else -count)
        execute(_RANK_PART if joins else _UNRANK_PART, part)
        if joins and records.policy.order is None:
            execute(_UNORDER_PART, part)
        elif joins and state.reordered_to:
            execute(_REORDER_PART, (*part, state.reordered_to))
    if last is not None:
        state.converted_to = last
        return
    done, state.conversion, state.converted_to, state.reordered_to = state.conversion, None, "", 0
    groups.flush()
    if done == "join":
        groups.join_all()
    elif done == "leave":
        execute(_GROUPS_CLEAR, (number,))
        execute(_COUNTS_CLEAR, (number,))
        execute(_GROUPING_CLEAR, (number,))
        records.groups = None


# ---- damage ----------------------------------------------------------------------------------------------


def check(records: QueueRecords, *, mend: bool) -> list[Damage]:
    """Find wrong counts of groups, and groups that can continue and are not in line."""
    groups = records.groups
    if groups is None or not groups.counts_all:
        return []
    records.flush_messages()
    groups.flush()
    damages = _check_counts(records, groups, mend=mend)
    for found in records.step.execute(_AWAY, (records.number,)).fetchall():
        row = GroupRow(*found)
        if row.can_go_on(records.policy, records.now):
            group = row.name or None
            if mend:
                groups.join(row.name)
                groups.freed.add(row.name)
                records.note("configured", None, group=group, cause=f"mended group: {IN_LINE}")
            text = "it has messages to hand out and is not in line"
            damages.append(Damage(records.name, "group", group, text, IN_LINE if mend else None))
    return damages


def _check_counts(records: QueueRecords, groups: Grouping, *, mend: bool) -> list[Damage]:
    execute, number = records.step.execute, records.number
    stored = {
        group or NO_GROUP: (ready, leased, live - ready - leased)
        for group, ready, leased, live in execute(_COUNTED, (number,)).fetchall()
    }
    kept = {name: tuple(counts) for name, *counts in execute(_COUNTS, (number,)).fetchall()}
    wrong = [name for name in stored.keys() | kept.keys() if stored.get(name, (0, 0, 0)) != kept.get(name, (0, 0, 0))]
    if not wrong:
        return []
    if mend:
        for name in wrong:
            for state, is_, was in zip(
                (READY, LEASED, DELAYED), stored.get(name, (0, 0, 0)), kept.get(name, (0, 0, 0)), strict=True
            ):
                if is_ != was:
                    groups.count(name or None, state, is_ - was)
        groups.flush()
        records.note("configured", None, cause=f"mended counters of {len(wrong)} groups")
    found = f"the counts of {len(wrong)} groups are off, {min(wrong) or 'messages without a group'} among them"
    return [Damage(records.name, "counters", None, found, "counted anew" if mend else None)]


def strand(step: Step, queue: str, group: str) -> None:
    """For tests: remove a group from the line that can hand out a message, so that no claim finds its messages."""
    number = step.queue_for_writing(queue).number
    step.execute("UPDATE {group} SET turn = NULL WHERE queue = ? AND name = ?", (number, group))
