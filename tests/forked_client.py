"""A program whose clients are used on both sides of a fork.

    python -m tests.forked_client URL NAMESPACE

The child must be refused by its parent's clients and may make its own; the parent goes on. Prints how many of the four
checks of the child passed, and how many messages the parent's sync client sees.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from waypost import AsyncWaypost, Waypost
from waypost.errors import ForkedClient

ROOT = Path(__file__).parents[1]


def run_forked(url: str, namespace: str) -> list[str]:
    """Run the program, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.forked_client", url, namespace],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True,
        timeout=90,
    )  # fmt: skip
    return done.stdout.split()


def child_checks(url: str, namespace: str, post: Waypost, other: AsyncWaypost) -> int:
    passed = 0
    for use in (lambda: post.publish("orders", 2), lambda: asyncio.run(other.publish("orders", 2)), post.open):
        try:
            use()
        except ForkedClient as error:
            passed += "make a new one in the child" in str(error)
    post.close()
    asyncio.run(other.close())
    with Waypost(url, namespace=namespace) as own:
        passed += own.publish("orders", 3).status == "queued"
    return passed


def main(url: str, namespace: str) -> None:
    # No second try: what a child did to its parent's connections would show at once.
    post = Waypost(url, namespace=namespace, retry_budget=0)
    other = AsyncWaypost(url, namespace=namespace, retry_budget=0)
    loop = asyncio.Runner()
    post.publish("orders", 1)
    loop.run(other.publish("orders", 1))
    child = os.fork()
    if child == 0:
        os._exit(child_checks(url, namespace, post, other))
    passed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    post.publish("orders", 4)
    loop.run(other.publish("orders", 4))
    print(passed, post.ledger("orders").ready)
    loop.run(other.close())
    loop.close()
    post.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
