"""A process full of idle worker loops, for the figures of wake-ups.

    python -m tests.fault.sleeping_workers '{"url": …, "namespace": …, "wake": …, "loops": 10, …}'

Each loop is a worker of a client of its own. A handler notes when it started; the body holds the time of the publish.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from waypost import AsyncWaypost
from waypost.operations import receive


async def run_workers(given: dict[str, Any]) -> None:
    """Run the workers until the standard input ends."""
    notes = os.open(given["notes"], os.O_WRONLY | os.O_APPEND)
    clients = [
        AsyncWaypost(given["url"], namespace=given["namespace"], wake=given.get("wake")) for _ in range(given["loops"])
    ]

    async def handle(published_ns: int) -> None:
        os.write(notes, b"%d %d\n" % (published_ns, time.monotonic_ns()))

    workers = []
    for client in clients:
        client.handler("orders", concurrency=given.get("concurrency", 10))(handle)
        workers.append(client.worker())
    for worker in workers:
        await worker.start()
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(worker.stop(1) for worker in workers))
    for client in clients:
        await client.close()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    logging.getLogger("waypost").setLevel(logging.CRITICAL)
    vars(receive)["SAFETY_POLL_SECONDS"] = options["poll"]
    os.nice(options["nice"])
    asyncio.run(run_workers(options))
