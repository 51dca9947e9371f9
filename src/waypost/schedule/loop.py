"""The loop of a scheduler or a promoter, sync and async: tick, sleep, and hand over at the end.

A tick that fails is logged once and tried again: the loop ends only when it is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from waypost.errors import WaypostError
from waypost.message import error_text, error_type
from waypost.operations.flow import ClientContext, Flow, drive, drive_async
from waypost.schedule.election import Candidate
from waypost.store.port import AsyncExecutor, Executor
from waypost.values import Elected
from waypost.wake.port import Listening

log = logging.getLogger("waypost")

#: The pause after a failed tick, whose calls were already repeated for the retry budget.
FAILED_SECONDS = 1.0
#: The longest wait for a hand-over; without one, the next leader starts when the lease ends.
HAND_OVER_SECONDS = 2.0
#: How often a loop in a thread, whose caller has the event that stops it, checks whether it was notified.
NOTIFIED_SECONDS = 0.5


class TickResult(Protocol):
    """The part of a tick's result that the loop needs."""

    @property
    def _sleep_seconds(self) -> float: ...


class Ticker(Protocol):
    """A scheduler or a promoter."""

    role: str
    context: ClientContext
    candidate: Candidate

    def tick(self) -> Flow[TickResult]: ...
    def hand_over(self) -> Flow[None]: ...
    def refresh(self) -> None: ...
    def listen(self, wake: Callable[[], None]) -> Listening | None:
        """Call `wake`, from any thread, when a notification makes a tick necessary before its time."""
        ...


class _FailureLog:
    """Logs the first of several failures in a row. Shared by both loops."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self._failing = False

    def failed(self, error: Exception) -> float:
        ticker = self._ticker
        ticker.context.emit(f"{ticker.role}_tick", "", "failure", error_type=error_type(error), error=error_text(error))
        if not self._failing:
            self._failing = True
            # An unexpected error is a defect: log its traceback. The loop continues, for all other schedules.
            traceback = None if isinstance(error, WaypostError) else error
            fields = {"event": f"{ticker.role}_failed"}
            log.warning("%s: %s; trying again", ticker.role, error, exc_info=traceback, extra=fields)
        return FAILED_SECONDS

    def succeeded(self, ticked: TickResult) -> float:
        self._failing = False
        return ticked._sleep_seconds


def run_blocking(executor: Executor, ticker: Ticker, stop: threading.Event) -> None:
    """Tick until `stop` is set, then hand over."""
    failures = _FailureLog(ticker)
    woken = threading.Event()
    listening = ticker.listen(woken.set)
    try:
        while not stop.is_set():
            woken.clear()
            try:
                seconds = failures.succeeded(drive(executor, ticker.tick()))
            except Exception as error:
                seconds = failures.failed(error)
            _pause(seconds, seconds if listening is None else NOTIFIED_SECONDS, stop, woken)
    finally:
        if listening is not None:
            listening.close()
        try:
            drive(executor, ticker.hand_over())
        except WaypostError as error:
            log.info(
                "%s could not hand over: %s", ticker.role, error, extra={"event": f"{ticker.role}_not_handed_over"}
            )


def _pause(seconds: float, step: float, stop: threading.Event, woken: threading.Event) -> None:
    """Wait until `stop` is set; check every `step` seconds whether it was woken."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not woken.is_set():
        if stop.wait(min(left, step)):
            return


class BackgroundLoop:
    """Runs a scheduler or promoter as a task on an event loop."""

    def __init__(self, executor: AsyncExecutor, ticker: Ticker) -> None:
        self._executor = executor
        self._ticker = ticker
        self._failures = _FailureLog(ticker)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = self._loop.create_task(self.run(), name=f"waypost {self._ticker.role}")

    @property
    def candidate(self) -> Candidate:
        """The candidate of the scheduler or promoter."""
        return self._ticker.candidate

    def update_election(self, elected: Elected) -> None:
        """Take over the result of an election that a poll of the worker held."""
        self.candidate.update(elected)
        if self.candidate.leading:
            self._woken.set()

    def refresh(self) -> None:
        """Tick now. Safe from any thread."""
        self._call_soon(self._refresh)

    def _refresh(self) -> None:
        self._ticker.refresh()
        self._woken.set()

    def _wake(self) -> None:
        self._call_soon(self._woken.set)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        # The loop may have ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def request_stop(self) -> None:
        """Stop after the current tick and hand over."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Tick until `request_stop`, then hand over."""
        listening = self._ticker.listen(self._wake)
        try:
            while not self._stopping:
                self._woken.clear()
                try:
                    seconds = self._failures.succeeded(await drive_async(self._executor, self._ticker.tick()))
                except Exception as error:
                    seconds = self._failures.failed(error)
                if seconds > 0 and not self._stopping:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._woken.wait(), seconds)
                else:
                    await asyncio.sleep(0)
        finally:
            if listening is not None:
                listening.close()
            await self._hand_over()

    async def _hand_over(self) -> None:
        try:
            await asyncio.wait_for(drive_async(self._executor, self._ticker.hand_over()), HAND_OVER_SECONDS)
        except (WaypostError, TimeoutError) as error:
            log.info(
                "%s could not hand over: %s", self._ticker.role, error,
                extra={"event": f"{self._ticker.role}_not_handed_over"},
            )  # fmt: skip

    async def stop(self, timeout: float = HAND_OVER_SECONDS) -> None:
        """Stop and wait for the end. A tick that hangs is cancelled, which is safe: each step is atomic."""
        self.request_stop()
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=timeout)
        task, self._task = self._task, None
        if task.done() and not task.cancelled() and task.exception() is not None:
            log.error(
                "%s ended: %s", self._ticker.role, task.exception(), extra={"event": f"{self._ticker.role}_ended"}
            )
