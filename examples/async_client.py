"""The same with asyncio: three consumers share a client, and each message sends another one on when it is done."""

import asyncio
import dataclasses

from waypost import AsyncWaypost, Queue


@dataclasses.dataclass
class Order:
    """What is ordered."""

    id: int
    amount: int


ORDERS = Queue("orders", Order)


async def consume(post: AsyncWaypost) -> int:
    """Handle orders until none has come for a moment, and return how many there were."""
    handled = 0
    while True:
        async with post.receive(ORDERS, wait=0.2) as message:
            if message is None:
                return handled
            # Decided in the same step as this message's end: the invoice exists exactly if the order is done.
            message.then("invoices", {"order": message.body.id, "total": message.body.amount * 2})
            message.keep_result({"charged": message.body.amount})
            handled += 1


async def main() -> None:
    async with AsyncWaypost("sqlite:///orders.db") as post:
        published = await post.publish_many(ORDERS, [Order(n, 10 * n) for n in range(1, 10)])
        handled = await asyncio.gather(*(consume(post) for _ in range(3)))
        print(sum(handled), "orders handled by", len(handled), "consumers")
        print("result of the first:", await post.result(ORDERS, published[0].id))
        invoices = [invoice.body["total"] async for invoice in post.messages("invoices")]
        print("invoices:", sorted(invoices))
        ledger = await post.ledger(ORDERS)
        print(f"{ledger.done} done, {ledger.transferred} sent on, balance {ledger.balance}")


asyncio.run(main())
