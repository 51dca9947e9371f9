"""`waypost watch`: the store live in a terminal, or one look for scripts."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from waypost.cli.ending import USAGE, Trouble
from waypost.cli.options import add_command, open_post
from waypost.cli.output import quiet_log, table, write, write_json
from waypost.cli.watching import HEADERS, Watcher, cells, totals
from waypost.errors import MissingExtra


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "watch", run, "watch all queues live, and act on them", positional_url=True,
        more="p pauses the queue under the cursor, r resumes it, d makes its dead letters ready again (it asks), q "
        "ends. An idle store is asked less than twice a second.",
        examples=("waypost watch valkey://127.0.0.1:6379", "waypost watch --once", "waypost watch --json"),
        json_text="one look, as one JSON document",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="one look, as a table")


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    if options.once or options.json:
        return look_once(options)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Trouble("a live view needs a terminal; --once gives one look", USAGE)
    try:
        from waypost.cli.watch_view import WatchView
    except ImportError:
        raise MissingExtra('the live view needs textual: pip install "waypost[cli]"; --once does without') from None
    # What is wrong is shown in the view; a line of the log would break it.
    with quiet_log(), open_post(options, retry_budget=0) as post:
        WatchView(post).run()
    return 0


def look_once(options: argparse.Namespace) -> int:
    """One look at everything; the exit code."""
    with open_post(options) as post:
        watcher = Watcher(post)
        watcher.tick(time.monotonic())
    lines = watcher.lines()
    if options.json:
        write_json({"queues": [asdict(line) for line in lines], "workers": watcher.workers})
        return 0
    if lines:
        for row in table(HEADERS, map(cells, lines), flexible=(0,), gap=1):
            write(row)
    write(totals(lines, watcher.workers))
    return 0
