"""The pages in a real Chromium with very many messages: lists are pages, searches end, and live updates come through.

The store has 50,000 messages; 1,000,000 with `WAYPOST_TESTS_LARGE=1`, as in `make more`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.browser import PROGRAM, Shop, Tab
from tests.web.test_browser import wider_than_the_screen

pytestmark = [
    pytest.mark.promise("FACE-3"), pytest.mark.needs(PROGRAM), pytest.mark.xdist_group("browser"),
]  # fmt: skip
MESSAGES = 1_000_000 if os.environ.get("WAYPOST_TESTS_LARGE") else 50_000
TOGETHER = 10_000
ORDERS = "/s/main/queues/orders"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop with very many messages of one queue, dead letters and timers among them."""
    folder: Path = tmp_path_factory.mktemp("large")
    with Shop(f"sqlite:///{folder / 'shop.db'}") as made:
        made.bury("orders", *range(150), error="no such customer")
        made.post.publish_many("orders", range(300), delay=3_600)
        for start in range(0, MESSAGES, TOGETHER):
            made.post.publish_many("orders", ({"number": number} for number in range(start, start + TOGETHER)))
        yield made


@pytest.fixture
def tab(chromium: Any, shop: Shop) -> Iterator[Tab]:
    with Tab(chromium, shop.server) as made:
        yield made
    assert made.complaints == []


def rows(page: Any) -> int:
    return int(page.locator("#messages tbody tr").count())


def test_a_list_of_very_many_messages_is_read_page_by_page(tab: Tab, shop: Shop) -> None:
    page = tab.go(ORDERS)
    page.get_by_text(f"{shop.post.ledger('orders').ready:,} ready").first.wait_for()
    seen = set[str]()
    for _ in range(4):
        assert rows(page) == 50
        ids = set(page.locator("#messages tbody a.id").all_inner_texts())
        assert not ids & seen, "a message is on two pages"
        seen |= ids
        with page.expect_navigation():
            page.get_by_role("link", name="Next").click()
    assert len(seen) == 200
    assert wider_than_the_screen(page) <= 0
    for state in ("delayed", "dead"):
        assert rows(tab.go(f"{ORDERS}?state={state}")) == 50
    assert page.locator("*").count() < 5_000, "the page has more than its rows"


def test_a_message_among_very_many_is_found_and_has_its_timeline(tab: Tab, shop: Shop) -> None:
    last = shop.post.publish("orders", {"number": -1}, key="the-last")
    page = tab.go("/s/main")
    for wanted in (last.id, "the-last"):
        page.locator("#show-keys").wait_for()
        page.keyboard.press("/")
        page.locator("#search").fill(wanted)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Timeline").wait_for()
        assert last.id in page.url
    assert shop.post.cancel("orders", id=last.id) == "cancelled"


def test_a_search_of_very_many_messages_has_its_progress_and_goes_on(tab: Tab) -> None:
    page = tab.go("/s/main/search?q=none-has-it&by=group&queue=orders")
    status = page.locator(".found")
    total = MESSAGES + 450
    status.get_by_text(f"of {total:,} messages").wait_for()
    with page.expect_navigation():
        page.get_by_role("link", name="Search on").click()
    page.locator(".found").get_by_text(f"of {total:,} messages").wait_for()


def test_a_page_of_very_many_messages_follows_the_store(tab: Tab, shop: Shop) -> None:
    page = tab.go("/s/main")
    ready = shop.post.ledger("orders").ready
    page.locator("#queues tr", has_text="orders").get_by_text(f"{ready:,}").wait_for()
    ids = [one.id for one in shop.post.publish_many("orders", range(3))]
    page.locator("#queues tr", has_text="orders").get_by_text(f"{ready + 3:,}").wait_for()
    for id in ids:
        assert shop.post.cancel("orders", id=id) == "cancelled"
    page.locator("#queues tr", has_text="orders").get_by_text(f"{ready:,}").wait_for()


def test_a_bulk_action_among_very_many_is_counted_and_ends(tab: Tab, shop: Shop) -> None:
    shop.bury("bills", *range(120), error="out of paper")
    shop.bury("bills", 1, error="no ink")
    page = tab.go("/s/main/queues/bills/do/bulk_redrive?error=out of paper")
    page.get_by_text("120 dead letters").wait_for()
    page.get_by_role("button", name="Redrive", exact=True).click()
    page.locator("tr", has_text="bills").get_by_text("120 sent again").wait_for()
    assert shop.post.ledger("bills").redriven == 120
