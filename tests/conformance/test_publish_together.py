"""Single publishes that are made at the same time share calls, and each gets its own result."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from tests.waiting import until, until_async
from waypost import AsyncWaypost, Waypost
from waypost.errors import (
    InvalidInput,
    KeyInUse,
    OperationTooOld,
    OutcomeUnknown,
    QueueFull,
    StoreUnavailable,
    WaypostError,
)
from waypost.operations.gathering import Line, shares_calls
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.store.port import Call
from waypost.testing.bench import StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.values import Published, Settlement

pytestmark = pytest.mark.promise("PUB-11")
T = TypeVar("T")
COUNT = 40


class HoldingStore:
    """A store whose publishes, or another verb, are held back until it is `open`, and may fail."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.verb = "publish"
        self.open = threading.Event()
        self.open.set()
        #: How many of these calls have been sent.
        self.sent = 0
        #: What becomes of the next publishes: an exception is raised instead of sending, "cut" loses the reply, and
        #: "stuck" holds one back until `unstuck`.
        self.faults: list[Exception | str | None] = []
        self.unstuck = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *, start_timeout: float) -> Any:
        return HoldingExecutor(self, self.inner.connect(start_timeout=start_timeout))

    async def connect_async(self, *, start_timeout: float) -> Any:
        return AsyncHoldingExecutor(self, await self.inner.connect_async(start_timeout=start_timeout))

    def next_fault(self) -> Exception | str | None:
        self.sent += 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        return fault


class HoldingExecutor:
    def __init__(self, store: HoldingStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    def run(self, call: Call[T]) -> T:
        if call.name != self.store.verb:
            return self.inner.run(call)  # type: ignore[no-any-return]
        fault = self.store.next_fault()
        assert (self.store.unstuck if fault == "stuck" else self.store.open).wait(90)
        result: T = self.inner.run(call)
        if fault == "cut":
            raise OutcomeUnknown("the reply was lost")
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return self.inner.run_many(calls)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.inner.close()


class AsyncHoldingExecutor:
    def __init__(self, store: HoldingStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    async def run(self, call: Call[T]) -> T:
        if call.name != self.store.verb:
            return await self.inner.run(call)  # type: ignore[no-any-return]
        fault = self.store.next_fault()
        gate = self.store.unstuck if fault == "stuck" else self.store.open
        if not gate.is_set():
            await until_async(gate.is_set)
        result: T = await self.inner.run(call)
        if fault == "cut":
            raise OutcomeUnknown("the reply was lost")
        return result

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return await self.inner.run_many(calls)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
def store(make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch) -> HoldingStore:
    # On a busy machine no call is to be overtaken, except where a test wants it.
    monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 3600.0)
    return HoldingStore(make_store(ManualClock(), fresh_namespace()))


def run(store: HoldingStore, test: Callable[[AsyncWaypost], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncWaypost(store=store, **options) as post:
            await test(post)

    asyncio.run(main())


async def bodies_of(post: AsyncWaypost) -> dict[str, Any]:
    return {message.id: message.body async for message in post.messages("orders")}


async def held(store: HoldingStore, *publishes: Awaitable[Published]) -> list[asyncio.Task[Published]]:
    """Begin publishes on a loop, the first of which is sent and held back, while the others wait in line."""
    store.open.clear()
    sent = store.sent
    tasks = []
    for publish in publishes:
        tasks.append(asyncio.ensure_future(publish))
        await until_async(lambda: store.sent > sent)
        # A publish takes its place in line, or is sent, without waiting for anything.
        for _ in range(5):
            await asyncio.sleep(0)
    return tasks


def held_in_threads(
    store: HoldingStore, threads: ThreadPoolExecutor, line: Line[Any, Any], calls: Sequence[Callable[[], T]]
) -> list[Future[T]]:
    """The same for threads, with the line in which they wait."""
    store.open.clear()
    sent = store.sent
    futures = []
    for number, call in enumerate(calls):
        futures.append(threads.submit(call))
        until(lambda number=number: store.sent == sent + 1 and len(line._waiting) == number)  # type: ignore[misc]
    return futures


def publishes_of(post: Waypost, queue: str = "orders") -> Line[Any, Any]:
    return post._shared_calls.publishes.of(queue)


# ---- tasks -----------------------------------------------------------------------------------------------------


def test_tasks_share_calls(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, *(post.publish("orders", number) for number in range(COUNT)))
        assert store.sent == 1
        store.open.set()
        results = await asyncio.gather(*tasks)
        assert store.sent == 2
        assert {one.status for one in results} == {"queued"}
        ids = {one.id for one in results}
        assert len(ids) == COUNT
        bodies = await bodies_of(post)
        assert [bodies[one.id] for one in results] == list(range(COUNT))
        # A lone publish is sent at once.
        await post.publish("orders", "lone")
        assert (store.sent, (await post.ledger("orders")).published) == (3, COUNT + 1)

    run(store, test)


@pytest.mark.parametrize(
    ("body", "most"),
    [("small", CHUNK_MESSAGES_MAX), ("x" * 600_000, CHUNK_BYTES_MAX // 600_000)],
    ids=["messages", "bytes"],
)
def test_a_shared_call_has_at_most_512_messages_and_4_mib(store: HoldingStore, body: str, most: int) -> None:
    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, post.publish("orders", body))
        tasks += [asyncio.ensure_future(post.publish("orders", body)) for _ in range(2 * most + 1)]
        await asyncio.sleep(0)
        store.open.set()
        assert len({one.id for one in await asyncio.gather(*tasks)}) == 2 * most + 2
        assert store.sent == 4, "the one that was held, two full calls, and one more message"
        assert (await post.ledger("orders")).published == 2 * most + 2

    run(store, test)


def test_each_publish_has_its_own_options_and_result(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        await post.publish("orders", "before", key="taken")
        tasks = await held(
            store,
            post.publish("orders", 0),
            post.publish("orders", 1, key="a"),
            post.publish("orders", 2, key="a"),
            post.publish("orders", 3, key="taken", on_conflict="error"),
            post.publish("orders", 4, delay=60, priority=9),
            post.publish("other", 5),
        )
        store.open.set()
        plain, first, second, refused, timer, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(first, Published)
        assert isinstance(second, Published)
        assert {first.status, second.status} == {"queued", "duplicate"}
        assert first.id == second.id
        assert isinstance(refused, KeyInUse)
        assert [getattr(one, "status", one) for one in (plain, timer, other)] == ["queued", "delayed", "queued"]
        assert ((await post.ledger("orders")).published, (await post.ledger("other")).published) == (4, 1)

    run(store, test)


def test_a_wrong_argument_concerns_only_its_own_publish(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, post.publish("orders", 0), post.publish("orders", 1), post.publish("orders", 2))
        with pytest.raises(InvalidInput):
            await post.publish("orders", 3, priority=70)
        store.open.set()
        assert len(await asyncio.gather(*tasks)) == 3

    run(store, test)


def test_exactly_those_that_do_not_fit_into_a_full_queue_are_refused(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        await post.configure("orders", max_pending=5, overload="raise")
        tasks = await held(store, *(post.publish("orders", number) for number in range(9)))
        store.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(type(one).__name__ for one in results) == ["Published"] * 5 + ["QueueFull"] * 4
        assert (await post.ledger("orders")).published == 5

    run(store, test)


def test_publishers_that_wait_for_room_wait_alone(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        await post.configure("orders", max_pending=2, overload="block")
        tasks = await held(store, *(post.publish("orders", number, block_timeout=3600) for number in range(4)))
        store.open.set()
        await until_async(lambda: sum(task.done() for task in tasks) == 2)
        with pytest.raises(QueueFull):
            await post.publish("orders", "no time", block_timeout=0)
        assert (await post.publish("other", "room")).status == "queued"
        for _ in range(2):
            async with post.receive("orders") as message:
                assert message is not None
        await asyncio.gather(*tasks)
        assert (await post.ledger("orders")).published == 4

    run(store, test)


def test_a_sender_that_is_cancelled_passes_its_call_on(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        first = await held(store, *(post.publish("orders", number) for number in range(4)))
        # The lone first one is cancelled while its call is under way, then the sender of the others.
        first[0].cancel()
        await until_async(lambda: store.sent == 2)
        first[1].cancel()
        await until_async(lambda: store.sent == 3)
        store.open.set()
        results = await asyncio.gather(*first, return_exceptions=True)
        assert [type(one).__name__ for one in results] == ["CancelledError"] * 2 + ["Published"] * 2
        found = await bodies_of(post)
        assert [found[one.id] for one in results[2:]] == [2, 3]  # type: ignore[union-attr]
        # That of a cancelled caller may be published; none is published twice.
        assert sorted(found.values()) in ([1, 2, 3], [0, 1, 2, 3])
        assert (await post.publish("orders", "next")).status == "queued"

    run(store, test)


def test_a_publish_that_is_cancelled_in_line_is_not_sent(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, *(post.publish("orders", number) for number in range(4)))
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        store.open.set()
        await asyncio.gather(tasks[0], tasks[1], tasks[3])
        assert sorted((await bodies_of(post)).values()) == [0, 1, 3]

    run(store, test)


def test_publishes_that_are_cancelled_in_line_are_not_searched_for(
    store: HoldingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of tasks may be cancelled at once, as at the end of a program."""
    compared = []

    def compare(place: object, other: object) -> bool:
        compared.append(other)
        return place is other

    monkeypatch.setattr("waypost.operations.gathering._Place.__eq__", compare, raising=False)

    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, post.publish("orders", 0))
        tasks += [asyncio.ensure_future(post.publish("orders", number)) for number in range(1, 300)]
        await asyncio.sleep(0)
        for task in reversed(tasks[2:]):
            task.cancel()
        await asyncio.sleep(0)
        store.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, Published) for one in results] == [True] * 2 + [False] * 298
        assert sorted((await bodies_of(post)).values()) == [0, 1]
        assert len(compared) == 0

    run(store, test)


def test_one_that_is_cancelled_when_its_turn_comes_delays_no_other(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        tasks = await held(store, *(post.publish("orders", number) for number in range(4)))
        line = next(iter(post._connections.values())).shared_calls.publishes.of("orders")  # type: ignore[union-attr]
        next_in_line = line._waiting[0]
        store.open.set()
        await until_async(lambda: next_in_line.leads)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one).__name__ for one in results if not isinstance(one, Published)] in ([], ["CancelledError"])
        assert (await post.publish("orders", "next")).status == "queued"

    run(store, test)


def test_a_lost_reply_is_repeated_for_all(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        store.faults = [None, "cut"]
        tasks = await held(store, *(post.publish("orders", number) for number in range(5)))
        store.open.set()
        results = await asyncio.gather(*tasks)
        assert store.sent == 3
        assert sorted((await bodies_of(post)).values()) == list(range(5))
        assert len({one.id for one in results}) == 5

    run(store, test)


def test_a_call_that_may_have_run_is_not_sent_again_as_many(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        # The reply is lost, and the repeat comes when the store no longer remembers the call, as after a freeze.
        store.faults = [None, "cut", OperationTooOld("too old to be repeated")]
        tasks = await held(store, *(post.publish("orders", number) for number in range(5)))
        store.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one).__name__ for one in results] == ["Published"] + ["OperationTooOld"] * 4
        assert sorted((await bodies_of(post)).values()) == list(range(5))

    run(store, test)


def test_an_unreachable_store_fails_each_publish(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        store.faults = [None, StoreUnavailable("refused")]
        tasks = await held(store, *(post.publish("orders", number) for number in range(5)))
        store.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one).__name__ for one in results] == ["Published"] + ["StoreUnavailable"] * 4
        assert len({id(one) for one in results}) == 5
        assert (await post.publish("orders", "next")).status == "queued"

    run(store, test, retry_budget=0)


def test_a_slow_call_is_overtaken(store: HoldingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(post: AsyncWaypost) -> None:
        monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 0.01)
        tasks = await held(store, *(post.publish("orders", number) for number in range(3)))
        await until_async(lambda: store.sent >= 2)
        store.open.set()
        assert len({one.id for one in await asyncio.gather(*tasks)}) == 3
        assert (await post.publish("orders", "next")).status == "queued"

    run(store, test)


def test_a_call_that_was_overtaken_delays_no_later_publish(
    store: HoldingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(post: AsyncWaypost) -> None:
        monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 0.01)
        store.faults = ["stuck"]
        stuck = asyncio.ensure_future(post.publish("orders", "stuck"))
        await until_async(lambda: store.sent == 1)
        await post.publish("orders", "overtakes")
        monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 3600.0)
        await asyncio.wait_for(post.publish("orders", "next"), 30)
        assert not stuck.done()
        # When it ends at last, no other call is under way, or one that it does not end.
        tasks = await held(store, *(post.publish("orders", number) for number in range(3)))
        store.unstuck.set()
        await stuck
        assert store.sent == 4
        store.open.set()
        await asyncio.gather(*tasks)
        assert (store.sent, (await post.ledger("orders")).published) == (5, 6)

    run(store, test)


class Uncopyable(WaypostError):
    """An error with an argument that its copy does not get."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)


def test_an_error_that_cannot_be_copied_reaches_each_publish(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        store.faults = [None, "cut", Uncopyable("refused", needed=1)]
        tasks = await held(store, *(post.publish("orders", number) for number in range(5)))
        store.open.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert [type(one).__name__ for one in results] == ["Published"] + ["Uncopyable"] * 4

    run(store, test)


def test_publishes_of_handlers_share_calls(store: HoldingStore) -> None:
    async def test(post: AsyncWaypost) -> None:
        @post.handler("orders", concurrency=COUNT)
        async def forward(body: int) -> None:
            await post.publish("parcels", body)

        await post.publish_many("orders", range(COUNT))
        sent = store.sent
        await post.worker().run(until_empty=True, signals=False)
        assert (await post.ledger("parcels")).published == COUNT
        assert store.sent - sent < COUNT

    run(store, test)


def test_settles_of_blocks_that_end_at_the_same_time_share_calls(make_store: StoreMaker) -> None:
    async def block(post: AsyncWaypost, begun: asyncio.Event, ready: asyncio.Semaphore) -> Any:
        async with post.receive("orders") as message:
            ready.release()
            await begun.wait()
            assert message is not None
            return message.body

    async def main() -> None:
        async with AsyncWaypost(store=make_store(ManualClock(), fresh_namespace())) as post:
            await post.publish_many("orders", range(COUNT))
            begun, ready = asyncio.Event(), asyncio.Semaphore(0)
            tasks = [asyncio.ensure_future(block(post, begun, ready)) for _ in range(COUNT)]
            for _ in range(COUNT):
                await ready.acquire()
            executor = next(iter(post._connections.values())).executor  # type: ignore[union-attr]
            calls, send = [], executor.run

            async def run(call: Call[Any]) -> Any:
                calls.append(call.name)
                return await send(call)

            executor.run = run  # type: ignore[method-assign]
            begun.set()
            assert sorted(await asyncio.gather(*tasks)) == list(range(COUNT))
            ledger = await post.ledger("orders")
            assert (ledger.done, ledger.leased) == (COUNT, 0)
            assert calls.count("settle") < COUNT

    asyncio.run(main())


# ---- threads ---------------------------------------------------------------------------------------------------


def test_threads_share_calls(store: HoldingStore) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(8) as threads:
        publishes = [lambda number=number: post.publish("orders", number) for number in range(8)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        store.open.set()
        results = [future.result(90) for future in futures]
        assert store.sent == 2
        bodies = {message.id: message.body for message in post.messages("orders")}
        assert [bodies[one.id] for one in results] == list(range(8))


def test_threads_that_publish_all_the_time_lose_nothing(store: HoldingStore) -> None:
    def work(number: int) -> list[str]:
        return [post.publish("orders", number).id for _ in range(25)]

    with Waypost(store=store) as post, ThreadPoolExecutor(8) as threads:
        ids = [id for part in threads.map(work, range(8)) for id in part]
        assert len(set(ids)) == 200
        assert post.ledger("orders").published == 200


def test_a_full_queue_refuses_exactly_the_threads_that_do_not_fit(store: HoldingStore) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(6) as threads:
        post.configure("orders", max_pending=3, overload="raise")
        publishes = [lambda number=number: post.publish("orders", number) for number in range(6)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        store.open.set()
        errors = [future.exception(90) for future in futures]
        assert sorted(type(error).__name__ for error in errors) == ["NoneType"] * 3 + ["QueueFull"] * 3
        assert post.ledger("orders").published == 3


def test_threads_that_wait_for_room_wait_alone(store: HoldingStore) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(5) as threads:
        post.configure("orders", max_pending=2, overload="block")
        publishes = [lambda number=number: post.publish("orders", number, block_timeout=3600) for number in range(5)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        store.open.set()
        until(lambda: sum(future.done() for future in futures) == 2)
        assert post.publish("other", "room").status == "queued"
        handled = []
        for _ in range(3):
            with post.receive("orders", wait=90) as message:
                assert message is not None
                handled.append(message.body)
        assert len({future.result(90).id for future in futures}) == 5
        handled += [message.body for message in post.messages("orders")]
        assert sorted(handled) == list(range(5))


def test_equal_keys_of_threads_store_one_message_each(store: HoldingStore) -> None:
    keys = ("a", "a", "a", "b", "b", "c")
    with Waypost(store=store) as post, ThreadPoolExecutor(len(keys)) as threads:
        line = publishes_of(post)
        shares = shares_calls(post._context, "a")
        store.open.clear()
        futures = []
        for number, key in enumerate(keys):
            futures.append(threads.submit(post.publish, "orders", number, key=key))
            until(lambda number=number: store.sent + len(line._waiting) == number + 1)  # type: ignore[misc]
        # Where a transaction of the caller may hold a key, each goes alone.
        assert store.sent == (1 if shares else len(keys))
        store.open.set()
        results = [future.result(90) for future in futures]
        assert store.sent == (3 if shares else len(keys)), "equal keys go in different calls"
        assert sorted(one.status for one in results) == ["duplicate"] * 3 + ["queued"] * 3
        assert len({(one.id, key) for one, key in zip(results, keys, strict=True)}) == 3
        assert post.ledger("orders").published == 3


def test_publishes_of_sync_handlers_share_calls(store: HoldingStore) -> None:
    count = 8
    with Waypost(store=store) as post, ThreadPoolExecutor(1) as threads:
        begun = threading.Barrier(count)

        @post.handler("orders", concurrency=count)
        def forward(body: int) -> None:
            begun.wait(90)
            post.publish("parcels", body)

        post.publish_many("orders", range(count))
        store.open.clear()
        sent, line = store.sent, publishes_of(post, "parcels")
        worker = threads.submit(post.worker().run, until_empty=True, signals=False)
        until(lambda: store.sent == sent + 1 and len(line._waiting) == count - 1)
        store.open.set()
        worker.result(90)
        assert store.sent == sent + 2
        assert sorted(message.body for message in post.messages("parcels")) == list(range(count))


def test_settles_of_threads_share_calls_and_each_gets_its_own_result(
    store: HoldingStore, caplog: pytest.LogCaptureFixture
) -> None:
    count = 8
    with Waypost(store=store) as post, ThreadPoolExecutor(count) as threads:
        post.publish_many("orders", range(count))
        blocks = [post.receive("orders", renew=False) for _ in range(count)]
        messages = [block.__enter__() for block in blocks]
        # Another client has settled one of them in its place.
        elsewhere = messages[5]
        assert elsewhere is not None
        lease = elsewhere._lease
        settled = Settlement(lease.id, lease.token, lease.nonce, "done")
        post._connected().run(post.store.settle("orders", [settled], post._context.session.operation("orders")))
        store.verb = "settle"
        ends = [lambda block=block: block.__exit__(None, None, None) for block in blocks]
        futures = held_in_threads(store, threads, post._shared_calls.settles.of("orders"), ends)
        sent = store.sent
        store.open.set()
        assert [future.exception(90) for future in futures] == [None] * count
        assert store.sent == sent + 1
        lost = [vars(record)["message_id"] for record in caplog.records if vars(record).get("event") == "lease_lost"]
        assert lost == [elsewhere.id]
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.leased) == (count, 0)


def test_a_slow_call_of_a_thread_is_overtaken(store: HoldingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 0.01)
    monkeypatch.setattr("waypost.operations.flow.TURN_SECONDS", 0.01)
    with Waypost(store=store) as post, ThreadPoolExecutor(3) as threads:
        store.open.clear()
        futures = [threads.submit(post.publish, "orders", number) for number in range(3)]
        until(lambda: store.sent >= 2)
        store.open.set()
        assert len({future.result(90).id for future in futures}) == 3
        assert post.publish("orders", "next").status == "queued"


def test_a_publish_from_a_hook_or_a_log_handler_waits_for_nothing(store: HoldingStore) -> None:
    class Publishing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            post.publish("orders", "logged")

    def on_event(event: Any) -> None:
        if event.event == "published" and not seen:
            seen.append(event)
            post.publish("orders", "observed")

    seen: list[Any] = []
    log = logging.getLogger("waypost")
    with Waypost(store=store, on_event=on_event) as post:
        store.faults = [StoreUnavailable("refused")]
        handler, level = Publishing(), log.level
        log.addHandler(handler)
        try:
            post.publish("orders", "first")
            log.warning("anything")
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        assert sorted(message.body for message in post.messages("orders")) == ["first", "logged", "observed"]


def test_a_thread_that_is_interrupted_before_its_call_holds_no_other_up(
    store: HoldingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    with Waypost(store=store) as post, ThreadPoolExecutor(4) as threads:
        publishes = [lambda number=number: post.publish("orders", number) for number in range(4)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        monkeypatch.setattr("waypost.operations.gathering._Batch", interrupt)
        store.open.set()
        results = [future.exception(90) for future in futures]
        assert sorted(type(one).__name__ for one in results) == ["Interrupted", "NoneType", "NoneType", "NoneType"]
        assert post.ledger("orders").published == 3


def interrupt_after(call: Callable[..., Any], *, thread: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Return a function that calls another one and is then interrupted, once."""
    interrupts = [True]

    def interrupted(*arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        if interrupts and thread():
            interrupts.clear()
            raise Interrupted
        return result

    return interrupted


@pytest.mark.parametrize("place", ["Line.take", "_Batch", "_send", "_Place.end"])
def test_no_thread_waits_for_good_for_one_that_is_interrupted(
    store: HoldingStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(4) as threads:
        publishes = [lambda number=number: post.publish("orders", number) for number in range(4)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        owner, _, name = f"waypost.operations.gathering.{place}".rpartition(".")
        attribute = getattr(importlib.import_module("waypost.operations.gathering"), place.partition(".")[0])
        call = getattr(attribute, name) if "." in place else attribute
        # The first of the places that end is the one that sends the others.
        patched = interrupt_after(call, thread=lambda: place != "_Place.end" or store.sent == 2)
        monkeypatch.setattr(f"{owner}.{name}", patched)
        store.open.set()
        results = [future.exception(30) for future in futures]
        assert sorted(type(one).__name__ for one in results) == ["Interrupted", "NoneType", "NoneType", "NoneType"]
        published = post.ledger("orders").published
        assert published in (3, 4), "none is published twice, and only that of the interrupted thread may be missing"
        assert published == len(list(post.messages("orders")))


def test_a_thread_that_is_interrupted_when_it_may_send_delays_no_later_publish(
    store: HoldingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(1) as interrupted, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr("waypost.operations.gathering.Line.join", interrupt_after(Line.join))
        assert isinstance(interrupted.submit(post.publish, "orders", 0).exception(30), Interrupted)
        monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 0.0)
        monkeypatch.setattr("waypost.operations.flow.TURN_SECONDS", 0.01)
        threads.submit(post.publish, "orders", 1).result(30)
        monkeypatch.setattr("waypost.operations.gathering.OVERTAKE_SECONDS", 3600.0)
        threads.submit(post.publish, "orders", 2).result(30)


def test_an_interrupted_thread_passes_its_call_on(store: HoldingStore) -> None:
    with Waypost(store=store) as post, ThreadPoolExecutor(4) as threads:
        store.faults = [None, "interrupt"]
        publishes = [lambda number=number: post.publish("orders", number) for number in range(4)]
        futures = held_in_threads(store, threads, publishes_of(post), publishes)
        interrupt_second_publish(store)
        store.open.set()
        results = [future.exception(90) for future in futures]
        assert sorted(type(one).__name__ for one in results) == ["Interrupted", "NoneType", "NoneType", "NoneType"]
        assert sorted(message.body for message in post.messages("orders")) == [0, 1, 2, 3]


class Interrupted(BaseException):
    """What a signal handler raises in a thread that waits for the store."""


def interrupt_second_publish(store: HoldingStore) -> None:
    take = store.next_fault

    def next_fault() -> Any:
        fault = take()
        if fault == "interrupt":
            raise Interrupted
        return fault

    store.next_fault = next_fault  # type: ignore[method-assign]
