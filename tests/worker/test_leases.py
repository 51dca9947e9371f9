"""Leases of running handlers: renewed, lost, cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Message, NoRetry, Waypost, lease_clock
from waypost.worker.consumer import Consumer

LEASE = 0.6


def expired(harness: Harness) -> int:
    return int(harness.ledger("orders").expired)


@pytest.mark.promise("LEASE-3")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_the_lease_of_a_long_handler_is_renewed(harness: Harness, is_async: bool) -> None:
    harness.configure("orders", lease=LEASE)
    calls: list[int] = []

    if is_async:

        @harness.handler("orders")
        async def awaits(message: Message[int]) -> None:
            calls.append(message.token)
            await asyncio.sleep(2.5 * LEASE)
    else:

        @harness.handler("orders")
        def blocks(message: Message[int]) -> None:
            calls.append(message.token)
            threading.Event().wait(2.5 * LEASE)

    harness.publish("orders", 1)
    with harness.working():
        until(lambda: harness.ledger("orders").done)
    assert calls == [1]
    assert expired(harness) == 0


@pytest.mark.promise("LEASE-3")
def test_a_handler_that_blocks_the_event_loop_keeps_its_leases(harness: Harness) -> None:
    harness.configure("orders", lease=LEASE)
    calls: list[int] = []

    @harness.handler("orders", concurrency=1)
    async def handle(number: int) -> None:
        calls.append(number)
        while number == 0 and time.monotonic() < begun + 2.5 * LEASE:
            threading.Event().wait(0.01)

    harness.publish_many("orders", range(3))
    begun = time.monotonic()
    with harness.working():
        until(lambda: harness.ledger("orders").done == 3)
    assert sorted(calls) == [0, 1, 2]
    assert expired(harness) == 0


@pytest.mark.promise("LEASE-3")
def test_after_the_maximum_run_time_the_lease_is_not_renewed_any_more(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.configure("orders", lease=LEASE, max_deliveries=1)
    lease_lost: list[bool] = []
    buried = threading.Event()

    @harness.handler("orders", max_run=0.05, concurrency=2)
    def handle(message: Message[int]) -> None:
        until(lambda: message.lease_lost)
        lease_lost.append(message.lease_lost)
        assert buried.wait(20)

    harness.publish("orders", 1)
    with harness.working():
        until(lambda: lease_lost)
        until(lambda: harness.ledger("orders").dead)
        buried.set()
    assert lease_lost == [True]
    assert [vars(record)["event"] for record in caplog.records if record.name == "waypost"] == [
        "run_too_long",
        "lease_lost",
    ]


def take_away(harness: Harness, url: str, namespace: str) -> Message[Any]:
    """Claim and settle the message as another worker does once its lease has ended (renewals are held back)."""
    with Waypost(url, namespace=namespace) as thief:
        reception = thief.receive("orders", wait=20)
        message = reception.__enter__()
        assert message is not None
        message.done()
        reception.__exit__(None, None, None)
        return message


@pytest.mark.promise("LEASE-3", "LEASE-2")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_handler_learns_that_its_lease_is_lost(
    harness: Harness, url: str, namespace: str, is_async: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    harness.configure("orders", lease=LEASE)
    ends: list[str] = []
    called: list[str] = []
    silent = threading.Event()
    silent.set()

    # Renewals are held back, as a frozen process would hold them back, until another worker has the message.
    to_renew = Consumer.to_renew
    monkeypatch.setattr(Consumer, "to_renew", lambda self: [] if silent.is_set() else to_renew(self))
    # Only the store's answer counts here, not the worker's own clock.
    monkeypatch.setattr(lease_clock, "local_end", lambda sent, seconds: sent + 3600)

    def on_lease_lost(message: Message[Any]) -> None:
        called.append(message.id)

    if is_async:

        @harness.handler("orders", on_lease_lost=on_lease_lost)
        async def awaits(message: Message[int]) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append(f"cancelled, lost {message.lease_lost}")
                raise
    else:

        @harness.handler("orders", on_lease_lost=on_lease_lost)
        def blocks(message: Message[int]) -> None:
            until(lambda: message.lease_lost)
            ends.append(f"lost {message.lease_lost}")

    harness.publish("orders", 1)
    with harness.working() as worker:
        until(lambda: harness.ledger("orders").leased)
        worker.quiet()
        stolen = take_away(harness, url, namespace)
        silent.clear()
        until(lambda: ends and called)
    assert ends == ["cancelled, lost True" if is_async else "lost True"]
    assert called == [stolen.id]
    lost = [vars(record) for record in caplog.records if vars(record).get("event") == "lease_lost"]
    assert [(one["phase"], one["queue"], one["message_id"], one["deliveries"]) for one in lost] == [
        ("extend", "orders", stolen.id, 1)
    ]
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("LEASE-12")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_running_message_is_cancelled_by_its_next_renewal(harness: Harness, is_async: bool) -> None:
    harness.configure("orders", lease=LEASE)
    ends: list[bool] = []
    began = threading.Event()

    if is_async:

        @harness.handler("orders", retry=NoRetry())
        async def awaits(message: Message[int]) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(message.cancel_requested)
    else:

        @harness.handler("orders", retry=NoRetry())
        def blocks(message: Message[int]) -> None:
            began.set()
            until(lambda: message.cancel_requested)
            ends.append(message.cancel_requested)
            raise RuntimeError("cancelled by request")

    published = harness.publish("orders", 1)
    with harness.working():
        until(began.is_set)
        assert harness.cancel("orders", id=published.id) == "requested"
        until(lambda: harness.ledger("orders").cancelled)
    assert ends == [True]
    assert harness.ledger("orders").dead == 0


@pytest.mark.promise("LEASE-3", "LEASE-12")
def test_a_batch_ends_when_each_of_its_messages_is_lost_or_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    to_renew = Consumer.to_renew
    monkeypatch.setattr(Consumer, "to_renew", lambda self: [one for one in to_renew(self) if one.body != "lost"])
    running: list[Message[str]] = []
    with Waypost("memory://") as post:
        post.configure("orders", lease=LEASE)

        @post.handler("orders", batch=2, concurrency=1)
        async def handle(messages: list[Message[str]]) -> None:
            running.extend(messages)
            await asyncio.Event().wait()

        post.publish_many("orders", ["lost", "cancelled"])
        with post.worker():
            until(lambda: len(running) == 2 and running[0].lease_lost)
            assert post.cancel("orders", id=running[1].id) == "requested"
            until(lambda: post.ledger("orders").cancelled)
            running.clear()


@pytest.mark.promise("LEASE-12")
def test_done_wins_over_a_cancel(harness: Harness) -> None:
    harness.configure("orders", lease=LEASE)
    begun = threading.Event()

    @harness.handler("orders")
    async def handle(message: Message[int]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    published = harness.publish("orders", 1)
    with harness.working():
        # A message that has not started needs no handler any more, and ends as cancelled.
        until(begun.is_set)
        harness.cancel("orders", id=published.id)
        until(lambda: harness.ledger("orders").done)
    assert harness.ledger("orders").cancelled == 0


@pytest.mark.promise("LEASE-3")
def test_one_call_renews_all_leases_of_a_queue(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    caplog.set_level(logging.ERROR)
    with Harness("sync", "memory://one-call", on_event=seen.append) as harness:
        harness.configure("orders", lease=LEASE)

        @harness.handler("orders", concurrency=50)
        async def handle(number: int) -> None:
            await asyncio.sleep(LEASE)

        harness.publish_many("orders", range(50))
        with harness.working():
            until(lambda: harness.ledger("orders").done == 50)
    renewals = [event.count for event in seen if event.event == "renewed" and event.count]
    assert renewals
    assert max(renewals) == 50
