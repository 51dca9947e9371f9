"""Schedules and leaders as a model: what each verb means, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from waypost.identity import Operation
from waypost.store.port import Draft, FireStep
from waypost.values import Elected, Fired, FireStatus, Promoted, Published, Saved, StoredSchedule

if TYPE_CHECKING:
    from waypost.store.memory.queue import QueueModel


def save_schedule(
    model: QueueModel, schedule: StoredSchedule, version: str | None, next_ms: int | None
) -> tuple[Saved, bool]:
    """Write a schedule if it still has the version and next fire that the caller read. The counts stay."""
    found = model.schedules.get(schedule.key)
    if (None if found is None else (found.version, found.next_ms)) != (None if version is None else (version, next_ms)):
        return Saved("conflict", found), False
    if found is not None:
        schedule = structs.replace(schedule, fires=found.fires, missed=found.missed, last_ms=found.last_ms)
    model.schedules[schedule.key] = schedule
    return Saved("saved", schedule), True


def fire_schedule(model: QueueModel, now: int, step: FireStep, drafts: Sequence[Draft], operation: Operation) -> Fired:
    """Publish the fires of a schedule and advance it, if it is unchanged since the caller read it and is due."""
    found = model.schedules.get(step.key)
    status: FireStatus = "fired"
    paused = found is not None and found.paused and not step.by_hand
    if found is None or paused or (found.version, found.next_ms) != (step.version, step.expected_ms):
        status = "conflict"
    elif now < step.last_due_ms:
        status = "early"
    elif now > step.valid_until_ms:
        status = "stale"
    elif step.after_run is not None and _is_running(model, now, step.after_run.run_id):
        status = "running" if step.after_run.state is None else "skipped"
    if found is None or status not in ("fired", "skipped"):
        return Fired(status, now, found)
    moved = structs.replace(
        found,
        version=step.new_version or found.version,
        next_ms=step.next_ms,
        due_ms=step.due_ms,
        missed=found.missed + step.missed,
    )
    if status == "skipped" and step.after_run is not None:
        after = step.after_run
        moved = structs.replace(moved, state=after.state or b"")
        if after.skipped:
            model.note(
                now, "skipped", operation, None, schedule=step.key, cause="overlap", reason=after.run_id,
                due_ms=after.instant_ms, size=after.skipped,
            )  # fmt: skip
    else:
        # A full queue refuses here, before anything has changed.
        model.publish(now, drafts, operation, schedule=step.key)
        moved = structs.replace(
            moved,
            fires=found.fires + (0 if step.by_hand else len(drafts)),
            last_ms=found.last_ms if step.last_ms is None else step.last_ms,
            state=found.state if step.state is None else step.state,
        )
    model.schedules[step.key] = moved
    return Fired(status, now, moved)


def _is_running(model: QueueModel, now: int, run_id: str) -> bool:
    """Whether the message of a run is not final: it waits, is leased, or waits for a retry, and has not lapsed."""
    record = model.messages.get(run_id)
    return record is not None and record.state != "dead" and not record.has_lapsed(now)


def trigger_schedule(model: QueueModel, now: int, key: str, draft: Draft, operation: Operation) -> Published | None:
    """Publish a schedule's message now, in addition to its instants; None if there is no such schedule."""
    if key not in model.schedules:
        return None
    return model.publish(now, [draft], operation, schedule=key)[0]


def promote(model: QueueModel, now: int) -> Promoted:
    """Make due timers ready, as a claim does, and end what has lapsed. In a paused queue timers accumulate."""
    late = model.next_due_at()
    before = model.count("delayed")
    promoted = 0
    if not model.paused:
        model.promote(now, None)
        promoted = before - model.count("delayed")
    model.lapse(now, None)
    lag = 0 if late is None else max(0, now - late)
    return Promoted(promoted, model.count("delayed"), lag, model.next_moment(now))


class Leaders:
    """The leader of each role, and the end of its lease."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[str, int, int]] = {}

    def elect(self, now: int, role: str, name: str, ttl_ms: int) -> Elected:
        """Become or stay the leader, unless there is another; return the leader."""
        leader, token, until = self._roles.get(role, ("", 0, 0))
        if leader != name and leader and until > now:
            if until - now > 4 * ttl_ms:
                # The clock was set back: do not wait for a dead leader until the clock reaches the old time.
                until = now + ttl_ms
                self._roles[role] = (leader, token, until)
            return Elected(leader, token, until - now)
        if leader != name or until <= now:
            token += 1
        self._roles[role] = (name, token, now + ttl_ms)
        return Elected(name, token, ttl_ms)

    def resign(self, now: int, role: str, name: str) -> bool:
        """Give up the lead, so that another one can lead at once."""
        leader, token, until = self._roles.get(role, ("", 0, 0))
        if leader != name or until <= now:
            return False
        self._roles[role] = ("", token, 0)
        return True
