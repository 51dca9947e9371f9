"""Chains and waits under faults: processes killed at every step, connections cut while very many wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fault.proxy import Proxy
from tests.fault.worker_group import ROOT
from tests.servers.valkey_setups import ClusterSetup
from tests.waiting import until
from waypost import AsyncWaypost, Message, Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

QUEUES = ("chop", "cook", "serve")
KINDS: tuple[type[EmbeddedServer], ...] = (ValkeyServer, PostgresServer)
WAITS = 1_000


@contextmanager
def url_of(store: str, folder: Path) -> Iterator[str]:
    match store:
        case "sqlite":
            yield f"sqlite:///{folder / 'chains.db'}"
        case "valkey":
            with ValkeyServer() as valkey:
                yield valkey.url
        case "cluster":
            with ClusterSetup() as cluster:
                yield cluster.url
        case "postgres":
            with PostgresServer() as postgres:
                migrate(postgres.url)
                yield postgres.url


def begin_worker(url: str, notes: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "tests.fault.chain_app:post"]
    environment = os.environ | {"APP_URL": url, "APP_NOTES": str(notes), "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.promise("CHAIN-2")
@pytest.mark.parametrize("store", ["sqlite", "valkey", "cluster", "postgres"])
def test_a_chain_ends_once_though_its_process_is_killed_at_every_step(tmp_path: Path, store: str) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    with url_of(store, tmp_path) as url, Waypost(url) as post:
        for queue in QUEUES:
            post.configure(queue, lease=0.5)
        chain = post.publish("chop", {"step": 1}, chain=True)
        workers = [begin_worker(url, notes)]
        kills = 0
        try:
            while kills < 5:
                until(lambda: workers[-1].poll() is not None, "a kill")
                kills += 1
                workers.append(begin_worker(url, notes))
            assert post.wait_chain(chain, timeout=30) == "dinner"
        finally:
            workers[-1].terminate()
            assert workers[-1].wait(30) == 0
        deliveries = [line.split()[1:3] for line in notes.read_text().splitlines()]
        assert deliveries == [[str(step), str(delivery)] for step in range(1, 6) for delivery in (1, 2)]
        ledgers = [post.ledger(queue) for queue in QUEUES]
        assert [ledger.done for ledger in ledgers] == [2, 2, 1]
        assert {(ledger.balance, ledger.unexplained, ledger.dead) for ledger in ledgers} == {(0, 0, 0)}


@pytest.mark.promise("CHAIN-1", "WAKE-1")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.scheme)
def test_a_thousand_waits_for_results_all_end_though_their_connections_are_cut(kind: type[EmbeddedServer]) -> None:
    with kind() as server, Proxy(server.port) as proxy:
        if kind is PostgresServer:
            migrate(server.url)
        through = server.url.replace(f":{server.port}", f":{proxy.port}")
        results = asyncio.run(wait_for_all(server.url, through, proxy))
    assert results == list(range(WAITS))


async def wait_for_all(url: str, through: str, proxy: Proxy) -> list[object]:
    """Publish, wait for all at once, and run a worker while the connections of the waiting client are cut twice."""
    worker_side, waiting_side = AsyncWaypost(url), AsyncWaypost(through, retry_budget=30)

    @worker_side.handler("sums", concurrency=50)
    async def handle(number: int, message: Message[int]) -> None:
        message.keep_result(number)

    async with worker_side, waiting_side:
        published = await waiting_side.publish_many("sums", range(WAITS))
        waits = [asyncio.create_task(waiting_side.wait_result(one, timeout=60)) for one in published]
        await asyncio.sleep(0)
        proxy.cut()
        async with worker_side.worker():
            while not any(wait.done() for wait in waits):  # noqa: ASYNC110 - polled between two cuts
                await asyncio.sleep(0.01)
            proxy.cut()
            return list(await asyncio.gather(*waits))
