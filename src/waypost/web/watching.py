"""What the server knows of a store: the figures of all queues, read in turns, shared by all requests and open pages.

A request has figures that are at most about a second old read for it, in bounded time: of very many queues first those
that it shows, then those read longest ago, and each figure says when it was read. What is older than a minute after
that is read in the background. While pages are open, one loop for all of them reads a part of the queues each second,
in one flush, and notifies the pages of queues that changed. It begins with the first open page and ends after the last:
a mounted app is not notified when its server starts.

What follows from the figures of a queue (its alerts, its place in the list) is computed once for each read of it, so
that a page of 50 queues costs about the same whether the store has 50 of them or 2,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from waypost import AsyncWaypost
from waypost.errors import WaypostError
from waypost.schedule.schedule import Schedule
from waypost.views import RegisteredWorker
from waypost.web import alerts
from waypost.web.documents import Alert, Failure, Level
from waypost.web.figures import RECENT_MINUTES, Figures, figures_of

log = logging.getLogger("waypost.web")

#: Figures younger than this are not read again for a request.
FRESH_SECONDS = 1.0
#: A request has figures read for it no longer than this; what is left is read for later ones. The second is for a
#: store of which some queues were never read.
REFRESH_SECONDS, FIRST_SECONDS = 0.02, 0.3
#: Figures older than this are read in the background once a request has come.
STALE_SECONDS = 60.0
#: Before each flush that is read in the background: requests go first.
BACKGROUND_PAUSE_SECONDS = 0.05
#: A page needs the figures several times: they are not read again within so long.
REFRESHED_SECONDS = 0.2
#: While the loop for open pages runs, requests use what it read if nothing is older than this: further pages cost
#: the store nothing.
SWEPT_SECONDS = 8.0
#: A store that does not answer for so long is reported as not available.
ANSWER_SECONDS = 5.0
#: Queues that are read in one flush: the most, and the fewest where a read takes long.
READ_TOGETHER, READ_TOGETHER_MIN = 64, 8
#: How often queues and workers are listed, and schedules, of which there may be many.
LIST_SECONDS, SCHEDULES_SECONDS = 3.0, 15.0
TICK_SECONDS = 1.0
#: Open pages that are kept up to date at the same time, of all browsers.
STREAMS_MAX = 100
#: Notifications that wait for a slow page. When it is full, the page is sent a request to read everything anew.
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


class Assessment(Struct, frozen=True):
    """What follows from the figures of a queue."""

    alerts: list[Alert]
    level: Level
    #: Those with alerts first: the worst level, then the longest wait, then the most dead letters, then by name.
    order: tuple[int, float, int, str]
    #: Messages handled in the last minutes, those that died, and failures that are retried.
    handled: int
    died: int
    retried: int


class Totals(Struct, frozen=True):
    """Sums over all queues that were read, and the store's time of the latest read."""

    ready: int
    running: int
    dead: int
    handled: int
    at: datetime | None


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
        #: The workers that serve each queue, and whether one serves queues that it does not list.
        self._serving: dict[str, list[RegisteredWorker]] = {}
        self._has_unlisted = False
        #: What follows from the figures, as far as it was asked for since they were read.
        self._assessments: dict[str, Assessment] = {}
        self._ranked: list[str] | None = None
        self._totals: Totals | None = None
        #: How long the read of one queue took lately.
        self._seconds_each = 0.0
        self._pages: set[asyncio.Queue[Change]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None
        #: What failed lately in each queue, and the state of the queue when that was read.
        self.failures: dict[str, tuple[tuple[object, ...], list[Failure]]] = {}

    # ---- for requests ------------------------------------------------------------------------------------------

    async def refresh(self, first: Sequence[str] = ()) -> None:
        """Read what is older than `FRESH_SECONDS`, for a bounded time, `first` before others.

        A failure is kept in `error`. Requests that come while this runs wait for the same read: a store that hangs
        makes each of them wait once.
        """
        loop = asyncio.get_running_loop()
        if time.monotonic() - self._refreshed_at < REFRESHED_SECONDS or self._is_swept:
            return
        if self._refreshing is None or self._refreshing.done() or self._refreshing.get_loop() is not loop:
            self._refreshing = loop.create_task(self._refresh(first))
        await asyncio.shield(self._refreshing)

    async def _refresh(self, first: Sequence[str]) -> None:
        began = time.monotonic()
        with self._failures_noted():
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._list()
                await self._read_until(
                    self._stale(FRESH_SECONDS, first), began + (FIRST_SECONDS if self.unread else REFRESH_SECONDS)
                )
                self._refreshed_at = time.monotonic()
        if self.error is None and self._stale(STALE_SECONDS):
            self.read_in_background()

    async def _read_until(self, names: Sequence[str], until: float) -> None:
        """Read queues in this order, at least some of them, until a time."""
        at = 0
        while at < len(names) and (at == 0 or time.monotonic() < until):
            left = max(0.0, until - time.monotonic())
            size = READ_TOGETHER if not self._seconds_each else int(left / self._seconds_each)
            part = names[at : at + max(READ_TOGETHER_MIN, min(READ_TOGETHER, size))]
            await self._read(part)
            at += len(part)

    def read_in_background(self) -> None:
        """Begin to read what was never read, or not for long: when the server starts, and after a quiet time."""
        loop = asyncio.get_running_loop()
        if self._background is None or self._background.done() or self._background.get_loop() is not loop:
            self._background = loop.create_task(self._read_stale())

    async def _read_stale(self) -> None:
        with self._failures_noted():
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._list()
            # The next request makes a list of its own, however soon it comes after the start of the server.
            self._listed_at = float("-inf")
            while part := self._stale(STALE_SECONDS)[:READ_TOGETHER]:
                await asyncio.sleep(BACKGROUND_PAUSE_SECONDS)
                async with asyncio.timeout(ANSWER_SECONDS):
                    changed = await self._read(part)
                if changed:
                    self._notify(changed)

    async def list_names(self) -> list[str]:
        """The names of all queues, as of some seconds ago: those that need attention first, unread ones last."""
        if not self.readings:
            await self.refresh()
        else:
            with self._failures_noted():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._list()
        return [*self.ranked(), *(name for name in self.names if name not in self.readings)]

    async def read_some(self, names: Sequence[str]) -> None:
        """Read those of some queues that were not read lately, in one flush. A failure is kept in `error`."""
        before = time.monotonic() - FRESH_SECONDS
        part = [name for name in names if name not in self.readings or self.readings[name].read_at < before]
        if part:
            with self._failures_noted():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._read(part[:READ_TOGETHER])

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

    def assess(self, name: str) -> Assessment:
        """What follows from the figures of a queue that was read."""
        found = self._assessments.get(name)
        if found is None:
            figures, serving = self.readings[name].figures, self.workers_of(name)
            wrong = alerts.queue_alerts(figures, serving, is_unserved=not serving and not self._has_unlisted)
            level = alerts.level_of(wrong)
            order = -alerts.LEVELS.index(level), -(figures.oldest_ready or 0.0), -figures.ledger.dead_kept, name
            handled, died, retried = (figures.recent(counter) for counter in ("done", "dead", "retried"))
            found = self._assessments[name] = Assessment(wrong, level, order, handled, died, retried)
        return found

    def alerts(self, name: str) -> list[Alert]:
        """What is wrong with a queue that was read."""
        return self.assess(name).alerts

    def ranked(self) -> list[str]:
        """The queues that were read, those that need attention first."""
        if self._ranked is None:
            self._ranked = sorted(self.readings, key=lambda name: self.assess(name).order)
        return self._ranked

    def totals(self) -> Totals:
        """Sums over the queues that were read."""
        if self._totals is None:
            figures = [reading.figures for reading in self.readings.values()]
            ledgers = [one.ledger for one in figures]
            self._totals = Totals(
                ready=sum(one.ready for one in ledgers), running=sum(one.leased for one in ledgers),
                dead=sum(one.dead_kept for one in ledgers),
                handled=sum(self.assess(name).handled for name in self.readings),
                at=max((one.at for one in figures), default=None),
            )  # fmt: skip
        return self._totals

    def store_now(self) -> datetime | None:
        """The store's time now, by the latest figures and how long ago they were read; None if there are none."""
        latest = max(self.readings.values(), key=lambda one: one.read_at, default=None)
        return None if latest is None else latest.figures.at + timedelta(seconds=time.monotonic() - latest.read_at)

    def age(self, name: str) -> float:
        """How many seconds ago a queue was read."""
        return time.monotonic() - self.readings[name].read_at

    def _forget(self, names: Iterable[str]) -> None:
        """Compute anew what follows from the figures of these queues."""
        for name in names:
            self._assessments.pop(name, None)
        self._ranked = self._totals = None

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
            names = await self._post.queues()
            self._set_workers(await self._post.workers())
            self.names = sorted(names)
            if self.readings.keys() - set(names):
                known = set(names)
                self._forget(name for name in self.readings if name not in known)
                self.readings = {name: reading for name, reading in self.readings.items() if name in known}
            self._listed_at = now
        if now - self._schedules_at >= SCHEDULES_SECONDS:
            self.schedules = await self._post.schedules()
            self._schedules_at = now

    def _set_workers(self, workers: list[RegisteredWorker]) -> None:
        """Keep the workers, and assess those queues anew whose workers are others or in another state."""
        before, had_unlisted = self._serving, self._has_unlisted
        self.workers, self._serving = workers, {}
        self._has_unlisted = any(worker.unlisted for worker in workers)
        for worker in workers:
            for queue in worker.queues:
                self._serving.setdefault(queue.name, []).append(worker)
        if self._has_unlisted != had_unlisted:
            self._forget(self.readings)
            return
        for name in {*before, *self._serving}:
            if conditions(before.get(name, ())) != conditions(self._serving.get(name, ())):
                self._forget([name])

    def _stale(self, older_than: float, first: Sequence[str] = ()) -> list[str]:
        """The queues that were read so long ago or never: these first, then those read longest ago."""
        before, readings = time.monotonic() - older_than, self.readings
        ages = {
            name: read_at
            for name in self.names
            if (read_at := readings[name].read_at if name in readings else 0.0) < before
        }
        preferred = [name for name in first if ages.pop(name, None) is not None]
        return [*preferred, *sorted(ages, key=ages.__getitem__)]

    async def _read(self, names: Sequence[str]) -> list[str]:
        """Read queues in one flush; return those that changed."""
        began = time.monotonic()
        found = await self._post.stats_many(names, RECENT_MINUTES)
        now, changed = time.monotonic(), list[str]()
        self._forget(names)
        for stats in found:
            figures, before = figures_of(stats), self.readings.get(stats.queue)
            has_changed = before is None or differs(before.figures, figures)
            self.readings[stats.queue] = Reading(figures, now, has_changed)
            if has_changed:
                changed.append(stats.queue)
        self._seconds_each = (time.monotonic() - began) / max(1, len(names))
        return changed

    # ---- for open pages ----------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no further page can be kept up to date: it has to poll."""
        return len(self._pages) >= STREAMS_MAX

    async def changes(self) -> AsyncGenerator[Change | None, None]:
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
        """End the loop and what is read in the background."""
        tasks = [task for task in (self._loop_task, self._background) if task is not None]
        self._loop_task = self._background = None
        here = [task for task in tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in here:
            task.cancel()
        if here:
            await asyncio.wait(here)

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
                part = list(dict.fromkeys([*active, *self._stale(FRESH_SECONDS / 2)]))[:READ_TOGETHER]
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


def conditions(workers: Sequence[RegisteredWorker]) -> list[tuple[str, str, list[str]]]:
    """What the alerts of a queue say of its workers."""
    return [(worker.name, worker.status, worker.reasons) for worker in workers]


def statuses(workers: Sequence[RegisteredWorker]) -> list[tuple[str, str, str]]:
    """What open pages show of workers without a reload."""
    return [(worker.name, worker.state, worker.status) for worker in workers]
