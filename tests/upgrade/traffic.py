"""Traffic for upgrades: a process of one release does one thing until it gets SIGTERM, and notes it in a file.

    python traffic.py publish URL NAMESPACE FILE NAME RATE    publish RATE messages a second, by turns to two queues
    python traffic.py flow URL NAMESPACE FILE NAME RATE       the same in batches of ten, to `orders` only
    python traffic.py work URL NAMESPACE FILE NAME RATE       a worker of `orders` and `ticks`, with its scheduler
    python traffic.py receive URL NAMESPACE FILE NAME RATE    receive messages of `parcels` one by one
    python traffic.py read URL NAMESPACE FILE NAME RATE       follow the journal of `orders` as Spark's tasks do

Each line of the file: what, a name, when it began by the machine's clock, and the seconds that it took.
It uses only names that every release has, because releases side by side run it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from typing import TextIO

from waypost import Waypost

QUEUES = ("orders", "parcels")
TICK_SECONDS = 0.1
BATCH = 10


class Notes:
    """The file that a process writes."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def add(self, what: str, name: str, began: float) -> None:
        self._file.write(f"{what} {name} {began:.6f} {time.monotonic() - began:.6f}\n")


def publish(post: Waypost, notes: Notes, name: str, stopped: threading.Event, rate: float) -> None:
    number, due = 0, time.monotonic()
    while not stopped.wait(max(0.0, due - time.monotonic())):
        body, began = f"{name}:{number}", time.monotonic()
        # Some with a delay, and few with headers: these have an envelope of a newer version in the next release.
        post.publish(
            QUEUES[number % 2], body, key=body, delay=0.05 if number % 10 == 0 else None,
            headers={"number": str(number)} if number in (4, 9) else None,
        )  # fmt: skip
        notes.add("published", body, began)
        number += 1
        # One that is late does not catch up: the next ones would measure a burst.
        due = max(due + 1 / rate, began)


def flow(post: Waypost, notes: Notes, name: str, stopped: threading.Event, rate: float) -> None:
    number, due = 0, time.monotonic()
    while not stopped.wait(max(0.0, due - time.monotonic())):
        began = time.monotonic()
        bodies = [f"{name}:{number + place}" for place in range(BATCH)]
        post.publish_many("orders", bodies)
        for body in bodies:
            notes.add("published", body, began)
        number += BATCH
        due = max(due + BATCH / rate, began)


def work(post: Waypost, notes: Notes) -> None:
    @post.handler("orders", concurrency=4)
    def handle(body: str) -> None:
        notes.add("handled", body, time.monotonic())

    @post.handler("ticks")
    def tick(body: str) -> None:
        notes.add("ticked", body, time.monotonic())

    post.worker(["orders", "ticks"]).run()


def receive(post: Waypost, notes: Notes, stopped: threading.Event) -> None:
    while not stopped.is_set():
        began = time.monotonic()
        with post.receive("parcels", wait=0) as message:
            if message is not None:
                notes.add("handled", message.body, began)
        if message is None:
            stopped.wait(0.01)


def read(url: str, namespace: str, notes: Notes, stopped: threading.Event) -> None:
    from waypost.spark.source.bulk import Bulk
    from waypost.store.opening import open_store

    after = 0
    store = open_store(url, namespace=namespace, clock=None, replay_ttl_ms=60_000, durability="server")
    with Bulk(store) as bulk:
        while not stopped.wait(0.2):
            _, newest = bulk.bounds("orders")
            rows = [
                row
                for batch in bulk.journal("orders", after, newest, ("number", "event", "message_id"))
                for row in batch.to_pylist()
            ]
            for row in sorted(rows, key=lambda row: row["number"]):
                notes.add("read", f"{row['number']}:{row['event']}:{row['message_id']}", time.monotonic())
            after = newest


def main() -> None:
    what, url, namespace, path, name, rate = sys.argv[1:]
    stopped = threading.Event()
    # That newer envelopes are left for newer workers is logged each time.
    logging.getLogger("waypost").setLevel(logging.ERROR)
    with open(path, "a", buffering=1) as file:
        notes = Notes(file)
        if what != "work":
            signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        if what == "read":
            read(url, namespace, notes, stopped)
            return
        with Waypost(url, namespace=namespace) as post:
            if what == "work":
                work(post, notes)
            elif what == "receive":
                receive(post, notes, stopped)
            elif what == "flow":
                flow(post, notes, name, stopped, float(rate))
            else:
                publish(post, notes, name, stopped, float(rate))


if __name__ == "__main__":
    main()
