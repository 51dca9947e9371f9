"""Valkey and Redis (6.2 and newer): one script per verb, all keys of a queue in one slot."""

from waypost.store.valkey.store import ValkeyStore

__all__ = ["ValkeyStore"]
