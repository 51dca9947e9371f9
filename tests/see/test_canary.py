"""The password of a running server is in no event, log, metric, trace, `repr`, journal, error or output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.see.conftest import Start
from tests.see.service import Service, get
from tests.servers.nats import NatsServer
from tests.waiting import until
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
        with ValkeyServer(requirepass=CANARY, appendonly=True) as server:
            yield server, server.url
        return
    postgres = PostgresServer(durable=True)
    postgres.password = CANARY
    with postgres as running:
        migrate(running.url)
        yield running, running.url


@pytest.mark.promise("SEE-1", "SEE-2", "SEE-6", "FACE-2")
def test_the_password_of_a_server_appears_nowhere(
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


def handled(post: Waypost, done: int, copies: Waypost) -> None:
    """Wait until `done` orders are done, and their continuations have arrived behind the relay."""
    until(lambda: post.ledger("orders").done >= done, f"{done} orders")
    until(lambda: copies.ledger("out").published >= done, f"{done} copies")


@pytest.mark.promise("SEE-1", "SEE-2", "SEE-3", "SEE-6", "BOX-4", "TIMER-4", "CRON-7")
def test_processes_that_run_show_the_password_of_no_server(guarded: tuple[EmbeddedServer, str], start: Start) -> None:
    """A worker with a relay, a scheduler, a promoter and two relays, at DEBUG, while their servers go and come back."""
    server, url = guarded
    nats = NatsServer()
    nats.password = CANARY
    with ValkeyServer(requirepass=CANARY, appendonly=True) as target, nats:
        place = {"WAYPOST_URL": url, "WAYPOST_NAMESPACE": "wp", "GUARDED_TARGET": f"{target.url}#out"}
        with Waypost(url, retry_budget=30) as post, Waypost(target.url, retry_budget=30) as copies:
            for queue in ("orders", "out", "tick", "astray"):
                post.configure(queue, journal="full", completed=10)
            post.publish("astray", 1)
            debug = ("--log-level", "debug")
            worker = start(
                "worker", "tests.see.canary_app:post", "--metrics-port", "0", "--promoter", "--json", *debug, **place
            )
            services = [
                worker,
                start("scheduler", *debug, **place),
                start("promoter", *debug, **place),
                start("relay", "--queue", "astray", "--to", f"{nats.url}/nowhere", "--hold", "0.2", *debug, **place),
            ]
            post.publish_many("orders", range(20))
            handled(post, 10, copies)
            until(lambda: post.ledger("tick").done, "a fire of the schedule")
            metrics = get(f"{worker.url}/metrics")[2] + get(f"{worker.url}/health")[2]
            for one in (server, target, nats):
                one.kill()
            until(
                lambda: "no connection to" in worker.output() or "was lost" in worker.output(), "the loss to be logged"
            )
            for one in (server, target, nats):
                one.start()
            post.publish_many("orders", range(20))
            handled(post, 20, copies)
            metrics += get(f"{worker.url}/metrics")[2] + get(f"{worker.url}/ready")[2]
            kept = [repr(event) for queue in post.queues() for event in post.journal(queue).events]
            kept += [repr(event) for event in copies.journal("out").events] + [repr(one) for one in post.workers()]
            kept += [repr(message) for state in ("done", "dead") for message in post.messages("orders", state=state)]
        seen = {"metrics": metrics, "kept": "\n".join(kept)}
        seen |= {f"log {number}": ended(service) for number, service in enumerate(services)}
    log = seen["log 0"]
    assert all(part in log for part in ("event='dead'", '"trace_id"', "DEBUG", "ValueError")), log[-3000:]
    assert "waypost_queue_messages" in metrics
    assert [name for name, text in seen.items() if CANARY in text] == []


def ended(service: Service) -> str:
    """Stop a process, and return its log."""
    service.process.terminate()
    service.process.wait(60)
    return service.output()
