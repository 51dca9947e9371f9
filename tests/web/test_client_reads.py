"""The reads of the clients that the pages stand on: `page`, `find` and `stats_many`, on every store, sync and async."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.clients import MODES, open_client
from tests.web.conftest import STORES
from waypost import Queue
from waypost.errors import InvalidInput, InvalidName, WaypostError
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace


@pytest.fixture(params=[(mode, store) for mode in MODES for store in STORES], ids="-".join)
def post(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    mode, kind = request.param
    namespace = fresh_namespace()
    match kind:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'reads.db'}"
        case _:
            url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        migrate(url, namespace=namespace)
    with open_client(mode, url, namespace=namespace) as client:
        yield client


def read_all(post: Any, queue: str, state: str = "ready", **options: Any) -> list[str]:
    """All messages, page by page; their ids."""
    found, cursor = [], None
    for _ in range(100):
        page = post.page(queue, state, cursor=cursor, **options)
        found += [message.id for message in page.messages]
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the listing does not end")


@pytest.mark.promise("QUEUE-8", "FACE-1")
@pytest.mark.parametrize("limit", [1, 2, 5, 7, 100])
def test_pages_list_every_message_once_in_order(post: Any, limit: int) -> None:
    ids = [published.id for published in post.publish_many("orders", range(7))]
    assert read_all(post, "orders", limit=limit) == ids


@pytest.mark.promise("QUEUE-8")
def test_pages_of_every_state_and_filter_are_those_of_messages(post: Any) -> None:
    post.configure("orders", completed=100)
    for number in range(6):
        post.publish("orders", number, group="ab"[number % 2])
    for number in range(3):
        with post.receive("orders") as message:
            if number:
                message.dead("rejected")
    for number in range(4):
        post.publish("orders", number, delay=3600 + number, key=f"k{number}")
    for state in ("ready", "delayed", "waiting", "leased", "dead", "done"):
        listed = [message.id for message in post.messages("orders", state)]
        assert read_all(post, "orders", state, limit=2) == listed
    for filters in ({"group": "a"}, {"group": "none"}):
        listed = [message.id for message in post.messages("orders", "ready", **filters)]
        assert read_all(post, "orders", limit=1, **filters) == listed
    assert len(read_all(post, "orders", "delayed", key="k2")) == 1
    soon = datetime.now(UTC) + timedelta(seconds=3602)
    assert len(read_all(post, "orders", "delayed", limit=1, before=soon)) in (2, 3)


@pytest.mark.promise("QUEUE-8", "FACE-1")
def test_a_key_is_found_in_all_queues_or_in_one(post: Any) -> None:
    first = post.publish("orders", 1, key="k")
    second = post.publish("mails", 2, key="k", delay=60)
    post.publish("orders", 3, key="other")
    found = {(one.queue, one.id, one.state) for one in post.find_key("k")}
    assert found == {("orders", first.id, "ready"), ("mails", second.id, "delayed")}
    assert [one.id for one in post.find_key("k", "mails")] == [second.id]
    assert post.find_key("k", Queue("no-such-queue", int)) == []
    assert post.find_key("none") == []
    for wrong in ("", "x" * 513, None):
        with pytest.raises(InvalidInput):
            post.find_key(wrong)


@pytest.mark.promise("CHAIN-2", "FACE-1")
def test_links_name_the_chain_of_a_message_and_what_waits_for_it(post: Any) -> None:
    chain = post.publish("orders", 1, chain=True)
    waiting = post.publish("mails", 2, after=[chain])
    found = post.links(chain)
    assert (found.chain, found.begun.open, found.members) == (chain.chain_id, 1, (chain.chain_id,))
    assert found.watchers in ((), (f"mails/{waiting.id}",))  # a watcher may still be on its way
    assert post.links("mails", waiting.id).blockers == (chain.chain_id,)
    assert post.links("orders", "0" * 24).begun.known is False
    with pytest.raises(InvalidInput):
        post.links("orders")


@pytest.mark.promise("QUEUE-8", "PUB-8")
def test_a_cursor_belongs_to_its_queue_state_and_filters(post: Any) -> None:
    post.publish_many("orders", range(5))
    post.publish_many("mails", range(5))
    cursor = post.page("orders", limit=2).cursor
    assert len(post.page("orders", cursor=cursor, limit=2).messages) == 2
    for queue, state, filters, given in (
        ("mails", "ready", {}, cursor),
        ("orders", "dead", {}, cursor),
        ("orders", "ready", {"group": "g"}, cursor),
        ("orders", "ready", {}, cursor[:-1]),
        ("orders", "ready", {}, ""),
        ("orders", "ready", {}, "é"),
        ("orders", "ready", {}, "x" * 2_000),
        ("orders", "ready", {}, 7),
    ):
        with pytest.raises(InvalidInput, match="cursor"):
            post.page(queue, state, cursor=given, **filters)


@pytest.mark.promise("FACE-1")
def test_a_page_of_a_typed_queue_has_typed_bodies(post: Any) -> None:
    post.publish(Queue("numbers", int), 7)
    assert [message.body for message in post.page(Queue("numbers", int)).messages] == [7]


@pytest.mark.promise("SEE-5")
def test_a_message_is_found_by_its_id_wherever_it_is(post: Any) -> None:
    post.configure("kept", completed=10)
    places: dict[str, tuple[str, Any]] = {}
    for queue in ("a", "b", "kept", "gone", "dead"):
        places[queue] = (post.publish(queue, 1).id, None)
    timer = post.publish("a", 2, delay=3600)
    for queue in ("kept", "gone"):
        with post.receive(queue):
            pass
    with post.receive("dead") as message:
        message.dead("rejected")
    cancelled = post.publish("b", 3)
    post.cancel("b", cancelled.id)

    def found(id: str) -> list[tuple[str, Any]]:
        return [(one.queue, one.state or one.ended) for one in post.find(id)]

    assert found(places["a"][0]) == [("a", "ready")]
    assert found(timer.id) == [("a", "delayed")]
    assert found(places["dead"][0]) == [("dead", "dead")]
    assert found(places["kept"][0]) == [("kept", "done")]
    assert found(places["gone"][0]) == [("gone", "done")]
    assert found(cancelled.id) == [("b", "cancelled")]
    assert found("0" * 24) == []
    with post.receive("a") as message:
        assert found(message.id) == [("a", "leased")]
    with pytest.raises(WaypostError):
        post.find("no id")


@pytest.mark.promise("SEE-5")
def test_the_state_of_several_queues_is_that_of_each(post: Any) -> None:
    for number, queue in enumerate(("a", "b", "c")):
        post.publish_many(queue, range(number + 1))
    found = post.stats_many(["c", "a", Queue("b", int), "none"], minutes=2)
    assert [stats.queue for stats in found] == ["c", "a", "b", "none"]
    assert [stats.ledger.ready for stats in found] == [3, 1, 2, 0]
    assert sum(minute.counts.get("published", 0) for minute in found[0].minutes) == 3
    assert post.stats_many([]) == []
    with pytest.raises(InvalidInput):
        post.stats_many(["a b"])
    with pytest.raises(InvalidInput):
        post.stats_many(["a"], minutes=-1)


def test_more_queues_than_one_flush_carries_are_read(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.operations.manage.QUEUES_TOGETHER", 2)
    monkeypatch.setattr("waypost.operations.manage.TRACES_TOGETHER", 2)
    ids = {queue: post.publish(queue, 1).id for queue in "abcde"}
    assert [stats.ledger.ready for stats in post.stats_many(list("abcde"))] == [1] * 5
    assert [one.queue for one in post.find(ids["e"])] == ["e"]
    with post.receive("e"):
        pass
    assert [one.queue for one in post.find(ids["e"])] == ["e"]


# ---- shared records ----------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-3", "FACE-1")
def test_programs_share_records_and_change_them_only_if_they_are_the_same(post: Any) -> None:
    saved = post.save_record("deploys", "lock", b"me", version=0, ttl=600)
    assert saved.saved
    assert saved.record.expires_at - saved.record.created_at == timedelta(seconds=600)
    assert not post.save_record("deploys", "lock", b"you", version=0).saved
    assert post.save_record("deploys", "lock", b"you", version=saved.record.version).saved
    post.save_record("deploys", "other", b"")
    page = post.records("deploys", limit=1)
    found = page.records + post.records("deploys", cursor=page.cursor).records
    assert sorted((one.name, one.data) for one in found) == [("lock", b"you"), ("other", b"")]
    assert [one.name for one in post.records("deploys", names=["lock", "none"]).records] == ["lock"]
    assert post.save_record("deploys", "lock", None).saved
    assert [one.name for one in post.records("deploys").records] == ["other"]


@pytest.mark.promise("PUB-8")
def test_wrong_records_are_refused_before_anything_is_written(post: Any) -> None:
    wrong: list[tuple[Any, ...]] = [
        ("Bad kind", "n", b""),
        ("k", "", b""),
        ("k", "n", "text"),
        ("k", "n", b"x" * 65_537),
    ]
    for arguments in wrong:
        with pytest.raises((InvalidInput, InvalidName)):
            post.save_record(*arguments)
    with pytest.raises(InvalidInput):
        post.save_record("k", "n", b"", keep=0)
    with pytest.raises(InvalidInput):
        post.records("k", cursor="x")
    with pytest.raises(InvalidInput):
        post.records("k", limit=0)
    assert post.records("k").records == []
