"""Damaged records: other messages go on, a check finds them, and a repair restores them."""

from __future__ import annotations

import pytest

from waypost.testing.bench import QUEUE, Bench, strand
from waypost.values import Damage


def check(bench: Bench, *, mend: bool = False) -> list[Damage]:
    """Run a whole check, step by step."""
    damages, cursor = list[Damage](), None
    while True:
        page = bench.run(bench.store.check(QUEUE, cursor, mend=mend))
        damages += page.damages
        cursor = page.cursor
        if cursor is None:
            return damages


class TestDamage:
    """A message that no claim can reach, as after a crash or a manual change of the data."""

    @pytest.mark.promise("SEE-5")
    def test_a_check_of_a_sound_queue_finds_nothing(self, bench: Bench) -> None:
        bench.configure(max_deliveries=2, completed=5)
        bench.publish_count(5)
        bench.publish(key="key", window=60)
        bench.publish(delay=60, key="timer")
        first, second, third = bench.claim(3)
        bench.settle(first, "dead")
        bench.settle(second)
        bench.settle(third, "retry", after=5)
        running = bench.claim_one()
        bench.publish(key=running.key, on_conflict="replace") if running.key else None
        assert check(bench) == []
        assert check(bench, mend=True) == []
        assert bench.ledger().balance == 0

    @pytest.mark.promise("SEE-5")
    def test_a_check_of_an_unknown_queue_finds_nothing_and_creates_none(self, bench: Bench) -> None:
        assert check(bench) == []
        assert bench.run(bench.store.queues()) == []

    @pytest.mark.promise("SEE-5", "LEASE-4")
    def test_other_messages_are_claimed_beside_a_stranded_one_and_a_repair_restores_it(self, bench: Bench) -> None:
        ids = bench.publish_count(200)
        bench.run(strand(bench.store, QUEUE, ids[77]))
        leases = bench.claim(500)
        assert [lease.id for lease in leases] == ids[:77] + ids[78:]
        found = [(damage.kind, damage.id, damage.mended) for damage in check(bench)]
        assert found[0] == ("stranded", ids[77], None)
        assert [damage.kind for damage in check(bench)] == ["stranded", *(kind for kind, _, _ in found[1:])]
        mended = check(bench, mend=True)
        assert (mended[0].id, mended[0].mended) == (ids[77], "ready at the head of its priority")
        assert check(bench) == []
        assert bench.claim_one().id == ids[77]
        assert (bench.ledger().balance, bench.ledger().unexplained) == (0, 0)
        assert bench.ledger().published == 200

    @pytest.mark.promise("SEE-5", "LEASE-2")
    def test_a_stranded_lease_comes_back_with_a_higher_token(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.run(strand(bench.store, QUEUE, lease.id))
        check(bench, mend=True)
        assert bench.settle(lease) == "lost"
        again = bench.claim_one()
        assert again.id == lease.id
        assert again.token > lease.token
        assert bench.settle(again) == "done"
        assert (bench.ledger().balance, bench.ledger().unexplained, bench.ledger().done) == (0, 0, 1)

    @pytest.mark.promise("SEE-5", "PUB-4")
    def test_a_stranded_message_keeps_its_key_through_a_repair(self, bench: Bench) -> None:
        id = bench.publish(key="order:7").id
        bench.run(strand(bench.store, QUEUE, id))
        check(bench, mend=True)
        assert bench.publish(key="order:7").status == "duplicate"
        bench.settle(bench.claim_one())
        assert bench.publish(key="order:7").status == "queued"
        assert bench.ledger().balance == 0

    @pytest.mark.promise("SEE-5")
    def test_a_stranded_message_keeps_its_last_error_through_a_repair(self, bench: Bench) -> None:
        id = bench.publish().id
        bench.settle(bench.claim_one(), "retry", error_type="ValueError", error="not now")
        bench.run(strand(bench.store, QUEUE, id))
        check(bench, mend=True)
        (found,) = bench.run(bench.store.peek(QUEUE, "ready", 10)).messages
        assert (found.id, found.error_type, found.error) == (id, "ValueError", "not now")

    @pytest.mark.promise("SEE-5", "PUB-9")
    def test_a_stranded_message_keeps_its_priority_through_a_repair(self, bench: Bench) -> None:
        high = bench.publish(priority=9).id
        low = bench.publish(priority=0).id
        plain = bench.publish().id
        for id in (low, high):
            bench.run(strand(bench.store, QUEUE, id))
        check(bench, mend=True)
        assert [(lease.id, lease.priority) for lease in bench.claim(3)] == [(high, 9), (plain, 5), (low, 0)]

    @pytest.mark.promise("SEE-5", "SEE-3")
    def test_a_repair_is_journalled_and_a_check_is_not(self, bench: Bench) -> None:
        id = bench.publish().id
        bench.run(strand(bench.store, QUEUE, id))
        check(bench)
        assert [event.event for event in bench.events()] == ["published"]
        check(bench, mend=True)
        events = [(event.event, event.message_id, event.cause) for event in bench.events()]
        assert ("promoted", id, "mended") in events
        assert ("configured", None, f"mended stranded {id}: ready at the head of its priority") in events
