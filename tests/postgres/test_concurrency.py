"""Many clients at once: limits hold, no message is claimed twice, a key stores one message, readers miss no event.

All of it on a server's own connections, and through a pgbouncer in transaction mode that has fewer of them than there
are clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from waypost.errors import QueueFull
from waypost.store.postgres import PostgresStore
from waypost.store.postgres.statement import PostgresCall
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.postgres import PostgresServer
from waypost.values import Published

SideBySide = Callable[[list[Callable[[], object]]], list[object]]


@pytest.fixture(params=["direct", pytest.param("pgbouncer", marks=pytest.mark.needs("pgbouncer"))])
def way(request: pytest.FixtureRequest, server: PostgresServer) -> str:
    if request.param == "direct":
        return server.url
    url: str = request.getfixturevalue("bouncer").url
    return url


@pytest.mark.promise("PUB-7", "STORE-2")
def test_ten_publishers_of_a_capped_queue_never_pass_the_cap(bench: Bench, side_by_side: SideBySide) -> None:
    bench.configure(max_pending=25)

    def publisher(client: Bench) -> Callable[[], object]:
        def publish() -> int:
            stored = 0
            for _ in range(10):
                try:
                    client.publish()
                    stored += 1
                except QueueFull:
                    assert client.ledger().ready <= 25
            return stored

        return publish

    stored = side_by_side([publisher(bench.another_client()) for _ in range(10)])
    assert sum(count for count in stored if isinstance(count, int)) == 25
    assert bench.ledger().ready == 25


@pytest.mark.promise("LEASE-1", "STORE-2")
def test_claimers_at_once_never_share_a_message(bench: Bench, side_by_side: SideBySide) -> None:
    ids = bench.publish_count(400)

    def claimer(client: Bench) -> Callable[[], object]:
        def claim() -> list[str]:
            found: list[str] = []
            while leases := client.claim(7):
                found += [lease.id for lease in leases]
                client.settle_batch([client.settlement(lease) for lease in leases[::2]])
            return found

        return claim

    found = side_by_side([claimer(bench.another_client()) for _ in range(6)])
    claimed = [id for part in found if isinstance(part, list) for id in part]
    assert sorted(claimed) == sorted(ids)
    assert bench.ledger().claims == 400


@pytest.mark.promise("LEASE-17", "STORE-2")
@pytest.mark.parametrize("lease", [60, None])
def test_a_claim_under_way_locks_only_the_messages_that_it_returns(
    bench: Bench, server: PostgresServer, lease: float | None
) -> None:
    """A message that did not fit into a claim by its bytes is not locked by it, or other claims would skip it.

    One message is an exception: by it the claim knows that there are more.
    """
    bench.configure(lease=lease)
    ids = [bench.publish(b"x" * 10_000).id for _ in range(20)]
    claim = bench.store.claim(QUEUE, 10, bench.operation(), worker="slow", bytes_max=25_000)
    assert isinstance(claim, PostgresCall)
    with psycopg.connect(server.url) as slow:
        slow.execute("SELECT 1")  # begins a transaction, which stays open
        kinds, values = zip(*claim.parameters, strict=True)
        first = claim.decode(slow.pgconn.exec_params(claim.command, values, kinds, [1] * len(values), 1))
        second = bench.another_client().claimed(10, bytes_max=25_000)
        slow.commit()
    assert [one.id for one in first.leases] == ids[:2]
    assert len(second.leases) == 2
    assert {one.id for one in second.leases} <= set(ids[2:5])


@pytest.mark.promise("PUB-4", "STORE-2")
@pytest.mark.parametrize("rule", ["keep", "replace", "extend"])
def test_publishes_of_one_key_at_once_keep_one_message(bench: Bench, side_by_side: SideBySide, rule: str) -> None:
    def publisher(client: Bench) -> Callable[[], object]:
        return lambda: [client.publish(key="k", on_conflict=rule) for _ in range(12)]

    results = side_by_side([publisher(bench.another_client()) for _ in range(6)])
    published = [one for part in results if isinstance(part, list) for one in part]
    assert len(published) == 72
    assert [one.status for one in published].count("queued") == 1
    assert bench.ledger().ready == 1
    assert len(bench.claim(10)) == 1


@pytest.mark.promise("PUB-4", "STORE-2")
def test_a_key_until_the_claim_has_one_unclaimed_message_beside_publishers_and_claimers(
    bench: Bench, side_by_side: SideBySide
) -> None:
    def publisher(client: Bench) -> Callable[[], object]:
        rules = ("keep", "replace", "extend")
        return lambda: [
            client.publish(key="k", unique="until_claimed", on_conflict=rules[at % 3]).status for at in range(18)
        ]

    def claimer(client: Bench) -> Callable[[], object]:
        def claim() -> int:
            claimed = 0
            for _ in range(30):
                leases = client.claim(5)
                assert len(leases) <= 1
                assert [lease.key for lease in leases] == ["k"] * len(leases)
                claimed += len(leases)
            return claimed

        return claim

    publishers = [publisher(bench.another_client()) for _ in range(3)]
    results = side_by_side([*publishers, claimer(bench.another_client()), claimer(bench.another_client())])
    statuses = [status for part in results if isinstance(part, list) for status in part]
    claims = sum(count for count in results if isinstance(count, int))
    assert len(statuses) == 54
    # Each of them was stored because the key was free: nothing has it, or it was given up at a claim.
    assert statuses.count("queued") == claims + len(bench.ids("ready", key="k"))
    bench.check_queue("orders")


@pytest.mark.promise("PUB-4", "STORE-2")
def test_a_key_that_dead_letters_keep_has_one_message_however_it_dies_and_returns(
    bench: Bench, side_by_side: SideBySide
) -> None:
    def publisher(client: Bench) -> Callable[[], object]:
        return lambda: [client.publish(key="k", unique="live_or_dead").status for _ in range(20)]

    def worker(client: Bench) -> Callable[[], object]:
        def work() -> int:
            for _ in range(20):
                for lease in client.claim(5):
                    client.settle(lease, "dead")
                client.redrive()
            return 0

        return work

    publishers = [publisher(bench.another_client()) for _ in range(3)]
    results = side_by_side([*publishers, worker(bench.another_client()), worker(bench.another_client())])
    statuses = [status for part in results if isinstance(part, list) for status in part]
    assert (statuses.count("queued"), statuses.count("duplicate")) == (1, 59)
    bench.check_queue("orders")


@pytest.mark.promise("PUB-4", "STORE-2")
def test_batches_with_the_same_keys_do_not_deadlock(bench: Bench, side_by_side: SideBySide) -> None:
    keys = [f"key {number}" for number in range(60)]

    def publisher(client: Bench, mine: list[str]) -> Callable[[], object]:
        return lambda: client.publish_drafts([client.draft(key=key) for key in mine])

    orders = [keys, keys[::-1], keys[30:] + keys[:30], sorted(keys)]
    results = side_by_side([publisher(bench.another_client(), mine) for mine in orders])
    statuses = [one.status for part in results if isinstance(part, list) for one in part if isinstance(one, Published)]
    assert len(statuses) == 240
    assert statuses.count("queued") == 60


@pytest.mark.promise("PUB-6", "STORE-2")
def test_a_key_republished_while_it_is_handled_and_settled_at_once_loses_no_generation(
    bench: Bench, side_by_side: SideBySide
) -> None:
    bench.publish(key="k")

    def publisher(client: Bench) -> Callable[[], object]:
        return lambda: [client.publish(key="k", on_conflict="replace").id for _ in range(30)]

    def worker(client: Bench) -> Callable[[], object]:
        def work() -> int:
            done = 0
            for _ in range(60):
                for lease in client.claim(2):
                    assert client.settle(lease) in ("done", "lost")
                    done += 1
            return done

        return work

    results = side_by_side([publisher(bench.another_client()), *(worker(bench.another_client()) for _ in range(3))])
    assert [type(result).__name__ for result in results] == ["list", "int", "int", "int"]
    bench.check_queue("orders")
    for lease in bench.claim(5):
        bench.settle(lease)
    assert bench.ledger().waiting == bench.ledger().ready == 0


@pytest.mark.promise("PUB-3", "LEASE-6")
def test_one_operation_sent_twice_at_once_runs_once(bench: Bench, side_by_side: SideBySide) -> None:
    clients = [bench.another_client() for _ in range(4)]
    for _ in range(10):
        operation, draft = bench.operation(), bench.draft(key=None)

        def publisher(client: Bench, operation: Any = operation, draft: Any = draft) -> Callable[[], object]:
            return lambda: client.publish_drafts([draft], operation=operation)

        results = side_by_side([publisher(client) for client in clients])
        assert results == [[Published(draft.id, "queued", "orders")]] * 4
        claiming = bench.operation()

        def claimer(client: Bench, operation: Any = claiming) -> Callable[[], object]:
            return lambda: [lease.id for lease in client.claim(5, operation=operation)]

        assert side_by_side([claimer(client) for client in clients]) == [[draft.id]] * 4
    assert (bench.ledger().published, bench.ledger().claims) == (10, 10)


@pytest.mark.promise("SEE-5", "STORE-2")
def test_counts_and_minutes_are_exact_whichever_step_folds_them(bench: Bench, side_by_side: SideBySide) -> None:
    def client_of_many(client: Bench) -> Callable[[], object]:
        def live() -> int:
            for _ in range(60):
                client.publish()
                for lease in client.claim(1):
                    client.settle(lease)
            return 60

        return live

    assert side_by_side([client_of_many(bench.another_client()) for _ in range(4)]) == [60] * 4
    for lease in bench.claim(512):
        bench.settle(lease)
    stats = bench.stats(minutes=5)
    assert (stats.ledger.published, stats.ledger.claims, stats.ledger.done) == (240, 240, 240)
    assert sum(minute.counts["done"] for minute in stats.minutes) == 240


@pytest.mark.promise("SEE-3", "STORE-2")
def test_a_reader_does_not_miss_a_transaction_that_commits_late(
    bench: Bench, server: PostgresServer, namespace: str
) -> None:
    store = PostgresStore.from_url(server.url, namespace=namespace)
    bench.publish()
    late, early = bench.draft(), bench.draft()

    def call(cursor: psycopg.Cursor[Any], draft: Any) -> None:
        cursor.execute(
            store.names.fill(
                "SELECT {publish}('orders', NULL, %b, 1, NULL, %b::bytea[], NULL, NULL, NULL, NULL, NULL, NULL, NULL,"
                " NULL, NULL)"
            ),
            (draft.id[:8].encode() + draft.id[-4:].encode(), [draft.envelope]),
        )

    with psycopg.connect(server.url) as slow:
        with slow.cursor() as cursor:
            call(cursor, late)  # writes its event, and does not commit
        bench.publish_drafts([early])
        page = bench.run(bench.store.journal("orders", 0, 100))
        # The early event is committed, but the late one may still come before it: neither is handed out.
        assert [event.number for event in page.events] == [1]
        slow.commit()
    rest = bench.run(bench.store.journal("orders", page.last, 100))
    assert [(event.number, event.message_id) for event in rest.events] == [(2, late.id), (3, early.id)]


@pytest.mark.promise("SEE-3", "STORE-2")
def test_a_reader_beside_many_writers_sees_every_event_once(bench: Bench, side_by_side: SideBySide) -> None:
    def writer(client: Bench) -> Callable[[], object]:
        return lambda: [client.publish().id for _ in range(40)]

    def reader(client: Bench) -> Callable[[], object]:
        def read() -> list[str]:
            seen: list[str] = []
            numbers: list[int] = []
            while len(seen) < 160:
                page = client.run(client.store.journal("orders", len(numbers), 7))
                numbers += [event.number for event in page.events]
                seen += [event.message_id or "" for event in page.events]
            assert numbers == list(range(1, 161))
            return seen

        return read

    *written, seen = side_by_side([*(writer(bench.another_client()) for _ in range(4)), reader(bench.another_client())])
    assert isinstance(seen, list), seen
    assert sorted(seen) == sorted(id for part in written if isinstance(part, list) for id in part)


@pytest.mark.promise("STORE-2")
def test_no_verb_waits_for_an_open_transaction_of_another_publisher(
    bench: Bench, server: PostgresServer, namespace: str
) -> None:
    store = PostgresStore.from_url(server.url, namespace=namespace)
    bench.publish()
    draft = bench.draft()
    with psycopg.connect(server.url) as slow:
        slow.execute(
            store.names.fill(
                "SELECT {publish}('orders', NULL, 'otherone'::bytea, 1, NULL, %b::bytea[], NULL, NULL, NULL, NULL,"
                " NULL, NULL, NULL, NULL, NULL)"
            ),
            ([draft.envelope],),
        )
        # If all of them wrote the same row, these would wait for ever.
        for _ in range(130):
            bench.publish()
            for lease in bench.claim(1):
                assert bench.extend(lease) == "ok"
                assert bench.settle(lease) == "done"
        slow.rollback()
    assert bench.state_of(draft.id) is None
