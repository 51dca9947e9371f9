"""Traffic for upgrades: a process of one release does one thing until it gets SIGTERM, and notes it in a file.

    python traffic.py publish URL NAMESPACE FILE NAME RATE    publish RATE messages a second, by turns to two queues
    python traffic.py flow URL NAMESPACE FILE NAME RATE       the same in batches of ten, to `orders` only
    python traffic.py work URL NAMESPACE FILE NAME RATE       a worker of `orders` and `ticks`, with its scheduler
    python traffic.py receive URL NAMESPACE FILE NAME RATE    receive messages of `parcels` one by one
    python traffic.py read URL NAMESPACE FILE NAME RATE       follow the journal of `orders` as Spark's tasks do
    python traffic.py command ARGUMENTS                       run a command as `waypost` does, and end

Each line of the file: what, a name, when it began by the machine's clock, the seconds that it took, and for how many of
these its thread could run and had no processor.
It uses only names that every release has, because releases side by side run it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn, TextIO

from waypost import Waypost
from waypost.store.opening import open_store
from waypost.store.port import Store

QUEUES = ("orders", "parcels")
TICK_SECONDS = 0.1
BATCH = 10


class Notes:
    """The file that a process writes."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._waited = waited()

    def begin(self) -> float:
        """Return the time at which something begins."""
        self._waited = waited()
        return time.monotonic()

    def end(self, what: str, name: str, began: float) -> None:
        """Note what began then and ends now."""
        seconds = time.monotonic() - began
        self._file.write(f"{what} {name} {began:.6f} {seconds:.6f} {waited() - self._waited:.6f}\n")

    def add(self, what: str, name: str) -> None:
        """Note what happened now."""
        self._file.write(f"{what} {name} {time.monotonic():.6f} 0 0\n")


class Stop:
    """Whether SIGTERM came. Its handler runs in the main thread, which may hold the lock of an Event just then."""

    def __init__(self) -> None:
        self.is_set = False
        self._never = threading.Event()

    def set(self) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        """Wait for so long, and return whether to stop."""
        if not self.is_set:
            self._never.wait(seconds)
        return self.is_set


def waited() -> float:
    """Return for how many seconds the main thread could run and had no processor; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def take_usual_priority() -> None:
    """Run at the priority that others have; the imports ran at a lower one, so that they take no time from these.

    Call it before a store is opened: a process at a low priority would keep others waiting for its locks.
    """
    lowered = int(os.environ.get("TRAFFIC_STARTS_LOWERED", "0"))
    if lowered:
        usual = os.getpriority(os.PRIO_PROCESS, 0) - lowered
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), usual)


def publish(post: Waypost, notes: Notes, name: str, stopped: Stop, rate: float) -> None:
    number, due = 0, time.monotonic()
    while not stopped.wait(max(0.0, due - time.monotonic())):
        body, began = f"{name}:{number}", notes.begin()
        # Some with a delay, and few with headers: these have an envelope of a newer version in the next release.
        post.publish(
            QUEUES[number % 2], body, key=body, delay=0.05 if number % 10 == 0 else None,
            headers={"number": str(number)} if number in (4, 9) else None,
        )  # fmt: skip
        notes.end("published", body, began)
        number += 1
        # One that is late does not catch up: the next ones would measure a burst.
        due = max(due + 1 / rate, began)


def flow(post: Waypost, notes: Notes, name: str, stopped: Stop, rate: float) -> None:
    number, due = 0, time.monotonic()
    while not stopped.wait(max(0.0, due - time.monotonic())):
        began = notes.begin()
        bodies = [f"{name}:{number + place}" for place in range(BATCH)]
        post.publish_many("orders", bodies)
        for body in bodies:
            notes.end("published", body, began)
        number += BATCH
        due = max(due + BATCH / rate, began)


def work(post: Waypost, notes: Notes) -> None:
    @post.handler("orders", concurrency=4)
    def handle(body: str) -> None:
        notes.add("handled", body)

    @post.handler("ticks")
    def tick(body: str) -> None:
        notes.add("ticked", body)

    post.worker(["orders", "ticks"]).run()


def receive(post: Waypost, notes: Notes, stopped: Stop) -> None:
    while not stopped.is_set:
        began = notes.begin()
        with post.receive("parcels", wait=0) as message:
            if message is not None:
                notes.end("handled", message.body, began)
        if message is None:
            stopped.wait(0.01)


def read(url: str, namespace: str, notes: Notes, stopped: Stop) -> None:
    from waypost.spark.source.bulk import Bulk

    after = 0
    store = import_store(url, namespace)
    take_usual_priority()
    with Bulk(store) as bulk:
        while not stopped.wait(0.2):
            _, newest = bulk.bounds("orders")
            rows = [
                row
                for batch in bulk.journal("orders", after, newest, ("number", "event", "message_id"))
                for row in batch.to_pylist()
            ]
            for row in sorted(rows, key=lambda row: row["number"]):
                notes.add("read", f"{row['number']}:{row['event']}:{row['message_id']}")
            after = newest


def import_store(url: str, namespace: str) -> Store:
    """Import what a store needs; return it without a connection."""
    return open_store(url, namespace=namespace, clock=None, replay_ttl_ms=60_000, durability="server")


def run_command(arguments: list[str]) -> NoReturn:
    from waypost.cli import main
    from waypost.store import postgres  # noqa: F401

    take_usual_priority()
    sys.exit(main.main(arguments))


def main() -> None:
    if sys.argv[1] == "command":
        run_command(sys.argv[2:])
    what, url, namespace, path, name, rate = sys.argv[1:]
    stopped = Stop()
    # That newer envelopes are left for newer workers is logged each time.
    logging.getLogger("waypost").setLevel(logging.ERROR)
    with open(path, "a", buffering=1) as file:
        notes = Notes(file)
        if what != "work":
            signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        if what == "read":
            read(url, namespace, notes, stopped)
            return
        import_store(url, namespace)
        take_usual_priority()
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
