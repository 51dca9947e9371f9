"""Rows of a SQLite file with invalid values: SQLite accepts any value in any column."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.unit.clients import MODES, open_client
from waypost.store.port import Store
from waypost.store.sqlite import SqliteStore
from waypost.testing.bench import Bench
from waypost.testing.conformance.damage import check
from waypost.views import Observed

pytestmark = pytest.mark.promise("SEE-5", "STORE-3")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "damaged.db"


@pytest.fixture
def bench(path: Path) -> Iterator[Bench]:
    with Bench(lambda clock, namespace: cast(Store, SqliteStore(path, namespace="wp", clock=clock)), "sync") as subject:
        yield subject


def execute(path: Path, statement: str, *parameters: object) -> None:
    connection = sqlite3.connect(path)
    with connection:
        assert connection.execute(statement, parameters).rowcount > 0
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [
        "deliveries = 'many'", "token = x'00'", "priority = 12", "position = 'first'", "ready_ms = 1.5",
        "nonce = 'text'",
        "attempts = x''", "token = 1, cause = 'strange'", "size = 'big'",
    ],
)  # fmt: skip
def test_an_unreadable_row_is_set_aside_and_repaired(bench: Bench, path: Path, damage: str) -> None:
    ids = bench.publish_count(20)
    execute(path, f"UPDATE wp_message SET {damage} WHERE id = ?", ids[7])
    claimed = bench.claimed(50)
    assert {lease.id for lease in claimed.leases} == set(ids) - {ids[7]}
    assert claimed.damaged == (ids[7],)
    assert (bench.ledger().ready, bench.ledger().leased) == (0, 19)
    [found] = [damage for damage in check(bench) if damage.id is not None]
    assert (found.kind in ("unreadable", "stranded"), found.id) == (True, ids[7])
    check(bench, mend=True)
    assert check(bench) == []
    lease = bench.claim_one()
    # A count that cannot be read begins anew.
    assert (lease.id, lease.deliveries, lease.attempts) == (ids[7], 1, 0)
    assert (bench.ledger().balance, bench.ledger().leased) == (0, 20)


@pytest.mark.parametrize(("state", "column"), [(1, "deliveries"), (2, "token"), (4, "attempts")])
def test_timers_leases_and_dead_letters_go_on_beside_an_unreadable_row(
    bench: Bench, path: Path, state: int, column: str
) -> None:
    bench.configure(lease=10)
    ids = bench.publish_count(5, delay=10 if state == 1 else 0)
    if state > 1:
        for lease in bench.claim(5):
            if state == 4:
                bench.settle(lease, "dead")
    execute(path, f"UPDATE wp_message SET {column} = 'x' WHERE id = ?", ids[2])
    bench.after(10)
    if state == 4:
        assert len(bench.redrive().moved) == 4
    assert {lease.id for lease in bench.claim_all()} == {*ids} - {ids[2]}
    check(bench, mend=True)
    assert check(bench) == []
    assert bench.ledger().balance == 0


def test_a_message_without_its_body_is_dropped_by_a_mend(bench: Bench, path: Path) -> None:
    ids = bench.publish_count(3)
    execute(path, "DELETE FROM wp_envelope WHERE seq = (SELECT seq FROM wp_message WHERE id = ?)", ids[1])
    assert [lease.id for lease in bench.claim(5)] == [ids[0], ids[2]]
    assert check(bench, mend=True)[0].mended == "dropped"
    assert (bench.ledger().balance, bench.ledger().dropped, bench.ledger().ready) == (0, 1, 0)
    assert bench.event_names(ids[1]) == ["published", "dropped"]


def test_a_dead_letter_without_its_body_is_removed_by_a_mend(bench: Bench, path: Path) -> None:
    id = bench.publish().id
    bench.settle(bench.claim_one(), "dead")
    execute(path, "DELETE FROM wp_envelope WHERE seq = (SELECT seq FROM wp_message WHERE id = ?)", id)
    assert check(bench, mend=True)[0].mended == "removed from the dead letters"
    ledger = bench.ledger()
    assert (ledger.balance, ledger.dead, ledger.dead_kept, ledger.dropped) == (0, 1, 0, 0)
    assert bench.event_names(id) == ["published", "claimed", "dead", "dead_trimmed"]


def test_counters_follow_the_rows(bench: Bench, path: Path) -> None:
    bench.publish_count(5)
    execute(path, "UPDATE wp_queue SET ready = 50, published = 3")
    assert [damage.kind for damage in check(bench)] == ["counters"]
    check(bench, mend=True)
    assert (bench.ledger().ready, bench.ledger().published, bench.ledger().balance) == (5, 5, 0)
    [event] = bench.events("configured")
    assert event.cause == "mended counters: counts are off: ready +45, and the ledger by -2"


@pytest.mark.promise("SEE-1")
@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_record_is_logged_and_reported_once_and_a_client_can_mend_it(
    path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Observed] = []
    with open_client(mode, f"sqlite:///{path}", on_event=events.append) as post:
        broken, sound = (one.id for one in post.publish_many("orders", ["first", "second"]))
        execute(path, "UPDATE wp_message SET deliveries = 'x' WHERE id = ?", broken)
        for _ in range(2):
            with post.receive("orders", wait=0) as message:
                assert message is None or message.id == sound
        logged = [vars(record) for record in caplog.records if vars(record).get("event") == "damaged_record"]
        assert [(one["queue"], one["message_id"]) for one in logged] == [("orders", broken)]
        assert [event.message_id for event in events if event.event == "damaged_record"] == [broken]
        seen: list[int] = []
        report = post.check("orders", progress=seen.append)
        assert (report.examined, seen) == (1, [1])
        assert {damage.kind for damage in report.damages} <= {"unreadable", "counters"}
        assert post.check("orders", mend=True).balance == 0
        assert [event.message_id for event in events if event.event == "mended"][:1] == [broken]
        assert post.check("orders").damages == []
        with post.receive("orders", wait=0) as message:
            assert message is not None
            assert message.id == broken
