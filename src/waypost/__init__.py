"""Messages that must arrive: queues, timers and dead letters on SQLite, Valkey or PostgreSQL, with an exact history.

The names that programs use are here; the errors are in `waypost.errors`, all of them a `WaypostError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from waypost.client import Waypost
from waypost.errors import WaypostError
from waypost.message import Dead, Drop, Message, Outcome, Queue, Retry, Snooze, StoredMessage
from waypost.middleware import Middleware, Outgoing
from waypost.operations.backfill import Backfilled
from waypost.operations.publish import CONTENT
from waypost.policy import ByException, CatchUp, Constant, Exponential, Linear, NoRetry, RetryPolicy
from waypost.release import VERSION
from waypost.schedule.schedule import Schedule
from waypost.values import Drained, Health, Ledger, Published, Redriven
from waypost.views import Event, JournalPage, Observed, Policy, RegisteredWorker, Stats

if TYPE_CHECKING:
    from waypost.client import AsyncWaypost
else:

    def __getattr__(name: str) -> object:
        """Import the async client on first use: most programs need one of the two."""
        if name == "AsyncWaypost":
            from waypost.client import AsyncWaypost

            globals()[name] = AsyncWaypost
            return AsyncWaypost
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = VERSION

__all__ = [
    "CONTENT",
    "AsyncWaypost",
    "Backfilled",
    "ByException",
    "CatchUp",
    "Constant",
    "Dead",
    "Drained",
    "Drop",
    "Event",
    "Exponential",
    "Health",
    "JournalPage",
    "Ledger",
    "Linear",
    "Message",
    "Middleware",
    "NoRetry",
    "Observed",
    "Outcome",
    "Outgoing",
    "Policy",
    "Published",
    "Queue",
    "Redriven",
    "RegisteredWorker",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "Snooze",
    "Stats",
    "StoredMessage",
    "Waypost",
    "WaypostError",
    "__version__",
]
