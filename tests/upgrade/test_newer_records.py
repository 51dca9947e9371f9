"""What a later release may add is passed on or refused by this one, and never misread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import redis

from waypost import Waypost, policy
from waypost.cli.main import main
from waypost.errors import InvalidPolicy, InvalidSchedule, SchemaTooNew
from waypost.release import DATA_VERSION
from waypost.release import VERSION as RELEASE
from waypost.schedule import rule
from waypost.spark.source.bulk import Bulk
from waypost.store.port import Draft, Heartbeat
from waypost.store.postgres import migrate
from waypost.store.sqlite import entries
from waypost.store.valkey.packing import STATE
from waypost.store.valkey.scripts import COUNTERS
from waypost.testing.bench import fresh_namespace

EXTENSION = b"\x00\x07planted"


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
def server(valkey_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(valkey_url.replace("valkey:", "redis:")) as client:
        yield client


@pytest.fixture
def post(valkey_url: str, namespace: str) -> Iterator[Waypost]:
    with Waypost(valkey_url, namespace=namespace) as client:
        yield client


def read_in_bulk(post: Waypost, queue: str) -> list[dict[str, Any]]:
    with Bulk(post._store) as bulk:
        batches = bulk.journal(queue, 0, bulk.bounds(queue)[1], ("number", "event", "message_id", "chain_id", "key"))
        return sorted((row for batch in batches for row in batch.to_pylist()), key=lambda row: row["number"])


# ---- Valkey: packed states -----------------------------------------------------------------------------------


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("chained", [False, True])
def test_the_extension_of_a_packed_state_is_passed_on(
    post: Waypost, server: Any, namespace: str, chained: bool
) -> None:
    first = post.publish("orders", 1, key="order:1")
    if chained:
        with post.receive("orders") as message:
            assert message is not None
            message.then("orders", 2, key="order:2")
    (waiting,) = post.messages("orders", state="ready")
    key = f"{{{namespace}:orders}}:state"
    state = server.hget(key, waiting.id)
    flags = STATE.unpack_from(state)[7] | 128
    server.hset(key, waiting.id, state[:37] + bytes([flags]) + state[38:] + EXTENSION)

    with post.receive("orders") as message:
        assert message is not None
        assert (message.id, message.key) == (waiting.id, waiting.key)
        message.retry(after=60)
    assert server.hget(key, waiting.id).endswith(EXTENSION)
    assert post.check("orders").damages == []
    assert post.reschedule("orders", id=waiting.id, delay=0) == "moved"
    with post.receive("orders", wait=20) as message:
        assert message is not None
        assert message.id == waiting.id
    history = post.history("orders", waiting.id)
    assert [event.event for event in history][-2:] == ["claimed", "done"]
    assert {event.key for event in history} == {waiting.key}
    events = post.journal("orders", limit=1_000).events
    assert [(event.number, event.event, event.chain_id) for event in events] == [
        (row["number"], row["event"], row["chain_id"]) for row in read_in_bulk(post, "orders")
    ]
    assert (post.ledger("orders").balance, first.status) == (0, "queued")


# ---- Valkey: the journal ---------------------------------------------------------------------------------------


def append_entry(server: Any, namespace: str, item: bytes, **fields: bytes) -> None:
    """Write one event behind the journal of a queue, as another release could."""
    key = f"{{{namespace}:orders}}:journal"
    ((last, _),) = server.xrevrange(key, count=1)
    number = int(last.split(b"-")[0]) + 1
    entry = (0).to_bytes(8, "big") + bytes(12) + (1).to_bytes(2, "big") + item
    server.xadd(key, {"e": entry, **fields}, id=f"{number}-0")
    counts = f"{{{namespace}:orders}}:queue"
    packed = msgspec.msgpack.decode(server.hget(counts, "counts"))
    packed[COUNTERS.index("journal_last")] = number
    server.hset(counts, "counts", msgspec.msgpack.encode(packed))


PUBLISHED = b"p" + (7).to_bytes(4, "big") + b"\x05" + b"0" * 24


@pytest.mark.promise("STORE-7")
def test_what_is_behind_the_events_of_an_entry_is_passed_over(post: Waypost, server: Any, namespace: str) -> None:
    post.publish("orders", 1)
    append_entry(server, namespace, PUBLISHED + b"a field of a later release", f=b"another field")
    post.publish("orders", 2)
    assert [event.event for event in post.journal("orders").events] == ["published"] * 3
    assert [row["event"] for row in read_in_bulk(post, "orders")] == ["published"] * 3


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize(
    "item",
    [b"?" + PUBLISHED[1:], b"S\xfa\x00" + b"0" * 24 + bytes(STATE.size), b"S\x01\xfa" + b"0" * 24 + bytes(STATE.size)],
    ids=["kind", "event", "cause"],
)
def test_an_event_of_a_later_release_is_an_error_and_not_a_guess(
    post: Waypost, server: Any, namespace: str, item: bytes
) -> None:
    post.publish("orders", 1)
    append_entry(server, namespace, item)
    for read in (lambda: post.journal("orders"), lambda: read_in_bulk(post, "orders")):
        with pytest.raises(SchemaTooNew, match="update waypost here"):
            read()
    # What is before it can be read, and the queue goes on.
    assert len(post.journal("orders", limit=1).events) == 1
    with post.receive("orders") as message:
        assert message is not None


def plant_in_sqlite(url: str, namespace: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    last, data = execute(path, f'SELECT last, data FROM "{namespace}_entry" ORDER BY last DESC LIMIT 1')[0]
    values = msgspec.msgpack.decode(data)
    values[1 + entries.COLUMNS.index("event")] = "planted"
    execute(path, f'UPDATE "{namespace}_entry" SET data = ? WHERE last = ?', msgspec.msgpack.encode(values), last)


def plant_in_postgres(url: str, namespace: str) -> None:
    with psycopg.connect(url) as connection:
        newest = f'(SELECT max(seq) FROM "{namespace}_entry")'
        connection.execute(f"""UPDATE "{namespace}_entry" SET event = 'planted' WHERE seq = {newest}""".encode())


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize(("store", "plant"), [("sqlite", plant_in_sqlite), ("postgres", plant_in_postgres)])
def test_a_named_event_of_a_later_release_is_an_error_too(
    store: str, plant: Callable[[str, str], None], request: pytest.FixtureRequest, namespace: str
) -> None:
    url = PLACES[store](request, namespace)
    with Waypost(url, namespace=namespace) as post:
        first, second = post.publish("orders", 1), post.publish("orders", 2)
        plant(url, namespace)
        for read in (
            lambda: post.journal("orders"), lambda: read_in_bulk(post, "orders"),
            lambda: post.history("orders", second.id),
        ):  # fmt: skip
            with pytest.raises(SchemaTooNew, match=r"up to number 2.*update waypost here"):
                read()
        # What is before it can be read, and the queue goes on.
        assert [event.message_id for event in post.journal("orders", limit=1).events] == [first.id]
        with post.receive("orders") as message:
            assert message is not None


@pytest.mark.promise("STORE-7")
def test_a_queue_that_needs_a_newer_layout_is_refused(post: Waypost, server: Any, namespace: str) -> None:
    post.publish("orders", 1)
    key = f"{{{namespace}:orders}}:queue"
    assert server.hget(key, "version") == b"%d" % DATA_VERSION
    server.hset(key, "version", DATA_VERSION + 1)
    before = server.hgetall(key)
    for use in (lambda: post.publish("orders", 2), lambda: post.ledger("orders"), lambda: post.policy("orders")):
        with pytest.raises(SchemaTooNew, match="update waypost here"):
            use()
    assert server.hgetall(key) == before
    assert post.publish("others", 1).status == "queued"


@pytest.mark.promise("STORE-7")
def test_a_queue_of_the_first_release_is_refused_there_after_a_write_of_this_one(
    post: Waypost, server: Any, namespace: str
) -> None:
    post.publish("orders", 1)
    key = f"{{{namespace}:orders}}:queue"
    server.hset(key, "version", 1)
    post.publish("orders", 2)
    assert server.hget(key, "version") == b"2"


# ---- SQLite ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with Waypost(f"sqlite:///{path}") as post:
        post.publish("orders", 1)
    return path


def execute(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(statement, values).fetchall()
        connection.commit()
    return found


@pytest.mark.promise("STORE-7")
def test_added_columns_tables_and_journal_fields_of_a_file_are_passed_over(file: Path) -> None:
    execute(file, "ALTER TABLE wp_message ADD COLUMN planted TEXT")
    execute(file, "ALTER TABLE wp_queue ADD COLUMN planted INTEGER NOT NULL DEFAULT 0")
    execute(file, "CREATE TABLE wp_planted (number INTEGER PRIMARY KEY)")
    ((data,),) = execute(file, "SELECT data FROM wp_entry")
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(data), "planted"])
    execute(file, "UPDATE wp_entry SET data = ?", longer)
    with Waypost(f"sqlite:///{file}") as post:
        post.publish("orders", 2)
        assert [message.body for message in post.messages("orders", state="ready")] == [1, 2]
        assert [event.event for event in post.journal("orders").events] == ["published"] * 2
        assert [row["event"] for row in read_in_bulk(post, "orders")] == ["published"] * 2


@pytest.mark.promise("STORE-7")
def test_a_setting_or_a_schema_of_a_later_release_is_refused(file: Path) -> None:
    ((settings,),) = execute(file, "SELECT policy FROM wp_queue")
    newer = msgspec.json.encode({**msgspec.json.decode(settings), "planted": 1})
    execute(file, "UPDATE wp_queue SET policy = ?", newer)
    with Waypost(f"sqlite:///{file}") as post:
        with pytest.raises(SchemaTooNew, match="update waypost"):
            post.publish("orders", 2)
        assert post.publish("others", 1).status == "queued"
    execute(file, "UPDATE wp_meta SET value = value + 1 WHERE name = 'schema'")
    with pytest.raises(SchemaTooNew, match="update waypost"):
        Waypost(f"sqlite:///{file}").open()


# ---- settings that the release before does not know ---------------------------------------------------------------


def sqlite_place(request: pytest.FixtureRequest, namespace: str) -> str:
    return f"sqlite:///{request.getfixturevalue('tmp_path') / 'store.db'}"


def valkey_place(request: pytest.FixtureRequest, namespace: str) -> str:
    return str(request.getfixturevalue("valkey_url"))


def postgres_place(request: pytest.FixtureRequest, namespace: str) -> str:
    url = str(request.getfixturevalue("postgres_url"))
    migrate(url, namespace=namespace)
    return url


PLACES: dict[str, Callable[[pytest.FixtureRequest, str], str]] = {
    "sqlite": sqlite_place, "valkey": valkey_place, "postgres": postgres_place,
}  # fmt: skip


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("store", PLACES)
def test_new_settings_wait_for_the_end_of_an_upgrade(
    store: str,
    request: pytest.FixtureRequest,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = PLACES[store](request, namespace)
    monkeypatch.setattr(policy, "NEW_SETTINGS", frozenset({"hide_bodies"}))
    command = ("migrate", "--url", url, "--namespace", namespace)
    with Waypost(url, namespace=namespace) as post:
        post.publish("orders", 1)
        post.save_record("waypost-upgrade", "finished", b"%d" % (DATA_VERSION - 1))
        with pytest.raises(InvalidPolicy, match=r"does not know hide_bodies.*--finish"):
            post.configure("orders", hide_bodies=True)
        post.configure("orders", lease=5)
        # The register shows that a process of another release is there.
        for name, version in (("old:1", "0.0.9"), ("new:1", RELEASE)):
            post._run(post._context.attempt(post._store.heartbeat(Heartbeat(name, version=version), 60_000)))
        for shows in ("workers", "doctor"):
            main([shows, *command[1:]])
            assert f"1 worker of 0.0.9, 1 worker of {RELEASE}" in " ".join(capsys.readouterr().out.split())
        assert main([*command, "--finish"]) == 1
        assert "worker old:1 of release 0.0.9 is registered" in capsys.readouterr().out
        post._run(post._context.attempt(post._store.unregister("old:1")))
        assert main([*command, "--finish"]) == 0
        assert post.configure("orders", hide_bodies=True).hide_bodies is True
        # A newer release has finished: an older one does not take that back.
        post.save_record("waypost-upgrade", "finished", b"%d" % (DATA_VERSION + 1))
        assert main([*command, "--finish"]) == 0
        assert post.records("waypost-upgrade").records[0].data == b"%d" % (DATA_VERSION + 1)


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("store", PLACES)
def test_new_settings_of_groups_and_fields_of_schedules_wait_too(
    store: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = PLACES[store](request, namespace)
    monkeypatch.setattr(policy, "NEW_GROUP_SETTINGS", frozenset({"weight"}))
    monkeypatch.setattr(rule, "NEW_FIELDS", frozenset({"overlap"}))
    with Waypost(url, namespace=namespace) as post:
        post.save_schedule("rollup", queue="reports", every=60)
        post.configure("orders", fair=True)
        post.save_record("waypost-upgrade", "finished", b"%d" % (DATA_VERSION - 1))
        with pytest.raises(InvalidPolicy, match=r"does not know weight.*--finish"):
            post.configure_group("orders", "a", weight=2)
        with pytest.raises(InvalidSchedule, match=r"does not know overlap.*--finish"):
            post.save_schedule("rollup", queue="reports", every=60, overlap="skip")
        post.configure_group("orders", "a", max_running=2)
        post.save_schedule("rollup", queue="reports", every=30)
        assert main(["migrate", "--url", url, "--namespace", namespace, "--finish"]) == 0
        assert post.configure_group("orders", "a", weight=2) is True
        assert post.save_schedule("rollup", queue="reports", every=60, overlap="skip").overlap == "skip"


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("store", PLACES)
def test_a_new_store_has_nothing_to_wait_for(
    store: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = PLACES[store](request, namespace)
    monkeypatch.setattr(policy, "NEW_SETTINGS", frozenset({"hide_bodies"}))
    with Waypost(url, namespace=namespace) as post:
        assert post.configure("orders", hide_bodies=True).hide_bodies is True
        assert post.configure("others", hide_bodies=True).hide_bodies is True


# ---- envelopes ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-1", "STORE-7")
@pytest.mark.parametrize("store", PLACES)
def test_a_newer_envelope_stays_for_a_newer_worker(store: str, request: pytest.FixtureRequest, namespace: str) -> None:
    url = PLACES[store](request, namespace)
    handled: list[Any] = []
    with Waypost(url, namespace=namespace) as post:
        post.configure("orders", max_deliveries=1, journal="full")
        draft = post.publish("others", 0)
        envelope = b"\xff" + draft.id.encode() + b"whatever comes after version one"
        newer = Draft(draft.id, envelope, journal_copy=envelope)
        post._run(
            post._context.operate_and_wake(
                "orders", lambda operation: post._store.publish("orders", [newer], operation)
            )
        )
        post.publish("orders", "plain")

        @post.handler("orders")
        def handle(body: Any) -> None:
            handled.append(body)

        post.worker(["orders"], scheduler=False).run(until_empty=True)
        (left,) = post.messages("orders", state="delayed")
        assert (left.id, left.deliveries) == (draft.id, 0)
        assert (handled, list(post.dead_letters("orders"))) == (["plain"], [])
        assert "snoozed" in [event.event for event in post.history("orders", draft.id)]
        assert {row["event"] for row in read_in_bulk(post, "orders")} >= {"published", "snoozed"}
        assert post.ledger("orders").balance == 0
