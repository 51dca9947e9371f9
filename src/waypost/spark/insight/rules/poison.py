"""Poison shapes: a value of a field that the bodies of dead letters share, and that hardly another message has.

No setting knows the fields of bodies, so only the handler can refuse a value. But where the messages with the value are
a group of their own, that group can be paused: its messages wait instead of dying, until the handler can handle them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from waypost.spark.insight.advice import Advice, Facts, FieldValue, Measured, Rule, sql_text
from waypost.spark.lake.views import view_name

KIND: Final = "poison"
DEAD_MIN: Final = 20
#: The part of the messages with the value that died, of all dead that have it, and of the others that died at most.
DEAD_SHARE_MIN: Final = 0.8
SHARED_MIN: Final = 0.5
OTHERS_MAX: Final = 0.2
CASES_MAX: Final = 3
#: A group is paused only if so large a part of it dies: the others would wait for nothing.
PAUSED_DEAD_SHARE_MIN: Final = 0.95


def others(facts: Facts, one: FieldValue) -> float:
    """Return the part of messages without the value that died."""
    assert facts.bodies is not None
    return (facts.bodies.dead - one.dead) / max(1, facts.bodies.messages - one.messages)


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return the part of the messages with a value that died."""
    if facts.bodies is None:
        return None
    for one in facts.bodies.values:
        if f"{one.name}={one.value}" == subject:
            return Measured(one.dead / one.messages, one.messages)
    return Measured(0.0, facts.bodies.messages) if facts.bodies.messages >= DEAD_MIN else None


def is_over(facts: Facts, one: FieldValue) -> bool:
    """Return whether its group is paused, or was paused or resumed after the last of these messages died."""
    change = facts.groups.get(one.group) if one.group is not None else None
    return change is not None and (change.paused or one.died_ms <= change.at_ms)


def group_to_pause(facts: Facts, one: FieldValue) -> str:
    """Return the group that can be paused in place of a change of the handler; empty if there is none."""
    # What waits fills a queue that has a cap, so that publishers of other groups would be refused.
    has_cap = facts.policy.max_pending is not None or facts.policy.group_max_pending is not None
    if one.group is None or has_cap or one.dead < PAUSED_DEAD_SHARE_MIN * one.messages:
        return ""
    return one.group


def find(facts: Facts) -> list[Advice]:
    """Name the values that most dead letters share."""
    bodies = facts.bodies
    if bodies is None or bodies.dead < DEAD_MIN:
        return []
    cases = [
        one for one in bodies.values
        if one.dead >= DEAD_MIN and one.dead >= DEAD_SHARE_MIN * one.messages and one.dead >= SHARED_MIN * bodies.dead
        and others(facts, one) <= OTHERS_MAX * one.dead / one.messages and not is_over(facts, one)
    ]  # fmt: skip
    found = []
    for one in sorted(cases, key=lambda one: (-one.dead, one.name))[:CASES_MAX]:
        # Not by a path of JSON, in which not every name can be written.
        field = f"from_json({bodies.text}, 'map<string,string>')[{sql_text(one.name)}]"
        value: Any = msgspec.json.decode(one.value)
        is_value = f"{'is' if value is None else '=='} {value!r}"
        name = one.name if one.name.isidentifier() else repr(one.name)
        group = group_to_pause(facts, one)
        effect = f"{one.dead:,} dead letters fewer in such a period, if these messages are handled or refused"
        if group:
            effect = f"the messages of group {group!r} wait instead of dying, until the handler can handle them"
        turns = bool(group) and not facts.policy.grouped
        found.append(
            Advice(
                KIND, facts.queue, f"{one.name}={one.value}",
                f"{one.dead:,} of {bodies.dead:,} dead letters have {name} = {one.value}",
                {"field": one.name, "value": value, "messages": one.messages, "dead": one.dead,
                 "dead_of_others": round(others(facts, one), 4)},
                one.messages,
                f"SELECT {field} AS value, count(*) AS messages, count(d.message_id) AS dead FROM "
                f"{view_name(f'messages/{facts.queue}')} LEFT JOIN (SELECT DISTINCT message_id FROM bronze_journal "
                f"WHERE queue = {sql_text(facts.queue)} AND event = 'dead') AS d ON d.message_id = id "
                "GROUP BY 1 ORDER BY 3 DESC",
                effect, one.dead / one.messages, OTHERS_MAX, {"fair": True} if turns else {},
                {"fair": False} if turns else {}, group=group,
                code=f"if body.get({one.name!r}) {is_value}: return Dead('unsupported')  # first in the handler of "
                f"{facts.queue}, until it can handle them",
            )
        )  # fmt: skip
    return found


RULE: Final = Rule(KIND, find, measure)
