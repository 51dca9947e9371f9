"""Make the data of release 0.1.0. It runs with that release: PYTHONPATH=<its src> python make_data.py FOLDER.

Each store gets the same content through the public names of 0.1: messages in every state, keys, timers, chains, dead
letters, results, schedules and settings. What is written:

    sqlite.db.gz        the file of the SQLite store
    postgres.sql.gz     a dump of the PostgreSQL store (inserts, without owners)
    valkey.json.gz      every key of the Valkey store by its type, bytes as latin-1 text
    lake.tar.gz         the lake that `waypost pipeline run` made of the SQLite store
    expected.json       what 0.1.0 itself reads of each store
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import redis

from waypost import CatchUp, Constant, Message, NoRetry, Waypost
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

FAR = timedelta(days=20_000)


class Parcel(msgspec.Struct):
    weight: int
    to: str


@dataclass
class Person:
    name: str
    age: int


BODIES: list[tuple[str, Any]] = [
    ("json", {"id": 7, "text": "é ✓", "nested": {"list": [1, 2.5, None, True]}}),
    ("text", "plain text with é"),
    ("bytes", b"\x00\x01\xfe\xff"),
    ("null", None),
    ("number", 2**53 - 1),
    ("struct", Parcel(3, "Rome")),
    ("dataclass", Person("Ada", 36)),
    ("empty text", ""),
    ("empty bytes", b""),
]


def fill(post: Waypost, url: str) -> None:
    """Give a store its content."""
    post.configure("orders", journal="full", lease=30, max_deliveries=4, max_pending=1_000, completed=50, dead_max=100)
    post.configure("mails", rate="100/m", max_running=5, journal="all")
    post.configure("quiet", journal="off")
    post.configure("bodies", lease=1)
    for number, (kind, body) in enumerate(BODIES):
        post.publish(
            "bodies", body, priority=number, group=f"group-{number % 2}", headers={"kind": kind, "source": "0.1.0"},
            correlation_id=f"request-{number}", reply_to="answers",
        )  # fmt: skip
    for number in range(12):
        post.publish("orders", {"id": number}, key=f"order:{number}", group="eu" if number % 2 else "us")

    @post.handler("orders", retry=Constant(pause=1.5e9, attempts=5), result_ttl=timedelta(days=20_000))
    def handle(order: dict[str, int], message: Message[Any]) -> object:
        if order["id"] == 3:
            raise LookupError("no such order")  # waits for its retry
        if order["id"] == 4:
            message.then("mails", {"for": 4})
        return {"shipped": order["id"]}

    @post.handler("rejects", retry=NoRetry())
    def reject(body: object) -> None:
        raise ValueError("not wanted")

    post.worker(["orders"]).run(until_empty=True)
    post.publish_many("rejects", [{"country": "ES"}, {"country": "FR"}, {"country": "ES"}])
    post.worker(["rejects"]).run(until_empty=True)
    (letter, *_) = list(post.dead_letters("rejects"))
    post.redrive("rejects", ids=[letter.id])
    for number in range(12, 16):
        post.publish("orders", {"id": number}, key=f"order:{number}")
    post.publish("orders", {"id": 13, "replaced": True}, key="order:13", on_conflict="replace")
    post.publish("orders", {"id": 14, "again": True}, key="order:14")  # a duplicate
    post.publish("orders", {"id": 99}, delay=FAR, key="timer:99")
    post.publish("orders", {"id": 98}, delay=FAR)
    post.cancel("orders", key="order:15")
    post.publish("windows", 1, key="once", window=86_400)
    post.publish("windows", 2, key="once", window=86_400)
    # A message of a worker that never came back.
    holder = Waypost(url)
    leased = holder.receive("bodies", wait=1)
    assert leased.__enter__() is not None
    HELD.append((holder, leased))
    post.publish("paused", {"id": 1})
    post.pause("paused")
    post.publish("quiet", "no journal")
    post.save_schedule(
        "rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", missed=CatchUp(10), body={"a": 1}
    )
    post.save_schedule("tick", queue="ticks", every=3600, key="tick", body="tick", priority=8, group="clock")
    post.trigger_schedule("tick", queue="ticks")
    post.save_schedule("held", queue="ticks", cron="@daily", key="held")
    post.pause_schedule("held", queue="ticks")
    first = post.publish("steps", {"step": 1}, chain=True)
    post.publish("steps", {"step": "last"}, after=first)


#: Claims that stay open until the process ends.
HELD: list[Any] = []


def read(post: Waypost) -> dict[str, Any]:
    """Read everything back, as 0.1.0 does."""
    queues: dict[str, Any] = {}
    for queue in post.queues():
        messages = {
            state: [
                {"id": one.id, "key": one.key, "group": one.group, "priority": one.priority,
                 "headers": dict(one.headers), "body": plain(one.body), "deliveries": one.deliveries,
                 "attempts": one.attempts, "reason": one.reason, "error_type": one.error_type}
                for one in post.messages(queue, state)
            ]
            for state in ("ready", "delayed", "leased", "waiting", "dead", "done")
        }  # fmt: skip
        events = post.journal(queue, limit=1_000).events
        queues[queue] = {
            "messages": messages,
            "ledger": msgspec.to_builtins(post.ledger(queue)),
            "policy": msgspec.to_builtins(post.policy(queue)),
            "events": [[one.number, one.event, one.message_id, one.token, one.cause, one.reason] for one in events],
        }
    schedules = [
        {"queue": one.queue, "key": one.key, "paused": one.paused, "fires": one.fires} for one in post.schedules()
    ]
    return {"queues": queues, "schedules": schedules}


def plain(body: Any) -> Any:
    return {"bytes": body.decode("latin-1")} if isinstance(body, bytes) else body


def dump_valkey(url: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with redis.Redis.from_url(url.replace("valkey:", "redis:")) as server:
        for key in server.scan_iter(count=1000):
            kind = server.type(key)
            if kind == b"string":
                value: Any = bytes(server.get(key) or b"").decode("latin-1")
            elif kind == b"hash":
                value = [[a.decode("latin-1"), b.decode("latin-1")] for a, b in server.hgetall(key).items()]
            elif kind == b"list":
                value = [one.decode("latin-1") for one in server.lrange(key, 0, -1)]
            elif kind == b"set":
                value = [one.decode("latin-1") for one in server.smembers(key)]
            elif kind == b"zset":
                value = [[a.decode("latin-1"), repr(b)] for a, b in server.zrange(key, 0, -1, withscores=True)]
            else:
                assert kind == b"stream", kind
                value = [
                    [number.decode(), [[a.decode("latin-1"), b.decode("latin-1")] for a, b in fields.items()]]
                    for number, fields in server.xrange(key)
                ]
            found[key.decode("latin-1")] = [kind.decode(), server.pttl(key), value]
    return found


def write_gzip(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data, 9, mtime=0))


def main(folder: Path) -> None:
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store.db"

        url = f"sqlite:///{path}"
        with Waypost(url) as post:
            fill(post, url)
            expected["sqlite"] = read(post)
            copy = sqlite3.connect(path)
            copy.execute("VACUUM INTO ?", (str(Path(temporary) / "copy.db"),))
            copy.close()
            write_gzip(folder / "sqlite.db.gz", (Path(temporary) / "copy.db").read_bytes())
        lake = Path(temporary) / "lake"
        subprocess.run(
            [sys.executable, "-m", "waypost.cli.main", "pipeline", "run", "--store", url, "--lake", str(lake)],
            check=True,
        )  # fmt: skip
        with tarfile.open(folder / "lake.tar.gz", "w:gz") as archive:
            archive.add(lake, "lake")
        with ValkeyServer() as server, Waypost(server.url) as post:
            fill(post, server.url)
            expected["valkey"] = read(post)
            write_gzip(folder / "valkey.json.gz", json.dumps(dump_valkey(server.url)).encode())
        with PostgresServer() as database:
            url = database.url
            subprocess.run([sys.executable, "-m", "waypost.cli.main", "migrate", "--url", url], check=True)
            with Waypost(url) as post:
                fill(post, url)
                expected["postgres"] = read(post)
            program = next(Path(sys.prefix).rglob("pginstall18/bin/pg_dump"))
            dumped = subprocess.run(
                [program, "--inserts", "--no-owner", "--no-privileges", url], check=True, stdout=subprocess.PIPE
            ).stdout
            write_gzip(folder / "postgres.sql.gz", dumped)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
