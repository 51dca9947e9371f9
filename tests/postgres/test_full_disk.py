"""A full disk: refused calls write nothing, stored messages can be drained, then there is room again.

The files of the server may not grow beyond a size that is not a whole number of pages, so the server gets what it gets
at the end of a disk: a page that could be written only in part. Debian's PostgreSQL 15 writes page by page and reports
a full disk; newer ones reserve space beforehand and would get the error of a file that is too large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest

from waypost import Waypost
from waypost.errors import PartialPublish, StoreFull
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer

pytestmark = pytest.mark.needs("postgresql-15")
#: A segment of the server's write-ahead log has 16 MiB; a table may grow a little larger, and by half a page more.
FILE_BYTES = 16 * 1024 * 1024 + 4096
#: Random, so that the server cannot make it smaller.
BODY = os.urandom(50_000)
MESSAGES_MAX = 5_000


@pytest.fixture
def small_server() -> Iterator[PostgresServer]:
    with PostgresServer(release=15, file_bytes_max=FILE_BYTES) as server:
        migrate(server.url)
        yield server


def fill(post: Waypost) -> int:
    """Publish until the disk is full, and return how many were acknowledged."""
    for count in range(MESSAGES_MAX):
        try:
            post.publish("full", BODY, key=f"key:{count}")
        except StoreFull:
            return count
    return MESSAGES_MAX


@pytest.mark.promise("STORE-2", "SEE-6")
def test_a_full_disk_refuses_publishes_whole_and_can_be_drained(small_server: PostgresServer) -> None:
    with Waypost(small_server.url, retry_budget=0) as post:
        stored = fill(post)
        assert 100 < stored < MESSAGES_MAX
        # Again, without a key, and in a batch of which nothing has room.
        for _ in range(3):
            with pytest.raises(StoreFull, match="nothing was written") as refusal:
                post.publish("full", BODY)
            assert refusal.value.outcome == "not done"
        with pytest.raises((StoreFull, PartialPublish)):
            post.publish_many("full", [BODY] * 50)
        ledger = post.ledger("full")
        assert (ledger.published, ledger.ready, ledger.balance) == (stored, stored, 0)
        # The journal has no trace of what was refused.
        assert [event.event for event in post.journal("full", limit=1_000).events] == ["published"] * stored

        for _ in range(stored):
            with post.receive("full", wait=0) as message:
                assert message is not None
                assert message.body == BODY
        ledger = post.ledger("full")
        assert (ledger.done, ledger.ready, ledger.leased, ledger.balance) == (stored, 0, 0, 0)
        # The space of removed rows is free after a vacuum, which autovacuum does by itself elsewhere.
        with psycopg.connect(small_server.url, autocommit=True) as connection:
            connection.execute("VACUUM")
        assert post.publish("full", BODY, key=f"key:{stored}").status == "queued"
        assert post.ledger("full").balance == 0
