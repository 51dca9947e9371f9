"""The example of an order service on PostgreSQL: as a program, and as a service that a signal stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.waiting import until
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.promise("FACE-4")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop_url(postgres_url: str) -> str:
    """A database of its own: the tables of the example have fixed names."""
    name = fresh_namespace().replace("-", "_")
    before, _, query = postgres_url.partition("?")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    url = before.rpartition("/")[0] + f"/{name}" + (f"?{query}" if query else "")
    migrate(url)
    return url


def environment(url: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])
    return {**os.environ, "PYTHONPATH": paths, "SHOP_URL": url}


def test_the_example_runs_on_postgresql(shop_url: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "fastapi_orders.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=tmp_path, env=environment(shop_url), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-3:] == ["order 1: paid", "order 2: open", "timers: ['order:2']"]


def test_the_example_runs_as_a_service_and_stops_on_a_signal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    path = str(tmp_path / "shop.sock")
    command = [sys.executable, "-m", "uvicorn", "fastapi_orders:app", "--uds", path, "--log-level", "error"]
    service = subprocess.Popen(command, cwd=tmp_path, env=environment(url))

    def listens() -> bool:
        assert service.poll() is None, "the service ended"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(path) == 0

    try:
        until(listens, "the start of the service")
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://shop") as web:

            def get(path: str) -> Any:
                return web.get(path).json()

            until(lambda: get("/health/ready")["ok"], "a worker that claims")
            number = web.post("/orders", json={"address": "ann@example.com", "amount": 10}).json()
            assert web.post(f"/orders/{number}/payment").json() == "cancelled"
            until(lambda: get(f"/orders/{number}") == "paid", "the worker")
            assert get("/health/live") == {"ok": True, "worker": "green"}
    finally:
        service.send_signal(signal.SIGTERM)
        code = service.wait(60)
    assert code in (0, -signal.SIGTERM), "uvicorn ends by the signal that it was sent, once the application has stopped"
    with Waypost(url) as post:
        assert post.workers() == []
        assert post.ledger("charges").leased == 0
