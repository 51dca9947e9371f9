"""What survives which fault, in figures: each line is `name: figure (limit) ok`, or `SHORT` where it is not.

    make faults [QUICK=1]

Real stores and real clients; leases are short, so that a run takes minutes at most. A seed makes the order of the
messages repeatable. It fails if any figure is short.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.fault.figure import Figure
from tests.fault.group_figures import QUICK, WHOLE, group_figures
from tests.fault.idle_figures import CONNECTIONS, many_queues, many_queues_in_a_file
from tests.fault.lake_figures import lake_figures
from tests.fault.lease_figures import disconnected, late_answers, poison_by_exit
from tests.fault.proxy import Proxy
from tests.fault.relay_figures import relay_figures
from tests.fault.release_figures import release_figures
from tests.fault.repeat_figures import repeat_figures
from tests.fault.scheduler_processes import (
    SchedulerProcesses,
    WorkerProcesses,
    run_faulty_schedulers,
    run_late_saves,
    run_takeovers,
)
from tests.fault.simulator_figures import simulator_figures
from tests.fault.spark_figures import spark_figures
from tests.fault.token_figures import token_crashes
from tests.fault.wake_figures import COUNTED_FIGURES, TIMED_FIGURES, Server
from tests.outbox.killed_programs import have_effects, sell
from tests.outbox.transaction_kinds import KINDS, is_file
from tests.schedule.oracle import utc
from tests.schedule.test_daylight_saving import PATTERNS, differences, zones_alike
from waypost import AsyncWaypost, Message, Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer
from waypost.values import Ledger

POISON_DELIVERIES = 3
LEASE_SECONDS = 0.05
#: The tables of the SQL stores whose rows belong to messages.
GROWING = ("message", "completed", "window", "result", "arrival", "rate")
#: What a worker may grow by over the last 150,000 of 200,000 messages.
WORKER_GROWTH_MB_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where figures are measured: a store, the size of the run, and a seeded random generator."""

    store: str
    url: str
    quick: bool
    chance: random.Random
    #: The server behind the URL, None where there is none.
    server: EmbeddedServer | None = None

    def kept(self) -> int:
        """Return how much the store keeps: the keys of a server, or the rows of tables that could grow with messages.

        Left out are counters of the last day, the journal, and the results of a client's last 128 calls: all bounded.
        """
        if isinstance(self.server, ValkeyServer):
            import redis

            with redis.Redis(port=self.server.port, password=self.server.password) as client:
                return int(client.dbsize())
        # On SQLite the data of a message is a row of its own.
        tables = GROWING if self.url.startswith("postgresql") else ("envelope", *GROWING)
        rows = " + ".join(f"(SELECT count(*) FROM wp_{table})" for table in tables)
        if self.url.startswith("postgresql"):
            import psycopg

            with psycopg.connect(self.url) as server:
                found = server.execute(f"SELECT {rows}".encode()).fetchone()
        else:
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file:
                found = file.execute(f"SELECT {rows}").fetchone()
        assert found is not None
        return int(found[0])

    def size(self, full: int) -> int:
        """Return the size of a figure: a tenth of it in a quick run."""
        return max(10, full // 10) if self.quick else full


def balanced(name: str, ledger: Ledger) -> Figure:
    """Check the ledger after a figure: it must balance, and every redelivery must have a cause."""
    return Figure(
        f"{name} ledger",
        f"balance {ledger.balance}, unexplained {ledger.unexplained}",
        "0, 0",
        ledger.balance == 0 and ledger.unexplained == 0,
    )


def frozen_workers(place: Place) -> Iterator[Figure]:
    """A holder that sleeps past its lease while another claims the message: its settle must change nothing."""
    queue, count = "frozen", place.size(100)
    refused = 0
    with Waypost(place.url) as frozen, Waypost(place.url) as awake:
        frozen.configure(queue, lease=LEASE_SECONDS)
        for number in range(count):
            frozen.publish(queue, number)
            with frozen.receive(queue, wait=10, renew=False) as held, awake.receive(queue, wait=10) as received:
                both = held is not None and received is not None and held.id == received.id
            # The inner block ended first: the message is done, and the outer settle came late.
            refused += both and held is not None and held.settled == "lost"
        ledger = awake.ledger(queue)
    yield Figure(f"{place.store} frozen workers", f"stale settles refused {refused}", f"{count}", refused == count)
    yield Figure(f"{place.store} frozen workers done", f"{ledger.done}", f"{count}", ledger.done == count)
    yield balanced(f"{place.store} frozen workers", ledger)


def poison(place: Place) -> Iterator[Figure]:
    """Messages that always fail are dead after exactly `max_deliveries` deliveries, and the others are done."""
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
    start = threading.Barrier(publishers, timeout=60)
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
    """One reply in ten never arrives: each call still takes effect once."""
    server = place.server
    if server is None:
        return  # SQLite has no replies to lose
    queue, count = "lost-replies", place.size(5_000)
    runs: Counter[int] = Counter()
    with Proxy(server.port) as proxy, Waypost(place.url.replace(f":{server.port}", f":{proxy.port}")) as post:
        post.ledger(queue)
        proxy.drop_some(0.1, seed=place.chance.randrange(2**32), to=VERBS[server.scheme])
        ids = {post.publish(queue, number).id for number in range(count)}
        published = proxy.dropped
        while sum(runs.values()) < 2 * count:
            with post.receive(queue, wait=0) as message:
                if message is not None:
                    runs[message.body] += 1
            # A connection that ends before the claim ran, while the statement is prepared, leaves nothing to repeat:
            # then no message comes within a wait of 0.
            if message is None and post.ledger(queue).ready == 0:
                break
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


def stopped_server(place: Place) -> Iterator[Figure]:
    """A server stopped at once under load and started again: clients go on, nothing acknowledged is missing."""
    server = place.server
    if not isinstance(server, PostgresServer):
        return
    queue, stops, pause = "stopped-server", 3 if place.quick else 10, 100
    acknowledged: list[str] = []
    received: Counter[str] = Counter()
    failures: list[BaseException] = []
    ended, published = threading.Event(), threading.Event()

    def publish() -> None:
        try:
            with Waypost(place.url) as post:
                while not ended.is_set():
                    acknowledged.append(post.publish(queue, len(acknowledged)).id)
        except BaseException as error:
            failures.append(error)

    def receive() -> None:
        try:
            with Waypost(place.url) as post:
                while True:
                    with post.receive(queue, wait=0.2) as message:
                        if message is not None:
                            received[message.id] += 1
                        elif published.is_set() and (ledger := post.ledger(queue)).ready == ledger.leased == 0:
                            return
        except BaseException as error:
            failures.append(error)

    with Waypost(place.url) as post:
        post.configure(queue, lease=2)
    publishers = [threading.Thread(target=publish) for _ in range(3)]
    receivers = [threading.Thread(target=receive) for _ in range(2)]
    for thread in publishers + receivers:
        thread.start()
    for _ in range(stops):
        reached, deadline = len(acknowledged) + pause, time.monotonic() + 60
        while len(acknowledged) < reached and time.monotonic() < deadline and not failures:
            time.sleep(0.01)
        server.stop_at_once()
        server.start()
    ended.set()
    # The last publish may be under way still, and is acknowledged when the server is back: it is to be received too.
    for thread in publishers:
        thread.join(120)
    published.set()
    for thread in receivers:
        thread.join(120)
    with Waypost(place.url) as post:
        ledger = post.ledger(queue)
    missing = set(acknowledged) - set(received)
    again = received.total() - len(received)
    # A claim does not wait for the disk: a stop may forget those of the messages that receivers have in hand.
    explained = sum(ledger.redelivered.values()) + stops * len(receivers)
    yield Figure(
        f"{place.store} stopped at once {stops} times",
        f"acknowledged publishes {len(acknowledged)}, missing {len(missing)}",
        f"at least {stops * pause}, 0",
        len(acknowledged) >= stops * pause and not missing,
    )
    yield Figure(f"{place.store} stopped at once, clients that gave up", f"{len(failures)}", "0", not failures)
    yield Figure(
        f"{place.store} stopped at once, each once",
        f"published {ledger.published}, done {ledger.done}, run again {again}",
        f"{len(acknowledged)}, {len(acknowledged)}, at most {explained}: explained, or in hand at a stop",
        ledger.published == ledger.done == len(acknowledged) and again <= explained,
    )
    yield balanced(f"{place.store} stopped at once", ledger)


def worker_memory(place: Place) -> Iterator[Figure]:
    """A worker that has handled very many messages is no larger than after the first of them, nor is its store."""
    queue, waves = "worker-memory", 20
    wave = place.size(200_000) // waves
    with Waypost(place.url) as post:
        # The history is bounded by a cap of its own; here it would only hide what should not grow.
        post.configure(queue, journal="off")

        @post.handler(queue)
        async def handle(body: dict[str, int]) -> None: ...

        sizes, kept = list[int](), list[int]()
        with post.worker():
            for number in range(1, waves + 1):
                post.publish_many(queue, ({"number": one, "wave": number} for one in range(wave)))
                while (ledger := post.ledger(queue)).done < number * wave:
                    time.sleep(0.01)
                gc.collect()
                sizes.append(resident_bytes())
                kept.append(place.kept())
    # Warm is a quarter of them: allocators, caches and replay windows have found their size.
    warm = waves // 4
    grown = (max(sizes[-warm:]) - max(sizes[:warm])) / 1e6
    yield Figure(
        f"{place.store} worker memory",
        f"grown by {grown:.1f} MB in {wave * (waves - warm):,} messages",
        f"{WORKER_GROWTH_MB_MAX:g} MB",
        grown < WORKER_GROWTH_MB_MAX,
    )
    yield Figure(
        f"{place.store} worker memory, things kept in the store",
        f"{min(kept[-warm:])} after {waves * wave:,} messages",
        f"{max(kept[:warm])}, as after {warm * wave:,}",
        min(kept[-warm:]) <= max(kept[:warm]),
    )
    yield balanced(f"{place.store} worker memory", ledger)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def schedulers(place: Place) -> Iterator[Figure]:
    """Six schedulers whose leaders die or freeze at their ticks, one with its clock an hour off where it can be."""
    faults = place.size(100)
    seed = place.chance.randrange(2**32)
    if place.store == "postgres":
        migrate(place.url, namespace="ticks")
    report = run_faulty_schedulers(
        place.url, "ticks", faults=faults, processes=6, seed=seed, hours_off=0 if place.server is None else 1
    )
    failed = f"{report.kills} kills and {report.freezes} freezes at the tick"
    yield Figure(
        f"{place.store} schedulers, {failed}",
        f"fired {report.fired}, double fires {report.doubles}, early {report.early}",
        f"{faults} faults; 0, 0",
        report.kills + report.freezes >= faults and report.doubles == 0 and report.early == 0,
    )
    yield Figure(
        f"{place.store} schedulers, instants without a fire",
        f"{report.holes}, counted as missed {report.missed}",
        "0, 0",
        report.holes == 0 and report.missed == 0,
    )


def takeovers(place: Place) -> Iterator[Figure]:
    """Three schedulers of a schedule of each second, whose leader is killed while its lease of 15 seconds lasts."""
    if place.store == "postgres":
        migrate(place.url, namespace="takeover")
    kills = 1 if place.quick else 3
    report = run_takeovers(place.url, "takeover", kills=kills, seed=place.chance.randrange(2**32), ttl_seconds=15)
    yield Figure(
        f"{place.store} schedulers, {report.kills} leaders killed",
        f"missed {report.missed}, double fires {report.doubles}, latest fire {report.latest.total_seconds():.1f} s",
        f"{report.kills}, 0, 2 s",
        report.missed <= report.kills and report.doubles == 0 and report.latest.total_seconds() < 2,
    )
    yield from late_saves(place, kills)


def late_saves(place: Place, kills: int) -> Iterator[Figure]:
    """The same with a schedule that is saved while they run, of which a leader that is killed at once fires nothing."""

    def start_workers(number: int) -> WorkerProcesses:
        return WorkerProcesses(place.url, "takeover", 3)

    def start_schedulers(number: int) -> SchedulerProcesses:
        return SchedulerProcesses(place.url, "takeover", 3, number, 0.0, 0.0, 15)

    for first, (kind, start) in enumerate((("schedulers", start_schedulers), ("workers", start_workers))):
        report = run_late_saves(place.url, "takeover", start, kills=kills, every=2.0, first=first * kills)
        yield Figure(
            f"{place.store} {kind}, {report.kills} leaders killed after a save",
            f"missed {report.missed}, double fires {report.doubles}, latest fire {report.latest.total_seconds():.1f} s",
            f"{kills}, 0, 2 s",
            report.missed <= report.kills and report.doubles == 0 and report.latest.total_seconds() < 2,
        )


def slow_link(place: Place) -> Iterator[Figure]:
    """A worker behind a link that takes ten leases to carry all messages: none may end before it has arrived."""
    if place.server is None:
        return
    queue, count = "slow", place.size(100)
    with Waypost(place.url) as post, Proxy(place.server.port, bytes_per_second=5_000_000) as link:
        post.configure(queue, lease=2)
        post.publish_many(queue, [b"x" * 1_000_000] * count)
        worker_post = AsyncWaypost(place.url.replace(f":{place.server.port}", f":{link.port}"))
        handled: list[str] = []

        @worker_post.handler(queue, concurrency=100)
        async def handle(body: bytes, message: Message[bytes]) -> None:
            handled.append(message.id)

        async def work() -> None:
            async with worker_post:
                await worker_post.worker().run(until_empty=True, signals=False)

        asyncio.run(work())
        ledger = post.ledger(queue)
    every = ledger.done == len(set(handled)) == count
    yield Figure(f"{place.store} slow link handled", f"{ledger.done} in {len(handled)} runs", f"{count}", every)
    yield Figure(f"{place.store} slow link leases lost", f"{ledger.expired}", "0", ledger.expired == 0)
    yield balanced(f"{place.store} slow link", ledger)


def daylight_saving(place: Place) -> Iterator[Figure]:
    """Every change of the clocks against an oracle that checks each minute. It needs no store: run once."""
    if place.store != "sqlite":
        return
    quick = {zone: [zone] for zone in ("America/New_York", "Europe/Dublin", "Africa/Casablanca", "Australia/Lord_Howe")}
    zones = quick if place.quick else zones_alike()
    seen, wrong = 0, 0
    for zone in zones:
        changes, differing = differences(zone, utc(2020), utc(2036))
        seen, wrong = seen + changes, wrong + len(differing)
    yield Figure(
        f"daylight saving, {seen} changes in {sum(map(len, zones.values()))} zones × {len(PATTERNS)} patterns",
        f"differences {wrong}",
        "0",
        wrong == 0 and seen > 30,
    )


def outbox(place: Place) -> Iterator[Figure]:
    """Transactions of which half are rolled back, by programs that are killed inside them: messages are commits."""
    transactions, kills = (40, 2) if place.quick else (1_000, 50)
    for kind in KINDS if place.store in ("sqlite", "postgres") else ():
        if is_file(kind) != (place.store == "sqlite"):
            continue
        sold = sell(kind, place.url, f"box-{kind}", transactions=transactions, kills=kills)
        yield Figure(
            f"{place.store} outbox by {kind}, {sold.kills} kills",
            f"messages {len(sold.messages)}, commits {len(sold.rows)}",
            "equal",
            sold.messages == sold.rows and sold.kills == kills,
        )


def effects_once(place: Place) -> Iterator[Figure]:
    """Handlers that settle in their own transaction, or record their message in an inbox, killed again and again."""
    messages, kills = (300, 3) if place.quick else (5_000, 100)
    if place.store == "postgres":
        found = have_effects("settle", place.url, "effects", place.url, messages=messages, kills=kills)
    elif place.store == "valkey":
        with PostgresServer() as database:
            found = have_effects("inbox", place.url, "effects", database.url, messages=messages, kills=kills)
    else:
        return
    yield Figure(
        f"{place.store} effects once, {kills} kills",
        f"effects {found[0]}",
        f"{messages}",
        found == (messages, messages),
    )


def leases(place: Place) -> Iterator[Figure]:
    """Workers that are cut off from their store, or answered too late."""
    if place.server is None:
        return
    server = Server(place.store, place.url, place.server.port)
    for figure in (*disconnected(server, place.size(40)), *late_answers(server, place.size(50))):
        yield figure.on(place.store)


def repeats(place: Place) -> Iterator[Figure]:
    """Calls that are repeated after the store has forgotten them, and sessions that two processes have."""
    port = None if place.server is None else place.server.port
    for figure in repeat_figures(place.url, port, place.size(50)):
        yield figure.on(place.store)


def exits(place: Place) -> Iterator[Figure]:
    """Handlers that end by an exit, in worker processes."""
    namespace = fresh_namespace()
    if place.store == "postgres":
        migrate(place.url, namespace=namespace)
    for figure in poison_by_exit(place.url, namespace):
        yield figure.on(place.store)


def groups(place: Place) -> Iterator[Figure]:
    """Order and limits of groups, while worker processes are killed."""
    namespace = fresh_namespace()
    if place.store == "postgres":
        migrate(place.url, namespace=namespace)
    verbs = VERBS.get(urlsplit(place.url).scheme)
    size = QUICK if place.quick else WHOLE
    for figure in group_figures(place.url, namespace, size=size, chance=place.chance, verbs=verbs):
        yield figure.on(place.store)


def releases(place: Place) -> Iterator[Figure]:
    """This release and the next one side by side, through an upgrade and back."""
    namespace = fresh_namespace()
    if place.store == "postgres":
        migrate(place.url, namespace=namespace)
    for figure in release_figures(place.url, namespace, quick=place.quick):
        yield figure.on(place.store)


FIGURES: tuple[Callable[[Place], Iterator[Figure]], ...] = (
    frozen_workers, poison, same_keys, lost_replies, repeats, stopped_server, worker_memory, schedulers,
    takeovers, daylight_saving, outbox, effects_once, slow_link, leases, exits, groups, releases,
)  # fmt: skip
#: The names that `--only` accepts, and those that `--counts` excludes because they measure times.
NAMES = (*(take.__name__ for take in FIGURES), "wakes", "tokens", "idle", "relays", "simulator", "lake", "spark")
TIMED_NAMES = ("idle", "takeovers", "spark", "releases")
#: What requests that change something contain; replies to the handshake of a new connection always pass.
VERBS = {"valkey": b"EVALSHA", "postgresql": b'"($1|waypost_'}


def main(arguments: list[str]) -> int:
    """Measure every figure on every store; the exit code is 1 if one is short."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.figures", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--counts", action="store_true", help="without figures that time something")
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=NAMES, help="this figure only; may be given several times"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return (options.only is None or name in options.only) and not (options.counts and name in TIMED_NAMES)

    # Lost leases are what some figures are about; a warning for each would hide the figures.
    logging.getLogger("waypost").setLevel(logging.ERROR)
    print(f"seed {options.seed}", flush=True)
    short = 0
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        valkey = stack.enter_context(ValkeyServer(appendonly=True))
        postgres = stack.enter_context(PostgresServer(durable=True, max_connections=300))
        migrate(postgres.url)
        urls = {
            "sqlite": f"sqlite:///{Path(directory) / 'figures.db'}",
            "valkey": valkey.url,
            "postgres": postgres.url,
        }
        servers: dict[str, EmbeddedServer] = {"valkey": valkey, "postgres": postgres}
        for store, url in urls.items():
            for take in (take for take in FIGURES if wanted(take.__name__)):
                began = time.monotonic()
                for figure in take(Place(store, url, options.quick, random.Random(options.seed), servers.get(store))):
                    short += not figure.ok
                    print(figure, flush=True)
                print(f"  {take.__name__} on {store}: {time.monotonic() - began:.1f} s", flush=True)
        places: dict[str, EmbeddedServer] = {}
        if wanted("wakes"):
            places = {"valkey": valkey, "postgres": stack.enter_context(PostgresServer(max_connections=300))}
        for store, place in places.items():
            for wake_figure in COUNTED_FIGURES if options.counts else (*COUNTED_FIGURES, *TIMED_FIGURES):
                for figure in wake_figure(Server(store, place.url, place.port), 3 if options.quick else 10):
                    short += not figure.ok
                    print(figure.on(store), flush=True)
        for crash in token_crashes(3 if options.quick else 20) if wanted("tokens") else ():
            short += not crash.ok
            print(crash.on("postgres"), flush=True)
        # Each worker polls once in 15 s: of a shorter span the polls at its ends decide.
        seconds = 45.0 if options.quick else 120.0
        found: list[tuple[str, Iterator[Figure]]] = []
        if wanted("idle"):
            found = [("sqlite", many_queues_in_a_file(f"sqlite:///{Path(directory) / 'idle.db'}", seconds))]
            large_postgres = stack.enter_context(PostgresServer(max_connections=CONNECTIONS))
            for store, server in (("valkey", valkey), ("postgres", large_postgres)):
                found.append((store, many_queues(Server(store, server.url, server.port), seconds)))
        for store, readings in found:
            for figure in readings:
                short += not figure.ok
                print(figure.on(store), flush=True)
        others: dict[str, Callable[[], Iterator[Figure]]] = {
            "relays": lambda: relay_figures(quick=options.quick),
            "simulator": lambda: simulator_figures(quick=options.quick, seed=options.seed),
            "lake": lambda: lake_figures(quick=options.quick),
            "spark": lambda: spark_figures(quick=options.quick),
        }
        for line in (line for name, measure in others.items() if wanted(name) for line in measure()):
            short += not line.ok
            print(line, flush=True)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
