"""The demo: a short story told on SQLite, and again on a real Valkey server if one can be started.

    make demo

Six orders are published, one of them twice and one for later. A handler fails on one of them until it is a dead
letter; then the handler is repaired and the dead letter sent again. At the end the ledger says where everything went,
and the history what happened to the order that died. Each step shows the seconds since the start.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waypost import Message, Waypost
from waypost.errors import MissingExtra

QUEUE = "orders"
TIMER_SECONDS = 0.5
#: A story that has not ended by then is stuck, and says so.
STORY_SECONDS_MAX = 20.0


class Teller:
    """Prints each step with its time."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"  {time.monotonic() - self.start:6.3f} s  {text}", flush=True)


def publish_orders(post: Waypost, tell: Teller) -> None:
    for number in range(1, 6):
        published = post.publish(QUEUE, {"id": number, "item": "lamp"}, key=f"order:{number}")
        tell(f"publish order {number}, key order:{number}: {published.status}")
    again = post.publish(QUEUE, {"id": 3, "item": "lamp"}, key="order:3")
    tell(f"publish order 3 once more, same key: {again.status}")
    later = post.publish(QUEUE, {"id": 6, "item": "clock"}, key="order:6", delay=TIMER_SECONDS)
    tell(f"publish order 6 for {TIMER_SECONDS} s from now: {later.status}")


def charge(message: Message[Any], tell: Teller, *, repaired: bool) -> None:
    """The handler. Order 4 has a card that the first version of it cannot read."""
    number = message.body["id"]
    if number == 4 and not repaired:
        if message.deliveries < 3:
            tell(f"order {number}: card unreadable, delivery {message.deliveries}, try again")
            message.retry(after=0.05, reason="card unreadable")
        else:
            tell(f"order {number}: card unreadable, delivery {message.deliveries}, give up")
            message.dead("rejected", error="card unreadable")
        return
    tell(f"order {number}: charged, delivery {message.deliveries}, token {message.token}")


def handle_until(post: Waypost, tell: Teller, ended: Callable[[], bool], *, repaired: bool) -> None:
    deadline = time.monotonic() + STORY_SECONDS_MAX
    while not ended():
        if time.monotonic() > deadline:
            sys.exit("the demo is stuck: the ledger says " + str(post.ledger(QUEUE)))
        with post.receive(QUEUE, wait=1) as message:
            if message is not None:
                charge(message, tell, repaired=repaired)


def tell_story(url: str, tell: Teller) -> None:
    with Waypost(url) as post:
        publish_orders(post, tell)
        handle_until(post, tell, lambda: post.ledger(QUEUE).done == 5, repaired=False)

        for letter in post.dead_letters(QUEUE):
            tell(f"dead letter: order {letter.body['id']}, {letter.reason}: {letter.error}")
            died = letter.id
        redriven = post.redrive(QUEUE, reason="rejected")
        tell(f"the handler is repaired; redrive: {len(redriven.moved)} message is ready again")
        handle_until(post, tell, lambda: post.ledger(QUEUE).done == 6, repaired=True)

        ledger = post.ledger(QUEUE)
        tell(
            f"ledger: published {ledger.published} + redriven {ledger.redriven} = "
            f"done {ledger.done} + dead {ledger.dead}; balance {ledger.balance}"
        )
        causes = ", ".join(f"{cause} {count}" for cause, count in ledger.redelivered.items() if count)
        tell(
            f"claims {ledger.claims} = first {ledger.first_claims} + again ({causes}); unexplained {ledger.unexplained}"
        )
        tell("history of the order that died:")
        for event in post.history(QUEUE, died):
            more = " ".join(part for part in (event.cause, event.reason) if part)
            tell(f"    {event.number:>3}  {event.event:<10} delivery {event.deliveries}  {more}".rstrip())
        if ledger.balance or ledger.unexplained:
            sys.exit("the ledger does not balance: this is a defect")


def main() -> None:
    """Tell the story on each store there is."""
    tell = Teller()
    with tempfile.TemporaryDirectory() as directory:
        print("SQLite, one file:")
        tell_story(f"sqlite:///{Path(directory) / 'demo.db'}", tell)
    try:
        from waypost.testing.servers import ValkeyServer

        server = ValkeyServer(appendonly=True)
    except MissingExtra as missing:
        print(f"Valkey: left out, {missing}")
        return
    with server:
        print("\nValkey, a real server that this demo started:")
        tell_story(server.url, tell)


if __name__ == "__main__":
    main()
