"""A full store: nothing is half-written, stored messages can be drained, and then there is room again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from waypost import Waypost
from waypost.errors import StoreFull
from waypost.testing.servers import ValkeyServer

BODY = b"x" * 10_000
#: Far more than the server's memory holds.
MESSAGES_MAX = 5_000


@pytest.fixture
def small_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer(maxmemory="12mb", maxmemory_policy="noeviction")
    with server:
        yield server


def fill(post: Waypost, queue: str) -> int:
    """Publish until the store is full, and return how many were acknowledged."""
    for count in range(MESSAGES_MAX):
        try:
            post.publish(queue, BODY, key=f"key:{count}")
        except StoreFull:
            return count
    return MESSAGES_MAX


@pytest.mark.promise("STORE-1")
def test_a_full_valkey_refuses_publishes_whole_and_can_be_drained(small_server: ValkeyServer) -> None:
    with Waypost(small_server.url) as post:
        stored = fill(post, "full")
        assert 100 < stored < MESSAGES_MAX
        ledger = post.ledger("full")
        assert (ledger.published, ledger.ready, ledger.balance) == (stored, stored, 0)

        for _ in range(stored):
            with post.receive("full", wait=0) as message:
                assert message is not None
                assert message.body == BODY
        ledger = post.ledger("full")
        assert (ledger.done, ledger.ready, ledger.leased, ledger.balance) == (stored, 0, 0, 0)

        assert post.publish("full", BODY, key="key:0").status == "queued"


@pytest.mark.promise("STORE-1")
def test_a_full_valkey_still_buries_retries_cancels_and_purges(small_server: ValkeyServer) -> None:
    with Waypost(small_server.url) as post:
        stored = fill(post, "full")
        with post.receive("full", wait=0) as buried:
            assert buried is not None
            buried.dead("rejected", error="no room needed")
        with post.receive("full", wait=0) as retried:
            assert retried is not None
            retried.retry(after=3600)
        assert buried is not None
        assert retried is not None
        assert (buried.settled, retried.settled) == ("dead", "retried")
        assert post.cancel("full", key=f"key:{stored - 1}") == "cancelled"
        assert post.purge("full", "ready") == stored - 3
        ledger = post.ledger("full")
        assert (ledger.dead, ledger.delayed, ledger.cancelled, ledger.balance) == (1, 1, stored - 2, 0)
