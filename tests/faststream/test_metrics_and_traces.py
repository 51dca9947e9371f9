"""FastStream's own middlewares for Prometheus and OpenTelemetry work with a `WaypostBroker`."""

from __future__ import annotations

from typing import Any

import pytest
from faststream.exceptions import RejectMessage
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from tests.faststream.running import Place, run, running, settled
from waypost.faststream.opentelemetry import WaypostTelemetryMiddleware
from waypost.faststream.prometheus import WaypostPrometheusMiddleware

pytestmark = pytest.mark.promise("FACE-4")


def test_prometheus_counts_by_queue_and_outcome(place: Place) -> None:
    registry = CollectorRegistry()
    broker = place.broker(middlewares=[WaypostPrometheusMiddleware(registry=registry)])

    @broker.subscriber("orders")
    async def charge(body: int) -> None:
        if body == 2:
            raise RejectMessage

    @broker.subscriber("many", batch=10)
    async def handle(bodies: list[int]) -> None: ...

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "orders")
            await broker.publish(2, "orders")
            await broker.publish_batch(1, 2, 3, queue="many")
            await settled(broker, "orders", done=1, dead=1)
            await settled(broker, "many", done=3)

    run(test())

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(
            f"faststream_{name}", {"app_name": "faststream", "broker": "waypost", **labels}
        )

    processed = "received_processed_messages_total"
    assert value(processed, handler="orders", status="acked") == 1
    assert value(processed, handler="orders", status="rejected") == 1
    assert value(processed, handler="many", status="acked") == 3
    assert value("published_messages_total", destination="orders", status="success") == 2


def test_a_trace_goes_on_from_the_publish_to_the_handler(place: Place) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(metric_readers=[reader])
    middleware = WaypostTelemetryMiddleware(tracer_provider=provider, meter_provider=meters)
    broker = place.broker(middlewares=[middleware])

    @broker.subscriber("orders")
    @broker.publisher("receipts")
    async def charge(body: int) -> int:
        return body

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "orders")
            await settled(broker, "receipts", ready=1)
            await settled(broker, "orders", done=1)

    run(test())
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} >= {"orders publish", "orders process", "receipts publish"}
    assert len({span.context.trace_id for span in spans}) == 1
    meters.shutdown()
    provider.shutdown()
