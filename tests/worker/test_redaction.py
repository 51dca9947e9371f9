"""The redact hook: whichever way a message takes into a store, the journal keeps only what the hook lets through."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import waypost
from tests.waiting import until
from tests.worker import process_handlers
from tests.worker.harness import Harness
from waypost import Message
from waypost.codec import open_envelope

pytestmark = pytest.mark.promise("SEE-3")

CANARY = "Canary7Secret"
SECRET = {"card": CANARY}


def redact(queue: str, body: Any, headers: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """What a shop might have: it is given the same kinds of bodies by every way in."""
    assert isinstance(body, dict | str | int), body
    return f"(hidden from {queue})", dict.fromkeys(headers, "…")


@pytest.fixture(params=["sync", "async"])
def harness(request: pytest.FixtureRequest, url: str, namespace: str) -> Iterator[Harness]:
    with Harness(request.param, url, namespace=namespace, redact=redact) as made:
        for queue in ("orders", "next", "reports"):
            made.configure(queue, journal="full")
        yield made


def journalled(harness: Harness, queue: str) -> list[bytes]:
    """The bodies that a queue's journal keeps."""
    return [event.body for event in harness.journal(queue).events if event.event == "published"]


def check_hidden(harness: Harness, *counts: tuple[str, int]) -> None:
    """So many messages of each queue are journalled, each with what the hook made of it."""
    for queue, count in counts:
        bodies = journalled(harness, queue)
        assert len(bodies) == count
        for body in bodies:
            assert CANARY.encode() not in body
            assert open_envelope(body).data == f"(hidden from {queue})".encode()


def test_publishes_are_journalled_redacted(harness: Harness) -> None:
    harness.publish("orders", SECRET, headers={"token": CANARY})
    harness.publish("orders", SECRET, key="k", delay=60)
    harness.publish("orders", SECRET, key="k", delay=60, on_conflict="replace")
    harness.publish_many("orders", [SECRET, SECRET], headers={"token": CANARY})
    check_hidden(harness, ("orders", 5))


def test_continuations_of_a_handler_are_journalled_redacted(harness: Harness) -> None:
    @harness.handler("orders")
    def charge(body: Any, message: Message[Any]) -> None:
        message.then("next", SECRET, headers={"token": CANARY})
        message.then("next", SECRET, key="k")
        if body != "again":
            message.then("orders", "again")

    harness.publish("orders", SECRET)
    harness.run()
    until(lambda: len(journalled(harness, "next")) == 3, "all that was sent on")
    check_hidden(harness, ("orders", 2), ("next", 3))


@pytest.mark.parametrize("url", ["sqlite", "valkey", "postgres"], indirect=True)
def test_continuations_of_a_handler_in_a_process_are_journalled_redacted(harness: Harness) -> None:
    harness.handler("orders", process=True)(process_handlers.sends_canary_on)
    harness.publish("orders", SECRET)
    harness.run()
    until(lambda: len(journalled(harness, "next")) == 1, "what was sent on")
    check_hidden(harness, ("orders", 1), ("next", 1))


def test_continuations_from_a_receive_block_are_journalled_redacted(harness: Harness) -> None:
    harness.publish("orders", SECRET)
    with harness.receive("orders", wait=5) as message:
        message.then("next", SECRET)
    until(lambda: len(journalled(harness, "next")) == 1, "what was sent on")
    check_hidden(harness, ("orders", 1), ("next", 1))


def test_rescheduled_messages_are_journalled_redacted(harness: Harness) -> None:
    @harness.handler("orders")
    def charge(body: Any, message: Message[Any]) -> None:
        if message.headers:
            message.reschedule(3600)

    harness.publish("orders", SECRET, headers={"token": CANARY})
    harness.run()
    until(lambda: len(journalled(harness, "orders")) == 2, "the next one")
    check_hidden(harness, ("orders", 2))


def test_messages_fired_by_a_schedule_are_journalled_redacted(harness: Harness) -> None:
    harness.save_schedule("rollup", queue="reports", every=0.05, body=SECRET, max_fires=2)
    harness.handler("reports")(lambda body: None)
    with harness.working():
        until(lambda: len(journalled(harness, "reports")) == 2, "both fires")
    harness.save_schedule("by-hand", queue="next", cron="@yearly", body=SECRET)
    harness.trigger_schedule("by-hand")
    check_hidden(harness, ("reports", 2), ("next", 1))


def test_messages_relayed_into_a_store_are_journalled_redacted(harness: Harness, tmp_path: Path) -> None:
    with Harness(harness.mode, f"sqlite:///{tmp_path / 'target.db'}") as target:
        target.configure("copies", journal="full")
        harness.post.relay("orders", to=f"sqlite:///{tmp_path / 'target.db'}#copies", headers={"token": CANARY})
        harness.publish("orders", SECRET)
        with harness.working():
            until(lambda: len(journalled(target, "copies")) == 1, "what was relayed")
        check_hidden(target, ("copies", 1))
        assert next(iter(target.messages("copies"))).body == SECRET


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("harness", ["sync"], indirect=True)
def test_messages_published_in_a_transaction_are_journalled_redacted(harness: Harness, url: str) -> None:
    is_sqlite = harness.store.kind == "sqlite"
    opened: Any = (
        sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None) if is_sqlite else psycopg.connect(url)
    )
    with closing(opened) as connection:
        if is_sqlite:
            connection.execute("BEGIN IMMEDIATE")
        harness.publish("orders", SECRET, transaction=connection)
        harness.publish_many("orders", [SECRET], transaction=connection)
        connection.commit()
    check_hidden(harness, ("orders", 2))


def test_every_settle_is_made_where_the_hook_is_applied() -> None:
    source = Path(waypost.__file__).parent
    made = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        if "testing" not in path.parts
        for line in path.read_text().splitlines()
        if "store.settle(" in line
    ]
    assert made == [
        "operations/receive.py: return lambda operation: "
        "context.store.settle(queue, journalled, operation, next_claim=next_claim)"
    ]
