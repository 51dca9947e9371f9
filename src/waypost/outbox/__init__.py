"""Publishing and settling in the transactions of the user's own database, an inbox, and relays."""

from __future__ import annotations

from waypost.outbox.inbox import AsyncInbox, Inbox, inbox_sql
from waypost.outbox.message_transaction import transaction
from waypost.outbox.schema import include_object, metadata

__all__ = ["AsyncInbox", "Inbox", "inbox_sql", "include_object", "metadata", "transaction"]
