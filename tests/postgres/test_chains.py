"""Chains and waits with many clients at once: each waiter is woken once and in time, and no client blocks another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.postgres.test_batches import run_in
from waypost.errors import MessageIdInUse
from waypost.store.port import Call
from waypost.store.postgres import PostgresStore, migrate
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.postgres import PostgresServer
from waypost.values import Lease, OutcomeName, Published, Watched, chain_id

SideBySide = Callable[[list[Callable[[], object]]], list[object]]
Database = psycopg.Connection[Any]


def deadlocks(database: Database) -> int:
    """Return how many deadlocks the server has resolved so far."""
    database.execute("SELECT pg_stat_clear_snapshot()")
    found = database.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert found is not None
    return int(found[0])


def rows(database: Database, namespace: str, *tables: str) -> list[int]:
    found = [database.execute(f'SELECT count(*) FROM "{namespace}_{table}"').fetchone() for table in tables]
    return [int(row[0]) for row in found if row is not None]


def run_in_open(transaction: Database, call: Call[Any]) -> None:
    """Run a call of a store in a transaction that stays open."""
    transaction.execute("SELECT 1")
    run_in(transaction, call)


def commit_when_waited_for(transaction: Database, database: Database) -> None:
    """Commit as soon as another connection waits for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    for _ in range(5_000):
        if database.execute(waiting).fetchone() != (0,):
            break
        database.execute("SELECT pg_sleep(0.002)")
    transaction.commit()


def settler(client: Bench, leases: list[Lease], queue: str) -> Callable[[], object]:
    """Return a function that settles leases as done, one step each, and returns the names to wake."""

    def settle() -> list[str]:
        reported: list[str] = []
        for lease in leases:
            client.woken = {}
            assert client.settle(lease, queue=queue) == "done"
            reported += [name for names in client.woken.values() for name in names]
        return reported

    return settle


@pytest.mark.promise("CHAIN-2", "WAKE-1")
def test_the_branches_of_a_chain_that_end_at_once_finish_it_once(bench: Bench, side_by_side: SideBySide) -> None:
    chain = bench.begin_chain()
    lease = bench.claim_one()
    bench.settle(lease, then=[bench.continuation(lease, "mails", index=index) for index in range(60)])
    report = bench.publish(queue="reports", after_chains=[chain])
    assert bench.chain_state(chain, "anna").open == 60
    mails = bench.claim(60, queue="mails")
    reported = side_by_side([settler(bench.another_client(), mails[n::4], "mails") for n in range(4)])
    assert [name for part in reported if isinstance(part, list) for name in part].count("anna") == 1
    assert bench.chain_state(chain).is_finished
    assert bench.event_names(report.id, queue="reports") == ["published", "promoted"]


@pytest.mark.promise("CHAIN-2")
def test_a_message_that_waits_for_chains_which_end_at_once_becomes_ready_once(
    bench: Bench, side_by_side: SideBySide
) -> None:
    for _ in range(10):
        chains = [bench.begin_chain() for _ in range(4)]
        report = bench.publish(queue="reports", after_chains=chains)
        side_by_side([settler(bench.another_client(), [lease], "orders") for lease in bench.claim(4)])
        assert [lease.id for lease in bench.claim(2, queue="reports")] == [report.id]


@pytest.mark.promise("CHAIN-2")
def test_batches_with_ends_of_the_same_chains_do_not_deadlock(
    bench: Bench, side_by_side: SideBySide, database: Database
) -> None:
    before = deadlocks(database)
    chains = [bench.begin_chain() for _ in range(20)]
    for lease in bench.claim(20):
        bench.settle(lease, then=[bench.continuation(lease, "mails", index=index) for index in range(4)])
    mails = bench.claim(80, queue="mails")

    def batch(client: Bench, n: int) -> Callable[[], object]:
        mine = mails[n::4] if n % 2 else mails[n::4][::-1]
        return lambda: client.settle_batch([client.settlement(mail) for mail in mine], queue="mails")

    assert side_by_side([batch(bench.another_client(), n) for n in range(4)]) == [["done"] * 20] * 4
    assert all(bench.chain_state(chain).is_finished for chain in chains)
    assert deadlocks(database) == before


@pytest.mark.promise("CHAIN-1", "WAKE-1")
@pytest.mark.parametrize("outcome", ["done", "dead"])
def test_a_client_that_begins_to_wait_while_a_message_ends_is_woken_or_sees_the_end(
    bench: Bench, side_by_side: SideBySide, outcome: OutcomeName
) -> None:
    client, settles = bench.another_client(), bench.another_client()
    for number in range(60):
        published = bench.publish()
        lease = bench.claim_one()
        settles.woken = {}
        seen, _ = side_by_side(
            [
                lambda id=published.id, name=f"w{number}": client.watch(id, name),  # type: ignore[misc]
                lambda held=lease: settles.settle(held, outcome),  # type: ignore[misc]
            ]
        )
        assert isinstance(seen, Watched)
        if seen.state == "leased":
            assert settles.woken["orders"] == [f"w{number}"]


@pytest.mark.promise("CHAIN-1", "WAKE-2")
def test_a_message_that_a_client_begins_to_wait_for_is_not_skipped_by_a_claim(
    bench: Bench, server: PostgresServer
) -> None:
    ready, delayed = bench.publish(), bench.publish(delay=0.001)
    with psycopg.connect(server.url) as waiting:
        for published in (ready, delayed):
            run_in_open(waiting, bench.store.watch("orders", published.id, "anna"))
        found: list[str] = []
        while len(found) < 2:
            found += [lease.id for lease in bench.claim(2)]
    assert sorted(found) == sorted([ready.id, delayed.id])


@pytest.mark.promise("CHAIN-1", "LEASE-7")
def test_a_claim_at_most_once_sees_a_wait_that_has_just_begun(
    bench: Bench, side_by_side: SideBySide, server: PostgresServer, database: Database
) -> None:
    bench.configure(lease=None)
    published = bench.publish()
    with psycopg.connect(server.url) as waiting:
        run_in_open(waiting, bench.store.watch("orders", published.id, "anna"))
        found, _ = side_by_side([bench.claim_one, lambda: commit_when_waited_for(waiting, database)])
    assert isinstance(found, Lease)
    assert found.id == published.id
    assert bench.watch(published.id) == Watched(None, "done")


@pytest.mark.promise("CHAIN-2")
def test_a_wait_that_begins_while_its_chain_ends_is_not_forgotten(
    bench: Bench, side_by_side: SideBySide, server: PostgresServer, database: Database
) -> None:
    chain = bench.begin_chain()
    lease, other = bench.claim_one(), bench.another_client()
    with psycopg.connect(server.url) as ending:
        run_in_open(ending, bench.store.settle("orders", [bench.settlement(lease)], bench.operation()))
        report, _ = side_by_side(
            [
                lambda: other.publish(queue="reports", after_chains=[chain]),
                lambda: commit_when_waited_for(ending, database),
            ]
        )
    assert isinstance(report, Published)
    assert bench.claim_one(queue="reports").id == report.id


@pytest.mark.promise("CHAIN-2", "DEAD-1")
def test_a_long_line_of_messages_that_wait_for_each_other_fails_in_one_step(bench: Bench) -> None:
    chain = bench.begin_chain()
    for _ in range(300):
        chain = bench.begin_chain(queue="row", after_chains=[chain])
    assert bench.settle(bench.claim_one(), "dead") == "dead"
    assert len(bench.listing("dead", queue="row", reason="blocker_failed")) == 300
    assert bench.chain_state(chain).failed == (chain, "blocker_failed")


@pytest.mark.promise("CHAIN-1", "CHAIN-2")
def test_a_claim_at_most_once_ends_chains_and_waits(bench: Bench) -> None:
    bench.configure(lease=None)
    chain = bench.begin_chain()
    plain = bench.publish()
    report = bench.publish(queue="reports", after_chains=[chain])
    bench.watch(plain.id, "anna")
    first, second = bench.claim(2)
    assert (first.chain, second.chain) == (chain, None)
    assert bench.chain_state(chain).is_finished
    assert bench.watch(plain.id) == Watched(None, "done")
    assert bench.claim_one(queue="reports").id == report.id


@pytest.mark.promise("CHAIN-2", "SEE-3")
def test_sets_journal_the_chain_of_each_message(bench: Bench) -> None:
    bench.configure(lease=0.001)
    chain = bench.begin_chain(delay=0.001)
    bench.publish_count(3, delay=0.001)
    while len(bench.events("expired")) < 4:
        bench.claim(10)
    bench.configure(lease=30)
    leases: list[Lease] = []
    while len(leases) < 4:
        leases += bench.claim(10)
    bench.settle_batch([bench.settlement(lease, "release") for lease in leases])
    bench.settle_batch([bench.settlement(lease, "dead") for lease in bench.claim(10)])
    bench.redrive()
    bench.purge("ready")
    first = chain.rpartition("/")[2]
    for name in ("promoted", "claimed", "expired", "released", "dead", "redriven", "cancelled"):
        reported = {event.message_id == first: event.chain_id for event in bench.events(name)}
        assert reported == {True: chain, False: None}, name
    assert bench.chain_state(chain).failed == (chain, "rejected")


@pytest.mark.promise("CHAIN-2")
def test_a_purge_of_waiting_messages_removes_both_kinds_in_order(
    bench: Bench, database: Database, namespace: str
) -> None:
    chain = bench.begin_chain(queue="first")
    blocked = [bench.publish(after_chains=[chain]).id for _ in range(3)]
    bench.publish(key="k")
    bench.claim_one()
    parked = bench.publish(key="k", on_conflict="replace").id
    assert bench.purge("waiting", limit=2).more
    left = sorted([*blocked, parked])[2:]
    assert bench.ids("waiting") == left
    assert bench.purge("waiting").removed == 2
    assert rows(database, namespace, "blocker") == [0]


@pytest.mark.promise("STORE-2", "CHAIN-1", "CHAIN-2")
def test_expired_chains_waits_and_ends_are_removed(server: PostgresServer, database: Database) -> None:
    clock, name = ManualClock(), fresh_namespace()
    migrate(server.url, namespace=name)
    with Bench(lambda _, __: PostgresStore.from_url(server.url, namespace=name, clock=clock), "sync") as bench:
        broken, never = bench.begin_chain(), bench.begin_chain(queue="never")
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "mails", index=index) for index in range(2_100)])
        bench.settle(bench.claim_one(queue="mails"), "dead", queue="mails")
        assert bench.chain_state(broken).failed is not None
        for _ in range(20):
            bench.watch(bench.publish().id, "anna")
            bench.settle(bench.claim_one())
            bench.watch(bench.publish().id, "bert")
            bench.chain_state(never, "carl")
            bench.claim_one()
        assert rows(database, name, "chain", "member", "waiter", "ending") == [2, 2_100, 21, 20]
        clock.advance(31 * 86_400)
        other = bench.another_client()
        for _ in range(400):
            other.publish(queue="later")
        # Unfinished chains stay, also where the release before gave them an end.
        assert rows(database, name, "chain", "member", "waiter", "ending") == [1, 1, 0, 0]
        database.execute(f'UPDATE "{name}_chain" SET until_ms = 1'.encode())
        assert bench.chain_state(never).open == 1
        for _ in range(200):
            other.publish(queue="later")
        assert rows(database, name, "chain", "member") == [1, 1]
        bench.cancel(never.rpartition("/")[2], queue="never")
        clock.advance(3_600)
        for _ in range(200):
            other.publish(queue="later")
        assert rows(database, name, "chain", "member", "waiter", "ending") == [0, 0, 0, 0]


@pytest.mark.promise("LEASE-6")
def test_a_message_id_that_exists_is_refused_whatever_the_options_of_its_draft(bench: Bench) -> None:
    published = bench.publish()
    for draft in (
        bench.draft(id=published.id, chain=chain_id("orders", published.id)),
        bench.draft(id=published.id, key="other"),
    ):
        with pytest.raises(MessageIdInUse, match="already"):
            bench.publish_drafts([draft])
    assert bench.ids("ready") == [published.id]


@pytest.mark.promise("CHAIN-2", "STORE-2")
def test_nothing_is_kept_of_a_wait_that_was_cancelled(
    bench: Bench, database: psycopg.Connection[Any], namespace: str
) -> None:
    chain = bench.begin_chain()
    waits = [bench.publish(queue="mails", after_chains=[chain]).id for _ in range(2)]
    assert bench.cancel(waits[0], queue="mails") == "cancelled"
    left = database.execute(f'SELECT id FROM "{namespace}_blocker"').fetchall()
    assert left == [(waits[1],)]
