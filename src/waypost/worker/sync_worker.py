"""The worker of the sync client: the same worker, on its own event loop."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

from waypost.errors import ConfigurationError
from waypost.store.port import Store
from waypost.times import Duration
from waypost.values import Drained, Health
from waypost.worker.handler import Handler
from waypost.worker.worker import STOP_SECONDS, Worker, await_unfinished


class SyncWorker:
    """Runs handlers in the calling thread with `run`, or in a background thread for the length of a `with` block."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._ended.set()
        self._error: BaseException | None = None
        self._claims = False

    @property
    def handlers(self) -> list[Handler]:
        """The handlers that it runs."""
        return self._worker.handlers

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._worker.name

    @property
    def is_running(self) -> bool:
        """Whether it is running."""
        return self._worker.is_running

    @property
    def is_ready(self) -> bool:
        """Whether it claims: it is connected, and neither quiet nor stopping."""
        return self._worker.is_ready

    @property
    def store(self) -> Store:
        """The store that it claims from."""
        return self._worker.store

    def run(self, *, until_empty: bool = False, signals: bool = True, timeout: Duration = STOP_SECONDS) -> Drained:
        """Run until `stop`, a signal, or with `until_empty` until nothing is ready. Returns a report.

        SIGINT, SIGTERM and SIGHUP stop it, giving handlers `timeout` seconds; a second one has its default effect. They
        are handled only in the main thread, and only if the program has no handler for them.
        """
        loop = asyncio.new_event_loop()
        self._ended = ended = threading.Event()
        try:
            # Not asyncio.run, which handles SIGINT itself.
            return loop.run_until_complete(self._worker.run(until_empty=until_empty, signals=signals, timeout=timeout))
        finally:
            close_loop(loop)
            ended.set()

    def start(self) -> Self:
        """Run in a background thread; returns once it claims, or raises the error that prevents it."""
        if self._worker.is_running:
            raise ConfigurationError("this worker is already running")
        # New events: the thread of an earlier run may still be waiting for a handler.
        known, self._ended = threading.Event(), threading.Event()
        self._error, self._claims = None, False
        self._thread = threading.Thread(
            target=self._run_in_thread, args=(known, self._ended), name="waypost-worker", daemon=True
        )
        self._thread.start()
        known.wait()
        # An error after it started to claim is raised by `stop`.
        if self._error is not None and not self._claims:
            raise self._error
        return self

    def quiet(self) -> None:
        """Stop claiming, and continue with claimed messages."""
        self._worker.quiet()

    def request_stop(self, timeout: Duration | None = None) -> None:
        """Request a stop without waiting for it. Safe from any thread and from a signal handler."""
        self._worker.request_stop(timeout)

    def stop(self, timeout: Duration = STOP_SECONDS) -> Drained:
        """Stop, giving handlers this time to end; wait for it and return a report.

        Raises the error that ended the worker earlier, if there was one.
        """
        self._worker.request_stop(timeout)
        if self._thread is not threading.current_thread():
            self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._worker.report()

    def report(self) -> Drained:
        """Return the current state of the worker."""
        return self._worker.report()

    def health(self) -> Health:
        """Whether this worker consumes: it claimed, or could have, within its window. Cheap; safe from any thread."""
        return self._worker.health()

    def reports(self) -> dict[str, Drained]:
        """Return the current state of each of its queues."""
        return self._worker.reports()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run_in_thread(self, known: threading.Event, ended: threading.Event) -> None:
        def on_started() -> None:
            self._claims = True
            known.set()

        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._worker.run(signals=False, on_started=on_started))
            ended.set()
            loop.run_until_complete(await_unfinished())
        except BaseException as error:
            self._error = error
        finally:
            close_loop(loop)
            ended.set()
            known.set()


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the remaining tasks of the loop, as `asyncio.run` does, but without waiting for threads."""
    try:
        left: set[asyncio.Task[Any]] = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
