"""What undoes each action: another action with its options, or only words."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from waypost.views import UNDONE_BY, ActionUndo
from waypost.web import documents


def undo_of(action: str, request: Any, done: documents.Done) -> ActionUndo:
    """How an action that was done can be undone."""
    match done:
        case documents.SettingsDone():
            before = {change.name: change.before for change in done.changes}
            return ActionUndo.of(action, before, changed=bool(before) and not done.dry_run)
        case documents.TriggerDone():
            return ActionUndo.of(action, {"queue": done.queue, "id": done.id})
    if action not in UNDONE_BY:
        return ActionUndo.of(action)
    return ActionUndo.of(action, structs.asdict(request), changed=done.changed)
