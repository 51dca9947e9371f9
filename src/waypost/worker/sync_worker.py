"""The worker of the sync client: the same worker, on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

from waypost.errors import ConfigurationError
from waypost.store.port import Store
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
        """What it runs."""
        return self._worker.handlers

    @property
    def name(self) -> str:
        """How the store knows it."""
        return self._worker.name

    @property
    def is_running(self) -> bool:
        """Whether it is at work."""
        return self._worker.is_running

    @property
    def is_ready(self) -> bool:
        """Whether it claims: it is connected, and it was not asked to be quiet or to stop."""
        return self._worker.is_ready

    @property
    def store(self) -> Store:
        """The store that it claims from."""
        return self._worker.store

    def run(self, *, until_empty: bool = False, signals: bool = True, timeout: float = STOP_SECONDS) -> Drained:
        """Work until `stop`, a signal, or with `until_empty` until nothing is ready. Returns how it ended.

        SIGINT, SIGTERM and SIGHUP stop it, giving handlers `timeout` seconds; a second one has its usual effect. They
        are only listened to in the main thread, and only where the program has no handler of its own.
        """
        loop = asyncio.new_event_loop()
        self._ended = ended = threading.Event()
        try:
            # Not asyncio.run: that takes SIGINT for itself.
            return loop.run_until_complete(self._worker.run(until_empty=until_empty, signals=signals, timeout=timeout))
        finally:
            close_loop(loop)
            ended.set()

    def start(self) -> Self:
        """Work in a background thread; returns once it claims, or raises why it cannot."""
        if self._worker.is_running:
            raise ConfigurationError("this worker is running already")
        # Events of its own: the thread of an earlier run may still be waiting for a handler.
        known, self._ended = threading.Event(), threading.Event()
        self._error, self._claims = None, False
        self._thread = threading.Thread(
            target=self._run_in_thread, args=(known, self._ended), name="waypost-worker", daemon=True
        )
        self._thread.start()
        known.wait()
        # What happens after it began to claim is raised by `stop`.
        if self._error is not None and not self._claims:
            raise self._error
        return self

    def quiet(self) -> None:
        """Claim no more, and go on with what is claimed."""
        self._worker.quiet()

    def request_stop(self, timeout: float | None = None) -> None:
        """Ask for a stop without waiting for it. Safe from any thread and from a signal handler."""
        self._worker.request_stop(timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> Drained:
        """Stop in order, wait for it, and say how it went: handlers have so long to end.

        Raises what ended the worker before its time, if something did.
        """
        self._worker.request_stop(timeout)
        if self._thread is not threading.current_thread():
            self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._worker.report()

    def report(self) -> Drained:
        """Where the worker stands now."""
        return self._worker.report()

    def health(self) -> Health:
        """Whether this worker consumes: it claimed, or could have, within its window. Cheap; safe from any thread."""
        return self._worker.health()

    def reports(self) -> dict[str, Drained]:
        """The same for each of its queues."""
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
    """End what still runs on a loop of our own, as `asyncio.run` does, but without waiting for threads."""
    try:
        left: set[asyncio.Task[Any]] = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
