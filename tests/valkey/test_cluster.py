"""A Cluster of three primaries: calls find their node, and follow slots that move, with nothing lost or done twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import pytest
import redis
import redis.asyncio
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.test_state_machine import REACHED, USUAL
from tests.servers.valkey_setups import ClusterSetup, client_of
from tests.unit.clients import MODES, open_client
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError, InvalidUrl, StoreUnavailable, UnusableClient
from waypost.store.port import Call, Executor, Store
from waypost.store.valkey import ValkeyStore
from waypost.store.valkey.cluster import ClusterSource
from waypost.store.valkey.command import ValkeyCall
from waypost.store.valkey.failures import SlotMoving
from waypost.testing.bench import QUEUE, Bench, Mode, StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.machine import machine_for
from waypost.testing.servers import ValkeyServer
from waypost.values import Notice, chain_id

T = TypeVar("T")
SECRET = "canary-hunter2"
#: Enough queues that every node has one.
QUEUES = [f"queue-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def setup() -> Iterator[ClusterSetup]:
    with ClusterSetup() as one:
        yield one


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def make_store(setup: ClusterSetup) -> StoreMaker:
    return lambda clock, namespace: cast(Store, ValkeyStore.from_url(setup.url, namespace=namespace, clock=clock))


def slot(setup: ClusterSetup, namespace: str, queue: str = QUEUE) -> int:
    return setup.slot_of(f"{{{namespace}:{queue}}}")


def another_node(setup: ClusterSetup, number: int) -> ValkeyServer:
    return next(server for server in setup.servers if server is not setup.owner(number))


def everything(setup: ClusterSetup, namespace: str) -> dict[tuple[int, bytes], bytes]:
    """Return the values of a namespace on every node."""
    found = {}
    for server in setup.servers:
        # One connection, because ASKING holds for the next request on it.
        with redis.Redis(port=server.port, password=server.password, single_connection_client=True) as client:
            for key in client.scan_iter(match=f"*{namespace}*", count=10_000):
                client.execute_command("ASKING")
                found[server.port, key] = cast(Any, client).dump(key)
    return found


def check_use(post: Any) -> None:
    """Publish, claim and settle in every queue, and list all of them."""
    for queue in QUEUES:
        published = post.publish(queue, {"n": queue}, key="order:é", window=60)
        with post.receive(queue, wait=1) as message:
            assert (message.id, message.body) == (published.id, {"n": queue})
            message.keep_result("kept")
        assert post.publish(queue, {"n": queue}, key="order:é", window=60).status == "duplicate"
        assert [one.status for one in post.publish_many(queue, range(1_100))] == ["queued"] * 1_100
        assert post.ledger(queue).ready == 1_100
    assert post.queues() == sorted(QUEUES)


# ---- URLs and clients --------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-1", "STORE-5")
def test_a_cluster_url_leads_to_every_node(setup: ClusterSetup, mode: Mode) -> None:
    namespace = fresh_namespace()
    with open_client(mode, setup.url, namespace=namespace) as post:
        check_use(post)
    owners = {setup.owner(slot(setup, namespace, queue)).port for queue in QUEUES}
    assert owners == {server.port for server in setup.servers}


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}])
def test_the_callers_cluster_client_is_used_and_not_closed(setup: ClusterSetup, options: dict[str, Any]) -> None:
    kind: Any = redis.RedisCluster
    with kind(host="127.0.0.1", port=setup.servers[0].port, password=setup.password, **options) as client:
        with Waypost(client=client, namespace=fresh_namespace()) as post:
            check_use(post)
        assert client.ping()
        with pytest.raises(UnusableClient, match="needs Waypost"):
            asyncio.run(AsyncWaypost(client=client).open())
        with pytest.raises(UnusableClient, match="collects commands"):
            Waypost(client=client.pipeline())


@pytest.mark.promise("STORE-5")
def test_the_callers_asyncio_cluster_client_is_used_and_not_closed(setup: ClusterSetup) -> None:
    async def scenario() -> bool:
        kind: Any = redis.asyncio.RedisCluster
        client = kind(host="127.0.0.1", port=setup.servers[0].port, password=setup.password)
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            for queue in QUEUES:
                published = await post.publish(queue, 1)
                async with post.receive(queue, wait=1) as message:
                    assert message is not None
                    assert message.id == published.id
            assert await post.queues() == sorted(QUEUES)
        with pytest.raises(UnusableClient, match="needs AsyncWaypost"):
            Waypost(client=client).open()
        alive = bool(await client.ping())
        await client.aclose()
        return alive

    assert asyncio.run(scenario())


@pytest.mark.promise("STORE-5", "SEE-6")
@pytest.mark.parametrize(
    ("url", "reported"),
    [
        (f"valkey+cluster://user:{SECRET}@host:6379/3", "one database"),
        (f"valkey+cluster://user:{SECRET}@host:6379?db=3", "one database"),
        (f"valkey+cluster://user:{SECRET}@host:port,other", "cannot be read"),
        (f"unix+cluster://user:{SECRET}@host", "begins with"),
    ],
)
def test_an_unusable_cluster_url_is_an_error_with_the_reason_and_no_password(url: str, reported: str) -> None:
    with pytest.raises(InvalidUrl, match=reported) as caught:
        Waypost(url)
    assert SECRET not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"
    assert ClusterSource(f"valkeys+cluster://u:{SECRET}@a,b:7/0").display_name == "valkeys+cluster://a:6379,b:7"


@pytest.mark.promise("STORE-5", "LEASE-14")
def test_a_server_without_cluster_and_one_node_of_a_cluster_have_different_errors(
    setup: ClusterSetup, mode: Mode
) -> None:
    with (
        ValkeyServer() as single,
        pytest.raises(ConfigurationError, match="is no Cluster"),
        open_client(mode, f"valkey+cluster://:{single.password}@127.0.0.1:{single.port}"),
    ):
        pass
    with (
        pytest.raises(StoreUnavailable, match="is the server running"),
        open_client(mode, f"valkey+cluster://:{single.password}@127.0.0.1:{single.port}"),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"valkey\+cluster://"), open_client(mode, setup.servers[0].url):
        pass


# ---- several queues, several nodes -------------------------------------------------------------------------------


@pytest.mark.promise("STORE-1")
def test_a_batch_over_many_queues_is_answered_in_its_order(make_store: StoreMaker, mode: Mode) -> None:
    with Bench(make_store, mode) as bench:
        order = [queue for number in range(3) for queue in (QUEUES if number % 2 else QUEUES[::-1])]
        drafts = [bench.draft() for _ in order]
        calls = [
            bench.store.publish(queue, [draft], bench.operation(queue))
            for queue, draft in zip(order, drafts, strict=True)
        ]
        results = bench.runner.run_many(calls)
        assert [cast(Any, one).result[0].id for one in results] == [draft.id for draft in drafts]
        assert bench.run(bench.store.queues()) == sorted(QUEUES)


@pytest.mark.promise("STORE-1")
def test_a_continuation_to_a_queue_on_another_node_arrives_once(setup: ClusterSetup, mode: Mode) -> None:
    namespace = fresh_namespace()
    with open_client(mode, setup.url, namespace=namespace) as post:
        owner = setup.owner(slot(setup, namespace))
        far = next(queue for queue in QUEUES if setup.owner(slot(setup, namespace, queue)) is not owner)
        post.publish(QUEUE, "first")
        with post.receive(QUEUE, wait=1) as message:
            message.then(far, "second")
        with post.receive(far, wait=5) as message:
            assert message.body == "second"
        ledgers = post.ledger(QUEUE), post.ledger(far)
        assert [(one.published, one.done, one.balance) for one in ledgers] == [(1, 1, 0), (1, 1, 0)]


@pytest.mark.promise("STORE-1", "LEASE-14")
def test_a_node_that_restarts_is_waited_for_and_the_others_go_on(mode: Mode) -> None:
    with ClusterSetup(appendonly=True) as own:
        namespace = fresh_namespace()
        listed = own.owner(own.slot_of(f"{namespace}:queues"))
        gone = next(server for server in own.servers if server is not listed)
        there = next(one for one in QUEUES if own.owner(slot(own, namespace, one)) is gone)
        here = next(one for one in QUEUES if own.owner(slot(own, namespace, one)) is not gone)
        with open_client(mode, own.url, namespace=namespace, retry_budget=30) as post:
            first = post.publish(there, 1)
            gone.kill()
            with open_client(mode, own.url, namespace=namespace, retry_budget=0) as hasty:
                with pytest.raises(StoreUnavailable):
                    hasty.publish(there, 2)
                assert hasty.publish(here, 1).status == "queued"
            starting = threading.Timer(0.2, gone.start)
            starting.start()
            assert post.publish(there, 3).status == "queued"
            starting.join()
            with post.receive(there, wait=5) as message:
                assert message.id == first.id
            ledger = post.ledger(there)
            assert (ledger.published, ledger.done, ledger.balance) == (2, 1, 0)


# ---- slots that move ---------------------------------------------------------------------------------------------


#: Keys of a queue that a simple program does not create.
MISSING = {
    "due": "zset", "waiting": "zset", "dead": "zset", "errors": "hash", "readers": "hash", "sleepers": "zset",
    "rate": "list", "completed": "list", "outgoing": "hash", "arrivals": "zset",
}  # fmt: skip


@pytest.mark.promise("STORE-1")
@pytest.mark.parametrize("moved", [0, 1, 5, 100])
def test_no_script_begins_while_its_slot_is_moving(
    setup: ClusterSetup, make_store: StoreMaker, mode: Mode, moved: int
) -> None:
    """All keys that a script could touch exist, so only the key that never exists keeps it from beginning."""
    with Bench(make_store, mode) as bench:
        bench.publish(key="order:1", window=3600)
        lease = bench.claim_one()
        bench.publish()
        number = slot(setup, bench.namespace)
        with client_of(setup.owner(number)) as raw:
            for name, kind in MISSING.items():
                key = f"{{{bench.namespace}:{QUEUE}}}:{name}"
                if kind == "hash":
                    raw.hset(key, "x" * 24, b"x")
                elif kind == "zset":
                    raw.zadd(key, {"x" * 24: 9e15})
                else:
                    raw.rpush(key, b"0:0")
            assert all(raw.exists(key) for key in ValkeyStore.keys_of(cast(ValkeyStore, bench.store), QUEUE))
        target = another_node(setup, number)
        setup.begin_move(number, target)
        try:
            setup.move_keys(number, target, moved)
            before = everything(setup, bench.namespace)
            attempts: list[Callable[[], object]] = [
                lambda: bench.publish(key="order:2", window=3600),
                lambda: bench.claim(5),
                lambda: bench.settle(lease, result=b"kept"),
                lambda: bench.extend(lease),
                bench.stats,
                lambda: bench.watch(lease.id, "anna"),
                lambda: bench.run(bench.store.result(QUEUE, lease.id)),
                lambda: bench.chain_state(chain_id(QUEUE, lease.id), "anna"),
                lambda: bench.carry(Notice("a notice", "ended", QUEUE, chain_id(QUEUE, lease.id), "orders/x")),
            ]
            for attempt in attempts:
                with pytest.raises(SlotMoving):
                    attempt()
            calls = [bench.store.publish(QUEUE, [bench.draft()], bench.operation()) for _ in range(3)]
            assert [type(one) for one in bench.runner.run_many(calls)] == [SlotMoving] * 3
            # A single key is found wherever it is.
            assert bench.run(bench.store.policy(QUEUE)).max_deliveries == 10
            assert everything(setup, bench.namespace) == before
        finally:
            setup.end_move(number, target)
        # The waiting settle still works, and the key is still in its window.
        assert bench.settle(lease, result=b"kept") == "done"
        assert bench.publish(key="order:1", window=3600).status == "duplicate"
        assert bench.run(bench.store.result(QUEUE, lease.id)) == b"kept"


class Restless:
    """An executor that moves slots during calls: it begins to move one, tries the call, ends the move, tries again."""

    def __init__(self, inner: Executor, setup: ClusterSetup, seen: Counter[str]) -> None:
        self.inner = inner
        self.setup = setup
        self.seen = seen

    def run(self, call: Call[T]) -> T:
        self.seen["calls"] += 1
        if self.seen["calls"] % 23:
            return self.inner.run(call)
        number = self.setup.slot_of(cast("ValkeyCall[T]", call).place.decode())
        target = another_node(self.setup, number)
        self.setup.begin_move(number, target)
        self.setup.move_keys(number, target, self.seen["calls"] % 7)
        try:
            result = self.inner.run(call)
        except SlotMoving:
            self.seen["refused"] += 1
            self.setup.end_move(number, target)
            return self.inner.run(call)
        except BaseException:
            self.setup.end_move(number, target)
            raise
        self.seen["ran"] += 1
        self.setup.end_move(number, target)
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return self.inner.run_many(calls)

    def close(self) -> None:
        self.inner.close()


class RestlessStore:
    def __init__(self, inner: Store, setup: ClusterSetup, seen: Counter[str]) -> None:
        self.inner = inner
        self.setup = setup
        self.seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *, start_timeout: float) -> Restless:
        return Restless(self.inner.connect(start_timeout=start_timeout), self.setup, self.seen)


@pytest.mark.promise("STORE-1", "STORE-4", "SEE-5")
def test_any_program_gives_the_same_results_while_slots_move(setup: ClusterSetup, make_store: StoreMaker) -> None:
    seen: Counter[str] = Counter()

    def make(clock: ManualClock, namespace: str) -> Store:
        return cast(Store, RestlessStore(make_store(clock, namespace), setup, seen))

    machine = machine_for(make)
    run_state_machine_as_test(machine, settings=settings(USUAL, max_examples=12))
    # A dozen programs are too few to be sure of each event.
    assert len(REACHED - set(machine.reached)) <= 3
    assert seen["refused"] > 20


@pytest.mark.promise("STORE-1", "LEASE-14")
def test_clients_go_on_while_their_slot_moves_back_and_forth(setup: ClusterSetup, mode: Mode) -> None:
    namespace, goal = fresh_namespace(), 150
    number = slot(setup, namespace)
    ended = threading.Event()
    moves = 0

    def move() -> None:
        nonlocal moves
        while not ended.is_set():
            setup.move_slot(number, another_node(setup, number))
            moves += 1
            ended.wait(0.05)

    moving = threading.Thread(target=move)
    published: list[str] = []
    handled: list[str] = []
    with open_client(mode, setup.url, namespace=namespace) as post:
        moving.start()
        try:
            while len(published) < goal or moves < 3:
                published.append(post.publish(QUEUE, len(published), key=f"order:{len(published)}").id)
                published += [one.id for one in post.publish_many(QUEUE, [b"many"] * 3)]
            while len(handled) < len(published):
                with post.receive(QUEUE, wait=10) as message:
                    handled.append(message.id)
        finally:
            ended.set()
            moving.join()
        assert handled == published
        ledger = post.ledger(QUEUE)
        assert (ledger.done, ledger.claims, ledger.balance, ledger.unexplained) == (
            len(published),
            len(published),
            0,
            0,
        )
