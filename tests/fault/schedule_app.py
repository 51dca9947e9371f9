"""A program with a schedule, for worker processes: each tick writes its instant and its process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from waypost import Message, Waypost

post = Waypost(os.environ["APP_URL"])
notes = Path(os.environ["APP_NOTES"])


@post.every(0.05)
def tick(message: Message[Any]) -> None:
    with notes.open("a") as file:
        file.write(f"{message.headers['waypost-instant']} {os.getpid()}\n")
