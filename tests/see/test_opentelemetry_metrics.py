"""Metrics for OpenTelemetry, as a reader of the SDK collects them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from waypost import NoRetry, Waypost
from waypost.see import OpenTelemetryMetrics

pytestmark = pytest.mark.promise("SEE-2")
QUEUE = "messaging.destination.name"


def collected(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """The points of each metric by its name."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_events_and_readings_of_the_store_become_instruments() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metering = OpenTelemetryMetrics(provider)
    with Waypost("memory://metered", middleware=[metering]) as post:
        metering.watch(post.store)

        @post.handler("orders", retry=NoRetry())
        def charge(body: int) -> None:
            if body == 3:
                raise ValueError(body)

        post.publish_many("orders", [1, 2, 3])
        post.publish("orders", 4, delay=60)
        post.journal_reader("orders", "lake", read_to=2)
        post.worker().run(until_empty=True, signals=False)
        found = collected(reader)
        newest = post.stats("orders").journal_last
    metering.close()
    provider.shutdown()

    where = {QUEUE: "orders"}
    assert [(point.attributes, point.value) for point in found["waypost.published"]] == [(where, 4)]
    assert [(point.attributes, point.value) for point in found["waypost.claimed"]] == [(where, 3)]
    settled = {point.attributes["waypost.outcome"]: point.value for point in found["waypost.settled"]}
    assert settled == {"done": 2, "dead": 1}
    assert [point.count for point in found["messaging.process.duration"]] == [3]
    assert [point.count for point in found["waypost.wait.duration"]] == [3]
    states = {point.attributes["waypost.state"]: point.value for point in found["waypost.queue.messages"]}
    assert states == {"ready": 0, "delayed": 1, "waiting": 0, "leased": 0, "dead": 1}
    assert [(point.attributes, point.value) for point in found["waypost.queue.oldest_ready"]] == [(where, 0)]
    assert [point.value for point in found["waypost.journal.lag"]] == [newest - 2]
