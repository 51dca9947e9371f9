"""`waypost bulk`: redrive, purge, cancel or move many messages in the background, and see how far it is."""

from __future__ import annotations

import argparse
import time
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import (
    add_command,
    add_dead_filters,
    dead_filters,
    integer_between,
    open_client,
    parse_duration,
    parse_time,
)
from waypost.cli.output import format_table, format_time, write, write_json
from waypost.cli.progress import Progress
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import format_call, format_count, hide_header
from waypost.policy import PRIORITY_MAX, PRIORITY_MIN
from waypost.values import Counted
from waypost.views import ActionUndo, BulkAction

#: How long one call carries an action on, before the progress is shown again.
RUN_SECONDS = 1.0
PAUSE_SECONDS = 0.2
#: Messages that `--dry-run` reads at the most.
COUNTED_MAX = 100_000


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "bulk", None, "redrive, purge, cancel, move or prioritize many messages", store=False, json_text=None,
        more="A bulk action is saved in the store, and goes on when this command, a page or a server ends: web servers "
        "and `waypost bulk run` carry it on.",
        examples=("waypost bulk start orders redrive --reason retries_exhausted --rate 50/s", "waypost bulk list",
                  "waypost bulk start mails cancel --state delayed --header tenant=acme --dry-run",
                  "waypost bulk start mails reschedule --group acme --delay 0",
                  "waypost bulk start mails prioritize --state ready --type shop.Welcome --priority 9",
                  "waypost bulk run 1m7fra5gs06ap4cfk9b5jsq9"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    start = add_command(
        actions, "start", run_start, "save a bulk action",
        more="It asks before a purge and a cancel. --dry-run only counts what the options choose, and reads at most "
        f"{COUNTED_MAX:,} messages for it.",
    )  # fmt: skip
    start.add_argument("queue", help="the queue")
    start.add_argument(
        "verb", choices=("redrive", "purge", "cancel", "reschedule", "prioritize"),
        help="send dead letters again, remove them for good; cancel messages, move timers, or change priorities",
    )  # fmt: skip
    start.add_argument(
        "--state", choices=("ready", "delayed", "waiting"), help="of a cancel or prioritize: the state of the messages"
    )
    when = start.add_mutually_exclusive_group()
    when.add_argument("--delay", type=parse_duration, metavar="S", help="of a reschedule: due after this time; 0: now")
    when.add_argument("--at", type=parse_time, metavar="TIME", help="or due at a time: 2026-03-06T09:00:00Z")
    start.add_argument(
        "--priority", type=integer_between(PRIORITY_MIN, PRIORITY_MAX), metavar="N", help="of a prioritize: 0 to 9"
    )
    start.add_argument("--dry-run", action="store_true", help="only count them")
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
    filters: Any = dead_filters(options)
    state = {"redrive": "dead", "purge": "dead", "reschedule": "delayed"}.get(options.verb, options.state)
    if state is None:
        raise CommandError("which messages? give --state ready, delayed or waiting", USAGE)
    with open_client(options) as post:
        if options.dry_run:
            return print_count(options, post.count_messages(options.queue, state, limit=COUNTED_MAX, **filters))
        if options.verb in ("purge", "cancel"):
            found = post.count_messages(options.queue, state, limit=1_000, **filters)
            least = "" if found.searched >= found.total else "at least "
            what = f"{least}{format_count(found.count, 'dead letter' if state == 'dead' else f'{state} message')}"
            verb = "Remove" if options.verb == "purge" else "Cancel"
            confirm(options, f"{verb} {what} of {options.queue} (of {found.total:,}) for good?")
        action = f"bulk_{options.verb}"
        chosen = {name: getattr(options, name) for name in ("state", "delay", "at", "priority", "rate")}
        given: Any = {name: value for name, value in chosen.items() if value is not None}
        python = format_call("start_bulk", options.queue, options.verb, **hide_header(filters), **given)
        with logged_action(options, post, action, options.queue, python) as entry:
            started = post.start_bulk(options.queue, options.verb, via="command line", **given, **filters)
            entry.text = f"bulk action {started.id} is saved"
            entry.undo, entry.bulk = ActionUndo.of(action), started.id
    if options.json:
        write_json(started)
    else:
        write(started.id)
    return 0


def print_count(options: argparse.Namespace, found: Counted) -> int:
    """Print how many messages fit, and return the exit code."""
    if options.json:
        write_json(found)
    else:
        write(f"{found.count:,} fit of {found.searched:,} searched, of {format_count(found.total, 'message')}")
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
            (one.id, one.verb, one.queue, one.state, f"{one.done:,}", f"{one.total:,}",
             f"{str(format_time(one.started_at))[:19]} by {one.user}")
            for one in found
        ]  # fmt: skip
        heads = ("id", "verb", "queue", "state", "done", "at start", "started (UTC)")
        for line in format_table(heads, rows, flexible=(2, 6)):
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
    done = format_count(found.done, "dead letter" if found.source == "dead" else "message")
    text = f"{found.verb} of {found.queue}: {found.state}, {done} done"
    text += f" of {found.searched:,} searched" if not found.has_ended and found.searched else ""
    text += f", {found.left:,} stay dead because their keys are in use" if found.left else ""
    text += f", {found.unknown:,} may have been counted too few" if found.unknown else ""
    return text + (f": {found.error}" if found.error else "")
