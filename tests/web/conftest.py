"""An app on each store, and a client for it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import system_parts
from tests.web.asgi import Client
from tests.web.browser import PROGRAM
from waypost import AsyncWaypost, Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.web import create_app

STORES = ("memory", "sqlite", "valkey", "postgres")
_numbers = itertools.count()


class Site:
    """A store with a client to prepare it, and an app that shows it."""

    def __init__(self, url: str, namespace: str, runner: asyncio.Runner) -> None:
        self.url = url
        self.namespace = namespace
        self.runner = runner
        self.post = Waypost(url, namespace=namespace)
        self.served = AsyncWaypost(url, namespace=namespace, retry_budget=0.2)
        self.apps: list[Any] = []

    def client(self, **options: Any) -> Client:
        """A client of an app with these options."""
        app = create_app(self.served, **options)
        self.apps.append(app)
        return Client(app, self.runner)

    def bury(self, queue: str, *bodies: object, reason: str = "rejected", error: str | None = None) -> list[str]:
        """Make dead letters; their ids."""
        ids = [self.post.publish(queue, body).id for body in bodies]
        for _ in bodies:
            with self.post.receive(queue) as message:
                assert message is not None
                message.dead(reason, error)
        return ids

    def close(self) -> None:
        for app in self.apps:
            # What a server does in the background ends before its client is closed.
            self.runner.run(app.state.bulk.close())
        self.runner.run(self.served.close())
        self.post.close()


def make_site(kind: str, request: pytest.FixtureRequest, tmp_path: Path, runner: asyncio.Runner) -> Site:
    namespace = fresh_namespace()
    match kind:
        case "memory":
            url = f"memory://web-{next(_numbers)}"
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'web.db'}"
        case _:
            url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        migrate(url, namespace=namespace)
    return Site(url, namespace, runner)


@pytest.fixture(params=STORES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on each store."""
    with asyncio.Runner() as runner:
        made = make_site(request.param, request, tmp_path, runner)
        yield made
        made.close()


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on the memory store, for what does not depend on the store."""
    with asyncio.Runner() as runner:
        made = make_site("memory", request, tmp_path, runner)
        yield made
        made.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a file; each has contexts of its own.

    Playwright runs an event loop in this thread until it is closed, so that tests of other files could not run theirs.
    """
    if not system_parts.is_there(PROGRAM):
        pytest.skip(f"needs {PROGRAM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to have one as root
        path = system_parts.PARTS[PROGRAM][0]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
