"""What tests in a real browser share: a server in a thread, a store with some of everything, tabs that note errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn

from waypost import AsyncWaypost, Waypost
from waypost.store.port import Heartbeat, ServedQueue
from waypost.web import create_app
from waypost.web.server import bind

PROGRAM = "chromium-headless-shell"
SECONDS_MAX = 30.0
#: A worker that every shop has, and how long it stays registered.
WORKER, WORKER_TTL_MS = "shop:1", 600_000
PHONE, DESK = {"width": 360, "height": 780}, {"width": 1280, "height": 900}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


class Server:
    """The app on a port of its own, in a thread. It ends with its client and every connection closed."""

    def __init__(self, url: str, namespace: str = "wp", **options: Any) -> None:
        self.post = AsyncWaypost(url, namespace=namespace, retry_budget=0.2)
        self.app = create_app(self.post, **options)
        self._listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def serve() -> None:
            try:
                await self._server.serve([self._listening])
            finally:
                await self.post.close()

        asyncio.run(serve())

    @property
    def watch(self) -> Any:
        return self.app.state.service.places["main"].watch

    @property
    def streams(self) -> int:
        """Pages that the server keeps up to date."""
        return len(self.watch._pages)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS_MAX)
        self._listening.close()
        assert not self._thread.is_alive(), "the server does not end"


class Shop:
    """A store, and a server that shows it, which may reach it by another URL."""

    def __init__(self, url: str, namespace: str = "wp", *, served_url: str | None = None, **options: Any) -> None:
        self.post = Waypost(url, namespace=namespace)
        self.server = Server(served_url or url, namespace, **options)

    def fill(self) -> None:
        """Make some of everything."""
        self.post.publish("orders", {"id": 7}, key="order:7", group="acme")
        self.post.publish("mails", "later", delay=3600, key="welcome")
        self.bury("orders", 1, 2, error="no such customer")
        self.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", key="rollup", body={})
        register_worker(self.post, Heartbeat(WORKER, queues=(ServedQueue("mails", 1),)))

    def bury(self, queue: str, *bodies: object, reason: str = "rejected", error: str | None = None) -> list[str]:
        """Make dead letters; their ids."""
        ids = [self.post.publish(queue, body, priority=9).id for body in bodies]
        for _ in bodies:
            with self.post.receive(queue) as message:
                assert message is not None
                message.dead(reason, error)
        return ids

    def close(self) -> None:
        try:
            self.server.stop()
        finally:
            self.post.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def register_worker(post: Waypost, heartbeat: Heartbeat) -> int:
    """Register a worker that is no process; return the store's time."""
    executor = post.store.connect(start_timeout=SECONDS_MAX)
    try:
        return executor.run(post.store.heartbeat(heartbeat, WORKER_TTL_MS))
    finally:
        executor.close()


class Tab:
    """A page of the browser that notes every complaint, in a context of its own."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        # Without transitions: a colour in between has another contrast.
        self.context = browser.new_context(**({"viewport": DESK, "reduced_motion": "reduce"} | options))
        self.context.set_default_timeout(SECONDS_MAX * 1000)
        self.server = server
        self.complaints: list[str] = []
        self.page = self.open_page()

    def open_page(self) -> Any:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note_line)
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        return page

    def _note_line(self, line: Any) -> None:
        if line.type in ("error", "warning"):
            self.complaints.append(line.text)

    def go(self, path: str) -> Any:
        answer = self.page.goto(self.server.url + path)
        assert answer.status == 200, (path, answer.status)
        return self.page

    def close(self) -> None:
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
