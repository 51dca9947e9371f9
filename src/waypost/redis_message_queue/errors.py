"""The errors of redis-message-queue, which are errors of waypost too.

RedisMessageQueueError (WaypostError)
├── ConfigurationError (ValueError)   arguments that make no sense, alone or together
├── GatewayContractError (TypeError)  a gateway that is none
├── QueueBackpressureError            the queue is full; nothing was published
├── QueueDrainedError                 this object was drained and publishes no more
├── CleanupFailedError                the message was handled, and the store could not record it
└── RetryBudgetExhaustedError         the store did not answer for longer than the retry budget
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from waypost.errors import ConfigurationError as WrongConfiguration
from waypost.errors import InvalidName, OutcomeUnknown, QueueDrained, QueueFull, StoreUnavailable, WaypostError


class RedisMessageQueueError(WaypostError):
    """The class of all errors here."""


class ConfigurationError(RedisMessageQueueError, ValueError):
    """Raised for arguments that make no sense, alone or together."""


class GatewayContractError(RedisMessageQueueError, TypeError):
    """Raised for a gateway that is no `RedisGateway` of this package."""


class QueueBackpressureError(RedisMessageQueueError):
    """Raised when a queue is full; nothing was published."""


class QueueDrainedError(RedisMessageQueueError):
    """Raised by a publish after `drain`."""


class CleanupFailedError(RedisMessageQueueError):
    """Raised when a message was handled and the store could not record it: it is delivered again."""


class RetryBudgetExhaustedError(RedisMessageQueueError, ConnectionError):
    """Raised when the store did not answer for longer than the retry budget."""


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raise errors of waypost as those of redis-message-queue; the others pass."""
    try:
        yield
    except RedisMessageQueueError:
        raise
    except QueueFull as error:
        raise QueueBackpressureError(f"{error}; here: max_pending_length, pending_overload_policy") from error
    except QueueDrained as error:
        raise QueueDrainedError("queue is drained") from error
    except (StoreUnavailable, OutcomeUnknown) as error:
        raise RetryBudgetExhaustedError(str(error)) from error
    except (WrongConfiguration, InvalidName) as error:
        raise ConfigurationError(str(error)) from error
