"""`waypost dead`: list, show, redrive and remove dead letters."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from typing import Any

from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import add_command, add_message_filters, integer_between, open_client
from waypost.cli.output import format_table, format_time, message_json, print_message, write, write_json
from waypost.cli.progress import Progress
from waypost.cli.prompts import add_yes, confirm
from waypost.formatting import format_count
from waypost.views import Observed


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "dead", None, "list, show, redrive or remove dead letters", store=False, json_text=None,
        examples=("waypost dead list orders --reason retries_exhausted",
                  "waypost dead peek orders 1m7fra5gs06ap4cfk9b5jsq9",
                  "waypost dead redrive orders --all --rate 50/s", "waypost dead purge orders"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    listing = add_command(actions, "list", run_list, "list the dead letters of a queue, oldest first")
    listing.add_argument("queue", help="the queue")
    add_message_filters(listing)
    listing.add_argument("--reason", help="those with this reason")
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
        actions, "purge", run_purge, "remove all dead letters of a queue for good", more="It asks for confirmation."
    )
    purge.add_argument("queue", help="the queue")
    add_yes(purge)


def run_list(options: argparse.Namespace) -> int:
    """List dead letters and return the exit code."""
    with open_client(options) as post:
        letters = post.dead_letters(
            options.queue, reason=options.reason, id=options.id, key=options.key, group=options.group
        )
        if options.by_reason:
            counted = Counter((letter.reason, letter.error_type) for letter in letters)
            return print_reasons(options, counted)
        found = list(islice(letters, options.n))
        kept = post.ledger(options.queue).dead_kept
    if options.json:
        write_json([message_json(letter) for letter in found])
        return 0
    if not found:
        write("no dead letters" + (" like that" if kept else ""))
        return 0
    rows = [
        (letter.id, str(format_time(letter.ended_at))[:19], letter.reason, letter.deliveries,
         ": ".join(filter(None, (letter.error_type, letter.error))))
        for letter in found
    ]  # fmt: skip
    for line in format_table(("id", "died (UTC)", "reason", "del", "error"), rows, flexible=(2, 4)):
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
        with progress:
            done = post.redrive(
                options.queue, ids=options.id or None, reason=options.reason, limit=options.limit, rate=options.rate
            )
    missing = len(set(options.id)) - len(done.moved) - len(done.duplicates) if options.id else 0
    if options.json:
        write_json({"queue": options.queue, "moved": done.moved, "duplicates": done.duplicates, "more": done.more})
    else:
        parts = [f"{format_count(len(done.moved), 'dead letter')} of {options.queue} made ready again"]
        parts += [f"{len(done.duplicates):,} stay dead because their keys are in use"] if done.duplicates else []
        parts += [f"{missing:,} not found"] if missing > 0 else []
        parts += ["more are left"] if done.more else []
        write("; ".join(parts))
    return FOUND if done.duplicates or missing > 0 else 0


def run_purge(options: argparse.Namespace) -> int:
    """Remove all dead letters and return the exit code."""
    with open_client(options) as post:
        count = post.ledger(options.queue).dead_kept
        if count:
            confirm(options, f"Remove {format_count(count, 'dead letter')} of {options.queue} for good?")
        removed = post.purge(options.queue, "dead")
    if options.json:
        write_json({"queue": options.queue, "removed": removed})
    else:
        write(f"removed {format_count(removed, 'dead letter')} of {options.queue}")
    return 0
