"""Every change of the clocks from 2020 to 2035 in every zone, against an oracle that reads each minute.

Zones that have the same offsets through all these years are one case: about 80 of them stand for 600 names.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import pytest

from tests.schedule.oracle import Window, changes, utc
from waypost.schedule.cron import read_cron
from waypost.schedule.instants import next_instant
from waypost.schedule.zones import zone_of

FIRST, LAST = utc(2020), utc(2036)
HALF_A_DAY = 43_200
#: Zones that must be among those that are compared.
KNOWN = {
    "America/New_York", "America/Sao_Paulo", "America/St_Johns", "Europe/Berlin", "Europe/Dublin", "Africa/Casablanca",
    "Africa/Cairo", "Asia/Tehran", "Asia/Beirut", "Australia/Lord_Howe", "Pacific/Chatham", "Antarctica/Troll", "UTC",
}  # fmt: skip
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
    """Return how many changes were compared, and where code and oracle disagree."""
    info = ZoneInfo(zone)
    moments = changes(info, first, last)
    wrong = []
    # A zone whose clocks never change is compared once.
    for moment in moments or [first]:
        window = Window(info, moment - timedelta(hours=8), moment + timedelta(hours=6))
        for pattern in PATTERNS:
            # What lies before the window may be a first pass that the oracle has not seen: skip its edge.
            begin = window.start + timedelta(hours=2)
            expected = [instant for instant in window.instants(pattern) if instant >= begin]
            if fires(pattern, zone, begin, window.end) != expected:
                wrong.append(f"{pattern} around {moment:%Y-%m-%d %H:%M}")
    return len(moments), wrong


def offsets(zone: str) -> tuple[object, ...]:
    """The offsets of a zone through the years, each with the second from which on it holds."""
    info = ZoneInfo(zone)

    def at(second: int) -> timedelta | None:
        return datetime.fromtimestamp(second, UTC).astimezone(info).utcoffset()

    first, last = int(FIRST.timestamp()), int(LAST.timestamp())
    offset = at(first)
    found: list[object] = [offset]
    for second in range(first, last, HALF_A_DAY):
        if at(second) == offset:
            continue
        low, high = second - HALF_A_DAY, second
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if at(middle) == offset else (low, middle)
        offset = at(second)
        found += [high, offset]
    return tuple(found)


@cache
def zones_alike() -> dict[str, list[str]]:
    """Every zone of the machine's tz database: one for each way of changing the clocks, with all that are like it."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(available_timezones()):
        alike.setdefault(offsets(name), []).append(name)
    return {names[0]: names for names in alike.values()}


@pytest.mark.promise("CRON-3", "CRON-2")
def test_no_instant_differs_from_the_oracle_at_any_change_of_the_clocks() -> None:
    compared = {zone: differences(zone, FIRST, LAST) for zone in zones_alike()}
    assert {zone: wrong for zone, (_, wrong) in compared.items() if wrong} == {}
    # An oracle that is asked nothing agrees with everything.
    assert all(seen == len(offsets(zone)) // 2 for zone, (seen, _) in compared.items())
    assert sum(seen > 0 for seen, _ in compared.values()) > 30


@pytest.mark.promise("CRON-2")
def test_every_zone_of_the_machine_is_compared() -> None:
    names = {name for alike in zones_alike().values() for name in alike}
    assert names == available_timezones()
    assert names >= KNOWN
    assert all(zone_of(name) is not None for name in names)


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


def test_times_are_found_from_1970_to_the_last_day_of_the_year_9999() -> None:
    minutely = read_cron("* * * * *")
    last = 253_402_214_400
    for zone in (UTC, ZoneInfo("Pacific/Kiritimati"), ZoneInfo("Pacific/Pago_Pago")):
        assert next_instant(minutely, zone, 0) == 60
        assert next_instant(minutely, zone, -1) is None
        assert next_instant(minutely, zone, last - 1) == last
        assert next_instant(minutely, zone, last) is None


def test_the_zones_have_changes_to_compare() -> None:
    """An oracle that is asked nothing agrees with everything."""
    counts = {
        zone: len(changes(ZoneInfo(zone), utc(2020), utc(2036))) for zone in ("Europe/Berlin", "Africa/Casablanca")
    }
    assert counts["Europe/Berlin"] == 32
    assert counts["Africa/Casablanca"] >= 24
