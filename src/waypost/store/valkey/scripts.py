"""The Lua scripts as the server gets them: constants from our own modules, the common part, the verb.

Scripts are files, loaded once and called by their hash; values reach them only as arguments. The constants put
before them come from `policy` and `message`, so that Python and Lua cannot disagree.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any, get_args

from msgspec import structs

from waypost import policy
from waypost.message import MINUTE_COUNTERS, REDELIVERY_CAUSES, EventName

#: The layout of the keys. A newer one than a client knows makes it stop before it touches anything.
VERSION = 1

#: Suffixes of a queue's keys, in the order of KEYS.
KEY_NAMES = (
    "queue", "messages", "state", "ready", "due", "leases", "keys", "waiting", "dead", "errors", "journal", "readers",
    "sleepers", "rate", "completed", "outgoing", "arrivals",
)  # fmt: skip

#: Cumulative counters of a queue, in the order in which they are packed.
COUNTERS = (
    "published", "redriven", "done", "dead", "dropped", "cancelled", "replaced", "claims", "first_claims",
    *(f"again_{cause}" for cause in REDELIVERY_CAUSES),
    "expired", "released", "retried", "snoozed", "duplicates", "transferred",
    "sequence", "journal_last", "journal_first",
)  # fmt: skip

#: Events and causes travel as one byte: the place in these lists, from 1. Only ever append.
EVENTS: tuple[EventName, ...] = get_args(EventName)
CAUSES = (
    *REDELIVERY_CAUSES, "due", "unparked", "overload", "publish", "replace", "parked", "forwarded", "at_most_once",
    "request", "purge", "retry", "snooze", "release", "dead", "drop", "dead_max", "dead_keep", "hard_cap",
)  # fmt: skip

SCRIPTS = (
    "publish", "claim", "settle", "extend", "cancel", "redrive", "purge", "peek", "stats", "configure", "journal",
    "outgoing",
)  # fmt: skip


class Script:
    """A script and its hash."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text.encode()
        # The server names scripts by SHA-1; this is an address, not a protection.
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


@cache
def script(name: str) -> Script:
    """A script by the name of its verb."""
    folder = resources.files(__package__) / "lua"
    parts = [constants(), *((folder / f"{part}.lua").read_text() for part in ("common", name))]
    return Script(name, "\n".join(parts))


def constants() -> str:
    """The Lua lines that give scripts the limits, codes and the default policy."""
    limits = (
        "PROMOTE_MAX", "RECLAIM_MAX", "BURY_MAX", "REPLAY_MAX", "SLEEPER_TTL_MS", "ARRIVAL_TTL_MS", "MINUTES_KEPT",
        "HEAD_OFFSET", "CHUNK_MESSAGES_MAX",
    )  # fmt: skip
    lines = [f"local {name} = {getattr(policy, name)}" for name in limits]
    lines += [
        f"local VERSION = {VERSION}",
        f"local COUNTERS, MINUTE_COUNTERS = {len(COUNTERS)}, {len(MINUTE_COUNTERS)}",
        "local NO_NONCE = string.rep('\\0', 12)",
        f"local COUNT = {_table({name: place for place, name in enumerate(COUNTERS, 1)})}",
        f"local MINUTE = {_table({name: place for place, name in enumerate(MINUTE_COUNTERS, 1)})}",
        f"local FAILURE = {_table(dict.fromkeys(sorted(policy.FAILURE_EVENTS), True))}",
        f"local EVENT = {_bytes(EVENTS)}",
        f"local CAUSE = {_bytes(CAUSES)}",
        f"local CAUSE_NUMBER = {_table({name: place for place, name in enumerate(CAUSES, 1)})}",
        f"local CAUSE_NAME = {{{', '.join(_literal(name) for name in CAUSES)}}}",
        f"local DEFAULT_POLICY = {_table(structs.asdict(policy.DEFAULT_POLICY))}",
    ]
    return "\n".join(lines)


def _table(entries: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {_literal(value)}" for name, value in entries.items() if value is not None) + "}"


def _bytes(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(f"{name} = '\\{place}'" for place, name in enumerate(names, 1)) + "}"


def _literal(value: Any) -> str:
    if value is True:
        return "true"
    return f"'{value}'" if isinstance(value, str) else str(value)
