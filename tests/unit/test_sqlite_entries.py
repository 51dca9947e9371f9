"""Batches on SQLite: a journal packed by steps, and statements that take a whole batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from waypost import Waypost
from waypost.errors import SchemaTooNew, StoreFailed
from waypost.identity import Session
from waypost.store.bulk.reader import BulkConnection
from waypost.store.port import Draft
from waypost.store.sqlite import SqliteStore
from waypost.store.sqlite import schema as schemas
from waypost.store.sqlite.entries import ENTRY_EVENTS_MAX, entries_to_rows
from waypost.store.sqlite.executor import SqliteExecutor
from waypost.testing.clock import ClockTime, ManualClock
from waypost.values import EventRecord, Lease, Settlement

pytestmark = pytest.mark.promise("STORE-3", "SEE-3")


class Subject:
    """A store on a file, with its own clock and session."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path = path
        self.store = SqliteStore(path, clock=clock)
        self.executor = self.store.connect(start_timeout=20)
        self.session = Session(ClockTime(clock))

    def publish(self, count: int, *, queue: str = "orders", **fields: Any) -> list[str]:
        drafts = [Draft(id, b"body", **fields) for id in self.session.message_ids(count)]
        published = self.executor.run(self.store.publish(queue, drafts, self.session.operation(queue)))
        return [one.id for one in published.result]

    def claim(self, limit: int, *, nonce: bytes | None = None, queue: str = "orders") -> list[Lease]:
        call = self.store.claim(queue, limit, self.session.operation(queue), worker="w", nonce=nonce)
        return self.executor.run(call).leases

    def settle(self, leases: Sequence[Lease], queue: str = "orders") -> list[str]:
        settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases]
        call = self.store.settle(queue, settlements, self.session.operation(queue))
        return list(self.executor.run(call).result)

    def events(self, after: int = 0, limit: int = 10_000) -> list[EventRecord]:
        return self.executor.run(self.store.journal("orders", after, limit)).events

    def trace(self, id: str) -> list[str]:
        return [event.event for event in self.executor.run(self.store.trace("orders", id)).events]

    def count(self, table: str) -> int:
        with closing(sqlite3.connect(self.path)) as file:
            return int(file.execute(f"SELECT count(*) FROM wp_{table}").fetchone()[0])

    def to_rows(self) -> None:
        """Let the journal be as the first release wrote it."""
        with closing(sqlite3.connect(self.path)) as file, file:
            entries_to_rows(file, self.store.spelling)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def subject(tmp_path: Path, clock: ManualClock) -> Iterator[Subject]:
    made = Subject(tmp_path / "orders.db", clock)
    yield made
    made.executor.close()


# ---- the journal ---------------------------------------------------------------------------------------------


def test_the_events_of_a_step_are_one_row(subject: Subject) -> None:
    subject.publish(100)
    subject.settle(subject.claim(100))
    assert (subject.count("entry"), subject.count("journal")) == (3, 0)
    events = subject.events()
    assert [event.number for event in events] == list(range(1, 301))
    assert {event.event: event.operation_id for event in events}.keys() == {"published", "claimed", "done"}
    assert [event.number for event in subject.events(after=150, limit=120)] == list(range(151, 271))
    assert [event.number for event in subject.events(after=90, limit=20)] == list(range(91, 111))
    reader = subject.store.bulk_reader(cast(BulkConnection, subject.executor))
    batches = reader.journal("orders", 90, 110, ["number"])
    assert [number for batch in batches for number in batch.column("number").to_pylist()] == list(range(91, 111))


def test_a_large_step_is_several_rows(subject: Subject) -> None:
    ids = subject.publish(2 * ENTRY_EVENTS_MAX + 1)
    assert subject.count("entry") == 3
    assert [event.message_id for event in subject.events()] == ids


def test_the_history_of_a_message_is_found_in_small_and_large_steps(subject: Subject) -> None:
    ids = subject.publish(50)
    (alone,) = subject.publish(1)
    subject.settle(subject.claim(3))
    subject.settle(subject.claim(100))
    assert [subject.trace(id) for id in (ids[0], ids[-1], alone)] == [["published", "claimed", "done"]] * 3
    assert subject.trace("elsewhere") == []
    (call,) = subject.store.locate(["orders", "billing"], ids[7], in_journals=True)
    assert [found.queue for found in subject.executor.run(call)] == ["orders"]


def test_rows_of_the_first_release_are_read_together_with_entries(subject: Subject) -> None:
    ids = subject.publish(30)
    leases = subject.claim(20)
    before = subject.events()
    subject.to_rows()
    assert (subject.count("entry"), subject.count("journal")) == (0, 50)
    assert subject.events() == before
    subject.settle(leases)
    events = subject.events()
    assert events[:50] == before
    assert [event.number for event in events] == list(range(1, 71))
    assert [event.number for event in subject.events(after=45, limit=10)] == list(range(46, 56))
    assert subject.trace(ids[0]) == ["published", "claimed", "done"]
    reader = subject.store.bulk_reader(cast(BulkConnection, subject.executor))
    batches = list(reader.journal("orders", 40, 60, ["number", "event", "message_id"]))
    assert [number for batch in batches for number in batch.column("number").to_pylist()] == list(range(41, 61))
    (call,) = subject.store.locate(["orders"], ids[29], in_journals=True)
    assert subject.executor.run(call)


def test_trimmed_events_are_deleted_from_rows_and_entries(subject: Subject) -> None:
    subject.publish(30)
    subject.to_rows()
    leases = subject.claim(30)
    assert subject.executor.run(subject.store.journal_trim("orders", 40)) == 41
    assert [event.number for event in subject.events()] == list(range(41, 61))
    assert subject.trace(leases[0].id) == []
    assert subject.trace(leases[-1].id) == ["claimed"]
    # The entry of the claim has events on both sides of the cut.
    assert (subject.count("journal"), subject.count("entry")) == (0, 1)
    subject.settle(leases)
    subject.executor.run(subject.store.journal_trim("orders", 90))
    subject.publish(1)
    assert (subject.count("journal"), subject.count("entry")) == (0, 1)


def test_no_event_of_a_removed_queue_is_kept(subject: Subject) -> None:
    subject.publish(5)
    subject.to_rows()
    subject.settle(subject.claim(5))
    removed = subject.executor.run(subject.store.remove("orders", subject.session.operation("orders")))
    assert (removed.existed, removed.more) == (True, False)
    assert (subject.count("journal"), subject.count("entry")) == (0, 0)


def test_a_file_of_the_first_release_gets_a_packed_journal_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "first.db"
    with Waypost(f"sqlite:///{path}") as post:
        post.publish("orders", 1)
    with closing(sqlite3.connect(path)) as file, file:
        entries_to_rows(file, schemas.Spelling("wp"))
        file.execute("DROP TABLE wp_entry")
        file.execute("UPDATE wp_meta SET value = 1 WHERE name = 'schema'")
    with Waypost(f"sqlite:///{path}") as post:
        sent = post.publish("orders", 2)
        assert [event.event for event in post.history("orders", sent.id)] == ["published"]
        assert post.ledger("orders").ready == 2
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT value FROM wp_meta WHERE name = 'schema'").fetchone() == (2,)
        assert file.execute("SELECT count(*) FROM wp_entry").fetchone() == (1,)
    monkeypatch.setattr(schemas, "SCHEMA_VERSION", 1)
    with pytest.raises(SchemaTooNew, match="update waypost"):
        SqliteStore(path).connect(start_timeout=20)


@pytest.mark.promise("SEE-6")
def test_the_error_of_a_damaged_entry_names_its_events(subject: Subject) -> None:
    ids = subject.publish(10)
    with closing(sqlite3.connect(subject.path)) as file, file:
        file.execute("UPDATE wp_entry SET data = x'91'")
    for read in (subject.events, lambda: subject.trace(ids[3])):
        with pytest.raises(StoreFailed, match=r"events 1 to 10 of a journal are damaged .* trim the journal up to 10"):
            read()


# ---- batches -------------------------------------------------------------------------------------------------


@contextmanager
def counted_statements(executor: SqliteExecutor) -> Iterator[list[str]]:
    """Gather the statements that write."""
    statements: list[str] = []
    with executor._writer.use() as connection:
        connection.set_trace_callback(statements.append)
    yield statements
    with executor._writer.use() as connection:
        connection.set_trace_callback(None)


def test_a_large_batch_takes_no_more_statements_than_a_small_one(subject: Subject) -> None:
    subject.settle(subject.claim(1) if subject.publish(1) else [])
    counts = []
    for count in (50, 400):
        with counted_statements(subject.executor) as statements:
            subject.publish(count)
            published = len(statements)
            leases = subject.claim(count)
            claimed = len(statements)
            assert subject.settle(leases) == ["done"] * count
        counts.append((published, claimed, len(statements)))
    assert counts[0] == counts[1]


@pytest.mark.promise("LEASE-2")
@pytest.mark.parametrize("nonce", [None, bytes(12)], ids=["another nonce", "the same nonce"])
def test_a_lease_that_another_process_has_by_now_is_lost(
    subject: Subject, clock: ManualClock, nonce: bytes | None
) -> None:
    subject.publish(8)
    leases = subject.claim(8, nonce=nonce)
    clock.advance(61)
    other = Subject(subject.path, clock)
    again = other.claim(4, nonce=nonce)
    assert [lease.token for lease in again] == [2] * 4
    held = {lease.id for lease in again}
    assert subject.settle([lease for lease in leases if lease.id in held]) == ["lost"] * 4
    assert set(subject.settle(leases)) == {"lost"}
    assert other.settle(again) == ["done"] * 4
    other.executor.close()


@pytest.mark.promise("LEASE-2")
def test_leases_are_settled_in_any_parts_and_order_by_any_process(subject: Subject, clock: ManualClock) -> None:
    subject.publish(40)
    subject.publish(3, key=None, priority=9)
    first, second = subject.claim(20), subject.claim(30)
    other = Subject(subject.path, clock)
    mixed = [*first[::2], *second[::2]]
    assert subject.settle(mixed) == ["done"] * len(mixed)
    assert other.settle(first[1::2]) == ["done"] * 10
    assert subject.settle([*second[1::2], *first[:2]]) == ["done"] * len(second[1::2]) + ["lost"] * 2
    assert subject.settle(first[1::2]) == ["lost"] * 10
    ledger = subject.executor.run(subject.store.stats("orders")).ledger
    assert (ledger.done, ledger.leased, ledger.balance) == (43, 0, 0)
    other.executor.close()


def test_leases_are_not_settled_under_the_name_of_another_queue(subject: Subject) -> None:
    subject.publish(3)
    subject.publish(3, queue="billing")
    leases = subject.claim(3)
    assert subject.settle(leases, queue="billing") == ["lost"] * 3
    assert subject.settle(leases) == ["done"] * 3


def test_what_a_process_remembers_of_its_leases_is_bounded(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.store.sqlite.known.LEASES_MAX", 30)
    subject.publish(100)
    leases = [lease for _ in range(10) for lease in subject.claim(10)]
    known = subject.store._known
    assert sum(len(claim) for claim in known._claims.values()) == known._count == 30
    assert subject.settle(leases) == ["done"] * 100
    assert subject.settle(leases[-10:]) == ["lost"] * 10
