"""The lifespan of an application with waypost in it, and routes that report its health."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from waypost.checks import check_flag, check_seconds, show
from waypost.client import AsyncWaypost, Waypost
from waypost.client.internals import store_answers, store_answers_sync
from waypost.client.options import QueueName
from waypost.errors import ConfigurationError, WaypostError
from waypost.policy import HEALTH_WINDOW_SECONDS
from waypost.times import Duration
from waypost.values import Health
from waypost.views import to_json
from waypost.worker.sync_worker import SyncWorker
from waypost.worker.worker import STOP_SECONDS, Worker

#: How long a health route waits for the store: probes give up after a few seconds.
STORE_SECONDS = 2.0

OwnLifespan = Callable[[Any], AbstractAsyncContextManager[Any] | AsyncIterator[Any]]


class WaypostLifespan:
    """Opens a client when an application starts and closes it when that stops; in between, it runs a worker.

        waypost = WaypostLifespan(post)
        app = FastAPI(lifespan=waypost)

    `post` is the client that the handlers are registered with: an `AsyncWaypost`, whose worker shares the event loop of
    the application, or a `Waypost`, whose worker has a thread of its own. `own` is a lifespan of the application: what
    it opens is there before the first handler runs and until the last one has ended. Or call it inside your own:

        @asynccontextmanager
        async def lifespan(app):
            async with open_resources() as resources, waypost(app):
                yield {"resources": resources}

    The worker has no signal handlers: the server that runs the application has. When the application stops, no message
    is claimed any more, handlers have `stop_timeout` (25 s) to end, and what has not started is given back at no cost.
    `worker=False` runs none: for processes that only publish. `queues`, `scheduler`, `promoter`, `health_window` and
    `max_handlers` are those of `post.worker`.
    """

    def __init__(
        self,
        post: AsyncWaypost | Waypost,
        own: OwnLifespan | None = None,
        *,
        worker: bool = True,
        queues: Iterable[QueueName] | None = None,
        stop_timeout: Duration = STOP_SECONDS,
        scheduler: bool = True,
        promoter: bool = False,
        health_window: Duration = HEALTH_WINDOW_SECONDS,
        max_handlers: int | None = None,
    ) -> None:
        if not isinstance(post, AsyncWaypost | Waypost):
            raise ConfigurationError(f"post= is an AsyncWaypost or a Waypost, not {show(post)}")
        if own is not None and not callable(own):
            raise ConfigurationError(f"own= is a lifespan, a function of the application, not {show(own)}")
        self.post = post
        self._own = asynccontextmanager(own) if own is not None and inspect.isasyncgenfunction(own) else own
        self._runs_worker = check_flag("worker", worker, ConfigurationError)
        self._queues = None if queues is None else list(queues)
        self._stop_seconds = check_seconds("stop_timeout", stop_timeout, error=ConfigurationError)
        self._options: dict[str, Any] = {
            "scheduler": scheduler, "promoter": promoter, "health_window": health_window, "max_handlers": max_handlers
        }  # fmt: skip
        #: The worker while the application runs.
        self.worker: Worker | SyncWorker | None = None
        #: Whether an application has begun to start with it; it is open once the application's own lifespan is.
        self._is_used = False
        self._is_open = False
        self._store_check: asyncio.Task[str | None] | None = None

    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[Any]:
        """Return the lifespan of an application, or a part of it."""
        return self._run(app)

    @asynccontextmanager
    async def _run(self, app: FastAPI) -> AsyncIterator[Any]:
        if self._is_used:
            raise ConfigurationError("this lifespan is running already: each application needs one of its own")
        self._is_used = True
        try:
            own: Any = nullcontext() if self._own is None else self._own(app)
            async with own as state:
                self._is_open = True
                try:
                    await self._open()
                    yield state
                finally:
                    try:
                        await self._close()
                    finally:
                        self._is_open = False
        finally:
            self._is_used = False

    async def _open(self) -> None:
        if isinstance(self.post, AsyncWaypost):
            await self.post.open()
        else:
            await asyncio.to_thread(self.post.open)
        if not self._runs_worker:
            return
        self.worker = self.post.worker(self._queues, **self._options)
        if isinstance(self.worker, Worker):
            await self.worker.start()
        else:
            await asyncio.to_thread(self.worker.start)

    async def _close(self) -> None:
        worker, self.worker = self.worker, None
        check, self._store_check = self._store_check, None
        if check is not None:
            check.cancel()
        try:
            if isinstance(worker, Worker):
                await worker.stop(self._stop_seconds)
            elif worker is not None:
                await asyncio.to_thread(worker.stop, self._stop_seconds)
        finally:
            if isinstance(self.post, AsyncWaypost):
                await self.post.close()
            else:
                await asyncio.to_thread(self.post.close)

    # ---- health --------------------------------------------------------------------------------------------

    def health_routes(self, *, details: bool = False) -> APIRouter:
        """Return a router with `/live` and `/ready`, to be included with a prefix of your choice.

        `/live` is 503 if this process should be started again: its worker has ended, or does not claim although the
        store answers. `/ready` is 200 while the store answers and the worker, if this process runs one, claims. Both
        reply with a JSON document, whose `worker` is its health, or `none` if this process runs none. With `details` it
        has the reasons and the queues too. These name the address of the store, so they are for routes that the public
        cannot reach.

            app.include_router(waypost.health_routes(), prefix="/health")
        """

        async def live() -> JSONResponse:
            return self._respond(*await self._live(), details=details)

        async def ready() -> JSONResponse:
            return self._respond(*await self._ready(), details=details)

        router = APIRouter(include_in_schema=False)
        router.add_api_route("/live", live, methods=["GET", "HEAD"])
        router.add_api_route("/ready", ready, methods=["GET", "HEAD"])
        return router

    async def _live(self) -> tuple[bool, Health, list[str]]:
        health = self._health()
        # A store that is away is no reason to start the process again.
        is_alive = health.status != "red" or (self._is_working and await self._store_problem() is not None)
        return is_alive, health, []

    async def _ready(self) -> tuple[bool, Health, list[str]]:
        health, problem = self._health(), await self._store_problem()
        claims = not self._runs_worker or (self.worker is not None and self.worker.is_ready)
        is_ready = self._is_open and claims and health.status != "red" and problem is None
        return is_ready, health, [] if problem is None else [problem]

    @property
    def _is_working(self) -> bool:
        return self.worker is not None and self.worker.is_running

    def _health(self) -> Health:
        if not self._is_open:
            return Health("red", ["the application is not running"], [])
        if self._runs_worker and self.worker is None:
            return Health("red", ["the worker is not running"], [])
        return Health("green", [], []) if self.worker is None else self.worker.health()

    async def _store_problem(self) -> str | None:
        """Return why the store cannot be used, or None. Probes that come together share one call."""
        if not self._is_open:
            return "the client is not open"
        check = self._store_check
        if check is None or check.done():
            check = self._store_check = asyncio.create_task(self._call_store(), name="waypost checks the store")
        try:
            async with asyncio.timeout(STORE_SECONDS):
                return await asyncio.shield(check)
        except TimeoutError:
            return f"the store has not answered for {STORE_SECONDS:g} s"

    async def _call_store(self) -> str | None:
        try:
            if isinstance(self.post, AsyncWaypost):
                await store_answers(self.post)
            else:
                await asyncio.to_thread(store_answers_sync, self.post)
        except WaypostError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _respond(self, is_well: bool, health: Health, problems: list[str], *, details: bool) -> JSONResponse:
        document: dict[str, Any] = {"ok": is_well, "worker": health.status if self._runs_worker else "none"}
        if details:
            document["reasons"] = [*health.reasons, *problems]
            document["queues"] = [to_json(queue) for queue in health.queues]
        return JSONResponse(document, 200 if is_well else 503, {"Cache-Control": "no-store"})
