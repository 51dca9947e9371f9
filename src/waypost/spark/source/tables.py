"""The tables of the data source, declared once: what each `kind` reads, and what a written DataFrame may hold.

The tables that a store's bulk reader returns are in `waypost.store.bulk.tables`. Times are milliseconds by the store's
clock: `timestamp_millis(at_ms)` converts them to timestamps.
"""

from __future__ import annotations

from typing import Final

from waypost.store.bulk.tables import ENVELOPE, JOURNAL, MESSAGES, SCHEDULES, Table

#: Messages as they were published, one row for each, from a journal that keeps bodies.
PUBLISHED: Final = Table(
    "published",
    {
        "queue": "STRING",
        "number": "BIGINT",
        "id": "STRING",
        "published_ms": "BIGINT",
        "key": "STRING",
        "group": "STRING",
        "priority": "INT",
        "due_ms": "BIGINT",
        "cause": "STRING",
        "size": "BIGINT",
        "chain_id": "STRING",
        "schedule": "STRING",
        **ENVELOPE,
    },
)

#: How ids of messages that a backfill publishes begin: a time in 1970, which no publisher's clock has. So they are
#: recognized wherever an id is (the journal has no headers at its usual level), and searched in the whole journal.
BACKFILL_PREFIX: Final = "00000"

#: What `kind` may be, and the table that it reads.
KINDS: Final[dict[str, Table]] = {
    "ready": MESSAGES,
    "delayed": MESSAGES,
    "waiting": MESSAGES,
    "leased": MESSAGES,
    "dead": MESSAGES,
    "journal": JOURNAL,
    "messages": PUBLISHED,
    "schedules": SCHEDULES,
}

_NUMBER: Final = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")

#: What a written DataFrame may have: the body, and how to publish it. Only `body` must be there.
WRITTEN: Final[dict[str, tuple[str, ...]]] = {
    "body": ("string", "binary", "struct", "map", "array"),
    "key": ("string",),
    "delay": _NUMBER,
    "due": ("timestamp", "bigint"),
    "expires": ("timestamp", *_NUMBER),
    "priority": ("tinyint", "smallint", "int", "bigint"),
    "group": ("string",),
    "headers": ("map",),
    "retry": ("string",),
    "timeout": _NUMBER,
}
