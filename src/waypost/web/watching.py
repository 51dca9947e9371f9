"""What the server knows of a store: the figures of all queues, read in turns, shared by all requests and open pages.

A request has figures that are at most about a second old read for it, in bounded time: of very many queues those read
longest ago first, and each figure says when it was read. While pages are open, one loop for all of them reads a part of
the queues each second, in one flush, and notifies the pages of queues that changed. It begins with the first open page
and ends after the last: a mounted app is not told when its server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from msgspec import Struct

from waypost import AsyncWaypost
from waypost.errors import WaypostError
from waypost.schedule.schedule import Schedule
from waypost.views import RegisteredWorker
from waypost.web import alerts
from waypost.web.documents import Alert
from waypost.web.figures import RECENT_MINUTES, Figures, figures_of

log = logging.getLogger("waypost.web")

#: Figures younger than this are not read again for a request.
FRESH_SECONDS = 1.0
#: A request has figures read for it no longer than this; what is left is read for later ones. The second is for a
#: store of which some queues were never read.
REFRESH_SECONDS, FIRST_SECONDS = 0.03, 0.3
#: A page needs the figures several times: they are not read again within so long.
REFRESHED_SECONDS = 0.2
#: While the loop for open pages runs, requests use what it read if nothing is older than this: further pages cost
#: the store nothing.
SWEPT_SECONDS = 8.0
#: A store that does not answer for so long is reported as not available.
ANSWER_SECONDS = 5.0
#: Queues that are read in one flush.
READ_TOGETHER = 64
#: How often queues and workers are listed, and schedules, of which there may be many.
LIST_SECONDS, SCHEDULES_SECONDS = 3.0, 15.0
TICK_SECONDS = 1.0
#: Open pages that are kept up to date at the same time, of all browsers.
STREAMS_MAX = 100
#: Notifications that wait for a slow page. When it is full, the page is told to read everything anew.
NOTIFICATIONS_MAX = 32
#: A stream without news sends a line so often, so that both ends notice when the other is gone.
HEARTBEAT_SECONDS = 15.0
#: A stream ends after so long and the browser opens a new one, so that a session that has ended is noticed.
STREAM_SECONDS_MAX = 900.0


class Change(Struct, frozen=True):
    """A notification for open pages: the queues that changed. Empty: anything may have changed."""

    version: int
    queues: list[str]


class Reading(Struct):
    """The figures of a queue, and when they were read by this server's monotonic clock."""

    figures: Figures
    read_at: float
    has_changed: bool = True


class StoreWatch:
    """The figures of one store."""

    def __init__(self, post: AsyncWaypost) -> None:
        self._post = post
        self.readings: dict[str, Reading] = {}
        self.names: list[str] = []
        self.workers: list[RegisteredWorker] = []
        self.schedules: list[Schedule] = []
        #: Why the last read failed; None if it did not.
        self.error: str | None = None
        self.version = 0
        self._listed_at = self._schedules_at = self._refreshed_at = float("-inf")
        #: The workers that serve each queue, and what is wrong with each queue as far as it was looked at.
        self._serving: dict[str, list[RegisteredWorker]] = {}
        self._alerts: dict[str, list[Alert]] = {}
        self._pages: set[asyncio.Queue[Change]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None

    # ---- for requests ------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read what is older than `FRESH_SECONDS`, for a bounded time. A failure is kept in `error`.

        Requests that come while this runs wait for the same read: a store that hangs makes each of them wait once.
        """
        loop = asyncio.get_running_loop()
        if time.monotonic() - self._refreshed_at < REFRESHED_SECONDS or self._is_swept:
            return
        if self._refreshing is None or self._refreshing.done() or self._refreshing.get_loop() is not loop:
            self._refreshing = loop.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        began = time.monotonic()
        with self._failures_noted():
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._list()
                until = began + (FIRST_SECONDS if self.unread else REFRESH_SECONDS)
                while (part := self._stalest(FRESH_SECONDS)) and time.monotonic() < until:
                    await self._read(part)
                self._refreshed_at = time.monotonic()

    async def read_queue(self, name: str) -> bool:
        """Read one queue now; whether there is one. A failure is kept in `error`."""
        with self._failures_noted():
            async with asyncio.timeout(ANSWER_SECONDS):
                if name not in self.names:
                    self._listed_at = float("-inf")
                    await self._list()
                if name in self.names:
                    await self._read([name])
        return name in self.names

    async def changed(self, name: str | None) -> None:
        """Read anew what a write through this server changed, and notify open pages."""
        self._listed_at = self._schedules_at = self._refreshed_at = float("-inf")
        if name is not None:
            await self.read_queue(name)
        self._notify([] if name is None else [name])

    def workers_of(self, name: str) -> list[RegisteredWorker]:
        """The registered workers that serve a queue."""
        return self._serving.get(name, [])

    def alerts(self, name: str) -> list[Alert]:
        """What is wrong with a queue that was read."""
        found = self._alerts.get(name)
        if found is None:
            serving = self.workers_of(name)
            is_unserved = not serving and not any(worker.unlisted for worker in self.workers)
            figures = self.readings[name].figures
            found = self._alerts[name] = alerts.queue_alerts(figures, serving, is_unserved=is_unserved)
        return found

    @property
    def _is_swept(self) -> bool:
        """Whether the loop for open pages keeps the figures of all queues fresh enough for a request."""
        if not self.is_reading or self.error is not None or not self.names or self.unread:
            return False
        before = time.monotonic() - SWEPT_SECONDS
        return self._listed_at > before and all(self.readings[name].read_at > before for name in self.names)

    @property
    def unread(self) -> int:
        """Queues that were listed and never read."""
        return sum(name not in self.readings for name in self.names)

    @contextlib.contextmanager
    def _failures_noted(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self.error = f"the store has not answered for {ANSWER_SECONDS:.0f} seconds"
        except WaypostError as error:
            self.error = f"the store cannot be read: {error}"
        else:
            self.error = None

    async def _list(self) -> None:
        now = time.monotonic()
        if now - self._listed_at >= LIST_SECONDS:
            self.names = sorted(await self._post.queues())
            self.workers = await self._post.workers()
            self._serving = {}
            for worker in self.workers:
                for queue in worker.queues:
                    self._serving.setdefault(queue.name, []).append(worker)
            self._alerts.clear()
            known = set(self.names)
            self.readings = {name: reading for name, reading in self.readings.items() if name in known}
            self._listed_at = now
        if now - self._schedules_at >= SCHEDULES_SECONDS:
            self.schedules = await self._post.schedules()
            self._schedules_at = now

    def _stalest(self, older_than: float) -> list[str]:
        """The queues that were read longest ago, as many as are read in one flush."""
        before = time.monotonic() - older_than
        ages = {name: self.readings[name].read_at if name in self.readings else 0.0 for name in self.names}
        return sorted((name for name in self.names if ages[name] < before), key=ages.__getitem__)[:READ_TOGETHER]

    async def _read(self, names: Sequence[str]) -> list[str]:
        """Read queues in one flush; return those that changed."""
        found = await self._post.stats_many(names, RECENT_MINUTES)
        now, changed = time.monotonic(), list[str]()
        for stats in found:
            figures, before = figures_of(stats), self.readings.get(stats.queue)
            has_changed = before is None or differs(before.figures, figures)
            self.readings[stats.queue] = Reading(figures, now, has_changed)
            self._alerts.pop(stats.queue, None)
            if has_changed:
                changed.append(stats.queue)
        return changed

    # ---- for open pages ----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no further page can be kept up to date: it has to poll."""
        return len(self._pages) >= STREAMS_MAX

    async def changes(self) -> AsyncIterator[Change | None]:
        """Notify of changes until the page is closed; None now and then, when there is none.

        The loop that reads runs while there is any such page.
        """
        page: asyncio.Queue[Change] = asyncio.Queue(NOTIFICATIONS_MAX)
        self._pages.add(page)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield Change(self.version, [])
            until = time.monotonic() + STREAM_SECONDS_MAX
            while time.monotonic() < until:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        change = await page.get()
                except TimeoutError:
                    yield None
                else:
                    yield change
        finally:
            self._pages.discard(page)
            if not self._pages and self._loop_task is not None:
                self._loop_task.cancel()
                self._loop_task = None

    @property
    def is_reading(self) -> bool:
        """Whether the loop for open pages runs."""
        return self._loop_task is not None and not self._loop_task.done()

    async def close(self) -> None:
        """End the loop."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._tick()
            except Exception:
                log.exception("the figures of a store could not be read", extra={"event": "web_poll_failed"})
            await asyncio.sleep(max(0.05, TICK_SECONDS - (time.monotonic() - started)))

    async def _tick(self) -> None:
        """Read a part of the queues: those that changed last time, then those read longest ago."""
        before, changed = self.error, list[str]()
        with self._failures_noted():
            async with asyncio.timeout(ANSWER_SECONDS):
                names, workers = self.names, self.workers
                await self._list()
                active = [name for name in self.names if name in self.readings and self.readings[name].has_changed]
                part = list(dict.fromkeys([*active, *self._stalest(FRESH_SECONDS / 2)]))[:READ_TOGETHER]
                if part:
                    changed = await self._read(part)
                if names != self.names or statuses(workers) != statuses(self.workers):
                    changed = []
                    self._notify([])
        if changed or self.error != before:
            self._notify(changed)

    def _notify(self, queues: list[str]) -> None:
        self.version += 1
        for page in self._pages:
            if page.full():
                while not page.empty():
                    page.get_nowait()
                queues = []
            page.put_nowait(Change(self.version, queues))


def differs(before: Figures, after: Figures) -> bool:
    """Whether anything happened in a queue between two reads."""
    return (
        before.ledger != after.ledger or before.paused != after.paused or before.journal_last != after.journal_last
        or before.sleepers != after.sleepers or before.damaged != after.damaged
    )  # fmt: skip


def statuses(workers: Sequence[RegisteredWorker]) -> list[tuple[str, str, str]]:
    """What open pages show of workers without a reload."""
    return [(worker.name, worker.state, worker.status) for worker in workers]
