"""Programs killed in the middle of their transactions: messages equal commits, and effects happen once.

Smaller here than in the figures (`make faults`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outbox.killed_programs import have_effects, sell
from tests.outbox.transaction_kinds import KINDS, is_file
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer


@pytest.mark.promise("BOX-1")
@pytest.mark.parametrize("kind", KINDS)
def test_messages_equal_commits_whenever_the_process_is_killed(
    server: PostgresServer, tmp_path: Path, kind: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}" if is_file(kind) else server.url
    sold = sell(kind, url, fresh_namespace(), transactions=40, kills=2)
    assert sold.kills == 2
    assert sold.messages == sold.rows
    assert all(number % 2 == 0 for number in sold.rows)


@pytest.mark.promise("BOX-3")
def test_effects_happen_once_in_the_transaction_that_settles(server: PostgresServer) -> None:
    found = have_effects("settle", server.url, fresh_namespace(), server.url, messages=300, kills=3)
    assert found == (300, 300)


@pytest.mark.promise("BOX-3")
def test_effects_happen_once_with_the_inbox_of_another_database(server: PostgresServer) -> None:
    with ValkeyServer() as valkey:
        found = have_effects("inbox", valkey.url, "wp", server.url, messages=300, kills=3)
    assert found == (300, 300)
