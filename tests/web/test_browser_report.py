"""The report in a real Chromium, opened from a file: nothing on its console, accessible, on a phone and a desk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.show.lakes import CLEAN, counts, make_lake, minute, planted_lake, recorded_lake
from tests.web.browser import DESK, PHONE, PROGRAM, SECONDS_MAX, Shop
from tests.web.hostile import HOSTILE_TEXTS
from waypost.spark.lake.report import write_report

pytestmark = [
    pytest.mark.promise("SPARK-7"), pytest.mark.needs(PROGRAM), pytest.mark.xdist_group("browser"),
]  # fmt: skip


class Opened:
    """A report in a tab of its own, which notes every complaint."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(
            **({"viewport": DESK, "reduced_motion": "reduce", "offline": True} | options)
        )
        self.context.set_default_timeout(SECONDS_MAX * 1000)
        self.complaints: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.goto(url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.complaints == []


def overflow(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of some minutes, of a day, of 90 days with 200 queues, and of a history with hostile names."""
    folder = tmp_path_factory.mktemp("reports")
    row = {"minute": minute(0), "count": 30}
    hostile = make_lake(
        folder / "hostile", CLEAN,
        minutes=[counts(text, 0, published=9, claimed=60, dead=30) for text in HOSTILE_TEXTS],
        redeliveries=[row | {"queue": text, "cause": text} for text in HOSTILE_TEXTS],
        dead_letters=[row | {"queue": text, "reason": text, "error_type": text} for text in HOSTILE_TEXTS],
    )  # fmt: skip
    lakes = {
        "minutes": recorded_lake(folder / "minutes"),
        "day": planted_lake(folder / "day", minutes=1440, queues=8, points=48),
        "days": planted_lake(folder / "days", minutes=90 * 1440, queues=200, points=60),
        "hostile": hostile,
    }
    return {name: write_report(lake, folder / f"{name}.html").as_uri() for name, lake in lakes.items()}


def test_axe_finds_nothing_light_or_dark_open_or_closed(chromium: Any, reports: dict[str, str]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for name in ("minutes", "day"):
        for scheme in ("light", "dark"):
            with Opened(chromium, reports[name], color_scheme=scheme, bypass_csp=True) as page:
                page.click(".queue a >> nth=0")
                page.eval_on_selector_all("details", "found => found.forEach((one) => { one.open = true; })")
                options: dict[str, Any] = {"resultTypes": ["violations"]}
                if scheme == "dark":
                    # Of a dark page only the colors differ.
                    options["runOnly"] = ["color-contrast"]
                violations = Axe().run(page, options=options).response["violations"]
                assert [(one["id"], one["nodes"][0]["html"][:300]) for one in violations] == [], (name, scheme)


@pytest.mark.parametrize("name", ["minutes", "days", "hostile"])
def test_a_report_fits_a_phone_a_tablet_and_a_desk(chromium: Any, reports: dict[str, str], name: str) -> None:
    with Opened(chromium, reports[name]) as page:
        page.click(".queue a >> nth=0")
        for size in (PHONE, {"width": 800, "height": 900}, DESK):
            page.set_viewport_size(size)
            assert overflow(page) <= 0, size
            assert page.locator(".detail:target .chart").first.is_visible()


def test_the_queues_are_filtered_and_sorted_and_a_row_opens_and_closes(chromium: Any, reports: dict[str, str]) -> None:
    with Opened(chromium, reports["days"]) as page:
        first = page.locator(".queue a").first
        assert page.locator(".queue:visible").count() == 200
        page.fill("#filter", "SERVICE-01")
        assert page.locator(".queue:visible").count() == 10
        assert page.locator("#shown").inner_text() == "10 of 200 queues"
        page.fill("#filter", "")
        page.select_option("#order", "name")
        assert first.inner_text() == "exports"
        page.select_option("#order", "wait")
        assert first.inner_text() == "exports"
        page.select_option("#order", "published")
        assert first.inner_text() == "orders"
        first.click()
        assert page.locator(".detail:target .chart").count() >= 4
        assert page.locator(".queue:has(+ .detail:target) a").inner_text() == "orders"
        first.click()
        assert page.locator(".detail:target").count() == 0


def test_a_report_is_read_and_a_queue_opened_without_scripts(chromium: Any, reports: dict[str, str]) -> None:
    with Opened(chromium, reports["minutes"], java_script_enabled=False) as page:
        assert page.locator("figure.chart").first.is_visible()
        assert not page.locator(".tools").is_visible()
        page.click(".queue a >> nth=1")
        assert page.locator(".detail:target").is_visible()
        page.click(".detail:target .close")
        assert page.locator(".detail:target").count() == 0


def test_hostile_names_run_nothing(chromium: Any, reports: dict[str, str]) -> None:
    with Opened(chromium, reports["hostile"]) as page:
        page.fill("#filter", "<script>")
        assert page.locator(".queue:visible").count() >= 1
        assert page.evaluate("window.hit") is None
        assert page.locator("script").count() == 1


def test_the_web_page_links_the_report_which_works_without_an_origin(chromium: Any, tmp_path: Path) -> None:
    lake = recorded_lake(tmp_path / "lake", 30)
    write_report(lake)
    with (
        Shop(f"sqlite:///{tmp_path / 'shop.db'}", lake=str(lake)) as shop,
        Opened(chromium, f"{shop.server.url}/s/main/lake", offline=False) as page,
    ):
        page.get_by_role("link", name="Open the report").click()
        page.fill("#filter", "mai")
        page.click(".queue:visible a")
        assert page.locator(".detail:target .chart").first.is_visible()
        assert page.locator(".queue:has(+ .detail:target) a").inner_text() == "mails"
