"""Keys: deduplication while a message lives or in a window, conflicts in every state, and generations."""

from __future__ import annotations

import pytest

from waypost.testing.bench import Bench
from waypost.values import MessageState, OutcomeName, chain_id


class TestLiveKeys:
    """A key is held while its message is unfinished."""

    @pytest.mark.promise("PUB-4", "PUB-5")
    def test_a_held_key_gives_duplicate_and_names_its_holder(self, bench: Bench) -> None:
        holder = bench.publish(key="order:7")
        again = bench.publish(b"other", key="order:7")
        assert (again.status, again.id) == ("duplicate", holder.id)
        assert bench.ids("ready") == [holder.id]
        assert bench.ledger().duplicates == 1

    @pytest.mark.promise("PUB-4")
    def test_a_key_is_free_when_its_message_is_done(self, bench: Bench) -> None:
        bench.publish(key="k")
        bench.settle(bench.claim_one())
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-4")
    def test_a_key_stays_held_through_a_retry(self, bench: Bench) -> None:
        holder = bench.publish(key="k")
        bench.settle(bench.claim_one(), "retry", after=5)
        assert bench.publish(key="k") == type(holder)(holder.id, "duplicate", holder.queue)

    @pytest.mark.promise("PUB-4")
    def test_a_key_stays_held_through_a_crash(self, bench: Bench) -> None:
        holder = bench.publish(key="k")
        bench.claim_one()
        bench.after(61)
        assert bench.publish(key="k").id == holder.id
        assert bench.claim_one().id == holder.id

    @pytest.mark.promise("PUB-4")
    def test_messages_without_a_key_are_never_duplicates(self, bench: Bench) -> None:
        statuses = {bench.publish(b"same").status for _ in range(3)}
        assert statuses == {"queued"}

    @pytest.mark.promise("PUB-4")
    @pytest.mark.parametrize("key", ["Straße", "\u4e2d\u6587", "a b'c\"d", "{tag}", "%s:*?[x]", "\U0001f600" * 100])
    def test_any_text_can_be_a_key(self, bench: Bench, key: str) -> None:
        holder = bench.publish(key=key)
        assert bench.publish(key=key) == type(holder)(holder.id, "duplicate", holder.queue)
        assert bench.stored(holder.id).key == key
        assert bench.ids("ready", key=key) == [holder.id]
        assert bench.claim_one().key == key
        assert bench.cancel(key=key) == "requested"

    @pytest.mark.promise("PUB-4")
    def test_keys_that_differ_only_in_their_spelling_are_different(self, bench: Bench) -> None:
        composed, decomposed = "\u00e9", "e\u0301"
        assert {bench.publish(key=key).status for key in ("K", "k", composed, decomposed, "k ")} == {"queued"}

    @pytest.mark.promise("PUB-4", "SEE-3")
    def test_a_duplicate_is_journalled_with_its_holder(self, bench: Bench) -> None:
        holder = bench.publish(key="k")
        bench.publish(key="k")
        (event,) = bench.events("duplicate")
        assert (event.message_id, event.key) == (holder.id, "k")


class TestWindows:
    """A key with a window is held until the window ends, whether its message is finished or not."""

    @pytest.mark.promise("PUB-4")
    def test_a_window_outlives_a_finished_message(self, bench: Bench) -> None:
        holder = bench.publish(key="k", window=60)
        bench.settle(bench.claim_one())
        bench.after(59.999)
        assert bench.publish(key="k", window=60) == type(holder)(holder.id, "duplicate", holder.queue)
        bench.after(0.001)
        assert bench.publish(key="k", window=60).status == "queued"

    @pytest.mark.promise("PUB-4")
    def test_an_unfinished_message_holds_its_key_past_the_window(self, bench: Bench) -> None:
        holder = bench.publish(key="k", window=1, delay=600)
        bench.after(60)
        assert bench.publish(key="k", window=1).id == holder.id

    @pytest.mark.promise("PUB-4")
    @pytest.mark.parametrize("end", ["dead", "drop", "cancel", "cancel_running", "purge"])
    def test_a_window_ends_when_its_message_dies_is_dropped_or_cancelled(self, bench: Bench, end: str) -> None:
        published = bench.publish(key="k", window=3600)
        match end:
            case "dead":
                bench.settle(bench.claim_one(), "dead")
            case "drop":
                bench.settle(bench.claim_one(), "drop")
            case "cancel":
                bench.cancel(published.id)
            case "cancel_running":
                lease = bench.claim_one()
                bench.cancel(published.id)
                bench.settle(lease, "retry")
            case "purge":
                bench.purge("ready")
        assert bench.publish(key="k", window=3600).status == "queued"

    @pytest.mark.promise("PUB-4", "LEASE-5")
    def test_a_window_ends_when_its_message_runs_out_of_deliveries(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1, lease=1)
        bench.publish(key="k", window=3600)
        bench.claim_one()
        bench.after(1)
        assert bench.claim() == []
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-5")
    @pytest.mark.parametrize(
        ("rule", "status"),
        [("keep", "duplicate"), ("replace", "duplicate"), ("extend", "duplicate"), ("error", "conflict")],
    )
    def test_inside_the_window_of_a_finished_message_nothing_is_stored(
        self, bench: Bench, rule: str, status: str
    ) -> None:
        holder = bench.publish(key="k", window=60)
        bench.settle(bench.claim_one())
        published = bench.publish(key="k", on_conflict=rule, delay=5)
        assert (published.id, published.status) == (holder.id, status)
        assert bench.ledger().published == 1

    @pytest.mark.promise("PUB-4", "LEASE-7")
    def test_a_window_holds_for_a_message_that_was_claimed_at_most_once(self, bench: Bench) -> None:
        bench.configure(lease=None)
        bench.publish(key="k", window=60)
        bench.claim_one()
        assert bench.publish(key="k", window=60).status == "duplicate"

    @pytest.mark.promise("PUB-4")
    def test_a_replacing_publish_starts_its_own_window(self, bench: Bench) -> None:
        bench.publish(key="k", window=60)
        bench.after(30)
        replacement = bench.publish(key="k", window=60, on_conflict="replace")
        bench.settle(bench.claim_one())
        bench.after(59)
        assert bench.publish(key="k", window=60) == type(replacement)(replacement.id, "duplicate", replacement.queue)
        bench.after(1)
        assert bench.publish(key="k", window=60).status == "queued"


class TestConflicts:
    """`on_conflict` while the holder waits: ready or delayed."""

    @pytest.mark.promise("PUB-5")
    @pytest.mark.parametrize("delay", [0, 60])
    def test_keep_changes_nothing(self, bench: Bench, delay: float) -> None:
        holder = bench.publish(b"first", key="k", delay=delay)
        before = bench.stored(holder.id)
        bench.publish(b"second", key="k", delay=5, priority=9)
        assert bench.stored(holder.id) == before

    @pytest.mark.promise("PUB-5")
    @pytest.mark.parametrize("delay", [0, 60])
    def test_error_returns_conflict_and_changes_nothing(self, bench: Bench, delay: float) -> None:
        holder = bench.publish(b"first", key="k", delay=delay)
        before = bench.stored(holder.id)
        refused = bench.publish(b"second", key="k", on_conflict="error")
        assert (refused.id, refused.status) == (holder.id, "conflict")
        assert bench.stored(holder.id) == before

    @pytest.mark.promise("PUB-5")
    def test_error_stores_a_message_whose_key_is_free(self, bench: Bench) -> None:
        assert bench.publish(key="k", on_conflict="error").status == "queued"

    @pytest.mark.promise("PUB-5")
    @pytest.mark.parametrize("old_delay", [0, 60])
    @pytest.mark.parametrize("new_delay", [0, 30])
    def test_replace_takes_body_due_time_and_everything_else(
        self, bench: Bench, old_delay: float, new_delay: float
    ) -> None:
        old = bench.publish(b"first", key="k", delay=old_delay, priority=1, group="a")
        new = bench.publish(b"second", key="k", delay=new_delay, priority=9, group="b", on_conflict="replace")
        assert new.status == "replaced"
        assert new.id != old.id
        assert bench.state_of(old.id) is None
        stored = bench.stored(new.id)
        assert (bench.body(stored), stored.priority, stored.group) == (b"second", 9, "b")
        assert stored.state == ("delayed" if new_delay else "ready")
        assert stored.ready_ms == bench.now_ms + new_delay * 1000
        assert bench.event_names(old.id)[-1] == "replaced"
        assert bench.ledger().replaced == 1

    @pytest.mark.promise("PUB-5")
    def test_replace_removes_the_old_entry_from_the_queue(self, bench: Bench) -> None:
        for round_number in range(5):
            bench.publish(b"%d" % round_number, key="k", on_conflict="replace")
        other = bench.publish()
        leases = bench.claim(10)
        assert [bench.body(lease) for lease in leases[:1]] == [b"4"]
        assert [lease.id for lease in leases[1:]] == [other.id]

    @pytest.mark.promise("PUB-5")
    def test_extend_moves_only_the_due_time(self, bench: Bench) -> None:
        holder = bench.publish(b"first", key="k", delay=60, priority=1)
        extended = bench.publish(b"second", key="k", delay=90, priority=9, on_conflict="extend")
        assert (extended.id, extended.status) == (holder.id, "extended")
        stored = bench.stored(holder.id)
        assert (bench.body(stored), stored.priority, stored.state) == (b"first", 1, "delayed")
        assert stored.ready_ms == bench.now_ms + 90_000
        [event] = bench.events("postponed")
        assert (event.message_id, event.due_ms) == (holder.id, stored.ready_ms)

    @pytest.mark.promise("PUB-5")
    def test_extend_can_bring_a_timer_forward_to_now(self, bench: Bench) -> None:
        holder = bench.publish(key="k", delay=60)
        bench.publish(key="k", on_conflict="extend")
        assert bench.claim_one().id == holder.id

    @pytest.mark.promise("PUB-5", "TIMER-1")
    def test_extend_can_put_a_ready_message_off(self, bench: Bench) -> None:
        holder = bench.publish(key="k")
        bench.publish(key="k", on_conflict="extend", delay=60)
        assert bench.claim() == []
        bench.after(60)
        assert bench.claim_one().id == holder.id

    @pytest.mark.promise("PUB-5")
    def test_extend_moves_a_message_that_waits_for_its_retry(self, bench: Bench) -> None:
        holder = bench.publish(key="k")
        bench.settle(bench.claim_one(), "retry", after=10)
        bench.publish(key="k", on_conflict="extend", delay=100)
        bench.after(99)
        assert bench.claim() == []
        bench.after(1)
        lease = bench.claim_one()
        assert (lease.id, lease.attempts, lease.token) == (holder.id, 1, 2)

    @pytest.mark.promise("PUB-5")
    @pytest.mark.parametrize("rule", ["replace", "extend"])
    def test_a_rule_for_conflicts_is_harmless_on_a_free_key(self, bench: Bench, rule: str) -> None:
        assert bench.publish(key="k", on_conflict=rule).status == "queued"
        assert bench.publish(key="other", on_conflict=rule, delay=1).status == "delayed"


class TestHolders:
    """Finding messages by their key."""

    @pytest.mark.promise("QUEUE-8")
    def test_a_key_is_found_in_all_queues_that_have_it(self, bench: Bench) -> None:
        owner, other = bench.publish(key="k").id, bench.publish(key="k", queue="other", delay=60).id
        bench.publish(key="j")
        bench.publish(queue="third")
        queues = ("orders", "other", "third", "no-such-queue")
        assert bench.holders("k", *queues) == {"orders": [owner], "other": [other]}
        bench.claim(2)
        successor = bench.publish(key="k", on_conflict="replace").id
        assert bench.holders("k", *queues) == {"orders": [owner, successor], "other": [other]}
        assert bench.holders("ключ \u2028'") == {}

    @pytest.mark.promise("QUEUE-8")
    def test_a_key_of_an_ended_message_is_not_found(self, bench: Bench) -> None:
        bench.publish(key="dead")
        bench.publish(key="done", window=3600)
        for outcome in ("dead", "done"):
            bench.settle(bench.claim_one(), outcome)
        assert (bench.holders("dead"), bench.holders("done")) == ({}, {})

    @pytest.mark.promise("DEAD-2", "QUEUE-8")
    def test_a_listing_by_key_finds_its_message_in_each_state(self, bench: Bench) -> None:
        ready = bench.publish(key="ready").id
        delayed = bench.publish(key="delayed", delay=60).id
        leased = bench.publish(key="leased", priority=9).id
        dead = bench.publish(key="dead", priority=9).id
        bench.claim_one()
        bench.settle(bench.claim_one(), "dead")
        waiting = bench.publish(key="leased", on_conflict="replace").id
        places: dict[MessageState, tuple[str, str]] = {
            "ready": ("ready", ready), "delayed": ("delayed", delayed), "dead": ("dead", dead),
            "leased": ("leased", leased), "waiting": ("leased", waiting),
        }  # fmt: skip
        for state, (key, id) in places.items():
            assert bench.ids(state, key=key) == [id]
            assert bench.ids(state, key="none") == []
        assert bench.ids("ready", key="delayed") == []
        assert bench.ids("ready", key="ready", group="none") == []


class TestGenerations:
    """Publishing a key while its message is being handled."""

    @pytest.mark.promise("PUB-6", "CHAIN-2")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release"])
    @pytest.mark.parametrize("chained", [False, True])
    def test_the_next_generation_of_another_key_ends_no_delivery(
        self, bench: Bench, outcome: OutcomeName, chained: bool
    ) -> None:
        id = bench.session.message_ids(1)[0]
        bench.publish(id=id, key="k", chain=chain_id("orders", id) if chained else None)
        other = bench.publish(key="other").id
        first, _ = bench.claim(2)
        parked = bench.publish(key="other", on_conflict="replace").id
        bench.settle(first, outcome)
        assert (bench.ids("ready"), bench.ids("leased"), bench.ids("waiting")) == ([id], [other], [parked])
        assert bench.ledger().replaced == 0

    @pytest.mark.promise("PUB-6")
    @pytest.mark.parametrize(("rule", "status"), [("keep", "duplicate"), ("error", "conflict")])
    def test_keep_and_error_store_nothing(self, bench: Bench, rule: str, status: str) -> None:
        holder = bench.publish(key="k")
        bench.claim_one()
        published = bench.publish(key="k", on_conflict=rule)
        assert (published.id, published.status) == (holder.id, status)
        assert bench.ids("waiting") == []

    @pytest.mark.promise("PUB-6")
    @pytest.mark.parametrize(("rule", "status"), [("replace", "replaced"), ("extend", "extended")])
    def test_replace_and_extend_park_the_next_generation(self, bench: Bench, rule: str, status: str) -> None:
        running = bench.publish(b"first", key="k")
        lease = bench.claim_one()
        parked = bench.publish(b"second", key="k", on_conflict=rule)
        assert parked.status == status
        assert parked.id != running.id
        assert bench.ids("waiting") == [parked.id]
        assert bench.claim() == []
        assert bench.settle(lease) == "done"
        following = bench.claim_one()
        assert (following.id, following.token, bench.body(following)) == (parked.id, 1, b"second")

    @pytest.mark.promise("PUB-6")
    def test_a_parked_generation_keeps_its_due_time(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace", delay=30)
        bench.settle(lease)
        assert bench.ids("delayed") == [parked.id]
        bench.after(29.999)
        assert bench.claim() == []
        bench.after(0.001)
        assert bench.claim_one().id == parked.id

    @pytest.mark.promise("PUB-6")
    def test_a_parked_generation_whose_time_came_is_ready_at_the_settle(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="extend", delay=10)
        bench.after(20)
        bench.settle(lease)
        assert bench.ids("ready") == [parked.id]
        assert bench.stored(parked.id).ready_ms == bench.now_ms

    @pytest.mark.promise("PUB-6")
    def test_later_publishes_change_the_parked_one(self, bench: Bench) -> None:
        bench.publish(b"running", key="k")
        lease = bench.claim_one()
        second = bench.publish(b"second", key="k", on_conflict="replace")
        kept = bench.publish(b"ignored", key="k")
        assert (kept.id, kept.status) == (second.id, "duplicate")
        third = bench.publish(b"third", key="k", on_conflict="replace")
        assert bench.ids("waiting") == [third.id]
        moved = bench.publish(b"ignored", key="k", on_conflict="extend", delay=50)
        assert (moved.id, moved.status) == (third.id, "extended")
        refused = bench.publish(key="k", on_conflict="error")
        assert (refused.id, refused.status) == (third.id, "conflict")
        bench.settle(lease)
        bench.after(50)
        assert bench.body(bench.claim_one()) == b"third"

    @pytest.mark.promise("PUB-6")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release"])
    def test_an_owner_that_would_come_back_ends_replaced(self, bench: Bench, outcome: str) -> None:
        owner = bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        assert bench.run(
            bench.store.settle("orders", [bench.settlement(lease, outcome)], bench.operation())  # type: ignore[arg-type]
        ).result == ["replaced"]
        assert bench.state_of(owner.id) is None
        assert bench.claim_one().id == parked.id
        assert bench.ledger().replaced == 1

    @pytest.mark.promise("PUB-6")
    def test_an_owner_whose_lease_ends_gives_way(self, bench: Bench) -> None:
        bench.configure(lease=10)
        owner = bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        bench.after(10)
        assert [one.id for one in bench.claim(10)] == [parked.id]
        assert bench.event_names(owner.id)[-1] == "replaced"
        assert bench.settle(lease) == "lost"
        assert bench.ledger().expired == 0

    @pytest.mark.promise("PUB-6")
    @pytest.mark.parametrize("outcome", ["dead", "drop"])
    def test_an_owner_that_dies_or_is_dropped_hands_its_key_on(self, bench: Bench, outcome: str) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        bench.settle(lease, "dead" if outcome == "dead" else "drop")
        assert bench.claim_one().id == parked.id
        assert bench.publish(key="k").id == parked.id

    @pytest.mark.promise("PUB-6")
    def test_the_settle_of_the_running_one_cannot_erase_the_next(self, bench: Bench) -> None:
        bench.publish(key="k", window=60)
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        operation = bench.operation()
        assert bench.settle(lease, operation=operation) == "done"
        assert bench.settle(lease, operation=operation) == "done"
        assert bench.settle(lease) == "lost"
        assert bench.ids("ready") == [parked.id]

    @pytest.mark.promise("PUB-6")
    def test_never_are_two_of_one_key_leased(self, bench: Bench) -> None:
        bench.configure(lease=10)
        bench.publish(key="k")
        for _ in range(6):
            leases = bench.claim(10)
            assert len(leases) == 1
            bench.publish(key="k", on_conflict="replace")
            assert bench.claim(10) == []
            bench.check_queue("orders")
            bench.after(10)

    @pytest.mark.promise("PUB-6")
    def test_a_message_reschedules_itself_from_inside_its_handler(self, bench: Bench) -> None:
        bench.publish(b"tick", key="k")
        for _ in range(3):
            lease = bench.claim_one()
            assert bench.publish(b"tick", key="k", on_conflict="extend", delay=60).status == "extended"
            assert bench.settle(lease) == "done"
            bench.after(60)
        assert bench.ledger().done == 3
        assert bench.ledger().replaced == 0

    @pytest.mark.promise("PUB-6", "SEE-3")
    def test_parking_and_taking_over_are_journalled(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        bench.settle(lease)
        events = bench.events(message_id=parked.id)
        assert [(event.event, event.cause) for event in events] == [("published", "parked"), ("promoted", "unparked")]

    @pytest.mark.promise("PUB-6", "LEASE-12")
    def test_cancel_by_key_removes_the_parked_one_and_requests_it_of_the_running_one(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        assert bench.cancel(key="k") == "requested"
        assert bench.state_of(parked.id) is None
        assert bench.extend(lease) == "cancel"
        assert bench.settle(lease, "retry") == "cancelled"
        assert bench.claim() == []
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("PUB-6", "LEASE-12")
    def test_cancel_by_id_takes_only_the_parked_one(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        parked = bench.publish(key="k", on_conflict="replace")
        assert bench.cancel(parked.id) == "cancelled"
        assert bench.extend(lease) == "ok"
        assert bench.settle(lease, "retry") == "retried"

    @pytest.mark.promise("PUB-6")
    def test_a_cancelled_owner_hands_its_key_to_a_generation_parked_later(self, bench: Bench) -> None:
        owner = bench.publish(key="k")
        lease = bench.claim_one()
        bench.cancel(owner.id)
        parked = bench.publish(key="k", on_conflict="replace")
        assert bench.settle(lease, "retry") == "cancelled"
        assert bench.claim_one().id == parked.id

    @pytest.mark.promise("PUB-6", "DEAD-2")
    def test_purging_waiting_messages_does_not_affect_the_running_one(self, bench: Bench) -> None:
        bench.publish(key="k")
        lease = bench.claim_one()
        bench.publish(key="k", on_conflict="replace")
        assert bench.purge("waiting").removed == 1
        assert bench.settle(lease, "retry") == "retried"
        assert bench.ledger().cancelled == 1
