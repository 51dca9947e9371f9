"""Waypost in a FastAPI application.

lifespan      WaypostLifespan: opens the client and runs a worker inside the application; health routes
publishing    publisher: a dependency that publishes in the transaction of the request
background    background_task: a function that runs after the response, and survives a restart
web           web_routes: the web page behind the application's own authentication

It needs the extra `fastapi`: pip install "waypost[fastapi]". Subscribers of FastStream in a FastAPI application are
another thing: `waypost.faststream.fastapi`.
"""

from __future__ import annotations

from waypost.errors import MissingExtra

try:
    import fastapi as _fastapi  # noqa: F401
except ImportError:
    raise MissingExtra("FastAPI is not installed: pip install 'waypost[fastapi]'") from None

from waypost.fastapi.background import background_task
from waypost.fastapi.lifespan import WaypostLifespan
from waypost.fastapi.publishing import AsyncPublisher, Publisher, publisher
from waypost.fastapi.web import web_routes

__all__ = ["AsyncPublisher", "Publisher", "WaypostLifespan", "background_task", "publisher", "web_routes"]
