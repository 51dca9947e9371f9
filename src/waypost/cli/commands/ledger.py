"""`waypost ledger`: where every message of a queue went."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from waypost.cli.commands.stats import fetch_stats
from waypost.cli.exit_codes import FOUND
from waypost.cli.options import add_command, open_client
from waypost.cli.output import format_redeliveries, with_color, write, write_json, write_stderr
from waypost.formatting import format_count
from waypost.values import Ledger


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "ledger", run, "show where every message of a queue went",
        more="Exit code 1: a ledger does not balance, which is a defect.", examples=("waypost ledger orders",),
    )  # fmt: skip
    parser.add_argument("queue", nargs="*", help="these queues; all of them if none is named")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        ledgers = {stats.queue: stats.ledger for stats in fetch_stats(post, options.queue)}
    if options.json:
        write_json({
            queue: msgspec.to_builtins(one) | {"balance": one.balance, "unexplained": one.unexplained}
            for queue, one in ledgers.items()
        })  # fmt: skip
    else:
        for number, (queue, ledger) in enumerate(ledgers.items()):
            print_ledger(queue, ledger, first=number == 0)
        if not ledgers:
            write("no queues")
    wrong = [queue for queue, one in ledgers.items() if one.balance or one.unexplained]
    if wrong:
        count = format_count(len(wrong), "ledger")
        write_stderr(f"waypost: {count} not in balance: {', '.join(wrong)}; that is a defect, report it")
    return FOUND if wrong else 0


def print_ledger(queue: str, ledger: Ledger, *, first: bool) -> None:
    """Print one ledger as a sum."""
    if not first:
        write("")
    write(with_color(queue, "bold"))
    added = [("published", ledger.published), ("redriven", ledger.redriven)]
    subtracted = [(name, getattr(ledger, name)) for name in (
        "ready", "delayed", "waiting", "leased", "done", "dead", "dropped", "cancelled", "replaced",
    )]  # fmt: skip
    size = max(len(f"{number:,}") for _, number in [*added, *subtracted])
    for sign, pairs in (("+", added), ("-", subtracted)):
        for name, number in pairs:
            kept = f"  ({ledger.dead_kept:,} kept now)" if name == "dead" and number != ledger.dead_kept else ""
            write(f"  {sign} {name:10} {number:>{size},}{kept}")
    write(f"  = {'balance':10} {ledger.balance:>{size},}")
    write(f"  claims {ledger.claims:,}, first {ledger.first_claims:,}, redelivered: {format_redeliveries(ledger)}; "
          f"unexplained {ledger.unexplained}")  # fmt: skip
