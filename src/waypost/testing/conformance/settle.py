"""Settling: every outcome, its results and continuations, and cancels."""

from __future__ import annotations

import pytest

from waypost.store.port import Target
from waypost.testing.bench import QUEUE, Bench
from waypost.values import OutcomeName


class TestOutcomes:
    """What each outcome does."""

    @pytest.mark.promise("LEASE-8")
    def test_done_removes_the_message(self, bench: Bench) -> None:
        published = bench.publish()
        assert bench.settle(bench.claim_one()) == "done"
        assert bench.state_of(published.id) is None
        assert bench.ledger().done == 1

    @pytest.mark.promise("LEASE-8")
    def test_retry_brings_it_back_after_its_pause(self, bench: Bench) -> None:
        published = bench.publish()
        assert bench.settle(bench.claim_one(), "retry", after=5) == "retried"
        assert bench.stored(published.id).state == "delayed"
        bench.after(4.999)
        assert bench.claim() == []
        bench.after(0.001)
        assert bench.claim_one().attempts == 1

    @pytest.mark.promise("LEASE-8")
    @pytest.mark.parametrize("outcome", ["retry", "snooze"])
    def test_without_a_pause_it_goes_to_the_end_of_its_priority(self, bench: Bench, outcome: OutcomeName) -> None:
        first, second = bench.publish_count(2)
        bench.settle(bench.claim_one(), outcome)
        assert [lease.id for lease in bench.claim(2)] == [second, first]

    @pytest.mark.promise("LEASE-8")
    def test_snooze_brings_it_back_and_is_no_failure(self, bench: Bench) -> None:
        bench.publish()
        assert bench.settle(bench.claim_one(), "snooze", after=5) == "snoozed"
        bench.after(5)
        lease = bench.claim_one()
        assert (lease.attempts, lease.deliveries, lease.token) == (0, 1, 2)

    @pytest.mark.promise("LEASE-8", "DEAD-1")
    def test_dead_moves_it_to_the_dead_letters(self, bench: Bench) -> None:
        published = bench.publish()
        assert bench.settle(bench.claim_one(), "dead", reason="rejected") == "dead"
        assert bench.ids("dead") == [published.id]

    @pytest.mark.promise("LEASE-8")
    def test_drop_forgets_it(self, bench: Bench) -> None:
        published = bench.publish()
        assert bench.settle(bench.claim_one(), "drop") == "dropped"
        assert bench.state_of(published.id) is None
        assert bench.ledger().dropped == 1

    @pytest.mark.promise("LEASE-8", "LEASE-11")
    def test_release_hands_it_back_at_once_for_free(self, bench: Bench) -> None:
        bench.publish()
        assert bench.settle(bench.claim_one(), "release") == "released"
        lease = bench.claim_one()
        assert (lease.deliveries, lease.attempts, lease.token) == (1, 0, 2)

    @pytest.mark.promise("LEASE-10")
    def test_many_outcomes_settle_in_one_step(self, bench: Bench) -> None:
        bench.publish_count(6)
        leases = bench.claim(6)
        outcomes: list[OutcomeName] = ["done", "retry", "snooze", "dead", "drop", "release"]
        statuses = bench.settle_batch(
            [bench.settlement(lease, outcome, after=1) for lease, outcome in zip(leases, outcomes, strict=True)]
        )
        assert statuses == ["done", "retried", "snoozed", "dead", "dropped", "released"]
        ledger = bench.ledger()
        assert (ledger.done, ledger.delayed, ledger.dead, ledger.dropped, ledger.ready) == (1, 2, 1, 1, 1)

    @pytest.mark.promise("LEASE-10")
    def test_a_full_chunk_settles_in_one_step(self, bench: Bench) -> None:
        bench.publish_count(512)
        leases = bench.claim(512)
        assert set(bench.settle_batch([bench.settlement(lease) for lease in leases])) == {"done"}
        assert bench.ledger().done == 512

    @pytest.mark.promise("LEASE-8")
    def test_every_claim_is_closed_by_exactly_one_event(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        for outcome in ("retry", "snooze", "release", None, "done"):
            lease = bench.claim_one()
            if outcome is None:
                bench.after(10)
            else:
                bench.settle(lease, outcome)
        event_names = bench.event_names(lease.id)
        assert event_names == [
            "published", "claimed", "retried", "claimed", "snoozed", "claimed", "released", "claimed", "expired",
            "claimed", "done",
        ]  # fmt: skip


class TestResults:
    """A result is kept for a time."""

    @pytest.mark.promise("CHAIN-1")
    def test_a_result_is_kept_until_its_time_is_over(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, result=b"\0result\xff", result_ttl=60)
        assert bench.result(lease.id) == b"\0result\xff"
        bench.after(59.999)
        assert bench.result(lease.id) == b"\0result\xff"
        bench.after(0.001)
        assert bench.result(lease.id) is None

    @pytest.mark.promise("CHAIN-1")
    def test_an_empty_result_is_a_result(self, bench: Bench) -> None:
        bench.publish_count(2)
        with_result, without = bench.claim(2)
        bench.settle(with_result, result=b"")
        bench.settle(without)
        assert bench.result(with_result.id) == b""
        assert bench.result(without.id) is None

    @pytest.mark.promise("CHAIN-1", "LEASE-2")
    def test_a_lost_settle_stores_no_result(self, bench: Bench) -> None:
        bench.configure(lease=1)
        bench.publish()
        late = bench.claim_one()
        bench.after(1)
        current = bench.claim_one()
        assert bench.settle(late, result=b"stale") == "lost"
        assert bench.result(late.id) is None
        bench.settle(current, result=b"true")
        assert bench.result(late.id) == b"true"


class TestContinuations:
    """A settle sends the next message on in the same step; it arrives once."""

    @pytest.mark.promise("CHAIN-2")
    def test_the_next_message_arrives_once(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        following = bench.continuation(lease, "billing", b"bill it", priority=7, group="acme", key="bill:7")
        operation = bench.operation()
        settlement = [bench.settlement(lease, then=[following])]
        assert bench.settle_batch(settlement, operation=operation) == ["done"]
        assert bench.settle_batch(settlement, operation=operation) == ["done"]
        bench.deliver_outgoing()
        bench.deliver_outgoing()
        (arrived,) = bench.claim(10, queue="billing")
        assert (arrived.id, bench.body(arrived)) == (following.id, b"bill it")
        assert (arrived.priority, arrived.group, arrived.key) == (7, "acme", "bill:7")
        assert bench.ledger().transferred == 1
        assert bench.ledger(queue="billing").published == 1

    @pytest.mark.promise("CHAIN-2")
    def test_a_resent_continuation_is_not_stored_again(self, bench: Bench) -> None:
        bench.publish()
        following = bench.continuation(bench.claim_one(), "billing")
        assert bench.forward(following).status == "queued"
        assert bench.forward(following).status == "duplicate"
        bench.settle(bench.claim_one(queue="billing"), queue="billing")
        assert bench.forward(following).status == "duplicate"
        assert bench.ledger(queue="billing").published == 1

    @pytest.mark.promise("CHAIN-2", "PUB-4")
    def test_a_continuation_refused_for_its_key_stays_refused(self, bench: Bench) -> None:
        bench.publish(key="bill:7", queue="billing")
        bench.publish()
        following = bench.continuation(bench.claim_one(), "billing", key="bill:7")
        assert bench.forward(following).status == "duplicate"
        bench.settle(bench.claim_one(queue="billing"), queue="billing")
        assert bench.forward(following).status == "duplicate"
        assert bench.claim(queue="billing") == []

    @pytest.mark.promise("CHAIN-2")
    def test_a_continuation_may_stay_in_its_queue_and_wait(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        following = bench.continuation(lease, "orders", delay=10)
        bench.settle(lease, then=[following])
        bench.deliver_outgoing()
        assert bench.claim() == []
        bench.after(10)
        assert bench.claim_one().id == following.id

    @pytest.mark.promise("CHAIN-2")
    def test_several_continuations_go_to_several_queues(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        queues = ["billing", "mail", "billing"]
        following = [bench.continuation(lease, queue, index=index) for index, queue in enumerate(queues)]
        bench.settle(lease, then=following)
        bench.deliver_outgoing()
        # Nothing is promised about the order in which they arrive.
        assert {one.id for one in bench.claim(5, queue="billing")} == {following[0].id, following[2].id}
        assert [one.id for one in bench.claim(5, queue="mail")] == [following[1].id]
        assert bench.ledger().transferred == 3

    @pytest.mark.promise("CHAIN-2", "LEASE-2")
    def test_a_lost_settle_sends_nothing_on(self, bench: Bench) -> None:
        bench.configure(lease=1)
        bench.publish()
        late = bench.claim_one()
        bench.after(1)
        bench.claim_one()
        assert bench.settle(late, then=[bench.continuation(late, "billing")]) == "lost"
        bench.deliver_outgoing()
        assert bench.claim(queue="billing") == []
        assert bench.ledger().transferred == 0

    @pytest.mark.promise("CHAIN-2", "PUB-7")
    def test_a_continuation_is_never_refused_by_a_full_queue(self, bench: Bench) -> None:
        bench.configure(queue="billing", max_pending=1)
        bench.publish(queue="billing")
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing")])
        bench.deliver_outgoing()
        ledger = bench.ledger(queue="billing")
        assert (ledger.ready, ledger.over_cap) == (2, 1)

    @pytest.mark.promise("PUB-7", "CHAIN-2")
    def test_only_messages_past_the_cap_are_counted(self, bench: Bench) -> None:
        bench.configure(queue="billing", max_pending=2)
        bench.configure(queue="open")
        bench.publish_count(3)
        for lease in bench.claim(3):
            assert (
                bench.settle(
                    lease, then=[bench.continuation(lease, "billing"), bench.continuation(lease, "open", index=1)]
                )
                == "done"
            )
            bench.deliver_outgoing()
        billing, free = bench.ledger(queue="billing"), bench.ledger(queue="open")
        assert (billing.ready, billing.over_cap) == (3, 1)
        assert (free.ready, free.over_cap) == (3, 0)
        bench.configure(queue="billing", max_pending=None)
        assert bench.ledger(queue="billing").over_cap == 1

    @pytest.mark.promise("PUB-7", "PUB-6")
    def test_a_continuation_to_its_own_full_queue_is_counted(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        bench.publish()
        lease = bench.claim_one()
        bench.publish()
        assert bench.settle(lease, then=[bench.continuation(lease, QUEUE)]) == "done"
        bench.deliver_outgoing()
        assert (bench.ledger().ready, bench.ledger().over_cap) == (2, 1)

    @pytest.mark.promise("PUB-7", "DEAD-2")
    def test_messages_redriven_into_a_full_queue_are_counted(self, bench: Bench) -> None:
        bench.publish_count(3)
        for lease in bench.claim(3):
            bench.settle(lease, "dead")
        bench.configure(max_pending=2)
        bench.publish()
        assert len(bench.redrive().moved) == 3
        assert (bench.ledger().ready, bench.ledger().over_cap) == (4, 2)

    @pytest.mark.promise("CHAIN-2", "SEE-3")
    def test_an_arrival_is_journalled_as_forwarded(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing")])
        bench.deliver_outgoing()
        assert [event.cause for event in bench.events("published", queue="billing")] == ["forwarded"]


class TestCancel:
    """Cancel by id or key, in every state."""

    @pytest.mark.promise("LEASE-12")
    @pytest.mark.parametrize("delay", [0, 60])
    @pytest.mark.parametrize("by", ["id", "key"])
    def test_a_waiting_message_is_cancelled_at_once(self, bench: Bench, delay: float, by: str) -> None:
        published = bench.publish(key="k", delay=delay)
        assert (bench.cancel(published.id) if by == "id" else bench.cancel(key="k")) == "cancelled"
        assert bench.state_of(published.id) is None
        bench.after(60)
        assert bench.claim() == []
        assert bench.ledger().cancelled == 1
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("LEASE-12")
    @pytest.mark.parametrize("by", ["id", "key"])
    def test_a_running_message_learns_of_the_cancel_at_its_next_renewal(self, bench: Bench, by: str) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        assert bench.extend(lease) == "ok"
        assert (bench.cancel(lease.id) if by == "id" else bench.cancel(key="k")) == "requested"
        assert bench.stored(lease.id).cancel_requested
        assert bench.extend(lease) == "cancel"
        assert bench.extend(lease) == "cancel"

    @pytest.mark.promise("LEASE-12")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release", "dead", "drop"])
    def test_every_end_but_done_becomes_cancelled(self, bench: Bench, outcome: OutcomeName) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.cancel(lease.id)
        assert bench.settle(lease, outcome, after=1) == "cancelled"
        assert bench.state_of(lease.id) is None
        assert bench.ledger().cancelled == 1

    @pytest.mark.promise("LEASE-12")
    def test_done_wins_over_cancel(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.cancel(lease.id)
        assert bench.settle(lease, result=b"made it") == "done"
        assert bench.result(lease.id) == b"made it"
        assert (bench.ledger().done, bench.ledger().cancelled) == (1, 0)

    @pytest.mark.promise("LEASE-12")
    def test_a_cancelled_message_whose_lease_ends_is_not_delivered_again(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        lease = bench.claim_one()
        bench.cancel(lease.id)
        bench.after(10)
        assert bench.claim() == []
        assert (bench.ledger().cancelled, bench.ledger().expired) == (1, 0)
        assert bench.settle(lease) == "lost"

    @pytest.mark.promise("LEASE-12")
    def test_a_second_request_changes_nothing(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        assert [bench.cancel(lease.id), bench.cancel(lease.id)] == ["requested", "requested"]
        assert len(bench.events("cancel_requested")) == 1

    @pytest.mark.promise("LEASE-12")
    def test_a_message_that_never_existed_cannot_be_cancelled(self, bench: Bench) -> None:
        assert bench.cancel("0" * 24) == "unknown"
        assert bench.cancel(key="unused") == "unknown"
        assert bench.ledger().cancelled == 0

    @pytest.mark.promise("LEASE-12")
    def test_a_dead_letter_is_finished(self, bench: Bench) -> None:
        published = bench.publish()
        bench.settle(bench.claim_one(), "dead")
        assert bench.cancel(published.id) == "finished"
        assert bench.ids("dead") == [published.id]

    @pytest.mark.promise("LEASE-12")
    def test_a_finished_message_that_is_remembered_is_finished(self, bench: Bench) -> None:
        bench.configure(completed=1)
        bench.publish_count(2)
        by_result, by_history = bench.claim(2)
        bench.settle(by_result, result=b"kept", result_ttl=60)
        bench.settle(by_history)
        assert bench.cancel(by_result.id) == "finished"
        assert bench.cancel(by_history.id) == "finished"
        bench.after(60)
        assert bench.cancel(by_result.id) == "unknown"

    @pytest.mark.promise("LEASE-12")
    def test_a_key_whose_message_finished_inside_its_window_is_finished(self, bench: Bench) -> None:
        bench.publish(key="k", window=60)
        bench.settle(bench.claim_one())
        assert bench.cancel(key="k") == "finished"
        bench.after(60)
        assert bench.cancel(key="k") == "unknown"

    @pytest.mark.promise("LEASE-12")
    def test_a_cancelled_retry_does_not_come_back(self, bench: Bench) -> None:
        published = bench.publish()
        bench.settle(bench.claim_one(), "retry", after=10)
        assert bench.cancel(published.id) == "cancelled"
        bench.after(10)
        assert bench.claim() == []

    @pytest.mark.promise("LEASE-12")
    def test_many_are_cancelled_in_one_step(self, bench: Bench) -> None:
        ids = bench.publish_count(3)
        bench.publish(key="k")
        targets = [*(Target(id=id) for id in ids), Target(key="k"), Target(key="k"), Target(id=ids[0])]
        statuses = bench.run(bench.store.cancel("orders", targets, bench.operation())).result
        assert statuses == ["cancelled"] * 4 + ["unknown"] * 2
