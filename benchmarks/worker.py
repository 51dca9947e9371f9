"""How fast one worker process empties a queue.

    python -m benchmarks.worker --quick --json

`drain` is the default worker (leases, at least once, one handler call per message, concurrency 10, journal `all`) with
an async handler that does nothing, on a queue that was filled before; the time of its start and stop is included.
Variants have names of their own. `--profile` prints where the time of one drain goes instead.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import logging
import pstats
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.core import BODY
from benchmarks.measure import Contender, Report, arguments
from waypost import Waypost
from waypost.testing.servers import ValkeyServer
from waypost.worker.blocking import BlockingWorker


async def nothing(body: dict[str, Any]) -> None:
    """The handler of `drain`."""


async def turn(body: dict[str, Any]) -> None:
    """A handler that waits for one turn of the event loop."""
    await asyncio.sleep(0)


def blocking(body: dict[str, Any]) -> None:
    """A handler for a thread."""


async def batched(bodies: list[Any]) -> None:
    """A handler of batches."""


class Subject:
    """A client with a fresh queue and a worker for each run."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._numbers = itertools.count()
        self.post = Waypost(url)
        self.worker: BlockingWorker | None = None

    def fill(self, count: int, handler: Callable[..., Any], options: dict[str, Any], settings: dict[str, Any]) -> None:
        """A queue with so many messages, and a worker that has not started."""
        self.post.close()
        self.post = Waypost(self.url)
        queue = f"drain-{next(self._numbers)}"
        if settings:
            self.post.configure(queue, **settings)
        self.post.handler(queue, **options)(handler)
        self.post.publish_many(queue, itertools.repeat(BODY, count))
        self.worker = self.post.worker()

    def drain(self, count: int) -> None:
        """Until it is empty."""
        assert self.worker is not None
        report = self.worker.run(until_empty=True, signals=False)
        assert report.complete, report


@contextmanager
def stores(only: str | None) -> Iterator[dict[str, Subject]]:
    with ValkeyServer() as server, tempfile.TemporaryDirectory() as folder:
        subjects = {
            "valkey": Subject(server.url),
            "sqlite": Subject(f"sqlite:///{Path(folder).absolute() / 'bench.db'}"),
        }
        try:
            yield {name: subject for name, subject in subjects.items() if only in (None, name)}
        finally:
            for subject in subjects.values():
                subject.post.close()


def contender(
    subject: Subject,
    count: int,
    handler: Callable[..., Any],
    variant: str = "",
    lease: float | None = 60,
    **options: Any,
) -> Contender:
    settings = {} if lease == 60 else {"lease": lease}
    return Contender(
        "waypost",
        partial(subject.drain, count),
        count,
        partial(subject.fill, count, handler, options, settings),
        variant,
    )


def profile(subject: Subject, count: int) -> None:
    """Where the time goes, function by function."""
    for _ in range(2):
        subject.fill(count, nothing, {}, {})
        profiler = cProfile.Profile()
        profiler.enable()
        subject.drain(count)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Run what was asked for."""
    wants_profile = "--profile" in sys.argv
    if wants_profile:
        sys.argv.remove("--profile")
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    count, rounds = (51_200, 3) if options.quick else (204_800, 5)
    with stores(options.store) as subjects:
        for store, subject in subjects.items():
            if wants_profile:
                profile(subject, count)
                continue
            slower = count // 8
            report.rates("drain", store, [contender(subject, count, nothing)], rounds)
            report.rates("one-turn", store, [contender(subject, slower, turn)], rounds)
            report.rates("threads", store, [contender(subject, slower, blocking)], rounds)
            report.rates("batches-of-100", store, [contender(subject, count, batched, batch=100)], rounds)
            report.rates("at-most-once", store, [contender(subject, slower, nothing, lease=None)], rounds)


if __name__ == "__main__":
    main()
