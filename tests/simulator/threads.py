"""Threads of simulated processes: greenlets on the event loop, and a `threading` module made of them.

A simulated thread runs until it waits: for a condition, an event, another thread, an answer of the store, or a time.
Then the loop goes on with something else. So threads change places only where they wait, and in an order that the seed
decides; a switch in the middle of a statement is not simulated.
"""

from __future__ import annotations

import asyncio
import queue as real_queue
import threading as real_threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from tests.simulator.loop import VirtualTimeLoop
    from tests.simulator.process import SimulatedProcess


class ThreadEnded(BaseException):
    """Thrown into a thread that is left when the run is over."""


class EndOfWait:
    """Ends one wait of a thread with a value."""

    __slots__ = ("_thread", "_wait")
    in_thread = True

    def __init__(self, thread: SimulatedThread, wait: object) -> None:
        self._thread = thread
        self._wait = wait

    def __call__(self, value: Any) -> None:
        self._thread._resume(self._wait, value)


class SimulatedThread:
    """A thread of the process that runs when it is made."""

    #: Its steps run also while the event loop of its process is busy.
    in_thread = True

    def __init__(
        self,
        threads: Threads,
        target: Callable[..., Any],
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.daemon = True
        self.process: SimulatedProcess | None = threads.loop.current
        self._threads = threads
        self._loop = threads.loop
        self._call: Callable[[], Any] = partial(target, *args, **(kwargs or {}))
        self._greenlet = greenlet(self._run, threads.main)
        self._alive = False
        #: What it waits for: only the wake-up of this wait may resume it.
        self._wait: object | None = None
        self._joining: list[SimulatedThread] = []

    def start(self) -> None:
        self._alive = True
        self._threads.alive[self] = None
        self._loop.soon(self.process, self._begin)

    def is_alive(self) -> bool:
        return self._alive

    def join(self, timeout: float | None = None) -> None:
        me = self._threads.current
        if self._alive and isinstance(me, SimulatedThread):
            self._joining.append(me)
            me.block(timeout)
            if me in self._joining:
                self._joining.remove(me)

    def _begin(self) -> None:
        self._greenlet.switch()

    def _run(self) -> None:
        self._threads.of_greenlet[self._greenlet] = self
        try:
            self._call()
        except ThreadEnded:
            pass
        except BaseException as error:
            self._loop.call_exception_handler({"message": f"thread {self.name} ended by an error", "exception": error})
        finally:
            self._alive = False
            self._threads.alive.pop(self, None)
            self._threads.of_greenlet.pop(self._greenlet, None)
            joining, self._joining = self._joining, []
            for thread in joining:
                thread.wake()

    def block(self, timeout: float | None, begin: Callable[[Callable[[Any], None]], None] | None = None) -> Any:
        """Wait until `wake`, and return its value; None when the time is up.

        `begin` is given what ends the wait with a value, to be called as a step of the same process.
        """
        if self._threads.over:
            raise ThreadEnded
        self._wait = wait = object()
        if begin is not None:
            begin(EndOfWait(self, wait))
        timer = None if timeout is None else self._loop.call_later(max(0.0, timeout), self._resume, wait, None)
        value = self._threads.main.switch()
        if timer is not None:
            timer.cancel()
        if self._threads.over:
            raise ThreadEnded
        return value

    def wake(self, value: Any = True) -> None:
        """End the wait under way. Called as a step of the same process."""
        if self._wait is not None:
            self._loop.soon(self.process, self._resume, self._wait, value)

    def _resume(self, wait: object, value: Any) -> None:
        if self._wait is wait and self._alive:
            self._wait = None
            self._greenlet.switch(value)

    def end(self) -> None:
        """End it at once, when the run is over."""
        if self._alive and not self._greenlet.dead:
            if not self._greenlet:
                self._alive = False  # it never began
                return
            throw: Callable[[type[BaseException]], Any] = self._greenlet.throw
            throw(ThreadEnded)


class LoopThread:
    """The thread of a process in which its event loop runs."""

    name = "MainThread"


class Threads:
    """All threads of a simulation, and what stands for the modules `threading` and `queue` in its processes."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.loop = loop
        self.main = getcurrent()
        self.alive: dict[SimulatedThread, None] = {}
        self.of_greenlet: dict[greenlet, SimulatedThread] = {}
        #: The run is over: no thread goes on.
        self.over = False
        self._loop_thread = LoopThread()
        loop.in_thread = self.run_in_thread

    @property
    def current(self) -> SimulatedThread | LoopThread:
        return self.of_greenlet.get(getcurrent()) or self._loop_thread

    def blocking(self, what: str) -> SimulatedThread:
        """The thread that is about to wait. An event loop must not."""
        thread = self.current
        if not isinstance(thread, SimulatedThread):
            if self.over:
                raise ThreadEnded
            raise RuntimeError(f"the event loop of a process waits for {what}, which would stop it")
        return thread

    def run_in_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function in a thread of the process that runs; `asyncio.to_thread` comes here."""
        future: asyncio.Future[Any] = self.loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        SimulatedThread(self, run, "to_thread").start()
        return future

    def sleep(self, seconds: float) -> None:
        self.blocking("time.sleep").block(seconds)

    def end_all(self) -> None:
        """End the threads that are left, at the end of the run."""
        self.over = True
        for thread in list(self.alive):
            thread.end()
        self.alive.clear()

    def threading_module(self) -> Any:
        """What stands for the module `threading`."""
        return ThreadingModule(self)

    def queue_module(self) -> Any:
        """What stands for the module `queue`."""
        return QueueModule(self)


class Lock:
    """A lock, or a reentrant one: threads change places only where they wait, so it is rarely contended."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._owner: object | None = None
        self._count = 0
        self._waiting: deque[SimulatedThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = getcurrent()
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            thread = self._threads.blocking("a lock that another thread holds")
            self._waiting.append(thread)
            thread.block(None)
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if self._waiting:
                self._waiting.popleft().wake()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *ended: object) -> None:
        self.release()


class Condition:
    """A condition: `wait` gives its lock up meanwhile."""

    def __init__(self, threads: Threads, lock: Lock | None = None) -> None:
        self._threads = threads
        self._lock = lock or Lock(threads)
        self._waiting: dict[SimulatedThread, None] = {}
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *ended: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._threads.blocking("a condition")
        lock = self._lock
        count, lock._count = lock._count, 1
        lock.release()
        self._waiting[thread] = None
        try:
            return bool(thread.block(timeout))
        finally:
            self._waiting.pop(thread, None)
            if not self._threads.over:
                lock.acquire()
            lock._count = count

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        loop = self._threads.loop
        end = None if timeout is None else loop.time() + timeout
        while not (result := predicate()):
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for thread in list(self._waiting)[:n]:
            del self._waiting[thread]
            thread.wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """A flag that threads wait for."""

    def __init__(self, threads: Threads) -> None:
        self._changed = Condition(threads)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_set, timeout)
        return self._is_set


class ThreadingModule:
    """What stands for the module `threading`; what it does not have is the real module's."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def Thread(  # noqa: N802
        self,
        target: Callable[..., Any],
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> SimulatedThread:
        return SimulatedThread(self._threads, target, name, args, kwargs)

    def Lock(self) -> Any:  # noqa: N802
        return Lock(self._threads)

    RLock = Lock

    def Condition(self, lock: Any = None) -> Any:  # noqa: N802
        return Condition(self._threads, lock)

    def Event(self) -> Any:  # noqa: N802
        return Event(self._threads)

    def current_thread(self) -> object:
        return self._threads.current

    def main_thread(self) -> object:
        return self._threads._loop_thread

    def __getattr__(self, name: str) -> Any:
        return getattr(real_threading, name)


class SimpleQueue:
    """A queue between threads."""

    def __init__(self, threads: Threads) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(threads)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.notify()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
        return self._items.popleft()


class QueueModule:
    """What stands for the module `queue`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def SimpleQueue(self) -> SimpleQueue:  # noqa: N802
        return SimpleQueue(self._threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_queue, name)
