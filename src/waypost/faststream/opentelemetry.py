"""FastStream's OpenTelemetry middleware for `WaypostBroker`: spans and metrics of publishes and handlers."""

from __future__ import annotations

from typing import Any

from faststream.message import StreamMessage
from faststream.opentelemetry import TelemetrySettingsProvider
from faststream.opentelemetry.consts import MESSAGING_DESTINATION_PUBLISH_NAME
from faststream.opentelemetry.middleware import TelemetryMiddleware
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.semconv.trace import SpanAttributes
from opentelemetry.trace import TracerProvider

from waypost.faststream.message import WaypostMessage
from waypost.faststream.publishing import WaypostPublishCommand


class WaypostTelemetrySettingsProvider(TelemetrySettingsProvider[Any, WaypostPublishCommand]):
    """Where the attributes of a span come from."""

    messaging_system = "waypost"

    def get_consume_attrs_from_message(self, msg: StreamMessage[Any]) -> dict[str, Any]:
        """Return the attributes of a message that is handled."""
        assert isinstance(msg, WaypostMessage)
        attributes = {
            SpanAttributes.MESSAGING_SYSTEM: self.messaging_system,
            SpanAttributes.MESSAGING_MESSAGE_ID: msg.message_id,
            SpanAttributes.MESSAGING_MESSAGE_CONVERSATION_ID: msg.correlation_id,
            SpanAttributes.MESSAGING_MESSAGE_PAYLOAD_SIZE_BYTES: sum(len(one._data) for one in msg.messages),
            MESSAGING_DESTINATION_PUBLISH_NAME: msg.queue,
        }
        if isinstance(msg.raw_message, list):
            attributes[SpanAttributes.MESSAGING_BATCH_MESSAGE_COUNT] = len(msg.messages)
        return attributes

    def get_consume_destination_name(self, msg: StreamMessage[Any]) -> str:
        """Return the queue that it came from."""
        assert isinstance(msg, WaypostMessage)
        return msg.queue

    def get_publish_attrs_from_cmd(self, cmd: WaypostPublishCommand) -> dict[str, Any]:
        """Return the attributes of a publish."""
        return {
            SpanAttributes.MESSAGING_SYSTEM: self.messaging_system,
            SpanAttributes.MESSAGING_DESTINATION_NAME: cmd.destination,
            SpanAttributes.MESSAGING_MESSAGE_CONVERSATION_ID: cmd.correlation_id,
        }

    def get_publish_destination_name(self, cmd: WaypostPublishCommand) -> str:
        """Return the queue that is published to."""
        return cmd.destination


class WaypostTelemetryMiddleware(TelemetryMiddleware[WaypostPublishCommand]):
    """`WaypostBroker(url, middlewares=[WaypostTelemetryMiddleware(tracer_provider=provider)])`."""

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        include_messages_counters: bool = True,
    ) -> None:
        super().__init__(
            settings_provider_factory=lambda _: WaypostTelemetrySettingsProvider(),
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            meter=meter,
            include_messages_counters=include_messages_counters,
        )
