"""`waypost schedules`: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from waypost import Waypost
from waypost.cli.main import main


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'shop.db'}"
    with Waypost(made) as post:
        post.save_schedule("rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", body={"a": 1})
        post.save_schedule("ping", queue="pings", every=0.5, missed="once")
    return made


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["schedules", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.mark.promise("CRON-7", "CRON-3")
def test_a_preview_shows_both_times_across_a_change_of_the_clocks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("0 2 * * *", "--tz", "America/New_York", "--start", "2026-03-06T00:00:00Z", "--count", "4", "--json")
    assert json.loads(run_command(capsys, "preview", *arguments)) == [
        {"utc": "2026-03-06T07:00:00Z", "local": "2026-03-06T02:00:00-05:00"},
        {"utc": "2026-03-07T07:00:00Z", "local": "2026-03-07T02:00:00-05:00"},
        {"utc": "2026-03-08T07:00:00Z", "local": "2026-03-08T03:00:00-04:00"},
        {"utc": "2026-03-09T06:00:00Z", "local": "2026-03-09T02:00:00-04:00"},
    ]


@pytest.mark.promise("CRON-7")
def test_a_preview_begins_with_its_start_and_knows_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys, "preview", "0 0 * * *", "--start", "2026-03-06T00:00:00Z", "--count", "1")
    assert text == "2026-03-06T00:00:00Z  2026-03-06T00:00:00+00:00\n"
    text = run_command(capsys, "preview", "--every", "0.25", "--start", "2026-03-06T00:00:00Z", "--count", "2")
    assert [line.split()[0] for line in text.splitlines()] == ["2026-03-06T00:00:00Z", "2026-03-06T00:00:00.250Z"]


@pytest.mark.promise("CRON-7", "CRON-1")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("0 25 * * *",), "hours: 25 is out of range"),
        (("0 0 30 2 *",), "never occurs"),
        (("0 0 * * *", "--tz", "Mars"), "time zone 'Mars'"),
        (("0 0 * * *", "--start", "yesterday"), "--start is a time"),
        (("0 0 * * *", "--start", "2026-01-01T00:00:00"), "needs its zone"),
        (("0 0 * * *", "--count", "0"), "--count"),
        ((), "either cron"),
    ],
)
def test_a_preview_of_an_invalid_rule_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    assert text in run_command(capsys, "preview", *arguments, code=2)


@pytest.mark.promise("CRON-7")
def test_schedules_are_listed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str], url: str) -> None:
    lines = run_command(capsys, "list", url).splitlines()
    assert [re.split("  +", line)[:3] for line in lines] == [
        ["queue", "name", "rule"],
        ["pings", "ping", "every 0.5 s"],
        ["reports", "rollup", "0 9 * * * Europe/Madrid"],
    ]
    (one,) = json.loads(run_command(capsys, "list", url, "--queue", "reports", "--count", "2", "--json"))
    assert (one["name"], one["paused"], one["missed"], one["fires"]) == ("rollup", False, "skip", 0)
    assert [fire["local"][11:16] for fire in one["next_fires"]] == ["09:00", "09:00"]


@pytest.mark.promise("CRON-7")
def test_a_schedule_is_paused_resumed_triggered_and_removed(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run_command(capsys, "pause", url, "ping") == "paused\n"
    assert "nothing to change" in run_command(capsys, "pause", url, "ping")
    assert "  paused  " in run_command(capsys, "list", url, "--queue", "pings")
    assert run_command(capsys, "resume", url, "ping", "--queue", "pings") == "resumed\n"
    assert run_command(capsys, "trigger", url, "rollup").startswith("published ")
    assert run_command(capsys, "remove", url, "rollup") == "removed\n"
    assert main(["schedules", "remove", url, "rollup"]) == 1
    with Waypost(url) as post:
        assert post.ledger("reports").ready == 1
        assert [schedule.name for schedule in post.schedules()] == ["ping"]


@pytest.mark.promise("CRON-7")
def test_an_unknown_schedule_is_an_error(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert "no schedule 'nothing'" in run_command(capsys, "trigger", url, "nothing", code=1)
    assert "scheme" in run_command(capsys, "list", "nonsense", code=2)
