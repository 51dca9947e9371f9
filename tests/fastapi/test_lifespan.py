"""`WaypostLifespan`: a worker that starts and stops with the application, and routes that report its health."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from tests.fastapi.running import run, serving
from tests.waiting import until_async
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError
from waypost.fastapi import WaypostLifespan
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.promise("FACE-4")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_handler(post: AsyncWaypost | Waypost, seen: list[Any]) -> None:
    """Register a handler that records its bodies."""
    if isinstance(post, AsyncWaypost):

        @post.handler("orders")
        async def charge_async(body: object) -> None:
            seen.append(body)

    else:

        @post.handler("orders")
        def charge(body: object) -> None:
            seen.append(body)


@pytest.mark.parametrize("kind", [AsyncWaypost, Waypost])
def test_the_worker_starts_and_stops_with_the_application(kind: type[Any], tmp_path: Path) -> None:
    url, seen, order = f"sqlite:///{tmp_path / 'shop.db'}", list[Any](), list[str]()
    post = kind(url)
    add_handler(post, seen)

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        order.append("opened")
        yield {"shop": "corner shop"}
        order.append(f"closed, worker {waypost.worker}")

    waypost = WaypostLifespan(post, own)
    app = FastAPI(lifespan=waypost)

    async def test(reader: Waypost, body: int) -> None:
        before = [signal.getsignal(one) for one in SIGNALS]
        async with app.router.lifespan_context(app) as state:
            assert state == {"shop": "corner shop"}
            assert waypost.worker is not None
            order.append("running")
            assert [signal.getsignal(one) for one in SIGNALS] == before
            reader.publish("orders", body)
            await until_async(lambda: body in seen, "the handler")
        assert waypost.worker is None
        assert reader.workers() == []

    with Waypost(url) as reader:
        for body in (1, 2):  # it can be started again
            run(test(reader, body))
        assert reader.ledger("orders").done == 2
    assert order == ["opened", "running", "closed, worker None"] * 2


def test_a_lifespan_that_is_a_generator_and_a_call_inside_of_another_one_both_work() -> None:
    post = AsyncWaypost("memory://")
    seen: list[Any] = []
    add_handler(post, seen)

    async def own(app: FastAPI) -> AsyncIterator[None]:
        seen.append("opened")
        yield
        seen.append("closed")

    inner = WaypostLifespan(post)

    @asynccontextmanager
    async def around(app: FastAPI) -> AsyncIterator[dict[str, int]]:
        async with inner(app):
            yield {"answer": 42}

    async def test() -> None:
        async with serving(FastAPI(lifespan=WaypostLifespan(post, own))):
            await post.publish("orders", 1)
            await until_async(lambda: 1 in seen, "the handler")
        app = FastAPI(lifespan=around)

        @app.get("/")
        async def read(request: Request) -> bool:
            return inner.worker is not None

        async with serving(app) as web:
            assert (await web.get("/")).json() is True

    run(test())
    assert seen == ["opened", 1, "closed"]


def test_a_stop_lets_handlers_end_and_gives_back_what_has_not_started(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    post = AsyncWaypost(url)
    ended: list[int] = []

    async def test() -> None:
        running, stopping = asyncio.Event(), asyncio.Event()

        @post.handler("orders", concurrency=1)
        async def charge(body: int) -> None:
            running.set()
            await stopping.wait()
            ended.append(body)

        waypost = WaypostLifespan(post)

        async def end_once_it_stops() -> None:
            await until_async(lambda: waypost.worker is None, "the stop")
            stopping.set()

        async with serving(FastAPI(lifespan=waypost)):
            await post.publish_many("orders", [1, 2, 3])
            await running.wait()
            ending = asyncio.create_task(end_once_it_stops())
        await ending

    run(test())
    assert ended == [1]
    with Waypost(url) as reader:
        ledger = reader.ledger("orders")
        assert (ledger.done, ledger.ready, ledger.leased) == (1, 2, 0)
        assert [message.deliveries for message in reader.messages("orders")] == [0, 0]


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    post = AsyncWaypost("memory://")

    async def start() -> None:
        async with serving(FastAPI(lifespan=WaypostLifespan(post))):
            pass

    with pytest.raises(ConfigurationError, match="nothing to run"):
        run(start())
    with pytest.raises(ConfigurationError, match=r"post= is an AsyncWaypost"):
        WaypostLifespan("memory://")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="own= is a lifespan"):
        WaypostLifespan(post, 1)  # type: ignore[arg-type]

    async def twice() -> None:
        waypost = WaypostLifespan(post, worker=False)
        app = FastAPI(lifespan=waypost)
        async with waypost(app), waypost(app):
            pass

    with pytest.raises(ConfigurationError, match="running already"):
        run(twice())


def test_a_lifespan_of_two_applications_that_start_together_is_refused() -> None:
    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.sleep(0)  # the other application starts meanwhile
        yield

    async def test() -> None:
        post = AsyncWaypost("memory://")
        add_handler(post, [])
        waypost = WaypostLifespan(post, own)
        first, second = FastAPI(lifespan=waypost), FastAPI(lifespan=waypost)
        ends = await asyncio.gather(use(first), use(second), return_exceptions=True)
        assert [type(end) for end in ends] == [type(None), ConfigurationError]
        await use(second)  # the first has ended

    async def use(app: FastAPI) -> None:
        async with serving(app):
            await asyncio.sleep(0)

    run(test())


def with_health(waypost: WaypostLifespan) -> FastAPI:
    app = FastAPI(lifespan=waypost)
    app.include_router(waypost.health_routes(details=True), prefix="/health")
    app.include_router(waypost.health_routes(), prefix="/public")
    return app


def test_an_application_that_only_publishes_runs_no_worker() -> None:
    post = Waypost("memory://")
    waypost = WaypostLifespan(post, worker=False)
    app = with_health(waypost)

    async def test() -> None:
        async with serving(app) as web:
            assert waypost.worker is None
            assert (await asyncio.to_thread(post.publish, "orders", 1)).status == "queued"
            for path in ("live", "ready"):
                answer = await web.get(f"/health/{path}")
                assert (answer.status_code, answer.json()["ok"], answer.json()["worker"]) == (200, True, "none")
            assert answer.headers["cache-control"] == "no-store"

    run(test())


@pytest.mark.parametrize("kind", [AsyncWaypost, Waypost])
def test_a_worker_that_ended_makes_the_process_neither_live_nor_ready(kind: type[Any]) -> None:
    post = kind("memory://")
    add_handler(post, [])
    waypost = WaypostLifespan(post)
    app = with_health(waypost)

    async def test() -> None:
        async with serving(app) as web:
            healthy = [(await web.get(f"/health/{path}")).json() for path in ("live", "ready")]
            assert [(one["ok"], one["worker"], one["queues"][0]["name"]) for one in healthy] == [
                (True, "green", "orders")
            ] * 2
            assert waypost.worker is not None
            waypost.worker.quiet()
            await until_async(lambda: waypost.worker is not None and not waypost.worker.is_ready, "a quiet worker")
            assert [(await web.get(f"/health/{path}")).status_code for path in ("live", "ready")] == [200, 503]
            waypost.worker.request_stop(0)
            await until_async(
                lambda: waypost.worker is not None and not waypost.worker.is_running, "the end of the worker"
            )
            answers = [await web.get(f"/health/{path}") for path in ("live", "ready")]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert answers[0].json()["reasons"] == ["the worker is not running"]

    run(test())


@pytest.mark.parametrize("kind", [AsyncWaypost, Waypost])
def test_a_store_that_is_away_makes_the_process_not_ready_but_live(kind: type[Any]) -> None:
    with ValkeyServer() as server:
        post = kind(server.url, retry_budget=0.1)
        add_handler(post, [])
        waypost = WaypostLifespan(post, health_window=0.2, stop_timeout=0)
        app = with_health(waypost)

        async def test() -> None:
            async with serving(app) as web:

                async def is_ready() -> bool:
                    return (await web.get("/health/ready")).status_code == 200

                await until_async(is_ready, "a worker that claims")
                await asyncio.to_thread(server.stop)
                await until_async(lambda: waypost.worker is not None and waypost.worker.health().status == "red", "red")
                answers = await asyncio.gather(*(web.get(f"/health/{path}") for path in ("live", "ready", "ready")))
                assert [answer.status_code for answer in answers] == [200, 503, 503]
                assert len(answers[1].json()["reasons"]) >= 2
                assert (await web.get("/public/ready")).json() == {"ok": False, "worker": "red"}

        run(test())
