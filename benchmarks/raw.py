"""Ceilings: the least that a queue on each store must do, with no promises at all."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import redis

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
    """One table and the index of what is ready, through the same driver, in the fewest statements."""

    def __init__(self, url: str, payload_bytes: int) -> None:
        self._payload = os.urandom(payload_bytes)
        self._database = psycopg.connect(url, autocommit=True, prepare_threshold=None)
        self._database.execute(
            "CREATE TABLE raw (id bigserial PRIMARY KEY, leased boolean NOT NULL DEFAULT false, body bytea)"
            " WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)"
        )
        self._database.execute("CREATE INDEX raw_ready ON raw (id) WHERE NOT leased")

    def empty(self) -> None:
        self._database.execute("TRUNCATE raw")

    def publish_one(self, count: int) -> None:
        for _ in range(count):
            self._database.execute("INSERT INTO raw (body) VALUES (%b)", (self._payload,))

    def publish_many(self, count: int, batch: int) -> None:
        for start in range(0, count, batch):
            bodies = [self._payload] * min(batch, count - start)
            self._database.execute("INSERT INTO raw (body) SELECT unnest(%b::bytea[])", (bodies,))

    def claim_settle(self, batch: int) -> int:
        done = 0
        while True:
            found = self._database.execute(
                "UPDATE raw SET leased = true WHERE id IN (SELECT id FROM raw WHERE NOT leased ORDER BY id LIMIT %s"
                " FOR UPDATE SKIP LOCKED) RETURNING id, body",
                (batch,),
                binary=True,
            ).fetchall()
            if not found:
                return done
            self._database.execute("DELETE FROM raw WHERE id = ANY(%b)", ([number for number, _ in found],))
            done += len(found)

    def close(self) -> None:
        self._database.close()
