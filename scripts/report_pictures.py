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
    "healthy": lambda path: planted_lake(path, minutes=DAY, queues=6, healthy=True),
    "empty": make_lake,
}


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
        browser.close()


if __name__ == "__main__":
    main()
