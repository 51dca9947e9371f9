"""How many bytes a message takes on each store, for a sizing of servers and disks.

    python -m benchmarks.bytes [--messages 20000]

Publishes messages with bodies of 100, 1,000 and 10,000 bytes into an empty store and measures how it grows: the memory
of Valkey, the relations of PostgreSQL, the file of SQLite. First without a journal, then with it: the difference is its
events of a publish. The last column is what is left of each message after all were handled, with the journal.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

BODIES = (100, 1_000, 10_000)
QUEUE = "orders"
#: Returns the bytes that a store takes.
Measure = Callable[[], int]


@contextmanager
def empty_valkey() -> Iterator[tuple[str, Measure]]:
    """A new Valkey."""
    from redis import Redis

    with (
        ValkeyServer(maxmemory_policy="noeviction") as server,
        Redis(port=server.port, password=server.password) as client,
    ):
        yield server.url, lambda: int(client.info("memory")["used_memory"])


@contextmanager
def empty_postgres() -> Iterator[tuple[str, Measure]]:
    """A new PostgreSQL with waypost's tables."""
    import psycopg

    with PostgresServer() as server:
        migrate(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:

            def measure() -> int:
                # Autovacuum does this in the background: the space of messages that are done is used again.
                connection.execute("VACUUM")
                row = connection.execute(
                    "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
                    "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
                ).fetchone()
                return 0 if row is None else int(row[0])

            yield server.url, measure


@contextmanager
def empty_sqlite() -> Iterator[tuple[str, Measure]]:
    """A new file."""
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "waypost.db"

        def measure() -> int:
            connection = sqlite3.connect(path)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            pages, free, size = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
            connection.close()
            return int((pages - free) * size)

        yield f"sqlite:///{path}", measure


STORES = {"valkey": empty_valkey, "postgres": empty_postgres, "sqlite": empty_sqlite}


def measure_store(name: str, body_bytes: int, count: int, *, journal: bool) -> tuple[float, float]:
    """Return the bytes of a waiting message, and of one that is done."""
    with ExitStack() as stack:
        url, measure = stack.enter_context(STORES[name]())
        post = stack.enter_context(Waypost(url))
        post.configure(QUEUE, journal="all" if journal else "off")
        # What a first message creates is not a part of the others.
        post.publish(QUEUE, b"first")
        post.handler(QUEUE)(lambda body: None)
        before = measure()
        post.publish_many(QUEUE, (secrets.token_bytes(body_bytes) for _ in range(count)))
        waiting = (measure() - before) / count
        post.worker().run(until_empty=True, signals=False)
        return waiting, (measure() - before) / count


def main() -> None:
    """Print one line for each store and body."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000, metavar="N", help="messages of each (20000)")
    parser.add_argument("--store", choices=STORES, action="append", help="only this store")
    options = parser.parse_args()
    print(f"{'store':<10}{'body':>8}{'waiting':>10}{'with journal':>14}{'left when done':>16}")
    for name in options.store or STORES:
        for body in BODIES:
            plain, _ = measure_store(name, body, options.messages, journal=False)
            journalled, left = measure_store(name, body, options.messages, journal=True)
            print(f"{name:<10}{body:>8,}{plain:>10,.0f}{journalled:>14,.0f}{left:>16,.0f}", flush=True)


if __name__ == "__main__":
    main()
