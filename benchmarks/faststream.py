"""How fast FastStream empties a queue of waypost, beside its own Redis broker, our worker, and its own upper bound.

    python -m benchmarks.faststream --quick --json

All run in this process, by turns, on one Valkey without persistence, on queues that were filled before, with a handler
that only counts. `process` calls FastStream's `process_message` for messages that are in memory: no broker can be
faster. `redis-stream` is FastStream's own broker with a consumer group, ten workers and reads of 100. Beside the rate
there is the processor time of this process for each message, which a busy machine affects less; the ratios are printed
of both.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from faststream.redis import RedisBroker, StreamSub

from benchmarks.core import BODY
from benchmarks.measure import Report, arguments
from waypost import AsyncWaypost
from waypost.codec import encode_body, make_envelope
from waypost.faststream import WaypostBroker
from waypost.message import Message
from waypost.testing.bench import fresh_namespace
from waypost.testing.servers import ValkeyServer
from waypost.values import Lease

COUNT, QUICK_COUNT = 20_000, 4_000
ROUNDS = 3
BATCH = 100
#: One measurement: seconds on the clock, and seconds of this process on the processor.
Cost = tuple[float, float]


class Countdown:
    """Counts handled messages; `wait` returns when all are."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._done = asyncio.Event()

    def add(self, count: int = 1) -> None:
        """So many more were handled."""
        self._left -= count
        if self._left <= 0:
            self._done.set()

    async def wait(self) -> None:
        """Wait for the last one."""
        await self._done.wait()


async def measured(start: Callable[[], Awaitable[Any]], countdown: Countdown) -> Cost:
    """Return the cost from the start of the consumer to the last message."""
    clock, processor = time.perf_counter(), time.process_time()
    await start()
    await countdown.wait()
    return time.perf_counter() - clock, time.process_time() - processor


async def process(url: str, count: int) -> Cost:
    """FastStream's processing alone."""
    broker, countdown = WaypostBroker("memory://", logger=None), Countdown(count)

    @broker.subscriber("orders")
    async def handle(body: dict[str, Any]) -> None:
        countdown.add()

    (subscriber,) = broker.subscribers
    subscriber._build_fastdepends_model()
    encoded, id = encode_body(BODY), "0" * 24
    lease = Lease(id, 1, b"", 1, 0, 5, None, None, 0, 0, 0, 1, make_envelope(id, encoded))

    async def run() -> None:
        for _ in range(count):
            await subscriber.process_message(Message("orders", lease))

    await broker.connect()
    try:
        return await measured(run, countdown)
    finally:
        await broker.stop()


async def drain(url: str, count: int, batch: int | None = None) -> Cost:
    """`WaypostBroker`, one by one or in batches."""
    broker, countdown = WaypostBroker(url, namespace=fresh_namespace(), logger=None), Countdown(count)

    if batch is None:

        @broker.subscriber("orders")
        async def handle(body: dict[str, Any]) -> None:
            countdown.add()
    else:

        @broker.subscriber("orders", batch=batch)
        async def handle_many(bodies: list[dict[str, Any]]) -> None:
            countdown.add(len(bodies))

    await broker.connect()
    await broker.client.publish_many("orders", [BODY] * count)
    try:
        return await measured(broker.start, countdown)
    finally:
        await broker.stop()


async def drain_worker(url: str, count: int, batch: int | None = None) -> Cost:
    """Our worker without FastStream."""
    async with AsyncWaypost(url, namespace=fresh_namespace()) as post:
        countdown = Countdown(count)
        if batch is None:

            @post.handler("orders")
            async def handle(body: dict[str, Any]) -> None:
                countdown.add()
        else:

            @post.handler("orders", batch=batch)
            async def handle_many(bodies: list[dict[str, Any]]) -> None:
                countdown.add(len(bodies))

        await post.publish_many("orders", [BODY] * count)
        worker = post.worker()
        try:
            return await measured(worker.start, countdown)
        finally:
            await worker.stop()


async def drain_stream(url: str, count: int) -> Cost:
    """FastStream's own broker on a Redis stream."""
    broker, countdown = RedisBroker(url.replace("valkey://", "redis://"), logger=None), Countdown(count)  # type: ignore[arg-type]
    stream = fresh_namespace()

    async with broker:
        for _ in range(count):
            await broker.publish(dict(BODY), stream=stream)  # type: ignore[arg-type]

    @broker.subscriber(
        stream=StreamSub(stream, group="all", consumer="one", last_id=">", max_records=100), max_workers=10
    )
    async def handle(body: dict[str, Any]) -> None:
        countdown.add()

    client = await broker.connect()
    await client.xgroup_create(stream, "all", id="0")
    try:
        return await measured(broker.start, countdown)
    finally:
        await broker.stop()


CONTENDERS: dict[str, Callable[[str, int], Coroutine[Any, Any, Cost]]] = {
    "process": process,
    "waypost-broker": drain,
    "waypost-worker": drain_worker,
    "redis-stream": drain_stream,
    "waypost-broker-batch": lambda url, count: drain(url, count, BATCH),
    "waypost-worker-batch": lambda url, count: drain_worker(url, count, BATCH),
}
RATIOS = (
    ("waypost-broker", "process"),
    ("waypost-broker", "redis-stream"),
    ("waypost-broker-batch", "waypost-worker-batch"),
)


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.disable(logging.WARNING)
    report, count = Report(options.json), QUICK_COUNT if options.quick else COUNT
    costs: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
    with ValkeyServer() as server:
        for turn in range(ROUNDS + 1):
            for name, run in CONTENDERS.items():
                cost: Cost = asyncio.run(run(server.url, count))
                if turn:
                    costs[name].append(cost)
    seconds = {name: statistics.median(one[0] for one in found) for name, found in costs.items()}
    processor = {name: statistics.median(one[1] for one in found) for name, found in costs.items()}
    for name in CONTENDERS:
        report.add("drain", "valkey", name, round(count / seconds[name]), "messages/s")
        report.add("cpu", "valkey", name, round(processor[name] / count * 1e6, 1), "us/message")
    for ours, other in RATIOS:
        report.add(f"{ours}-of-{other}", "valkey", "rate", round(seconds[other] / seconds[ours], 2), "x")
        report.add(f"{ours}-of-{other}", "valkey", "cpu", round(processor[other] / processor[ours], 2), "x")


if __name__ == "__main__":
    main()
