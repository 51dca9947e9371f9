"""`waypost actions`: who did what, as the log in the store has it."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.options import add_command, integer_between, open_client
from waypost.cli.output import format_table, format_time, write, write_json
from waypost.policy import ACTIONS_MAX
from waypost.views import LoggedAction

PAGE = 100


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "actions", run, "list who did what", positional_url=True,
        more="Changes by commands, through the web page and its API, the newest first; the store keeps the newest "
        f"{ACTIONS_MAX:,}.",
        examples=("waypost actions", "waypost actions --queue orders -n 50 --json"),
    )  # fmt: skip
    parser.add_argument("-n", type=integer_between(1, ACTIONS_MAX), default=20, metavar="N", help="at most N (20)")
    parser.add_argument("--queue", help="those that concern this queue")
    parser.add_argument("--user", help="those of this user")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    found: list[LoggedAction] = []
    with open_client(options) as post:
        cursor: str | None = None
        while len(found) < options.n:
            page = post.actions(cursor=cursor, limit=PAGE)
            found += [
                one for one in page.actions if options.queue in (None, one.queue) and options.user in (None, one.user)
            ]
            cursor = page.cursor
            if cursor is None:
                break
    found = found[: options.n]
    if options.json:
        write_json(found)
    elif not found:
        write("no actions" + (" like that" if options.queue or options.user else ""))
    else:
        rows = [
            (str(format_time(one.at))[:19], one.user, one.via, one.action, one.queue or "",
             one.text if one.ok else f"failed: {one.text}")
            for one in found
        ]  # fmt: skip
        heads = ("when (UTC)", "who", "through", "action", "queue", "what became of it")
        for line in format_table(heads, rows, flexible=(1, 4, 5)):
            write(line)
    return 0
