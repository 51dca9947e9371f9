"""Publishing and settling in the transactions of the user's own database, an inbox, and relays.

Each name is imported on first use: what this package has for waypost itself needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waypost.outbox.inbox import AsyncInbox, Inbox, inbox_sql
    from waypost.outbox.message_transaction import transaction
    from waypost.outbox.schema import include_object, metadata
else:
    _MODULES = {
        "AsyncInbox": "inbox", "Inbox": "inbox", "inbox_sql": "inbox", "transaction": "message_transaction",
        "include_object": "schema", "metadata": "schema",
    }  # fmt: skip

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["AsyncInbox", "Inbox", "inbox_sql", "include_object", "metadata", "transaction"]
