"""A process of workers with nothing to do, for the figures of idle cost.

    python -m tests.fault.idle_workers '{"url": …, "namespace": …, "workers": 1, "queues": 1000, "first": 0}'

Each worker has a client and queues of its own. It prints `ready` when all of them work. For each input line it
prints how many steps it took on its store, which only counts where the store is a SQLite file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from waypost import AsyncWaypost
from waypost.store.sqlite.executor import SqliteExecutor

_steps = [0]


def _count_steps() -> None:
    """Count the transactions of SQLite files in this process: they have no server that would."""
    inner = SqliteExecutor._run_group

    def counted(self: SqliteExecutor, calls: Any) -> Any:
        _steps[0] += 1
        return inner(self, calls)

    SqliteExecutor._run_group = counted  # type: ignore[method-assign]
    alone = SqliteExecutor.run

    def run(self: SqliteExecutor, call: Any) -> Any:
        _steps[0] += 1
        return alone(self, call)

    SqliteExecutor.run = run  # type: ignore[method-assign]


async def idle(given: dict[str, Any]) -> None:
    """Run the workers until the standard input ends."""
    clients = []

    async def handle(body: object) -> None: ...

    workers = []
    for number in range(given["workers"]):
        client = AsyncWaypost(given["url"], namespace=given["namespace"])
        for queue in range(given["queues"]):
            client.handler(f"idle-{given['first'] + number}-{queue}")(handle)
        clients.append(client)
        workers.append(await client.worker().start())
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(_steps[0], flush=True)
    await asyncio.gather(*(worker.stop(1) for worker in workers))
    for client in clients:
        await client.close()


if __name__ == "__main__":
    logging.getLogger("waypost").setLevel(logging.CRITICAL)
    _count_steps()
    asyncio.run(idle(json.loads(sys.argv[1])))
