"""Take pictures of reports, on a phone and a desk, light and dark: some minutes, a day and 90 days, one queue and 200.

    python -m scripts.report_pictures FOLDER [NAME …]

Look at the pictures after a change of the report: no test sees whether a page is pleasant to read. It needs the
Chromium of the machine (scripts/system_parts.py), and no Spark.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import system_parts
from tests.show.lakes import make_lake, planted_lake, recorded_lake
from waypost.spark.insight.advice import Advice
from waypost.spark.insight.advise import append_rows, make_row, open_records
from waypost.spark.insight.chart import Bar, draw_svg
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.report import write_report

PROGRAM = "chromium-headless-shell"
SIZES = {"phone": {"width": 360, "height": 780}, "desk": {"width": 1280, "height": 900}}
#: A picture of a longer page is cut.
HEIGHT_MAX = 5_000
DAY = 1_440

LAKES: dict[str, Callable[[Path], Path]] = {
    "minutes-1": lambda path: recorded_lake(path, queues=1),
    "minutes-200": lambda path: recorded_lake(path, queues=200),
    "day-1": lambda path: planted_lake(path, minutes=DAY, queues=1),
    "day-200": lambda path: planted_lake(path, minutes=DAY, queues=200, points=144),
    "days-1": lambda path: planted_lake(path, minutes=90 * DAY, queues=1),
    "days-200": lambda path: planted_lake(path, minutes=90 * DAY, queues=200),
    "advice": lambda path: add_advice(planted_lake(path, minutes=DAY, queues=8, points=144)),
    "healthy": lambda path: planted_lake(path, minutes=DAY, queues=6, healthy=True),
    "empty": make_lake,
}


def add_advice(lake: Path) -> Path:
    """Record advice of most kinds in a lake: open, and applied."""
    jitter = {f"rollup-{number}": 90.0 for number in range(20)}
    found = [
        (Advice("lease", "orders", "", "37 leases ended before their handlers: P99.9 of run times is 28.4 s, the lease "
                "30 s; 37 of 37 are of type shop.Invoice", {}, 9_000, "", "", 0.02, 0.001, {"lease": 60},
                {"lease": 30.0}), "applied"),
        (Advice("groups", "mails", "acme", "12 groups wait 41.2 s (p95) behind group 'acme', and 0.3 s otherwise", {},
                900, "", "", 41_200, 1_000, {"fair": True}, {"fair": False}), "advised"),
        (Advice("poison", "payments", 'country="XX"', '8,522 of 11,334 dead letters have country = "XX"', {}, 8_600,
                "", "", 0.99, 0.2, {"fair": True}, {"fair": False}, group="XX"), "applied"),
        (Advice("retries", "payments", "OSError", "none of 44,678 retries after shop.NoSuchCustomer was successful, on "
                "3 days", {}, 900, "", "", 9, 1,
                code="@post.handler('payments', retry=ByException((NoSuchCustomer, NoRetry())))"), "advised"),
        (Advice("spike", "reports", "", "20 schedules fire at the same moment, and their messages wait 19 s", {}, 100,
                "", "", 19_000, 2_000, jitter=jitter, jitter_before=dict.fromkeys(jitter, 0.0)), "applied"),
    ]  # fmt: skip
    append_rows(open_records(Lake(str(lake))), [make_row(record, one, 1_772_366_400_000) for one, record in found])
    return lake


def draw_outcomes(folder: Path) -> list[Path]:
    """Draw charts of `waypost pipeline simulate`: a few scenarios with a target, and many with long names."""
    few = [Bar("observed", 41_000, 41_000, 41_000, is_present=True), Bar("4 workers, lease 30", 39_000, 33_000, 52_000)]
    few += [Bar("8 workers, lease 30", 4_200, 2_100, 6_900), Bar("16 workers, lease 30", 120, 80, 210)]
    settings = [(count, retry) for count in (4, 8, 16, 32) for retry in ("exponential:attempts=5,first=2", "none")]
    many = few[:1] + [
        Bar(f"{count} workers, retry {retry}, traffic 2x", 300_000 / count, 200_000 / count, 500_000 / count)
        for count, retry in settings
    ]
    note = (
        "model p95 39 s, observed 41 s · 2026-03-01 00:00 to 2026-03-14 23:59 UTC, 812,400 claims, 4 workers with 10 "
        "at once"
    )
    found = []
    for name, bars, limit in (("outcomes-few", few, 5_000.0), ("outcomes-many", many, None)):
        found.append(folder / f"{name}.svg")
        found[-1].write_text(draw_svg("p95 wait of orders", note, bars, limit), encoding="utf-8")
    return found


def take(browser: Any, report: Path, folder: Path) -> None:
    """Take the pictures of one report: at each size and in each scheme, and with a queue that is open."""
    for size, viewport in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            page.goto(report.as_uri())
            height = min(HEIGHT_MAX, page.evaluate("document.documentElement.scrollHeight"))
            page.set_viewport_size({"width": viewport["width"], "height": height})
            page.screenshot(path=folder / f"{report.stem}-{size}-{scheme}.png")
            if page.locator(".queue").count():
                page.set_viewport_size(viewport)
                page.click(".queue a >> nth=0")
                page.screenshot(path=folder / f"{report.stem}-open-{size}-{scheme}.png")
            context.close()


def main() -> None:
    """Make the reports, and take their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="*", choices=[*LAKES, []], help="which reports (all)")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to have one as root
        browser = playwright.chromium.launch(executable_path=system_parts.PARTS[PROGRAM][0], args=arguments)
        for name in options.name or LAKES:
            lake = options.folder / "lakes" / name
            report = write_report(lake if lake.exists() else LAKES[name](lake), options.folder / f"{name}.html")
            print(f"{name}: {report.stat().st_size:,} bytes")
            take(browser, report, options.folder)
        for drawing in () if options.name else draw_outcomes(options.folder):
            take(browser, drawing, options.folder)
        browser.close()


if __name__ == "__main__":
    main()
