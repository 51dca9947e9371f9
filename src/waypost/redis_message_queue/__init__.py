"""The interface of the package redis-message-queue on a waypost store, for programs that switch over.

    from waypost.redis_message_queue import RedisMessageQueue            # instead of: from redis_message_queue import …

    queue = RedisMessageQueue("my_queue", client=redis_client)
    queue.publish("order:1234")
    with queue.process_message() as message: ...

`client` is a client of redis-py, the URL of any store, or a `Waypost`. `waypost.redis_message_queue.asyncio` has the
same for an event loop. `queue.post` is the client of waypost below.
"""

from __future__ import annotations

from waypost.redis_message_queue.errors import (
    CleanupFailedError,
    ConfigurationError,
    GatewayContractError,
    QueueBackpressureError,
    QueueDrainedError,
    RedisMessageQueueError,
    RetryBudgetExhaustedError,
)
from waypost.redis_message_queue.events import EventOperation, EventOutcome, QueueEvent
from waypost.redis_message_queue.interrupts import BaseGracefulInterruptHandler, GracefulInterruptHandler
from waypost.redis_message_queue.options import RedisGateway
from waypost.redis_message_queue.sync_queue import RedisMessageQueue

__all__ = [
    "BaseGracefulInterruptHandler",
    "CleanupFailedError",
    "ConfigurationError",
    "EventOperation",
    "EventOutcome",
    "GatewayContractError",
    "GracefulInterruptHandler",
    "QueueBackpressureError",
    "QueueDrainedError",
    "QueueEvent",
    "RedisGateway",
    "RedisMessageQueue",
    "RedisMessageQueueError",
    "RetryBudgetExhaustedError",
]
