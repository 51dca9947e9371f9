"""Groups: turns between them, order inside them, limits on them, and changes of all that on a live queue."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from waypost.errors import InvalidInput, InvalidPolicy, OperationTooOld, QueueFull
from waypost.policy import CHUNK_MESSAGES_MAX, DEFAULT_POLICY
from waypost.store.port import Idle
from waypost.testing.bench import QUEUE, Bench, Runner, strand_group
from waypost.testing.conformance.damage import check
from waypost.values import GroupRecord, Lease


def names(leases: Sequence[Lease]) -> str:
    """Return the groups of leases, in order: one letter each, `-` for none."""
    return "".join(lease.group or "-" for lease in leases)


def handle_next(bench: Bench, count: int) -> str:
    """Claim and finish messages one by one; return their groups."""
    found = list[Lease]()
    for _ in range(count):
        leases = bench.claim(1)
        found += leases
        for lease in leases:
            bench.settle(lease)
    return names(found)


def fill(bench: Bench, groups: str) -> list[str]:
    """Publish one message for each letter, of that group (`-`: of none); return their ids."""
    return [one.id for one in bench.publish_drafts([bench.draft(group=None if g == "-" else g) for g in groups])]


class TestTurns:
    """Claims take turns between the groups that have something to hand out."""

    @pytest.mark.promise("QUEUE-6", "QUEUE-8")
    def test_a_priority_that_is_changed_counts_inside_its_group(self, bench: Bench) -> None:
        bench.configure(fair=True)
        first, second, other = fill(bench, "aab")
        assert bench.change_priority(second, other, priority=9) == ["changed", "changed"]
        assert sorted([lease.id for lease in bench.claim(2)]) == sorted([second, other])
        assert bench.claim_one().id == first
        bench.check_queue("orders")

    @pytest.mark.promise("QUEUE-5", "QUEUE-8")
    def test_no_priority_counts_in_an_ordered_group(self, bench: Bench) -> None:
        bench.configure(order="group")
        first, second, alone = fill(bench, "aa-")
        assert bench.change_priority(second, alone, priority=9) == ["unchanged", "changed"]
        assert sorted([lease.id for lease in bench.claim(5)]) == sorted([first, alone])

    @pytest.mark.promise("QUEUE-6")
    def test_a_group_with_many_messages_delays_no_other(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "aaaaaaaaaabbc")
        assert names(bench.claim(6)) == "abcaba"
        assert names(bench.claim(100)) == "aaaaaaa"

    @pytest.mark.promise("QUEUE-6")
    def test_turns_go_on_from_claim_to_claim(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "aaabbbccc")
        assert handle_next(bench, 9) == "abcabcabc"

    @pytest.mark.promise("QUEUE-6")
    def test_a_group_that_was_away_has_saved_nothing_up(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "ab" + "c" * 30)
        assert handle_next(bench, 12) == "abcccccccccc"
        fill(bench, "bbbb")
        assert handle_next(bench, 8) == "bcbcbcbc"
        # One that comes back with each message has its turn once a round, not more often.
        order = ""
        for _ in range(4):
            fill(bench, "d")
            order += handle_next(bench, 2)
        assert order.count("d") == order.count("c") == 4

    @pytest.mark.promise("QUEUE-6")
    def test_no_group_has_a_second_turn_before_one_that_stands_behind_a_paused_group(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "bb--p")
        bench.pause_group("p")
        assert names(bench.claim(1)) == "-"
        fill(bench, "a")
        assert names(bench.claim(3)) == "b-a"

    @pytest.mark.promise("QUEUE-6")
    def test_messages_without_a_group_share_one_turn(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "----aaaabbbb")
        assert names(bench.claim(9)) == "-ab-ab-ab"

    @pytest.mark.promise("QUEUE-6", "PUB-9")
    def test_inside_its_turn_a_group_follows_priority_and_age(self, bench: Bench) -> None:
        bench.configure(fair=True)
        low = bench.publish_count(2, group="a", priority=1)
        (high,) = bench.publish_count(1, group="a", priority=9)
        (other,) = bench.publish_count(1, group="b", priority=0)
        assert [lease.id for lease in bench.claim(10)] == [high, other, *low]

    @pytest.mark.promise("QUEUE-6", "LEASE-4")
    def test_a_reclaimed_message_is_the_next_of_its_group(self, bench: Bench) -> None:
        bench.configure(fair=True, lease=10)
        ids = fill(bench, "aaab")
        assert names(bench.claim(2)) == "ab"
        bench.after(10)
        assert [lease.id for lease in bench.claim(4)] == [ids[0], ids[3], ids[1], ids[2]]

    @pytest.mark.promise("QUEUE-6")
    def test_a_group_with_more_weight_has_more_of_each_round(self, bench: Bench) -> None:
        bench.configure(fair=True)
        assert bench.configure_group("b", weight=3)
        fill(bench, "a" * 40 + "b" * 40)
        counts = Counter(handle_next(bench, 40))
        assert counts["b"] == 30
        assert bench.group("b").weight == 3
        bench.configure_group("b", weight=1)
        assert abs(Counter(handle_next(bench, 12))["a"] - 6) <= 1

    @pytest.mark.promise("QUEUE-6", "LEASE-17")
    def test_a_turn_is_not_lost_to_a_reply_that_is_full(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "aabb")
        first = bench.claimed(4, bytes_max=1)
        assert (names(first.leases), first.more, first.grouped) == ("a", True, True)
        assert names(bench.claim(4)) == "bab"

    @pytest.mark.promise("QUEUE-6", "LEASE-5")
    def test_a_message_above_its_deliveries_uses_no_turn(self, bench: Bench) -> None:
        bench.configure(fair=True, lease=1, max_deliveries=1)
        fill(bench, "ab")
        bench.claim(2)
        bench.after(1)
        fill(bench, "abab")
        assert names(bench.claim(4)) == "abab"
        assert bench.ledger().dead == 2

    @pytest.mark.promise("QUEUE-6", "LEASE-7")
    def test_turns_need_no_lease(self, bench: Bench) -> None:
        bench.configure(fair=True, lease=None)
        fill(bench, "aaabb")
        assert names(bench.claim(10)) == "ababa"
        assert bench.ledger().done == 5

    @pytest.mark.promise("QUEUE-6", "PUB-7")
    def test_a_full_queue_drops_from_the_longest_group(self, bench: Bench) -> None:
        bench.configure(fair=True, max_pending=6, overload="drop_oldest")
        ids = fill(bench, "aaaabb")
        fill(bench, "ccc")
        assert [bench.state_of(id) for id in ids] == [None, None, None, "ready", "ready", "ready"]
        assert sorted(message.group or "" for message in bench.listing("ready")) == list("abbccc")
        assert bench.ledger().dropped == 3

    @pytest.mark.promise("QUEUE-6", "PUB-7")
    def test_a_full_queue_and_a_full_group_drop_different_messages(self, bench: Bench) -> None:
        bench.configure(fair=True, max_pending=4, group_max_pending=2, overload="drop_oldest")
        bench.publish(group="a", delay=60)
        ids = fill(bench, "abc")
        fill(bench, "a-")
        assert [bench.state_of(id) for id in ids] == [None, None, "ready"]

    @pytest.mark.promise("QUEUE-6", "PUB-7")
    def test_a_full_queue_drops_no_message_that_the_same_batch_replaces(self, bench: Bench) -> None:
        bench.configure(fair=True, max_pending=2, overload="drop_oldest")
        bench.publish(group="a", key="k")
        fill(bench, "b")
        bench.publish_drafts([bench.draft(group="a", key="k", on_conflict="replace"), bench.draft(group="c")])
        assert Counter(message.group for message in bench.listing("ready")) == {"a": 1, "c": 1}

    @pytest.mark.promise("QUEUE-6", "PUB-5", "PUB-7")
    def test_a_group_is_not_the_longest_by_a_message_that_the_same_batch_replaces(self, bench: Bench) -> None:
        bench.configure(fair=True, max_pending=4, overload="drop_oldest")
        bench.publish(group="b", key="k")
        fill(bench, "bac")
        bench.publish_drafts([bench.draft(group="c", key="k", on_conflict="replace"), bench.draft(group="c")])
        assert Counter(message.group for message in bench.listing("ready")) == {"b": 1, "c": 3}

    @pytest.mark.promise("QUEUE-6", "DEAD-2")
    def test_a_listing_has_each_group_in_its_order(self, bench: Bench) -> None:
        bench.configure(fair=True)
        ids = fill(bench, "aba-bab")
        listed = bench.listing("ready", page_size=2)
        assert sorted(message.id for message in listed) == sorted(ids)
        for group in "ab":
            own = [one for one, name in zip(ids, "aba-bab", strict=True) if name == group]
            assert [message.id for message in listed if message.group == group] == own
            assert [message.id for message in bench.listing("ready", page_size=1, group=group)] == own

    @pytest.mark.promise("QUEUE-6", "SEE-2")
    @pytest.mark.parametrize("groups", ["ab", "ba"])
    def test_the_longest_wait_is_that_of_any_group(self, bench: Bench, groups: str) -> None:
        bench.configure(fair=True)
        for group in groups:
            bench.publish(group=group)
            bench.after(5)
        assert bench.stats().oldest_ready_ms == 10_000

    @pytest.mark.promise("QUEUE-5", "SEE-2")
    def test_the_longest_wait_in_order_is_not_that_of_a_message_that_is_tried_again(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        fill(bench, "ab")
        bench.settle(bench.claim_one(), "retry", after=50)
        bench.after(50)
        bench.claim(0)
        assert len(bench.ids("ready")) == 2
        assert bench.stats().oldest_ready_ms == 50_000

    @pytest.mark.promise("QUEUE-6", "SEE-5")
    def test_a_check_finds_a_group_that_has_lost_its_turn(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "aab")
        assert check(bench) == []
        bench.run(strand_group(bench.store, QUEUE, "a"))
        assert names(bench.claim(5)) == "b"
        assert [(damage.kind, damage.id, damage.mended) for damage in check(bench)] == [("group", "a", None)]
        assert [(damage.kind, damage.id) for damage in check(bench, mend=True)] == [("group", "a")]
        assert check(bench) == []
        assert names(bench.claim(5)) == "aa"

    @pytest.mark.promise("QUEUE-6", "QUEUE-8")
    def test_a_removed_queue_keeps_no_group(self, bench: Bench) -> None:
        bench.configure(fair=True)
        bench.configure_group("a", weight=5)
        bench.pause_group("b")
        fill(bench, "abc")
        bench.purge("ready")
        assert bench.remove().existed
        bench.after(0.001)
        bench.configure(fair=True)
        assert bench.groups() == []
        fill(bench, "ababab")
        assert names(bench.claim(10)) == "ababab"


class TestGroupOrder:
    """The messages of an ordered group are handed out one at a time, in order."""

    @pytest.mark.promise("QUEUE-5")
    def test_a_group_hands_out_one_at_a_time_and_others_go_on_beside_it(self, bench: Bench) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aaabb")
        first = bench.claim(10)
        assert [lease.id for lease in first] == [ids[0], ids[3]]
        assert bench.claim(10) == []
        bench.settle(first[1])
        assert [lease.id for lease in bench.claim(10)] == [ids[4]]
        bench.settle(first[0])
        assert [lease.id for lease in bench.claim(10)] == [ids[1]]

    @pytest.mark.promise("QUEUE-5")
    def test_priorities_do_not_reorder_inside_a_group(self, bench: Bench) -> None:
        bench.configure(order="group")
        ids = [bench.publish(group="a", priority=priority).id for priority in (1, 9, 5)]
        free = [bench.publish(priority=priority).id for priority in (1, 9)]
        first = bench.claim(5)
        assert [lease.id for lease in first] == [free[1], ids[0], free[0]]
        bench.settle(first[1])
        second = bench.claim_one()
        bench.settle(second)
        assert [second.id, bench.claim_one().id] == ids[1:]

    @pytest.mark.promise("QUEUE-5")
    @pytest.mark.parametrize("outcome", ["done", "dead", "drop"])
    def test_a_message_that_ended_lets_the_next_one_go(self, bench: Bench, outcome: Any) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aa")
        bench.settle(bench.claim_one(), outcome)
        assert bench.claim_one().id == ids[1]

    @pytest.mark.promise("QUEUE-5", "LEASE-8")
    @pytest.mark.parametrize("outcome", ["retry", "snooze"])
    def test_a_message_that_waits_for_another_try_holds_its_group(self, bench: Bench, outcome: Any) -> None:
        bench.configure(order="group", lease=600)
        ids = fill(bench, "aab")
        first, other = bench.claim(5)
        bench.settle(first, outcome, after=30)
        bench.settle(other)
        claimed = bench.claimed(5)
        assert (claimed.leases, claimed.next_due_ms) == ([], 30_000)
        assert bench.group("a").held_by == ids[0]
        bench.after(30)
        assert [lease.id for lease in bench.claim(5)] == [ids[0]]

    @pytest.mark.promise("QUEUE-5", "LEASE-8")
    def test_with_pass_the_next_one_goes_and_the_failed_one_returns_to_its_place(self, bench: Bench) -> None:
        bench.configure(order="group", on_failure="pass", lease=600)
        ids = fill(bench, "aaaa")
        bench.settle(bench.claim_one(), "retry", after=30)
        second = bench.claim_one()
        # The failed one does not hold the group, the running one does.
        assert (second.id, bench.group("a").held_by) == (ids[1], ids[1])
        bench.after(30)
        assert bench.claim(5) == []
        bench.settle(second)
        again = bench.claim_one()
        bench.settle(again)
        assert [again.id, bench.claim_one().id] == [ids[0], ids[2]]

    @pytest.mark.promise("QUEUE-5", "LEASE-4", "LEASE-5")
    def test_a_released_or_expired_message_keeps_its_place(self, bench: Bench) -> None:
        bench.configure(order="group", lease=10)
        ids = fill(bench, "aaa")
        bench.settle(bench.claim_one(), "release")
        assert bench.claim_one().id == ids[0]
        bench.after(10)
        first = bench.claim_one()
        assert (first.id, first.token) == (ids[0], 3)
        bench.settle(first)
        bench.settle(bench.claim_one(), "retry")
        assert bench.claim_one().id == ids[1]

    @pytest.mark.promise("QUEUE-5", "LEASE-5")
    def test_a_message_past_its_deliveries_is_buried_and_the_next_one_goes(self, bench: Bench) -> None:
        bench.configure(order="group", lease=10, max_deliveries=1)
        ids = fill(bench, "aa")
        bench.claim_one()
        bench.after(10)
        assert [lease.id for lease in bench.claim(5)] == [ids[1]]
        assert bench.ids("dead") == [ids[0]]

    @pytest.mark.promise("QUEUE-5", "TIMER-1")
    def test_a_timer_joins_its_group_when_it_is_due(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        timer = bench.publish(group="a", delay=10)
        first = bench.publish(group="a")
        bench.after(10)
        bench.run(bench.store.promote(QUEUE))
        last = bench.publish(group="a")
        order = []
        for _ in range(3):
            lease = bench.claim_one()
            order.append(lease.id)
            bench.settle(lease)
        assert order == [first.id, timer.id, last.id]

    @pytest.mark.promise("QUEUE-5", "PUB-5", "DEAD-2")
    def test_a_replaced_and_a_redriven_message_join_at_the_end(self, bench: Bench) -> None:
        bench.configure(order="group")
        dead = bench.publish(group="a")
        bench.settle(bench.claim_one(), "dead")
        bench.publish(group="a", key="k")
        second = bench.publish(group="a")
        bench.redrive(dead.id)
        replaced = bench.publish(group="a", key="k", on_conflict="replace")
        order = []
        for _ in range(3):
            lease = bench.claim_one()
            order.append(lease.id)
            bench.settle(lease)
        assert order == [second.id, dead.id, replaced.id]

    @pytest.mark.promise("QUEUE-5", "LEASE-12")
    def test_a_held_message_that_is_cancelled_lets_the_next_one_go_and_wakes_a_worker(self, bench: Bench) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aa")
        bench.settle(bench.claim_one(), "retry", after=300)
        assert bench.claim(5, sleeper="anna") == []
        assert bench.cancel(ids[0]) == "cancelled"
        assert bench.woken == {QUEUE: ["anna"]}
        assert bench.claim_one().id == ids[1]

    @pytest.mark.promise("QUEUE-5", "SEE-3")
    def test_a_held_message_can_be_skipped(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        ids = fill(bench, "aaa")
        bench.settle(bench.claim_one(), "retry", after=30)
        assert bench.claim(5, sleeper="anna") == []
        operation = bench.operation()
        assert bench.skip_held("a", operation=operation) == ids[0]
        assert bench.woken == {QUEUE: ["anna"]}
        (skipped,) = bench.events("skipped")
        assert (skipped.message_id, skipped.group, skipped.cause) == (ids[0], "a", "held")
        assert bench.skip_held("a", operation=operation) == ids[0]
        assert bench.skip_held("a") is None
        second = bench.claim_one()
        assert second.id == ids[1]
        bench.after(30)
        bench.settle(second)
        # It returns to its own place, and holds the group again if it fails again.
        again = bench.claim_one()
        assert again.id == ids[0]
        bench.settle(again, "retry", after=30)
        assert bench.claim(5) == []

    @pytest.mark.promise("QUEUE-5", "WAKE-5")
    def test_a_claim_that_follows_a_settle_takes_the_next_message_of_the_group_and_no_worker_is_woken(
        self, bench: Bench
    ) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aaa")
        lease = bench.claim_one()
        assert bench.claim(5, sleeper="anna") == []
        for following in ids[1:]:
            settled, claimed = bench.settle_and_claim([bench.settlement(lease)], 5)
            assert (settled, [one.id for one in claimed.leases], bench.woken) == (["done"], [following], {})
            lease = claimed.leases[0]
        # Another worker is woken for what the claim has no room for, and for a timer, which the claim does not take.
        bench.settle(lease)
        fill(bench, "bbcc")
        leases = bench.claim(2)
        assert bench.claim(5, sleeper="anna") == []
        settled, claimed = bench.settle_and_claim([bench.settlement(one) for one in leases], 1)
        assert (settled, len(claimed.leases), bench.woken) == (["done", "done"], 1, {QUEUE: ["anna"]})
        last = [*claimed.leases, *bench.claim(1)]
        assert bench.claim(5, sleeper="anna") == []
        settled, claimed = bench.settle_and_claim([bench.settlement(one, "retry", after=5) for one in last], 5)
        assert (settled, claimed.leases, bench.woken) == (["retried", "retried"], [], {QUEUE: ["anna"]})

    @pytest.mark.promise("QUEUE-5", "WAKE-5")
    def test_workers_are_woken_for_all_that_a_settle_frees_but_what_the_claim_takes(self, bench: Bench) -> None:
        bench.configure(order="group")
        fill(bench, "aa")
        for _ in range(2):
            bench.publish()
        leases = bench.claim(5)
        assert sorted(lease.group or "" for lease in leases) == ["", "", "a"]
        for name in ("anna", "bert", "carl"):
            assert bench.claim(5, sleeper=name) == []
        # Two that are released, and the second one of the group.
        ends = [bench.settlement(lease, "done" if lease.group else "release") for lease in leases]
        _, claimed = bench.settle_and_claim(ends, 1)
        assert (len(claimed.leases), bench.woken) == (1, {QUEUE: ["carl", "bert"]})

    @pytest.mark.promise("QUEUE-5", "LEASE-6")
    def test_a_settle_and_the_claim_that_follows_are_repeated_each_as_its_own_operation(self, bench: Bench) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aaa")
        done = [bench.settlement(bench.claim_one())]
        operations = bench.operation(QUEUE), bench.operation(QUEUE)
        for _ in range(3):
            settled, claimed = bench.settle_and_claim(done, 5, operations=operations)
            assert settled == ["done"]
            assert [(one.id, one.deliveries) for one in claimed.leases] == [(ids[1], 1)]
        assert bench.settle(claimed.leases[0]) == "done"
        assert bench.ledger().claims == 2

    @pytest.mark.promise("QUEUE-5", "LEASE-6")
    def test_a_claim_that_is_refused_does_not_undo_the_settle_before_it(self, bench: Bench) -> None:
        bench.configure(order="group")
        ids = fill(bench, "aa")
        lease = bench.claim_one()
        old = bench.operation(QUEUE)._replace(stamp=1)
        settled, claimed = bench.settle_and_claim([bench.settlement(lease)], operations=(bench.operation(QUEUE), old))
        assert settled == ["done"]
        assert isinstance(claimed, OperationTooOld)
        settled, claimed = bench.settle_and_claim([bench.settlement(lease)])
        assert settled == ["lost"]
        assert [one.id for one in claimed.leases] == ids[1:]

    @pytest.mark.promise("QUEUE-5", "WAKE-5")
    def test_a_settle_that_frees_a_group_wakes_a_worker(self, bench: Bench) -> None:
        bench.configure(order="group")
        fill(bench, "aaa")
        lease = bench.claim_one()
        assert bench.claim(5, sleeper="anna") == []
        bench.settle(lease)
        assert bench.woken == {QUEUE: ["anna"]}
        last = bench.claim_one()
        assert bench.claim(5, sleeper="anna") == []
        bench.settle(last, "retry", after=5)
        assert bench.woken in ({}, {QUEUE: ["anna"]})  # the timer may be the earliest one

    @pytest.mark.promise("QUEUE-5", "WAKE-2")
    def test_a_settle_that_frees_a_group_wakes_all_workers_without_a_record_of_sleepers(self, bench: Bench) -> None:
        bench.configure(order="group", lease=300)
        fill(bench, "aa")
        lease = bench.claim_one()
        bench.after(61)
        bench.settle(lease)
        assert bench.woken == {QUEUE: ["*"]}

    @pytest.mark.promise("QUEUE-5", "WAKE-2")
    def test_a_batch_for_one_ordered_group_wakes_one_worker(self, bench: Bench) -> None:
        bench.configure(order="group")
        for sleeper in ("anna", "bert", "carl"):
            bench.claim(1, sleeper=sleeper)
        fill(bench, "aaaa")
        assert len(bench.woken[QUEUE]) == 1
        fill(bench, "bb-")
        assert len(bench.woken[QUEUE]) == 2

    @pytest.mark.promise("QUEUE-5", "WAKE-2")
    def test_a_replaced_message_of_a_batch_for_one_ordered_group_wakes_no_second_worker(self, bench: Bench) -> None:
        bench.configure(order="group")
        for sleeper in ("anna", "bert", "carl", "dora"):
            assert bench.claim(5, sleeper=sleeper) == []
        bench.publish(group="b", key="k")
        drafts = [bench.draft(group=group) for group in "ab"]
        bench.publish_drafts([*drafts, bench.draft(group="b", key="k", on_conflict="replace")])
        assert len(bench.woken[QUEUE]) == 2

    @pytest.mark.promise("QUEUE-5", "WAKE-5")
    def test_a_poll_needs_no_claim_while_all_groups_are_busy(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        fill(bench, "aaa")
        lease = bench.claim_one()
        assert bench.claim(5, sleeper="anna") == []
        assert not bench.poll(Idle(QUEUE, "anna")).queues[0].needs_claim
        bench.settle(lease)
        assert bench.poll(Idle(QUEUE)).queues[0].needs_claim

    @pytest.mark.promise("QUEUE-5", "LEASE-6")
    def test_a_repeated_claim_takes_no_second_message(self, bench: Bench) -> None:
        bench.configure(order="group")
        fill(bench, "aab")
        operation = bench.operation()
        first = bench.claim(1, operation=operation)
        again = bench.claim(1, operation=operation)
        assert [lease.id for lease in first] == [lease.id for lease in again]
        assert names(bench.claim(5)) == "b"

    @pytest.mark.promise("QUEUE-5")
    def test_order_holds_for_many_clients_at_once(self, bench: Bench) -> None:
        """Clients in threads: no two have messages of one group, and each group is handed out in order."""
        bench.configure(order="group", lease=600)
        drafts = [bench.draft(f"{number}".encode(), group="abcd"[number % 4]) for number in range(48)]
        bench.publish_drafts(drafts)
        held: Counter[str] = Counter()
        order: dict[str, list[int]] = {group: [] for group in "abcd"}
        overlaps, guard = list[str](), threading.Lock()
        clients = [bench.another_client() for _ in range(3)]

        def work(client: Bench) -> None:
            runner = Runner(client.store, client.mode)
            try:
                for _ in range(60):
                    operation = client.session.operation(QUEUE)
                    claimed = runner.run(client.store.claim(QUEUE, 2, operation, worker="w"))
                    for lease in claimed.leases:
                        group = lease.group or ""
                        with guard:
                            held[group] += 1
                            if held[group] > 1:
                                overlaps.append(group)
                            order[group].append(int(client.body(lease)))
                    for lease in claimed.leases:
                        with guard:
                            held[lease.group or ""] -= 1
                        done = client.settlement(lease)
                        runner.run(client.store.settle(QUEUE, [done], client.session.operation(QUEUE)))
            finally:
                runner.close()

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert overlaps == []
        assert order == {group: list(range(at, 48, 4)) for at, group in enumerate("abcd")}


class TestGroupLimits:
    """Limits of each group, decided inside the claim or the publish."""

    @pytest.mark.promise("QUEUE-7")
    def test_a_group_has_no_more_leases_than_its_limit(self, bench: Bench) -> None:
        bench.configure(group_max_running=2)
        fill(bench, "aaaab--")
        first = bench.claim(10)
        assert names(first) == "-ab-a"
        assert bench.claim(10) == []
        assert bench.group("a") == GroupRecord("a", ready=2, running=2, oldest_ms=0, limited_by="max_running")
        bench.settle(first[1])
        assert names(bench.claim(10)) == "a"

    @pytest.mark.promise("QUEUE-7", "LEASE-4")
    def test_an_expired_lease_makes_room_in_its_group(self, bench: Bench) -> None:
        bench.configure(group_max_running=1, lease=10)
        ids = fill(bench, "aa")
        bench.claim_one()
        bench.after(10)
        assert [lease.id for lease in bench.claim(5)] == [ids[0]]

    @pytest.mark.promise("QUEUE-7", "QUEUE-3")
    def test_the_limits_of_the_queue_hold_on_top(self, bench: Bench) -> None:
        bench.configure(group_max_running=2, max_running=3, lease=600)
        fill(bench, "aaabbb")
        first = bench.claim(10)
        assert names(first) == "aba"
        bench.settle(first[0])
        assert names(bench.claim(10)) == "b"

    @pytest.mark.promise("QUEUE-7", "WAKE-5")
    def test_a_settle_that_makes_room_in_a_group_wakes_a_worker(self, bench: Bench) -> None:
        bench.configure(group_max_running=1)
        fill(bench, "aab")
        a, b = bench.claim(2)
        assert bench.claim(5, sleeper="anna") == []
        bench.settle(b)
        assert bench.woken == {}
        bench.settle(a)
        assert bench.woken == {QUEUE: ["anna"]}

    @pytest.mark.promise("QUEUE-7")
    def test_a_rate_holds_for_each_group_in_any_window(self, bench: Bench) -> None:
        bench.configure(group_rate="3/s", lease=3600)
        fill(bench, "a" * 60 + "b" * 60)
        times: dict[str, list[int]] = {"a": [], "b": []}
        for _ in range(60):
            for lease in bench.claim(3):
                times[lease.group or ""].append(bench.now_ms)
            bench.after(0.13)
        for group in times.values():
            assert len(group) > 18
            assert all(later - earlier >= 1_000 for earlier, later in zip(group, group[3:], strict=False))

    @pytest.mark.promise("QUEUE-7", "WAKE-5")
    def test_a_claim_returns_when_the_rate_of_a_group_goes_on(self, bench: Bench) -> None:
        bench.configure(group_rate="2/64ms", lease=600)
        fill(bench, "aaaaa")
        assert names(bench.claim(1)) == "a"
        bench.after(0.01)
        claimed = bench.claimed(5)
        assert (names(claimed.leases), claimed.next_rate_ms) == ("a", 54)
        assert bench.group("a").limited_by == "rate"
        assert bench.group("a").limited_until_ms == bench.now_ms + 54
        # A poll returns the same moment: it replaces what the worker knows of the queue.
        polled = bench.poll(Idle(QUEUE)).queues[0]
        assert (polled.needs_claim, polled.next_due_ms) == (False, 54)
        bench.after(0.053)
        assert bench.claim(5) == []
        bench.after(0.001)
        assert bench.poll(Idle(QUEUE)).queues[0].needs_claim
        claimed = bench.claimed(5)
        assert (names(claimed.leases), claimed.next_rate_ms) == ("a", 10)

    @pytest.mark.promise("QUEUE-7", "WAKE-5")
    def test_a_settle_in_a_group_whose_rate_is_used_up_lets_a_worker_learn_until_when(self, bench: Bench) -> None:
        bench.configure(group_rate="1/64ms", group_max_running=1, lease=600)
        fill(bench, "aaabbb")
        leases = bench.claim(2)
        claimed = bench.claimed(5, sleeper="anna")
        # They are at their limit of leases: there is no moment to wait for.
        assert (claimed.leases, claimed.next_rate_ms) == ([], None)
        # One is woken for both groups.
        bench.claim(5, sleeper="bert")
        bench.settle_batch([bench.settlement(lease) for lease in leases])
        assert bench.woken == {QUEUE: ["bert"]}
        claimed = bench.claimed(5, sleeper="bert")
        assert (claimed.leases, claimed.next_rate_ms) == ([], 64)
        bench.after(0.064)
        assert names(bench.claim(5)) == "ab"

    @pytest.mark.promise("QUEUE-7", "WAKE-5")
    def test_a_group_that_is_resumed_while_its_rate_is_used_up_lets_a_worker_learn_until_when(
        self, bench: Bench
    ) -> None:
        bench.configure(group_rate="1/64ms", lease=600)
        fill(bench, "aa")
        bench.claim(1)
        bench.pause_group("a")
        assert bench.claim(5, sleeper="anna") == []
        bench.resume_group("a")
        assert bench.woken == {QUEUE: ["anna"]}
        assert bench.claimed(5).next_rate_ms == 64

    @pytest.mark.promise("QUEUE-7")
    def test_the_rate_of_a_group_is_remembered_without_messages(self, bench: Bench) -> None:
        bench.configure(group_rate="1/m")
        fill(bench, "a")
        bench.settle(bench.claim_one())
        fill(bench, "a")
        assert bench.claim(5) == []
        bench.after(61)
        assert names(bench.claim(5)) == "a"

    @pytest.mark.promise("QUEUE-7")
    @pytest.mark.parametrize("hours", [-1, 1])
    def test_a_rate_of_a_group_goes_on_after_the_clock_was_set(self, bench: Bench, hours: int) -> None:
        bench.configure(group_rate="2/m", lease=7200)
        fill(bench, "a" * 9)
        assert len(bench.claim(9)) == 2
        assert bench.claim(9) == []
        bench.clock.step(hours * 3600)
        bench.claim(0)
        found = len(bench.claim(9))
        bench.after(61)
        found += len(bench.claim(9))
        assert found == (4 if hours > 0 else 2)
        bench.after(61)
        assert len(bench.claim(9)) == 2

    @pytest.mark.promise("QUEUE-7", "PUB-7")
    def test_a_full_group_refuses_and_others_do_not(self, bench: Bench) -> None:
        bench.configure(group_max_pending=2)
        fill(bench, "aab--")
        with pytest.raises(QueueFull, match="group a of queue orders") as refused:
            fill(bench, "ba")
        assert (refused.value.group, refused.value.room) == ("a", 0)
        assert bench.ledger().published == 5
        with pytest.raises(QueueFull) as refused:
            fill(bench, "cbb")
        assert (refused.value.group, refused.value.room) == ("b", 1)
        bench.configure(max_pending=7)
        with pytest.raises(QueueFull) as refused:
            fill(bench, "cde")
        assert (refused.value.group, refused.value.room) == (None, 2)
        bench.configure(max_pending=None)
        fill(bench, "b---")
        bench.settle(bench.claim(2)[1], "retry", after=5)
        with pytest.raises(QueueFull):
            fill(bench, "a")

    @pytest.mark.promise("QUEUE-7", "PUB-8")
    @pytest.mark.parametrize("group", ["a, on @b", "a script: b", "é\n%s", "x" * 128])
    def test_a_full_group_is_named_whatever_its_name_contains(self, bench: Bench, group: str) -> None:
        bench.configure(group_max_pending=1)
        bench.publish(group=group)
        with pytest.raises(QueueFull) as refused:
            bench.publish(group=group)
        assert (refused.value.group, refused.value.room) == (group, 0)

    @pytest.mark.promise("QUEUE-7", "PUB-7")
    def test_a_full_group_drops_its_own_oldest(self, bench: Bench) -> None:
        bench.configure(group_max_pending=2, overload="drop_oldest")
        ids = fill(bench, "bbaa")
        fill(bench, "a")
        assert bench.state_of(ids[2]) is None
        assert Counter(message.group for message in bench.listing("ready")) == {"a": 2, "b": 2}

    @pytest.mark.promise("QUEUE-7", "PUB-5")
    @pytest.mark.parametrize("state", ["ready", "delayed", "waiting"])
    def test_a_message_that_replaces_one_of_another_group_counts_in_its_own(self, bench: Bench, state: str) -> None:
        bench.configure(group_max_pending=1, lease=600)
        if state == "waiting":
            bench.publish(group="c", key="k")
            bench.claim_one()
        bench.publish(group="a", key="k", delay=60 * (state == "delayed"), on_conflict="replace")
        oldest = bench.publish(group="b").id
        with pytest.raises(QueueFull) as refused:
            bench.publish(group="b", key="k", on_conflict="replace")
        assert (refused.value.group, refused.value.room) == ("b", 0)
        assert (bench.group("a").full, bench.group("b").full) == (True, True)
        # In its own group it takes the place of the other one.
        assert bench.publish(group="a", key="k", on_conflict="replace").status == "replaced"
        bench.configure(overload="drop_oldest", max_pending=2)
        bench.publish(group="b", key="k", on_conflict="replace")
        assert bench.state_of(oldest) is None
        assert [(one.group, one.ready + one.later) for one in bench.groups() if one.group != "c"] == [("b", 1)]

    @pytest.mark.promise("QUEUE-7")
    def test_a_single_group_can_have_limits_of_its_own(self, bench: Bench) -> None:
        bench.configure(group_max_running=1, group_max_pending=3, lease=600)
        bench.configure_group("a", max_running=3, max_pending=5)
        bench.configure_group("b", rate="1/m")
        fill(bench, "aaaaabbbccc")
        assert Counter(names(bench.claim(10))) == {"a": 3, "b": 1, "c": 1}
        with pytest.raises(QueueFull):
            fill(bench, "cc")
        bench.configure_group("a", max_running=None, max_pending=None)
        assert bench.group("a") == GroupRecord("a", ready=2, running=3, oldest_ms=0, limited_by="max_running")

    @pytest.mark.promise("QUEUE-7")
    @pytest.mark.parametrize("limit", [{"group_max_running": 4}, {"group_rate": "4/h"}])
    def test_limits_of_groups_are_exact_for_many_clients_at_once(self, bench: Bench, limit: dict[str, Any]) -> None:
        bench.configure(lease=7200, **limit)
        fill(bench, "aabb" * 10)
        clients = [bench.another_client() for _ in range(3)]
        held, guard = list[Lease](), threading.Lock()

        def work(client: Bench) -> None:
            runner = Runner(client.store, client.mode)
            try:
                for _ in range(6):
                    operation = client.session.operation(QUEUE)
                    claimed = runner.run(client.store.claim(QUEUE, 2, operation, worker="w"))
                    with guard:
                        held.extend(claimed.leases)
            finally:
                runner.close()

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert Counter(names(held)) == {"a": 4, "b": 4}

    @pytest.mark.promise("QUEUE-7", "PUB-7")
    @pytest.mark.parametrize("overload", ["raise", "drop_oldest"])
    def test_a_group_never_holds_more_than_it_may_while_many_clients_publish(self, bench: Bench, overload: Any) -> None:
        bench.configure(group_max_pending=5, overload=overload)
        bench.configure_group("b", max_pending=3)
        stored = Counter[str]()
        seen = list[Counter[str | None]]()
        guard = threading.Lock()

        def work(number: int, client: Bench) -> None:
            runner = Runner(client.store, client.mode)
            try:
                for step in range(12):
                    groups = ("ab", "ba", "a", "b")[(number + step) % 4]
                    # Delayed messages count as others do, and only ready ones can be dropped.
                    drafts = [client.draft(group=group, delay=60 * (step == 0)) for group in groups]
                    try:
                        runner.run(client.store.publish(QUEUE, drafts, client.session.operation(QUEUE)))
                    except QueueFull:
                        assert overload == "raise"
                    else:
                        with guard:
                            stored.update(groups)
                    pages = [runner.run(client.store.peek(QUEUE, state, 100)) for state in ("ready", "delayed")]
                    with guard:
                        seen.extend(Counter(message.group for message in page.messages) for page in pages)
            finally:
                runner.close()

        clients = [bench.another_client() for _ in range(3)]
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert all(counts["a"] <= 5 and counts["b"] <= 3 for counts in seen)
        pending = Counter(message.group for state in ("ready", "delayed") for message in bench.listing(state))
        assert pending == {"a": 5, "b": 3}
        ledger = bench.ledger()
        assert ledger.published == stored.total()
        if overload == "raise":
            assert (ledger.dropped, stored) == (0, {"a": 5, "b": 3})
        else:
            assert ledger.dropped == stored.total() - 8


class TestGroupSettings:
    """Settings of queues and of single groups, pauses, listings."""

    @pytest.mark.promise("QUEUE-2", "QUEUE-5", "QUEUE-7")
    def test_the_settings_of_groups_are_kept_with_the_queue(self, bench: Bench) -> None:
        changed = bench.configure(
            order="group", on_failure="pass", fair=True, group_max_running=2, group_rate="10/s", group_max_pending=7
        )
        assert changed == DEFAULT_POLICY.changed(
            {
                "order": "group", "on_failure": "pass", "fair": True, "group_max_running": 2, "group_rate_count": 10,
                "group_rate_per_ms": 1000, "group_max_pending": 7,
            }
        )  # fmt: skip
        other = bench.another_client()
        assert other.run(other.store.policy(QUEUE)) == changed
        assert bench.configure(
            order=None, on_failure="hold", fair=False, group_max_running=None, group_rate=None, group_max_pending=None
        ) == DEFAULT_POLICY  # fmt: skip

    @pytest.mark.promise("QUEUE-5", "QUEUE-7", "LEASE-7")
    @pytest.mark.parametrize(
        "settings",
        [{"order": "group"}, {"group_max_running": 1}, {"group_rate": "1/s"}, {"group_max_pending": 1}],
        ids=lambda settings: next(iter(settings)),
    )
    def test_order_and_limits_of_groups_need_a_lease(self, bench: Bench, settings: dict[str, Any]) -> None:
        with pytest.raises(InvalidPolicy, match="need a lease"):
            bench.configure(lease=None, **settings)
        bench.configure(**settings)
        with pytest.raises(InvalidPolicy, match="need a lease"):
            bench.configure(lease=None)
        assert bench.run(bench.store.policy(QUEUE)).lease_ms is not None
        removed: dict[str, Any] = dict.fromkeys(settings)
        bench.configure(fair=True, lease=None, **removed)
        with pytest.raises(InvalidPolicy, match="need a lease"):
            bench.configure_group("a", max_running=1)

    @pytest.mark.promise("QUEUE-7", "LEASE-7")
    @pytest.mark.parametrize(
        "limit", [{"max_running": 1}, {"rate": "1/s"}, {"max_pending": 1}], ids=lambda limit: next(iter(limit))
    )
    def test_limits_of_single_groups_need_a_lease(self, bench: Bench, limit: dict[str, Any]) -> None:
        bench.configure(fair=True)
        bench.configure_group("a", **limit)
        with pytest.raises(InvalidPolicy, match="need a lease"):
            bench.configure(lease=None)
        assert bench.run(bench.store.policy(QUEUE)).lease_ms is not None
        # Without turns the limit is kept and has no effect, so it counts again when turns are switched on.
        bench.configure(fair=False, lease=None)
        with pytest.raises(InvalidPolicy, match="need a lease"):
            bench.configure(fair=True)
        bench.configure(fair=True, lease=60)
        removed: dict[str, Any] = {"weight": 2} | dict.fromkeys(limit)
        bench.configure_group("a", **removed)
        assert bench.configure(lease=None).lease_ms is None

    @pytest.mark.promise("QUEUE-6")
    def test_a_queue_that_takes_no_turns_refuses_what_is_for_groups(self, bench: Bench) -> None:
        fill(bench, "ab")
        for call in (
            bench.groups,
            lambda: bench.configure_group("a", weight=2),
            lambda: bench.pause_group("a"),
            lambda: bench.skip_held("a"),
        ):
            with pytest.raises(InvalidInput, match="fair=True"):
                call()
        assert not bench.claimed(5).grouped

    @pytest.mark.promise("QUEUE-6")
    def test_a_paused_group_waits_and_a_resume_wakes_workers(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "aab")
        assert (bench.pause_group("a"), bench.pause_group("a")) == (True, False)
        assert names(bench.claim(5)) == "b"
        for sleeper in ("anna", "bert", "carl"):
            assert bench.claim(5, sleeper=sleeper) == []
        fill(bench, "a")
        assert bench.group("a").paused
        assert bench.claim(5, sleeper=bench.woken[QUEUE][0]) == []
        assert not bench.poll(Idle(QUEUE)).queues[0].needs_claim
        assert bench.resume_group("a")
        assert len(bench.woken[QUEUE]) == 3
        assert not bench.resume_group("a")
        assert names(bench.claim(5)) == "aaa"
        texts = [(event.group, event.cause) for event in bench.events("configured")[1:]]
        assert texts == [("a", "own_paused=True"), ("a", "own_paused=False")]

    @pytest.mark.promise("QUEUE-6")
    def test_the_groups_of_a_queue_are_listed(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        fill(bench, "bb-")
        bench.after(1)
        ids = fill(bench, "aaa")
        bench.configure_group("ü", weight=7, rate="5/m", max_pending=9)
        bench.pause_group("b")
        lease = next(lease for lease in bench.claim(5) if lease.group == "a")
        bench.settle(lease, "retry", after=60)
        bench.after(2)
        bench.publish(group="d", delay=60)
        expected = [
            GroupRecord(None, running=1),
            GroupRecord("a", ready=2, later=1, oldest_ms=2_000, held_by=ids[0], held_state="delayed"),
            GroupRecord("b", ready=2, oldest_ms=3_000, paused=True),
            GroupRecord("d", later=1),
            GroupRecord("ü", weight=7, rate_count=5, rate_per_ms=60_000, max_pending=9),
        ]
        for page_size in (1, 3, 100):
            assert bench.groups(page_size=page_size) == expected
        assert bench.groups(group="c") == []

    @pytest.mark.promise("QUEUE-5", "QUEUE-6")
    @pytest.mark.parametrize("on_failure", ["hold", "pass"])
    def test_the_listing_names_the_message_that_holds_an_ordered_group(self, bench: Bench, on_failure: Any) -> None:
        bench.configure(order="group", on_failure=on_failure, lease=600)
        first, second, _ = fill(bench, "aa-")
        leases = {lease.id: lease for lease in bench.claim(5)}
        held = [(one.group, one.held_by, one.held_state) for one in bench.groups()]
        assert held == [(None, None, None), ("a", first, "leased")]
        bench.settle(leases[first], "retry", after=60)
        if on_failure == "hold":
            assert bench.group("a").held_by == first
            bench.skip_held("a")
        assert bench.group("a").held_by is None
        assert bench.claim_one().id == second
        assert bench.group("a") == GroupRecord("a", later=1, running=1, held_by=second, held_state="leased")
        bench.configure(order=None, fair=True)
        assert bench.group("a").held_by is None

    @pytest.mark.promise("QUEUE-6")
    def test_a_leased_holder_is_named_while_the_queue_has_a_bounded_number_of_leases(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        first = fill(bench, "a")[0]
        bench.publish_count(CHUNK_MESSAGES_MAX)
        bench.claim(CHUNK_MESSAGES_MAX)
        assert bench.group("a").held_by == first
        assert len(bench.claim(5)) == 1
        assert bench.group("a") == GroupRecord("a", running=1)

    @pytest.mark.promise("QUEUE-6", "QUEUE-7")
    def test_full_groups_are_listed_as_such(self, bench: Bench) -> None:
        bench.configure(group_max_pending=2, group_max_running=1, lease=600)
        bench.configure_group("b", max_pending=1)
        fill(bench, "a-----b")
        bench.publish(group="a", delay=60)
        fill(bench, "c")
        listed = [(one.group, one.ready, one.later, one.full, one.limited_by) for one in bench.groups()]
        assert listed == [
            (None, 5, 0, False, None), ("a", 1, 1, True, None), ("b", 1, 0, True, None), ("c", 1, 0, False, None),
        ]  # fmt: skip
        bench.claim(5)
        fill(bench, "a")
        assert (bench.group("a").full, bench.group("a").limited_by) == (True, "max_running")
        assert (bench.group("b").full, bench.group("b").limited_by) == (False, "max_running")

    @pytest.mark.promise("QUEUE-6")
    def test_groups_without_messages_are_not_listed(self, bench: Bench) -> None:
        bench.configure(fair=True)
        fill(bench, "abc")
        for lease in bench.claim(2):
            bench.settle(lease)
        bench.cancel(bench.ids("ready")[0])
        later = bench.publish(group="d", delay=60)
        assert bench.groups() == [GroupRecord("d", later=1)]
        bench.cancel(later.id)
        assert bench.groups() == []
        bench.configure_group("a", weight=2)
        bench.configure_group("a", weight=1)
        assert bench.groups() == []


class TestGroupSwitches:
    """Settings that change under a live queue: nothing is lost, and no order."""

    @pytest.mark.promise("QUEUE-2", "QUEUE-7")
    def test_settings_of_a_group_are_listed_after_turns_were_off(self, bench: Bench) -> None:
        bench.configure(fair=True)
        bench.configure_group("a", max_running=2)
        bench.configure(fair=False)
        bench.configure(fair=True)
        assert [(group.group, group.max_running) for group in bench.groups()] == [("a", 2)]

    @pytest.mark.promise("QUEUE-2", "QUEUE-6")
    def test_turns_can_be_switched_on_and_off(self, bench: Bench) -> None:
        ids = fill(bench, "aaaabb-")
        bench.configure(fair=True)
        first = bench.claim(4)
        assert names(first) == "-aba"
        bench.configure(fair=False)
        assert [lease.id for lease in bench.claim(10)] == [ids[2], ids[3], ids[5]]
        bench.publish_count(2, group="c")
        assert names(bench.claim(10)) == "cc"
        for lease in first:
            assert bench.settle(lease) == "done"
        bench.configure(fair=True)
        assert bench.claim(5) == []
        fill(bench, "ab")
        assert names(bench.claim(5)) == "ab"

    @pytest.mark.promise("QUEUE-2", "QUEUE-5")
    def test_an_order_that_is_switched_on_keeps_the_order_of_claims(self, bench: Bench) -> None:
        bench.configure(lease=600)
        ids = fill(bench, "aaa")
        high = bench.publish(group="a", priority=9)
        timer = bench.publish(group="a", delay=10)
        running = bench.claim_one()
        assert running.id == high.id
        bench.configure(order="group")
        assert bench.claim(5) == []
        bench.after(10)
        bench.settle(running, "retry")
        order = []
        for _ in range(5):
            lease = bench.claim_one()
            assert bench.claim(5) == []
            order.append(lease.id)
            bench.settle(lease)
        assert order == [high.id, *ids, timer.id]

    @pytest.mark.promise("QUEUE-2", "QUEUE-5")
    def test_an_order_that_is_switched_off_lets_held_groups_go(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        ids = fill(bench, "aaa")
        bench.settle(bench.claim_one(), "retry", after=60)
        assert bench.claim(5, sleeper="anna") == []
        bench.configure(order=None)
        assert bench.woken == {QUEUE: ["anna"]}
        assert [lease.id for lease in bench.claim(5)] == ids[1:]
        bench.after(60)
        assert bench.claim_one().id == ids[0]

    @pytest.mark.promise("QUEUE-2", "QUEUE-5")
    def test_what_a_failure_does_can_be_switched(self, bench: Bench) -> None:
        bench.configure(order="group", lease=600)
        ids = fill(bench, "aaa")
        bench.settle(bench.claim_one(), "retry", after=60)
        bench.configure(on_failure="pass")
        second = bench.claim_one()
        assert second.id == ids[1]
        bench.settle(second)
        bench.configure(on_failure="hold")
        assert bench.claim(5) == []
        assert bench.group("a").held_by == ids[0]

    @pytest.mark.promise("QUEUE-2", "QUEUE-5", "PUB-5")
    def test_a_retry_that_was_delayed_when_an_order_was_set_joins_its_group_also_if_it_is_extended(
        self, bench: Bench
    ) -> None:
        bench.configure(lease=600)
        first = bench.publish(group="a", key="k").id
        bench.settle(bench.claim_one(), "retry", after=10)
        second = bench.publish(group="a").id
        bench.configure(order="group")
        third = bench.publish(group="a").id
        assert bench.publish(group="a", key="k", on_conflict="extend", delay=20).status == "extended"
        bench.after(20)
        order = []
        for _ in range(3):
            lease = bench.claim_one()
            order.append(lease.id)
            bench.settle(lease)
        assert order == [second, third, first]

    @pytest.mark.promise("QUEUE-2", "QUEUE-7")
    def test_a_lower_limit_of_groups_acts_at_the_next_claim(self, bench: Bench) -> None:
        bench.configure(fair=True, lease=600)
        fill(bench, "aaaaaa")
        leases = bench.claim(4)
        bench.configure(group_max_running=2)
        assert bench.claim(5) == []
        for lease in leases[:2]:
            assert bench.settle(lease) == "done"
        assert bench.claim(5) == []
        bench.settle(leases[2])
        assert names(bench.claim(5)) == "a"
        bench.configure(group_max_running=3)
        assert names(bench.claim(5)) == "a"

    @pytest.mark.promise("QUEUE-2", "QUEUE-5", "QUEUE-6")
    @pytest.mark.parametrize("settings", [{"fair": True}, {"order": "group"}], ids=["fair", "order"])
    def test_a_long_queue_is_switched_in_steps_and_loses_nothing(self, bench: Bench, settings: dict[str, Any]) -> None:
        count = 1_200
        drafts = [bench.draft(f"{number}".encode(), group=f"g{number % 7}") for number in range(count)]
        for at in range(0, count, 400):
            bench.publish_drafts(drafts[at : at + 400])
        bench.configure(lease=600, **settings)
        handed: dict[str, list[int]] = {}
        for round in range(400):
            if round == 3:
                bench.publish_drafts([bench.draft(f"{count + n}".encode(), group=f"g{n}") for n in range(7)])
            leases = bench.claim(50)
            for lease in leases:
                handed.setdefault(lease.group or "", []).append(int(bench.body(lease)))
            bench.settle_batch([bench.settlement(lease) for lease in leases])
        assert sum(map(len, handed.values())) == count + 7
        assert all(numbers == sorted(numbers) for numbers in handed.values())
        assert check(bench) == []
