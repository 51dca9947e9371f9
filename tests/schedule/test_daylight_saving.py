"""Every change of the clocks from 2020 to 2035 in many zones, against an oracle that looks at each minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from tests.schedule.oracle import Window, changes, utc
from waypost.schedule.cron import read_cron
from waypost.schedule.instants import next_instant
from waypost.schedule.zones import zone_of

ZONES = (
    "America/New_York", "America/Sao_Paulo", "America/St_Johns", "America/Santiago", "Europe/Berlin", "Europe/Dublin",
    "Europe/Madrid", "Africa/Casablanca", "Africa/Cairo", "Asia/Tehran", "Asia/Beirut", "Australia/Lord_Howe",
    "Pacific/Chatham", "Pacific/Auckland", "Antarctica/Troll",
)  # fmt: skip
PATTERNS = (
    "0 2 * * *", "30 2 * * *", "*/15 2 * * *", "0 * * * *", "*/20 * * * *", "15 */2 * * *", "0 0 * * *", "59 1 * * *",
    "0 1,2,3 * * *", "30 0-4 * * *", "0 3 * * 0", "5 2 1-7 * 0", "*/7 1-3 * * *", "45 23 * * *", "0 */6 * 3,10 *",
    "10 0 29 * 5", "* 2 * * *",
)  # fmt: skip


def fires(pattern: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """The instants of a window as the code finds them, one after the other."""
    cron, place = read_cron(pattern), zone_of(zone)
    found: list[datetime] = []
    at: int | None = int(start.timestamp()) - 1
    while True:
        assert at is not None
        at = next_instant(cron, place, at)
        if at is None or at >= end.timestamp():
            return found
        found.append(datetime.fromtimestamp(at, UTC))


def differences(zone: str, first: datetime, last: datetime) -> tuple[int, list[str]]:
    """How many changes were looked at, and where code and oracle disagree."""
    info = ZoneInfo(zone)
    moments = changes(info, first, last)
    wrong = []
    for moment in moments:
        window = Window(info, moment - timedelta(hours=8), moment + timedelta(hours=6))
        for pattern in PATTERNS:
            # What lies before the window may be a first pass that the oracle has not seen: leave its edge alone.
            begin = window.start + timedelta(hours=2)
            expected = [instant for instant in window.instants(pattern) if instant >= begin]
            if fires(pattern, zone, begin, window.end) != expected:
                wrong.append(f"{pattern} around {moment:%Y-%m-%d %H:%M}")
    return len(moments), wrong


@pytest.mark.promise("CRON-3", "CRON-2")
@pytest.mark.parametrize("zone", ZONES)
def test_no_instant_differs_from_the_oracle_at_any_change_of_the_clocks(zone: str) -> None:
    _, wrong = differences(zone, utc(2020), utc(2036))
    assert wrong == []


@pytest.mark.promise("CRON-3")
@pytest.mark.parametrize(
    ("zone", "first", "last"),
    [
        ("Pacific/Apia", utc(2011, 9, 1), utc(2012, 5, 1)),
        ("Pacific/Kwajalein", utc(1993, 8, 1), utc(1993, 9, 1)),
        ("Pacific/Fakaofo", utc(2011, 12, 1), utc(2012, 1, 15)),
        ("Asia/Pyongyang", utc(2015, 8, 1), utc(2018, 6, 1)),
        ("America/Caracas", utc(2016, 4, 1), utc(2016, 6, 1)),
    ],
)
def test_a_day_that_was_skipped_and_odd_changes_agree_with_the_oracle_too(
    zone: str, first: datetime, last: datetime
) -> None:
    seen, wrong = differences(zone, first, last)
    assert seen > 0
    assert wrong == []


def test_the_zones_have_changes_to_look_at() -> None:
    """An oracle that is asked nothing agrees with everything."""
    counts = {
        zone: len(changes(ZoneInfo(zone), utc(2020), utc(2036))) for zone in ("Europe/Berlin", "Africa/Casablanca")
    }
    assert counts["Europe/Berlin"] == 32
    assert counts["Africa/Casablanca"] >= 24
