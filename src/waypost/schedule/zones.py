"""Time zones: `UTC` or `Z`, fixed offsets, IANA names."""

from __future__ import annotations

import re
from datetime import UTC, timedelta, timezone, tzinfo
from functools import lru_cache

from waypost.checks import show
from waypost.errors import InvalidSchedule

OFFSET = re.compile(r"([+-])(\d{2}):?(\d{2})")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+\-]*(?:/[A-Za-z0-9_+\-]+){0,3}")


def zone_of(name: str) -> tzinfo:
    """Return the zone of a name, or raise `InvalidSchedule`. A fixed offset is a `datetime.timezone`."""
    if not isinstance(name, str):
        raise InvalidSchedule(f"tz must be a time zone as text, not {show(name)}")
    return _zone_of(name)


@lru_cache(maxsize=1024)
def _zone_of(name: str) -> tzinfo:
    if name.upper() in ("UTC", "Z"):
        return UTC
    offset = OFFSET.fullmatch(name)
    if offset is not None:
        hours, minutes = int(offset[2]), int(offset[3])
        if hours > 23 or minutes > 59:
            raise InvalidSchedule(f"time zone {name!r}: an offset is at most 23:59")
        span = timedelta(hours=hours, minutes=minutes)
        return timezone(-span if offset[1] == "-" else span)
    # zoneinfo opens a file of this name, so reject names that could leave its directory.
    if NAME.fullmatch(name) is not None:
        from zoneinfo import ZoneInfo  # it reads the configuration of Python

        try:
            return ZoneInfo(name)
        except (OSError, ValueError):  # no such file, a folder, not a zone file; "not found" is a KeyError
            pass
        except KeyError:
            pass
    raise InvalidSchedule(
        f"time zone {name[:64]!r} is not known here; use UTC, an offset like +05:30, or a name like Europe/Madrid. If "
        "the system has no zones, install tzdata"
    )


def zone_name(name: str) -> str:
    """Return the name of a zone as used in keys: `Z` and `utc` are `UTC`."""
    zone_of(name)
    return "UTC" if name.upper() in ("UTC", "Z") else name
