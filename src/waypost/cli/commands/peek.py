"""`waypost peek`: show messages without claiming them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import Any

from waypost.cli.exit_codes import FOUND
from waypost.cli.options import add_command, add_dead_filters, add_message_filters, dead_filters, open_client
from waypost.cli.output import format_body, format_table, format_time, message_json, print_message, write, write_json
from waypost.message import StoredMessage
from waypost.values import MessageState

STATES: tuple[MessageState, ...] = ("ready", "delayed", "waiting", "leased", "dead", "done")


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "peek", run, "show messages without claiming them",
        examples=("waypost peek orders", "waypost peek orders --state dead -n 3 --json",
                  "waypost peek orders --id 1m7fra5gs06ap4cfk9b5jsq9"),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    add_message_filters(parser)
    add_dead_filters(parser, without=("--group",))
    parser.add_argument("--state", choices=STATES, help="messages of this state (ready; with --id, any)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    filters: Any = dead_filters(options)
    with open_client(options) as post:
        states: Sequence[MessageState] = [options.state] if options.state else (STATES if options.id else STATES[:1])
        messages: list[StoredMessage[Any]] = []
        for state in states:
            listing = post.messages(options.queue, state, id=options.id, key=options.key, **filters)
            messages += islice(listing, options.n - len(messages))
    if options.json:
        write_json([message_json(message) for message in messages])
    elif options.id and messages:
        print_message(messages[0])
    elif messages:
        rows = [
            (one.id, one.priority, one.deliveries, one.key, format_time(one.ready_at), format_body(one))
            for one in messages
        ]  # fmt: skip
        for line in format_table(("id", "pri", "del", "key", "ready at", "body"), rows, flexible=(3, 5)):
            write(line)
    else:
        write("no messages")
    return FOUND if options.id and not messages else 0
