"""Connections to a real server: how they begin, what is refused, and what they survive."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from tests.fault.proxy import Proxy
from tests.forked_client import run_forked
from tests.unit.clients import MODES, open_client
from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError, InvalidUrl, StoreError, StoreUnavailable, UnusableClient
from waypost.store.port import Store
from waypost.store.valkey import ValkeyStore, executor
from waypost.store.valkey.executor import check_server
from waypost.store.valkey.sources import REPLY_TIMEOUT_SECONDS, UrlSource
from waypost.testing.bench import Mode, Runner, fresh_namespace
from waypost.testing.servers import ValkeyServer, free_port
from waypost.values import Ledger, Published

SECRET = "canary-hunter2"
QUEUE = "orders"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def post(server: ValkeyServer, mode: str) -> Iterator[Any]:
    with open_client(mode, server.url, namespace=fresh_namespace()) as one:
        yield one


def check_use(post: Any) -> None:
    """Publish, claim and settle a message, and read everything."""
    published = post.publish(QUEUE, {"n": 1}, key="order:é", headers={"a": "b"})
    assert published.status == "queued"
    with post.receive(QUEUE, wait=1) as message:
        assert (message.id, message.body, message.key) == (published.id, {"n": 1}, "order:é")
        message.keep_result({"kept": True})
    assert post.ledger(QUEUE).done == 1
    assert [event.event for event in post.history(QUEUE, published.id)] == ["published", "claimed", "done"]
    assert post.queues() == [QUEUE]
    assert post.policy(QUEUE).max_deliveries == 10


# ---- the first connection --------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-14")
def test_a_port_without_a_server_is_an_error_at_once(mode: str) -> None:
    url = f"valkey://user:{SECRET}@127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match="is the server running") as caught, open_client(mode, url):
        pass
    assert SECRET not in str(caught.value)


@pytest.mark.promise("LEASE-14")
def test_a_server_that_accepts_and_stays_silent_fails_after_the_start_timeout(mode: str) -> None:
    """Without the start timeout, the wait for a reply would be longer than this test's limit."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        failures: list[BaseException] = []

        def connect() -> None:
            try:
                with open_client(mode, f"valkey://127.0.0.1:{silent.getsockname()[1]}", start_timeout=0.2):
                    pass
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(REPLY_TIMEOUT_SECONDS / 2)
        assert [type(failure) for failure in failures] == [StoreUnavailable]


def test_later_replies_may_take_longer_than_the_first(server: ValkeyServer, mode: Mode) -> None:
    for options, limit in (("", REPLY_TIMEOUT_SECONDS), ("?socket_timeout=7", 7)):
        runner = Runner(cast(Store, ValkeyStore.from_url(server.url + options)), mode)
        runner.run(ValkeyStore.from_url(server.url).queues())
        connected: Any = runner._sync or runner._async
        assert [getattr(kept, "redis_connection", kept).socket_timeout for kept, _ in connected._idle] == [limit]
        runner.close()


# ---- URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-5", "SEE-6")
@pytest.mark.parametrize(
    ("url", "reported"),
    [
        (f"http://user:{SECRET}@host", "http scheme"),
        (f"//user:{SECRET}@host", "no scheme"),
        (f"valkey://user:{SECRET}@host:port", "port"),
        (f"valkey://user:{SECRET}@host:70000", "port"),
        (f"valkey://user:{SECRET}@host/orders", "number of the database"),
        ("unix://", "names a socket"),
        (f"valkey://user:{SECRET}@host?socket_timeout=soon", "cannot be used"),
    ],
)
def test_an_unusable_url_is_an_error_with_the_reason_and_no_password(url: str, reported: str) -> None:
    with pytest.raises(InvalidUrl, match=reported) as caught:
        UrlSource(url).pool(1)
    assert SECRET not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("options", ["", "/3", "/?decode_responses=yes", "/?protocol=3", "?client_name=mine"])
def test_a_url_may_have_options(server: ValkeyServer, mode: str, options: str) -> None:
    with open_client(mode, server.url + options, namespace=fresh_namespace()) as post:
        check_use(post)


@pytest.mark.promise("STORE-5")
def test_a_unix_socket_works_too(server: ValkeyServer, mode: str) -> None:
    with open_client(mode, server.socket_url, namespace=fresh_namespace()) as post:
        check_use(post)


@pytest.mark.promise("STORE-5", "SEE-6")
def test_a_password_is_accepted_and_a_wrong_one_is_never_printed(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with ValkeyServer(requirepass="right") as locked:
        with open_client(mode, f"valkey://:right@127.0.0.1:{locked.port}") as post:
            check_use(post)
        reported = []
        for user in (f":{SECRET}@", f"user:{SECRET}@", ""):
            with (
                pytest.raises(StoreError, match="password") as caught,
                open_client(mode, f"valkey://{user}127.0.0.1:{locked.port}") as post,
            ):
                post.queues()
            assert isinstance(caught.value, ConfigurationError)
            assert isinstance(caught.value, PermissionError)
            reported += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    unopened = Waypost(f"valkey://:{SECRET}@127.0.0.1:1")
    reported += [repr(unopened), repr(unopened.store), repr(unopened.store.source), unopened.store.source.display_name]  # type: ignore[attr-defined]
    assert SECRET not in " ".join(reported) + caplog.text


@pytest.mark.promise("SEE-6")
def test_a_user_that_may_not_run_scripts_gets_an_error(server: ValkeyServer, raw: Any, mode: str) -> None:
    raw.acl_setuser(
        "looker", enabled=True, passwords=[f"+{SECRET}"], categories=["+@read"], commands=["+info"], keys="*"
    )
    try:
        with open_client(
            mode, f"valkey://looker:{SECRET}@127.0.0.1:{server.port}", namespace=fresh_namespace()
        ) as post:
            for verb, body in ((post.publish, 1), (post.publish_many, [1, 2])):
                with pytest.raises(PermissionError, match="ACL of the user") as caught:
                    verb(QUEUE, body)
                assert SECRET not in str(caught.value)
    finally:
        raw.acl_deluser("looker")


# ---- the caller's own client -----------------------------------------------------------------------------------


def untyped(kind: Any) -> Any:
    """Return a class of redis-py whose constructor has no types."""
    return kind


def unusable(server: ValkeyServer) -> Iterator[tuple[str, Any]]:
    """Return objects that resemble a client and cannot be used, with the expected errors."""
    yield "master_for", untyped(Sentinel)([("127.0.0.1", 1)])
    yield "master_for", untyped(AsyncSentinel)([("127.0.0.1", 1)])
    yield "collects commands", redis.Redis(port=1).pipeline()
    yield "collects commands", redis.asyncio.Redis(port=1).pipeline()
    yield "owns one socket", redis.Redis(port=server.port, password=server.password, single_connection_client=True)
    yield "owns one socket", redis.asyncio.Redis(port=1, single_connection_client=True)
    yield "not a builtins.object", object()
    yield "redis.connection.ConnectionPool", redis.ConnectionPool()


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_client_that_cannot_be_shared_is_refused_by_the_constructor(
    server: ValkeyServer, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = list(unusable(server))

    def connect(*given: Any) -> None:
        raise AssertionError("a socket was used")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        for reported, client in clients:
            with pytest.raises(UnusableClient, match=reported):
                kind(client=client)
    for _, client in clients:
        if isinstance(client, redis.Redis):
            client.close()


@pytest.mark.promise("STORE-5")
def test_a_client_of_the_other_mode_is_refused(server: ValkeyServer) -> None:
    with (
        redis.Redis(port=server.port, password=server.password) as blocking,
        pytest.raises(UnusableClient, match="needs Waypost"),
    ):
        asyncio.run(AsyncWaypost(client=blocking).open())
    with pytest.raises(UnusableClient, match="needs AsyncWaypost"):
        Waypost(client=redis.asyncio.Redis(port=server.port, password=server.password)).open()


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3, "decode_responses": True}])
def test_the_callers_own_client_is_used_and_not_closed(server: ValkeyServer, options: dict[str, Any]) -> None:
    client = redis.Redis(port=server.port, password=server.password, **options)
    with Waypost(client=client, namespace=fresh_namespace()) as post:
        check_use(post)
        assert client.ping()
    # All connections were returned: a pool of one would be stuck otherwise.
    assert client.ping()
    client.connection_pool.disconnect()
    client.close()


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3, "decode_responses": True}])
def test_the_callers_own_asyncio_client_is_used_and_not_closed(server: ValkeyServer, options: dict[str, Any]) -> None:
    async def scenario() -> bool:
        client = redis.asyncio.Redis(port=server.port, password=server.password, **options)
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            published = await post.publish(QUEUE, {"n": 1}, key="order:é")
            async with post.receive(QUEUE, wait=1) as message:
                assert message is not None
                assert (message.id, message.body, message.key) == (published.id, {"n": 1}, "order:é")
            assert (await post.ledger(QUEUE)).done == 1
            assert await post.queues() == [QUEUE]
        alive = bool(await client.ping())
        await client.aclose()
        return alive

    assert asyncio.run(scenario())


def check_replies(published: Sequence[Published], queues: Sequence[str], ledger: Ledger) -> None:
    assert len({one.id for one in published}) == len(published) == 1_500
    assert list(queues) == [QUEUE]
    assert (ledger.published, ledger.ready, ledger.balance) == (1_500, 1_500, 0)


@pytest.mark.promise("STORE-5")
def test_what_the_server_sends_without_a_request_is_no_reply(server: ValkeyServer, mode: str) -> None:
    """The caller's connections track keys, so the server sends a notice for each key that was read and has changed."""

    def track(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("CLIENT", "TRACKING", "ON")
        assert connection.read_response() in (b"OK", "OK")

    async def track_async(connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("CLIENT", "TRACKING", "ON")
        assert await connection.read_response() in (b"OK", "OK")

    options: dict[str, Any] = {"port": server.port, "password": server.password, "protocol": 3}

    async def scenario() -> None:
        client = untyped(redis.asyncio.Redis)(**options, redis_connect_func=track_async)
        async with AsyncWaypost(client=client, namespace=fresh_namespace(), retry_budget=0) as post:
            published = [await post.publish(QUEUE, number) for number in range(5)]
            published += await post.publish_many(QUEUE, range(1_495))
            check_replies(published, await post.queues(), await post.ledger(QUEUE))
        await client.aclose()

    if mode == "async":
        asyncio.run(scenario())
        return
    client = untyped(redis.Redis)(**options, redis_connect_func=track)
    with Waypost(client=client, namespace=fresh_namespace(), retry_budget=0) as post:
        published = [post.publish(QUEUE, number) for number in range(5)]
        published += post.publish_many(QUEUE, range(1_495))
        check_replies(published, post.queues(), post.ledger(QUEUE))
    client.close()


@pytest.mark.promise("STORE-5")
def test_connections_are_returned_to_the_callers_pool(server: ValkeyServer) -> None:
    pool = untyped(redis.BlockingConnectionPool)(
        port=server.port, password=server.password, max_connections=1, timeout=1
    )
    client = redis.Redis(connection_pool=pool)
    with Waypost(client=client, namespace=fresh_namespace()) as post:
        check_use(post)
    assert client.ping()
    pool.disconnect()


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize("protocol", [2, 3])
def test_the_caller_may_close_the_connections_of_its_pool_between_two_calls(
    server: ValkeyServer, protocol: int
) -> None:
    client = redis.Redis(port=server.port, password=server.password, protocol=protocol)
    with Waypost(client=client, namespace=fresh_namespace(), retry_budget=0) as post:
        post.publish(QUEUE, b"before")
        client.connection_pool.disconnect()
        assert post.publish(QUEUE, b"after").status == "queued"
        assert post.ledger(QUEUE).published == 2
    client.close()


# ---- forks -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-13")
def test_a_forked_child_is_refused_and_its_parent_goes_on(server: ValkeyServer) -> None:
    assert run_forked(server.url, fresh_namespace()) == ["4", "5"]


# ---- servers that come and go ------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-14", "STORE-1")
def test_after_a_restart_of_the_server_the_next_call_works_by_itself(mode: str) -> None:
    with ValkeyServer(appendonly=True) as server, open_client(mode, server.url, retry_budget=30) as post:
        first = post.publish(QUEUE, b"before", key="order")
        server.restart()
        assert post.publish(QUEUE, b"after").status == "queued"
        server.restart()
        assert {one.status for one in post.publish_many(QUEUE, [b"many"] * 1_500)} == {"queued"}
        server.restart()
        with post.receive(QUEUE, wait=5) as message:
            assert message.id == first.id
            server.restart()
        ledger = post.ledger(QUEUE)
        assert (ledger.published, ledger.done, ledger.claims, ledger.balance) == (1_502, 1, 1, 0)


@pytest.mark.promise("STORE-1")
def test_scripts_that_the_server_forgot_are_loaded_again(post: Any, raw: Any) -> None:
    for number in range(3):
        raw.script_flush()
        assert post.publish(QUEUE, number).status == "queued"
        raw.script_flush()
        assert len(post.publish_many(QUEUE, range(600))) == 600
        raw.script_flush()
        with post.receive(QUEUE) as message:
            assert message.body == number if number == 0 else message is not None
            raw.script_flush()
    ledger = post.ledger(QUEUE)
    assert (ledger.published, ledger.done, ledger.balance) == (3 * 601, 3, 0)


@pytest.mark.promise("LEASE-14")
def test_a_connection_that_the_server_closed_is_replaced(post: Any, raw: Any) -> None:
    post.publish(QUEUE, 1)
    for _ in range(3):
        raw.client_kill_filter(_type="normal", skipme=True)
        assert post.publish(QUEUE, 2).status == "queued"
    assert post.ledger(QUEUE).published == 4


@pytest.mark.promise("LEASE-14")
def test_an_idle_connection_that_the_server_closed_is_noticed_before_it_is_used(
    server: ValkeyServer, raw: Any, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0)
    name = fresh_namespace()
    runner = Runner(cast(Store, ValkeyStore.from_url(f"{server.url}?client_name={name}")), mode)
    queues = ValkeyStore.from_url(server.url).queues()
    for _ in range(3):
        runner.run(queues)
        raw.client_kill_filter(_type="normal", skipme=True)
        runner.run(queues)
    connected: Any = runner._sync or runner._async
    assert len(connected._idle) == connections_named(raw, name) == 1
    runner.close()


@pytest.mark.promise("LEASE-14")
def test_a_client_works_after_a_cancelled_call(server: ValkeyServer) -> None:
    async def scenario(proxy: Proxy) -> tuple[int, int]:
        async with AsyncWaypost(server.url_at(proxy.port), namespace=fresh_namespace()) as post:
            await post.publish(QUEUE, "first")
            for _ in range(5):
                proxy.silence(requests=False)
                running = asyncio.ensure_future(post.publish(QUEUE, "cancelled"))
                while not running.done():
                    await asyncio.sleep(0.01)
                    running.cancel()
                assert running.cancelled()
                proxy.heal()
                # A reply to the cancelled call must not be read as the reply to this one.
                assert len(await post.queues()) == 1
                assert (await post.publish(QUEUE, "next")).status == "queued"
            ledger = await post.ledger(QUEUE)
            return ledger.published, ledger.balance

    with Proxy(server.port) as proxy:
        published, balance = asyncio.run(scenario(proxy))
    assert 6 <= published <= 11
    assert balance == 0


@pytest.mark.promise("STORE-5")
def test_a_call_that_ends_after_the_close_returns_its_connection(server: ValkeyServer, raw: Any, mode: str) -> None:
    name, store = fresh_namespace(), ValkeyStore.from_url(server.url)
    own = ValkeyStore.from_url(f"{server.url}?client_name={name}")

    async def scenario() -> None:
        pool = untyped(redis.asyncio.BlockingConnectionPool)(
            port=server.port, password=server.password, max_connections=1, timeout=5
        )
        client = redis.asyncio.Redis(connection_pool=pool)
        for opened in (own, ValkeyStore.from_client(client)):
            executor = await opened.connect_async(start_timeout=3)
            await executor.close()
            await executor.run(store.queues())
            await executor.run_many([store.queues(), store.queues()])
        assert await client.ping()
        await client.aclose()
        await pool.disconnect()

    if mode == "async":
        asyncio.run(scenario())
    else:
        pool = untyped(redis.BlockingConnectionPool)(
            port=server.port, password=server.password, max_connections=1, timeout=5
        )
        client = redis.Redis(connection_pool=pool)
        for opened in (own, ValkeyStore.from_client(client)):
            executor = opened.connect(start_timeout=3)
            executor.close()
            executor.run(store.queues())
            executor.run_many([store.queues(), store.queues()])
        assert client.ping()
        pool.disconnect()
    until(lambda: connections_named(raw, name) == 0, "the end of the connections")


@pytest.mark.promise("STORE-5", "LEASE-14")
def test_a_call_that_is_cancelled_before_its_connection_is_used_loses_none(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0)

    async def scenario() -> int:
        pool = untyped(redis.asyncio.BlockingConnectionPool)(
            port=server.port, password=server.password, max_connections=1, timeout=5
        )
        client = redis.asyncio.Redis(connection_pool=pool)
        async with AsyncWaypost(client=client, namespace=fresh_namespace(), retry_budget=0) as post:
            await post.publish(QUEUE, "first")
            for turns in range(8):
                running = asyncio.ensure_future(post.publish(QUEUE, "cancelled"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                assert (await post.publish(QUEUE, "next")).status == "queued"
            balance = (await post.ledger(QUEUE)).balance
        await client.aclose()
        await pool.disconnect()
        return balance

    assert asyncio.run(scenario()) == 0


# ---- how many ----------------------------------------------------------------------------------------------------


def connections_named(raw: Any, name: str) -> int:
    return sum(client["name"] == name for client in raw.client_list())


@pytest.mark.promise("STORE-5")
def test_threads_share_a_client_and_use_as_many_connections_as_run_at_once(server: ValkeyServer, raw: Any) -> None:
    name, threads_count, each = fresh_namespace(), 8, 40
    with Waypost(f"{server.url}?client_name={name}", namespace=name) as post:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for number in range(each):
                    post.publish(QUEUE, number)
                    with post.receive(QUEUE) as message:
                        assert message is not None
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert 1 <= connections_named(raw, name) <= threads_count + 1
        ledger = post.ledger(QUEUE)
        assert (ledger.done, ledger.claims, ledger.balance) == (threads_count * each, threads_count * each, 0)
    # The server closes its side a moment later.
    until(lambda: connections_named(raw, name) == 0, "the end of the connections")


@pytest.mark.promise("STORE-5")
def test_coroutines_use_as_many_connections_as_run_at_once(server: ValkeyServer, raw: Any) -> None:
    name, at_once = fresh_namespace(), 8

    async def scenario() -> int:
        limit = asyncio.Semaphore(at_once)

        async def one(post: AsyncWaypost, number: int) -> None:
            async with limit:
                await post.publish(QUEUE, number)

        async with AsyncWaypost(f"{server.url}?client_name={name}", namespace=name) as post:
            await asyncio.gather(*(one(post, number) for number in range(200)))
            assert (await post.ledger(QUEUE)).published == 200
            return connections_named(raw, name)

    assert 1 <= asyncio.run(scenario()) <= at_once + 1
    # The server closes its side a moment later.
    until(lambda: connections_named(raw, name) == 0, "the end of the connections")


# ---- warnings at the first connection ------------------------------------------------------------------------


def warnings_of(records: list[logging.LogRecord]) -> list[tuple[str, str]]:
    return [(vars(record)["problem"], record.getMessage()) for record in records if record.levelname == "WARNING"]


@pytest.mark.promise("STORE-1")
def test_a_server_that_can_lose_messages_is_warned_about_once(
    server: ValkeyServer, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_warned", set())
    for _ in range(3):
        with open_client(mode, server.url):
            pass
    [(problem, text)] = warnings_of(caplog.records)
    assert problem == "no_append_only_file"
    assert "set appendonly yes" in text
    assert f"127.0.0.1:{server.port}" in text


@pytest.mark.promise("STORE-1")
def test_a_server_that_evicts_is_warned_about_and_a_safe_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_warned", set())
    with ValkeyServer(appendonly=True, maxmemory="64mb", maxmemory_policy="allkeys-lru") as server:
        with Waypost(server.url):
            pass
        [(problem, text)] = warnings_of(caplog.records)
        assert problem == "evicting"
        assert "set maxmemory-policy noeviction" in text
        caplog.clear()
        with redis.Redis(port=server.port, password=server.password) as client:
            client.config_set("maxmemory-policy", "noeviction")
        with Waypost(server.url):
            pass
        assert warnings_of(caplog.records) == []


@pytest.mark.promise("STORE-1")
@pytest.mark.parametrize(("version", "welcome"), [("5.0.14", False), ("6.0.16", False), ("6.2.0", True), ("9.1", True)])
def test_a_server_that_is_too_old_is_refused(version: str, welcome: bool) -> None:
    expected = (
        nullcontext() if welcome else pytest.raises(ConfigurationError, match=f"is version {version}; waypost needs")
    )
    with expected:
        check_server({"redis_version": version}, "valkey://here")


# ---- the async executor's own reads and writes on a connection -------------------------------------------------------


def test_a_connection_that_the_server_closed_is_not_used_again(server: ValkeyServer) -> None:
    async def scenario() -> None:
        client = redis.asyncio.Redis(port=server.port, password=server.password)
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            await post.publish("orders", 1)
            with redis.Redis(port=server.port, password=server.password) as other:
                assert other.client_kill_filter(_type="normal", skipme=True) >= 1
            await asyncio.sleep(0)
            assert (await post.publish("orders", 2)).status == "queued"
            assert (await post.ledger("orders")).published == 2
        await client.aclose()

    asyncio.run(scenario())


def test_a_returned_connection_has_its_streams_again(server: ValkeyServer) -> None:
    async def scenario() -> None:
        client = redis.asyncio.Redis(port=server.port, password=server.password)
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            await post.publish("orders", "x" * 700_000)
            received = await post.receive("orders", wait=5).__aenter__()
            assert received is not None
            assert len(received.body) == 700_000
        assert len(client.connection_pool._available_connections) >= 1
        assert await client.ping()
        await client.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_connection_reads_replies_of_both_protocol_versions(server: ValkeyServer, protocol: int) -> None:
    async def scenario() -> None:
        client = redis.asyncio.Redis(
            port=server.port, password=server.password, protocol=protocol, decode_responses=True
        )
        async with AsyncWaypost(client=client, namespace=fresh_namespace()) as post:
            published = await post.publish_many("orders", [{"id": n} for n in range(1_200)])
            assert {one.status for one in published} == {"queued"}
            assert (await post.ledger("orders")).ready == 1_200
        await client.aclose()

    asyncio.run(scenario())
