"""A worker started from the command line and scraped like Prometheus does, on every store with a file or a server."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.see.conftest import Start
from tests.see.service import Service, figures, get, get_json, value
from tests.waiting import until
from waypost import Waypost
from waypost.see.metrics import METRICS
from waypost.testing.servers import free_port

pytestmark = pytest.mark.promise("SEE-2")
SHOP = "tests.see.shop_app:post"


def two_ports() -> int:
    """Return a free port whose successor is free too."""
    while True:
        port = free_port()
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except (OSError, OverflowError):
            continue


def settled(service: Service, outcome: str, queue: str = "orders") -> float:
    return value(service.scrape(), "waypost_settled_total", queue=queue, outcome=outcome) or 0


def test_a_scrape_of_a_worker_has_its_own_metrics_and_those_of_the_store(
    start: Start, url: str, namespace: str
) -> None:
    with Waypost(url, namespace=namespace) as post:
        post.publish_many("orders", ["a", "b", "c", "shaky", "bad"])
        post.publish("orders", "later", delay=3600)
        post.journal_reader("orders", "lake", read_to=0)
        service = start("worker", SHOP, "--metrics-port", "0", SHOP_URL=url, SHOP_NAMESPACE=namespace)
        until(lambda: settled(service, "done") == 4 and settled(service, "dead") == 1, "the work")
        # A reading of the store is shared for a second; this one comes after that.
        found = until(
            lambda: (
                f if value(f := service.scrape(), "waypost_queue_ended_total", queue="orders", end="done") == 4 else 0
            )
        )
        stats = post.stats("orders")

    assert value(found, "waypost_claimed_total", queue="orders") == 6
    assert value(found, "waypost_settled_total", queue="orders", outcome="retried") == 1
    assert value(found, "waypost_handled_total", queue="orders", outcome="failure") == 1
    assert value(found, "waypost_handled_total", queue="orders", outcome="success") == 4
    assert value(found, "waypost_handled_total", queue="orders", outcome="skipped") == 1
    assert value(found, "waypost_leases_lost_total", queue="orders") == 0
    assert value(found, "waypost_run_seconds_count", queue="orders") == 6
    assert (value(found, "waypost_run_seconds_sum", queue="orders") or 0) > 0
    assert value(found, "waypost_wait_seconds_count", queue="orders") == 6
    assert value(found, "waypost_wait_seconds_bucket", queue="orders", le="+Inf") == 6
    # The handler publishes in turn, through the same client.
    assert value(found, "waypost_published_total", queue="sales", result="queued") == 4

    assert value(found, "waypost_store_up") == 1
    assert value(found, "waypost_queue_messages", queue="orders", state="ready") == 0
    assert value(found, "waypost_queue_messages", queue="orders", state="delayed") == 1
    assert value(found, "waypost_queue_messages", queue="orders", state="dead") == 1
    assert value(found, "waypost_queue_published_total", queue="orders") == 6
    assert value(found, "waypost_queue_ended_total", queue="orders", end="dead") == 1
    assert value(found, "waypost_queue_redelivered_total", queue="orders", cause="retried") == 1
    assert value(found, "waypost_queue_oldest_ready_seconds", queue="orders") == 0
    assert value(found, "waypost_queue_imbalance", queue="orders") == 0
    assert value(found, "waypost_queue_workers", queue="orders") == 1
    assert value(found, "waypost_workers", status="green") == 1
    assert (value(found, "waypost_journal_lag_events", queue="orders") or 0) > 0
    assert stats.ledger.done == 4

    assert value(found, "waypost_worker_health") == 2
    assert value(found, "waypost_worker_ready") == 1
    assert value(found, "waypost_worker_concurrency", queue="orders") == 4
    # Queues of others are not read by this worker, and nothing is exported that the catalogue does not have.
    assert value(found, "waypost_queue_published_total", queue="sales") is None
    exported_name = {metric.exported_name for metric in METRICS.values()}
    names = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in found}
    assert names <= exported_name
    labels = {label for _, labels in found for label, _ in labels}
    assert labels <= {"queue", "state", "result", "outcome", "end", "cause", "status", "le"}


def test_each_of_several_processes_has_a_port_and_keeps_it_when_it_is_replaced(start: Start, tmp_path: object) -> None:
    url, first = f"sqlite:///{tmp_path}/shop.db", two_ports()
    service = start(
        "worker", SHOP, "--processes", "2", "--metrics-port", str(first), SHOP_URL=url, SHOP_NAMESPACE="wp"
    )  # fmt: skip
    assert service.url
    ports = [first, first + 1]

    def pids() -> list[int]:
        try:
            answers = [get_json(f"http://127.0.0.1:{port}/ready") for port in ports]
        except OSError:
            return []
        return [int(answer["worker"].split(":")[1]) for status, answer in answers if status == 200]

    def both() -> list[int]:
        found = pids()
        return found if len(set(found)) == 2 else []

    before = until(both, "two workers")
    os.kill(before[1], signal.SIGKILL)
    after = until(lambda: found if (found := both()) and found != before else None, "another in its place")
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_same_metrics_are_served_as_openmetrics_on_request(start: Start, tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    service = start("worker", SHOP, "--metrics-port", "0", SHOP_URL=url, SHOP_NAMESPACE="wp")
    address = f"{service.url}/metrics"
    status, kind, text = get(address, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")
    status, kind, text = get(address)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert value(figures(text), "waypost_store_up") == 1


def test_a_port_in_use_is_an_error_in_one_sentence(start: Start, tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    first = start("worker", SHOP, "--metrics-port", "0", SHOP_URL=url, SHOP_NAMESPACE="wp")
    port = first.url.rpartition(":")[2]
    second = start("worker", SHOP, "--metrics-port", port, SHOP_URL=url, SHOP_NAMESPACE="wp")
    assert second.process.wait(60) != 0
    assert f"waypost: cannot listen on 127.0.0.1, port {port}:" in second.output()
    assert "Traceback" not in second.output()
