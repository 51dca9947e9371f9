"""A worker whose handlers write one row each, in the transaction that settles or beside an inbox; killed at will.

    python -m tests.outbox.killed_worker KIND STORE_URL NAMESPACE DATABASE_URL

KIND is `settle` (the store's own transaction) or `inbox` (any store, the user's database beside it). For each line that
it reads it forks a worker, prints its process id, and waits for its end: all is imported then, nothing connected yet.
"""

from __future__ import annotations

import asyncio
import os
import sys

from psycopg_pool import AsyncConnectionPool

from waypost import AsyncWaypost, Message
from waypost.outbox import AsyncInbox

SALE = "INSERT INTO effect (n) VALUES (%s)"


async def main(kind: str, url: str, namespace: str, database: str) -> None:
    post = AsyncWaypost(url, namespace=namespace)
    inbox = AsyncInbox()
    async with AsyncConnectionPool(database, min_size=1, max_size=4, open=False) as pool:

        async def settled(body: int, message: Message[int]) -> None:
            async with message.transaction() as connection:
                await connection.execute(SALE, (body,))

        async def recorded(body: int, message: Message[int]) -> None:
            async with pool.connection() as connection:
                if await inbox.first(message, connection):
                    await connection.execute(SALE, (body,))

        post.handler("sales", concurrency=4)(settled if kind == "settle" else recorded)
        async with post:
            await post.worker().run(signals=False)


def fork_workers() -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(main(*sys.argv[1:5]))
            finally:
                os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    fork_workers()
