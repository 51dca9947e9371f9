"""`waypost scheduler` and `waypost promoter`: the loops that workers have inside, as processes of their own."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from typing import Any

from waypost.cli.options import add_command, open_post
from waypost.cli.output import log_to_stderr, write_json
from waypost.policy import LEADER_TTL_MS, RETRY_BUDGET_SECONDS
from waypost.schedule.promoter import PromoterTick
from waypost.schedule.scheduler import Tick
from waypost.worker.signals import StopSignals

log = logging.getLogger("waypost")


def add(commands: Any) -> None:
    """The arguments of these commands."""
    for role, text in (("scheduler", "fire schedules"), ("promoter", "make timers ready and wake workers for them")):
        parser = add_command(
            commands, role, run, text, positional_url=True,
            json_text="each tick that did something, one JSON document a line",
            more="Of all that run, one leads at a time.", examples=(f"waypost {role} valkey://127.0.0.1:6379",),
        )  # fmt: skip
        parser.add_argument(
            "--ttl", type=float, default=LEADER_TTL_MS / 1000, metavar="S",
            help=f"a leader not heard of for so many seconds is replaced ({LEADER_TTL_MS // 1000})",
        )  # fmt: skip
        parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"),
                            help="what is logged on stderr (info)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command until a signal; its exit code."""
    log_to_stderr(options.log_level)
    stop = threading.Event()
    with (
        open_post(options, retry_budget=RETRY_BUDGET_SECONDS, creates=True) as post,
        StopSignals(lambda name: stop.set()),
    ):
        if options.command == "scheduler":
            post.run_scheduler(stop, ttl=options.ttl, on_tick=tell_json if options.json else tell_scheduler)
        else:
            post.run_promoter(stop, ttl=options.ttl, on_tick=tell_json if options.json else tell_promoter)
    return 0


def tell_json(tick: Tick | PromoterTick) -> None:
    """A tick for a program; those that did nothing are not told."""
    counted = tick.fires + tick.missed if isinstance(tick, Tick) else tick.promoted
    if counted or tick.election == "elected":
        write_json(tick)
        sys.stdout.flush()


def tell_scheduler(tick: Tick) -> None:
    """One line for a tick; those that did nothing only at level debug."""
    level = logging.INFO if tick.fires or tick.missed or tick.election == "elected" else logging.DEBUG
    log.log(
        level, "tick: %s, fired %d, missed %d, late %d ms", tick.election, tick.fires, tick.missed, tick.lateness_ms,
        extra={"event": "scheduler_tick", "fires": tick.fires, "missed": tick.missed, "lateness_ms": tick.lateness_ms},
    )  # fmt: skip


def tell_promoter(tick: PromoterTick) -> None:
    """The same of a promoter."""
    level = logging.INFO if tick.promoted or tick.election == "elected" else logging.DEBUG
    log.log(
        level, "tick: %s, promoted %d, %d timers left, the oldest %d ms late", tick.election, tick.promoted, tick.depth,
        tick.oldest_lag_ms, extra={"event": "promoter_tick", "promoted": tick.promoted, "depth": tick.depth},
    )  # fmt: skip
