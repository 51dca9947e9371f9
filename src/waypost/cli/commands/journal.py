"""`waypost journal`: the last events of a queue, or those after a number, and new ones as they come."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from waypost.cli.options import add_command, integer_between, open_client
from waypost.cli.output import (
    INDENT,
    event_json,
    format_event,
    format_time,
    one_line,
    print_events,
    wrap_indented,
    write,
    write_json,
)
from waypost.client import Waypost
from waypost.policy import PAGE_MAX
from waypost.views import Event

#: How often `--follow` polls for new events.
POLL_SECONDS = 1.0


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "journal", run, "show the events of a queue, and follow them",
        examples=("waypost journal orders", "waypost journal orders --follow --event dead",
                  "waypost journal orders --after 1000 -n 500 --json"),
        json_text="one JSON document a line",
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument(
        "-n", type=integer_between(0, 1_000_000), default=20, metavar="N", help="the last N events (20)"
    )
    parser.add_argument(
        "--after", type=integer_between(0, 2**53), metavar="NUMBER", help="the events after this number instead"
    )
    parser.add_argument("--follow", action="store_true", help="then print new events until Ctrl-C")
    parser.add_argument(
        "--event", action="append", metavar="NAME", help="only events of this name: claimed, dead, …; may be repeated"
    )
    parser.add_argument(
        "--limit", type=integer_between(1, 2**40), metavar="N", help="with --follow: end after N events"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        newest = post.journal(options.queue, limit=1).newest
        after = max(0, newest - options.n) if options.after is None else options.after
        end = newest if options.after is None else min(newest, after + options.n)
        events = (
            one
            for one in read_events(post, options.queue, after, end)
            if not options.event or one.event in options.event
        )
        count = print_all(options, events)
        if options.follow:
            follow(post, options, end, count)
    return 0


def read_events(post: Waypost, queue: str, after: int, end: int) -> Iterator[Event]:
    """Yield the events after one number up to another."""
    while after < end:
        page = post.journal(queue, after, min(PAGE_MAX, end - after))
        if not page.events:
            return
        yield from page.events
        after = page.last


def print_all(options: argparse.Namespace, events: Iterable[Event]) -> int:
    """Print events as a table, or as JSON documents; return how many."""
    if options.json:
        count = 0
        for count, event in enumerate(events, 1):  # noqa: B007
            write_json(event_json(event))
        return count
    found = list(events)
    if found:
        print_events(found, with_id=True)
    elif not options.follow:
        write("no events")
    return len(found)


def follow(post: Waypost, options: argparse.Namespace, after: int, count: int) -> None:
    """Print new events as they come, one a line."""
    limit = options.limit or 2**60
    while True:
        page = post.journal(options.queue, after)
        for event in page.events:
            if count >= limit:
                return
            if options.event and event.event not in options.event:
                continue
            count += 1
            if options.json:
                write_json(event_json(event))
            else:
                at = str(format_time(event.at))[:23]
                more = one_line(format_event(event))
                text = f"{event.number}  {at}  {event.event}  {event.message_id or '–'}  {more}"
                for line in wrap_indented(text, INDENT):
                    write(line)
        sys.stdout.flush()
        after = page.last
        if count >= limit:
            return
        if not page.events:
            time.sleep(POLL_SECONDS)
