"""`waypost bench`: measure publishing, handling and latency on the user's own store.

It uses a queue of its own and leaves it empty; the counters of that queue stay.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from waypost.cli.exit_codes import FAILED, USAGE, CommandError
from waypost.cli.options import add_command, integer_between, open_client
from waypost.cli.output import quiet_log, write, write_json, write_stderr
from waypost.cli.progress import Progress
from waypost.client import Waypost
from waypost.message import Message

QUEUE = "waypost-bench"
#: How many messages are published one by one, to measure how long each takes.
SINGLE_PUBLISHES = 500
#: A message that takes longer is an error.
ARRIVAL_SECONDS_MAX = 60.0


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "bench", run, "measure a store: publish and drain rates, latency", positional_url=True,
        more="It uses a queue of its own and leaves it empty. Every message is really stored, claimed and settled.",
        examples=("waypost bench sqlite:///bench.db", "waypost bench --messages 20000 --size 1000 --json"),
    )  # fmt: skip
    parser.add_argument("--messages", type=integer_between(10, 1_000_000), default=5_000, metavar="N",
                        help="messages to publish (5000)")  # fmt: skip
    parser.add_argument("--size", type=integer_between(0, 1_000_000), default=100, metavar="BYTES",
                        help="bytes in each body (100)")  # fmt: skip
    parser.add_argument("--pings", type=integer_between(10, 100_000), default=200, metavar="N",
                        help="messages for the latency, one at a time (200)")  # fmt: skip
    parser.add_argument("--concurrency", type=integer_between(1, 1_000), default=10, metavar="N",
                        help="handlers at once (10)")  # fmt: skip
    parser.add_argument("--queue", default=QUEUE, help=f"the queue to use ({QUEUE})")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    # `doctor` reports warnings of the store; here they would disturb the progress bar.
    with quiet_log(), open_client(options, creates=True) as post:
        ledger = post.ledger(options.queue)
        if ledger.ready or ledger.delayed or ledger.leased or ledger.waiting:
            raise CommandError(f"queue {options.queue} is in use; give an empty one with --queue", USAGE)
        write_stderr(f"waypost bench: {post.store.kind}, namespace {post.store.namespace}, queue {options.queue}")
        try:
            measured = measure(post, options)
        finally:
            post.purge(options.queue, "ready")
    if options.json:
        write_json(measured)
        return 0
    write(f"publish, in batches   {measured['publish_many_per_second']:>9,.0f} messages/s")
    write(f"publish, one by one   {measured['publish_per_second']:>9,.0f} messages/s")
    write(f"claim, handle, settle {measured['drain_per_second']:>9,.0f} messages/s")
    for name, title in (("publish_seconds", "one publish"), ("latency_seconds", "publish to handler")):
        one = {which: seconds * 1000 for which, seconds in measured[name].items()}
        write(f"{title:21} p50 {one['p50']:.2f} ms, p99 {one['p99']:.2f} ms, max {one['max']:.2f} ms")
    return 0


def measure(post: Waypost, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    body = b"x" * options.size
    bench = Bench(post, options.queue, options.concurrency)
    with Progress("publishing", options.messages, quiet=options.json) as progress:
        began = time.perf_counter()
        for start in range(0, options.messages, 1_000):
            number = min(1_000, options.messages - start)
            post.publish_many(options.queue, [body] * number)
            progress.advance(number)
        many = options.messages / (time.perf_counter() - began)
    singles = min(options.messages, SINGLE_PUBLISHES)
    took = []
    for _ in range(singles):
        began = time.perf_counter()
        post.publish(options.queue, body)
        took.append(time.perf_counter() - began)
    total = options.messages + singles
    with Progress("handling", total, quiet=options.json) as progress:
        drained = bench.drain(total, progress)
    with Progress("latency", options.pings, quiet=options.json) as progress:
        latencies = bench.ping(options.pings, body, progress)
    return {
        "store": post.store.kind, "queue": options.queue, "messages": options.messages, "size": options.size,
        "concurrency": options.concurrency, "publish_many_per_second": round(many, 1),
        "publish_per_second": round(singles / sum(took), 1), "drain_per_second": round(drained, 1),
        "publish_seconds": summarize(took), "latency_seconds": summarize(latencies),
    }  # fmt: skip


def summarize(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum."""
    from statistics import quantiles  # loading it takes longer than most commands

    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 6), "p99": round(cuts[98], 6), "max": round(max(values), 6)}


class Bench:
    """Measures a worker with a handler that does nothing."""

    def __init__(self, post: Waypost, queue: str, concurrency: int) -> None:
        self._post = post
        self._queue = queue
        self._handled = 0
        self._progress: Progress | None = None
        self._arrived = threading.Event()
        self._arrived_at = 0.0

        @post.handler(queue, concurrency=concurrency)
        async def handle(message: Message[bytes]) -> None:
            self._arrived_at = time.perf_counter()
            self._handled += 1
            if self._progress is not None:
                self._progress.advance()
            self._arrived.set()

    def drain(self, total: int, progress: Progress) -> float:
        """Handle all messages of the queue; return messages per second."""
        self._progress = progress
        began = time.perf_counter()
        self._post.worker([self._queue], scheduler=False).run(until_empty=True)
        ended = time.perf_counter()
        self._progress = None
        if self._handled < total:
            raise CommandError(f"only {self._handled:,} of {total:,} messages were handled; does another worker "
                               "use the queue?", FAILED)  # fmt: skip
        return total / (ended - began)

    def ping(self, number: int, body: bytes, progress: Progress) -> list[float]:
        """Return how long each message takes from its publish to its handler on an idle queue, in seconds."""
        found = []
        with self._post.worker([self._queue], scheduler=False):
            for at in range(-1, number):
                self._arrived.clear()
                began = time.perf_counter()
                self._post.publish(self._queue, body)
                if not self._arrived.wait(ARRIVAL_SECONDS_MAX):
                    raise CommandError(f"a message did not arrive within {ARRIVAL_SECONDS_MAX:g} s", FAILED)
                if at >= 0:  # the first one also waits for the worker to start
                    found.append(self._arrived_at - began)
                    progress.advance()
        return found
