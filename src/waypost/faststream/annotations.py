"""Parameters that a handler is given by their annotation: `async def charge(order: Order, message: WaypostMessage)`."""

from __future__ import annotations

from typing import Annotated

from waypost.client import AsyncWaypost
from waypost.faststream.broker import WaypostBroker as _Broker
from waypost.faststream.internals import Context
from waypost.faststream.message import WaypostMessage as _Message

#: The message that is handled, with `ack`, `nack`, `reject` and `reschedule`.
WaypostMessage = Annotated[_Message, Context("message")]
#: The broker of the subscriber.
WaypostBroker = Annotated[_Broker, Context("broker")]
#: The client of that broker.
Client = Annotated[AsyncWaypost, Context("broker.client")]
