"""Removing a queue by both clients on every store, and what is left of it afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.conformance.conftest import tables
from tests.unit.clients import MODES, open_client
from waypost.errors import QueueNotEmpty
from waypost.testing.bench import QUEUE, Bench, StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.values import StoredSchedule

#: The tables of the SQL stores in which something of a removed queue may be left, until it runs out.
RUNS_OUT = {"operation", "arrival", "session", "replay"}


@pytest.fixture(params=MODES)
def post(request: pytest.FixtureRequest, make_store: StoreMaker) -> Iterator[Any]:
    with open_client(request.param, store=make_store(ManualClock(), fresh_namespace()), wake="poll") as client:
        yield client


@pytest.mark.promise("QUEUE-8", "SEE-6")
def test_a_queue_that_is_not_empty_is_refused_with_what_is_left_in_it(post: Any) -> None:
    post.publish("orders", 1)
    post.publish("orders", 2, delay=60)
    post.save_schedule("hourly", queue="orders", every=3600, body={})
    post.journal_reader("orders", "lake")
    with post.receive("orders") as message:
        message.dead("bad")
    with pytest.raises(QueueNotEmpty) as refusal:
        post.remove_queue("orders")
    assert refusal.value.left == {"delayed": 1, "dead": 1, "schedules": 1, "readers": 1}
    for part in ("queue orders is not empty", "1 delayed message (", "1 dead letter (", "1 schedule (", "1 reader of"):
        assert part in str(refusal.value)
    assert post.ledger("orders").balance == 0
    post.purge("orders", "delayed")
    post.purge("orders", "dead")
    post.remove_schedule("hourly", queue="orders")
    post.journal_forget("orders", "lake")
    assert post.remove_queue("orders")


@pytest.mark.promise("QUEUE-8")
def test_a_client_goes_on_in_a_new_queue_at_once(post: Any) -> None:
    """In the same millisecond as the removal: the first request is refused, and the client makes a new stamp."""
    post.configure("orders", lease=10)
    post.publish("orders", 1, key="k", window=3600)
    with post.receive("orders") as message:
        assert message.body == 1
    assert post.remove_queue("orders")
    assert not post.remove_queue("orders")
    assert post.queues() == []
    with post.receive("orders") as nothing:
        assert nothing is None
    assert post.queues() == []
    assert post.publish("orders", 2, key="k", window=3600).status == "queued"
    assert post.queues() == ["orders"]
    assert post.policy("orders").lease == timedelta(seconds=60)
    with post.receive("orders") as message:
        assert message.body == 2
    ledger = post.ledger("orders")
    assert (ledger.published, ledger.done, ledger.balance, ledger.unexplained) == (1, 1, 0, 0)


def use_everything(bench: Bench) -> None:
    """Use every feature of a queue, and empty it."""
    bench.configure(completed=10, rate="1000/s", journal="full", max_pending=100)
    bench.publish(key="k", window=3600, group="g")
    bench.publish(b"timer", delay=1)
    bench.publish_drafts([bench.draft(forwarded=True)])
    bench.begin_chain()
    bench.after(2)
    due_ms = bench.now_ms + 3_600_000
    schedule = StoredSchedule("hourly", "v1", b"spec", False, due_ms, due_ms)
    bench.run(bench.store.save_schedule("orders", schedule, version=None, next_ms=None))
    bench.run(bench.store.schedules_changed("orders"))
    bench.run(bench.store.journal_reader("orders", "lake", None))
    for lease in bench.claim_all():
        bench.watch(lease.id, "someone")
        bench.settle(lease, result=b"result")
    bench.deliver_all()
    bench.publish()
    bench.settle(bench.claim_one(), "dead", reason="rejected")
    bench.claimed(sleeper="anna", poll_soon_ms=50)
    bench.purge("dead")
    bench.run(bench.store.remove_schedule("orders", "hourly"))
    bench.run(bench.store.journal_forget("orders", "lake"))


@pytest.mark.promise("QUEUE-8", "STORE-1")
@pytest.mark.parametrize("store_name", ["valkey", "redis62"], indirect=True)
def test_every_key_that_is_left_on_valkey_expires(make_store: StoreMaker, store_name: str, request: Any) -> None:
    import redis

    url = request.getfixturevalue("valkey_url" if store_name == "valkey" else "redis_url")
    with Bench(make_store, "sync") as bench, redis.Redis.from_url(url.replace("valkey", "redis")) as client:
        use_everything(bench)
        base = f"{{{bench.namespace}:orders}}:"
        before = {key.decode().removeprefix(base) for key in client.scan_iter(match=base + "*", count=10_000)}
        assert {"queue", "journal", "completed", "window:k", "arrivals"} <= before
        assert bench.remove().existed
        bench.after(1)
        bench.claimed(sleeper="anna")
        left = {key.decode(): client.pttl(key) for key in client.scan_iter(match=base + "*", count=10_000)}
        assert {name for name, ttl in left.items() if ttl <= 0} == set()
        kinds = {name.removeprefix(base).partition(":")[0] for name in left}
        assert kinds <= {"queue", "arrivals", "operations", "sleepers", "window", "result", "end", "chain", "waiters"}
        assert client.memory_usage(base + "queue") < 500
        assert not client.sismember(f"{bench.namespace}:queues", "orders")
        assert not client.hexists(f"{bench.namespace}:scheduled", "orders")


def rows_left(execute: Any, names: dict[str, str]) -> dict[str, int]:
    """Return how many rows there are in each table."""
    counts = {table: execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for table, name in names.items()}
    return {table: count for table, count in counts.items() if count}


@pytest.mark.promise("QUEUE-8", "STORE-3")
@pytest.mark.parametrize("store_name", ["sqlite"], indirect=True)
def test_no_row_of_a_removed_queue_is_left_in_a_file(make_store: StoreMaker) -> None:
    from waypost.store.sqlite.schema import TABLES

    with Bench(make_store, "sync") as bench:
        store: Any = bench.store
        use_everything(bench)
        names = {table: store.spelling.name(table) for table in TABLES if table not in ("reserve", "meta", "record")}
        with sqlite3.connect(store.path) as file:
            before = rows_left(file.execute, names)
            assert {"entry", "window", "result", "completed", "rate", "minute", "arrival"} <= before.keys()
            assert bench.remove().existed
            left = rows_left(file.execute, names)
        assert {table: count for table, count in left.items() if table not in RUNS_OUT} == {"queue": 1}
        bench.after(31 * 86_400)
        bench.publish(queue="another")
        bench.publish(queue="one more")
        with sqlite3.connect(store.path) as file:
            kept = dict(file.execute(f'SELECT name, number FROM "{names["queue"]}"').fetchall())
            marks = file.execute(f"SELECT count(*) FROM \"{store.spelling.name('meta')}\" WHERE name LIKE 'removal:%'")
            assert (sorted(kept), marks.fetchone()[0]) == (["another", "one more"], 0)


@pytest.mark.promise("QUEUE-8", "STORE-2")
@pytest.mark.parametrize("store_name", ["postgres"], indirect=True)
def test_no_row_of_a_removed_queue_is_left_in_the_tables(make_store: StoreMaker, postgres: Any) -> None:
    import psycopg

    with Bench(make_store, "sync") as bench, psycopg.connect(postgres.url, autocommit=True) as connection:
        store: Any = bench.store
        use_everything(bench)
        names = {table: f"{store.names.namespace}_{table}" for table in tables() if table != "record"}
        before = rows_left(connection.execute, names)
        assert {"entry", "window", "result", "completed", "rate", "arrival"} <= before.keys()
        assert bench.remove().existed
        left = rows_left(connection.execute, names)
        # The row of the queue, and where the numbers of its journal go on.
        assert {table: count for table, count in left.items() if table not in RUNS_OUT} == {
            "queue": 1, "mark": 1, "kept": 1,
        }  # fmt: skip
        bench.after(31 * 86_400)
        bench.publish(queue="another")
        bench.settle(bench.claim_one(queue="another"), queue="another")
        assert bench.remove(queue="another").existed
        found = connection.execute(f'SELECT name FROM "{names["queue"]}"').fetchall()
        assert found == [("another",)]


@pytest.mark.promise("QUEUE-8")
@pytest.mark.parametrize("store_name", ["memory", "sqlite", "postgres"], indirect=True)
def test_numbers_of_the_journal_go_on_for_thirty_days(make_store: StoreMaker) -> None:
    """On Valkey the record of a removed queue expires by the server's own clock."""
    with Bench(make_store, "sync") as bench:

        def first_number(days: int) -> int:
            bench.settle(bench.claim_one())
            assert bench.remove().existed
            bench.after(days * 86_400)
            # Another removal forgets the names whose time is over.
            bench.publish(queue="another")
            bench.settle(bench.claim_one(queue="another"), queue="another")
            assert bench.remove(queue="another").existed
            bench.after(1)
            bench.publish()
            return bench.events()[0].number

        bench.publish()
        assert first_number(29) == 4
        assert first_number(31) == 1


@pytest.mark.promise("QUEUE-8", "STORE-2")
@pytest.mark.parametrize("store_name", ["postgres"], indirect=True)
@pytest.mark.parametrize("numbered", [False, True])
def test_a_long_history_goes_in_bounded_steps(make_store: StoreMaker, postgres: Any, numbered: bool) -> None:
    import psycopg

    with Bench(make_store, "sync") as bench, psycopg.connect(postgres.url, autocommit=True) as connection:
        store: Any = bench.store
        name = store.names.namespace
        bench.configure(completed=10)
        bench.publish_count(5)
        for lease in bench.claim(5):
            bench.settle(lease)
        connection.execute(
            f'INSERT INTO "{name}_entry" (queue, count, xid, seq, at_ms, event, ids) '
            f"SELECT queue, 1, xid, seq + n, at_ms, event, ARRAY[repeat('x', 24)] "
            f'FROM "{name}_entry" e, generate_series(1, 40000) n WHERE e.seq = (SELECT max(seq) FROM "{name}_entry")'
        )
        connection.execute(f"SELECT setval('\"{name}_sequence\"', nextval('\"{name}_sequence\"') + 50000)")
        last = 40_000 + 1 + 3 * 5
        if numbered:  # by a reader, who read a part
            assert bench.run(store.journal_trim(QUEUE, 100)) == 101
            assert bench.run(store.journal(QUEUE, 0, 1)).newest == last
        kept = []
        while True:
            removal = bench.run(store.remove(QUEUE, bench.operation()))
            if not removal.more:
                break
            [(first,)] = connection.execute(f'SELECT first FROM "{name}_kept"').fetchall()
            kept.append(first)
        assert (removal.existed, removal.left) == (True, {})
        # The first entries hold several events each.
        entries = 1 + 1 + 1 + 5
        assert kept == [16_384 - entries + 16 + 1, 2 * 16_384 - entries + 16 + 1]
        bench.after(1)
        bench.publish()
        page = bench.run(store.journal(QUEUE, 0, 10))
        assert [event.number for event in page.events] == [last + 1]


@pytest.mark.promise("QUEUE-8")
@pytest.mark.parametrize("store_name", ["postgres"], indirect=True)
def test_an_open_transaction_that_publishes_keeps_its_queue(make_store: StoreMaker, postgres: Any) -> None:
    import psycopg

    clock = ManualClock()
    with open_client("sync", store=make_store(clock, fresh_namespace()), wake="poll") as post:
        post.publish("orders", 1)
        with post.receive("orders"):
            pass
        for level in (psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.REPEATABLE_READ):
            with psycopg.connect(postgres.url) as connection:
                connection.isolation_level = level
                connection.execute("SELECT 1")
                published = post.publish("orders", 2, transaction=connection)
                with pytest.raises(QueueNotEmpty) as refusal:
                    post.remove_queue("orders")
                assert refusal.value.left == {"transactions": 1}
                connection.commit()
            with post.receive("orders") as message:
                assert message.id == published.id
        with psycopg.connect(postgres.url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT 1")
            assert post.remove_queue("orders")
            # A snapshot from before the removal has the settings that the queue had then.
            with pytest.raises(psycopg.errors.SerializationFailure):
                post.publish("orders", 3, transaction=connection)
            connection.rollback()
            assert post.queues() == []
            published = post.publish("orders", 3, transaction=connection)
            connection.commit()
        assert post.queues() == ["orders"]
        with post.receive("orders") as message:
            assert (message.id, message.body) == (published.id, 3)
        assert post.ledger("orders").balance == 0
