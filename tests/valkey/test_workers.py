"""The register of workers as the server has it: two keys in one slot, bounded, and usable in a full memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import redis
from redis.crc import key_slot

from tests.valkey.test_full_memory import fill
from waypost.errors import ForeignData, MissingExtra, StoreFull
from waypost.policy import WORKERS_SWEPT_MAX
from waypost.store.port import Heartbeat, Store
from waypost.store.valkey import ValkeyStore
from waypost.testing.bench import Bench
from waypost.testing.servers import EmbeddedServer, RedisServer, ValkeyServer

pytestmark = pytest.mark.promise("SEE-4", "STORE-1")
TTL_MS = 30_000


def keys(bench: Bench) -> tuple[str, str]:
    return f"{{{bench.namespace}}}:workers", f"{{{bench.namespace}}}:records"


def heartbeat(bench: Bench, name: str, ttl_ms: int = TTL_MS) -> int:
    return bench.run(bench.store.heartbeat(Heartbeat(name), ttl_ms))


def names(bench: Bench) -> list[str]:
    return [worker.name for worker in bench.run(bench.store.workers())]


def test_both_keys_lie_in_one_slot_and_end_with_the_last_worker(plain_bench: Bench, raw: Any) -> None:
    register, records = keys(plain_bench)
    assert key_slot(register.encode()) == key_slot(records.encode())
    heartbeat(plain_bench, "a")
    heartbeat(plain_bench, "short", 1_000)
    for key in (register, records):
        assert TTL_MS < raw.pttl(key) <= 2 * TTL_MS
    for name in ("a", "short"):
        plain_bench.run(plain_bench.store.unregister(name))
    assert raw.exists(register, records) == 0


def test_expired_workers_are_removed_a_bounded_number_at_a_time(plain_bench: Bench, raw: Any) -> None:
    register, records = keys(plain_bench)
    many = WORKERS_SWEPT_MAX + 50
    plain_bench.runner.run_many([plain_bench.store.heartbeat(Heartbeat(f"gone-{n}"), 1_000) for n in range(many)])
    assert raw.zcard(register) == raw.hlen(records) == many
    plain_bench.after(2)
    heartbeat(plain_bench, "a")
    assert raw.zcard(register) == raw.hlen(records) == 51
    assert names(plain_bench) == ["a"]
    heartbeat(plain_bench, "a")
    assert raw.zcard(register) == raw.hlen(records) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_foreign_key_is_named_and_not_changed(plain_bench: Bench, raw: Any, place: int) -> None:
    key = keys(plain_bench)[place]
    raw.set(key, "theirs")
    for call in (
        plain_bench.store.heartbeat(Heartbeat("a"), TTL_MS), plain_bench.store.unregister("a"),
        plain_bench.store.workers(),
    ):  # fmt: skip
        with pytest.raises(ForeignData, match=key):
            plain_bench.run(cast(Any, call))
    assert raw.get(key) == b"theirs"
    assert raw.exists(*keys(plain_bench)) == 1


@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer], ids=["valkey", "redis62"])
def test_workers_can_be_listed_while_the_memory_is_full(kind: type[EmbeddedServer]) -> None:
    try:
        server: Any = kind(maxmemory="4mb", maxmemory_policy="noeviction")
    except MissingExtra:
        pytest.skip(f"needs the wheel {kind.wheel}")

    def make(clock: Any, namespace: str) -> Store:
        return cast(Store, ValkeyStore.from_url(server.url, namespace=namespace, clock=clock))

    with server, redis.Redis(port=server.port, password=server.password) as client, Bench(make, "sync") as bench:
        heartbeat(bench, "early")
        fill(bench)
        # Well past the limit, whatever the server's buffers use.
        client.config_set("maxmemory", cast(dict[str, Any], client.info("memory"))["used_memory"] - 200_000)
        with pytest.raises(StoreFull):
            bench.publish(b"x" * 10_000)
        heartbeat(bench, "early")
        heartbeat(bench, "late")
        assert names(bench) == ["early", "late"]
        assert bench.run(bench.store.unregister("early")) is True
        assert names(bench) == ["late"]
