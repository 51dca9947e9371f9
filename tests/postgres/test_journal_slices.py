"""The journal is partitioned into slices that are emptied whole: no event is lost, and no client waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from waypost.store.postgres import PostgresStore
from waypost.store.postgres.schema import VERSION
from waypost.testing.bench import Bench
from waypost.testing.clock import ManualClock
from waypost.testing.postgres import PostgresServer

Database = psycopg.Connection[Any]
SideBySide = Callable[[list[Callable[[], object]]], list[object]]

SLICES = "abcdefgh"
#: A slice is full after about forty entries here, so that the whole ring turns within a test.
SMALL = 32 * 1024
#: Longer than a slice rests before it is emptied.
REST_SECONDS = 61


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def subject(server: PostgresServer, namespace: str, database: Database, clock: ManualClock) -> Iterator[Bench]:
    make_slices_small(database, namespace)
    with Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=namespace, clock=clock), "sync") as bench:
        yield bench
        bench.check_invariants()


def make_slices_small(database: Database, namespace: str) -> None:
    database.execute(
        f'CREATE OR REPLACE FUNCTION "{namespace}_slice_bytes_{VERSION}"() RETURNS bigint LANGUAGE sql IMMUTABLE '
        f"AS $body$ SELECT {SMALL}::bigint $body$"
    )


def turn(database: Database, namespace: str, clock: ManualClock, *, times: int = 1) -> None:
    """Maintain every slice, as one step in 64 does with one of them, and let their rest time pass."""
    for _ in range(times):
        for number in range(len(SLICES)):
            database.execute(f'SELECT "{namespace}_rotate_journal_{VERSION}"(%s, %s)', (clock(), number))
        clock.advance(REST_SECONDS)


def entries(database: Database, namespace: str, table: str, queue: str = "%") -> int:
    found = database.execute(
        f'SELECT count(*) FROM "{namespace}_{table}" e JOIN "{namespace}_queue" q ON q.number = e.queue '
        "WHERE q.name LIKE %s",
        (queue,),
    ).fetchone()
    assert found is not None
    return int(found[0])


def filled(database: Database, namespace: str) -> int:
    """Return the slice that writers fill."""
    found = database.execute(f'SELECT last_value FROM "{namespace}_turn"').fetchone()
    assert found is not None
    return int(found[0])


def fill(bench: Bench, database: Database, namespace: str, clock: ManualClock, *, queue: str = "orders") -> None:
    """Publish until writers fill another slice."""
    before = filled(database, namespace)
    for _ in range(40):
        for _ in range(10):
            bench.publish(queue=queue)
        turn(database, namespace, clock)
        if filled(database, namespace) != before:
            return
    pytest.fail("no slice was ever full")


def numbers(bench: Bench, queue: str = "orders") -> list[int]:
    return [event.number for event in bench.events(queue=queue)]


@pytest.mark.promise("SEE-3", "STORE-2")
def test_a_slice_whose_events_are_all_trimmed_is_emptied_whole(
    subject: Bench, database: Database, namespace: str, clock: ManualClock
) -> None:
    fill(subject, database, namespace, clock)
    first = filled(database, namespace) - 1
    held = entries(database, namespace, f"entry_{SLICES[first]}", "orders")
    assert held >= 20
    subject.run(subject.store.journal_trim("orders", held))
    turn(database, namespace, clock, times=3)
    assert entries(database, namespace, f"entry_{SLICES[first]}") == 0
    size = database.execute("SELECT pg_relation_size(%s)", (f"{namespace}_entry_{SLICES[first]}",)).fetchone()
    assert size == (0,)
    assert numbers(subject) == list(range(held + 1, subject.ledger().published + 1))


@pytest.mark.promise("SEE-3", "STORE-2")
def test_a_slice_rests_for_a_minute_before_it_is_emptied(
    subject: Bench, database: Database, namespace: str, clock: ManualClock
) -> None:
    """A snapshot from before its last events moved may still read them there."""
    fill(subject, database, namespace, clock)
    first = filled(database, namespace) - 1
    held = entries(database, namespace, f"entry_{SLICES[first]}", "orders")
    subject.run(subject.store.journal_trim("orders", held))
    sizes = []
    for wait_ms in (0, 0, 59_999, 1):
        clock.advance_ms(wait_ms)
        database.execute(f'SELECT "{namespace}_rotate_journal_{VERSION}"(%s, %s)', (clock(), first))
        found = database.execute("SELECT pg_relation_size(%s)", (f"{namespace}_entry_{SLICES[first]}",)).fetchone()
        assert found is not None
        sizes.append(found[0] > 0)
    assert sizes == [True, True, True, False]


@pytest.mark.promise("SEE-3", "STORE-2")
def test_slices_turn_and_the_journal_stays_small_and_without_a_gap(
    subject: Bench, database: Database, namespace: str, clock: ManualClock
) -> None:
    subject.configure(journal_max=100)
    used: set[int] = set()
    for _ in range(60):
        for _ in range(40):
            subject.publish()
        turn(database, namespace, clock)
        used.add(filled(database, namespace))
        kept = numbers(subject)
        assert kept == list(range(kept[0], subject.ledger().published + 2))
        if len(used) == len(SLICES):
            break
    assert len(used) == len(SLICES)
    assert sum(entries(database, namespace, f"entry_{name}") for name in SLICES) < 1_500


@pytest.mark.promise("SEE-3", "SEE-5", "STORE-2")
def test_the_few_events_of_a_quiet_queue_outlive_the_slice_of_a_busy_one(
    subject: Bench, database: Database, namespace: str, clock: ManualClock
) -> None:
    quiet = subject.publish(queue="quiet").id
    for _ in range(3):
        fill(subject, database, namespace, clock)
        subject.run(subject.store.journal_trim("orders", 1_000_000))
    turn(database, namespace, clock, times=3)
    assert entries(database, namespace, "entry_a", "quiet") == 0
    assert entries(database, namespace, "rest", "quiet") == 1
    assert [(event.number, event.message_id) for event in subject.events(queue="quiet")] == [(1, quiet)]
    for lease in subject.claim(5, queue="quiet"):
        subject.settle(lease, queue="quiet")
    assert [event.event for event in subject.trace(quiet, queue="quiet")] == ["published", "claimed", "done"]
    assert numbers(subject, "quiet") == [1, 2, 3]
    # Events that were moved there are trimmed like all others.
    subject.run(subject.store.journal_trim("quiet", 3))
    assert numbers(subject, "quiet") == []


@pytest.mark.promise("SEE-3", "STORE-2")
def test_events_that_a_reader_has_not_read_are_kept(
    subject: Bench, database: Database, namespace: str, clock: ManualClock
) -> None:
    subject.run(subject.store.journal_reader("orders", "lake", None))
    fill(subject, database, namespace, clock)
    published = subject.ledger().published
    subject.run(subject.store.journal_trim("orders", published))
    turn(database, namespace, clock, times=3)
    assert numbers(subject) == list(range(1, published + 1))
    subject.run(subject.store.journal_reader("orders", "lake", published))
    subject.run(subject.store.journal_trim("orders", published))
    turn(database, namespace, clock, times=3)
    assert entries(database, namespace, "entry_a", "orders") == 0
    assert subject.run(subject.store.journal("orders", 0, 10)).first_kept == published + 1


@pytest.mark.promise("SEE-3", "STORE-2")
def test_a_transaction_left_open_in_an_old_slice_is_not_waited_for_and_not_lost(
    subject: Bench, server: PostgresServer, database: Database, namespace: str, clock: ManualClock
) -> None:
    draft = subject.draft()
    with psycopg.connect(server.url) as slow:
        subject.publish()
        slow.execute(
            subject_names(subject).fill(
                "SELECT {publish}('orders', NULL, 'otherone'::bytea, 1, NULL, %b::bytea[], NULL, NULL, NULL, NULL,"
                " NULL, NULL, NULL, NULL, NULL)"
            ),
            ([draft.envelope],),
        )
        # Nothing gets a number while it is open, so the ring turns by the entries alone; and no client waits.
        fill(subject, database, namespace, clock)
        turn(database, namespace, clock, times=3)
        assert numbers(subject) == [1]
        slow.commit()
    ids = [event.message_id for event in subject.events()]
    assert draft.id in ids
    assert len(ids) == len(set(ids)) == subject.ledger().published
    subject.run(subject.store.journal_trim("orders", 1))
    turn(database, namespace, clock, times=3)
    assert [event.message_id for event in subject.events()] == ids[1:]


def subject_names(bench: Bench) -> Any:
    store: Any = bench.store
    return store.names


@pytest.mark.promise("SEE-3", "STORE-2")
def test_readers_and_writers_beside_turning_slices_see_every_event_once(
    server: PostgresServer, database: Database, namespace: str, side_by_side: SideBySide
) -> None:
    make_slices_small(database, namespace)
    began = time.monotonic()

    def hurried() -> int:
        # A minute passes in some milliseconds, so that slices turn while this test runs.
        return 1_700_000_000_000 + int((time.monotonic() - began) * 10_000_000)

    def make(clock: object, _: str) -> Any:
        return PostgresStore.from_url(server.url, namespace=namespace, clock=hurried)

    with Bench(make, "sync") as bench:

        def writer(client: Bench) -> Callable[[], object]:
            return lambda: [client.publish().id for _ in range(400)]

        def reader(client: Bench) -> Callable[[], object]:
            def read() -> list[str]:
                seen: list[str] = []
                client.run(client.store.journal_reader("orders", "lake", None))
                while len(seen) < 1_200:
                    page = client.run(client.store.journal("orders", len(seen), 50))
                    assert [event.number for event in page.events] == list(range(len(seen) + 1, page.last + 1))
                    seen += [event.message_id or "" for event in page.events]
                    client.run(client.store.journal_reader("orders", "lake", page.last))
                    client.run(client.store.journal_trim("orders", page.last))
                return seen

            return read

        clients = [bench.another_client() for _ in range(4)]
        *written, seen = side_by_side([*(writer(client) for client in clients[:3]), reader(clients[3])])
        assert isinstance(seen, list), seen
        assert sorted(seen) == sorted(id for part in written if isinstance(part, list) for id in part)
    emptied = database.execute(
        "SELECT count(*) FROM pg_class WHERE relname LIKE %s AND relkind = 'r' AND relfilenode <> oid",
        (f"{namespace}_entry__",),
    ).fetchone()
    assert emptied is not None
    assert emptied[0] > 0
