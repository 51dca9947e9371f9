"""The reference model: every promise of a store in plain Python, readable and slow, and the users' test mode."""

from waypost.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
