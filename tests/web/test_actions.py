"""The log of actions: every write with who made it, what became of it, and how it is undone."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from tests.web.conftest import Site
from waypost.cli.main import main
from waypost.policy import ACTIONS_MAX
from waypost.views import LoggedAction

TOKEN = "a token of sixteen"


def logged(client: Any, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.api("/actions", **query)["actions"]
    return found


@pytest.mark.promise("FACE-3", "SEE-3")
def test_every_write_is_logged_with_who_made_it_and_what_became_of_it(site: Site) -> None:
    site.post.publish("orders", 1)
    client = site.client(secret=TOKEN)
    client.headers["authorization"] = f"Bearer {TOKEN}"
    client.write("/queues/orders/pause")
    client.write("/queues/orders/settings", {"max_running": 5}, method="PATCH")
    client.write("/queues/orders/settings", {"max_running": 7, "dry_run": True}, method="PATCH")
    client.write("/queues/orders/remove", {"confirm": "orders"})
    removed, configured, paused = logged(client)
    assert (paused["user"], paused["via"], paused["origin"]) == ("operator", "web", "127.0.0.1")
    assert (paused["action"], paused["queue"], paused["ok"]) == ("pause", "orders", True)
    assert (paused["text"], paused["command"]) == ("orders is paused", "waypost pause orders")
    assert paused["undo"]["action"] == "resume"
    assert configured["undo"] == {
        "text": "Set what was changed back to its values before.", "action": "configure",
        "options": {"max_running": None},
    }  # fmt: skip
    assert configured["python"] == "post.configure('orders', max_running=5)"
    assert (removed["ok"], removed["undo"]) == (False, None)
    assert "not empty" in removed["text"]
    assert [one.action for one in site.post.actions().actions] == ["remove", "configure", "pause"]
    pages = [logged(client, limit=1), client.api("/actions", limit=1)["next"]]
    assert logged(client, limit=5, cursor=pages[1])[0]["action"] == "configure"


@pytest.mark.promise("FACE-3")
def test_the_page_of_actions_undoes_what_can_be_undone(site: Site) -> None:
    site.post.publish("orders", 1)
    client = site.client()
    client.write("/queues/orders/pause")
    client.write("/queues/orders/settings", {"max_running": 5, "rate": "9/s"}, method="PATCH")
    text = client.get("/s/main/actions").text
    assert "waypost configure orders max_running=5" in text
    assert "local" in text
    # A pause is undone by the page that asks for a resume; settings by the page that shows what changes.
    link = unescape(re.findall(r'href="([^"]*/do/resume[^"]*)"', text)[0])
    assert "Hand out messages of a queue again" in client.get(link).text
    form = re.findall(r'<form method="post" action="[^"]*/do/configure".*?</form>', text, re.DOTALL)[0]
    fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form)}
    preview = client.form("/s/main/queues/orders/do/configure", fields)
    assert preview.status == 200
    assert "<del>5</del>" in preview.text
    assert "<del>9/s</del>" in preview.text
    hidden = r'<input type="hidden" name="(\w+)" value="([^"]*)"'
    fields = {name: unescape(value) for name, value in re.findall(hidden, preview.text)}
    assert client.form("/s/main/queues/orders/do/configure", fields).status == 303
    policy = site.post.policy("orders")
    assert (policy.max_running, policy.rate) == (None, None)


@pytest.mark.promise("FACE-3")
def test_the_log_is_bounded(memory: Site) -> None:
    for number in range(ACTIONS_MAX + 5):
        memory.post.log_action(LoggedAction("u", "web", "pause", f"q{number}", True, "x" * 5_000))
    count, cursor = 0, None
    while True:
        page = memory.post.actions(cursor=cursor, limit=200)
        count += len(page.actions)
        assert all(len(one.text) == 2_000 for one in page.actions)
        cursor = page.cursor
        if cursor is None:
            break
    assert count == ACTIONS_MAX


@pytest.mark.promise("FACE-2")
def test_the_command_lists_actions(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from waypost import Waypost

    url = f"sqlite:///{tmp_path / 'actions.db'}"
    with Waypost(url) as post:
        post.log_action(LoggedAction("mara", "web", "pause", "orders", True, "orders is paused"))
        post.log_action(LoggedAction("ben", "web", "purge", "mails", False, "not possible"))
    assert main(["actions", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "ben" in lines[1]
    assert "failed: not possible" in lines[1]
    assert main(["actions", url, "--queue", "orders", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["user"], found["action"]) == ("mara", "pause")
    assert main(["actions", url, "--user", "none"]) == 0
    assert capsys.readouterr().out == "no actions like that\n"


@pytest.mark.promise("FACE-3")
def test_a_write_whose_entry_cannot_be_kept_is_done_all_the_same(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from waypost.errors import StoreUnavailable

    async def refuse(action: LoggedAction) -> LoggedAction:
        raise StoreUnavailable("away")

    memory.post.publish("orders", 1)
    client = memory.client()
    monkeypatch.setattr(memory.served, "log_action", refuse)
    assert client.write("/queues/orders/pause").json()["changed"] is True


def test_a_change_of_settings_logs_and_undoes_nothing_of_another_user(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.post.publish("orders", 1)
    configure = memory.served.configure

    async def after_another(queue: str, **options: Any) -> Any:
        memory.post.configure("orders", max_running=7)
        return await configure(queue, **options)

    monkeypatch.setattr(memory.served, "configure", after_another)
    client = memory.client()
    done = client.write("/queues/orders/settings", {"max_pending": 50}, method="PATCH").json()
    assert [one["name"] for one in done["changes"]] == ["max_pending"]
    (entry,) = client.api("/actions")["actions"]
    assert set(entry["undo"]["options"]) == {"max_pending"}
