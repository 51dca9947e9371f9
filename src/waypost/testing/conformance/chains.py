"""Waiting for the end of a message, chains over several queues, and messages that wait for chains."""

from __future__ import annotations

import pytest

from waypost.policy import ENDED_TTL_MS, LINKS_MAX, WAITER_TTL_MS
from waypost.testing.bench import QUEUE, Bench
from waypost.values import ChainState, Lease, Links, OutcomeName, Purged, Watched, chain_id, split_chain_id

DAY = 86_400.0
INVOICES = "invoices"
MAILS = "mails"


def go_on(bench: Bench, lease: Lease, *queues: str, queue: str = QUEUE) -> list[str]:
    """Settle a message as done, send one on to each of these queues, and return their ids."""
    then = [bench.continuation(lease, target, index=index) for index, target in enumerate(queues)]
    assert bench.settle(lease, queue=queue, then=then) == "done"
    bench.deliver_all()
    return [one.id for one in then]


class TestWaiting:
    """A client that waits for a message learns how it ended, and is woken for it."""

    @pytest.mark.promise("CHAIN-1")
    def test_a_message_that_has_not_ended_is_described_as_it_is(self, bench: Bench) -> None:
        ready, delayed = bench.publish(), bench.publish(delay=60)
        assert bench.watch(ready.id) == Watched("ready")
        assert bench.watch(delayed.id) == Watched("delayed")
        bench.claim_one()
        assert bench.watch(ready.id) == Watched("leased")

    @pytest.mark.promise("CHAIN-1")
    def test_the_result_comes_with_the_end(self, bench: Bench) -> None:
        published = bench.publish()
        bench.settle(bench.claim_one(), result=b"\0the result")
        assert bench.watch(published.id) == Watched(None, "done", result=b"\0the result")

    @pytest.mark.promise("CHAIN-1", "WAKE-1")
    def test_the_end_wakes_its_waiters(self, bench: Bench) -> None:
        published, other = bench.publish(), bench.publish()
        bench.watch(published.id, "anna")
        bench.watch(published.id, "bert")
        bench.watch(other.id, "carl")
        bench.settle(bench.claim_one())
        assert sorted(bench.woken[QUEUE]) == ["anna", "bert"]
        bench.settle(bench.claim_one())
        assert bench.woken[QUEUE] == ["carl"]

    @pytest.mark.promise("CHAIN-1")
    def test_an_end_with_a_waiter_is_remembered_as_long_as_a_result(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.settle(bench.claim_one())
        assert bench.watch(published.id) == Watched(None, "done")
        bench.after(ENDED_TTL_MS / 1000)
        assert bench.watch(published.id) == Watched(None)

    @pytest.mark.promise("CHAIN-1")
    def test_a_retry_is_no_end(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.settle(bench.claim_one(), "retry", after=5)
        assert bench.woken.get(QUEUE, []) != ["anna"]
        assert bench.watch(published.id, "anna") == Watched("delayed")

    @pytest.mark.promise("CHAIN-1")
    def test_a_dead_letter_ends_the_wait_with_its_reason(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.settle(bench.claim_one(), "dead", reason="rejected", error_type="ValueError", error="no such customer")
        assert bench.woken[QUEUE] == ["anna"]
        assert bench.watch(published.id) == Watched("dead", "dead", "rejected", "ValueError", "no such customer")

    @pytest.mark.promise("CHAIN-1")
    def test_dropped_is_an_end(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.settle(bench.claim_one(), "drop")
        assert bench.woken[QUEUE] == ["anna"]
        assert bench.watch(published.id) == Watched(None, "dropped")

    @pytest.mark.promise("CHAIN-1")
    def test_a_cancel_is_an_end(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.cancel(published.id)
        assert bench.watch(published.id) == Watched(None, "cancelled")

    @pytest.mark.promise("CHAIN-1")
    def test_a_purge_is_an_end(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.purge("ready")
        assert bench.watch(published.id) == Watched(None, "cancelled")

    @pytest.mark.promise("CHAIN-1")
    def test_being_replaced_is_an_end(self, bench: Bench) -> None:
        published = bench.publish(key="k")
        bench.watch(published.id, "anna")
        bench.publish(key="k", on_conflict="replace")
        assert "anna" in bench.woken[QUEUE]
        assert bench.watch(published.id) == Watched(None, "replaced")

    @pytest.mark.promise("CHAIN-1")
    def test_death_by_the_delivery_limit_is_an_end(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.claim_one()
        bench.after(1)
        assert bench.claim() == []
        assert bench.watch(published.id) == Watched("dead", "dead", "max_deliveries")

    @pytest.mark.promise("CHAIN-1")
    def test_a_waiter_that_stopped_polling_is_not_woken(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        bench.after(WAITER_TTL_MS / 1000)
        bench.watch(published.id, "bert")
        bench.settle(bench.claim_one())
        assert "anna" not in bench.woken.get(QUEUE, [])

    @pytest.mark.promise("CHAIN-1")
    def test_a_message_that_never_existed_is_unknown(self, bench: Bench) -> None:
        (id,) = bench.session.message_ids(1)
        assert bench.watch(id, "anna") == Watched(None)
        assert bench.watch(id, "anna", queue="never-used") == Watched(None)

    @pytest.mark.promise("CHAIN-1")
    def test_a_repeated_settle_wakes_the_same_waiters(self, bench: Bench) -> None:
        published = bench.publish()
        bench.watch(published.id, "anna")
        lease, operation = bench.claim_one(), bench.operation()
        bench.settle(lease, operation=operation)
        bench.woken = {}
        bench.settle(lease, operation=operation)
        assert bench.woken == {QUEUE: ["anna"]}


class TestChains:
    """A chain is finished when its last message is done, whatever its queues."""

    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_of_one_ends_with_its_message(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        assert (bench.chain_state(chain).open, bench.chain_state(chain).is_finished) == (1, False)
        lease = bench.claim_one()
        assert lease.chain == chain
        bench.settle(lease)
        state = bench.chain_state(chain)
        assert (state.open, state.failed, state.last, state.is_finished) == (0, None, chain, True)

    @pytest.mark.promise("CHAIN-2")
    def test_a_plain_message_begins_no_chain(self, bench: Bench) -> None:
        published = bench.publish()
        assert not bench.chain_state(published.chain_id).known
        lease = bench.claim_one()
        assert lease.chain is None
        go_on(bench, lease, INVOICES)
        assert bench.claim_one(queue=INVOICES).chain is None
        assert not bench.chain_state(published.chain_id).known

    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_goes_on_over_queues_and_ends_with_its_last_message(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        (invoice,) = go_on(bench, bench.claim_one(), INVOICES)
        assert bench.chain_state(chain).open == 1
        lease = bench.claim_one(queue=INVOICES)
        assert (lease.id, lease.chain) == (invoice, chain)
        (mail,) = go_on(bench, lease, MAILS, queue=INVOICES)
        assert not bench.chain_state(chain).is_finished
        go_on(bench, bench.claim_one(queue=MAILS), queue=MAILS)
        state = bench.chain_state(chain)
        assert (state.is_finished, state.failed, state.last) == (True, None, chain_id(MAILS, mail))

    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_may_come_back_to_a_queue(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        go_on(bench, bench.claim_one(), QUEUE)
        assert bench.chain_state(chain).open == 1
        go_on(bench, bench.claim_one())
        assert bench.chain_state(chain).is_finished

    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_with_branches_ends_with_the_last_of_them(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        go_on(bench, bench.claim_one(), INVOICES, MAILS, MAILS)
        assert bench.chain_state(chain).open == 3
        go_on(bench, bench.claim_one(queue=MAILS), queue=MAILS)
        go_on(bench, bench.claim_one(queue=INVOICES), queue=INVOICES)
        assert bench.chain_state(chain).open == 1
        go_on(bench, bench.claim_one(queue=MAILS), queue=MAILS)
        assert bench.chain_state(chain).is_finished

    @pytest.mark.promise("CHAIN-2", "WAKE-1")
    def test_the_end_of_a_chain_wakes_its_waiters(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.chain_state(chain, "anna")
        go_on(bench, bench.claim_one(), INVOICES)
        assert "anna" not in bench.woken.get(QUEUE, [])
        go_on(bench, bench.claim_one(queue=INVOICES), queue=INVOICES)
        assert "anna" in bench.woken[QUEUE]

    @pytest.mark.promise("CHAIN-2")
    @pytest.mark.parametrize(
        ("outcome", "reason"), [("dead", "rejected"), ("drop", "dropped")], ids=["dead", "dropped"]
    )
    def test_a_message_that_is_not_done_fails_its_chain(self, bench: Bench, outcome: str, reason: str) -> None:
        chain = bench.begin_chain()
        (invoice,) = go_on(bench, bench.claim_one(), INVOICES)
        bench.chain_state(chain, "anna")
        bench.settle(bench.claim_one(queue=INVOICES), outcome, queue=INVOICES)  # type: ignore[arg-type]
        bench.deliver_all()
        state = bench.chain_state(chain)
        assert (state.failed, state.is_finished) == ((chain_id(INVOICES, invoice), reason), True)
        assert "anna" in bench.woken[QUEUE]

    @pytest.mark.promise("CHAIN-2")
    def test_a_cancelled_message_fails_its_chain(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        (invoice,) = go_on(bench, bench.claim_one(), INVOICES)
        bench.cancel(invoice, queue=INVOICES)
        bench.deliver_all()
        assert bench.chain_state(chain).failed == (chain_id(INVOICES, invoice), "cancelled")

    @pytest.mark.promise("CHAIN-2")
    def test_a_purged_message_fails_its_chain(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.purge("ready")
        bench.deliver_all()
        assert bench.chain_state(chain).failed == (chain, "cancelled")

    @pytest.mark.promise("CHAIN-2")
    def test_death_by_the_delivery_limit_fails_the_chain(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        chain = bench.begin_chain()
        bench.claim_one()
        bench.after(1)
        assert bench.claim() == []
        bench.deliver_all()
        assert bench.chain_state(chain).failed == (chain, "max_deliveries")

    @pytest.mark.promise("CHAIN-2")
    def test_a_retry_keeps_the_chain_open(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one(), "retry")
        assert bench.chain_state(chain).open == 1
        lease = bench.claim_one()
        assert lease.chain == chain
        bench.settle(lease)
        assert bench.chain_state(chain).is_finished

    @pytest.mark.promise("CHAIN-2")
    def test_a_redriven_message_does_not_repair_a_failed_chain(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one(), "dead")
        bench.deliver_all()
        bench.redrive()
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.chain_state(chain).failed == (chain, "rejected")

    @pytest.mark.promise("CHAIN-2")
    def test_a_continuation_whose_key_is_held_fails_its_chain(self, bench: Bench) -> None:
        bench.publish(key="k", queue=INVOICES)
        chain = bench.begin_chain()
        lease = bench.claim_one()
        then = bench.continuation(lease, INVOICES, key="k")
        bench.settle(lease, then=[then])
        bench.deliver_all()
        assert bench.chain_state(chain).failed == (chain_id(INVOICES, then.id), "duplicate")

    @pytest.mark.promise("CHAIN-2")
    def test_a_settle_that_is_repeated_counts_once(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        lease, operation = bench.claim_one(), bench.operation()
        then = [bench.continuation(lease, INVOICES, index=index) for index in range(2)]
        for _ in range(2):
            assert bench.settle(lease, then=then, operation=operation) == "done"
            bench.deliver_all()
        assert bench.chain_state(chain).open == 2

    @pytest.mark.promise("CHAIN-2")
    def test_a_notice_that_arrives_twice_counts_once(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        go_on(bench, bench.claim_one(), INVOICES, INVOICES)
        bench.settle(bench.claim_one(queue=INVOICES), queue=INVOICES)
        for one in bench.run(bench.store.outgoing(INVOICES, 10)):
            bench.carry(one)
            bench.carry(one)
        bench.deliver_all()
        assert bench.chain_state(chain).open == 1

    @pytest.mark.promise("CHAIN-2")
    def test_notices_may_arrive_in_any_order(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        go_on(bench, bench.claim_one(), INVOICES)
        lease = bench.claim_one(queue=INVOICES)
        bench.settle(lease, queue=INVOICES, then=[bench.continuation(lease, MAILS, index=n) for n in range(2)])
        late = bench.run(bench.store.outgoing(INVOICES, 10))
        for one in [one for one in late if one.queue == MAILS]:
            bench.carry(one)
        mails = bench.claim(2, queue=MAILS)
        bench.settle_batch([bench.settlement(mail) for mail in mails[:1]], queue=MAILS)
        bench.deliver_outgoing(MAILS)
        assert not bench.chain_state(chain).is_finished
        bench.deliver_all()
        assert bench.chain_state(chain).open == len(mails) - 1

    @pytest.mark.promise("CHAIN-1", "CHAIN-2")
    def test_the_result_is_that_of_the_last_message_though_earlier_ends_are_counted_late(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        go_on(bench, bench.claim_one(), INVOICES)
        lease = bench.claim_one(queue=INVOICES)
        mail = bench.continuation(lease, MAILS)
        bench.settle(lease, queue=INVOICES, then=[mail])
        # A client that dies behind this point leaves the notice of this end to a later claim.
        late = bench.run(bench.store.outgoing(INVOICES, 10))
        for one in [one for one in late if one.queue == MAILS]:
            bench.carry(one)
        bench.settle(bench.claim_one(queue=MAILS), queue=MAILS)
        bench.deliver_outgoing(MAILS)
        bench.deliver_all()
        state = bench.chain_state(chain)
        assert (state.is_finished, state.last) == (True, chain_id(MAILS, mail.id))

    @pytest.mark.promise("CHAIN-2")
    def test_a_finished_chain_is_remembered_as_long_as_a_result(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one())
        bench.after(ENDED_TTL_MS / 1000 - 0.001)
        assert bench.chain_state(chain).known
        bench.after(0.001)
        assert not bench.chain_state(chain).known

    @pytest.mark.promise("CHAIN-2")
    @pytest.mark.parametrize("days", [31, 366])
    def test_a_chain_is_remembered_while_its_first_message_is_a_timer(self, bench: Bench, days: int) -> None:
        """A message that waits for it is delivered after it, not forgotten with it."""
        chain = bench.begin_chain(delay=days * DAY)
        report = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        for _ in range(4):
            bench.after(days * DAY / 4)
            bench.begin_chain(queue=INVOICES)  # makes stores check which chains to forget
            assert bench.claim(queue=MAILS) == []
            bench.deliver_all()
            for lease in bench.claim_all(queue=INVOICES):
                bench.settle(lease, queue=INVOICES)
        assert bench.chain_state(chain).open == 1
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.claim_one(queue=MAILS).id == report.id
        assert bench.chain_state(chain).is_finished
        bench.after(ENDED_TTL_MS / 1000)
        assert not bench.chain_state(chain).known

    @pytest.mark.parametrize("outcome", ["done", "dead"])
    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_is_remembered_while_a_message_sent_on_is_far_away(
        self, bench: Bench, outcome: OutcomeName
    ) -> None:
        chain = bench.begin_chain()
        report = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, INVOICES, delay=40 * DAY)])
        bench.deliver_all()
        for _ in range(4):
            bench.after(10 * DAY)
            if outcome == "dead":
                bench.begin_chain(queue="others")  # makes stores check which chains to forget or keep
            assert bench.claim(queue=MAILS) == []
            bench.deliver_all()
        assert bench.chain_state(chain).open == 1
        bench.settle(bench.claim_one(queue=INVOICES), outcome, queue=INVOICES)
        bench.deliver_all()
        if outcome == "done":
            assert bench.claim_one(queue=MAILS).id == report.id
        else:
            # Not "unknown chain", which is the reason for one that is forgotten.
            assert bench.stored(report.id, queue=MAILS).error == f"chain {chain}: rejected"

    @pytest.mark.promise("CHAIN-2", "SEE-3")
    def test_the_journal_names_the_chain_of_each_message(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        (invoice,) = go_on(bench, bench.claim_one(), INVOICES)
        assert {event.chain_id for event in bench.events("published", "claimed", "done")} == {chain}
        (published,) = bench.events("published", queue=INVOICES)
        assert (published.message_id, published.chain_id) == (invoice, chain)


class TestBlockers:
    """A message that waits for chains becomes claimable when the last of them has ended well."""

    @pytest.mark.promise("CHAIN-2")
    def test_it_waits_until_all_its_chains_have_ended(self, bench: Bench) -> None:
        first, second = bench.begin_chain(), bench.begin_chain(queue=INVOICES)
        report = bench.publish(queue=MAILS, after_chains=[first, second])
        bench.deliver_all()
        assert bench.state_of(report.id, queue=MAILS) == "waiting"
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.claim(queue=MAILS) == []
        bench.settle(bench.claim_one(queue=INVOICES), queue=INVOICES)
        bench.deliver_all()
        assert bench.claim_one(queue=MAILS).id == report.id

    @pytest.mark.promise("CHAIN-2")
    def test_many_chains_make_one_message_claimable_once(self, bench: Bench) -> None:
        chains = [bench.begin_chain() for _ in range(100)]
        report = bench.publish(queue=MAILS, after_chains=chains)
        bench.deliver_all()
        leases = bench.claim(100)
        bench.settle_batch([bench.settlement(lease) for lease in leases[:99]])
        bench.deliver_all()
        assert bench.state_of(report.id, queue=MAILS) == "waiting"
        bench.settle(leases[99])
        bench.deliver_all()
        assert [lease.id for lease in bench.claim(2, queue=MAILS)] == [report.id]
        assert bench.event_names(report.id, queue=MAILS) == ["published", "promoted", "claimed"]

    @pytest.mark.promise("CHAIN-2")
    def test_chains_that_have_already_ended_do_not_delay_a_message(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one())
        report = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        assert bench.claim_one(queue=MAILS).id == report.id

    @pytest.mark.promise("CHAIN-2")
    def test_a_chain_of_its_own_queue_can_be_waited_for(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        report = bench.publish(after_chains=[chain])
        bench.deliver_all()
        lease = bench.claim_one()
        assert bench.claim() == []
        bench.settle(lease)
        bench.deliver_all()
        assert bench.claim_one().id == report.id

    @pytest.mark.promise("CHAIN-2", "DEAD-1")
    def test_a_failed_chain_buries_the_messages_that_wait_for_it(self, bench: Bench) -> None:
        chain, other = bench.begin_chain(), bench.begin_chain(queue=INVOICES)
        report = bench.publish(queue=MAILS, after_chains=[chain, other])
        bench.deliver_all()
        bench.settle(bench.claim_one(), "dead", reason="rejected")
        bench.deliver_all()
        letter = bench.stored(report.id, queue=MAILS)
        assert (letter.state, letter.reason, letter.error_type) == ("dead", "blocker_failed", "ChainFailed")
        assert letter.error == f"chain {chain}: rejected"
        bench.settle(bench.claim_one(queue=INVOICES), queue=INVOICES)
        bench.deliver_all()
        assert bench.state_of(report.id, queue=MAILS) == "dead"

    @pytest.mark.promise("CHAIN-2", "DEAD-1")
    @pytest.mark.parametrize("queue", [QUEUE, MAILS])
    def test_a_chain_that_broke_before_buries_the_messages_that_come_to_wait_for_it(
        self, bench: Bench, queue: str
    ) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one(), "dead", reason="rejected")
        bench.deliver_all()
        report = bench.publish(queue=queue, after_chains=[chain])
        bench.deliver_all()
        letter = bench.stored(report.id, queue=queue)
        assert (letter.state, letter.reason, letter.error_type) == ("dead", "blocker_failed", "ChainFailed")
        assert letter.error == f"chain {chain}: rejected"

    @pytest.mark.promise("CHAIN-2", "DEAD-1")
    def test_an_unknown_chain_buries_the_messages_that_wait_for_it(self, bench: Bench) -> None:
        plain = bench.publish()
        report = bench.publish(queue=MAILS, after_chains=[plain.chain_id])
        bench.deliver_all()
        letter = bench.stored(report.id, queue=MAILS)
        assert (letter.state, letter.reason) == ("dead", "blocker_failed")
        assert letter.error == f"chain {plain.chain_id}: unknown chain"

    @pytest.mark.promise("CHAIN-2", "DEAD-2")
    def test_a_redriven_message_that_waited_runs_without_waiting(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        report = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        bench.settle(bench.claim_one(), "dead")
        bench.deliver_all()
        bench.redrive(queue=MAILS)
        assert bench.claim_one(queue=MAILS).id == report.id

    @pytest.mark.promise("CHAIN-2")
    def test_a_waiting_message_can_be_cancelled(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        report = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        assert bench.cancel(report.id, queue=MAILS) == "cancelled"
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.claim(queue=MAILS) == []
        assert bench.ledger(queue=MAILS).cancelled == 1

    @pytest.mark.promise("CHAIN-2")
    def test_a_message_waits_only_for_its_own_chains_after_a_cancelled_one(self, bench: Bench) -> None:
        first, second = bench.begin_chain(), bench.begin_chain()
        for chain in (first, first):
            report = bench.publish(queue=MAILS, after_chains=[chain])
            bench.deliver_all()
            assert bench.cancel(report.id, queue=MAILS) == "cancelled"
        waiting = bench.publish(queue=MAILS, after_chains=[second])
        bench.deliver_all()
        _, other = bench.claim(2)
        bench.settle(other)
        bench.deliver_all()
        assert [lease.id for lease in bench.claim(queue=MAILS)] == [waiting.id]

    @pytest.mark.promise("CHAIN-2")
    def test_waiting_messages_can_be_purged(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        for _ in range(3):
            bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        assert bench.purge("waiting", limit=2, queue=MAILS) == Purged(2, True)
        assert bench.purge("waiting", limit=2, queue=MAILS) == Purged(1, False)
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.claim(queue=MAILS) == []
        assert bench.ledger(queue=MAILS).cancelled == 3

    @pytest.mark.promise("CHAIN-2", "LEASE-12")
    @pytest.mark.parametrize("by", ["cancel", "purge"])
    def test_others_go_on_waiting_when_a_waiting_message_is_removed(self, bench: Bench, by: str) -> None:
        chains = [bench.begin_chain(), bench.begin_chain(queue=INVOICES)]
        gone, waits = (bench.publish(queue=MAILS, after_chains=chains) for _ in range(2))
        bench.deliver_all()
        if by == "cancel":
            assert bench.cancel(gone.id, queue=MAILS) == "cancelled"
        else:
            assert bench.purge("waiting", limit=1, queue=MAILS) == Purged(1, True)
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.ids("waiting", queue=MAILS) == [waits.id]
        bench.settle(bench.claim_one(queue=INVOICES), queue=INVOICES)
        bench.deliver_all()
        assert bench.claim_one(queue=MAILS).id == waits.id

    @pytest.mark.promise("CHAIN-2", "QUEUE-8")
    def test_messages_in_other_states_and_queues_are_no_obstacle_to_a_purge_of_waiting_ones(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.publish(queue=INVOICES, after_chains=[chain])
        ready = bench.publish_count(3, queue=MAILS)
        waiting = [bench.publish(queue=MAILS, after_chains=[chain]).id for _ in range(2)]
        bench.deliver_all()
        assert bench.purge("waiting", limit=2, queue=MAILS) == Purged(2, False)
        assert [event.message_id for event in bench.events("cancelled", queue=MAILS)] == waiting
        assert bench.ids("ready", queue=MAILS) == ready
        assert len(bench.ids("waiting", queue=INVOICES)) == 1

    @pytest.mark.promise("CHAIN-2", "TIMER-2")
    def test_its_own_due_time_still_counts(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        report = bench.publish(queue=MAILS, after_chains=[chain], delay=60)
        bench.deliver_all()
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.state_of(report.id, queue=MAILS) == "delayed"
        bench.after(60)
        assert bench.claim_one(queue=MAILS).id == report.id

    @pytest.mark.promise("CHAIN-2", "WAKE-2")
    def test_the_last_chain_wakes_a_worker_for_the_waiting_message(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        bench.claim(queue=MAILS, sleeper="anna")
        bench.settle(bench.claim_one())
        bench.deliver_all()
        assert bench.woken[MAILS] == ["anna"]

    @pytest.mark.promise("CHAIN-2")
    def test_a_waiting_message_may_begin_a_chain_itself(self, bench: Bench) -> None:
        first = bench.begin_chain()
        second = bench.begin_chain(queue=MAILS, after_chains=[first])
        bench.deliver_all()
        bench.settle(bench.claim_one())
        bench.deliver_all()
        bench.settle(bench.claim_one(queue=MAILS), queue=MAILS)
        bench.deliver_all()
        assert bench.chain_state(second).is_finished

    @pytest.mark.promise("CHAIN-2")
    def test_a_notice_of_a_chain_that_arrives_twice_changes_nothing(self, bench: Bench) -> None:
        first, second = bench.begin_chain(), bench.begin_chain()
        report = bench.publish(queue=MAILS, after_chains=[first, second])
        bench.deliver_all()
        bench.settle(bench.claim_one())
        while notices := bench.run(bench.store.outgoing(QUEUE, 10)):
            for one in notices:
                bench.carry(one)
                bench.carry(one)
            bench.run(bench.store.forwarded(QUEUE, [one.id for one in notices]))
        assert bench.state_of(report.id, queue=MAILS) == "waiting"


class TestLinks:
    """What a message has to do with chains."""

    @pytest.mark.promise("CHAIN-2", "FACE-3")
    def test_a_chain_lists_its_unfinished_messages_and_those_that_wait_for_it(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        first = split_chain_id(chain)[1]
        waiting = bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        watchers = (chain_id(MAILS, waiting.id),)
        assert bench.links(first) == Links(chain, (), ChainState(True, 1), (chain,), watchers)
        assert bench.links(waiting.id, queue=MAILS) == Links(None, (chain,))
        one, other = go_on(bench, bench.claim_one(), INVOICES, MAILS)
        members = tuple(sorted((chain_id(INVOICES, one), chain_id(MAILS, other))))
        assert bench.links(first) == Links(None, (), ChainState(True, 2, None, chain), members, watchers)
        assert bench.links(one, queue=INVOICES) == Links(chain)
        for queue in (INVOICES, MAILS):
            go_on(bench, bench.claim_one(queue=queue), queue=queue)
        found = bench.links(first)
        assert (found.begun.open, found.members, found.watchers) == (0, (), ())
        assert bench.links(waiting.id, queue=MAILS) == Links()
        bench.after(ENDED_TTL_MS / 1000)
        assert bench.links(first) == Links()

    @pytest.mark.promise("CHAIN-2")
    def test_a_broken_chain_names_the_message_that_broke_it(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        bench.settle(bench.claim_one(), "dead", reason="rejected")
        bench.deliver_all()
        found = bench.links(split_chain_id(chain)[1])
        assert (found.chain, found.begun.failed) == (chain, (chain, "rejected"))

    @pytest.mark.promise("CHAIN-2")
    def test_a_message_without_chains_has_no_links(self, bench: Bench) -> None:
        assert bench.links(bench.publish().id) == Links()
        assert bench.links("0" * 24) == Links()
        assert bench.links("0" * 24, queue="no-such-queue") == Links()

    @pytest.mark.promise("CHAIN-2")
    @pytest.mark.parametrize("how", ["cancel", "purge", "redrive"])
    def test_a_message_that_no_longer_waits_has_no_links_nor_has_a_later_one(self, bench: Bench, how: str) -> None:
        chains = [bench.begin_chain(), bench.begin_chain(queue=INVOICES)]
        waiting = bench.publish(queue=MAILS, after_chains=chains)
        bench.deliver_all()
        if how == "cancel":
            assert bench.cancel(waiting.id, queue=MAILS) == "cancelled"
        elif how == "purge":
            assert bench.purge("waiting", queue=MAILS) == Purged(1, False)
        else:
            bench.settle(bench.claim_one(), "dead")
            bench.deliver_all()
            assert bench.links(waiting.id, queue=MAILS) == Links()
            assert bench.redrive(queue=MAILS).moved == [waiting.id]
        assert bench.links(waiting.id, queue=MAILS) == Links()
        later = [bench.publish(queue=MAILS), bench.publish(queue=MAILS, key="k")]
        assert [bench.links(one.id, queue=MAILS) for one in later] == [Links(), Links()]

    @pytest.mark.promise("CHAIN-2")
    def test_very_many_links_are_listed_in_part(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        for _ in range(LINKS_MAX + 20):
            bench.publish(queue=MAILS, after_chains=[chain])
        bench.deliver_all()
        assert len(bench.links(split_chain_id(chain)[1]).watchers) == LINKS_MAX
