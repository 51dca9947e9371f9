"""What undoes each action: another action with its options, or only words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from waypost.views import ActionUndo
from waypost.web import documents

CANNOT = ActionUndo("It cannot be undone.")
REDRIVEN = ActionUndo(
    "Messages that no worker has claimed yet can be cancelled; they then end as cancelled, not as dead letters."
)
PUBLISHED = "Cancel the message that was published, if no worker has claimed it yet."

Undo = Callable[[Any, Any], ActionUndo]


def another(action: str, text: str) -> Undo:
    """Undone by the action that does the opposite, if this one changed anything."""

    def undo(request: Any, done: documents.Done) -> ActionUndo:
        if not done.changed:
            return ActionUndo("It changed nothing.")
        options = {name: getattr(request, name) for name in request.__struct_fields__}
        return ActionUndo(text, action, options)

    return undo


def undo_configure(request: documents.SettingsChange, done: documents.SettingsDone) -> ActionUndo:
    """Back to the settings before."""
    if not done.changes or done.dry_run:
        return ActionUndo("It changed nothing.")
    before = {change.name: change.before for change in done.changes}
    return ActionUndo("Set what was changed back to its values before.", "configure", before)


def undo_trigger(request: documents.ScheduleReference, done: documents.TriggerDone) -> ActionUndo:
    """The message can be cancelled while it waits."""
    return ActionUndo(PUBLISHED, "cancel", {"queue": done.queue, "id": done.id})


UNDO: dict[str, Undo] = {
    "pause": another("resume", "Resume the queue."),
    "resume": another("pause", "Pause the queue."),
    "configure": undo_configure,
    "pause_schedule": another("resume_schedule", "Resume the schedule."),
    "resume_schedule": another("pause_schedule", "Pause the schedule."),
    "trigger_schedule": undo_trigger,
    "redrive": lambda request, done: REDRIVEN,
    "bulk_redrive": lambda request, done: ActionUndo("Cancel the rest of it while it runs. " + REDRIVEN.text),
    "bulk_purge": lambda request, done: ActionUndo("Cancel the rest of it while it runs; what is removed is gone."),
    "edit_dead": lambda request, done: ActionUndo("Cancel the new message, if no worker has claimed it yet."),
    "change_bulk": lambda request, done: ActionUndo(
        "Resume it if it was paused; a cancelled one must be started anew."
    ),
    "save_schedule": lambda request, done: ActionUndo("Save it with its rule before, or remove it if it is new."),
    "remove_schedule": lambda request, done: ActionUndo("Save the schedule again; its counts of fires start anew."),
    "reschedule": lambda request, done: ActionUndo("Move the timer to its time before, while it is not due."),
}


def undo_of(action: str, request: Any, done: documents.Done) -> ActionUndo:
    """How an action that was done can be undone."""
    return UNDO.get(action, lambda request, done: CANNOT)(request, done)
