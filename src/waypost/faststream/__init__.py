"""FastStream on waypost: `WaypostBroker` for FastStream 0.7.

broker         WaypostBroker: connect, publish, request, timers
registrator    how subscribers and publishers are declared; WaypostRouter
subscriber     FastStream's processing of a message as a handler of a worker
outcomes       how the end of a handler becomes an outcome
workers        which worker runs which subscribers
publishing     commands, the producer, publishers, replies
message        a message as handlers and middlewares see it
specification  what the AsyncAPI document lists
testing        TestWaypostBroker
internals      all private names of FastStream, and the only module that imports them
prometheus, opentelemetry, fastapi    to be imported on their own: they need more packages
"""

from waypost.errors import MissingExtra

try:
    import faststream as _faststream  # noqa: F401
except ImportError:
    raise MissingExtra("FastStream is not installed: pip install 'waypost[faststream]'") from None

from waypost.faststream.broker import WaypostBroker
from waypost.faststream.message import WaypostMessage
from waypost.faststream.publishing import WaypostPublisher, WaypostResponse
from waypost.faststream.registrator import WaypostRoute, WaypostRoutePublisher, WaypostRouter
from waypost.faststream.subscriber import WaypostSubscriber
from waypost.faststream.testing import TestWaypostBroker

__all__ = [
    "TestWaypostBroker",
    "WaypostBroker",
    "WaypostMessage",
    "WaypostPublisher",
    "WaypostResponse",
    "WaypostRoute",
    "WaypostRoutePublisher",
    "WaypostRouter",
    "WaypostSubscriber",
]
