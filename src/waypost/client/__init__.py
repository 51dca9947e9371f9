"""The two clients: the methods of `Waypost` block, those of `AsyncWaypost` are awaited. Otherwise they are the same.

Each method checks its arguments, makes a flow (`waypost.operations`) and runs it. Retries and lost replies are handled
in the flows, so both clients behave in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from waypost.client.sync_client import Waypost

if TYPE_CHECKING:
    from waypost.client.async_client import AsyncWaypost
else:

    def __getattr__(name: str) -> object:
        """Import the async client on first use: most programs need only one of the two."""
        if name == "AsyncWaypost":
            from waypost.client.async_client import AsyncWaypost

            globals()[name] = AsyncWaypost
            return AsyncWaypost
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["AsyncWaypost", "Waypost"]
