"""An event loop on virtual time: it never waits, and time jumps to the next timer.

All simulated processes share it. Each handle belongs to the process that ran when it was scheduled. Handles of a
process that is frozen or suspended are kept until it runs again, handles of one that has crashed are dropped. So a
crash ends a process between two steps of its tasks, and none of its `finally` blocks runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.process import SimulatedProcess

#: A simulation that runs so many steps without time going on will never end: some code repeats itself without a pause.
STEPS_AT_ONE_MOMENT_MAX = 300_000
#: Cancelled timers are removed when there are so many, and more than the others.
CANCELLED_MIN = 256


class EndlessLoop(Exception):
    """Raised when the simulated code repeats itself without a pause."""


class OwnedHandle(asyncio.Handle):
    """A callback of one process."""

    __slots__ = ("process",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: contextvars.Context | None,
        process: SimulatedProcess | None,
    ) -> None:
        # What the class it derives from does, in one call less: there are many of these.
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self.process = process


class OwnedTimer(asyncio.TimerHandle):
    """A callback of one process at a moment of its monotonic clock."""

    __slots__ = ("process",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: contextvars.Context | None,
        process: SimulatedProcess | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True
        self.process = process


class Delivery:
    """A step at a true moment: something reaches a process, or the simulation itself goes on."""

    __slots__ = ("_args", "_callback", "process")
    _cancelled = False
    _context = contextvars.Context()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], process: SimulatedProcess | None
    ) -> None:
        self._callback = callback
        self._args = args
        self.process = process


Runnable = OwnedHandle | OwnedTimer | Delivery


def runs_in_thread(callback: Callable[..., object] | None) -> bool:
    """Whether a callback is a step of a simulated thread, which an event loop that is busy does not hold up."""
    return getattr(callback, "in_thread", False) or getattr(getattr(callback, "__self__", None), "in_thread", False)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs handles in an order that depends on the seed alone. `now` is the true time of the simulation in seconds."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.now = 0.0
        #: The process whose code runs; None for the simulation itself: the network, the stores, the faults.
        self.current: SimulatedProcess | None = None
        self.steps = 0
        #: What the code under test raised where nothing catches it.
        self.unhandled: list[dict[str, Any]] = []
        #: Runs a function as a simulated thread; set by `threads.py`.
        self.in_thread: Callable[[Callable[[], Any]], asyncio.Future[Any]] | None = None
        self._random = random.random
        self._handles: deque[Runnable] = deque()
        self._timers: list[tuple[float, float, int, Runnable]] = []
        self._sequence = 0
        self._cancelled_timers = 0
        self._generators: list[Any] = []

    # ---- what asyncio calls ------------------------------------------------------------------------------

    def time(self) -> float:
        process = self.current
        return self.now if process is None else process.machine.monotonic()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = OwnedHandle(callback, args, self, context, self.current)
        self._handles.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = OwnedTimer(when, callback, args, self, context, self.current)
        self._push(timer)
        return timer

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(coro, name=name, context=context)
        if self.current is not None:
            self.current.tasks[task] = None
            task.add_done_callback(self.current.forget_task)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        assert self.in_thread is not None
        return self.in_thread(lambda: func(*args))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append({"process": self.current, **context})

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += getattr(handle, "_scheduled", False)
        if self._cancelled_timers > CANCELLED_MIN and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[3]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    # ---- what the simulation calls -----------------------------------------------------------------------

    def at(
        self, moment: float, callback: Callable[..., object], *args: Any, process: SimulatedProcess | None = None
    ) -> None:
        """Call back at a true moment, as a step of a process or of the simulation itself."""
        self._sequence += 1
        heapq.heappush(self._timers, (moment, self._random(), self._sequence, Delivery(callback, args, process)))

    def soon(self, process: SimulatedProcess | None, callback: Callable[..., object], *args: Any) -> None:
        """Call back as a step of a process."""
        self._handles.append(Delivery(callback, args, process))

    def resume(self, handles: list[Runnable]) -> None:
        """Run what was kept while its process stood still; timers wait for the rest of their time."""
        for handle in handles:
            if isinstance(handle, OwnedTimer):
                self._push(handle)
            else:
                self._handles.append(handle)

    def run_until_moment(self, end: float) -> None:
        """Run everything that happens before a true moment, and stand at that moment."""
        events._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        # A generator that is given up is closed at the end of the run, not when the garbage collector finds it.
        sys.set_asyncgen_hooks(firstiter=self._generators.append, finalizer=lambda generator: None)
        try:
            self._run_handles()
            while self._timers and self._timers[0][0] <= end:
                self._next_moment()
                self._run_handles()
            self.now = max(self.now, end)
        finally:
            self.current = None
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)

    def take_generators(self) -> list[Any]:
        """The async generators that were begun."""
        generators, self._generators = self._generators, []
        return generators

    def _push(self, timer: OwnedTimer) -> None:
        process = timer.process
        when = timer._when if process is None else process.machine.true_time(timer._when)
        self._sequence += 1
        # The order of timers of the same moment is drawn, so that no test depends on it.
        heapq.heappush(self._timers, (when, self._random(), self._sequence, timer))

    def _next_moment(self) -> None:
        """Move to the next timer, and make those of that moment ready to run."""
        timers = self._timers
        while timers:
            when, _, _, timer = timers[0]
            if timer._cancelled:
                heapq.heappop(timers)
                self._cancelled_timers -= type(timer) is OwnedTimer
                continue
            if self._handles and when > self.now:
                return
            self.now = max(self.now, when)
            heapq.heappop(timers)
            if type(timer) is OwnedTimer:
                process = timer.process
                if process is not None and process.machine.true_time(timer._when) > self.now + 1e-9:
                    self._push(timer)  # its machine was suspended since
                    continue
                timer._scheduled = False
            self._handles.append(timer)

    def _run_handles(self) -> None:
        handles, began = self._handles, self.steps
        while handles:
            handle = handles.popleft()
            if handle._cancelled:
                continue
            process = handle.process
            if process is not None and (
                process.stands_still or (process.stalled and not runs_in_thread(handle._callback))
            ):
                process.keep(handle)
                continue
            self.current = process
            self.steps += 1
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"a callback failed: {handle._callback!r}", "exception": error})
            if self.steps - began > STEPS_AT_ONE_MOMENT_MAX:
                raise EndlessLoop(
                    f"{self.steps - began} steps at {self.now:.3f} s without a pause, the last of "
                    f"{'the simulation' if process is None else process.name}: {handle!r}"
                )
        self.current = None
