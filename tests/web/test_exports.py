"""Lists as files, and views saved by name."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.web.asgi import Answer, Client
from tests.web.conftest import Site
from waypost.web import Token, documents, exports, reading, search

pytestmark = pytest.mark.promise("FACE-3")
EXPORT = "/api/v1/stores/main/export"


def client_of(site: Site) -> Client:
    """A client that waits for the end of a file."""
    client = site.client()
    client.goes_away = False
    return client


def rows(answer: Answer) -> list[dict[str, str]]:
    assert answer.status == 200, answer.text
    assert answer.header("content-type").startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_a_file_of_a_long_search_is_cut_and_ends_with_a_note(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.post.publish_many("orders", range(300))
    monkeypatch.setattr(exports, "PAGES_MAX", 1)
    client = client_of(memory)
    found = rows(client.get(f"{EXPORT}/messages?queue=orders"))
    assert len(found) == documents.PAGE_LIMIT_MAX + 1
    assert found[-1]["queue"].startswith("cut after a search")
    document = client.get(f"{EXPORT}/messages?queue=orders&format=json").json()
    assert (len(document["rows"]), document["truncated"]) == (documents.PAGE_LIMIT_MAX, True)


def test_the_columns_of_a_file_do_not_depend_on_its_first_row(memory: Site) -> None:
    async def mixed() -> AsyncIterator[dict[str, Any]]:
        yield {"name": "idle"}
        yield {"name": "busy", "queue_name": "orders"}

    async def read() -> bytes:
        return b"".join([line async for line in exports.as_csv(mixed(), exports.COLUMNS["workers"])])

    found = list(csv.DictReader(io.StringIO(memory.runner.run(read()).decode())))
    assert [(one["name"], one["queue_name"]) for one in found] == [("idle", ""), ("busy", "orders")]
    memory.post.publish("orders", 1, delay=60)
    memory.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", body={})
    client = client_of(memory)
    for name, query in (("queues", ""), ("messages", "queue=orders&state=delayed"), ("timers", ""), ("schedules", ""),
                        ("minutes", "queues=orders&minutes=60")):  # fmt: skip
        document = client.get(f"{EXPORT}/{name}?format=json&{query}").json()
        assert list(document["rows"][0]) == exports.COLUMNS[name]


def test_every_list_is_exported_as_csv_and_json(site: Site) -> None:
    site.post.publish_many("orders", [{"id": number} for number in range(3)])
    site.post.publish("mails", 1, delay=60, key="later")
    site.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", body={})
    client = client_of(site)
    messages = rows(client.get(f"{EXPORT}/messages?queue=orders&state=ready"))
    assert [json.loads(one["body"]) for one in messages] == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert {one["state"] for one in messages} == {"ready"}
    assert {one["name"] for one in rows(client.get(f"{EXPORT}/queues"))} >= {"orders", "mails"}
    assert [one["key"] for one in rows(client.get(f"{EXPORT}/timers"))] == ["later"]
    assert [one["cron"] for one in rows(client.get(f"{EXPORT}/schedules"))] == ["0 9 * * *"]
    minutes = rows(client.get(f"{EXPORT}/minutes?queues=orders&minutes=60"))
    assert sum(int(one["published"]) for one in minutes) == 3
    assert client.get(f"{EXPORT}/workers").text.startswith("name,host,pid,")
    for name, query in (
        ("messages", "queue=orders"),
        ("queues", ""),
        ("timers", ""),
        ("schedules", ""),
        ("workers", ""),
    ):
        document = client.get(f"{EXPORT}/{name}?format=json&{query}").json()
        assert (document["limit"], document["truncated"]) == (exports.EXPORT_MAX, False)
        assert len(document["rows"]) == len(rows(client.get(f"{EXPORT}/{name}?{query}")))
    file = client.get(f"{EXPORT}/messages?queue=orders&state=ready").header("content-disposition")
    assert file == 'attachment; filename="orders-ready-messages.csv"'


def test_a_file_is_cut_at_its_limit_and_ends_with_a_note(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "EXPORT_MAX", 250)
    memory.post.publish_many("orders", range(300))
    client = client_of(memory)
    found = rows(client.get(f"{EXPORT}/messages?queue=orders"))
    assert len(found) == 251
    assert found[-1]["queue"] == "cut after 250 rows: there are more"
    document = client.get(f"{EXPORT}/messages?queue=orders&format=json").json()
    assert (len(document["rows"]), document["truncated"]) == (250, True)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-2+3", "@SUM(A1)", "\tx", '=HYPERLINK("http://x","y")'])
def test_no_cell_is_a_formula(memory: Site, text: str) -> None:
    memory.post.publish("orders", text, group=text if text.isprintable() else None)
    (row,) = rows(client_of(memory).get(f"{EXPORT}/messages?queue=orders"))
    assert not any((value or "").startswith(exports.FORMULA_STARTS) for value in row.values())
    if text.isprintable():
        assert row["group"] == f"'{text}"
    # JSON has the text as it is.
    (kept,) = client_of(memory).get(f"{EXPORT}/messages?queue=orders&format=json").json()["rows"]
    assert kept["body"] == text


def test_numbers_below_zero_stay_numbers() -> None:
    assert [exports.cell(value) for value in (-5, -0.5, None, True, {"a": 1}, "-5")] == [
        "-5", "-0.5", "", "true", '{"a":1}', "'-5",
    ]  # fmt: skip


def test_what_is_wrong_with_an_export_is_a_problem_and_bodies_need_their_scope(memory: Site) -> None:
    memory.post.publish("orders", "hidden text")
    client = client_of(memory)
    assert client.get(f"{EXPORT}/messages?queue=none").problem == "unknown-queue"
    assert client.get(f"{EXPORT}/messages?queue=orders&state=none").problem == "invalid-input"
    assert client.get(f"{EXPORT}/secrets").problem == "unknown-export"
    assert client.get(f"{EXPORT}/queues?format=xml").problem == "unknown-export"
    secret = "0123456789abcdef"
    reader = Client(
        memory.client(tokens=[Token("reader", secret, frozenset({"read"}))]).app, memory.runner, goes_away=False
    )
    assert reader.get(f"{EXPORT}/queues").status == 401
    answer = reader.get(f"{EXPORT}/messages?queue=orders", {"authorization": f"Bearer {secret}"})
    assert rows(answer)[0]["body"] == ""
    assert "hidden text" not in answer.text


# ---- saved views -----------------------------------------------------------------------------------------------


def test_a_view_is_saved_by_name_and_listed_where_filters_are(site: Site) -> None:
    site.post.publish("orders", 1)
    client = site.client()
    path = "/s/main/queues/orders?state=dead&reason=rejected"
    assert client.write("/filters", {"name": "rejected ones", "path": path}).json()["changed"]
    assert client.api("/filters") == {"filters": [{"name": "rejected ones", "path": path}]}
    page = client.get("/s/main/queues/orders")
    assert path.replace("&", "&amp;") in page.text
    assert client.get(path).status == 200
    # From a page: the view is the page that the form is on.
    token = page.text.partition('name="csrf_token" value="')[2].partition('"')[0]
    here = "/s/main/timers?queue=orders"
    done = client.form("/s/main/filters", {"csrf_token": token, "name": "timers", "return_to": here})
    assert (done.status, done.header("location")) == (303, here)
    assert [one["name"] for one in client.api("/filters")["filters"]] == ["rejected ones", "timers"]
    # A second save under the name replaces it.
    client.write("/filters", {"name": "timers", "path": "/s/main/timers"})
    assert {one["name"]: one["path"] for one in client.api("/filters")["filters"]}["timers"] == "/s/main/timers"
    assert client.write("/filters/remove", {"name": "timers"}).json()["changed"]
    assert not client.write("/filters/remove", {"name": "timers"}).json()["changed"]
    gone = {"csrf_token": token, "name": "rejected ones", "remove": "true", "return_to": here}
    assert client.form("/s/main/filters", gone).status == 303
    assert client.api("/filters") == {"filters": []}


def test_saved_views_belong_to_their_user_and_are_bounded(memory: Site) -> None:
    secrets = {"ann": "0123456789abcdef", "bob": "fedcba9876543210"}
    app = memory.client(tokens=[Token(name, secret) for name, secret in secrets.items()]).app

    def client(name: str) -> Client:
        return Client(app, memory.runner, headers={"authorization": f"Bearer {secrets[name]}"})

    for number in range(50):
        assert client("ann").write("/filters", {"name": f"view {number}", "path": "/s/main"}).status == 200
    assert client("ann").write("/filters", {"name": "one more", "path": "/s/main"}).problem == "too-many-filters"
    assert client("bob").api("/filters") == {"filters": []}


@pytest.mark.parametrize(
    "path", ["https://x.example/", "//x.example", "/s/other", "/s/mainly", "javascript:alert(1)", "/"]
)
def test_a_saved_view_leads_to_a_page_of_its_store_only(memory: Site, path: str) -> None:
    assert memory.client().write("/filters", {"name": "x", "path": path}).problem == "invalid-path"


def test_a_read_only_server_saves_no_view(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client(read_only=True)
    assert client.write("/filters", {"name": "x", "path": "/s/main"}).problem == "read-only"
    assert client.form("/s/main/filters", {"name": "x", "return_to": "/s/main"}).status == 403
    assert client.api("/filters") == {"filters": []}
    assert "This view as" not in client.get("/s/main/queues/orders").text


def test_a_form_without_a_token_saves_no_view(memory: Site) -> None:
    client = memory.client()
    assert client.form("/s/main/filters", {"name": "x", "return_to": "/s/main"}).status == 403
    assert client.api("/filters") == {"filters": []}


def test_the_log_of_actions_is_exported_with_who_and_the_undo(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = client_of(memory)
    client.write("/queues/orders/pause")
    client.write("/queues/orders/resume")
    found = rows(client.get(f"{EXPORT}/actions"))
    assert [(one["user"], one["action"], one["undo"]) for one in found] == [
        ("local", "resume", "Pause the queue."), ("local", "pause", "Resume the queue."),
    ]  # fmt: skip
    document = client.get(f"{EXPORT}/actions?format=json").json()
    assert [one["command"] for one in document["rows"]] == ["waypost resume orders", "waypost pause orders"]
    assert f"{EXPORT}/actions?format=csv" in client.get("/s/main/actions").text


def test_what_a_search_finds_is_exported_from_its_beginning(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.post.publish_many("orders", range(30), group="acme")
    site.post.publish_many("orders", range(30), group="other")
    client = client_of(site)
    monkeypatch.setattr(search, "FOUND_MAX", 10)
    found = rows(client.get(f"{EXPORT}/search?group=acme&queue=orders"))
    assert len({one["id"] for one in found}) == 30
    assert {one["group"] for one in found} == {"acme"}
    monkeypatch.setattr(exports, "READ_SECONDS_MAX", -1.0)
    monkeypatch.setattr(search, "SEARCHED_MAX", 10)
    document = client.get(f"{EXPORT}/search?group=acme&queue=orders&format=json").json()
    assert document["truncated"] is True
    cut = rows(client.get(f"{EXPORT}/search?group=acme&queue=orders"))
    assert "of 60 messages were searched" in cut[-1]["queue"]
    page = client.get("/s/main/search?q=acme&by=group&queue=orders").text
    assert f"{EXPORT}/search?format=csv&amp;group=acme&amp;queue=orders" in page
    assert client.get(f"{EXPORT}/search?queue=orders").status == 422


def test_a_search_by_header_is_exported_only_to_users_that_may_see_headers(memory: Site) -> None:
    memory.post.publish("orders", 1, headers={"tenant": "a"})
    client = memory.client(tokens=[Token("reader", "a secret of the reader", frozenset({"read"}))])
    client.goes_away = False
    client.headers["authorization"] = "Bearer a secret of the reader"
    assert client.get(f"{EXPORT}/search?header=tenant%3Da&queue=orders").status == 403
    assert len(rows(client_of(memory).get(f"{EXPORT}/search?header=tenant%3Da&queue=orders"))) == 1


def test_groups_of_dead_letters_are_exported_and_a_part_of_them_has_a_note(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.bury("orders", 1, 2, error="=no room")
    memory.bury("orders", 3, reason="too big")
    client = client_of(memory)
    first, second = rows(client.get(f"{EXPORT}/dead?queue=orders"))
    assert (first["queue"], first["count"], first["error"], len(first["samples"].split())) == (
        "orders",
        "2",
        "'=no room",
        2,
    )
    assert (second["reason"], second["count"]) == ("too big", "1")
    assert f"{EXPORT}/dead?format=json&amp;queue=orders" in client.get("/s/main/queues/orders/dead").text
    monkeypatch.setattr(reading, "GROUPED_MAX", 2)
    monkeypatch.setattr(reading, "GROUPED_PAGE", 2)
    cut = rows(client.get(f"{EXPORT}/dead?queue=orders"))
    assert cut[-1]["queue"] == "of 2 of 3 dead letters, the oldest"
    assert client.get(f"{EXPORT}/dead").status == 422
