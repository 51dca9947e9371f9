"""The two clients: the methods of `Waypost` block, those of `AsyncWaypost` are awaited. All else is the same.

Each method checks its arguments, makes a flow (`waypost.operations`) and runs it. Retries and lost replies are handled
in the flows, so both clients behave alike.
"""

from __future__ import annotations

from waypost.client.async_client import AsyncWaypost
from waypost.client.sync_client import Waypost

__all__ = ["AsyncWaypost", "Waypost"]
