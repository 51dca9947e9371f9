"""A router for FastAPI: its subscribers take FastAPI's dependencies, and start and stop with the application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Unpack

from fastapi.datastructures import Default
from faststream import ContextRepo

from waypost.client.options import PublishKeywords
from waypost.faststream.broker import WaypostBroker
from waypost.faststream.internals import fastapi_context, stream_router
from waypost.faststream.message import WaypostMessage
from waypost.faststream.publishing import WaypostPublisher
from waypost.message import Queue

_StreamRouter = stream_router()
Context = fastapi_context()
#: FastAPI takes the model from the annotation of the return value.
NO_MODEL = Default(None)

#: Parameters of a subscriber: the message, and the broker.
WaypostMessageParameter = Annotated[WaypostMessage, Context("message")]
WaypostBrokerParameter = Annotated[WaypostBroker, Context("broker")]


class WaypostRouter(_StreamRouter):  # type: ignore[misc, valid-type]
    """An `APIRouter` that is a broker too: `app.include_router(router)` starts its subscribers with the application.

    `store` is that of `WaypostBroker`; the other options are those of the broker and of `APIRouter`.

        router = WaypostRouter("postgresql://…")

        @router.subscriber("orders")
        async def charge(order: Order, session: Annotated[Session, Depends(open_session)]) -> None: ...

        @router.post("/orders")
        async def create(order: Order) -> str:
            return (await router.broker.publish(order, "orders")).id
    """

    broker_class = WaypostBroker
    broker: WaypostBroker

    def __init__(self, store: object, *, context: ContextRepo | None = None, **options: Any) -> None:
        super().__init__(store, context=context, **options)

    def subscriber(
        self,
        *queues: str | Queue[Any],
        dependencies: Iterable[Any] = (),
        response_model: Any = NO_MODEL,
        response_model_include: Any = None,
        response_model_exclude: Any = None,
        response_model_by_alias: bool = True,
        response_model_exclude_unset: bool = False,
        response_model_exclude_defaults: bool = False,
        response_model_exclude_none: bool = False,
        **options: Any,
    ) -> Any:
        """Handle the messages of one or more queues; the options are those of `WaypostBroker.subscriber`."""
        return super().subscriber(
            *queues,
            dependencies=dependencies,
            response_model=response_model,
            response_model_include=response_model_include,
            response_model_exclude=response_model_exclude,
            response_model_by_alias=response_model_by_alias,
            response_model_exclude_unset=response_model_exclude_unset,
            response_model_exclude_defaults=response_model_exclude_defaults,
            response_model_exclude_none=response_model_exclude_none,
            **options,
        )

    def publisher(self, queue: str | Queue[Any], **options: Unpack[PublishKeywords]) -> WaypostPublisher:
        """Publish what a subscriber returns to a queue."""
        return self.broker.publisher(queue, **options)
