"""Tables of each earlier version, with messages, migrated to this release: nothing in them is lost or changed.

`versions/N.sql.gz` is what `waypost migrate --sql --namespace wp` printed when N was the newest version.
"""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from waypost import Retry, Waypost
from waypost.operations.schedules import make_spec
from waypost.schedule.rule import pack_spec
from waypost.store.postgres import check, migrate, schema
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer

VERSIONS = Path(__file__).parent / "versions"
WAS = range(1, schema.VERSION)
TABLES = ("queue", "message", "total", "entry", "window", "operation", "schedule", "chain", "member", "completed")


def make(connection: psycopg.Connection[Any], version: int, namespace: str) -> None:
    script = gzip.decompress((VERSIONS / f"{version}.sql.gz").read_bytes()).decode()
    connection.execute(re.sub(r"\bwp_(?=[a-z])", f"{namespace}_", script).replace("wp:", f"{namespace}:").encode())


#: Columns that came with a later version.
NEW = {
    "message": ("claims", "group_rank", "keeps_place", "expires_ms", "key_mode", "freed_key"),
    "entry": ("claims", "errors"), "total": ("over_cap",),
    "queue": (
        "made", "removed_ms", "removed_mark", "removed_until", "changes", "hide_bodies", "no_tracebacks", "order",
        "on_failure", "fair", "group_max_running", "group_rate_count", "group_rate_per_ms", "group_max_pending",
        "group_mode", "claim_mode", "conversion", "group_capped", "group_limited",
    ),
    "schedule": ("state",),
}  # fmt: skip

#: A claim of this release by the function of an older one, which knows no bound on bytes, and made the nonce of the
#: session and the number: here they are made of the nonce.
OLD_CLAIM = """
    CREATE FUNCTION "{0}_claim"(text, bigint, bytea, bigint, bigint, bigint, text, text, boolean, bigint, bigint)
    RETURNS TABLE (
        head text, id text, token bigint, deliveries integer, attempts integer, rank smallint, key text, "group" text,
        published_ms bigint, ready_ms bigint, claimed_ms bigint, lease_end_ms bigint, data bytea, chain text
    ) LANGUAGE sql AS $$
        SELECT (c.head::jsonb || 'false')::text, c.id, c.token, c.deliveries, c.attempts, c.rank, c.key, c."group",
            c.published_ms, c.ready_ms, c.claimed_ms, c.lease_end_ms, c.data, c.chain
        FROM "{0}_claim"(
            $1, $2, substr($3, 25, 8), ('x' || encode(substr($3, 33, 4), 'hex'))::bit(32)::bigint, $5, $6, $7, $8, $9,
            $10
        ) c
    $$
"""
#: A schedule saved as earlier releases did; from version 15 on it has a state.
OLD_SAVE = """
    SELECT * FROM "{0}_save_schedule"(
        'orders', 'rollup', NULL, NULL, 'v1', %s, false, 4102444800000, 4102444800000{1})
"""


def contents(connection: psycopg.Connection[Any], namespace: str) -> dict[str, list[Any]]:
    return {
        table: sorted(
            connection.execute(
                f'SELECT (to_jsonb(t) - %s::text[])::text FROM "{namespace}_{table}" t'.encode(),
                (list(NEW.get(table, ())),),
            ).fetchall()
        )
        for table in TABLES
    }  # fmt: skip


def fill(monkeypatch: pytest.MonkeyPatch, url: str, namespace: str, version: int) -> None:
    """Publish messages in every state, with chains, results and so on, by the functions of that version."""
    with monkeypatch.context() as patched:
        patched.setattr(schema, "VERSION", version)
        patched.setattr("waypost.store.postgres.store.new_nonce", lambda: os.urandom(8) + bytes([0, 0, 0, 1]))
        with Waypost(url, namespace=namespace) as post:
            post.configure("orders", journal="full", completed=10)
            post.publish_many("orders", range(20))
            post.publish("orders", "timer", delay=3600, key="timer")
            post.publish("orders", "keyed", key="order:7", window=3600, priority=9)
            first = post.publish("orders", "first", chain=True)
            post.publish("later", "blocked", after=[first])
            for _ in range(3):
                with post.receive("orders") as message:
                    assert message is not None
            with post.receive("orders") as message:
                assert message is not None
                message.outcome = Retry(after=3600)


@pytest.mark.promise("BOX-5", "STORE-2")
@pytest.mark.parametrize("version", WAS)
def test_an_older_version_with_messages_is_migrated(
    server: PostgresServer, database: Any, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    name = fresh_namespace()
    make(database, version, name)
    if version < 3:
        database.execute(OLD_CLAIM.format(name).encode())
    fill(monkeypatch, server.url, name, version)
    state = ", ''" if version >= 15 else ""
    database.execute(OLD_SAVE.format(name, state).encode(), (pack_spec(make_spec("rollup", cron="0 9 * * *")),))
    before = contents(database, name)
    assert migrate(server.url, namespace=name) == version
    after = contents(database, name)
    assert {table: len(rows) for table, rows in after.items()} == {table: len(rows) for table, rows in before.items()}
    assert {table for table in TABLES if before[table] != after[table]} == set()
    assert check(server.url, namespace=name).is_current
    found = database.execute(
        "SELECT DISTINCT substr(proname, length(%s) + 2) FROM pg_proc WHERE starts_with(proname, %s)",
        (name, f"{name}_"),
    ).fetchall()
    made = {made for file in schema.FUNCTIONS for _, made in schema.MADE.findall(schema.function_text(file))}
    assert {function for (function,) in found} == {f"{function}_{schema.VERSION}" for function in made}
    with Waypost(server.url, namespace=name) as post, psycopg.connect(server.url) as connection:
        found = connection.execute(
            f'SELECT count(*) FILTER (WHERE claims > 0), count(*) FILTER (WHERE claims <> token) FROM "{name}_message"'
        ).fetchone()
        assert found == (1, 0)
        ledger = post.ledger("orders")
        assert (ledger.published, ledger.done, ledger.delayed, ledger.balance) == (23, 3, 2, 0)
        assert [schedule.name for schedule in post.schedules()] == ["rollup"]
        post.publish("orders", "within", transaction=connection)
        connection.commit()
        bodies = []
        while True:
            with post.receive("orders") as message:
                if message is None:
                    break
                bodies.append(message.body)
        assert bodies[-1] == "within"
        assert len(bodies) == 23 - 3 - 2 + 1
        with post.receive("later", wait=10) as message:
            assert message is not None
            assert message.body == "blocked"


def test_every_earlier_version_has_its_script() -> None:
    assert sorted(int(path.name.partition(".")[0]) for path in VERSIONS.iterdir()) == list(WAS)
