"""`waypost bulk`: redrive or purge many dead letters in the background, and see how far it is."""

from __future__ import annotations

import argparse
import time
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND
from waypost.cli.options import (
    add_command,
    add_dead_filters,
    dead_filters,
    integer_between,
    open_client,
)
from waypost.cli.output import format_table, format_time, write, write_json
from waypost.cli.progress import Progress
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import format_call, format_count
from waypost.views import ActionUndo, BulkAction

#: How long one call carries an action on, before the progress is shown again.
RUN_SECONDS = 1.0
PAUSE_SECONDS = 0.2


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "bulk", None, "redrive or purge many dead letters in the background", store=False, json_text=None,
        more="A bulk action is saved in the store, and goes on when this command, a page or a server ends: web servers "
        "and `waypost bulk run` carry it on.",
        examples=("waypost bulk start orders redrive --reason retries_exhausted --rate 50/s", "waypost bulk list",
                  "waypost bulk run 1m7fra5gs06ap4cfk9b5jsq9"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    start = add_command(actions, "start", run_start, "save a bulk action", more="It asks before a purge.")
    start.add_argument("queue", help="the queue")
    start.add_argument(
        "verb", choices=("redrive", "purge"), help="send the dead letters again, or remove them for good"
    )
    add_dead_filters(start)
    start.add_argument("--rate", metavar="N/UNIT", help='at most this fast: "100/s", "10/m"')
    add_yes(start)
    listing = add_command(actions, "list", run_list, "list bulk actions, the newest first", positional_url=True)
    listing.add_argument("-n", type=integer_between(1, 200), default=20, metavar="N", help="at most N (20)")
    run = add_command(
        actions, "run", run_run, "carry on a bulk action until it ends",
        more="It waits while another program works on it. Exit code 1: it is paused, or ended and not all was done.",
    )  # fmt: skip
    run.add_argument("id", help="its id")
    for name, text in (
        ("pause", "stop a bulk action for a while"),
        ("resume", "let a bulk action go on"),
        ("cancel", "end a bulk action; what was done stays done"),
    ):
        add_command(actions, name, run_change, text).add_argument("id", help="its id")


def run_start(options: argparse.Namespace) -> int:
    """Save a bulk action and return the exit code."""
    with open_client(options) as post:
        if options.verb == "purge":
            count = post.ledger(options.queue).dead_kept
            confirm(options, f"Remove dead letters of {options.queue} (of {count:,}) for good?")
        action, filters = f"bulk_{options.verb}", dead_filters(options)
        rate = {} if options.rate is None else {"rate": options.rate}
        python = format_call("start_bulk", options.queue, options.verb, **filters, **rate)
        with logged_action(options, post, action, options.queue, python) as entry:
            started = post.start_bulk(
                options.queue, options.verb, rate=options.rate, via="command line", **filters
            )  # fmt: skip
            entry.text = f"bulk action {started.id} is saved"
            entry.undo, entry.bulk = ActionUndo.of(action), started.id
    if options.json:
        write_json(started)
    else:
        write(started.id)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """List bulk actions and return the exit code."""
    with open_client(options) as post:
        found = post.bulk_actions(limit=options.n).actions
    if options.json:
        write_json(found)
    elif not found:
        write("no bulk actions")
    else:
        rows = [
            (one.id, str(format_time(one.started_at))[:19], one.user, one.verb, one.queue, one.state, f"{one.done:,}",
             f"{one.total:,}")
            for one in found
        ]  # fmt: skip
        heads = ("id", "started (UTC)", "who", "verb", "queue", "state", "done", "dead at start")
        for line in format_table(heads, rows, flexible=(2, 4)):
            write(line)
    return 0


def run_run(options: argparse.Namespace) -> int:
    """Carry on a bulk action and return the exit code."""
    with open_client(options) as post:
        found = post.bulk_action(options.id)
        progress = Progress(f"{found.verb} of {found.queue}", found.total, quiet=options.json)
        with progress:
            while not found.has_ended and found.state != "paused":
                before = found.done
                found = post.run_bulk(options.id, seconds=RUN_SECONDS)
                progress.advance(found.done - progress.done)
                if found.done == before and not found.has_ended:
                    # Another program works on it, or its rate does not allow the next step yet.
                    time.sleep(PAUSE_SECONDS)
    print_bulk(options, found)
    return 0 if found.state == "done" and not found.left else FOUND


def run_change(options: argparse.Namespace) -> int:
    """Pause, resume or cancel a bulk action and return the exit code."""
    python = format_call("change_bulk", options.id, options.action)
    with open_client(options) as post, logged_action(options, post, "change_bulk", None, python) as entry:
        found = post.change_bulk(options.id, options.action)
        entry.text, entry.queue, entry.bulk = describe_bulk(found), found.queue, found.id
        entry.undo = ActionUndo.of("change_bulk")
    print_bulk(options, found)
    return 0


def print_bulk(options: argparse.Namespace, found: BulkAction) -> None:
    """Print how far a bulk action is."""
    if options.json:
        write_json(found)
    else:
        write(describe_bulk(found))


def describe_bulk(found: BulkAction) -> str:
    """Return how far a bulk action is in a sentence."""
    text = f"{found.verb} of {found.queue}: {found.state}, {format_count(found.done, 'dead letter')} done"
    text += f", {found.left:,} stay dead because their keys are in use" if found.left else ""
    text += f", {found.unknown:,} may have been counted too few" if found.unknown else ""
    return text + (f": {found.error}" if found.error else "")
