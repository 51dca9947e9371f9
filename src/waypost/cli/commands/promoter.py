"""`waypost promoter`: make due timers ready in a process of its own."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from waypost.cli.commands.scheduler import run_until_signal
from waypost.cli.options import add_leader_command
from waypost.cli.output import write_json
from waypost.formatting import format_age
from waypost.schedule.promoter import PromoterTick

log = logging.getLogger("waypost")


def add(commands: Any) -> None:
    """Declare the arguments."""
    add_leader_command(commands, "promoter", run, "make timers ready and wake workers for them")


def run(options: argparse.Namespace) -> int:
    """Run until a signal and return the exit code."""
    on_tick = write_tick if options.json else log_tick
    return run_until_signal(options, lambda post, stop: post.run_promoter(stop, ttl=options.ttl, on_tick=on_tick))


def write_tick(tick: PromoterTick) -> None:
    """Write a tick as JSON, unless it did nothing."""
    if tick.promoted or tick.election == "elected":
        write_json(tick)
        sys.stdout.flush()


def log_tick(tick: PromoterTick) -> None:
    """Log a tick; one that did nothing only at level debug."""
    level = logging.INFO if tick.promoted or tick.election == "elected" else logging.DEBUG
    log.log(
        level, "tick: %s, promoted %d, %d timers left, the oldest %s late", tick.election, tick.promoted, tick.depth,
        format_age(tick.oldest_lag), extra={"event": "promoter_tick", "promoted": tick.promoted, "depth": tick.depth},
    )  # fmt: skip
