"""`waypost journal`: the events of a queue, the last ones or from a number on, and those to come."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from waypost.cli.looking import tell_events, told
from waypost.cli.options import add_command, count_from, open_post
from waypost.cli.output import cut, event_json, time_of, width, write, write_json
from waypost.client import Waypost
from waypost.policy import PAGE_MAX
from waypost.values import Event

#: How often it looks for more.
LOOK_SECONDS = 1.0


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "journal", run, "show the events of a queue, and follow them",
        examples=("waypost journal orders", "waypost journal orders --follow --event dead",
                  "waypost journal orders --after 1000 -n 500 --json"),
        json_text="one JSON document a line",
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument(
        "-n", type=count_from(0, 1_000_000), default=20, metavar="N", help="so many, the last ones (20)"
    )
    parser.add_argument("--after", type=count_from(0, 2**53), metavar="NUMBER", help="those after this number instead")
    parser.add_argument("--follow", action="store_true", help="go on with what happens next, until Ctrl-C")
    parser.add_argument(
        "--event", action="append", metavar="NAME", help="only these: claimed, dead, …; may be repeated"
    )
    parser.add_argument("--limit", type=count_from(1, 2**40), metavar="N", help="with --follow: end after so many")


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    with open_post(options) as post:
        newest = post.journal(options.queue, limit=1).newest
        after = max(0, newest - options.n) if options.after is None else options.after
        end = newest if options.after is None else min(newest, after + options.n)
        events = (
            one for one in until(post, options.queue, after, end) if not options.event or one.event in options.event
        )
        shown = tell(options, events)
        if options.follow:
            follow(post, options, end, shown)
    return 0


def until(post: Waypost, queue: str, after: int, end: int) -> Iterator[Event]:
    """The events behind one number up to another."""
    while after < end:
        page = post.journal(queue, after, min(PAGE_MAX, end - after))
        if not page.events:
            return
        yield from page.events
        after = page.last


def tell(options: argparse.Namespace, events: Iterable[Event]) -> int:
    """Events as a table, or one JSON document each, as they come; how many they were."""
    if options.json:
        shown = 0
        for shown, event in enumerate(events, 1):  # noqa: B007
            write_json(event_json(event))
        return shown
    found = list(events)
    if found:
        tell_events(found, with_id=True)
    elif not options.follow:
        write("no events")
    return len(found)


def follow(post: Waypost, options: argparse.Namespace, after: int, shown: int) -> None:
    """Go on with what happens, a line at once for each event."""
    limit = options.limit or 2**60
    while True:
        page = post.journal(options.queue, after)
        for event in page.events:
            if shown >= limit:
                return
            if options.event and event.event not in options.event:
                continue
            shown += 1
            if options.json:
                write_json(event_json(event))
            else:
                at = str(time_of(event.at_ms))[:23]
                line = f"{event.number}  {at}  {event.event}  {event.message_id or '–'}  {told(event)}"
                write(cut(line, width()))
        sys.stdout.flush()
        after = page.last
        if shown >= limit:
            return
        if not page.events:
            time.sleep(LOOK_SECONDS)
