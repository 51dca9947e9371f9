"""How long a message has its key: until it is first claimed, or also while it is a dead letter."""

from __future__ import annotations

import pytest

from waypost.policy import Unique
from waypost.testing.bench import Bench
from waypost.values import OutcomeName, Published


class TestUntilClaimed:
    """With `unique="until_claimed"` a key is in use until its message is first claimed."""

    @pytest.mark.promise("PUB-4")
    @pytest.mark.parametrize("group", [None, "g"])
    def test_a_key_is_free_once_its_message_is_claimed(self, bench: Bench, group: str | None) -> None:
        bench.configure(fair=group is not None)
        first = bench.publish(key="k", group=group, unique="until_claimed")
        assert bench.publish(key="k", unique="until_claimed") == Published(first.id, "duplicate", "orders")
        lease = bench.claim_one()
        assert (lease.id, lease.key) == (first.id, "k")
        second = bench.publish(key="k", group=group, unique="until_claimed")
        assert second.status == "queued"
        # Both run at the same time, and the end of the one does not change the other.
        other = bench.claim_one()
        assert other.id == second.id
        assert bench.ids("leased") == [first.id, second.id]
        assert bench.settle(lease) == "done"
        third = bench.publish(key="k", unique="until_claimed")
        assert bench.settle(other) == "done"
        assert bench.publish(key="k").id == third.id
        bench.check_invariants()

    @pytest.mark.promise("PUB-4")
    def test_a_claim_of_many_frees_the_keys_of_those_that_are_to_be_freed(self, bench: Bench) -> None:
        modes: tuple[Unique, ...] = ("live", "until_claimed", "live_or_dead", "until_claimed")
        drafts = [bench.draft(key=f"k{at}", unique=mode) for at, mode in enumerate(modes)]
        bench.publish_drafts([*drafts, bench.draft()])
        assert [lease.key for lease in bench.claim(5)] == ["k0", "k1", "k2", "k3", None]
        again = bench.publish_drafts([bench.draft(key=f"k{at}") for at in range(4)])
        assert [one.status for one in again] == ["duplicate", "queued", "duplicate", "queued"]
        bench.check_invariants()

    @pytest.mark.promise("PUB-4")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release", "expired"])
    def test_a_message_that_comes_back_does_not_take_its_key_again(self, bench: Bench, outcome: str) -> None:
        first = bench.publish(key="k", unique="until_claimed")
        lease = bench.claim_one()
        if outcome == "expired":
            bench.after(60)
        else:
            bench.settle(lease, outcome, after=0)  # type: ignore[arg-type]
        second = bench.publish(key="k", unique="until_claimed")
        assert second.status == "queued"
        bench.after(1)
        leases = bench.claim(2)
        assert [(one.id, one.key) for one in leases] == [(first.id, "k"), (second.id, "k")]
        assert {event.key for event in bench.events(message_id=first.id)} == {"k"}
        for one in leases:
            assert bench.settle(one) == "done"
        assert bench.ledger().replaced == 0
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "PUB-6")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release", "done"])
    def test_the_successor_of_another_message_does_not_end_one_that_gave_its_key_up(
        self, bench: Bench, outcome: OutcomeName
    ) -> None:
        first = bench.publish(key="k", unique="until_claimed")
        lease = bench.claim_one()
        owner = bench.publish(key="k")
        bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        assert bench.ids("waiting") == [parked.id]
        bench.settle(lease, outcome)
        assert bench.state_of(first.id) == (None if outcome == "done" else "ready")
        assert (bench.ids("leased"), bench.ids("waiting")) == ([owner.id], [parked.id])
        assert bench.ledger().replaced == 0
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "PUB-5", "PUB-6")
    @pytest.mark.parametrize("rule", ["keep", "replace", "extend", "error"])
    def test_after_the_claim_no_rule_finds_a_conflict(self, bench: Bench, rule: str) -> None:
        first = bench.publish(b"first", key="k", unique="until_claimed")
        lease = bench.claim_one()
        second = bench.publish(b"second", key="k", unique="until_claimed", on_conflict=rule)
        assert (second.status, bench.ids("waiting")) == ("queued", [])
        assert bench.claim_one().id == second.id
        assert bench.settle(lease, "retry") == "retried"
        assert bench.state_of(first.id) is not None

    @pytest.mark.promise("PUB-4", "PUB-5")
    def test_before_the_claim_it_can_be_replaced_and_extended(self, bench: Bench) -> None:
        first = bench.publish(b"first", key="k", unique="until_claimed")
        second = bench.publish(b"second", key="k", unique="until_claimed", on_conflict="replace")
        assert (second.status, bench.state_of(first.id)) == ("replaced", None)
        moved = bench.publish(key="k", on_conflict="extend", delay=5)
        assert (moved.id, moved.status) == (second.id, "extended")
        bench.after(5)
        assert bench.body(bench.claim_one()) == b"second"
        # The rule is that of the message that has the key, not that of a publish that only moves it.
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-4", "PUB-6")
    def test_a_successor_of_this_kind_gives_the_key_up_when_it_is_claimed(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", unique="until_claimed", on_conflict="replace")
        assert bench.publish(key="k").id == parked.id
        bench.settle(lease)
        assert bench.publish(key="k").id == parked.id
        assert bench.claim_one().id == parked.id
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-4", "LEASE-12", "TIMER-1", "QUEUE-8")
    def test_by_its_key_only_the_message_that_has_it_is_found(self, bench: Bench) -> None:
        first = bench.publish(key="k", unique="until_claimed")
        assert bench.holders("k") == {"orders": [first.id]}
        lease = bench.claim_one()
        assert (bench.holders("k"), bench.ids("leased", key="k"), bench.cancel(key="k")) == ({}, [], "unknown")
        assert bench.reschedule(key="k", delay=5) == "unknown"
        assert bench.stored(first.id).key == "k"
        second = bench.publish(key="k", delay=60, unique="until_claimed")
        assert (bench.holders("k"), bench.ids("delayed", key="k")) == ({"orders": [second.id]}, [second.id])
        bench.settle(lease, "retry", after=90)
        assert (bench.ids("delayed"), bench.ids("delayed", key="k")) == ([second.id, first.id], [second.id])
        assert bench.cancel(key="k") == "cancelled"
        assert bench.cancel(first.id) == "cancelled"

    @pytest.mark.promise("PUB-4", "PUB-7", "PUB-10")
    def test_messages_that_end_unclaimed_free_their_keys(self, bench: Bench) -> None:
        bench.publish(key="cancelled", unique="until_claimed", delay=60)
        bench.cancel(key="cancelled")
        bench.publish(key="lapsed", unique="until_claimed", expires=5)
        bench.after(5)
        bench.configure(max_pending=1, overload="drop_oldest")
        bench.publish(key="lapsed", unique="until_claimed")
        bench.publish(key="cancelled", unique="until_claimed")
        assert bench.publish(key="lapsed", unique="until_claimed").status == "queued"
        assert bench.ledger().dropped == 3
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "PUB-10")
    def test_a_publish_does_not_end_a_lapsed_message_that_gave_the_key_up(self, bench: Bench) -> None:
        first = bench.publish(key="k", unique="until_claimed", expires=5)
        bench.settle(bench.claim_one(), "retry", after=60)
        bench.after(5)
        assert bench.publish(key="k", unique="until_claimed").status == "queued"
        assert bench.state_of(first.id) == "delayed"

    @pytest.mark.promise("PUB-4", "DEAD-2")
    def test_a_redriven_message_has_its_key_until_it_is_claimed_again(self, bench: Bench) -> None:
        first = bench.publish(key="k", unique="until_claimed")
        bench.settle(bench.claim_one(), "dead")
        assert (bench.stored(first.id).key, bench.ids("dead", key="k")) == ("k", [first.id])
        second = bench.publish(key="k", unique="until_claimed")
        assert bench.redrive().duplicates == [first.id]
        assert bench.claim_one().id == second.id
        assert bench.redrive(first.id).moved == [first.id]
        assert bench.publish(key="k").id == first.id
        assert bench.claim_one().id == first.id
        assert bench.publish(key="k").status == "queued"
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "LEASE-5")
    def test_a_message_without_deliveries_left_dies_with_its_key(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        first = bench.publish(key="k", unique="until_claimed")
        bench.claim_one()
        second = bench.publish(key="k", unique="until_claimed")
        bench.after(1)
        assert bench.claim_one().id == second.id
        assert (bench.stored(first.id).state, bench.stored(first.id).key) == ("dead", "k")
        assert bench.purge("dead").removed == 1
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "LEASE-7", "DEAD-3")
    @pytest.mark.parametrize("lease", [None, 60])
    def test_the_history_of_finished_messages_has_the_key(self, bench: Bench, lease: float | None) -> None:
        bench.configure(lease=lease, completed=10)
        first = bench.publish(key="k", unique="until_claimed")
        claimed = bench.claim_one()
        assert claimed.key == "k"
        if lease is not None:
            bench.settle(claimed)
        [kept] = bench.listing("done")
        assert (kept.id, kept.key) == (first.id, "k")
        assert {event.key for event in bench.events(message_id=first.id)} == {"k"}

    @pytest.mark.promise("PUB-4", "LEASE-6")
    def test_a_repeated_claim_returns_the_key_and_frees_nothing_else(self, bench: Bench) -> None:
        bench.publish(key="k", unique="until_claimed")
        operation = bench.operation()
        bench.claimed(operation=operation)
        second = bench.publish(key="k", unique="until_claimed")
        [lease] = bench.claimed(operation=operation).leases
        assert lease.key == "k"
        assert bench.publish(key="k").id == second.id


class TestLiveOrDead:
    """With `unique="live_or_dead"` a key is in use while its message is unfinished or a dead letter."""

    @pytest.mark.promise("PUB-4", "DEAD-1")
    @pytest.mark.parametrize("death", ["settled", "settled one by one", "exhausted"])
    def test_a_message_without_a_key_dies_like_any_other(self, bench: Bench, death: str) -> None:
        # As when a key function returns one for some messages of a batch.
        bench.configure(max_deliveries=1, lease=1)
        letters = bench.publish_drafts([bench.draft(key=key, unique="live_or_dead") for key in ("k", None)])
        leases = bench.claim(2)
        if death == "settled":
            assert bench.settle_batch([bench.settlement(lease, "dead") for lease in leases]) == ["dead", "dead"]
        elif death == "settled one by one":
            assert [bench.settle(lease, "dead") for lease in leases] == ["dead", "dead"]
        else:
            bench.after(1)
            assert bench.claim() == []
        assert [bench.stored(letter.id).state for letter in letters] == ["dead", "dead"]
        assert bench.publish(key="k").status == "duplicate"
        assert bench.redrive(letters[1].id).moved == [letters[1].id]
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "DEAD-1")
    @pytest.mark.parametrize("death", ["settled", "exhausted"])
    def test_a_dead_letter_keeps_its_key(self, bench: Bench, death: str) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        if death == "settled":
            bench.settle(bench.claim_one(), "dead")
        else:
            bench.configure(max_deliveries=1, lease=1)
            bench.claim_one()
            bench.after(1)
            assert bench.claim() == []
        bench.after(10**9)
        assert bench.publish(key="k") == Published(letter.id, "duplicate", "orders")
        assert bench.cancel(key="k") == "finished"
        assert bench.reschedule(key="k", delay=5) == "unknown"
        assert bench.holders("k") == {}
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "PUB-5")
    @pytest.mark.parametrize(
        ("rule", "status"),
        [("keep", "duplicate"), ("replace", "duplicate"), ("extend", "duplicate"), ("error", "conflict")],
    )
    def test_nothing_is_stored_in_place_of_a_dead_letter(self, bench: Bench, rule: str, status: str) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        bench.settle(bench.claim_one(), "dead")
        published = bench.publish(key="k", unique="live_or_dead", on_conflict=rule, delay=5)
        assert (published.id, published.status) == (letter.id, status)
        assert bench.ledger().published == 1

    @pytest.mark.promise("PUB-4", "DEAD-1", "DEAD-2")
    @pytest.mark.parametrize("end", ["purge", "purge one", "dead_keep", "dead_max"])
    def test_its_key_is_free_when_the_letter_goes(self, bench: Bench, end: str) -> None:
        letter = bench.publish(key="k", unique="live_or_dead", window=3600)
        bench.settle(bench.claim_one(), "dead")
        match end:
            case "purge":
                bench.purge("dead")
            case "purge one":
                bench.purge("dead", letter.id)
            case "dead_keep":
                bench.configure(dead_keep=1)
                bench.after(1)
                bench.claim()
            case "dead_max":
                bench.configure(dead_max=1)
                bench.publish()
                bench.settle(bench.claim_one(), "dead")
        assert bench.state_of(letter.id) is None
        assert bench.publish(key="k").status == "queued"
        bench.check_invariants()

    @pytest.mark.promise("PUB-4")
    @pytest.mark.parametrize("end", ["done", "drop", "cancel"])
    def test_its_key_is_free_when_the_message_ends_otherwise(self, bench: Bench, end: str) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        if end == "cancel":
            bench.cancel(letter.id)
        else:
            bench.settle(bench.claim_one(), end)  # type: ignore[arg-type]
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-4", "DEAD-2")
    def test_a_redriven_letter_has_its_key_until_it_ends(self, bench: Bench) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        for _ in range(2):
            bench.settle(bench.claim_one(), "dead")
            assert bench.publish(key="k").id == letter.id
            assert bench.redrive().moved == [letter.id]
            assert bench.publish(key="k").id == letter.id
        bench.settle(bench.claim_one())
        assert bench.publish(key="k").status == "queued"
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "DEAD-2")
    def test_another_letter_of_the_key_stays_dead_as_a_duplicate(self, bench: Bench) -> None:
        other = bench.publish(key="k")
        bench.settle(bench.claim_one(), "dead")
        letter = bench.publish(key="k", unique="live_or_dead")
        bench.settle(bench.claim_one(), "dead")
        bench.after(1)
        assert bench.redrive(other.id).duplicates == [other.id]
        # That other one goes without the key.
        assert bench.purge("dead", other.id).removed == 1
        assert bench.publish(key="k").id == letter.id
        assert bench.redrive(letter.id).moved == [letter.id]

    @pytest.mark.promise("PUB-4", "PUB-6")
    def test_a_successor_takes_the_key_over(self, bench: Bench) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        bench.settle(lease, "dead")
        assert bench.publish(key="k").id == parked.id
        bench.settle(bench.claim_one())
        new = bench.publish(key="k")
        assert new.status == "queued"
        assert bench.purge("dead", letter.id).removed == 1
        assert bench.publish(key="k").id == new.id

    @pytest.mark.promise("PUB-4", "DEAD-2")
    def test_an_edited_message_takes_over_the_key_and_its_rule(self, bench: Bench) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        bench.settle(bench.claim_one(), "dead")
        edited = bench.replace_dead(letter.id, key="k")
        assert edited is not None
        assert edited.status == "queued"
        assert bench.publish(key="k").id == edited.id
        bench.settle(bench.claim_one(), "dead")
        assert bench.publish(key="k").id == edited.id
        bench.check_invariants()

    @pytest.mark.promise("PUB-4", "DEAD-2", "PUB-7")
    def test_after_a_refused_edit_the_letter_has_its_key(self, bench: Bench) -> None:
        letter = bench.publish(key="k", unique="live_or_dead")
        bench.settle(bench.claim_one(), "dead")
        other = bench.publish(key="other")
        refused = bench.replace_dead(letter.id, key="other")
        assert refused == Published(other.id, "duplicate", "orders")
        assert bench.publish(key="k").id == letter.id

    @pytest.mark.promise("PUB-4")
    def test_a_window_counts_after_the_end_and_a_letter_after_its_death(self, bench: Bench) -> None:
        done = bench.publish(key="k", unique="live_or_dead", window=60)
        bench.settle(bench.claim_one())
        assert bench.publish(key="k").id == done.id
        bench.after(60)
        letter = bench.publish(key="k", unique="live_or_dead", window=60)
        bench.settle(bench.claim_one(), "dead")
        bench.after(60)
        assert bench.publish(key="k").id == letter.id
