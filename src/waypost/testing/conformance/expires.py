"""Messages that lapse: not handed out after their expiry, ended without a claim, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from waypost.policy import LAPSE_MAX
from waypost.store.port import Idle
from waypost.testing.bench import QUEUE, Bench
from waypost.values import OutcomeName, SideEffect, Watched, chain_id


def lapses(also: tuple[SideEffect, ...]) -> list[str]:
    """Return the ids of messages that a step ended because they had lapsed."""
    return sorted(one.id or "" for one in also if (one.event, one.reason) == ("dropped", "lapsed"))


class TestExpiry:
    """A message that is not claimed before its expiry is never handed out: it ends dropped, cause lapsed."""

    @pytest.mark.promise("PUB-10")
    @pytest.mark.parametrize("absolute", [False, True])
    def test_a_message_past_its_expiry_is_not_handed_out(self, bench: Bench, absolute: bool) -> None:
        at_ms = bench.now_ms + 5_000 if absolute else None
        draft = bench.draft(expires=5, expires_at_ms=at_ms)
        late, kept = bench.publish_drafts([draft, bench.draft()])
        assert bench.stored(late.id).expires_ms == bench.now_ms + 5_000
        assert bench.stored(kept.id).expires_ms is None
        bench.after(5)
        claimed = bench.claimed(5)
        assert [lease.id for lease in claimed.leases] == [kept.id]
        assert lapses(claimed.also) == [late.id]
        assert bench.state_of(late.id) is None
        last = bench.trace(late.id)[-1]
        assert (last.event, last.cause) == ("dropped", "lapsed")
        ledger = bench.ledger()
        assert (ledger.dropped, ledger.claims) == (1, 1)
        bench.check_invariants()

    @pytest.mark.promise("PUB-10")
    def test_the_id_of_a_message_that_lapsed_can_be_published_again_with_its_key(self, bench: Bench) -> None:
        published = bench.publish(key="k", expires=5)
        bench.after(5)
        assert bench.publish(key="k", id=published.id).status == "queued"

    @pytest.mark.promise("PUB-10")
    def test_a_message_is_handed_out_until_its_expiry(self, bench: Bench) -> None:
        published = bench.publish(expires=5)
        bench.after(4.999)
        assert bench.claim_one().id == published.id

    @pytest.mark.promise("PUB-10")
    def test_a_running_message_is_not_interrupted(self, bench: Bench) -> None:
        bench.configure(lease=60)
        bench.publish(expires=5)
        lease = bench.claim_one()
        bench.after(10)
        assert bench.claimed(5).also == ()
        assert bench.extend(lease) == "ok"
        assert bench.settle(lease) == "done"
        assert bench.ledger().dropped == 0
        bench.check_invariants()

    @pytest.mark.promise("PUB-10")
    @pytest.mark.parametrize("outcome", ["retry", "snooze", "release"])
    def test_a_message_that_returns_lapses_like_any_other(self, bench: Bench, outcome: OutcomeName) -> None:
        bench.configure(lease=60)
        first, second = bench.publish(expires=5), bench.publish(expires=20)
        early, late = bench.claim(2)
        bench.settle(late, outcome, after=30)
        bench.after(10)
        bench.claim()
        if outcome == "release":
            # The one that was released is not over yet.
            assert bench.state_of(second.id) == "leased"
        bench.settle(early, outcome, after=1)
        assert lapses(bench.claimed(5).also) == [first.id]
        if outcome != "release":
            bench.after(10)
            assert lapses(bench.claimed(5).also) == [second.id]
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "LEASE-4")
    def test_a_message_whose_lease_ends_after_its_expiry_lapses(self, bench: Bench) -> None:
        bench.configure(lease=10)
        published = bench.publish(expires=5)
        bench.claim_one()
        bench.after(10)
        claimed = bench.claimed(5)
        assert claimed.leases == []
        assert [one.event for one in claimed.also] == ["expired", "dropped"]
        assert bench.state_of(published.id) is None
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "TIMER-2")
    def test_a_timer_that_is_promoted_too_late_lapses(self, bench: Bench) -> None:
        published = bench.publish(delay=5, expires=6)
        bench.after(6)
        claimed = bench.claimed(5)
        assert claimed.leases == []
        assert lapses(claimed.also) == [published.id]

    @pytest.mark.promise("PUB-10")
    def test_what_lapses_is_known_to_sleepers_and_polls(self, bench: Bench) -> None:
        bench.publish(delay=100, expires=200)
        waiting = bench.begin_chain()
        bench.publish(after_chains=[waiting], expires=7)
        bench.claim_one()
        assert bench.claimed(5, sleeper="anna").next_due_ms == 7_000
        (polled,) = bench.poll(Idle(QUEUE, "anna")).queues
        assert (polled.needs_claim, polled.next_due_ms) == (False, 7_000)
        bench.after(7)
        (polled,) = bench.poll(Idle(QUEUE, "anna")).queues
        assert (polled.needs_claim, polled.next_due_ms) == (True, 0)
        assert len(lapses(bench.claimed(5, sleeper="anna").also)) == 1
        assert bench.stats().next_due_ms == 93_000

    @pytest.mark.promise("PUB-10")
    def test_the_promoter_ends_what_lapsed_in_a_queue_without_workers(self, bench: Bench) -> None:
        ids = [bench.publish(expires=5).id, bench.publish(delay=2, expires=6).id]
        bench.after(6)
        woken = bench.run(bench.store.promote(QUEUE))
        assert lapses(woken.also) == sorted(ids)
        assert (woken.result.promoted, woken.result.depth) == (1, 0)
        assert (woken.result.next_due_ms, bench.ledger().dropped) == (None, 2)
        bench.check_invariants()

    @pytest.mark.promise("PUB-10")
    @pytest.mark.parametrize("grouped", [False, True])
    def test_a_step_ends_a_bounded_number_and_hands_out_none_of_the_rest(self, bench: Bench, grouped: bool) -> None:
        if grouped:
            bench.configure(fair=True)
        bench.publish_count(LAPSE_MAX + 3, expires=1)
        kept = bench.publish()
        bench.after(1)
        assert bench.run(bench.store.promote(QUEUE)).result.next_due_ms == 0
        assert bench.ledger().dropped == LAPSE_MAX
        bench.publish_count(LAPSE_MAX, expires_at_ms=bench.now_ms)
        found = bench.claim(5)
        assert [lease.id for lease in found or bench.claim(5)] == [kept.id]
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "QUEUE-5", "QUEUE-6")
    @pytest.mark.parametrize("settings", [{"fair": True}, {"order": "group"}], ids=["fair", "ordered"])
    def test_turns_between_many_groups_hand_out_nothing_that_lapsed(
        self, bench: Bench, settings: dict[str, Any]
    ) -> None:
        bench.configure(**settings)
        bench.publish_drafts([bench.draft(group=f"g{number}", expires=1) for number in range(LAPSE_MAX + 7)])
        bench.after(1)
        assert bench.claim(5) == []
        assert bench.claim(5) == []
        bench.check_invariants()
        assert bench.ledger().dropped == LAPSE_MAX + 7

    @pytest.mark.promise("PUB-10")
    @pytest.mark.parametrize("step", ["claim", "promote"])
    @pytest.mark.parametrize("settings", [{}, {"fair": True}, {"order": "group"}], ids=["plain", "fair", "ordered"])
    def test_messages_lapse_in_a_paused_queue_and_timers_gather(
        self, bench: Bench, step: str, settings: dict[str, Any]
    ) -> None:
        bench.configure(max_pending=3, **settings)
        lapsing = [bench.publish(expires=5, key="k", group="a").id, bench.publish(delay=2, expires=6).id]
        timer = bench.publish(delay=2, group="a")
        bench.pause()
        assert bench.claimed(5, sleeper="anna").leases == []
        (polled,) = bench.poll(Idle(QUEUE, "anna")).queues
        assert (polled.needs_claim, polled.next_due_ms, polled.next_lease_ms) == (False, 5_000, None)
        bench.after(6)
        (polled,) = bench.poll(Idle(QUEUE, "anna")).queues
        assert (polled.needs_claim, polled.next_due_ms) == (True, 0)
        if step == "claim":
            claimed = bench.claimed(5, sleeper="anna")
            assert (claimed.leases, lapses(claimed.also)) == ([], sorted(lapsing))
        else:
            woken = bench.run(bench.store.promote(QUEUE))
            assert (lapses(woken.also), woken.result.promoted, woken.result.depth) == (sorted(lapsing), 0, 1)
        assert not bench.poll(Idle(QUEUE, "anna")).queues[0].needs_claim
        ledger = bench.ledger()
        assert (ledger.dropped, ledger.delayed, ledger.ready) == (2, 1, 0)
        # Key and place are free, before the queue goes on.
        kept = [bench.publish(key="k", group="a"), bench.publish()]
        assert [one.status for one in kept] == ["queued", "queued"]
        bench.resume()
        assert sorted(self.handed_out(bench)) == sorted([timer.id, *(one.id for one in kept)])
        bench.check_invariants()

    @staticmethod
    def handed_out(bench: Bench) -> list[str]:
        found = []
        while leases := bench.claim(5):
            found += [lease.id for lease in leases]
            for lease in leases:
                bench.settle(lease)
        return found

    @pytest.mark.promise("PUB-10", "PUB-4")
    @pytest.mark.parametrize("rule", ["keep", "replace", "extend", "error"])
    @pytest.mark.parametrize("window", [0, 60])
    def test_a_message_that_lapsed_gives_its_key_back(self, bench: Bench, rule: str, window: int) -> None:
        lapsed = bench.publish(key="a", window=window, expires=5)
        bench.after(5)
        # Before any step has ended the first one.
        second = bench.publish(key="a", on_conflict=rule)
        assert second.status == "queued"
        assert lapses(bench.also) == [lapsed.id]
        assert bench.claim_one().id == second.id
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "PUB-6")
    def test_the_successor_of_a_running_message_lapses_while_it_waits(self, bench: Bench) -> None:
        bench.configure(lease=60)
        bench.publish(key="a")
        lease = bench.claim_one()
        parked = bench.publish(key="a", on_conflict="replace", expires=5)
        bench.after(5)
        again = bench.publish(key="a", on_conflict="replace", expires=5)
        assert lapses(bench.also) == [parked.id]
        bench.after(5)
        assert lapses(bench.claimed().also) == [again.id]
        bench.settle(lease)
        assert bench.claim() == []
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "CHAIN-1")
    def test_the_client_that_waits_for_a_message_that_lapsed_is_woken(self, bench: Bench) -> None:
        published = bench.publish(expires=5)
        bench.watch(published.id, "anna")
        bench.after(5)
        claimed = bench.claimed()
        assert claimed.wake == {QUEUE: ["anna"]}
        assert bench.watch(published.id) == Watched(None, "dropped")

    @pytest.mark.promise("PUB-10", "CHAIN-2")
    def test_a_chain_counts_a_message_that_lapsed_as_failed(self, bench: Bench) -> None:
        draft = bench.draft(expires=5)
        first = chain_id(QUEUE, draft.id)
        (published,) = bench.publish_drafts([bench.draft(id=draft.id, chain=first, expires=5)])
        waits = bench.publish(after_chains=[first], queue="mails")
        bench.deliver_all()
        bench.after(5)
        bench.claim()
        bench.deliver_all()
        state = bench.chain_state(first)
        assert state.failed == (first, "dropped")
        letter = bench.stored(waits.id, queue="mails")
        assert (letter.state, letter.reason) == ("dead", "blocker_failed")
        assert bench.state_of(published.id) is None

    @pytest.mark.promise("PUB-10", "CHAIN-2")
    @pytest.mark.parametrize("absolute", [False, True])
    @pytest.mark.parametrize("queue", [QUEUE, "billing"])
    def test_the_expiry_of_what_is_sent_on_counts_from_the_settle(
        self, bench: Bench, absolute: bool, queue: str
    ) -> None:
        first = bench.begin_chain()
        lease = bench.claim_one()
        following = [
            bench.continuation(lease, queue, expires=5, expires_at_ms=bench.now_ms + 5_000 if absolute else None),
            bench.continuation(lease, queue, index=1, chain=None),
        ]
        ends_ms = bench.now_ms + 5_000
        assert bench.settle(lease, then=following) == "done"
        # It arrives late where the step of a settle cannot span queues.
        bench.after(2)
        bench.deliver_all()
        assert [bench.stored(one.id, queue=queue).expires_ms for one in following] == [ends_ms, None]
        bench.after(3)
        claimed = bench.claimed(5, queue=queue)
        assert [one.id for one in claimed.leases] == [following[1].id]
        assert lapses(claimed.also) == [following[0].id]
        bench.deliver_all()
        assert bench.chain_state(first).failed == (chain_id(queue, following[0].id), "dropped")
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "CHAIN-2", "PUB-4")
    def test_what_is_sent_on_takes_the_key_of_a_message_that_lapsed(self, bench: Bench) -> None:
        lapsed = bench.publish(key="a", queue="billing", expires=5)
        bench.publish()
        lease = bench.claim_one()
        bench.after(5)
        following = bench.continuation(lease, "billing", key="a")
        bench.settle(lease, then=[following])
        bench.deliver_all()
        assert bench.state_of(lapsed.id, queue="billing") is None
        assert bench.claim_one(queue="billing").id == following.id
        assert bench.ledger(queue="billing").dropped == 1
        bench.check_invariants()

    @pytest.mark.promise("PUB-10")
    def test_a_redriven_dead_letter_does_not_lapse(self, bench: Bench) -> None:
        published = bench.publish(expires=5)
        bench.settle(bench.claim_one(), "dead")
        assert bench.stored(published.id).expires_ms is None
        bench.after(10)
        bench.redrive()
        assert bench.stored(published.id).expires_ms is None
        assert bench.claim_one().id == published.id

    @pytest.mark.promise("PUB-10", "QUEUE-5")
    @pytest.mark.parametrize("held", [False, True])
    def test_in_an_ordered_group_the_next_message_goes_when_one_lapses(self, bench: Bench, held: bool) -> None:
        bench.configure(order="group", lease=60)
        first, second = bench.publish(group="a", expires=5), bench.publish(group="a")
        if held:
            bench.settle(bench.claim_one(), "retry", after=30)
            assert bench.claim() == []
        bench.after(5)
        claimed = bench.claimed()
        assert lapses(claimed.also) == [first.id]
        assert [lease.id for lease in claimed.leases] == [second.id]
        bench.check_invariants()

    @pytest.mark.promise("PUB-10", "QUEUE-8")
    def test_a_queue_whose_messages_lapsed_can_be_removed(self, bench: Bench) -> None:
        bench.publish(expires=5)
        bench.claim_one()
        bench.publish(expires=5)
        bench.after(60)
        bench.claim()
        assert bench.ledger().dropped == 2
        bench.remove()
        bench.after(1)
        published = bench.publish()
        bench.after(5)
        assert bench.claim_one().id == published.id
