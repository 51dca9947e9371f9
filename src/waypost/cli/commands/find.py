"""`waypost find`: find a message by its id or key."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import add_command, open_client
from waypost.cli.output import format_table, write, write_json, write_stderr


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "find", run, "find a message by its id or key in all queues",
        more="By its id also after it has ended, as far back as the journals go; by its key while it is unfinished. "
        "Exit code 1: it was not found.",
        examples=("waypost find 1m7fra5gs06ap4cfk9b5jsq9", "waypost find --key order-7"),
    )  # fmt: skip
    parser.add_argument("id", nargs="?", help="the id of the message")
    parser.add_argument("--key", help="or its key")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if (options.id is None) == (options.key is None):
        raise CommandError("one message is searched for: give its id, or --key", USAGE)
    with open_client(options) as post:
        found = post.find(options.id) if options.key is None else post.find_key(options.key)
    if options.json:
        write_json(found)
    elif found:
        rows = [(one.queue, one.id, one.state or one.ended or "known by its journal") for one in found]
        for line in format_table(("queue", "id", "state"), rows, flexible=(0,)):
            write(line)
    else:
        write_stderr("waypost: no queue and no journal has it" if options.key is None else "waypost: no queue has it")
    return 0 if found else FOUND
