"""Groups on SQLite: settings that change under a long queue, part by part, and rows that are wrong."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from waypost.identity import Operation
from waypost.store.port import Draft
from waypost.store.sqlite import SqliteStore, groups
from waypost.store.sqlite.executor import SqliteExecutor
from waypost.testing.clock import ManualClock
from waypost.values import Damage, Lease, Settlement

QUEUE = "orders"
PLAIN: dict[str, Any] = {"order": None, "fair": False, "group_max_running": None}


class Client:
    """A store in a file, with operations of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.store = SqliteStore(path, clock=self.clock)
        self.executor: SqliteExecutor = self.store.connect(start_timeout=5)
        self._number = 0
        self.published = 0

    def operation(self) -> Operation:
        self._number += 1
        return Operation(b"session1", self._number, self.clock(), self._number.to_bytes(8))

    def publish(self, count: int, names: int = 7, *, priority: int = 5) -> None:
        drafts = [
            Draft(f"{number:024}", b"x", group=f"g{number % names}", priority=priority)
            for number in range(self.published, self.published + count)
        ]
        self.published += count
        for start in range(0, count, 500):
            self.executor.run(self.store.publish(QUEUE, drafts[start : start + 500], self.operation()))

    def configure(self, **changes: Any) -> None:
        self.executor.run(self.store.configure(QUEUE, changes))

    def claim(self, limit: int) -> list[Lease]:
        return self.executor.run(self.store.claim(QUEUE, limit, self.operation(), worker="w")).leases

    def settle(self, leases: list[Lease], outcome: Any = "done") -> None:
        done = [Settlement(lease.id, lease.token, lease.nonce, outcome) for lease in leases]
        self.executor.run(self.store.settle(QUEUE, done, self.operation()))

    def check(self, *, mend: bool = False) -> list[Damage]:
        damages, cursor = list[Damage](), None
        while True:
            page = self.executor.run(self.store.check(QUEUE, cursor, mend=mend))
            damages += page.damages
            cursor = page.cursor
            if cursor is None:
                return damages

    def conversion(self) -> str | None:
        """Return the pass that is not over."""
        with self.executor._writer.use() as connection:
            query = "SELECT json_extract(CAST(grouping AS TEXT), '$.conversion') FROM wp_queue WHERE name = ?"
            found: str | None = connection.execute(query, (QUEUE,)).fetchone()[0]
            return found


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(groups, "CONVERTED_MAX", 50)
    made = Client(tmp_path / "groups.db")
    yield made
    made.executor.close()


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
def test_an_order_that_is_switched_on_part_by_part_keeps_the_order_of_claims(client: Client) -> None:
    client.publish(300)
    client.publish(100, priority=9)
    handed: dict[str, list[str]] = defaultdict(list)

    def note(leases: list[Lease]) -> None:
        for lease in leases:
            handed[lease.group or ""].append(lease.id)

    client.configure(order="group")
    assert client.conversion() == "join"
    client.publish(50)
    steps = 0
    while client.conversion() is not None:
        steps += 1
        leases = client.claim(3)
        note(leases)
        client.settle(leases)
    assert steps >= 5
    while leases := client.claim(50):
        assert len({lease.group for lease in leases}) == len(leases), "two of one ordered group"
        note(leases)
        client.settle(leases)
    assert sum(map(len, handed.values())) == 450
    for ids in handed.values():
        # Those of the higher priority were first when the order was switched on; then all by age.
        expected = sorted(ids, key=lambda id: (not 300 <= int(id) < 400, int(id)))
        assert ids == expected
    assert client.check() == []


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.parametrize("between", [PLAIN, {"order": None, "fair": True}], ids=["plain", "fair"])
def test_an_order_that_is_set_again_before_the_last_one_was_converted_back_is_kept(
    client: Client, between: dict[str, Any]
) -> None:
    client.configure(order="group")
    client.publish(300)
    client.configure(**between)
    assert client.conversion() is not None
    client.publish(20)
    client.configure(order="group")
    client.publish(20)
    # One is claimed and fails while it is not converted, and holds its group.
    failed = client.claim(1)
    client.settle(failed, "retry")
    client.configure(group_max_running=1)
    while client.conversion() is not None:
        client.claim(0)
    handed: dict[str, list[str]] = defaultdict(list)
    while leases := client.claim(50):
        for lease in leases:
            handed[lease.group or ""].append(lease.id)
        client.settle(leases)
    assert sum(map(len, handed.values())) == 340
    assert all(ids == sorted(ids) for ids in handed.values())
    assert client.check() == []


@pytest.mark.promise("QUEUE-2", "QUEUE-5", "QUEUE-6", "QUEUE-7")
@pytest.mark.parametrize("seed", range(4))
def test_changes_in_the_middle_of_a_conversion_lose_and_repeat_nothing(client: Client, seed: int) -> None:
    chance = random.Random(seed)
    done: list[str] = []
    held: list[Lease] = []
    changes: list[dict[str, Any]] = [
        {"fair": True}, {"order": "group"}, {"order": None}, PLAIN, PLAIN, {"group_max_running": 2},
        {"order": "group", "fair": True},
    ]  # fmt: skip

    def end_some() -> None:
        count = chance.randrange(len(held) + 1)
        for lease in held[:count]:
            outcome = chance.choice(("done", "done", "done", "retry", "release"))
            done.extend([lease.id] if outcome == "done" else [])
            client.settle([lease], outcome)
        del held[:count]

    def claim_some() -> None:
        held.extend(client.claim(chance.choice((1, 5, 20))))

    verbs: list[Callable[[], None]] = [
        lambda: client.publish(chance.choice((3, 40)), priority=chance.choice((5, 5, 9))),
        lambda: client.configure(**chance.choice(changes)),
        claim_some, claim_some, end_some,
    ]  # fmt: skip
    client.publish(200)
    for _ in range(80):
        chance.choice(verbs)()
    client.configure(**chance.choice(({"order": "group"}, {"fair": True}, PLAIN)))
    for _ in range(10_000):
        held.extend(client.claim(50))
        if not held:
            break
        done.extend(lease.id for lease in held)
        client.settle(held)
        held.clear()
    assert sorted(done) == [f"{number:024}" for number in range(client.published)]
    assert client.check() == []
    client.configure(**PLAIN)
    while client.conversion() is not None:
        client.claim(1)
    with closing(sqlite3.connect(client.path)) as connection:
        assert connection.execute("SELECT count(*) FROM wp_group").fetchone() == (0,)
        assert connection.execute("SELECT grouping FROM wp_queue").fetchone() == (None,)


@pytest.mark.promise("QUEUE-6", "SEE-5")
def test_a_message_of_a_group_that_cannot_be_read_is_set_aside_and_others_go_on(client: Client) -> None:
    client.configure(order="group")
    client.publish(21)
    with closing(sqlite3.connect(client.path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM wp_envelope WHERE seq = 1")
        connection.execute("UPDATE wp_message SET attempts = 'many' WHERE seq = 2")
    assert [int(lease.id) for lease in client.claim(7)] == [7, 8, 2, 3, 4, 5, 6]
    found = client.check(mend=True)
    assert [damage.kind for damage in found] == ["missing", "unreadable", "counters", "counters"]
    assert client.check() == []


@pytest.mark.promise("QUEUE-6", "SEE-5")
def test_wrong_counts_of_groups_are_found_and_corrected(client: Client) -> None:
    client.configure(fair=True, group_max_running=2)
    client.publish(21)
    client.claim(3)
    with closing(sqlite3.connect(client.path, isolation_level=None)) as connection:
        connection.execute("UPDATE wp_group SET ready = ready + 1, leased = leased + 5 WHERE name IN ('g1', 'g2')")
    (damage,) = client.check()
    assert (damage.kind, damage.found) == ("counters", "the counts of 2 groups are off, g1 among them")
    assert [one.mended for one in client.check(mend=True)] == ["counted anew"]
    assert client.check() == []
    assert len(client.claim(50)) == 11


@pytest.mark.promise("QUEUE-6")
def test_groups_that_have_nothing_keep_no_rows(client: Client) -> None:
    client.configure(order="group", group_rate_count=100, group_rate_per_ms=1_000)
    client.publish(300, names=300)
    while leases := client.claim(100):
        client.settle(leases)
    client.clock.advance(2 * 3_600)
    for _ in range(3):
        assert client.claim(10) == []
    with closing(sqlite3.connect(client.path)) as connection:
        assert connection.execute("SELECT count(*) FROM wp_group").fetchone() == (0,)
