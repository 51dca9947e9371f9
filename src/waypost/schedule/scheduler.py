"""The scheduler: one leader reads the schedules, sleeps until the next fire, and fires; others stand by.

A tick does no I/O of its own: it is a flow, and its result includes how long to sleep. Only store time counts: every
reply carries it and this process's monotonic clock extends it, so a wrong wall clock is harmless. Electing a leader
only saves work: the store compares each fire with its own record, so two leaders fire each instant once between them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from datetime import timedelta

from msgspec import Struct, structs

from waypost.checks import DUE_MS_MAX
from waypost.errors import OutcomeUnknown, QueueFull, StoreUnavailable, WaypostError
from waypost.formatting import format_count
from waypost.identity import Operation
from waypost.message import error_text, error_type
from waypost.operations.flow import REFUSALS, ClientContext, Flow, Sending, Together
from waypost.operations.schedules import drafts_of
from waypost.policy import CHUNK_MESSAGES_MAX, LEADER_TTL_MS
from waypost.schedule.election import Candidate, Election
from waypost.schedule.missed import Decision, decide
from waypost.schedule.rule import Fire, Spec, unpack_spec
from waypost.schedule.state import State, read_state
from waypost.schedule.steps import fire_step, waiting_step
from waypost.store.port import Call, Draft, FireStep, Woken
from waypost.times import to_ms, to_timedelta
from waypost.values import Fired, ScheduleList, StoredSchedule
from waypost.wake.port import ALL_QUEUES, Listening

log = logging.getLogger("waypost")

#: How often a leader polls for saved schedules: with its renewals, less than a command a second.
POLL_SECONDS = 4.0
#: How often a standby polls: rarely, or more often while no notification of a change can reach it. How late a fire must
#: be before a standby fires it; the pause after a leader was faster.
STANDBY_POLL_SECONDS, UNNOTIFIED_POLL_SECONDS = 300.0, 20.0
STANDBY_LATE_MS = 1_000
STANDBY_SECONDS = 30.0
#: After a notification of a change both poll at once: so many times, and then on average once in so many seconds. There
#: may be many standbys, so they poll less often, and not all at the same moment.
NOTIFIED_POLLS = 10
NOTIFIED_SECONDS, STANDBY_NOTIFIED_SECONDS = 1.0, 30.0
STANDBY_SPREAD_SECONDS = 0.3
#: Of schedules that fire more often than that, one standby, the deputy, tries each fire, or one a second: for how long
#: it is elected, how late a fire must be for it (so that one of each second is not missed), and its pause. It also
#: tries what waits for the end of a run.
DEPUTY_ROLE = "scheduler deputy"
DEPUTY_TTL_MS = 60_000
DEPUTY_LATE_MS = 700
DEPUTY_SECONDS = 0.9
#: How often it reads all schedules again, changed or not.
READ_SECONDS = 30.0
#: Fires sent to the store in one flush.
FIRES_PER_FLUSH = 64
#: How often it is tried to fire what waits for the end of a run: less and less often while the run goes on.
RUN_POLL_SECONDS_MIN, RUN_POLL_SECONDS_MAX = 0.2, 2.0
#: The pause before a fire that failed is tried again, for example because its queue is full.
RETRY_SECONDS = 1.0


class Tick(Struct, frozen=True):
    """What a tick did."""

    election: Election
    #: Messages published, instants missed, and how late the latest fire was by the store's clock.
    fires: int = 0
    missed: int = 0
    lateness: timedelta = timedelta(0)
    #: Fires that were skipped, or wait, because the run before has not ended.
    overlaps: int = 0
    # Exact: rounded to microseconds it could be 0 before there is something to do.
    _sleep_seconds: float = 0.0

    @property
    def sleep(self) -> timedelta:
        """How long until the next tick has something to do."""
        return timedelta(seconds=self._sleep_seconds)


class _KnownSchedule(Struct):
    """A schedule as this scheduler last read it."""

    queue: str
    stored: StoredSchedule
    spec: Spec
    state: State
    #: Do not fire before this, by the monotonic clock: the last try failed. Logged once.
    retry_at: float = 0.0
    reported: bool = False
    #: When to see again whether the run has ended for which a fire waits, by the monotonic clock, and the pause then.
    run_at: float = 0.0
    run_seconds: float = RUN_POLL_SECONDS_MIN
    #: How many fires one step publishes at most: fewer after its queue had no room for so many, then more again.
    fires_max: int = CHUNK_MESSAGES_MAX


class Scheduler:
    """The state of the loop. `refresh` makes the next `tick` read all schedules first."""

    role = "scheduler"

    def __init__(
        self,
        context: ClientContext,
        *,
        ttl_ms: int = LEADER_TTL_MS,
        poll_seconds: float = POLL_SECONDS,
        on_tick: Callable[[Tick], object] | None = None,
        by_polls: bool = False,
    ) -> None:
        self.context = context
        self.candidate = Candidate(context, self.role, name=context.worker, ttl_ms=ttl_ms, by_polls=by_polls)
        #: As a standby: how late a fire must be to be fired here, and when the next try is allowed (monotonic clock).
        self._standby_ms = round(STANDBY_LATE_MS * random.uniform(1.0, 1.5))
        self._standby_at = 0.0
        #: As a standby: whether it fires in the place of a leader that does not; until when it is the deputy, and when
        #: to stand for that again (monotonic clock).
        self._acting = False
        #: When the lease of the leader ended as that began; None: not known yet. A later end: the leader is alive.
        self._acting_lease_end: float | None = None
        self._deputy_until = self._deputy_at = 0.0
        self._poll_seconds = poll_seconds
        self._on_tick = on_tick
        self._known: dict[tuple[str, str], _KnownSchedule] = {}
        self._numbers: dict[str, int] = {}
        #: Store time minus the monotonic clock, in milliseconds; None before the first reply.
        self._clock_offset_ms: float | None = None
        self._poll_at = self._read_at = 0.0
        self._listening: Listening | None = None
        #: Set by a notification, in any thread. Then: a poll was moved forward for it; when the next one may be.
        self._notified = False
        self._polls_soon = False
        self._notified_at = float("-inf")

    def listen(self, wake: Callable[[], None]) -> Listening | None:
        """Call `wake` when any process has changed a schedule: the next tick then reads it soon."""

        def on_notification(notification: str) -> None:
            self._notified = True
            wake()

        self._listening = self.context.wakeups.listen("schedules", ALL_QUEUES, None, on_notification)
        return self._listening

    def refresh(self) -> None:
        """Read all schedules in the next tick: one was saved here, or the time changed."""
        self._poll_at = self._read_at = 0.0

    def retry(self) -> None:
        """Try in the next tick what failed, and what waits for the end of a run, without the pause that is left."""
        for known in self._known.values():
            known.retry_at = known.run_at = 0.0

    def hand_over(self) -> Flow[None]:
        """Give up the lead, so that another scheduler leads at once."""
        yield from self.candidate.resign()
        if self.context.monotonic() < self._deputy_until:
            self._deputy_until = 0.0
            deputy = self.context.store.resign(DEPUTY_ROLE, self.candidate.name)
            yield from self.context.attempt(deputy, budget=0)

    def tick(self) -> Flow[Tick]:
        """Stand for election; as the leader, poll for changes and fire what is due."""
        stands = self.context.monotonic() >= self.candidate.elect_at
        election = yield from self.candidate.elect()
        if election == "following":
            if self._acting and stands:
                self._see_leader()
            tick = yield from self._follow(Tick(election))
            return self._report(tick)
        if election == "elected":
            self._poll_at = self._read_at = 0.0
            self._acting = False
        self._poll_if_notified(NOTIFIED_SECONDS)
        yield from self._poll(self._poll_seconds)
        tick = Tick(election)
        due = self._due()
        for at in range(0, len(due), FIRES_PER_FLUSH):
            tick = yield from self._fire(due[at : at + FIRES_PER_FLUSH], tick)
        return self._report(structs.replace(tick, _sleep_seconds=self._sleep_seconds()))

    def _follow(self, tick: Tick) -> Flow[Tick]:
        """Fire what the leader has not fired a second after its due time; the store compares as it does for a leader.

        So no fire waits for the lease of a dead leader to end. With a live leader, a standby sends at most one fire in
        `STANDBY_SECONDS`, and the deputy one a second. A standby that has fired goes on as the leader would, until
        another one is faster.
        """
        now = self.context.monotonic()
        yield from self._poll_as_standby(now)
        if self._waits() and not self._acting:
            yield from self._elect_deputy(now)
        is_deputy = now < self._deputy_until
        late_ms = 0 if self._acting else DEPUTY_LATE_MS if is_deputy else self._standby_ms
        late = self._due(late_ms, waiting=self._acting or is_deputy) if now >= self._standby_at else []
        # Those that could not fire before come last.
        late = sorted(late, key=lambda known: known.reported)[:FIRES_PER_FLUSH]
        for number, known in enumerate(late, 1):
            run_at = known.run_at
            tick = yield from self._fire([known], tick)
            if tick.fires or tick.missed or tick.overlaps:
                tick = yield from self._fire(late[number:], tick)
                self._act(now)
                break
            if known.retry_at > now and number < len(late):
                continue  # It could not fire, as for a full queue: that says nothing of the leader.
            if known.retry_at <= now and known.run_at == run_at:
                # Another was faster. (A run that goes on, for which a fire waits, says nothing of the leader.)
                self._acting = False
            if not self._acting and known.run_at == run_at:
                self._standby_at = now + (DEPUTY_SECONDS if is_deputy else STANDBY_SECONDS)
                yield from self._elect_deputy(now)
            break
        sleep = min(self._until(self._poll_at), self._until(self.candidate.elect_at))
        waiting = self._acting or now < self._deputy_until
        fire = self._next_fire_seconds(0 if self._acting else late_ms, waiting=waiting)
        if fire is not None:
            sleep = min(sleep, max(fire, self._until(self._standby_at)))
        if self._waits() and not self._acting:
            sleep = min(sleep, self._until(self._deputy_at))
        return structs.replace(tick, _sleep_seconds=max(0.0, sleep))

    def _waits(self) -> bool:
        """Return whether a fire waits for the end of a run, as far as is known here."""
        return any(known.state.waiting_ms is not None and not known.stored.paused for known in self._known.values())

    def _act(self, now: float) -> None:
        """The leader is late, and may be dead: fire in its place, and stand for election before the next poll."""
        if not self._acting:
            self._acting, self._acting_lease_end = True, None
            # Others may have been saved since this standby read the schedules.
            self._poll_at = 0.0
        self._standby_at = 0.0
        self.candidate.elect_at = min(self.candidate.elect_at, now + 1.0)

    def _see_leader(self) -> None:
        """Leave the fires to the leader again if it has renewed its lease since this standby fires in its place."""
        end = self.candidate.lease_end
        if self._acting_lease_end is None:
            self._acting_lease_end = end
        elif end > self._acting_lease_end + 1.0:
            self._acting = False

    def _elect_deputy(self, now: float) -> Flow[None]:
        """Stand for deputy, or stay it, if a schedule fires so often that each standby tries few of its fires."""
        fire = self._next_fire_seconds(0)
        if now < self._deputy_at or fire is None or fire > STANDBY_SECONDS:
            return
        name = self.candidate.name
        elected = yield from self.context.attempt(self.context.store.elect(DEPUTY_ROLE, name, DEPUTY_TTL_MS))
        if elected.leader == name:
            self._deputy_until, self._deputy_at = now + DEPUTY_TTL_MS / 1000, now + DEPUTY_TTL_MS / 3000
            self._standby_at = now + DEPUTY_SECONDS
        else:
            self._deputy_until, self._deputy_at = 0.0, now + (elected.remaining_ms + 1) / 1000

    def _report(self, tick: Tick) -> Tick:
        if tick.election == "elected" or tick.fires or tick.missed or tick.overlaps or self._on_tick is not None:
            self.context.emit(
                "scheduler_tick", "", "success" if tick.fires else "skipped", count=tick.fires, missed=tick.missed,
                _wait_ms=to_ms(tick.lateness), reason=tick.election,
            )  # fmt: skip
        if self._on_tick is not None:
            self._on_tick(tick)
        return tick

    # ---- time --------------------------------------------------------------------------------------------

    def _monotonic_ms(self) -> float:
        return self.context.monotonic() * 1000

    def _set_store_time(self, at_ms: int) -> None:
        """Set store time from a reply. It is slightly in the past, so no fire is early."""
        self._clock_offset_ms = at_ms - self._monotonic_ms()

    def _store_now(self) -> int:
        assert self._clock_offset_ms is not None
        return int(self._monotonic_ms() + self._clock_offset_ms)

    def _until(self, at: float) -> float:
        return max(0.0, at - self.context.monotonic())

    def _sleep_seconds(self) -> float:
        """Return the time until the next fire, poll or renewal."""
        sleep = min(self._until(self._poll_at), self._until(self.candidate.elect_at))
        fire = self._next_fire_seconds(0)
        return max(0.0, sleep if fire is None else min(sleep, fire))

    def _next_fire_seconds(self, late_ms: int, *, waiting: bool = True) -> float | None:
        """Return how long until the next fire is `late_ms` late; None if no schedule will fire."""
        found = None
        for known in self._known.values():
            if known.stored.paused:
                continue
            due_ms = known.stored.due_ms
            if due_ms is not None:
                # One millisecond more, because store time is truncated to whole milliseconds.
                seconds = (due_ms + late_ms - self._store_now() + 1) / 1000
                seconds = max(seconds, self._until(known.retry_at))
                found = seconds if found is None else min(found, seconds)
            if waiting and known.state.waiting_ms is not None:
                seconds = max(self._until(known.run_at), self._until(known.retry_at))
                found = seconds if found is None else min(found, seconds)
        return found

    # ---- reading -----------------------------------------------------------------------------------------

    def _poll_as_standby(self, now: float) -> Flow[None]:
        if self._acting or now < self._deputy_until:
            self._poll_if_notified(NOTIFIED_SECONDS)
            yield from self._poll(self._poll_seconds)
            return
        self._poll_if_notified(STANDBY_NOTIFIED_SECONDS, random.uniform(0, STANDBY_SPREAD_SECONDS))
        notified = self._listening is not None and self._listening.working
        yield from self._poll(STANDBY_POLL_SECONDS if notified else UNNOTIFIED_POLL_SECONDS)

    def _poll_if_notified(self, pause: float, delay: float = 0.0) -> None:
        """After a notification move the next poll forward; after `NOTIFIED_POLLS` of them once in `pause` seconds."""
        if not self._notified:
            return
        self._notified = False
        if self._polls_soon:
            return  # that poll comes after both changes
        self._polls_soon = True
        now = self.context.monotonic()
        self._notified_at = max(self._notified_at, now - NOTIFIED_POLLS * pause) + pause
        self._poll_at = min(self._poll_at, max(now, self._notified_at) + delay)

    def _poll(self, seconds: float) -> Flow[None]:
        """Read the schedules of changed queues, and of all from time to time; poll again in `seconds`."""
        now = self.context.monotonic()
        if now < self._poll_at:
            return
        # Set before the request, so that a refresh during it is not lost.
        self._poll_at = now + seconds
        self._polls_soon = False
        try:
            yield from self._read_changes(now, seconds)
        except BaseException:
            # What it was to find out is not known yet: poll again as soon as the scheduler tries again.
            self._poll_at = now
            raise

    def _read_changes(self, now: float, seconds: float) -> Flow[None]:
        numbers = yield from self.context.attempt(self.context.store.scheduled())
        if now >= self._read_at:
            self._read_at = now + max(READ_SECONDS, seconds)
            self._numbers.clear()
        changed = [queue for queue, number in numbers.items() if self._numbers.get(queue) != number]
        for at in range(0, len(changed), FIRES_PER_FLUSH):
            part = changed[at : at + FIRES_PER_FLUSH]
            results = yield Together([self.context.store.schedules(queue) for queue in part])
            for queue, result in zip(part, results, strict=True):
                if isinstance(result, StoreUnavailable | OutcomeUnknown):
                    raise result
                self._numbers[queue] = numbers[queue]
                if isinstance(result, Exception):
                    # One queue that cannot be read must not stop the schedules of all others.
                    log.warning("schedules of queue %s: %s", queue, result, extra={"event": "schedules_unreadable"})
                else:
                    self._update_queue(queue, result)

    def _update_queue(self, queue: str, listing: ScheduleList) -> None:
        self._set_store_time(listing.at_ms)
        kept = {stored.key for stored in listing.schedules}
        for place in [place for place in self._known if place[0] == queue and place[1] not in kept]:
            del self._known[place]
        for stored in listing.schedules:
            self._update_schedule(queue, stored)

    def _update_schedule(self, queue: str, stored: StoredSchedule) -> None:
        known = self._known.get((queue, stored.key))
        try:
            spec = known.spec if known is not None and known.stored.spec == stored.spec else unpack_spec(stored.spec)
            state = known.state if known is not None and known.stored.state == stored.state else read_state(stored)
        except WaypostError as error:
            # A newer release saved it: leave it to a scheduler of that release.
            log.warning("schedule %s of queue %s: %s", stored.key, queue, error, extra={"event": "schedule_unreadable"})
            self._known.pop((queue, stored.key), None)
            return
        updated = _KnownSchedule(queue, stored, spec, state)
        if known is not None:
            updated.retry_at, updated.fires_max = known.retry_at, known.fires_max
            if known.state.waiting_ms is not None:
                updated.run_at, updated.run_seconds = known.run_at, known.run_seconds
        self._known[queue, stored.key] = updated

    def _due(self, late_ms: int = 0, *, waiting: bool = True) -> list[_KnownSchedule]:
        """Return the schedules that are at least `late_ms` overdue, or have a fire that waits for a run, oldest first.

        Without `waiting` the latter are left out: a standby leaves them to the leader.
        """
        if not self._known:
            return []
        now, monotonic = self._store_now() - late_ms, self.context.monotonic()
        due: list[tuple[int, tuple[str, str]]] = []
        for place, known in self._known.items():
            if known.stored.paused or known.retry_at > monotonic:
                continue
            if waiting and known.state.waiting_ms is not None and known.run_at <= monotonic:
                due.append((known.state.waiting_ms, place))
            elif known.stored.due_ms is not None and known.stored.due_ms <= now:
                due.append((known.stored.due_ms, place))
        return [self._known[place] for _, place in sorted(due)]

    # ---- firing ------------------------------------------------------------------------------------------

    def _fire(self, due: list[_KnownSchedule], tick: Tick) -> Flow[Tick]:
        steps: list[tuple[_KnownSchedule, Decision, Sending[Woken[Fired]]]] = []
        yield from self.context.know_time()
        for known in due:
            try:
                planned = yield from self._plan(known)
            except Exception as error:  # a zone that this machine does not know, or a middleware of the client
                self._postpone(known, error)
                continue
            if planned is not None:
                decision, step, drafts = planned
                steps.append((known, decision, self._sending(known.queue, step, drafts)))
        try:
            results = yield Together([sending.call() for *_, sending in steps])
            for (known, decision, sending), result in zip(steps, results, strict=True):
                if isinstance(result, (StoreUnavailable, OutcomeUnknown, *REFUSALS)):
                    # Send the same operation again: the store replies with the result of the first.
                    pause = sending.failed("fire_schedule", result)
                    if pause is not None:
                        yield pause
                    result = yield from sending.run()
                if isinstance(result, WaypostError):
                    if isinstance(result, QueueFull):
                        # A queue may never have room for all fires of an outage at once, but for fewer.
                        known.fires_max = max(1, len(decision.fires) // 2)
                    self._postpone(known, result)
                elif isinstance(result, Exception):
                    raise result
                else:
                    tick = self._record_result(known, decision, result, tick)
        finally:
            for *_, sending in steps:
                sending.end()
        return tick

    def _plan(self, known: _KnownSchedule) -> Flow[tuple[Decision, FireStep, list[Draft]] | None]:
        """Return the next step of a schedule and its messages; None if there is nothing to do yet."""
        stored, queue, waiting_ms = known.stored, known.queue, known.state.waiting_ms
        if waiting_ms is not None and known.run_at <= self.context.monotonic():
            decision = Decision((Fire(waiting_ms, waiting_ms),), 0, 0, DUE_MS_MAX, None)
            drafts = yield from drafts_of(self.context, queue, stored, known.spec, decision.fires)
            return decision, waiting_step(stored, known.spec, known.state, drafts[0].id if drafts else None), drafts
        expected = Fire(stored.next_ms or 0, stored.due_ms or 0)
        found = decide(known.spec, stored.key, expected, stored.fires, self._store_now())
        if found is None:
            return None
        decision = found.first(known.fires_max)
        drafts = yield from drafts_of(self.context, queue, stored, known.spec, decision.fires)
        return decision, fire_step(stored, known.spec, decision, drafts[-1].id if drafts else None), drafts

    def _sending(self, queue: str, step: FireStep, drafts: list[Draft]) -> Sending[Woken[Fired]]:
        """Return a fire that can be sent again: the store compares it, so a late repeat changes nothing."""

        def make(operation: Operation) -> Call[Woken[Fired]]:
            return self.context.store.fire_schedule(queue, step, drafts, operation)

        return Sending(self.context, queue, make, fenced=True)

    def _postpone(self, known: _KnownSchedule, error: Exception) -> None:
        """Try a fire that failed again in `RETRY_SECONDS`, and continue with the others. Nothing was published."""
        queue, key = known.queue, known.stored.key
        known.retry_at = self.context.monotonic() + RETRY_SECONDS
        if not known.reported:
            known.reported = True
            fields = {"event": "fire_held", "queue": queue, "schedule": key}
            log.warning(
                "schedule %s of queue %s could not fire and is tried again: %s", key, queue, error, extra=fields
            )
        reason = "queue_full" if isinstance(error, QueueFull) else None
        self.context.emit(
            "fired", queue, "failure", key=key, reason=reason, error_type=error_type(error), error=error_text(error)
        )

    def _record_result(self, known: _KnownSchedule, decision: Decision, result: Woken[Fired], tick: Tick) -> Tick:
        """Record the result of one fire, and return the tick with it added."""
        queue, key = known.queue, known.stored.key
        fired = self.context.wake_and_report(result)
        self._set_store_time(fired.at_ms)
        if fired.status == "running":
            known.run_at = self.context.monotonic() + known.run_seconds
            known.run_seconds = min(RUN_POLL_SECONDS_MAX, 2 * known.run_seconds)
            return tick
        known.fires_max = min(CHUNK_MESSAGES_MAX, 2 * known.fires_max)
        if fired.schedule is None:
            del self._known[queue, key]
        else:
            self._update_schedule(queue, fired.schedule)
        if fired.status not in ("fired", "skipped"):
            self.context.emit("fired", queue, "skipped", key=key, reason=fired.status)
            return tick
        if decision.missed:
            log.warning(
                "schedule %s of queue %s missed %s", key, queue, format_count(decision.missed, "instant"),
                extra={"event": "fires_missed", "queue": queue, "schedule": key, "missed": decision.missed},
            )  # fmt: skip
        if fired.status == "skipped":
            self.context.emit("fired", queue, "skipped", key=key, reason="overlap", missed=decision.missed)
            return structs.replace(tick, missed=tick.missed + decision.missed, overlaps=tick.overlaps + 1)
        late = fired.at_ms - decision.fires[-1].due_ms if decision.fires else 0
        self.context.emit("fired", queue, key=key, count=len(decision.fires), missed=decision.missed, _wait_ms=late)
        return structs.replace(
            tick,
            fires=tick.fires + len(decision.fires),
            missed=tick.missed + decision.missed,
            lateness=max(tick.lateness, to_timedelta(late)),
        )
