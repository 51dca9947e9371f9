"""What open pages cost the store, how figures are shared, and the pure parts: alerts, timelines, charts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from waypost import AsyncWaypost, Waypost
from waypost.store.memory import MemoryStore
from waypost.web import create_app, reading, search
from waypost.web.alerts import queue_alerts, sentence
from waypost.web.charts import make_chart, timeline_spans
from waypost.web.documents import Minute, PreviewQuery, QueuesQuery, SearchQuery
from waypost.web.figures import HistoryEvent, figures_of
from waypost.web.reading import Place
from waypost.web.schedule_views import read_preview
from waypost.web.timeline import make_timeline
from waypost.web.watching import NOTIFICATIONS_MAX, READ_TOGETHER, STREAMS_MAX, Change, StoreWatch

pytestmark = pytest.mark.promise("FACE-3")
QUEUES = 200


class CountingStore:
    """A memory store that counts the round trips to it: a flush of many calls is one."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.round_trips = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def connect_async(self, *, start_timeout: float) -> Any:
        return CountingExecutor(self, await self.inner.connect_async(start_timeout=start_timeout))


class CountingExecutor:
    def __init__(self, store: CountingStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    async def run(self, call: Any) -> Any:
        self.store.round_trips += 1
        return await self.inner.run(call)

    async def run_many(self, calls: Iterable[Any]) -> Any:
        self.store.round_trips += 1
        return await self.inner.run_many(calls)

    async def close(self) -> None:
        await self.inner.close()


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr("waypost.web.watching.time.monotonic", lambda: self.now)


async def make_watch(count: int) -> tuple[CountingStore, StoreWatch, AsyncWaypost]:
    store: Any = CountingStore()
    post = AsyncWaypost(store=store)
    for number in range(count):
        await post.publish(f"q{number:03}", 1)
    return store, StoreWatch(post), post


def test_an_idle_store_gets_at_most_two_round_trips_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def watch_for_a_minute() -> tuple[int, int, float]:
        store, watch, _ = await make_watch(QUEUES)
        await watch._tick()
        store.round_trips, seconds = 0, 60
        for _ in range(seconds):
            clock.now += 1.0
            await watch._tick()
        oldest = clock.now - min(reading.read_at for reading in watch.readings.values())
        return store.round_trips, len(watch.readings), oldest

    round_trips, read, oldest = asyncio.run(watch_for_a_minute())
    assert round_trips <= 2 * 60
    assert read == QUEUES
    assert oldest <= QUEUES / READ_TOGETHER + 2


def test_twenty_open_pages_cost_what_one_costs() -> None:
    async def open_pages(count: int) -> list[Change | None]:
        _, watch, post = await make_watch(3)
        pages = [watch.changes() for _ in range(count)]
        firsts = [await anext(page) for page in pages]
        assert watch.is_reading
        task = watch._loop_task
        await post.publish("q000", 2)
        changes = [await anext(page) for page in pages]
        assert watch._loop_task is task, "each page has a loop of its own"
        for page in pages:
            await page.aclose()
        assert not watch.is_reading, "the loop runs without a page"
        assert len(firsts) == count
        return changes

    changes = asyncio.run(open_pages(20))
    assert len(changes) == 20
    assert len({change.version for change in changes if change is not None}) == 1


def test_a_page_that_does_not_read_its_stream_must_read_everything() -> None:
    async def fall_behind() -> list[Change]:
        _, watch, _ = await make_watch(1)
        page = watch.changes()
        await anext(page)
        for _ in range(3 * NOTIFICATIONS_MAX):
            watch._notify(["q000"])
        waiting = next(iter(watch._pages))
        found = []
        while not waiting.empty():
            found.append(waiting.get_nowait())
        await page.aclose()
        return found

    found = asyncio.run(fall_behind())
    assert len(found) <= NOTIFICATIONS_MAX
    assert [] in [change.queues for change in found]


def test_a_stream_ends_when_its_browser_goes_away_in_the_middle_of_an_event() -> None:
    async def close_page() -> int:
        post = AsyncWaypost("memory://goes-away")
        app = create_app(post)
        sending, parts = asyncio.Event(), [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not parts:
                await sending.wait()
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()  # the browser reads no more

        scope = {
            "type": "http", "method": "GET", "scheme": "http", "path": "/s/main/events", "raw_path": b"/s/main/events",
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        await app(scope, receive, send)
        left = len(app.state.service.places["main"].watch._pages)
        await post.close()
        return left

    assert asyncio.run(close_page()) == 0


def test_open_streams_are_bounded() -> None:
    async def open_many() -> bool:
        _, watch, _ = await make_watch(1)
        pages = [watch.changes() for _ in range(STREAMS_MAX)]
        for page in pages:
            await anext(page)
        full = watch.is_full
        await watch.close()
        for page in pages:
            with suppress(RuntimeError):
                await page.aclose()
        return full

    assert asyncio.run(open_many())


def test_a_request_reads_what_is_old_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def send_request() -> tuple[int, int, int, int]:
        store, watch, _ = await make_watch(600)
        monkeypatch.setattr(store.inner, "stats", slowly(clock, store.inner.stats))
        await watch.refresh()
        first, unread = len(watch.readings), watch.unread
        store.round_trips = 0
        await watch.refresh()
        again = store.round_trips
        clock.now += 0.5
        await watch.refresh()
        return first, unread, len(watch.readings), again

    first, unread, later, again = asyncio.run(send_request())
    assert 0 < first < 600
    assert first + unread == 600
    assert again == 0, "a page reads the same figures twice"
    assert later > first, "the rest is not read for later requests"


def test_requests_to_a_store_that_hangs_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.web.watching.ANSWER_SECONDS", 0.2)

    async def request_often() -> tuple[int, str | None, str | None]:
        _, watch, _ = await make_watch(3)
        reads = 0

        async def hang() -> list[str]:
            nonlocal reads
            reads += 1
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(watch._post, "queues", hang)
        await asyncio.gather(*(watch.refresh() for _ in range(20)))
        failed = watch.error
        monkeypatch.undo()
        await watch.refresh()
        return reads, failed, watch.error

    reads, failed, healed = asyncio.run(request_often())
    assert reads == 1
    assert failed is not None
    assert "has not answered" in failed
    assert healed is None


def test_what_follows_from_figures_is_computed_once_for_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, computed = Clock(monkeypatch), list[str]()

    def note(figures: Any, workers: Any, *, is_unserved: bool) -> Any:
        computed.append(figures.name)
        return queue_alerts(figures, workers, is_unserved=is_unserved)

    monkeypatch.setattr("waypost.web.watching.alerts.queue_alerts", note)

    async def read_often() -> tuple[int, int, int]:
        _, watch, post = await make_watch(QUEUES)
        place = Place("main", post, watch)
        await reading.health(place)
        first = len(computed)
        clock.now += 0.5
        for _ in range(3):
            await reading.queues(place, QueuesQuery())
            await reading.health(place)
        again = len(computed) - first
        await post.publish("q007", 2)
        await watch.read_queue("q007")
        await reading.health(place)
        return first, again, len(computed) - first - again

    assert asyncio.run(read_often()) == (QUEUES, 0, 1)


def test_a_request_reads_the_queues_that_it_shows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def read_the_last_page() -> tuple[list[str], set[str], int]:
        store, watch, post = await make_watch(600)
        await read_all(watch)
        clock.now += 30.0
        monkeypatch.setattr(store.inner, "stats", slowly(clock, store.inner.stats))
        before = clock.now
        listed = await reading.queues(Place("main", post, watch), QueuesQuery(order="name", cursor="550"))
        fresh = {name for name, one in watch.readings.items() if one.read_at >= before}
        return [one.name for one in listed.queues], fresh, len(fresh)

    visible, fresh, count = asyncio.run(read_the_last_page())
    assert len(visible) == 50
    assert set(visible) <= fresh, "what the page shows is older than what it does not show"
    assert count < 600, "a request reads all queues"


def test_figures_of_an_hour_ago_are_read_in_the_background_after_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("waypost.web.watching.BACKGROUND_PAUSE_SECONDS", 0.0)

    async def come_back() -> tuple[int, int]:
        store, watch, _ = await make_watch(600)
        await read_all(watch)
        clock.now += 3_600.0
        monkeypatch.setattr(store.inner, "stats", slowly(clock, store.inner.stats))
        await watch.refresh()
        at_once = sum(one.read_at > clock.now - 60 for one in watch.readings.values())
        assert watch._background is not None
        await watch._background
        return at_once, sum(one.read_at > clock.now - 60 for one in watch.readings.values())

    at_once, later = asyncio.run(come_back())
    assert at_once < 600
    assert later == 600


def test_pages_that_show_no_figures_read_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_pages() -> tuple[int, int]:
        store, watch, post = await make_watch(QUEUES)
        place, read = Place("main", post, watch), list[str]()
        await read_all(watch)
        stats = store.inner.stats

        def note(queue: str, **options: Any) -> Any:
            read.append(queue)
            return stats(queue, **options)

        monkeypatch.setattr(store.inner, "stats", note)
        watch._listed_at = watch._refreshed_at = float("-inf")
        for one in watch.readings.values():
            one.read_at = 0.0
        await read_preview(place, PreviewQuery(cron="0 9 * * *"))
        await watch.list_names()
        await search.search(place, SearchQuery(id="0" * 24), bodies=True)
        none = len(read)
        found = await reading.named_queues(place, "Q00")
        assert [one.name for one in found] == [f"q00{number}" for number in range(10)]
        return none, len(read)

    assert asyncio.run(read_pages()) == (0, 10)


async def read_all(watch: StoreWatch) -> None:
    """Read every queue once."""
    while not watch.names or watch.unread:
        await watch._tick()


def slowly(clock: Clock, stats: Any) -> Any:
    """Each read of a queue takes a millisecond."""

    def call(*given: Any, **options: Any) -> Any:
        clock.now += 0.001
        return stats(*given, **options)

    return call


# ---- alerts --------------------------------------------------------------------------------------------------------


def figures_with(**changes: Any) -> Any:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        found = figures_of(post.stats("orders", 5))
    from msgspec import structs

    ledger = {name: changes.pop(name) for name in list(changes) if hasattr(found.ledger, name)}
    return structs.replace(found, ledger=structs.replace(found.ledger, **ledger), **changes)


@pytest.mark.parametrize(
    ("changes", "unserved", "level", "kind"),
    [
        ({"oldest_ready": 5.0}, False, "calm", None),
        ({"oldest_ready": 61.0}, False, "warning", "old"),
        ({"oldest_ready": 700.0}, False, "alarm", "old"),
        ({"oldest_ready": 5.0}, True, "note", "unserved"),
        ({"oldest_ready": 15.0}, True, "warning", "unserved"),
        ({"oldest_ready": 40.0}, True, "alarm", "unserved"),
        ({"oldest_ready": 40.0, "sleepers": 1}, True, "calm", None),
        ({"paused": True, "oldest_ready": 700.0}, False, "warning", "paused"),
        ({"damaged": 2, "oldest_ready": 1.0}, False, "alarm", "damaged"),
        ({"published": 5, "oldest_ready": 1.0}, False, "alarm", "unbalanced"),
        ({"dead": 1, "published": 2, "dead_kept": 1, "oldest_ready": 1.0}, False, "note", "dead"),
    ],
)
def test_each_alert_has_its_level(changes: dict[str, Any], unserved: bool, level: str, kind: str | None) -> None:
    found = queue_alerts(figures_with(**changes), [], is_unserved=unserved)
    assert [one.kind for one in found][:1] == ([] if kind is None else [kind])
    assert ([one.level for one in found] or ["calm"])[0] == level
    assert all(one.text and one.next_step for one in found)


def test_the_sentence_names_the_worst_queue() -> None:
    calm = queue_alerts(figures_with(oldest_ready=1.0), [], is_unserved=False)
    old = queue_alerts(figures_with(oldest_ready=700.0), [], is_unserved=False)
    slow = queue_alerts(figures_with(oldest_ready=70.0), [], is_unserved=False)
    assert sentence({"a": calm}, [], unread=0, handled=7) == (
        "calm", "All is well: 1 queue, 7 messages handled in the last 15 minutes.",
    )  # fmt: skip
    assert sentence({"a": calm, "b": slow}, [], unread=0, handled=0)[1].startswith(
        "Queue b needs attention: the oldest"
    )
    assert sentence({"a": slow, "b": old}, [], unread=0, handled=0)[1].startswith(
        "2 of 2 queues need attention, first b"
    )
    assert "3 not read yet" in sentence({"a": calm}, [], unread=3, handled=0)[1]


# ---- timelines and charts --------------------------------------------------------------------------------------------

START = datetime(2026, 3, 6, 9, tzinfo=UTC)


def event(name: str, seconds: float, due: float | None = None, cause: str | None = None) -> HistoryEvent:
    at = START + timedelta(seconds=seconds)
    moment = None if due is None else START + timedelta(seconds=due)
    return HistoryEvent(at, name, moment, cause, None, None, "w1", 1, 1)


def test_a_timeline_has_the_waits_and_runs_in_order() -> None:
    events = [
        event("published", 0), event("claimed", 2), event("expired", 62), event("claimed", 63, cause="expired"),
        event("retried", 65, due=75), event("promoted", 75), event("claimed", 76, cause="retried"), event("done", 80),
    ]  # fmt: skip
    timeline = make_timeline(events, START + timedelta(seconds=500))
    assert [(span.kind, span.seconds) for span in timeline.spans] == [
        ("ready", 2), ("running", 60), ("ready", 1), ("running", 2), ("delayed", 10), ("ready", 1), ("running", 4),
    ]  # fmt: skip
    assert all(span.end is not None for span in timeline.spans)
    assert "again because its lease expired" in timeline.steps[3].text
    assert timeline.steps[2].text == "Lease lost after 60.0 s: the worker did not renew it"


def test_a_timeline_that_goes_on_ends_now_and_a_timer_that_was_not_promoted_was_ready_when_it_was_due() -> None:
    waiting = make_timeline([event("published", 0, due=10)], START + timedelta(seconds=4))
    assert [(span.kind, span.seconds, span.end) for span in waiting.spans] == [("delayed", 4, None)]
    late = make_timeline([event("published", 0, due=10), event("claimed", 12)], START + timedelta(seconds=13))
    assert [(span.kind, span.seconds) for span in late.spans] == [("delayed", 10), ("ready", 2), ("running", 1)]
    assert late.spans[-1].end is None
    trimmed = make_timeline([event("claimed", 5), event("done", 6)], START)
    assert not trimmed.whole
    assert make_timeline([], START).spans == []


def test_bars_fill_the_width_and_short_ones_stay_visible() -> None:
    events = [event("published", 0), event("claimed", 3600), event("done", 3600.001)]
    spans = timeline_spans(make_timeline(events, START))
    assert sum(span.end - span.start for span in spans) == pytest.approx(1)
    assert min(span.end - span.start for span in spans) > 0.003
    assert timeline_spans(make_timeline([], START)) == []


def test_a_chart_has_a_point_for_each_part_of_the_time_and_counts_everything_once() -> None:
    at = datetime(2026, 3, 6, 9, 30, 12, tzinfo=UTC)
    minutes = [Minute(at=at.replace(second=0) - timedelta(minutes=ago), counts={"done": 5}) for ago in (0, 1, 59, 60)]
    chart = make_chart(minutes, ("done", "dead"), at, 60)
    assert [series.text for series in chart.series] == ["15", "0"]
    assert len(chart.series[0].values) == 60
    day = make_chart(minutes, ("done",), at, 1_440)
    assert day.series[0].text == "20"
    assert len(day.series[0].values) <= 72
    assert make_chart([], ("done",), at, 60).most == 0
