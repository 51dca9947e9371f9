"""What a worker logs about handler calls: each failure says what becomes of its message."""

from __future__ import annotations

import logging
import re
import traceback
from typing import Any

import pytest

from tests.waiting import until
from waypost import Dead, Drop, Message, NoRetry, Retry, Waypost
from waypost.policy import Constant

pytestmark = pytest.mark.promise("FACE-6")


def run(post: Waypost, caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[logging.LogRecord]:
    """Let a worker empty the queue; return what was logged about handler calls."""
    with caplog.at_level(level, "waypost"):
        post.worker(scheduler=False).run(until_empty=True, signals=False)
    return [record for record in caplog.records if str(vars(record).get("event")).startswith("handler_")]


def test_a_failure_is_logged_with_what_becomes_of_its_message(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", retry=Constant(pause=0, attempts=3))
        def charge(order: int) -> None:
            raise ValueError(f"card of order {order} declined\nwith a second line")

        published = post.publish("orders", 7)
        records = run(post, caplog)
    start = f"handler {post.handlers[0].name} failed on message {published.id} of queue orders: "
    start += "ValueError: card of order 7 declined; "
    assert [record.getMessage() for record in records] == [
        start + "retrying in 0.0 s, attempt 1 of 3",
        start + "retrying in 0.0 s, attempt 2 of 3",
        start + "dead letter: retries_exhausted",
    ]
    assert [record.levelname for record in records] == ["WARNING", "WARNING", "ERROR"]
    fields = [(vars(one)["outcome"], vars(one)["retry_seconds"], vars(one)["reason"]) for one in records]
    assert fields == [("retry", 0.0, None), ("retry", 0.0, None), ("dead", None, "retries_exhausted")]


def test_a_traceback_begins_in_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", retry=NoRetry())
        async def charge(order: int) -> None:
            post.publish("mails", object())  # fails inside waypost

        post.publish("orders", 7)
        (record,) = run(post, caplog)
    assert record.exc_info is not None
    frames = traceback.extract_tb(record.exc_info[2])
    assert frames[0].name == "charge"
    assert "waypost" in frames[-1].filename


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Dead("rejected"), r"gives up message \S+ of queue orders: dead letter: rejected"),
        (
            Retry(after=0, reason="later"),
            r"asks for another try of message \S+ of queue orders: later; retrying in 0.0 s, attempt 1 of 2",
        ),
    ],
)
def test_what_a_handler_decides_is_logged_without_a_traceback(
    outcome: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", retry=Constant(pause=0, attempts=2))
        def charge(order: int, message: Message[Any]) -> None:
            raise outcome

        post.publish("orders", 7)
        record = run(post, caplog)[0]
    assert record.levelname == "INFO"
    assert re.search(text, record.getMessage()), record.getMessage()
    assert record.exc_info is None


def test_a_dropped_message_is_not_logged_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders")
        def charge(order: int) -> None:
            raise Drop

        post.publish("orders", 7)
        assert run(post, caplog) == []


def test_what_a_handler_chooses_by_hand_is_logged_and_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", batch=4, concurrency=1, manual=True, retry=Constant(pause=60, jitter=0, attempts=2))
        def charge(messages: list[Message[str]]) -> None:
            for message in messages:
                if message.body != "forget":
                    getattr(message, message.body)()

        published = post.publish_many("orders", ["done", "dead", "retry", "forget"])
        records = run(post, caplog, logging.DEBUG)
    name, about = post.handlers[0].name, "of queue orders"
    assert [(record.levelname, record.getMessage()) for record in records[:3]] == [
        ("INFO", f"handler {name} gives up message {published[1].id} {about}: dead letter: rejected"),
        ("INFO", f"handler {name} asks for another try of message {published[2].id} {about}: "
                 "retrying in 60.0 s, attempt 1 of 2"),
        ("INFO", f"handler {name} asks for another try of message {published[3].id} {about}: "
                 "left unsettled; retrying in 60.0 s, attempt 1 of 2"),
    ]  # fmt: skip
    assert records[3].getMessage().startswith(f"handler {name}: message {published[0].id} {about} done in ")


def test_the_failure_of_a_message_whose_cancel_was_requested_is_logged_as_its_cancel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders")
        def charge(message: Message[int]) -> None:
            assert post.cancel("orders", id=message.id) == "requested"
            until(lambda: message.cancel_requested)
            raise ValueError("stopped half-way")

        post.publish("orders", 7)
        (record,) = run(post, caplog)
        assert post.ledger("orders").cancelled == 1
    assert record.getMessage().endswith("ValueError: stopped half-way; its cancel was requested: it is cancelled")


def test_a_batch_is_one_line_with_the_outcomes_of_all(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", batch=3, concurrency=1, retry=NoRetry())
        def charge(orders: list[int]) -> None:
            raise KeyError("lamp")

        first = post.publish_many("orders", [1, 2, 3])[0]
        (record,) = run(post, caplog)
    assert f"failed on 3 messages, the first of them {first.id}, of queue orders: KeyError" in record.getMessage()
    assert record.getMessage().endswith("; 3 dead letters")


@pytest.mark.parametrize("level", [None, logging.INFO])
def test_successes_are_logged_with_their_time_at_the_level_that_is_chosen(
    level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    done = logging.getLogger("waypost.done")
    with Waypost("memory://") as post:

        @post.handler("orders")
        async def charge(order: int) -> None: ...

        published = post.publish("orders", 7)
        done.setLevel(level or logging.NOTSET)
        try:
            (record,) = run(post, caplog, level or logging.DEBUG)
        finally:
            done.setLevel(logging.NOTSET)
    assert record.levelno == (level or logging.DEBUG)
    assert re.fullmatch(rf"handler \S+ message {published.id} of queue orders done in [\d.]+ m?s", record.getMessage())


def test_nothing_is_logged_about_successes_unless_it_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:

        @post.handler("orders")
        async def charge(order: int) -> None: ...

        post.publish("orders", 7)
        assert run(post, caplog) == []


def test_a_worker_counts_what_became_of_its_messages() -> None:
    with Waypost("memory://") as post:

        @post.handler("orders", retry=Constant(pause=0, attempts=2))
        def charge(order: int) -> None:
            if order == 0:
                raise ValueError("no")

        post.publish_many("orders", range(5))
        report = post.worker(scheduler=False).run(until_empty=True, signals=False)
    assert (report.done, report.retried, report.dead) == (4, 1, 1)
    assert str(report) == "4 done, 1 dead, 1 retried"
