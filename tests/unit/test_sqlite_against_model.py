"""SQLite next to the memory model: the same programs, the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sqlite_program import Pair
from waypost.policy import BURY_MAX, PROMOTE_MAX, RECLAIM_MAX
from waypost.store.port import Draft
from waypost.store.sqlite import SqliteStore
from waypost.values import Settlement


@pytest.fixture
def pair_for(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(seed: int, **options: Any) -> Pair:
        made.append(Pair(lambda clock: SqliteStore(tmp_path / f"{seed}.db", clock=clock), seed, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def claim_some(pair: Pair, limit: int) -> None:
    pair.once("orders", lambda store, operation: store.claim("orders", limit, operation, worker="w", nonce=bytes(12)))


@pytest.mark.promise("STORE-3", "STORE-4", "SEE-5")
@pytest.mark.parametrize("seed", range(5))
def test_random_programs_have_the_same_history_on_both(pair_for: Callable[[int], Pair], seed: int) -> None:
    pair = pair_for(seed)
    for _ in range(150):
        pair.check(pair.step())
    assert pair.both(lambda store: store.queues()) == ["billing", "orders"]


@pytest.mark.promise("STORE-4", "QUEUE-5", "QUEUE-6", "QUEUE-7")
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_with_groups_have_the_same_history_on_both(pair_for: Callable[..., Pair], seed: int) -> None:
    pair = pair_for(seed, groups=("g", "h", "ü"))
    for _ in range(150):
        pair.check(pair.step())
    assert pair.both(lambda store: store.queues()) == ["billing", "orders"]


@pytest.mark.promise("STORE-4", "LEASE-4", "LEASE-5", "TIMER-4")
def test_the_bounds_of_a_claim_are_the_same_on_both(pair_for: Callable[[int], Pair]) -> None:
    pair = pair_for(0)
    many = PROMOTE_MAX + 60
    ids = [f"id-{n:021}" for n in range(many)]
    for part in (ids[:400], ids[400:]):
        drafts = [Draft(id, b"x", delay_ms=1_000) for id in part]
        pair.once("orders", lambda store, operation, d=drafts: store.publish("orders", d, operation))  # type: ignore[misc]
    pair.both(lambda store: store.configure("orders", {"max_deliveries": 1, "lease_ms": 1_000, "dead_max": 100}))
    pair.clock.advance(2)
    assert many > BURY_MAX + RECLAIM_MAX
    for limit in (0, 512, 512, 1, 512, 512):
        claim_some(pair, limit)
        pair.check("orders")
        pair.clock.advance(2)


@pytest.mark.promise("STORE-4", "SEE-3")
def test_a_journal_over_its_cap_is_cut_at_the_same_event_on_both(pair_for: Callable[[int], Pair]) -> None:
    pair = pair_for(0)
    pair.both(lambda store: store.configure("orders", {"journal_max": 30}))
    pair.both(lambda store: store.journal_reader("orders", "lake", None))
    for batch in range(12):
        drafts = [Draft(f"{batch:03}-{n:020}", b"x") for n in range(100)]
        pair.once("orders", lambda store, operation, d=drafts: store.publish("orders", d, operation))  # type: ignore[misc]
        pair.check("orders")
    stats = pair.both(lambda store: store.stats("orders"))
    assert stats is not None
    assert 1 < stats.journal_first <= stats.journal_last


@pytest.mark.promise("STORE-4", "PUB-3", "LEASE-6")
def test_a_repeated_operation_gets_the_same_result_on_both(pair_for: Callable[[int], Pair]) -> None:
    pair = pair_for(0)
    drafts = [Draft(f"id-{n:021}", b"x", key=f"k{n}" if n % 3 else None) for n in range(40)]
    published = pair.once("orders", lambda store, operation: store.publish("orders", drafts, operation))
    claimed = pair.once(
        "orders", lambda store, operation: store.claim("orders", 20, operation, worker="w", nonce=bytes(12))
    )
    assert claimed is not None
    settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases[:10]]
    settled = pair.once("orders", lambda store, operation: store.settle("orders", settlements, operation))
    publish_again, claim_again, settle_again = pair.repeats
    assert pair.both(publish_again) == published
    assert pair.both(settle_again) == settled
    again = pair.both(claim_again)
    assert again is not None
    assert [lease.id for lease in again.leases] == [lease.id for lease in claimed.leases[10:]]
