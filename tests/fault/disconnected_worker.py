"""A worker that is cut off from its store while its handlers run, for the figures of leases.

    APP_OPTIONS='{"url": …, "namespace": …, "notes": …, "number": 3}' python -m tests.fault.disconnected_worker

Each kind of handler has a queue of its own. They write lines into the notes: what, kind, message, and when by the clock
of the machine. Handlers would run for twenty seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from waypost import Message, Waypost

RUN_SECONDS = 20.0
#: Read when this module is imported, also in the processes of handlers.
given: dict[str, Any] = json.loads(os.environ["APP_OPTIONS"])
post = Waypost(given["url"], namespace=given["namespace"], retry_budget=5)


def note(what: str, kind: str, message: Message[Any]) -> None:
    """Append one line in a single write."""
    with open(given["notes"], "ab", buffering=0) as file:
        file.write(f"{what} {kind} {message.id} {message.deliveries} {time.monotonic_ns()}\n".encode())


@post.handler(f"async-{given['number']}", on_lease_lost=lambda message: note("callback", "async", message))
async def waits(message: Message[int]) -> None:
    note("began", "async", message)
    until = time.monotonic() + RUN_SECONDS
    while time.monotonic() < until:
        await asyncio.sleep(0.01)
        note("alive", "async", message)


@post.handler(f"thread-{given['number']}", on_lease_lost=lambda message: note("callback", "thread", message))
def blocks(message: Message[int]) -> None:
    note("began", "thread", message)
    until = time.monotonic() + RUN_SECONDS
    while time.monotonic() < until and not message.lease_lost:
        time.sleep(0.01)
    note("lease-lost" if message.lease_lost else "ended", "thread", message)


def on_process_lost(message: Message[Any]) -> None:
    note("callback", "process", message)


@post.handler(f"process-{given['number']}", process=True, on_lease_lost=on_process_lost)
def computes(message: Message[int]) -> None:
    note("began", "process", message)
    until = time.monotonic() + RUN_SECONDS
    while time.monotonic() < until:
        time.sleep(0.01)
        note("alive", "process", message)


@post.handler(f"quick-{given['number']}")
async def quick(message: Message[int]) -> None:
    note("began", "quick", message)


def main() -> None:
    """Run a worker until the standard input ends."""
    with post.worker():
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    from tests.fault import disconnected_worker  # where the processes of handlers import them

    disconnected_worker.main()
