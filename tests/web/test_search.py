"""Where is my message? The search of the API and of the page, on every store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tests.web.asgi import Client
from tests.web.conftest import Site
from waypost import Queue
from waypost.web import Token, search

READER = Token("reader", "reader-secret-0123456789", frozenset({"read"}))


class Parcel(msgspec.Struct):
    """A body with a type."""

    number: int


PARCELS = Queue("parcels", Parcel)


def ids(answer: Any) -> list[str]:
    return [found["id"] for found in answer["found"]]


def search_all(client: Client, **query: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Search to the end; the ids, and how far each request had come."""
    found: list[str] = []
    steps: list[tuple[int, int]] = []
    for _ in range(100):
        answer = client.api("/search", **query)
        found += ids(answer)
        steps.append((answer["searched"], answer["total"]))
        if answer["next"] is None:
            return found, steps
        query["cursor"] = answer["next"]
    raise AssertionError("the search does not end")


@pytest.mark.promise("FACE-3", "QUEUE-8")
def test_a_key_is_found_in_all_queues_and_in_one_queue_after_its_end(site: Site) -> None:
    ready = site.post.publish("a", 1, key="order:7").id
    timer = site.post.publish("b", 2, key="order:7", delay=3600).id
    client = site.client()
    answer = client.api("/search", key="order:7")
    assert sorted((one["queue"], one["id"], one["condition"]) for one in answer["found"]) == [
        ("a", ready, "ready"), ("b", timer, "delayed"),
    ]  # fmt: skip
    assert (answer["queues_searched"], answer["searched"], answer["next"]) == (2, 0, None)
    site.post.configure("a", completed=10)
    with site.post.receive("a"):
        pass
    dead = site.post.publish("a", 3, key="order:7").id
    with site.post.receive("a") as message:
        assert message is not None
        message.dead()
    now = site.post.publish("a", 4, key="order:7").id
    assert ids(client.api("/search", key="order:7")) == [now, timer] or ids(client.api("/search", key="order:7")) == [
        timer, now,
    ]  # fmt: skip
    assert ids(client.api("/search", key="order:7", queue="a")) == [now, dead, ready]
    assert ids(client.api("/search", key="none", queue="a")) == []
    assert client.get("/api/v1/stores/main/search", key="order:7", queue="none").problem == "unknown-queue"


@pytest.mark.promise("FACE-3", "CHAIN-2")
def test_a_chain_is_found_by_its_id(site: Site) -> None:
    chain = site.post.publish("a", 1, chain=True)
    client = site.client()
    (first,) = client.api("/search", chain=chain.chain_id)["found"]
    assert (first["queue"], first["id"], first["condition"]) == ("a", chain.id, "first message")
    with site.post.receive("a") as message:
        assert message is not None
        sent_on = message.then("b", 2)
    roles = {one["id"]: one["condition"] for one in client.api("/search", chain=chain.chain_id)["found"]}
    assert roles == {chain.id: "first message", sent_on: "unfinished"}
    assert client.api("/search", chain=f"a/{'0' * 24}")["found"] == []
    assert client.get("/api/v1/stores/main/search", chain="a/b").problem == "invalid-chain"


@pytest.mark.promise("FACE-3", "QUEUE-8")
def test_type_group_header_and_correlation_id_are_searched_for_in_one_queue(site: Site) -> None:
    site.post.configure("parcels", completed=10)
    done = site.post.publish("parcels", Parcel(0), group="north").id
    with site.post.receive("parcels"):
        pass
    site.post.publish("parcels", 1, group="south")
    parcel = site.post.publish("parcels", Parcel(2), group="north", headers={"Tenant": "acme"}, correlation_id="c-2").id
    other = site.post.publish("parcels", 3, delay=timedelta(hours=1), headers={"tenant": "other"}).id
    client = site.client()

    def find(**query: str) -> list[str]:
        return sorted(search_all(client, queue="parcels", **query)[0])

    assert find(group="north") == sorted([done, parcel])
    assert find(type="parcel") == sorted([done, parcel])
    assert find(header="tenant=acme") == [parcel]
    assert find(header="TENANT") == sorted([parcel, other])
    assert find(correlation_id="c-2") == [parcel]
    assert find(group="west") == []
    assert search_all(client, queue="parcels", group="west")[1] == [(4, 4)]


@pytest.mark.promise("FACE-3", "QUEUE-8")
def test_a_search_reports_how_far_it_came_and_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCHED_MAX", 25)
    monkeypatch.setattr(search, "FIRST_CALL_MESSAGES", 10)
    monkeypatch.setattr(search, "CALL_MESSAGES", 10)
    site.post.publish_many("orders", range(50), group="theirs")
    ours = [published.id for published in site.post.publish_many("orders", range(3), group="ours", priority=0)]
    client = site.client()
    found, steps = search_all(client, queue="orders", group="ours")
    assert found == ours
    assert steps == [(30, 53), (53, 53)]
    page = client.get("/s/main/search", q="ours", by="group", queue="orders").text
    assert "Searched 30 of 53 messages" in page
    assert "Search on" in page
    for wrong in ("x", "9.1.", "0.-1.", "1", "0.0.no"):
        assert client.get("/api/v1/stores/main/search", queue="orders", group="x", cursor=wrong).status == 422


@pytest.mark.promise("FACE-3")
def test_a_search_needs_one_thing_to_search_for_and_a_queue_where_there_is_no_index(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client()
    path = "/api/v1/stores/main/search"
    assert client.get(path).problem == "no-choice"
    assert client.get(path, key="a", group="b", queue="orders").problem == "no-choice"
    assert client.get(path, group="a").problem == "no-queue"
    page = client.get("/s/main/search", q="a", by="group")
    assert page.status == 200
    assert "name it in queue" in page.text


@pytest.mark.promise("FACE-3")
def test_who_may_not_see_headers_cannot_search_by_them(memory: Site) -> None:
    memory.post.publish("orders", 1, headers={"card": "4111"}, correlation_id="c-1")
    memory.post.publish("cards", 1, headers={"card": "4111"})
    memory.post.configure("cards", hide_bodies=True)
    client = memory.client(tokens=[READER])
    path, headers = "/api/v1/stores/main/search", {"authorization": f"Bearer {READER.secret}"}
    for field, text in (("header", "card=4111"), ("correlation_id", "c-1")):
        assert client.get(path, headers, **{field: text}, queue="orders").problem == "missing-scope"
    local = memory.client()
    assert len(local.api("/search", header="card=4111", queue="orders")["found"]) == 1
    assert local.get(path, header="card=4111", queue="cards").problem == "hidden-bodies"
    assert local.get(path, type="int", queue="cards").status == 200


@pytest.mark.promise("FACE-3")
def test_the_search_box_finds_ids_keys_and_chains_and_goes_straight_there(site: Site) -> None:
    chain = site.post.publish("orders", 1, key="k/7", chain=True)
    client = site.client()
    for text in (chain.id, "k/7", chain.chain_id):
        answer = client.get("/s/main/search", q=text)
        assert (answer.status, answer.header("location")) == (303, f"/s/main/queues/orders/messages/{chain.id}")
    both = site.post.publish("mails", 2, key="orders").id
    page = client.get("/s/main/search", q="orders").text
    assert both in page
    assert 'href="/s/main/queues/orders"' in page
    assert client.get("/s/main/search", q="orders", by="key").text.count(both) == 2


@pytest.mark.promise("FACE-3")
@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ({"q": "0" * 24}, ("queues and their journals were searched", "journal_max")),
        ({"q": "none"}, ("No unfinished message has the key", "name a queue")),
        ({"q": f"orders/{'0' * 24}"}, ("knows no chain", "for an hour")),
        ({"q": "none", "by": "type", "queue": "orders"}, ("No message of orders has the type", "completed")),
        ({"q": "none", "by": "key", "queue": "orders"}, ("No message of orders has the key", "completed")),
        ({"q": "x", "by": "group", "queue": "nothing"}, ("there is no queue",)),
        ({"q": "x", "by": "id"}, ("is not the id of a message",)),
    ],
)
def test_an_empty_answer_names_what_was_searched_and_the_next_step(
    memory: Site, query: dict[str, str], texts: tuple[str, ...]
) -> None:
    memory.post.publish("orders", 1)
    page = memory.client().get("/s/main/search", None, **query).text
    for text in texts:
        assert text in page
