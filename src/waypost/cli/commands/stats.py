"""`waypost stats`: the counters of one queue, or of all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from waypost.cli.options import add_command, integer_between, open_client
from waypost.cli.output import (
    format_pairs,
    format_redeliveries,
    format_table,
    format_time,
    print_queues,
    with_color,
    write,
    write_json,
)
from waypost.client import Waypost
from waypost.formatting import format_age
from waypost.policy import MINUTES_KEPT
from waypost.views import Stats, to_json

#: Counters of a minute that are printed even if they are 0.
ALWAYS_PRINTED = ("published", "claims", "done")


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "stats", run, "show the counters of a queue, or of all queues",
        examples=("waypost stats", "waypost stats orders --minutes 10", "waypost stats orders --json"),
    )  # fmt: skip
    parser.add_argument("queue", nargs="*", help="these queues; all of them if none is named")
    parser.add_argument("--minutes", type=integer_between(0, MINUTES_KEPT), default=0, metavar="N",
                        help="also the counters of each of the last N minutes")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        stats = fetch_stats(post, options.queue, options.minutes)
    if options.json:
        write_json([stats_json(one) for one in stats])
    elif len(options.queue) == 1:
        print_stats(stats[0])
    else:
        print_queues(stats)
        for one in stats:
            print_minutes(one)
    return 0


def fetch_stats(post: Waypost, queues: Sequence[str], minutes: int = 0) -> list[Stats]:
    """Return the stats of these queues, or of all if none is named."""
    return [post.stats(queue, minutes) for queue in (queues or post.queues())]


def stats_json(stats: Stats) -> dict[str, Any]:
    """Return all counters of a queue for JSON."""
    fields: dict[str, Any] = to_json(stats)
    fields["ledger"] |= {"balance": stats.ledger.balance, "unexplained": stats.ledger.unexplained}
    fields["backlog"] = to_json(stats.backlog)
    return fields


def print_stats(stats: Stats) -> None:
    """Print one queue in full."""
    ledger = stats.ledger
    readers = ", ".join(f"{name} {stats.journal_last - at:,} behind" for name, at in stats.journal_readers.items())
    pairs: list[tuple[str, object]] = [
        ("queue", stats.queue + (with_color("  paused", "yellow") if stats.paused else "")),
        ("ready", f"{ledger.ready:,}, the oldest for {format_age(stats.oldest_ready_age)}"),
        ("delayed", f"{ledger.delayed:,}, the next in {format_age(stats.next_due_in)}"),
        ("waiting", f"{ledger.waiting:,}"),
        ("leased", f"{ledger.leased:,}, the longest for {format_age(stats.oldest_leased_age)}"),
        ("dead", f"{ledger.dead_kept:,}"),
        ("done", f"{ledger.done:,}"),
        ("published", f"{ledger.published:,}, {ledger.duplicates:,} duplicates"),
        ("redelivered", format_redeliveries(ledger)),
        *([("past max_pending", f"{ledger.over_cap:,}, sent on or redriven")] if ledger.over_cap else []),
        ("sleepers", stats.sleepers),
        ("journal", f"{stats.journal_first:,} to {stats.journal_last:,}{'; ' if readers else ''}{readers}"),
    ]
    for line in format_pairs(pairs):
        write(line)
    print_minutes(stats)


def print_minutes(stats: Stats) -> None:
    """Print the counters by minute, if there are any, the backlog at its beginning, and waits and run times.

    Counters that are 0 in all minutes are left out, but for the most important ones.
    """
    if not stats.minutes:
        return
    counted = {name for minute in stats.minutes for name, count in minute.counts.items() if count}
    names = [name for name in stats.minutes[-1].counts if name in counted or name in ALWAYS_PRINTED]
    backlog = {one.at: f"{one.messages:,}" for one in stats.backlog}
    rows = [
        (
            str(format_time(minute.at))[11:16], *(minute.counts.get(name, "-") for name in names),
            backlog.get(minute.at, "-"),
            *(format_age(time) for time in (minute.wait_mean, minute.wait_max, minute.run_mean, minute.run_max)),
        )
        for minute in stats.minutes
    ]  # fmt: skip
    write("")
    titles = ("minute", *names, "backlog", "mean wait", "longest", "mean run", "longest")
    for line in format_table(titles, rows):
        write(line)
