"""Removing a queue: only an empty one, all of it, and late calls for it do not reach the next queue of its name."""

from __future__ import annotations

import threading

import pytest

from waypost.errors import OperationTooOld
from waypost.policy import ARRIVAL_TTL_MS, DEFAULT_POLICY, REMOVED_TTL_MS
from waypost.store.port import Idle
from waypost.testing.bench import Bench, Runner
from waypost.values import StoredSchedule


def schedule(bench: Bench, key: str = "hourly") -> StoredSchedule:
    """Save a schedule that is due some time later."""
    return StoredSchedule(key, "v1", b"spec", False, bench.now_ms + 3_600_000, bench.now_ms + 3_600_000)


def used_up(bench: Bench) -> None:
    """Publish three messages and handle them."""
    bench.publish_count(3)
    for lease in bench.claim_all():
        bench.settle(lease)


class TestRefusedRemovals:
    """A queue that is not empty stays, and the answer names what it holds."""

    @pytest.mark.promise("QUEUE-8")
    def test_messages_in_any_state_keep_a_queue(self, bench: Bench) -> None:
        bench.publish_count(2)
        leased, dead = bench.claim(2)
        bench.settle(dead, "dead", reason="rejected")
        bench.publish_count(3)
        bench.publish_count(2, delay=60)
        bench.publish(after_chains=[bench.begin_chain(queue="billing")])
        bench.deliver_all()
        removal = bench.remove()
        assert removal.existed
        assert removal.left == {"ready": 3, "delayed": 2, "waiting": 1, "leased": 1, "dead": 1}
        assert bench.settle(leased) == "done"
        assert bench.ledger().ready == 3

    @pytest.mark.promise("QUEUE-8")
    def test_a_parked_message_keeps_a_queue(self, bench: Bench) -> None:
        bench.publish(key="k")
        bench.claim_one()
        bench.publish(key="k", on_conflict="replace")
        assert bench.remove().left == {"waiting": 1, "leased": 1}

    @pytest.mark.promise("QUEUE-8")
    def test_schedules_keep_a_queue(self, bench: Bench) -> None:
        bench.run(bench.store.save_schedule("orders", schedule(bench), version=None, next_ms=None))
        assert bench.remove().left == {"schedules": 1}
        assert bench.run(bench.store.remove_schedule("orders", "hourly"))
        assert bench.remove().left == {}

    @pytest.mark.promise("QUEUE-8")
    def test_a_registered_reader_of_the_journal_keeps_a_queue(self, bench: Bench) -> None:
        used_up(bench)
        bench.run(bench.store.journal_reader("orders", "lake", None))
        assert bench.remove().left == {"readers": 1}
        assert bench.run(bench.store.journal_forget("orders", "lake"))
        assert bench.remove().left == {}

    @pytest.mark.promise("QUEUE-8")
    def test_a_chain_that_has_not_finished_keeps_the_queue_where_it_began(self, bench: Bench) -> None:
        chain = bench.begin_chain()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing")])
        bench.deliver_all()
        assert bench.remove().left == {"chains": 1}
        bench.settle(bench.claim_one(queue="billing"), queue="billing")
        bench.deliver_all()
        assert bench.remove().left == {}
        assert not bench.chain_state(chain).known

    @pytest.mark.promise("QUEUE-8")
    def test_a_continuation_under_way_to_another_queue_keeps_a_queue(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease, then=[bench.continuation(lease, "billing")])
        if bench.run(bench.store.outgoing("orders", 10)):
            assert bench.remove().left == {"outgoing": 1}
        bench.deliver_all()
        assert bench.remove().left == {}
        assert bench.ledger(queue="billing").ready == 1


class TestRemovals:
    """A removed queue is gone, and the next queue of its name is a new one."""

    @pytest.mark.promise("QUEUE-8")
    def test_an_empty_queue_is_removed_with_all_its_records(self, bench: Bench) -> None:
        bench.configure(lease=10, completed=5, rate="100/s", journal="full")
        id = bench.publish(key="k", window=3600).id
        bench.settle(bench.claim_one(), result=b"its result")
        bench.claimed(sleeper="anna")
        assert bench.remove().existed
        assert "orders" not in bench.run(bench.store.queues())
        stats = bench.stats(minutes=5)
        assert (stats.ledger.published, stats.ledger.done, stats.ledger.balance) == (0, 0, 0)
        assert (stats.minutes, stats.sleepers, stats.journal_readers) == ([], 0, {})
        assert bench.events() == []
        assert bench.trace(id) == []
        assert bench.listing("done") == []
        assert bench.run(bench.store.policy("orders")) == DEFAULT_POLICY
        assert bench.result(id) is None
        watched = bench.watch(id)
        assert (watched.state, watched.ended) == (None, None)

    @pytest.mark.promise("QUEUE-8")
    def test_an_unknown_queue_cannot_be_removed(self, bench: Bench) -> None:
        removal = bench.remove()
        assert (removal.existed, removal.left) == (False, {})
        used_up(bench)
        assert bench.remove().existed
        bench.after(1)
        assert not bench.remove().existed

    @pytest.mark.promise("QUEUE-8")
    def test_the_next_publish_makes_a_new_queue(self, bench: Bench) -> None:
        bench.configure(lease=10, max_deliveries=1)
        first = bench.publish(key="k", window=3600).id
        bench.settle(bench.claim_one(), result=b"old")
        bench.remove()
        bench.after(1)
        again = bench.publish(key="k", window=3600)
        assert again.status == "queued"
        assert bench.run(bench.store.queues()) == ["orders"]
        assert bench.run(bench.store.policy("orders")) == DEFAULT_POLICY
        assert bench.ledger().published == 1
        assert bench.publish(key="k", window=3600).status == "duplicate"
        lease = bench.claim_one()
        assert (lease.id, lease.deliveries) == (again.id, 1)
        assert bench.settle(lease, result=b"new") == "done"
        assert bench.result(again.id) == b"new"
        assert bench.result(first) is None

    @pytest.mark.promise("QUEUE-8")
    def test_a_setting_makes_a_new_queue(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.remove()
        bench.after(1)
        bench.configure(max_deliveries=3)
        assert bench.run(bench.store.queues()) == ["orders"]
        policy = bench.run(bench.store.policy("orders"))
        assert (policy.max_deliveries, policy.lease_ms) == (3, DEFAULT_POLICY.lease_ms)

    @pytest.mark.promise("QUEUE-8")
    def test_a_schedule_makes_a_new_queue(self, bench: Bench) -> None:
        used_up(bench)
        bench.remove()
        bench.after(1)
        bench.run(bench.store.save_schedule("orders", schedule(bench), version=None, next_ms=None))
        bench.after(REMOVED_TTL_MS / 1000 + 1)
        assert bench.run(bench.store.queues()) == ["orders"]
        assert bench.remove().left == {"schedules": 1}

    @pytest.mark.promise("QUEUE-8")
    def test_a_paused_queue_can_be_removed_and_the_next_one_is_not_paused(self, bench: Bench) -> None:
        used_up(bench)
        bench.pause()
        assert bench.remove().existed
        bench.after(1)
        bench.publish()
        assert len(bench.claim()) == 1

    @pytest.mark.promise("QUEUE-8")
    def test_a_removed_queue_can_be_removed_again_and_again(self, bench: Bench) -> None:
        for _ in range(3):
            used_up(bench)
            assert bench.remove().existed
            bench.after(1)
        assert bench.run(bench.store.queues()) == []

    @pytest.mark.promise("QUEUE-8")
    def test_other_queues_are_not_affected(self, bench: Bench) -> None:
        bench.publish(queue="billing", key="k")
        used_up(bench)
        bench.remove()
        assert bench.run(bench.store.queues()) == ["billing"]
        assert bench.publish(queue="billing", key="k").status == "duplicate"
        assert len(bench.events("published", queue="billing")) == 1

    @pytest.mark.promise("QUEUE-8", "SEE-3")
    def test_numbers_of_the_journal_go_on_in_the_next_queue(self, bench: Bench) -> None:
        used_up(bench)
        last = bench.stats().journal_last
        assert last == 9
        bench.remove()
        bench.after(1)
        page = bench.run(bench.store.journal("orders", last, 10))
        assert (page.events, page.last) == ([], last)
        bench.publish()
        assert [(event.number, event.event) for event in bench.events(after=last)] == [(last + 1, "published")]
        assert bench.stats().journal_first == last + 1
        assert bench.run(bench.store.journal_reader("orders", "lake", None)) == last


class TestUnknownQueues:
    """A worker that serves a name creates no queue."""

    @pytest.mark.promise("QUEUE-8")
    def test_claims_settles_and_reads_make_no_queue(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease)
        bench.remove()
        for _ in range(3):
            bench.after(1)
            assert bench.claim(5, sleeper="anna") == []
            bench.poll(Idle("orders", "anna"))
            assert bench.extend(lease) == "lost"
            assert bench.settle(lease) == "lost"
            assert bench.cancel(lease.id) == "unknown"
            assert bench.redrive().moved == []
            assert bench.purge("ready").removed == 0
            bench.run(bench.store.promote("orders"))
            bench.watch(lease.id, "someone")
            bench.run(bench.store.check("orders", None))
            assert not bench.resume()
        assert bench.run(bench.store.queues()) == []
        assert not bench.remove().existed

    @pytest.mark.promise("QUEUE-8", "WAKE-2")
    def test_a_worker_that_serves_a_removed_queue_is_woken_by_the_next_one(self, bench: Bench) -> None:
        used_up(bench)
        bench.remove()
        bench.after(1)
        assert bench.claim(5, sleeper="anna") == []
        bench.publish()
        assert bench.woken == {"orders": ["anna"]}
        assert len(bench.claim(5, sleeper="anna")) == 1

    @pytest.mark.promise("QUEUE-8")
    def test_a_fence_of_the_removed_queue_is_of_no_use_in_the_next_one(self, bench: Bench) -> None:
        id = bench.publish().id
        old = bench.claim_one()
        bench.settle(old)
        bench.remove()
        bench.after(1)
        # The worst case: a message of the same id, with the same token.
        bench.publish(id=id)
        new = bench.claim_one()
        assert (new.id, new.nonce != old.nonce) == (old.id, True)
        assert bench.settle(old) == "lost"
        assert bench.extend(old) == "lost"
        assert bench.settle(new) == "done"


class TestOperationsAcrossARemoval:
    """Calls for the removed queue do not run in the next one."""

    @pytest.mark.promise("QUEUE-8", "PUB-3", "LEASE-18")
    def test_a_repeated_publish_neither_makes_the_queue_again_nor_stores_twice(self, bench: Bench) -> None:
        operation, draft = bench.operation(), bench.draft()
        bench.publish_drafts([draft], operation=operation)
        bench.settle(bench.claim_one())
        bench.remove()
        for _ in range(2):
            bench.after(1)
            with pytest.raises(OperationTooOld) as refusal:
                bench.publish_drafts([draft], operation=operation)
            assert "removed" in str(refusal.value)
            assert refusal.value._store_ms == bench.now_ms
        assert not bench.remove().existed
        bench.after(1)
        bench.publish()
        with pytest.raises(OperationTooOld):
            bench.publish_drafts([draft], operation=operation)
        assert bench.ledger().published == 1

    @pytest.mark.promise("QUEUE-8", "LEASE-18")
    def test_a_call_first_sent_before_the_removal_does_not_act_on_the_next_queue(self, bench: Bench) -> None:
        used_up(bench)
        purge, redrive, cancel, claim = (bench.operation() for _ in range(4))
        bench.after(1)
        bench.remove()
        bench.after(1)
        id = bench.publish().id
        with pytest.raises(OperationTooOld):
            bench.purge("ready", operation=purge)
        with pytest.raises(OperationTooOld):
            bench.redrive(operation=redrive)
        with pytest.raises(OperationTooOld):
            bench.cancel(id, operation=cancel)
        with pytest.raises(OperationTooOld):
            bench.claim(operation=claim)
        assert bench.ids("ready") == [id]

    @pytest.mark.promise("QUEUE-8", "LEASE-18")
    def test_an_operation_of_the_same_moment_is_refused_with_a_time_that_passes(self, bench: Bench) -> None:
        used_up(bench)
        bench.remove()
        with pytest.raises(OperationTooOld) as refusal:
            bench.publish()
        assert refusal.value._store_ms == bench.now_ms + 1
        operation = bench.operation()._replace(stamp=refusal.value._store_ms)
        assert bench.publish(operation=operation).status == "queued"

    @pytest.mark.promise("QUEUE-8", "PUB-3")
    def test_a_repeated_removal_is_answered_and_does_not_affect_the_next_queue(self, bench: Bench) -> None:
        used_up(bench)
        operation = bench.operation()
        assert bench.remove(operation=operation).existed
        bench.after(1)
        assert bench.remove(operation=operation).existed
        bench.configure(lease=10)
        assert bench.remove(operation=operation).existed
        assert bench.run(bench.store.queues()) == ["orders"]

    @pytest.mark.promise("QUEUE-8", "LEASE-18")
    def test_a_removal_that_was_first_sent_before_another_one_does_not_run(self, bench: Bench) -> None:
        used_up(bench)
        late = bench.operation()
        bench.after(1)
        bench.remove()
        bench.after(1)
        bench.configure(lease=10)
        with pytest.raises(OperationTooOld):
            bench.remove(operation=late)
        assert bench.run(bench.store.queues()) == ["orders"]

    @pytest.mark.promise("QUEUE-8")
    def test_a_clock_set_back_past_the_removal_does_not_stop_the_next_queue(self, bench: Bench) -> None:
        used_up(bench)
        bench.remove()
        bench.clock.step(-3600)
        assert bench.publish().status == "queued"
        assert len(bench.claim()) == 1

    @pytest.mark.promise("QUEUE-8")
    def test_a_continuation_that_arrived_before_the_removal_does_not_arrive_again(self, bench: Bench) -> None:
        draft = bench.draft(forwarded=True)
        bench.publish_drafts([draft])
        bench.settle(bench.claim_one())
        bench.remove()
        bench.after(ARRIVAL_TTL_MS / 1000 - 10)
        assert bench.publish_drafts([draft])[0].status == "duplicate"
        assert bench.ledger().ready == 0
        bench.publish_drafts([bench.draft(forwarded=True)])
        assert bench.publish_drafts([draft])[0].status == "duplicate"
        assert bench.ledger().ready == 1


class TestRemovalsAtTheSameTime:
    """A publish lands before the removal, which is then refused, or after it, in a new queue."""

    @pytest.mark.promise("QUEUE-8")
    def test_no_message_is_lost_between_removals_and_publishes(self, bench: Bench) -> None:
        clients = [bench.another_client() for _ in range(2)]
        published: list[str] = []

        def publishing(client: Bench) -> None:
            runner = Runner(client.store, client.mode)
            try:
                for _ in range(60):
                    draft = client.draft()
                    while True:
                        operation = client.session.operation("orders")
                        try:
                            runner.run(client.store.publish("orders", [draft], operation))
                            break
                        except OperationTooOld:
                            continue  # first sent before a removal: clients send it again with a new stamp
                    published.append(draft.id)
            finally:
                runner.close()

        threads = [threading.Thread(target=publishing, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        handled: list[str] = []
        removed = 0
        while any(thread.is_alive() for thread in threads) or bench.ledger().ready:
            bench.clock.advance_ms(1)
            for lease in bench.claim(10):
                assert bench.settle(lease) == "done"
                handled.append(lease.id)
            assert bench.ledger().balance == 0
            removal = bench.remove()
            assert set(removal.left) <= {"ready", "transactions"}
            removed += removal.existed and not removal.left
            bench.clock.advance_ms(1)
        for thread in threads:
            thread.join(60)
        assert sorted(handled) == sorted(published)
        assert len(published) == 120
        assert removed > 0
        bench.check_queue("orders")
