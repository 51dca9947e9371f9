"""FastStream on waypost: typed handlers, a publisher, retries, a timer, a request. Ends when nothing is left.

As a service, on any store: SHOP_URL=valkey://127.0.0.1:6379 faststream run faststream_app:app
"""

from __future__ import annotations

import asyncio
import logging
import os

from faststream import FastStream
from faststream.exceptions import RejectMessage
from pydantic import BaseModel

from waypost import Constant
from waypost.faststream import WaypostBroker
from waypost.faststream.annotations import WaypostMessage


class Order(BaseModel):
    """What is published into `orders`."""

    id: int
    amount: int


class Receipt(BaseModel):
    """What is published into `receipts`."""

    order: int
    paid: int


broker = WaypostBroker(
    os.environ.get("SHOP_URL", "sqlite:///shop.db"), namespace=os.environ.get("SHOP_NAMESPACE", "wp"), logger=None
)
app = FastStream(broker, logger=None)


@broker.subscriber("orders", concurrency=1, retry=Constant(attempts=3, pause=0.05, jitter=0))
@broker.publisher("receipts")
async def charge(order: Order, message: WaypostMessage) -> Receipt:
    if order.amount < 0:
        raise RejectMessage(reason="negative amount")
    if order.id == 2 and message.raw_message.attempts == 0:
        raise ConnectionError("the payment service is away")
    return Receipt(order=order.id, paid=order.amount)


@broker.subscriber("receipts")
async def send(receipt: Receipt) -> None:
    print(f"mail: order {receipt.order} is paid, {receipt.paid}")


@broker.subscriber("sums")
async def add(numbers: list[int]) -> int:
    return sum(numbers)


@app.after_startup
async def publish_orders() -> None:
    await broker.publish_batch(Order(id=1, amount=10), Order(id=2, amount=20), Order(id=3, amount=-5), queue="orders")
    await broker.publish(Order(id=4, amount=0), "orders", key="order:4", delay=3600)


async def ended(queue: str, count: int) -> None:
    """Wait until so many messages of a queue are done and none is ready or running."""
    ledger = await broker.client.ledger(queue)
    while ledger.done < count or ledger.ready or ledger.leased:
        await asyncio.sleep(0.01)
        ledger = await broker.client.ledger(queue)


async def main() -> None:
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a handler that fails is logged with its traceback
    await app.start()
    try:
        for queue, count in (("receipts", 2), ("orders", 2)):
            await ended(queue, count)
        print("timers:", [timer.key for timer in await broker.timers("orders")])
        print("order 4:", await broker.cancel("orders", key="order:4"))
        async for letter in broker.client.dead_letters("orders"):
            print(f"dead: order {letter.body['id']}, {letter.reason}")
        reply = await broker.request([1, 2, 3], "sums", timeout=30)
        print("sum:", await reply.decode())
    finally:
        await app.stop()


if __name__ == "__main__":
    asyncio.run(main())
