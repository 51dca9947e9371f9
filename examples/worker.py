"""Handlers and a worker: typed bodies, retries, outcomes, a message sent on, batches. Ends when nothing is left."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from waypost import Constant, Dead, Message, Queue, Waypost


@dataclass
class Order:
    """What is published into `orders`."""

    id: int
    amount: int


post = Waypost("sqlite:///shop.db")
orders = Queue("orders", Order)


@post.handler(orders, retry=Constant(pause=0.05, jitter=0))
async def charge(order: Order, message: Message[Order]) -> Any:
    if order.amount < 0:
        return Dead("negative amount")
    if message.attempts == 0 and order.id == 2:
        raise ConnectionError("the payment service is away")
    message.then("mails", f"order {order.id} is charged")
    return None


@post.handler("mails", batch=10)
def send(mails: list[str]) -> None:
    for mail in mails:
        print(f"mail: {mail}")


def main() -> None:
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a handler that fails is logged with its traceback
    with post:
        post.publish_many(orders, [Order(1, 10), Order(2, 20), Order(3, -5)])
        with post.worker():  # in the background; `waypost worker worker:post` does the same in a process of its own
            while post.ledger("mails").done < 2:
                time.sleep(0.01)
        for letter in post.dead_letters(orders):
            print(f"dead: order {letter.body.id}, {letter.reason}")
        ledger = post.ledger(orders)
        print(f"{ledger.done} done, {ledger.retried} retried, {ledger.dead} dead, balance {ledger.balance}")


if __name__ == "__main__":
    main()
