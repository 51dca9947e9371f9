"""The pages in a real Chromium: every screen, the actions, live updates, keys, sixty hostile texts, no scripts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from scripts import system_parts
from tests.unit.clients import ShakyStore
from tests.web.hostile import HOSTILE_TEXTS, fill_store
from waypost import AsyncWaypost, Waypost
from waypost.web import create_app
from waypost.web.server import bind

PROGRAM = "chromium-headless-shell"
pytestmark = [
    pytest.mark.promise("FACE-3"), pytest.mark.needs(PROGRAM), pytest.mark.xdist_group("browser"),
]  # fmt: skip
SECRET = "correct-horse-battery"
SECONDS_MAX = 20.0
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Server:
    """The app on a port of its own, in a thread."""

    def __init__(self, stores: Any, **options: Any) -> None:
        self.app = create_app(stores, **options)
        self._listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), daemon=True)
        self._thread.start()

    @property
    def watch(self) -> Any:
        return self.app.state.service.places["main"].watch

    @property
    def streams(self) -> int:
        """Pages that the server keeps up to date."""
        return len(self.watch._pages)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS_MAX)
        self._listening.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if not system_parts.is_there(PROGRAM):
        pytest.skip(f"needs {PROGRAM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to have one as root
        path = system_parts.PARTS[PROGRAM][0]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Shop:
    """A store with some of everything, and a server that shows it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.post = Waypost(url)
        self.server = Server(url, **options)

    def bury(self, queue: str, *bodies: object, reason: str = "rejected", error: str | None = None) -> list[str]:
        ids = [self.post.publish(queue, body, priority=9).id for body in bodies]
        for _ in bodies:
            with self.post.receive(queue) as message:
                assert message is not None
                message.dead(reason, error)
        return ids


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    made = Shop(url)
    made.post.publish("orders", {"id": 7}, key="order:7", group="acme")
    made.post.publish("mails", "later", delay=3600, key="welcome")
    made.bury("orders", 1, 2, error="no such customer")
    made.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", key="rollup", body={})
    yield made
    made.server.stop()
    made.post.close()


class Tab:
    """A page of the browser that notes every complaint."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": DESK} | options))
        self.context.set_default_timeout(SECONDS_MAX * 1000)
        self.server = server
        self.complaints: list[str] = []
        self.page = self.open_page()

    def open_page(self) -> Any:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console", lambda line: self.complaints.append(line.text) if line.type in ("error", "warning") else None
        )
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        return page

    def note_line(self, line: Any) -> None:
        if line.type in ("error", "warning"):
            self.complaints.append(line.text)

    def go(self, path: str) -> Any:
        answer = self.page.goto(self.server.url + path)
        assert answer.status == 200, (path, answer.status)
        return self.page


@pytest.fixture
def tab(chromium: Any, shop: Shop) -> Iterator[Tab]:
    made = Tab(chromium, shop.server)
    yield made
    made.context.close()
    assert made.complaints == []


def screens(shop: Shop) -> list[str]:
    dead = next(iter(shop.post.dead_letters("orders"))).id
    return [
        "/s/main", "/s/main/queues/orders", "/s/main/queues/orders?state=dead", "/s/main/queues/orders/dead",
        f"/s/main/queues/orders/messages/{dead}", "/s/main/schedules", "/s/main/timers", "/s/main/workers",
        "/s/main/search?q=or", "/s/main/queues/orders/do/configure", "/s/main/queues/orders/do/redrive?all=true",
        "/s/main/do/save_schedule",
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
def test_every_screen_fits_and_neither_browser_nor_axe_complains(
    chromium: Any, shop: Shop, size: dict[str, int], scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = Tab(chromium, shop.server, viewport=size, color_scheme=scheme)
    for path in screens(shop):
        page = tab.go(path)
        violations = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == [], path
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, (path, wider)
    tab.context.close()
    assert tab.complaints == []


def test_what_happens_in_the_store_appears_on_an_open_page(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main")
    assert page.locator("tr", has_text="invoices").count() == 0
    shop.post.publish("invoices", 1)
    page.locator("tr", has_text="invoices").wait_for()
    page = tab.go("/s/main/queues/invoices")
    page.get_by_role("heading", name="invoices").wait_for()
    shop.post.publish_many("invoices", range(4))
    page.locator("#messages tbody tr").nth(4).wait_for()


def test_a_queue_is_paused_and_resumed_by_a_click(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/queues/orders")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Orders is paused.").wait_for()
    assert shop.post.stats("orders").paused
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("Orders is resumed.").wait_for()
    assert not shop.post.stats("orders").paused


def test_dead_letters_are_redriven_from_their_group(tab: Tab, shop: Shop) -> None:
    shop.bury("orders", 3, error="out of stock")
    page = tab.go("/s/main/queues/orders/dead")
    group = page.locator("li", has_text="out of stock")
    group.get_by_role("link", name="Redrive these").click()
    assert "waypost bulk start orders redrive" in page.locator(".forms").inner_text()
    page.get_by_role("button", name="Redrive").click()
    page.locator(".notice.done", has_text="Sending dead letters again has begun").wait_for()
    # The page of actions shows its end without a reload.
    page.get_by_text("1 sent again").wait_for()
    assert shop.post.ledger("orders").dead_kept == 2


def test_settings_are_changed_after_the_page_of_the_difference(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/queues/orders")
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("max_running").fill("5")
    page.get_by_role("button", name="See what would change").click()
    assert page.locator("ins").inner_text() == "5"
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Changed max_running of orders.").wait_for()
    assert shop.post.policy("orders").max_running == 5


def test_a_message_is_cancelled_a_timer_moved_and_a_queue_purged(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/queues/orders?key=order:7")
    page.locator("#messages tbody a").click()
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Cancel the message").click()
    page.get_by_text("The message is cancelled.").wait_for()
    page = tab.go("/s/main/queues/mails?state=delayed")
    page.locator("#messages tbody a").click()
    page.get_by_role("link", name="Move").click()
    page.get_by_label("Seconds from now").fill("60")
    page.get_by_role("button", name="Move").click()
    page.get_by_text("Welcome is moved.").wait_for()
    page = tab.go("/s/main/queues/orders/dead")
    page.get_by_role("link", name="Purge all").click()
    page.get_by_label("Type the name of the queue").fill("orders")
    page.get_by_role("button", name="Purge").click()
    page.get_by_text("Removed 2 messages (dead) of orders.").wait_for()
    assert shop.post.ledger("orders").dead_kept == 0


def test_schedules_are_made_paused_triggered_and_removed(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main/schedules")
    page.get_by_role("link", name="New schedule").click()
    page.get_by_label("Name", exact=True).fill("nightly")
    page.get_by_label("Queue", exact=True).fill("reports")
    page.get_by_label("Cron pattern").fill("0 2 * * *")
    page.get_by_role("button", name="Save").click()
    row = page.locator("tr", has_text="nightly")
    row.get_by_role("button", name="Pause").click()
    page.locator("tr", has_text="nightly").get_by_role("button", name="Resume").wait_for()
    page.locator("tr", has_text="nightly").get_by_role("link", name="Trigger").click()
    page.get_by_role("button", name="Trigger").click()
    page.get_by_text("Published message").wait_for()
    assert shop.post.ledger("reports").published == 1
    page.locator("tr", has_text="nightly").get_by_role("link", name="Remove").click()
    page.get_by_role("button", name="Remove").click()
    page.get_by_text("is removed.").wait_for()
    assert [one.name for one in shop.post.schedules()] == ["rollup"]


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


def test_eight_tabs_are_live_with_one_stream_and_hidden_ones_cost_nothing(tab: Tab, shop: Shop) -> None:
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


def test_sixty_hostile_texts_appear_as_text(tab: Tab, shop: Shop) -> None:
    assert len(set(HOSTILE_TEXTS)) == 60
    ids = [id for text in HOSTILE_TEXTS for id in fill_store(shop, text)]
    requested: list[str] = []
    tab.page.on(
        "request", lambda request: None if request.url.startswith(shop.server.url) else requested.append(request.url)
    )
    orders = "/s/main/queues/orders"
    paths = [
        "/s/main",
        orders,
        f"{orders}?state=dead",
        f"{orders}?state=delayed",
        f"{orders}/dead",
        "/s/main/schedules",
    ]
    paths += [f"{orders}/messages/{id}" for id in ids[:: len(ids) // 12]]
    for path in paths:
        page = tab.go(path)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.evaluate("window.hit") is None, path
    assert [url for url in requested if not url.startswith(shop.server.url)] == []
    letters = tab.go(f"{orders}/dead").locator("li.panel pre").all_inner_texts()
    found = {text.strip() for text in letters}
    missing = [text for text in HOSTILE_TEXTS if text.isprintable() and "\n" not in text and text.strip() not in found]
    assert missing == [], "a text is not shown as it is"


def test_reading_and_acting_work_without_scripts(chromium: Any, shop: Shop) -> None:
    tab = Tab(chromium, shop.server, java_script_enabled=False)
    page = tab.go("/s/main")
    page.get_by_role("link", name="orders").click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Orders is paused.").wait_for()
    page.locator("#messages tbody a").first.click()
    page.get_by_role("heading", name="Timeline").wait_for()
    tab.context.close()
    assert shop.post.stats("orders").paused


def test_people_sign_in_and_come_back_to_their_page(chromium: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'secret.db'}"
    shop = Shop(url, secret=SECRET)
    shop.post.publish("orders", 1)
    tab = Tab(chromium, shop.server)
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
    tab.context.close()
    shop.server.stop()
    shop.post.close()


def test_a_page_reports_that_the_store_is_away_and_recovers(chromium: Any) -> None:
    store: Any = ShakyStore()
    server = Server(AsyncWaypost(store=store, retry_budget=0))
    tab = Tab(chromium, server)
    page = tab.go("/s/main")
    page.get_by_text("All is well").wait_for()
    store.faults = ["refuse"] * 100_000
    page.get_by_text("The store cannot be read").first.wait_for()
    store.faults = []
    page.get_by_text("All is well").wait_for()
    tab.context.close()
    server.stop()
    assert tab.complaints == []
