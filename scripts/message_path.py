"""Count the code that one message runs through: publish, handle and settle, with the async client on Valkey.

    python scripts/message_path.py

Prints the files, folders and functions of waypost that are executed for one message of an idle worker, and how deep
their calls are nested at most. Work of other threads is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import waypost
from waypost import AsyncWaypost
from waypost.testing.servers import ValkeyServer

SOURCE = Path(waypost.__file__).parent
QUEUE = "orders"


class Trace:
    """The functions of waypost that are called while it is on."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, int]] = {}
        self.calls = 0
        self.depth = 0

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call if it is one of ours."""
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(SOURCE):
            return
        functions = self.functions.setdefault(file.relative_to(SOURCE).as_posix(), {})
        name = frame.f_code.co_qualname
        functions[name] = functions.get(name, 0) + 1
        self.calls += 1
        depth, outer = 0, frame
        while outer is not None and depth < 1000:
            depth += outer.f_code.co_filename.startswith(str(SOURCE))
            outer = outer.f_back  # type: ignore[assignment]
        self.depth = max(self.depth, depth)


async def trace_one_message(url: str) -> Trace:
    trace, handled = Trace(), asyncio.Event()
    post = AsyncWaypost(url)

    @post.handler(QUEUE)
    async def handle(order: dict[str, int]) -> None:
        handled.set()

    async with post:
        worker = post.worker()
        running = asyncio.create_task(worker.run())
        await post.publish(QUEUE, {"id": 0})
        await handled.wait()
        await asyncio.sleep(1.5)  # until the worker waits inside the server
        handled.clear()
        sys.setprofile(trace.note)
        try:
            await post.publish(QUEUE, {"id": 1})
            await handled.wait()
            await asyncio.sleep(0.2)  # until the outcome is settled and the next wait has begun
        finally:
            sys.setprofile(None)
        worker.request_stop()
        await running
    return trace


def main() -> None:
    logging.disable(logging.WARNING)
    with ValkeyServer() as server:
        trace = asyncio.run(trace_one_message(server.url))
    for file, functions in trace.functions.items():
        print(f"{file:32} {sum(functions.values()):4}  {', '.join(functions)}")
    folders = {Path(file).parent for file in trace.functions}
    print(
        f"{len(trace.functions)} files, {len(folders)} folders, {sum(map(len, trace.functions.values()))} functions, "
        f"{trace.calls} calls, nested at most {trace.depth} deep"
    )


if __name__ == "__main__":
    main()
