"""Publishing inside the caller's transaction, of every kind: the message exists if and only if it commits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from tests.outbox.conftest import Place
from tests.outbox.transaction_kinds import Step
from tests.waiting import until
from waypost import Published, Waypost
from waypost.errors import InvalidInput, KeyInUse, PartialPublish, QueueFull
from waypost.identity import Session
from waypost.testing.clock import ClockTime
from waypost.testing.postgres import PostgresServer
from waypost.values import Settlement


@pytest.mark.promise("BOX-1")
def test_a_message_is_there_once_the_transaction_commits_and_not_before(place: Place) -> None:
    seen: list[int] = []
    (published,) = place.kind.run(
        [("publish", ("orders", {"id": 7}), {})], row=1, inside=lambda: seen.append(len(place.bodies("orders")))
    )
    assert isinstance(published, Published)
    assert published.status == "queued"
    assert seen == [0]
    assert place.bodies("orders") == [{"id": 7}]
    assert place.rows() == [1]


@pytest.mark.promise("BOX-1")
def test_a_rollback_publishes_nothing(place: Place) -> None:
    place.kind.run([("publish", ("orders", 1), {}), ("publish_many", ("orders", [2, 3]), {})], row=1, commit=False)
    assert place.bodies("orders") == []
    assert place.rows() == []
    assert place.reader.ledger("orders").published == 0
    place.kind.run([("publish", ("orders", 4), {})], row=2)
    assert place.bodies("orders") == [4]
    assert place.reader.ledger("orders").balance == 0


@pytest.mark.promise("BOX-2")
def test_keys_timers_priorities_groups_headers_and_bytes_work_as_outside(place: Place) -> None:
    first, timer, duplicate, urgent, raw, claimable = place.kind.run([
        ("publish", ("orders", "a"), {"key": "k"}),
        ("publish", ("orders", "later"), {"delay": timedelta(hours=1), "key": "t"}),
        ("publish", ("orders", "b"), {"key": "k"}),
        ("publish", ("orders", "c"), {"priority": 9, "group": "g", "headers": {"x": "1"}}),
        ("publish", ("orders", b"%s\0\xff"), {"priority": 1}),
        ("publish", ("others", "d"), {"key": "k", "unique": "until_claimed"}),
    ])  # fmt: skip
    assert (first.status, timer.status, duplicate.status) == ("queued", "delayed", "duplicate")
    assert duplicate.id == first.id
    assert urgent.status == raw.status == "queued"
    assert place.bodies("orders") == ["c", "a", b"%s\0\xff"]
    assert [message.body for message in place.reader.timers("orders")] == ["later"]
    with place.reader.receive("orders") as message:
        assert message is not None
        assert (message.group, message.headers, message.priority) == ("g", {"x": "1"}, 9)
    assert place.reader.ledger("orders").balance == 0
    assert place.reader.publish("others", "e", key="k").id == claimable.id
    with place.reader.receive("others"):
        assert place.reader.publish("others", "e", key="k").status == "queued"


@pytest.mark.promise("BOX-2")
def test_a_batch_longer_than_one_step_is_published_whole(place: Place) -> None:
    (results,) = place.kind.run([("publish_many", ("orders", list(range(1200))), {"key": str})])
    assert len({one.id for one in results}) == 1200
    assert place.reader.ledger("orders").ready == 1200
    (again,) = place.kind.run([("publish_many", ("orders", [5, 6, 5000]), {"key": str})])
    assert [one.status for one in again] == ["duplicate", "duplicate", "queued"]


@pytest.mark.promise("BOX-1")
def test_a_duplicate_key_does_not_abort_the_transaction(place: Place) -> None:
    _, error, after = place.kind.run(
        [
            ("publish", ("orders", 1), {"key": "k"}),
            ("publish", ("orders", 2), {"key": "k", "on_conflict": "error"}),
            ("publish", ("orders", 3), {}),
        ],
        row=8,
    )
    assert isinstance(error, KeyInUse)
    assert after.status == "queued"
    assert place.bodies("orders") == [1, 3]
    assert place.rows() == [8]


@pytest.mark.promise("BOX-1")
def test_a_full_queue_does_not_abort_the_transaction_and_writes_nothing_partial(place: Place) -> None:
    place.reader.configure("orders", max_pending=2)
    one, many, two, full, known = place.kind.run(
        [
            ("publish", ("orders", 1), {"key": "a"}),
            ("publish_many", ("orders", [2, 3]), {"key": str}),
            ("publish", ("orders", 4), {}),
            ("publish", ("orders", 5), {}),
            ("publish", ("orders", 6), {"key": "a"}),
        ],
        row=9,
    )
    assert one.status == two.status == "queued"
    assert isinstance(many, QueueFull)
    assert isinstance(full, QueueFull)
    assert known.status == "duplicate"
    assert place.bodies("orders") == [1, 4]
    assert place.rows() == [9]
    assert place.reader.ledger("orders").balance == 0


@pytest.mark.promise("BOX-1")
def test_the_oldest_is_dropped_inside_a_transaction_too(place: Place) -> None:
    place.reader.configure("orders", max_pending=2, overload="drop_oldest")
    place.kind.run([("publish_many", ("orders", [1, 2]), {})])
    place.kind.run([("publish", ("orders", 3), {})])
    place.kind.run([("publish", ("orders", 4), {})], commit=False)
    assert place.bodies("orders") == [2, 3]
    assert place.reader.ledger("orders").dropped == 1


@pytest.mark.promise("BOX-1")
def test_a_publish_does_not_wait_for_room_inside_a_transaction(place: Place) -> None:
    place.reader.configure("orders", max_pending=5, overload="block")
    refused, other = place.kind.run([("publish", ("orders", 1), {}), ("publish", ("others", 2), {})], row=3)
    assert isinstance(refused, InvalidInput)
    assert "block" in str(refused)
    assert other.status == "queued"
    assert place.bodies("orders") == []
    assert place.rows() == [3]


def test_a_refused_body_does_not_abort_the_transaction(place: Place) -> None:
    bad, partly = place.kind.run(
        [("publish", ("orders", object()), {}), ("publish_many", ("orders", [*range(600), object()]), {})], row=4
    )
    assert isinstance(bad, InvalidInput)
    assert isinstance(partly, PartialPublish)
    assert sum(one is not None for one in partly.results) == len(place.bodies("orders"))
    assert place.rows() == [4]


@pytest.mark.promise("BOX-1")
def test_the_error_of_a_full_queue_names_what_is_in_the_transaction(place: Place) -> None:
    place.reader.configure("orders", max_pending=600)
    (partly,) = place.kind.run([("publish_many", ("orders", range(1000)), {})])
    assert isinstance(partly, PartialPublish)
    assert isinstance(partly.cause, QueueFull)
    assert sum(one is not None for one in partly.results) == 512 == place.reader.ledger("orders").ready


@pytest.mark.promise("BOX-2", "CHAIN-2")
def test_a_message_that_began_no_chain_is_refused_inside_a_transaction_too(place: Place) -> None:
    chain, alone = place.reader.publish("parts", 1, chain=True), place.reader.publish("parts", 2)
    waiting, refused = place.kind.run([
        ("publish", ("orders", "waits"), {"after": chain}),
        ("publish", ("orders", "never"), {"after": alone}),
    ], row=1)  # fmt: skip
    assert isinstance(refused, InvalidInput)
    assert "has no chain" in str(refused)
    assert waiting.status == "queued"
    assert place.rows() == [1]
    ledger = place.reader.ledger("orders")
    assert (ledger.published, ledger.waiting, ledger.balance) == (1, 1, 0)


@pytest.mark.promise("BOX-6")
def test_a_message_is_cancelled_if_and_only_if_the_transaction_commits(place: Place) -> None:
    timer = place.reader.publish("orders", 1, key="a", delay=3600)
    place.reader.publish("orders", 2, key="b")
    seen: list[int] = []
    cancels = [("cancel", ("orders",), {"key": "a"}), ("cancel", ("orders",), {"key": "b"})]
    rolled_back = place.kind.run(
        cancels, row=1, commit=False, inside=lambda: seen.append(place.reader.ledger("orders").cancelled)
    )
    assert rolled_back == ["cancelled", "cancelled"]
    assert seen == [0]
    assert (place.bodies("orders"), place.rows()) == ([2], [])
    done = place.kind.run([*cancels, ("publish", ("orders", 3), {"key": "a"}), ("cancel", (timer,), {})], row=2)
    assert [*done[:2], done[2].status, done[3]] == ["cancelled", "cancelled", "queued", "unknown"]
    assert (place.bodies("orders"), place.rows()) == ([3], [2])
    ledger = place.reader.ledger("orders")
    assert (ledger.cancelled, ledger.balance) == (2, 0)


@pytest.mark.promise("BOX-6")
def test_a_timer_is_moved_if_and_only_if_the_transaction_commits(place: Place) -> None:
    late = place.reader.publish("orders", 1, delay=3600)
    place.reader.publish("orders", 2, key="b", delay=3600)
    moves: list[Step] = [
        ("reschedule", (late,), {"delay": 0}),
        ("reschedule", ("orders",), {"key": "b", "delay": 7200}),
    ]
    seen: list[int] = []
    rolled_back = place.kind.run(
        moves, row=1, commit=False, inside=lambda: seen.append(place.reader.ledger("orders").ready)
    )
    assert (rolled_back, seen, place.rows()) == (["moved", "moved"], [0], [])
    before = {timer.id: timer.ready_at for timer in place.reader.timers("orders")}
    assert len(before) == 2
    done = place.kind.run([*moves, ("reschedule", ("orders",), {"key": "none", "delay": 1})], row=2)
    assert (done, place.rows()) == (["moved", "moved", "unknown"], [2])
    (left,) = place.reader.timers("orders")
    assert left.ready_at > before[left.id]
    with place.reader.receive("orders") as message:
        assert message is not None
        assert message.id == late.id
    assert place.reader.ledger("orders").balance == 0


def bury(place: Place, *bodies: int) -> None:
    """Make dead letters with these bodies, the key of each its body."""
    for body in bodies:
        place.reader.publish("orders", body, key=f"{body}")
        with place.reader.receive("orders") as message:
            assert message is not None
            message.dead("wrong" if body % 2 else "lost")


def bury_all(place: Place) -> None:
    """Make dead letters of all ready messages."""
    store, session, run = place.reader.store, Session(ClockTime()), place.reader._call
    while leases := run(store.claim("orders", 512, session.operation("orders"), worker="test")).leases:
        ends = [Settlement(lease.id, lease.token, lease.nonce, "dead", reason="lost") for lease in leases]
        run(store.settle("orders", ends, session.operation("orders")))


@pytest.mark.promise("BOX-6", "DEAD-2")
def test_letters_are_redriven_if_and_only_if_the_transaction_commits(place: Place) -> None:
    bury(place, 1, 2, 3, 4)
    place.reader.publish("orders", 9, key="2")  # its letter would be a duplicate
    seen: list[int] = []
    rolled_back, refused = place.kind.run(
        [("redrive", ("orders",), {}), ("redrive", ("orders",), {"rate": "1/s"})], row=1, commit=False,
        inside=lambda: seen.append(place.reader.ledger("orders").redriven),
    )  # fmt: skip
    assert (len(rolled_back.moved), len(rolled_back.duplicates), rolled_back.more) == (3, 1, False)
    assert isinstance(refused, InvalidInput)
    assert (seen, place.reader.ledger("orders").dead_kept, place.rows()) == ([0], 4, [])
    one, wrong, rest = place.kind.run([
        ("redrive", ("orders",), {"limit": 1}), ("redrive", ("orders",), {"reason": "wrong"}),
        ("redrive", ("orders",), {}),
    ], row=2)  # fmt: skip
    assert (len(one.moved), one.more) == (1, True)
    assert (len(wrong.moved), wrong.more) == (1, False)
    assert (len(rest.moved), len(rest.duplicates)) == (1, 1)
    assert place.rows() == [2]
    assert sorted(place.bodies("orders")) == [1, 3, 4, 9]
    ledger = place.reader.ledger("orders")
    assert (ledger.redriven, ledger.dead_kept, ledger.balance) == (3, 1, 0)


@pytest.mark.promise("BOX-6", "DEAD-2")
def test_many_letters_are_redriven_in_one_transaction(place: Place) -> None:
    ids = [published.id for published in place.reader.publish_many("orders", range(600))]
    bury_all(place)
    by_id, rest = place.kind.run([("redrive", ("orders",), {"ids": ids[:20]}), ("redrive", ("orders",), {})])
    assert sorted(by_id.moved) == sorted(ids[:20])
    assert (sorted(rest.moved), rest.more) == (sorted(ids[20:]), False)
    assert (place.reader.ledger("orders").ready, place.reader.ledger("orders").balance) == (600, 0)


@pytest.mark.promise("BOX-6", "DEAD-2")
def test_letters_that_stay_duplicates_do_not_keep_a_redrive_going(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waypost.operations.in_transaction.CHUNK_MESSAGES_MAX", 5)
    dead = [one.id for one in place.reader.publish_many("orders", range(12), key=str)]
    bury_all(place)
    place.reader.publish_many("orders", range(12), key=str)
    by_any, by_reason, limited = place.kind.run([
        ("redrive", ("orders",), {}), ("redrive", ("orders",), {"reason": "duplicate"}),
        ("redrive", ("orders",), {"reason": "duplicate", "limit": 7}),
    ])  # fmt: skip
    assert (by_any.moved, sorted(by_any.duplicates), by_any.more) == ([], sorted(dead), False)
    # These come again and again: it looks at a part, and says that there are more.
    assert (by_reason.moved, len(by_reason.duplicates), by_reason.more) == ([], 5, True)
    assert (limited.moved, len(limited.duplicates), limited.more) == ([], 5, True)
    assert place.reader.ledger("orders").balance == 0


@pytest.mark.promise("BOX-6", "DEAD-2")
def test_a_key_published_during_a_redrive_does_not_abort_the_transaction(post: Waypost, server: PostgresServer) -> None:
    letter = post.publish("orders", "letter", key="k")
    other = post.publish("orders", "other")
    for _ in range(2):
        with post.receive("orders") as message:
            assert message is not None
            message.dead("wrong")
    with psycopg.connect(server.url) as theirs, psycopg.connect(server.url) as mine, ThreadPoolExecutor(1) as threads:
        post.publish("orders", "newer", key="k", transaction=theirs)
        mine.execute("INSERT INTO shop (n) VALUES (77)")
        redriving = threads.submit(post.redrive, "orders", transaction=mine)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        with psycopg.connect(server.url, autocommit=True) as third:
            until(lambda: third.execute(waits, (mine.info.backend_pid,)).fetchone() == (1,))
        theirs.commit()
        redriven = redriving.result(timeout=60)
        assert (redriven.moved, redriven.duplicates) == ([other.id], [letter.id])
        assert mine.execute("DELETE FROM shop WHERE n = 77").rowcount == 1
        mine.commit()
    ledger = post.ledger("orders")
    assert (ledger.ready, ledger.dead_kept, ledger.redriven, ledger.balance) == (2, 1, 1, 0)


@pytest.mark.promise("BOX-1", "QUEUE-5")
def test_a_transaction_that_reads_by_an_old_snapshot_fails_if_the_settings_have_changed(
    post: Waypost, server: PostgresServer
) -> None:
    post.publish("orders", 1, group="a")
    with psycopg.connect(server.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        post.publish("orders", 2, group="a", transaction=connection)
        connection.commit()
        connection.execute("SELECT 1")
        post.configure("orders", fair=True)
        # By the old settings its message would have no place in the turns.
        with pytest.raises(psycopg.errors.SerializationFailure):
            post.publish("orders", 3, group="a", transaction=connection)
        connection.rollback()
        post.publish("orders", 4, group="a", transaction=connection)
        connection.commit()
    bodies = []
    for _ in range(3):
        with post.receive("orders") as message:
            assert message is not None
            bodies.append(message.body)
    assert (bodies, post.ledger("orders").balance) == ([1, 2, 4], 0)


@pytest.mark.promise("BOX-6")
def test_a_cancel_of_a_running_message_is_requested_when_the_transaction_commits(place: Place) -> None:
    published = place.reader.publish("orders", 1)
    with place.reader.receive("orders", renew=False) as message:
        assert message is not None
        assert place.kind.run([("cancel", (published,), {})], commit=False) == ["requested"]
        assert place.reader.extend(message) == "ok"
        assert place.kind.run([("cancel", (published,), {})]) == ["requested"]
        assert place.reader.extend(message) == "cancel"
