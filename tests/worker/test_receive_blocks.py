"""Blocks of `receive` and `consume`: their leases are renewed while they run, and a drain ends those that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Waypost, lease_clock
from waypost.errors import StoreUnavailable
from waypost.worker.renewer import Renewer

LEASE = 0.6


def renewing_threads() -> list[threading.Thread]:
    names = ("waypost-renewals", "waypost-lease-ends")
    return [thread for thread in threading.enumerate() if thread.name in names]


@contextmanager
def consumed(harness: Harness, queue: str, **options: Any) -> Iterator[Any]:
    """The first message of `consume`, for a block."""
    messages = harness.post.consume(queue, **options)
    if harness.mode == "sync":
        with next(messages) as message:
            yield message
        messages.close()
        return

    async def first() -> Any:
        return await anext(messages)

    message = harness.done(first())
    yield message
    harness.done(message.__aexit__(None, None, None))
    harness.done(messages.aclose())


@pytest.mark.promise("LEASE-16")
@pytest.mark.parametrize("how", ["receive", "consume"])
def test_the_lease_of_a_block_is_renewed_while_it_runs(harness: Harness, url: str, namespace: str, how: str) -> None:
    harness.configure("orders", lease=LEASE)
    harness.publish("orders", 1)
    block = harness.receive("orders", wait=20) if how == "receive" else consumed(harness, "orders", wait=20)
    with block as message:
        with Waypost(url, namespace=namespace) as other, other.receive("orders", wait=2.5 * LEASE) as second:
            assert second is None
        assert not message.lease_lost
        assert message._lease_until > lease_clock.now()
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.expired) == (1, 0)


@pytest.mark.promise("LEASE-16")
@pytest.mark.parametrize("how", ["receive", "consume"])
def test_a_block_may_turn_lease_renewal_off(harness: Harness, url: str, namespace: str, how: str) -> None:
    harness.configure("orders", lease=LEASE)
    harness.publish("orders", 1)
    options: dict[str, Any] = {"wait": 20, "renew": False}
    block = harness.receive("orders", **options) if how == "receive" else consumed(harness, "orders", **options)
    with block as message, Waypost(url, namespace=namespace) as other, other.receive("orders", wait=20) as second:
        assert second is not None
        assert second.id == message.id
    assert message.settled == "lost"
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.expired) == (1, 1)


@pytest.mark.promise("LEASE-16", "LEASE-3")
def test_a_block_learns_that_its_lease_ended_although_the_store_is_silent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    healed = threading.Event()

    def hang(self: Renewer, *given: Any) -> Any:
        healed.wait(60)
        raise StoreUnavailable("cut off")

    monkeypatch.setattr(Renewer, "_extend", hang)
    harness.configure("orders", lease=LEASE)
    harness.publish("orders", 1)
    with harness.receive("orders", wait=20) as message:
        until(lambda: message.lease_lost)
    healed.set()
    # It was still the holder: no other client had claimed the message.
    assert message.settled == "done"
    lost = [vars(record)["phase"] for record in caplog.records if vars(record).get("event") == "lease_lost"]
    assert lost == ["deadline"]


@pytest.mark.promise("LEASE-16", "LEASE-12")
def test_a_block_learns_of_a_cancel_at_its_next_renewal(harness: Harness) -> None:
    harness.configure("orders", lease=LEASE)
    published = harness.publish("orders", 1)
    with harness.receive("orders", wait=20) as message:
        assert harness.cancel("orders", id=published.id) == "requested"
        until(lambda: message.cancel_requested)
        message.retry()
    assert harness.ledger("orders").cancelled == 1


@pytest.mark.promise("LEASE-16")
def test_the_threads_that_renew_end_when_no_block_is_left_and_with_the_client() -> None:
    before = len(renewing_threads())
    with Waypost("memory://blocks") as post:
        post.configure("orders", lease=LEASE)
        post.publish_many("orders", range(3))
        with post.receive("orders"):
            assert len(renewing_threads()) == before + 2
        until(lambda: len(renewing_threads()) == before)
        with post.receive("orders") as message:
            assert message is not None
            assert len(renewing_threads()) == before + 2
            first_end = message._lease_until
            until(lambda: message._lease_until > first_end)
        with post.receive("orders"):
            pass
    until(lambda: len(renewing_threads()) == before)
    assert post.open().ledger("orders").expired == 0
    post.close()


@pytest.mark.promise("LEASE-16", "LEASE-11")
@pytest.mark.parametrize("how", ["receive", "consume"])
def test_a_drain_ends_a_wait_at_once(harness: Harness, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    # No check from time to time finds the drain.
    monkeypatch.setattr("waypost.operations.flow.DRAIN_CHECK_SECONDS", 3600.0)
    found: list[Any] = []

    def wait() -> None:
        if how == "receive":
            with harness.receive("orders", wait=None) as message:
                found.append(message)
        else:
            found.append(list(harness.consume("orders")))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: harness.post._context.waiting)
    assert harness.drain(timeout=20).complete
    waiting.join(20)
    assert found == [None if how == "receive" else []]
