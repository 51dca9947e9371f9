"""Messages settled in one statement end as they would one by one, and only harmless steps do not wait for the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.pq import ExecStatus

from waypost.store.port import Call, Hold
from waypost.store.postgres.statement import PostgresCall
from waypost.testing.bench import Bench
from waypost.values import OutcomeName

SideBySide = Callable[[list[Callable[[], object]]], list[object]]
Database = psycopg.Connection[Any]


def run_in(database: Database, call: Call[Any]) -> None:
    """Run a call of a store on another connection, inside its transaction."""
    assert isinstance(call, PostgresCall)
    kinds, values = [kind for kind, _ in call.parameters], [value for _, value in call.parameters]
    result = database.pgconn.exec_params(call.command, values, kinds, [1] * len(values), 1)
    assert result.status == ExecStatus.TUPLES_OK, result.error_message


def waits(database: Database, call: Call[Any]) -> tuple[bool, bool]:
    """Return whether a step waits for the disk at its commit, and whether it folded counters. It is rolled back."""
    with database.transaction(force_rollback=True):
        database.execute("SET LOCAL synchronous_commit = on")
        run_in(database, call)
        found = database.execute(
            "SELECT current_setting('synchronous_commit') = 'on', pg_current_xact_id()::text::bigint % 64 = 0"
        ).fetchone()
    assert found is not None
    return bool(found[0]), bool(found[1])


@pytest.mark.promise("LEASE-1", "SEE-3", "STORE-2")
def test_a_claim_and_a_renewal_wait_for_the_disk_only_where_they_put_the_journal_in_order(
    bench: Bench, database: Database
) -> None:
    bench.publish_count(1)
    held = bench.claim_one()
    hold = Hold(held.id, held.token, held.nonce)
    seen = Counter[tuple[bool, bool]]()
    for _ in range(70):
        seen[waits(database, bench.store.claim("orders", 1, bench.operation(), worker="w"))] += 1
        seen[waits(database, bench.store.extend("orders", [hold], bench.operation()))] += 1
    assert set(seen) == {(False, False), (True, True)}


@pytest.mark.promise("LEASE-1", "STORE-2")
@pytest.mark.parametrize("count", [1, 2])
def test_a_claim_of_a_few_messages_does_no_maintenance(bench: Bench, database: Database, count: int) -> None:
    """Their handlers wait for it."""
    bench.publish_count(count)
    calls = [bench.store.claim("orders", 5, bench.operation(), worker="w") for _ in range(140)]
    assert {waits(database, call)[0] for call in calls} == {False}


@pytest.mark.promise("LEASE-1", "STORE-2")
def test_a_publish_that_wakes_a_worker_does_no_maintenance(bench: Bench, database: Database, namespace: str) -> None:
    """Its handler waits for it. Where no worker sleeps, a publish folds counts now and then."""

    def folds() -> bool:
        with database.transaction(force_rollback=True):
            run_in(database, bench.store.publish("orders", [bench.draft()], bench.operation()))
            found = database.execute(f'SELECT count(*) FROM "{namespace}_tally"').fetchone()
        assert found is not None
        return bool(found[0] == 0)

    def publishes() -> set[bool]:
        return {folds() for _ in range(140)}

    bench.publish()
    bench.claim_one()
    assert publishes() == {False, True}
    bench.run(bench.store.claim("orders", 5, bench.operation(), worker="w", sleeper="@w"))
    assert publishes() == {False}


@pytest.mark.promise("LEASE-7", "LEASE-2")
def test_a_claim_at_most_once_and_a_settle_wait_for_the_disk(bench: Bench, database: Database) -> None:
    bench.publish_count(3)
    held = bench.claim_one()
    assert waits(database, bench.store.settle("orders", [bench.settlement(held)], bench.operation()))[0]
    bench.configure(lease=None)
    assert waits(database, bench.store.claim("orders", 1, bench.operation(), worker="w"))[0]


@pytest.mark.promise("LEASE-8", "LEASE-10", "SEE-5")
def test_a_batch_of_all_outcomes_gives_each_message_its_own(bench: Bench) -> None:
    bench.configure(dead_max=1_000)
    bench.publish_count(240)
    leases = bench.claim(512)
    outcomes: list[OutcomeName] = ["done", "retry", "snooze", "release", "dead", "drop"]
    status = dict(zip(outcomes, ["done", "retried", "snoozed", "released", "dead", "dropped"], strict=True))
    chosen = {lease.id: outcomes[place % 6] for place, lease in enumerate(leases)}
    settlements = [
        bench.settlement(
            lease,
            chosen[lease.id],
            after=60 if place % 12 < 6 else 0,
            error_type=f"Error{place}",
            error=f"text {place}",
            reason=f"because {place}" if chosen[lease.id] == "dead" else None,
            result=b"kept" if chosen[lease.id] == "done" and place % 2 == 0 else None,
        )
        for place, lease in enumerate(leases)
    ]
    assert bench.settle_batch(settlements) == [status[chosen[lease.id]] for lease in leases]
    ledger = bench.ledger()
    assert (ledger.done, ledger.dead, ledger.dropped, ledger.leased) == (40, 40, 40, 0)
    assert (ledger.retried, ledger.snoozed, ledger.released) == (40, 40, 40)
    assert ledger.delayed == 40
    assert ledger.ready == 80
    for place, lease in enumerate(leases):
        assert bench.event_names(lease.id)[-1] == status[chosen[lease.id]]
        if chosen[lease.id] == "dead":
            letter = bench.stored(lease.id)
            assert (letter.reason, letter.error_type, letter.error) == (
                f"because {place}", f"Error{place}", f"text {place}",
            )  # fmt: skip
        elif chosen[lease.id] == "retry":
            assert (bench.stored(lease.id).attempts, bench.stored(lease.id).deliveries) == (1, 1)
        elif chosen[lease.id] in ("snooze", "release"):
            assert (bench.stored(lease.id).attempts, bench.stored(lease.id).deliveries) == (0, 0)


@pytest.mark.promise("LEASE-2", "LEASE-10")
def test_a_settle_of_many_distinguishes_current_and_lost_leases(bench: Bench) -> None:
    bench.publish_count(100)
    leases = bench.claim(100)
    assert set(bench.settle_batch([bench.settlement(lease) for lease in leases[::3]])) == {"done"}
    again = bench.settle_batch([bench.settlement(lease) for lease in [*leases, leases[1]]])
    assert again == ["lost" if place % 3 == 0 else "done" for place in range(100)] + ["lost"]
    assert bench.ledger().done == 100


@pytest.mark.promise("LEASE-2", "LEASE-10")
def test_deliveries_of_different_claims_settle_in_one_call(bench: Bench) -> None:
    bench.publish_count(6)
    first = bench.claim(3)
    assert set(bench.settle_batch([bench.settlement(lease, "release") for lease in first])) == {"released"}
    leases = bench.claim(2) + bench.claim(4)
    assert {lease.token for lease in leases} == {1, 2}
    assert bench.settle_batch([bench.settlement(lease) for lease in [*leases, first[0]]]) == ["done"] * 6 + ["lost"]


@pytest.mark.promise("DEAD-2")
def test_of_two_dead_letters_with_one_key_a_redrive_moves_the_older(bench: Bench) -> None:
    for _ in range(2):
        bench.publish(key="k")
        assert bench.settle(bench.claim_one(), "dead", reason="bad") == "dead"
    older, newer = (letter.id for letter in bench.listing("dead"))
    redriven = bench.redrive(reason="bad")
    assert (redriven.moved, redriven.duplicates) == ([older], [newer])
    assert bench.stored(newer).reason == "duplicate"
    assert bench.claim_one().id == older


@pytest.mark.promise("DEAD-2")
def test_redrives_by_reason_come_in_the_order_of_death_and_return_if_there_are_more(bench: Bench) -> None:
    bench.publish_count(30)
    leases = bench.claim(30)
    for place, lease in enumerate(leases):
        bench.settle(lease, "dead", reason="odd" if place % 2 else "even")
    redriven = bench.redrive(reason="odd", limit=10)
    assert redriven.moved == [lease.id for lease in leases[1:20:2]]
    assert redriven.more
    assert not bench.redrive(reason="odd", limit=10).more
    assert len(bench.listing("dead", reason="even")) == 15


@pytest.mark.promise("LEASE-7", "STORE-2")
def test_claims_at_most_once_at_once_never_share_a_message(bench: Bench, side_by_side: SideBySide) -> None:
    bench.configure(lease=None, completed=50)
    ids = bench.publish_count(300)

    def claimer(client: Bench) -> Callable[[], object]:
        def claim() -> list[str]:
            found: list[str] = []
            while leases := client.claim(9):
                found += [lease.id for lease in leases]
            return found

        return claim

    found = side_by_side([claimer(bench.another_client()) for _ in range(4)])
    assert sorted(id for part in found if isinstance(part, list) for id in part) == sorted(ids)
    assert bench.ledger().done == 300
    assert bench.claim(1) == []
    # Claims at the same time do not see what the others end: the next end removes what they left over the cap.
    bench.publish()
    assert len(bench.claim(1)) == 1
    assert len(bench.listing("done")) == 50
    assert bench.event_names(ids[0]) == ["published", "claimed", "done"]


@pytest.mark.promise("LEASE-6", "WAKE-2")
def test_a_repeat_of_a_single_publish_stores_nothing_and_names_the_same_sleeper(bench: Bench) -> None:
    bench.claim(1, sleeper="sleepy")
    operation, draft = bench.operation(), bench.draft()
    first = bench.publish_drafts([draft], operation=operation)
    assert bench.woken == {"orders": ["sleepy"]}
    assert bench.another_client().publish_drafts([draft], operation=operation) == first
    assert bench.publish_drafts([draft], operation=operation) == first
    assert bench.woken == {"orders": ["sleepy"]}
    assert bench.ledger().published == 1


@pytest.mark.promise("LEASE-6", "STORE-2")
def test_one_single_publish_repeated_from_many_connections_at_once_is_stored_once(
    bench: Bench, side_by_side: SideBySide
) -> None:
    bench.publish()
    for _ in range(10):
        operation, draft = bench.operation(), bench.draft()

        def publisher(client: Bench, operation: Any = operation, draft: Any = draft) -> Callable[[], object]:
            return lambda: client.publish_drafts([draft], operation=operation)

        results = side_by_side([publisher(bench.another_client()) for _ in range(4)])
        assert all(result == results[0] for result in results)
        assert not isinstance(results[0], Exception)
    assert bench.ledger().published == 11


@pytest.mark.promise("DEAD-2", "SEE-5")
@pytest.mark.parametrize("state", ["ready", "delayed", "dead"])
def test_a_purge_in_parts_ends_exactly(bench: Bench, state: Any) -> None:
    bench.publish_count(250, delay=60 if state == "delayed" else 0)
    if state == "dead":
        bench.settle_batch([bench.settlement(lease, "dead") for lease in bench.claim(512)])
    purged = [bench.purge(state, limit=125) for _ in range(3)]
    assert [(part.removed, part.more) for part in purged] == [(125, True), (125, False), (0, False)]
    assert bench.listing(state) == []
