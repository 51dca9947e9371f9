"""Values that are wrong for every argument, and calls of every public method with them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, NoReturn

from waypost import CatchUp, Middleware, Published, Waypost
from waypost.client.options import RULE_OPTIONS, DeadFilters
from waypost.operations.publish import OPTIONS
from waypost.views import LoggedAction

ID = "0123456789abcdefghjkmnpq"


class HostileError(Exception):
    """An error raised by code of the caller that waypost runs: it reaches the caller unchanged."""


class Hostile:
    """An object whose every method raises."""

    def _refuse(self, *given: object) -> NoReturn:
        raise HostileError

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __lt__ = __hash__ = _refuse
    __eq__ = __ne__ = __float__ = __int__ = __index__ = _refuse


class BadZone(tzinfo):
    def utcoffset(self, at: datetime | None) -> NoReturn:
        raise RuntimeError("no offset today")

    dst = tzname = utcoffset


def wrong() -> list[Any]:
    """Return new values each time: some calls consume them."""
    return [
        b"bytes", "", "\0", "\ud800", "a b", "x" * 5000, "é" * 200, ID, "100/m",
        0, -1, 10**400, 2**63, True, 0.0001, math.nan, math.inf, -math.inf, 1j,
        [], [[]], [None], ["x", 7], (), {}, {"a": object()}, {1: 2}, {"é": "\ud800"}, {"x"},
        (each for each in (1, "b")),
        object(), Hostile(), [Hostile()], {"a": Hostile()}, type, Exception("error"), Hostile._refuse,
        lambda body: body,
        datetime(2030, 1, 1), datetime.max.replace(tzinfo=timezone(-timedelta(hours=23))),  # noqa: DTZ001
        datetime.min.replace(tzinfo=timezone(timedelta(hours=23))), datetime(2030, 1, 1, tzinfo=BadZone()),
        datetime(2020, 1, 1, tzinfo=UTC), timedelta.max, timedelta.min, timedelta(0),
        Published("no id", "queued", "no/queue"), Middleware(), CatchUp(3),
    ]  # fmt: skip


SETTINGS = (
    "lease", "max_deliveries", "max_pending", "overload", "max_running", "rate", "journal", "journal_max", "dead_max",
    "dead_keep", "completed", "hide_bodies", "tracebacks", "fair", "order", "on_failure", "group_max_running",
    "group_rate", "group_max_pending", "no_such_setting",
)  # fmt: skip
DEAD_FILTERS = tuple(DeadFilters.__annotations__)
SCHEDULED = {"name": "nightly", "queue": "fuzzed"}

#: What each public method takes: arguments that are fine, and the names of others that may be given.
CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "publish": ({"queue": "fuzzed", "body": {"n": 1}}, (*OPTIONS, "no_such_option")),
    "publish_many": ({"queue": "fuzzed", "bodies": [1, 2]}, (*OPTIONS, "no_such_option")),
    "receive": ({"queue": "fuzzed"}, ("wait", "retry", "renew")),
    "consume": ({"queue": "fuzzed", "wait": 0}, ("retry", "renew")),
    "extend": ({"message": None}, ()),
    "cancel": ({"queue": "fuzzed"}, ("id", "key")),
    "result": ({"queue": "fuzzed", "id": ID}, ("default", "as_type")),
    "wait_result": ({"queue": Published(ID, "queued", "fuzzed"), "timeout": 0}, ("as_type",)),
    "wait_chain": ({"chain": f"fuzzed/{ID}", "timeout": 0}, ("as_type",)),
    "worker": ({}, ("queues", "health_window", "scheduler", "promoter")),
    "drain": ({"timeout": 0}, ()),
    "peek": ({"queue": "fuzzed"}, ("n", "state")),
    "messages": ({"queue": "fuzzed"}, ("state", "id", "key", "group", "reason", "before", "limit", "no_such_option")),
    "page": (
        {"queue": "fuzzed"}, ("state", "cursor", "limit", "id", "key", "group", "reason", "before", "no_such_option"),
    ),
    "find": ({"id": ID}, ("id",)),
    "find_key": ({"key": "order:7"}, ("key", "queue")),
    "links": ({"queue": "fuzzed", "id": ID}, ("id",)),
    "stats_many": ({"queues": ["fuzzed"]}, ("queues", "minutes")),
    "dead_letters": ({"queue": "fuzzed"}, ("reason", "id", "key", "group")),
    "timers": ({"queue": "fuzzed"}, ("before",)),
    "stats": ({"queue": "fuzzed"}, ("minutes",)),
    "ledger": ({"queue": "fuzzed"}, ()),
    "check": ({"queue": "fuzzed"}, ("mend", "progress")),
    "history": ({"queue": "fuzzed", "id": ID}, ()),
    "queues": ({}, ()),
    "workers": ({}, ()),
    "configure": ({"queue": "settings"}, SETTINGS),
    "policy": ({"queue": "fuzzed"}, ()),
    "pause": ({"queue": "settings"}, ()),
    "resume": ({"queue": "settings"}, ()),
    "groups": ({"queue": "grouped"}, ("group", "limit", "cursor")),
    "configure_group": (
        {"queue": "grouped", "group": "g"}, ("weight", "max_running", "rate", "max_pending", "no_such_setting"),
    ),
    "pause_group": ({"queue": "grouped", "group": "g"}, ()),
    "resume_group": ({"queue": "grouped", "group": "g"}, ()),
    "skip_held": ({"queue": "grouped", "group": "g"}, ()),
    "redrive": ({"queue": "fuzzed"}, ("id", "ids", "reason", "limit", "rate")),
    "purge": ({"queue": "fuzzed"}, ("state", "ids", *DEAD_FILTERS, "no_such_option")),
    "replace_dead": ({"queue": "fuzzed", "id": ID}, ("body", "headers")),
    "count_messages": ({"queue": "fuzzed", "state": "ready"}, ("limit", *DEAD_FILTERS, "no_such_option")),
    "start_bulk": (
        {"queue": "fuzzed", "verb": "redrive"},
        ("state", "delay", "at", "rate", "user", "via", *DEAD_FILTERS, "no_such_option"),
    ),
    "reschedule": ({"queue": "fuzzed", "delay": 60}, ("id", "key", "at")),
    "stop_worker": ({"name": "fuzzed"}, ()),
    "quiet_worker": ({"name": "fuzzed"}, ()),
    "bulk_action": ({"id": ID}, ()),
    "bulk_actions": ({}, ("cursor", "limit")),
    "change_bulk": ({"id": ID, "change": "pause"}, ()),
    "run_bulk": ({"id": ID}, ("seconds",)),
    "save_record": ({"kind": "fuzzed", "name": "one", "data": b""}, ("version", "ttl", "keep")),
    "records": ({"kind": "fuzzed"}, ("names", "cursor", "limit")),
    "log_action": ({"action": LoggedAction("u", "test", "pause", None, True, "")}, ()),
    "actions": ({}, ("cursor", "limit")),
    "remove_queue": ({"queue": "removed"}, ()),
    "journal": ({"queue": "fuzzed"}, ("after", "limit")),
    "journal_reader": ({"queue": "fuzzed", "name": "reader"}, ("read_to",)),
    "journal_forget": ({"queue": "fuzzed", "name": "reader"}, ()),
    "journal_trim": ({"queue": "fuzzed", "up_to": 0}, ()),
    "save_schedule": ({**SCHEDULED, "every": 3600}, (*RULE_OPTIONS, "key", "no_such_option")),
    "remove_schedule": (SCHEDULED, ()),
    "pause_schedule": (SCHEDULED, ()),
    "resume_schedule": (SCHEDULED, ()),
    "trigger_schedule": (SCHEDULED, ()),
    "backfill": (
        {**SCHEDULED, "start": datetime(2020, 1, 1, tzinfo=UTC), "end": datetime(2020, 1, 2, tzinfo=UTC)},
        ("limit", "dry_run", "progress"),
    ),
    "schedules": ({}, ("queue", "count")),
    "run_scheduler": ({"ttl": 0}, ("on_tick",)),
    "run_promoter": ({"ttl": 0}, ("on_tick",)),
    "use": ({}, ("middleware",)),
}  # fmt: skip
#: Those that register a function, and have nothing to do with a store.
DECORATORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "handler": (
        {"queue": "fuzzed"},
        ("concurrency", "retry", "timeout", "batch", "manual", "process", "max_run", "on_lease_lost", "result_ttl",
         "engine"),
    ),
    "spark_job": (
        {"queue": "fuzzed"},
        ("concurrency", "retry", "timeout", "manual", "max_run", "on_lease_lost", "result_ttl", "master", "config",
         "session"),
    ),
    "cron": ({"pattern": "0 9 * * *"}, ("tz", "name", "queue", "handler", *sorted(RULE_OPTIONS - {"cron", "tz"}))),
    "every": ({"interval": 60}, ("name", "queue", "handler", *sorted(RULE_OPTIONS - {"every"}))),
    "relay": ({"queue": "fuzzed", "to": "memory://#elsewhere"}, ("batch", "key", "headers", "hold")),
}  # fmt: skip
#: Where a value that is fine would wait for long.
WAITS = {"wait", "timeout"}


def public_methods() -> set[str]:
    """The methods of a client that can be called with something."""
    found = inspect.getmembers(Waypost, inspect.isfunction)
    return {name for name, _ in found if not name.startswith("_")} - {"open", "close"}


def calls(
    table: dict[str, tuple[dict[str, Any], tuple[str, ...]]],
) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Each method with one wrong value: its name, that of the argument, the value, and all arguments."""
    for method, (given, others) in table.items():
        for name in (*given, *others):
            for value in wrong():
                yield method, name, value, {**given, name: value}
