"""A page of the journal reads what it returns, also on a connection that first read it when it was empty."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from waypost.store.postgres.schema import VERSION
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.postgres import PostgresServer

Database = psycopg.Connection[Any]

ENTRIES = 50_000
PAGE = 1_000
#: Each entry of a page is read twice (its count, then the whole of it), and a page reads 64 entries ahead.
ROWS_MAX = 3 * PAGE


def fill_journal(database: Database, namespace: str) -> None:
    """Copy the first entry of the journal until there are `ENTRIES`, as after as many steps of one message."""
    database.execute(
        f'INSERT INTO "{namespace}_entry" (queue, count, xid, seq, at_ms, event, ids, sizes) '
        f"SELECT e.queue, e.count, e.xid, nextval('\"{namespace}_sequence\"'), e.at_ms, e.event, e.ids, e.sizes "
        f'FROM (SELECT * FROM "{namespace}_entry" LIMIT 1) e, generate_series(2, {ENTRIES})'
    )


def rows_read(reader: Database, namespace: str, call: str) -> tuple[int, int]:
    """Return how many rows a call returns, and how many entries of the journal it reads."""

    def read_so_far() -> int:
        found = reader.execute(
            "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables "
            "WHERE starts_with(relname, %s) OR relname = %s",
            (f"{namespace}_entry", f"{namespace}_rest"),
        ).fetchone()
        assert found is not None
        return int(found[0])

    with reader.transaction():
        before = read_so_far()
        returned = reader.execute(call).fetchall()
        return len(returned), read_so_far() - before


def connect_early(server: PostgresServer, call: str) -> Database:
    """Return a connection that has made this call on an empty journal: its plans are made by then."""
    reader = psycopg.connect(server.url, autocommit=True)
    for _ in range(10):  # the server may plan the first few calls anew
        reader.execute(call)
    return reader


@pytest.mark.promise("SEE-5")
def test_a_reader_that_first_saw_an_empty_journal_reads_only_its_page(
    server: PostgresServer, bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure()
    page = f"SELECT * FROM \"{namespace}_journal_{VERSION}\"('{QUEUE}', NULL, {{}}, {PAGE})"
    with connect_early(server, page.format(0)) as reader:
        bench.publish()
        fill_journal(database, namespace)
        reader.execute(page.format(0))  # numbers the entries, and for that reads each of them once
        returned, read = rows_read(reader, namespace, page.format(ENTRIES // 2))
    assert returned == PAGE + 1
    assert read <= ROWS_MAX


@pytest.mark.promise("SEE-5")
def test_a_history_first_read_on_an_empty_journal_reads_each_entry_once(
    server: PostgresServer, bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure()
    history = f"SELECT * FROM \"{namespace}_trace_{VERSION}\"('{QUEUE}', NULL, '{{}}')"
    with connect_early(server, history.format("0" * 24)) as reader:
        bench.publish()
        fill_journal(database, namespace)
        message_id = bench.publish().id
        reader.execute(history.format(message_id))
        returned, read = rows_read(reader, namespace, history.format(message_id))
    assert returned == 2
    # The entries of a message are searched among all, each read once; what is found is read by its position.
    assert read <= ENTRIES + 100
