"""The two faces: `Waypost` blocks, `AsyncWaypost` is awaited. Everything else about them is the same.

Each method checks its arguments, makes a flow (`waypost.operations`) and runs it. What can go wrong on the way is the
flows' business, so the faces have nothing to disagree about.
"""

from __future__ import annotations

from waypost.client.async_client import AsyncWaypost
from waypost.client.sync_client import Waypost

__all__ = ["AsyncWaypost", "Waypost"]
