"""procrastinate: its async connector, and the blocking one for threads. Only its publishing is measured."""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

from benchmarks.peers.protocol import Body, Program, main

CONNECTIONS = 16


def noop(message: Body) -> None:
    """Handle nothing: no worker is started."""


class Procrastinate(Program):
    """Its own connectors and pools."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._app: Any = App(connector=PsycopgConnector(conninfo=url, min_size=1, max_size=CONNECTIONS))
        self._task: Any = self._app.task(name="handle", queue="bench")(noop)
        self._blocking: Any = App(connector=SyncPsycopgConnector(conninfo=url, min_size=1, max_size=CONNECTIONS))
        self._blocking_task: Any = self._blocking.task(name="handle", queue="bench")(noop)

    async def open(self) -> None:
        await self._app.open_async()
        with psycopg.connect(self.url) as connection:
            known = connection.execute("SELECT to_regclass('procrastinate_jobs')").fetchone()
        if known is None or known[0] is None:
            await self._app.schema_manager.apply_schema_async()
        self._blocking.open()

    async def close(self) -> None:
        self._blocking.close()
        await self._app.close_async()

    async def send(self, message: Body) -> None:
        await self._task.defer_async(message=message)

    def send_blocking(self, message: Body) -> None:
        self._blocking_task.defer(message=message)


if __name__ == "__main__":
    sys.exit(main(Procrastinate))
