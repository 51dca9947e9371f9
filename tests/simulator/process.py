"""Simulated machines and processes: their clocks, their random numbers, and how they stop, crash and are copied."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os as real_os
import queue as real_queue
import random as real_random
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from waypost import lease_clock

if TYPE_CHECKING:
    from tests.simulator.loop import Runnable, VirtualTimeLoop
    from tests.simulator.threads import Threads

#: The wall clock of a simulation begins here, in seconds since 1970: a Friday in January 2027, at 8:00 UTC.
WALL_START = 1_800_000_000.0
#: The clocks of machines go by up to so much too fast or too slow.
CLOCK_SPEED_ERROR = 0.001
#: A runner that takes the end of its coroutine for a failure of its handler goes on to the next wait, and ends there.
CLOSES_MAX = 10_000
#: Packages whose modules do not run in a simulated process.
NOT_SIMULATED = ("waypost.cli.", "waypost.spark.", "waypost.testing.", "waypost.web.", "waypost.see.")


class Machine:
    """The clocks of one machine. While it is suspended its monotonic clock stands still and its boot clock goes on."""

    def __init__(self, name: str, loop: VirtualTimeLoop, random: Random) -> None:
        self.name = name
        self._loop = loop
        #: How long it had run when the simulation began.
        self._uptime = random.uniform(1e3, 1e6)
        #: How fast its clocks go: those of real machines differ by less.
        self._speed = 1.0 + random.uniform(-CLOCK_SPEED_ERROR, CLOCK_SPEED_ERROR)
        #: Its monotonic clock minus true time at its speed. No code of it runs while it is suspended.
        self._offset = self._uptime
        self._suspended_at: float | None = None
        #: The error of its wall clock, in seconds.
        self.wall_error = random.uniform(-0.5, 0.5)
        self.processes: list[SimulatedProcess] = []

    def monotonic(self) -> float:
        return self._loop.now * self._speed + self._offset

    def boot_clock(self) -> float:
        return self._uptime + self._loop.now * self._speed

    def wall(self) -> float:
        return WALL_START + self._loop.now + self.wall_error

    def true_time(self, monotonic: float) -> float:
        """The true moment at which its monotonic clock shows this, if it is not suspended from now on."""
        return (monotonic - self._offset) / self._speed

    @property
    def is_suspended(self) -> bool:
        return self._suspended_at is not None

    def suspend(self) -> None:
        if self._suspended_at is None:
            self._suspended_at = self._loop.now
            for process in self.processes:
                process.stands_still = True

    def resume(self) -> None:
        if self._suspended_at is not None:
            self._offset -= (self._loop.now - self._suspended_at) * self._speed
            self._suspended_at = None
            for process in self.processes:
                process.go_on()


class SimulatedProcess:
    """One run of a program on a machine, from its start to its end or crash."""

    def __init__(self, name: str, machine: Machine, loop: VirtualTimeLoop, seed: str, pid: int) -> None:
        self.name = name
        self.machine = machine
        self.pid = pid
        self.dead = False
        #: How many faults keep its event loop busy, while its threads run.
        self.stalled = 0
        #: Whether no code of it runs: it is dead or frozen, or its machine is suspended.
        self.stands_still = machine.is_suspended
        self._loop = loop
        self._frozen = 0
        self._kept: list[Runnable] = []
        #: Random numbers of the program, which a copy of the process repeats; and of the system, which it does not.
        self.random = Random(f"{seed}/{name}/{pid}/program")
        self.system_random = Random(f"{seed}/{name}/{pid}/system")
        self.tasks: dict[asyncio.Task[Any], None] = {}
        #: Called when it crashes or ends.
        self.on_end: list[Callable[[], None]] = []
        machine.processes.append(self)

    def _update(self) -> None:
        self.stands_still = self.dead or self._frozen > 0 or self.machine.is_suspended

    def keep(self, handle: Runnable) -> None:
        """A step came while it stands still, or its loop does: it runs later, or never."""
        if not self.dead:
            self._kept.append(handle)

    def go_on(self) -> None:
        """Run what was kept, if nothing else stops it."""
        self._update()
        if not self.stands_still:
            kept, self._kept = self._kept, []
            self._loop.resume(kept)

    def stall(self) -> None:
        """Keep its event loop busy, as a handler does that blocks it. Threads go on."""
        self.stalled += 1

    def end_stall(self) -> None:
        self.stalled -= 1
        self.go_on()

    def freeze(self) -> None:
        """Stop it as SIGSTOP does: its clocks go on."""
        self._frozen += 1
        self._update()

    def thaw(self) -> None:
        if self._frozen:
            self._frozen -= 1
        self.go_on()

    def crash(self) -> None:
        """End it between two steps: no code of it runs any more."""
        if not self.dead:
            self.dead = True
            self._update()
            self._kept = []
            for call in self.on_end:
                call()

    def forget_task(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def close_tasks(self) -> None:
        """Close what is left of its coroutines, when the run is over."""
        for task in list(self.tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            close_coroutine(task.get_coro())
        self.tasks.clear()


def close_coroutine(coroutine: Any) -> None:
    """Close a coroutine whatever it does at its end; one that goes on instead is closed again."""
    for _ in range(CLOSES_MAX):
        try:
            coroutine.close()
        except BaseException:
            continue
        return


class TimeModule:
    """What stands for the module `time` in simulated processes."""

    def __init__(self, loop: VirtualTimeLoop, threads: Threads) -> None:
        self._loop = loop
        self.sleep = threads.sleep
        self.monotonic = loop.time

    def time(self) -> float:
        process = self._loop.current
        return WALL_START + self._loop.now if process is None else process.machine.wall()

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


class RandomModule:
    """What stands for the module `random`: the numbers of the process that runs."""

    def __init__(self, loop: VirtualTimeLoop, otherwise: Random) -> None:
        self._loop = loop
        self._otherwise = otherwise

    def __getattr__(self, name: str) -> Any:
        process = self._loop.current
        return getattr(self._otherwise if process is None else process.random, name)


class OsModule:
    """What stands for the module `os`: bytes from the system, and the number of the process that runs."""

    def __init__(self, loop: VirtualTimeLoop, otherwise: Random) -> None:
        self._loop = loop
        self._otherwise = otherwise

    def urandom(self, count: int) -> bytes:
        process = self._loop.current
        return (self._otherwise if process is None else process.system_random).randbytes(count)

    def getpid(self) -> int:
        process = self._loop.current
        return 1 if process is None else process.pid

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)


class SocketModule:
    """What stands for the module `socket`: a process knows the name of its machine, and opens nothing."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def gethostname(self) -> str:
        process = self._loop.current
        return "simulation" if process is None else process.machine.name

    def socket(self, *given: object, **more: object) -> None:
        raise RuntimeError("a simulated process opened a socket")

    socketpair = create_connection = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(real_socket, name)


#: What runs in simulated processes and is imported only where it is used.
IMPORTED_LATER = (
    "client.async_client", "outbox.message_transaction", "outbox.relay.relay", "outbox.relay.waypost",
    "host", "schedule.loop", "schedule.promoter", "schedule.scheduler", "store.memory", "wake.hub",
    "worker.executor_adapters", "worker.worker",
)  # fmt: skip


def simulated_modules() -> list[ModuleType]:
    """All modules of waypost that run in simulated processes, imported."""
    for name in IMPORTED_LATER:
        importlib.import_module(f"waypost.{name}")
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("waypost.") and not name.startswith(NOT_SIMULATED)
    ]


@contextmanager
def simulated_environment(loop: VirtualTimeLoop, threads: Threads, random: Random) -> Iterator[None]:
    """Give the modules of waypost the clocks, threads and random numbers of the simulation, for the time of a block."""

    def boot_clock() -> float:
        process = loop.current
        return loop.now if process is None else process.machine.boot_clock()

    stand_ins: dict[str, tuple[ModuleType, object]] = {
        "time": (real_time, TimeModule(loop, threads)),
        "threading": (real_threading, threads.threading_module()),
        "queue": (real_queue, threads.queue_module()),
        "random": (real_random, RandomModule(loop, random)),
        "os": (real_os, OsModule(loop, random)),
        "socket": (real_socket, SocketModule(loop)),
    }
    changed: list[tuple[ModuleType, str, object]] = []
    for module in simulated_modules():
        for name, (real, stand_in) in stand_ins.items():
            if vars(module).get(name) is real:
                changed.append((module, name, real))
                setattr(module, name, stand_in)
    changed.append((lease_clock, "now", lease_clock.now))
    lease_clock.now = boot_clock
    loggers = [logging.getLogger(name) for name in ("waypost", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
