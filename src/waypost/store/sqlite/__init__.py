"""The embedded default: one file, no server, several processes."""

from waypost.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
