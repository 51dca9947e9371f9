"""Rows that no claim can reach and wrong counters: found and repaired."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from waypost.store.port import Store
from waypost.store.postgres import PostgresStore, migrate
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.conformance.damage import check
from waypost.testing.postgres import PostgresServer

pytestmark = pytest.mark.promise("SEE-5", "STORE-2")


@pytest.fixture
def name(server: PostgresServer) -> str:
    namespace = fresh_namespace()
    migrate(server.url, namespace=namespace)
    return namespace


@pytest.fixture
def bench(server: PostgresServer, name: str) -> Iterator[Bench]:
    def make(clock: Any, namespace: str) -> Store:
        return cast(Store, PostgresStore.from_url(server.url, namespace=name, clock=clock))

    with Bench(make, "sync") as subject:
        yield subject


@pytest.mark.parametrize(
    ("damage", "kind"),
    [("lease_end_ms = NULL", "unreadable"), ("state = -3", "stranded")],
)
def test_a_lease_without_an_end_is_repaired(bench: Bench, database: Any, name: str, damage: str, kind: str) -> None:
    bench.configure(lease=10)
    ids = bench.publish_count(5)
    bench.claim(5)
    database.execute(f'UPDATE "{name}_message" SET {damage} WHERE id = %s', [ids[2]])
    database.commit()
    bench.after(10)
    assert {lease.id for lease in bench.claim(50)} == {*ids} - {ids[2]}
    [found] = [damage for damage in check(bench) if damage.id is not None]
    assert (found.kind, found.id) == (kind, ids[2])
    check(bench, mend=True)
    assert check(bench) == []
    again = bench.claim_one()
    assert (again.id, again.token) == (ids[2], 2)
    assert (bench.ledger().balance, bench.ledger().unexplained, bench.ledger().leased) == (0, 0, 5)


def test_a_dead_letter_without_a_reason_can_be_redriven_after_a_repair(bench: Bench, database: Any, name: str) -> None:
    bench.publish()
    bench.settle(bench.claim_one(), "dead")
    database.execute(f'UPDATE "{name}_message" SET reason = NULL')
    database.commit()
    assert bench.redrive().moved == []
    check(bench, mend=True)
    assert len(bench.redrive().moved) == 1
    assert bench.ledger().balance == 0


def test_counters_follow_the_rows(bench: Bench, database: Any, name: str) -> None:
    ids = bench.publish_count(5)
    database.execute(f'DELETE FROM "{name}_message" WHERE id = %s', [ids[1]])
    database.commit()
    assert [damage.kind for damage in check(bench)] == ["counters"]
    check(bench, mend=True)
    ledger = bench.ledger()
    assert (ledger.ready, ledger.dropped, ledger.balance) == (4, 1, 0)
    assert check(bench) == []
