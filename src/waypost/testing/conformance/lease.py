"""Leases: which worker holds a message, its fence, and what happens when its lease ends."""

from __future__ import annotations

import pytest
from msgspec import structs

from waypost.errors import InvalidInput
from waypost.policy import CHUNK_MESSAGES_MAX, RECLAIM_MAX
from waypost.store.port import Hold
from waypost.testing.bench import Bench
from waypost.values import Lease, OutcomeName

OUTCOMES: tuple[OutcomeName, ...] = ("done", "retry", "snooze", "dead", "drop", "release")


def wrong_fences(lease: Lease) -> list[Hold]:
    """Return every kind of fence that is not the lease's own."""
    return [
        Hold(lease.id, lease.token - 1, lease.nonce),
        Hold(lease.id, lease.token + 1, lease.nonce),
        Hold(lease.id, lease.token, bytes(12)),
        Hold(lease.id, lease.token, b""),
        Hold(lease.id, lease.token, lease.nonce[:-1] + bytes([lease.nonce[-1] ^ 1])),
        Hold("0" * 24, lease.token, lease.nonce),
    ]


class TestClaims:
    """A claim."""

    @pytest.mark.promise("LEASE-1")
    def test_a_claim_leases_up_to_its_limit(self, bench: Bench) -> None:
        ids = bench.publish_count(5)
        assert [lease.id for lease in bench.claim(3)] == ids[:3]
        assert bench.ids("leased") == sorted(ids[:3])
        assert [lease.id for lease in bench.claim(3)] == ids[3:]
        assert bench.claim(3) == []

    @pytest.mark.promise("LEASE-1")
    def test_a_claim_takes_a_full_chunk(self, bench: Bench) -> None:
        ids = bench.publish_count(CHUNK_MESSAGES_MAX + 1)
        assert [lease.id for lease in bench.claim(CHUNK_MESSAGES_MAX)] == ids[:-1]

    @pytest.mark.promise("LEASE-17")
    def test_a_claim_ends_before_the_first_message_that_does_not_fit(self, bench: Bench) -> None:
        """It does not skip it for a smaller one: the first message is delivered first."""
        sizes = [100, 3_000, 100, 100, 50_000, 10, 10]
        ids = [bench.publish(b"x" * size).id for size in sizes]
        first = bench.claimed(10, bytes_max=3_000)
        assert ([lease.id for lease in first.leases], first.more) == (ids[:1], True)
        second = bench.claimed(10, bytes_max=4_000)
        assert ([lease.id for lease in second.leases], second.more) == (ids[1:4], True)
        third = bench.claimed(10, bytes_max=1)
        assert ([lease.id for lease in third.leases], third.more) == (ids[4:5], True)
        last = bench.claimed(10, bytes_max=1_000)
        assert ([lease.id for lease in last.leases], last.more) == (ids[5:], False)
        assert bench.ledger().leased == len(ids)
        bench.check_invariants()

    @pytest.mark.promise("LEASE-17")
    def test_a_claim_brings_one_message_whatever_its_size(self, bench: Bench) -> None:
        ids = [bench.publish(b"x" * 500_000).id for _ in range(3)]
        for id in ids:
            claimed = bench.claimed(5, bytes_max=0)
            assert [lease.id for lease in claimed.leases] == [id]
            assert claimed.leases[0].envelope.endswith(b"x" * 500_000)
            assert claimed.more == (id != ids[-1])
        assert bench.claimed(5, bytes_max=0).leases == []

    @pytest.mark.promise("LEASE-17")
    @pytest.mark.parametrize("lease", [60, None])
    def test_bytes_bound_many_claims_of_many_messages_exactly(self, bench: Bench, lease: float | None) -> None:
        bench.configure(lease=lease)
        ids = [bench.publish(b"x" * (10 if number % 3 else 2_000), priority=9 - number % 2).id for number in range(200)]
        wanted = ids[::2] + ids[1::2]
        sizes = {stored.id: len(stored.envelope) for stored in bench.listing("ready")}
        found: list[str] = []
        while True:
            claimed = bench.claimed(CHUNK_MESSAGES_MAX, bytes_max=30_000)
            size = sum(sizes[one.id] for one in claimed.leases)
            found += [one.id for one in claimed.leases]
            assert size <= 30_000
            if not claimed.more:
                break
            assert size + sizes[wanted[len(found)]] > 30_000, "the next one would have fitted"
        assert found == wanted
        bench.check_invariants()

    @pytest.mark.promise("LEASE-17", "LEASE-5")
    def test_buried_messages_use_no_bytes_of_a_claim(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        large = [bench.publish(b"x" * 5_000).id for _ in range(3)]
        assert len(bench.claim(3)) == 3
        bench.after(2)
        small = [bench.publish(b"x" * 100).id for _ in range(4)]
        claimed = bench.claimed(10, bytes_max=1_000)
        assert [lease.id for lease in claimed.leases] == small
        assert not claimed.more
        assert bench.ids("dead") == sorted(large)

    @pytest.mark.promise("LEASE-17", "WAKE-2")
    def test_a_claim_that_left_messages_behind_registers_no_sleeper(self, bench: Bench) -> None:
        for _ in range(2):
            bench.publish(b"x" * 1_000)
        assert bench.claimed(5, bytes_max=1_500, sleeper="a").more
        assert bench.stats().sleepers == 0
        assert not bench.claimed(5, bytes_max=1_500, sleeper="a").more
        assert bench.stats().sleepers == 1

    @pytest.mark.promise("LEASE-17", "LEASE-6")
    def test_the_answer_to_a_repeat_requests_another_claim(self, bench: Bench) -> None:
        ids = [bench.publish(b"x" * 1_000).id for _ in range(3)]
        operation = bench.operation()
        first = bench.claimed(5, bytes_max=2_500, operation=operation)
        again = bench.claimed(5, bytes_max=2_500, operation=operation)
        assert [lease.id for lease in first.leases] == [lease.id for lease in again.leases] == ids[:2]
        assert again.more
        assert not bench.claimed(5, operation=bench.operation(), replay=True).more

    @pytest.mark.promise("LEASE-1")
    def test_a_claim_of_an_empty_or_unknown_queue_is_empty(self, bench: Bench) -> None:
        claimed = bench.claimed(10)
        assert claimed.leases == []
        assert (claimed.next_due_ms, claimed.next_lease_ms, claimed.next_rate_ms) == (None, None, None)
        assert not claimed.paused

    @pytest.mark.promise("LEASE-1")
    def test_times_of_a_lease_are_the_stores(self, bench: Bench) -> None:
        bench.configure(lease=30)
        bench.publish()
        bench.after(86_400)
        lease = bench.claim_one()
        assert lease.claimed_ms == bench.now_ms
        assert lease.lease_end_ms == bench.now_ms + 30_000
        stored = bench.stored(lease.id)
        assert (stored.claimed_ms, stored.lease_end_ms, stored.worker) == (
            lease.claimed_ms, lease.lease_end_ms, "worker-1",
        )  # fmt: skip

    @pytest.mark.promise("LEASE-1", "WAKE-5")
    def test_a_claim_returns_when_the_next_timer_and_lease_are_due(self, bench: Bench) -> None:
        bench.publish()
        bench.claim_one()
        bench.publish(delay=100)
        bench.publish(delay=40)
        bench.after(10)
        claimed = bench.claimed()
        assert (claimed.next_due_ms, claimed.next_lease_ms) == (30_000, 50_000)

    @pytest.mark.promise("WAKE-5", "LEASE-4")
    def test_a_claim_returns_the_end_of_the_leases_that_it_gave(self, bench: Bench) -> None:
        bench.configure(lease=10)
        assert bench.claimed(1).next_lease_ms is None
        bench.publish_count(2)
        for _ in range(2):
            claimed = bench.claimed(1)
            assert (len(claimed.leases), claimed.next_lease_ms, claimed.next_due_ms) == (1, 10_000, None)
        bench.after(4)
        assert bench.claimed(1).next_lease_ms == 6_000

    @pytest.mark.promise("WAKE-5", "TIMER-2")
    def test_a_claim_of_fresh_messages_returns_when_the_next_timer_is_due(self, bench: Bench) -> None:
        bench.publish(delay=100)
        bench.publish()
        claimed = bench.claimed(1)
        assert (len(claimed.leases), claimed.next_due_ms) == (1, 100_000)

    @pytest.mark.promise("LEASE-1")
    def test_two_clients_never_hold_the_same_message(self, bench: Bench) -> None:
        bench.publish_count(6)
        other = bench.another_client()
        ours, theirs = bench.claim(3), other.claim(10)
        assert not {lease.id for lease in ours} & {lease.id for lease in theirs}
        assert {lease.nonce for lease in ours}.isdisjoint({lease.nonce for lease in theirs})


class TestFences:
    """Token and nonce: both, or nothing changes."""

    @pytest.mark.promise("LEASE-2")
    def test_a_leased_message_cannot_be_purged(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        with pytest.raises(InvalidInput):
            bench.purge("leased", limit=10)
        assert bench.settle(lease) == "done"

    @pytest.mark.promise("LEASE-2")
    def test_a_token_only_grows_through_retry_burial_and_redrive(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        tokens = []
        for step in ("retry", "snooze", "release", "expire", "dead", "retry"):
            lease = bench.claim_one()
            tokens.append(lease.token)
            match step:
                case "expire":
                    bench.after(10)
                case "dead":
                    bench.settle(lease, "dead")
                    assert bench.redrive().moved == [lease.id]
                case "retry" | "snooze" | "release":
                    bench.settle_batch([structs.replace(bench.settlement(lease), outcome=step)])
        assert tokens == [1, 2, 3, 4, 5, 6]

    @pytest.mark.promise("LEASE-2")
    @pytest.mark.parametrize("outcome", OUTCOMES)
    def test_a_settle_with_a_wrong_fence_changes_nothing(self, bench: Bench, outcome: OutcomeName) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        before, journalled = bench.stored(lease.id), len(bench.events())
        wrong = wrong_fences(lease)
        assert bench.settle_batch([bench.settlement(fence, outcome) for fence in wrong]) == ["lost"] * len(wrong)
        assert bench.stored(lease.id) == before
        assert len(bench.events()) == journalled
        assert bench.settle(lease) == "done"

    @pytest.mark.promise("LEASE-2")
    def test_an_extend_with_a_wrong_fence_changes_nothing(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        before = bench.stored(lease.id)
        bench.after(5)
        wrong = wrong_fences(lease)
        assert bench.extend_batch(wrong) == ["lost"] * len(wrong)
        assert bench.stored(lease.id) == before

    @pytest.mark.promise("LEASE-2")
    @pytest.mark.parametrize("outcome", OUTCOMES)
    @pytest.mark.parametrize("end", ["done", "dead", "drop", "cancelled"])
    def test_a_late_settle_cannot_revive_a_finished_message(self, bench: Bench, end: str, outcome: OutcomeName) -> None:
        bench.publish()
        lease = bench.claim_one()
        if end == "cancelled":
            bench.cancel(lease.id)
            bench.settle(lease, "retry")
        else:
            bench.settle_batch([structs.replace(bench.settlement(lease), outcome=end)])
        journalled, ledger = len(bench.events()), bench.ledger()
        assert bench.settle(lease, outcome) == "lost"
        assert bench.extend(lease) == "lost"
        assert bench.ledger() == ledger
        assert len(bench.events()) == journalled
        assert bench.claim() == []

    @pytest.mark.promise("LEASE-2")
    @pytest.mark.parametrize("outcome", OUTCOMES)
    def test_a_holder_whose_message_was_reclaimed_has_lost_it(self, bench: Bench, outcome: OutcomeName) -> None:
        bench.configure(lease=10)
        bench.publish()
        late = bench.claim_one(worker="slow")
        bench.after(10)
        current = bench.claim_one(worker="quick")
        assert bench.settle(late, outcome) == "lost"
        assert bench.extend(late) == "lost"
        assert bench.settle(current) == "done"

    @pytest.mark.promise("LEASE-2", "DEAD-2")
    def test_a_settle_from_before_a_redrive_is_lost(self, bench: Bench) -> None:
        bench.publish()
        old = bench.claim_one()
        bench.settle(old, "dead")
        bench.redrive()
        assert bench.settle(old) == "lost"
        new = bench.claim_one()
        assert bench.settle(old) == "lost"
        assert bench.settle(new) == "done"

    @pytest.mark.promise("LEASE-2")
    def test_a_batch_with_some_lost_settles_the_others(self, bench: Bench) -> None:
        bench.publish_count(3)
        first, second, third = bench.claim(3)
        bench.settle(second)
        assert bench.settle_batch([bench.settlement(lease) for lease in (first, second, third)]) == [
            "done", "lost", "done",
        ]  # fmt: skip

    @pytest.mark.promise("LEASE-2")
    def test_one_message_twice_in_a_batch_is_settled_once(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        assert bench.settle_batch([bench.settlement(lease), bench.settlement(lease, "retry")]) == ["done", "lost"]
        assert bench.ledger().done == 1

    @pytest.mark.promise("LEASE-2")
    def test_a_lease_that_ended_but_was_not_reclaimed_can_still_be_settled(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        lease = bench.claim_one()
        bench.after(11)
        assert bench.settle(lease) == "done"
        assert bench.claim() == []

    @pytest.mark.promise("LEASE-3")
    def test_extending_moves_the_end_of_every_lease_of_the_call(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish_count(3)
        leases = bench.claim(3)
        bench.after(8)
        assert bench.extend_batch(leases) == ["ok", "ok", "ok"]
        assert {message.lease_end_ms for message in bench.listing("leased")} == {bench.now_ms + 10_000}
        bench.after(8)
        assert bench.claim() == []
        assert bench.settle(leases[0]) == "done"

    @pytest.mark.promise("LEASE-3")
    def test_a_lease_past_its_end_that_was_not_reclaimed_can_be_extended(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        lease = bench.claim_one()
        bench.after(15)
        assert bench.extend(lease) == "ok"
        assert bench.claim() == []


class TestReclaim:
    """What a claim does with leases that ended."""

    @pytest.mark.promise("LEASE-4")
    def test_a_lease_ends_exactly_at_its_time(self, bench: Bench) -> None:
        bench.configure(lease=10)
        published = bench.publish()
        bench.claim_one()
        bench.after(9.999)
        assert bench.claim() == []
        bench.after(0.001)
        lease = bench.claim_one()
        assert (lease.id, lease.token, lease.deliveries, lease.attempts) == (published.id, 2, 2, 0)

    @pytest.mark.promise("LEASE-4")
    def test_reclaimed_messages_come_before_others_of_their_priority(self, bench: Bench) -> None:
        bench.configure(lease=10)
        crashed = bench.publish()
        bench.claim_one()
        waiting = bench.publish()
        high = bench.publish(priority=6)
        low = bench.publish(priority=4)
        bench.after(10)
        assert [lease.id for lease in bench.claim(4)] == [high.id, crashed.id, waiting.id, low.id]

    @pytest.mark.promise("LEASE-4")
    def test_the_oldest_deadline_is_reclaimed_first(self, bench: Bench) -> None:
        bench.configure(lease=10)
        first, second, third = bench.publish_count(3)
        leases = bench.claim(3)
        bench.after(1)
        bench.extend(leases[0])
        bench.after(1)
        bench.extend(leases[1])
        bench.after(20)
        assert [lease.id for lease in bench.claim(3)] == [third, first, second]

    @pytest.mark.promise("LEASE-4")
    def test_a_later_crash_is_reclaimed_after_an_earlier_one(self, bench: Bench) -> None:
        bench.configure(lease=10)
        first = bench.publish()
        bench.claim_one()
        bench.after(5)
        second = bench.publish()
        bench.claim_one()
        bench.publish()
        bench.after(5)
        bench.pause()
        bench.after(5)
        bench.resume()
        assert [lease.id for lease in bench.claim(2)] == [first.id, second.id]

    @pytest.mark.promise("LEASE-4")
    def test_a_released_message_goes_to_the_head_of_its_priority(self, bench: Bench) -> None:
        first, second = bench.publish_count(2)
        lease = bench.claim_one()
        assert bench.settle(lease, "release") == "released"
        assert [one.id for one in bench.claim(2)] == [first, second]

    @pytest.mark.promise("LEASE-4")
    def test_reclaims_are_bounded_per_claim_and_none_is_forgotten(self, bench: Bench) -> None:
        bench.configure(lease=10)
        count = RECLAIM_MAX + 10
        ids = bench.publish_count(count)
        assert len(bench.claim_all()) == count
        bench.after(10)
        first = bench.claim(1)
        assert bench.ledger().expired == RECLAIM_MAX
        rest = bench.claim_all()
        assert sorted(lease.id for lease in first + rest) == sorted(ids)
        assert bench.ledger().expired == count

    @pytest.mark.promise("LEASE-4", "SEE-5")
    def test_a_crash_is_journalled_with_its_worker_and_counted_as_a_cause(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        bench.claim_one(worker="the one that died")
        bench.after(12)
        bench.claim_one()
        (event,) = bench.events("expired")
        assert (event.worker, event.run_ms, event.token) == ("the one that died", 12_000, 1)
        assert bench.events("claimed")[1].cause == "expired"
        assert bench.ledger().redelivered["expired"] == 1


class TestCounts:
    """Deliveries, attempts and the delivery limit."""

    @pytest.mark.promise("LEASE-5")
    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_a_message_that_crashes_its_workers_dies_after_exactly_its_deliveries(
        self, bench: Bench, limit: int
    ) -> None:
        bench.configure(max_deliveries=limit, lease=1)
        published = bench.publish(b"poison")
        for number in range(1, limit + 1):
            assert bench.claim_one().deliveries == number
            bench.after(1)
        assert bench.claim(10) == []
        dead = bench.stored(published.id)
        assert (dead.state, dead.reason, dead.deliveries, dead.attempts) == ("dead", "max_deliveries", limit, 0)
        assert bench.body(dead) == b"poison"

    @pytest.mark.promise("LEASE-5")
    def test_a_buried_message_takes_no_place_of_the_claim(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        bench.publish()
        bench.claim_one()
        bench.after(1)
        healthy = bench.publish()
        assert [lease.id for lease in bench.claim(1)] == [healthy.id]
        assert bench.ledger().dead == 1

    @pytest.mark.promise("LEASE-5")
    def test_retries_use_deliveries_too(self, bench: Bench) -> None:
        bench.configure(max_deliveries=2)
        published = bench.publish()
        assert bench.settle(bench.claim_one(), "retry") == "retried"
        assert bench.settle(bench.claim_one(), "retry") == "retried"
        assert bench.claim() == []
        assert bench.stored(published.id).reason == "max_deliveries"

    @pytest.mark.promise("LEASE-5")
    @pytest.mark.parametrize("outcome", ["snooze", "release"])
    def test_snooze_and_release_give_the_delivery_back(self, bench: Bench, outcome: OutcomeName) -> None:
        bench.configure(max_deliveries=1)
        bench.publish()
        for token in range(1, 6):
            lease = bench.claim_one()
            assert (lease.token, lease.deliveries, lease.attempts) == (token, 1, 0)
            bench.settle(lease, outcome)
        assert bench.ledger().claims == 5

    @pytest.mark.promise("LEASE-5", "LEASE-9")
    def test_only_retries_count_as_attempts(self, bench: Bench) -> None:
        bench.configure(lease=1)
        bench.publish()
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "snooze")
        bench.settle(bench.claim_one(), "release")
        bench.claim_one()
        bench.after(1)
        lease = bench.claim_one()
        assert (lease.attempts, lease.deliveries, lease.token) == (1, 3, 5)

    @pytest.mark.promise("LEASE-5")
    def test_without_a_limit_deliveries_go_on(self, bench: Bench) -> None:
        bench.configure(max_deliveries=None, lease=1)
        bench.publish()
        for number in range(1, 31):
            assert bench.claim_one().deliveries == number
            bench.after(1)

    @pytest.mark.promise("LEASE-5", "QUEUE-2")
    def test_a_lower_limit_acts_at_the_next_claim(self, bench: Bench) -> None:
        bench.configure(lease=1)
        published = bench.publish()
        for _ in range(3):
            bench.claim_one()
            bench.after(1)
        bench.configure(max_deliveries=3)
        assert bench.claim() == []
        assert bench.state_of(published.id) == "dead"


class TestAtMostOnce:
    """`lease=None`: a claimed message is gone."""

    @pytest.mark.promise("LEASE-7")
    def test_a_claimed_message_is_gone_and_counts_as_done(self, bench: Bench) -> None:
        bench.configure(lease=None)
        published = bench.publish(b"once")
        lease = bench.claim_one()
        assert (lease.id, lease.lease_end_ms, bench.body(lease)) == (published.id, None, b"once")
        assert bench.state_of(published.id) is None
        assert bench.ledger().done == 1
        assert bench.event_names(published.id) == ["published", "claimed", "done"]

    @pytest.mark.promise("LEASE-7")
    def test_there_is_nothing_to_settle_or_extend(self, bench: Bench) -> None:
        bench.configure(lease=None)
        bench.publish()
        lease = bench.claim_one()
        assert bench.settle(lease, "retry") == "lost"
        assert bench.extend(lease) == "lost"
        bench.after(1_000_000)
        assert bench.claim() == []

    @pytest.mark.promise("LEASE-7", "PUB-4")
    def test_the_key_is_free_at_the_claim(self, bench: Bench) -> None:
        bench.configure(lease=None)
        bench.publish(key="k")
        bench.claim_one()
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("LEASE-7", "QUEUE-2")
    def test_leases_that_run_when_the_queue_becomes_at_most_once_go_on(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish_count(2)
        settled, crashed = bench.claim(2)
        bench.configure(lease=None)
        bench.after(9)
        assert bench.extend(settled) == "ok"
        bench.after(9)
        assert [lease.id for lease in bench.claim(5)] == [crashed.id]
        assert bench.settle(settled) == "done"
        assert bench.ledger().done == 2
