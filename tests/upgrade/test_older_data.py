"""This release reads, hands out and settles what every older one wrote; their own code made the data.

Each folder of `releases/` has `make_data.py`, which ran with that release, what it wrote, and `expected.json`: what
that release itself reads of it.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import redis

from waypost import Dead, Message, Waypost
from waypost.cli.main import main
from waypost.errors import SchemaTooOld
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer, program_of
from waypost.values import MessageState

RELEASES = sorted(path.name for path in (Path(__file__).parent / "releases").iterdir() if path.is_dir())
STATES: tuple[MessageState, ...] = ("ready", "delayed", "leased", "waiting", "dead", "done")
STORES = ("sqlite", "valkey", "postgres")


def folder_of(release: str) -> Path:
    return Path(__file__).parent / "releases" / release


def read_gzip(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


@contextmanager
def sqlite_url(release: str, tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "store.db"
    path.write_bytes(read_gzip(folder_of(release) / "sqlite.db.gz"))
    yield f"sqlite:///{path}"


@contextmanager
def valkey_url(release: str, tmp_path: Path) -> Iterator[str]:
    with ValkeyServer() as server:
        with redis.Redis.from_url(server.url.replace("valkey:", "redis:")) as client:
            for key, (kind, ttl_ms, value) in json.loads(read_gzip(folder_of(release) / "valkey.json.gz")).items():
                restore(client, encode(key), kind, value)
                if ttl_ms > 0:
                    client.pexpire(encode(key), ttl_ms)
        yield server.url


def encode(text: str) -> bytes:
    return text.encode("latin-1")


def restore(client: redis.Redis, key: bytes, kind: str, value: Any) -> None:
    if kind == "string":
        client.set(key, encode(value))
    elif kind == "hash":
        client.hset(key, mapping={encode(name): encode(one) for name, one in value})
    elif kind == "list":
        client.rpush(key, *map(encode, value))
    elif kind == "set":
        client.sadd(key, *map(encode, value))
    elif kind == "zset":
        client.zadd(key, {encode(member): float(score) for member, score in value})
    else:
        for number, fields in value:
            client.xadd(key, cast(Any, {encode(name): encode(one) for name, one in fields}), id=number)


@contextmanager
def postgres_url(release: str, tmp_path: Path) -> Iterator[str]:
    with PostgresServer() as server:
        psql = program_of(server.wheel, "pginstall18/bin/psql")
        subprocess.run(
            [psql, "--quiet", "--set", "ON_ERROR_STOP=1", server.url],
            input=read_gzip(folder_of(release) / "postgres.sql.gz"), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with pytest.raises(SchemaTooOld, match="waypost migrate"), Waypost(server.url) as post:
            post.queues()
        assert main(["migrate", "--url", server.url]) == 0
        assert main(["migrate", "--check", "--url", server.url]) == 0
        with psycopg.connect(server.url) as connection:  # statistics of a restored database are those of an empty one
            connection.execute("ANALYZE")
        yield server.url


OPEN: dict[str, Callable[[str, Path], Any]] = {"sqlite": sqlite_url, "valkey": valkey_url, "postgres": postgres_url}


@pytest.fixture(params=[(release, store) for release in RELEASES for store in STORES], ids="-".join)
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Waypost, dict[str, Any]]]:
    """A client of this release on the data of an older one, and what that one read."""
    release, store = request.param
    expected = json.loads((folder_of(release) / "expected.json").read_text())[store]
    with OPEN[store](release, tmp_path) as url, Waypost(url) as post:
        yield post, expected


def plain(body: Any) -> Any:
    return {"bytes": body.decode("latin-1")} if isinstance(body, bytes) else body


def in_order(bodies: list[Any]) -> list[str]:
    """Bodies of any types, as JSON, sorted."""
    return sorted(json.dumps(one, sort_keys=True) for one in bodies)


def read_message(one: Any) -> dict[str, Any]:
    return {
        "id": one.id, "key": one.key, "group": one.group, "priority": one.priority, "headers": dict(one.headers),
        "body": plain(one.body), "deliveries": one.deliveries, "attempts": one.attempts, "reason": one.reason,
        "error_type": one.error_type,
    }  # fmt: skip


@pytest.mark.promise("STORE-7", "PUB-1")
def test_everything_that_an_older_release_wrote_is_read(older: tuple[Waypost, dict[str, Any]]) -> None:
    post, expected = older
    assert post.queues() == sorted(expected["queues"])
    for queue, known in expected["queues"].items():
        for state in STATES:
            found = [read_message(one) for one in post.messages(queue, state=state)]
            assert found == known["messages"][state], (queue, state)
        ledger = post.ledger(queue)
        assert {name: getattr(ledger, name) for name in known["ledger"]} == known["ledger"], queue
        assert (ledger.balance, ledger.unexplained) == (0, 0)
        events = [
            [one.number, one.event, one.message_id, one.token, one.cause, one.reason]
            for one in post.journal(queue, limit=1_000).events
        ]
        assert events == known["events"], queue
        policy, record = post.policy(queue), known["policy"]
        assert [policy.lease.total_seconds() * 1000 if policy.lease else None, policy.max_deliveries,
                policy.max_pending, policy.max_running, policy.journal, policy.dead_max, policy.completed] == [
            record[name] for name in ("lease_ms", "max_deliveries", "max_pending", "max_running", "journal", "dead_max",
                                      "completed_max")
        ]  # fmt: skip
    schedules = [
        {"queue": one.queue, "key": one.key, "paused": one.paused, "fires": one.fires} for one in post.schedules()
    ]
    assert schedules == expected["schedules"]
    done = expected["queues"]["orders"]["messages"]["done"][0]
    assert post.result("orders", done["id"]) == {"shipped": done["body"]["id"]}
    assert [one.event for one in post.history("orders", done["id"])] == ["published", "claimed", "done"]


@pytest.mark.promise("STORE-7")
def test_messages_of_an_older_release_are_handled_to_the_end(older: tuple[Waypost, dict[str, Any]]) -> None:
    post, expected = older
    handled: dict[str, list[Any]] = {}
    post.resume("paused")
    post.redrive("rejects")
    for key in ("tick", "rollup::cron:0 9 * * *:Europe/Madrid"):
        post.trigger_schedule(key)
    # A key of the older release is still in use, and a window still remembers.
    assert post.publish("orders", {"id": 12}, key="order:12").status == "duplicate"
    assert post.publish("windows", 3, key="once", window=86_400).status == "duplicate"
    assert post.cancel("orders", key="timer:99") == "cancelled"
    queues: list[str] = list(expected["queues"])
    for queue in queues:

        @post.handler(queue)
        def handle(body: Any, message: Message[Any]) -> None:
            handled.setdefault(message.queue, []).append(plain(body))
            if message.headers.get("kind") == "null":
                raise Dead("refused")

    post.worker(queues, scheduler=False).run(until_empty=True)
    bodies = [one["body"] for state in ("ready", "leased") for one in expected["queues"]["bodies"]["messages"][state]]
    assert in_order(handled["bodies"]) == in_order(bodies)
    assert [one["country"] for one in handled["rejects"]] == ["ES", "FR", "ES"]
    assert in_order(handled["steps"]) == in_order([{"step": 1}, {"step": "last"}])
    assert (len(handled["ticks"]), len(handled["reports"]), handled["paused"]) == (2, 1, [{"id": 1}])
    for queue in queues:
        ledger = post.ledger(queue)
        assert (ledger.balance, ledger.unexplained, ledger.ready, ledger.leased) == (0, 0, 0, 0), queue
    assert [one.reason for one in post.dead_letters("bodies")] == ["refused"]


@pytest.mark.promise("STORE-7", "SPARK-4")
@pytest.mark.parametrize("release", RELEASES)
def test_a_lake_of_an_older_release_is_converted(release: str, tmp_path: Path) -> None:
    from waypost.spark.lake.lake import Lake

    with tarfile.open(folder_of(release) / "lake.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    if release == "0.1.0":
        assert main(["pipeline", "upgrade", "--lake", str(tmp_path / "lake")]) == 0
    expected = json.loads((folder_of(release) / "expected.json").read_text())["sqlite"]["queues"]
    found = Lake(str(tmp_path / "lake")).arrow("bronze/journal").to_pylist()
    events = [
        [one["number"], one["event"], one["message_id"], one["token"], one["cause"], one["reason"]] for one in found
    ]
    assert in_order(events) == in_order([event for one in expected.values() for event in one["events"]])
