"""How long the screens of the web page and the reads of its API take, with few and many messages and with many queues.

    python -m benchmarks.web --quick --json

Each is asked for several times through the app itself, without a network, on an idle store, and never from figures that
an earlier request has read: the median and the slowest are reported. A screen is named by its path, a read of the API
as `api-<operation>`; `-few` has 1,000 messages, `-many` 1,000,000 and `-queues` 2,000 queues. The figures should be the
same for few and for many: lists are pages, and nothing is scanned whole. PostgreSQL has whatever statistics of its
tables it has made by then: mostly none of a queue that has just grown. `--quick` has 50,000 messages and 500 queues.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.routing import Route

from benchmarks.measure import Report, arguments
from waypost import AsyncWaypost, Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer
from waypost.web import api, create_app

TURNS = 9
FEW, MANY, QUICK_MANY = 1_000, 1_000_000, 50_000
QUEUES, QUICK_QUEUES = 2_000, 500
DEAD = 200
PUBLISHED_TOGETHER = 10_000
UNKNOWN_ID = "0" * 24
STORES = ("sqlite", "valkey", "postgres")


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
def open_store(kind: str) -> Iterator[tuple[str, str]]:
    """A store of its own; its URL and namespace."""
    namespace = fresh_namespace()
    match kind:
        case "sqlite":
            with tempfile.TemporaryDirectory() as folder:
                yield f"sqlite:///{Path(folder) / 'web.db'}", namespace
        case "valkey":
            with ValkeyServer() as server:
                yield server.url, namespace
        case _:
            with PostgresServer() as server:
                migrate(server.url, namespace=namespace)
                yield server.url, namespace


def publish(post: Waypost, queue: str, count: int) -> str:
    """Publish many messages; the id of one in the middle."""
    middle = ""
    for start in range(0, count, PUBLISHED_TOGETHER):
        bodies = ({"number": number} for number in range(start, min(count, start + PUBLISHED_TOGETHER)))
        published = post.publish_many(queue, bodies)
        if start <= count // 2:
            middle = published[len(published) // 2].id
    return middle


def fill_messages(post: Waypost, count: int) -> dict[str, str]:
    """Make messages of every state, with schedules; the ids by what they are examples of."""
    post.publish_many("orders", ({"number": number} for number in range(DEAD)))
    dead = finished = ""
    for number in range(DEAD):
        with post.receive("orders", renew=False) as message:
            assert message is not None
            dead = message.id
            message.dead("rejected", f"error {number % 3}")
    finished = post.publish("orders", {"number": -1}, priority=9).id
    with post.receive("orders", renew=False):
        pass
    waiting = publish(post, "orders", count - DEAD)
    post.publish_many("mails", range(FEW), delay=3600)
    post.save_schedule("rollup", queue="reports", cron="0 9 * * *", body={})
    return {"waiting": waiting, "dead": dead, "finished": finished}


def fill_queues(post: Waypost, count: int) -> dict[str, str]:
    """Make many queues with a message each."""
    ids = [post.publish(f"queue-{number:04}", number).id for number in range(count)]
    post.publish("orders", 1)
    with post.receive(f"queue-{count // 4:04}", renew=False) as message:
        assert message is not None
        finished = message.id
    dead = post.publish("orders", 2, priority=9).id
    with post.receive("orders", renew=False) as message:
        assert message is not None
        message.dead("rejected", "error")
    return {"waiting": ids[count // 2], "dead": dead, "finished": finished}


def page_routes(app: Any) -> list[str]:
    """The pages that every store has, without the live stream and the forms of actions; there is no lake here."""
    routes = [route.path for route in app.routes if isinstance(route, Route) and "GET" in (route.methods or ())]
    others = ("/events", "{action}", "{name:path}", "/lake", "/lake/report")
    return [path for path in routes if path.startswith("/s/") and not path.endswith(others)]


def screens(app: Any, ids: dict[str, str], queues: dict[str, str]) -> dict[str, str]:
    """The path of each screen and of each read of the API, by the name of its figure.

    `ids` and `queues` are those of examples: a message that waits, a dead letter, a finished message.
    """
    sample = {"{store}": "main", "{queue}": "orders", "{id}": ids["dead"]}
    queries = {"search": f"id={ids['waiting']}", "charts": "queues=orders", "preview": "cron=0+9+*+*+*"}

    def fill(path: str) -> str:
        for name, value in sample.items():
            path = path.replace(name, value)
        return path

    found = {}
    for path in page_routes(app):
        name = path.removeprefix("/s/{store}").replace("/queues/{queue}", "/queue").replace("/{id}", "")
        found[name.strip("/").replace("/", "-") or "first-page"] = fill(path)
    orders = fill("/s/{store}/queues/{queue}")
    states = ("leased", "delayed", "waiting", "dead")
    found |= {f"queue-{state}": f"{orders}?state={state}&minutes=1440" for state in states}
    found |= {f"search-{kind}": f"/s/main/search?q={id}" for kind, id in (ids | {"unknown": UNKNOWN_ID}).items()}
    found |= {"search-queue": "/s/main/search?q=or", "settings": f"{orders}/do/configure"}
    found["message-dead"] = found.pop("queue-messages")
    for kind in ("waiting", "finished"):
        found[f"message-{kind}"] = f"/s/main/queues/{queues[kind]}/messages/{ids[kind]}"
    for read in api.READS:
        # Of a worker and of a bulk action there is none here.
        if "{name:path}" not in read.path and read.name != "bulk_action":
            query = f"?{queries[read.name]}" if read.name in queries else ""
            found[f"api-{read.name.replace('_', '-')}"] = fill(api.ROOT + read.path) + query
    return found


def forget_figures(app: Any) -> None:
    """Let the next request read everything anew, as after a quiet time."""
    watch = app.state.service.places["main"].watch
    watch._listed_at = watch._schedules_at = watch._refreshed_at = float("-inf")
    for reading in watch.readings.values():
        reading.read_at = 0.0


async def measure(post: AsyncWaypost, ids: dict[str, str], queues: dict[str, str]) -> dict[str, list[float]]:
    """Milliseconds of each page, asked for in turns. The first turns, which read every queue once, are not counted."""
    app = create_app(post)
    paths = screens(app, ids, queues)
    found: dict[str, list[float]] = {name: [] for name in paths}
    watch = app.state.service.places["main"].watch
    await get_page(app, "/s/main")
    while watch.unread:
        await watch.refresh()
    for turn, (name, path) in itertools.product(range(TURNS + 1), paths.items()):
        forget_figures(app)
        began = time.perf_counter()
        status = await get_page(app, path)
        assert status in (200, 303), (path, status)
        if turn:
            found[name].append((time.perf_counter() - began) * 1000)
    await post.close()
    return found


def run(kind: str, size: str, count: int, report: Report) -> None:
    """Measure all screens of one store."""
    with open_store(kind) as (url, namespace):
        with Waypost(url, namespace=namespace) as post:
            ids = fill_queues(post, count) if size == "queues" else fill_messages(post, count)
            queues = {kind: post.find(id)[0].queue for kind, id in ids.items()}
        times = asyncio.run(measure(AsyncWaypost(url, namespace=namespace), ids, queues))
        for name, measured in times.items():
            report.add(f"{name}-{size}-p50", kind, "waypost", round(statistics.median(measured), 2), "ms")
            report.add(f"{name}-{size}-slowest", kind, "waypost", round(max(measured), 2), "ms")


def main() -> None:
    options = arguments("how long the screens of the web page take")
    sizes = {"few": FEW, "many": MANY, "queues": QUEUES}
    if options.quick:
        sizes |= {"many": QUICK_MANY, "queues": QUICK_QUEUES}
    report = Report(options.json)
    for kind in (options.store,) if options.store else STORES:
        for size, count in sizes.items():
            run(kind, size, count, report)


if __name__ == "__main__":
    main()
