"""Running a queue: pause, policy on a live queue, exact limits, listings, isolation."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from waypost.policy import DEFAULT_POLICY, SCANNED_MAX, PolicyRecord
from waypost.testing.bench import Bench, Runner, fresh_namespace
from waypost.values import Lease


class TestPriorities:
    """Ready and delayed messages get another priority."""

    @pytest.mark.promise("QUEUE-8", "PUB-9")
    def test_a_message_with_a_higher_priority_is_claimed_first(self, bench: Bench) -> None:
        first, second, third = bench.publish_count(3)
        assert bench.change_priority(third, second, priority=9) == ["changed", "changed"]
        lease = bench.claim_one()
        # To the end of the priority, in the order in which they were changed; the time of waiting goes on.
        assert (lease.id, lease.priority) == (third, 9)
        assert lease.ready_ms == lease.published_ms
        assert [one.id for one in bench.claim(5)] == [second, first]
        assert [(event.message_id, event.priority, event.cause) for event in bench.events("postponed")] == [
            (third, 9, "priority"), (second, 9, "priority"),
        ]  # fmt: skip
        bench.check_queue("orders")

    @pytest.mark.promise("QUEUE-8", "PUB-9")
    def test_a_timer_keeps_its_time_with_another_priority(self, bench: Bench) -> None:
        timer = bench.publish(delay=10).id
        bench.after(10)
        later = bench.publish().id
        # It is due, and no claim has made it ready yet.
        assert bench.change_priority(timer, priority=7) == ["changed"]
        assert [event.due_ms for event in bench.events("postponed")] == [bench.now_ms]
        assert [(one.id, one.priority) for one in bench.claim(5)] == [(timer, 7), (later, 5)]

    @pytest.mark.promise("QUEUE-8")
    def test_a_priority_stays_through_a_retry(self, bench: Bench) -> None:
        id = bench.publish(priority=1).id
        bench.change_priority(id, priority=8)
        bench.settle(bench.claim_one(), "retry")
        assert (bench.stored(id).priority, bench.claim_one().priority) == (8, 8)

    @pytest.mark.promise("QUEUE-8")
    def test_what_is_neither_ready_nor_delayed_keeps_its_priority(self, bench: Bench) -> None:
        id = bench.publish(key="k").id
        assert bench.change_priority(id, priority=5) == ["unchanged"]
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace").id
        assert bench.change_priority(id, parked, "0" * 24, priority=9) == ["unchanged", "unchanged", "unknown"]
        bench.settle(lease, "dead")
        assert bench.change_priority(id, priority=9) == ["unknown"]
        assert bench.events("postponed") == []

    @pytest.mark.promise("QUEUE-8", "LEASE-6")
    def test_a_repeat_changes_no_priority_again(self, bench: Bench) -> None:
        id, operation = bench.publish().id, bench.operation()
        assert bench.change_priority(id, priority=9, operation=operation) == ["changed"]
        bench.change_priority(id, priority=1)
        assert bench.change_priority(id, priority=9, operation=operation) == ["changed"]
        assert bench.stored(id).priority == 1


class TestPause:
    """A paused queue accepts messages, and none can be claimed."""

    @pytest.mark.promise("QUEUE-1")
    def test_a_paused_queue_accepts_publishes_settles_and_renewals_and_claims_nothing(self, bench: Bench) -> None:
        bench.publish_count(2)
        lease = bench.claim_one()
        assert bench.pause()
        assert bench.publish().status == "queued"
        claimed = bench.claimed(5)
        assert (claimed.leases, claimed.paused) == ([], True)
        assert bench.extend(lease) == "ok"
        assert bench.settle(lease) == "done"
        assert bench.stats().paused
        assert bench.resume()
        assert len(bench.claim(5)) == 2

    @pytest.mark.promise("QUEUE-1")
    def test_timers_gather_while_paused(self, bench: Bench) -> None:
        first = bench.publish(delay=10)
        bench.pause()
        second = bench.publish(delay=5)
        bench.after(60)
        assert bench.claim() == []
        bench.resume()
        assert [lease.id for lease in bench.claim(5)] == [second.id, first.id]

    @pytest.mark.promise("QUEUE-1")
    def test_leases_that_end_while_paused_are_reclaimed_after_it(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish()
        lease = bench.claim_one()
        bench.pause()
        bench.after(20)
        assert bench.claim() == []
        assert bench.ledger().leased == 1
        assert bench.extend(lease) == "ok"
        bench.after(20)
        bench.resume()
        assert bench.claim_one().token == 2

    @pytest.mark.promise("QUEUE-1")
    def test_pausing_twice_changes_nothing(self, bench: Bench) -> None:
        assert (bench.pause(), bench.pause()) == (True, False)
        assert (bench.resume(), bench.resume()) == (True, False)

    @pytest.mark.promise("QUEUE-1", "LEASE-12", "DEAD-2")
    def test_a_paused_queue_can_be_cancelled_redriven_and_purged(self, bench: Bench) -> None:
        bench.publish_count(3)
        bench.settle(bench.claim_one(), "dead")
        bench.pause()
        assert bench.cancel(bench.ids("ready")[0]) == "cancelled"
        assert len(bench.redrive().moved) == 1
        assert bench.purge("ready").removed == 2


class TestPolicy:
    """Policy lives in the store and may change under a live queue."""

    @pytest.mark.promise("QUEUE-2")
    def test_a_queue_has_the_defaults_until_it_is_configured(self, bench: Bench) -> None:
        assert bench.run(bench.store.policy("orders")) == DEFAULT_POLICY

    @pytest.mark.promise("QUEUE-2")
    def test_a_change_is_the_same_for_every_client(self, bench: Bench) -> None:
        changed = bench.configure(
            lease=5, max_deliveries=None, max_pending=7, overload="drop_oldest", max_running=3, rate="10/s",
            journal="full", journal_max=500, dead_max=8, dead_keep=60, completed=4, hide_bodies=True,
            tracebacks=False,
        )  # fmt: skip
        assert changed == PolicyRecord(
            5_000, None, 7, "drop_oldest", 3, 10, 1_000, "full", 500, 8, 60_000, 4, True, True
        )
        other = bench.another_client()
        assert other.run(other.store.policy("orders")) == changed

    @pytest.mark.promise("QUEUE-2")
    def test_a_change_keeps_all_other_settings(self, bench: Bench) -> None:
        bench.configure(lease=5, rate="10/s", max_running=2)
        assert bench.configure(rate=None) == DEFAULT_POLICY.changed({"lease_ms": 5_000, "max_running": 2})

    @pytest.mark.promise("QUEUE-2")
    def test_hidden_bodies_can_be_made_visible_again(self, bench: Bench) -> None:
        assert bench.configure(hide_bodies=True).hide_bodies
        assert bench.configure(lease=5).hide_bodies
        assert bench.configure(hide_bodies=False) == DEFAULT_POLICY.changed({"lease_ms": 5_000})
        assert bench.configure(tracebacks=False).no_tracebacks
        assert bench.configure(tracebacks=True) == DEFAULT_POLICY.changed({"lease_ms": 5_000})

    @pytest.mark.promise("QUEUE-2")
    def test_a_changed_lease_applies_to_new_claims_only(self, bench: Bench) -> None:
        bench.configure(lease=60)
        bench.publish_count(2)
        old = bench.claim_one()
        bench.configure(lease=5)
        new = bench.claim_one()
        assert new.lease_end_ms == bench.now_ms + 5_000
        bench.after(4)
        assert bench.extend_batch([old, new]) == ["ok", "ok"]
        assert bench.stored(old.id).lease_end_ms == bench.now_ms + 60_000
        assert bench.stored(new.id).lease_end_ms == bench.now_ms + 5_000
        bench.after(20)
        assert [lease.id for lease in bench.claim(5)] == [new.id]
        assert bench.settle(old) == "done"

    @pytest.mark.promise("QUEUE-2", "LEASE-6")
    def test_a_replayed_claim_keeps_the_lease_it_was_given(self, bench: Bench) -> None:
        bench.configure(lease=60)
        bench.publish()
        operation = bench.operation()
        bench.claim_one(operation=operation)
        bench.configure(lease=5)
        assert bench.claim_one(operation=operation).lease_end_ms == bench.now_ms + 60_000

    @pytest.mark.promise("QUEUE-2", "QUEUE-3")
    def test_a_lower_running_limit_acts_at_the_next_claim_and_orphans_nothing(self, bench: Bench) -> None:
        bench.publish_count(6)
        leases = bench.claim(4)
        bench.configure(max_running=2)
        assert bench.claim(5) == []
        assert {bench.settle(lease) for lease in leases[:2]} == {"done"}
        assert bench.claim(5) == []
        bench.settle(leases[2])
        assert len(bench.claim(5)) == 1

    @pytest.mark.promise("QUEUE-2", "SEE-3")
    def test_a_changed_journal_level_acts_at_once(self, bench: Bench) -> None:
        bench.publish()
        bench.configure(journal="off")
        bench.publish()
        bench.configure(journal="all")
        bench.publish()
        assert [event.event for event in bench.events()] == ["published", "configured", "published"]


class TestLimits:
    """Limits inside the claim."""

    @pytest.mark.promise("QUEUE-3")
    def test_no_more_than_max_running_are_leased_at_once(self, bench: Bench) -> None:
        bench.configure(max_running=3, lease=10)
        bench.publish_count(10)
        first = bench.claim(2)
        other = bench.another_client()
        assert len(other.claim(5)) == 1
        assert other.claim(5) == []
        bench.settle(first[0])
        assert len(bench.claim(5)) == 1
        bench.after(10)
        assert len(bench.claim(5)) == 3
        assert bench.ledger().leased == 3

    @pytest.mark.promise("QUEUE-3")
    def test_a_rate_allows_its_number_of_messages_in_any_window(self, bench: Bench) -> None:
        bench.configure(rate="3/s")
        bench.publish_count(20)
        assert len(bench.claim(2)) == 2
        bench.after(0.6)
        claimed = bench.claimed(5)
        # A claim that uses the rate up returns when it goes on: a worker sleeps until then.
        assert (len(claimed.leases), claimed.next_rate_ms) == (1, 400)
        claimed = bench.claimed(5)
        assert (claimed.leases, claimed.next_rate_ms) == ([], 400)
        bench.after(0.399)
        assert bench.claim(5) == []
        bench.after(0.001)
        assert len(bench.claim(5)) == 2
        claimed = bench.claimed(5)
        assert (claimed.leases, claimed.next_rate_ms) == ([], 600)

    @pytest.mark.promise("QUEUE-3")
    def test_a_rate_counts_claimed_messages_not_the_limits_of_claims(self, bench: Bench) -> None:
        bench.configure(rate="3/s")
        assert bench.claim(5) == []
        bench.publish()
        assert len(bench.claim(5)) == 1
        bench.publish_count(5)
        assert len(bench.claim(5)) == 2

    @pytest.mark.promise("QUEUE-3")
    def test_a_rate_holds_over_many_windows(self, bench: Bench) -> None:
        bench.configure(rate="4/s", lease=3600)
        bench.publish_count(60)
        times: list[int] = []
        for _ in range(40):
            times += [bench.now_ms] * len(bench.claim(3))
            bench.after(0.13)
        assert len(times) > 15
        assert all(later - earlier >= 1_000 for earlier, later in zip(times, times[4:], strict=False))

    @pytest.mark.promise("QUEUE-3", "LEASE-5")
    def test_burying_uses_no_rate(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        bench.publish_count(3)
        bench.claim(3)
        bench.after(1)
        bench.configure(rate="1/h")
        healthy = bench.publish()
        assert [lease.id for lease in bench.claim(5)] == [healthy.id]
        assert bench.ledger().dead == 3

    @pytest.mark.promise("QUEUE-3", "PUB-7", "LEASE-1")
    @pytest.mark.parametrize("limit", [{"max_running": 20}, {"rate": "20/h"}, {"max_running": 20, "rate": "20/h"}])
    def test_limits_are_exact_under_concurrency(self, bench: Bench, limit: dict[str, Any]) -> None:
        """Clients in threads, each with its own connection: together they pass no limit and share no message."""
        bench.configure(lease=7_200, max_pending=60, **limit)
        held, refused = claim_together(bench, publishes=20, claims=8)
        ledger = bench.ledger()
        assert {type(error).__name__ for error in refused} <= {"QueueFull"}
        assert ledger.published + len(refused) == 80
        assert len(held) == ledger.leased == 20
        assert len({lease.id for lease in held}) == 20
        # The next window of a rate has room for as many, and not for one more; held messages keep theirs.
        bench.after(3_600)
        more, _ = claim_together(bench, publishes=0, claims=8)
        assert len({lease.id for lease in held + more}) == (20 if "max_running" in limit else 40)

    @pytest.mark.promise("QUEUE-3")
    def test_a_claim_that_finds_nothing_forgets_what_the_rate_has_let_pass(self, bench: Bench) -> None:
        bench.configure(rate="2/m", lease=3600, journal="off")
        for _ in range(2):
            bench.publish()
            bench.claim_one()
            bench.after(30)
        assert bench.claim(5) == []
        bench.publish_count(2)
        assert len(bench.claim(5)) == 1


def claim_together(bench: Bench, *, publishes: int, claims: int) -> tuple[list[Lease], list[Exception]]:
    """Run four clients at once, each with publishes and claims of two; return what they got, and what was refused."""
    held: list[Lease] = []
    refused: list[Exception] = []
    guard = threading.Lock()
    clients = [bench.another_client() for _ in range(4)]
    start = threading.Barrier(len(clients), timeout=30)

    def work(client: Bench) -> None:
        # An event loop belongs to one thread, so the connection is made in this one.
        runner = Runner(client.store, client.mode)
        try:
            start.wait()
            for _ in range(publishes):
                call = client.store.publish("orders", [client.draft()], client.session.operation("orders"))
                try:
                    runner.run(call)
                except Exception as error:
                    with guard:
                        refused.append(error)
            for _ in range(claims):
                operation = client.session.operation("orders")
                claimed = runner.run(client.store.claim("orders", 2, operation, worker="w"))
                with guard:
                    held.extend(claimed.leases)
        finally:
            runner.close()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return held, refused


class TestListings:
    """Listings."""

    @pytest.mark.promise("DEAD-2")
    @pytest.mark.parametrize("page_size", [1, 2, 7])
    def test_a_listing_comes_whole_in_pages(self, bench: Bench, page_size: int) -> None:
        ids = bench.publish_count(5) + bench.publish_count(2, priority=3)
        timers = bench.publish_count(3, delay=9)
        assert [message.id for message in bench.listing("ready", page_size=page_size)] == ids
        assert sorted(message.id for message in bench.listing("delayed", page_size=page_size)) == sorted(timers)

    @pytest.mark.promise("DEAD-2")
    def test_filters_hold_across_pages(self, bench: Bench) -> None:
        ours = []
        for number in range(6):
            ours += bench.publish_count(1, group="ours")
            bench.publish_count(number, group="theirs")
        assert [message.id for message in bench.listing("ready", page_size=2, group="ours")] == ours
        assert bench.listing("ready", page_size=2, group="unused") == []

    @pytest.mark.promise("DEAD-2", "QUEUE-8")
    def test_a_filter_that_fits_late_is_searched_in_bounded_steps(self, bench: Bench) -> None:
        bench.configure(completed=10, dead_max=None)
        bench.publish_count(SCANNED_MAX + 10, group="theirs")
        ours = bench.publish_count(3, group="ours")
        found, cursor, steps = list[str](), None, 0
        while steps < 10:
            page = bench.page("ready", 2, cursor=cursor, group="ours")
            found += [message.id for message in page.messages]
            cursor, steps = page.cursor, steps + 1
            if cursor is None:
                break
        assert found == ours
        assert steps > 2

    @pytest.mark.promise("DEAD-2")
    def test_a_message_is_found_by_its_id_only_in_its_state(self, bench: Bench) -> None:
        published = bench.publish()
        assert [message.id for message in bench.page("ready", id=published.id).messages] == [published.id]
        assert bench.page("dead", id=published.id).messages == []
        assert bench.page("ready", id="0" * 24).messages == []

    @pytest.mark.promise("DEAD-2")
    def test_only_dead_letters_have_a_reason_to_filter_by(self, bench: Bench) -> None:
        bench.configure(completed=5)
        bench.publish_count(4, key=None)
        bench.publish(delay=60)
        done, retried, dead = bench.claim(3)
        bench.settle(done)
        bench.settle(retried, "retry", reason="rejected")
        bench.settle(dead, "dead", reason="rejected")
        running = bench.claim_one()
        assert bench.ids("dead", reason="rejected") == [dead.id]
        assert bench.ids("dead", reason="undecodable") == []
        assert bench.ids("leased") == [running.id]
        for state in ("ready", "delayed", "leased", "waiting", "done"):
            assert bench.ids(state, reason="rejected") == []

    @pytest.mark.promise("DEAD-2")
    def test_listings_change_nothing(self, bench: Bench) -> None:
        bench.publish_count(3)
        bench.publish(delay=1)
        bench.claim_one()
        bench.after(100)
        before = bench.ledger()
        for state in ("ready", "delayed", "leased", "waiting", "dead", "done"):
            bench.listing(state)
        bench.stats(minutes=5)
        assert bench.ledger() == before

    @pytest.mark.promise("DEAD-2")
    def test_leased_messages_are_listed_by_the_end_of_their_leases(self, bench: Bench) -> None:
        bench.publish_count(2)
        first = bench.claim_one(worker="a")
        bench.after(1)
        second = bench.claim_one(worker="b")
        bench.after(1)
        bench.extend(first)
        assert [(message.id, message.worker) for message in bench.listing("leased")] == [
            (second.id, "b"),
            (first.id, "a"),
        ]


class TestIsolation:
    """Queues and namespaces are independent."""

    @pytest.mark.promise("QUEUE-2")
    def test_queues_are_independent(self, bench: Bench) -> None:
        ours = bench.publish(key="k")
        theirs = bench.publish(key="k", queue="orders2")
        assert theirs.status == "queued"
        bench.configure(queue="orders2", lease=5)
        bench.pause("orders2")
        assert [lease.id for lease in bench.claim(5)] == [ours.id]
        assert bench.claim(5, queue="orders2") == []
        assert bench.cancel(key="k", queue="orders2") == "cancelled"
        assert bench.ledger().leased == 1
        assert len(bench.events(queue="orders2")) == 4

    @pytest.mark.promise("LEASE-2")
    def test_a_lease_of_one_queue_settles_nothing_in_another(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        assert bench.settle(lease, queue="billing") == "lost"
        assert bench.settle(lease) == "done"

    @pytest.mark.promise("STORE-6", "QUEUE-2")
    def test_namespaces_are_independent(self, bench: Bench) -> None:
        other = bench.another_client(namespace=fresh_namespace())
        bench.publish(key="k")
        assert other.publish(key="k").status == "queued"
        bench.configure(max_pending=1)
        other.publish()
        assert other.ledger().ready == 2
        assert bench.ledger().ready == 1
        assert other.run(other.store.policy("orders")) == DEFAULT_POLICY

    @pytest.mark.promise("STORE-6")
    def test_the_queues_of_a_namespace_are_listed(self, bench: Bench) -> None:
        for name in ("zebra", "a.b:c-d_e", "Orders"):
            bench.publish(queue=name)
        assert bench.run(bench.store.queues()) == ["Orders", "a.b:c-d_e", "zebra"]
        other = bench.another_client(namespace=fresh_namespace())
        assert other.run(other.store.queues()) == []
