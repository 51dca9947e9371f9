"""Bulk actions of the web page on every store: by filter, with a count first, carried on by any server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import Any

import pytest

from tests.waiting import until
from tests.web.asgi import Client
from tests.web.conftest import Site
from waypost.errors import OutcomeUnknown
from waypost.views import ActionUndo, LoggedAction
from waypost.web import Token, bulk

pytestmark = pytest.mark.promise("FACE-3", "DEAD-2")
LETTERS = 240


def carried_on(client: Client, id: str) -> dict[str, Any]:
    """Wait until a bulk action has ended: the tasks of the app run while its requests do."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        client.run(pause())
        found.update(client.api(f"/bulk/{id}"))
        return found["state"] in ("done", "cancelled", "failed")

    until(has_ended, "the end of the bulk action")
    return found


async def pause() -> None:
    import asyncio

    await asyncio.sleep(0.02)


def test_a_filter_is_counted_first_and_then_redriven_in_the_background(site: Site) -> None:
    site.bury("orders", 1, 2, 3, error="no such customer\nin detail")
    (other,) = site.bury("orders", 4, error="timeout")
    client = site.client()
    (largest, _) = client.api("/queues/orders/dead")["groups"]
    assert (largest["error"], largest["count"], sum(largest["over_time"])) == ("no such customer", 3, 3)
    chosen = {"reason": largest["reason"], "error": largest["error"]}
    assert client.api("/queues/orders/dead/count", **chosen) == {"count": 3, "searched": 4, "total": 4}
    started = client.write("/queues/orders/bulk/redrive", chosen | {"rate": "1000/s", "by": "someone else"}).json()
    assert started["bulk_action"]["user"] == "local"
    ended = carried_on(client, started["bulk"])
    assert (ended["state"], ended["done"], ended["filters"]) == ("done", 3, chosen)
    assert [letter.id for letter in site.post.dead_letters("orders")] == [other]
    (entry,) = client.api("/actions")["actions"]
    assert entry["action"] == "bulk_redrive"
    assert entry["command"] == (
        "waypost bulk start orders redrive --reason rejected --error 'no such customer' --rate 1000/s"
    )


def test_a_purge_in_the_background_needs_the_name_and_its_scope(site: Site) -> None:
    site.bury("orders", 1, 2)
    client = site.client()
    assert client.write("/queues/orders/bulk/purge", {"confirm": "other"}).problem == "not-confirmed"
    started = client.write("/queues/orders/bulk/purge", {"confirm": "orders"}).json()
    assert carried_on(client, started["bulk"])["text"] == "2 removed"
    assert site.post.ledger("orders").dead_kept == 0


def test_a_bulk_action_is_paused_resumed_and_cancelled_on_the_page_of_actions(site: Site) -> None:
    site.bury("orders", 1, 2, 3)
    client = site.client()
    id = client.write("/queues/orders/bulk/redrive", {"rate": "1/h"}).json()["bulk"]
    assert client.write("/bulk", {"id": id, "change": "pause"}).json()["changed"] is True
    text = client.get("/s/main/actions").text
    assert "Bulk actions" in text
    assert 'value="resume"' in text
    form = next(one for one in re.findall(r"<form.*?</form>", text, re.DOTALL) if 'value="cancel"' in one)
    fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form)}
    assert client.form("/s/main/do/change_bulk", fields).status == 303
    assert carried_on(client, id)["state"] == "cancelled"
    assert client.write("/bulk", {"id": id, "change": "resume"}).status == 422
    assert "waypost bulk cancel" in client.get("/s/main/actions").text


def test_the_pages_show_the_count_and_the_same_as_a_command(site: Site) -> None:
    site.bury("orders", 1, 2, error="<b>wrong</b>")
    client = site.client()
    text = client.get("/s/main/queues/orders/dead").text
    links = [unescape(one) for one in re.findall(r'href="([^"]*/do/bulk_[^"]*error=[^"]*)"', text)]
    assert len(links) == 2
    for link in links:
        page = client.get(link)
        assert page.status == 200
        assert "<b>2</b> dead letters" in page.text
        assert "waypost bulk start orders" in page.text
        assert "&lt;b&gt;wrong&lt;/b&gt;" in page.text
    answer = client.press("/s/main/queues/orders/do/bulk_redrive", client.get(links[0]).text)
    assert answer.header("location") == "/s/main/actions"
    until(lambda: client.run(pause()) or site.post.ledger("orders").dead_kept == 0)


def test_a_letter_is_edited_and_sent_again_once(site: Site) -> None:
    (letter,) = site.bury("orders", {"amount": "ten"})
    client = site.client()
    text = client.get(f"/s/main/queues/orders/do/edit_dead?id={letter}").text
    assert "&#34;amount&#34;: &#34;ten&#34;" in text
    fields = dict(re.findall(r'name="(csrf_token|once)" value="([^"]*)"', text))
    sent = fields | {"id": letter, "body": '{"amount": 10}', "headers": '{"by": "me"}'}
    for _ in range(2):
        assert client.form("/s/main/queues/orders/do/edit_dead", sent).status == 303
    (stored,) = site.post.peek("orders")
    assert stored.body == {"amount": 10}
    assert stored.headers == {"by": "me", "waypost-edited-from": letter}
    again = client.write("/queues/orders/edit", {"id": letter, "body": 1})
    assert (again.status, again.problem) == (404, "unknown-letter")
    assert "amount" not in json.dumps(client.api("/actions")), "the log of actions has a body"


def test_only_who_may_see_a_body_edits_it_on_a_page(memory: Site) -> None:
    (letter,) = memory.bury("orders", "secret text")
    client = memory.client(hide_bodies=["orders"])
    answer = client.get(f"/s/main/queues/orders/do/edit_dead?id={letter}")
    assert answer.status == 403
    assert "secret text" not in answer.text


# ---- servers that end --------------------------------------------------------------------------------------------


def test_the_card_of_letters_without_an_error_takes_only_those(memory: Site) -> None:
    plain = memory.bury("orders", 1, 2)
    memory.bury("orders", 3, error="timeout")
    client = memory.client()
    text = client.get("/s/main/queues/orders/dead").text
    (link,) = (unescape(one) for one in re.findall(r'href="([^"]*/do/bulk_redrive[^"]*error=)"', text))
    page = client.get(link).text
    assert "<b>2</b> dead letters" in page
    assert client.press(link.partition("?")[0], page).status == 303
    (started,) = client.api("/bulk")["bulk_actions"]
    assert started["filters"] == {"reason": "rejected", "error_type": "", "error": ""}
    assert carried_on(client, started["id"])["done"] == 2
    assert {message.id for message in memory.post.messages("orders")} == set(plain)


def test_a_read_only_server_carries_on_no_bulk_action(memory: Site) -> None:
    memory.bury("orders", 1)
    started = memory.post.start_bulk("orders", "redrive")
    client = memory.client(read_only=True)
    for page in ("/s/main/queues/orders/dead", "/s/main/actions"):
        assert client.get(page).status == 200
        assert client.app.state.bulk._task is None
    assert memory.post.bulk_action(started.id).state == "running"


def test_old_bulk_actions_are_carried_on_however_many_are_newer(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LISTED", 2)
    memory.bury("orders", 1)
    old = memory.post.start_bulk("orders", "redrive")
    for _ in range(5):
        memory.post.change_bulk(memory.post.start_bulk("orders", "purge", reason="none").id, "pause")
    client = memory.client()
    client.get("/s/main/actions")
    assert carried_on(client, old.id)["done"] == 1


def test_a_mounted_server_waits_for_the_rate_of_a_bulk_action_after_the_last_request(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(bulk, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(bulk, "TURN_SECONDS", 0.01)
    memory.bury("orders", 1, 2)
    started = memory.post.start_bulk("orders", "redrive", rate="1/s")
    client = memory.client()
    client.get("/s/main/actions")
    until(lambda: client.run(pause()) or memory.post.bulk_action(started.id).state == "done")
    until(lambda: client.run(pause()) or client.app.state.bulk._task.done())
    assert memory.post.bulk_action(started.id).done == 2


def test_an_error_of_one_bulk_action_holds_up_no_other(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.bury("orders", 1)
    broken, sound = memory.post.start_bulk("orders", "purge"), memory.post.start_bulk("orders", "redrive")
    run = memory.served.run_bulk

    async def run_bulk(id: str, **options: Any) -> Any:
        if id == broken.id:
            raise OutcomeUnknown("the answer is lost")
        return await run(id, **options)

    monkeypatch.setattr(memory.served, "run_bulk", run_bulk)
    client = memory.client()
    client.get("/s/main/actions")
    assert carried_on(client, sound.id)["done"] == 1


def test_a_time_without_a_zone_is_refused(memory: Site) -> None:
    memory.bury("orders", 1)
    client = memory.client()
    for name in ("died_before", "died_after"):
        answer = client.get(f"/api/v1/stores/main/queues/orders/dead/count?{name}=2026-03-06T09:00:00")
        assert (answer.status, answer.problem) == (422, "invalid-time")
        assert name in answer.json()["detail"]


def test_the_page_of_a_bulk_action_takes_what_is_no_filter(memory: Site) -> None:
    memory.bury("orders", 1)
    page = memory.client().get("/s/main/queues/orders/do/bulk_redrive?rate=5/s&reason=rejected&by=me")
    assert page.status == 200
    assert "<b>1</b> dead letter of" in page.text
    assert 'name="rate" value="5/s"' in page.text


def test_a_purge_is_changed_only_with_the_scope_that_starts_it(memory: Site) -> None:
    memory.bury("orders", 1)
    purge, redrive = (memory.post.start_bulk("orders", verb).id for verb in ("purge", "redrive"))
    for id in (purge, redrive):
        memory.post.change_bulk(id, "pause")  # no server carries it on meanwhile
    client = memory.client(
        secret="s" * 16, tokens=[Token("night shift", "o" * 16, scopes=frozenset({"read", "operate"}))]
    )
    client.headers["authorization"] = f"Bearer {'o' * 16}"
    assert client.write("/bulk", {"id": purge, "change": "resume"}).problem == "missing-scope"
    assert client.write("/bulk", {"id": redrive, "change": "cancel"}).status == 200
    client.headers["authorization"] = f"Bearer {'s' * 16}"
    assert client.write("/bulk", {"id": purge, "change": "cancel"}).status == 200


def test_an_undo_that_only_another_release_has_is_only_described(memory: Site) -> None:
    undo = ActionUndo("Ask the new server.", "move_queue", {})
    memory.post.log_action(LoggedAction("mara", "web", "move", "orders", True, "moved", undo=undo))
    page = memory.client().get("/s/main/actions")
    assert page.status == 200
    assert "Ask the new server." in page.text
    assert ">Undo<" not in page.text


@contextmanager
def server(site: Site) -> Iterator[subprocess.Popen[str]]:
    """A web server in a process of its own; it is killed at the end."""
    command = [
        sys.executable, "-m", "waypost.cli.main", "web", "--url", site.url, "--namespace", site.namespace,
        "--port", "0", "--json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("site", ["sqlite", "valkey", "postgres"], indirect=True)
def test_a_killed_server_is_followed_by_another_and_each_letter_is_moved_once(site: Site) -> None:
    site.post.publish_many("orders", range(LETTERS))
    for _ in range(LETTERS):
        with site.post.receive("orders") as message:
            assert message is not None
            message.dead("rejected")
    action = site.post.start_bulk("orders", "redrive", rate="40/s")
    with server(site) as first:
        until(lambda: site.post.bulk_action(action.id).done > 0, "the first step")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    killed_at = site.post.bulk_action(action.id)
    assert not killed_at.has_ended, "it ended before its server was killed"
    with server(site):
        until(lambda: site.post.bulk_action(action.id).has_ended, "the end of the bulk action")
    ended = site.post.bulk_action(action.id)
    assert (ended.state, ended.done, ended.left, ended.unknown) == ("done", LETTERS, 0, 0)
    ledger = site.post.ledger("orders")
    assert (ledger.redriven, ledger.ready, ledger.dead_kept, ledger.balance) == (LETTERS, LETTERS, 0, 0)


# ---- messages that are not dead ----------------------------------------------------------------------------------


def publish_for_tenants(site: Site, **options: Any) -> None:
    for number in range(6):
        site.post.publish("orders", number, headers={"Tenant": "acme" if number % 2 else "other"}, group="g", **options)


@pytest.mark.promise("QUEUE-8", "FACE-3")
def test_messages_are_cancelled_by_a_header_after_their_number_was_read(memory: Site) -> None:
    publish_for_tenants(memory)
    client = memory.client()
    counted = client.api("/queues/orders/count", state="ready", header="tenant=acme")
    assert counted == {"count": 3, "searched": 6, "total": 6}
    page = client.get("/s/main/queues/orders/do/bulk_cancel?state=ready&header=tenant%3Dacme").text
    assert "<b>3</b> ready messages" in page
    assert "will be cancelled" in page
    assert "waypost bulk start orders cancel --state ready --header tenant=acme" in page
    wrong = client.write("/queues/orders/bulk/cancel", {"state": "ready", "confirm": "other"})
    assert wrong.problem == "not-confirmed"
    done = client.write("/queues/orders/bulk/cancel", {"state": "ready", "header": "tenant=acme", "confirm": "orders"})
    id = done.json()["bulk"]
    memory.post.run_bulk(id)
    found = client.api(f"/bulk/{id}")
    assert (found["verb"], found["source"], found["state"], found["done"]) == ("cancel", "ready", "done", 3)
    assert found["text"] == "3 cancelled"
    assert memory.post.ledger("orders").ready == 3
    assert "cancel · " in client.get("/s/main/actions").text
    search = client.get("/s/main/search?q=tenant%3Dother&by=header&queue=orders").text
    assert "/do/bulk_cancel?state=ready&amp;header=tenant%3Dother" in search


@pytest.mark.promise("QUEUE-8", "FACE-3")
def test_timers_are_moved_in_the_background(memory: Site) -> None:
    publish_for_tenants(memory, delay=600)
    client = memory.client()
    page = client.get("/s/main/queues/orders/do/bulk_reschedule?group=g").text
    assert "<b>6</b> timers" in page
    assert client.write("/queues/orders/bulk/reschedule", {"group": "g"}).problem == "no-choice"
    done = client.write("/queues/orders/bulk/reschedule", {"group": "g", "delay": 0})
    assert memory.post.run_bulk(done.json()["bulk"]).done == 6
    assert memory.post.ledger("orders").ready == 6
    assert "bulk_reschedule?group=g" not in client.get("/s/main/queues/orders?state=delayed&group=g").text


@pytest.mark.promise("QUEUE-8", "FACE-3")
def test_a_filter_by_header_needs_the_right_to_see_headers(memory: Site) -> None:
    publish_for_tenants(memory)
    secret = "a secret of the operator"
    client = memory.client(tokens=[Token("op", secret, frozenset({"admin"}))])
    client.headers["authorization"] = f"Bearer {secret}"
    given = {"state": "ready", "header": "tenant=acme", "confirm": "orders"}
    assert client.write("/queues/orders/bulk/cancel", given).problem == "missing-scope"
    assert client.get("/api/v1/stores/main/queues/orders/count?state=ready&header=tenant").problem == "missing-scope"
    assert client.get("/s/main/queues/orders/do/bulk_cancel?state=ready&header=tenant").status == 403
    hidden = memory.client(hide_bodies=["orders"])
    assert hidden.write("/queues/orders/bulk/cancel", given).problem == "hidden-bodies"
    assert client.write("/queues/orders/bulk/cancel", {"state": "ready", "confirm": "orders"}).status == 200
    assert memory.post.bulk_actions().actions[0].filters == {}


@pytest.mark.promise("FACE-3")
def test_a_header_in_a_filter_is_visible_only_with_the_right_to_see_headers(memory: Site) -> None:
    publish_for_tenants(memory)
    operator, owner = "a secret of the operator", "a secret of the owner"
    client = memory.client(
        tokens=[Token("op", operator, frozenset({"admin"})), Token("own", owner, frozenset({"admin", "bodies"}))]
    )
    client.headers["authorization"] = f"Bearer {owner}"
    started = client.write(
        "/queues/orders/bulk/cancel", {"state": "ready", "header": "tenant=acme-gold", "confirm": "orders"}
    ).json()
    id = started["bulk"]
    memory.post.run_bulk(id)
    assert started["bulk_action"]["filters"] == {"header": "tenant=acme-gold"}
    assert client.api(f"/bulk/{id}")["filters"] == {"header": "tenant=acme-gold"}
    assert "acme-gold" in client.get("/s/main/actions").text
    assert "acme-gold" not in json.dumps(client.api("/actions")), "the log of actions, which all may read, has it"
    waiting = memory.post.start_bulk("orders", "cancel", state="ready", header="tenant=acme-gold")
    client.headers["authorization"] = f"Bearer {operator}"
    assert client.api(f"/bulk/{id}")["filters"] == {"header": "(hidden)"}
    changed = client.write("/bulk", {"id": waiting.id, "change": "cancel"})
    assert changed.status == 200
    texts = [changed.text, *(client.get(path).text for path in (
        "/s/main/actions", "/api/v1/stores/main/bulk", "/api/v1/stores/main/actions",
        "/api/v1/stores/main/export/actions?format=json",
    ))]  # fmt: skip
    assert [text for text in texts if "acme-gold" in text] == []
    assert "(hidden)" in texts[1]
    hidden = memory.client(hide_bodies=["orders"])
    assert "acme-gold" not in hidden.get("/s/main/actions").text


@pytest.mark.promise("QUEUE-8", "FACE-3")
def test_the_messages_of_a_bulk_action_are_chosen_by_key_type_and_age_in_a_form(memory: Site) -> None:
    for number in range(6):
        memory.post.publish("orders", number, key=f"{'acme' if number % 2 else 'other'}:{number}", delay=600)
    client = memory.client()
    path = "/s/main/queues/orders/do/bulk_cancel"
    page = client.get(path, state="delayed", key_prefix="acme:").text
    assert "<b>3</b> delayed messages" in page
    assert 'name="key_prefix" value="acme:"' in page
    assert "--key-prefix acme:" in page
    assert "<b>0</b> delayed messages" in client.get(path, state="delayed", type_name="shop.Order").text
    assert "<b>0</b> delayed messages" in client.get(path, state="delayed", older_than="2h").text
    published = max(one.published_at for one in memory.post.messages("orders", "delayed"))
    until(lambda: memory.post.stats("orders").at > published)
    aged = client.get(path, state="delayed", key_prefix="acme:", older_than="0s").text
    assert "<b>3</b> delayed messages" in aged
    assert re.search(r'name="published_before" value="[^"]*\+00:00"', aged), "an age means others than the count"
    assert client.press(path, aged, confirm="orders").status == 303
    (started,) = client.api("/bulk")["bulk_actions"]
    assert set(started["filters"]) == {"key_prefix", "published_before"}
    assert carried_on(client, started["id"])["done"] == 3
    for age, text in (("soon", "2h or 7d"), ("999999d", "before all times")):
        wrong = client.get(path, state="delayed", older_than=age)
        assert (wrong.status, text in wrong.text) == (422, True)


@pytest.mark.promise("QUEUE-8", "DEAD-2", "FACE-3")
@pytest.mark.parametrize("verb", ["bulk_cancel", "bulk_purge", "bulk_redrive", "bulk_reschedule"])
def test_a_filter_that_was_typed_but_not_counted_is_counted_first(memory: Site, verb: str) -> None:
    if verb in ("bulk_purge", "bulk_redrive"):
        memory.bury("orders", 1, 2)
    memory.post.publish_many("orders", range(4), group="acme", delay=600 if verb == "bulk_reschedule" else None)
    client = memory.client()
    path = f"/s/main/queues/orders/do/{verb}"
    page = client.get(path).text
    confirmed = {"confirm": "orders"} if 'name="confirm"' in page else {}
    for changes in ({"group": "none"}, {"older_than": "2h"}, {"counted": ""}):
        answer = client.press(path, page, **confirmed, **changes)
        assert answer.status == 303
        assert answer.header("location").partition("?")[0] == path
        assert "confirm" not in answer.header("location")
        assert client.api("/bulk")["bulk_actions"] == []
        again = client.get(answer.header("location")).text
        assert "Nothing was done" in again
        assert ("<b>0</b>" in again) == ("counted" not in changes)
    recounted = client.press(path, again, group="acme", step="count").header("location")
    counted = client.get(recounted).text
    assert "Nothing was done" not in counted
    # An age that is taken back leaves no time behind.
    aged = client.get(path, older_than="2h").text
    back = client.press(path, aged, older_than="").header("location")
    assert "_before" not in back
    assert client.press(path, counted, **confirmed).header("location") == "/s/main/actions"
    (started,) = client.api("/bulk")["bulk_actions"]
    assert started["filters"]["group"] == "acme"


def test_a_rate_that_was_typed_stays_when_messages_are_counted_again(memory: Site) -> None:
    memory.bury("orders", 1)
    client = memory.client()
    path = "/s/main/queues/orders/do/bulk_redrive"
    counted = client.press(path, client.get(path).text, reason="rejected", rate="5/s", step="count")
    page = client.get(counted.header("location")).text
    assert re.search(r'<input id="f-rate" name="rate" value="5/s"', page)


@pytest.mark.promise("DEAD-2", "FACE-3")
def test_dead_letters_of_a_bulk_action_are_chosen_by_the_time_of_their_death(memory: Site) -> None:
    memory.bury("orders", 1, 2, error="timeout")
    client = memory.client()
    link = "/s/main/queues/orders/do/bulk_redrive"
    died = max(one.ended_at for one in memory.post.dead_letters("orders") if one.ended_at is not None)
    until(lambda: memory.post.stats("orders").at > died)
    assert "<b>2</b> dead letters" in client.get(link, error="timeout", older_than="0s").text
    page = client.get(link, error="timeout", older_than="1h").text
    assert "<b>0</b> dead letters" in page
    assert "died_before" in page
    assert 'name="error" value="timeout"' in page, "what the form does not ask for is lost"
    secret = "a secret of the operator"
    client = memory.client(tokens=[Token("op", secret, frozenset({"operate"}))])
    client.headers["authorization"] = f"Bearer {secret}"
    assert 'name="header"' not in client.get(link).text
