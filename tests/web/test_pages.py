"""The pages without a browser: every screen is drawn, forms act, everything is escaped, and signing in works."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.web.asgi import Answer, Client
from tests.web.conftest import Site
from tests.web.hostile import HOSTILE_TEXTS, fill_store
from waypost.web import Token

pytestmark = pytest.mark.promise("FACE-3")
SECRET = "correct-horse-battery"


class Markup(HTMLParser):
    """What a page is made of: scripts, handlers, inline styles, links, forms, ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self, attribute: str) -> list[str]:
        return [given[attribute] or "" for _, given in self.tags if attribute in given]


def links(answer: Answer) -> list[str]:
    return Markup(answer.text).values("href")


def form_token(answer: Answer) -> str:
    found = re.search(r'name="csrf_token" value="([^"]+)"', answer.text)
    assert found is not None, answer.text
    return found[1]


SCREENS = (
    "/s/main", "/s/main/queues/orders", "/s/main/queues/orders?state=dead&minutes=1440",
    "/s/main/queues/orders?state=delayed", "/s/main/queues/orders?state=leased", "/s/main/queues/orders/dead",
    "/s/main/schedules", "/s/main/timers",
    "/s/main/workers", "/s/main/search", "/s/main/search?q=ord", "/s/main/search?q=000000000000000000000000",
    "/s/main/queues/orders/do/configure", "/s/main/queues/orders/do/redrive?all=true",
    "/s/main/queues/orders/do/purge?state=ready", "/s/main/queues/orders/do/remove",
    "/s/main/queues/orders/do/cancel?key=k", "/s/main/queues/orders/do/reschedule?key=timer",
    "/s/main/charts", "/s/main/charts?queue=orders&queue=reports&minutes=60", "/s/main/timers?queue=orders",
    "/s/main/do/save_schedule?queue=reports&key=rollup", "/s/main/do/stop_worker?name=w",
    "/s/main/do/save_schedule", "/s/main/do/trigger_schedule?queue=reports&key=rollup",
    "/s/main/do/backfill_schedule?queue=reports&key=rollup",
    "/s/main/do/backfill_schedule?queue=reports&key=rollup&start=2026-03-01T00:00&end=2026-03-02T00:00",
    "/s/main/queues/orders/do/bulk_cancel?state=ready&key_prefix=k", "/s/main/queues/orders/do/bulk_redrive",
)  # fmt: skip


@pytest.fixture
def shop(site: Site) -> Site:
    site.post.publish("orders", {"id": 7}, key="k", group="acme")
    site.bury("orders", 1, 2, reason="rejected", error="no such customer")
    site.post.publish("orders", "later", delay=3600, key="timer")
    site.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", key="rollup", body={})
    return site


def test_every_screen_is_drawn_and_its_links_lead_somewhere(shop: Site) -> None:
    client = shop.client()
    known: set[str] = set()
    for path in SCREENS:
        answer = client.get(path, headers={"accept": "text/html"})
        assert answer.status == 200, (path, answer.text)
        assert answer.header("content-type").startswith("text/html")
        known |= {link.partition("#")[0] for link in links(answer)}
    for link in sorted(known - {""}):
        assert client.get(link, headers={"accept": "text/html"}).status in (200, 303), link


def test_pages_have_no_inline_script_or_style_and_fetch_nothing_from_elsewhere(shop: Site) -> None:
    client = shop.client()
    for path in SCREENS:
        page = Markup(client.get(path).text)
        for tag, given in page.tags:
            assert "style" not in given, (path, tag)
            assert not [name for name in given if name.startswith("on")], (path, tag)
            if tag == "script":
                assert (given.get("src") or "").startswith("/static/")
            assert tag not in ("iframe", "object", "embed", "base", "style")
        outside = [link for link in [*page.values("href"), *page.values("src")] if not link.startswith(("/", "#"))]
        assert outside == []
        ids = page.values("id")
        assert len(ids) == len(set(ids)), path


def test_everything_is_escaped_on_every_screen(memory: Site) -> None:
    """Each hostile text is a body, key, group, header, error, reason, worker, schedule and correlation id."""
    for text in HOSTILE_TEXTS:
        site_ids = fill_store(memory, text)
        client = memory.client()
        paths = [*SCREENS, *(f"/s/main/queues/orders/messages/{id}" for id in site_ids)]
        searches = (
            {"q": text},
            {"q": text, "by": "header", "queue": "orders"},
            {"q": text[:100], "by": text, "queue": text},
        )
        paths += [f"/s/main/search?{urlencode(query)}" for query in searches]
        for path in paths:
            page = Markup(client.get(path).text)
            for tag, given in page.tags:
                assert not [name for name in given if name.startswith("on") or name == "style"], (path, text, tag)
                if tag == "script":
                    assert given in SCRIPTS, (path, text)
                assert tag in KNOWN_TAGS, (path, text, tag)
            for link in [*page.values("href"), *page.values("action"), *page.values("src")]:
                assert link.startswith(("/", "#")), (path, text, link)
                assert not link.startswith("//"), (path, text, link)
        break_down(memory)


SCRIPTS = ({"src": "/static/theme.js"}, {"type": "module", "src": "/static/main.js"})
KNOWN_TAGS = frozenset((
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "nav", "form", "input", "div",
    "button", "span", "p", "main", "h1", "h2", "section", "ul", "li", "table", "thead", "tr", "th", "tbody", "td",
    "footer", "dialog", "dl", "dt", "dd", "kbd", "label", "select", "option", "img", "time", "b", "code", "details",
    "summary", "pre", "svg", "line", "path", "polyline", "rect", "figure", "figcaption", "ol", "q", "textarea",
    "del", "ins", "datalist", "text",
))  # fmt: skip


def break_down(site: Site) -> None:
    """Empty the store for the next text."""
    for schedule in site.post.schedules():
        site.post.remove_schedule(schedule.key, queue=schedule.queue)
    for state in ("ready", "delayed", "dead"):
        site.post.purge("orders", state)


# ---- actions -------------------------------------------------------------------------------------------------------


def send_form(client: Client, page: str, action: str, fields: dict[str, str], **headers: str) -> Answer:
    """Fill in a form of a page, and follow the answer."""
    token = form_token(client.get(page))
    answer = client.form(action, {"csrf_token": token} | fields, headers)
    if answer.status == 303:
        return client.get(answer.header("location"))
    return answer


def test_forms_pause_and_resume_and_report_it_once(shop: Site) -> None:
    client = shop.client()
    page = "/s/main/queues/orders"
    answer = send_form(client, page, f"{page}/do/pause", {})
    assert "Orders is paused." in answer.text
    assert shop.post.stats("orders").paused
    assert "Orders is paused." not in client.get(page).text
    send_form(client, page, f"{page}/do/resume", {})
    assert not shop.post.stats("orders").paused


def test_a_page_lists_changed_settings_before_they_are_saved(shop: Site) -> None:
    client = shop.client()
    page = "/s/main/queues/orders/do/configure"
    fields = {name: value for name, value in form_values(client.get(page).text).items() if name != "csrf_token"}
    preview = send_form(client, page, page, fields | {"lease": "30", "max_pending": "500", "rate": "5/s"})
    assert "<del>60.0 s</del>" in preview.text
    assert "<ins>30.0 s</ins>" in preview.text
    assert "Seconds that a worker holds a message" in preview.text
    assert "waypost configure orders" in preview.text
    assert client.api("/queues/orders")["settings"]["lease"] == 60.0
    confirmed = form_values(preview.text)
    done = client.form(page, confirmed)
    assert done.status == 303
    settings = client.api("/queues/orders")["settings"]
    assert (settings["lease"], settings["max_pending"], settings["rate"]) == (30.0, 500, "5/s")
    same = send_form(client, page, page, {"step": "preview", "lease": "30"})
    assert "Nothing was changed." in same.text
    wrong = send_form(client, page, page, {"step": "preview", "lease": "soon"})
    assert wrong.status == 422


def form_values(text: str) -> dict[str, str]:
    """The fields of the last form of a page, as a browser would send them."""
    form = text[text.rindex('<form method="post" class="write"') :]
    values = dict(re.findall(r'<input[^>]*name="([^"]+)"[^>]*value="([^"]*)"', form))
    for name, options in re.findall(r'<select[^>]*name="([^"]+)">(.*?)</select>', form, re.DOTALL):
        values[name] = re.findall(r"<option selected>([^<]*)", options)[0]
    return values


def test_a_form_sent_twice_runs_once(shop: Site) -> None:
    client = shop.client()
    confirm = client.get("/s/main/do/trigger_schedule?queue=reports&key=rollup")
    fields = form_values(confirm.text)
    for _ in range(2):
        assert client.form("/s/main/do/trigger_schedule", fields).status == 303
    assert shop.post.ledger("reports").published == 1


@pytest.mark.promise("CRON-8", "FACE-3")
def test_a_past_interval_is_counted_first_and_then_backfilled_once(shop: Site) -> None:
    client = shop.client()
    page = "/s/main/do/backfill_schedule"
    schedule = {"queue": "reports", "key": "rollup"}
    assert f"{page}?queue=reports&amp;key=rollup" in client.get("/s/main/schedules").text
    first = client.get(page, None, **schedule).text
    assert "Publish " not in first, "nothing is published without a count"
    interval = {"start": "2026-03-01T00:00:00", "end": "2026-03-08T00:00:00"}
    counted = client.get(page, None, **schedule, **interval).text
    assert "<b>7</b> messages would be published" in counted
    assert "waypost schedules backfill rollup --queue reports --from 2026-03-01T00:00:00+00:00" in counted
    assert shop.post.ledger("reports").published == 0
    changed = client.press(page, counted, start="2026-03-02T00:00").header("location")
    assert "start=2026-03-02T00%3A00&" in changed, "an interval that was not counted is counted first"
    assert "<b>6</b> messages would be published" in client.get(changed).text
    assert shop.post.ledger("reports").published == 0
    for start in ("2026-03-01T00:00:00", "2026-03-01T00:00"):
        assert client.press(page, counted, start=start).header("location") == "/s/main/schedules"
    assert shop.post.ledger("reports").published == 7
    again = client.get(page, None, **schedule, **interval).text
    assert "Nothing would be published; 7 instants have fired already" in again
    sent = schedule | {"start": "2026-03-01T00:00:00Z", "end": "2026-03-09T00:00:00Z"}
    dry = client.write("/schedules/backfill", sent | {"dry_run": True}).json()
    assert (dry["published"], dry["skipped"], dry["changed"]) == (1, 7, False)
    done = client.write("/schedules/backfill", sent).json()
    assert (done["published"], done["text"].startswith("published 1 message")) == (1, True)
    early = client.get(page, None, **schedule, start="0001-01-01T00:00:00+05:00", end="2026-03-08T00:00")
    assert (early.status, "is no time" in early.text) == (200, True)
    naive = client.write("/schedules/backfill", sent | {"start": "2026-03-01T00:00:00"})
    assert naive.problem == "invalid-time"
    wrong = client.get(page, None, **schedule, start="2026-03-08T00:00", end="2026-03-01T00:00")
    assert (wrong.status, 'role="alert"' in wrong.text) == (200, True)
    logged = [one["text"] for one in client.api("/actions")["actions"] if one["ok"]]
    assert [text.partition(" of ")[0] for text in logged] == ["published 1 message", "published 7 messages"]


def test_a_schedule_is_made_by_a_form(shop: Site) -> None:
    client = shop.client()
    page = "/s/main/do/save_schedule"
    fields = {"name": "nightly", "queue": "reports", "cron": "0 2 * * *", "every": "", "tz": "UTC", "missed": "once",
              "body": '{"a": 1}'}  # fmt: skip
    assert "nightly" in send_form(client, page, page, fields).text
    (saved,) = [one for one in shop.post.schedules() if one.name == "nightly"]
    assert (saved.cron, saved.missed, saved.body) == ("0 2 * * *", "once", {"a": 1})
    wrong = send_form(client, page, page, fields | {"cron": "99 * * * *"})
    assert wrong.status == 422
    assert "99" in wrong.text
    assert send_form(client, page, page, fields | {"body": "{"}).status == 422


def test_a_purge_wants_the_name_of_the_queue(shop: Site) -> None:
    client = shop.client()
    page = "/s/main/queues/orders/do/purge?state=ready"
    action = "/s/main/queues/orders/do/purge"
    assert send_form(client, page, action, {"state": "ready", "confirm": "other"}).status == 422
    assert shop.post.stats("orders").ledger.ready == 1
    assert "Removed 1 message" in send_form(client, page, action, {"state": "ready", "confirm": "orders"}).text


def test_a_filtered_list_does_not_offer_to_purge_what_it_does_not_have(shop: Site) -> None:
    purge = "/s/main/queues/orders/do/purge?state=ready"
    assert purge in links(shop.client().get("/s/main/queues/orders?state=ready"))
    for filtered in ("key=k", "group=eu"):
        assert purge not in links(shop.client().get(f"/s/main/queues/orders?state=ready&{filtered}"))


def test_a_form_without_its_token_or_of_another_site_is_refused(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client()
    page = "/s/main/queues/orders"
    token = form_token(client.get(page))
    assert client.form(f"{page}/do/pause", {}).status == 403
    assert client.form(f"{page}/do/pause", {"csrf_token": token[:-1]}).status == 403
    elsewhere = {"origin": "https://evil.example"}
    assert client.form(f"{page}/do/pause", {"csrf_token": token}, elsewhere).status == 403
    assert not memory.post.stats("orders").paused


def test_what_a_user_may_not_do_has_no_button_and_is_refused(memory: Site) -> None:
    memory.bury("orders", 1)
    reader = Token("reader", "reader-reader-reader", frozenset(("read",)))
    client = memory.client(tokens=[reader])
    client.form("/sign-in", {"secret": reader.secret})
    page = client.get("/s/main/queues/orders").text
    assert "/do/" not in page
    assert client.get("/s/main/queues/orders/do/purge?state=dead").status == 403
    assert client.form("/s/main/queues/orders/do/pause", {}).status == 403
    only_reading = memory.client(read_only=True)
    assert "/do/" not in only_reading.get("/s/main/queues/orders").text
    assert "read-only" in only_reading.get("/s/main").text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nset-cookie: x"])
def test_a_form_never_sends_the_browser_to_another_site(memory: Site, target: str) -> None:
    memory.post.publish("orders", 1)
    client = memory.client(secret=SECRET)
    signed_in = client.form("/sign-in", {"secret": SECRET, "return_to": target})
    assert (signed_in.status, signed_in.header("location")) == (303, "/")
    token = form_token(client.get("/s/main/queues/orders"))
    done = client.form("/s/main/queues/orders/do/pause", {"csrf_token": token, "return_to": target})
    assert done.header("location") == "/s/main/queues/orders"


# ---- signing in ----------------------------------------------------------------------------------------------------


def test_people_sign_in_with_the_secret_and_out_again(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client(secret=SECRET)
    answer = client.get("/s/main/queues/orders?state=dead")
    assert answer.status == 303
    assert answer.header("location") == "/sign-in?return_to=%2Fs%2Fmain%2Fqueues%2Forders%3Fstate%3Ddead"
    assert "Secret" in client.get(answer.header("location")).text
    wrong = client.form("/sign-in", {"secret": "wrong" * 4})
    assert wrong.status == 401
    assert "not known" in wrong.text
    done = client.form("/sign-in", {"secret": SECRET, "return_to": "/s/main/workers"})
    assert (done.status, done.header("location")) == (303, "/s/main/workers")
    cookie = done.header("set-cookie").lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    page = client.get("/s/main")
    assert page.status == 200
    before = dict(client.cookies)
    client.form("/sign-out", {"csrf_token": form_token(page)})
    client.cookies = before
    assert client.get("/s/main").status == 303, "a session that was ended is accepted"


def test_signing_in_is_throttled(memory: Site) -> None:
    client = memory.client(secret=SECRET)
    statuses = [client.form("/sign-in", {"secret": "wrong" * 4}).status for _ in range(6)]
    assert statuses == [401, 401, 401, 401, 401, 429]
    assert client.form("/sign-in", {"secret": SECRET}).status == 429


def test_problems_are_pages_for_browsers_and_documents_for_scripts(memory: Site) -> None:
    client = memory.client()
    page = client.get("/s/main/queues/none", headers={"accept": "text/html"})
    assert (page.status, "There is no queue" in page.text or "there is no queue" in page.text) == (404, True)
    missing = client.get("/nothing", headers={"accept": "text/html"})
    assert missing.header("content-type").startswith("text/html")
    assert client.get("/nothing").problem == "no-such-operation"
    assert client.get("/s/other").status == 404
    assert client.get("/s/main/do/explode").status == 404
    assert client.get("/static/../app.py").status == 404


def test_several_stores_have_a_page_of_their_own(memory: Site) -> None:
    from waypost.web import create_app

    client = Client(create_app({"shop": memory.served, "bills": "memory://web-bills"}), memory.runner)
    memory.post.publish("orders", 1)
    page = client.get("/")
    assert [link for link in links(page) if link.startswith("/s/")] == ["/s/shop", "/s/bills"]
    assert client.get("/s/shop").status == client.get("/s/bills").status == 200


def test_a_store_that_is_away_is_reported_on_the_page_which_recovers(memory: Site) -> None:
    from tests.unit.clients import ShakyStore
    from waypost import AsyncWaypost
    from waypost.web import create_app

    store: Any = ShakyStore()
    client = Client(create_app(AsyncWaypost(store=store, retry_budget=0)), memory.runner)
    store.faults = ["refuse"] * 40
    page = client.get("/s/main")
    assert page.status == 200
    assert "The store cannot be read" in page.text
    assert client.get("/s/main/workers").status == 503
    store.faults = []
    assert "All is well" in client.get("/s/main").text
