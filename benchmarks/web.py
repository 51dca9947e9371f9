"""How long the screens of the web page take, with a thousand and with a million messages, and with 2,000 queues.

    python -m benchmarks.web --quick --json

Each screen is asked for several times through the app itself, without a network, on an idle store; the median and the
slowest are reported. The figures should not grow with the messages: lists are pages, and nothing is scanned whole.
`--quick` has 100,000 messages in place of a million.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Report, arguments
from waypost import AsyncWaypost, Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer
from waypost.web import create_app

TURNS = 15
QUEUES = 2_000
DEAD = 2_000


async def get_page(app: Any, path: str) -> int:
    """Request a page; return its status."""
    place, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": place, "raw_path": place.encode(), "query_string": query.encode(), "root_path": "",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "headers": [(b"host", b"localhost")],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


@contextmanager
def open_store(kind: str) -> Iterator[str]:
    """A store of its own; its URL."""
    match kind:
        case "sqlite":
            with tempfile.TemporaryDirectory() as folder:
                yield f"sqlite:///{Path(folder) / 'web.db'}"
        case "valkey":
            with ValkeyServer() as server:
                yield server.url
        case _:
            with PostgresServer() as server:
                yield server.url


def fill(post: Waypost, count: int) -> tuple[str, str]:
    """Make messages, dead letters and timers; the ids of one that waits and of one that is dead."""
    post.publish_many("orders", ({"number": number} for number in range(DEAD)))
    for number in range(DEAD):
        with post.receive("orders", renew=False) as message:
            assert message is not None
            message.dead("rejected", f"error {number % 3}")
    published = post.publish_many("orders", ({"number": number} for number in range(count - DEAD)))
    post.publish_many("mails", range(1_000), delay=3600)
    return published[len(published) // 2].id, post.peek("orders", 1, "dead")[0].id


async def measure(post: AsyncWaypost, paths: dict[str, str]) -> dict[str, list[float]]:
    """Milliseconds of each page, asked for in turns. The first turn, which reads everything, is not counted."""
    app = create_app(post)
    found: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(TURNS + 1):
        for name, path in paths.items():
            began = time.perf_counter()
            status = await get_page(app, path)
            assert status in (200, 303), (path, status)
            if turn:
                found[name].append((time.perf_counter() - began) * 1000)
    await post.close()
    return found


def run(kind: str, counts: tuple[int, ...], report: Report) -> None:
    for count in counts:
        with open_store(kind) as url:
            namespace = fresh_namespace()
            if kind == "postgres":
                migrate(url, namespace=namespace)
            with Waypost(url, namespace=namespace) as post:
                waiting, dead = fill(post, count)
            queue = "/s/main/queues/orders"
            paths = {
                "first-page": "/s/main", "queue": queue, "dead-letters": f"{queue}?state=dead",
                "dead-groups": f"{queue}/dead", "message": f"{queue}/messages/{dead}",
                "search": f"/s/main/search?q={waiting}", "timers": "/s/main/timers",
            }  # fmt: skip
            found = asyncio.run(measure(AsyncWaypost(url, namespace=namespace), paths))
            for name, times in found.items():
                add_times(report, f"{name}-{count}-messages", kind, times)


def run_queues(kind: str, report: Report) -> None:
    with open_store(kind) as url:
        namespace = fresh_namespace()
        if kind == "postgres":
            migrate(url, namespace=namespace)
        with Waypost(url, namespace=namespace) as post:
            for number in range(QUEUES):
                post.publish(f"queue-{number:04}", number)
            id = post.peek("queue-1000", 1)[0].id
        paths = {"first-page": "/s/main", "search": f"/s/main/search?q={id}"}
        found = asyncio.run(measure(AsyncWaypost(url, namespace=namespace), paths))
        for name, times in found.items():
            add_times(report, f"{name}-{QUEUES}-queues", kind, times)


def add_times(report: Report, name: str, kind: str, times: list[float]) -> None:
    report.add(f"{name}-p50", kind, "waypost", round(statistics.median(times), 2), "ms")
    report.add(f"{name}-slowest", kind, "waypost", round(max(times), 2), "ms")


def main() -> None:
    options = arguments("how long the screens of the web page take")
    counts = (3_000, 100_000) if options.quick else (3_000, 1_000_000)
    report = Report(options.json)
    for kind in (options.store,) if options.store else ("sqlite", "valkey", "postgres"):
        run(kind, counts, report)
        run_queues(kind, report)


if __name__ == "__main__":
    main()
