"""What the AsyncAPI document lists: one channel for each queue of a subscriber or publisher, and the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import BrokerSpec, Message, Operation, PublisherSpec, SubscriberSpec
from faststream.specification.schema.extra import Tag, TagDict

from waypost.client import AsyncWaypost
from waypost.faststream.internals import (
    CallsCollection,
    PublisherSpecification,
    PublisherSpecificationConfig,
    SubscriberSpecification,
    SubscriberSpecificationConfig,
)
from waypost.urls import redact_url


class WaypostSubscriberSpecification(SubscriberSpecification[Any, Any]):
    """The channels of a subscriber."""

    def __init__(
        self, outer: Any, config: SubscriberSpecificationConfig, calls: CallsCollection[Any], queues: tuple[str, ...]
    ) -> None:
        super().__init__(outer, config, calls)
        self._queues = queues

    @property
    def channel_labels(self) -> list[str]:
        """The queues, with the prefixes of their routers."""
        return [f"{self._outer_config.prefix}{queue}" for queue in self._queues]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the channels by their names in the document."""
        payload = resolve_payloads(self.get_payloads())
        names = {queue: self._channel_key(queue, split=len(self._queues) > 1) for queue in self.channel_labels}
        return {
            name: SubscriberSpec(
                description=self.description,
                operation=Operation(message=Message(title=f"{name}:Message", payload=payload), bindings=None),
                bindings=None,
                address=queue,
            )
            for queue, name in names.items()
        }


class WaypostPublisherSpecification(PublisherSpecification[Any, Any]):
    """The channel of a publisher."""

    def __init__(self, outer: Any, config: PublisherSpecificationConfig, queue: str) -> None:
        super().__init__(outer, config)
        self._queue = queue

    @property
    def address(self) -> str:
        """The queue, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self._queue}"

    @property
    def name(self) -> str:
        """The name of the channel in the document."""
        return self.config.title_ or f"{self.address}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the channel by its name in the document."""
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        return {
            self.name: PublisherSpec(
                description=self.config.description_,
                operation=Operation(message=Message(title=f"{self.name}:Message", payload=payload), bindings=None),
                bindings=None,
                address=self.address,
            )
        }


def broker_specification(
    client: AsyncWaypost,
    url: str | None,
    *,
    description: str | None,
    tags: Iterable[Tag | TagDict],
) -> BrokerSpec:
    """Return the server of the document. It has no user, password or parameters of a URL."""
    address = f"waypost://{client.store.namespace}" if url is None else redact_url(url)
    protocol = address.partition("://")[0]
    return BrokerSpec(
        url=[address], protocol=protocol, protocol_version=None, description=description, tags=tags, security=None
    )
