"""Programs that are killed again and again in the middle of their work, and counts of what they left."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.outbox.transaction_kinds import TABLE
from waypost import Waypost
from waypost.outbox import inbox_sql
from waypost.store.postgres import migrate

ROOT = Path(__file__).parents[2]
#: The leases of a killed worker end after this.
LEASE_SECONDS = 0.5
#: Longer than any of this takes, even on a busy machine.
TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Sold:
    """Rows of the user's table, messages, and how often the program was killed."""

    rows: list[int]
    messages: list[int]
    kills: int


def start(module: str, *given: object) -> subprocess.Popen[str]:
    command: Sequence[str] = [sys.executable, "-m", module, *map(str, given)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def sell(kind: str, url: str, namespace: str, *, transactions: int, kills: int) -> Sold:
    """Run `transactions` transactions, half of them rolled back, in processes that are killed `kills` times."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            file.execute(TABLE)
            file.execute("DELETE FROM shop")
            file.commit()
    else:
        migrate(url, namespace=namespace)
        with psycopg.connect(url) as connection:
            connection.execute(TABLE)
            connection.execute("TRUNCATE shop")
    with Waypost(url, namespace=namespace) as post:
        post.ledger("sales")
        program = start("tests.outbox.killed_writer", kind, url, namespace, transactions // kills, kills)
        killed = int(program.communicate(timeout=TIMEOUT_SECONDS)[0])
        messages = sorted(message.body for message in post.messages("sales"))
        assert post.ledger("sales").balance == 0
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            rows = [row[0] for row in file.execute("SELECT n FROM shop ORDER BY n")]
    else:
        with psycopg.connect(url) as connection:
            rows = [row[0] for row in connection.execute("SELECT n FROM shop ORDER BY n")]
    return Sold(rows, messages, killed)


def have_effects(kind: str, url: str, namespace: str, database: str, *, messages: int, kills: int) -> tuple[int, int]:
    """Handle messages with workers that are killed `kills` times; return the number of rows, and of distinct ones."""
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS effect (n bigint)")
        connection.execute("TRUNCATE effect")
        connection.execute(inbox_sql().encode())
    if url.startswith("postgresql"):
        migrate(url, namespace=namespace)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with Waypost(url, namespace=namespace) as post:
        post.configure("sales", lease=LEASE_SECONDS, max_deliveries=None)
        post.publish_many("sales", range(messages))
        share = messages / (kills + 1)
        program = start("tests.outbox.killed_worker", kind, url, namespace, database)
        assert program.stdin is not None
        assert program.stdout is not None
        for number in range(kills + 1):
            program.stdin.write("\n")
            program.stdin.flush()
            worker = int(program.stdout.readline())
            target = messages if number == kills else min(messages - 1, int(share * (number + 1)))
            try:
                while post.ledger("sales").done < target:
                    assert time.monotonic() < deadline, f"{post.ledger('sales').done} of {messages} done"
                    time.sleep(0.01)
            finally:
                os.kill(worker, signal.SIGKILL)
        program.communicate(timeout=TIMEOUT_SECONDS)
        assert post.ledger("sales").balance == 0
    with psycopg.connect(database) as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT n) FROM effect").fetchone()
        assert found is not None
        return int(found[0]), int(found[1])
