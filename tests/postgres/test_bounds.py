"""Nothing grows with finished messages, without a background process: steps fold and remove as much as they add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from waypost import Waypost
from waypost.policy import ENDED_TTL_MS, SLEEPER_TTL_MS, WAITER_TTL_MS
from waypost.store.postgres import PostgresStore, migrate
from waypost.store.postgres.schema import VERSION
from waypost.testing.bench import QUEUE, Bench, fresh_namespace
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
    # Trimmed events are removed with their slice; test_journal_slices.py tests how slices are emptied.
    assert rows(database, namespace, "kept", "max(first)") > 500
    assert rows(database, namespace, "tally") < 150
    assert bench.ledger().published == 4_000
    numbers = [event.number for event in bench.events()]
    assert numbers == list(range(numbers[0], 4_002))


@pytest.mark.promise("STORE-2", "LEASE-6")
def test_expired_records_are_removed(server: PostgresServer, database: Database) -> None:
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


@pytest.mark.promise("STORE-2", "WAKE-2", "CHAIN-1")
def test_a_sweep_removes_expired_records_and_nothing_else(server: PostgresServer, database: Database) -> None:
    clock, name = ManualClock(), fresh_namespace()
    migrate(server.url, namespace=name)
    ends = {
        "window": 5_000, "result": 5_000, "sleeper": SLEEPER_TTL_MS, "waiter": WAITER_TTL_MS, "ending": ENDED_TTL_MS,
    }  # fmt: skip

    def swept() -> dict[str, int]:
        for queue in (1, 2):
            database.execute(f'SELECT "{name}_sweep_{VERSION}"({queue}, {clock()})'.encode())
        return {table: rows(database, name, table) for table in ends}

    with Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=name, clock=clock), "sync") as bench:
        for queue in ("orders", "mails"):
            bench.publish(queue=queue, key="a", window=5)
            lease = bench.claim_one(queue=queue)
            bench.watch(lease.id, "anna", queue=queue)
            bench.settle(lease, queue=queue, result=b"kept", result_ttl=5)
            bench.publish(queue=queue, delay=60)
            bench.watch(bench.ids("delayed", queue=queue)[0], "anna", queue=queue)
            assert bench.claim(queue=queue, sleeper="carl") == []
        began, there = clock(), swept()
        assert all(there.values())
        for end in sorted({*ends.values()}):
            for after_ms in (end - 1, end):
                clock.advance_ms(began + after_ms - clock())
                assert swept() == {table: there[table] if after_ms < ends[table] else 0 for table in ends}


#: How many rows may wait to be folded: the threshold of a step, and what a few steps add until one folds.
COUNTS_MAX = 700
STEPS = 60
EACH = 50


def drop_oldest(bench: Bench) -> None:
    bench.publish_drafts([bench.draft() for _ in range(EACH)], queue="capped")


def send_on(bench: Bench) -> None:
    bench.publish_drafts([bench.draft() for _ in range(EACH)], queue="first")
    leases = bench.claim(EACH, queue="first")
    bench.settle_batch(
        [bench.settlement(lease, then=[bench.continuation(lease, "second")]) for lease in leases], queue="first"
    )
    bench.settle_batch([bench.settlement(lease) for lease in bench.claim(EACH, queue="second")], queue="second")


def chains(bench: Bench) -> None:
    ids = bench.session.message_ids(EACH)
    bench.publish_drafts([bench.draft(id=id, chain=f"first/{id}") for id in ids], queue="first")
    bench.publish_drafts([bench.draft(after_chains=[f"first/{id}"]) for id in ids], queue="after")
    bench.settle_batch([bench.settlement(lease) for lease in bench.claim(EACH, queue="first")], queue="first")
    bench.settle_batch([bench.settlement(lease) for lease in bench.claim(EACH, queue="after")], queue="after")


def replaced(bench: Bench) -> None:
    keys = [f"key {number}" for number in range(EACH)]
    bench.publish_drafts([bench.draft(key=key, on_conflict="replace") for key in keys], queue="keyed")


def by_turns(bench: Bench) -> None:
    """Two queues in turn, so that the transaction ids of each are all even or all odd."""
    for _ in range(EACH):
        for queue in ("even", "odd", "third", "fourth"):
            bench.publish(queue=queue)


def keyed_by_turns(bench: Bench) -> None:
    """The same for a publish with a key."""
    for number in range(EACH // 5):
        for queue in ("even", "odd", "third", "fourth"):
            bench.publish(queue=queue, key=f"key {number}", on_conflict="replace")


@pytest.mark.promise("STORE-2")
@pytest.mark.parametrize("step", [drop_oldest, send_on, chains, replaced, by_turns, keyed_by_turns])
def test_counts_are_folded_as_fast_as_they_come(
    step: Callable[[Bench], None], bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(queue="capped", max_pending=EACH, overload="drop_oldest")
    most = 0
    for _ in range(STEPS):
        step(bench)
        most = max(most, rows(database, namespace, "tally"))
    assert most <= COUNTS_MAX


@pytest.mark.promise("STORE-2", "BOX-1")
@pytest.mark.parametrize("claimed", [False, True], ids=["never claimed", "claimed in large batches"])
def test_counts_of_callers_transactions_are_folded_as_fast_as_they_come(
    claimed: bool, server: PostgresServer, database: Database, namespace: str
) -> None:
    with (
        Waypost(server.url, namespace=namespace) as post,
        Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=namespace), "sync") as bench,
        psycopg.connect(server.url) as held,
        psycopg.connect(server.url) as connection,
    ):
        if not claimed:
            post.configure("orders", max_pending=EACH, overload="drop_oldest")
        else:
            # It stays open: its own counts are folded when it ends, and those of others meanwhile.
            post.publish("orders", 0, transaction=held)
        most = 0
        for _ in range(STEPS // 3):
            for number in range(EACH):
                post.publish("orders", number, transaction=connection)
                connection.commit()
            for _ in range(2 * claimed):
                bench.settle_batch(
                    [bench.settlement(lease) for lease in bench.claim(EACH // 2, queue="orders")], queue="orders"
                )
            most = max(most, rows(database, namespace, "tally"))
        held.commit()
        assert most <= COUNTS_MAX
        ledger = post.ledger("orders")
        assert (ledger.balance, ledger.published) == (0, STEPS // 3 * EACH + claimed)


@pytest.mark.promise("STORE-2", "PUB-4", "CHAIN-1", "CHAIN-2")
def test_expired_records_are_removed_as_fast_as_they_come(server: PostgresServer, database: Database) -> None:
    clock, name = ManualClock(), fresh_namespace()
    migrate(server.url, namespace=name)
    with Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=name, clock=clock), "sync") as bench:
        most: Counter[str] = Counter()
        each = 200
        for step in range(STEPS):
            keys = [f"key {step} {number}" for number in range(each)]
            ids = bench.session.message_ids(each)
            drafts = [
                bench.draft(key=key, id=id, window=1, chain=f"{QUEUE}/{id}") for key, id in zip(keys, ids, strict=True)
            ]
            bench.publish_drafts(drafts)
            leases = bench.claim(each)
            bench.settle_batch([bench.settlement(lease, result=b"kept", result_ttl=1) for lease in leases])
            # Longer than the memory of a chain that has ended.
            clock.advance(3601)
            for table in ("window", "result", "chain", "member", "tally"):
                most[table] = max(most[table], rows(database, name, table))
        assert {table: count for table, count in most.items() if count > 5 * each} == {}


@pytest.mark.promise("STORE-2", "SEE-3")
def test_the_journal_keeps_its_cap_when_each_message_is_an_entry(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(queue="second", journal_max=100)
    for _ in range(STEPS):
        send_on(bench)
    published = STEPS * EACH
    assert rows(database, namespace, "kept", "max(first)") > published
