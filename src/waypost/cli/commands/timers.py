"""`waypost timers`: list, cancel and reschedule messages that are not due yet."""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.commands.cancel import CANCEL_TEXTS
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import add_command, integer_between, open_client, parse_duration, parse_time
from waypost.cli.output import format_body, format_table, format_time, message_json, write, write_json
from waypost.formatting import format_age, format_call, format_count
from waypost.message import StoredMessage
from waypost.views import ActionUndo


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "timers", None, "list, cancel or move messages that are not due yet", store=False, json_text=None,
        examples=("waypost timers list mails --before 2026-03-06T00:00:00Z",
                  "waypost timers cancel mails --key welcome-7",
                  "waypost timers reschedule mails welcome-7 --delay 2h"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    listing = add_command(actions, "list", run_list, "list timers, soonest first")
    listing.add_argument("queue", help="the queue")
    listing.add_argument("-n", type=integer_between(1, 1_000_000), default=20, metavar="N", help="at most N (20)")
    listing.add_argument("--before", type=parse_time, metavar="TIME", help="timers due before: 2026-03-06T00:00:00Z")
    listing.add_argument("--key", help="the timer with this key")
    cancel = add_command(actions, "cancel", run_cancel, "cancel a timer by its key or id",
                         more="Exit code 1: there is no such timer.")  # fmt: skip
    cancel.add_argument("queue", help="the queue")
    cancel.add_argument("id", nargs="?", help="its id")
    cancel.add_argument("--key", help="or its key")
    move = add_command(actions, "reschedule", run_reschedule, "give a timer another due time, by its key or id",
                       more="Exit code 1: there is no such timer, or it is due already.")  # fmt: skip
    move.add_argument("queue", help="the queue")
    move.add_argument("key", nargs="?", help="its key")
    move.add_argument("--id", help="or its id")
    when = move.add_mutually_exclusive_group(required=True)
    when.add_argument("--delay", type=parse_duration, metavar="S", help="due after this time (90, 30s, 5m, 2h, 7d)")
    when.add_argument("--at", type=parse_time, metavar="TIME", help="due at a time: 2026-03-06T09:00:00Z")


def run_list(options: argparse.Namespace) -> int:
    """List timers and return the exit code."""
    with open_client(options) as post:
        found: list[StoredMessage[Any]]
        if options.key is not None:
            found = list(islice(post.messages(options.queue, "delayed", key=options.key), options.n))
        else:
            found = list(islice(post.timers(options.queue, options.before), options.n))
        stats = post.stats(options.queue)
    if options.json:
        write_json([message_json(timer) for timer in found])
        return 0
    if not found:
        write("no timers" + (" like that" if stats.ledger.delayed else ""))
        return 0
    rows = [
        (
            timer.id,
            format_time(timer.ready_at),
            format_age(timer.ready_at - stats.at),
            timer.key,
            format_body(timer),
        )
        for timer in found
    ]
    for line in format_table(("id", "due", "in", "key", "body"), rows, flexible=(3, 4)):
        write(line)
    if stats.ledger.delayed > len(found):
        write(f"{len(found):,} of {format_count(stats.ledger.delayed, 'timer')}")
    return 0


def run_cancel(options: argparse.Namespace) -> int:
    """Cancel a timer and return the exit code."""
    if (options.id is None) == (options.key is None):
        raise CommandError("no timer was chosen: give its id, or --key", USAGE)
    chosen = {"id": options.id} if options.key is None else {"key": options.key}
    python = format_call("cancel", options.queue, **chosen)
    with open_client(options) as post, logged_action(options, post, "cancel", options.queue, python) as entry:
        found = list(post.messages(options.queue, "delayed", id=options.id, key=options.key))
        # By id: meanwhile the key may have passed to another message.
        status = post.cancel(options.queue, id=found[0].id) if found else "unknown"
        entry.text = f"timer {options.key or options.id}: {CANCEL_TEXTS[status]}"
        entry.undo = ActionUndo.of("cancel", changed=status == "cancelled")
    if options.json:
        write_json({"queue": options.queue, "id": found[0].id if found else options.id, "key": options.key,
                    "status": status})  # fmt: skip
    else:
        write(CANCEL_TEXTS[status] if found else f"{options.queue} has no such timer")
    return 0 if status == "cancelled" else FOUND


def run_reschedule(options: argparse.Namespace) -> int:
    """Move a timer and return the exit code."""
    if (options.id is None) == (options.key is None):
        raise CommandError("no timer was chosen: give its key, or --id", USAGE)
    named = f"the timer {options.key or options.id!r}"
    chosen = {"id": options.id, "key": options.key, "delay": options.delay, "at": options.at}
    python = format_call(
        "reschedule", options.queue, **{name: value for name, value in chosen.items() if value is not None}
    )
    with open_client(options) as post, logged_action(options, post, "reschedule", options.queue, python) as entry:
        status = post.reschedule(options.queue, options.id, key=options.key, delay=options.delay, at=options.at)
        if status == "unknown":
            raise CommandError(f"{options.queue} has no timer with the {'key' if options.key else 'id'} "
                               f"{options.key or options.id!r}", FOUND)  # fmt: skip
        if status == "due":
            raise CommandError(f"{named} is due already, and was not moved", FOUND)
        entry.text, entry.undo = f"{options.key or options.id} is moved", ActionUndo.of("reschedule")
        now = list(post.messages(options.queue, "delayed", id=options.id, key=options.key))
        due = format_time(now[0].ready_at) if now else None
        entry.text = f"{options.key or options.id} is due {due or 'now'}"
    if options.json:
        write_json({"queue": options.queue, "key": options.key, "id": options.id, "status": status, "due": due})
    else:
        write(entry.text)
    return 0
