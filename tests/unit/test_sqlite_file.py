"""The file itself: who owns it, and what happens when it cannot be used or is full."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.errors import (
    ConfigurationError,
    ForeignData,
    InvalidInput,
    InvalidName,
    SchemaTooNew,
    SchemaTooOld,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from waypost.identity import Session
from waypost.store.port import Call, Draft, Store
from waypost.store.sqlite import SqliteStore, shrink
from waypost.store.sqlite.connection import check_library
from waypost.store.sqlite.executor import SqliteExecutor
from waypost.store.sqlite.schema import ADDED, ADDED_INDEXES, ADDED_TABLES, TABLES, Spelling, prefix_of
from waypost.testing.clock import ClockTime
from waypost.values import Published, Settlement


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


@pytest.fixture
def connected(path: Path) -> Iterator[Callable[..., tuple[SqliteStore, SqliteExecutor]]]:
    made: list[SqliteExecutor] = []

    def connect(namespace: str = "wp") -> tuple[SqliteStore, SqliteExecutor]:
        store = SqliteStore(path, namespace=namespace)
        made.append(store.connect(start_timeout=3))
        return store, made[-1]

    yield connect
    for executor in made:
        executor.close()


def contents(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def publish(store: Store, executor: SqliteExecutor, session: Session, count: int, body: bytes = b"x") -> None:
    drafts = [Draft(id, body) for id in session.message_ids(count)]
    executor.run(store.publish("orders", drafts, session.operation("orders")))


# ---- the owner of the file ------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-3", "STORE-5")
def test_a_path_that_is_no_file_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigurationError, match="memory://"):
        SqliteStore(":memory:")
    with pytest.raises(ConfigurationError, match="not a file"):
        SqliteStore("")


@pytest.mark.promise("STORE-3")
def test_a_relative_path_stays_the_same_file_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("orders.db")
    executor = store.connect(start_timeout=3)
    try:
        publish(store, executor, Session(ClockTime()), 1)
        monkeypatch.chdir(elsewhere)
        assert executor.run(store.queues()) == ["orders"]
        with store.transactions.begin(lambda: executor) as connection:
            assert connection.execute("SELECT count(*) FROM wp_message").fetchone() == (1,)
    finally:
        executor.close()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.promise("STORE-3")
def test_a_library_that_is_too_old_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"3\.34\.1 is too old, waypost needs 3\.35\.0"):
        check_library((3, 34, 1))


@pytest.mark.promise("STORE-3", "SEE-6")
def test_the_error_of_a_missing_directory_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="create it first"):
        SqliteStore(tmp_path / "nowhere" / "orders.db").connect(start_timeout=1)
    with pytest.raises(StoreUnavailable, match="is a directory"):
        SqliteStore(tmp_path).connect(start_timeout=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("STORE-3", "SEE-6")
def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    path.write_text("the quarterly figures, without a copy " * 40)
    before = path.read_bytes()
    with pytest.raises(ForeignData, match="not a SQLite database"):
        SqliteStore(path).connect(start_timeout=1)
    assert path.read_bytes() == before


@pytest.mark.promise("STORE-3")
@pytest.mark.parametrize("statement", ["CREATE TABLE wp_message (id)", "CREATE TABLE WP_META (name, value)"])
def test_foreign_tables_in_our_place_are_left_alone(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    before = path.read_bytes()
    with pytest.raises(ForeignData, match=r"not made by waypost: wp_me.* choose another namespace"):
        SqliteStore(path).connect(start_timeout=1)
    assert path.read_bytes() == before


@pytest.mark.promise("STORE-3")
def test_the_owners_own_tables_are_left_alone(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE message (body); INSERT INTO message VALUES ('mine');")
    connected()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT body FROM message").fetchall() == [("mine",)]


@pytest.mark.promise("STORE-3", "SEE-6")
@pytest.mark.parametrize(("version", "error"), [(99, SchemaTooNew), (0, SchemaTooOld)])
def test_the_schema_of_another_release_is_left_alone(
    path: Path,
    connected: Callable[..., tuple[SqliteStore, SqliteExecutor]],
    version: int,
    error: type[StoreError],
) -> None:
    connected()[1].close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE wp_meta SET value = ? WHERE name = 'schema'", (version,))
    before = contents(path)
    with pytest.raises(error, match=f"schema {version}"):
        SqliteStore(path).connect(start_timeout=1)
    assert contents(path) == before


@pytest.mark.promise("STORE-3", "BOX-5")
def test_a_table_that_lost_a_column_is_named_and_one_with_more_is_fine(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]
) -> None:
    store, executor = connected()
    executor.close()
    with closing(sqlite3.connect(path)) as connection:
        for table in TABLES:
            connection.execute(f"ALTER TABLE wp_{table} ADD COLUMN theirs TEXT")
    store, executor = connected()
    publish(store, executor, Session(ClockTime()), 3)
    assert executor.run(store.stats("orders")).ledger.ready == 3
    executor.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE wp_journal DROP COLUMN run_ms")
    with pytest.raises(ForeignData, match=r"wp_journal .* lacks run_ms"):
        store.connect(start_timeout=1)


@pytest.mark.promise("STORE-3", "PUB-7")
@pytest.mark.parametrize("within", [False, True], ids=["opened", "in a transaction"])
def test_a_file_of_the_first_release_gets_the_tables_and_columns_that_it_lacks(path: Path, within: bool) -> None:
    with Waypost(f"sqlite:///{path}") as post:
        post.publish("orders", 1)
    with closing(sqlite3.connect(path)) as connection:
        for index in ADDED_INDEXES:
            connection.execute(f'DROP INDEX "wp_{index}"')
        for table, column in ADDED:
            connection.execute(f"ALTER TABLE wp_{table} DROP COLUMN {column}")
        for table in ADDED_TABLES:
            connection.execute(f"DROP TABLE wp_{table}")
        if within:
            connection.execute("BEGIN IMMEDIATE")
            Waypost(f"sqlite:///{path}").publish("orders", "within", transaction=connection)
            connection.rollback()
    with Waypost(f"sqlite:///{path}") as post:
        post.publish("orders", 2)
        assert (post.ledger("orders").ready, post.ledger("orders").over_cap) == (2, 0)
        assert post.save_record("notes", "one", b"x").saved
        post.configure("orders", order="group")
        post.publish("orders", 3, group="g")
        assert [group.ready for group in post.groups("orders").groups] == [2, 1]
    with closing(sqlite3.connect(path)) as connection:
        for table, column in ADDED:
            assert column in {row[1] for row in connection.execute(f"PRAGMA table_info(wp_{table})")}


@pytest.mark.promise("STORE-3", "QUEUE-2")
def test_the_first_release_can_read_settings_that_it_knows(path: Path) -> None:
    def stored() -> dict[str, object]:
        with closing(sqlite3.connect(path)) as connection:
            return dict(json.loads(connection.execute("SELECT policy FROM wp_queue").fetchone()[0]))

    with Waypost(f"sqlite:///{path}") as post:
        post.configure("orders", hide_bodies=True, tracebacks=False)
        assert (stored()["hide_bodies"], stored()["no_tracebacks"]) == (True, True)
        post.configure("orders", hide_bodies=False, tracebacks=True, lease=5)
        assert not {"hide_bodies", "no_tracebacks"} & set(stored())


# ---- namespaces ------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-6")
def test_similar_namespaces_never_meet(connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]) -> None:
    names = ("wp", "WP", "Wp", "wP", "wp_message", "wp-x", "sqlite", "SQLite", "sqlite_a")
    session = Session(ClockTime())
    for count, name in enumerate(names, 1):
        store, executor = connected(name)
        publish(store, executor, session, count)
    for count, name in enumerate(names, 1):
        store, executor = connected(name)
        assert executor.run(store.stats("orders")).ledger.ready == count


@pytest.mark.promise("STORE-6")
def test_table_names_are_prefixed_and_validated(path: Path) -> None:
    assert len({prefix_of(name) for name in ("a", "A", "a_b", "aB", "sqlite", "sqlite_x")}) == 6
    assert Spelling("shop")["SELECT 1 FROM {message} INDEXED BY {message:ready}"] == (
        'SELECT 1 FROM "shop_message" INDEXED BY "shop_message:ready"'
    )
    with pytest.raises(InvalidName):
        SqliteStore(path, namespace='x"; DROP TABLE wp_message; --')


# ---- a full file -----------------------------------------------------------------------------------------------


def limit_pages(executor: SqliteExecutor, more: int) -> None:
    with executor._writer.use() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + more}")


def fill(store: SqliteStore, executor: SqliteExecutor, session: Session, body: bytes) -> int:
    """Publish until the file is full, and return how many messages were acknowledged."""
    published = 0
    for count in (50, 1):
        refusals: list[StoreFull] = []
        while not refusals:
            try:
                publish(store, executor, session, count, body)
                published += count
            except StoreFull as error:
                refusals.append(error)
        assert "nothing was written" in str(refusals[0])
    return published


@pytest.mark.promise("STORE-3", "SEE-6")
@pytest.mark.parametrize("size", [1, 3_000])
def test_a_full_file_keeps_nothing_half_written_and_can_be_drained(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]], size: int
) -> None:
    store, executor = connected()
    session = Session(ClockTime())
    limit_pages(executor, 300)
    published = fill(store, executor, session, b"x" * size)
    ledger = executor.run(store.stats("orders")).ledger
    assert (ledger.published, ledger.ready, ledger.balance) == (published, published, 0)
    settled = 0
    while settled < published:
        claimed = executor.run(store.claim("orders", 100, session.operation("orders"), worker="w"))
        settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases]
        woken = executor.run(store.settle("orders", settlements, session.operation("orders")))
        assert set(woken.result) == {"done"}
        settled += len(settlements)
    ledger = executor.run(store.stats("orders")).ledger
    assert (ledger.done, ledger.ready, ledger.balance) == (published, 0, 0)
    with executor._writer.use() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.promise("STORE-3")
def test_a_drained_file_accepts_messages_again(connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]) -> None:
    store, executor = connected()
    session = Session(ClockTime())
    limit_pages(executor, 200)
    body = b"x" * 20_000
    published = fill(store, executor, session, body)
    claimed = executor.run(store.claim("orders", published, session.operation("orders"), worker="w"))
    settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases]
    executor.run(store.settle("orders", settlements, session.operation("orders")))
    publish(store, executor, session, 1, body)
    assert executor.run(store.stats("orders")).ledger.ready == 1


# ---- what is written -------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-3", "LEASE-3")
def test_no_step_but_publish_and_the_end_of_a_message_touches_its_envelope(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]
) -> None:
    store, executor = connected()
    session = Session(ClockTime())
    with executor._writer.use() as connection:
        connection.execute(
            "CREATE TRIGGER guard BEFORE UPDATE ON wp_envelope BEGIN SELECT raise(ABORT, 'touched'); END"
        )
    publish(store, executor, session, 1, b"x" * 100_000)
    for outcome in ("retry", "release", "snooze", "dead"):
        (lease,) = executor.run(store.claim("orders", 1, session.operation("orders"), worker="w")).leases
        settlement = Settlement(lease.id, lease.token, lease.nonce, outcome)
        executor.run(store.settle("orders", [settlement], session.operation("orders")))
    assert executor.run(store.stats("orders")).ledger.dead_kept == 1


@pytest.mark.promise("STORE-3")
def test_acknowledged_messages_are_on_disk(connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]) -> None:
    _, executor = connected()
    with executor._writer.use() as connection:
        modes = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]


@pytest.mark.promise("STORE-3")
def test_reads_do_not_wait_for_a_writer(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]
) -> None:
    store, executor = connected()
    session = Session(ClockTime(store.clock))
    publish(store, executor, session, 1)
    id = executor.run(store.peek("orders", "ready", 1)).messages[0].id
    reads: list[Call[Any]] = [
        store.time(), store.stats("orders"), store.queues(), store.policy("orders"), store.workers(),
        store.journal("orders", 0, 10), store.trace("orders", id), store.result("orders", id),
        store.schedules("orders"), store.scheduled(), store.schedules_changed("orders"), store.outgoing("orders", 1),
    ]  # fmt: skip
    # It waits for no lock longer than SQLite itself does.
    impatient = SqliteExecutor(
        str(path), store.spelling, store.clock, replay_ttl_ms=store.replay_ttl_ms, busy_budget_seconds=0
    )
    impatient.start(3)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable):
            publish(store, impatient, session, 1)
        for read in reads:
            impatient.run(read)
    impatient.close()


@pytest.mark.promise("STORE-3")
def test_an_invalid_cursor_is_refused(
    connected: Callable[..., tuple[SqliteStore, SqliteExecutor]],
) -> None:
    store, executor = connected()
    for cursor in ("nonsense", "[1]", "{}"):
        with pytest.raises(InvalidInput, match="start again without it"):
            executor.run(store.peek("orders", "ready", 10, cursor=cursor))


@pytest.mark.promise("STORE-3", "STORE-5")
def test_a_closed_connection_raises_in_sync_and_async(path: Path) -> None:
    store: Store = SqliteStore(path)
    executor = store.connect(start_timeout=3)
    executor.close()
    executor.close()
    with pytest.raises(StoreUnavailable, match="connect again"):
        executor.run(store.queues())

    async def awaited() -> None:
        executor = await store.connect_async(start_timeout=3)
        assert await executor.run(store.queues()) == []
        await executor.close()
        await executor.close()
        with pytest.raises(StoreUnavailable, match="connect again"):
            await executor.run(store.queues())

    asyncio.run(awaited())


@pytest.mark.promise("PUB-11", "LEASE-14")
def test_publishes_that_a_close_finds_in_line_fail_at_once(path: Path) -> None:
    async def awaited() -> list[Published | BaseException]:
        post = AsyncWaypost(f"sqlite:///{path}")
        await post.open()
        publishes = [asyncio.ensure_future(post.publish("orders", number)) for number in range(9)]
        await asyncio.sleep(0)
        await post.close()
        # The retry budget of 120 s would let them wait for a connection that does not come back.
        return await asyncio.wait_for(asyncio.gather(*publishes, return_exceptions=True), 60)

    results = asyncio.run(awaited())
    closed = [one for one in results if not isinstance(one, Published)]
    assert closed
    assert {type(one).__name__ for one in closed} == {"ConnectionClosed"}
    assert all(isinstance(one, StoreUnavailable) and "connect again" in str(one) for one in closed)


@pytest.mark.promise("CHAIN-2")
def test_an_unfinished_chain_to_which_the_release_before_gave_an_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "chains.db"
    with Waypost(f"sqlite:///{path}") as post:
        first = post.publish("orders", 1, chain=True, delay=3600)
        post.publish("reports", 2, after=[first])
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE wp_chain SET until_ms = 1")
        for _ in range(3):
            post.publish("others", 3, chain=True)
        assert post.cancel("orders", id=first.id) == "cancelled"
        (letter,) = post.dead_letters("reports")
    assert letter.reason == "blocker_failed"


# ---- free pages ----------------------------------------------------------------------------------------------


def publish_much(post: Waypost) -> None:
    """Publish 8 MB."""
    for _ in range(4):
        post.publish_many("orders", ["x" * 2_000] * 1_000)


def free_pages_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


@pytest.mark.promise("STORE-3")
def test_a_file_shrinks_when_its_messages_are_done(path: Path) -> None:
    with Waypost(f"sqlite:///{path}") as post:
        publish_much(post)

        @post.handler("orders", batch=500)
        def handle(bodies: list[str]) -> None:
            pass

        with post.worker():
            until(lambda: post.ledger("orders").done == 4_000, "the last message")
            until(lambda: free_pages_of(path) <= shrink.FREE_PAGES_KEPT, "a file without free pages")
            until(lambda: path.stat().st_size < 5_000_000, "a smaller file")
        assert post.ledger("orders").done == 4_000


@pytest.mark.promise("STORE-3")
def test_only_calls_that_find_nothing_to_do_shrink_a_file(
    path: Path, connected: Callable[..., tuple[SqliteStore, SqliteExecutor]]
) -> None:
    store, executor = connected()
    with Waypost(store=store) as post:
        publish_much(post)
        assert post.purge("orders") == 4_000
        free = free_pages_of(path)
        assert free > shrink.FREE_PAGES_MAX
        session = Session(ClockTime())
        publish(store, executor, session, 1)
        assert executor.run(store.claim("orders", 1, session.operation("orders"), worker="w")).leases
        assert executor._shrinker._thread is None
        assert not executor.run(store.claim("orders", 1, session.operation("orders"), worker="w")).leases
        until(lambda: free_pages_of(path) < free, "a step")
        executor.close()
        assert executor._shrinker._thread is not None
        assert not executor._shrinker._thread.is_alive()
        left = free_pages_of(path)
    assert free_pages_of(path) == left


@pytest.mark.promise("STORE-3")
def test_a_file_of_the_user_is_left_as_it_is_and_doctor_advises_a_vacuum(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE shop (n)")
    store = SqliteStore(path)
    with Waypost(store=store) as post:
        publish_much(post)
        post.purge("orders")
        free = free_pages_of(path)
        with post.receive("orders") as message:
            assert message is None
        (found,) = [one for one in store.checkup(None).check_server([]) if one.check == "free"]
        assert "VACUUM" in str(found)
        assert free_pages_of(path) == free
