"""Cron patterns: which are accepted, which are refused with which error, and their next times."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.oracle import fits
from waypost.errors import InvalidSchedule
from waypost.schedule.cron import ALIASES, Cron, read_cron
from waypost.schedule.instants import next_instant
from waypost.schedule.zones import zone_name, zone_of

START = datetime(2026, 1, 1, 0, 0)  # noqa: DTZ001


def following(pattern: str, count: int = 3, start: datetime = START) -> list[str]:
    """Return the next local times of a pattern, as text."""
    cron, found = Cron(pattern), []
    at: datetime | None = start
    for _ in range(count):
        assert at is not None
        at = cron.after(at)
        found.append("none" if at is None else at.isoformat(sep=" "))
    return found


@pytest.mark.promise("CRON-1")
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*/15 * * * *", ["2026-01-01 00:15:00", "2026-01-01 00:30:00", "2026-01-01 00:45:00"]),
        ("0 9 * * mon-fri", ["2026-01-01 09:00:00", "2026-01-02 09:00:00", "2026-01-05 09:00:00"]),
        ("30 8 1,15 * *", ["2026-01-01 08:30:00", "2026-01-15 08:30:00", "2026-02-01 08:30:00"]),
        ("0 0 29 2 *", ["2028-02-29 00:00:00", "2032-02-29 00:00:00", "2036-02-29 00:00:00"]),
        ("0 12 * JAN,Jul 0", ["2026-01-04 12:00:00", "2026-01-11 12:00:00", "2026-01-18 12:00:00"]),
        ("0 12 * * 7", ["2026-01-04 12:00:00", "2026-01-11 12:00:00", "2026-01-18 12:00:00"]),
        ("0 12 * * fri-sun", ["2026-01-02 12:00:00", "2026-01-03 12:00:00", "2026-01-04 12:00:00"]),
        ("10/20 5 * * *", ["2026-01-01 05:10:00", "2026-01-01 05:30:00", "2026-01-01 05:50:00"]),
        ("*/1 5 * * *", ["2026-01-01 05:00:00", "2026-01-01 05:01:00", "2026-01-01 05:02:00"]),
        ("7-7/1 5 * * *", ["2026-01-01 05:07:00", "2026-01-02 05:07:00", "2026-01-03 05:07:00"]),
        ("*/20 * * * * *", ["2026-01-01 00:00:20", "2026-01-01 00:00:40", "2026-01-01 00:01:00"]),
        ("5,10 0 0 * * *", ["2026-01-01 00:00:05", "2026-01-01 00:00:10", "2026-01-02 00:00:05"]),
        ("59 59 23 31 12 *", ["2026-12-31 23:59:59", "2027-12-31 23:59:59", "2028-12-31 23:59:59"]),
        ("  0   6  *  *  * ", ["2026-01-01 06:00:00", "2026-01-02 06:00:00", "2026-01-03 06:00:00"]),
        ("@hourly", ["2026-01-01 01:00:00", "2026-01-01 02:00:00", "2026-01-01 03:00:00"]),
        ("@Weekly", ["2026-01-04 00:00:00", "2026-01-11 00:00:00", "2026-01-18 00:00:00"]),
        ("@yearly", ["2027-01-01 00:00:00", "2028-01-01 00:00:00", "2029-01-01 00:00:00"]),
    ],
)
def test_a_pattern_occurs_at_its_times(pattern: str, expected: list[str]) -> None:
    assert following(pattern) == expected


@pytest.mark.promise("CRON-3")
def test_two_restricted_days_match_either_and_a_star_makes_it_both() -> None:
    # The 13th, or a Friday.
    assert following("0 0 13 * 5", 4) == [
        "2026-01-02 00:00:00", "2026-01-09 00:00:00", "2026-01-13 00:00:00", "2026-01-16 00:00:00",
    ]  # fmt: skip
    # Every second day of the month that is a Friday: `*/2` is not restricted.
    assert following("0 0 */2 * 5", 3) == ["2026-01-09 00:00:00", "2026-01-23 00:00:00", "2026-02-13 00:00:00"]


@pytest.mark.promise("CRON-1")
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("60 * * * *", "minutes: 60 is out of range"),
        ("* 24 * * *", "hours: 24 is out of range"),
        ("* * 0 * *", "day of month: 0 is out of range"),
        ("* * * 13 *", "month: 13 is out of range"),
        ("* * * * 8", "day of week: 8 is out of range"),
        ("61 * * * * *", "seconds: 61 is out of range"),
        ("* * L * *", "day of month: 'L' in 'L' is no number"),
        ("* * 15W * *", "day of month: '15W' is not supported"),
        ("* * * * 5#2", "day of week: '5#2' is not supported"),
        ("* * ? * *", "day of month: '?' is not supported"),
        ("* * * foo *", "month: 'foo' in 'foo' is no number or name"),
        ("mon * * * *", "minutes: 'mon' in 'mon' is no number"),
        ("*/0 * * * *", "minutes: the step of '*/0'"),
        ("*/60 * * * *", "minutes: the step of '*/60'"),
        ("7-7/2 * * * *", "minutes: the step of '7-7/2' must be from 1 to 1"),
        ("5-1 * * * *", "minutes: range '5-1' runs backwards"),
        ("*-5 * * * *", "minutes: '*-5' is no range"),
        ("1,,2 * * * *", "minutes: '' is not supported"),
        ("-1 * * * *", "minutes: '-1' is not supported"),
        ("1.5 * * * *", "minutes: '1.5' is not supported"),
        ("* * * *", "has 4 fields"),
        ("0 0 0 1 1 * 2026", "has 7 fields"),
        ("", "has 0 fields"),
        ("@reboot", "alias '@reboot' is not supported"),
        ("0 0 30 2 *", "never occurs"),
        ("0 0 31 4,6,9,11 *", "never occurs"),
        ("*" * 300, "at most 256 characters"),
    ],
)
def test_a_bad_or_unsupported_field_is_named(pattern: str, text: str) -> None:
    with pytest.raises(InvalidSchedule, match=re.escape(text)):
        Cron(pattern)


@pytest.mark.promise("CRON-1")
def test_a_pattern_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="cron must be a pattern as text"):
        read_cron(5)  # type: ignore[arg-type]


@pytest.mark.promise("CRON-2")
@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("UTC", "2026-06-01T12:00:00+00:00"),
        ("Z", "2026-06-01T12:00:00+00:00"),
        ("+05:30", "2026-06-01T17:30:00+05:30"),
        ("-0800", "2026-06-01T04:00:00-08:00"),
        ("Europe/Madrid", "2026-06-01T14:00:00+02:00"),
        ("America/Argentina/Buenos_Aires", "2026-06-01T09:00:00-03:00"),
    ],
)
def test_a_zone_is_utc_an_offset_or_a_name(name: str, local: str) -> None:
    at = datetime.fromisoformat("2026-06-01T12:00:00+00:00")
    assert at.astimezone(zone_of(name)).isoformat() == local


@pytest.mark.promise("CRON-2")
@pytest.mark.parametrize(
    "name",
    ["", "Mars/Olympus", "../../etc/passwd", "/etc/localtime", "+24:00", "+1", "Europe/", "Europe", "a" * 500, "\0"],
)
def test_a_zone_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(InvalidSchedule, match="time zone"):
        zone_of(name)


@pytest.mark.promise("CRON-5")
def test_utc_has_one_name() -> None:
    assert {zone_name(name) for name in ("UTC", "utc", "Z", "z")} == {"UTC"}


@pytest.mark.promise("CRON-3")
def test_a_pattern_far_ahead_is_found_across_many_changes_of_the_clocks() -> None:
    berlin = zone_of("Europe/Berlin")
    after = int(datetime(2026, 3, 1, tzinfo=ZoneInfo("UTC")).timestamp())
    wall = next_instant(read_cron("30 6 29 2 *"), berlin, after)
    real = next_instant(read_cron("30 */6 29 2 *"), berlin, after)
    assert wall == int(datetime(2028, 2, 29, 6, 30, tzinfo=berlin).timestamp())
    assert real == int(datetime(2028, 2, 29, 0, 30, tzinfo=berlin).timestamp())


fields = st.sampled_from(["*", "*/5", "0", "7", "3,9", "1-6", "2-10/3", "12/4", "30", "59", "1", "5-7"])


@pytest.mark.promise("CRON-1")
@settings(max_examples=150, deadline=None)
@given(st.tuples(fields, fields, fields, fields, fields), st.integers(0, 3_000_000))
def test_the_next_time_fits_and_none_before_it_does(parts: tuple[str, ...], minutes: int) -> None:
    pattern = " ".join(parts)
    try:
        cron = Cron(pattern)
    except InvalidSchedule:
        return
    start = START + timedelta(minutes=minutes)
    found = cron.after(start)
    assert found is not None
    assert fits(pattern, found)
    at = start + timedelta(minutes=1)
    for _ in range(2_000):
        if at >= found:
            break
        assert not fits(pattern, at)
        at += timedelta(minutes=1)


@pytest.mark.promise("CRON-1")
@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="*/-,0123456789 @abcdefJANmonL#?W\t\n\0ä", max_size=40))
def test_no_text_makes_it_crash_or_hang(text: str) -> None:
    try:
        cron = Cron(text)
    except InvalidSchedule:
        return
    assert cron.after(START) is not None


@pytest.mark.promise("CRON-1")
def test_every_alias_is_a_pattern() -> None:
    for alias, pattern in ALIASES.items():
        assert following(alias) == following(pattern)
