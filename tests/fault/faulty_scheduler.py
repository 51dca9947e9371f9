"""A scheduler process that kills or freezes itself at its ticks: `python -m tests.fault.faulty_scheduler`.

Arguments: URL, namespace, seconds of a leader's lease, seed, chance of a fault at each fire, hours its clock is off.
It prints `ready` after its first tick.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from waypost import Waypost
from waypost.operations.flow import ClientContext
from waypost.schedule.loop import run_blocking
from waypost.schedule.scheduler import Scheduler, Tick
from waypost.store.port import Call, Executor


class FaultyExecutor:
    """An executor that fails its process just before a fire is sent, or just after it was done."""

    def __init__(self, executor: Executor, chance: random.Random, probability: float) -> None:
        self._executor = executor
        self._chance = chance
        self._probability = probability

    def run(self, call: Call[Any]) -> Any:
        return self._executor.run(call)

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        chosen = list(calls)
        firing = any(call.name == "fire_schedule" for call in chosen)
        fault, after = None, False
        if firing and self._chance.random() < self._probability:
            fault = self._chance.choice((signal.SIGKILL, signal.SIGSTOP))
            after = self._chance.random() < 0.5
        if fault is not None and not after:
            os.kill(os.getpid(), fault)
        results = self._executor.run_many(chosen)
        if fault is not None and after:
            os.kill(os.getpid(), fault)
        return results

    def close(self) -> None:
        self._executor.close()


def main(arguments: list[str]) -> None:
    """Run until a signal."""
    url, namespace, ttl, seed, probability, hours_off = arguments
    logging.getLogger("waypost").setLevel(logging.ERROR)
    if float(hours_off):
        # A wall clock that is wrong from the first moment on.
        off = round(float(hours_off) * 3_600 * 1e9)
        real_ns, real = time.time_ns, time.time
        time.time_ns = lambda: real_ns() + off
        time.time = lambda: real() + off / 1e9
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    ready = threading.Event()

    def report(tick: Tick) -> None:
        if not ready.is_set():
            ready.set()
            print("ready", flush=True)

    with Waypost(url, namespace=namespace) as post:
        context = ClientContext(
            post.store, session=post._session, worker=f"ticker:{os.getpid()}", retry_budget=20, wakeups=post.wakeups
        )
        executor = post.store.connect(start_timeout=10)
        faulty = FaultyExecutor(executor, random.Random(int(seed)), float(probability))
        try:
            run_blocking(faulty, Scheduler(context, ttl_ms=round(float(ttl) * 1000), on_tick=report), stop)
        finally:
            executor.close()


if __name__ == "__main__":
    main(sys.argv[1:])
