"""`waypost queues`, `stats`, `peek`, `history` and `ledger`: looking at a store without changing anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from waypost.cli.ending import FOUND
from waypost.cli.options import add_command, count_from, open_post
from waypost.cli.output import (
    body_text,
    coloured,
    event_json,
    facts,
    message_json,
    say,
    table,
    time_of,
    write,
    write_json,
)
from waypost.client import Waypost
from waypost.formatting import format_age, format_count
from waypost.message import StoredMessage
from waypost.policy import MINUTES_KEPT
from waypost.values import REDELIVERY_CAUSES, Event, Ledger, MessageState, Stats

STATES: tuple[MessageState, ...] = ("ready", "delayed", "waiting", "leased", "dead", "done")


def add(commands: Any) -> None:
    """The arguments of these commands."""
    queues = add_command(
        commands, "queues", run_queues, "list the queues", positional_url=True,
        examples=("waypost queues", "waypost queues --names"),
    )  # fmt: skip
    queues.add_argument("--names", action="store_true", help="their names only, which costs one call")
    stats = add_command(
        commands, "stats", run_stats, "show a queue at a glance, or all of them",
        examples=("waypost stats", "waypost stats orders --minutes 10", "waypost stats orders --json"),
    )  # fmt: skip
    stats.add_argument("queue", nargs="*", help="these queues; all of them if none is named")
    stats.add_argument("--minutes", type=count_from(0, MINUTES_KEPT), default=0, metavar="N",
                       help="with counters of the last so many minutes")  # fmt: skip
    peek = add_command(
        commands, "peek", run_peek, "look at messages without touching them",
        examples=("waypost peek orders", "waypost peek orders --state dead -n 3 --json",
                  "waypost peek orders --id 1m7fra5gs06ap4cfk9b5jsq9"),
    )  # fmt: skip
    peek.add_argument("queue", help="the queue")
    add_choice(peek)
    peek.add_argument("--state", choices=STATES, help="messages of this state (ready; with --id, any)")
    history = add_command(
        commands, "history", run_history, "tell all that happened to one message",
        more="As far back as the journal of its queue goes.",
        examples=("waypost history orders 1m7fra5gs06ap4cfk9b5jsq9",),
    )  # fmt: skip
    history.add_argument("queue", help="the queue")
    history.add_argument("id", help="the id of the message")
    ledger = add_command(
        commands, "ledger", run_ledger, "show where every message of a queue went",
        more="Exit code 1: a ledger does not balance, which is a defect.", examples=("waypost ledger orders",),
    )  # fmt: skip
    ledger.add_argument("queue", nargs="*", help="these queues; all of them if none is named")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Which messages of a listing."""
    parser.add_argument("-n", type=count_from(1, 1_000_000), default=10, metavar="N", help="so many at most (10)")
    parser.add_argument("--id", help="the one with this id")
    parser.add_argument("--key", help="those with this key")
    parser.add_argument("--group", help="those of this group")


def chosen_stats(post: Waypost, queues: Sequence[str], minutes: int = 0) -> list[Stats]:
    """The stats of some queues, or of all."""
    return [post.stats(queue, minutes) for queue in (queues or post.queues())]


# ---- queues and stats -----------------------------------------------------------------------------------------


def run_queues(options: argparse.Namespace) -> int:
    """List the queues; the exit code."""
    with open_post(options) as post:
        names = post.queues()
        found = [] if options.names else chosen_stats(post, names) if names else []
    if options.names:
        if options.json:
            write_json(names)
        for name in () if options.json else names:
            write(name)
        return 0
    if options.json:
        write_json([glance(stats) for stats in found])
        return 0
    tell_queues(found)
    return 0


def glance(stats: Stats) -> dict[str, Any]:
    """What a line of a list says of a queue."""
    ledger = stats.ledger
    return {
        "queue": stats.queue, "paused": stats.paused, "ready": ledger.ready, "delayed": ledger.delayed,
        "waiting": ledger.waiting, "leased": ledger.leased, "dead": ledger.dead_kept, "done": ledger.done,
        "oldest_ready_ms": stats.oldest_ready_ms,
    }  # fmt: skip


def tell_queues(found: Sequence[Stats]) -> None:
    """A table with a line for each queue."""
    if not found:
        write("no queues")
        return
    headers = ("queue", "ready", "delayed", "waiting", "leased", "dead", "done", "oldest", "")
    rows = [
        (stats.queue, one.ready, one.delayed, one.waiting, one.leased, one.dead_kept, one.done,
         format_age(stats.oldest_ready_ms), "paused" if stats.paused else "")
        for stats in found for one in [stats.ledger]
    ]  # fmt: skip
    for line in table(headers, rows, flexible=(0,)):
        write(line)


def run_stats(options: argparse.Namespace) -> int:
    """Show stats; the exit code."""
    with open_post(options) as post:
        found = chosen_stats(post, options.queue, options.minutes)
    if options.json:
        write_json([stats_json(stats) for stats in found])
    elif len(options.queue) == 1:
        tell_stats(found[0])
    else:
        tell_queues(found)
        for stats in found:
            tell_minutes(stats)
    return 0


def stats_json(stats: Stats) -> dict[str, Any]:
    """All that a store says of a queue."""
    shown: dict[str, Any] = msgspec.to_builtins(stats)
    shown["ledger"] |= {"balance": stats.ledger.balance, "unexplained": stats.ledger.unexplained}
    return shown | {"at": time_of(stats.at_ms)}


def tell_stats(stats: Stats) -> None:
    """One queue in full."""
    ledger = stats.ledger
    readers = ", ".join(f"{name} {stats.journal_last - at:,} behind" for name, at in stats.journal_readers.items())
    pairs: list[tuple[str, object]] = [
        ("queue", stats.queue + (coloured("  paused", "yellow") if stats.paused else "")),
        ("ready", f"{ledger.ready:,}, the oldest for {format_age(stats.oldest_ready_ms)}"),
        ("delayed", f"{ledger.delayed:,}, the next in {format_age(stats.next_due_ms)}"),
        ("waiting", f"{ledger.waiting:,}"),
        ("leased", f"{ledger.leased:,}, the longest for {format_age(stats.oldest_leased_ms)}"),
        ("dead", f"{ledger.dead_kept:,}"),
        ("done", f"{ledger.done:,}"),
        ("published", f"{ledger.published:,}, {ledger.duplicates:,} duplicates"),
        ("redelivered", told_causes(ledger)),
        *([("past max_pending", f"{ledger.over_cap:,}, sent on or redriven")] if ledger.over_cap else []),
        ("sleepers", stats.sleepers),
        ("journal", f"{stats.journal_first:,} to {stats.journal_last:,}{'; ' if readers else ''}{readers}"),
    ]
    for line in facts(pairs):
        write(line)
    tell_minutes(stats)


def told_causes(ledger: Ledger) -> str:
    """Redeliveries by what caused them."""
    causes = [f"{ledger.redelivered[name]:,} {name}" for name in REDELIVERY_CAUSES if ledger.redelivered.get(name)]
    return ", ".join(causes) or "none"


def tell_minutes(stats: Stats) -> None:
    """The counters of minutes, if there are any."""
    if not stats.minutes:
        return
    names = list(stats.minutes[0].counts)
    rows = [
        (str(time_of(minute.at_ms))[11:16], *(minute.counts.get(name, 0) for name in names)) for minute in stats.minutes
    ]
    write("")
    for line in table(("minute", *names), rows):
        write(line)


# ---- messages -------------------------------------------------------------------------------------------------


def run_peek(options: argparse.Namespace) -> int:
    """Look at messages; the exit code."""
    with open_post(options) as post:
        states: Sequence[MessageState] = [options.state] if options.state else (STATES if options.id else STATES[:1])
        found: list[StoredMessage[Any]] = []
        for state in states:
            listing = post.messages(options.queue, state, id=options.id, key=options.key, group=options.group)
            found += islice(listing, options.n - len(found))
    return tell_messages(options, found)


def tell_messages(options: argparse.Namespace, found: Sequence[StoredMessage[Any]]) -> int:
    """A list of messages; one that was asked for by its id in full, and 1 if it is not there."""
    if options.json:
        write_json([message_json(message) for message in found])
    elif options.id and found:
        tell_message(found[0])
    elif found:
        rows = [
            (one.id, one.priority, one.deliveries, one.key, time_of(one.stored.ready_ms), body_text(one))
            for one in found
        ]  # fmt: skip
        for line in table(("id", "pri", "del", "key", "ready at", "body"), rows, flexible=(3, 5)):
            write(line)
    else:
        write("no messages")
    return FOUND if options.id and not found else 0


def tell_message(message: StoredMessage[Any]) -> None:
    """One message in full."""
    shown = message_json(message)
    body = shown.pop("body")
    for line in facts((name, value) for name, value in shown.items() if value not in (None, {}, False)):
        write(line)
    write("")
    write_json(body, indent=2)


# ---- history --------------------------------------------------------------------------------------------------


def run_history(options: argparse.Namespace) -> int:
    """Tell what happened to a message; the exit code."""
    with open_post(options) as post:
        events = post.history(options.queue, options.id)
    if options.json:
        write_json([event_json(event) for event in events])
    elif events:
        tell_events(events)
    else:
        say("waypost: the journal of this queue tells nothing of such a message")
    return 0 if events else FOUND


def tell_events(events: Sequence[Event], *, with_id: bool = False) -> None:
    """Events, one a line."""
    rows = [
        (
            event.number,
            str(time_of(event.at_ms))[:23],
            event.event,
            *([event.message_id] if with_id else []),
            told(event),
        )
        for event in events
    ]
    headers = ("number", "at (UTC)", "event", *(["message"] if with_id else []), "more")
    for line in table(headers, rows, flexible=(len(headers) - 1,)):
        write(line)


def told(event: Event) -> str:
    """What is to be said of an event besides its name."""
    parts = [f"delivery {event.deliveries}"] if event.event == "claimed" and event.deliveries else []
    parts += [event.cause] if event.cause else []
    parts += [event.reason] if event.reason else []
    parts += [event.error_type] if event.error_type else []
    parts += [f"waited {format_age(event.wait_ms)}"] if event.wait_ms is not None else []
    parts += [f"ran {format_age(event.run_ms)}"] if event.run_ms is not None else []
    parts += [f"due {time_of(event.due_ms)}"] if event.due_ms is not None else []
    parts += [f"by {event.worker}"] if event.worker else []
    return ", ".join(parts)


# ---- the ledger -----------------------------------------------------------------------------------------------


def run_ledger(options: argparse.Namespace) -> int:
    """Show ledgers; the exit code."""
    with open_post(options) as post:
        found = chosen_stats(post, options.queue)
    ledgers = {stats.queue: stats.ledger for stats in found}
    if options.json:
        write_json({
            queue: msgspec.to_builtins(one) | {"balance": one.balance, "unexplained": one.unexplained}
            for queue, one in ledgers.items()
        })  # fmt: skip
    else:
        for number, (queue, ledger) in enumerate(ledgers.items()):
            tell_ledger(queue, ledger, first=number == 0)
        if not ledgers:
            write("no queues")
    wrong = [queue for queue, one in ledgers.items() if one.balance or one.unexplained]
    if wrong:
        ledgers_wrong = format_count(len(wrong), "ledger")
        say(f"waypost: {ledgers_wrong} not in balance: {', '.join(wrong)}; that is a defect, report it")
    return FOUND if wrong else 0


def tell_ledger(queue: str, ledger: Ledger, *, first: bool) -> None:
    """One ledger as the sum that it is."""
    if not first:
        write("")
    write(coloured(queue, "bold"))
    came = [("published", ledger.published), ("redriven", ledger.redriven)]
    went = [(name, getattr(ledger, name)) for name in (
        "ready", "delayed", "waiting", "leased", "done", "dead", "dropped", "cancelled", "replaced",
    )]  # fmt: skip
    size = max(len(f"{number:,}") for _, number in [*came, *went])
    for sign, pairs in (("+", came), ("-", went)):
        for name, number in pairs:
            write(f"  {sign} {name:10} {number:>{size},}")
    write(f"  = {'balance':10} {ledger.balance:>{size},}")
    write(f"  claims {ledger.claims:,}, first {ledger.first_claims:,}, redelivered: {told_causes(ledger)}; "
          f"unexplained {ledger.unexplained}")  # fmt: skip
