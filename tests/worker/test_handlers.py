"""The arguments of a handler, and how its end becomes the outcome of the message."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.waiting import until
from tests.worker import process_handlers
from tests.worker.harness import Harness
from tests.worker.process_handlers import Exiting
from waypost import (
    ByException,
    Constant,
    Dead,
    Drop,
    Exponential,
    Message,
    NoRetry,
    Outcome,
    Queue,
    Retry,
    Snooze,
    Waypost,
)
from waypost.errors import ConfigurationError, InvalidPolicy, ResultNotKept
from waypost.testing import TestPost

AT_ONCE = Constant(pause=0, jitter=0, attempts=3)


class OwnPolicy:
    """A retry policy of the application, which does not declare how many attempts it allows."""

    def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
        return 0.001


@dataclass
class Order:
    id: int
    item: str = "lamp"


# ---- arguments ----------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1")
def test_the_body_arrives_as_the_annotated_type_with_its_message(harness: Harness) -> None:
    seen: list[Any] = []

    @harness.handler("orders")
    async def handle(order: Order, message: Message[Order]) -> None:
        seen.append((order, message.body is order, message.headers, message.deliveries))

    harness.publish("orders", Order(7), headers={"from": "shop"})
    assert harness.run().handled == 1
    assert seen == [(Order(7), True, {"from": "shop"}, 1)]
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("FACE-1", "DEAD-1")
@pytest.mark.parametrize("batch", [None, 10])
def test_a_body_of_another_type_is_dead_with_the_reason(
    harness: Harness, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    if batch is None:

        @harness.handler("orders")
        async def handle(order: Order) -> None:
            seen.append(order.id)
    else:

        @harness.handler("orders", batch=batch)
        async def handle_many(orders: list[Order]) -> None:
            seen.extend(order.id for order in orders)

    harness.publish_many("orders", [{"id": 1}, {"id": "seven"}, {"id": 3}])
    harness.run()
    assert seen == [1, 3]
    (letter,) = harness.dead_letters("orders")
    assert letter.reason == "undecodable"
    assert "Expected `int`, got `str`" in letter.error
    assert [vars(record)["event"] for record in caplog.records if record.levelno == logging.WARNING] == ["unreadable"]


@pytest.mark.promise("FACE-1")
def test_the_type_of_the_queue_applies_where_the_handler_has_none(harness: Harness) -> None:
    seen: list[Any] = []

    @harness.handler(Queue("orders", Order))
    def handle(order, message) -> None:  # type: ignore[no-untyped-def]
        seen.append((order, message.queue))

    @harness.handler("anything")
    def handle_anything(body: Any) -> None:
        seen.append(body)

    harness.publish("orders", Order(7))
    harness.publish("anything", [1, "two"])
    harness.run()
    assert (Order(7), "orders") in seen
    assert [1, "two"] in seen


@pytest.mark.promise("FACE-1")
def test_a_function_that_blocks_runs_in_a_thread_and_an_async_one_on_the_loop(harness: Harness) -> None:
    places: dict[str, str] = {}

    @harness.handler("blocking")
    def blocks(body: str) -> None:
        places[body] = threading.current_thread().name

    @harness.handler("awaited")
    async def awaits(body: str) -> None:
        places[body] = threading.current_thread().name
        assert asyncio.current_task() is not None

    harness.publish("blocking", "b")
    harness.publish("awaited", "a")
    harness.run()
    assert places["b"].startswith("waypost-blocking")
    assert not places["a"].startswith("waypost-")


def test_context_variables_set_by_one_call_do_not_reach_the_next(harness: Harness) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[int, int]] = []

    @harness.handler("orders", concurrency=1)
    async def handle(number: int) -> None:
        before = variable.get()
        variable.set(number)
        if number % 2:
            await asyncio.sleep(0)
        seen.append((before, variable.get()))

    harness.publish_many("orders", [1, 2, 3, 4])
    harness.run()
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_invalid_handlers_are_refused_when_they_are_registered() -> None:
    post = Waypost("memory://")

    def refused(match: str, queue: str = "orders", **options: Any) -> Any:
        return pytest.raises((ConfigurationError, InvalidPolicy), match=match), queue, options

    def wrong_parameter(body: str, other: str) -> None: ...
    def plain(body: str) -> None: ...
    def many(bodies: Order) -> None: ...
    def yields(body: str) -> Iterator[str]:
        yield body

    async def yields_async(body: str) -> AsyncIterator[str]:
        yield body

    async def loses(message: Message[Any]) -> None: ...

    cases: list[tuple[Any, Any]] = [
        (refused("there is no value for the parameter 'other'"), wrong_parameter),
        (refused("nothing can stop a thread", timeout=5), plain),
        (refused("concurrency must be a whole number", concurrency=0), plain),
        (refused("batch must be a whole number", batch=1000), plain),
        (refused("annotate its parameter as list", batch=10), many),
        (refused("a retry policy is an object", retry=Exponential), plain),
        (refused("use return instead of yield"), yields),
        (refused("use return instead of yield"), yields_async),
        (refused("use return instead of yield"), partial(yields)),
        (refused("on_lease_lost is a plain function", on_lease_lost=loses), plain),
    ]
    for (expected, queue, options), function in cases:
        with expected:
            post.handler(queue, **options)(function)
    with pytest.raises(ConfigurationError, match="there is nothing to run"):
        post.worker()
    post.handler("orders")(plain)
    with pytest.raises(ConfigurationError, match=r"has a handler already: .*plain"):
        post.handler("orders")(plain)
    with pytest.raises(ConfigurationError, match="no handler is registered for mails"):
        post.worker(["mails"])


# ---- outcomes ---------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("how", ["returned", "raised", "by hand"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_an_outcome_is_returned_or_raised_or_chosen_by_hand(harness: Harness, how: str, is_async: bool) -> None:
    outcomes: dict[str, Outcome | None] = {
        "retry": Retry(60), "snooze": Snooze(60), "dead": Dead("bad address"), "drop": Drop(), "done": None,
    }  # fmt: skip
    by_hand: dict[str, tuple[Any, ...]] = {
        "retry": (60,),
        "snooze": (60,),
        "dead": ("bad address",),
        "drop": (),
        "done": (),
    }

    def end(name: str, message: Message[Any]) -> Any:
        if how == "by hand":
            getattr(message, name)(*by_hand[name])
        elif (outcome := outcomes[name]) is not None:
            if how == "raised":
                raise outcome
            return outcome
        return "a value that is no outcome"

    if is_async:

        @harness.handler("orders")
        async def awaits(name: str, message: Message[str]) -> Any:
            return end(name, message)
    else:

        @harness.handler("orders")
        def blocks(name: str, message: Message[str]) -> Any:
            return end(name, message)

    harness.publish_many("orders", list(outcomes))
    harness.run()
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.dropped, ledger.dead, ledger.delayed) == (1, 1, 1, 2)
    assert (ledger.retried, ledger.snoozed) == (1, 1)
    (letter,) = harness.dead_letters("orders")
    assert letter.reason == "bad address"
    assert {(timer.body, timer.attempts, timer.deliveries) for timer in harness.timers("orders")} == {
        ("retry", 1, 1),
        ("snooze", 0, 0),
    }


@pytest.mark.promise("LEASE-8", "LEASE-9")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_an_error_is_retried_until_the_policy_gives_up(
    harness: Harness, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(message: Message[Any]) -> None:
        calls.append(message.attempts)
        raise KeyError("no such order")

    if is_async:

        @harness.handler("orders", retry=AT_ONCE)
        async def awaits(message: Message[Any]) -> None:
            await asyncio.sleep(0)
            fail(message)
    else:
        harness.handler("orders", retry=AT_ONCE)(fail)

    harness.publish("orders", 1)
    with harness.working():
        until(lambda: harness.ledger("orders").dead)
    assert calls == [0, 1, 2]
    (letter,) = harness.dead_letters("orders")
    assert (letter.reason, letter.error_type) == ("retries_exhausted", "KeyError")
    failures = [record for record in caplog.records if vars(record).get("event") == "handler_failed"]
    assert [vars(record)["attempts"] for record in failures] == [1, 2, 3]
    assert failures[0].exc_info is not None


@pytest.mark.promise("LEASE-8")
def test_a_manual_message_left_unsettled_is_retried(harness: Harness) -> None:
    @harness.handler("orders", manual=True, retry=NoRetry())
    async def handle(body: str, message: Message[str]) -> None:
        if body == "settled":
            message.done()

    harness.publish_many("orders", ["settled", "forgotten"])
    harness.run()
    (letter,) = harness.dead_letters("orders")
    assert (letter.body, letter.reason, letter.error) == ("forgotten", "retries_exhausted", "left unsettled")
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("LEASE-9")
def test_a_policy_by_exception_class_and_one_that_fails(harness: Harness) -> None:
    class Broken:
        def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
            raise ZeroDivisionError("no policy")

    policy = ByException(
        (ValueError, NoRetry()), ((OSError, LookupError), AT_ONCE), (ArithmeticError, Broken()), otherwise=NoRetry()
    )
    errors = {"value": ValueError, "file": FileNotFoundError, "key": KeyError, "sum": OverflowError, "other": TypeError}
    calls: list[str] = []

    @harness.handler("orders", retry=policy)
    async def handle(name: str) -> None:
        calls.append(name)
        raise errors[name]("on purpose")

    harness.publish_many("orders", list(errors))
    with harness.working():
        until(lambda: harness.ledger("orders").dead == 5)
    assert {name: calls.count(name) for name in errors} == {"value": 1, "file": 3, "key": 3, "sum": 1, "other": 1}
    reasons = {letter.body: (letter.reason, letter.error_type) for letter in harness.dead_letters("orders")}
    assert reasons["sum"] == ("retry_policy_failed", "ZeroDivisionError")
    assert reasons["file"] == ("retries_exhausted", "FileNotFoundError")
    tracebacks = {letter.body: letter.traceback or "" for letter in harness.dead_letters("orders")}
    assert 'raise errors[name]("on purpose")' in tracebacks["key"]
    assert "/src/waypost/" not in "".join(tracebacks.values())


@pytest.mark.promise("LEASE-8")
def test_a_handler_past_its_timeout_has_failed(harness: Harness) -> None:
    @harness.handler("orders", timeout=0.02, retry=NoRetry())
    async def handle(body: str) -> None:
        await asyncio.Event().wait()

    harness.publish("orders", "slow")
    harness.run()
    (letter,) = harness.dead_letters("orders")
    assert (letter.reason, letter.error_type) == ("retries_exhausted", "TimeoutError")


class Strange(BaseException):
    """An error of the user that is not an `Exception`."""


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


POISONS: dict[str, type[BaseException]] = {
    "exit": SystemExit, "interrupt": KeyboardInterrupt, "strange": Strange, "generator-exit": GeneratorExit,
    "cancelled-error": asyncio.CancelledError, "cancels-its-task": asyncio.CancelledError,
}  # fmt: skip


@pytest.mark.promise("LEASE-8", "LEASE-5", "LEASE-9")
@pytest.mark.parametrize("kind", ["async", "sync", "batch"])
def test_a_handler_that_ends_by_an_exit_fails_like_any_other_and_the_worker_goes_on(
    harness: Harness, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, int]] = []

    async def awaits(message: Message[str]) -> None:
        if message.body == "cancels-its-task":
            calls.append((message.body, message.attempts))
            cancel_own_task()
            await asyncio.Event().wait()
        blocks(message)

    def blocks(message: Message[str]) -> None:
        if message.body in POISONS:
            calls.append((message.body, message.attempts))
            raise POISONS[message.body]

    async def batch(messages: list[Message[str]]) -> None:
        await awaits(messages[0])

    options: dict[str, Any] = {"concurrency": 2, "retry": Constant(pause=0.01, attempts=3)}
    if kind == "batch":
        harness.handler("orders", batch=1, **options)(batch)
    else:
        harness.handler("orders", **options)(awaits if kind == "async" else blocks)
    published = harness.publish_many("orders", list(POISONS))
    harness.publish_many("orders", [str(number) for number in range(20)])
    with harness.working() as worker:
        until(lambda: harness.ended("orders") == 20 + len(POISONS))
        assert worker.is_running
    letters = {letter.body: letter for letter in harness.dead_letters("orders")}
    assert letters.keys() == POISONS.keys()
    for body, letter in letters.items():
        assert (letter.reason, letter.deliveries) == ("retries_exhausted", 3)
        assert letter.error_type.endswith(POISONS[body].__name__)
    assert sorted(calls) == sorted((body, attempt) for body in POISONS for attempt in range(3))
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.dead, ledger.released) == (20, len(POISONS), 0)
    failures = [vars(record) for record in caplog.records if vars(record).get("event") == "handler_failed"]
    assert {failure["message_id"] for failure in failures} == {one.id for one in published}


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("kind", ["sync", "async", "process", "inline"])
def test_a_handler_that_returns_a_coroutine_has_not_run_and_fails(kind: str) -> None:
    async def awaits(body: str) -> None:
        raise AssertionError("it is never awaited")

    def blocks(body: str) -> Any:
        return awaits(body)

    async def forgets_to_await(body: str) -> Any:
        return awaits(body)

    post = TestPost() if kind == "inline" else Waypost("memory://")
    with post:
        function = process_handlers.forgets_to_await if kind == "process" else blocks
        post.handler("orders", retry=NoRetry(), process=kind == "process")(
            forgets_to_await if kind == "async" else function
        )
        post.publish("orders", "lamp")
        if isinstance(post, TestPost):
            with pytest.raises(ConfigurationError):
                post.run_all()
        else:
            post.worker().run(until_empty=True, signals=False)
        (letter,) = post.dead_letters("orders")
    assert letter.error_type == "waypost.errors.ConfigurationError"
    assert "without awaiting it, so it has not run" in str(letter.error)


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize("process", [False, True], ids=["in-a-thread", "in-a-process"])
def test_a_class_of_outcomes_is_an_outcome_of_that_class(how: str, process: bool) -> None:
    with Waypost("memory://") as post:
        post.handler("orders", process=process, concurrency=1, retry=Constant(pause=60))(process_handlers.end_by_class)
        post.publish_many("orders", [f"{how} {name}" for name in ("Retry", "Dead", "Drop", "Snooze")])
        post.worker().run(until_empty=True, signals=False)
        ledger = post.ledger("orders")
        errors = [timer.error_type for timer in post.timers("orders")]
    assert (ledger.done, ledger.dead, ledger.dropped, ledger.retried) == (0, 1, 1, 2)
    assert sorted(map(str, errors)) == ["None", "TypeError"]  # a `Snooze` needs to know for how long


@pytest.mark.promise("LEASE-8", "LEASE-9")
@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize("process", [False, True], ids=["in-a-thread", "in-a-process"])
def test_an_outcome_that_is_none_of_ours_is_an_error_like_any_other(how: str, process: bool) -> None:
    with Waypost("memory://") as post:
        post.handler("orders", process=process, concurrency=1, retry=NoRetry())(process_handlers.end_by_own_class)
        post.publish_many("orders", [f"{how} Postponed", f"{how} Limited"])
        post.worker().run(until_empty=True, signals=False)
        letters = {letter.body: letter.error_type for letter in post.dead_letters("orders")}
    assert letters == {
        f"{how} Postponed": "tests.worker.process_handlers.Postponed",
        # A `Retry` whose constructor does not call that of its base: the policy decides.
        f"{how} Limited": None,
    }


def test_a_block_passes_an_outcome_that_is_none_of_ours_on_as_an_error() -> None:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        with pytest.raises(process_handlers.Postponed), post.receive("orders", retry=NoRetry()):
            raise process_handlers.Postponed
        assert post.ledger("orders").dead == 1


@pytest.mark.parametrize("outcome", [Retry(5, "later"), Snooze(3), Dead("bad", "text"), Drop()], ids=repr)
def test_an_outcome_comes_back_from_a_process_pool_of_the_application(outcome: Outcome) -> None:
    copied = copy.copy(outcome)  # by the same means as a pickle
    assert (type(copied), str(copied), vars(copied)) == (type(outcome), str(outcome), vars(outcome))


@pytest.mark.promise("LEASE-9")
def test_a_policy_whose_attempts_cannot_be_read_does_not_end_the_worker() -> None:
    class Policy:
        @property
        def attempts(self) -> int:
            raise RuntimeError("not known")

        def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
            return 0 if attempt == 1 else None

    with Waypost("memory://") as post:

        @post.handler("orders", retry=Policy())
        def handle(body: str) -> None:
            raise ValueError(body)

        post.publish("orders", "lamp")
        assert post.worker().run(until_empty=True, signals=False).handled == 2
        assert post.ledger("orders").dead == 1


@pytest.mark.promise("LEASE-8", "LEASE-9")
def test_every_message_of_a_batch_that_ends_by_an_exit_counts_but_for_those_already_decided(harness: Harness) -> None:
    @harness.handler("orders", batch=5, concurrency=1, retry=NoRetry())
    async def handle(messages: list[Message[int]]) -> None:
        messages[0].done()
        raise SystemExit

    harness.publish_many("orders", range(5))
    calls = harness.run().handled
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.dead, ledger.released) == (calls, 5 - calls, 0)


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_body_whose_own_code_exits_is_the_failure_of_its_message_in_a_batch(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    arrived: list[int] = []

    async def awaits(bodies: list[Exiting]) -> None:
        arrived.extend(body.id for body in bodies)

    def blocks(bodies: list[Exiting]) -> None:
        arrived.extend(body.id for body in bodies)

    with Waypost("memory://") as post:
        post.handler("orders", batch=4, concurrency=1, retry=NoRetry())(awaits if is_async else blocks)
        post.publish_many("orders", [{"id": number} for number in range(4)])
        post.worker().run(until_empty=True, signals=False)
        letters = {letter.body["id"]: (letter.reason, letter.error_type) for letter in post.dead_letters("orders")}
    assert arrived == [0, 3]
    assert letters == {
        1: ("retries_exhausted", "SystemExit"), 2: ("retries_exhausted", "waypost.errors.ConfigurationError"),
    }  # fmt: skip
    assert sum(vars(record).get("event") == "handler_failed" for record in caplog.records) == 2


class Unreadable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unkept:
    """A value whose attributes cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise Unreadable


@pytest.mark.promise("LEASE-8")
def test_a_result_whose_own_code_fails_without_a_text_does_not_end_the_worker() -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", result_ttl=60)
        def handle(body: int) -> Any:
            return Unkept()

        published = post.publish("orders", 1)
        assert post.worker().run(until_empty=True, signals=False).done == 1
        with pytest.raises(ResultNotKept, match="Unreadable"):
            post.result(published)


@pytest.mark.promise("LEASE-8")
def test_a_handler_that_cancels_its_task_and_returns_harms_no_other_message(harness: Harness) -> None:
    @harness.handler("orders", concurrency=1, retry=NoRetry())
    async def handle(body: str) -> None:
        if body == "cancels":
            cancel_own_task()
        else:
            await asyncio.sleep(0)

    harness.publish_many("orders", ["cancels", "a", "cancels", "b"])
    with harness.working():
        until(lambda: harness.ended("orders") == 4)
        harness.publish("orders", "c")
        until(lambda: harness.ended("orders") == 5)
    assert harness.ledger("orders").done == 5


def interrupted(url: str, namespace: str, script: str) -> tuple[int, str]:
    """The exit code and output of a program whose worker runs an async handler that sends its process a signal."""
    program = f"""
import asyncio, os, signal, sys
from waypost import Waypost

post = Waypost({url!r}, namespace={namespace!r})

@post.handler("orders")
async def handle(body):
    os.kill(os.getpid(), signal.{"SIGTERM" if "SIGTERM" in script else "SIGINT"})
    await asyncio.sleep(20)

post.publish("orders", 1)
{script}
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stderr


@pytest.mark.promise("LEASE-8", "LEASE-5")
@pytest.mark.parametrize("url", ["sqlite", "valkey", "postgres"], indirect=True)
@pytest.mark.parametrize(
    "script",
    [
        "post.worker().run(timeout=0.1)",
        "post.worker().run(signals=False)",
        "signal.signal(signal.SIGTERM, lambda *given: sys.exit(3))\npost.worker().run()",
    ],
    ids=["signal", "keyboard-interrupt", "own-signal-handler"],
)
def test_a_stop_from_outside_releases_the_message_and_ends_the_worker(url: str, namespace: str, script: str) -> None:
    code, errors = interrupted(url, namespace, script)
    assert code == (3 if "SIGTERM" in script else 0 if "timeout" in script else -signal.SIGINT), errors
    with Waypost(url, namespace=namespace) as post:
        (stored,) = post.peek("orders")
        assert (stored.deliveries, stored.attempts) == (0, 0)
        assert post.ledger("orders").released >= 1


@pytest.mark.promise("LEASE-7")
def test_at_most_once_is_handled_once_and_needs_no_settle(harness: Harness) -> None:
    harness.configure("orders", lease=None)
    seen: list[int] = []

    @harness.handler("orders")
    async def handle(number: int) -> None:
        seen.append(number)
        raise ValueError("too bad")

    harness.publish_many("orders", range(50))
    harness.run()
    assert sorted(seen) == list(range(50))
    assert harness.ledger("orders").done == 50


# ---- batches -------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1", "LEASE-8")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_batch_handler_gets_lists_and_may_settle_each_by_hand(harness: Harness, is_async: bool) -> None:
    sizes: list[int] = []

    def handle(messages: list[Message[int]]) -> None:
        sizes.append(len(messages))
        for message in messages:
            if message.body % 10 == 0:
                message.dead("round")

    async def awaited(messages: list[Message[int]]) -> None:
        handle(messages)

    harness.handler("numbers", batch=20, concurrency=2)(awaited if is_async else handle)
    harness.publish_many("numbers", range(100))
    harness.run()
    ledger = harness.ledger("numbers")
    assert (ledger.done, ledger.dead) == (90, 10)
    assert sum(sizes) == 100
    assert max(sizes) == 20


def test_an_error_in_a_batch_is_the_error_of_all_that_were_not_settled(harness: Harness) -> None:
    @harness.handler("numbers", batch=10, retry=NoRetry())
    async def handle(numbers: list[int], messages: list[Message[int]]) -> None:
        messages[0].done()
        raise ValueError("half way")

    harness.publish_many("numbers", range(4))
    harness.run()
    ledger = harness.ledger("numbers")
    assert ledger.done + ledger.dead == 4
    assert ledger.done >= 1
    assert all(letter.error == "half way" for letter in harness.dead_letters("numbers"))


@pytest.mark.promise("QUEUE-2", "LEASE-9")
def test_a_retry_policy_that_max_deliveries_cuts_is_reported_at_the_start_and_in_the_dead_letter(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    policies: dict[str, Any] = {
        "cut": Constant(attempts=4, pause=0.001),
        "by-error": ByException((KeyError, Constant(attempts=4, pause=0.001)), otherwise=NoRetry()),
        "fits": Constant(attempts=3, pause=0.001),
        "own": OwnPolicy(),
    }
    for queue, policy in policies.items():
        harness.configure(queue, max_deliveries=3)

        @harness.handler(queue, retry=policy)
        def fail(body: Any) -> None:
            raise KeyError("always")

        harness.publish(queue, 1)
    harness.configure("default", max_deliveries=3)
    harness.handler("default")(lambda body: None)
    with harness.working():
        until(lambda: sum(harness.ledger(queue).dead for queue in policies) == 4, "four burials")
    records = [one for one in caplog.records if getattr(one, "event", None) == "retries_cut"]
    reported = [vars(one) for one in records]
    assert {(one["queue"], one["attempts"], one["max_deliveries"]) for one in reported} == {
        ("cut", 4, 3), ("by-error", 4, 3),
    }  # fmt: skip
    assert "configure max_deliveries=4 or more" in records[0].getMessage()
    for queue in ("cut", "by-error", "own"):
        (letter,) = harness.dead_letters(queue)
        assert (letter.reason, letter.attempts, letter.deliveries) == ("max_deliveries", 3, 3)
        assert "the retry policy allowed another try: raise max_deliveries" in letter.note
    (letter,) = harness.dead_letters("fits")
    assert (letter.reason, letter.note) == ("retries_exhausted", None)
