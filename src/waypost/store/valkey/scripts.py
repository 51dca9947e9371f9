"""The Lua scripts as the server gets them: the base, the verb, and our own constants written in.

Scripts are files, loaded once and called by their hash; values reach them only as arguments. The constants come from
`policy`, `message` and this module, so that Python and Lua cannot disagree; they are written in as literals because a
table of them would be built anew at every call.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any, get_args

from msgspec import structs

from waypost import policy
from waypost.release import DATA_VERSION
from waypost.values import MINUTE_COUNTERS, MINUTE_COUNTERS_FIRST, REDELIVERY_CAUSES, EventName

#: The newest layout that this release can use. A client refuses a queue that needs a newer one before it changes
#: anything. 1: release 0.1.
VERSION = DATA_VERSION
#: The layout that a client must know to use what this release writes; a queue with new settings needs `VERSION`.
#: It stays behind by one release, so that both work side by side, unless the release before is to stop.
VERSION_WRITTEN = 2

#: The mark of sleepers that are in a blocking wait.
BLOCKED_MARK = "!"
#: Added to the expiry of a message while it is leased. No expiry is as late.
EXPIRY_ASIDE = 2**50
#: Suffixes of a queue's keys, in the order of KEYS.
KEY_NAMES = (
    "queue", "messages", "state", "ready", "due", "leases", "keys", "waiting", "dead", "errors", "journal", "readers",
    "sleepers", "rate", "completed", "outgoing", "arrivals",
)  # fmt: skip

#: The counters of a queue in the order in which they are packed: cumulative ones, then the minute in progress.
COUNTERS = (
    "published", "redriven", "done", "dead", "dropped", "cancelled", "replaced", "claims", "first_claims",
    *(f"again_{cause}" for cause in REDELIVERY_CAUSES),
    "expired", "released", "retried", "snoozed", "duplicates", "transferred",
    "sequence", "journal_last", "journal_first", "rate_sum",
    "minute", *(f"minute_{name}" for name in MINUTE_COUNTERS),
)  # fmt: skip

#: Events and causes are encoded as one byte: the index in these lists, from 1. Only append to them.
EVENTS: tuple[EventName, ...] = get_args(EventName)
CAUSES = (
    *REDELIVERY_CAUSES, "due", "unparked", "overload", "publish", "replace", "parked", "forwarded", "at_most_once",
    "request", "purge", "retry", "snooze", "release", "dead", "drop", "dead_max", "dead_keep", "hard_cap",
    "blocked", "unblocked", "damaged", "mended", "max_deliveries", "blocker_failed", "edited", "held", "group",
    "lapsed", "priority",
)  # fmt: skip

SCRIPTS = (
    "publish", "claim", "settle", "extend", "cancel", "reschedule", "redrive", "purge", "peek", "stats",
    "configure", "journal", "outgoing", "heartbeat", "unregister", "workers", "request_worker", "arrive", "watch",
    "save_schedule", "schedules", "fire_schedule", "trigger_schedule", "promote", "check", "poll", "remove",
    "locate", "save_record", "records", "replace_dead", "groups", "configure_group", "skip_held",
    "change_priority",
)  # fmt: skip
#: Scripts that need nothing of the base.
APART = ("elect", "start_wait", "unblock")
#: What stands before the base of a script: a way that is shorter than to make the functions of the base.
BEFORE_BASE = {"publish": "one"}
#: Scripts that are not given all keys of a queue, and those that they are given; they make the names of the others.
GIVEN_KEYS = {"publish": ("queue", "messages", "ready", "journal", "sleepers")}


def _table(entries: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {value}" for name, value in entries.items()) + "}"


class Script:
    """A script and its hash."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text.encode()
        # The server identifies scripts by SHA-1, which is not used for security here.
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


#: Where a script does not include it itself, behind its shortest way, this file comes right behind the base.
SHARED = "-- include shared\n"
#: A file in place of the line: always, `if` a condition of Lua holds, or `as` it is made for a use.
INCLUDE = re.compile(r"^-- include (\w+)(?: (if|as) (.+))?\n", re.MULTILINE)
#: A part of such a file: in each script, or `where` the use is one of these.
PART = re.compile(r"^ +-- include (\w+)(?: where (.+))?\n", re.MULTILINE)
#: What a file makes known at its top level: functions, and names with or without a value.
TOP_FUNCTION = re.compile(r"^local function (\w+)", re.MULTILINE)
TOP_NAMES = re.compile(r"^local (?!function)([\w, ]+?)( =|$)", re.MULTILINE)
LIMITS = (
    "PROMOTE_MAX", "RECLAIM_MAX", "BURY_MAX", "REPLAY_MAX", "STAMP_AHEAD_MS", "SLEEPER_TTL_MS", "ARRIVAL_TTL_MS",
    "ARRIVALS_FORGOTTEN_MAX", "CHANGES_KEPT", "LAPSE_MAX",
    "MINUTES_KEPT", "HEAD_OFFSET", "CHUNK_MESSAGES_MAX", "WORKERS_SWEPT_MAX", "ENDED_TTL_MS", "WAITER_TTL_MS",
    "NO_END_MS", "COMPLETION_TTL_MS", "BLOCKER_CHECK_MS", "BLOCKER_CHECKS_MAX", "POLL_SOON_MS_MAX",
    "POLL_SOON_MESSAGES_MAX", "UNBLOCK_TTL_MS", "SCANNED_MAX", "CHUNK_BYTES_MAX", "JOURNAL_SLACK_PART",
    "SIDE_EFFECTS_MAX", "REMOVED_TTL_MS", "RECORDS_SWEPT_MAX", "JOURNAL_ERROR_CHARACTERS_MAX", "LINKS_MAX",
    "GROUP_STRIDE", "GROUP_RATE_PARTS", "GROUPS_KEPT_MAX", "GROUPS_SKIPPED_MAX",
    "OLDEST_READ_MAX",
)  # fmt: skip
_places: dict[str, dict[str, Any]] = {
    "COUNT": {name: place for place, name in enumerate(COUNTERS, 1)},
    "MINUTE": {name: COUNTERS.index(f"minute_{name}") + 1 for name in MINUTE_COUNTERS},
    "EVENT": {name: f"'\\{place}'" for place, name in enumerate(EVENTS, 1)},
    "CAUSE": {name: f"'\\{place}'" for place, name in enumerate(CAUSES, 1)},
    "CAUSE_NUMBER": {name: place for place, name in enumerate(CAUSES, 1)},
}
_texts = {
    **{name: str(getattr(policy, name)) for name in LIMITS},
    **{f"{table}_TABLE": _table(entries) for table, entries in _places.items()},
    "KEY_NAMES": f"'{' '.join(KEY_NAMES)}'",
    "VERSION": str(VERSION),
    "VERSION_WRITTEN": str(VERSION_WRITTEN),
    "NEW_SETTINGS_TABLE": _table(dict.fromkeys(sorted(policy.NEW_SETTINGS), "true")),
    "EXPIRY_ASIDE": str(EXPIRY_ASIDE),
    "COUNTERS": str(len(COUNTERS)),
    # How packed counters begin: MessagePack's mark of a list, and its length.
    "COUNTS_HEAD": f"'\\220\\0\\{len(COUNTERS)}'",
    "MINUTE_COUNTERS_FIRST": str(MINUTE_COUNTERS_FIRST),
    "REDELIVERY_CAUSES": str(len(REDELIVERY_CAUSES)),
    "DEFAULT_PRIORITY": str(policy.PRIORITY_DEFAULT),
    "DEFAULT_JOURNAL_LIMIT": str(policy.DEFAULT_POLICY.journal_max + policy.DEFAULT_POLICY.journal_slack),
    "BLOCKED_MARK": f"'{BLOCKED_MARK}'",
    "BLOCKED_BYTE": str(ord(BLOCKED_MARK)),
    "NO_NONCE": "'" + "\\0" * 12 + "'",
    # The name of a queue in the first of its keys; no namespace has a colon.
    "QUEUE_PATTERN": "'^{[^:]*:(.*)}:queue$'",
    "FAILURE_TABLE": _table(dict.fromkeys(sorted(policy.FAILURE_EVENTS), "true")),
    "CAUSE_NAME_TABLE": "{" + ", ".join(f"'{name}'" for name in CAUSES) + "}",
    "DEFAULT_POLICY": _table(
        {
            name: f"'{value}'" if isinstance(value, str) else value
            for name, value in structs.asdict(policy.DEFAULT_POLICY).items()
            # The first release does not know `on_failure`: a record without it means its default.
            if value is not None and value is not False and name != "on_failure"
        }
    ),
}
COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
CONSTANT = re.compile(rf"\b(?:(?:{'|'.join(_places)})\.\w+|(?:{'|'.join(_texts)})\b)")


def constant(name: str) -> str:
    """What stands in a script for a name of ours: a number, a byte or a table, written out."""
    table, dot, entry = name.partition(".")
    return str(_places[table][entry]) if dot else _texts[name]


def _read(name: str) -> str:
    return (resources.files(__package__) / "lua" / f"{name}.lua").read_text()


def _included(match: re.Match[str]) -> str:
    """A file in the place of its include, with the parts that its use needs.

    One with a condition is skipped where that does not hold: to make thirty functions takes the server as long as a
    claim's whole work on one message.
    """
    name, kind, what = match.groups()
    use = what if kind == "as" else ""
    text = PART.sub(lambda part: _read(part[1]) if part[2] is None or use in part[2].split(", ") else "", _read(name))
    text = text.replace("GROUP_USE", f"'{use}'")
    if kind != "if":
        return text
    names = TOP_FUNCTION.findall(text) + [found[0] for found in TOP_NAMES.findall(text)]
    text = TOP_FUNCTION.sub(r"function \1", text)
    text = TOP_NAMES.sub(lambda found: found[1] + found[2] if found[2] else "", text)
    return f"local {', '.join(names)}\nif {what} then\n{text}end\n"


@cache
def script(name: str) -> Script:
    """A script by the name of its verb."""
    text = _read(name)
    if name not in APART:
        text = _read("base") + ("" if SHARED in text else SHARED) + text
        if name in BEFORE_BASE:
            text = _read(BEFORE_BASE[name]) + text
    while INCLUDE.search(text):
        text = INCLUDE.sub(_included, text)
    text = COMMENT.sub("", text)
    return Script(name, CONSTANT.sub(lambda match: constant(match[0]), text))
