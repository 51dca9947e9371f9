"""Lost replies: a repeat with the same operation gets the first answer, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from waypost.codec import with_id
from waypost.errors import MessageIdInUse, OperationTooOld, SessionInUse
from waypost.identity import OPERATIONS_MAX, Operation, new_mark
from waypost.policy import REPLAY_MAX, REPLAY_TTL_MS, STAMP_AHEAD_MS
from waypost.testing.bench import QUEUE, Bench
from waypost.values import chain_id

#: After so many steps of another client a store has removed expired records: PostgreSQL does it in one step of 64.
SWEEPING_STEPS = 70


class TestLostReplies:
    """Each verb, sent twice."""

    @pytest.mark.promise("PUB-3")
    def test_a_repeated_publish_stores_once_and_answers_the_same(self, bench: Bench) -> None:
        bench.publish(key="in use")
        operation = bench.operation()
        drafts = [bench.draft(), bench.draft(key="in use"), bench.draft(key="k", delay=5)]
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
    def test_a_repeated_claim_returns_the_same_leases_with_new_ends(self, bench: Bench) -> None:
        bench.publish_count(3)
        operation = bench.operation()
        first = bench.claim(2, operation=operation)
        bench.after(20)
        again = bench.claim(2, operation=operation)
        assert [(one.id, one.token, one.deliveries) for one in again] == [
            (one.id, one.token, one.deliveries) for one in first
        ]
        assert {one.lease_end_ms for one in again} == {bench.now_ms + 60_000}
        assert {message.lease_end_ms for message in bench.listing("leased")} == {bench.now_ms + 60_000}
        assert bench.ledger().claims == 2
        assert len(bench.events("claimed")) == 2

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_claim_omits_messages_that_are_no_longer_held(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish_count(3)
        operation = bench.operation()
        done, reclaimed, held = bench.claim(3, operation=operation)
        bench.settle(done)
        bench.after(5)
        bench.extend(held)
        bench.after(5)
        assert [one.id for one in bench.claim(5)] == [reclaimed.id]
        assert [one.id for one in bench.claim(5, operation=operation)] == [held.id]

    @pytest.mark.promise("LEASE-6")
    def test_a_repeated_claim_takes_no_fresh_work(self, bench: Bench) -> None:
        operation = bench.operation()
        assert bench.claim(5, operation=operation) == []
        bench.publish()
        assert bench.claim(5, operation=operation) == []
        assert bench.ledger().ready == 1

    @pytest.mark.promise("LEASE-6")
    def test_a_claim_sent_as_a_replay_takes_no_fresh_work(self, bench: Bench) -> None:
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
        old = Operation(bench.session.id, 1, bench.now_ms, bytes(8))
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
    def test_each_session_and_queue_numbers_its_own_operations(self, bench: Bench) -> None:
        other = bench.another_client()
        bench.publish()
        other.publish()
        bench.publish(queue="billing")
        assert bench.ledger().published == 2
        assert bench.ledger(queue="billing").published == 1

    @pytest.mark.promise("LEASE-6", "LEASE-10")
    def test_each_call_of_a_flush_has_its_own_answer(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        calls = [bench.store.publish("orders", [bench.draft()], bench.operation()) for _ in range(2)]
        first, second = bench.runner.run_many(calls)
        assert not isinstance(first, Exception)
        assert first.result[0].status == "queued"
        assert type(second).__name__ == "QueueFull"


def refused_with_time(bench: Bench, call: Callable[[], object]) -> None:
    """Expect the refusal of an operation that is too old, with the time of the store."""
    with pytest.raises(OperationTooOld) as refusal:
        call()
    assert refusal.value._store_ms == bench.now_ms
    assert refusal.value.outcome == "unknown"


class TestForgottenOperations:
    """Operations that the store may have forgotten, by its own clock: none of them runs."""

    @pytest.mark.promise("LEASE-18", "PUB-3")
    def test_a_repeat_is_answered_until_its_time_is_over_and_refused_after_it(self, bench: Bench) -> None:
        operation, draft = bench.operation(), bench.draft()
        first = bench.publish_drafts([draft], operation=operation)
        bench.clock.advance_ms(REPLAY_TTL_MS)
        assert bench.publish_drafts([draft], operation=operation) == first
        bench.clock.advance_ms(1)
        refused_with_time(bench, lambda: bench.publish_drafts([draft], operation=operation))
        assert bench.ledger().published == 1

    @pytest.mark.promise("LEASE-18", "PUB-3")
    def test_a_client_that_froze_does_not_publish_again_what_was_done(self, bench: Bench) -> None:
        operation, draft = bench.operation(), bench.draft()
        bench.publish_drafts([draft], operation=operation)
        bench.settle(bench.claim_one())
        for _ in range(3):  # others make the store forget
            bench.after(REPLAY_TTL_MS / 1000)
            bench.another_client().publish()
        refused_with_time(bench, lambda: bench.publish_drafts([draft], operation=operation))
        assert bench.ledger().published == 4
        assert bench.ledger().balance == 0

    @pytest.mark.promise("LEASE-18")
    def test_every_verb_refuses_an_operation_that_it_may_have_forgotten(self, bench: Bench) -> None:
        bench.publish_count(3)
        lease, dead = bench.claim(2)
        bench.settle(dead, "dead")
        frozen = [bench.operation() for _ in range(8)]
        bench.clock.advance_ms(REPLAY_TTL_MS + 1)
        ledger, events = bench.ledger(), len(bench.events())
        calls: list[Callable[[Operation], object]] = [
            lambda operation: bench.publish(operation=operation),
            lambda operation: bench.claim(operation=operation),
            lambda operation: bench.claim(operation=operation, replay=True),
            lambda operation: bench.settle(lease, operation=operation),
            lambda operation: bench.extend(lease, operation=operation),
            lambda operation: bench.cancel(lease.id, operation=operation),
            lambda operation: bench.redrive(operation=operation),
            lambda operation: bench.purge("ready", operation=operation),
        ]
        for call, operation in zip(calls, frozen, strict=True):
            refused_with_time(bench, lambda call=call, operation=operation: call(operation))  # type: ignore[misc]
        assert bench.ledger() == ledger
        assert len(bench.events()) == events

    @pytest.mark.promise("LEASE-18")
    def test_a_stamp_from_before_the_clock_was_set_back_is_refused(self, bench: Bench) -> None:
        ahead = bench.operation()._replace(stamp=bench.now_ms + STAMP_AHEAD_MS + 1)
        refused_with_time(bench, lambda: bench.publish(operation=ahead))
        assert bench.ledger().published == 0
        nearly = bench.operation()._replace(stamp=bench.now_ms + STAMP_AHEAD_MS)
        assert bench.publish(operation=nearly).status == "queued"

    @pytest.mark.promise("LEASE-18")
    def test_an_operation_stamped_ahead_of_the_clock_is_remembered_as_long_as_it_can_be_repeated(
        self, bench: Bench
    ) -> None:
        ahead, draft = bench.operation()._replace(stamp=bench.now_ms + STAMP_AHEAD_MS), bench.draft()
        first = bench.publish_drafts([draft], operation=ahead)
        bench.clock.advance_ms(REPLAY_TTL_MS + STAMP_AHEAD_MS)
        other = bench.another_client()
        for _ in range(SWEEPING_STEPS):
            other.publish()
        assert bench.publish_drafts([draft], operation=ahead) == first
        assert bench.ledger().published == SWEEPING_STEPS + 1

    @pytest.mark.promise("LEASE-18")
    def test_a_number_of_four_bytes_is_like_any_other(self, bench: Bench) -> None:
        last = bench.operation()._replace(number=OPERATIONS_MAX)
        draft = bench.draft()
        first = bench.publish_drafts([draft], operation=last)
        assert bench.publish_drafts([draft], operation=last) == first
        lease = bench.claim_one(operation=last._replace(number=OPERATIONS_MAX - 1))
        assert bench.settle(lease, operation=last._replace(number=OPERATIONS_MAX - 2)) == "done"
        assert bench.events("published")[0].operation_id == str(last)

    @pytest.mark.promise("LEASE-18")
    def test_the_store_returns_its_time(self, bench: Bench) -> None:
        assert bench.run(bench.store.time()) == bench.now_ms


class TestClonedSessions:
    """Two processes with one session: a machine that was cloned, or a process that was copied."""

    @pytest.mark.promise("LEASE-18")
    def test_every_verb_refuses_a_number_that_another_call_has(self, bench: Bench) -> None:
        bench.publish_count(3)
        lease, dead = bench.claim(2)
        bench.settle(dead, "dead")
        bench.cancel("0" * 24)
        clone = bench.last_operation._replace(mark=new_mark())
        ledger, events = bench.ledger(), len(bench.events())
        calls: list[Callable[[], object]] = [
            lambda: bench.publish(operation=clone),
            lambda: bench.publish(operation=clone, key="k"),
            lambda: bench.claim(operation=clone),
            lambda: bench.claim(operation=clone, replay=True),
            lambda: bench.settle(lease, operation=clone),
            lambda: bench.extend(lease, operation=clone),
            lambda: bench.cancel(lease.id, operation=clone),
            lambda: bench.redrive(operation=clone),
            lambda: bench.purge("ready", operation=clone),
        ]
        for call in calls:
            with pytest.raises(SessionInUse) as refusal:
                call()
            assert refusal.value.outcome == "not done"
        assert bench.ledger() == ledger
        assert len(bench.events()) == events

    @pytest.mark.promise("LEASE-18")
    def test_a_late_clone_does_not_learn_that_its_call_did_not_run(self, bench: Bench) -> None:
        operation = bench.operation()
        bench.after(10)
        bench.publish(operation=operation._replace(mark=new_mark(), stamp=bench.now_ms))
        bench.clock.advance_ms(REPLAY_TTL_MS - 9_999)
        refused_with_time(bench, lambda: bench.publish(operation=operation))
        assert bench.ledger().published == 1

    @pytest.mark.promise("LEASE-18", "LEASE-6", "LEASE-2")
    def test_of_two_clients_that_repeat_one_claim_the_later_holds_the_leases(self, bench: Bench) -> None:
        bench.publish_count(2)
        operation = bench.operation()
        first = bench.claim(2, operation=operation)
        bench.after(20)
        later = bench.claim(2, operation=operation)
        assert [(one.id, one.token, one.deliveries) for one in later] == [
            (one.id, one.token, one.deliveries) for one in first
        ]
        assert not {one.nonce for one in later} & {one.nonce for one in first}
        assert bench.extend(first[0]) == "lost"
        assert bench.settle(first[0]) == "lost"
        assert bench.extend(later[0]) == "ok"
        assert bench.settle(later[0]) == "done"
        again = bench.claim(2, operation=operation)
        assert [one.id for one in again] == [later[1].id]
        assert bench.settle(later[1]) == "lost"
        assert bench.settle(again[0]) == "done"
        assert bench.ledger().claims == 2

    @pytest.mark.promise("LEASE-18", "PUB-3")
    @pytest.mark.parametrize(
        "wish",
        [
            {}, {"key": "k"}, {"delay": 5}, {"key": "held", "on_conflict": "replace"}, {"chain": ""},
            {"after_chains": [""]},
        ],
        ids=["plain", "keyed", "delayed", "parked", "chain", "after"],
    )  # fmt: skip
    @pytest.mark.parametrize("state", ["ready", "leased", "delayed", "dead"])
    def test_a_publish_of_a_known_id_is_refused(self, bench: Bench, wish: dict[str, Any], state: str) -> None:
        bench.publish(key="held")
        bench.claim_one()
        known = bench.draft(delay=60 if state == "delayed" else 0)
        bench.publish_drafts([known])
        if state in ("leased", "dead"):
            lease = bench.claim_one()
            if state == "dead":
                bench.settle(lease, "dead")
        ledger, events = bench.ledger(), len(bench.events())
        chain = chain_id(QUEUE, known.id)
        if "chain" in wish:
            wish = {"chain": chain}
        elif "after_chains" in wish:
            wish = {"after_chains": [chain]}
        draft = bench.draft(**wish)
        copied = structs.replace(draft, id=known.id, envelope=with_id(draft.envelope, known.id))
        for drafts in ([copied], [bench.draft(), copied, bench.draft()]):
            with pytest.raises(MessageIdInUse, match=known.id) as refusal:
                bench.publish_drafts(drafts)
            assert refusal.value.outcome == "not done"
        assert bench.ledger() == ledger
        assert len(bench.events()) == events
        stored = [one for one in bench.listing(state) if one.id == known.id]  # type: ignore[arg-type]
        assert [one.envelope for one in stored] == [known.envelope]
        assert not bench.run(bench.store.watch_chain(QUEUE, known.id, None)).known

    @pytest.mark.promise("LEASE-18", "CHAIN-2")
    @pytest.mark.parametrize("wish", ["chain", "after"])
    def test_a_known_id_that_began_a_chain_is_refused_and_the_chain_goes_on(self, bench: Bench, wish: str) -> None:
        id = bench.session.message_ids(1)[0]
        chain = chain_id(QUEUE, id)
        bench.publish(id=id, chain=chain)
        with pytest.raises(MessageIdInUse, match=id):
            bench.publish(id=id, chain=chain) if wish == "chain" else bench.publish(id=id, after_chains=[chain])
        bench.deliver_all()
        assert bench.run(bench.store.watch_chain(QUEUE, id, None)).open == 1
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.run(bench.store.watch_chain(QUEUE, id, None)).open == 0
        assert bench.claim() == []

    @pytest.mark.promise("LEASE-18")
    def test_a_message_is_not_replaced_by_one_of_its_own_id(self, bench: Bench) -> None:
        known = bench.draft(key="k")
        bench.publish_drafts([known])
        with pytest.raises(MessageIdInUse):
            bench.publish_drafts([structs.replace(known, on_conflict="replace")])
        assert bench.ledger().replaced == 0
        assert bench.publish_drafts([known])[0].status == "duplicate"
