"""The journal: every state change, in the step that makes it, numbered without a gap."""

from __future__ import annotations

import pytest

from waypost.policy import CHUNK_MESSAGES_MAX, ENDED_TTL_MS, FAILURE_EVENTS, POLL_QUEUES_MAX
from waypost.testing.bench import QUEUE, Bench


def live_a_little(bench: Bench) -> None:
    """Make some events of every kind."""
    bench.publish_count(3)
    bench.publish(key="k", delay=5)
    bench.publish(key="k")
    first, second, third = bench.claim(3)
    bench.settle(first)
    bench.settle(second, "retry", error_type="OSError")
    bench.settle(third, "dead", reason="rejected")
    bench.cancel(key="k")
    bench.redrive()
    bench.pause()
    bench.resume()


class TestJournal:
    """What is written, and at which level."""

    @pytest.mark.promise("SEE-3")
    def test_numbers_begin_with_one_and_have_no_gap(self, bench: Bench) -> None:
        live_a_little(bench)
        numbers = [event.number for event in bench.events()]
        assert numbers == list(range(1, len(numbers) + 1))
        stats = bench.stats()
        assert (stats.journal_first, stats.journal_last) == (1, len(numbers))

    @pytest.mark.promise("SEE-3")
    def test_an_event_has_all_fields_of_its_message(self, bench: Bench) -> None:
        draft = bench.draft(b"body", key="k", group="g", priority=7)
        operation = bench.operation()
        bench.publish_drafts([draft], operation=operation)
        (event,) = bench.events()
        assert (event.queue, event.number, event.at_ms, event.event) == ("orders", 1, bench.now_ms, "published")
        assert (event.message_id, event.key, event.group, event.priority) == (draft.id, "k", "g", 7)
        assert (event.token, event.claims, event.deliveries, event.attempts) == (0, 0, 0, 0)
        assert (event.size, event.operation_id) == (len(draft.envelope), str(operation))
        assert (event.due_ms, event.cause, event.body) == (None, None, None)

    @pytest.mark.promise("SEE-3")
    def test_a_claim_and_its_end_have_worker_wait_and_run_time(self, bench: Bench) -> None:
        bench.publish()
        bench.after(2)
        lease = bench.claim_one(worker="anna")
        bench.after(3)
        bench.settle(lease, "retry", after=10, reason="because", error_type="OSError")
        claimed, retried = bench.events("claimed", "retried")
        assert (claimed.worker, claimed.wait_ms, claimed.token, claimed.deliveries) == ("anna", 2_000, 1, 1)
        assert (retried.worker, retried.run_ms, retried.attempts) == ("anna", 3_000, 1)
        assert (retried.reason, retried.error_type, retried.due_ms) == ("because", "OSError", bench.now_ms + 10_000)

    @pytest.mark.promise("SEE-3")
    def test_each_failure_keeps_the_beginning_of_its_error(self, bench: Bench) -> None:
        bench.publish_count(2)
        kept, other = bench.claim(2)
        bench.settle_batch(
            [bench.settlement(kept, "retry", error_type="OSError", error="first ✗"), bench.settlement(other)]
        )
        bench.settle(bench.claim_one(), "snooze")
        bench.settle(bench.claim_one(), "dead", error_type="ValueError", error="é" * 600)
        retried, dead = bench.events("retried", "dead")
        assert (retried.error_type, retried.error) == ("OSError", "first ✗")
        assert (dead.error_type, dead.error) == ("ValueError", "é" * 500)
        assert bench.stored(kept.id).error == "é" * 600
        others = [event for event in bench.events() if event.event not in ("retried", "dead")]
        assert {event.error for event in others} == {None}
        assert [event.error for event in bench.trace(kept.id) if event.error] == [retried.error, dead.error]

    @pytest.mark.promise("SEE-3", "LEASE-5")
    def test_a_message_that_dies_of_too_many_deliveries_keeps_its_last_error(self, bench: Bench) -> None:
        bench.configure(max_deliveries=2)
        bench.publish()
        bench.settle(bench.claim_one(), "retry", error="the last one")
        bench.settle(bench.claim_one(), "retry")
        assert bench.claim() == []
        assert [event.error for event in bench.events("retried", "dead")] == ["the last one", None, None]
        bench.publish()
        bench.settle(bench.claim_one(), "retry")
        bench.settle(bench.claim_one(), "retry", error_type="OSError", error="no room")
        assert bench.claim() == []
        assert [(event.reason, event.error) for event in bench.events("dead")][1:] == [("max_deliveries", "no room")]

    @pytest.mark.promise("SEE-3", "LEASE-5")
    def test_claims_never_decrease_while_deliveries_are_given_back(self, bench: Bench) -> None:
        bench.publish()
        for _ in range(3):
            bench.settle(bench.claim_one(), "snooze")
        assert [event.claims for event in bench.events("claimed")] == [1, 2, 3]
        assert [event.deliveries for event in bench.events("claimed")] == [1, 1, 1]
        assert [event.deliveries for event in bench.events("snoozed")] == [0, 0, 0]

    @pytest.mark.promise("SEE-3")
    def test_level_off_writes_nothing(self, bench: Bench) -> None:
        bench.configure(journal="off")
        before = len(bench.events())
        live_a_little(bench)
        assert len(bench.events()) == before

    @pytest.mark.promise("SEE-3")
    def test_level_failures_writes_failures_and_changes(self, bench: Bench) -> None:
        bench.configure(journal="failures")
        live_a_little(bench)
        names = [event.event for event in bench.events()]
        assert set(names) <= FAILURE_EVENTS
        assert names == ["configured", "retried", "dead", "cancelled", "paused", "resumed"]
        assert [event.number for event in bench.events()] == list(range(1, len(names) + 1))

    @pytest.mark.promise("SEE-3")
    def test_level_full_keeps_the_envelope_of_a_publish(self, bench: Bench) -> None:
        bench.configure(journal="full")
        draft = bench.draft(b"\0whole")
        bench.publish_drafts([draft])
        (event,) = bench.events("published")
        assert event.body == draft.envelope

    @pytest.mark.promise("SEE-3")
    @pytest.mark.parametrize("copy", [b"redacted", b""])
    def test_level_full_keeps_the_redacted_copy_instead(self, bench: Bench, copy: bytes) -> None:
        bench.configure(journal="full")
        bench.publish(b"secret", journal_copy=copy)
        (event,) = bench.events("published")
        assert (event.body or b"") == copy
        assert bench.body(bench.claim_one()) == b"secret"

    @pytest.mark.promise("SEE-3")
    @pytest.mark.parametrize("queue", [QUEUE, "invoices"])
    @pytest.mark.parametrize("copy", [b"redacted", b"", None])
    def test_level_full_keeps_the_redacted_copy_of_a_continuation(
        self, bench: Bench, queue: str, copy: bytes | None
    ) -> None:
        for name in {QUEUE, queue}:
            bench.configure(queue=name, journal="full")
        bench.publish_drafts([bench.draft(b"first")])
        lease = bench.claim_one()
        plain = bench.continuation(lease, queue, b"plain", index=0)
        hidden = bench.continuation(lease, queue, b"secret", index=1, journal_copy=copy, key="k", delay=0)
        assert bench.settle(lease, then=[plain, hidden]) == "done"
        bench.deliver_all()
        bodies = {event.message_id: event.body for event in bench.events("published", queue=queue)}
        assert bodies[plain.id] == plain.envelope
        assert (bodies[hidden.id] or b"") == (hidden.envelope if copy is None else copy)

    @pytest.mark.promise("SEE-3")
    def test_below_level_full_no_body_is_kept(self, bench: Bench) -> None:
        bench.publish(b"private", journal_copy=b"copy")
        assert {event.body for event in bench.events()} == {None}

    @pytest.mark.promise("SEE-3", "QUEUE-2")
    def test_changes_of_the_queue_are_journalled(self, bench: Bench) -> None:
        bench.configure(max_running=3, lease=5)
        bench.pause()
        bench.pause()
        bench.resume()
        events = bench.events()
        assert [event.event for event in events] == ["configured", "paused", "resumed"]
        assert events[0].cause == "lease_ms=5000 max_running=3"
        assert events[0].message_id is None

    @pytest.mark.promise("SEE-3")
    def test_a_refused_step_writes_no_event(self, bench: Bench) -> None:
        bench.publish()
        lease = bench.claim_one()
        bench.settle(lease)
        before = len(bench.events())
        bench.settle(lease)
        bench.extend(lease)
        bench.cancel("0" * 24)
        bench.claim()
        assert len(bench.events()) == before

    @pytest.mark.promise("SEE-3")
    def test_unicode_survives_the_journal(self, bench: Bench) -> None:
        bench.publish(key="schlüssel\n\t|;\u2028", group='g"1,\\')
        lease = bench.claim_one(worker="wörker ✓")
        bench.settle(lease, "dead", reason="gründe", error_type="Fehler…")
        event = bench.events("dead")[0]
        assert (event.key, event.group, event.worker) == ("schlüssel\n\t|;\u2028", 'g"1,\\', "wörker ✓")
        assert (event.reason, event.error_type) == ("gründe", "Fehler…")


class TestJournalReaders:
    """Pages, readers and trimming."""

    @pytest.mark.promise("SEE-3")
    def test_pages_go_on_where_the_last_ended(self, bench: Bench) -> None:
        bench.publish_count(7)
        numbers: list[int] = []
        after = 0
        while True:
            page = bench.run(bench.store.journal("orders", after, 3))
            assert len(page.events) <= 3
            assert page.newest == 7
            numbers += [event.number for event in page.events]
            if not page.events:
                assert page.last == after
                break
            after = page.last
        assert numbers == list(range(1, 8))

    @pytest.mark.promise("SEE-3")
    def test_a_page_may_begin_inside_a_step(self, bench: Bench) -> None:
        bench.publish_drafts([bench.draft() for _ in range(5)])
        page = bench.run(bench.store.journal("orders", 2, 2))
        assert [event.number for event in page.events] == [3, 4]
        assert (page.last, page.first_kept, page.newest) == (4, 1, 5)

    @pytest.mark.promise("SEE-3")
    def test_the_journal_of_an_unknown_queue_is_empty(self, bench: Bench) -> None:
        page = bench.run(bench.store.journal("nothing", 0, 10))
        assert (page.events, page.last, page.first_kept, page.newest) == ([], 0, 1, 0)

    @pytest.mark.promise("SEE-3")
    def test_a_reader_registers_and_only_moves_forward(self, bench: Bench) -> None:
        bench.publish_count(10)
        store = bench.store
        assert bench.run(store.journal_reader("orders", "lake", None)) == 0
        assert bench.run(store.journal_reader("orders", "lake", 6)) == 6
        assert bench.run(store.journal_reader("orders", "lake", 4)) == 6
        assert bench.run(store.journal_reader("orders", "lake", None)) == 6
        assert bench.run(store.journal_reader("orders", "lake", 99)) == 10
        assert bench.stats().journal_readers == {"lake": 10}

    @pytest.mark.promise("SEE-3")
    def test_trimming_keeps_what_the_slowest_reader_has_not_read(self, bench: Bench) -> None:
        bench.publish_count(10)
        store = bench.store
        bench.run(store.journal_reader("orders", "quick", 9))
        bench.run(store.journal_reader("orders", "slow", 4))
        assert bench.run(store.journal_trim("orders", 8)) == 5
        assert [event.number for event in bench.events()] == list(range(5, 11))
        assert bench.run(store.journal_forget("orders", "slow"))
        assert not bench.run(store.journal_forget("orders", "slow"))
        assert bench.run(store.journal_trim("orders", 8)) == 9
        assert bench.run(store.journal("orders", 0, 10)).first_kept == 9

    @pytest.mark.promise("SEE-3")
    def test_numbers_go_on_after_a_trim(self, bench: Bench) -> None:
        bench.publish_count(3)
        assert bench.run(bench.store.journal_trim("orders", 100)) == 4
        assert bench.events() == []
        bench.publish()
        assert [event.number for event in bench.events()] == [4]

    @pytest.mark.promise("SEE-3")
    def test_a_trim_never_goes_back(self, bench: Bench) -> None:
        bench.publish_count(5)
        assert bench.run(bench.store.journal_trim("orders", 3)) == 4
        assert bench.run(bench.store.journal_trim("orders", 1)) == 4

    @pytest.mark.promise("SEE-3")
    def test_the_cap_is_kept_without_a_gap_when_no_reader_is_registered(self, bench: Bench) -> None:
        bench.configure(journal_max=100)
        bench.publish_count(3 * CHUNK_MESSAGES_MAX)
        events = bench.events()
        assert len(events) <= 100 + CHUNK_MESSAGES_MAX
        assert [event.number for event in events] == list(range(events[0].number, events[-1].number + 1))
        assert bench.events("trimmed") == []

    @pytest.mark.promise("SEE-3")
    def test_past_the_cap_a_slow_reader_learns_what_it_missed(self, bench: Bench) -> None:
        bench.configure(journal_max=100)
        bench.run(bench.store.journal_reader("orders", "slow", None))
        bench.publish_count(3 * CHUNK_MESSAGES_MAX)
        events = bench.events()
        assert len(events) <= 100 + CHUNK_MESSAGES_MAX + 1
        missed = 0
        for event in bench.events("trimmed"):
            first, last = (int(number) for number in (event.reason or "").split("-"))
            assert event.size == last - first + 1
            missed += event.size
        kept = [event.number for event in events]
        assert kept == list(range(kept[0], kept[-1] + 1))
        assert missed > 0
        assert bench.events("trimmed")[-1].reason == f"{_first_of(bench)}-{kept[0] - 1}"


def _first_of(bench: Bench) -> int:
    return int((bench.events("trimmed")[-1].reason or "0-0").split("-")[0])


class TestTrace:
    """The history of one message."""

    @pytest.mark.promise("SEE-5")
    def test_a_trace_is_the_messages_part_of_the_journal(self, bench: Bench) -> None:
        live_a_little(bench)
        ids = {event.message_id for event in bench.events() if event.message_id is not None}
        for id in ids:
            assert bench.trace(id) == bench.events(message_id=id)

    @pytest.mark.promise("SEE-5")
    def test_a_trace_holds_the_whole_life_of_a_message(self, bench: Bench) -> None:
        bench.configure(lease=10)
        published = bench.publish(key="k")
        bench.publish(key="k")
        bench.claim_one()
        bench.after(10)
        bench.settle(bench.claim_one(), "retry", after=1)
        bench.after(1)
        bench.settle(bench.claim_one(), "dead")
        bench.redrive()
        bench.settle(bench.claim_one())
        assert [event.event for event in bench.trace(published.id)] == [
            "published", "duplicate", "claimed", "expired", "claimed", "retried", "promoted", "claimed", "dead",
            "redriven", "claimed", "done",
        ]  # fmt: skip

    @pytest.mark.promise("SEE-5")
    def test_the_trace_of_an_unknown_message_is_empty(self, bench: Bench) -> None:
        bench.publish()
        assert bench.trace("0" * 24) == []


class TestLocate:
    """Finding a message by its id in many queues."""

    @pytest.mark.promise("SEE-5")
    def test_only_the_queue_that_has_a_message_is_found_whatever_its_state(self, bench: Bench) -> None:
        queues = [f"other-{number}" for number in range(POLL_QUEUES_MAX + 3)]
        bench.publish(queue=queues[-1])
        queues.append(QUEUE)
        ids: dict[str, str] = {"dead": bench.publish().id}
        bench.settle(bench.claim_one(), "dead")
        ids["leased"] = bench.publish(key="k").id
        bench.claim_one()
        ids["waiting"] = bench.publish(key="k", on_conflict="replace").id
        ids["delayed"] = bench.publish(delay=60).id
        ids["ready"] = bench.publish().id
        for state, id in ids.items():
            assert bench.locate(id, queues) == [(QUEUE, state)]
        assert bench.locate("0" * 24, queues) == []
        assert bench.locate(ids["ready"], queues[:-1]) == []
        assert bench.locate(ids["ready"], []) == []

    @pytest.mark.promise("SEE-5")
    def test_the_end_of_a_message_is_remembered_and_then_known_by_the_journal(self, bench: Bench) -> None:
        kept = bench.publish().id
        bench.settle(bench.claim_one(), result=b"its result")
        dropped = bench.publish().id
        bench.watch(dropped, "carl")
        bench.settle(bench.claim_one(), "drop")
        bench.publish(queue="other")
        queues = ["other", QUEUE]
        assert bench.locate(kept, queues) == [(QUEUE, "done")]
        assert bench.locate(dropped, queues) == [(QUEUE, "dropped")]
        bench.after(2 * ENDED_TTL_MS / 1000)
        for id in (kept, dropped):
            assert bench.locate(id, queues) == []
            assert bench.locate_in_journals(id, queues) == [QUEUE]
        assert bench.locate_in_journals("0" * 24, queues) == []

    @pytest.mark.promise("SEE-5")
    def test_a_message_of_a_batch_is_found_in_a_long_journal(self, bench: Bench) -> None:
        ids = bench.publish_count(100)
        for _ in range(100):
            bench.settle(bench.claim_one())
        bench.publish(queue="other")
        assert bench.locate_in_journals(ids[50], ["other", QUEUE]) == [QUEUE]
        assert bench.trace(ids[50]) != []

    @pytest.mark.promise("SEE-5")
    def test_a_queue_with_more_batches_than_are_searched_is_not_left_out(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("waypost.policy.SCANNED_MAX", 2)
        ids = [bench.publish_count(3) for _ in range(4)]
        assert bench.locate_in_journals(ids[-1][1], [QUEUE]) == [QUEUE]
