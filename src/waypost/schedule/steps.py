"""The steps that a scheduler sends to the store: a fire by the rule, and one that waited for the end of a run. No I/O.

With an overlap rule a schedule remembers the message of its last run. A step names that message, and the store fires
only if it is final; otherwise it writes the state that the step has for that case.
"""

from __future__ import annotations

import os

from msgspec import structs

from waypost.checks import DUE_MS_MAX
from waypost.schedule.missed import Decision
from waypost.schedule.rule import Spec
from waypost.schedule.state import State, add_range, after_fires, after_gap, fired_ranges, pack_state, read_state
from waypost.store.port import AfterRun, FireStep
from waypost.values import StoredSchedule


def fire_step(stored: StoredSchedule, spec: Spec, decision: Decision, run_id: str | None) -> FireStep:
    """Return the step of a decision; `run_id` is the id of its last message, None if it has none."""
    following = decision.following
    known = read_state(stored)
    first_ms = decision.fires[0].instant_ms if decision.fires else None
    state = after_fires(known, stored.last_ms, first_ms, decision.missed > 0)
    if spec.overlap != "allow" and run_id is not None:
        # A fire that waited for its turn has none any more: this one is newer.
        superseded = known.waiting_ms is not None
        state = structs.replace(state, run_id=run_id, waiting_ms=None, skipped=state.skipped + superseded)
    return FireStep(
        key=stored.key,
        version=stored.version,
        expected_ms=stored.next_ms,
        last_due_ms=decision.last_due_ms,
        valid_until_ms=decision.valid_until_ms,
        last_ms=decision.fires[-1].instant_ms if decision.fires else None,
        missed=decision.missed,
        next_ms=None if following is None else following.instant_ms,
        due_ms=None if following is None else following.due_ms,
        state=None if state == known and stored.state else pack_state(state),
        after_run=_after_run(stored, spec, decision, known),
    )


def _after_run(stored: StoredSchedule, spec: Spec, decision: Decision, known: State) -> AfterRun | None:
    """Return what happens to a fire while the last run has not ended; None if it may overlap."""
    if spec.overlap == "allow" or known.run_id is None or not decision.fires:
        return None
    newest_ms, state = decision.fires[-1].instant_ms, after_gap(known, stored.last_ms)
    if spec.overlap == "skip":
        state = structs.replace(state, skipped=known.skipped + 1)
        return AfterRun(known.run_id, pack_state(state), 1, newest_ms)
    # The newest instant waits. One that waited before it is skipped.
    dropped = int(known.waiting_ms is not None)
    state = structs.replace(state, waiting_ms=newest_ms, skipped=known.skipped + dropped)
    return AfterRun(known.run_id, pack_state(state), dropped, known.waiting_ms or 0)


def waiting_step(stored: StoredSchedule, spec: Spec, known: State, run_id: str | None) -> FireStep:
    """Return the step of a fire that waits for the end of the last run: nothing changes before that."""
    assert known.waiting_ms is not None
    # Its schedule may overlap since it waits: then newer instants may have fired before it.
    last_ms = known.waiting_ms if stored.last_ms is None or known.waiting_ms > stored.last_ms else None
    waits_for = None if spec.overlap == "allow" else known.run_id
    # The fires after it may be those after a pause, so no range begins with it.
    fired = add_range(fired_ranges(known, stored.last_ms), known.waiting_ms, known.waiting_ms)
    state = structs.replace(known, since_ms=None, fired=fired, run_id=run_id, waiting_ms=None)
    return FireStep(
        stored.key, stored.version, stored.next_ms, 0, DUE_MS_MAX, last_ms, 0, stored.next_ms, stored.due_ms,
        state=pack_state(state), new_version=os.urandom(8).hex(),
        after_run=None if waits_for is None else AfterRun(waits_for),
    )  # fmt: skip
