"""`waypost queues`: list the queues of a store."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.options import add_command, open_client
from waypost.cli.output import print_queues, write, write_json
from waypost.views import Stats, to_json


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "queues", run, "list the queues", positional_url=True,
        examples=("waypost queues", "waypost queues --names"),
    )  # fmt: skip
    parser.add_argument("--names", action="store_true", help="their names only, which costs one call")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        names = post.queues()
        stats = [] if options.names else [post.stats(name, 0) for name in names]
    if options.names and options.json:
        write_json(names)
    elif options.names:
        for name in names:
            write(name)
    elif options.json:
        write_json([summarize(one) for one in stats])
    else:
        print_queues(stats)
    return 0


def summarize(stats: Stats) -> dict[str, Any]:
    """Return the fields of one queue in the JSON list."""
    ledger = stats.ledger
    return {
        "queue": stats.queue, "paused": stats.paused, "ready": ledger.ready, "delayed": ledger.delayed,
        "waiting": ledger.waiting, "leased": ledger.leased, "dead": ledger.dead_kept, "done": ledger.done,
        "oldest_ready_age_seconds": to_json(stats.oldest_ready_age),
    }  # fmt: skip
