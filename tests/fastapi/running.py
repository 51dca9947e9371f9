"""Applications that run for the length of a block, and waits for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from tests.waiting import WAIT_SECONDS_MAX

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a test on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS_MAX * 2))


@asynccontextmanager
async def serving(app: FastAPI, root_path: str = "") -> AsyncIterator[AsyncClient]:
    """Start an application, as a server does, and stop it at the end of the block."""
    transport = ASGITransport(app=app, root_path=root_path)
    async with app.router.lifespan_context(app), AsyncClient(transport=transport, base_url="http://localhost") as web:
        yield web
