"""Publishing: what is stored is what was sent, once, in order, within the cap."""

from __future__ import annotations

import pytest

from waypost.codec import open_envelope
from waypost.errors import EnvelopeTooNew, QueueFull
from waypost.policy import BURY_MAX, CHUNK_MESSAGES_MAX
from waypost.store.port import Draft
from waypost.testing.bench import Bench


class TestPublishing:
    """A publish and its result."""

    @pytest.mark.promise("PUB-2")
    def test_a_message_is_queued_and_its_id_comes_back(self, bench: Bench) -> None:
        draft = bench.draft()
        published = bench.publish_drafts([draft])
        assert [(one.id, one.status) for one in published] == [(draft.id, "queued")]
        assert bench.ids("ready") == [draft.id]

    @pytest.mark.promise("PUB-2", "TIMER-1")
    def test_a_message_for_later_is_delayed(self, bench: Bench) -> None:
        published = bench.publish(delay=5)
        assert published.status == "delayed"
        assert bench.ids("delayed") == [published.id]

    @pytest.mark.promise("PUB-2")
    def test_a_batch_returns_a_status_for_each_message(self, bench: Bench) -> None:
        holder = bench.publish(key="in use")
        moved = bench.publish(key="moved")
        batch = [
            bench.draft(),
            bench.draft(delay=9),
            bench.draft(key="in use"),
            bench.draft(key="moved", on_conflict="extend", delay=9),
            bench.draft(key="new"),
        ]
        published = bench.publish_drafts(batch)
        assert [one.status for one in published] == ["queued", "delayed", "duplicate", "extended", "queued"]
        assert [one.id for one in published] == [batch[0].id, batch[1].id, holder.id, moved.id, batch[4].id]

    @pytest.mark.promise("PUB-2", "PUB-8")
    def test_the_largest_batch_goes_in_one_step(self, bench: Bench) -> None:
        drafts = [bench.draft(b"%d" % number) for number in range(CHUNK_MESSAGES_MAX)]
        published = bench.publish_drafts(drafts)
        assert {one.status for one in published} == {"queued"}
        assert [lease.id for lease in bench.claim(CHUNK_MESSAGES_MAX)] == [draft.id for draft in drafts]

    @pytest.mark.promise("PUB-1")
    def test_all_bytes_of_a_body_survive(self, bench: Bench) -> None:
        body = bytes(range(256)) * 3 + b"\0\0"
        bench.publish(body)
        assert bench.body(bench.claim_one()) == body

    @pytest.mark.promise("PUB-1")
    @pytest.mark.parametrize("body", [b"", b"\0", b"\r\n", b"'; --", "\u00e9\u4e2d\U0001f600".encode()])
    def test_awkward_bodies_survive(self, bench: Bench, body: bytes) -> None:
        published = bench.publish(body)
        assert bench.body(bench.stored(published.id)) == body
        assert bench.body(bench.claim_one()) == body

    @pytest.mark.promise("PUB-1")
    def test_a_large_body_survives_retries_burial_and_redrive(self, bench: Bench) -> None:
        body = bytes(range(256)) * 400
        published = bench.publish(body)
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "dead")
        assert bench.body(bench.stored(published.id)) == body
        bench.redrive()
        assert bench.body(bench.claim_one()) == body

    @pytest.mark.promise("PUB-1")
    def test_an_envelope_of_a_newer_release_is_carried_unread(self, bench: Bench) -> None:
        id = bench.draft().id
        envelope = b"\xff" + id.encode() + b"whatever comes after version one"
        bench.publish_drafts([Draft(id, envelope)])
        lease = bench.claim_one()
        assert lease.envelope == envelope
        with pytest.raises(EnvelopeTooNew):
            open_envelope(lease.envelope)
        assert bench.settle(lease, "snooze", after=1) == "snoozed"
        assert bench.stored(id).deliveries == 0

    @pytest.mark.promise("PUB-1")
    def test_a_lease_carries_all_that_was_published_with_the_message(self, bench: Bench) -> None:
        published = bench.publish(b"body", key="order:7", group="acme", priority=8)
        published_ms = bench.now_ms
        bench.after(2)
        lease = bench.claim_one()
        assert (lease.id, lease.key, lease.group, lease.priority) == (published.id, "order:7", "acme", 8)
        assert (lease.published_ms, lease.ready_ms, lease.claimed_ms) == (published_ms, published_ms, bench.now_ms)
        assert (lease.deliveries, lease.attempts) == (1, 0)

    @pytest.mark.promise("PUB-9", "LEASE-15")
    def test_claims_are_first_in_first_out(self, bench: Bench) -> None:
        ids = bench.publish_count(5) + bench.publish_count(5)
        assert [lease.id for lease in bench.claim_all()] == ids

    @pytest.mark.promise("LEASE-15")
    def test_order_is_the_stores_not_that_of_the_ids(self, bench: Bench) -> None:
        older, newer = bench.draft(), bench.draft()
        bench.publish_drafts([newer])
        bench.publish_drafts([older])
        assert [lease.id for lease in bench.claim(2)] == [newer.id, older.id]

    @pytest.mark.promise("PUB-9")
    def test_a_higher_priority_comes_first_and_order_holds_within_one(self, bench: Bench) -> None:
        low = bench.publish_count(2, priority=0)
        usual = bench.publish_count(2)
        high = bench.publish_count(2, priority=9)
        late_low = bench.publish_count(1, priority=0)
        assert bench.ids("ready") == high + usual + low + late_low
        assert [lease.id for lease in bench.claim_all()] == high + usual + low + late_low

    @pytest.mark.promise("PUB-9")
    def test_all_ten_priorities_have_their_place(self, bench: Bench) -> None:
        ids = {priority: bench.publish(priority=priority).id for priority in (3, 0, 9, 7, 1, 5, 8, 2, 6, 4)}
        claimed = [lease.id for lease in bench.claim(10)]
        assert claimed == [ids[priority] for priority in range(9, -1, -1)]

    @pytest.mark.promise("QUEUE-4")
    def test_a_group_is_stored_listed_and_journalled(self, bench: Bench) -> None:
        ours = bench.publish(group="Zürich ☂")
        bench.publish(group="other")
        assert bench.ids("ready", group="Zürich ☂") == [ours.id]
        assert {event.group for event in bench.events(message_id=ours.id)} == {"Zürich ☂"}
        assert bench.claim_one().group == "Zürich ☂"


class TestCap:
    """Backpressure: `max_pending` is enforced in the step that would pass it."""

    @pytest.mark.promise("PUB-7", "SEE-6")
    def test_a_full_queue_refuses_and_writes_nothing(self, bench: Bench) -> None:
        bench.configure(max_pending=3)
        ids = bench.publish_count(3)
        before = len(bench.events())
        with pytest.raises(QueueFull) as refusal:
            bench.publish()
        assert refusal.value.outcome == "not done"
        assert bench.ids("ready") == ids
        assert len(bench.events()) == before

    @pytest.mark.promise("PUB-7")
    def test_a_batch_goes_in_whole_or_not_at_all(self, bench: Bench) -> None:
        bench.configure(max_pending=3)
        bench.publish()
        with pytest.raises(QueueFull):
            bench.publish_drafts([bench.draft() for _ in range(3)])
        assert bench.ledger().published == 1
        bench.publish_drafts([bench.draft() for _ in range(2)])
        assert bench.ledger().ready == 3

    @pytest.mark.promise("PUB-7")
    def test_a_refused_publish_may_be_repeated_when_there_is_room(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        bench.publish()
        operation, draft = bench.operation(), bench.draft()
        with pytest.raises(QueueFull):
            bench.publish_drafts([draft], operation=operation)
        bench.settle(bench.claim_one())
        assert bench.publish_drafts([draft], operation=operation)[0].status == "queued"

    @pytest.mark.promise("PUB-7")
    def test_ready_delayed_and_parked_messages_fill_the_cap_and_leased_ones_do_not(self, bench: Bench) -> None:
        bench.configure(max_pending=3)
        bench.publish(key="k")
        bench.claim_one()
        bench.publish(key="k", on_conflict="replace")
        bench.publish(delay=60)
        bench.publish()
        assert [len(bench.ids(state)) for state in ("waiting", "delayed", "ready", "leased")] == [1, 1, 1, 1]
        with pytest.raises(QueueFull):
            bench.publish()

    @pytest.mark.promise("PUB-7")
    def test_parking_a_generation_is_refused_at_the_cap(self, bench: Bench) -> None:
        bench.publish(key="k")
        bench.claim_one()
        bench.configure(max_pending=1)
        bench.publish()
        with pytest.raises(QueueFull):
            bench.publish(key="k", on_conflict="replace")

    @pytest.mark.promise("PUB-7", "PUB-5")
    def test_a_publish_that_adds_no_message_is_not_refused(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        bench.publish(key="k")
        assert bench.publish(key="k").status == "duplicate"
        assert bench.publish(key="k", on_conflict="replace").status == "replaced"
        assert bench.publish(key="k", on_conflict="extend", delay=1).status == "extended"

    @pytest.mark.promise("PUB-7")
    def test_retries_reclaims_promotions_and_redrives_are_never_refused(self, bench: Bench) -> None:
        bench.configure(max_pending=1, lease=10)
        first = bench.publish()
        retried = bench.claim_one()
        second = bench.publish()
        expiring = bench.claim_one()
        third = bench.publish()
        dying = bench.claim_one()
        bench.publish(delay=5)
        assert bench.settle(retried, "retry") == "retried"
        assert bench.settle(dying, "dead") == "dead"
        bench.after(10)
        assert bench.redrive().moved == [third.id]
        assert {lease.id for lease in bench.claim(10)} >= {first.id, second.id, third.id}
        assert bench.settle(expiring) == "lost"

    @pytest.mark.promise("PUB-7")
    def test_drop_oldest_makes_room_from_the_lowest_priority(self, bench: Bench) -> None:
        bench.configure(max_pending=4, overload="drop_oldest")
        high = bench.publish(priority=9)
        low_old, low_new = bench.publish_count(2, priority=1)
        usual = bench.publish()
        newest = bench.publish_count(2)
        assert set(bench.ids("ready")) == {high.id, usual.id, *newest}
        assert [event.message_id for event in bench.events("dropped")] == [low_old, low_new]
        assert bench.ledger().dropped == 2

    @pytest.mark.promise("PUB-7")
    def test_drop_oldest_takes_the_oldest_of_a_priority_first(self, bench: Bench) -> None:
        bench.configure(max_pending=3, overload="drop_oldest")
        first, second, third = bench.publish_count(3)
        fourth, fifth = bench.publish_count(2)
        assert bench.ids("ready") == [third, fourth, fifth]
        assert [(event.message_id, event.cause) for event in bench.events("dropped")] == [
            (first, "overload"),
            (second, "overload"),
        ]

    @pytest.mark.promise("PUB-7", "PUB-9")
    def test_drop_oldest_makes_room_whatever_the_priority_is(self, bench: Bench) -> None:
        bench.configure(max_pending=10, overload="drop_oldest")
        for priority in range(10):
            bench.publish(priority=priority)
        dropped = []
        for _ in range(10):
            bench.publish(priority=9)
            dropped.append(bench.events("dropped")[-1].priority)
        assert dropped == list(range(10))

    @pytest.mark.promise("PUB-7", "QUEUE-2")
    def test_a_cap_lowered_far_is_reached_bit_by_bit(self, bench: Bench) -> None:
        bench.publish_count(BURY_MAX + 100)
        bench.configure(max_pending=10, overload="drop_oldest")
        bench.publish()
        assert bench.ledger().ready == 100
        bench.publish()
        assert bench.ledger().ready == 10

    @pytest.mark.promise("PUB-7")
    def test_drop_oldest_spares_leased_and_delayed_messages(self, bench: Bench) -> None:
        bench.configure(max_pending=1, overload="drop_oldest")
        bench.publish()
        lease = bench.claim_one()
        timer = bench.publish(delay=60)
        with pytest.raises(QueueFull):
            bench.publish()
        assert bench.ids("delayed") == [timer.id]
        assert bench.settle(lease) == "done"

    @pytest.mark.promise("PUB-7")
    def test_drop_oldest_refuses_a_batch_that_could_never_fit(self, bench: Bench) -> None:
        bench.configure(max_pending=2, overload="drop_oldest")
        kept = bench.publish()
        with pytest.raises(QueueFull):
            bench.publish_drafts([bench.draft() for _ in range(3)])
        assert bench.ids("ready") == [kept.id]
        assert bench.ledger().dropped == 0

    @pytest.mark.promise("PUB-7", "PUB-4")
    def test_a_dropped_message_frees_its_key_and_its_window(self, bench: Bench) -> None:
        bench.configure(max_pending=1, overload="drop_oldest")
        bench.publish(key="k", window=3600)
        bench.publish()
        assert bench.publish(key="k", window=3600).status == "queued"

    @pytest.mark.promise("PUB-7")
    def test_the_message_that_holds_a_published_key_is_not_dropped_for_it(self, bench: Bench) -> None:
        bench.configure(max_pending=2, overload="drop_oldest")
        holder = bench.publish(key="k")
        other = bench.publish()
        statuses = [one.status for one in bench.publish_drafts([bench.draft(key="k"), bench.draft()])]
        assert statuses == ["duplicate", "queued"]
        assert holder.id in bench.ids("ready")
        assert other.id not in bench.ids("ready")

    @pytest.mark.promise("PUB-7", "QUEUE-2")
    def test_a_lower_cap_acts_on_the_next_publish_and_loses_nothing(self, bench: Bench) -> None:
        ids = bench.publish_count(5)
        bench.configure(max_pending=2)
        with pytest.raises(QueueFull):
            bench.publish()
        assert bench.ids("ready") == ids
        bench.configure(max_pending=None)
        assert bench.publish().status == "queued"

    @pytest.mark.promise("PUB-7", "SPARK-1")
    @pytest.mark.parametrize("routed", [False, True], ids=["plain", "routed"])
    def test_remembered_arrivals_obey_the_cap_when_they_request_it(self, bench: Bench, routed: bool) -> None:
        def drafts(count: int) -> list[Draft]:
            return [bench.draft(group="g" if routed else None, forwarded=True, capped=True) for _ in range(count)]

        bench.configure(max_pending=3)
        first = drafts(2)
        assert [one.status for one in bench.publish_drafts(first)] == ["queued"] * 2
        with pytest.raises(QueueFull):
            bench.publish_drafts(drafts(2))
        assert bench.publish_drafts(drafts(1))[0].status == "queued"
        # A message that has already arrived needs no room.
        assert [one.status for one in bench.publish_drafts(first)] == ["duplicate"] * 2
        assert (bench.ledger().ready, bench.ledger().over_cap) == (3, 0)
        bench.configure(overload="drop_oldest")
        kept = bench.publish_drafts(drafts(1))[0]
        ledger = bench.ledger()
        assert (ledger.ready, ledger.dropped, ledger.over_cap) == (3, 1, 0)
        assert kept.id in bench.ids("ready")

    @pytest.mark.promise("PUB-7")
    def test_a_refused_message_is_not_remembered_as_arrived(self, bench: Bench) -> None:
        bench.configure(max_pending=1)
        bench.publish()
        draft = bench.draft(forwarded=True, capped=True)
        with pytest.raises(QueueFull):
            bench.publish_drafts([draft])
        bench.configure(max_pending=None)
        assert bench.publish_drafts([draft])[0].status == "queued"

    @pytest.mark.promise("PUB-7")
    def test_a_batch_of_both_kinds_is_judged_message_by_message(self, bench: Bench) -> None:
        bench.configure(max_pending=2)
        both = [bench.draft(forwarded=True), bench.draft(forwarded=True, capped=True), bench.draft(forwarded=True)]
        assert [one.status for one in bench.publish_drafts(both)] == ["queued"] * 3
        assert (bench.ledger().ready, bench.ledger().over_cap) == (3, 1)


class TestArrivals:
    """Messages whose arrival is remembered: each is stored once, however often it is sent, also after it ended."""

    @pytest.mark.promise("SPARK-1", "CHAIN-2")
    def test_a_batch_that_is_sent_again_changes_nothing(self, bench: Bench) -> None:
        drafts = [bench.draft(b"%d" % number, priority=number, forwarded=True) for number in range(8)]
        assert [one.status for one in bench.publish_drafts(drafts)] == ["queued"] * 8
        first = bench.events("published")
        assert [(event.message_id, event.cause, event.priority) for event in first] == [
            (draft.id, "forwarded", draft.priority) for draft in drafts
        ]
        again = bench.publish_drafts(drafts)
        assert [(one.id, one.status) for one in again] == [(draft.id, "duplicate") for draft in drafts]
        assert [lease.id for lease in bench.claim(10)] == [draft.id for draft in reversed(drafts)]
        assert bench.ledger().published == 8
        assert bench.ledger().duplicates == 8

    @pytest.mark.promise("SPARK-1")
    def test_of_a_batch_that_arrived_in_part_only_the_rest_is_stored(self, bench: Bench) -> None:
        drafts = [bench.draft(b"%d" % number, forwarded=True) for number in range(6)]
        bench.publish_drafts(drafts[:3])
        done, dead, _ = bench.claim(3)
        bench.settle(done)
        bench.settle(dead, "dead", reason="rejected")
        statuses = [one.status for one in bench.publish_drafts(drafts)]
        assert statuses == ["duplicate"] * 3 + ["queued"] * 3
        assert [message.envelope for message in bench.listing("ready")] == [draft.envelope for draft in drafts[3:]]

    @pytest.mark.promise("SPARK-1")
    def test_plain_messages_and_remembered_ones_go_together(self, bench: Bench) -> None:
        remembered, plain, later = bench.draft(forwarded=True), bench.draft(), bench.draft(forwarded=True, delay=5)
        statuses = [one.status for one in bench.publish_drafts([remembered, plain, later])]
        assert statuses == ["queued", "queued", "delayed"]
        assert [message.id for message in bench.listing("ready")] == [remembered.id, plain.id]
        assert bench.publish_drafts([later])[0].status == "duplicate"
