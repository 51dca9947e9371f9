"""`waypost purge`: remove all messages of a state."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.options import add_command, add_dead_filters, dead_filters, open_client
from waypost.cli.output import write, write_json
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import format_call, format_count, hide_header
from waypost.views import ActionUndo


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "purge", run, "remove all messages of a state, or some",
        more="All of them, or those that the options choose. This cannot be undone, so it asks for confirmation.",
        examples=("waypost purge orders --state delayed", "waypost purge orders --state ready --yes"),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    states = ("ready", "delayed", "waiting", "dead", "done")
    parser.add_argument("--state", choices=states, required=True, help="the state")
    add_dead_filters(parser)
    add_yes(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    filters = dead_filters(options)
    with open_client(options) as post:
        ledger = post.ledger(options.queue)
        count = {"ready": ledger.ready, "delayed": ledger.delayed, "dead": ledger.dead_kept}.get(options.state)
        what = "all kept messages" if count is None else format_count(count, f"{options.state} message")
        if count != 0:
            confirm(options, f"Remove {'those that fit of ' if filters else ''}{what} of {options.queue} for good?")
        python = format_call("purge", options.queue, options.state, **hide_header(filters))
        with logged_action(options, post, "purge", options.queue, python) as entry:
            removed = post.purge(options.queue, options.state, **filters)
            entry.text = f"removed {format_count(removed, f'{options.state} message')} of {options.queue}"
            entry.undo = ActionUndo.of("purge", changed=removed > 0)
    if options.json:
        write_json({"queue": options.queue, "state": options.state, "removed": removed})
    else:
        write(entry.text)
    return 0
