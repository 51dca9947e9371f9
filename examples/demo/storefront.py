"""A small shop that takes orders: each is a row of its own table and a message, in one transaction of PostgreSQL."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict, dataclass, replace

import psycopg

from examples.demo.shop import ORDERS, SHOP, Order
from waypost import Waypost

TABLES = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL, at bigint NOT NULL);
CREATE TABLE takings (at timestamptz DEFAULT now(), orders bigint NOT NULL, amount bigint NOT NULL)
"""
#: Numbers of the shop's orders begin behind those that are imported.
FIRST_NUMBER = 10_000_001
#: Every so manieth customer changes their mind before the commit, or clicks twice.
ROLLED_BACK_EVERY, TWICE_EVERY = 10, 25
#: The order with a card that nobody can read, and the one that an old program sends in a form of its own.
UNREADABLE, MALFORMED = 13, 17
KEY_SECONDS = 3600
PAUSE_SECONDS = 0.03


@dataclass(slots=True)
class Taken:
    """What became of the customers."""

    committed: int = 0
    rolled_back: int = 0
    duplicates: int = 0
    amount: int = 0


class Storefront(threading.Thread):
    """Takes orders until it is told to close."""

    def __init__(self, url: str) -> None:
        super().__init__(name="storefront", daemon=True)
        self.url = url
        self.taken = Taken()
        self.error: Exception | None = None
        self._closed = threading.Event()
        self._chance = random.Random(7)

    def run(self) -> None:
        """Open, take orders, close."""
        try:
            with Waypost(self.url) as post, psycopg.connect(self.url) as connection:
                number = 0
                while not self._closed.wait(PAUSE_SECONDS):
                    number += 1
                    self.take(number, post, connection)
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Take no more orders, whatever came of them."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def close(self) -> Taken:
        """Take no more; what came of it."""
        self.stop()
        if self.error is not None:
            raise self.error
        return self.taken

    def take(self, number: int, post: Waypost, connection: psycopg.Connection) -> None:
        """One customer. The message exists if and only if the transaction commits."""
        order = Order(
            id=FIRST_NUMBER + number, customer=f"customer-{number % 97}", amount=self._chance.randint(500, 9_000),
            at=time.time_ns() // 1_000_000, source=SHOP,
        )  # fmt: skip
        if number == UNREADABLE:
            order = replace(order, card="unreadable")
        with connection.transaction(force_rollback=number % ROLLED_BACK_EVERY == 0):
            self.write(order, post, connection, malformed=number == MALFORMED)
        if number % ROLLED_BACK_EVERY == 0:
            self.taken.rolled_back += 1
            return
        self.taken.committed += 1
        self.taken.amount += order.amount
        if number % TWICE_EVERY == 0 or number == 5:
            with connection.transaction():
                self.taken.duplicates += self.write(order, post, connection) == "duplicate"

    def write(self, order: Order, post: Waypost, connection: psycopg.Connection, *, malformed: bool = False) -> str:
        """The row and the message."""
        connection.execute(
            "INSERT INTO orders (id, customer, amount, at) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (order.id, order.customer, order.amount, order.at),
        )
        body = asdict(order) | ({"amount": "a lot"} if malformed else {})
        published = post.publish(ORDERS, body, key=f"order:{order.id}", window=KEY_SECONDS, transaction=connection)
        return published.status
