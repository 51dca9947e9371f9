"""What a step does besides its work: its answer reports it, and the clients that wait for such an end are woken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from waypost.policy import SIDE_EFFECTS_MAX
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.conformance.schedules import fire, saved
from waypost.values import MessageState, SideEffect, chain_id

EffectTuple = tuple[str, str | None, str | None]


def effect_tuples(also: Sequence[SideEffect], *, queue: str = QUEUE) -> list[EffectTuple]:
    """Return event, message and reason of each side effect, sorted."""
    assert all(change.queue == queue and change.count == 1 for change in also)
    return sorted(((change.event, change.id, change.reason) for change in also), key=str)


class TestSideEffects:
    """An answer reports the side effects of its step: the event, the message and the reason."""

    @pytest.mark.promise("SEE-1")
    def test_a_step_without_side_effects_reports_none(self, bench: Bench) -> None:
        bench.publish(key="a", window=60)
        bench.publish(key="b", on_conflict="replace")
        assert bench.also == ()
        claimed = bench.claimed(2)
        assert (claimed.also, claimed.wake) == ((), {})
        dead, retried = claimed.leases
        bench.settle_batch([bench.settlement(dead, "dead"), bench.settlement(retried, "retry")])
        assert bench.also == ()
        bench.settle(bench.claim_one(), "drop")
        assert bench.also == ()

    @pytest.mark.promise("SEE-1", "LEASE-4")
    def test_a_claim_reports_leases_that_had_ended(self, bench: Bench) -> None:
        bench.configure(lease=10)
        ids = bench.publish_count(3)
        leases = bench.claim(3)
        bench.after(10)
        claimed = bench.claimed(1)
        assert effect_tuples(claimed.also) == [("expired", id, None) for id in sorted(ids)]
        assert {(change.id, change.token) for change in claimed.also} == {(lease.id, lease.token) for lease in leases}
        assert bench.claimed(2).also == ()

    @pytest.mark.promise("SEE-1", "LEASE-5", "DEAD-1")
    def test_a_claim_reports_buried_messages_and_trimmed_dead_letters(self, bench: Bench) -> None:
        bench.configure(lease=10, max_deliveries=1, dead_max=1)
        first = bench.publish()
        lease = bench.claim_one()
        bench.after(10)
        claimed = bench.claimed(1)
        assert claimed.leases == []
        assert effect_tuples(claimed.also) == [("dead", first.id, "max_deliveries"), ("expired", first.id, None)]
        assert {change.token for change in claimed.also} == {lease.token}
        second = bench.publish()
        bench.claim_one()
        bench.after(10)
        assert effect_tuples(bench.claimed(1).also) == sorted([
            ("dead", second.id, "max_deliveries"), ("dead_trimmed", first.id, "dead_max"), ("expired", second.id, None),
        ])  # fmt: skip

    @pytest.mark.promise("SEE-1", "DEAD-1")
    @pytest.mark.parametrize("by", ["settle", "claim"])
    def test_trimmed_dead_letters_are_reported(self, bench: Bench, by: str) -> None:
        bench.configure(dead_max=1) if by == "settle" else bench.configure(dead_keep=5)
        first, second = bench.publish(), bench.publish()
        bench.settle(bench.claim_one(), "dead")
        assert bench.also == ()
        if by == "settle":
            bench.settle(bench.claim_one(), "dead")
            assert effect_tuples(bench.also) == [("dead_trimmed", first.id, "dead_max")]
        else:
            bench.after(5)
            claimed = bench.claimed(1)
            assert effect_tuples(claimed.also) == [("dead_trimmed", first.id, "dead_keep")]
            assert [lease.id for lease in claimed.leases] == [second.id]

    @pytest.mark.promise("SEE-1", "TIMER-4")
    @pytest.mark.parametrize("by", ["claim", "promoter"])
    def test_timers_that_become_ready_are_reported(self, bench: Bench, by: str) -> None:
        ids = bench.publish_count(2, delay=5)
        bench.publish(delay=60)
        bench.after(5)
        also = bench.claimed(1).also if by == "claim" else bench.run(bench.store.promote(QUEUE)).also
        assert effect_tuples(also) == [("promoted", id, "due") for id in sorted(ids)]
        assert {change.token for change in also} == {0}

    @pytest.mark.promise("SEE-1", "PUB-7")
    @pytest.mark.parametrize("by", ["publish", "schedule"])
    def test_messages_dropped_to_make_room_are_reported(self, bench: Bench, by: str) -> None:
        bench.configure(max_pending=2, overload="drop_oldest")
        ids = bench.publish_count(2)
        schedule = saved(bench)
        bench.after(60)
        bench.watch(ids[0], "anna")
        if by == "publish":
            bench.publish()
        else:
            fire(bench, schedule)
        assert effect_tuples(bench.also) == [("dropped", ids[0], "overload")]
        assert "anna" in bench.woken[QUEUE]

    @pytest.mark.promise("SEE-1", "PUB-5", "PUB-6")
    def test_generations_of_a_key_are_reported(self, bench: Bench) -> None:
        bench.configure(lease=10)
        first = bench.publish(key="a")
        second = bench.publish(key="a", on_conflict="replace")
        assert effect_tuples(bench.also) == [("replaced", first.id, "publish")]
        lease = bench.claim_one()
        third = bench.publish(key="a", on_conflict="replace")
        assert bench.also == ()
        bench.settle(lease)
        assert effect_tuples(bench.also) == [("promoted", third.id, "unparked")]
        assert lease.id == second.id
        bench.claim_one()
        fourth = bench.publish(key="a", on_conflict="replace")
        bench.after(10)
        assert effect_tuples(bench.claimed(1).also) == [
            ("promoted", fourth.id, "unparked"),
            ("replaced", third.id, "expired"),
        ]

    @pytest.mark.promise("SEE-1", "LEASE-12")
    def test_a_cancel_completed_by_the_end_of_a_lease_is_reported(self, bench: Bench) -> None:
        bench.configure(lease=10)
        published = bench.publish()
        bench.claim_one()
        assert bench.cancel(published.id) == "requested"
        bench.after(10)
        assert effect_tuples(bench.claimed(1).also) == [("cancelled", published.id, "expired")]

    @pytest.mark.promise("SEE-1", "CHAIN-2")
    @pytest.mark.parametrize("outcome", ["done", "dead"])
    def test_messages_that_waited_for_a_chain_are_reported(self, bench: Bench, outcome: str) -> None:
        first = bench.publish(id=(draft_id := bench.session.message_ids(1)[0]), chain=chain_id(QUEUE, draft_id))
        waits = bench.publish(after_chains=[first.chain_id])
        bench.deliver_all()
        bench.settle(bench.claim_one(), "done" if outcome == "done" else "dead")
        bench.deliver_all()
        expected = ("promoted", waits.id, "unblocked") if outcome == "done" else ("dead", waits.id, "blocker_failed")
        assert effect_tuples(bench.also) == [expected]

    @pytest.mark.promise("SEE-1", "LEASE-12", "CHAIN-2")
    @pytest.mark.parametrize("by", ["id", "key", "purge"])
    def test_a_cancel_and_a_purge_report_messages_that_waited_for_a_failed_chain(self, bench: Bench, by: str) -> None:
        bench.configure(dead_max=1)
        letter = bench.publish()
        bench.settle(bench.claim_one(), "dead")
        id = bench.session.message_ids(1)[0]
        first = bench.publish(id=id, key="a", chain=chain_id(QUEUE, id))
        waits = bench.publish(after_chains=[first.chain_id])
        bench.deliver_all()
        match by:
            case "id":
                assert bench.cancel(id) == "cancelled"
            case "key":
                assert bench.cancel(key="a") == "cancelled"
            case "purge":
                assert bench.purge("ready").removed == 1
        bench.deliver_all()
        assert effect_tuples(bench.also) == [
            ("dead", waits.id, "blocker_failed"), ("dead_trimmed", letter.id, "dead_max"),
        ]  # fmt: skip

    @pytest.mark.promise("SEE-1", "LEASE-12", "PUB-6")
    def test_a_cancel_by_key_reports_the_next_generation_that_it_ends(self, bench: Bench) -> None:
        bench.publish(key="a")
        running = bench.claim_one()
        parked = bench.publish(key="a", on_conflict="replace")
        operation = bench.operation()
        for _ in range(2):
            assert bench.cancel(key="a", operation=operation) == "requested"
            assert effect_tuples(bench.also) == [("cancelled", parked.id, "parked")]
        bench.settle(running, "retry")
        assert bench.also == ()
        assert (bench.ledger().cancelled, bench.ledger().balance) == (2, 0)

    @pytest.mark.promise("SEE-1", "LEASE-12")
    def test_the_messages_of_a_cancel_or_purge_are_no_side_effects(self, bench: Bench) -> None:
        ids = bench.publish_count(2) + bench.publish_count(2, delay=5)
        bench.settle(bench.claim_one(), "dead")
        assert [bench.cancel(id) for id in (ids[0], ids[1], ids[2])] == ["finished", "cancelled", "cancelled"]
        assert (bench.also, bench.woken) == ((), {})
        for state in ("ready", "delayed", "dead"):
            bench.purge(state)
            assert (bench.also, bench.woken) == ((), {})

    @pytest.mark.promise("SEE-1")
    def test_side_effects_are_reported_though_the_journal_is_off(self, bench: Bench) -> None:
        bench.configure(lease=10, journal="off")
        published, timer = bench.publish(), bench.publish(delay=5)
        bench.claim_one()
        bench.after(10)
        assert effect_tuples(bench.claimed(5).also) == sorted(
            [("expired", published.id, None), ("promoted", timer.id, "due")]
        )

    @pytest.mark.promise("SEE-1", "LEASE-6")
    def test_a_repeat_reports_the_side_effects_of_the_first_call(self, bench: Bench) -> None:
        bench.configure(lease=10, max_pending=1, overload="drop_oldest")
        first = bench.publish()
        operation = bench.operation()
        draft = bench.draft()
        bench.publish_drafts([draft], operation=operation)
        also = bench.also
        assert effect_tuples(also) == [("dropped", first.id, "overload")]
        bench.publish_drafts([draft], operation=operation)
        assert bench.also == also
        bench.watch(draft.id, "anna")
        bench.claim_one()
        bench.after(10)
        bench.configure(max_deliveries=1)
        operation = bench.operation()
        claimed = bench.claimed(1, operation=operation)
        assert len(claimed.also) == 2
        for replay in (False, True):
            again = bench.claimed(1, operation=operation, replay=replay)
            assert (again.also, again.wake) == (claimed.also, claimed.wake)

    @pytest.mark.promise("SEE-1")
    def test_beyond_a_bound_messages_are_counted(self, bench: Bench) -> None:
        count = SIDE_EFFECTS_MAX + 30
        ids = bench.publish_count(count, delay=5)
        bench.after(5)
        also = bench.claimed(1).also
        named = [change.id for change in also if change.id is not None]
        assert len(set(named)) == len(named) == SIDE_EFFECTS_MAX
        assert set(named) <= set(ids)
        assert also[-1] == SideEffect(QUEUE, "promoted", None, None, "due", 30)
        assert len(also) == SIDE_EFFECTS_MAX + 1


class TestEndsInsideClaims:
    """A client that waits for the end of a message is woken by any step that ends it."""

    @pytest.mark.promise("CHAIN-1", "WAKE-1")
    def test_a_burial_inside_a_claim_wakes_the_waiters(self, bench: Bench) -> None:
        bench.configure(lease=10, max_deliveries=1)
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.claim_one()
        bench.after(10)
        claimed = bench.claimed(1)
        assert claimed.wake == {QUEUE: ["anna"]}
        watched = bench.watch(published.id)
        assert (watched.ended, watched.reason) == ("dead", "max_deliveries")

    @pytest.mark.promise("CHAIN-1", "WAKE-1", "LEASE-12")
    def test_the_end_of_a_lease_that_completes_a_cancel_wakes_the_waiters(self, bench: Bench) -> None:
        bench.configure(lease=10)
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.claim_one()
        bench.cancel(published.id)
        bench.after(10)
        assert bench.claimed(1).wake == {QUEUE: ["anna"]}
        assert bench.watch(published.id).ended == "cancelled"

    @pytest.mark.promise("CHAIN-1", "WAKE-1", "LEASE-12")
    @pytest.mark.parametrize("state", ["ready", "delayed", "waiting"])
    @pytest.mark.parametrize("by", ["id", "key", "purge"])
    def test_a_cancel_and_a_purge_wake_the_waiters(self, bench: Bench, by: str, state: MessageState) -> None:
        if state == "waiting":
            bench.publish(key="a")
            bench.claim_one()
        published = bench.publish(key="a", delay=5 if state == "delayed" else 0, on_conflict="replace")
        bench.watch(published.id, "anna")
        operation = bench.operation()
        for _ in range(2):
            match by:
                case "id":
                    assert bench.cancel(published.id, operation=operation) == "cancelled"
                case "key":
                    bench.cancel(key="a", operation=operation)
                case "purge":
                    assert bench.purge(state, operation=operation).removed == 1
            assert bench.woken == {QUEUE: ["anna"]}
        assert bench.watch(published.id).ended == "cancelled"

    @pytest.mark.promise("CHAIN-1", "CHAIN-2", "WAKE-1", "LEASE-12")
    @pytest.mark.parametrize("by", ["cancel", "purge"])
    def test_a_cancel_and_a_purge_wake_the_waiters_of_a_chain(self, bench: Bench, by: str) -> None:
        id = bench.session.message_ids(1)[0]
        published = bench.publish(id=id, chain=chain_id(QUEUE, id))
        bench.run(bench.store.watch_chain(QUEUE, published.id, "anna"))
        bench.cancel(id) if by == "cancel" else bench.purge("ready")
        assert bench.woken == {QUEUE: ["anna"]}

    @pytest.mark.promise("CHAIN-1", "WAKE-1", "LEASE-7")
    def test_a_claim_at_most_once_wakes_the_waiters(self, bench: Bench) -> None:
        bench.configure(lease=None)
        published = bench.publish()
        bench.watch(published.id, "anna")
        claimed = bench.claimed(1)
        assert [lease.id for lease in claimed.leases] == [published.id]
        assert claimed.wake == {QUEUE: ["anna"]}

    @pytest.mark.promise("CHAIN-1", "CHAIN-2", "WAKE-1")
    def test_a_burial_inside_a_claim_wakes_the_waiters_of_its_chain(self, bench: Bench) -> None:
        bench.configure(lease=10, max_deliveries=1)
        id = bench.session.message_ids(1)[0]
        published = bench.publish(id=id, chain=chain_id(QUEUE, id))
        bench.run(bench.store.watch_chain(QUEUE, published.id, "anna"))
        bench.claim_one()
        bench.after(10)
        assert bench.claimed(1).wake == {QUEUE: ["anna"]}

    @pytest.mark.promise("CHAIN-2", "WAKE-1", "LEASE-7")
    def test_a_claim_that_ends_a_chain_wakes_a_worker_for_the_waiting_messages(self, bench: Bench) -> None:
        bench.configure(lease=None)
        id = bench.session.message_ids(1)[0]
        bench.publish(id=id, chain=chain_id(QUEUE, id), delay=5)
        waits = bench.publish(after_chains=[chain_id(QUEUE, id)])
        bench.deliver_all()
        assert bench.claim(1, sleeper="carl") == []
        bench.after(5)
        claimed = bench.claimed(1)
        assert [lease.id for lease in claimed.leases] == [id]
        assert effect_tuples(claimed.also) == sorted([("promoted", id, "due"), ("promoted", waits.id, "unblocked")])
        assert claimed.wake == {QUEUE: ["carl"]}
