"""The part of the shop that takes orders: each is a row of a table and a message, in one transaction of PostgreSQL.

`waypost worker examples.demo.storefront:outbox` forwards the messages to the shop's store.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass

import psycopg

from waypost import Waypost
from waypost.cli.demo.shop import ORDERS, STORE_VARIABLE, Order, make_order

#: The environment variable with the URL of PostgreSQL.
OUTBOX_VARIABLE = "WAYPOST_DEMO_OUTBOX"
TABLE = "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount bigint, at bigint)"
#: The numbers of the shop's orders start after those of imported orders.
FIRST_NUMBER = 10_000_001
#: Every tenth customer cancels before the commit, every twenty-fifth clicks twice.
ROLLED_BACK_EVERY, TWICE_EVERY = 10, 25
#: The order with an unreadable card, and the order in an old format.
UNREADABLE, MALFORMED = 13, 17
KEY_SECONDS = 3600
PAUSE_SECONDS = 0.03

outbox = Waypost(os.environ.get(OUTBOX_VARIABLE, "memory://outbox"))
# The relay forwards what committed transactions published, each message once.
outbox.relay(ORDERS, to=os.environ.get(STORE_VARIABLE, "memory://shop"))


@dataclass(slots=True)
class OrderCounts:
    """How many orders were committed, rolled back, and duplicates."""

    committed: int = 0
    rolled_back: int = 0
    duplicates: int = 0
    amount: int = 0


class Storefront(threading.Thread):
    """Takes orders until it is closed."""

    def __init__(self, url: str) -> None:
        super().__init__(name="storefront", daemon=True)
        self.url = url
        self.counts = OrderCounts()
        self.error: Exception | None = None
        self._closed = threading.Event()

    def run(self) -> None:
        """Take orders until it is closed."""
        try:
            with Waypost(self.url) as post, psycopg.connect(self.url) as connection:
                number = 0
                while not self._closed.wait(PAUSE_SECONDS):
                    number += 1
                    self.take_order(number, post, connection)
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Stop taking orders, also after an error."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def close(self) -> OrderCounts:
        """Stop taking orders and return the counts; raise the error if there was one."""
        self.stop()
        if self.error is not None:
            raise self.error
        return self.counts

    def take_order(self, number: int, post: Waypost, connection: psycopg.Connection) -> None:
        """Take one order. The message exists if and only if the transaction commits."""
        order = make_order(FIRST_NUMBER + number, card="unreadable" if number == UNREADABLE else "good")
        with connection.transaction(force_rollback=number % ROLLED_BACK_EVERY == 0):
            self.write(order, post, connection, malformed=number == MALFORMED)
        if number % ROLLED_BACK_EVERY == 0:
            self.counts.rolled_back += 1
            return
        self.counts.committed += 1
        self.counts.amount += order.amount
        if number % TWICE_EVERY == 0 or number == 5:
            with connection.transaction():
                self.counts.duplicates += self.write(order, post, connection) == "duplicate"

    def write(self, order: Order, post: Waypost, connection: psycopg.Connection, *, malformed: bool = False) -> str:
        """Write the row and publish the message; return the status of the publish."""
        connection.execute(
            "INSERT INTO orders (id, customer, amount, at) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (order.id, order.customer, order.amount, order.at),
        )
        body = asdict(order) | ({"amount": "a lot"} if malformed else {})
        published = post.publish(ORDERS, body, key=f"order:{order.id}", window=KEY_SECONDS, transaction=connection)
        return published.status
