"""Carries out the plan of a backfill in a process that kills itself at a chosen point, on a clock that may be ahead.

python -m tests.spark.killed_backfill POINT LAKE NAME DAYS CHUNK_ROWS

A point is a place and a number: the second intent that was recorded is `after-intent:2`. `none:0` is never reached.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

POINT, LAKE, NAME, DAYS, CHUNK_ROWS = sys.argv[1:6]
REAL = time.time_ns
# Before anything reads the clock.
time.time_ns = lambda: REAL() + int(DAYS) * 86_400 * 1_000_000_000

from waypost.errors import WaypostError  # noqa: E402
from waypost.spark.lake.lake import Lake  # noqa: E402
from waypost.spark.republish import sending  # noqa: E402
from waypost.spark.republish.api import find_store  # noqa: E402
from waypost.spark.republish.carry_out import carry_out  # noqa: E402
from waypost.spark.republish.run import Options  # noqa: E402
from waypost.spark.republish.state import Records, find_records  # noqa: E402
from waypost.store.sqlite.executor import SqliteExecutor  # noqa: E402

COUNTS = {name: itertools.count(1) for name in ("intent", "keys")}


def dying(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the process is killed before or after one of its calls."""

    def run(*arguments: Any, **options: Any) -> Any:
        number = next(COUNTS[name])
        if f"before-{name}:{number}" == POINT:
            os.kill(os.getpid(), signal.SIGKILL)
        found = act(*arguments, **options)
        if f"after-{name}:{number}" == POINT:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return run


def die_after_call() -> None:
    """Run calls one by one, and let the n-th publish or redrive be the last thing that happens: no answer is read."""
    run, numbers = SqliteExecutor.run, {name: itertools.count(1) for name in ("publish", "redrive")}

    def run_one(executor: SqliteExecutor, call: Any) -> Any:
        found = run(executor, call)
        if call.name in numbers and f"after-{call.name}:{next(numbers[call.name])}" == POINT:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def run_many(executor: SqliteExecutor, calls: Iterable[Any]) -> list[Any]:
        found = []
        for call in calls:
            try:
                found.append(run_one(executor, call))
            except WaypostError as error:
                found.append(error)
        return found

    SqliteExecutor.run = run_one  # type: ignore[method-assign, assignment]
    SqliteExecutor.run_many = run_many  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    Records.commit = dying("intent", Records.commit)  # type: ignore[method-assign]
    die_after_call()
    sending.Sender.add_keys = dying("keys", sending.Sender.add_keys)  # type: ignore[method-assign]
    lake = Lake(LAKE)
    records = find_records(lake.files, NAME)
    state = carry_out(records, lake, find_store(lake, None), Options(chunk_rows=int(CHUNK_ROWS)))
    print(state.phase, state.counts)
