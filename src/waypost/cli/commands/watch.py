"""`waypost watch`: all queues live in a terminal, or once for scripts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from waypost.cli.exit_codes import USAGE, CommandError
from waypost.cli.options import add_command, open_client
from waypost.cli.output import format_table, quiet_log, terminal_width, write, write_json
from waypost.cli.watch.collector import Collector, QueueLine
from waypost.cli.watch.columns import (
    choose_columns,
    format_name,
    format_totals,
    needed_name_width,
    printed_columns,
)
from waypost.errors import MissingExtra


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "watch", run, "watch all queues live, and act on them", positional_url=True,
        more="Enter opens the queue under the cursor: dead letters by reason, workers, recent errors, rates. / filters "
        "by name, s sorts, p pauses a queue, r resumes it, d makes its dead letters ready again after a question, ? "
        "lists the keys, q quits. What is wrong is red. An idle store gets less than two commands a second.",
        examples=("waypost watch valkey://127.0.0.1:6379", "waypost watch --once", "waypost watch --json"),
        json_text="the current state once, as one JSON document",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print the current state once, as a table")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.once or options.json:
        return print_once(options)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("the live view needs a terminal; --once prints the state once", USAGE)
    try:
        from waypost.cli.watch.screen import WatchScreen
    except ImportError:
        raise MissingExtra('the live view needs textual: pip install "waypost[cli]"; --once works without it') from None
    # The screen shows errors itself; a log line would break it.
    with quiet_log(), open_client(options, retry_budget=0) as post:
        WatchScreen(post).run()
    return 0


def print_once(options: argparse.Namespace) -> int:
    """Print the state of all queues once and return the exit code."""
    with open_client(options) as post:
        collector = Collector(post)
        collector.tick(time.monotonic())
    lines = collector.lines()
    if options.json:
        write_json({"queues": lines, "workers": collector.workers})
        return 0
    if lines:
        for row in format_lines(lines):
            write(row)
    write(format_totals(lines, collector.workers))
    return 0


def format_lines(lines: Sequence[QueueLine]) -> list[str]:
    """Return the table of queues: all columns in full, or on a terminal those that fit, in short."""
    width = terminal_width()
    columns = printed_columns() if width is None else choose_columns(width, needed_name_width(lines, width))
    rows = [
        (format_name(line), *((column.format_exact if width is None else column.format)(line) for column in columns))
        for line in lines
    ]
    return format_table(("queue", *(column.name for column in columns)), rows, flexible=(0,), gap=1)
