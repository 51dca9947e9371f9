"""The handlers of the demo, run by `waypost worker examples.demo.shop:post` and, for the outbox, `…:outbox`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass

from waypost import Constant, Message, Queue, Waypost

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
# What the shop's transactions have published goes on to Valkey, each message once.
outbox.relay(ORDERS, to=VALKEY)


@post.handler(Queue(ORDERS, Order), concurrency=100, retry=Constant(pause=0.5, attempts=ATTEMPTS))
async def pay(order: Order, message: Message[Order]) -> None:
    """Take the money, and send a mail some seconds later, in the same step that says done."""
    if order.id % 20 == 0:
        await asyncio.sleep(0.02)  # the bank takes its time
    if order.id % 200 == 13 and message.attempts == 0:
        raise ConnectionError("the bank is away")
    if order.card != "good":
        raise ValueError("card unreadable")
    if order.source == SHOP or order.id % 100 == 0:
        message.then(MAILS, {"order": order.id, "to": order.customer}, delay=MAIL_SECONDS)


@post.handler(MAILS, concurrency=100)
async def send(mail: dict[str, object]) -> None:
    """Send the mail."""


@post.every(ROLLUP_SECONDS)
def rollup() -> None:
    """By the clock: what the shop has taken so far, into a table of its own."""
    import psycopg

    with psycopg.connect(POSTGRES) as connection:
        connection.execute("INSERT INTO takings (orders, amount) SELECT count(*), coalesce(sum(amount), 0) FROM orders")


def end_with_the_teller() -> None:
    """Wait for the end of the input, which is the end of whoever started this."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# Only in workers: others import this module too, and read their input themselves.
if WORKER_VARIABLE in os.environ:
    threading.Thread(target=end_with_the_teller, name="end-with-the-teller", daemon=True).start()
