"""What survives which fault, in figures: each line is `name: figure (limit) ok`, or `SHORT` where it is not.

    make faults [QUICK=1]

Real stores and real clients; leases are short, so that a run takes minutes at most. A seed makes the order of the
messages repeatable. It fails if any figure is short.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.fault.proxy import Proxy
from tests.fault.wake_figures import COUNTED_FIGURES, TIMED_FIGURES, Server
from waypost import Waypost
from waypost.message import Ledger
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

POISON_DELIVERIES = 3
LEASE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    name: str
    figure: str
    limit: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.figure} ({self.limit}) {'ok' if self.ok else 'SHORT'}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where figures are taken: a store, how large they are, and chance with a seed."""

    store: str
    url: str
    quick: bool
    chance: random.Random
    #: Where a proxy finds the server, None where there is none.
    port: int | None = None

    def size(self, full: int) -> int:
        """The size of a figure: a tenth of it when it must be quick."""
        return max(10, full // 10) if self.quick else full


def balanced(name: str, ledger: Ledger) -> Figure:
    """The ledger after a figure: it must balance, and every redelivery must have a cause."""
    return Figure(
        f"{name} ledger",
        f"balance {ledger.balance}, unexplained {ledger.unexplained}",
        "0, 0",
        ledger.balance == 0 and ledger.unexplained == 0,
    )


def frozen_workers(place: Place) -> Iterator[Figure]:
    """A holder that sleeps past its lease while another takes over: its settle must change nothing."""
    queue, count = "frozen", place.size(100)
    refused = 0
    with Waypost(place.url) as frozen, Waypost(place.url) as awake:
        frozen.configure(queue, lease=LEASE_SECONDS)
        for number in range(count):
            frozen.publish(queue, number)
            with frozen.receive(queue, wait=10) as held, awake.receive(queue, wait=10) as taken:
                both = held is not None and taken is not None and held.id == taken.id
            # The inner block ended first: the message is done, and the outer settle came late.
            refused += both and held is not None and held.settled == "lost"
        ledger = awake.ledger(queue)
    yield Figure(f"{place.store} frozen workers", f"stale settles refused {refused}", f"{count}", refused == count)
    yield Figure(f"{place.store} frozen workers done", f"{ledger.done}", f"{count}", ledger.done == count)
    yield balanced(f"{place.store} frozen workers", ledger)


def poison(place: Place) -> Iterator[Figure]:
    """Messages that fail every time are buried after exactly so many deliveries, and the others are done."""
    queue, count = "poison", place.size(2_000)
    bad = count // 10
    bodies = ["poison"] * bad + ["fine"] * (count - bad)
    place.chance.shuffle(bodies)
    with Waypost(place.url) as post:
        post.configure(queue, max_deliveries=POISON_DELIVERIES)
        post.publish_many(queue, bodies)
        while (ledger := post.ledger(queue)).ready + ledger.delayed + ledger.leased:
            with post.receive(queue, wait=0.05) as message:
                if message is not None and message.body == "poison":
                    message.retry(after=0)
        letters = Counter((letter.reason, letter.body, letter.deliveries) for letter in post.dead_letters(queue))
    exactly = letters["max_deliveries", "poison", POISON_DELIVERIES]
    yield Figure(
        f"{place.store} poison",
        f"dead {letters.total()}, after exactly {POISON_DELIVERIES} deliveries {exactly}",
        f"{bad}, {bad}",
        letters.total() == exactly == bad,
    )
    yield Figure(
        f"{place.store} poison, the others", f"done {ledger.done}", f"{count - bad}", ledger.done == count - bad
    )
    yield balanced(f"{place.store} poison", ledger)


def same_keys(place: Place) -> Iterator[Figure]:
    """Many publishers, few keys: each key is stored once."""
    queue, publishers, each, keys = "same-keys", 10, place.size(1_000), place.size(500)
    order = [[place.chance.randrange(keys) for _ in range(each)] for _ in range(publishers)]
    start = threading.Barrier(publishers)
    failures: list[BaseException] = []

    def publish(numbers: list[int]) -> None:
        try:
            with Waypost(place.url) as post:
                start.wait()
                for number in numbers:
                    post.publish(queue, number, key=f"key:{number}", window=3600)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(numbers,)) for numbers in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    distinct = len({number for numbers in order for number in numbers})
    with Waypost(place.url) as post:
        ledger = post.ledger(queue)
    yield Figure(f"{place.store} publishers that failed", f"{len(failures)}", "0", not failures)
    yield Figure(
        f"{place.store} dedup, {publishers} publishers × {each}",
        f"stored {ledger.published}, duplicates {ledger.duplicates}",
        f"{distinct}, {publishers * each - distinct}",
        (ledger.published, ledger.duplicates) == (distinct, publishers * each - distinct),
    )
    yield balanced(f"{place.store} dedup", ledger)


def lost_replies(place: Place) -> Iterator[Figure]:
    """One reply in ten never arrives: what was asked for happens once all the same."""
    if place.port is None:
        return  # SQLite has no replies to lose
    queue, count = "lost-replies", place.size(5_000)
    runs: Counter[int] = Counter()
    with Proxy(place.port) as proxy, Waypost(f"valkey://127.0.0.1:{proxy.port}") as post:
        post.ledger(queue)
        proxy.drop_some(0.1, seed=place.chance.randrange(2**32), to=b"EVALSHA")
        ids = {post.publish(queue, number).id for number in range(count)}
        published = proxy.dropped
        while sum(runs.values()) < 2 * count:
            with post.receive(queue, wait=0) as message:
                if message is None:
                    break
                runs[message.body] += 1
        ledger, dropped = post.ledger(queue), proxy.dropped
    again = runs.total() - count
    explained = sum(ledger.redelivered.values())
    yield Figure(
        f"{place.store} lost replies",
        f"{published} to publishes, {dropped - published} to claims and settles",
        "each over 0",
        0 < published < dropped,
    )
    yield Figure(
        f"{place.store} lost replies, publish",
        f"stored {ledger.published}, ids {len(ids)}",
        f"{count}, {count}",
        ledger.published == len(ids) == count,
    )
    yield Figure(
        f"{place.store} lost replies, settle",
        f"done {ledger.done}, run again {again}, explained {explained}",
        f"{count}, as many as explained",
        ledger.done == count == len(runs) and again == explained,
    )
    yield balanced(f"{place.store} lost replies", ledger)


FIGURES: tuple[Callable[[Place], Iterator[Figure]], ...] = (frozen_workers, poison, same_keys, lost_replies)


def main(arguments: list[str]) -> int:
    """Take every figure on every store; the exit code is 1 if one is short."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.figures", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--counts", action="store_true", help="without figures that time something")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args(arguments)
    # Lost leases are what some figures are about; a warning for each would hide the figures.
    logging.getLogger("waypost").setLevel(logging.ERROR)
    print(f"seed {options.seed}", flush=True)
    short = 0
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(ValkeyServer(appendonly=True))
        urls = {"sqlite": f"sqlite:///{Path(directory) / 'figures.db'}", "valkey": server.url}
        ports = {"valkey": server.port}
        for store, url in urls.items():
            for take in FIGURES:
                began = time.monotonic()
                for figure in take(Place(store, url, options.quick, random.Random(options.seed), ports.get(store))):
                    short += not figure.ok
                    print(figure, flush=True)
                print(f"  {take.__name__} on {store}: {time.monotonic() - began:.1f} s", flush=True)
        database = stack.enter_context(PostgresServer(max_connections=300))
        places = {"valkey": server, "postgres": database}
        for store, place in places.items():
            for wake_figure in COUNTED_FIGURES if options.counts else (*COUNTED_FIGURES, *TIMED_FIGURES):
                for reading in wake_figure(Server(store, place.url, place.port), 3 if options.quick else 10):
                    short += not reading.ok
                    print(Figure(f"{store} {reading.name}", reading.figure, reading.limit, reading.ok), flush=True)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
