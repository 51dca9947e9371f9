"""The report: one self-contained page with the figures of the tables, in which all markup is escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.show.browser import Page, open_page
from tests.show.lakes import CLEAN, busy_lake, counts, make_lake, minute
from waypost.cli.main import main
from waypost.errors import InvalidInput
from waypost.spark.lake.percentiles import bucket_of
from waypost.spark.lake.report import write_report
from waypost.spark.lake.report.gold import MINUTE_MS, Gold, open_lake, read
from waypost.spark.lake.report.page import page
from waypost.spark.lake.report.series import ALL, OTHERS, POINTS_MAX, STACKS_MAX, build_data, step_for

pytestmark = pytest.mark.promise("SPARK-7")

LOST = {"queue": "orders", "message_id": "01J-b", "fault": "gone", "events": []}
MARKUP = '<img src=x onerror=alert(1)></script><a href="https://example.com">x</a>&amp;'


class Parts(HTMLParser):
    """The references of a page, and its text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.references += [
            given[name] for name in ("src", "href", "action", "data", "srcset", "poster") if name in given
        ]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self._within = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts.append(data)
        elif not self._within:
            self.texts.append(data)


def parts_of(text: str) -> Parts:
    parts = Parts()
    parts.feed(text)
    return parts


def read_gold(lake: Path) -> Gold:
    return read(open_lake(str(lake)))


def text_of(lake: Path) -> str:
    """Return the page without the chart library, which no test needs to read."""
    gold = read_gold(lake)
    return page(build_data(gold), gold.verdict, made_ms=0, library="")


def command(*arguments: str) -> int:
    return main(["pipeline", "report", *arguments])


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_rates_and_sums_are_those_of_the_tables(tmp_path: Path) -> None:
    lake = make_lake(
        tmp_path / "lake",
        minutes=[
            counts("orders", 0, published=120, done=60),
            counts("orders", 2, done=60),
            counts("mails", 0, published=6),
        ],
    )
    view = {one.name: one for one in build_data(read_gold(lake)).views}
    assert list(view) == [ALL, "orders", "mails"]
    assert view["orders"].rates["published"] == [2.0, 0.0, 0.0]
    assert view["orders"].rates["done"] == [1.0, 0.0, 1.0]
    assert view[ALL].totals["published"] == 126


def test_percentiles_over_time_come_from_the_buckets_of_each_step(tmp_path: Path) -> None:
    rows = [
        {"queue": "orders", "minute": minute(0), "measure": "run", "bucket": bucket_of(value), "count": count}
        for value, count in ((10, 90), (200, 9), (4000, 1))
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0), counts("orders", 1)], histograms=rows)
    lines = build_data(read_gold(lake)).views[0].percentiles["run"]
    assert lines["p50"] == [pytest.approx(10, rel=0.01), None]
    assert lines["p95"] == [pytest.approx(200, rel=0.01), None]
    assert lines["p99"] == [pytest.approx(200, rel=0.01), None]


def test_two_queues_together_have_the_percentiles_of_all_their_messages(tmp_path: Path) -> None:
    rows = [
        {"queue": queue, "minute": minute(0), "measure": "wait", "bucket": bucket_of(value), "count": 10}
        for queue, value in (("fast", 2), ("slow", 900))
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("fast", 0), counts("slow", 0)], histograms=rows)
    overall = {one.name: one.overall["wait"] for one in build_data(read_gold(lake)).views}
    assert overall["fast"]["p99"] == pytest.approx(2, rel=0.01)
    assert overall[ALL]["p50"] == pytest.approx(2, rel=0.01)
    assert overall[ALL]["p99"] == pytest.approx(900, rel=0.01)


@pytest.mark.parametrize("days", [1, 30, 365, 20_000])
def test_a_long_period_is_divided_into_readable_steps(days: int) -> None:
    step = step_for(0, days * 1440 * MINUTE_MS)
    assert step % MINUTE_MS == 0
    assert days * 1440 * MINUTE_MS / step <= POINTS_MAX


def test_many_reasons_become_the_largest_ones_and_other(tmp_path: Path) -> None:
    rows = [
        {"queue": "orders", "minute": minute(0), "reason": f"reason {number}", "count": 100 - number}
        for number in range(40)
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0)], dead_letters=rows)
    stacks = build_data(read_gold(lake)).views[0].dead_letters
    assert list(stacks)[:2] == ["reason 0", "reason 1"]
    assert len(stacks) == STACKS_MAX + 1
    assert sum(sum(stack) for stack in stacks.values()) == sum(100 - number for number in range(40))
    assert OTHERS in stacks


# ---- the audit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("audit", "kind", "printed"),
    [
        (CLEAN, "good", "0 unaccounted of 204,133"),
        (CLEAN | {"not_seen": 12, "undecided": 4}, "warn", "The end of 4 messages may be among them"),
        (CLEAN | {"unaccounted_count": 1, "unaccounted": [LOST]}, "bad", "orders 01J-b: gone"),
        (CLEAN | {"unrecorded_count": 2, "unrecorded": [LOST]}, "bad", "orders 01J-b: gone"),
        (CLEAN | {"unrecorded_count": 2}, "bad", "2 messages that no event of the journal explains"),
        (CLEAN | {"duplicates_unexplained_count": 3}, "bad", "3 messages have a claim or an end too many"),
        (CLEAN | {"queues": {"orders": {"overcounted": {"done": 2}}}}, "bad", "2 more changes than the store"),
        (None, "", "No audit yet"),
    ],
)  # fmt: skip
def test_the_result_of_the_audit_is_at_the_top(
    tmp_path: Path, audit: dict[str, Any] | None, kind: str, printed: str
) -> None:
    text = text_of(make_lake(tmp_path / "lake", audit, minutes=[counts("orders", 0, published=1)]))
    assert f'class="card verdict {kind}"' in text
    assert printed in text
    assert text.index('<section class="card verdict') < text.index('<div class="tiles">')


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_of_itself(tmp_path: Path) -> None:
    text = write_report(busy_lake(tmp_path / "lake", 5, CLEAN)).read_text()
    parts = parts_of(text)
    assert parts.references == []
    assert not {"link", "iframe", "object", "embed", "img", "base", "form"} & set(parts.tags)
    assert "default-src 'none'" in parts.policy
    # Only two scripts run, and none may fetch: no source of scripts or data is named.
    assert len(re.findall(r"'sha256-[^']+'", parts.policy)) == 2
    assert "unsafe-inline" not in parts.policy.split("script-src")[1].split(";")[0]
    assert not re.search(r"https?:|connect-src", parts.policy)
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_names_with_markup_are_escaped(tmp_path: Path) -> None:
    row = {"queue": MARKUP, "minute": minute(0), "count": 1}
    lake = make_lake(
        tmp_path / "lake",
        CLEAN | {"unaccounted_count": 1, "unaccounted": [LOST | {"fault": MARKUP}]},
        minutes=[counts(MARKUP, 0, published=1)],
        redeliveries=[row | {"cause": MARKUP}],
        dead_letters=[row | {"reason": MARKUP}],
    )
    parts = parts_of(text_of(lake))
    assert "img" not in parts.tags
    assert "a" not in parts.tags
    assert parts.references == []
    assert parts.texts.count(MARKUP) == 2  # the selection of queues, and the table
    assert f"orders 01J-b: {MARKUP}" in parts.texts
    data = json.loads(parts.scripts[0])
    assert list(data["views"][0]["dead_letters"]) == [MARKUP]


def test_an_empty_lake_gives_a_page(tmp_path: Path) -> None:
    text = text_of(make_lake(tmp_path / "lake"))
    assert "nothing yet" in text
    assert json.loads(parts_of(text).scripts[0])["times"] == []


# ---- a real browser --------------------------------------------------------------------------------------------------


def drawn(opened: Page) -> int:
    found = re.search(r'data-drawn="(\d+)"', opened.document)
    return int(found[1]) if found else -1


@pytest.mark.needs("chromium-headless-shell")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_draws_every_chart_without_a_console_message(tmp_path: Path, width: int, dark: bool) -> None:
    path = write_report(busy_lake(tmp_path / "lake", 30, CLEAN), tmp_path / "report.html")
    opened = open_page(path, tmp_path / "profile", width=width, dark=dark)
    assert opened.console == ()
    assert drawn(opened) == 7
    assert opened.document.count('class="main-svg"') >= 7


@pytest.mark.needs("chromium-headless-shell")
def test_a_browser_shows_markup_in_names_as_text_and_runs_none_of_it(tmp_path: Path) -> None:
    row = {"queue": MARKUP, "minute": minute(0), "count": 5}
    lake = make_lake(
        tmp_path / "lake",
        minutes=[counts(MARKUP, 0, published=1)],
        redeliveries=[row | {"cause": MARKUP}],
        dead_letters=[row | {"reason": MARKUP}],
    )
    opened = open_page(write_report(lake), tmp_path / "profile")
    assert opened.console == ()
    assert drawn(opened) == 3
    body = opened.document.split('<script type="application/json"')[0]
    assert "<img" not in body
    assert not re.search(r"<a [^>]*example\.com", body)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_beside_the_tables_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = busy_lake(tmp_path / "lake", 3, CLEAN)
    assert command("--lake", str(lake)) == 0
    assert capsys.readouterr().out == f"{lake / 'report.html'}\n"
    assert (lake / "report.html").read_text().startswith("<!doctype html>")
    assert command("--lake", str(lake), "--output", str(tmp_path / "mine.html"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "mine.html")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake", "mine.html"]


def test_a_folder_that_is_no_lake_gives_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--lake", str(tmp_path)) == 2
    assert "there is no gold/minutes in" in capsys.readouterr().err
    assert command("--lake", str(busy_lake(tmp_path / "lake", 2)), "--output", str(tmp_path / "no" / "r.html")) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_file_that_is_not_our_table_or_audit_gives_one_sentence(tmp_path: Path) -> None:
    lake = busy_lake(tmp_path / "lake", 2)
    (lake / "audit.json").write_text('{"published": 3}')
    with pytest.raises(InvalidInput, match="is not what `waypost pipeline audit` writes"):
        read_gold(lake)
    (lake / "audit.json").unlink()
    (file,) = (lake / "gold" / "minutes").rglob("*.parquet")
    file.write_bytes(b"PAR1 no")
    with pytest.raises(InvalidInput, match="is not what the pipeline writes"):
        read_gold(lake)


def test_a_remote_lake_that_does_not_exist_gives_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="there is no gold/minutes in mock:///lake"):
        write_report("mock:///lake")
