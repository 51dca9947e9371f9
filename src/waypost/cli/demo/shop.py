"""The shop of `waypost demo` and `make demo`: handlers as a user writes them, run by `waypost worker …:post`."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

from waypost import Constant, Message, Queue, Waypost
from waypost.cli.demo.runner import WORKER_VARIABLE, end_with_parent

#: Environment variables: the URL of the store, how many orders a worker handles at once, and whether the handler can
#: read every card.
STORE_VARIABLE, CONCURRENCY_VARIABLE = "WAYPOST_DEMO_STORE", "WAYPOST_DEMO_CONCURRENCY"
REPAIRED_VARIABLE = "WAYPOST_DEMO_REPAIRED"
ORDERS, MAILS, ROLLUP = "orders", "mails", "rollup"
#: The source of orders that the shop itself takes; other orders are imported.
SHOP = "shop"
ATTEMPTS = 3
BANK_SECONDS = 0.12
MAIL_SECONDS = 1
ROLLUP_SECONDS = 1


@dataclass
class Order:
    """An order. The amount is in cents; `at` is when the customer ordered, in milliseconds since 1970."""

    id: int
    customer: str
    amount: int
    at: int
    source: str = SHOP
    card: str = "good"


def make_order(number: int, *, card: str = "good") -> Order:
    """Return an order of the shop, placed now."""
    return Order(number, f"customer-{number % 97}", 500 + number * 7919 % 8_500, time.time_ns() // 1_000_000, card=card)


post = Waypost(os.environ.get(STORE_VARIABLE, "memory://"))


@post.handler(
    Queue(ORDERS, Order),
    concurrency=int(os.environ.get(CONCURRENCY_VARIABLE, "6")),
    retry=Constant(pause=0.3, attempts=ATTEMPTS, jitter=0),
)
async def charge(order: Order, message: Message[Order]) -> None:
    """Charge the card. The same step that settles an order of the shop publishes a mail for a second later."""
    if order.id % 200 == 99 and message.attempts == 0:
        raise ConnectionError("the bank does not answer")
    # Of the imported orders, which are very many, only some take long and send a mail.
    is_slow = order.source == SHOP or order.id % 100 == 0
    if is_slow:
        await asyncio.sleep(BANK_SECONDS)
    if order.card != "good" and REPAIRED_VARIABLE not in os.environ:
        raise ValueError("card unreadable")
    if is_slow:
        message.then(MAILS, {"order": order.id, "to": order.customer}, delay=MAIL_SECONDS)


@post.handler(MAILS, concurrency=100)
async def send(mail: dict[str, object]) -> None:
    """Send the mail."""


@post.every(ROLLUP_SECONDS)
async def rollup() -> None:
    """Run once each second, however many workers there are."""


# Only in workers: the demos import this module too, and read their input themselves.
if WORKER_VARIABLE in os.environ:
    end_with_parent()
