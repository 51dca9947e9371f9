"""How a client is made, connects, survives its connection, and notices that it was forked."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.forked_client import run_forked
from tests.unit.clients import MODES, ShakyStore, open_client
from waypost import AsyncWaypost, Waypost, errors
from waypost.store.memory import MemoryStore
from waypost.store.opening import open_store
from waypost.testing.clock import ManualClock

# ---- URLs and clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ({}, errors.ConfigurationError, "exactly one of"),
        ({"url": "memory://", "store": MemoryStore()}, errors.ConfigurationError, "exactly one of"),
        ({"url": "memory://", "namespace": "a b"}, errors.InvalidName, "namespace"),
        ({"url": "memory://", "retry_budget": -1}, errors.ConfigurationError, "retry_budget"),
        ({"url": "memory://", "start_timeout": 0}, errors.ConfigurationError, "start_timeout"),
        ({"url": 7}, errors.InvalidUrl, "a store URL is text, not int"),
        ({"url": "orders.db"}, errors.InvalidUrl, "starts with a scheme"),
        ({"url": "user:hunter2@host"}, errors.InvalidUrl, "starts with a scheme"),
        ({"url": "mysql://user:hunter2@host/db"}, errors.InvalidUrl, "scheme mysql:// is not known"),
        ({"url": "postgresql+asyncpg://user:hunter2@host/db"}, errors.InvalidUrl, "that SQLAlchemy has"),
        ({"url": "memory://a/b"}, errors.InvalidUrl, "at most a name"),
        ({"url": "sqlite://orders.db"}, errors.InvalidUrl, "three slashes"),
        ({"url": "sqlite:///"}, errors.InvalidUrl, "must name a file"),
        ({"url": "sqlite:///folder/"}, errors.InvalidUrl, "must name a file"),
        ({"url": "sqlite:///:memory:"}, errors.InvalidUrl, "use memory://"),
        ({"url": "sqlite:///a.db?mode=ro"}, errors.InvalidUrl, "no options"),
        ({"url": "sqlite:///a%00.db"}, errors.InvalidUrl, "NUL"),
        ({"url": "valkey://"}, errors.InvalidUrl, "names no host"),
        ({"url": "valkey://user:hunter2@:6379"}, errors.InvalidUrl, "names no host"),
        ({"url": "redis://user:hunter2@host:port"}, errors.InvalidUrl, "host or port"),
        ({"url": "unix://"}, errors.InvalidUrl, "must name a socket"),
        ({"client": object()}, errors.UnusableClient, "not a builtins.object"),
    ],
)
def test_the_error_of_a_wrongly_built_client_names_the_mistake_and_no_password(
    kind: type[Waypost] | type[AsyncWaypost], given: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected) as caught:
        kind(**given)
    assert "hunter2" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_missing_driver_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(errors.MissingExtra, match=r'pip install "waypost\[valkey\]"'):
        Waypost("valkey://127.0.0.1:6379")


def test_a_named_memory_store_is_shared_and_a_nameless_one_is_not() -> None:
    clock = ManualClock()
    with Waypost("memory://shared-here", clock=clock) as one, Waypost("memory://shared-here") as other:
        one.publish("orders", 1)
        assert other.queues() == ["orders"]
        with Waypost("memory://shared-here", namespace="other") as apart, Waypost("memory://") as fresh:
            assert apart.queues() == fresh.queues() == []
    with pytest.raises(errors.ConfigurationError, match="another clock"):
        Waypost("memory://shared-here", clock=ManualClock())


@pytest.mark.promise("STORE-3")
def test_a_sqlite_url_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Waypost("sqlite:///my%20orders.db") as post:
        post.publish("orders", 1)
    with Waypost(f"sqlite:///{tmp_path}/my orders.db") as post:
        assert post.ledger("orders").ready == 1
    assert (tmp_path / "my orders.db").exists()


@pytest.mark.parametrize(
    "url",
    ["valkey://localhost:1", "valkeys://localhost:1", "redis://u:p@localhost", "rediss://localhost", "unix:///a.sock"],
)
def test_a_valkey_url_opens_a_valkey_store_without_connecting(url: str) -> None:
    store = open_store(url, namespace="wp", clock=None, replay_ttl_ms=1000, durability="server")
    assert (store.kind, store.namespace) == ("valkey", "wp")


@pytest.mark.promise("STORE-5")
def test_a_redis_client_of_the_callers_own_makes_a_valkey_store() -> None:
    import redis

    class Mine(redis.Redis):
        pass

    client = Mine(port=1)
    assert Waypost(client=client).store.kind == "valkey"
    client.close()


@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
def test_a_client_shows_its_kind_of_store_and_nothing_else(kind: Any) -> None:
    assert repr(kind("memory://", namespace="shop")) == f"{kind.__name__}(memory, namespace='shop')"


# ---- opening and closing -------------------------------------------------------------------------------------


def test_a_client_connects_once_however_many_threads_begin() -> None:
    store = ShakyStore()
    post = Waypost(store=store)
    start = threading.Barrier(8, timeout=60)

    def begin() -> None:
        start.wait()
        post.publish("orders", 1)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (store.connections, post.ledger("orders").ready) == (1, 8)
    post.close()
    assert store.closed == 1


def test_an_async_client_connects_once_per_event_loop() -> None:
    store = ShakyStore()
    post = AsyncWaypost(store=store)

    async def many() -> None:
        await asyncio.gather(*(post.publish("orders", n) for n in range(8)))

    asyncio.run(many())
    assert store.connections == 1
    asyncio.run(many())
    assert store.connections == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_client_refuses_calls_until_it_is_opened_again(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store) as post:
        post.close()
        post.close()
        with pytest.raises(errors.ConfigurationError, match="is closed"):
            post.queues()
        post.open()
        assert post.queues() == []
        assert store.closed == 1


@pytest.mark.promise("LEASE-14")
@pytest.mark.parametrize("mode", MODES)
def test_a_first_connection_that_fails_is_an_error_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShakyStore()
    given: list[float] = []

    def refuse(start_timeout: float) -> Any:
        given.append(start_timeout)
        raise errors.StoreUnavailable("connection refused")

    async def refuse_async(*, start_timeout: float) -> Any:
        refuse(start_timeout)

    monkeypatch.setattr(store, "connect", lambda *, start_timeout: refuse(start_timeout))
    monkeypatch.setattr(store, "connect_async", refuse_async)
    with (
        pytest.raises(errors.StoreUnavailable, match="connection refused"),
        open_client(mode, store=store, start_timeout=0.5),
    ):
        pass
    assert given == [0.5]


# ---- connections that fail -----------------------------------------------------------------------------------


@pytest.mark.promise("PUB-3", "LEASE-14")
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_reply_never_publishes_twice(mode: str) -> None:
    store = ShakyStore(faults=["cut", "refuse", "cut"])
    with open_client(mode, store=store) as post:
        first = post.publish("orders", 1)
        assert first.status == "queued"
        assert store.ran == ["publish", "publish", "publish"]
        assert [stored.id for stored in post.messages("orders")] == [first.id]


@pytest.mark.promise("PUB-3")
@pytest.mark.parametrize("mode", MODES)
def test_lost_replies_within_a_batch_are_requested_again(mode: str) -> None:
    store = ShakyStore(faults=[None, "cut", "refuse"])
    with open_client(mode, store=store) as post:
        results = post.publish_many("orders", range(2000))
        assert {stored.id for stored in post.messages("orders")} == {published.id for published in results}
        assert post.ledger("orders").published == 2000


@pytest.mark.promise("PUB-2", "LEASE-14")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "kind"), [("cut", errors.OutcomeUnknown), ("refuse", errors.StoreUnavailable)])
def test_a_batch_whose_connection_stays_away_reports_what_is_known(mode: str, fault: Any, kind: type) -> None:
    store = ShakyStore(faults=[None, fault])
    with open_client(mode, store=store, retry_budget=0) as post:
        with pytest.raises(errors.PartialPublish) as caught:
            post.publish_many("orders", range(1500))
        assert isinstance(caught.value.cause, kind)
        known = [published is not None for published in caught.value.results]
        assert known == [True] * 512 + [False] * 512 + [True] * 476


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_stops_at_a_full_store(mode: str) -> None:
    store = ShakyStore(faults=[None] * 64 + [errors.StoreFull("no room")])
    with open_client(mode, store=store) as post:
        with pytest.raises(errors.PartialPublish) as caught:
            post.publish_many("orders", (n for n in range(512 * 200)))
        assert isinstance(caught.value.cause, errors.StoreFull)
        # The parts that were under way are known; what was not read from the generator is not counted.
        assert len(caught.value.results) == 512 * 128


@pytest.mark.promise("LEASE-14", "SEE-6")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("faults", "kind", "expected"),
    [
        (["refuse"], errors.StoreUnavailable, r"Nothing was done"),
        (["cut"], errors.OutcomeUnknown, r"It may have been done"),
    ],
)
def test_without_a_budget_nothing_is_repeated(mode: str, faults: Any, kind: type[Exception], expected: str) -> None:
    store = ShakyStore(faults=faults)
    with open_client(mode, store=store, retry_budget=0) as post:
        with pytest.raises(kind, match=expected):
            post.publish("orders", 1)
        assert len(store.ran) == (faults == ["cut"])


@pytest.mark.parametrize("mode", MODES)
def test_reads_are_repeated_too(mode: str) -> None:
    store = ShakyStore(faults=["cut", "refuse"])
    with open_client(mode, store=store) as post:
        assert post.queues() == []
        assert store.ran == ["queues", "queues"]


# ---- redaction -----------------------------------------------------------------------------------------------


@pytest.mark.promise("SEE-3")
@pytest.mark.parametrize("mode", MODES)
def test_the_journal_keeps_only_what_the_redact_hook_lets_through(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    def redact(queue: str, body: Any, headers: dict[str, str]) -> tuple[Any, dict[str, str]]:
        if body == "broken":
            raise LookupError("secret")
        return {"card": "…"}, dict.fromkeys(headers, "…")

    with open_client(mode, "memory://", redact=redact) as post:
        post.configure("orders", journal="full")
        post.publish("orders", {"card": "secret"}, headers={"token": "secret"})
        post.publish_many("orders", [{"card": "secret"}, "broken"])
        events = post.journal("orders").events
        bodies = [event.body for event in events if event.event == "published"]
        assert len(bodies) == 3
        assert not any(b"secret" in body for body in bodies)
        assert next(stored.body for stored in post.messages("orders")) == {"card": "secret"}
    assert [vars(record)["event"] for record in caplog.records] == ["redact_failed"]
    assert "secret" not in caplog.text


# ---- fork ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-13")
def test_a_forked_child_must_make_its_own_client() -> None:
    assert run_forked("memory://", "wp") == ["4", "2"]
