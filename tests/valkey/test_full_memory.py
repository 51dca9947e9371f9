"""A server with full memory: every kind of publish is refused whole, messages can be drained, then there is room.

Run on the newest server and on the oldest supported one: they detect a full memory in different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis

from tests.valkey.inspector import Inside
from waypost.errors import MissingExtra, StoreFull
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import Store
from waypost.store.valkey import ValkeyStore
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.servers import EmbeddedServer, RedisServer, ValkeyServer
from waypost.values import Watched, chain_id

pytestmark = pytest.mark.promise("STORE-1")

BODY = b"x" * 10_000

#: Every kind of publish, each on a queue that has a waiting message with the key `waiting` and a leased one `running`.
PUBLISHES: dict[str, Callable[[Bench], Any]] = {
    "plain": lambda bench: bench.publish(BODY),
    "empty": lambda bench: bench.publish(b""),
    "batch": lambda bench: bench.publish_drafts([bench.draft(b"small") for _ in range(CHUNK_MESSAGES_MAX)]),
    "keyed": lambda bench: bench.publish(BODY, key="new"),
    "windowed": lambda bench: bench.publish(BODY, key="new", window=60),
    "delayed": lambda bench: bench.publish(BODY, delay=60),
    "keyed-batch": lambda bench: bench.publish_drafts([bench.draft(b"small", key=f"many:{n}") for n in range(100)]),
    "replace": lambda bench: bench.publish(BODY, key="waiting", on_conflict="replace"),
    "postpone": lambda bench: bench.publish(BODY, key="waiting", on_conflict="extend", delay=60),
    "park": lambda bench: bench.publish(BODY, key="running", on_conflict="replace"),
    "sent-on": lambda bench: bench.publish(BODY, forwarded=True),
    "first of a chain": lambda bench: bench.begin_chain(),
    "waits for chains": lambda bench: bench.publish(BODY, after_chains=[chain_id(QUEUE, "0" * 24)]),
    "configure": lambda bench: bench.configure(max_pending=5),
}


@pytest.fixture(scope="module", params=[ValkeyServer, RedisServer], ids=["valkey", "redis62"])
def small_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    try:
        server: EmbeddedServer = request.param(maxmemory_policy="noeviction")
    except MissingExtra:
        pytest.skip(f"needs the wheel {request.param.wheel}")
    with server:
        yield server


def fill(bench: Bench, groups: int = 0) -> None:
    """Publish until the memory is full."""
    number = 0
    while True:
        try:
            group = f"g{number % groups}" if groups else None
            bench.publish(BODY, key=f"key:{number}", delay=0 if groups else number % 3 * 10, group=group)
        except StoreFull:
            return
        number += 1


@pytest.fixture
def full(small_server: EmbeddedServer) -> Iterator[tuple[Bench, Inside]]:
    """A bench on a server that has just refused a publish."""
    with redis.Redis(port=small_server.port, password=small_server.password) as client:
        client.execute_command("FLUSHALL", "SYNC")  # otherwise it may free the memory later
        client.config_set("maxmemory", "8mb")

        def make(clock: Any, namespace: str) -> Store:
            return cast(Store, ValkeyStore.from_url(small_server.url, namespace=namespace, clock=clock))

        with Bench(make, "sync") as bench:
            bench.publish(b"running", key="running")
            bench.claim_one()
            bench.publish(b"waiting", key="waiting")
            fill(bench)
            # Well past the limit, whatever the server's buffers use.
            client.config_set("maxmemory", cast(dict[str, Any], client.info("memory"))["used_memory"] - 200_000)
            yield bench, Inside(client, bench.namespace)


@pytest.mark.parametrize("kind", PUBLISHES)
def test_a_publish_into_a_full_memory_is_refused_whole(full: tuple[Bench, Inside], kind: str) -> None:
    bench, inside = full
    before = inside.snapshot()
    with pytest.raises(StoreFull, match="nothing was written"):
        PUBLISHES[kind](bench)
    assert inside.snapshot() == before
    inside.check()
    assert bench.ledger().balance == 0


def test_a_full_memory_is_drained_by_claims_and_settles_and_then_accepts_messages_again(
    full: tuple[Bench, Inside],
) -> None:
    bench, inside = full
    stored = bench.ledger().published
    assert stored > 200
    bench.after(25)
    # One end after another, none of which may need room that is not there.
    for number, outcome in enumerate(("release", "snooze", "retry", "drop", "dead")):
        lease = bench.claim_one()
        assert bench.settle(lease, outcome, after=5 + number, error_type="ValueError", error="no") != "lost"  # type: ignore[arg-type]
        inside.check()
    bench.after(25)
    while leases := bench.claim(7):
        assert bench.extend_batch(leases) == ["ok"] * len(leases)
        assert bench.settle_batch([bench.settlement(lease) for lease in leases]) == ["done"] * len(leases)
    bench.purge("dead")
    inside.check()
    ledger = bench.ledger()
    assert (ledger.published, ledger.done, ledger.dropped, ledger.dead) == (stored, stored - 3, 1, 1)
    assert (ledger.ready, ledger.delayed, ledger.leased, ledger.balance) == (0, 0, 1, 0)
    for kind, publish in PUBLISHES.items():
        assert publish(bench), kind
    inside.check()
    bench.check_invariants()


def test_in_a_full_memory_chains_end_and_waiters_are_woken(small_server: EmbeddedServer) -> None:
    with redis.Redis(port=small_server.port, password=small_server.password) as client:
        client.execute_command("FLUSHALL", "SYNC")
        client.config_set("maxmemory", "8mb")

        def make(clock: Any, namespace: str) -> Store:
            return cast(Store, ValkeyStore.from_url(small_server.url, namespace=namespace, clock=clock))

        with Bench(make, "sync") as bench:
            chain, far = bench.begin_chain(priority=9), bench.begin_chain(queue="far")
            report = bench.publish(priority=9, after_chains=[chain, far])
            bench.deliver_all()
            lease, other = bench.claim_one(), bench.claim_one(queue="far")
            fill(bench)
            client.config_set("maxmemory", cast(dict[str, Any], client.info("memory"))["used_memory"] - 200_000)
            assert bench.watch(lease.id, "anna") == Watched("leased")
            assert bench.settle(lease) == "done"
            assert bench.woken[QUEUE] == ["anna"]
            assert bench.settle(other, queue="far") == "done"
            bench.deliver_all()
            assert bench.chain_state(chain).is_finished
            assert bench.claim_one().id == report.id
            Inside(client, bench.namespace).check()
            bench.check_invariants()


@pytest.mark.promise("STORE-1", "QUEUE-5", "QUEUE-7")
@pytest.mark.parametrize("settings", [{"order": "group"}, {"group_max_running": 3}], ids=["order", "limit"])
def test_a_grouped_queue_in_a_full_memory_refuses_whole_and_is_drained(
    small_server: EmbeddedServer, settings: dict[str, Any]
) -> None:
    with redis.Redis(port=small_server.port, password=small_server.password) as client:
        client.execute_command("FLUSHALL", "SYNC")
        client.config_set("maxmemory", "8mb")

        def make(clock: Any, namespace: str) -> Store:
            return cast(Store, ValkeyStore.from_url(small_server.url, namespace=namespace, clock=clock))

        with Bench(make, "sync") as bench:
            bench.configure(**settings)
            inside = Inside(client, bench.namespace)
            fill(bench, groups=5)
            stored = bench.ledger().published
            client.config_set("maxmemory", cast(dict[str, Any], client.info("memory"))["used_memory"] - 200_000)
            before = inside.snapshot()
            writes: list[Callable[[], Any]] = [
                lambda: bench.publish(BODY, group="new"), lambda: bench.configure_group("g1", weight=2),
                lambda: bench.configure(order=None, group_max_running=None, fair=True),
            ]  # fmt: skip
            for write in writes:
                with pytest.raises(StoreFull, match="nothing was written"):
                    write()
            assert inside.snapshot() == before
            for outcome in ("retry", "release"):
                bench.settle(bench.claim_one(), outcome, after=1)
                inside.check()
            bench.after(1)
            handled = 0
            while leases := bench.claim(7):
                handled += len(leases)
                bench.settle_batch([bench.settlement(lease) for lease in leases])
            assert handled == stored
            inside.check()
            assert bench.publish(BODY, group="new").status == "queued"
