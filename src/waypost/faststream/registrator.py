"""How subscribers and publishers are declared, on a broker or on a router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

from faststream import AckPolicy
from faststream.exceptions import SetupError

from waypost.client.options import PublishKeywords
from waypost.errors import ConfigurationError
from waypost.faststream.internals import (
    EMPTY,
    ArgsContainer,
    BrokerConfig,
    BrokerMiddleware,
    BrokerRouter,
    CodecProto,
    CustomCallable,
    Dependant,
    PublisherSpecificationConfig,
    Registrator,
    SubscriberRoute,
    SubscriberSpecificationConfig,
)
from waypost.faststream.publishing import WaypostPublisher, WaypostPublisherConfig
from waypost.faststream.specification import WaypostPublisherSpecification, WaypostSubscriberSpecification
from waypost.faststream.subscriber import SubscriberCalls, WaypostSubscriber, WaypostSubscriberConfig
from waypost.message import Queue, queue_name
from waypost.policy import RetryPolicy
from waypost.times import Duration
from waypost.worker.handler import OnLeaseLost


class SubscriberOptions(TypedDict, total=False):
    """How a worker runs the handlers of a subscriber: options of `AsyncWaypost.handler`."""

    concurrency: int
    retry: RetryPolicy
    timeout: Duration | None
    max_run: Duration
    on_lease_lost: OnLeaseLost | None


class WaypostRegistrator(Registrator[Any, Any]):
    """What brokers and routers have in common."""

    def subscriber(  # type: ignore[override]
        self,
        *queues: str | Queue[Any],
        batch: int | None = None,
        lease: Duration | None = EMPTY,
        max_deliveries: int | None = EMPTY,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Dependant] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
        persistent: bool = True,
        **options: Unpack[SubscriberOptions],
    ) -> WaypostSubscriber:
        """Handle the messages of one or more queues.

        `concurrency` (10) messages are handled at once; with `batch` the function is given lists of up to so many.
        `retry` decides about failures (`Exponential()`), `timeout` and `max_run` bound a call. `lease` and
        `max_deliveries` belong to the queue: it is configured with them when the subscriber starts. With
        `ack_policy=AckPolicy.MANUAL` the handler decides by `message.ack()` and the like; what it leaves is retried.

            @broker.subscriber("orders", concurrency=50, lease=30, retry=Exponential(attempts=5))
            async def charge(order: Order) -> None: ...
        """
        if not queues:
            raise ConfigurationError('name a queue: @broker.subscriber("orders")')
        names = tuple(map(queue_name, queues))
        unknown = set(options) - SubscriberOptions.__annotations__.keys()
        if unknown:
            raise ConfigurationError(f"subscriber has no option {', '.join(sorted(unknown))}")
        settings = {"lease": lease, "max_deliveries": max_deliveries}
        calls = SubscriberCalls()
        config = WaypostSubscriberConfig(
            _outer_config=self.config,  # type: ignore[arg-type]
            _ack_policy=ack_policy,
            no_reply=no_reply,
            queues=names,
            batch=batch,
            options=options,
            settings={name: value for name, value in settings.items() if value is not EMPTY},
        )
        specification = WaypostSubscriberSpecification(
            self.config,
            SubscriberSpecificationConfig(title_=title, description_=description, include_in_schema=include_in_schema),
            calls,
            names,
        )
        subscriber = WaypostSubscriber(config, specification, calls)
        subscriber.handlers()  # wrong options are refused here, not when the broker starts
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            dependencies_=dependencies,
            codec_=codec,
        )

    def publisher(  # type: ignore[override]
        self,
        queue: str | Queue[Any],
        *,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
        persistent: bool = True,
        **options: Unpack[PublishKeywords],
    ) -> WaypostPublisher:
        """Publish what a handler returns to a queue, with the options of `publish`; or keep it and call `publish`."""
        name = queue_name(queue)
        specification = WaypostPublisherSpecification(
            self.config,
            PublisherSpecificationConfig(
                title_=title, description_=description, schema_=schema, include_in_schema=include_in_schema
            ),
            name,
        )
        publisher = WaypostPublisher(WaypostPublisherConfig(self.config, name, options), specification)
        super().publisher(publisher, persistent=persistent)
        return publisher

    def include_router(
        self,
        router: Registrator[Any, Any],
        *,
        prefix: str = "",
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any]] = (),
        include_in_schema: bool | None = None,
    ) -> None:
        """Add what a `WaypostRouter` declares, its queues with `prefix` before their names."""
        if not isinstance(router, WaypostRegistrator):
            raise SetupError(f"a WaypostBroker includes a WaypostRouter, not {type(router).__name__}")
        super().include_router(
            router, prefix=prefix, dependencies=dependencies, middlewares=middlewares,
            include_in_schema=include_in_schema,
        )  # fmt: skip


class WaypostRoutePublisher(ArgsContainer):
    """A publisher of a `WaypostRoute`: the arguments of `publisher`."""


class WaypostRoute(SubscriberRoute):
    """A handler for `WaypostRouter(handlers=…)`: a function, its `publishers`, and the arguments of `subscriber`."""

    def __init__(
        self,
        call: Callable[..., Any] | Callable[..., Awaitable[Any]],
        *queues: str | Queue[Any],
        publishers: Iterable[WaypostRoutePublisher] = (),
        **options: Any,
    ) -> None:
        super().__init__(call, *queues, publishers=publishers, **options)


class WaypostRouter(WaypostRegistrator, BrokerRouter[Any, BrokerConfig]):
    """Subscribers and publishers that a broker includes, all queues with `prefix` before their names."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[WaypostRoute] = (),
        *,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any]] = (),
        routers: Sequence[WaypostRegistrator] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        ack_policy: AckPolicy = EMPTY,
        include_in_schema: bool | None = None,
    ) -> None:
        super().__init__(
            handlers=handlers,
            config=BrokerConfig(
                prefix=prefix, broker_middlewares=middlewares, broker_dependencies=dependencies, broker_parser=parser,
                broker_decoder=decoder, broker_codec=codec, ack_policy=ack_policy, include_in_schema=include_in_schema,
            ),
            routers=routers,
        )  # fmt: skip
