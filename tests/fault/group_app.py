"""Handlers for the worker processes of the figures of groups: each call notes when it began and ended."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from waypost import Constant, Message, Waypost

post = Waypost(os.environ["APP_URL"], namespace=os.environ["APP_NAMESPACE"], retry_budget=60)
#: Opened for appending: each line is written at once, whichever process writes it.
notes = os.open(os.environ["APP_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
#: One of so many messages fails the first time.
FAILS_EACH = 17


def note(what: str, message: Message[Any]) -> None:
    place = [message.queue, message.group, message.body, message.id, message.token]
    line = [what, *place, os.getpid(), time.monotonic_ns()]
    os.write(notes, (" ".join(map(str, line)) + "\n").encode())


async def handle(message: Message[int]) -> None:
    note("began", message)
    try:
        await asyncio.sleep(0.002)
    finally:
        # Also of a call that is stopped, because its lease is lost: only a kill leaves none.
        note("ended", message)
    if message.body % FAILS_EACH == 0 and message.attempts == 0:
        raise RuntimeError("fails the first time")


RETRY = Constant(pause=0.02, jitter=0)
post.handler("ordered", concurrency=5, retry=RETRY)(handle)
post.handler("limited", concurrency=5, retry=RETRY)(handle)
