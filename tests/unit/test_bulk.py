"""Bulk actions on every store: chosen by a filter, carried on by any client, each letter moved and counted once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.clients import MODES, open_client
from tests.waiting import until
from waypost import Waypost
from waypost.errors import InvalidInput, InvalidName, InvalidPolicy, StoreUnavailable
from waypost.operations import bulk
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.values import DeadFilter

STORES = ("memory", "sqlite", "valkey", "postgres")


class Place:
    """A store, and clients of it."""

    def __init__(self, mode: str, url: str, namespace: str) -> None:
        self.mode = mode
        self.url = url
        self.namespace = namespace

    def open(self) -> Any:
        return open_client(self.mode, self.url, namespace=self.namespace)


@pytest.fixture(params=[(mode, store) for store in STORES for mode in MODES], ids="-".join)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    mode, kind = request.param
    return make_place(mode, kind, request, tmp_path)


@pytest.fixture(params=STORES)
def sync_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """For what ends or holds up a client inside a flow, which is the same for both."""
    return make_place("sync", request.param, request, tmp_path)


def make_place(mode: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    namespace = fresh_namespace()
    url = {"memory": f"memory://bulk-{namespace}", "sqlite": f"sqlite:///{tmp_path / 'bulk.db'}"}.get(kind)
    url = url or request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        migrate(url, namespace=namespace)
    return Place(mode, url, namespace)


@pytest.fixture
def post(place: Place) -> Iterator[Any]:
    with place.open() as client:
        yield client


def bury(post: Any, count: int, reason: str = "rejected", error: str | None = None, **options: Any) -> list[str]:
    ids = [post.publish("orders", number, **options).id for number in range(count)]
    for _ in ids:
        with post.receive("orders") as message:
            message.dead(reason, error)
    return ids


def dead(post: Any) -> list[str]:
    return [letter.id for letter in post.dead_letters("orders")]


@pytest.mark.promise("DEAD-2", "QUEUE-8")
def test_a_bulk_redrive_moves_what_its_filter_means(post: Any) -> None:
    bury(post, 3, "rejected", "no such customer\nmore", group="acme")
    other = bury(post, 2, "rejected", "timeout")
    started = post.start_bulk("orders", "redrive", reason="rejected", error="no such customer", group="acme")
    assert (started.state, started.total, started.done, started.has_ended) == ("running", 5, 0, False)
    assert started.filters == {"reason": "rejected", "error": "no such customer", "group": "acme"}
    ended = post.run_bulk(started.id)
    assert (ended.state, ended.done, ended.left, ended.unknown) == ("done", 3, 0, 0)
    assert ended.ended_at is not None
    assert dead(post) == other
    assert post.ledger("orders").redriven == 3
    assert post.bulk_action(started.id) == ended
    assert [one.id for one in post.bulk_actions().actions] == [started.id]


@pytest.mark.promise("TIMER-1", "QUEUE-8")
def test_a_low_rate_does_not_make_the_search_for_messages_slow(sync_place: Place) -> None:
    wanted = (340, 341, 345)
    with sync_place.open() as post:
        post.publish_many(
            "orders", range(350), delay=600, key=lambda body: f"{'wanted' if body in wanted else 'other'}-{body}"
        )
        started = post.start_bulk("orders", "cancel", state="delayed", key_prefix="wanted-", rate="1/h")
        found = post.run_bulk(started.id, seconds=20)
        assert (found.state, found.done) == ("running", 1)
        assert found.steps <= 2, "each step reads as few messages as its rate allows to be cancelled"
        # The rest stays for the next steps, behind the one that was cancelled.
        assert found.searched <= 342
        again = post.start_bulk("orders", "cancel", state="delayed", key_prefix="wanted-")
        assert post.run_bulk(again.id).done == 2


@pytest.mark.promise("QUEUE-8")
@pytest.mark.parametrize("most", [1, 2, 5])
def test_messages_are_chosen_once_however_few_a_step_takes(sync_place: Place, most: int) -> None:
    with sync_place.open() as post:
        ids = [one.id for one in post.publish_many("orders", range(40), key=lambda body: f"{body % 3}-{body}")]
        chosen, cursor, steps = list[str](), None, 0
        while True:
            found = post._run(
                bulk.choose(
                    post._context, "orders", DeadFilter(key_prefix="0-"), cursor, 15, 2**60, state="ready", most=most
                )
            )
            assert len(found.ids) <= most
            chosen, cursor, steps = [*chosen, *found.ids], found.cursor, steps + 1
            if found.is_last:
                break
        assert chosen == ids[::3]
        assert steps <= 1 + -(-14 // most) + 3


@pytest.mark.promise("DEAD-2", "QUEUE-8")
def test_a_bulk_purge_removes_what_its_filter_means(post: Any) -> None:
    bury(post, 2, "undecodable", key=None)
    kept = bury(post, 1, "rejected")
    started = post.start_bulk("orders", "purge", reason="undecodable", user="mara", via="test")
    assert (started.user, started.via) == ("mara", "test")
    assert post.run_bulk(started.id).done == 2
    assert dead(post) == kept


@pytest.mark.promise("QUEUE-8", "DEAD-2")
def test_dead_letters_are_purged_by_each_filter(post: Any) -> None:
    start = datetime.now(UTC)
    ids = [post.publish("orders", number, key=f"{'ab'[number % 2]}:{number}").id for number in range(4)]
    for number in range(4):
        with post.receive("orders") as message:
            if number == 0:
                message.dead("rejected", "first line\nsecond")
            else:
                message.dead("other", f"error {number}")
    day = timedelta(days=1)
    for nothing in (
        {"reason": "none"}, {"error_type": "none"}, {"error": "second"}, {"group": "none"}, {"key_prefix": "c"},
        {"type_name": "none"}, {"died_before": start - day}, {"died_after": start + day},
    ):  # fmt: skip
        assert post.purge("orders", "dead", **nothing) == 0
    assert post.purge("orders", "dead", error="first line", died_after=start - day) == 1
    assert post.purge("orders", "dead", key_prefix="b:", died_before=start + day) == 2
    assert dead(post) == [ids[2]]
    with pytest.raises(InvalidInput, match="reason is for dead letters"):
        post.purge("orders", "ready", reason="other")


@pytest.mark.promise("DEAD-2")
def test_a_bulk_action_goes_over_many_steps_and_skips_what_dies_later(post: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bulk, "STEP_LETTERS", 3)
    keyed = bury(post, 1, key="k")
    bury(post, 7)
    post.publish("orders", "holds the key", key="k")
    started = post.start_bulk("orders", "redrive")
    while datetime.now(UTC) <= started.started_at + timedelta(milliseconds=2):
        pass  # what dies in the same millisecond is still meant
    with post.receive("orders") as message:
        later = [message.id]
        message.dead("rejected")
    with post.receive("orders") as message:
        assert message is None, "the message that holds the key is dead by now"
    ended = post.run_bulk(started.id)
    assert (ended.state, ended.done, ended.left) == ("done", 8, 0)
    assert dead(post) == later
    assert keyed[0] in {message.id for message in post.messages("orders")}
    assert post.run_bulk(started.id) == ended


@pytest.mark.promise("DEAD-2")
def test_letters_whose_key_is_in_use_are_counted_apart(post: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bulk, "STEP_LETTERS", 2)
    keyed = bury(post, 1, key="k")
    bury(post, 3)
    post.publish("orders", "holds the key", key="k")
    ended = post.run_bulk(post.start_bulk("orders", "redrive").id)
    assert (ended.state, ended.done, ended.left) == ("done", 3, 1)
    assert dead(post) == keyed


@pytest.mark.promise("DEAD-2")
def test_a_bulk_action_is_paused_resumed_and_cancelled(post: Any) -> None:
    bury(post, 3)
    started = post.start_bulk("orders", "redrive")
    assert post.change_bulk(started.id, "pause").state == "paused"
    assert post.run_bulk(started.id).done == 0
    assert post.change_bulk(started.id, "pause").state == "paused"
    assert post.change_bulk(started.id, "resume").state == "running"
    assert post.run_bulk(started.id).state == "done"
    for change in ("pause", "resume", "cancel"):
        with pytest.raises(InvalidInput, match="has ended"):
            post.change_bulk(started.id, change)
    second = post.start_bulk("orders", "purge")
    assert post.change_bulk(second.id, "cancel").state == "cancelled"
    assert post.run_bulk(second.id).done == 0


class Killed(BaseException):
    """A process that was killed at this point."""


#: Each point at which a process may end: the verb of the store that it ends before (or behind).
POINTS = [("save_record", False), ("save_record", True), ("redrive", False), ("redrive", True), ("peek", False)]


@pytest.mark.promise("DEAD-2", "LEASE-6")
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("verb", "behind"), POINTS)
def test_a_client_that_ends_anywhere_is_followed_by_another_and_each_letter_counts_once(
    sync_place: Place, verb: str, behind: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "STEP_LETTERS", 2)
    monkeypatch.setattr(bulk, "LEASE_MS", 1)
    with sync_place.open() as first, sync_place.open() as second:
        ids = bury(first, 5)
        started = first.start_bulk("orders", "redrive")
        kill_at(first, verb, nth, behind, monkeypatch)
        with pytest.raises(Killed):
            first.run_bulk(started.id)
        ended = second.run_bulk(started.id)
        while not ended.has_ended:  # the lease of the first has to end
            ended = second.run_bulk(started.id)
        assert (ended.state, ended.done, ended.left, ended.unknown) == ("done", 5, 0, 0)
        assert sorted(message.id for message in second.messages("orders")) == sorted(ids)
        assert second.ledger("orders").redriven == 5


def kill_at(post: Waypost, verb: str, nth: int, behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process of a client before or behind the nth call of a verb."""
    run, calls = post._connected().run, [0]

    def run_until(call: Any) -> Any:
        if call.name != verb:
            return run(call)
        calls[0] += 1
        if calls[0] < nth:
            return run(call)
        if calls[0] == nth and behind:
            run(call)
        raise Killed

    monkeypatch.setattr(post._connected(), "run", run_until)


@pytest.mark.promise("DEAD-2")
def test_two_clients_do_not_work_on_one_action_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP_LETTERS", 2)
    with place.open() as first, place.open() as second:
        bury(first, 6)
        started = first.start_bulk("orders", "redrive", rate="1/h")
        held = first.run_bulk(started.id, seconds=0.5)
        assert held.done <= 1
        assert held.carried
        assert second.run_bulk(started.id, seconds=0.1).done == held.done
        assert len(dead(second)) == 6 - held.done


@pytest.mark.promise("DEAD-2")
def test_a_client_that_was_believed_dead_changes_nothing(sync_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was frozen between planning a step and running it; another client has finished meanwhile."""
    monkeypatch.setattr(bulk, "STEP_LETTERS", 2)
    monkeypatch.setattr(bulk, "LEASE_MS", 1)
    with sync_place.open() as first, sync_place.open() as second:
        bury(first, 6)
        started = first.start_bulk("orders", "redrive")
        run = first._connected().run
        ended: list[Any] = []

        def run_late(call: Any) -> Any:
            if call.name == "redrive" and not ended:
                ended.append(None)
                while not (found := second.run_bulk(started.id)).has_ended:
                    pass
                ended.append(found)
            return run(call)

        monkeypatch.setattr(first._connected(), "run", run_late)
        assert first.run_bulk(started.id) == ended[1]
        assert (ended[1].done, ended[1].unknown) == (6, 0)
        assert second.ledger("orders").redriven == 6


@pytest.mark.promise("DEAD-2")
def test_a_pause_while_a_step_runs_loses_no_count(sync_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP_LETTERS", 2)
    with sync_place.open() as first, sync_place.open() as second:
        bury(first, 6)
        started = first.start_bulk("orders", "redrive")
        run, states = first._connected().run, list[str]()

        def pause_then_run(call: Any) -> Any:
            if call.name == "redrive" and not states:
                states.append(second.change_bulk(started.id, "pause").state)
            return run(call)

        monkeypatch.setattr(first._connected(), "run", pause_then_run)
        paused = first.run_bulk(started.id)
        assert states == ["pausing"]
        assert (paused.state, paused.done) == ("paused", 2)
        assert len(dead(second)) == 4
        second.change_bulk(started.id, "resume")
        assert first.run_bulk(started.id).done == 6


@pytest.mark.promise("DEAD-2")
def test_an_error_that_stays_ends_a_bulk_action_and_one_that_passes_does_not(
    sync_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync_place.open() as post:
        bury(post, 2)
        started = post.start_bulk("orders", "redrive")
        run, error = post._connected().run, [StoreUnavailable("away"), None]

        def fail(call: Any) -> Any:
            if call.name == "redrive" and error[0] is not None:
                raise error[0]
            return run(call)

        monkeypatch.setattr(post._connected(), "run", fail)
        monkeypatch.setattr(post._context, "retry_budget", 0.0)
        with pytest.raises(StoreUnavailable):
            post.run_bulk(started.id)
        assert post.bulk_action(started.id).state == "running"
        error[0] = InvalidInput("never")  # type: ignore[call-overload]
        failed = post.run_bulk(started.id)
        assert (failed.state, failed.error) == ("failed", "never")


@pytest.mark.promise("PUB-8")
def test_wrong_bulk_actions_are_refused(post: Any) -> None:
    with pytest.raises(InvalidPolicy):
        post.start_bulk("orders", "redrive", rate="fast")
    with pytest.raises(InvalidInput):
        post.start_bulk("orders", "cancel")
    with pytest.raises(InvalidInput, match="state"):
        post.start_bulk("orders", "cancel", state="leased")
    with pytest.raises(InvalidInput, match="delay= or at="):
        post.start_bulk("orders", "reschedule")
    with pytest.raises(InvalidInput, match="takes no delay"):
        post.start_bulk("orders", "redrive", delay=5)
    with pytest.raises(InvalidInput, match="a priority=, from 0 to 9"):
        post.start_bulk("orders", "prioritize", state="ready")
    with pytest.raises(InvalidInput, match="priority"):
        post.start_bulk("orders", "prioritize", state="ready", priority=10)
    with pytest.raises(InvalidInput, match="takes no priority="):
        post.start_bulk("orders", "redrive", priority=5)
    with pytest.raises(InvalidInput, match="reason is for dead letters"):
        post.start_bulk("orders", "cancel", state="ready", reason="rejected")
    with pytest.raises(InvalidInput, match="died_before is for dead letters"):
        post.purge("orders", "delayed", died_before=datetime.now(UTC))
    with pytest.raises(InvalidInput, match="there is no bulk action"):
        post.run_bulk("nothing")
    assert post.bulk_actions().actions == []


@pytest.mark.promise("DEAD-2")
def test_empty_text_means_letters_without_an_error(post: Any) -> None:
    plain = bury(post, 2, "rejected")
    other = bury(post, 1, "rejected", "timeout")
    started = post.start_bulk("orders", "redrive", reason="rejected", error_type="", error="")
    assert started.filters == {"reason": "rejected", "error_type": "", "error": ""}
    assert post.run_bulk(started.id).done == 2
    assert dead(post) == other
    assert post.purge("orders", "dead", error="") == 0
    assert {message.id for message in post.messages("orders")} == set(plain)
    with pytest.raises(InvalidName):
        post.start_bulk("orders", "redrive", reason="")


@pytest.mark.promise("DEAD-2")
def test_a_start_removes_an_ended_bulk_action_and_never_one_that_has_not_ended(
    post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "KEPT_MAX", 3)
    monkeypatch.setattr(bulk, "SPARE", 1)
    post.publish("orders", 1)
    first, second, third = (post.start_bulk("orders", "redrive").id for _ in range(3))
    with pytest.raises(InvalidInput, match="none of them has ended"):
        post.start_bulk("orders", "redrive")
    post.run_bulk(second)
    fourth = post.start_bulk("orders", "redrive").id
    assert {one.id for one in post.bulk_actions().actions} == {first, third, fourth}


def test_a_bulk_action_of_another_release_is_left_out_of_the_list(post: Any) -> None:
    post.publish("orders", 1)
    post.save_record(bulk.KIND, "new", b'{"verb": "move"}')
    started = post.start_bulk("orders", "redrive").id
    assert [one.id for one in post.bulk_actions().actions] == [started]
    with pytest.raises(InvalidInput, match="another release"):
        post.run_bulk("new")


def test_a_filter_is_kept_as_it_was_given() -> None:
    given = DeadFilter(reason="rejected", before_ms=7)
    assert bulk.plain_filter(given) == {"reason": "rejected", "before_ms": 7}


# ---- messages that are not dead ----------------------------------------------------------------------------------


def publish_for_tenants(post: Any, count: int, **options: Any) -> tuple[list[str], list[str]]:
    """Publish messages of two tenants in turn; the ids of each."""
    ids = [
        post.publish("orders", number, headers={"tenant": "acme" if number % 2 else "other"}, **options).id
        for number in range(count)
    ]
    return ids[1::2], ids[::2]


@pytest.mark.promise("QUEUE-8")
@pytest.mark.parametrize("state", ["ready", "delayed"])
def test_messages_are_counted_and_cancelled_by_a_filter(sync_place: Place, state: Any) -> None:
    with sync_place.open() as post:
        delay = 600 if state == "delayed" else 0
        mine, others = publish_for_tenants(post, 12, delay=delay)
        counted = post.count_messages("orders", state, header="tenant=acme")
        assert (counted.count, counted.searched, counted.total) == (6, 12, 12)
        assert post.count_messages("orders", state, header="tenant").count == 12
        assert post.count_messages("orders", state, header="none").count == 0
        started = post.start_bulk("orders", "cancel", state=state, header="tenant=acme")
        assert (started.total, started.source, started.filters) == (12, state, {"header": "tenant=acme"})
        ended = post.run_bulk(started.id)
        assert (ended.state, ended.done, ended.left, ended.unknown, ended.searched) == ("done", 6, 0, 0, 12)
        assert {message.id for message in post.messages("orders", state)} == set(others)
        assert not {message.id for message in post.messages("orders", state)} & set(mine)
        assert (post.ledger("orders").cancelled, post.ledger("orders").balance) == (6, 0)


@pytest.mark.promise("QUEUE-8")
def test_what_is_published_after_the_start_is_not_meant() -> None:
    with Waypost("memory://bulk-later") as post:
        post.publish("orders", 1)
        started = post.start_bulk("orders", "cancel", state="ready")
        until(lambda: datetime.now(UTC) > started.started_at + timedelta(milliseconds=2))
        later = post.publish("orders", 2).id
        assert post.run_bulk(started.id).done == 1
        assert [message.id for message in post.messages("orders", "ready")] == [later]


@pytest.mark.promise("QUEUE-8", "TIMER-1")
def test_timers_are_moved_and_run_now_by_a_filter(sync_place: Place) -> None:
    with sync_place.open() as post:
        for kind in "ab":
            post.publish_many("orders", range(110), delay=600, key=lambda body, kind=kind: f"{kind}-{body}")
        at = datetime.now(UTC) + timedelta(days=2)
        moved = post.run_bulk(post.start_bulk("orders", "reschedule", at=at, key_prefix="a-").id)
        assert (moved.state, moved.done) == ("done", 110)
        due = {round(timer.ready_at.timestamp()) for timer in post.timers("orders") if timer.key.startswith("a-")}
        assert due == {round(at.timestamp())}
        later = post.run_bulk(post.start_bulk("orders", "reschedule", delay=timedelta(days=5)).id)
        assert later.done == 220
        now = post.run_bulk(post.start_bulk("orders", "reschedule", delay=0, key_prefix="b-").id)
        assert (now.done, post.ledger("orders").ready, post.ledger("orders").balance) == (110, 110, 0)


@pytest.mark.promise("QUEUE-8", "PUB-9")
@pytest.mark.parametrize("priority", [1, 9])
def test_priorities_are_changed_by_a_filter(sync_place: Place, priority: int) -> None:
    with sync_place.open() as post:
        for kind in "ab":
            post.publish_many("orders", range(110), key=lambda body, kind=kind: f"{kind}-{body}")
        started = post.start_bulk("orders", "prioritize", state="ready", priority=priority, key_prefix="b-")
        changed = post.run_bulk(started.id)
        assert (changed.state, changed.done, changed.filters["priority"]) == ("done", 110, priority)
        kinds = [message.key[0] for message in post.messages("orders")]
        assert kinds == sorted(kinds, reverse=priority == 9)
        assert post.ledger("orders").balance == 0


@pytest.mark.promise("QUEUE-8")
def test_messages_are_listed_by_a_filter(post: Any) -> None:
    for number in range(300):
        post.publish("orders", number, key=f"{'ab'[number % 2]}-{number}", headers={"tenant": "ab"[number // 150]})
    found = list(post.messages("orders", key_prefix="b-", header="tenant=b"))
    assert [message.body for message in found] == list(range(151, 300, 2))
    assert [message.body for message in post.messages("orders", key_prefix="b-", limit=2)] == [1, 3]
    assert list(post.messages("orders", type_name="shop.Order")) == []
    assert list(post.messages("orders", published_before=datetime(2020, 1, 1, tzinfo=UTC))) == []
    with post.receive("orders") as message:
        message.dead("rejected", "no such customer")
    (letter,) = post.dead_letters("orders", error="no such customer", key_prefix="a-")
    assert letter.body == 0
    with pytest.raises(InvalidInput, match="died_before is for dead letters"):
        list(post.messages("orders", died_before=datetime.now(UTC)))


@pytest.mark.promise("QUEUE-8")
def test_messages_are_purged_by_a_filter_step_by_step(post: Any) -> None:
    _, others = publish_for_tenants(post, 8, group="g")
    assert post.purge("orders", "ready", header="tenant=acme", group="g") == 4
    assert {message.id for message in post.messages("orders", "ready")} == set(others)
    assert post.purge("orders", "ready", published_after=datetime.now(UTC) + timedelta(days=1)) == 0
    assert post.purge("orders", "ready", published_before=datetime.now(UTC) + timedelta(days=1)) == 4
    assert (post.ledger("orders").cancelled, post.ledger("orders").balance) == (8, 0)


@pytest.mark.promise("QUEUE-8", "DEAD-2")
def test_dead_letters_are_chosen_by_header(post: Any) -> None:
    publish_for_tenants(post, 6)
    for _ in range(6):
        with post.receive("orders") as message:
            message.dead("rejected")
    assert post.count_messages("orders", header="tenant=acme").count == 3
    ended = post.run_bulk(post.start_bulk("orders", "redrive", header="tenant=acme").id)
    assert (ended.done, ended.searched, len(dead(post))) == (3, 6, 3)


@pytest.mark.promise("QUEUE-8")
def test_a_count_reads_a_bounded_number(post: Any) -> None:
    post.publish_many("orders", range(30), key=lambda body: f"k{body}")
    counted = post.count_messages("orders", "ready", key_prefix="k", limit=10)
    assert (counted.count, counted.searched, counted.total) == (10, 10, 30)
    assert post.count_messages("orders", "ready", limit=1) == post.count_messages("orders", "ready")


@pytest.mark.promise("QUEUE-8")
def test_a_start_whose_reply_was_lost_finds_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bulk._save

    def saved_by_another(context: Any, found: Any, record: Any, owner: str | None = None) -> Any:
        """The record is saved, a server begins with it, and the repeat of the save is refused."""
        yield from real(context, found, record, "a web server")

    with Waypost("memory://bulk-start") as post:
        post.publish("orders", 1)
        with monkeypatch.context() as patched:
            patched.setattr(bulk, "_save", saved_by_another)
            started = post.start_bulk("orders", "cancel", state="ready")
        assert post.bulk_action(started.id).id == started.id
