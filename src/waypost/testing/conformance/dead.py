"""Dead letters: kept whole with their reason, redriven on request; and the history of finished messages."""

from __future__ import annotations

from typing import Any

import pytest

from waypost.errors import InvalidInput, QueueFull
from waypost.policy import CHUNK_BYTES_MAX
from waypost.testing.bench import Bench
from waypost.values import TRACEBACK_MARK, Published, split_error


def bury(bench: Bench, count: int = 1, *, reason: str = "rejected", **options: Any) -> list[str]:
    """Make `count` dead letters; return their ids in the order of their deaths."""
    ids = bench.publish_count(count, **options)
    for lease in bench.claim(count):
        bench.settle(lease, "dead", reason=reason, error_type="ValueError", error="no such customer")
    return ids


class TestDeadLetters:
    """What a dead letter keeps, and for how long."""

    @pytest.mark.promise("DEAD-1")
    def test_a_dead_letter_is_whole(self, bench: Bench) -> None:
        published = bench.publish(b"\0body", key="k", group="acme", priority=7)
        published_ms = bench.now_ms
        bench.settle(bench.claim_one(), "retry", error_type="OSError", error="first")
        bench.after(3)
        lease = bench.claim_one()
        bench.settle(lease, "dead", reason="rejected", error_type="ValueError", error="it is – broken")
        dead = bench.stored(published.id)
        assert (dead.state, dead.reason, dead.error_type, dead.error) == (
            "dead", "rejected", "ValueError", "it is – broken",
        )  # fmt: skip
        assert (dead.key, dead.group, dead.priority, bench.body(dead)) == ("k", "acme", 7, b"\0body")
        assert (dead.token, dead.deliveries, dead.attempts) == (2, 2, 1)
        assert (dead.published_ms, dead.ended_ms) == (published_ms, bench.now_ms)

    @pytest.mark.promise("DEAD-1")
    @pytest.mark.parametrize("reason", ["rejected", "retries_exhausted", "undecodable", "retry_policy_failed"])
    def test_the_reason_is_kept_and_can_be_filtered_by(self, bench: Bench, reason: str) -> None:
        (id,) = bury(bench, reason=reason)
        bury(bench, reason="something else")
        assert bench.ids("dead", reason=reason) == [id]
        assert [event.reason for event in bench.events("dead", message_id=id)] == [reason]

    @pytest.mark.promise("DEAD-1")
    @pytest.mark.parametrize(
        ("reason", "attempts"),
        [("retries_exhausted", 2), ("retry_policy_failed", 2), ("rejected", 1), ("undecodable", 1)],
    )
    def test_the_failure_that_ended_a_message_is_one_of_its_attempts(
        self, bench: Bench, reason: str, attempts: int
    ) -> None:
        published = bench.publish()
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "dead", reason=reason)
        assert bench.stored(published.id).attempts == attempts
        assert [event.attempts for event in bench.events("dead")] == [attempts]

    @pytest.mark.promise("DEAD-1")
    def test_without_a_reason_it_was_rejected(self, bench: Bench) -> None:
        bench.publish()
        bench.settle(bench.claim_one(), "dead")
        assert bench.listing("dead")[0].reason == "rejected"

    @pytest.mark.promise("DEAD-1")
    def test_a_long_error_text_is_kept_to_its_limit(self, bench: Bench) -> None:
        bench.publish()
        text = "é" * 8192
        bench.settle(bench.claim_one(), "dead", error_type="E", error=text)
        assert bench.listing("dead")[0].error == text

    @pytest.mark.promise("DEAD-1", "SEE-3")
    @pytest.mark.parametrize("chained", [False, True])
    def test_a_traceback_is_kept_with_the_last_error_and_not_in_the_journal(self, bench: Bench, chained: bool) -> None:
        for _ in range(2):
            bench.begin_chain() if chained else bench.publish()
        traceback = "Traceback ✗\n" + "line\n" * 100
        first, last = (f"{text}{TRACEBACK_MARK}{traceback}" for text in ("no room", "é" * 600))
        leases = bench.claim(2)
        bench.settle_batch([bench.settlement(lease, "retry", error_type="OSError", error=first) for lease in leases])
        assert [bench.stored(lease.id).error for lease in leases] == [first] * 2
        again, dead = bench.claim(2)
        bench.settle_batch([bench.settlement(again), bench.settlement(dead, "dead", error=last)])
        assert bench.stored(dead.id).error == last
        assert split_error(bench.watch(dead.id).error) == ("é" * 600, traceback)
        assert [event.error for event in bench.events("retried", "dead")] == ["no room", "no room", "é" * 500]

    @pytest.mark.promise("DEAD-1", "QUEUE-2")
    @pytest.mark.parametrize("chained", [False, True])
    def test_a_queue_can_be_configured_to_keep_no_tracebacks(self, bench: Bench, chained: bool) -> None:
        bench.configure(tracebacks=False)
        for _ in range(2):
            bench.begin_chain() if chained else bench.publish()
        error = f"no room{TRACEBACK_MARK}Traceback"
        failed, other = bench.claim(2)
        bench.settle_batch([bench.settlement(failed, "retry", error=error), bench.settlement(other, "retry")])
        assert [bench.stored(one.id).error or None for one in (failed, other)] == ["no room", None]
        bench.settle_batch([bench.settlement(lease, "dead", error=error) for lease in bench.claim(2)])
        assert [letter.error for letter in bench.listing("dead")] == ["no room"] * 2
        assert {event.error for event in bench.events("dead")} == {"no room"}

    @pytest.mark.promise("DEAD-2", "FACE-3")
    @pytest.mark.parametrize("group", [None, "acme"])
    def test_a_page_is_bounded_by_bytes_and_nothing_is_left_out(self, bench: Bench, group: str | None) -> None:
        ids = [bench.publish(b"x" * 900_000, group="acme").id for _ in range(7)]
        sizes, found, cursor = [], list[str](), None
        while True:
            page = bench.run(bench.store.peek("orders", "ready", 100, cursor=cursor, group=group))
            sizes.append(sum(len(message.envelope) for message in page.messages))
            found += [message.id for message in page.messages]
            cursor = page.cursor
            if cursor is None:
                break
        assert found == ids
        assert len(sizes) > 1
        # About so many: the message that goes past it is in the page too.
        assert max(sizes) < CHUNK_BYTES_MAX + 1_000_000

    @pytest.mark.promise("DEAD-1", "LEASE-5")
    def test_a_message_that_ran_out_of_deliveries_keeps_its_last_error(self, bench: Bench) -> None:
        bench.configure(max_deliveries=1)
        bench.publish()
        bench.settle(bench.claim_one(), "retry", error_type="OSError", error="the last error")
        bench.claim()
        (dead,) = bench.listing("dead")
        assert (dead.reason, dead.error_type, dead.error) == ("max_deliveries", "OSError", "the last error")

    @pytest.mark.promise("DEAD-1")
    def test_dead_letters_are_listed_oldest_first(self, bench: Bench) -> None:
        first, second = bench.publish_count(2)
        leases = {lease.id: lease for lease in bench.claim(2)}
        bench.settle(leases[second], "dead")
        bench.after(1)
        bench.settle(leases[first], "dead")
        assert bench.ids("dead") == [second, first]

    @pytest.mark.promise("DEAD-1")
    def test_dead_letters_are_kept_for_ever_by_default(self, bench: Bench) -> None:
        ids = bury(bench, 3)
        bench.after(10 * 365 * 86_400)
        bench.claim()
        assert bench.ids("dead") == ids

    @pytest.mark.promise("DEAD-1")
    def test_dead_max_forgets_the_oldest_and_journals_it(self, bench: Bench) -> None:
        bench.configure(dead_max=2)
        ids = []
        for _ in range(4):
            ids += bury(bench)
            bench.after(1)
        assert bench.ids("dead") == ids[2:]
        assert [(event.message_id, event.cause) for event in bench.events("dead_trimmed")] == [
            (ids[0], "dead_max"),
            (ids[1], "dead_max"),
        ]
        assert (bench.ledger().dead, bench.ledger().dead_kept) == (4, 2)

    @pytest.mark.promise("DEAD-1")
    def test_dead_keep_forgets_what_died_too_long_ago(self, bench: Bench) -> None:
        bench.configure(dead_keep=60)
        (old,) = bury(bench)
        bench.after(30)
        (young,) = bury(bench)
        bench.after(29.999)
        bench.claim()
        assert bench.ids("dead") == [old, young]
        bench.after(0.001)
        bench.claim()
        assert bench.ids("dead") == [young]
        assert [(event.message_id, event.cause) for event in bench.events("dead_trimmed")] == [(old, "dead_keep")]

    @pytest.mark.promise("DEAD-1", "QUEUE-2")
    def test_a_new_bound_on_dead_letters_acts_at_the_next_claim(self, bench: Bench) -> None:
        ids = bury(bench, 5)
        bench.configure(dead_max=1)
        bench.claim()
        assert bench.ids("dead") == ids[-1:]

    @pytest.mark.promise("DEAD-2")
    def test_purging_dead_letters_is_journalled_and_bounded(self, bench: Bench) -> None:
        bury(bench, 3)
        first = bench.purge("dead", limit=2)
        assert (first.removed, first.more) == (2, True)
        second = bench.purge("dead", limit=2)
        assert (second.removed, second.more) == (1, False)
        assert (bench.ledger().dead, bench.ledger().dead_kept) == (3, 0)
        assert [event.cause for event in bench.events("dead_trimmed")] == ["purge"] * 3

    @pytest.mark.promise("DEAD-1")
    def test_a_dead_message_is_final(self, bench: Bench) -> None:
        (id,) = bury(bench, key="k")
        bench.after(1_000_000)
        assert bench.claim() == []
        assert bench.state_of(id) == "dead"
        assert bench.publish(key="k").status == "queued"


class TestRedrive:
    """Redriving dead letters."""

    @pytest.mark.promise("DEAD-2")
    def test_counts_start_again_and_the_token_goes_on(self, bench: Bench) -> None:
        bench.publish()
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "dead")
        assert bench.redrive().moved != []
        lease = bench.claim_one()
        assert (lease.deliveries, lease.attempts, lease.token) == (1, 0, 3)
        assert bench.stored(lease.id).reason is None
        assert bench.ledger().redelivered["redriven"] == 1

    @pytest.mark.promise("DEAD-2")
    def test_chosen_ones_come_back(self, bench: Bench) -> None:
        first, second, third = bury(bench, 3)
        redriven = bench.redrive(third, first, "0" * 24)
        assert sorted(redriven.moved) == sorted([first, third])
        assert bench.ids("dead") == [second]

    @pytest.mark.promise("DEAD-2")
    def test_all_of_one_reason_come_back(self, bench: Bench) -> None:
        bury(bench, 2, reason="undecodable")
        ids = bury(bench, 2, reason="rejected")
        assert sorted(bench.redrive(reason="rejected").moved) == sorted(ids)
        assert {dead.reason for dead in bench.listing("dead")} == {"undecodable"}

    @pytest.mark.promise("DEAD-2")
    def test_a_bounded_redrive_keeps_the_rest_for_the_next_call(self, bench: Bench) -> None:
        ids = bury(bench, 5)
        moved = []
        while True:
            redriven = bench.redrive(limit=2)
            assert len(redriven.moved) <= 2
            moved += redriven.moved
            if not redriven.more:
                break
        assert sorted(moved) == sorted(ids)

    @pytest.mark.promise("DEAD-2")
    def test_they_come_back_oldest_death_first_at_the_end_of_the_queue(self, bench: Bench) -> None:
        first = bury(bench)
        bench.after(1)
        second = bury(bench)
        waiting = bench.publish()
        bench.redrive()
        assert [lease.id for lease in bench.claim(3)] == [waiting.id, *first, *second]

    @pytest.mark.promise("DEAD-2")
    def test_a_message_whose_key_is_held_by_another_stays_dead_as_a_duplicate(self, bench: Bench) -> None:
        (old,) = bury(bench, key="k")
        new = bench.publish(key="k")
        redriven = bench.redrive()
        assert (redriven.moved, redriven.duplicates, redriven.more) == ([], [old], False)
        assert bench.stored(old).reason == "duplicate"
        assert bench.ids("ready") == [new.id]

    @pytest.mark.promise("DEAD-2", "PUB-4")
    def test_a_key_inside_the_window_of_a_newer_message_is_held(self, bench: Bench) -> None:
        (old,) = bury(bench, key="k")
        bench.publish(key="k", window=60)
        bench.settle(bench.claim_one())
        assert bench.redrive().duplicates == [old]
        bench.after(60)
        assert bench.redrive(reason="duplicate").moved == [old]

    @pytest.mark.promise("DEAD-2")
    def test_a_duplicate_is_not_chosen_again_unless_it_is_named(self, bench: Bench) -> None:
        (old,) = bury(bench, key="k")
        bench.publish(key="k")
        bench.redrive()
        bench.settle(bench.claim_one())
        assert bench.redrive().moved == []
        assert bench.redrive(reason="duplicate").moved == [old]

    @pytest.mark.promise("DEAD-2")
    def test_of_two_dead_letters_of_one_key_only_the_older_comes_back(self, bench: Bench) -> None:
        (older,) = bury(bench, key="k")
        bench.after(1)
        (newer,) = bury(bench, key="k")
        redriven = bench.redrive()
        assert (redriven.moved, redriven.duplicates) == ([older], [newer])

    @pytest.mark.promise("DEAD-2", "PUB-4")
    def test_a_redriven_message_holds_its_key_again(self, bench: Bench) -> None:
        (id,) = bury(bench, key="k")
        bench.redrive()
        assert bench.publish(key="k") == Published(id, "duplicate", "orders")
        bench.settle(bench.claim_one())
        assert bench.publish(key="k").status == "queued"

    @pytest.mark.promise("DEAD-2")
    def test_a_redriven_message_can_die_again(self, bench: Bench) -> None:
        (id,) = bury(bench)
        bench.redrive()
        bench.settle(bench.claim_one(), "dead", reason="undecodable")
        assert bench.stored(id).reason == "undecodable"
        ledger = bench.ledger()
        assert (ledger.published, ledger.redriven, ledger.dead, ledger.dead_kept) == (1, 1, 2, 1)

    @pytest.mark.promise("DEAD-2")
    def test_redriving_nothing_is_harmless(self, bench: Bench) -> None:
        redriven = bench.redrive()
        assert (redriven.moved, redriven.duplicates, redriven.more) == ([], [], False)
        assert bench.ledger().redriven == 0


class TestChosenLetters:
    """Removing some dead letters, and replacing one by an edited message."""

    @pytest.mark.promise("DEAD-2", "QUEUE-8")
    def test_only_chosen_letters_are_purged(self, bench: Bench) -> None:
        first, second, third = bury(bench, 3)
        ready = bench.publish()
        purged = bench.purge("dead", first, "0" * 24, third, first, ready.id)
        assert (purged.removed, purged.more) == (2, False)
        assert bench.ids("dead") == [second]
        assert bench.ids("ready") == [ready.id]
        trimmed = bench.events("dead_trimmed")
        assert sorted((event.message_id or "", event.cause or "") for event in trimmed) == sorted(
            [(first, "purge"), (third, "purge")]
        )
        assert bench.ledger().dead_kept == 1

    @pytest.mark.promise("DEAD-2")
    def test_a_repeated_purge_of_chosen_letters_has_the_first_answer(self, bench: Bench) -> None:
        ids = bury(bench, 3)
        operation = bench.operation()
        first = bench.purge("dead", *ids[:2], operation=operation)
        assert bench.purge("dead", *ids[:2], operation=operation) == first
        assert bench.ids("dead") == ids[2:]

    @pytest.mark.promise("DEAD-2")
    def test_only_dead_letters_are_purged_by_their_ids(self, bench: Bench) -> None:
        published = bench.publish()
        with pytest.raises(InvalidInput, match="only dead letters"):
            bench.purge("ready", published.id)
        assert bench.ids("ready") == [published.id]

    @pytest.mark.promise("DEAD-2")
    def test_an_edited_message_takes_the_place_of_its_letter_in_one_step(self, bench: Bench) -> None:
        old, other = bury(bench, 2)
        published = bench.replace_dead(old, b"better", priority=8, group="acme")
        assert published is not None
        assert published.status == "queued"
        assert published.id != old
        assert bench.ids("dead") == [other]
        lease = bench.claim_one()
        assert (lease.id, lease.deliveries, lease.attempts, lease.token) == (published.id, 1, 0, 1)
        assert (lease.priority, lease.group) == (8, "acme")
        ledger = bench.ledger()
        assert (ledger.published, ledger.redriven, ledger.dead, ledger.dead_kept) == (3, 0, 2, 1)
        assert ledger.balance == 0
        (trimmed,) = bench.events("dead_trimmed")
        assert (trimmed.message_id, trimmed.cause) == (old, "edited")

    @pytest.mark.promise("DEAD-2", "PUB-3")
    def test_a_repeated_replacement_publishes_once(self, bench: Bench) -> None:
        (old,) = bury(bench)
        operation, id = bench.operation(), bench.session.message_ids(1)[0]
        first = bench.replace_dead(old, id=id, operation=operation)
        assert bench.replace_dead(old, id=id, operation=operation) == first
        assert bench.replace_dead(old) is None, "another request found the letter again"
        assert len(bench.ids("ready")) == 1

    @pytest.mark.promise("DEAD-2")
    def test_nothing_is_published_for_a_letter_that_is_not_there(self, bench: Bench) -> None:
        (letter,) = bury(bench)
        bench.redrive(letter)
        for id in (letter, "0" * 24):
            assert bench.replace_dead(id) is None
        assert bench.ids("ready") == [letter]
        assert bench.ledger().published == 1

    @pytest.mark.promise("DEAD-2")
    def test_a_letter_whose_key_is_in_use_stays(self, bench: Bench) -> None:
        (old,) = bury(bench, key="k")
        new = bench.publish(key="k")
        assert bench.replace_dead(old, key="k") == Published(new.id, "duplicate", "orders")
        assert bench.ids("dead") == [old]
        bench.settle(bench.claim_one())
        again = bench.replace_dead(old, key="k")
        assert again is not None
        assert again.status == "queued"
        assert bench.publish(key="k").status == "duplicate"
        assert bench.ids("dead") == []

    @pytest.mark.promise("DEAD-2", "PUB-7")
    def test_a_full_queue_refuses_a_replacement_and_keeps_the_letter(self, bench: Bench) -> None:
        (old,) = bury(bench)
        bench.configure(max_pending=1)
        bench.publish()
        with pytest.raises(QueueFull):
            bench.replace_dead(old)
        assert bench.ids("dead") == [old]
        assert len(bench.ids("ready")) == 1

    @pytest.mark.promise("DEAD-2", "WAKE-2")
    def test_a_replacement_wakes_a_sleeper(self, bench: Bench) -> None:
        (old,) = bury(bench)
        bench.claimed(1, sleeper="w")
        bench.replace_dead(old)
        assert bench.woken == {"orders": ["w"]}

    @pytest.mark.promise("QUEUE-8")
    def test_a_listing_goes_on_where_it_was_when_letters_were_removed_meanwhile(self, bench: Bench) -> None:
        ids = []
        for _ in range(6):
            ids += bury(bench)
            bench.after(1)
        page = bench.run(bench.store.peek("orders", "dead", 3))
        assert [stored.id for stored in page.messages] == ids[:3]
        bench.purge("dead", ids[0], ids[1])
        rest = bench.run(bench.store.peek("orders", "dead", 9, cursor=page.cursor))
        assert [stored.id for stored in rest.messages] == ids[3:]

    @pytest.mark.promise("DEAD-2", "QUEUE-8")
    def test_a_listing_begins_with_the_letters_that_died_since_a_time(self, bench: Bench) -> None:
        (old,) = bury(bench, reason="old")
        bench.after(1)
        since = bench.now_ms
        together = sorted([*bury(bench, reason="new"), *bury(bench, reason="other")])
        bench.after(1)
        (last,) = bury(bench, reason="new")
        cursor = bench.store.dead_since(since)
        page = bench.run(bench.store.peek("orders", "dead", 2, cursor=cursor))
        assert sorted(stored.id for stored in page.messages) == together
        rest = bench.run(bench.store.peek("orders", "dead", 2, cursor=page.cursor))
        assert ([stored.id for stored in rest.messages], rest.cursor) == ([last], None)
        of_reason = bench.run(bench.store.peek("orders", "dead", 9, cursor=cursor, reason="new"))
        assert len(of_reason.messages) == 2
        for id, expected in ((old, []), (last, [last])):
            one = bench.run(bench.store.peek("orders", "dead", 9, cursor=cursor, id=id))
            assert [stored.id for stored in one.messages] == expected
        later = bench.run(bench.store.peek("orders", "dead", 9, cursor=bench.store.dead_since(bench.now_ms + 1)))
        assert (later.messages, later.cursor) == ([], None)


class TestCompletedHistory:
    """Finished messages, when a queue keeps them."""

    @pytest.mark.promise("DEAD-3", "LEASE-7")
    @pytest.mark.parametrize("lease", [None, 60])
    def test_messages_that_one_step_ends_are_kept_in_the_order_of_their_ends(
        self, bench: Bench, lease: float | None
    ) -> None:
        bench.configure(lease=lease, completed=2)
        low = bench.publish_count(2, priority=0)
        high = bench.publish(priority=9).id
        leases = bench.claim(3)
        if lease is not None:
            # With a result each, so that they are no plain dones.
            bench.settle_batch([bench.settlement(one, result=b"1", result_ttl=60) for one in leases])
        assert [one.id for one in leases] == [high, *low]
        assert [message.id for message in bench.listing("done")] == low

    @pytest.mark.promise("DEAD-3")
    def test_history_is_off_by_default(self, bench: Bench) -> None:
        bench.publish()
        bench.settle(bench.claim_one())
        assert bench.ids("done") == []

    @pytest.mark.promise("DEAD-3")
    def test_the_newest_finished_messages_are_kept_up_to_the_limit(self, bench: Bench) -> None:
        bench.configure(completed=2)
        ids = bench.publish_count(4)
        for lease in bench.claim(4):
            bench.settle(lease)
        assert bench.ids("done") == ids[2:]
        assert bench.ledger().done == 4

    @pytest.mark.promise("DEAD-3")
    def test_a_finished_message_is_kept_as_it_was(self, bench: Bench) -> None:
        bench.configure(completed=10)
        published = bench.publish(b"body", key="k", group="g")
        bench.after(1)
        bench.settle(bench.claim_one())
        (done,) = bench.listing("done")
        assert (done.id, done.state, done.key, done.group) == (published.id, "done", "k", "g")
        assert (done.ended_ms, done.deliveries, bench.body(done)) == (bench.now_ms, 1, b"body")

    @pytest.mark.promise("DEAD-3")
    def test_only_done_messages_are_history(self, bench: Bench) -> None:
        bench.configure(completed=10)
        bench.publish_count(3)
        dead, dropped, cancelled = bench.claim(3)
        bench.settle(dead, "dead")
        bench.settle(dropped, "drop")
        bench.cancel(cancelled.id)
        bench.settle(cancelled, "retry")
        assert bench.ids("done") == []

    @pytest.mark.promise("DEAD-3", "LEASE-7")
    def test_at_most_once_messages_are_kept_too(self, bench: Bench) -> None:
        bench.configure(completed=10, lease=None)
        published = bench.publish()
        bench.claim_one()
        assert bench.ids("done") == [published.id]

    @pytest.mark.promise("DEAD-3")
    def test_history_can_be_purged(self, bench: Bench) -> None:
        bench.configure(completed=10)
        bench.publish_count(3)
        for lease in bench.claim(3):
            bench.settle(lease)
        purged = bench.purge("done", limit=2)
        assert (purged.removed, purged.more) == (2, True)
        assert bench.purge("done", limit=2).removed == 1
        assert bench.ids("done") == []
