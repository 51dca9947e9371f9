"""All names of FastStream that it does not document, for the rest of this package.

FastStream has no public way to add a broker: each of its own is built on `faststream._internal`, which may change with
every release. Therefore `faststream>=0.7,<0.8`, and no other module of waypost imports one of these names (a test
checks that). What each is for:

    broker          BrokerUsecase, BrokerRouter, ArgsContainer, SubscriberRoute, Registrator, BrokerConfig
    endpoints       SubscriberUsecase, PublisherUsecase, FakePublisher and their configurations and specifications
    publishing      ProducerProto (what a broker publishes with), DefaultCodec, ParserComposition
    dependencies    FastDependsConfig, Context, ContextRepo, UnderlyingDriverAnnotation, EMPTY
    logging         DefaultLoggerStorage, make_logger_state, get_broker_logger
    tests           TestBroker
    FastAPI         StreamRouter and Context, by functions, because they need FastAPI
"""

from __future__ import annotations

from typing import Any

from fast_depends.dependencies import Dependant
from fast_depends.library.serializer import SerializerProto
from fast_depends.utils import is_coroutine_callable
from faststream._internal.basic_types import LoggerProto, SendableMessage
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
    UnderlyingDriverAnnotation,
)
from faststream._internal.constants import EMPTY, ContentTypes
from faststream._internal.context import Context
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.publisher import PublisherProto, PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection, HandlerItem
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import CodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream._internal.testing.broker import TestBroker
from faststream._internal.types import BrokerMiddleware, CustomCallable, PublisherMiddleware
from faststream.message.utils import decode_message

__all__ = [
    "EMPTY", "ArgsContainer", "BrokerConfig", "BrokerMiddleware", "BrokerRouter", "BrokerUsecase", "CallsCollection",
    "CodecProto", "ContentTypes", "Context", "ContextRepo", "CustomCallable", "DefaultCodec", "DefaultLoggerStorage",
    "Dependant", "FakePublisher", "FastDependsConfig", "HandlerItem", "LoggerProto", "ParserComposition",
    "ProducerProto", "PublisherMiddleware", "PublisherProto", "PublisherSpecification", "PublisherSpecificationConfig",
    "PublisherUsecase", "PublisherUsecaseConfig", "Registrator", "SendableMessage", "SerializerProto",
    "SubscriberRoute", "SubscriberSpecification", "SubscriberSpecificationConfig", "SubscriberUsecase",
    "SubscriberUsecaseConfig", "TestBroker", "UnderlyingDriverAnnotation", "decode_message",
    "fastapi_context", "get_broker_logger", "is_blocking", "make_logger_state", "serializer_of", "stream_router",
]  # fmt: skip


def serializer_of(config: FastDependsConfig) -> SerializerProto | None:
    """Return what turns bodies into bytes: that of the broker, or the default."""
    return config._serializer


def is_blocking(call: HandlerItem[Any]) -> bool:
    """Whether FastStream calls this handler in a thread, because it is no coroutine function."""
    return not is_coroutine_callable(call.handler._declared_call)


def stream_router() -> Any:
    """Return the base class of routers for FastAPI, which is imported here."""
    from faststream._internal.fastapi.router import StreamRouter

    return StreamRouter


def fastapi_context() -> Any:
    """Return the marker of parameters that FastStream's context fills under FastAPI."""
    from faststream._internal.fastapi.context import Context

    return Context
