"""`waypost scheduler`: fire schedules in a process of its own."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from waypost.cli.options import add_leader_command, open_client
from waypost.cli.output import log_to_stderr, write_json
from waypost.client.sync_client import Waypost
from waypost.formatting import format_age
from waypost.policy import RETRY_BUDGET_SECONDS
from waypost.schedule.scheduler import Tick
from waypost.worker.signals import StopSignals

log = logging.getLogger("waypost")


def add(commands: Any) -> None:
    """Declare the arguments."""
    add_leader_command(commands, "scheduler", run, "fire schedules")


def run(options: argparse.Namespace) -> int:
    """Run until a signal and return the exit code."""
    on_tick = write_tick if options.json else log_tick
    return run_until_signal(options, lambda post, stop: post.run_scheduler(stop, ttl=options.ttl, on_tick=on_tick))


def run_until_signal(options: argparse.Namespace, loop: Callable[[Waypost, threading.Event], None]) -> int:
    """Run a loop that ends when its event is set, which a signal does; return the exit code."""
    log_to_stderr(options.log_level, options.log_format)
    stop = threading.Event()
    with (
        open_client(options, retry_budget=RETRY_BUDGET_SECONDS, creates=True) as post,
        StopSignals(lambda name: stop.set()),
    ):
        loop(post, stop)
    return 0


def write_tick(tick: Tick) -> None:
    """Write a tick as JSON, unless it did nothing."""
    if tick.fires or tick.missed or tick.election == "elected":
        write_json(tick)
        sys.stdout.flush()


def log_tick(tick: Tick) -> None:
    """Log a tick; one that did nothing only at level debug."""
    level = logging.INFO if tick.fires or tick.missed or tick.election == "elected" else logging.DEBUG
    log.log(
        level, "tick: %s, fired %d, missed %d, late %s",
        tick.election, tick.fires, tick.missed, format_age(tick.lateness),
        extra={"event": "scheduler_tick", "fires": tick.fires, "missed": tick.missed,
               "lateness_seconds": tick.lateness.total_seconds()},
    )  # fmt: skip
