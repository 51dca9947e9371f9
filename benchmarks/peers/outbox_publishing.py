"""Publishing in transactions of SQLAlchemy's AsyncSession with asyncpg: the same program for waypost and its peer.

    python -m benchmarks.peers.outbox_publishing waypost|faststream-outbox URL COUNT SIZE

COUNT messages, SIZE in each transaction, beside a row in a table of the user's. Prints how many seconds it took,
and how many of a processor.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

BODY = {"number": 1, "customer": "c-0042", "items": ["a", "b"], "total": 1999}
SALE = text("INSERT INTO shop (n) VALUES (1)")
WARM = 50


async def main(kind: str, url: str, count: int, size: int) -> None:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=2)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS shop (n bigint)"))
    publish: Any
    if kind == "waypost":
        from waypost import AsyncWaypost

        post = AsyncWaypost(url)

        async def publish(session: AsyncSession) -> None:
            if size == 1:
                await post.publish("bench", BODY, transaction=session)
            else:
                await post.publish_many("bench", [BODY] * size, transaction=session)
    else:
        from faststream_outbox import OutboxBroker, make_outbox_table

        metadata = MetaData()
        broker = OutboxBroker(engine, outbox_table=make_outbox_table(metadata, table_name="outbox"), logger=None)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await broker.connect()

        async def publish(session: AsyncSession) -> None:
            if size == 1:
                await broker.publish(BODY, queue="bench", session=session)
            else:
                await broker.publish_batch(*[BODY] * size, queue="bench", session=session)

    async def transactions(number: int) -> None:
        for _ in range(number):
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(SALE)
                await publish(session)

    await transactions(WARM if size == 1 else 2)
    began, spent = time.perf_counter(), time.process_time()
    await transactions(count // size)
    print(time.perf_counter() - began, time.process_time() - spent, flush=True)
    if kind == "waypost":
        await post.close()
    else:
        await broker.stop()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
