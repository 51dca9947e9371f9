"""The worker's HTTP endpoint: health and readiness are right, also while the event loop is blocked."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio

from tests.see.service import figures, get, get_json, value
from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError
from waypost.see import Endpoint, Prometheus
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.promise("SEE-2", "SEE-4")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as made:
        yield made


def test_health_turns_red_when_nothing_can_be_claimed_and_process_metrics_are_still_exported(
    server: ValkeyServer,
) -> None:
    prometheus = Prometheus()
    with Waypost(server.url, middleware=[prometheus], retry_budget=1) as post:

        @post.handler("orders")
        def charge(body: int) -> None: ...

        post.publish("orders", 1)
        worker = post.worker(health_window=1)
        with Endpoint(worker, prometheus) as endpoint, worker:
            # The worker counts a settle when the answer has arrived, which is later than the store's own count.
            until(
                lambda: (
                    value(
                        figures(get(f"{endpoint.url}/metrics")[2]),
                        "waypost_settled_total",
                        queue="orders",
                        outcome="done",
                    )
                    == 1
                )
            )
            assert get_json(f"{endpoint.url}/health")[0] == 200
            server.kill()
            status, answer = until(
                lambda: found if (found := get_json(f"{endpoint.url}/health"))[0] == 503 else None, "a red health"
            )
            assert (status, answer["status"]) == (503, "red")
            assert any("the store has not answered" in reason for reason in answer["reasons"])
            assert get_json(f"{endpoint.url}/ready")[0] == 503
            found = until(
                lambda: f if value(f := figures(get(f"{endpoint.url}/metrics")[2]), "waypost_store_up") == 0 else None
            )
            assert value(found, "waypost_worker_health") == 0
            assert value(found, "waypost_settled_total", queue="orders", outcome="done") == 1
            assert value(found, "waypost_queue_published_total", queue="orders") is None
            server.start()
            until(lambda: get_json(f"{endpoint.url}/health")[0] == 200, "a green health")
            assert get_json(f"{endpoint.url}/ready")[0] == 200


def test_a_worker_is_ready_while_it_claims_and_neither_before_nor_after() -> None:
    with Waypost("memory://ready") as post:
        release = threading.Event()

        @post.handler("orders")
        def charge(body: int) -> None:
            release.wait(60)

        worker = post.worker()
        with Endpoint(worker) as endpoint:
            ready, health = f"{endpoint.url}/ready", f"{endpoint.url}/health"
            assert get_json(ready)[0] == get_json(health)[0] == 503
            worker.start()
            assert get_json(ready)[0] == get_json(health)[0] == 200
            post.publish("orders", 1)
            until(lambda: worker.health().queues[0].running == 1)
            # While it stops it finishes what it has: healthy, but not ready for more work.
            worker.request_stop(60)
            until(lambda: get_json(ready)[0] == 503, "the end of readiness")
            status, answer = get_json(health)
            assert (status, answer["status"], answer["ready"]) == (200, "green", False)
            release.set()
            assert worker.stop().handled == 1
            assert get_json(ready)[0] == get_json(health)[0] == 503
        with pytest.raises(OSError, match="refused"):
            get(ready)


def test_a_quiet_worker_is_not_ready() -> None:
    with Waypost("memory://quiet") as post:

        @post.handler("orders")
        def charge(body: int) -> None: ...

        with post.worker() as worker, Endpoint(worker) as endpoint:
            assert get_json(f"{endpoint.url}/ready")[0] == 200
            worker.quiet()
            until(lambda: get_json(f"{endpoint.url}/ready")[0] == 503)
            assert get_json(f"{endpoint.url}/health")[0] == 200


def test_the_endpoint_answers_while_the_event_loop_is_blocked() -> None:
    answers: list[Any] = []

    async def main() -> None:
        prometheus = Prometheus()
        async with AsyncWaypost("memory://blocked", middleware=[prometheus]) as post:

            @post.handler("orders")
            async def charge(body: int) -> None:
                # On the event loop's own thread: nothing else can run on it.
                for path in ("/health", "/ready", "/metrics"):
                    answers.append(get(endpoint.url + path))

            await post.publish("orders", 1)
            worker = post.worker()
            with Endpoint(worker, prometheus) as endpoint:
                await worker.run(until_empty=True, signals=False)

    asyncio.run(main())
    assert [status for status, _, _ in answers] == [200, 200, 200]
    found = figures(answers[2][2])
    assert value(found, "waypost_worker_running", queue="orders") == 1
    assert value(found, "waypost_queue_messages", queue="orders", state="leased") == 1


def test_the_endpoint_is_read_only() -> None:
    with Waypost("memory://endpoint") as post:

        @post.handler("orders")
        def charge(body: int) -> None: ...

        with post.worker() as worker, Endpoint(worker) as endpoint:
            assert endpoint.host == "127.0.0.1"
            assert get(f"{endpoint.url}/ready/?verbose")[0] == 200
            assert get(f"{endpoint.url}/secrets")[::2] == (404, "not found: use /metrics, /health or /ready\n")
            # Without a Prometheus there are no figures.
            assert get(f"{endpoint.url}/metrics")[0] == 404
            connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=60)
            connection.request("HEAD", "/health")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            connection.close()
            connection.request("POST", "/health", b"{}")
            assert connection.getresponse().status == 501
            connection.close()
            # A client that sends nothing delays no other.
            with socket.create_connection(("127.0.0.1", endpoint.port)):
                assert get(f"{endpoint.url}/health")[0] == 200


@pytest.mark.parametrize("port", [-1, 65_536, "80", True])
def test_an_invalid_port_is_refused(port: Any) -> None:
    with Waypost("memory://port") as post:
        post.handler("orders")(lambda body: None)
        with pytest.raises(ConfigurationError, match="a port is a whole number from 0 to 65535"):
            Endpoint(post.worker(), port=port)


def test_an_address_that_cannot_be_bound_is_refused_at_start() -> None:
    with Waypost("memory://address") as post:
        post.handler("orders")(lambda body: None)
        worker = post.worker()
        with Endpoint(worker) as endpoint:
            with pytest.raises(ConfigurationError, match="is already started"):
                endpoint.start()
            with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1, port"):
                Endpoint(worker, port=endpoint.port).start()
        with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1, port 0"):
            Endpoint(worker, host="192.0.2.1").start()


def test_with_the_callers_asyncio_client_the_store_is_not_read_and_one_warning_is_logged(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    prometheus = Prometheus()

    async def main() -> list[str]:
        async with (
            redis.asyncio.Redis(port=server.port, password=server.password) as client,
            AsyncWaypost(client=client, middleware=[prometheus]) as post,
        ):
            await post.publish("orders", 1)
            prometheus.watch(post.store)
            return [(await asyncio.to_thread(prometheus.exposition))[0].decode() for _ in range(2)]

    for text in asyncio.run(main()):
        found = figures(text)
        assert value(found, "waypost_store_up") == 0
        assert value(found, "waypost_published_total", queue="orders", result="queued") == 1
    texts = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "metrics_not_read"]
    assert ["give the client a URL" in text for text in texts] == [True]
