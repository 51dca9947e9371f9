"""The log of handler calls: how each ended, and what happens to its messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from waypost.message import CHOICES, Dead, Message, Outcome, Retry, error_text, error_type, is_own_file
from waypost.values import Settlement
from waypost.worker.handler import Handler

log = logging.getLogger("waypost")
#: Successes are logged by this logger, at DEBUG, or at the level that is set for it.
done_log = logging.getLogger("waypost.done")

#: The text of an error is cut in the line of a failure; the traceback below it is complete.
LINE_CHARACTERS_MAX = 300
#: What happens to a message after each outcome except a retry.
OUTCOMES = {
    "done": "it is done",
    "release": "it is released",
    "snooze": "it is snoozed",
    "drop": "it is dropped",
}


def log_failure(
    handler: Handler, messages: Sequence[Message[Any]], error: BaseException, settlements: Sequence[Settlement]
) -> None:
    """Log that a handler failed, what happens to its messages, and the traceback of its own frames."""
    message, chosen = messages[0], isinstance(error, CHOICES)
    is_dead = any(one.outcome == "dead" for one in settlements)
    if chosen and not is_dead and settlements[0].outcome != "retry":
        return  # the handler chose this outcome
    level, verb = logging.WARNING, "failed on"
    if isinstance(error, Dead):
        level, verb = logging.INFO, "gives up"
    elif is_dead:
        level = logging.ERROR
    elif chosen:
        level, verb = logging.INFO, "asks for another try of"
    cause = describe_cause(error)
    log.log(
        level,
        "handler %s %s %s of queue %s: %s%s",
        handler.name,
        verb,
        describe_messages(messages),
        handler.queue,
        f"{cause}; " if cause else "",
        describe_outcomes(handler, messages, settlements),
        exc_info=None if chosen else (type(error), error, own_frames(error.__traceback__)),
        extra={
            "event": "handler_failed",
            "queue": handler.queue,
            "message_id": message.id,
            "count": len(messages),
            "deliveries": message.deliveries,
            "attempts": message.attempts + 1,
            "error_type": error_type(error),
            "outcome": settlements[0].outcome,
            "reason": settlements[0].reason,
            "retry_seconds": settlements[0].after_ms / 1000 if settlements[0].outcome == "retry" else None,
        },
    )


def log_chosen(
    handler: Handler, messages: Sequence[Message[Any]], settlements: Sequence[Settlement]
) -> list[Message[Any]]:
    """Log what a handler that raised nothing chose for its messages by hand; return those that are done."""
    done: list[Message[Any]] = []
    chosen: dict[tuple[str, ...], list[tuple[Message[Any], Settlement]]] = {}
    for message, settlement in zip(messages, settlements, strict=True):
        if settlement.outcome == "done":
            done.append(message)
        else:
            # One line for all messages of a batch that ended in the same way.
            about = (settlement.outcome, settlement.reason or "", describe_cause(_choice(message)))
            chosen.setdefault(about, []).append((message, settlement))
    for ended in chosen.values():
        log_failure(handler, [one for one, _ in ended], _choice(ended[0][0]), [one for _, one in ended])
    return done


def _choice(message: Message[Any]) -> Outcome:
    """Return the outcome that a handler chose by hand; a message that is settled by hand, and was not, is retried."""
    return message.outcome if isinstance(message.outcome, Outcome) else Retry(reason="left unsettled")


def done_level() -> int | None:
    """Return the level at which successes are logged, None if they are not logged."""
    level = done_log.level or logging.DEBUG
    return level if done_log.isEnabledFor(level) else None


def log_done(level: int, handler: Handler, messages: Sequence[Message[Any]], seconds: float) -> None:
    """Log that a handler has ended without an error, and how long it took."""
    done_log.log(
        level,
        "handler %s: %s of queue %s done in %s",
        handler.name,
        describe_messages(messages),
        handler.queue,
        f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s",
        extra={
            "event": "handler_done",
            "queue": handler.queue,
            "message_id": messages[0].id,
            "count": len(messages),
            "deliveries": messages[0].deliveries,
            "seconds": round(seconds, 6),
        },
    )


def describe_cause(error: BaseException) -> str:
    """Return the class of an error and its first line, or the reason that a handler gave for another try."""
    if isinstance(error, CHOICES):
        return error.reason or "" if isinstance(error, Retry) else ""
    text = error_text(error).partition("\n")[0][:LINE_CHARACTERS_MAX]
    return f"{error_type(error)}: {text}" if text else error_type(error)


def describe_messages(messages: Sequence[Message[Any]]) -> str:
    """Return the message of a call, or how many there are and the first of them."""
    if len(messages) == 1:
        return f"message {messages[0].id}"
    return f"{len(messages)} messages, the first of them {messages[0].id},"


def describe_outcomes(handler: Handler, messages: Sequence[Message[Any]], settlements: Sequence[Settlement]) -> str:
    """Return what happens to the messages of a call."""
    if len(messages) == 1:
        return describe_outcome(handler, messages[0], settlements[0])
    counts = Counter(one.outcome for one in settlements)
    parts = {"retry": "retrying {}", "dead": "{} dead letters", "release": "{} released"}
    texts = [parts.get(outcome, f"{{}} {outcome}").format(count) for outcome, count in counts.items()]
    return ", ".join(texts)


def describe_outcome(handler: Handler, message: Message[Any], settlement: Settlement) -> str:
    """Return what happens to a message."""
    if message.at_most_once:
        return "its queue delivers at most once: it is not tried again"
    if message.lease_lost:
        return "its lease is lost: another worker may have it"
    if message.cancel_requested and settlement.outcome != "done":
        return "its cancel was requested: it is cancelled"
    if settlement.outcome == "dead":
        return f"dead letter: {settlement.reason}"
    if settlement.outcome != "retry":
        return OUTCOMES[settlement.outcome]
    try:
        most = getattr(message.own_retry(handler.retry), "attempts", None)
    except Exception:
        most = None  # a policy of the application
    attempt = f"attempt {message.attempts + 1}" + (f" of {most}" if isinstance(most, int) else "")
    return f"retrying in {settlement.after_ms / 1000:.1f} s, {attempt}"


def own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside waypost on: the frames before it do not concern the handler."""
    while traceback is not None and is_own_file(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback
