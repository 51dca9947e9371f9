"""Nothing grows with messages done, even if nobody ever looks: one step in 64 tidies up."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from waypost.store.postgres import PostgresStore, migrate
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.postgres import PostgresServer

Database = psycopg.Connection[Any]


def rows(database: Database, namespace: str, table: str, what: str = "count(*)") -> int:
    found = database.execute(f'SELECT coalesce({what}, 0) FROM "{namespace}_{table}"').fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.promise("STORE-2", "SEE-3", "SEE-5")
def test_counts_are_folded_and_the_journal_keeps_its_cap_without_a_reader(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(journal_max=100)
    for _ in range(200):
        bench.publish_drafts([bench.draft() for _ in range(20)])
    # What is forgotten goes with its slice; how slices are emptied is shown in test_journal_slices.py.
    assert rows(database, namespace, "kept", "max(first)") > 500
    assert rows(database, namespace, "tally") < 150
    assert bench.ledger().published == 4_000
    numbers = [event.number for event in bench.events()]
    assert numbers == list(range(numbers[0], 4_002))


@pytest.mark.promise("STORE-2", "LEASE-6")
def test_what_has_run_out_is_swept(server: PostgresServer, database: Database) -> None:
    clock, name = ManualClock(), fresh_namespace()
    migrate(server.url, namespace=name)
    with Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=name, clock=clock), "sync") as bench:
        for number in range(50):
            bench.publish(key=f"key {number}", window=5)
        for lease in bench.claim(50):
            bench.settle(lease, result=b"kept", result_ttl=5)
        assert rows(database, name, "window") == rows(database, name, "result") == 50
        clock.advance(3600)
        other = bench.another_client()
        for _ in range(300):
            other.publish()
        assert rows(database, name, "window") == rows(database, name, "result") == 0
        sessions = rows(database, name, "operation", "count(DISTINCT session)")
        assert sessions == 1
        assert rows(database, name, "operation") == 128
