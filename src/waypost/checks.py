"""Validation of arguments: each function returns the value or raises an error that names argument, value and rule.

Every public method validates its arguments before anything is sent, with these functions only, so that an
invalid value raises the same error everywhere. They accept values of any class, also one whose
`__repr__` or `__eq__` fails.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from waypost.errors import (
    ConfigurationError,
    InvalidHeaders,
    InvalidInput,
    InvalidName,
    InvalidTime,
    UnknownOption,
)
from waypost.identity import is_message_id
from waypost.values import MessageState, Published, split_chain_id

T = TypeVar("T")
Error = type[InvalidInput] | type[ConfigurationError]

QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
NAMESPACE = re.compile(r"[A-Za-z][A-Za-z0-9_\-]{0,47}")
#: A timer may be years away, but not so far that milliseconds exceed the exact range of a double.
DUE_MS_MAX = 253_402_300_799_000  # the end of the year 9999
#: No duration is longer: about 31 years.
SECONDS_MAX = 1e9
QUOTED_CHARACTERS_MAX = 80
STATES = ("ready", "delayed", "waiting", "leased", "dead", "done")
COUNTED_STATES = ("ready", "delayed", "waiting", "dead")
PURGED_STATES = ("ready", "delayed", "waiting", "dead", "done")


def show(value: object) -> str:
    """Return a value for an error text: its shortened repr, or the name of its type if that fails."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= QUOTED_CHARACTERS_MAX else text[: QUOTED_CHARACTERS_MAX - 3] + "..."


# ---- names and texts -----------------------------------------------------------------------------------------


def check_queue(name: str) -> str:
    """Return a queue name unchanged, or raise `InvalidName`."""
    if not isinstance(name, str) or QUEUE_NAME.fullmatch(name) is None:
        raise InvalidName(
            f"queue name {show(name)} is not allowed: 1 to 128 of A-Z a-z 0-9 . _ : -, first a letter or digit"
        )
    return name


def check_namespace(name: str) -> str:
    """Return a namespace unchanged, or raise `InvalidName`."""
    if not isinstance(name, str) or NAMESPACE.fullmatch(name) is None:
        raise InvalidName(f"namespace {show(name)} is not allowed: 1 to 48 of A-Z a-z 0-9 _ -, starting with a letter")
    return name


def check_text(what: str, value: str, characters_max: int) -> str:
    """Return a key, group or other short text unchanged, or raise `InvalidName`."""
    if not isinstance(value, str) or not value or len(value) > characters_max or "\0" in value:
        raise InvalidName(f"{what} must be text of 1 to {characters_max} characters without NUL, not {show(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidName(f"{what} holds characters that UTF-8 cannot carry: {show(value)}") from None
    return value


def check_choice(what: str, value: Any, allowed: Sequence[str], error: Error = InvalidInput) -> str:
    """Return one of the allowed values unchanged."""
    if not isinstance(value, str) or value not in allowed:
        raise error(f"{what} must be one of {', '.join(allowed)}, not {show(value)}")
    return value


def check_id(message_id: object) -> str:
    """Return a message id unchanged, or raise `InvalidInput`."""
    if not isinstance(message_id, str) or not is_message_id(message_id):
        raise InvalidInput(
            f"{show(message_id)} is no message id: it has 24 characters of 0-9 and a-z without i, l, o and u"
        )
    return message_id


def check_state(state: MessageState, allowed: Sequence[str] = STATES) -> MessageState:
    """Return a state unchanged, or raise `InvalidInput`."""
    check_choice("state", state, allowed)
    return state


def check_chain(chain: object) -> str:
    """Return the id of a chain, given as that or as the publish that began it; or raise `InvalidInput`."""
    if isinstance(chain, Published):
        chain = chain.chain_id
    if isinstance(chain, str):
        queue, message_id = split_chain_id(chain)
        if is_message_id(message_id) and QUEUE_NAME.fullmatch(queue):
            return chain
    raise InvalidInput(f"a chain is named by what its first publish returned, or by its chain_id, not by {show(chain)}")


# ---- numbers -------------------------------------------------------------------------------------------------


def check_count(what: str, value: int, least: int, most: int, error: Error = InvalidInput) -> int:
    """Return a whole number within its bounds unchanged. True is not a number."""
    if type(value) is not int or not least <= value <= most:
        raise error(f"{what} must be a whole number from {least} to {most}, not {show(value)}")
    return value


def check_flag(what: str, value: bool, error: Error = InvalidInput) -> bool:
    """Return True or False unchanged."""
    if type(value) is not bool:
        raise error(f"{what} must be True or False, not {show(value)}")
    return value


def check_number(what: str, value: float, least: float, most: float, error: Error = InvalidInput) -> float:
    """Return a number within its bounds unchanged. NaN, infinity and True are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise error(f"{what} must be a number from {least:g} to {most:g}, not {show(value)}")
    return value


def check_seconds(
    what: str,
    value: float | timedelta,
    *,
    least: float = 0.0,
    most: float = SECONDS_MAX,
    error: Error = InvalidTime,
    hint: str = "",
) -> float:
    """Return a duration in seconds; given as a number or a timedelta. NaN and infinity are refused."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not least <= seconds <= most:
        raise error(f"{what} must be seconds from {least:g} to {most:g} or a timedelta{hint}, not {show(value)}")
    return float(seconds)


def check_message_timeout(timeout: float | timedelta) -> float:
    """Return the time limit that a message carries, in seconds."""
    return check_seconds("timeout", timeout, least=0.001)


def check_moment(what: str, at: datetime) -> int:
    """Return a time as milliseconds since 1970, from 0 to the end of 9999; it is a datetime with a time zone."""
    if not isinstance(at, datetime):
        raise InvalidTime(f"{what} must be a datetime with a time zone, not {show(at)}")
    try:
        if at.tzinfo is None or at.utcoffset() is None:
            raise InvalidTime(
                f"{what} must carry a time zone, for example datetime.now(timezone.utc) + …; naive times are ambiguous"
            )
        return min(max(0, round((at - _EPOCH) / timedelta(milliseconds=1))), DUE_MS_MAX)
    except InvalidTime:
        raise
    except Exception as failure:  # the zone may be any code
        raise InvalidTime(f"{what} has a time zone that fails for it: {type(failure).__name__}") from None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def due_ms(delay: float | timedelta | None, at: datetime | None) -> tuple[int, int | None]:
    """Turn `delay` or `at` into (milliseconds from now, None) or (0, absolute milliseconds)."""
    if at is not None:
        if delay is not None:
            raise InvalidTime("give either delay or at, not both")
        return 0, check_moment("at", at)
    if delay is None:
        return 0, None
    return check_delay("delay", delay), None


def expiry_ms(expires: float | timedelta | datetime | None, delay_ms: int, at_ms: int | None) -> int:
    """Turn `expires` into absolute milliseconds, or into minus the milliseconds after the publish; 0 for none.

    A message that would lapse before it is due is refused. If one of both times is absolute, this machine's clock
    decides.
    """
    if expires is None:
        return 0
    if isinstance(expires, datetime):
        found = max(1, check_moment("expires", expires))
        is_early = found <= at_ms if at_ms is not None else delay_ms > 0 and found <= time.time() * 1000 + delay_ms
    else:
        span = max(1, round(check_seconds("expires", expires, least=0.001) * 1000))
        is_early = span <= delay_ms if at_ms is None else time.time() * 1000 + span <= at_ms
        found = -span
    if is_early:
        raise InvalidInput(f"expires={show(expires)} lies before the message is due: expire later, or be due earlier")
    return found


def check_delay(what: str, delay: float | timedelta) -> int:
    """Return a delay in milliseconds, 0 for a negative one."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise InvalidTime(f"{what} must be seconds or a timedelta, not {show(delay)}")
    if not -1e9 < seconds < DUE_MS_MAX / 2000:
        raise InvalidTime(f"{what} of {show(delay)} is out of range")
    return max(0, round(seconds * 1000))


# ---- what holds others ---------------------------------------------------------------------------------------


def check_items(what: str, value: Iterable[T], error: Error = InvalidInput) -> list[T]:
    """Return the items of a list, tuple, set or generator. Text and mappings are refused."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise error(f"{what} must be a list, not {show(value)}")
    return list(value)


def check_texts(what: str, value: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of a mapping of text to text (its content is validated when it is encoded); {} for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidHeaders(f"{what} must be a mapping of text to text, not {show(value)}")
    return dict(value)


def check_function(what: str, value: Callable[..., T] | None, error: Error = InvalidInput) -> Callable[..., T] | None:
    """Return a function, or None, unchanged."""
    if value is not None and not callable(value):
        raise error(f"{what} must be a function, not {show(value)}")
    return value


def check_options(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keywords that a call does not have, and name the close ones."""
    names = sorted(known)
    for name in given:
        if name not in names:
            from difflib import get_close_matches

            close = get_close_matches(name, names)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it takes {', '.join(names)}"
            raise UnknownOption(f"{call} has no option {name!r}; {hint}")
