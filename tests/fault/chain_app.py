"""A chain of five steps over three queues, whose process is killed at the first delivery of every step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waypost import Message, Waypost

post = Waypost(os.environ["APP_URL"], retry_budget=20)
notes = Path(os.environ["APP_NOTES"])
NEXT = {"chop": "cook", "cook": "serve", "serve": "chop"}


def step(body: dict[str, int], message: Message[dict[str, int]]) -> None:
    """Continue in the next queue, or keep the result. The kill comes before the settle, which does both."""
    with notes.open("a") as file:
        file.write(f"began {body['step']} {message.deliveries} {os.getpid()}\n")
    if message.deliveries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if body["step"] < 5:
        message.then(NEXT[message.queue], {"step": body["step"] + 1})
    else:
        message.keep_result("dinner")


for queue in NEXT:
    post.handler(queue, concurrency=1)(step)
