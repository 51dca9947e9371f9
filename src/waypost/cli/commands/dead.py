"""`waypost dead`: list, peek at, redrive, edit and purge dead letters."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import islice
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import (
    add_command,
    add_dead_filters,
    add_message_filters,
    dead_filters,
    integer_between,
    open_client,
)
from waypost.cli.output import format_table, format_time, message_json, print_message, write, write_json
from waypost.cli.progress import Progress
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import Placeholder, format_call, format_count, hide_header
from waypost.values import Redriven
from waypost.views import ActionUndo, Observed


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "dead", None, "list, peek at, redrive, edit or purge dead letters", store=False, json_text=None,
        examples=("waypost dead list orders --reason retries_exhausted",
                  "waypost dead peek orders 1m7fra5gs06ap4cfk9b5jsq9",
                  "waypost dead redrive orders --all --rate 50/s", "waypost dead purge orders"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    listing = add_command(actions, "list", run_list, "list dead letters, queue by queue, oldest first")
    listing.add_argument("queue", nargs="?", help="the queue (all)")
    add_message_filters(listing)
    add_dead_filters(listing, without=("--group",))
    listing.add_argument("--by-reason", action="store_true", help="only the number of each reason and error")
    peek = add_command(actions, "peek", run_peek, "show one dead letter in full")
    peek.add_argument("queue", help="the queue")
    peek.add_argument("id", help="its id")
    redrive = add_command(
        actions, "redrive", run_redrive, "make dead letters ready again with fresh counts",
        more="A dead letter whose key is in use by now stays dead, and the exit code is 1.",
        examples=("waypost dead redrive orders 1m7fra5gs06ap4cfk9b5jsq9",
                  "waypost dead redrive orders --reason undecodable --rate 100/s"),
    )  # fmt: skip
    redrive.add_argument("queue", help="the queue")
    redrive.add_argument("id", nargs="*", help="the ids of dead letters")
    redrive.add_argument("--reason", help="those with this reason")
    redrive.add_argument("--all", action="store_true", help="all of them")
    redrive.add_argument("--rate", metavar="N/UNIT", help='at most this fast: "100/s", "10/m"')
    redrive.add_argument("--limit", type=integer_between(1, 2**40), metavar="N", help="at most N in all")
    purge = add_command(
        actions, "purge", run_purge, "remove dead letters of a queue for good",
        more="All of them, or those that the options choose. It asks for confirmation.",
        examples=("waypost dead purge orders",
                  "waypost dead purge orders --reason rejected --died-before 2026-01-01T00:00:00Z"),
    )  # fmt: skip
    purge.add_argument("queue", help="the queue")
    add_dead_filters(purge)
    add_yes(purge)
    edit = add_command(
        actions, "edit", run_edit, "send a dead letter again with another body or other headers",
        more="A new message takes its place, in one step. Its header waypost-edited-from has its id. Exit "
        "code 1: there is no such letter, or its key is in use by now.",
        examples=("waypost dead edit orders 1m7fra5gs06ap4cfk9b5jsq9 --body '{\"id\": 7}'",),
    )  # fmt: skip
    edit.add_argument("queue", help="the queue")
    edit.add_argument("id", help="its id")
    edit.add_argument("--body", metavar="JSON", help="the new body")
    edit.add_argument("--text", metavar="TEXT", help="the new body, as text")
    edit.add_argument("--header", action="append", metavar="NAME=VALUE", help="a header; it replaces all old ones")


def run_list(options: argparse.Namespace) -> int:
    """List dead letters and return the exit code."""
    filters: Any = dead_filters(options)
    with open_client(options) as post:
        queues = post.queues() if options.queue is None else [options.queue]
        letters = (
            letter for queue in queues for letter in post.dead_letters(queue, id=options.id, key=options.key, **filters)
        )
        if options.by_reason:
            counted = Counter((letter.reason, letter.error_type) for letter in letters)
            return print_reasons(options, counted)
        found = list(islice(letters, options.n))
        kept = sum(one.ledger.dead_kept for one in post.stats_many(queues))
    if options.json:
        write_json([message_json(letter) for letter in found])
        return 0
    if not found:
        write("no dead letters" + (" like that" if kept else ""))
        return 0
    rows = [
        (letter.queue, letter.id, str(format_time(letter.ended_at))[:19], letter.reason, letter.deliveries,
         ": ".join(filter(None, (letter.error_type, letter.error))))
        for letter in found
    ]  # fmt: skip
    head = ("queue", "id", "died (UTC)", "reason", "del", "error")
    first = 0 if options.queue is None else 1  # the queue is a column where there may be several
    flexible = [at - first for at in (0, 3, 5) if at >= first]
    for line in format_table(head[first:], [row[first:] for row in rows], flexible=flexible):
        write(line)
    if kept > len(found):
        write(f"{len(found):,} of {format_count(kept, 'dead letter')}")
    return 0


def print_reasons(options: argparse.Namespace, counted: Counter[tuple[str | None, str | None]]) -> int:
    """Print the number of dead letters by reason and error, and return the exit code."""
    if options.json:
        write_json([
            {"reason": reason, "error_type": kind, "count": number}
            for (reason, kind), number in counted.most_common()
        ])  # fmt: skip
    elif not counted:
        write("no dead letters")
    else:
        rows = [(number, reason, kind) for (reason, kind), number in counted.most_common()]
        for line in format_table(("count", "reason", "error"), rows, flexible=(2,)):
            write(line)
    return 0


def run_peek(options: argparse.Namespace) -> int:
    """Show one dead letter and return the exit code."""
    with open_client(options) as post:
        found = list(post.dead_letters(options.queue, id=options.id))
    if not found:
        raise CommandError(f"{options.queue} has no dead letter {options.id}", FOUND)
    if options.json:
        write_json(message_json(found[0]))
    else:
        print_message(found[0])
    return 0


def run_redrive(options: argparse.Namespace) -> int:
    """Make dead letters ready again and return the exit code."""
    if not options.id and options.reason is None and not options.all:
        raise CommandError("no dead letters were chosen: give ids, --reason, or --all", USAGE)
    if options.id and (options.all or options.reason is not None):
        raise CommandError("give ids, or --reason, or --all, not several of them", USAGE)
    progress = Progress(f"redriving {options.queue}", len(options.id) or None, quiet=options.json)

    def note(event: Observed) -> None:
        if event.event == "redriven":
            progress.advance()

    with open_client(options, on_event=note) as post:
        if options.all:
            progress.total = post.ledger(options.queue).dead_kept
        chosen = {"ids": options.id or None, "reason": options.reason, "limit": options.limit, "rate": options.rate}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        python = format_call("redrive", options.queue, **given)
        with progress, logged_action(options, post, "redrive", options.queue, python) as entry:
            done = post.redrive(options.queue, **given)
            missing = len(set(options.id)) - len(done.moved) - len(done.duplicates) if options.id else 0
            entry.text = describe_redrive(options.queue, done, missing)
            entry.undo = ActionUndo.of("redrive", changed=bool(done.moved))
    if options.json:
        write_json({"queue": options.queue, "moved": done.moved, "duplicates": done.duplicates, "more": done.more})
    else:
        write(entry.text)
    return FOUND if done.duplicates or missing > 0 else 0


def describe_redrive(queue: str, done: Redriven, missing: int) -> str:
    """Return what a redrive did in a sentence."""
    parts = [f"{format_count(len(done.moved), 'dead letter')} of {queue} made ready again"]
    parts += [f"{len(done.duplicates):,} stay dead because their keys are in use"] if done.duplicates else []
    parts += [f"{missing:,} not found"] if missing > 0 else []
    parts += ["more are left"] if done.more else []
    return "; ".join(parts)


def run_purge(options: argparse.Namespace) -> int:
    """Remove dead letters and return the exit code."""
    filters = dead_filters(options)
    with open_client(options) as post:
        count = post.ledger(options.queue).dead_kept
        if count:
            which = (
                f"those that fit of {format_count(count, 'dead letter')}"
                if filters
                else format_count(count, "dead letter")
            )
            confirm(options, f"Remove {which} of {options.queue} for good?")
        python = format_call("purge", options.queue, "dead", **hide_header(filters))
        with logged_action(options, post, "purge", options.queue, python) as entry:
            removed = post.purge(options.queue, "dead", **filters)
            entry.text = f"removed {format_count(removed, 'dead letter')} of {options.queue}"
            entry.undo = ActionUndo.of("purge", changed=removed > 0)
    if options.json:
        write_json({"queue": options.queue, "removed": removed})
    else:
        write(entry.text)
    return 0


def run_edit(options: argparse.Namespace) -> int:
    """Send an edited dead letter and return the exit code."""
    if options.body is not None and options.text is not None:
        raise CommandError("give --body or --text, not both", USAGE)
    if options.body is None and options.text is None and not options.header:
        raise CommandError("nothing was edited: give --body, --text or --header; or use `waypost dead redrive`", USAGE)
    given: dict[str, Any] = {}
    if options.text is not None:
        given["body"] = options.text
    elif options.body is not None:
        try:
            given["body"] = json.loads(options.body)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"--body is no JSON: {error}", USAGE) from None
    headers = None
    if options.header:
        headers = dict(one.partition("=")[::2] for one in options.header)
    parts = {"body": Placeholder("body")} if given else {}
    parts |= {"headers": Placeholder("headers")} if headers is not None else {}
    python = format_call("replace_dead", options.queue, options.id, **parts)
    with open_client(options) as post, logged_action(options, post, "edit_dead", options.queue, python) as entry:
        published = post.replace_dead(options.queue, options.id, headers=headers, **given)
        if published is None:
            raise CommandError(f"{options.queue} has no dead letter {options.id}", FOUND)
        if published.status == "duplicate":
            entry.text = f"the letter stays dead: its key is in use by message {published.id}"
        else:
            entry.text = f"{published.id} is {published.status} in place of {options.id}"
        entry.undo = ActionUndo.of("edit_dead", changed=published.status != "duplicate")
    if options.json:
        write_json(published)
    else:
        write(entry.text)
    return FOUND if published.status == "duplicate" else 0
