"""Backfill: publish the fires of a schedule for an interval of the past, those that have not fired.

Each part is one step of the store, which publishes the messages and records in the same step that they have fired. So a
repeat, a second client or a crash in between publishes no instant twice, and another run continues where the first one
ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime

from msgspec import Struct, structs

from waypost.checks import DUE_MS_MAX, check_count, check_flag, check_moment
from waypost.errors import InvalidSchedule, QueueFull, StoreFailed, UnknownSchedule
from waypost.operations.flow import ClientContext, Flow, Sleep
from waypost.operations.schedules import SAVE_TRIES, drafts_of, find_one, message_size
from waypost.policy import BACKFILL_INSTANTS, BACKFILL_INSTANTS_MAX, CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.schedule.rule import Fire, Timeline, counted_from, unpack_spec
from waypost.schedule.state import FiredInstants, add_range, pack_state, read_state
from waypost.store.port import FireStep
from waypost.times import format_datetime, to_datetime
from waypost.values import Fired, StoredSchedule

Progress = Callable[[int], object]


class Backfilled(Struct, frozen=True):
    """The result of a backfill, or with `dry_run` the expected one, for instants with `start` <= instant < `end`."""

    queue: str
    key: str
    start: datetime
    end: datetime
    #: Instants whose messages were published; with `dry_run`, would be.
    published: int
    #: Instants that had fired before, in time or by a backfill.
    skipped: int
    #: Instants that the scheduler must still fire, because it is late.
    left: int
    dry_run: bool
    #: The first and the last of the published instants.
    first: datetime | None = None
    last: datetime | None = None


def backfill(
    context: ClientContext,
    name: str,
    queue: str | None,
    start: datetime,
    end: datetime,
    *,
    limit: int = BACKFILL_INSTANTS,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Flow[Backfilled]:
    """Publish the messages of the instants in [start, end) that have not fired; return how many there were."""
    start_ms, end_ms = check_moment("start", start), check_moment("end", end)
    check_count("limit", limit, 1, BACKFILL_INSTANTS_MAX, InvalidSchedule)
    check_flag("dry_run", dry_run)
    if end_ms <= start_ms:
        raise InvalidSchedule(f"a backfill ends after its start: {_format(end_ms)} is not after {_format(start_ms)}")
    queue, stored, now_ms = yield from find_one(context, name, queue)
    context.name_of(queue)
    if end_ms > now_ms:
        raise InvalidSchedule(
            f"a backfill is for the past: its end, {_format(end_ms)}, lies in the future (the store's time is "
            f"{_format(now_ms)}); the schedule itself fires what is to come"
        )
    instants = yield from _instants(stored, start_ms, end_ms, limit)
    work = _Backfill(context, queue, stored, now_ms, instants)
    if dry_run:
        yield from work.count_all()
    else:
        yield from work.publish_all(start_ms, progress)
        context.emit(
            "backfilled", queue, "success" if work.published else "skipped", key=stored.key, count=work.published
        )
    return Backfilled(
        queue, stored.key, to_datetime(start_ms), to_datetime(end_ms), work.published, work.skipped, work.left, dry_run,
        to_datetime(work.first_ms), to_datetime(work.last_ms),
    )  # fmt: skip


def _instants(stored: StoredSchedule, start_ms: int, end_ms: int, limit: int) -> Flow[list[Fire]]:
    """Return all instants of an interval; raises if there are too many of them."""
    timeline = Timeline(stored.key, counted_from(unpack_spec(stored.spec), start_ms))
    found: list[Fire] = []
    for fire in timeline.walk(start_ms - 1):
        if fire.instant_ms >= end_ms:
            break
        if len(found) == limit:
            raise InvalidSchedule(
                f"schedule {stored.key!r} has more than {limit:,} instants from {_format(start_ms)} to "
                f"{_format(end_ms)}: choose a shorter interval, or raise limit (at most {BACKFILL_INSTANTS_MAX:,})"
            )
        found.append(fire)
        if len(found) % CHUNK_MESSAGES_MAX == 0:
            # The search takes long for a pattern with many instants: let other tasks of this event loop run.
            yield Sleep(0)
    return found


class _Backfill:
    """A backfill in progress: the instants of its interval, the schedule as last read, and the result so far."""

    def __init__(
        self, context: ClientContext, queue: str, stored: StoredSchedule, now_ms: int, instants: list[Fire]
    ) -> None:
        self._context = context
        self._queue = queue
        self._stored = stored
        self._spec = unpack_spec(stored.spec)
        self._now_ms = now_ms
        self._instants = instants
        self.published = self.skipped = self.left = 0
        self.first_ms: int | None = None
        self.last_ms: int | None = None

    def count_all(self) -> Flow[None]:
        """Count what `publish_all` would do."""
        for at in range(0, len(self._instants), CHUNK_MESSAGES_MAX):
            instants = self._instants[at : at + CHUNK_MESSAGES_MAX]
            part, fires = self._choose(instants)
            self._count(part, fires)
            self.left += len(instants) - len(part)
            yield Sleep(0)

    def publish_all(self, begin_ms: int, progress: Progress | None) -> Flow[None]:
        """Publish part by part."""
        most = max(1, min(CHUNK_MESSAGES_MAX, CHUNK_BYTES_MAX // max(1, message_size(self._spec))))
        position, tries = 0, 0
        while position < len(self._instants):
            part, fires = self._choose(self._instants[position : position + most])
            if not part:
                # The scheduler has not reached these yet; it fires them, or counts them as missed.
                self.left = len(self._instants) - position
                return
            if fires:
                try:
                    fired = yield from self._publish(part, fires, begin_ms)
                except QueueFull as error:
                    if len(part) == 1:
                        raise self._no_room(error) from error
                    most = len(part) // 2
                    continue
                if fired.status != "fired":
                    tries += 1
                    self._follow(fired, tries)
                    continue
            self._count(part, fires)
            position, begin_ms, tries = position + len(part), part[-1].instant_ms + 1, 0
            if progress is not None:
                progress(position)

    def _choose(self, instants: list[Fire]) -> tuple[list[Fire], list[Fire]]:
        """Return the instants that the scheduler has passed, and which of them have not fired."""
        stored = self._stored
        if stored.paused or stored.next_ms is None:
            passed = [fire for fire in instants if fire.due_ms <= self._now_ms]
        else:
            passed = [fire for fire in instants if fire.instant_ms < stored.next_ms]
        fired = FiredInstants(read_state(stored), stored)
        return passed, [fire for fire in passed if fire.instant_ms not in fired]

    def _publish(self, part: list[Fire], fires: list[Fire], begin_ms: int) -> Flow[Fired]:
        """Publish the messages of some instants, and record that all instants of this part have fired."""
        context, queue, stored = self._context, self._queue, self._stored
        drafts = yield from drafts_of(context, queue, stored, self._spec, fires)
        known = read_state(stored)
        # An instant that waits for the end of a run is published here: otherwise it would fire again after that run.
        waits = known.waiting_ms is not None and all(fire.instant_ms != known.waiting_ms for fire in part)
        state = structs.replace(
            known,
            fired=add_range(known.fired, begin_ms, part[-1].instant_ms),
            backfilled=known.backfilled + len(drafts),
            waiting_ms=known.waiting_ms if waits else None,
        )
        step = FireStep(
            stored.key, stored.version, stored.next_ms, 0, DUE_MS_MAX, None, 0, stored.next_ms, stored.due_ms,
            state=pack_state(state), new_version=os.urandom(8).hex(), by_hand=True,
        )  # fmt: skip
        fired: Fired = yield from context.operate_and_wake(
            queue, lambda operation: context.store.fire_schedule(queue, step, drafts, operation), fenced=True
        )
        if fired.status == "fired" and fired.schedule is not None:
            self._stored = fired.schedule
        return fired

    def _follow(self, fired: Fired, tries: int) -> None:
        """Continue with the schedule as another client changed it, unless its rule is another one now."""
        done = f"{self.published:,} messages were published; run it again for the rest"
        if fired.schedule is None:
            raise UnknownSchedule(f"schedule {self._stored.key!r} was removed during its backfill; {done}")
        if tries > SAVE_TRIES or not unpack_spec(fired.schedule.spec).fires_like(self._spec):
            raise StoreFailed(f"schedule {self._stored.key!r} was changed by others during its backfill; {done}")
        self._stored, self._now_ms = fired.schedule, max(self._now_ms, fired.at_ms)
        self._spec = unpack_spec(fired.schedule.spec)

    def _no_room(self, error: QueueFull) -> QueueFull:
        return QueueFull(
            f"{error}; the backfill of schedule {self._stored.key!r} has published {self.published:,} messages: run it "
            "again when there is room, it skips what has fired",
            group=error.group,
            room=error.room,
        )

    def _count(self, part: list[Fire], fires: list[Fire]) -> None:
        self.published += len(fires)
        self.skipped += len(part) - len(fires)
        if fires:
            self.first_ms = fires[0].instant_ms if self.first_ms is None else self.first_ms
            self.last_ms = fires[-1].instant_ms


def _format(ms: int) -> str:
    return format_datetime(to_datetime(ms))
