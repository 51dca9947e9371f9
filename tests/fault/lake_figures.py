"""Figures of the lake: runs of the pipeline that are killed at their commits, read meanwhile, and two runs at once."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.fault.figure import Figure

#: A run commits one step to the lake, and then to the tables that the step changes, one after the other.
COMMITS = 10
POINTS = tuple(f"{when}:{number}" for number in range(1, COMMITS + 1) for when in ("before", "after"))
POINTS_QUICK = ("before:1", "after:4")
Rows = dict[str, Counter[tuple[str, ...]]]


def lake_figures(*, quick: bool) -> Iterator[Figure]:
    """Kill runs one after the other, each with new events; then let two run at the same time."""
    from tests.spark.lakes import live
    from tests.spark.shop import Shop

    points = POINTS_QUICK if quick else POINTS
    with tempfile.TemporaryDirectory() as directory, Shop(f"sqlite:///{directory}/orders.db", "wp") as shop:
        lake = f"{directory}/lake"
        live(shop, 20)
        expect_end(run(shop.url, lake, "nowhere"))
        killed = uncommitted = differing = 0
        for point in points:
            # Enough that a step changes every table.
            live(shop, 20)
            before = read_lake(lake)
            killed += run(shop.url, lake, point).returncode == -signal.SIGKILL
            dead = read_by_others(lake)
            # Opening the lake completes the step, if it was committed.
            after = read_lake(lake)
            uncommitted += sum((dead[name] - after[name]).total() for name in dead if dead[name] != before[name])
            differing += sum(rows not in (before[name], after[name]) for name, rows in dead.items())
            differing += read_by_others(lake) != after
        yield Figure(
            f"lake, {len(points)} kills of a run, read by polars and duckdb meanwhile",
            f"killed {killed}, uncommitted rows seen {uncommitted}, tables of no version {differing}",
            f"{len(points)}, 0, 0",
            (killed, uncommitted, differing) == (len(points), 0, 0),
        )
        live(shop, 20 if quick else 60)
        with ThreadPoolExecutor(2) as both:
            for ran in both.map(lambda _: run(shop.url, lake, "nowhere", "--batch-rows", "40"), range(2)):
                expect_end(ran)
        expect_end(run(shop.url, f"{directory}/whole", "nowhere"))
        found, wanted = read_lake(lake), read_lake(f"{directory}/whole")
        # Open rows merge when they are read; in how many parts they are depends on the steps.
        names = [name for name in wanted if not name.startswith("silver/open_")]
        events = wanted["bronze/journal"].total()
        doubled = sum((found[name] - wanted[name]).total() for name in names)
        lost = sum((wanted[name] - found[name]).total() for name in names)
        yield Figure(
            f"lake, two runs at once after {len(points)} kills, {events:,} events",
            f"rows doubled {doubled}, lost {lost}",
            "0, 0",
            doubled == lost == 0 < events,
        )


def run(store: str, lake: str, point: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the pipeline in a process of its own, which kills itself at this point."""
    from tests.spark.drivers import run_killed

    return run_killed(point, "run", "--store", store, "--lake", lake, *options)


def expect_end(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stderr


def read_lake(lake: str) -> Rows:
    """Return the rows of all tables as of the newest step, which is completed."""
    from tests.spark import readers
    from waypost.spark.lake.lake import Lake

    return _count(readers.read_lake(Lake(lake)))


def read_by_others(lake: str) -> Rows:
    """Return the rows that polars and duckdb see, which must agree; the lake is not opened."""
    from tests.spark import readers

    return _count(readers.read_by_others(lake))


def _count(found: dict[str, list[dict[str, Any]]]) -> Rows:
    from tests.spark.readers import text

    return {name: Counter(tuple(text(row)) for row in rows) for name, rows in found.items()}
