"""When what was wrong: the faults of a run as stretches of true time, by process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.simulator.history import (
    FaultBegan,
    FaultEnded,
    HandlerEnded,
    HandlerStarted,
    History,
    StoreStep,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from tests.simulator.scenario import OPERATOR, STORE, Scenario

FOREVER = float("inf")
#: What a fault leaves behind is over after so long: silent connections, pauses between tries.
AFTERMATH_SECONDS = 45.0
#: Faults in which a process runs no code of its handlers.
STANDSTILLS = ("freeze", "stall", "suspend")


@dataclass(slots=True)
class Stretch:
    """A fault of one process or of the store, from when to when."""

    who: str
    fault: str
    begin: float
    end: float = FOREVER


class Timeline:
    """All faults of a run, and when its workers claimed."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        self.scenario = scenario
        self.stretches: list[Stretch] = []
        #: Steps of the store's clock: when, and by how many milliseconds.
        self.clock_steps: list[tuple[float, float]] = []
        #: When workers were started, asked to stop, and had stopped.
        self.worker_changes: list[tuple[float, str, str]] = []
        self.end = history.happenings[-1].at if history.happenings else 0.0
        self._offsets: list[tuple[float, float]] = []
        open_stretches: dict[int, Stretch] = {}
        for one in history:
            match one:
                case FaultBegan(fault="wall_clock_step"):
                    continue  # harmless by promise: no rule may make an exception for it
                case FaultBegan():
                    # What a restart loses was written before it.
                    stretch = Stretch(one.who, one.fault, one.at - one.arguments.get("lose", 0.0))
                    if one.fault == "clock_step":
                        self.clock_steps.append((one.at, one.arguments["by"] * 1000))
                        stretch.end = one.at
                    elif one.fault == "clone":
                        # Two processes use one session from here on.
                        stretch.end = FOREVER
                    else:
                        open_stretches[one.number] = stretch
                    self.stretches.append(stretch)
                case FaultEnded():
                    ended = open_stretches.pop(one.number, None)
                    if ended is not None:
                        ended.end = one.at
                case WorkerStarted():
                    self.worker_changes.append((one.at, one.who, "started"))
                case WorkerStopping():
                    self.worker_changes.append((one.at, one.who, "stopping"))
                case WorkerStopped():
                    self.worker_changes.append((one.at, one.who, "stopped"))
                case StoreStep() if not self._offsets:
                    self._offsets.append((0.0, one.store_ms - one.at * 1000))
        for at, by in self.clock_steps:
            before = self._offsets[-1][1] if self._offsets else 0.0
            self._offsets.append((at, before + by))

    # ---- clocks ------------------------------------------------------------------------------------------

    def store_ms(self, at: float) -> float:
        """The store's time at a moment of true time."""
        offset = 0.0
        for since, value in self._offsets:
            if since <= at:
                offset = value
        return at * 1000 + offset

    def reaches(self, store_ms: float, since: float) -> float:
        """The first moment from `since` on at which the store's clock shows at least this."""
        moments = [since, *(at for at, _ in self.clock_steps if at > since)]
        for index, moment in enumerate(moments):
            before_ms = self.store_ms(moment)
            if before_ms >= store_ms:
                return moment
            reached = moment + (store_ms - before_ms) / 1000
            if index + 1 == len(moments) or reached <= moments[index + 1]:
                return reached
        return FOREVER

    def last_reaches(self, store_ms: float) -> float:
        """The moment from which on the store's clock shows at least this for good."""
        last = max((at for at, _ in self.clock_steps), default=0.0)
        return max([self.reaches(store_ms, 0.0), *([self.reaches(store_ms, last)] if last else [])])

    def clock_stepped(self, begin: float, end: float) -> bool:
        """Whether the store's clock was set between two moments."""
        return any(begin <= at <= end for at, _ in self.clock_steps)

    # ---- faults ------------------------------------------------------------------------------------------

    def _concerns(self, stretch: Stretch, who: str) -> bool:
        if stretch.who == STORE or who.partition("+")[0] == stretch.who.partition("+")[0]:
            return True
        if stretch.fault != "suspend" or OPERATOR in (who, stretch.who):
            return False
        return self.scenario.process(who).machine == self.scenario.process(stretch.who).machine

    def faults(self, who: str | None, begin: float, end: float, *, padded: bool = True) -> Iterator[Stretch]:
        """Faults that may matter for a process (None: for any) between two moments, with their aftermath."""
        after = AFTERMATH_SECONDS if padded else 0.0
        for stretch in self.stretches:
            if stretch.begin <= end and stretch.end + after >= begin and (who is None or self._concerns(stretch, who)):
                yield stretch

    def is_calm(self, who: str | None, begin: float, end: float) -> bool:
        """Whether nothing was wrong for a process between two moments."""
        return next(self.faults(who, begin, end), None) is None

    def standstill(self, who: str, begin: float, end: float) -> float:
        """For how long of a stretch a process ran no code, though it was there."""
        spans = sorted(
            (max(begin, one.begin), min(end, one.end))
            for one in self.stretches
            if one.fault in STANDSTILLS and one.who != STORE and self._concerns(one, who)
        )
        total, counted_until = 0.0, begin
        for start, stop in spans:
            start = max(start, counted_until)
            if stop > start:
                total += stop - start
                counted_until = stop
        return total

    def is_gone(self, who: str, begin: float, end: float) -> bool:
        """Whether a process crashed between two moments."""
        return any(one.fault == "crash" and one.who == who and begin <= one.begin <= end for one in self.stretches)

    def lost_writes(self, begin: float, end: float) -> bool:
        """Whether the store was restarted between two moments."""
        return any(one.fault == "store_restart" and begin <= one.end and one.begin <= end for one in self.stretches)

    @property
    def calm_since(self) -> float:
        """When the last step was done and the last fault over."""
        return max([self.scenario.faults_end, *(one.end for one in self.stretches if one.end < FOREVER)])

    def workers_steady(self, begin: float, end: float) -> bool:
        """Whether no worker was started or stopped between two moments."""
        return not any(begin <= at <= end for at, _, _ in self.worker_changes)

    def is_stopped(self, who: str, moment: float) -> bool:
        """Whether the worker of a process was stopped before a moment, and not started again."""
        changes = [change for at, name, change in self.worker_changes if name == who and at < moment]
        return bool(changes) and changes[-1] != "started"


@dataclass(slots=True)
class HandlerRun:
    """One run of a handler."""

    start: HandlerStarted
    end: HandlerEnded | None = None
    notified_at: float | None = None
    cancel_notified_at: float | None = None

    @property
    def who(self) -> str:
        return self.start.who

    @property
    def place(self) -> tuple[str, str, int]:
        """The lease that it runs under."""
        return (self.start.queue, self.start.message_id, self.start.token)
