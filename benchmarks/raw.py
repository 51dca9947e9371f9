"""Ceilings: the least that a queue on each store must do, with no promises at all."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import redis

from waypost.identity import Session
from waypost.store.postgres import migrate
from waypost.testing.clock import ClockTime

PUSH = "redis.call('LPUSH', KEYS[1], unpack(ARGV)) return #ARGV"
LEASE = """
local found = redis.call('RPOP', KEYS[1], ARGV[1])
if not found then return {} end
local leases = {}
for i = 1, #found do leases[i * 2 - 1] = ARGV[2] leases[i * 2] = found[i] end
redis.call('ZADD', KEYS[2], unpack(leases))
return found
"""
FINISH = "return redis.call('ZREM', KEYS[1], unpack(ARGV))"


class RawValkey:
    """Bare lists and scripts through redis-py."""

    def __init__(self, url: str, payload_bytes: int) -> None:
        self.client = redis.Redis.from_url(url.replace("valkey://", "redis://"), protocol=2)
        self._payload = os.urandom(payload_bytes - 8)
        self._number = 0
        self._push: Any = self.client.register_script(PUSH)
        self._lease: Any = self.client.register_script(LEASE)
        self._finish: Any = self.client.register_script(FINISH)

    def payloads(self, count: int) -> list[bytes]:
        """Distinct payloads of the size of our envelopes."""
        self._number += count
        return [number.to_bytes(8, "big") + self._payload for number in range(self._number - count, self._number)]

    def empty(self) -> None:
        self.client.delete("raw", "raw-leases")

    def publish_one(self, count: int) -> None:
        payload = self._payload
        for _ in range(count):
            self.client.lpush("raw", payload)

    def publish_many(self, count: int, batch: int) -> None:
        for start in range(0, count, batch):
            self._push(keys=["raw"], args=self.payloads(min(batch, count - start)))

    def claim_settle(self, batch: int) -> int:
        done = 0
        while True:
            found = self._lease(keys=["raw", "raw-leases"], args=[batch, "1"])
            if not found:
                return done
            self._finish(keys=["raw-leases"], args=found)
            done += len(found)


class RawSqlite:
    """One table, whole batches per transaction, the same durability as ours."""

    def __init__(self, path: Path, payload_bytes: int) -> None:
        self._payload = os.urandom(payload_bytes)
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(
            "CREATE TABLE raw (id INTEGER PRIMARY KEY, leased INTEGER NOT NULL DEFAULT 0, body BLOB)"
        )
        self._database.execute("CREATE INDEX raw_ready ON raw (id) WHERE leased = 0")

    def empty(self) -> None:
        self._database.execute("DELETE FROM raw")

    def publish_one(self, count: int) -> None:
        for _ in range(count):
            self._insert(1)

    def publish_many(self, count: int, batch: int) -> None:
        for start in range(0, count, batch):
            self._insert(min(batch, count - start))

    def _insert(self, count: int) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        self._database.executemany("INSERT INTO raw (body) VALUES (?)", [(self._payload,)] * count)
        self._database.execute("COMMIT")

    def claim_settle(self, batch: int) -> int:
        done = 0
        while True:
            self._database.execute("BEGIN IMMEDIATE")
            found = self._database.execute(
                "UPDATE raw SET leased = 1 WHERE id IN (SELECT id FROM raw WHERE leased = 0 ORDER BY id LIMIT ?)"
                " RETURNING id, body",
                (batch,),
            ).fetchall()
            self._database.execute("COMMIT")
            if not found:
                return done
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("DELETE FROM raw WHERE id = ?", [(number,) for number, _ in found])
            self._database.execute("COMMIT")
            done += len(found)

    def close(self) -> None:
        self._database.close()


class RawPostgres:
    """Bare statements on tables of the same columns and indexes, through the same driver with the same settings.

    A claim is the UPDATE of rows chosen with SKIP LOCKED, a settle the DELETE by id; each is a transaction. Of a claim
    only the ids are read, which the settle needs: nothing else is decoded. There is no journal, no counter, no
    fence and no record of what was done.
    """

    def __init__(self, url: str, payload_bytes: int) -> None:
        self._payload = os.urandom(payload_bytes)
        self._session = Session(ClockTime())
        migrate(url, namespace="raw")
        self._database = psycopg.connect(url, autocommit=True, prepare_threshold=None)
        # Like our functions: otherwise the planner's estimates of a table that was empty a moment ago decide.
        for name in ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "sort"):
            self._database.execute(f"SET enable_{name} = off")
        self._database.execute("SET jit = off")

    def empty(self) -> None:
        self._database.execute("TRUNCATE raw_message")

    def publish_one(self, count: int, *, prepare: bool = False) -> None:
        for _ in range(count):
            self._database.execute(
                "INSERT INTO raw_message (seq, position, ready_ms, published_ms, queue, state, rank, id, data)"
                " VALUES (nextval('raw_sequence'), 1, 1, 1, 1, 0, 4, %s, %b)",
                (self._session.message_ids(1)[0], self._payload),
                prepare=prepare,
            )

    def publish_one_in_transaction(self, count: int) -> None:
        """Like a service with more statements in its transaction."""
        for _ in range(count):
            with self._database.transaction():
                self.publish_one(1)

    def publish_many(self, count: int, batch: int) -> None:
        for start in range(0, count, batch):
            ids = self._session.message_ids(min(batch, count - start))
            self._database.execute(
                "INSERT INTO raw_message (seq, position, ready_ms, published_ms, queue, state, rank, id, data)"
                " SELECT u.n, u.n, 1, 1, 1, 0, 4, u.id, u.data"
                " FROM unnest(%b::text[], %b::bytea[]) WITH ORDINALITY AS u (id, data, n)",
                (ids, [self._payload] * len(ids)),
            )

    def claim(self, batch: int) -> list[bytes]:
        """Claim, and return the ids."""
        found = self._database.execute(
            "UPDATE raw_message m SET state = 2, token = m.token + 1, deliveries = m.deliveries + 1, nonce = %b,"
            " worker = 'bench:1:0000', claimed_ms = 1, lease_end_ms = 60001, lease_ms = 60000"
            " FROM (SELECT ctid AS place FROM raw_message WHERE queue = 1 AND state = 0 ORDER BY rank, position"
            " LIMIT %s FOR UPDATE SKIP LOCKED) c WHERE m.ctid = c.place"
            ' RETURNING m.id, m.token, m.deliveries, m.attempts, m.rank, m.key, m."group", m.published_ms,'
            " m.ready_ms, m.claimed_ms, m.lease_end_ms, m.data",
            (self._payload[:12], batch),
            binary=True,
        ).pgresult
        assert found is not None
        return [found.get_value(row, 0) or b"" for row in range(found.ntuples)]

    def claim_settle(self, batch: int) -> int:
        done = 0
        while True:
            ids = self.claim(batch)
            if not ids:
                return done
            self._database.execute(
                "DELETE FROM raw_message WHERE queue = 1 AND id = ANY (%b::text[])", ([id.decode() for id in ids],)
            )
            done += len(ids)

    def close(self) -> None:
        self._database.close()
