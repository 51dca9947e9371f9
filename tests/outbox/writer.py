"""A program that sells and publishes in one transaction each, and is killed at any point of it.

    python -m tests.outbox.writer WAY URL NAMESPACE FIRST COUNT SEED

Each sale is a row in the user's table and a message of the same number. Every second transaction is rolled back. At a
point that the seed chooses the process kills itself: before a transaction, inside of it, or right after its end.
"""

from __future__ import annotations

import os
import random
import signal
import sys

from tests.outbox.ways import open_way


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(way_name: str, url: str, namespace: str, first: int, count: int, seed: int) -> None:
    chance = random.Random(seed)
    doomed = chance.randrange(count)
    where = chance.choice(("before", "inside", "after"))
    with open_way(way_name, url, namespace) as way:
        for number in range(first, first + count):
            dies = number - first == doomed
            if dies and where == "before":
                die()
            way.run(
                [("publish", ("sales", number), {"key": str(number)})], row=number, commit=number % 2 == 0,
                inside=die if dies and where == "inside" else None,
            )  # fmt: skip
            if dies and where == "after":
                die()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
