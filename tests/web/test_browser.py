"""The pages in a real Chromium: every screen on every store, live updates, keys, hostile texts, no scripts.

What the pages change is in test_browser_actions.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.fault.proxy import Proxy
from tests.web.browser import PHONE, PROGRAM, WORKER, Shop, Tab, wait_until
from tests.web.hostile import HOSTILE_TEXTS, fill_store
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = [
    pytest.mark.promise("FACE-3"), pytest.mark.needs(PROGRAM), pytest.mark.xdist_group("browser"),
]  # fmt: skip
SECRET = "correct-horse-battery"
STORES = ("sqlite", "valkey", "postgres")


def place_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> tuple[str, str]:
    """The URL and namespace of a new store."""
    namespace = fresh_namespace()
    if kind == "sqlite":
        return f"sqlite:///{folder / 'shop.db'}", namespace
    url: str = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        migrate(url, namespace=namespace)
    return url, namespace


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A shop on SQLite, for what does not depend on the store."""
    with Shop(f"sqlite:///{tmp_path / 'shop.db'}") as made:
        made.fill()
        yield made


@pytest.fixture(params=STORES)
def each_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop on each store."""
    with Shop(*place_of(request.param, request, tmp_path)) as made:
        made.fill()
        yield made


@pytest.fixture
def tab(chromium: Any, shop: Shop) -> Iterator[Tab]:
    with Tab(chromium, shop.server) as made:
        yield made
    assert made.complaints == []


@pytest.fixture
def each_tab(chromium: Any, each_shop: Shop) -> Iterator[Tab]:
    with Tab(chromium, each_shop.server) as made:
        yield made
    assert made.complaints == []


def screens(shop: Shop, *, variants: bool = True) -> list[str]:
    """A path for every page of the app: of each route one, and its variants."""
    dead, waiting = (shop.post.peek("orders", 1, state)[0].id for state in ("dead", "ready"))
    sample = {"{store}": "main", "{queue}": "orders", "{id}": dead, "{name:path}": WORKER, "{name}": WORKER}
    found = []
    for route in shop.server.app.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None)
        # These stores have no lake.
        others = ("/events", "{action}", "/lake", "/lake/report")
        if path.startswith("/s/") and "GET" in (methods or ()) and not path.endswith(others):
            for name, value in sample.items():
                path = path.replace(name, value)
            found.append(path)
    assert not [path for path in found if "{" in path], "a page has a parameter that this test does not know"
    pages = [path for path in found if not path.endswith((".csv", ".json", "/export"))]
    orders, mails = "/s/main/queues/orders", "/s/main/queues/mails"
    timer = shop.post.peek("mails", 1, "delayed")[0].id
    of_schedule = "queue=reports&key=rollup"
    return pages if not variants else [
        *pages,
        *(f"{orders}?state={state}&minutes=1440" for state in ("leased", "delayed", "waiting", "dead", "done")),
        f"{orders}/messages/{waiting}", f"{mails}/messages/{timer}", "/s/main/search?q=or",
        "/s/main/charts?queue=orders&queue=mails&minutes=1440",
        f"/s/main/search?q={'0' * 24}", "/s/main/search?q=acme&by=group&queue=orders",
        f"{orders}/do/configure", f"{orders}/do/redrive?all=true", f"{orders}/do/purge?state=ready",
        f"{orders}/do/remove",
        f"{orders}/do/bulk_redrive?reason=rejected", f"{orders}/do/bulk_purge", f"{orders}/do/edit_dead?id={dead}",
        f"{orders}/do/cancel?id={waiting}", f"{mails}/do/reschedule?id={timer}",
        f"/s/main/do/stop_worker?name={WORKER}", f"/s/main/do/quiet_worker?name={WORKER}",
        "/s/main/do/save_schedule",
        *(f"/s/main/do/{name}_schedule?{of_schedule}" for name in ("save", "trigger", "backfill", "remove")),
        f"{orders}/do/bulk_cancel?state=ready&older_than=7d",
    ]  # fmt: skip


def wider_than_the_screen(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_axe_finds_nothing_on_any_screen_light_or_dark(tab: Tab, shop: Shop) -> None:
    from axe_playwright_python.sync_playwright import Axe

    axe, once = Axe(), screens(shop, variants=False)
    only = {"resultTypes": ["violations"]}

    def check(path: str, scheme: str, **options: Any) -> None:
        violations = axe.run(page, options=only | options).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == [], (path, scheme)

    for path in screens(shop):
        page = tab.go(path)
        check(path, "light")
        if path in once:
            # Of a dark page only the colors differ, and a page and its variants have the same.
            page.emulate_media(color_scheme="dark")
            check(path, "dark", runOnly=["color-contrast"])
            page.emulate_media(color_scheme="light")


def test_every_screen_fits_a_phone_and_a_desk_on_every_store(each_tab: Tab, each_shop: Shop) -> None:
    desk = each_tab.page.viewport_size
    for path in screens(each_shop, variants=each_shop.post.store.kind == "sqlite"):
        page = each_tab.go(path)
        assert page.locator("main").inner_text().strip(), path
        assert wider_than_the_screen(page) <= 0, path
        page.set_viewport_size(PHONE)
        assert wider_than_the_screen(page) <= 0, (path, "phone")
        page.set_viewport_size(desk)


def test_what_happens_in_the_store_appears_on_an_open_page(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main")
    assert page.locator("tr", has_text="invoices").count() == 0
    shop.post.publish("invoices", 1)
    page.locator("tr", has_text="invoices").wait_for()
    page = tab.go("/s/main/queues/invoices")
    page.get_by_role("heading", name="invoices").wait_for()
    shop.post.publish_many("invoices", range(4))
    page.locator("#messages tbody tr").nth(4).wait_for()


def test_a_message_is_found_with_the_keyboard_alone(tab: Tab, shop: Shop) -> None:
    published = shop.post.publish("orders", "find me")
    page = tab.go("/s/main")
    page.locator("#show-keys").wait_for()  # the scripts run
    page.keyboard.press("/")
    page.keyboard.type(published.id)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=published.id).wait_for()
    page.locator("#show-keys").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.locator("table.queues").wait_for()
    page.locator("#show-keys").wait_for()
    page.keyboard.press("j")
    first = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") != first
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.textContent") == first
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=first).wait_for()


def test_eight_tabs_are_live_with_one_stream_and_hidden_ones_cost_nothing(each_tab: Tab, each_shop: Shop) -> None:
    tab, shop = each_tab, each_shop
    pages = [tab.page, *(tab.open_page() for _ in range(7))]
    for page in pages:
        page.goto(f"{shop.server.url}/s/main")
    wait_until(lambda: shop.server.streams == 1, "the tabs have no stream")
    shop.post.publish("invoices", 1)
    for page in pages:
        page.locator("tr", has_text="invoices").wait_for()
    assert shop.server.streams == 1
    for page in pages:
        page.evaluate("""() => {
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
    wait_until(lambda: shop.server.streams == 0, "a hidden tab keeps its stream")
    wait_until(lambda: not shop.server.watch.is_reading, "the loop runs without a page")


def test_sixty_hostile_texts_appear_as_text_on_every_screen(each_tab: Tab, each_shop: Shop) -> None:
    """Each text is a body, key, group, header, error, reason, worker, host, schedule and correlation id."""
    tab, shop = each_tab, each_shop
    assert len(set(HOSTILE_TEXTS)) == 60
    ids = [id for text in HOSTILE_TEXTS for id in fill_store(shop, text)]
    requested: list[str] = []
    tab.page.on("request", lambda request: requested.append(request.url))
    orders = "/s/main/queues/orders"
    messages = [f"{orders}/messages/{id}" for id in ids[:: len(ids) // 12]]
    workers = [f"/s/main/workers/{quote(text, safe='')}" for text in HOSTILE_TEXTS[:6]]
    for path in [*screens(shop, variants=shop.post.store.kind == "sqlite"), *messages, *workers]:
        page = tab.go(path)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.evaluate("window.hit") is None, path
    assert [url for url in requested if not url.startswith(shop.server.url)] == []
    visible = {
        "errors": tab.go(f"{orders}/dead").locator("li.panel pre").all_inner_texts(),
        "workers": tab.go("/s/main/workers").locator("li h2").all_inner_texts(),
    }
    simple = [text for text in HOSTILE_TEXTS if text.isprintable() and "  " not in text]
    for place, found in visible.items():
        texts = {text.strip() for text in found} | {text.partition(":")[2].strip() for text in found}
        assert [text for text in simple if text.strip() not in texts] == [], f"not shown as it is among {place}"


def test_keys_are_typed_in_a_field_and_not_followed(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main")
    page.locator("#show-keys").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("j/?gs")
    box = page.locator("#search")
    assert box.input_value() == "j/?gs"
    page.keyboard.press("Escape")
    assert not box.evaluate("one => one === document.activeElement")
    assert page.url.endswith("/s/main")


def test_every_section_has_its_keys(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main")
    for key, name in (("s", "Schedules"), ("t", "Timers"), ("w", "Workers"), ("c", "Charts"), ("a", "Actions")):
        page.locator("#show-keys").wait_for()
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.get_by_role("heading", name=name, exact=True).wait_for()
        assert page.locator(".sections [aria-current]").inner_text() == name


def test_a_row_keeps_its_focus_while_its_page_is_updated(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main?order=name")
    page.locator("#show-keys").wait_for()
    for _ in range(9):
        page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "reports", "the last row is the end"
    shop.post.publish("invoices", 1)
    page.locator("tr", has_text="invoices").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "reports"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.textContent") == "orders"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="orders").wait_for()


def test_a_button_keeps_its_focus_while_its_page_is_updated(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/queues/orders")
    page.get_by_role("button", name="Pause").focus()
    shop.post.publish_many("orders", range(3))
    page.locator("#queue-head .figures", has_text="4 ready").wait_for()
    page.keyboard.press("Enter")
    page.get_by_text("Orders is paused.").wait_for()
    assert shop.post.stats("orders").paused


def test_the_first_page_has_the_next_step(tab: Tab, shop: Shop) -> None:
    shop.post.pause("orders")
    page = tab.go("/s/main")
    page.locator("#status", has_text="orders needs attention: paused").wait_for()
    page.get_by_role("button", name="Resume orders").click()
    page.get_by_text("Orders is resumed.").wait_for()
    assert not shop.post.stats("orders").paused


def test_a_queue_is_paused_with_the_keyboard_alone(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/queues/orders")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Pause":
            break
    page.keyboard.press("Enter")
    page.get_by_text("Orders is paused.").wait_for()
    assert shop.post.stats("orders").paused


def test_reading_and_acting_work_without_scripts(chromium: Any, shop: Shop) -> None:
    with Tab(chromium, shop.server, java_script_enabled=False) as tab:
        for path in screens(shop):
            assert tab.go(path).locator("main").inner_text().strip(), path
        page = tab.go("/s/main")
        page.locator("#queues").get_by_role("link", name="orders").click()
        page.get_by_role("button", name="Pause").click()
        page.get_by_text("Orders is paused.").wait_for()
        page.locator("#messages tbody a").first.click()
        page.get_by_role("heading", name="Timeline").wait_for()
    assert shop.post.stats("orders").paused


def test_people_sign_in_and_come_back_to_their_page(chromium: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'secret.db'}"
    with Shop(url, secret=SECRET) as shop, Tab(chromium, shop.server) as tab:
        shop.post.publish("orders", 1)
        page = tab.page
        page.goto(f"{shop.server.url}/s/main/queues/orders?state=dead")
        page.get_by_label("Secret").fill("not the right one")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("this secret is not known").wait_for()
        page.goto(f"{shop.server.url}/s/main/queues/orders?state=dead")
        page.get_by_label("Secret").fill(SECRET)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/s/main/queues/orders?state=dead")
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")


@pytest.mark.parametrize("kind", ["valkey", "postgres"])
def test_pages_report_a_slow_and_a_failing_store_and_recover(
    chromium: Any, kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("watching", "reading"):
        monkeypatch.setattr(f"waypost.web.{module}.ANSWER_SECONDS", 2.0)
    url, namespace = place_of(kind, request, tmp_path)
    port = int(re.findall(r":(\d+)", url)[-1])
    with Proxy(port, bytes_per_second=500_000) as proxy:
        served = url.replace(f":{port}", f":{proxy.port}")
        with Shop(url, namespace, served_url=served) as shop, Tab(chromium, shop.server) as tab:
            shop.post.configure("orders", lease=30)
            overview, detail = tab.go("/s/main"), tab.open_page()
            detail.goto(f"{shop.server.url}/s/main/queues/orders")
            for fault in (proxy.silence, proxy.refuse):
                overview.get_by_text("All is well").wait_for()
                detail.locator("#connection").wait_for(state="hidden")
                fault()
                if fault == proxy.refuse:
                    proxy.cut()
                overview.locator("#status.alarm", has_text="store").wait_for()
                detail.locator("#connection", has_text="store").wait_for()
                proxy.heal()
            overview.get_by_text("All is well").wait_for()
            detail.locator("#connection").wait_for(state="hidden")
            shop.post.publish("invoices", 1)
            overview.locator("tr", has_text="invoices").wait_for()
            assert detail.locator("#queue-head h1").inner_text().endswith("orders")
