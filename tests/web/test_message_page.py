"""The page of a message: what happened to it, with what error, and its chain."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from tests.servers.valkey_setups import wait_until
from tests.web.conftest import Site
from tests.web.hostile import HOSTILE_TEXTS
from waypost.errors import ResultNotKept, Undecodable
from waypost.identity import continuation_id
from waypost.values import ChainState, Links
from waypost.web.chain_graph import COLUMN_MAX, draw_chain, make_chain


def fail(site: Site, queue: str, error: Exception) -> None:
    """Handle one message, which fails and is to be retried at once."""
    with site.post.receive(queue) as message:
        assert message is not None
        message.retry(after=0, reason=str(error))


@pytest.mark.promise("FACE-3", "SEE-3")
def test_the_timeline_has_the_error_of_each_attempt(site: Site) -> None:
    published = site.post.publish("orders", {"n": 1})
    fail(site, "orders", ValueError("the bank is away <b>"))
    fail(site, "orders", ValueError("x" * 700))
    with site.post.receive("orders") as message:
        assert message is not None
        message.dead("rejected", "no such customer")
    client = site.client()
    steps = client.api(f"/queues/orders/messages/{published.id}")["timeline"]["steps"]
    assert [(step["event"], step["error"]) for step in steps] == [
        ("published", None), ("claimed", None), ("retried", "the bank is away <b>"), ("claimed", None),
        ("retried", "x" * 500), ("claimed", None), ("dead", "no such customer"),
    ]  # fmt: skip
    assert [step["cause"] for step in steps if step["event"] == "claimed"] == [None, "retried", "retried"]
    page = client.get(f"/s/main/queues/orders/messages/{published.id}").text
    assert "the bank is away &lt;b&gt;" in page
    assert f"{'x' * 500}…" in page
    assert "again because its handler failed" in page


@pytest.mark.promise("FACE-3", "DEAD-1")
def test_a_traceback_is_visible_to_users_that_may_see_bodies(site: Site) -> None:
    published = site.post.publish("orders", {"n": 1})
    with pytest.raises(LookupError), site.post.receive("orders"):
        raise LookupError("the <b> is away")
    path = f"/queues/orders/messages/{published.id}"
    client = site.client()
    visible = client.api(path)["message"]
    assert visible["error"] == "the <b> is away"
    assert 'raise LookupError("the <b> is away")' in visible["traceback"]
    (retried,) = (step for step in client.api(path)["timeline"]["steps"] if step["event"] == "retried")
    assert retried["error"] == "the <b> is away"
    page = client.get(f"/s/main{path}").text
    assert "raise LookupError(&#34;the &lt;b&gt; is away&#34;)" in page
    hidden = site.client(hide_bodies=["orders"])
    assert hidden.api(path)["message"]["traceback"] is None
    assert "raise LookupError" not in hidden.get(f"/s/main{path}").text
    client.write("/queues/orders/settings", {"tracebacks": False}, method="PATCH")
    assert client.api("/queues/orders")["settings"]["tracebacks"] is False


@pytest.mark.promise("FACE-3", "CHAIN-2")
def test_the_chain_of_a_message_is_drawn_with_links_to_its_neighbours(site: Site) -> None:
    chain = site.post.publish("orders", 1, chain=True)
    waiting = site.post.publish("reports", 2, after=[chain])
    with site.post.receive("orders") as message:
        assert message is not None
        parcel, mail = message.then("parcels", 3), message.then("mails", 4)
    wait_until("what was sent on has arrived", lambda: bool(site.post.find(parcel) and site.post.find(mail)))
    client = site.client()
    drawn = client.api(f"/queues/orders/messages/{chain.id}")["chain"]
    roles = {(node["queue"], node["id"]): node["role"] for node in drawn["nodes"]}
    expected = {("orders", chain.id): "first", ("parcels", parcel): "open", ("mails", mail): "open"}
    assert roles == expected | ({("reports", waiting.id): "waiting"} if len(roles) == 4 else {})
    direct = {edge["target"] for edge in drawn["edges"] if edge["direct"]}
    assert direct == {f"parcels/{parcel}", f"mails/{mail}"}
    assert "2 messages are unfinished" in drawn["sentence"]
    page = client.get(f"/s/main/queues/parcels/messages/{parcel}").text
    assert f'href="/s/main/queues/orders/messages/{chain.id}"' in page
    assert page.count("<rect") >= 3
    beside = client.api(f"/queues/parcels/messages/{parcel}")["chain"]
    assert {(node["id"], node["role"]) for node in beside["nodes"] if node["is_this"]} == {(parcel, "open")}
    waited = {edge["source"] for edge in beside["edges"] if edge["target"] == f"reports/{waiting.id}"}
    assert waited in (set(), {f"parcels/{parcel}", f"mails/{mail}"}), "what waits, waits for this message too"
    blocked = client.api(f"/queues/reports/messages/{waiting.id}")["chain"]
    assert {(node["id"], node["role"]) for node in blocked["nodes"]} == {(waiting.id, "this"), (chain.id, "blocker")}
    plain = site.post.publish("orders", 5)
    assert client.api(f"/queues/orders/messages/{plain.id}")["chain"] is None


@pytest.mark.promise("FACE-3")
def test_a_broken_chain_and_a_forgotten_one_are_described() -> None:
    first, member = "0" * 24, "1" * 24
    state = ChainState(True, 1, (f"b/{member}", "rejected"), f"b/{member}")
    broken = make_chain("a", first, Links(f"a/{first}", (), state), None, ())
    assert broken is not None
    assert "broken: rejected" in broken.sentence
    assert [node.role for node in broken.nodes] == ["first", "failed"]
    forgotten = make_chain("b", member, Links(f"a/{first}"), Links(), ())
    assert forgotten is not None
    assert "forgotten" in forgotten.sentence
    complete = make_chain("a", first, Links(f"a/{first}", (), ChainState(True, 0, None, f"b/{member}")), None, ())
    assert complete is not None
    assert "complete" in complete.sentence
    assert make_chain("a", first, Links(), None, ()) is None


@pytest.mark.promise("FACE-3")
def test_a_wide_chain_is_drawn_in_part_and_listed_whole() -> None:
    first = "0" * 24
    children = [continuation_id(first, 3, index) for index in range(20)]
    members = tuple(f"b/{child}" for child in children)
    chain = make_chain("a", first, Links(f"a/{first}", (), ChainState(True, 30), members), None, (3,))
    assert chain is not None
    assert (len(chain.nodes), chain.more) == (21, 10)
    assert sum(edge.direct for edge in chain.edges) == 16
    drawing = draw_chain(chain)
    assert (len(drawing.boxes), drawing.hidden) == (1 + COLUMN_MAX, 20 - COLUMN_MAX)
    assert len(drawing.lines) == COLUMN_MAX
    assert all(box.x + drawing.box_width < drawing.width for box in drawing.boxes)


@pytest.mark.promise("FACE-3")
@pytest.mark.parametrize("text", HOSTILE_TEXTS[:12])
def test_hostile_errors_and_results_are_texts(memory: Site, text: str) -> None:
    published = memory.post.publish("orders", text, chain=True, headers={"h": text}, correlation_id=text)
    fail(memory, "orders", ValueError(text))
    with memory.post.receive("orders") as message:
        assert message is not None
        message.keep_result(text)
    page = memory.client().get(f"/s/main/queues/orders/messages/{published.id}")
    assert page.status == 200
    found = [html.unescape(part) for part in re.findall(r"<pre[^>]*>(.*?)</pre>", page.text, re.DOTALL)]
    assert text in found
    assert text not in page.text or html.escape(text) == text


@pytest.mark.parametrize(("error", "text"), [
    (ResultNotKept("BodyTooLarge: secret"), "The result was not kept"),
    (Undecodable("secret"), "The result cannot be read"),
])  # fmt: skip
def test_a_message_whose_result_cannot_be_read_has_its_page(
    memory: Site, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = memory.post.publish("orders", 1)

    async def result(*given: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(memory.served, "result", result)
    page = memory.client().get(f"/s/main/queues/orders/messages/{published.id}")
    assert page.status == 200
    assert f"{text}: " in page.text
    assert "secret" in page.text
    hidden = memory.client(hide_bodies=["orders"]).get(f"/s/main/queues/orders/messages/{published.id}").text
    assert f"{text}." in hidden
    assert "secret" not in hidden
