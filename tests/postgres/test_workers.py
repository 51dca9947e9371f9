"""The register of workers: each writes its own row, and none waits for another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from waypost.store.port import Heartbeat
from waypost.testing.bench import Bench
from waypost.testing.postgres import PostgresServer

pytestmark = pytest.mark.promise("SEE-4", "STORE-2")
SideBySide = Callable[[list[Callable[[], object]]], list[object]]


def heartbeat(bench: Bench, name: str, ttl_ms: int = 30_000) -> int:
    return bench.run(bench.store.heartbeat(Heartbeat(name), ttl_ms))


def names(bench: Bench) -> list[str]:
    return [worker.name for worker in bench.run(bench.store.workers())]


def test_a_locked_row_delays_only_its_own_worker(
    bench: Bench, server: PostgresServer, namespace: str, database: psycopg.Connection[Any]
) -> None:
    heartbeat(bench, "gone", ttl_ms=1)
    while names(bench):
        """Its time is a millisecond of the server's clock."""
    with psycopg.connect(server.url) as holder:
        holder.execute(f'SELECT 1 FROM "{namespace}_worker" WHERE name = %s FOR UPDATE', ("gone",))
        heartbeat(bench, "other")
        assert names(bench) == ["other"]
        rows = database.execute(f'SELECT name FROM "{namespace}_worker" ORDER BY name').fetchall()
        assert rows == [("gone",), ("other",)]
    heartbeat(bench, "other")
    assert database.execute(f'SELECT count(*) FROM "{namespace}_worker"').fetchone() == (1,)


def test_many_workers_send_heartbeats_and_unregister_at_once(bench: Bench, side_by_side: SideBySide) -> None:
    def worker(client: Bench, number: int) -> Callable[[], object]:
        def work() -> str:
            for _ in range(30):
                heartbeat(client, f"w{number}")
                heartbeat(client, "shared", ttl_ms=1)
            if number % 2:
                client.run(client.store.unregister(f"w{number}"))
            return "ended"

        return work

    assert side_by_side([worker(bench.another_client(), number) for number in range(6)]) == ["ended"] * 6
    assert [name for name in names(bench) if name != "shared"] == ["w0", "w2", "w4"]
