"""How the end of a FastStream handler becomes an outcome of the message.

    returns                          done; with `AckPolicy.MANUAL`, what `ack()`, `nack()` or `reject()` decided
    raises `AckMessage`              done
    raises `NackMessage(delay=…)`    `Retry`: after that time, or when the retry policy decides
    raises `RejectMessage`           `Dead`
    raises `SkipMessage`             back to the queue at no cost, after a second
    raises `StopConsume`             back to the queue at no cost, and the subscriber stops
    any other error                  the retry policy; `REJECT_ON_ERROR`: `Dead`; `ACK`, `ACK_FIRST`: done

FastStream's own middleware for this calls `nack()` without the error, so that no retry policy could see it.
"""

from __future__ import annotations

from faststream import AckPolicy
from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage, StopConsume

from waypost.errors import InvalidInput
from waypost.message import Dead, Retry, Snooze, error_text, error_type
from waypost.times import Duration

#: A message that was skipped is delivered again after this time: at once would keep the worker busy with it.
SKIP_SECONDS = 1.0


def outcome_of(error: BaseException, policy: AckPolicy) -> BaseException | None:
    """Return what ends the message: an outcome, the error itself, for which the retry policy decides, or None: done."""
    if isinstance(error, HandlerException):
        return _decided(error)
    if isinstance(error, StopConsume):
        return Snooze(0)
    if not isinstance(error, Exception):
        return error
    if policy in (AckPolicy.ACK, AckPolicy.ACK_FIRST):
        return None
    if policy is AckPolicy.REJECT_ON_ERROR:
        return Dead("rejected", _describe(error))
    return error


def make_retry(delay: Duration | None = None, reason: str | None = None) -> Retry:
    """Return the outcome of `nack(…)` and `NackMessage(…)`."""
    return Retry(delay, reason)


def make_dead(reason: str = "rejected", error: str | None = None) -> Dead:
    """Return the outcome of `reject(…)` and `RejectMessage(…)`."""
    return Dead(reason, error)


def _decided(error: HandlerException) -> BaseException | None:
    try:
        match error:
            case AckMessage():
                return None
            case NackMessage():
                return make_retry(**error.extra_options)
            case RejectMessage():
                return make_dead(**error.extra_options)
    except TypeError:
        known = "delay= and reason=" if isinstance(error, NackMessage) else "reason= and error="
        given = ", ".join(f"{name}=" for name in getattr(error, "extra_options", ()))
        return InvalidInput(f"{type(error).__name__} takes {known}, not {given}")
    return Snooze(SKIP_SECONDS)


def _describe(error: Exception) -> str:
    return f"{error_type(error)}: {error_text(error)}"
