"""The password of a server that works is in no event, log, metric, trace, `repr`, journal, error or output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from waypost import NoRetry, Waypost, WaypostError
from waypost.cli.main import main
from waypost.see import Prometheus, Tracing
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

CANARY = "Canary7Secret"
COMMANDS = (
    "queues", "stats orders", "watch --once", "peek orders", "journal orders", "ledger orders", "dead list orders",
    "workers", "schedules list", "doctor", "configure orders",
)  # fmt: skip


@pytest.fixture(params=["valkey", "postgres"])
def guarded(request: pytest.FixtureRequest) -> Iterator[tuple[EmbeddedServer, str]]:
    """A server whose password is the canary, and its URL."""
    if request.param == "valkey":
        with ValkeyServer(requirepass=CANARY) as server:
            yield server, f"valkey://:{CANARY}@127.0.0.1:{server.port}"
        return
    postgres = PostgresServer()
    postgres.password = CANARY
    with postgres as running:
        migrate(running.url)
        yield running, running.url


@pytest.mark.promise("SEE-1", "SEE-2", "SEE-6", "FACE-2")
def test_the_password_of_a_server_is_seen_nowhere(
    guarded: tuple[EmbeddedServer, str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server, url = guarded
    assert CANARY in url
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    events: list[Any] = []
    spans, provider, prometheus = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False), Prometheus()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    post = Waypost(
        url, on_event=events.append, middleware=[Tracing(provider), prometheus], retry_budget=0.2, start_timeout=2
    )
    with post:
        post.configure("orders", journal="full")
        post.save_schedule("rollup", queue="reports", cron="@daily")

        @post.handler("orders", retry=NoRetry())
        def charge(body: int) -> None:
            if body == 2:
                raise ValueError("no")

        post.publish_many("orders", [1, 2])
        worker = post.worker()
        seen += [repr(one) for one in (post, post.store, getattr(post.store, "source", None), worker, post.wakeups)]
        worker.run(until_empty=True, signals=False)
        seen += [repr(event) for event in post.journal("orders").events] + [repr(post.stats("orders"))]
        seen += [msgspec.json.encode(one).decode() for one in post.workers()]
        seen.append(prometheus.exposition()[0].decode())
        for command in COMMANDS:
            main([*command.split(), "--url", url])
            main([*command.split(), "--url", url, "--json"])
        server.kill()
        for call in (lambda: post.publish("orders", 3), lambda: post.stats("orders")):
            with pytest.raises(WaypostError) as failed:
                call()
            error: BaseException | None = failed.value
            while error is not None:
                seen.append(f"{error} {error!r}")
                error = error.__cause__ or error.__context__
    for command in COMMANDS:
        main([*command.split(), "--url", url])
    assert events
    assert spans.get_finished_spans()
    seen += [repr(event) for event in events] + [span.to_json() for span in spans.get_finished_spans()]
    seen += [caplog.text, *(repr(vars(record)) for record in caplog.records), *capfd.readouterr()]
    assert [text for text in seen if CANARY in text] == []
