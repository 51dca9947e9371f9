"""FastStream's Prometheus middleware for `WaypostBroker`: messages received, handled and published, by queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from faststream.message import StreamMessage
from faststream.prometheus import ConsumeAttrs, MetricsSettingsProvider
from faststream.prometheus.middleware import PrometheusMiddleware

from waypost.faststream.internals import EMPTY
from waypost.faststream.message import WaypostMessage
from waypost.faststream.publishing import WaypostPublishCommand

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class WaypostMetricsSettingsProvider(MetricsSettingsProvider[Any, WaypostPublishCommand]):
    """Where the labels of a metric come from."""

    messaging_system = "waypost"

    def get_consume_attrs_from_message(self, msg: StreamMessage[Any]) -> ConsumeAttrs:
        """Return queue, size and count of what was received."""
        assert isinstance(msg, WaypostMessage)
        return {
            "destination_name": msg.queue,
            "message_size": sum(len(message._data) for message in msg.messages),
            "messages_count": len(msg.messages),
        }

    def get_publish_destination_name_from_cmd(self, cmd: WaypostPublishCommand) -> str:
        """Return the queue that is published to."""
        return cmd.destination


class WaypostPrometheusMiddleware(PrometheusMiddleware[Any, WaypostPublishCommand]):
    """`WaypostBroker(url, middlewares=[WaypostPrometheusMiddleware(registry=registry)])`."""

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        app_name: str = EMPTY,
        metrics_prefix: str = "faststream",
        received_messages_size_buckets: Sequence[float] | None = None,
        custom_labels: dict[str, str | Callable[[Any], str]] | None = None,
    ) -> None:
        super().__init__(
            settings_provider_factory=lambda _: WaypostMetricsSettingsProvider(),
            registry=registry,
            app_name=app_name,
            metrics_prefix=metrics_prefix,
            received_messages_size_buckets=received_messages_size_buckets,
            custom_labels=custom_labels,
        )
