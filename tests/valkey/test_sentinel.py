"""A primary, a replica and three Sentinels: a client finds the current primary; what a failover may lose is known."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from tests.servers.valkey_setups import SentinelSetup, client_of
from tests.unit.clients import MODES, open_client
from tests.valkey.test_connections import check_use
from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.errors import InvalidUrl, MissingExtra, StoreUnavailable
from waypost.store.port import Store
from waypost.store.valkey import ValkeyStore
from waypost.store.valkey.sentinel import SentinelSource
from waypost.testing.bench import QUEUE, Bench, StoreMaker, fresh_namespace
from waypost.testing.servers import EmbeddedServer, RedisServer, ValkeyServer

T = TypeVar("T")
SECRET = "canary-hunter2"
#: More than the buffers between two processes hold: what is written behind it cannot reach a frozen replica.
FILLER_BYTES = 64_000_000


@pytest.fixture(scope="module")
def calm() -> Iterator[SentinelSetup]:
    """One setup for all tests that kill no server."""
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def untyped(kind: Any) -> Any:
    return kind


# ---- URLs and clients --------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("options", ["", "/3", "?client_name=mine", "?protocol=3"])
def test_a_sentinel_url_leads_to_the_primary(calm: SentinelSetup, mode: str, options: str) -> None:
    place, _, given = calm.url.partition("?")
    path, _, more = options.partition("?")
    url = f"{place}{path}?{given}&{more}"
    with open_client(mode, url, namespace=fresh_namespace()) as post:
        check_use(post)


@pytest.mark.promise("STORE-5")
def test_one_sentinel_that_answers_is_enough(calm: SentinelSetup, mode: str) -> None:
    known = f"127.0.0.1:{calm.sentinels[0].port}"
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in calm.sentinels)
    url = calm.url.replace("valkey+", "redis+").replace(hosts, f"127.0.0.1:1,{known}")
    with open_client(mode, url, namespace=fresh_namespace()) as post:
        check_use(post)


@pytest.mark.promise("STORE-5", "LEASE-14")
def test_an_unknown_service_is_an_error_at_once(calm: SentinelSetup, mode: str) -> None:
    url = f"valkey+sentinel://user:{SECRET}@127.0.0.1:{calm.sentinels[0].port}/nothing"
    given = f"{url}?sentinel_password={calm.password}"
    with pytest.raises(StoreUnavailable, match="MasterNotFoundError") as caught, open_client(mode, given):
        pass
    assert SECRET not in str(caught.value)
    assert calm.password not in str(caught.value)


@pytest.mark.promise("STORE-5", "SEE-6")
@pytest.mark.parametrize(
    ("url", "reported"),
    [
        (f"valkey+sentinel://user:{SECRET}@host:26379", "names the service"),
        (f"valkey+sentinel://user:{SECRET}@host:26379/a/b", "number of the database"),
        (f"valkey+sentinel://user:{SECRET}@host:26379/a/0/c", "names the service"),
        (f"valkey+sentinel://user:{SECRET}@host:port,other/a", "cannot be read"),
        (f"valkey+sentinel://user:{SECRET}@host,,other/a", "cannot be read"),
        (f"valkey+sentinel://user:{SECRET}@host:70000/a", "cannot be read"),
        (f"valkey+sentinel://user:{SECRET}@host/a?socket_timeout=soon", "cannot be used"),
        (f"unix+sentinel://user:{SECRET}@host/a", "begins with"),
    ],
)
def test_an_unusable_sentinel_url_is_an_error_with_the_reason_and_no_password(url: str, reported: str) -> None:
    with pytest.raises(InvalidUrl, match=reported) as caught:
        Waypost(url)
    assert SECRET not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.promise("STORE-5", "SEE-6")
def test_a_sentinel_url_may_have_all_options() -> None:
    source = SentinelSource(
        f"valkeys+sentinel://user:{SECRET}@first,[::1]:5,third:6/orders/2?sentinel_password={SECRET}2&ssl_check_hostname=no"
    )
    assert source.display_name == "valkeys+sentinel://first:26379,[::1]:5,third:6/orders"
    for pool in (source.pool(1), source.async_pool(1)):
        settings = pool.connection_kwargs
        assert pool.service_name == "orders"
        assert "SSL" in pool.connection_class.__name__
        assert (settings["db"], settings["username"], settings["password"]) == (2, "user", SECRET)
        assert settings["ssl_check_hostname"] is False
        sentinels = [client.connection_pool.connection_kwargs for client in pool.sentinel_manager.sentinels]
        assert [(one["host"], one["port"]) for one in sentinels] == [("first", 26379), ("::1", 5), ("third", 6)]
        assert {one["password"] for one in sentinels} == {f"{SECRET}2"}


@pytest.mark.promise("STORE-5")
def test_the_callers_sentinel_client_is_used_and_not_closed(calm: SentinelSetup) -> None:
    manager = untyped(redis.sentinel.Sentinel)(
        [("127.0.0.1", one.port) for one in calm.sentinels],
        sentinel_kwargs={"password": calm.password},
        password=calm.password,
    )
    client = manager.master_for(calm.service)
    with Waypost(client=client, namespace=fresh_namespace()) as post:
        check_use(post)
    assert client.ping()
    client.connection_pool.disconnect()
    for one in (client, *manager.sentinels):
        one.close()


@pytest.mark.promise("STORE-5")
def test_the_callers_asyncio_sentinel_client_is_used_and_not_closed(calm: SentinelSetup) -> None:
    async def scenario() -> bool:
        manager = untyped(redis.asyncio.sentinel.Sentinel)(
            [("127.0.0.1", one.port) for one in calm.sentinels],
            sentinel_kwargs={"password": calm.password},
            password=calm.password,
        )
        client = manager.master_for(calm.service)
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            published = await post.publish(QUEUE, {"n": 1})
            async with post.receive(QUEUE, wait=1) as message:
                assert message is not None
                assert message.id == published.id
            assert (await post.ledger(QUEUE)).done == 1
        alive = bool(await client.ping())
        for one in (client, *manager.sentinels):
            await one.aclose()
        return alive

    assert asyncio.run(scenario())


# ---- servers that are not the primary -------------------------------------------------------------------------


@pytest.mark.promise("STORE-5", "LEASE-14")
@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_connection_to_a_server_that_became_a_replica_is_not_kept(kind: type[EmbeddedServer], mode: str) -> None:
    with server_or_skip(kind) as first, kind() as second, client_of(first) as raw:
        raw.config_set("masterauth", second.password)
        store = ValkeyStore.from_url(first.url)
        with Bench(lambda clock, namespace: cast(Store, store), "sync" if mode == "sync" else "async") as bench:
            bench.publish()
            raw.replicaof("127.0.0.1", second.port)
            connected: Any = bench.runner._sync or bench.runner._async
            assert len(connected._idle) == 1
            with pytest.raises(StoreUnavailable):
                bench.publish()
            assert len(connected._idle) == 0
            raw.replicaof("NO", "ONE")
            bench.publish()
            raw.replicaof("127.0.0.1", second.port)
            assert [
                type(one)
                for one in bench.runner.run_many([bench.store.publish(QUEUE, [bench.draft()], bench.operation())])
            ] == [StoreUnavailable]
            assert len(connected._idle) == 0
            raw.replicaof("NO", "ONE")


@pytest.mark.promise("STORE-1", "LEASE-14")
@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_primary_that_requires_replicas_and_has_none_refuses_whole_calls(kind: type[EmbeddedServer]) -> None:
    make: StoreMaker = lambda clock, namespace: cast(  # noqa: E731
        Store, ValkeyStore.from_url(server.url, namespace=namespace, clock=clock)
    )
    with server_or_skip(kind) as server, client_of(server) as raw, Bench(make, "sync") as bench:
        bench.publish()
        lease = bench.claim_one()
        before = {key: raw.dump(key) for key in raw.scan_iter()}
        raw.config_set("min-replicas-to-write", 1)
        attempts: list[Callable[[], object]] = [
            bench.publish, lambda: bench.publish(key="order"), lambda: bench.claim(1), lambda: bench.settle(lease),
            lambda: bench.settle(lease, "retry"), lambda: bench.extend(lease), lambda: bench.configure(lease=5),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                attempt()
        assert {key: raw.dump(key) for key in raw.scan_iter()} == before
        raw.config_set("min-replicas-to-write", 0)
        assert bench.settle(lease) == "done"


# ---- promotions --------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-1", "STORE-5", "LEASE-14")
def test_a_client_goes_on_after_a_failover(mode: str) -> None:
    with SentinelSetup() as setup, open_client(mode, setup.url, namespace=fresh_namespace(), retry_budget=60) as post:
        first = post.publish(QUEUE, {"n": 1}, key="order:1")
        waiting = post.publish(QUEUE, {"n": 2}, key="order:2")
        wait_for_replica(setup)
        with post.receive(QUEUE, wait=5) as message:
            assert message.id == first.id
            wait_for_replica(setup)
            killed = setup.fail_over(wait=False)
        assert post.publish(QUEUE, {"n": 2}, key="order:2").id == waiting.id
        with post.receive(QUEUE, wait=5) as message:
            assert (message.id, message.body) == (waiting.id, {"n": 2})
        ledger = post.ledger(QUEUE)
        assert (ledger.published, ledger.done, ledger.claims, ledger.duplicates, ledger.balance) == (2, 2, 2, 1, 0)
        assert [event.event for event in post.history(QUEUE, first.id)] == ["published", "claimed", "done"]
        assert setup.primary is not killed


@pytest.mark.promise("STORE-1", "LEASE-2", "SEE-5")
def test_a_failover_while_many_publish_and_receive(record_property: Callable[[str, object], None]) -> None:
    """What the failover loses is counted; all the rest is handled, and the ledger of the new primary balances."""
    namespace, goal = fresh_namespace(), 600
    acknowledged: list[str] = []
    tokens: dict[str, list[int]] = defaultdict(list)
    failures: list[BaseException] = []
    published_all = threading.Event()
    with SentinelSetup() as setup, Waypost(setup.url, namespace=namespace, retry_budget=60) as post:
        post.configure(QUEUE, lease=2)

        def publish() -> None:
            try:
                for number in range(goal):
                    acknowledged.append(post.publish(QUEUE, number).id)
            except BaseException as error:
                failures.append(error)
            published_all.set()

        def receive() -> None:
            try:
                # A lease whose settle was lost ends, and its message comes again.
                while not published_all.is_set() or (ledger := post.ledger(QUEUE)).ready + ledger.leased > 0:
                    with post.receive(QUEUE, wait=1) as message:
                        if message is not None:
                            tokens[message.id].append(message.token)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=publish), threading.Thread(target=receive)]
        for thread in threads:
            thread.start()
        until(lambda: len(acknowledged) > goal // 4 and len(tokens) > goal // 10)
        setup.fail_over(wait=False)
        before = len(acknowledged)
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(acknowledged) == goal
        assert before < goal
        lost = [id for id in acknowledged if not any(post.history(QUEUE, id))]
        ledger = post.ledger(QUEUE)
        record_property("lost", len(lost))
        assert (ledger.balance, ledger.unexplained) == (0, 0)
        # Everything that the new primary has was handled. Only writes shortly before the kill can be lost.
        assert ledger.done == ledger.published == goal - len(lost)
        assert all(acknowledged.index(id) < before + 2 for id in lost)
        assert set(acknowledged) - set(lost) <= set(tokens)
        for seen in tokens.values():
            # A claim that was lost with the old primary may be made again with the same number, never with a lower one.
            assert seen == sorted(seen)


@pytest.mark.promise("STORE-1", "LEASE-2")
def test_a_failover_that_loses_writes_loses_whole_calls_and_keeps_tokens_valid() -> None:
    """The replica is frozen while the primary acknowledges. A lease that was lost cannot be settled."""
    with SentinelSetup() as setup:
        make: StoreMaker = lambda clock, namespace: cast(  # noqa: E731
            Store, ValkeyStore.from_url(setup.url, namespace=namespace, clock=clock)
        )
        with Bench(make, "sync") as bench:
            bench.configure(lease=30)
            held, settled = bench.publish(), bench.publish()
            early = bench.claim_one()
            assert early.id == held.id
            wait_for_replica(setup)
            with replica_frozen(setup):
                # From here on the primary acknowledges, and nothing arrives at the replica.
                assert bench.settle(bench.claim_one()) == "done"
                bench.after(31)
                late = bench.claim_one()
                assert (late.id, late.token) == (held.id, early.token + 1)
                gone = bench.publish()
                assert bench.ledger().published == 3
                setup.fail_over(wait=False)
            setup.fail_over_ended()
            after = bench.another_client()
            ledger = after.ledger()
            assert (ledger.published, ledger.done, ledger.balance, ledger.unexplained) == (2, 0, 0, 0)
            assert after.trace(gone.id) == []
            # The claim is lost: its holder gets `lost`, and the token goes to another claim, with another nonce.
            assert after.settle(late) == "lost"
            again = after.claim_one()
            assert (again.id, again.token) == (held.id, early.token + 1)
            assert again.nonce != late.nonce
            assert [after.settle(one) for one in (late, early, again)] == ["lost", "lost", "done"]
            # The settle is lost: that message is delivered once more.
            assert after.claim_one().id == settled.id
            assert after.ledger().balance == 0


# ---- helpers -----------------------------------------------------------------------------------------------------


def server_or_skip(kind: type[EmbeddedServer]) -> EmbeddedServer:
    try:
        return kind()
    except MissingExtra:
        pytest.skip(f"needs the wheel {kind.wheel}")


def wait_for_replica(setup: SentinelSetup) -> None:
    """Wait until a replica has everything that was written so far."""
    with client_of(setup.primary) as client:
        client.set("marker", os.urandom(8))
        until(lambda: client.wait(1, 100), "a replica that has everything")


@contextmanager
def replica_frozen(setup: SentinelSetup) -> Iterator[None]:
    """Freeze the replica, and fill the buffers to it so that nothing more can arrive."""
    primary = setup.primary
    replica = next(server for server in setup.servers if server is not primary)
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGSTOP)
    try:
        with client_of(primary) as client:
            for number in range(FILLER_BYTES // 1_000_000):
                client.set(f"filler:{number}", b"x" * 1_000_000)
        yield
    finally:
        os.kill(replica.pid, signal.SIGCONT)
