"""Find damaged rows, and repair them: SQLite takes any value in any column, and files are edited by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

from waypost.policy import HEAD_OFFSET, PRIORITY_DEFAULT, PRIORITY_MAX
from waypost.store.sqlite import groups
from waypost.store.sqlite.grouping import NO_GROUP, RANK_FIRST
from waypost.store.sqlite.queue_records import COLUMNS, STATE_COUNTERS, QueueRecords
from waypost.store.sqlite.schema import DEAD, LEASED, READY
from waypost.values import REDELIVERY_CAUSES, CheckPage, Damage, DamageKind

#: Rows that one step checks.
ROWS_MAX = 500
#: The state of a message that was set aside: it is in no index, so no other step finds it.
SET_ASIDE = 9
#: Columns of a row, by their place in `COLUMNS`, that hold whole numbers.
NUMBERS = (2, 3, 4, 5, 6, 7, 10, 11, 12, 17, 18, 26)
#: Columns that hold a text or nothing.
TEXTS = (8, 9, 14, 19, 21, 22, 23, 24, 28)

#: The positions of the rank and of `key_mode`, each a number or null.
RANK, KEY_MODE = 25, 27

#: The position of the body, or of its length, in a row that has it.
BODY = 29

#: Whether the columns that a claim does not read have valid values. SQLite sorts numbers before texts, and texts before
#: bytes: a comparison takes a fifth of the time of `typeof`.
OTHERS_SOUND = "m.position < '' AND m.lease_ms < '' AND m.cancel_requested < '' AND m.nonce >= x''"

_PAGE = f"""
    SELECT {COLUMNS}, length(e.data)
    FROM {{message}} m INDEXED BY {{message:id}} LEFT JOIN {{envelope}} e ON e.seq = m.seq
    WHERE m.queue = ? AND m.id > ? ORDER BY m.id LIMIT ?"""
_ASIDE = "UPDATE {message} SET state = ? WHERE seq = ?"
_OWNER = """
    SELECT 1 FROM {message} INDEXED BY {message:owner}
    WHERE queue = ? AND key = ? AND state < {WAITING} AND seq <> ?"""
_TO_HEAD = """
    UPDATE {message} SET state = {READY}, priority = ?, position = ?, ready_ms = ?, published_ms = ?, size = ?, key = ?,
        "group" = ?, token = ?, deliveries = ?, attempts = ?, nonce = x'', worker = NULL, claimed_ms = NULL,
        lease_end_ms = NULL, lease_ms = 0, cancel_requested = 0, cause = ?, ended_ms = NULL, reason = NULL,
        rank = ?, holds = 0, key_mode = CASE typeof(key_mode) WHEN 'integer' THEN key_mode END,
        freed_key = CASE typeof(freed_key) WHEN 'text' THEN freed_key END,
        error_type = CASE typeof(error_type) WHEN 'text' THEN error_type END,
        error = CASE typeof(error) WHEN 'text' THEN error END, chain = ?
    WHERE seq = ?"""
_TO_DEAD = "UPDATE {message} SET ended_ms = ?, reason = ? WHERE seq = ?"
_WINDOW_FREE = "DELETE FROM {window} WHERE queue = ? AND key = ? AND message_id = ?"
_REMOVE = "DELETE FROM {message} WHERE seq = ?"
_DEPTHS = "SELECT state, count(*) FROM {message} WHERE queue = ? GROUP BY state"


def is_sound(row: Sequence[Any]) -> bool:
    """Return whether the columns of a message have valid values."""
    for place in NUMBERS:
        if type(row[place]) is not int:
            return False
    for place in TEXTS:
        if row[place] is not None and type(row[place]) is not str:
            return False
    if type(row[RANK]) not in (int, NoneType) or type(row[KEY_MODE]) not in (int, NoneType):
        return False
    # A ready message that was claimed before has a cause: why it is ready again.
    explained = row[2] != READY or row[10] == 0 or row[19] in REDELIVERY_CAUSES
    # A row that is about to be handed out has its body after its columns.
    whole = len(row) <= BODY or type(row[BODY]) in (bytes, int)
    return type(row[13]) is bytes and 0 <= row[3] <= PRIORITY_MAX and explained and whole


def usable(records: QueueRecords, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the valid rows. The others are set aside: they must not stop the rest."""
    sound = [row for row in rows if is_sound(row)]
    if len(sound) < len(rows):
        for row in rows:
            if not is_sound(row):
                records.step.execute(_ASIDE, (SET_ASIDE, row[0]))
                records.numbers[STATE_COUNTERS[row[2]]] -= 1
                records.moments_changed = True
                if records.groups is not None and row[RANK] is not None:
                    records.groups.count(_text(row[9]), row[2], -1)
                records.damaged.append(str(row[1]))
    return sound


def check(records: QueueRecords, after: str | None, *, mend: bool) -> CheckPage:
    """Check one bounded part; its cursor is the last id checked."""
    rows = records.step.execute(_PAGE, (records.number, after or "", ROWS_MAX)).fetchall()
    damages = []
    for row in rows:
        found = _what_is_wrong(row)
        if found is not None:
            done = _mend(records, row, found[0]) if mend else None
            damages.append(Damage(records.name, found[0], str(row[1]), found[1], done))
    if len(rows) == ROWS_MAX:
        return CheckPage(len(rows), damages, str(rows[-1][1]))
    damages += groups.check(records, mend=mend)
    damages += _check_counts(records, mend=mend)
    return CheckPage(len(rows), damages, None)


def _rank(records: QueueRecords, priority: int, group: str | None) -> int | None:
    """Return the rank of a message that becomes the first of its group."""
    if records.groups is None or not records.policy.grouped:
        return None
    return RANK_FIRST if records.groups.is_ordered(group) else records.groups.rank_of(priority, group)


def _what_is_wrong(row: tuple[Any, ...]) -> tuple[DamageKind, str] | None:
    state = row[2]
    if row[-1] is None:
        return "missing", "it has no body"
    if not is_sound(row):
        return "unreadable", "columns of its row hold what they cannot"
    if state not in range(5):
        return "stranded", f"its state is {state}, so no claim can reach it"
    if state == LEASED and (type(row[16]) is not int or not row[13]):
        return "unreadable", "it is leased, and its lease has no end or no holder"
    if state == DEAD and (type(row[20]) is not int or row[21] is None):
        return "unreadable", "it is a dead letter without a reason or a time"
    return None


def _number(value: Any, otherwise: int) -> int:
    return value if type(value) is int else otherwise


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def _mend(records: QueueRecords, row: tuple[Any, ...], kind: DamageKind) -> str:
    """Make a message the first of its priority, or drop it if it has no body. Counts are corrected later."""
    seq, message_id, state = row[:3]
    if state == DEAD and (kind == "missing" or not is_sound(row)):
        # It is no longer a dead letter.
        records.step.execute(_WINDOW_FREE, (records.number, _text(row[8]), str(message_id)))
    if kind == "missing":
        records.step.execute(_REMOVE, (seq,))
        if state != DEAD:
            records.count_up("dropped")
        records.note("dead_trimmed" if state == DEAD else "dropped", None, message_id=str(message_id), cause="damaged")
        done = "removed from the dead letters" if state == DEAD else "dropped"
    elif state == DEAD and is_sound(row):
        records.step.execute(_TO_DEAD, (_number(row[20], records.now), row[21] or "unknown", seq))
        done = "a dead letter with a reason and a time"
    else:
        priority = row[3] if type(row[3]) is int and 0 <= row[3] <= PRIORITY_MAX else PRIORITY_DEFAULT
        # The number of its claims may be unknown: at most the claims of all messages of the queue.
        token = _number(row[10], records.numbers["claims"])
        cause = row[19] if row[19] in REDELIVERY_CAUSES and state != LEASED else "expired"
        key = _text(row[8])
        if key is not None and records.step.execute(_OWNER, (records.number, key, seq)).fetchone() is not None:
            key = None  # another message has it by now
        records.step.execute(
            _TO_HEAD,
            (
                priority, records.now - HEAD_OFFSET, records.now, _number(row[6], records.now), row[-1], key,
                _text(row[9]),
                token, _number(row[11], 0), _number(row[12], 0), cause if token else None,
                _rank(records, priority, _text(row[9])), _text(row[24]), seq,
            ),
        )  # fmt: skip
        if records.groups is not None and records.policy.grouped:
            # Whether it was counted is not known: the counts of all groups are corrected at the end.
            records.groups.join(_text(row[9]) or NO_GROUP)
        records.freshly_ready += 1
        records.messages.pop(str(message_id), None)
        records.note("promoted", None, records.find(str(message_id)), cause="mended")
        done = "ready at the head of its priority"
    records.note("configured", None, cause=f"mended {kind} {message_id}: {done}")
    return done


def _check_counts(records: QueueRecords, *, mend: bool) -> list[Damage]:
    """Compare the queue's counters with its rows, and correct them if asked to."""
    depths = dict(records.step.execute(_DEPTHS, (records.number,)).fetchall())
    numbers = records.numbers
    stored = {name: depths.get(state, 0) for state, name in enumerate(STATE_COUNTERS)}
    live = sum(stored[STATE_COUNTERS[state]] for state in range(READY, DEAD))
    ended = sum(numbers[name] for name in ("done", "dead", "dropped", "cancelled", "replaced"))
    balance = numbers["published"] + numbers["redriven"] - live - ended
    wrong = {name: numbers[name] - number for name, number in stored.items() if numbers[name] != number}
    if not wrong and not balance:
        return []
    found = ", ".join([f"{name} {difference:+}" for name, difference in wrong.items()])
    found = f"counts are off: {found or 'none'}, and the ledger by {balance}"
    if mend:
        numbers.update(stored)
        numbers["dropped" if balance > 0 else "published"] += abs(balance)
        records.note("configured", None, cause=f"mended counters: {found}")
    return [Damage(records.name, "counters", None, found, "counted anew" if mend else None)]
