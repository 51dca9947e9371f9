"""Migrate a database with millions of messages while others flow, and print how long publishes and claims took.

    python -m tests.upgrade.large_migration [--messages 5000000] [--rate 1000] [--seconds 30]

The next release is the planted build of next_release.py: columns of three tables, one of them filled in batches for
every message, an index over all messages, and functions. Processes of this release publish and work through `migrate`,
those of the next one replace them, then comes `--finish`. It fails if a figure is short.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from tests.fault.figure import Figure
from tests.fault.release_figures import compare_times, report
from tests.upgrade.fleet import Fleet
from tests.upgrade.next_release import build
from tests.upgrade.traffic import TICK_SECONDS
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer

#: The part of the messages that is published one by one: these are timed.
SINGLE_RATE = 50.0
ROLES = ("publish", "receive", "work", "work2")
FLOWS = ("flow", "flow2")
FILL_AT_ONCE = 500_000
MIGRATE_SECONDS_MAX = 3600.0
#: What comes this long after a step still counts as its effect.
SECONDS_AFTER = 5.0

#: Copies of one message under other ids, and the count of them.
FILL = """
INSERT INTO wp_message (seq, position, ready_ms, published_ms, queue, state, rank, id, data)
SELECT s, s, m.ready_ms, m.published_ms, m.queue, m.state, m.rank, i,
    substring(m.data FROM 1 FOR 1) || convert_to(i, 'UTF8') || substring(m.data FROM 26)
FROM (SELECT * FROM wp_message WHERE queue = (SELECT number FROM wp_queue WHERE name = 'archive') LIMIT 1) m
CROSS JOIN LATERAL (
    SELECT nextval('wp_sequence') AS s, left(m.id, 14) || lpad(n::text, 10, '0') AS i
    FROM generate_series(%s::bigint, %s) n
    WHERE m.id IS NOT NULL) c
"""
COUNT = """
INSERT INTO wp_tally (seq, queue, minute, ready, published)
SELECT nextval('wp_sequence'), number, floor(extract(epoch FROM clock_timestamp()) / 60), %s, %s FROM wp_queue
WHERE name = 'archive'
"""


def fill(url: str, count: int) -> None:
    """Put messages into a queue that nothing handles."""
    with Waypost(url) as post:
        post.publish("archive", {"order": 12_345, "customer": "somebody", "items": [1, 2, 3]})
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(1, count, FILL_AT_ONCE):
            last = min(count - 1, first + FILL_AT_ONCE - 1)
            with connection.transaction():
                connection.execute(FILL, (first, last))
                connection.execute(COUNT, (last - first + 1, last - first + 1))
        connection.execute("VACUUM ANALYZE wp_message")


def figures(url: str, folder: Path, *, messages: int, rate: float, seconds: float) -> Iterator[Figure]:
    """Fill the database, then migrate it under load."""
    began = time.monotonic()
    fill(url, messages)
    print(f"  filled in {time.monotonic() - began:.0f} s", flush=True)
    title = f"migration of {messages:,} messages"
    fleet = Fleet(url, "wp", folder, build(folder / "next"), rate=SINGLE_RATE, politely=True)
    with Waypost(url) as post:
        post.save_schedule("tick", queue="ticks", every=TICK_SECONDS, body="tick")
    try:
        fleet.start("this", *ROLES)
        fleet.start("this", *FLOWS, rate=(rate - SINGLE_RATE) / len(FLOWS))
        fleet.wait_for_more("this", "receive")
        usual = time.monotonic()
        fleet.wait_for_more("this", "publish", int(SINGLE_RATE * seconds))
        upgrade = time.monotonic()
        code, printed = fleet.migrate("next", seconds=MIGRATE_SECONDS_MAX)
        yield Figure(f"{title}: migrate", f"{time.monotonic() - upgrade:.1f} s", "exit code 0", code == 0)
        print(f"  {printed.strip()}", flush=True)
        fleet.wait_for_more("this", "publish", int(SINGLE_RATE * SECONDS_AFTER))
        migrated = time.monotonic()
        fleet.start("next", *ROLES)
        fleet.wait_for_more("next", "receive")
        fleet.stop("this", *FLOWS, *ROLES)
        fleet.start("next", *FLOWS, rate=(rate - SINGLE_RATE) / len(FLOWS))
        fleet.wait_for_more("next", "publish", int(SINGLE_RATE * SECONDS_AFTER))
        code, printed = fleet.migrate("next", "--finish")
        yield Figure(f"{title}: finish at once", f"exit code {code}", "refused: 1", code == 1)
        fleet.pass_time_without_calls()
        began = time.monotonic()
        code, printed = fleet.migrate("next", "--finish")
        yield Figure(f"{title}: finish", f"{time.monotonic() - began:.1f} s", "exit code 0", code == 0)
        fleet.wait_for_more("next", "publish", int(SINGLE_RATE * SECONDS_AFTER))
        ended = time.monotonic()
        fleet.stop("next", *FLOWS, "publish")
        fleet.wait_until_handled()
        fleet.stop("next", "work", "work2", "receive")
        windows = [(usual, upgrade), (upgrade, migrated), (began, ended)]
        published = [note.began for what in ("publish", "flow") for note in fleet.all_notes(what)]
        flowed = sum(first <= at < last for first, last in windows for at in published)
        flow = flowed / sum(last - first for first, last in windows)
        yield Figure(f"{title}: messages a second", f"{flow:.0f}", f"{rate:.0f} offered", flow >= 0.9 * rate)
        yield from judge(title, fleet, messages)
        yield from compare_times(title, fleet, windows[0], windows[1:])
    finally:
        fleet.stop_all()


def judge(title: str, fleet: Fleet, messages: int) -> Iterator[Figure]:
    """Compare what was published and handled."""
    ledgers = report(fleet)["ledgers"]
    lost = Counter(fleet.published()) - Counter(fleet.handled())
    again = (Counter(fleet.handled()) - Counter(fleet.published())).total()
    explained = sum(ledger[4] for ledger in ledgers.values())
    yield Figure(
        f"{title}: {len(fleet.published())} others", f"lost {lost.total()}, doubled {again} ({explained} explained)",
        "0, as many as explained", not lost and again <= explained,
    )  # fmt: skip
    sound = all(tuple(ledger[2:4]) == (0, 0) for ledger in ledgers.values()) and ledgers["archive"][0] == messages
    yield Figure(f"{title}: ledgers", "balanced" if sound else f"{ledgers}", "balanced", sound)


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code is 1 if one is short."""
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade.large_migration", description=__doc__)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--rate", type=float, default=1_000.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the usual times are measured")
    options = parser.parse_args(arguments)
    short = 0
    with TemporaryDirectory() as folder, PostgresServer(durable=True) as server:
        migrate(server.url)
        for figure in figures(
            server.url, Path(folder), messages=options.messages, rate=options.rate, seconds=options.seconds
        ):
            short += not figure.ok
            print(figure, flush=True)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
