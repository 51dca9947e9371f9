"""`waypost cancel`: cancel a message by its id or key."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import add_command, open_client
from waypost.cli.output import write, write_json
from waypost.formatting import format_call
from waypost.views import ActionUndo

#: What each status of `Waypost.cancel` means.
CANCEL_TEXTS = {
    "cancelled": "cancelled",
    "requested": "it is running, and was asked to stop",
    "finished": "it has finished already",
    "unknown": "there is no such message",
}


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "cancel", run, "cancel a message by its id or key",
        more="A message that is not running is removed at once, a running one is asked to stop. Exit code 1: there is "
        "no such message, or it has finished.",
        examples=("waypost cancel orders 1m7fra5gs06ap4cfk9b5jsq9", "waypost cancel orders --key order-7"),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument("id", nargs="?", help="the id of the message")
    parser.add_argument("--key", help="or its key")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if (options.id is None) == (options.key is None):
        raise CommandError("one message is cancelled: give its id, or --key", USAGE)
    chosen = {"id": options.id} if options.key is None else {"key": options.key}
    python = format_call("cancel", options.queue, **chosen)
    with open_client(options) as post, logged_action(options, post, "cancel", options.queue, python) as entry:
        status = post.cancel(options.queue, id=options.id, key=options.key)
        entry.text = f"message {options.key or options.id}: {CANCEL_TEXTS[status]}"
        entry.undo = ActionUndo.of("cancel", changed=status in ("cancelled", "requested"))
    if options.json:
        write_json({"queue": options.queue, "id": options.id, "key": options.key, "status": status})
    else:
        write(CANCEL_TEXTS[status])
    return 0 if status in ("cancelled", "requested") else FOUND
