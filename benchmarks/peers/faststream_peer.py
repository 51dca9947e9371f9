"""faststream on streams with a handler of batches: 500 records a batch, a consumer group, settled after the handler."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from faststream.redis import RedisBroker, StreamSub

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

RECORDS = 500
#: Publishing goes through a pipeline in parts of this size.
PIPELINE = 1_000


class FastStream(Program):
    """The broker for Redis, with no application around it."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # Without its logger, which writes a line for each batch; without validation of the bodies.
        quiet: Any = None
        self._broker: Any = RedisBroker(url, logger=quiet, log_level=logging.ERROR, apply_types=False)

    async def open(self) -> None:
        await self._broker.connect()

    async def close(self) -> None:
        await self._broker.stop()

    async def send(self, message: Body) -> None:
        await self._broker.publish(message, stream="bench")

    async def publish(self, messages: Sequence[Body]) -> None:
        for start in range(0, len(messages), PIPELINE):
            await asyncio.gather(*map(self.send, messages[start : start + PIPELINE]))

    def work(self, started: Started) -> None:
        async def handle(messages: list[Body]) -> None:
            for message in messages:
                started(message["number"])

        stream = StreamSub("bench", group="bench", consumer="one", last_id="0", batch=True, max_records=RECORDS)
        self._broker.subscriber(stream=stream)(handle)

        async def run() -> None:
            await self._broker.start()
            print_json(ready=True)
            await asyncio.Event().wait()

        self.run(run)


if __name__ == "__main__":
    sys.exit(main(FastStream))
