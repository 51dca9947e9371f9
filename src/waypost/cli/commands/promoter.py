"""`waypost promoter`: make due timers ready in a process of its own."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from typing import Any

from waypost.cli.options import add_leader_command, open_client
from waypost.cli.output import log_to_stderr, write_json
from waypost.policy import RETRY_BUDGET_SECONDS
from waypost.schedule.promoter import PromoterTick
from waypost.worker.signals import StopSignals

log = logging.getLogger("waypost")


def add(commands: Any) -> None:
    """Declare the arguments."""
    add_leader_command(commands, "promoter", run, "make timers ready and wake workers for them")


def run(options: argparse.Namespace) -> int:
    """Run until a signal and return the exit code."""
    log_to_stderr(options.log_level)
    stop = threading.Event()
    with (
        open_client(options, retry_budget=RETRY_BUDGET_SECONDS, creates=True) as post,
        StopSignals(lambda name: stop.set()),
    ):
        post.run_promoter(stop, ttl=options.ttl, on_tick=write_tick if options.json else log_tick)
    return 0


def write_tick(tick: PromoterTick) -> None:
    """Write a tick as JSON, unless it did nothing."""
    if tick.promoted or tick.election == "elected":
        write_json(tick)
        sys.stdout.flush()


def log_tick(tick: PromoterTick) -> None:
    """Log a tick; one that did nothing only at level debug."""
    level = logging.INFO if tick.promoted or tick.election == "elected" else logging.DEBUG
    log.log(
        level, "tick: %s, promoted %d, %d timers left, the oldest %d ms late", tick.election, tick.promoted, tick.depth,
        tick.oldest_lag_ms, extra={"event": "promoter_tick", "promoted": tick.promoted, "depth": tick.depth},
    )  # fmt: skip
