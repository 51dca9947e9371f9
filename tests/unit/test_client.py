"""What the clients do, in both modes, on the stores that need no server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import waypost
from tests.unit.clients import MODES, open_client
from waypost import CONTENT, Queue, errors
from waypost.testing.clock import ManualClock


class Order(msgspec.Struct):
    id: int


@dataclasses.dataclass
class Note:
    text: str


# ---- publish -------------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-1", "FACE-1")
@pytest.mark.parametrize("body", [b"\0\xff", "text", {"a": [1, None]}, [1, 2], 7, 1.5, True, None])
def test_what_is_published_is_received(post: Any, body: object) -> None:
    published = post.publish("orders", body, headers={"a": "b"}, correlation_id="c", reply_to="r", group="g")
    assert published.status == "queued"
    with post.receive("orders") as message:
        assert message.id == published.id
        assert message.body == body
        assert (message.headers, message.correlation_id, message.reply_to) == ({"a": "b"}, "c", "r")
        assert (message.group, message.key, message.priority) == ("g", None, 5)
        assert (message.deliveries, message.attempts, message.token) == (1, 0, 1)
        assert message.published_at == datetime(2027, 1, 15, 8, tzinfo=UTC)
    assert message.settled == "done"
    assert post.ledger("orders").done == 1
    with post.receive("orders") as nothing:
        assert nothing is None


@pytest.mark.promise("FACE-1")
def test_a_typed_queue_gives_typed_bodies(post: Any) -> None:
    orders = Queue("orders", Order)
    post.publish(orders, Order(7))
    assert [stored.body for stored in post.peek(orders)] == [Order(7)]
    with post.receive(orders) as message:
        assert message.body == Order(7)
        assert message.type_name.endswith("Order")
        assert message.decode(dict) == {"id": 7}


def test_a_dataclass_is_stored_with_its_type_name(post: Any) -> None:
    post.publish_many("notes", [Note("a"), Note("b"), {"plain": 1}])
    first, second, plain = post.peek("notes")
    assert first.type_name == second.type_name == f"{__name__}.Note"
    assert second.decode(Note) == Note("b")
    assert plain.type_name is None


@pytest.mark.promise("PUB-4", "PUB-5")
def test_a_key_stands_for_one_message(post: Any) -> None:
    first = post.publish("orders", {"n": 1}, key="a")
    assert post.publish("orders", {"n": 2}, key="a") == waypost.Published(first.id, "duplicate", "orders")
    assert post.publish("orders", {"n": 2}, key=lambda body: "a").status == "duplicate"
    assert post.publish("orders", {"n": 3}, key="a", on_conflict="extend", delay=5).status == "extended"
    replaced = post.publish("orders", {"n": 4}, key="a", on_conflict="replace")
    assert replaced.status == "replaced"
    with pytest.raises(errors.KeyInUse, match="key 'a' belongs to message") as caught:
        post.publish("orders", {}, key="a", on_conflict="error")
    assert caught.value.id == replaced.id
    with post.receive("orders") as message:
        assert message.body == {"n": 4}
    assert post.publish("orders", {}, key="a").status == "queued"


@pytest.mark.promise("PUB-4")
def test_content_as_a_key_ignores_the_order_of_names(post: Any) -> None:
    assert post.publish("orders", {"a": 1, "b": 2}, key=CONTENT).status == "queued"
    assert post.publish("orders", {"b": 2, "a": 1}, key=CONTENT).status == "duplicate"
    statuses = [published.status for published in post.publish_many("orders", [{"a": 1}, {"a": 2}], key=CONTENT)]
    assert statuses == ["queued", "queued"]


def test_a_deduplication_window_outlives_its_message(post: Any, clock: ManualClock) -> None:
    post.publish("orders", 1, key="a", window=timedelta(seconds=10))
    with post.receive("orders"):
        pass
    assert post.publish("orders", 2, key="a").status == "duplicate"
    assert post.cancel("orders", key="a") == "finished"
    clock.advance(11)
    assert post.publish("orders", 2, key="a").status == "queued"


@pytest.mark.promise("TIMER-1")
def test_a_timer_is_listed_and_due_at_its_time(post: Any, clock: ManualClock) -> None:
    now = datetime.fromtimestamp(clock() / 1000, UTC)
    post.publish("orders", "late", at=now + timedelta(hours=2))
    assert post.publish("orders", "soon", delay=timedelta(minutes=1)).status == "delayed"
    assert [timer.body for timer in post.timers("orders")] == ["soon", "late"]
    assert [timer.body for timer in post.timers("orders", before=now + timedelta(hours=1))] == ["soon"]
    with post.receive("orders") as nothing:
        assert nothing is None
    clock.advance(60)
    with post.receive("orders") as message:
        assert message.body == "soon"


@pytest.mark.promise("PUB-9")
def test_a_higher_priority_goes_first(post: Any) -> None:
    post.publish_many("orders", [1, 2], priority=3)
    post.publish("orders", 3, priority=9)
    assert [stored.body for stored in post.peek("orders")] == [3, 1, 2]


# ---- batches -------------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-2")
def test_a_batch_keeps_its_order_over_many_parts(post: Any) -> None:
    results = post.publish_many("orders", ({"n": n} for n in range(1200)))
    assert len(results) == 1200
    assert {published.status for published in results} == {"queued"}
    listed = list(post.messages("orders"))
    assert [stored.id for stored in listed] == [published.id for published in results]
    assert [stored.body["n"] for stored in listed] == list(range(1200))


def test_a_batch_may_hold_a_key_twice(post: Any) -> None:
    results = post.publish_many("orders", ["a", "b", "a", "c", "a"], key=str, group=str.upper)
    assert [published.status for published in results] == ["queued", "queued", "duplicate", "queued", "duplicate"]
    assert results[0].id == results[2].id == results[4].id
    assert [stored.group for stored in post.messages("orders")] == ["A", "B", "C"]


def test_a_bad_body_in_the_first_part_of_a_batch_publishes_nothing(post: Any) -> None:
    with pytest.raises(errors.InvalidBody, match="cannot be published"):
        post.publish_many("orders", [1, 2, object()])
    assert post.queues() == []


@pytest.mark.promise("PUB-2", "PUB-8")
def test_a_bad_body_in_a_later_part_of_a_batch_reports_what_was_published(post: Any) -> None:
    bodies: list[object] = [{"n": n} for n in range(600)]
    bodies[550] = {"n": float("nan")}
    with pytest.raises(errors.PartialPublish, match="512 of 600 messages") as caught:
        post.publish_many("orders", bodies)
    assert isinstance(caught.value.cause, errors.InvalidBody)
    assert [published is None for published in caught.value.results] == [False] * 512 + [True] * 88
    assert post.ledger("orders").ready == 512


def test_an_error_of_the_callers_own_generator_reports_what_was_published(post: Any) -> None:
    def bodies() -> Iterator[int]:
        yield from range(512)
        raise LookupError("no more")

    with pytest.raises(errors.PartialPublish) as caught:
        post.publish_many("orders", bodies())
    assert isinstance(caught.value.cause, LookupError)
    assert len(caught.value.results) == 512


def test_keys_in_use_in_a_batch_are_reported(post: Any) -> None:
    post.publish("orders", "b", key="b")
    with pytest.raises(errors.PartialPublish) as caught:
        post.publish_many("orders", ["a", "b", "c"], key=str, on_conflict="error")
    assert isinstance(caught.value.cause, errors.KeyInUse)
    assert [published is None for published in caught.value.results] == [False, True, False]
    with pytest.raises(errors.KeyInUse):
        post.publish_many("orders", ["a", "b", "c"], key=str, on_conflict="error")


def test_large_bodies_are_spread_over_parts(post: Any) -> None:
    results = post.publish_many("orders", [b"x" * 900_000] * 6)
    assert [published.status for published in results] == ["queued"] * 6
    assert post.ledger("orders").ready == 6


# ---- a full queue --------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-7")
def test_a_full_queue_refuses(post: Any) -> None:
    assert post.configure("orders", max_pending=2).max_pending == 2
    post.publish_many("orders", [1, 2])
    with pytest.raises(errors.QueueFull, match="max_pending"):
        post.publish("orders", 3)
    with pytest.raises(errors.QueueFull):
        post.publish_many("orders", [3, 4])
    assert post.ledger("orders").published == 2


@pytest.mark.promise("PUB-7")
def test_a_blocked_publisher_gives_up_after_its_timeout(post: Any) -> None:
    post.configure("orders", max_pending=1, overload="block")
    post.publish("orders", 1)
    with pytest.raises(errors.QueueFull):
        post.publish("orders", 2, block_timeout=0.03)


def test_a_batch_longer_than_a_blocking_queue_fills_it_and_reports_it(post: Any) -> None:
    post.configure("orders", max_pending=3, overload="block")
    with pytest.raises(errors.PartialPublish) as caught:
        post.publish_many("orders", range(8), timeout=0.03)
    assert isinstance(caught.value.cause, errors.QueueFull)
    assert [published is None for published in caught.value.results] == [False] * 3 + [True] * 5
    assert [stored.body for stored in post.peek("orders")] == [0, 1, 2]


@pytest.mark.promise("PUB-7")
def test_the_oldest_makes_room_with_drop_oldest(post: Any) -> None:
    post.configure("orders", max_pending=2, overload="drop_oldest")
    post.publish_many("orders", [1, 2])
    post.publish("orders", 3)
    assert [stored.body for stored in post.peek("orders")] == [2, 3]
    assert post.ledger("orders").dropped == 1


# ---- listing and managing ------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-12")
def test_a_cancelled_message_is_gone(post: Any) -> None:
    first, second = post.publish_many("orders", ["a", "b"], key=str)
    assert post.cancel("orders", id=first.id) == "cancelled"
    assert post.cancel("orders", key="b") == "cancelled"
    assert post.cancel("orders", id=second.id) == "unknown"
    assert post.ledger("orders").cancelled == 2


@pytest.mark.promise("LEASE-12")
def test_a_running_message_learns_of_its_cancellation_when_it_renews(post: Any) -> None:
    published = post.publish("orders", 1)
    with post.receive("orders") as message:
        assert post.extend(message) == "ok"
        assert post.cancel("orders", id=published.id) == "requested"
        assert post.extend(message) == "cancel"
        message.retry()
    assert message.settled == "cancelled"


@pytest.mark.promise("QUEUE-1")
def test_a_paused_queue_hands_out_nothing(post: Any) -> None:
    post.publish("orders", 1)
    assert (post.pause("orders"), post.pause("orders")) == (True, False)
    with post.receive("orders", wait=0.02) as message:
        assert message is None
    assert (post.resume("orders"), post.resume("orders")) == (True, False)
    with post.receive("orders") as message:
        assert message.body == 1


@pytest.mark.promise("QUEUE-2")
def test_a_policy_is_the_same_for_every_client(post: Any) -> None:
    changed = post.configure("orders", lease=30, rate="100/m", completed=True)
    assert post.policy("orders") == changed
    assert (changed.lease, changed.rate, changed.completed) == (timedelta(seconds=30), "100/m", 1_000)


@pytest.mark.promise("SEE-5")
def test_the_history_of_a_message_is_complete(post: Any) -> None:
    published = post.publish("orders", 1)
    post.publish("orders", 2)
    with post.receive("orders"):
        pass
    assert [event.event for event in post.history("orders", published.id)] == ["published", "claimed", "done"]
    stats = post.stats("orders", minutes=1)
    assert (stats.ledger.balance, stats.ledger.unexplained) == (0, 0)
    assert stats.minutes[0].counts["published"] == 2


@pytest.mark.promise("SEE-3")
def test_the_journal_is_read_in_pages_by_named_readers(post: Any) -> None:
    post.publish_many("orders", [1, 2, 3])
    assert post.journal_reader("orders", "lake") == 0
    page = post.journal("orders", limit=2)
    assert [event.number for event in page.events] == [1, 2]
    assert post.journal_reader("orders", "lake", page.last) == 2
    assert post.journal_trim("orders", 3) == 3
    assert [event.number for event in post.journal("orders", after=2).events] == [3]
    assert (post.journal_forget("orders", "lake"), post.journal_forget("orders", "lake")) == (True, False)


@pytest.mark.promise("DEAD-2")
def test_dead_letters_are_listed_redriven_and_purged(post: Any) -> None:
    sent = post.publish_many("orders", range(4))
    for reason in ("bad", "bad", "worse", "worst"):
        with post.receive("orders") as message:
            message.dead(reason, error="why")
    assert [letter.body for letter in post.dead_letters("orders", reason="bad")] == [0, 1]
    letter = next(iter(post.dead_letters("orders", id=sent[2].id)))
    assert (letter.reason, letter.error, letter.state, letter.deliveries) == ("worse", "why", "dead", 1)
    assert letter.ended_at is not None
    assert post.redrive("orders", id=sent[0].id).moved == [sent[0].id]
    assert post.redrive("orders", ids=[]).moved == []
    assert post.redrive("orders", reason="bad", rate="1000/s").moved == [sent[1].id]
    assert post.redrive("orders", limit=1).moved == [sent[2].id]
    assert post.purge("orders", "dead") == 1
    assert post.purge("orders") == 3
    assert post.ledger("orders").balance == 0


def test_a_redrive_at_a_rate_goes_in_small_steps(post: Any) -> None:
    post.publish_many("orders", range(5))
    for _ in range(5):
        with post.receive("orders") as message:
            message.dead()
    redriven = post.redrive("orders", rate="1000/s", limit=4)
    assert (len(redriven.moved), redriven.more) == (4, True)


@pytest.mark.promise("DEAD-2")
def test_chosen_dead_letters_are_purged(post: Any) -> None:
    for body in range(5):
        post.publish("orders", body)
        with post.receive("orders") as message:
            message.dead()
    waiting = post.publish("orders", 5).id
    first, second, *others = [letter.id for letter in post.dead_letters("orders")]
    assert post.purge("orders", ids=iter([first, second, first, "0" * 24, waiting])) == 2
    assert [letter.id for letter in post.dead_letters("orders")] == others
    assert post.purge("orders", "dead", ids=[]) == 0, "an empty selection is nothing, not everything"
    assert post.purge("orders", "dead", ids=others[:1]) == 1
    assert (post.ledger("orders").ready, post.ledger("orders").dead_kept) == (1, 2)
    for wrong in ({"state": "ready", "ids": others}, {"ids": others, "reason": "rejected"}, {"ids": ["no id"]}):
        with pytest.raises(errors.InvalidInput):
            post.purge("orders", **wrong)
    assert (post.ledger("orders").ready, post.ledger("orders").dead_kept) == (1, 2)


@pytest.mark.promise("CHAIN-2")
def test_messages_that_wait_for_chains_are_cancelled_and_purged(post: Any) -> None:
    first = post.publish("orders", 1, chain=True, delay=3600)
    waiting = [post.publish("reports", number, after=[first]) for number in range(3)]
    assert post.cancel("reports", id=waiting[0].id) == "cancelled"
    assert post.purge("reports", "waiting") == 2
    assert post.ledger("reports").cancelled == 3
    assert post.ledger("reports").waiting == 0


@pytest.mark.promise("DEAD-3")
def test_finished_messages_can_be_kept_and_purged(post: Any) -> None:
    post.configure("orders", completed=10)
    post.publish("orders", 1)
    with post.receive("orders"):
        pass
    assert [stored.body for stored in post.messages("orders", "done")] == [1]
    assert post.purge("orders", "done") == 1
    assert post.purge("orders", "done") == 0


def test_a_listing_can_be_filtered(post: Any) -> None:
    post.publish_many("orders", ["a", "b"], key=str, group=str)
    assert [stored.body for stored in post.messages("orders", key="a")] == ["a"]
    assert [stored.body for stored in post.messages("orders", group="b")] == ["b"]
    assert post.queues() == ["orders"]


# ---- arguments refused before anything is sent -----------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    body: list[Any] = []
    for _ in range(depth - 1):
        body = [body]
    return body


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = [
    ("publish", ("no spaces", 1), {}, errors.InvalidName),
    ("publish", ("q", object()), {}, errors.InvalidBody),
    ("publish", ("q", b"x" * (1024 * 1024 + 1)), {}, errors.BodyTooLarge),
    ("publish", ("q", nested(65)), {}, errors.BodyTooDeep),
    ("publish", ("q", "\ud800"), {}, errors.InvalidBody),
    ("publish", ("q", 1), {"headers": {"a": 1}}, errors.InvalidHeaders),
    ("publish", ("q", 1), {"headers": {str(n): "" for n in range(65)}}, errors.InvalidHeaders),
    ("publish", ("q", 1), {"key": ""}, errors.InvalidName),
    ("publish", ("q", 1), {"key": 7}, errors.InvalidName),
    ("publish", ("q", 1), {"key": lambda body: "x" * 600}, errors.InvalidName),
    ("publish", ("q", 1), {"window": 5}, errors.InvalidInput),
    ("publish", ("q", 1), {"unique": "until_claimed"}, errors.InvalidInput),
    ("publish", ("q", 1), {"key": "a", "unique": "dead"}, errors.InvalidInput),
    ("publish", ("q", 1), {"key": "a", "unique": "until_claimed", "window": 5}, errors.InvalidInput),
    ("publish", ("q", 1), {"key": "a", "window": 0}, errors.InvalidTime),
    ("publish", ("q", 1), {"key": "a", "on_conflict": "ignore"}, errors.InvalidInput),
    ("publish", ("q", 1), {"delay": 1, "at": datetime.now(UTC)}, errors.InvalidTime),
    ("publish", ("q", 1), {"at": datetime(2030, 1, 1)}, errors.InvalidTime),  # noqa: DTZ001
    ("publish", ("q", 1), {"delay": "soon"}, errors.InvalidTime),
    ("publish", ("q", 1), {"priority": 10}, errors.InvalidInput),
    ("publish", ("q", 1), {"priority": True}, errors.InvalidInput),
    ("publish", ("q", 1), {"group": "x" * 129}, errors.InvalidName),
    ("publish_many", ("q", [1]), {"key": "one"}, errors.InvalidName),
    ("publish_many", ("q", bytearray(b"body")), {}, errors.InvalidInput),
    ("publish_many", ("q", memoryview(b"body")), {}, errors.InvalidInput),
    ("cancel", ("q",), {}, errors.InvalidInput),
    ("cancel", ("q",), {"id": "x", "key": "y"}, errors.InvalidInput),
    ("cancel", ("q",), {"id": "x"}, errors.InvalidInput),
    ("configure", ("q",), {"leese": 5}, errors.InvalidPolicy),
    ("configure", ("q",), {"rate": "fast"}, errors.InvalidPolicy),
    ("peek", ("q",), {"n": 0}, errors.InvalidInput),
    ("peek", ("q",), {"state": "lost"}, errors.InvalidInput),
    ("purge", ("q", "leased"), {}, errors.InvalidInput),
    ("stats", ("q",), {"minutes": 9999}, errors.InvalidInput),
    ("history", ("q", "x"), {}, errors.InvalidInput),
    ("result", ("q", "x"), {}, errors.InvalidInput),
    ("redrive", ("q",), {"ids": ["x"]}, errors.InvalidInput),
    ("redrive", ("q",), {"limit": 0}, errors.InvalidInput),
    ("redrive", ("q",), {"reason": ""}, errors.InvalidName),
    ("redrive", ("q",), {"rate": "0/s"}, errors.InvalidPolicy),
    ("journal", ("q",), {"after": -1}, errors.InvalidInput),
    ("journal", ("q",), {"limit": 0}, errors.InvalidInput),
    ("journal_reader", ("q", ""), {}, errors.InvalidName),
    ("journal_trim", ("q", -1), {}, errors.InvalidInput),
    ("messages", ("q",), {"key": ""}, errors.InvalidName),
    ("timers", ("q",), {"before": datetime(2030, 1, 1)}, errors.InvalidTime),  # noqa: DTZ001
]


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize(("method", "given", "options", "kind"), REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_invalid_arguments_are_refused_before_anything_is_written(
    mode: str, method: str, given: tuple[Any, ...], options: dict[str, Any], kind: type[Exception]
) -> None:
    with open_client(mode, "memory://") as client:
        with pytest.raises(kind):
            getattr(client, method)(*given, **options)
        assert client.queues() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wait", [-1, "long", True, float("nan")])
def test_a_wait_is_a_time(mode: str, wait: Any) -> None:
    with open_client(mode, "memory://") as client, pytest.raises(errors.InvalidTime), client.receive("q", wait=wait):
        pass


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_has_an_end(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.operations.publish.BATCH_MAX", 3)
    with open_client(mode, "memory://") as client:
        with pytest.raises(errors.InvalidInput, match="at most 3 messages"):
            client.publish_many("q", iter(range(5)))
        assert len(client.publish_many("q", iter(range(3)))) == 3


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("mode", MODES)
def test_a_list_that_is_too_long_is_refused_before_anything_is_written(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waypost.operations.publish.BATCH_MAX", 600)
    with open_client(mode, "memory://") as client:
        with pytest.raises(errors.InvalidInput, match="at most 600 messages"):
            client.publish_many("q", list(range(601)))
        assert client.queues() == []
        assert len(client.publish_many("q", list(range(600)))) == 600


@pytest.mark.parametrize("mode", MODES)
def test_a_message_is_named_by_what_publish_returned_or_by_queue_and_id(mode: str) -> None:
    with open_client(mode, "memory://") as client:
        published, second = client.publish("orders", 1), client.publish("orders", 2)
        with client.receive("orders") as message:
            message.keep_result("sold")
        assert client.result(published) == client.result("orders", published.id) == "sold"
        assert client.result(second, default="none yet") == "none yet"
        assert client.wait_result(published, timeout=5) == client.wait_result("orders", published.id, timeout=5)
        assert client.history(published) == client.history("orders", published.id) != []
        assert client.cancel(second) == "cancelled"
        for method in ("result", "wait_result", "history", "cancel"):
            with pytest.raises(errors.InvalidInput, match="what publish returned"):
                getattr(client, method)(published, published.id)
            with pytest.raises(errors.InvalidInput, match="which message of queue orders"):
                getattr(client, method)("orders")
        with pytest.raises(errors.InvalidInput, match="what publish returned"):
            client.cancel(published, key="a")


@pytest.mark.promise("DEAD-2", "QUEUE-8")
@pytest.mark.parametrize("mode", MODES)
def test_dead_letters_are_listed_from_the_time_of_their_death_on(mode: str) -> None:
    with open_client(mode, "memory://") as client:
        ids = [client.publish("orders", number).id for number in range(4)]
        for _ in ids:
            with client.receive("orders") as message:
                message.dead("rejected")
        letters = list(client.dead_letters("orders"))
        since = letters[-1].ended_at
        expected = [one.id for one in letters if one.ended_at >= since]
        assert [one.id for one in client.messages("orders", "dead", died_after=since)] == expected
        assert [one.id for one in client.dead_letters("orders", died_after=since)] == expected
        first = client.page("orders", "dead", died_after=letters[0].ended_at, limit=3)
        rest = client.page("orders", "dead", died_after=letters[0].ended_at, limit=3, cursor=first.cursor)
        assert [one.id for one in (*first.messages, *rest.messages)] == [one.id for one in letters]
        assert client.page("orders", "dead", died_after=since + timedelta(hours=1)).messages == []
        with pytest.raises(errors.InvalidInput, match="begin without one"):
            client.page("orders", "dead", died_after=since + timedelta(hours=1), cursor=first.cursor)
        with pytest.raises(errors.InvalidInput, match="state='dead'"):
            client.messages("orders", died_after=since)
        with pytest.raises(errors.InvalidTime, match="time zone"):
            client.messages("orders", "dead", died_after=datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("mode", MODES)
def test_one_listing_has_all_filters(mode: str) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with open_client(mode, "memory://") as client:
        ids = [client.publish("orders", n, group="a" if n < 3 else "b").id for n in range(5)]
        timer = client.publish("orders", 5, delay=60)
        client.publish("orders", 6, delay=7200)
        assert [one.id for one in client.messages("orders", group="a", limit=2)] == ids[:2]
        assert [one.id for one in client.messages("orders", id=ids[3])] == [ids[3]]
        assert [one.id for one in client.messages("orders", "delayed", before=later)] == [timer.id]
        assert [one.id for one in client.timers("orders", before=later)] == [timer.id]
        assert [one.id for one in client.peek("orders", 3)] == ids[:3]
        with pytest.raises(errors.InvalidInput, match="state='delayed'"):
            client.messages("orders", before=later)
        with pytest.raises(errors.InvalidInput, match="limit"):
            client.messages("orders", limit=0)
        with pytest.raises(errors.UnknownOption, match="did you mean group"):
            client.messages("orders", grop="a")
