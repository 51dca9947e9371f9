"""`waypost worker --metrics-port N`: metrics, health and readiness of a worker over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waypost.cli.output import report_progress

if TYPE_CHECKING:
    from waypost.client.base import BaseClient
    from waypost.see import Prometheus
    from waypost.worker.sync_worker import SyncWorker
    from waypost.worker.worker import Worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the metrics endpoint."""
    parser.add_argument(
        "--metrics-port", type=int, metavar="N",
        help="answer /metrics, /health and /ready on this port, 0 for a free one; with --processes each has the next",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="H",
        help="the address that port is bound to (127.0.0.1); it has no authentication",
    )  # fmt: skip


def install(client: BaseClient, options: argparse.Namespace) -> Prometheus | None:
    """Return the Prometheus middleware of the client, added if it has none; None if no port is given.

    Call it before the worker is created.
    """
    if options.metrics_port is None:
        return None
    from waypost.see import Prometheus

    for middleware in client.middleware:
        if isinstance(middleware, Prometheus):
            return middleware
    prometheus = Prometheus()
    client.use(prometheus)
    return prometheus


@contextmanager
def serve(worker: SyncWorker | Worker, prometheus: Prometheus | None, options: argparse.Namespace) -> Iterator[None]:
    """Serve the metrics of a worker inside the `with` block, if there are any."""
    if prometheus is None:
        yield
        return
    from waypost.see import Endpoint

    with Endpoint(worker, prometheus, host=options.metrics_host, port=options.metrics_port) as endpoint:
        report_progress(f"metrics at {endpoint.url}/metrics, beside /health and /ready", options.log_format)
        yield
