"""Advice: what it is made of, and what rules see. No I/O.

A rule looks at the facts of one queue. It gives advice only if its sample is large enough, with the figures, a query
that shows them, what to expect, and the exact call with its undo. Its measure can be taken again later: so past advice
is judged.
"""

from __future__ import annotations

import math
import re
import shlex
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from msgspec import Struct

from waypost.formatting import format_call
from waypost.policy import DEFAULT_POLICY, PolicyRecord
from waypost.spark.insight.history import Delivery
from waypost.spark.insight.lake_history import Change, changed_ms

DAY_MS: Final = 86_400_000
#: A type of messages is named if so large a part of what advice is about is of it.
TYPE_SHARE: Final = 0.9
#: The text of a body in a table of ingested messages: without a schema, and with one.
TEXT: Final = "text"
TEXT_OF_VALUE: Final = "to_json(value)"


class Advice(Struct, frozen=True):
    """One piece of advice for a queue."""

    kind: str
    queue: str
    #: What it is about within its queue: an error type, a group, a field of the body; or empty.
    subject: str
    title: str
    figures: dict[str, Any]
    #: How many deliveries, messages or fires it is based on.
    sample: int
    #: A query over the tables of the lake, by the names of `waypost pipeline views`.
    evidence: str
    effect: str
    #: What the rule measured, and what it should be after the change.
    measured: float
    expected: float
    #: Settings of `configure`, and their values before.
    settings: dict[str, Any] = {}
    before: dict[str, Any] = {}
    #: The jitter of schedules in seconds, by their keys, and before.
    jitter: dict[str, float] = {}
    jitter_before: dict[str, float] = {}
    #: The group that is paused, after its queue takes turns between groups; or empty.
    group: str = ""
    #: What to change in the program: where no setting does it, or where a setting only helps until then.
    code: str = ""

    @property
    def id(self) -> str:
        """What stays the same when it is given again."""
        return f"{self.kind}:{self.queue}:{self.subject}"

    @property
    def can_be_applied(self) -> bool:
        """Whether a setting does it."""
        return bool(self.settings or self.jitter or self.group)

    @property
    def call(self) -> str:
        """The change: Python, or commands for schedules, or what to do in the program."""
        pause = [format_call("pause_group", self.queue, self.group)] if self.group else []
        return "\n".join([*self._configure(self.settings), *pause, *self._save(self.jitter)]) or self.code

    @property
    def undo(self) -> str:
        """The reverse of the change; empty where no setting does it."""
        resume = [format_call("resume_group", self.queue, self.group)] if self.group else []
        return "\n".join([*resume, *self._configure(self.before), *self._save(self.jitter_before)])

    def _configure(self, settings: Mapping[str, Any]) -> list[str]:
        return [format_call("configure", self.queue, **settings)] if settings else []

    def _save(self, jitter: Mapping[str, float]) -> list[str]:
        return [
            shlex.join(["waypost", "schedules", "save", key, "--queue", self.queue, "--key", key, "--jitter", f"{s:g}"])
            for key, s in jitter.items()
        ]


class Measured(Struct, frozen=True):
    """What a rule measures, and on how large a sample."""

    value: float
    sample: int


class ScheduledRun(Struct, frozen=True):
    """A message that a schedule published."""

    schedule: str
    published_ms: int
    wait_ms: int | None
    ended_ms: int | None


class FieldValue(Struct, frozen=True):
    """How often a field of bodies has a value, and how many of these messages died."""

    name: str
    #: As JSON: 5 is a number and "5" a text.
    value: str
    messages: int
    dead: int
    #: The group that all of these messages have, and no other message has; None if there is no such group.
    group: str | None = None
    #: When the last of them died.
    died_ms: int = 0


class GroupChange(Struct, frozen=True):
    """When a group was last paused or resumed, and whether it is paused since."""

    at_ms: int
    paused: bool


class Bodies(Struct, frozen=True):
    """What is known of bodies: their number, how many of them died, and the values of their fields."""

    messages: int
    dead: int
    values: tuple[FieldValue, ...]
    #: The text of a body in the table, as an expression of SQL.
    text: str = TEXT
    #: They were published from this time on.
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules see of a queue."""

    queue: str
    policy: PolicyRecord = DEFAULT_POLICY
    changes: Sequence[Change] = ()
    #: Ended deliveries in the order of their claims.
    deliveries: Sequence[Delivery] = ()
    scheduled: Sequence[ScheduledRun] = ()
    #: The jitter of each schedule in seconds, by its key.
    schedules: Mapping[str, float] = field(default_factory=dict)
    #: When messages died, were redriven or trimmed: time, and by how many letters more.
    dead_changes: Sequence[tuple[int, int]] = ()
    #: The newest time that is known of the queue.
    now_ms: int = 0
    #: How many events each of the last runs of the pipeline loaded, and how many were trimmed before they were loaded.
    run_events: Sequence[int] = ()
    not_seen: int = 0
    bodies: Bodies | None = None
    #: Groups that were paused or resumed.
    groups: Mapping[str, GroupChange] = field(default_factory=dict)
    pauses: Sequence[tuple[int, int]] = ()
    never_claimed_ms: Sequence[int] = ()
    #: A wait that is wished for, as `parse_target` reads it.
    target: str | None = None

    def after(self, at_ms: int) -> Facts:
        """Return the facts from a time on; without bodies if some of them are older."""
        return replace(
            self,
            deliveries=[row for row in self.deliveries if row.claimed_ms >= at_ms],
            scheduled=[run for run in self.scheduled if run.published_ms >= at_ms],
            dead_changes=[change for change in self.dead_changes if change[0] >= at_ms],
            bodies=self.bodies if self.bodies is not None and self.bodies.since_ms >= at_ms else None,
        )

    def since_change(self, fields: Sequence[str]) -> Facts:
        """Return the facts since one of these settings was changed: what was before says nothing about it."""
        return self.after(changed_ms(self.changes, fields)) if fields else self


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of advice: how it is found, and how its measure is taken again."""

    kind: str
    find: Callable[[Facts], Sequence[Advice]]
    #: The measure of a subject; None if the sample is too small.
    measure: Callable[[Facts, str], Measured | None]
    #: Settings that decide about it: only what was recorded since their last change counts.
    fields: tuple[str, ...] = ()
    #: The measure is the part of a sample with the problem: a small sample says nothing about a small part.
    is_share: bool = False


# ---- helpers of rules ---------------------------------------------------------------------------------------


def count_types(deliveries: Iterable[Delivery]) -> dict[str, int]:
    """Return how many deliveries there are of each type of messages, where types are known, the most first."""
    return dict(Counter(row.type_name for row in deliveries if row.type_name is not None).most_common())


def name_type(deliveries: Sequence[Delivery]) -> str:
    """Return the type that nearly all of these deliveries have, as the end of a sentence; empty if there is none."""
    name, count = next(iter(count_types(deliveries).items()), ("", 0))
    return f"; {count:,} of {len(deliveries):,} are of type {name}" if count >= TYPE_SHARE * len(deliveries) > 0 else ""


def rank(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def round_up_seconds(milliseconds: float) -> int:
    """Return a duration in seconds as people set it: 15, 20, 30, 45, 60, 90, 120 …, at least as long."""
    seconds = milliseconds / 1000
    for step in (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 2700, 3600):
        if seconds <= step:
            return step
    return math.ceil(seconds / 3600) * 3600


def round_up_count(count: float) -> int:
    """Return a number as people set it, at least as large: 1, 2 or 5 with zeros."""
    size = 10 ** math.floor(math.log10(max(1.0, count)))
    return int(next(step * size for step in (1, 2, 5, 10) if step * size >= count))


def by_message(deliveries: Sequence[Delivery]) -> dict[str, list[Delivery]]:
    """Return the deliveries of each message, in the order of their claims."""
    found: dict[str, list[Delivery]] = {}
    for row in deliveries:
        found.setdefault(row.message_id, []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row.claim)
    return found


def join_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return times from and to, in order, with those as one that meet."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def is_within(spans: Sequence[tuple[float, float]], at_ms: float) -> bool:
    """Return whether a time is in one of these spans, which are in order: after its begin, and up to its end."""
    place = bisect_left(spans, at_ms, key=lambda span: span[0]) - 1
    return place >= 0 and at_ms <= spans[place][1]


def sql_text(text: str) -> str:
    """Return a text as an expression of SQL that means the same to Spark and to DuckDB, whatever its characters.

    To Spark a backslash is an escape and `${name}` a variable, so such characters are given by their numbers.
    """
    parts = []
    for part in re.split(r"([\x00-\x1f'\\]|\$(?={))", text):
        is_special = part == "$" or (len(part) == 1 and (part in "'\\" or part < " "))
        parts.append(f"chr({ord(part)})" if is_special else f"'{part}'" if part else "")
    found = [part for part in parts if part] or ["''"]
    return found[0] if len(found) == 1 else f"({' || '.join(found)})"
