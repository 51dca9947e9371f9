"""The handlers of `waypost demo`, as a user would write them: a shop with orders, mails and a rollup each second."""

from __future__ import annotations

import asyncio
import os

from waypost import Constant, Message, Waypost
from waypost.cli.demo.runner import end_with_parent

#: The URL of the store, and whether the handler can read all cards by now.
URL_VARIABLE, REPAIRED_VARIABLE = "WAYPOST_DEMO_URL", "WAYPOST_DEMO_REPAIRED"
ORDERS, MAILS, ROLLUP = "orders", "mails", "rollup"
CARD_UNREADABLE = 13
ATTEMPTS = 3

post = Waypost(os.environ.get(URL_VARIABLE, "memory://"))


@post.handler(ORDERS, concurrency=6, retry=Constant(pause=0.3, attempts=ATTEMPTS, jitter=0))
async def charge(order: dict[str, int], message: Message[dict[str, int]]) -> None:
    """Charge the card, and send a mail a second later, in the same step that settles the order."""
    await asyncio.sleep(0.12)
    if order["id"] == CARD_UNREADABLE and REPAIRED_VARIABLE not in os.environ:
        raise ValueError("card unreadable")
    message.then(MAILS, {"order": order["id"]}, delay=1)


@post.handler(MAILS, concurrency=50)
async def send(mail: dict[str, int]) -> None:
    """Send the mail."""
    await asyncio.sleep(0.001)


@post.every(1)
async def rollup() -> None:
    """Run once each second, however many workers there are."""


if URL_VARIABLE in os.environ:
    end_with_parent()
