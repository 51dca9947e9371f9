"""Shared records: small data that all programs that use a store share, such as several web servers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from waypost.checks import check_count, check_seconds, check_text, show
from waypost.errors import InvalidInput, InvalidName
from waypost.operations.flow import ClientContext, Flow
from waypost.policy import RECORD_BYTES_MAX, RECORDS_MAX, RECORDS_PAGE_MAX
from waypost.times import Duration
from waypost.values import RecordPage, RecordSaved

KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
NAME_CHARACTERS_MAX = 128
CURSOR_CHARACTERS_MAX = 1_024


def check_kind(kind: str) -> str:
    """Return the kind of a record, or raise `InvalidName`."""
    if not isinstance(kind, str) or KIND.fullmatch(kind) is None:
        raise InvalidName(
            f"the kind of a record has up to 32 of a-z, 0-9 and -, and begins with a letter: {show(kind)}"
        )
    return kind


def save_record(
    context: ClientContext,
    kind: str,
    name: str,
    data: bytes | None,
    *,
    version: int | None = None,
    ttl: Duration | None = None,
    keep: int = RECORDS_MAX,
) -> Flow[RecordSaved]:
    """Save a record, if it has this version; without `data` remove it. A repeat after a lost reply is harmless."""
    check_kind(kind)
    check_text("name", name, NAME_CHARACTERS_MAX)
    check_count("keep", keep, 1, RECORDS_MAX)
    if data is not None and (not isinstance(data, bytes) or len(data) > RECORD_BYTES_MAX):
        raise InvalidInput(f"the data of a record is at most {RECORD_BYTES_MAX:,} bytes, not {show(data)[:40]}")
    if version is not None:
        check_count("version", version, 0, 2**62)
    ttl_ms = None if ttl is None else max(1, round(check_seconds("ttl", ttl) * 1000))
    call = context.store.save_record(kind, name, data, version=version, ttl_ms=ttl_ms, keep=keep)
    return (yield from context.attempt(call))


def records(
    context: ClientContext, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = 100
) -> Flow[RecordPage]:
    """Return a page of the records of a kind, the newest first, or the records with some names."""
    check_kind(kind)
    check_count("limit", limit, 1, RECORDS_PAGE_MAX)
    if len(names) > RECORDS_PAGE_MAX:
        raise InvalidInput(f"{len(names):,} names at once, the limit is {RECORDS_PAGE_MAX}")
    for name in names:
        check_text("name", name, NAME_CHARACTERS_MAX)
    if cursor is not None:
        check_text("cursor", cursor, CURSOR_CHARACTERS_MAX)
    return (yield from context.attempt(context.store.records(kind, names=names, cursor=cursor, limit=limit)))
