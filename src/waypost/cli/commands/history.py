"""`waypost history`: the events of one message."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.exit_codes import FOUND
from waypost.cli.options import add_command, open_client
from waypost.cli.output import event_json, print_events, write_json, write_stderr


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "history", run, "show the events of one message",
        more="As far back as the journal of its queue goes. Exit code 1: there are none.",
        examples=("waypost history orders 1m7fra5gs06ap4cfk9b5jsq9",),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument("id", help="the id of the message")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        events = post.history(options.queue, options.id)
    if options.json:
        write_json([event_json(event) for event in events])
    elif events:
        print_events(events)
    else:
        write_stderr(f"waypost: the journal of {options.queue} has no events of message {options.id}")
    return 0 if events else FOUND
