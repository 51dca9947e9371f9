"""`waypost remove`: remove an empty queue with its settings, counters and journal."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND
from waypost.cli.options import add_command, open_client
from waypost.cli.output import write, write_json
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import format_call
from waypost.views import ActionUndo


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "remove", run, "remove a queue that is empty",
        more="Its settings, counters, history and journal are removed too. This cannot be undone, so it asks for "
        "confirmation. A queue that is not empty is not removed, and the exit code is 1. The next publish creates a "
        "new queue of the same name.",
        examples=("waypost remove orders", "waypost remove orders --yes"),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    add_yes(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        confirm(options, f"Remove the queue {options.queue} with its settings, counters and journal for good?")
        python = format_call("remove_queue", options.queue)
        with logged_action(options, post, "remove", options.queue, python) as entry:
            removed = post.remove_queue(options.queue)
            entry.text = f"removed {options.queue}" if removed else f"there is no queue {options.queue}"
            entry.undo = ActionUndo.of("remove", changed=removed)
    if options.json:
        write_json({"queue": options.queue, "removed": removed})
    else:
        write(entry.text)
    return 0 if removed else FOUND
