"""The report: one self-contained page with findings, charts and figures of the tables, in which all names are text."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.show.lakes import (
    CALM,
    CLEAN,
    DYING,
    EXPIRING,
    GROWING,
    SLOW,
    UNSERVED,
    add_rows,
    busy_lake,
    counts,
    events_lake,
    make_lake,
    minute,
    planted_lake,
    recorded_lake,
)
from tests.web.hostile import HOSTILE_TEXTS
from waypost import NoRetry, Waypost
from waypost.charts import TimeRange
from waypost.cli.main import main
from waypost.errors import InvalidInput
from waypost.formatting import printable
from waypost.spark.delta.table import Change
from waypost.spark.insight.advise import ADVICE, STEPS
from waypost.spark.lake.gold import write_days
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.percentiles import bucket_of
from waypost.spark.lake.report import write_report
from waypost.spark.lake.report.findings import Finding, act_on, find
from waypost.spark.lake.report.gold import ADVICE_TABLE, MINUTE_MS, SHORT_MS, Gold, open_lake, read
from waypost.spark.lake.report.page import page
from waypost.spark.lake.report.series import (
    LISTED_MAX,
    OTHERS,
    POINTS_MAX,
    STACKS_MAX,
    Letters,
    ReportData,
    View,
    build_data,
    even_out,
    longest_waits,
    step_for,
)
from waypost.spark.lake.tables import GOLD_DEAD_LETTERS, SILVER_DELIVERIES, SILVER_OPEN_MESSAGES, TABLES

pytestmark = pytest.mark.promise("SPARK-7")

LOST = {"queue": "orders", "message_id": "01J-b", "fault": "gone", "events": []}
MARKUP = '<img src=x onerror=alert(1)></script><a href="https://example.com">x</a>&amp;'
#: What a page of any size must be smaller than.
BYTES_MAX = 500_000


class Parts(HTMLParser):
    """The references of a page, and its text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.references: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += given
        self.references += [
            given[name]
            for name in ("src", "href", "action", "data", "srcset", "poster")
            if name in given and not given[name].startswith("#q")
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
    return page(read_gold(lake), made_ms=0)


def views_of(lake: Path) -> dict[str, View]:
    data = build_data(read_gold(lake))
    return {"": data.all} | {view.name: view for view in data.queues}


def findings_of(lake: Path) -> list[Finding]:
    gold = read_gold(lake)
    return find(build_data(gold), gold.verdict, gold.advice, gold.source)


def command(*arguments: str) -> int:
    return main(["pipeline", "report", *arguments])


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_counts_and_sums_are_those_of_the_tables(tmp_path: Path) -> None:
    lake = make_lake(
        tmp_path / "lake",
        minutes=[
            counts("orders", 0, published=120, done=60),
            counts("orders", 2, done=60),
            counts("mails", 0, published=6),
        ],
    )
    views = views_of(lake)
    assert list(views) == ["", "orders", "mails"]
    assert views["orders"].counts["published"] == [120, 0, 0]
    assert views[""].counts["done"] == [60, 0, 60]
    assert views[""].totals["published"] == 126


def test_a_backlog_is_what_began_and_has_not_ended(tmp_path: Path) -> None:
    rows = [
        counts("orders", 0, published=10, done=3, cancelled=1),
        counts("orders", 1, redriven=2, dead=4),
        counts("mails", 0, done=5),
        counts("mails", 1, published=2),
    ]
    views = views_of(make_lake(tmp_path / "lake", minutes=rows))
    assert views["orders"].backlog == [6, 4]
    # Five were there before the history began, at least.
    assert views["mails"].backlog == [0, 2]


def test_the_backlog_at_the_end_is_what_the_store_holds(tmp_path: Path) -> None:
    with Waypost("memory://") as post:
        post.configure("orders", max_pending=14, overload="drop_oldest")
        post.publish_many("orders", range(8))
        post.publish("orders", 1, key="k")
        post.publish("orders", 2, key="k", on_conflict="replace")
        post.publish("orders", 3, key="k", on_conflict="extend", delay=3600)
        post.publish("orders", 4, key="k", on_conflict="replace")
        post.publish_many("orders", range(3), delay=3600)
        post.publish_many("orders", range(9))
        for end in ("done", "retry", "snooze", "dead", "drop", "dead"):
            with post.receive("orders") as message:
                assert message is not None
                if end != "done":
                    getattr(message, end)(*{"retry": (3600,), "snooze": (3600,), "dead": ("bad",)}.get(end, ()))
        post.redrive("orders", limit=1)
        post.cancel("orders", key="k")
        post.purge("orders", "dead")
        ledger = post.ledger("orders")
        events = post.journal("orders").events
    rows = [
        {"queue": one.queue, "number": one.number, "at_ms": int(one.at.timestamp() * 1000), "event": one.event}
        for one in events
    ]
    lake = events_lake(tmp_path / "lake", rows)
    held = ledger.ready + ledger.delayed + ledger.waiting + ledger.leased
    assert (ledger.balance, held > 5, ledger.replaced > 0, ledger.dropped > 1) == (0, True, True, True)
    assert views_of(lake)["orders"].backlog[-1] == held


def test_the_oldest_message_was_ready_before_it_was_claimed_and_some_wait_still(tmp_path: Path) -> None:
    waits = [
        {"queue": "orders", "minute": minute(number), "measure": "wait", "bucket": bucket_of(value), "count": 3}
        for number, value in ((0, 10), (20, 150_000))
    ]
    rows = [counts(queue, number, published=3) for queue in ("orders", "mails") for number in (0, 20)]
    lake = make_lake(tmp_path / "lake", minutes=rows, histograms=waits)
    since = round(minute(18).timestamp() * 1000)
    state = {"queue": "mails", "message_id": "m1", "state": "ready", "last_ms": since, "last_number": 7}
    ended = {"queue": "mails", "message_id": "m0", "state": "ready", "last_ms": 5, "last_number": 1}
    add_rows(Lake(str(lake)), SILVER_OPEN_MESSAGES, [state, ended, ended | {"state": "done", "last_number": 2}])
    views = views_of(lake)
    orders = [value or 0.0 for value in views["orders"].oldest]
    assert orders[-3:] == pytest.approx([30_000, 90_000, 150_000], abs=1_500)
    assert orders[0] == pytest.approx(10, rel=0.01)
    assert orders[1:-3] == [0.0] * 17
    mails = [value or 0.0 for value in views["mails"].oldest]
    assert mails[-3:] == [60_000, 120_000, 180_000]
    assert (views[""].oldest[-1] or 0.0) == 180_000


def test_percentiles_over_time_come_from_the_buckets_of_each_step(tmp_path: Path) -> None:
    rows = [
        {"queue": "orders", "minute": minute(0), "measure": "run", "bucket": bucket_of(value), "count": count}
        for value, count in ((10, 90), (200, 9), (4000, 1))
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0), counts("orders", 1)], histograms=rows)
    lines = views_of(lake)["orders"].percentiles["run"]
    assert lines["p50"] == [pytest.approx(10, rel=0.01), None]
    assert lines["p95"] == [pytest.approx(200, rel=0.01), None]
    assert lines["p99"] == [pytest.approx(200, rel=0.01), None]


def test_two_queues_together_have_the_percentiles_of_all_their_messages(tmp_path: Path) -> None:
    rows = [
        {"queue": queue, "minute": minute(0), "measure": "wait", "bucket": bucket_of(value), "count": 10}
        for queue, value in (("fast", 2), ("slow", 900))
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("fast", 0), counts("slow", 0)], histograms=rows)
    overall = {name: view.overall["wait"] for name, view in views_of(lake).items()}
    assert overall["fast"]["p99"] == pytest.approx(2, rel=0.01)
    assert overall[""]["p50"] == pytest.approx(2, rel=0.01)
    assert overall[""]["p99"] == pytest.approx(900, rel=0.01)


@pytest.mark.parametrize("days", [1, 30, 365, 20_000])
def test_a_long_period_is_divided_into_readable_steps(days: int) -> None:
    step = step_for(0, days * 1440 * MINUTE_MS)
    assert step % MINUTE_MS == 0
    assert days * 1440 * MINUTE_MS / step <= POINTS_MAX


def test_a_history_of_some_minutes_is_read_by_seconds_with_its_workers(tmp_path: Path) -> None:
    gold = read_gold(recorded_lake(tmp_path / "lake", 120))
    assert gold.span_ms is not None
    assert gold.span_ms[1] - gold.span_ms[0] < SHORT_MS
    data = build_data(gold)
    assert data.time.step_ms < 5_000
    assert sum(data.all.counts["published"]) == data.all.totals["published"] == 960
    by_minute = build_data(read_gold(make_lake(tmp_path / "other", minutes=[counts("orders", 0, published=1)])))
    assert by_minute.time.step_ms == MINUTE_MS
    workers = {one.worker for one in data.workers}
    assert len(workers) == 4
    assert sum(one.deliveries for one in data.workers) == 960
    assert sum(one.expired for one in data.workers) == 10
    text = page(gold, made_ms=0)
    assert "12:00:30" in text
    assert 'aria-label="Workers"' in text


def test_many_reasons_become_the_largest_ones_and_other(tmp_path: Path) -> None:
    rows = [
        {"queue": "orders", "minute": minute(0), "reason": f"reason {number}", "count": 100 - number}
        for number in range(40)
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0)], dead_letters=rows)
    stacks = views_of(lake)[""].dead_letters
    assert list(stacks)[:2] == ["reason 0", "reason 1"]
    assert len(stacks) == STACKS_MAX + 1
    assert sum(sum(stack) for stack in stacks.values()) == sum(100 - number for number in range(40))
    assert OTHERS in stacks


def test_dead_letters_are_listed_by_reason_and_error_with_the_command_to_act(tmp_path: Path) -> None:
    row = {"queue": "orders", "minute": minute(0), "reason": "rejected"}
    rows = [
        row | {"error_type": "shop.NoStock", "count": 3},
        row | {"minute": minute(9), "error_type": "shop.NoStock", "count": 4},
        row | {"error_type": None, "count": 2},
    ]
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0, dead=9)], dead_letters=rows)
    found = build_data(read_gold(lake)).letters
    assert [(one.reason, one.error_type, one.count) for one in found] == [
        ("rejected", "shop.NoStock", 7),
        ("rejected", None, 2),
    ]
    assert [act_on(one) for one in found] == [
        f'waypost bulk run "$(waypost bulk start orders redrive --reason rejected --error-type {error} --rate 50/s)"'
        for error in ("shop.NoStock", "''")
    ]
    assert "shop.NoStock" in text_of(lake)


@pytest.mark.parametrize(("error_type", "left"), [("ValueError", None), (None, "ValueError")])
def test_the_command_sends_again_only_the_letters_of_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error_type: str | None, left: str | None
) -> None:
    url = f"sqlite:///{tmp_path}/it.db"
    with Waypost(url) as post:
        post.publish_many("orders", range(2))
        with post.receive("orders") as message:
            assert message is not None
            message.dead("retries_exhausted")
        with pytest.raises(ValueError, match="no"), post.receive("orders", retry=NoRetry()):
            raise ValueError("no")
        assert sorted(str(one.error_type) for one in post.dead_letters("orders")) == ["None", "ValueError"]
        command = shlex.split(act_on(Letters("orders", "retries_exhausted", error_type, 1, 0)))
        assert command[:3] == ["waypost", "bulk", "run"]
        start = shlex.split(command[3].removeprefix("$(").removesuffix(")"))
        assert main([*start[1:], "--url", url]) == 0
        assert main([*command[1:3], capsys.readouterr().out.strip(), "--url", url]) == 0
        assert [one.error_type for one in post.dead_letters("orders")] == [left]


def test_a_lake_whose_dead_letters_have_no_errors_yet_is_read_and_gets_the_column(tmp_path: Path) -> None:
    columns = {name: kind for name, kind in GOLD_DEAD_LETTERS.columns.items() if name != "error_type"}
    older = replace(GOLD_DEAD_LETTERS, columns=columns)
    lake = Lake(str(tmp_path), tables=[older if one is GOLD_DEAD_LETTERS else one for one in TABLES])
    lake.create()
    row = {"queue": "orders", "minute": minute(0), "reason": "rejected", "count": 2}
    change = Change(tuple(write_days(lake, older, pa.Table.from_pylist([row], schema=older.arrow(columns)))))
    lake.commit("run", {older.name: change}, lake.state)
    assert [(one.error_type, one.count) for one in build_data(read_gold(tmp_path)).letters] == [(None, 2)]
    updated = Lake(str(tmp_path))
    updated.create()
    assert "error_type" in updated.schema(GOLD_DEAD_LETTERS).names
    assert updated.rows(GOLD_DEAD_LETTERS).to_pylist() == [row | {"error_type": None}]


# ---- findings --------------------------------------------------------------------------------------------------------


def test_every_planted_problem_is_found_with_its_figures_and_a_command(tmp_path: Path) -> None:
    lake = planted_lake(tmp_path / "lake", minutes=1440, queues=12, points=60)
    found = findings_of(lake)
    texts = {one.queue: one.text for one in reversed(found)}
    assert set(texts) == {EXPIRING, DYING, GROWING, UNSERVED, SLOW}
    assert re.match(r"\d+ % of redeliveries \([\d,]+ of [\d,]+\) are expired leases in orders", texts[EXPIRING])
    assert "at 2" in texts[EXPIRING], "when it was"
    assert re.match(r"[\d,]+ messages of payments died \([\d.]+ % of those that ended\)", texts[DYING])
    assert "of them rejected with shop.NoSuchCustomer." in texts[DYING]
    assert "The backlog of mails grows" in texts[GROWING]
    assert "and no worker has claimed any" in texts[UNSERVED]
    assert "waited up to" in texts[SLOW]
    assert all(one.command.startswith("waypost ") for one in found)
    levels = [one.level for one in found]
    assert levels == sorted(levels, key=("alarm", "warning", "note").index)
    text = text_of(lake)
    assert f"{len(found)} things need attention" in text
    assert text.index("things need attention") < text.index('class="tiles"') < text.index("All queues")


@pytest.mark.parametrize(("minutes", "queues"), [(30, 1), (1440, 20)])
def test_a_healthy_history_has_no_findings(tmp_path: Path, minutes: int, queues: int) -> None:
    lake = planted_lake(tmp_path / "lake", minutes=minutes, queues=queues, points=60, healthy=True)
    assert findings_of(lake) == []
    assert "Nothing needs attention" in text_of(lake)


def test_a_worker_that_died_is_named(tmp_path: Path) -> None:
    found = findings_of(recorded_lake(tmp_path / "lake", 180))
    (died,) = [one.text for one in found if "Worker" in one.text]
    assert died.startswith(
        "Worker shop-2:4117:a1b2c3d4 died or was killed, and 10 leases expired: last seen at 12:01:0"
    )
    short = recorded_lake(tmp_path / "short", 90)
    assert [one.text for one in findings_of(short) if "Worker" in one.text] == [], "it may come back"
    letters = Lake(str(short)).rows(GOLD_DEAD_LETTERS).to_pylist()
    assert {(one["reason"], one["error_type"]) for one in letters} == {("rejected", "shop.NoSuchCustomer")}


def test_a_queue_that_journals_only_failures_has_findings_without_shares(tmp_path: Path) -> None:
    rows = [counts("orders", number, retried=25, dead=5) for number in range(8)]
    reason = {"queue": "orders", "minute": minute(0), "reason": "rejected", "error_type": None, "count": 40}
    lake = make_lake(tmp_path / "lake", minutes=rows, dead_letters=[reason])
    (found,) = findings_of(lake)
    assert found.text == "40 messages of orders died; all rejected."


def test_timers_that_are_not_due_are_no_backlog_and_need_no_worker(tmp_path: Path) -> None:
    rows = [counts("reminders", number, published=50) for number in range(40)]
    rows += [counts("busy", number, published=50, claimed=20, done=20) for number in range(40)]
    lake = make_lake(tmp_path / "lake", minutes=rows)
    end = round(minute(40).timestamp() * 1000)
    timer = {"state": "delayed", "last_event": "published", "due_ms": end + 1, "last_ms": 5, "last_number": 1}
    timers = [timer | {"queue": "reminders", "message_id": f"m{number}"} for number in range(2_000)]
    timers += [timer | {"queue": "busy", "message_id": f"b{number}"} for number in range(1_190)]
    add_rows(Lake(str(lake)), SILVER_OPEN_MESSAGES, timers)
    assert findings_of(lake) == []
    # A timer that is due stays delayed where no worker claims.
    due = timers[0] | {"due_ms": end - 600_000, "last_number": 2}
    add_rows(Lake(str(lake)), SILVER_OPEN_MESSAGES, [due])
    (found,) = findings_of(lake)
    assert found.text == "1 message of reminders waits, the oldest for 10 min, and no worker has claimed any."


def test_times_of_a_long_history_are_counted_from_its_last_minute(tmp_path: Path) -> None:
    last = 90 * 1440 + 10
    lake = make_lake(
        tmp_path / "lake", minutes=[counts("orders", number, published=9, claimed=9, done=8) for number in (0, last)]
    )
    end = round(minute(last + 1).timestamp() * 1000)
    ready = {"queue": "orders", "message_id": "m1", "state": "ready", "last_ms": end - 300_000, "last_number": 1}
    add_rows(Lake(str(lake)), SILVER_OPEN_MESSAGES, [ready])
    delivery = {
        "queue": "orders", "message_id": "m2", "worker": "shop-1:7:a", "token": 1, "claimed_ms": end - 120_000,
        "ended_ms": end - 60_000, "outcome": "expired", "wait_ms": 1, "run_ms": 60_000,
    }  # fmt: skip
    add_rows(Lake(str(lake)), SILVER_DELIVERIES, [delivery])
    gold = read_gold(lake)
    data = build_data(gold)
    assert data.time.end_ms > data.end_ms == end, "the last step of the charts ends later"
    assert data.all.oldest[-1] == data.queues[0].oldest[-1] == 300_000
    assert len(data.workers) == 1
    assert findings_of(lake) == [], "the worker was seen a minute before the end"


def test_longest_waits_are_one_row_for_each_step_not_for_each_minute(tmp_path: Path) -> None:
    waits = [
        {"queue": queue, "minute": minute(number), "measure": "wait", "bucket": bucket_of(number + 1), "count": 1}
        for number in range(0, 3 * 1440)
        for queue in ("orders", "mails")
    ]
    rows = [counts("orders", number, published=1) for number in (0, 3 * 1440 - 1)]
    gold = read_gold(make_lake(tmp_path / "lake", minutes=rows, histograms=waits))
    hour = 60 * MINUTE_MS
    found = longest_waits(gold, hour, ("queue",))
    assert len(found) == 2 * 3 * 24
    assert {row["bucket_max"] for row in found if row["at_ms"] == gold.end_ms - hour} == {bucket_of(3 * 1440)}
    assert len(longest_waits(gold, hour, ())) == 3 * 24


def test_late_timers_and_open_advice_are_findings(tmp_path: Path) -> None:
    late = {"queue": CALM, "minute": minute(0), "measure": "late", "bucket": bucket_of(90_000), "count": 40}
    lake = make_lake(tmp_path / "lake", minutes=[counts(CALM, 0, published=40, done=40, claimed=40)], histograms=[late])
    assert ADVICE.name == ADVICE_TABLE
    records = Lake(str(lake), steps=STEPS, tables=(ADVICE,))
    records.create()
    row = {
        "at_ms": 1, "recorded_ms": 1, "record": "advised", "id": "lease:refunds:", "kind": "lease", "queue": CALM,
        "title": "The lease is too short", "call": "post.configure('refunds', lease=60)", "undo": "lease=30",
    }  # fmt: skip
    add_rows(records, ADVICE, [row])
    timers, advice = findings_of(lake)
    assert timers.text == "Timers of refunds were claimed up to 90 s (p99) after they were due."
    assert advice.text == "1 piece of advice is open."
    assert advice.command == f"waypost pipeline advise --lake {lake} --apply"
    assert "<span>post.configure(&#x27;refunds&#x27;,</span> <span>lease=60)</span>" in text_of(lake)


# ---- the audit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("audit", "kind", "printed"),
    [
        (CLEAN, "calm", "0 unaccounted of 204,133"),
        (CLEAN | {"not_seen": 12, "undecided": 4}, "warning", "The end of 4 messages may be among them"),
        (CLEAN | {"unaccounted_count": 1, "unaccounted": [LOST]}, "alarm", "orders 01J-b: gone"),
        (CLEAN | {"unrecorded_count": 2, "unrecorded": [LOST]}, "alarm", "orders 01J-b: gone"),
        (CLEAN | {"unrecorded_count": 2}, "alarm", "2 messages that no event of the journal explains"),
        (CLEAN | {"duplicates_unexplained_count": 3}, "alarm", "3 messages have a claim or an end too many"),
        (CLEAN | {"queues": {"orders": {"overcounted": {"done": 2}}}}, "alarm", "2 more changes than the store"),
        (None, "", "No audit yet"),
    ],
)  # fmt: skip
def test_what_the_audit_could_not_explain_is_the_first_finding(
    tmp_path: Path, audit: dict[str, Any] | None, kind: str, printed: str
) -> None:
    lake = make_lake(tmp_path / "lake", audit, minutes=[counts("orders", 0, published=1, claimed=1, done=1)])
    text = text_of(lake)
    assert f'class="card audit{f" {kind}" if kind else ""}"' in text
    assert printed in text
    found = findings_of(lake)
    assert [one.level for one in found] == {"alarm": ["alarm"], "warning": ["note"]}.get(kind, [])
    assert all("audit" in one.command or "--reader" in one.command for one in found)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_of_itself(tmp_path: Path) -> None:
    text = write_report(busy_lake(tmp_path / "lake", 5, CLEAN)).read_text()
    parts = parts_of(text)
    assert parts.references == []
    assert not {"link", "iframe", "object", "embed", "img", "base"} & set(parts.tags)
    assert "default-src 'none'" in parts.policy
    # One script and one style, by their hashes; no style in an element, and nothing may be fetched.
    assert len(re.findall(r"'sha256-[^']+'", parts.policy)) == 2
    assert "unsafe" not in parts.policy
    assert "style" not in parts.attributes
    assert not re.search(r"https?:|connect-src", parts.policy)
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_names_with_markup_are_plain_text_everywhere(tmp_path: Path) -> None:
    tables: dict[str, list[dict[str, Any]]] = {"minutes": [], "redeliveries": [], "dead_letters": []}
    hostile = [MARKUP, *HOSTILE_TEXTS[:30]]
    for text in hostile:
        row = {"queue": text, "minute": minute(0), "count": 30}
        tables["minutes"].append(counts(text, 0, published=100, claimed=100, expired=30, retried=30, dead=30))
        tables["redeliveries"].append(row | {"cause": text})
        tables["dead_letters"].append(row | {"reason": text, "error_type": text})
    lost = [LOST | {"fault": text} for text in hostile[:20]]
    lake = make_lake(tmp_path / "lake", CLEAN | {"unaccounted_count": 20, "unaccounted": lost}, **tables)
    clean = parts_of(text_of(make_lake(tmp_path / "clean", minutes=[counts("orders", 0, published=1)])))
    parts = parts_of(text_of(lake))
    ours = {
        "table", "ul", "li", "code", "details", "summary", "br", "path", "input", "select", "option", "label", "form",
    }  # fmt: skip
    assert set(parts.tags) <= set(clean.tags) | ours
    assert not [name for name in parts.attributes if name.startswith("on")]
    assert parts.references == []
    assert len(parts.scripts) == len(clean.scripts) == 1
    visible = "".join(parts.texts)
    for text in hostile:
        assert printable(text) in visible


def test_two_hundred_queues_of_ninety_days_are_a_small_page_with_all_of_them(tmp_path: Path) -> None:
    lake = planted_lake(tmp_path / "lake", minutes=90 * 1440, queues=200, points=90)
    text = write_report(lake, tmp_path / "report.html").read_text()
    assert len(text.encode()) < BYTES_MAX
    assert text.count('<tr class="queue">') == text.count('<tr class="detail"') == 200
    # Those that need attention come first, and have their charts.
    names = re.findall(r'<a href="#q\d+">([^<]+)</a>', text)
    assert set(names[:5]) == {EXPIRING, DYING, GROWING, UNSERVED, SLOW}
    details = text.split('<tr class="detail"')[1:]
    assert all('class="chart"' in one for one in details[:6])


def test_of_very_many_queues_those_with_failures_are_listed(tmp_path: Path) -> None:
    rows = [counts(f"busy-{number:03}", 0, published=900, claimed=900, done=900) for number in range(LISTED_MAX + 30)]
    rows += [counts("small", 0, published=40, claimed=40, done=20, dead=20), counts("idle", 0)]
    lake = make_lake(tmp_path / "lake", minutes=rows)
    data = build_data(read_gold(lake))
    assert (len(data.queues), data.unlisted, data.queues[0].name) == (LISTED_MAX, 32, "small")
    assert [one.queue for one in findings_of(lake)] == ["small"]
    assert "and 32 more queues</p>" in text_of(lake)
    rows = [counts(f"queue-{number:03}", 0, published=9, claimed=9, dead=9) for number in range(LISTED_MAX + 7)]
    assert "and 7 more queues, 7 of them with failures</p>" in text_of(make_lake(tmp_path / "other", minutes=rows))


def test_parts_without_anything_are_left_out(tmp_path: Path) -> None:
    text = text_of(make_lake(tmp_path / "lake", minutes=[counts("orders", 0, published=1, claimed=1, done=1)]))
    assert "There were none of: backlog, wait, run time, lateness of timers, redeliveries, dead letters." in text
    for part in ("Workers", "Dead letters", "Advice"):
        assert f'aria-label="{part}"' not in text


def test_an_empty_lake_gives_a_page(tmp_path: Path) -> None:
    text = text_of(make_lake(tmp_path / "lake"))
    assert "nothing yet" in text
    assert "Nothing has happened yet" in text
    assert "<figure" not in text


def test_the_head_has_the_store_without_its_password_and_the_period(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", minutes=[counts("orders", 0, published=1), counts("orders", 90, done=1)])
    parts = parts_of(text_of(lake))
    assert "valkey://127.0.0.1:6379" in parts.texts
    assert "1 Mar 2026 12:00 to 13:31 UTC, in steps of 1 min" in parts.texts


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


def test_the_first_and_the_last_step_are_drawn_as_whole_ones_but_never_as_a_peak() -> None:
    time = TimeRange(0, 600_000, 4)
    data = ReportData(time, View("all"), begin_ms=300_000, end_ms=1_860_000)
    # Half of the first step and a tenth of the last one are known.
    assert even_out(data, time, [50, 100, 100, 10]) == [100, 100, 100, 100]
    assert even_out(data, time, [1, 1, 1, 1]) == [1, 1, 1, 1]
    assert even_out(data, time, [0, 0, 0, 7]) == [0, 0, 0, 7]
    assert even_out(data, time, [30, 100, 100, 0]) == [60, 100, 100, 0]
    assert even_out(data, TimeRange(0, 600_000, 2), [1, 5]) == [1, 5]


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
