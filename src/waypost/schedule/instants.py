"""The instants at which a cron pattern fires in a time zone, with daylight saving.

A pattern whose hour field begins with `*` follows real time: a local time that the clocks skip does not occur, one
that they repeat occurs twice. Every other pattern is wall-clock: local times that are skipped make one fire, at the
first instant after the gap, and of a time that is repeated only the first counts.

Both are monotonic, so the search jumps from match to match, never minute by minute. Times are whole seconds of UTC.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo

from waypost.schedule.cron import Cron

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  (naive, for arithmetic with local times)
DAY = 86_400
#: The distance between two offsets compared: no zone, since 1970, changed its clocks and back within a week.
STRIDE = 6 * DAY
#: The last second that has a local time in every zone.
SECONDS_MAX = 253_402_214_400
#: Later than all instants.
NEVER = 2 * SECONDS_MAX


def next_instant(cron: Cron, zone: tzinfo, after: int) -> int | None:
    """Return the first second after `after` (seconds of UTC) at which a pattern fires, or None."""
    if not 0 <= after < SECONDS_MAX:
        return None
    if isinstance(zone, timezone):
        offset = int(zone.utcoffset(None).total_seconds())
        found = cron.after(_naive(after + offset))
        return None if found is None else _seconds(found) - offset
    return _real_time(cron, zone, after) if cron.follows_real_time else _wall_clock(cron, zone, after)


def next_of_all(
    crons: Sequence[Cron],
    zone: tzinfo,
    after: int,
    excluded: Set[date] = frozenset(),
    upcoming: dict[int, int] | None = None,
) -> int | None:
    """Return the first second after `after` at which any pattern fires, on a day that is not excluded, or None.

    Days are those of the zone. Each pattern follows daylight saving by its own rule. A walk gives the same `upcoming`
    to each of its searches, with times in order: it keeps the next instant of each pattern until that has passed.
    """
    upcoming = {} if upcoming is None else upcoming
    while True:
        for number, cron in enumerate(crons):
            if upcoming.get(number, after) <= after:
                instant = next_instant(cron, zone, after)
                # A pattern without another instant is searched no more.
                upcoming[number] = NEVER if instant is None else instant
        instant = min(upcoming.values(), default=NEVER)
        if instant == NEVER:
            return None
        if not excluded:
            return instant
        if instant >= SECONDS_MAX:
            return None
        day = datetime.fromtimestamp(instant, UTC).astimezone(zone).date()
        if day not in excluded:
            return instant
        if day == date.max:
            return None
        # Go on with the next day: a pattern may have thousands of instants in this one.
        midnight = datetime.combine(day + timedelta(days=1), time())
        after = max(instant, first_instant_of(zone, midnight) - 1)


def _wall_clock(cron: Cron, zone: tzinfo, after: int) -> int | None:
    local: datetime | None = _naive(after + offset_at(zone, after))
    while True:
        local = None if local is None else cron.after(local)
        if local is None:
            return None
        instant = first_instant_of(zone, local)
        # In the second pass of a repeated hour, its local times have fired already.
        if instant > after:
            return instant


def _real_time(cron: Cron, zone: tzinfo, after: int) -> int | None:
    """Search with the current offset up to the next change, then with the offset after it."""
    while True:
        offset = offset_at(zone, after)
        local = cron.after(_naive(after + offset))
        if local is None:
            return None
        candidate = _seconds(local) - offset
        change = _next_change(zone, after, min(candidate, SECONDS_MAX))
        if change is None:
            return candidate
        # The change itself may be the instant, so search from the second before it, with the offset after it.
        offset = offset_at(zone, change)
        local = cron.after(_naive(change - 1 + offset))
        if local is None:
            return None
        candidate = _seconds(local) - offset
        if candidate == change or _next_change(zone, change, candidate) is None:
            return candidate
        after = change


def _next_change(zone: tzinfo, after: int, until: int) -> int | None:
    """Return the first second in (after, until] whose offset differs from the second before it, or None."""
    offset, low = offset_at(zone, after), after
    while low < until:
        high = min(low + STRIDE, until)
        if offset_at(zone, high) != offset:
            return _change_between(zone, low, high)
        low = high
    return None


def _change_between(zone: tzinfo, low: int, high: int) -> int:
    """Return the first second in (low, high] whose offset differs from that of `low`."""
    offset = offset_at(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        if offset_at(zone, middle) == offset:
            low = middle
        else:
            high = middle
    return high


def first_instant_of(zone: tzinfo, local: datetime) -> int:
    """Return the first instant with a local time; for a skipped one, the first instant after the gap."""
    seconds = _seconds(local)
    before = seconds - _offset_of(zone, local, 0)
    if before + offset_at(zone, before) == seconds:
        return before
    # Skipped: with the offset after the gap it is before the change, with the offset before the gap after it.
    return _change_between(zone, seconds - _offset_of(zone, local, 1), before)


def _offset_of(zone: tzinfo, local: datetime, fold: int) -> int:
    return _whole(zone.utcoffset(local.replace(fold=fold)))


def offset_at(zone: tzinfo, instant: int) -> int:
    """Return how many seconds local time is ahead of UTC at an instant."""
    return _whole(datetime.fromtimestamp(instant, UTC).astimezone(zone).utcoffset())


def _whole(offset: timedelta | None) -> int:
    return 0 if offset is None else offset.days * DAY + offset.seconds


def _naive(seconds: int) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def _seconds(local: datetime) -> int:
    span = local - EPOCH
    return span.days * DAY + span.seconds
