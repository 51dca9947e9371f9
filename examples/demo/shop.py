"""The handlers of the demo, run by `waypost worker examples.demo.shop:post` and, for the outbox, `…:outbox`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from waypost import Constant, Message, Queue, Waypost
from waypost.cli.demo.runner import end_with_parent

VALKEY_VARIABLE, POSTGRES_VARIABLE, WORKER_VARIABLE = "DEMO_VALKEY", "DEMO_POSTGRES", "DEMO_WORKER"
VALKEY = os.environ.get(VALKEY_VARIABLE, "memory://demo")
POSTGRES = os.environ.get(POSTGRES_VARIABLE, "memory://outbox")
ORDERS, MAILS, ROLLUP = "orders", "mails", "rollup"
ATTEMPTS = 3
ROLLUP_SECONDS = 2
MAIL_SECONDS = 2
SHOP = "shop"


@dataclass
class Order:
    """An order. Amounts are cents; `at` is when the customer ordered, in milliseconds."""

    id: int
    customer: str
    amount: int
    at: int
    source: str
    card: str = "good"


post = Waypost(VALKEY)
outbox = Waypost(POSTGRES)
# The relay forwards what the shop's transactions publish to Valkey, each message once.
outbox.relay(ORDERS, to=VALKEY)


@post.handler(Queue(ORDERS, Order), concurrency=100, retry=Constant(pause=0.5, attempts=ATTEMPTS))
async def pay(order: Order, message: Message[Order]) -> None:
    """Charge the card, and send a mail some seconds later, in the same step that settles the order."""
    if order.id % 20 == 0:
        await asyncio.sleep(0.02)  # a slow bank
    if order.id % 200 == 13 and message.attempts == 0:
        raise ConnectionError("the bank does not answer")
    if order.card != "good":
        raise ValueError("card unreadable")
    if order.source == SHOP or order.id % 100 == 0:
        message.then(MAILS, {"order": order.id, "to": order.customer}, delay=MAIL_SECONDS)


@post.handler(MAILS, concurrency=100)
async def send(mail: dict[str, object]) -> None:
    """Send the mail."""


@post.every(ROLLUP_SECONDS)
def rollup() -> None:
    """Write the revenue of the shop so far into a table, every two seconds."""
    import psycopg

    with psycopg.connect(POSTGRES) as connection:
        connection.execute("INSERT INTO revenue (orders, amount) SELECT count(*), coalesce(sum(amount), 0) FROM orders")


# Only in workers: other processes import this module too, and read their input themselves.
if WORKER_VARIABLE in os.environ:
    end_with_parent()
