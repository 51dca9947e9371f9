"""Find a message by its id in many queues: one statement over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from waypost.store.sqlite.entries import events_of
from waypost.store.sqlite.schema import STATES
from waypost.store.sqlite.step import Step
from waypost.values import FoundMessage

_MESSAGES = """
    SELECT q.name, m.state,
        CASE WHEN m.state IS NOT NULL THEN NULL
        WHEN EXISTS (SELECT 1 FROM {result} r WHERE r.queue = q.number AND r.id = ?2 AND r.until_ms > ?3) THEN 'done'
        ELSE (SELECT e.how FROM {ending} e WHERE e.queue = q.number AND e.id = ?2 AND e.until_ms > ?3) END AS ended
    FROM json_each(?1) j CROSS JOIN {queue} q ON q.name = j.value
        LEFT JOIN {message} m INDEXED BY {message:id} ON m.queue = q.number AND m.id = ?2
    WHERE m.state IS NOT NULL OR ended IS NOT NULL"""
_JOURNALS = """
    SELECT q.name, q.number, q.journal_first FROM json_each(?) j CROSS JOIN {queue} q ON q.name = j.value"""


def find_messages(step: Step, queues: Sequence[str], message_id: str) -> list[FoundMessage]:
    """Return the queues that have a message, or have stored how it ended."""
    found = list[FoundMessage]()
    for queue, number, ended in step.execute(_MESSAGES, (_names(queues), message_id, step.now)):
        state = None if number is None else STATES[number]
        found.append(FoundMessage(queue, message_id, state, "dead" if state == "dead" else ended))
    return found


def find_in_journals(step: Step, queues: Sequence[str], message_id: str) -> list[FoundMessage]:
    """Return the queues whose journal has an event of a message."""
    return [
        FoundMessage(queue, message_id, None)
        for queue, number, first in step.execute(_JOURNALS, (_names(queues),)).fetchall()
        if any(event[0] >= first for event in events_of(step, number, message_id, ()))
    ]


def _names(queues: Sequence[str]) -> str:
    return msgspec.json.encode(list(queues)).decode()
