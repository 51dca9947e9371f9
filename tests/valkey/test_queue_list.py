"""The list of queues: a queue with messages gets into it, even if its first announcement was lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from tests.fault.proxy import Proxy
from tests.servers.valkey_setups import ClusterSetup
from tests.unit.clients import MODES
from tests.valkey.inspector import Inside
from waypost.errors import StoreError
from waypost.store.port import Store
from waypost.store.valkey import ValkeyStore
from waypost.store.valkey import store as store_module
from waypost.testing.bench import QUEUE, Bench, Mode, StoreMaker
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.promise("STORE-1")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    with Proxy(server.port) as one:
        yield one


@pytest.fixture
def bench(server: ValkeyServer, proxy: Proxy, mode: Mode) -> Iterator[Bench]:
    """A client that reaches the server through the proxy."""

    def make(clock: Any, namespace: str) -> Store:
        url = server.url_at(proxy.port)
        return cast(Store, ValkeyStore.from_url(url, namespace=namespace, clock=clock))

    with Bench(make, mode) as subject:
        yield subject


def listed(raw: redis.Redis, bench: Bench) -> set[str]:
    members: Any = raw.smembers(f"{bench.namespace}:queues")
    return {name.decode() for name in members}


def test_a_lost_announcement_is_repeated_by_the_next_publish(bench: Bench, proxy: Proxy, raw: redis.Redis) -> None:
    call = bench.store.publish(QUEUE, [bench.draft()], bench.operation())
    proxy.refuse()
    proxy.cut()
    with pytest.raises(StoreError):
        bench.run(call)
    proxy.heal()
    bench.publish_count(50)
    assert listed(raw, bench) == {QUEUE}
    assert bench.run(bench.store.queues()) == [QUEUE]


def test_a_call_that_was_made_and_never_sent_announces_nothing_and_costs_nothing(
    bench: Bench, raw: redis.Redis
) -> None:
    bench.store.publish(QUEUE, [bench.draft()], bench.operation())
    bench.publish_count(50)
    assert listed(raw, bench) == {QUEUE}


def test_a_refused_announcement_is_repeated(bench: Bench, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANNOUNCE_PAUSE_SECONDS", 0.0)
    raw.set(f"{bench.namespace}:queues", "not a set")
    assert bench.publish().status == "queued"
    raw.delete(f"{bench.namespace}:queues")
    bench.publish()
    assert listed(raw, bench) == {QUEUE}


def test_a_worker_announces_a_queue_whose_publisher_did_not(bench: Bench, raw: redis.Redis) -> None:
    bench.publish_count(5)
    raw.delete(f"{bench.namespace}:queues")
    other = bench.another_client(namespace=bench.namespace)
    other.claim(1, queue="never-published")
    other.claim(1, queue="never-published")
    other.claim_one()
    other.claim_one()
    assert listed(raw, bench) == {QUEUE}


def test_a_list_that_was_lost_is_written_again(bench: Bench, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANNOUNCED_SECONDS", 0.0)
    bench.publish()
    raw.delete(f"{bench.namespace}:queues")
    bench.publish()
    assert listed(raw, bench) == {QUEUE}


def test_an_announcement_costs_no_round_trip_and_is_sent_once(
    plain_bench: Bench, raw: redis.Redis, inside: Inside
) -> None:
    before: Any = raw.info("commandstats")
    for _ in range(5):
        plain_bench.publish()
    after: Any = raw.info("commandstats")
    assert after["cmdstat_sadd"]["calls"] - before.get("cmdstat_sadd", {"calls": 0})["calls"] == 1


def test_a_cluster_accepts_messages_although_the_list_of_queues_is_refused_and_lists_the_queue_later(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ANNOUNCE_PAUSE_SECONDS", 0.0)

    def make(clock: Any, namespace: str) -> Store:
        return cast(Store, ValkeyStore.from_url(setup.url, namespace=namespace, clock=clock))

    with ClusterSetup() as setup, Bench(cast("StoreMaker", make), mode) as bench:
        list_owner = setup.owner(setup.slot_of(f"{bench.namespace}:queues"))
        queue = next(
            name
            for name in (f"queue-{number}" for number in range(100))
            if setup.owner(setup.slot_of(f"{{{bench.namespace}:{name}}}")) is not list_owner
        )
        refused = redis.Redis(port=list_owner.port, password=list_owner.password)
        refused.set(f"{bench.namespace}:queues", "not a set")
        assert bench.publish(queue=queue).status == "queued"
        refused.delete(f"{bench.namespace}:queues")
        assert bench.publish(queue=queue).status == "queued"
        assert bench.run(bench.store.queues()) == [queue]
        refused.close()
