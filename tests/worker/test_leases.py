"""Leases of running handlers: renewed, lost, cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from tests.worker.stage import Stage, until
from waypost import Message, NoRetry, Waypost, lease_clock

LEASE = 0.6


def expired(stage: Stage) -> int:
    return int(stage.ledger("orders").expired)


@pytest.mark.promise("LEASE-3")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_the_lease_of_a_long_handler_is_renewed(stage: Stage, is_async: bool) -> None:
    stage.configure("orders", lease=LEASE)
    calls: list[int] = []

    if is_async:

        @stage.handler("orders")
        async def awaits(message: Message[int]) -> None:
            calls.append(message.token)
            await asyncio.sleep(2.5 * LEASE)
    else:

        @stage.handler("orders")
        def blocks(message: Message[int]) -> None:
            calls.append(message.token)
            threading.Event().wait(2.5 * LEASE)

    stage.publish("orders", 1)
    with stage.working():
        until(lambda: stage.ledger("orders").done)
    assert calls == [1]
    assert expired(stage) == 0


@pytest.mark.promise("LEASE-3")
def test_a_handler_that_blocks_the_event_loop_keeps_its_leases(stage: Stage) -> None:
    stage.configure("orders", lease=LEASE)
    calls: list[int] = []

    @stage.handler("orders", concurrency=1)
    async def handle(number: int) -> None:
        calls.append(number)
        while number == 0 and time.monotonic() < begun + 2.5 * LEASE:
            threading.Event().wait(0.01)

    stage.publish_many("orders", range(3))
    begun = time.monotonic()
    with stage.working():
        until(lambda: stage.ledger("orders").done == 3)
    assert sorted(calls) == [0, 1, 2]
    assert expired(stage) == 0


@pytest.mark.promise("LEASE-3")
def test_after_the_maximum_run_time_the_lease_is_not_renewed_any_more(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.configure("orders", lease=LEASE, max_deliveries=1)
    told: list[bool] = []
    buried = threading.Event()

    @stage.handler("orders", max_run=0.05, concurrency=2)
    def handle(message: Message[int]) -> None:
        until(lambda: message.lease_lost)
        told.append(message.lease_lost)
        assert buried.wait(20)

    stage.publish("orders", 1)
    with stage.working():
        until(lambda: told)
        until(lambda: stage.ledger("orders").dead)
        buried.set()
    assert told == [True]
    assert [vars(record)["event"] for record in caplog.records if record.name == "waypost"] == [
        "run_too_long",
        "lease_lost",
    ]


def take_away(stage: Stage, url: str, namespace: str) -> Message[Any]:
    """What another worker does once a lease has ended: here the lease is stolen by cutting the renewals short."""
    with Waypost(url, namespace=namespace) as thief:
        reception = thief.receive("orders", wait=20)
        message = reception.__enter__()
        assert message is not None
        message.done()
        reception.__exit__(None, None, None)
        return message


@pytest.mark.promise("LEASE-3", "LEASE-2")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_handler_is_told_that_its_lease_is_lost(
    stage: Stage, url: str, namespace: str, is_async: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stage.configure("orders", lease=LEASE)
    ends: list[str] = []
    called: list[str] = []
    silent = threading.Event()
    silent.set()

    # Renewals are held back, as a frozen process would hold them back, until somebody else has the message.
    from waypost.worker.consumer import Consumer

    to_renew = Consumer.to_renew
    monkeypatch.setattr(Consumer, "to_renew", lambda self: [] if silent.is_set() else to_renew(self))
    # Only the store's answer counts here, not the worker's own clock.
    monkeypatch.setattr(lease_clock, "local_end", lambda sent, seconds: sent + 3600)

    def on_lease_lost(message: Message[Any]) -> None:
        called.append(message.id)

    if is_async:

        @stage.handler("orders", on_lease_lost=on_lease_lost)
        async def awaits(message: Message[int]) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append(f"cancelled, lost {message.lease_lost}")
                raise
    else:

        @stage.handler("orders", on_lease_lost=on_lease_lost)
        def blocks(message: Message[int]) -> None:
            until(lambda: message.lease_lost)
            ends.append(f"lost {message.lease_lost}")

    stage.publish("orders", 1)
    with stage.working() as worker:
        until(lambda: stage.ledger("orders").leased)
        worker.quiet()
        stolen = take_away(stage, url, namespace)
        silent.clear()
        until(lambda: ends and called)
    assert ends == ["cancelled, lost True" if is_async else "lost True"]
    assert called == [stolen.id]
    lost = [vars(record) for record in caplog.records if vars(record).get("event") == "lease_lost"]
    assert [(one["phase"], one["queue"], one["message_id"], one["deliveries"]) for one in lost] == [
        ("extend", "orders", stolen.id, 1)
    ]
    assert stage.ledger("orders").done == 1


@pytest.mark.promise("LEASE-12")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_a_running_message_is_cancelled_by_its_next_renewal(stage: Stage, is_async: bool) -> None:
    stage.configure("orders", lease=LEASE)
    ends: list[bool] = []
    began = threading.Event()

    if is_async:

        @stage.handler("orders", retry=NoRetry())
        async def awaits(message: Message[int]) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(message.cancel_requested)
    else:

        @stage.handler("orders", retry=NoRetry())
        def blocks(message: Message[int]) -> None:
            began.set()
            until(lambda: message.cancel_requested)
            ends.append(message.cancel_requested)
            raise RuntimeError("cancelled by request")

    published = stage.publish("orders", 1)
    with stage.working():
        until(began.is_set)
        assert stage.cancel("orders", id=published.id) == "requested"
        until(lambda: stage.ledger("orders").cancelled)
    assert ends == [True]
    assert stage.ledger("orders").dead == 0


@pytest.mark.promise("LEASE-12")
def test_done_wins_over_a_cancel(stage: Stage) -> None:
    stage.configure("orders", lease=LEASE)
    begun = threading.Event()

    @stage.handler("orders")
    async def handle(message: Message[int]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    published = stage.publish("orders", 1)
    with stage.working():
        # A message that has not started needs no handler any more, and ends as cancelled.
        until(begun.is_set)
        stage.cancel("orders", id=published.id)
        until(lambda: stage.ledger("orders").done)
    assert stage.ledger("orders").cancelled == 0


@pytest.mark.promise("LEASE-3")
def test_one_call_renews_all_leases_of_a_queue(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    caplog.set_level(logging.ERROR)
    with Stage("sync", "memory://one-call", on_event=seen.append) as stage:
        stage.configure("orders", lease=LEASE)

        @stage.handler("orders", concurrency=50)
        async def handle(number: int) -> None:
            await asyncio.sleep(LEASE)

        stage.publish_many("orders", range(50))
        with stage.working():
            until(lambda: stage.ledger("orders").done == 50)
    renewals = [event.count for event in seen if event.event == "renewed" and event.count]
    assert renewals
    assert max(renewals) == 50
