"""Lost replies: a repeat with the same operation gets the first answer, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from waypost.errors import OperationTooOld
from waypost.identity import Operation
from waypost.policy import REPLAY_MAX
from waypost.testing.bench import Bench


class TestLostReplies:
    """Each verb, sent twice."""

    @pytest.mark.promise("PUB-3")
    def test_a_repeated_publish_stores_once_and_answers_the_same(self, bench: Bench) -> None:
        bench.publish(key="taken")
        operation = bench.operation()
        drafts = [bench.draft(), bench.draft(key="taken"), bench.draft(key="k", delay=5)]
        first = bench.publish_drafts(drafts, operation=operation)
        woken = bench.woken
        journalled = len(bench.events())
        bench.settle(bench.claim_one())
        again = bench.publish_drafts(drafts, operation=operation)
        assert again == first
        assert bench.woken == woken
        assert bench.ledger().published == 3
        assert len(bench.events("published", "duplicate")) == journalled

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_claim_returns_the_same_leases_armed_anew(self, bench: Bench) -> None:
        bench.publish_count(3)
        operation = bench.operation()
        first = bench.claim(2, operation=operation)
        bench.after(20)
        again = bench.claim(2, operation=operation)
        assert [(one.id, one.token, one.nonce, one.deliveries) for one in again] == [
            (one.id, one.token, one.nonce, one.deliveries) for one in first
        ]
        assert {one.lease_end_ms for one in again} == {bench.now_ms + 60_000}
        assert {message.lease_end_ms for message in bench.listing("leased")} == {bench.now_ms + 60_000}
        assert bench.ledger().claims == 2
        assert len(bench.events("claimed")) == 2

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_claim_leaves_out_what_is_no_longer_held(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish_count(3)
        operation = bench.operation()
        done, taken, held = bench.claim(3, operation=operation)
        bench.settle(done)
        bench.after(5)
        bench.extend(held)
        bench.after(5)
        assert [one.id for one in bench.claim(5)] == [taken.id]
        assert [one.id for one in bench.claim(5, operation=operation)] == [held.id]

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_claim_takes_no_fresh_work(self, bench: Bench) -> None:
        operation = bench.operation()
        assert bench.claim(5, operation=operation) == []
        bench.publish()
        assert bench.claim(5, operation=operation) == []
        assert bench.ledger().ready == 1

    @pytest.mark.promise("LEASE-6")
    def test_a_claim_asked_for_as_a_replay_takes_no_fresh_work(self, bench: Bench) -> None:
        bench.publish()
        operation = bench.operation()
        assert bench.claim(5, operation=operation, replay=True) == []
        assert bench.ledger().ready == 1

    @pytest.mark.promise("LEASE-6")
    def test_a_claim_that_arrives_after_its_replay_takes_nothing(self, bench: Bench) -> None:
        bench.publish()
        operation = bench.operation()
        bench.claim(5, operation=operation, replay=True)
        assert bench.claim(5, operation=operation) == []
        assert bench.ledger().claims == 0

    @pytest.mark.promise("LEASE-6")
    def test_a_replay_finds_what_the_claim_took(self, bench: Bench) -> None:
        bench.publish_count(2)
        operation = bench.operation()
        first = bench.claim(2, operation=operation)
        bench.publish()
        again = bench.claim(2, operation=operation, replay=True)
        assert [one.id for one in again] == [one.id for one in first]

    @pytest.mark.promise("LEASE-6")
    def test_a_replayed_claim_is_no_sleeper(self, bench: Bench) -> None:
        bench.claimed(sleeper="someone")
        bench.publish()
        assert bench.woken == {"orders": ["someone"]}
        bench.claimed(sleeper="replaying", replay=True)
        bench.publish()
        assert bench.woken == {}

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_settle_answers_the_same_and_changes_nothing(self, bench: Bench) -> None:
        bench.publish_count(3)
        leases = bench.claim(3)
        operation = bench.operation()
        settlements = [
            bench.settlement(leases[0]),
            bench.settlement(leases[1], "retry"),
            bench.settlement(leases[2], "dead"),
        ]
        first = bench.settle_batch(settlements, operation=operation)
        assert first == ["done", "retried", "dead"]
        ledger, journalled = bench.ledger(), len(bench.events())
        assert bench.settle_batch(settlements, operation=operation) == first
        assert bench.ledger() == ledger
        assert len(bench.events()) == journalled

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_settle_does_not_settle_the_next_delivery(self, bench: Bench) -> None:
        bench.publish()
        operation = bench.operation()
        first = bench.claim_one()
        assert bench.settle(first, "retry", operation=operation) == "retried"
        second = bench.claim_one()
        assert bench.settle(first, "retry", operation=operation) == "retried"
        assert bench.settle(second) == "done"
        assert bench.ledger().retried == 1

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_extend_answers_the_same(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        operation = bench.operation()
        assert bench.extend(lease, operation=operation) == "ok"
        bench.settle(lease)
        assert bench.extend(lease, operation=operation) == "ok"
        assert bench.extend(lease) == "lost"

    @pytest.mark.promise("LEASE-6", "LEASE-12")
    def test_a_repeated_cancel_answers_the_same(self, bench: Bench) -> None:
        bench.publish(key="k")
        operation = bench.operation()
        assert bench.cancel(key="k", operation=operation) == "cancelled"
        newer = bench.publish(key="k")
        assert bench.cancel(key="k", operation=operation) == "cancelled"
        assert bench.ids("ready") == [newer.id]

    @pytest.mark.promise("LEASE-6", "DEAD-2")
    def test_a_repeated_redrive_and_purge_answer_the_same(self, bench: Bench) -> None:
        bench.publish_count(2)
        for lease in bench.claim(2):
            bench.settle(lease, "dead")
        operation = bench.operation()
        moved = bench.redrive(limit=1, operation=operation)
        assert len(moved.moved) == 1
        assert moved.more
        assert bench.redrive(limit=1, operation=operation) == moved
        assert bench.ledger().redriven == 1
        purging = bench.operation()
        assert bench.purge("ready", operation=purging).removed == 1
        bench.publish()
        assert bench.purge("ready", operation=purging).removed == 1
        assert bench.ledger().ready == 1


class TestOperations:
    """How far back a store remembers."""

    @pytest.mark.promise("LEASE-6", "PUB-3")
    def test_the_last_results_of_a_session_are_kept(self, bench: Bench) -> None:
        operation, draft = bench.operation(), bench.draft()
        first = bench.publish_drafts([draft], operation=operation)
        for _ in range(REPLAY_MAX - 1):
            bench.cancel("0" * 24)
        assert bench.publish_drafts([draft], operation=operation) == first
        assert bench.ledger().published == 1

    @pytest.mark.promise("LEASE-6", "PUB-3", "SEE-6")
    def test_an_older_operation_is_refused_and_does_not_run(self, bench: Bench) -> None:
        operation = bench.operation()
        bench.publish(operation=operation)
        for _ in range(REPLAY_MAX):
            bench.cancel("0" * 24)
        with pytest.raises(OperationTooOld) as refusal:
            bench.publish(operation=operation)
        assert refusal.value.outcome == "unknown"
        assert bench.ledger().published == 1

    @pytest.mark.promise("LEASE-6")
    def test_every_verb_refuses_an_operation_that_is_too_old(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        old = Operation(bench.session.id, 1)
        for _ in range(REPLAY_MAX):
            bench.cancel("0" * 24)
        ledger = bench.ledger()
        calls: list[Callable[[], object]] = [
            lambda: bench.publish(operation=old),
            lambda: bench.claim(operation=old),
            lambda: bench.claim(operation=old, replay=True),
            lambda: bench.settle(lease, operation=old),
            lambda: bench.extend(lease, operation=old),
            lambda: bench.cancel(lease.id, operation=old),
            lambda: bench.redrive(operation=old),
            lambda: bench.purge("ready", operation=old),
        ]
        for call in calls:
            with pytest.raises(OperationTooOld):
                call()
        assert bench.ledger() == ledger

    @pytest.mark.promise("LEASE-6")
    def test_operations_may_arrive_out_of_order(self, bench: Bench) -> None:
        early, late = bench.operation(), bench.operation()
        first, second = bench.draft(), bench.draft()
        bench.publish_drafts([second], operation=late)
        bench.publish_drafts([first], operation=early)
        assert bench.ids("ready") == [second.id, first.id]

    @pytest.mark.promise("LEASE-6")
    def test_sessions_and_queues_number_their_operations_apart(self, bench: Bench) -> None:
        other = bench.another_client()
        bench.publish()
        other.publish()
        bench.publish(queue="billing")
        assert bench.ledger().published == 2
        assert bench.ledger(queue="billing").published == 1

    @pytest.mark.promise("LEASE-6", "LEASE-10")
    def test_calls_of_one_flush_have_each_their_own_answer(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        calls = [bench.store.publish("orders", [bench.draft()], bench.operation()) for _ in range(2)]
        first, second = bench.runner.run_many(calls)
        assert not isinstance(first, Exception)
        assert first.result[0].status == "queued"
        assert type(second).__name__ == "QueueFull"
