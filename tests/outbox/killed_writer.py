"""A program that sells and publishes in one transaction each, and is killed at any point of it.

    python -m tests.outbox.killed_writer WAY URL NAMESPACE COUNT KILLS

Each sale is a row in the user's table and a message of the same number. Every second transaction is rolled back. COUNT
sales are one process, forked when all is imported and nothing is connected yet; at a point that its number chooses it
kills itself: before a transaction, inside of it, or right after its end. Then the next comes. It prints how many were
killed.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys

from tests.outbox.transaction_kinds import open_kind

#: What every kind of transaction needs, imported once for all the processes.
IMPORTED = (
    "asyncpg", "django.db", "psycopg", "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.ext.asyncio", "sqlalchemy.orm",
    "waypost.outbox.transaction_adapters", "waypost.store.postgres", "waypost.store.sqlite",
)  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(way_name: str, url: str, namespace: str, first: int, count: int, seed: int) -> None:
    chance = random.Random(seed)
    doomed = chance.randrange(count)
    where = chance.choice(("before", "inside", "after"))
    with open_kind(way_name, url, namespace) as kind:
        for number in range(first, first + count):
            dies = number - first == doomed
            if dies and where == "before":
                die()
            kind.run(
                [("publish", ("sales", number), {"key": str(number)})], row=number, commit=number % 2 == 0,
                inside=die if dies and where == "inside" else None,
            )  # fmt: skip
            if dies and where == "after":
                die()


def forked(kind: str, url: str, namespace: str, first: int, count: int, seed: int) -> int:
    """Run in a forked process; return its exit code, or the negative number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            main(kind, url, namespace, first, count, seed)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sell(kind: str, url: str, namespace: str, count: int, kills: int) -> int:
    """Run `kills` processes one after the other, and return how many were killed."""
    for module in IMPORTED:
        importlib.import_module(module)
    ends = [forked(kind, url, namespace, number * count, count, number) for number in range(kills)]
    return ends.count(-signal.SIGKILL)


if __name__ == "__main__":
    print(sell(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:6])))
