"""Handlers for the worker processes of the fault tests: each queue has its own fault."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from waypost import Constant, Message, Waypost

post = Waypost(os.environ["APP_URL"], retry_budget=float(os.environ.get("APP_BUDGET", "20")))
#: Each handler call writes a line here: queue, body, delivery, process.
notes = Path(os.environ["APP_NOTES"])


def note(what: str, message: Message[Any]) -> None:
    with notes.open("a") as file:
        file.write(f"{what} {message.body} {message.deliveries} {os.getpid()}\n")


@post.handler("slow", concurrency=5)
async def slow(message: Message[int]) -> None:
    """Take a little while, so that a signal finds it running."""
    note("began", message)
    await asyncio.sleep(0.05)
    note("ended", message)


@post.handler("hanging", concurrency=2)
async def hanging(message: Message[int]) -> None:
    """Hang on the first delivery."""
    note("began", message)
    if message.deliveries == 1:
        await asyncio.Event().wait()
    note("ended", message)


@post.handler("late", concurrency=2)
async def late(message: Message[int]) -> None:
    """End a while after the process was frozen for longer than the lease."""
    note("began", message)
    if message.deliveries == 1:
        while not (notes.parent / "thawed").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)
    note(f"ended-{message.lease_lost}", message)


@post.handler("lease-lost", concurrency=2)
async def wait_for_lost_lease(message: Message[int]) -> None:
    """Wait on the first delivery until the lease is lost."""
    note("began", message)
    try:
        while message.deliveries == 1 and not message.lease_lost:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)
    finally:
        note(f"lost-{message.lease_lost}", message)


@post.handler("blocking", concurrency=2)
async def blocking(message: Message[int]) -> None:
    """Block the event loop for several leases."""
    note("began", message)
    until = time.monotonic() + (2.0 if message.body == 0 else 0)
    while time.monotonic() < until:
        threading.Event().wait(0.01)
    note("ended", message)


@post.handler("poison", concurrency=1, retry=Constant(pause=0, jitter=0))
async def poison(message: Message[str]) -> None:
    """Kill the process."""
    note("began", message)
    if message.body == "poison":
        os.kill(os.getpid(), 9)
    note("ended", message)


@post.handler("grinding", concurrency=2, process=True)
def grinding(message: Message[int]) -> None:
    """Compute in a separate process; the first delivery of number 0 never ends."""
    note("began", message)
    while message.body == 0 and message.deliveries == 1:
        sum(range(1000))
    note("ended", message)
