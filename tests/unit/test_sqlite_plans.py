"""Every statement finds its rows by an index: a queue may hold millions, and a step must not read them all."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sqlite_program import STATES, Pair
from waypost.identity import Session
from waypost.policy import REPLAY_MAX
from waypost.store.port import Draft
from waypost.store.sqlite import SqliteStore
from waypost.store.sqlite.executor import SqliteExecutor
from waypost.testing.clock import ClockTime, ManualClock
from waypost.values import Lease, Settlement

#: One row per queue, one row in all, or a parameter: scanned whole, and never long.
SHORT = (
    "wp_queue", "wp_meta", "wp_reserve", "json_each", "j VIRTUAL TABLE", "j", "(subquery", "line", "CONSTANT ROW",
)  # fmt: skip
#: Statements that read all of something, by a part of each: a check of the whole queue, the leased messages when an
#: order is switched on, the groups of a full queue that drops from the longest.
WHOLE = ("GROUP BY state", 'rank IS NULL GROUP BY "group"', "ORDER BY ready DESC")
#: Indexes that find at most a handful of rows: sorting those costs nothing.
FEW = ('"wp_message:id"', '"wp_message:owner"', '"wp_message:parked"', '"wp_completed:id"')


def executor_of(pair: Pair) -> SqliteExecutor:
    executor = pair.executors[1]
    assert isinstance(executor, SqliteExecutor)
    return executor


def record_statements(executor: SqliteExecutor) -> set[str]:
    """Return a set that collects the statements of this executor from now on, without their values."""
    statements: set[str] = set()

    def record_statement(statement: str) -> None:
        shape = re.sub(r"'(?:[^']|'')*'|x'[0-9A-Fa-f]*'", "''", statement, flags=re.IGNORECASE)
        shape = re.sub(r"(?<=[ (=,-])\d{2,}", "7", shape)
        shape = re.sub(r"VALUES.*", "", shape)
        if shape not in shapes:
            shapes.add(shape)
            statements.add(statement)

    shapes: set[str] = set()
    for context in (executor._writer, executor._reader):
        with context.use() as connection:
            connection.set_trace_callback(record_statement)
    return statements


def scans(connection: sqlite3.Connection, statement: str) -> list[str]:
    """Return the steps of a statement's plan that scan a whole table, or sort what an index has in order."""
    plan = [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
    few = any(index in statement for index in FEW) or "json_each" in statement
    sorts = [] if few else [step for step in plan if "TEMP B-TREE" in step]
    return sorts + [step for step in plan if step.startswith("SCAN") and not step[5:].startswith(SHORT)]


@pytest.mark.promise("STORE-3", "SEE-5")
def test_no_statement_of_any_verb_scans_a_whole_table(tmp_path: Path) -> None:
    pair = Pair(lambda clock: SqliteStore(tmp_path / "plans.db", clock=clock), seed=1)
    executor = executor_of(pair)
    statements = record_statements(executor)
    for _ in range(250):
        queue = pair.step()
        filters = {name: pair.random.choice((None, None, "x")) for name in ("id", "key", "group", "reason")}
        for state in STATES:
            page = executor.run(pair.stores[1].peek(queue, state, 2, **filters))
            page = executor.run(pair.stores[1].peek(queue, state, 1))
            if page.cursor is not None:
                executor.run(pair.stores[1].peek(queue, state, 2, cursor=page.cursor))
        executor.run(pair.stores[1].stats(queue, minutes=5))
        executor.run(pair.stores[1].journal(queue, 0, 10))
        executor.run(pair.stores[1].trace(queue, "500"))
        (located,) = pair.stores[1].locate(["orders", "billing"], "500", in_journals=True)
        executor.run(located)
    with executor._writer.use() as connection:
        connection.set_trace_callback(None)
        traced = [
            statement for statement in statements if statement.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")
        ]
        found = {statement: steps for statement in traced if (steps := scans(connection, statement))}
    pair.close()
    assert len(traced) > 60
    assert found == {}


@pytest.mark.promise("STORE-3", "QUEUE-5", "QUEUE-6", "QUEUE-7")
def test_no_statement_about_groups_scans_a_whole_table(tmp_path: Path) -> None:
    pair = Pair(lambda clock: SqliteStore(tmp_path / "plans.db", clock=clock), seed=1, groups=("g", "h", "ü"))
    executor, store = executor_of(pair), pair.stores[1]
    statements = record_statements(executor)
    for at in range(150):
        queue = pair.step()
        if at % 5:
            continue
        pair.check(queue)
        for group in (None, "g"):
            page = executor.run(store.peek(queue, "ready", 1, group=group))
            while page.cursor is not None:
                page = executor.run(store.peek(queue, "ready", 3, cursor=page.cursor, group=group))
    with executor._writer.use() as connection:
        connection.set_trace_callback(None)
        traced = [
            statement for statement in statements if statement.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")
        ]
        found = {
            statement: steps
            for statement in traced
            if (steps := scans(connection, statement)) and not any(part in statement for part in WHOLE)
        }
    pair.close()
    assert sum("wp_group" in statement for statement in traced) > 20
    assert found == {}


def steps_of(connection: sqlite3.Connection, work: Callable[[], object]) -> int:
    """Return how many instructions of SQLite's virtual machine a piece of work takes, in hundreds."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    connection.set_progress_handler(count, 100)
    work()
    connection.set_progress_handler(None, 100)
    return counted[0]


@pytest.mark.promise("STORE-3")
def test_a_publish_a_claim_and_the_stats_cost_the_same_in_a_long_queue(tmp_path: Path) -> None:
    costs = []
    for depth in (100, 20_000):
        store = SqliteStore(tmp_path / f"{depth}.db", clock=ManualClock())
        pair = Pair(lambda clock, store=store: store)  # type: ignore[misc]
        executor = executor_of(pair)
        for start in range(0, depth, 500):
            count = min(500, depth - start)
            drafts = [Draft(f"id-{start + n:021}", b"x", delay_ms=n % 2 * 1_000_000) for n in range(count)]
            executor.run(store.publish("orders", drafts, pair.operation("orders")))
        verbs = (
            store.publish("orders", [Draft("id-new", b"x", key="k", priority=9)], pair.operation("orders")),
            store.claim("orders", 10, pair.operation("orders"), worker="w"),
            store.stats("orders"),
        )
        cost = []
        for verb in verbs:
            context = executor._writer if verb.name != "stats" else executor._reader  # the one that will run it
            with context.use() as connection:
                pass
            cost.append(steps_of(connection, lambda verb=verb, executor=executor: executor.run(verb)))  # type: ignore[misc]
        costs.append(cost)
        pair.close()
    short, long = costs
    assert all(many <= few + few // 2 + 5 for few, many in zip(short, long, strict=True)), costs


@pytest.mark.promise("STORE-3", "QUEUE-5", "QUEUE-6")
@pytest.mark.parametrize("settings", [{"fair": True}, {"order": "group"}, {"group_max_running": 2}], ids=str)
def test_a_claim_and_its_settle_cost_the_same_with_many_groups(tmp_path: Path, settings: dict[str, Any]) -> None:
    costs = []
    # Few groups, many groups, and many messages in each of a few groups.
    for groups, depth in ((50, 200), (5_000, 5_000), (50, 5_000)):
        store = SqliteStore(tmp_path / f"{groups}-{depth}.db", clock=ManualClock())
        pair = Pair(lambda clock, store=store: store)  # type: ignore[misc]
        executor = executor_of(pair)
        executor.run(store.configure("orders", settings))
        for start in range(0, depth, 500):
            drafts = [
                Draft(f"id-{start + n:021}", b"x", group=f"g{(start + n) % groups}") for n in range(min(500, depth))
            ]
            executor.run(store.publish("orders", drafts[: depth - start], pair.operation("orders")))
        with executor._writer.use() as connection:
            pass
        # Groups that cannot go on cost nothing: they have left the line.
        leases = executor.run(store.claim("orders", 40, pair.operation("orders"), worker="w")).leases
        assert len(leases) == 40
        done = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases[:10]]
        cost = []
        for verb in (
            store.claim("orders", 5, pair.operation("orders"), worker="w"),
            store.settle("orders", done, pair.operation("orders")),
            store.publish("orders", [Draft("id-new", b"x", group="g1")], pair.operation("orders")),
        ):
            cost.append(steps_of(connection, lambda verb=verb, executor=executor: executor.run(verb)))  # type: ignore[misc]
        costs.append(cost)
        pair.close()
    few, *others = costs
    for many in others:
        assert all(more <= less + less // 2 + 5 for less, more in zip(few, many, strict=True)), costs


@pytest.mark.promise("STORE-3", "PUB-3")
def test_the_memory_of_repeats_and_windows_is_bounded(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(tmp_path / "bounded.db", clock=clock, replay_ttl_ms=60_000)
    pair = Pair(lambda _: store)
    pair.clock = clock
    executor = executor_of(pair)
    for n in range(3 * REPLAY_MAX):
        draft = Draft(f"id-{n:021}", b"x", key=f"k{n}", window_ms=100, forwarded=True)
        executor.run(store.publish("orders", [draft], pair.operation("orders")))
        clock.advance_ms(50)
    with executor._writer.use() as connection:

        def count(table: str) -> int:
            return int(connection.execute(f"SELECT count(*) FROM wp_{table}").fetchone()[0])

        assert count("replay") <= REPLAY_MAX
        assert count("window") < 10
        assert count("session") == 1
    clock.advance(24 * 3600)
    operation = pair.operation("orders")._replace(session=b"another1")
    executor.run(store.publish("orders", [Draft("id-last", b"x", forwarded=True)], operation))
    with executor._writer.use() as connection:
        assert count("session") == 1
        assert count("replay") == 1
        assert count("arrival") == 3 * REPLAY_MAX + 1 - 10
    pair.close()


@pytest.mark.promise("STORE-3")
def test_a_step_of_one_message_has_few_statements(tmp_path: Path) -> None:
    store, session = SqliteStore(tmp_path / "store.db"), Session(ClockTime())
    with closing(store.connect(start_timeout=3)) as executor:

        def publish() -> Any:
            return store.publish("orders", [Draft(session.message_ids(1)[0], b"x")], session.operation("orders"))

        def claim() -> Any:
            return store.claim("orders", 1, session.operation("orders"), worker="w")

        def settle(lease: Lease) -> Any:
            done = [Settlement(lease.id, lease.token, lease.nonce)]
            return store.settle("orders", done, session.operation("orders"))

        executor.run(publish())
        executor.run(settle(executor.run(claim()).leases[0]))
        statements: list[str] = []
        with executor._writer.use() as connection:
            connection.set_trace_callback(statements.append)

        def count(call: Any) -> tuple[Any, int]:
            statements.clear()
            result = executor.run(call)
            # The first step of a minute deletes what is older than a day.
            return result, sum('DELETE FROM "wp_minute"' not in statement for statement in statements)

        assert count(publish())[1] <= 9
        claimed, number = count(claim())
        assert number <= 9
        assert count(settle(claimed.leases[0]))[1] <= 10
