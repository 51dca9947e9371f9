"""The handlers of `waypost demo`, as a user would write them: a shop with orders, mails and a rollup each second."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from waypost import Constant, Message, Waypost

#: Where the store is, and whether the handler can read all cards by now.
URL_VARIABLE, REPAIRED_VARIABLE = "WAYPOST_DEMO_URL", "WAYPOST_DEMO_REPAIRED"
ORDERS, MAILS, ROLLUP = "orders", "mails", "rollup"
CARD_UNREADABLE = 13
ATTEMPTS = 3

post = Waypost(os.environ.get(URL_VARIABLE, "memory://"))


@post.handler(ORDERS, concurrency=6, retry=Constant(pause=0.3, attempts=ATTEMPTS, jitter=0))
async def charge(order: dict[str, int], message: Message[dict[str, int]]) -> None:
    """Charge the card, then send a mail a second later, in the same step that says done."""
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
    """By the clock, once for each second, however many workers there are."""


def end_with_the_teller() -> None:
    """Wait for the end of the input, which is the end of whoever started this."""
    # Not through `sys.stdin`: a thread that waits inside of it would keep the interpreter from ending.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if URL_VARIABLE in os.environ:
    threading.Thread(target=end_with_the_teller, name="end-with-the-teller", daemon=True).start()
