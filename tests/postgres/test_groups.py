"""Groups on PostgreSQL: what a publish leaves alone, conversions beside open transactions, and what is left behind."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.waiting import until
from waypost import Waypost
from waypost.errors import InvalidPolicy
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.postgres import PostgresServer
from waypost.values import Lease

Database = psycopg.Connection[Any]
Together = Callable[[list[Callable[[], object]]], list[object]]


def count(database: Database, namespace: str, table: str, where: str = "true") -> int:
    found = database.execute(f'SELECT count(*) FROM "{namespace}_{table}" WHERE {where}'.encode()).fetchone()
    assert found is not None
    return int(found[0])


def bodies(bench: Bench, leases: list[Lease]) -> list[str]:
    return [bench.body(lease).decode() for lease in leases]


@pytest.fixture
def short_steps(database: Database, namespace: str) -> None:
    """Let each step of a conversion take three messages, and each fold two changes."""
    found = database.execute(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE starts_with(p.proname, %s)"
        " AND p.prokind = 'f' AND p.prosrc ~ 'convert_queue|fold_groups'",
        (f"{namespace}_",),
    )
    for (text,) in found.fetchall():
        short = re.sub(r"(convert_queue[^(]*\([^()]*), \d+\)", r"\1, 3)", text)
        database.execute(re.sub(r"(fold_groups[^(]*\([^()]*), \d+\)", r"\1, 2)", short).encode())


def count_waiting(database: Database) -> int:
    """Return how many steps wait for the lock of a test."""
    found = database.execute(
        "SELECT count(*) FROM pg_locks l"
        " WHERE NOT l.granted AND l.locktype = 'advisory' AND (l.classid, l.objid) = (7, 11)"
    ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.promise("QUEUE-6", "BOX-1", "STORE-2")
def test_a_publish_in_an_open_transaction_blocks_neither_publishers_nor_claims_of_its_group(
    server: PostgresServer, bench: Bench, namespace: str
) -> None:
    bench.configure(order="group")
    bench.publish(group="a")
    lease = bench.claim_one()
    with Waypost(server.url, namespace=namespace) as post, psycopg.connect(server.url) as connection:
        post.publish(QUEUE, "open", group="a", transaction=connection)
        second = bench.publish(group="a")
        bench.settle(lease)
        assert [one.id for one in bench.claim(5)] == [second.id]
        assert bench.groups(group="a")[0].running == 1
        connection.commit()
        assert bench.group("a").ready == 1


@pytest.mark.promise("QUEUE-2", "QUEUE-5", "BOX-1")
def test_a_message_published_by_the_settings_of_before_is_found_after_its_commit(
    server: PostgresServer, bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(lease=600)
    with Waypost(server.url, namespace=namespace) as post, psycopg.connect(server.url) as connection:
        post.publish(QUEUE, "before", group="a", transaction=connection)
        bench.configure(order="group")
        later = bench.publish(group="a")
        lease = bench.claim_one()
        assert lease.id == later.id
        bench.settle(lease)
        assert bench.claim(5) == []
        assert count(database, namespace, "queue", "conversion IS NOT NULL") == 1
        connection.commit()
        assert len(bench.claim(5)) == 1
        assert count(database, namespace, "queue", "conversion IS NOT NULL") == 0


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
def test_a_queue_that_is_longer_than_a_step_is_converted_by_its_claims(
    bench: Bench, database: Database, namespace: str
) -> None:
    total, limit = 12_000, 500
    for at in range(0, total, limit):
        bench.publish_drafts([bench.draft(f"{at + n}".encode(), group=f"g{n % 50}") for n in range(limit)])
    bench.configure(order="group", lease=600)
    assert count(database, namespace, "queue", "claim_mode = 0 AND conversion IS NOT NULL") == 1
    last: dict[str, int] = {}
    for _ in range(40):
        leases = bench.claim(50)
        for lease in leases:
            number = int(bench.body(lease))
            assert number > last.get(lease.group or "", -1)
            last[lease.group or ""] = number
        bench.settle_batch([bench.settlement(lease) for lease in leases])
    assert count(database, namespace, "queue", "claim_mode = 2 AND conversion IS NULL") == 1
    assert len(bench.claim(100)) == 50
    assert bench.claim(100) == []
    assert sum(group.ready for group in bench.groups()) == count(database, namespace, "message", "state = 0")
    bench.configure(order=None)
    while count(database, namespace, "queue", "conversion IS NOT NULL"):
        bench.settle_batch([bench.settlement(lease) for lease in bench.claim(500)])
    assert count(database, namespace, "group") == count(database, namespace, "group_change") == 0
    assert count(database, namespace, "message", "group_rank IS NOT NULL") == 0


@pytest.mark.promise("QUEUE-5", "BOX-6")
def test_a_first_message_that_another_step_has_locked_is_not_passed(
    bench: Bench, server: PostgresServer, namespace: str
) -> None:
    bench.configure(order="group")
    first, second, other = (bench.publish(group=group).id for group in "aab")
    with psycopg.connect(server.url) as connection:
        connection.execute(f'SELECT 1 FROM "{namespace}_message" WHERE id = %s FOR UPDATE'.encode(), (first,))
        assert [lease.id for lease in bench.claim(1)] == [other]
        assert bench.claim(5) == []
        connection.rollback()
    lease = bench.claim_one()
    assert lease.id == first
    bench.settle(lease)
    assert bench.claim_one().id == second


@pytest.mark.promise("QUEUE-6", "STORE-2")
def test_records_of_groups_that_come_and_go_are_removed(bench: Bench, database: Database, namespace: str) -> None:
    bench.configure(fair=True)
    for round in range(6):
        bench.publish_drafts([bench.draft(group=f"{round}-{number}") for number in range(300)])
        while leases := bench.claim(100):
            bench.settle_batch([bench.settlement(lease) for lease in leases])
    assert bench.groups() == []
    assert count(database, namespace, "group") == count(database, namespace, "group_change") == 0


@pytest.mark.promise("QUEUE-6")
def test_a_queue_without_settings_of_groups_writes_nothing_about_them(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.publish_drafts([bench.draft(group="a") for _ in range(5)])
    bench.publish(group="a", key="k", delay=60)
    first, second, *_ = bench.claim(4)
    bench.settle(first, "retry", after=5)
    bench.settle(second, "dead")
    bench.redrive(second.id)
    assert count(database, namespace, "group") == count(database, namespace, "group_change") == 0
    assert count(database, namespace, "message", "group_rank IS NOT NULL OR keeps_place IS NOT NULL") == 0


@pytest.mark.promise("QUEUE-6", "SEE-5")
def test_a_check_finds_wrong_counts_and_messages_outside_their_group(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(fair=True)
    ids = [bench.publish(group="a").id for _ in range(3)]
    bench.groups()
    database.execute(f'UPDATE "{namespace}_group" SET ready = 7'.encode())
    database.execute(f'UPDATE "{namespace}_message" SET group_rank = NULL WHERE id = %s'.encode(), (ids[1],))
    page = bench.run(bench.store.check(QUEUE, None, mend=True))
    assert [(damage.kind, damage.id) for damage in page.damages] == [("misplaced", ids[1]), ("counters", "a")]
    assert bench.run(bench.store.check(QUEUE, None)).damages == []
    assert [lease.id for lease in bench.claim(10)] == ids


@pytest.mark.promise("QUEUE-5", "QUEUE-7", "STORE-2")
def test_ordered_groups_hand_out_one_message_at_a_time_to_clients_that_claim_at_once(
    bench: Bench, side_by_side: Together
) -> None:
    bench.configure(order="group", lease=600)
    bench.publish_drafts([bench.draft(f"{number}".encode(), group=f"g{number % 6}") for number in range(180)])
    clients = [bench.another_client() for _ in range(4)]
    handed: list[tuple[str, int]] = []

    def work(client: Bench) -> None:
        idle = 0
        while idle < 40:
            leases = client.claim(2)
            idle = 0 if leases else idle + 1
            # Recorded before the settle: another message of the group can be claimed only after it.
            handed.extend((lease.group or "", int(client.body(lease))) for lease in leases)
            if leases:
                client.settle_batch([client.settlement(lease) for lease in leases])

    results = side_by_side([lambda client=client: work(client) for client in clients])  # type: ignore[misc]
    assert [result for result in results if isinstance(result, BaseException)] == []
    assert len(handed) == 180
    for name in {name for name, _ in handed}:
        numbers = [number for group, number in handed if group == name]
        assert numbers == sorted(numbers)


@pytest.mark.promise("QUEUE-5", "QUEUE-7")
@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("settings", [{"order": "group"}, {"group_max_running": 1}])
def test_what_is_leased_before_a_long_conversion_counts_after_it(
    bench: Bench, database: Database, namespace: str, settings: dict[str, Any]
) -> None:
    bench.configure(lease=600)
    bench.publish_drafts([bench.draft(group=f"g{number % 20}") for number in range(60)])
    assert len({lease.group for lease in bench.claim(20)}) == 20
    bench.configure(**settings)
    # Claims choose as before until the conversion is over; then no group may have a second one.
    while leases := bench.claim(1):
        assert count(database, namespace, "queue", "claim_mode = 0") == 1
        bench.settle(leases[0])
    assert {group.running for group in bench.groups()} == {1}


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.usefixtures("short_steps")
def test_messages_of_a_fair_queue_that_gets_an_order_are_not_passed_by_later_ones(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(fair=True, lease=600)
    bench.publish_drafts([bench.draft(f"{number}".encode(), group="a") for number in range(60)])
    bench.configure(order="group")
    handed: list[int] = []
    for limit in (20, *[1] * 29):
        bench.publish(f"{len(handed) + 60}".encode(), group="a")
        leases = bench.claim(limit)
        handed += [int(bench.body(lease)) for lease in leases]
        bench.settle_batch([bench.settlement(lease) for lease in leases])
    while leases := bench.claim(1):
        handed += [int(bench.body(lease)) for lease in leases]
        bench.settle_batch([bench.settlement(lease) for lease in leases])
    assert handed[:60] == list(range(60))
    assert handed[60:] == sorted(handed[60:])
    assert len(handed) == 90
    assert count(database, namespace, "queue", "claim_mode = 2 AND conversion IS NULL") == 1


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("before", [{}, {"fair": True}], ids=["plain", "fair"])
def test_messages_that_fail_while_a_queue_gets_an_order_keep_their_places(
    bench: Bench, database: Database, namespace: str, before: dict[str, Any]
) -> None:
    bench.configure(lease=600, **before)
    ids = [one.id for one in bench.publish_drafts([bench.draft(group="a") for _ in range(60)])]
    leases = bench.claim(2)
    bench.configure(order="group")
    leases += bench.claim(1)
    assert count(database, namespace, "queue", "claim_mode < 2 AND conversion IS NOT NULL") == 1
    bench.settle_batch([bench.settlement(lease, "retry", after=30) for lease in leases])
    while count(database, namespace, "queue", "conversion IS NOT NULL"):
        bench.claim(0)
    assert bench.claim(5) == []
    assert bench.group("a").held_by == ids[0]
    for id in ids[:3]:
        bench.reschedule(id)
    for id in ids[:5]:
        lease = bench.claim_one()
        assert lease.id == id
        bench.settle(lease)


@pytest.mark.promise("QUEUE-2", "DEAD-2")
def test_a_message_redriven_while_a_queue_gets_groups_is_found(
    server: PostgresServer, bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(lease=600)
    bench.publish(group="a")
    lease = bench.claim_one()
    bench.settle(lease, "dead")
    # A redrive waits in the middle for a lock that this test holds.
    database.execute(
        f"""
        CREATE FUNCTION "{namespace}_wait"() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(7, 11); RETURN NEW; END $$;
        CREATE TRIGGER wait BEFORE UPDATE ON "{namespace}_message" FOR EACH ROW WHEN (OLD.state = 4)
        EXECUTE FUNCTION "{namespace}_wait"();
        """.encode()
    )
    client = bench.another_client()
    with psycopg.connect(server.url) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(7, 11)")
        thread = threading.Thread(target=lambda: client.redrive(lease.id))
        thread.start()
        until(lambda: count_waiting(database))
        bench.configure(order="group")
        assert bench.claim(1) == []
        connection.rollback()
        thread.join(60)
    database.execute(f'DROP FUNCTION "{namespace}_wait" CASCADE'.encode())
    assert [one.id for one in bench.claim(5)] == [lease.id]


@pytest.mark.promise("QUEUE-5")
@pytest.mark.usefixtures("short_steps")
def test_messages_with_one_position_get_places_in_the_order_of_their_ids(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(lease=600)
    ids = sorted(bench.publish(group="a").id for _ in range(24))
    for id in reversed(ids):
        database.execute(f'UPDATE "{namespace}_message" SET position = 7 WHERE id = %s'.encode(), (id,))
    bench.configure(order="group")
    handed: list[str] = []
    for _ in range(40):
        for lease in bench.claim(1):
            handed.append(lease.id)
            bench.settle(lease)
    assert handed == ids


@pytest.mark.promise("QUEUE-6", "QUEUE-7")
def test_settings_of_groups_stay_while_a_queue_does_not_treat_them_apart(bench: Bench) -> None:
    bench.configure(order="group", lease=600)
    bench.publish(group="a")
    bench.publish(group="b")
    bench.pause_group("a")
    bench.configure_group("b", weight=3)
    bench.configure(order=None)
    assert len(bench.claim(1)) == 1
    bench.configure(fair=True)
    assert bench.group("a").paused
    assert bench.group("b").weight == 3
    assert sum(group.ready + group.running for group in bench.groups()) == 2


@pytest.mark.promise("QUEUE-5", "BOX-6")
def test_skip_held_does_not_wait_for_a_step_that_has_locked_the_message(
    bench: Bench, server: PostgresServer, namespace: str
) -> None:
    bench.configure(order="group", lease=600)
    first, second = (bench.publish(group="a").id for _ in range(2))
    bench.settle(bench.claim_one(), "retry", after=600)
    with psycopg.connect(server.url) as connection:
        connection.execute(f'SELECT 1 FROM "{namespace}_message" WHERE id = %s FOR UPDATE'.encode(), (first,))
        assert bench.skip_held("a") is None
        connection.rollback()
    assert bench.skip_held("a") == first
    assert bench.claim_one().id == second


@pytest.mark.promise("QUEUE-2", "BOX-6")
@pytest.mark.usefixtures("short_steps")
def test_a_conversion_does_not_begin_again_for_a_message_that_another_step_has_locked(
    bench: Bench, server: PostgresServer, database: Database, namespace: str
) -> None:
    bench.configure(lease=600)
    locked = bench.publish(group="a", delay=600).id
    bench.publish_drafts([bench.draft(group=f"g{number}") for number in range(30)])

    def read() -> Any:
        return database.execute(
            f'SELECT conversion FROM "{namespace}_queue" WHERE name = %s'.encode(), (QUEUE,)
        ).fetchone()

    with psycopg.connect(server.url) as connection:
        connection.execute(f'SELECT 1 FROM "{namespace}_message" WHERE id = %s FOR UPDATE'.encode(), (locked,))
        bench.configure(fair=True)
        for _ in range(30):
            bench.claim(1)
        before = read()
        assert before[0]["skipped"] == [locked]
        bench.claim(1)
        assert read() == before
        connection.rollback()
    for _ in range(40):
        bench.claim(1)
    assert read() == (None,)
    assert count(database, namespace, "message", "group_rank IS NULL") == 0


@pytest.mark.promise("PUB-7", "BOX-6")
def test_messages_of_other_groups_are_dropped_if_those_of_the_longest_are_locked(
    bench: Bench, server: PostgresServer, namespace: str
) -> None:
    bench.configure(fair=True, max_pending=4, overload="drop_oldest")
    bench.publish_drafts([bench.draft(group="a") for _ in range(3)])
    other = bench.publish(group="b").id
    with psycopg.connect(server.url) as connection:
        connection.execute(f"""SELECT 1 FROM "{namespace}_message" WHERE "group" = 'a' FOR UPDATE""".encode())
        kept = bench.publish(group="c").id
        connection.rollback()
    ids = [message.id for message in bench.listing("ready")]
    assert kept in ids
    assert other not in ids
    assert len(ids) == 4


@pytest.mark.promise("QUEUE-7", "STORE-2")
def test_records_of_groups_with_a_rate_are_removed_when_it_is_forgotten(
    bench: Bench, database: Database, namespace: str
) -> None:
    bench.configure(group_rate="5/s", lease=600)
    bench.publish_drafts([bench.draft(group=f"g{number}") for number in range(20)])
    leases = bench.claim(20)
    bench.settle_batch([bench.settlement(lease) for lease in leases])
    assert count(database, namespace, "group") == 20
    until(lambda: not bench.claim(1) and not count(database, namespace, "group"))


@pytest.mark.promise("QUEUE-6")
def test_a_claim_skips_a_bounded_number_of_groups(bench: Bench, database: Database, namespace: str) -> None:
    bench.configure(order="group", lease=600)
    bench.publish_drafts([bench.draft(group=f"g{number % 700}") for number in range(1_400)])
    assert sum(len(bench.claim(500)) for _ in range(2)) == 700
    last = bench.publish(group="z").id
    bench.groups(group="z")
    database.execute(f"""UPDATE "{namespace}_group" SET in_line = true, turn = 1 WHERE name <> 'z'""".encode())
    first = bench.claimed(1)
    assert (first.leases, first.next_rate_ms) == ([], 0)
    assert count(database, namespace, "group", "in_line") > 1
    assert [lease.id for lease in bench.claim(1)] == [last]


@pytest.mark.promise("QUEUE-5", "BOX-6", "WAKE-1")
def test_a_cancel_of_a_first_message_wakes_a_worker_with_the_commit(
    bench: Bench, server: PostgresServer, database: Database, namespace: str
) -> None:
    bench.configure(order="group", lease=600)
    first, second = (bench.publish(group="a").id for _ in range(2))
    with Waypost(server.url, namespace=namespace) as post, psycopg.connect(server.url) as connection:
        post.cancel(QUEUE, first, transaction=connection)
        assert bench.claim(5, sleeper="@w1") == []
        assert count(database, namespace, "sleeper", "NOT awake") == 1
        connection.commit()
        assert count(database, namespace, "sleeper", "NOT awake") == 0
    assert bench.claim_one().id == second


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.usefixtures("short_steps")
def test_an_order_is_set_again_only_when_no_places_of_the_one_before_are_left(bench: Bench) -> None:
    bench.configure(lease=600)
    bench.publish_drafts([bench.draft(group="a") for number in range(60)])
    bench.configure(order="group")
    bench.configure(order=None)
    with pytest.raises(InvalidPolicy, match="cannot be set again yet"):
        bench.configure(order="group")
    for _ in range(25):
        bench.settle_batch([bench.settlement(lease) for lease in bench.claim(1)])
    bench.configure(order="group")
