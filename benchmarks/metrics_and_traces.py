"""What metrics and traces cost: processor time for each message that a worker handles, without them and with each.

    python -m benchmarks.metrics_and_traces --quick --json

A worker empties a queue in memory, where the store costs least, with an async handler that does nothing; processor
time is measured over the run, which has claims, handler calls and settles. The variants take turns, so that a busy
machine is busy for all, and the median of each is compared with that of the worker without any.
`published-with-…` is the same for publishing one by one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.measure import Report, arguments
from waypost import AsyncWaypost, Middleware
from waypost.see import OpenTelemetryMetrics, Prometheus, Tracing


def _traced() -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    return Tracing(provider)


def _metered() -> OpenTelemetryMetrics:
    return OpenTelemetryMetrics(MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))


#: The middleware, by its name in the report.
WAYS: dict[str, Callable[[], list[Middleware]]] = {
    "nothing": lambda: [],
    "prometheus": lambda: [Prometheus()],
    "otel-metrics": lambda: [_metered()],
    "otel-traces": lambda: [_traced()],
    "otel-traces-no-sdk": lambda: [Tracing()],
}


async def _measure(way: str, count: int) -> tuple[float, float]:
    """Return the microseconds of processor time for each message published, and for each handled."""
    async with AsyncWaypost("memory://", middleware=WAYS[way]()) as post:

        @post.handler("orders", concurrency=50)
        async def handle(body: object) -> None: ...

        singles = count // 10
        began = time.process_time()
        for number in range(singles):
            await post.publish("orders", {"number": number})
        published = (time.process_time() - began) / singles
        await post.publish_many("orders", [{"number": number} for number in range(count - singles)])
        worker = post.worker()
        began = time.process_time()
        report = await worker.run(until_empty=True, signals=False)
        handled = (time.process_time() - began) / count
        assert report.handled == count, report
        return published * 1e6, handled * 1e6


def main() -> None:
    options = arguments("what metrics and traces cost")
    count, turns = (2_000, 5) if options.quick else (5_000, 21)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            found[way].append(asyncio.run(_measure(way, count)))
    report = Report(options.json)
    base = [statistics.median(turn[part] for turn in found["nothing"]) for part in (0, 1)]
    for way, figures in found.items():
        for part, name in enumerate(("published", "handled")):
            median = statistics.median(turn[part] for turn in figures)
            report.add(f"{name}-with-{way}", "memory", "waypost", round(median, 1), "µs CPU/message")
            if way != "nothing":
                report.add(f"{name}-more", "memory", "waypost", round(median - base[part], 1), "µs CPU/message")


if __name__ == "__main__":
    main()
