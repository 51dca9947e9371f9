"""`TestPost` and `AsyncTestPost`: what users test their programs with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from waypost import (
    AsyncWaypost,
    Constant,
    Dead,
    Message,
    Middleware,
    NoRetry,
    Observed,
    Outgoing,
    Published,
    Queue,
    Retry,
    Snooze,
    Waypost,
)
from waypost.errors import ConfigurationError, InvalidInput, Undecodable
from waypost.testing import AsyncTestPost, TestPost

pytestmark = pytest.mark.promise("FACE-7")

#: A store that no test can reach.
NOWHERE = "sqlite:////no/such/folder/waypost.db"


@dataclass
class Order:
    id: int
    amount: int = 0


def test_a_client_for_tests_is_not_collected_by_pytest() -> None:
    assert TestPost.__test__ is False
    assert AsyncTestPost.__test__ is False


# ---- run_all -------------------------------------------------------------------------------------------------


def test_handlers_run_in_the_thread_of_the_test() -> None:
    threads = []
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: dict[str, int]) -> None:
            threads.append(threading.current_thread())

        charge.publish({"id": 1})
        calls = post.run_all()
        assert threads == [threading.current_thread()]
        assert [(call.queue, call.outcome, call.error) for call in calls] == [("orders", "done", None)]
        assert calls[0].message.body == {"id": 1}
        assert post.ledger("orders").done == 1


def test_what_a_handler_publishes_is_handled_in_the_same_run() -> None:
    shipped: list[Any] = []
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: dict[str, int], message: Message[Any]) -> None:
            post.publish("mails", order)
            message.then("parcels", order)

        post.handler("mails")(shipped.append)
        post.handler("parcels")(shipped.append)
        post.publish("orders", {"id": 1})
        assert len(post.run_all()) == 3
        assert shipped == [{"id": 1}, {"id": 1}]


def test_an_error_of_a_handler_is_raised_with_its_message() -> None:
    with TestPost() as post:

        @post.handler("orders", retry=Constant(pause=30, attempts=2))
        def charge(order: dict[str, int]) -> None:
            raise ValueError("no money")

        published = post.publish("orders", {"id": 1}, key="order:1")
        post.publish("orders", {"id": 2})
        with pytest.raises(ValueError, match="no money") as raised:
            post.run_all()
        (note,) = raised.value.__notes__
        assert published.id in note
        assert "order:1" in note
        assert "outcome: retry" in note
        ledger = post.ledger("orders")
        assert (ledger.delayed, ledger.ready) == (1, 1)


def test_errors_can_be_collected() -> None:
    with TestPost() as post:

        @post.handler("orders", retry=NoRetry())
        def charge(order: dict[str, int]) -> None:
            if order["id"] == 1:
                raise ValueError("no money")

        post.publish_many("orders", [{"id": 1}, {"id": 2}])
        calls = post.run_all(raises=False)
        assert [call.outcome for call in calls] == ["dead", "done"]
        assert isinstance(calls[0].error, ValueError)
        (letter,) = post.dead_letters("orders")
        assert letter.reason == "retries_exhausted"
        post.redrive("orders")
        assert [call.outcome for call in post.run_all(raises=False)] == ["dead"]


def test_outcomes_are_no_errors() -> None:
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: str) -> Any:
            match order:
                case "retry":
                    raise Retry(5)
                case "snooze":
                    return Snooze(5)
                case _:
                    raise Dead("fraud")

        post.publish_many("orders", ["retry", "snooze", "dead"])
        assert [call.outcome for call in post.run_all()] == ["retry", "snooze", "dead"]


def test_a_body_of_another_type_is_an_error_and_a_dead_letter() -> None:
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: Order) -> None: ...

        post.publish("orders", {"id": "seven"})
        with pytest.raises(Undecodable):
            post.run_all()
        (letter,) = post.dead_letters("orders")
        assert letter.reason == "undecodable"


def test_a_batch_goes_on_without_what_cannot_be_decoded() -> None:
    seen: list[list[Order]] = []
    with TestPost() as post:

        @post.handler("orders", batch=10)
        def charge(orders: list[Order]) -> None:
            seen.append(orders)

        post.publish_many("orders", [{"id": 1}, {"id": "two"}, {"id": 3}])
        calls = post.run_all(raises=False)
        assert seen == [[Order(1), Order(3)]]
        assert sorted(outcome for call in calls for outcome in call.outcomes) == ["dead", "done", "done"]


def test_no_lease_of_a_batch_is_open_after_an_error() -> None:
    seen: list[list[Order]] = []
    with TestPost() as post:

        @post.handler("orders", batch=10)
        def charge(orders: list[Order]) -> None:
            seen.append(orders)

        post.publish_many("orders", [{"id": 1}, {"id": "two"}, {"id": 3}])
        with pytest.raises(Undecodable):
            post.run_all()
        assert seen == [[Order(1), Order(3)]]
        ledger = post.ledger("orders")
        assert (ledger.leased, ledger.dead, ledger.done) == (0, 1, 2)


def test_a_failure_of_the_test_inside_of_a_handler_is_not_collected() -> None:
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: object) -> None:
            pytest.fail("not reached")

        post.publish("orders", 1)
        with pytest.raises(pytest.fail.Exception):
            post.run_all(raises=False)
        ledger = post.ledger("orders")
        assert (ledger.leased, ledger.ready) == (0, 1)


def test_a_manual_message_left_unsettled_is_retried() -> None:
    with TestPost() as post:

        @post.handler("orders", manual=True)
        def charge(order: str, message: Message[Any]) -> None:
            if order == "settled":
                message.done()

        post.publish_many("orders", ["settled", "left"])
        assert [call.outcome for call in post.run_all()] == ["done", "retry"]


def test_results_and_chains_work() -> None:
    with TestPost() as post:

        @post.handler("orders", result_ttl=60)
        def charge(order: dict[str, int]) -> str:
            return f"charged {order['id']}"

        @post.handler("reports")
        def report(body: str) -> None: ...

        first = post.publish("orders", {"id": 7}, chain=True)
        post.publish("reports", "after", after=first)
        assert [call.queue for call in post.run_all()] == ["orders", "reports"]
        assert post.wait_result(first, timeout=1) == "charged 7"


def test_handlers_without_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.testing.inline.CALLS_MAX", 50)
    with TestPost() as post:

        @post.handler("orders")
        def again(order: object) -> None:
            post.publish("orders", order)

        post.publish("orders", 1)
        with pytest.raises(AssertionError, match="handler of orders publish to its own queue"):
            post.run_all()


def test_middleware_stands_around_handlers_and_publishes() -> None:
    steps: list[str] = []

    class Noted(Middleware):
        def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
            steps.append(f"publish by {outgoing.via}")
            return call_next(outgoing.with_headers({"tenant": "acme"}))

        def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
            steps.append("handle")
            return call_next()

        def on_event(self, event: Observed) -> None:
            if event.event == "handled":
                steps.append(event.outcome)

    with TestPost(middleware=[Noted()]) as post:

        @post.handler("orders")
        def charge(order: object, message: Message[Any]) -> None:
            message.then("mails", order)

        post.publish("orders", 1)
        post.run_all()
        assert steps == ["publish by publish", "handle", "publish by then", "success"]
        post.assert_published("mails", 1, headers={"tenant": "acme"})


def test_state_reaches_handlers() -> None:
    with TestPost(state={"till": 0}) as post:

        @post.handler("orders")
        def charge(amount: int, state: dict[str, int]) -> None:
            state["till"] += amount

        post.publish("orders", 5)
        post.run_all()
        assert post.state == {"till": 5}


# ---- time ----------------------------------------------------------------------------------------------------


def test_timers_and_retries_follow_the_clock() -> None:
    tries: list[datetime] = []
    with TestPost(start=datetime(2026, 3, 1, tzinfo=UTC)) as post:

        @post.handler("orders", retry=Constant(pause=30, attempts=3, jitter=0))
        def charge(order: object) -> None:
            tries.append(post.now)
            if len(tries) < 3:
                raise ValueError

        post.publish("orders", 1, delay=timedelta(hours=1))
        assert post.run_all() == []
        post.advance(hours=1)
        for _ in range(2):
            with pytest.raises(ValueError):
                post.run_all()
            post.advance(30)
        post.run_all()
        start = datetime(2026, 3, 1, 1, tzinfo=UTC)
        assert tries == [start, start + timedelta(seconds=30), start + timedelta(seconds=60)]


def test_a_run_for_a_time_calls_each_handler_when_its_message_is_due() -> None:
    seen: list[tuple[str, float]] = []
    with TestPost() as post:
        begin = post.now

        def note(name: str) -> None:
            seen.append((name, (post.now - begin).total_seconds()))

        @post.handler("orders", retry=Constant(pause=60, attempts=2, jitter=0))
        def charge(order: str) -> None:
            note(order)
            raise ValueError

        @post.every(1000)
        def sweep() -> None:
            note("sweep")

        post.publish("orders", "timer", delay=600)
        calls = post.run_for(minutes=20, raises=False)
        assert [outcome for call in calls for outcome in call.outcomes] == ["retry", "dead", "done"]
        assert [name for name, _ in seen] == ["timer", "timer", "sweep"]
        assert [at for name, at in seen if name == "timer"] == [600.0, 660.0]
        assert (post.now - begin) == timedelta(minutes=20)


def test_schedules_fire_each_time_on_the_way() -> None:
    fired: list[datetime] = []
    with TestPost(start=datetime(2026, 3, 1, 0, 30, tzinfo=UTC)) as post:

        @post.cron("0 * * * *")
        def hourly() -> None:
            fired.append(post.now)

        post.run_all()
        assert fired == []
        post.run_for(hours=3)
        assert [message.at.hour for message in post.published("hourly")] == [1, 2, 3]
        assert [at.hour for at in fired] == [1, 2, 3]
        (schedule,) = post.schedules()
        assert schedule.next_fires[0] == datetime(2026, 3, 1, 4, tzinfo=UTC)


def test_an_open_run_skips_later_instants_unless_they_may_overlap() -> None:
    with TestPost(start=datetime(2026, 3, 1, 0, 30, tzinfo=UTC)) as post:
        post.cron("0 * * * *", name="one")(lambda: None)
        post.cron("0 * * * *", name="each", overlap="allow")(lambda: None)
        post.advance(hours=3)
        assert [message.at.hour for message in post.published("one")] == [1]
        assert [message.at.hour for message in post.published("each")] == [1, 2, 3]
        assert len(post.run_all()) == 4
        post.advance(hours=1)
        assert [message.at.hour for message in post.published("one")] == [1, 4]


def test_a_lease_ends_when_the_clock_passes_it() -> None:
    with TestPost() as post:
        done: list[str] = []
        post.handler("orders")(done.append)
        post.publish("orders", "late")
        with post.receive("orders") as message:
            assert message is not None
            assert post.run_all() == []
            post.advance(minutes=2)
            post.run_all()
            assert done == ["late"]
        assert post.ledger("orders").expired == 1


def test_a_paused_queue_does_not_hold_the_clock() -> None:
    with TestPost() as post:
        done: list[str] = []
        post.handler("orders")(done.append)
        post.publish("orders", "timer", delay=10)
        post.pause("orders")
        begin = post.now
        assert post.run_for(60) == []
        assert post.now - begin == timedelta(seconds=60)
        post.resume("orders")
        post.run_all()
        assert done == ["timer"]


def test_a_fire_that_waits_for_a_run_follows_when_it_ends() -> None:
    fired: list[datetime] = []
    with TestPost(start=datetime(2026, 3, 1, 0, 30, tzinfo=UTC)) as post:

        @post.cron("0 * * * *", overlap="queue_one")
        def hourly() -> None:
            fired.append(post.now)

        post.advance(hours=3)
        assert len(post.published("hourly")) == 1
        post.run_all()
        assert fired == [datetime(2026, 3, 1, 3, 30, tzinfo=UTC)] * 2
        post.run_for(hours=2)
        assert [at.hour for at in fired] == [3, 3, 4, 5]
        assert {at.minute for at in fired[2:]} == {0}


def test_a_fire_that_cannot_be_published_does_not_hold_the_clock() -> None:
    attempts: list[datetime] = []

    class Refusing(Middleware):
        def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
            attempts.append(post.now)
            raise ValueError("not now")

    with TestPost(middleware=[Refusing()]) as post:
        begin = post.now
        post.every(3600, name="sweep")(lambda: None)
        post.run_for(hours=12)
        assert post.now - begin == timedelta(hours=12)
        assert 10 <= len(attempts) <= 1000
        assert post.published() == []


def test_a_schedule_fires_when_handlers_have_made_room_in_its_queue() -> None:
    done: list[datetime] = []
    with TestPost(start=datetime(2026, 3, 1, tzinfo=UTC)) as post:
        post.configure("sweep", max_pending=1)

        @post.every(60)
        def sweep() -> None:
            done.append(post.now)

        post.publish("sweep", None)
        post.advance(90)
        begin = post.now
        assert len(post.run_all()) == 2
        assert done == [begin, begin]


def test_a_run_for_a_time_keeps_to_the_rate_of_a_queue() -> None:
    seen: list[float] = []
    with TestPost() as post:
        begin = post.now
        post.configure("orders", rate="2/m")
        post.handler("orders")(lambda order: seen.append((post.now - begin).total_seconds()))
        post.publish_many("orders", range(6))
        post.run_for(minutes=10)
        assert seen == [0, 0, 60, 60, 120, 120]


def test_many_calls_in_a_long_time_are_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.testing.inline.CALLS_MAX", 10)
    with TestPost() as post:
        post.every(60, name="sweep")(lambda: None)
        assert len(post.run_for(hours=1)) >= 59


def test_the_distance_must_be_given_once_and_forward() -> None:
    with TestPost() as post:
        with pytest.raises(InvalidInput):
            post.advance()
        with pytest.raises(InvalidInput):
            post.advance(1, hours=1)
        with pytest.raises(InvalidInput):
            post.advance(-1)
        with pytest.raises(InvalidInput, match="fortnights"):
            post.advance(fortnights=1)


# ---- what was published --------------------------------------------------------------------------------------


def test_what_was_published_is_listed_with_what_became_of_it_left_out() -> None:
    orders = Queue("orders", Order)
    with TestPost() as post:
        post.handler(orders)(lambda order: None)
        post.publish(orders, Order(1, 10), key="order:1", group="acme", priority=7, headers={"a": "b"}, delay=5)
        post.publish("mails", "hello")
        post.run_for(10)
        (message,) = post.published(orders)
        assert (message.body, message.key, message.group, message.priority) == (Order(1, 10), "order:1", "acme", 7)
        assert (message.headers, message.delay) == ({"a": "b"}, timedelta(seconds=5))
        assert [one.queue for one in post.published()] == ["orders", "mails"]


@pytest.mark.parametrize("level", ["off", "failures", "all", "full"])
def test_what_was_published_does_not_depend_on_the_journal(level: Any) -> None:
    with TestPost(redact=lambda queue, body, headers: ("hidden", headers)) as post:
        post.configure("orders", journal=level)
        post.publish("orders", {"id": 1}, key="order:1", delay=60)
        (message,) = post.published("orders")
        assert (message.body, message.key, message.delay) == ({"id": 1}, "order:1", timedelta(minutes=1))


def test_what_was_published_is_in_order_while_the_clock_stands_still() -> None:
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: int, message: Message[Any]) -> None:
            message.then("mails", order)
            message.then("parcels", order)

        post.publish_many("orders", range(20))
        post.run_all()
        bodies = [message.body for message in post.published("mails")]
        assert bodies == list(range(20))
        follow = [(message.body, message.queue) for message in post.published()[20:]]
        assert follow == [(order, queue) for order in range(20) for queue in ("mails", "parcels")]


def test_what_was_published_is_known_after_its_queue_was_removed() -> None:
    with TestPost() as post:
        post.handler("orders")(lambda order: None)
        post.publish("orders", 1)
        post.run_all()
        assert post.remove_queue("orders")
        post.advance(1)
        post.publish("orders", 2)
        assert [message.body for message in post.published("orders")] == [1, 2]


def test_an_assertion_compares_bodies_typed_or_as_json() -> None:
    with TestPost() as post:

        @post.handler("orders")
        def charge(order: Order) -> None: ...

        charge.publish(Order(1, 10), key="order:1", delay=60)
        charge.publish(Order(2))
        assert len(post.assert_published("orders")) == 2
        assert len(post.assert_published("orders", Order(1, 10), key="order:1", delay=60)) == 1
        post.assert_published("orders", {"id": 2, "amount": 0}, key=None, count=1)
        post.assert_published("orders", lambda order: order.amount == 10, count=1)
        post.assert_published("orders", Order(3), count=0)
        post.assert_published("mails", count=0)


def test_a_failed_assertion_shows_what_is_there() -> None:
    with TestPost() as post:
        post.publish("orders", {"id": 1}, key="order:1")
        post.publish("orders", {"id": 2}, delay=60)
        with pytest.raises(AssertionError) as failed:
            post.assert_published("orders", {"id": 3}, key="order:3")
        text = str(failed.value)
        assert "at least one message in queue orders with body={'id': 3}, key='order:3'" in text
        assert "1. {'id': 1} key='order:1'" in text
        assert "2. {'id': 2} delay=60" in text
        with pytest.raises(AssertionError, match=r"expected 2 messages in queue orders with body=.*, and 1 of 2"):
            post.assert_published("orders", {"id": 1}, count=2)


# ---- eager ---------------------------------------------------------------------------------------------------


def test_eager_handlers_run_at_the_publish_and_raise_there() -> None:
    mails: list[object] = []
    with TestPost(eager=True) as post:

        @post.handler("orders", retry=NoRetry())
        def charge(order: int) -> None:
            if order < 0:
                raise ValueError("no money")
            post.publish("mails", order)
            assert mails == []  # after this handler, not inside of it

        post.handler("mails")(mails.append)
        post.publish("orders", 1)
        assert mails == [1]
        with pytest.raises(ValueError, match="no money"):
            post.publish("orders", -1)
        post.publish("mails", 2, delay=60)
        post.advance(60)
        assert mails == [1, 2]


# ---- the client of a program ---------------------------------------------------------------------------------


def test_a_program_publishes_to_the_test_and_later_to_its_own_store() -> None:
    post = Waypost(NOWHERE)
    charged: list[Order] = []

    @post.handler("orders")
    def charge(order: Order) -> None:
        charged.append(order)

    store = post.store
    with TestPost.replacing(post) as test:
        charge.publish(Order(7), key="order:7")
        assert post.stats("orders").ledger.ready == 1
        assert post.queues() == ["orders"]
        test.run_all()
        assert test.ledger("orders").done == 1
        with post.worker() as worker:
            assert worker.is_running
    assert charged == [Order(7)]
    assert post.store is store
    with TestPost.replacing(post) as test:
        assert test.published() == []


def test_a_worker_of_the_program_works_on_the_store_of_the_test() -> None:
    post = Waypost(NOWHERE)
    post.handler("orders")(lambda order: None)
    with TestPost.replacing(post) as test:
        post.publish("orders", 1)
        assert post.worker().run(until_empty=True, signals=False).done == 1
        test.assert_published("orders", 1)


def test_an_error_in_the_block_gives_the_store_back() -> None:
    post = Waypost(NOWHERE)
    store = post.store
    with pytest.raises(ZeroDivisionError), TestPost.replacing(post, eager=True):
        _ = 1 // 0
    assert post.store is store
    assert post.middleware == ()


def test_the_client_of_a_test_cannot_be_replaced_again() -> None:
    post = Waypost(NOWHERE)
    with TestPost.replacing(post) as test:
        for wrong in (post, test, "post"):
            with pytest.raises(InvalidInput), TestPost.replacing(wrong):  # type: ignore[arg-type]
                pass


def test_relays_are_not_run() -> None:
    post = Waypost(NOWHERE)
    post.relay("orders", to="sqlite:////no/such/folder/other.db#orders")
    with TestPost.replacing(post) as test:
        post.publish("orders", 1)
        assert test.run_all() == []
        test.assert_published("orders", 1)


def test_an_async_program_can_be_tested_without_an_event_loop() -> None:
    post = AsyncWaypost(NOWHERE)
    mails: list[int] = []

    @post.handler("orders")
    async def charge(order: int) -> None:
        await asyncio.sleep(0)
        await post.publish("mails", order)

    @post.handler("mails")
    async def mail(order: int) -> None:
        mails.append(order)

    with TestPost.replacing(post) as test:
        asyncio.run(charge.publish(5))
        test.run_all()
        test.publish("orders", 6)
        test.run_all()
    assert mails == [5, 6]


# ---- async ---------------------------------------------------------------------------------------------------


def run_async(test: Callable[[AsyncTestPost], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncTestPost(**options) as post:
            await test(post)

    asyncio.run(main())


def test_the_async_client_runs_handlers_in_the_task_of_the_test() -> None:
    async def check(post: AsyncTestPost) -> None:
        seen: list[Any] = []

        @post.handler("orders", retry=Constant(pause=30, attempts=2))
        async def charge(order: int) -> None:
            seen.append(asyncio.get_running_loop())
            if order < 0:
                raise ValueError("no money")

        @post.handler("files")
        def compress(name: str) -> None:
            seen.append(threading.current_thread())

        await charge.publish(1)
        await post.publish("files", "a")
        await post.run_all()
        assert seen[0] is asyncio.get_running_loop()
        assert seen[1] is not threading.current_thread()
        await charge.publish(-1, delay=60)
        post.assert_published("orders", -1, delay=60)
        await post.advance(minutes=1)
        with pytest.raises(ValueError, match="no money"):
            await post.run_all()
        assert [call.outcome for call in await post.run_for(60, raises=False)] == ["dead"]

    run_async(check)


def test_the_async_client_runs_eagerly() -> None:
    async def check(post: AsyncTestPost) -> None:
        mails: list[object] = []

        @post.handler("mails")
        async def mail(to: object) -> None:
            mails.append(to)

        await post.publish("mails", "ann")
        await post.publish("mails", "bob", delay=60)
        assert mails == ["ann"]
        await post.advance(60)
        assert mails == ["ann", "bob"]

    run_async(check, eager=True)


def test_an_async_program_is_replaced_in_its_event_loop() -> None:
    post = AsyncWaypost(NOWHERE)
    done: list[object] = []

    @post.every(60)
    async def sweep() -> None:
        done.append("sweep")

    async def check() -> None:
        store = post.store
        async with AsyncTestPost.replacing(post) as test:
            await test.run_for(minutes=10)
        assert post.store is store

    asyncio.run(check())
    assert 9 <= len(done) <= 10


def test_a_handler_that_takes_too_long_fails() -> None:
    async def check(post: AsyncTestPost) -> None:
        @post.handler("orders", timeout=0.01, retry=NoRetry())
        async def hang(order: object) -> None:
            await asyncio.Event().wait()

        await post.publish("orders", 1)
        with pytest.raises(TimeoutError):
            await post.run_all()
        assert (await post.ledger("orders")).dead == 1

    run_async(check)


def test_the_end_of_the_test_ends_its_handlers() -> None:
    async def check(post: AsyncTestPost) -> None:
        started = asyncio.Event()

        @post.handler("orders")
        async def charge(order: object) -> None:
            started.set()
            await asyncio.Event().wait()

        await post.publish("orders", 1)
        run = asyncio.create_task(post.run_all(raises=False))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        ledger = await post.ledger("orders")
        assert (ledger.leased, ledger.ready) == (0, 1)

    run_async(check)


def test_a_handler_that_cancels_itself_fails() -> None:
    async def check(post: AsyncTestPost) -> None:
        @post.handler("orders", retry=NoRetry())
        async def charge(order: object) -> None:
            raise asyncio.CancelledError

        await post.publish("orders", 1)
        (call,) = await post.run_all(raises=False)
        assert call.outcome == "dead"

    run_async(check)


def test_the_sync_client_is_refused_for_async_handlers_inside_an_event_loop() -> None:
    async def check() -> None:
        with TestPost() as post:

            @post.handler("orders")
            async def charge(order: object) -> None: ...

            post.publish("orders", 1)
            with pytest.raises(ConfigurationError, match="AsyncTestPost"):
                post.run_all()

    asyncio.run(check())
