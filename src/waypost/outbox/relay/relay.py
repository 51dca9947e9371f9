"""The relay: a batch handler that settles a message only after the target has confirmed it.

While the target does not reply, the relay keeps the batch under its leases, which the worker renews, and sends it again
after a growing pause, so the order is kept. After `hold` seconds it snoozes the batch (`Snooze`), which costs a message
neither a delivery nor an attempt: an unavailable target makes no dead letters.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import structs

from waypost import codec
from waypost.checks import check_seconds, check_text, check_texts
from waypost.codec import Envelope
from waypost.errors import ConfigurationError, EnvelopeTooNew, Undecodable
from waypost.message import Dead, Drop, Message, Outcome, Retry, Snooze, error_text, error_type
from waypost.operations.receive import TOO_NEW_SNOOZE_MS
from waypost.outbox.relay.target import Refused, RelayRecord, Target, Unconfirmed
from waypost.outbox.relay.target_urls import open_target
from waypost.policy import KEY_CHARACTERS_MAX
from waypost.redaction import Redact
from waypost.times import Duration
from waypost.urls import redact_text

log = logging.getLogger("waypost")

F = TypeVar("F", bound=Callable[[Message[Any]], Any])
KeyOf = Callable[[Message[Any]], str | None]
HeadersOf = Mapping[str, str] | Callable[[Message[Any]], Mapping[str, str]]

#: The pauses between two tries: short for a brief failure, and bounded so that a target is used soon after it is back.
PAUSE_FIRST_SECONDS, PAUSE_MAX_SECONDS = 0.1, 10.0
#: How long messages of a full group are snoozed: at first a short wait until it has room, then twice as long each time,
#: so that a large backlog of the group is not claimed again and again before those of other groups.
GROUP_PAUSE_SECONDS, GROUP_PAUSE_SECONDS_MAX = 5.0, 60.0
#: For so many full groups the pause is remembered; then it begins anew.
FULL_GROUPS_MAX = 10_000
#: The longest wait for a target to close.
CLOSE_SECONDS = 10.0


class Relay:
    """Sends one queue on. As a decorator, it takes a function from the message to the body to send."""

    def __init__(
        self,
        queue: str,
        to: str | Target,
        *,
        key: str | KeyOf | None = None,
        headers: HeadersOf | None = None,
        hold: Duration,
        redact: Redact | None = None,
    ) -> None:
        self.queue = queue
        self._to = to
        self._key = check_text("key", key, KEY_CHARACTERS_MAX) if isinstance(key, str) else key
        if not (key is None or isinstance(key, str) or callable(key)):
            raise ConfigurationError(f"key= of a relay is text or a function of the message, not {type(key).__name__}")
        if not callable(headers):
            # Refuse invalid headers now and not message by message.
            codec.encode_head(headers=check_texts("headers", headers))
        self._headers = headers
        self._transform: Callable[[Message[Any]], Any] | None = None
        self._hold = check_seconds("hold", hold, error=ConfigurationError)
        #: A URL gives one target for each event loop; the first is made now, so that an error is raised here.
        self._redact_hook = redact
        self._unused_target: Target | None = open_target(to, queue, redact)
        self.description = getattr(self._unused_target, "description", type(self._unused_target).__name__)
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}
        #: The last error of the target if it does not confirm messages now.
        self.failure: str | None = None
        #: The last refusal because a group is full, and until when it counts: messages that are snoozed for it return.
        self._full_group: str | None = None
        self._full_group_until = 0.0
        #: Of each group that was full: how long its messages are snoozed, and when that is over.
        self._pauses: dict[str | None, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"Relay({self.queue!r}, {self.description})"

    def __call__(self, function: F) -> F:
        """Send the result of this function for each message instead of its body."""
        if self._transform is not None:
            raise ConfigurationError(f"the relay of queue {self.queue} has a function already")
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                "the function of a relay is a sync function of the message, not a coroutine function"
            )
        self._transform = function
        return function

    @property
    def target(self) -> Target:
        """The target that it sends to."""
        return self._unused_target or next(iter(self._connections.values())).target

    def handler(self) -> Callable[[list[Message[Any]]], Awaitable[None]]:
        """Return the handler that a worker runs."""

        async def relay(messages: list[Message[Any]]) -> None:
            await self._relay_batch(messages)

        relay.__qualname__ = f"relay to {self.description}"
        return relay

    def note(self) -> str | None:
        """Return why messages are not sent, for the health of a worker; None if all are confirmed."""
        if self.failure is not None:
            return f"the relay of {self.queue} waits for {self.description}: {self.failure}"
        if time.monotonic() < self._full_group_until:
            return f"the relay of {self.queue} snoozes messages for {self.description}: {self._full_group}"
        return None

    def part(self) -> _Part:
        """Return the part that a worker starts and stops with its run."""
        return _Part(self)

    # ---- connections -------------------------------------------------------------------------------------

    def connection(self) -> _Connection:
        """Return the connection of this event loop."""
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None:
            target, self._unused_target = self._unused_target, None
            if target is None:
                if not isinstance(self._to, str):
                    raise ConfigurationError("a target given as an object serves one worker at a time; give a URL")
                target = open_target(self._to, self.queue, self._redact_hook)
            connection = self._connections[loop] = _Connection(target)
        return connection

    async def release(self, connection: _Connection) -> None:
        """Release the connection of a worker; the last one closes it."""
        connection.users -= 1
        if connection.users > 0:
            return
        self._connections = {loop: one for loop, one in self._connections.items() if one is not connection}
        await connection.close()
        self._unused_target = self._unused_target or connection.target

    # ---- a batch -----------------------------------------------------------------------------------------

    async def _relay_batch(self, messages: Sequence[Message[Any]]) -> None:
        connection = self.connection()
        waiting: list[tuple[Message[Any], RelayRecord]] = []
        for message in messages:
            record = self._prepare(message)
            if record is not None:
                waiting.append((message, record))
        deadline, failures = time.monotonic() + self._hold, 0
        confirms = False
        while waiting:
            count = len(waiting)
            waiting, error = await self._send(connection, waiting)
            if error is None:
                confirms = True
                break
            failures = 0 if len(waiting) < count else failures + 1
            self._report_failure(error, len(waiting))
            pause = min(PAUSE_FIRST_SECONDS * 2**failures, PAUSE_MAX_SECONDS) * random.uniform(0.5, 1.0)
            # Messages of at-most-once claims have left the store and cannot be released: hold them.
            if time.monotonic() + pause > deadline and not waiting[0][0].at_most_once:
                for message, _ in waiting:
                    message.snooze(pause)
                return
            await asyncio.sleep(pause)
            waiting = [(message, record) for message, record in waiting if not message.lease_lost]
        if confirms and self.failure is not None:
            self.failure = None
            log.warning(
                "the relay of queue %s: %s confirms messages again", self.queue, self.description,
                extra={"event": "relay_recovered", "queue": self.queue},
            )  # fmt: skip

    async def _send(
        self, connection: _Connection, waiting: list[tuple[Message[Any], RelayRecord]]
    ) -> tuple[list[tuple[Message[Any], RelayRecord]], str | None]:
        """Send once; return what is not confirmed, and the error."""
        try:
            async with connection.lock:
                confirmations = await connection.send([record for _, record in waiting])
            if len(confirmations) != len(waiting):
                raise TypeError(f"{len(confirmations)} confirmations for {len(waiting)} messages")
        except Exception as error:
            return waiting, self._redact(f"{error_type(error)}: {error_text(error)}")
        left: list[tuple[Message[Any], RelayRecord]] = []
        failure: str | None = None
        for (message, record), confirmation in zip(waiting, confirmations, strict=True):
            match confirmation:
                case None:
                    # Set now, so that it is settled even if this call is cancelled later.
                    message.done()
                    self._pauses.pop(record.group, None)
                case Refused():
                    self._refuse(message, confirmation)
                case Unconfirmed(is_group_full=True) if not message.at_most_once:
                    pause = self._group_pause(record.group)
                    self._report_full_group(self._redact(confirmation.error), pause)
                    message.snooze(pause)
                case Unconfirmed():
                    left.append((message, record))
                    failure = failure or self._redact(confirmation.error)
        return left, failure if left else None

    def _redact(self, text: str) -> str:
        """Return an error text of the target without the secrets of its URL."""
        return redact_text(text, self._to)

    def _refuse(self, message: Message[Any], refused: Refused) -> None:
        refused = structs.replace(refused, error=self._redact(refused.error))
        log.warning(
            "the relay of queue %s: %s refuses message %s (%s): %s",
            self.queue,
            self.description,
            message.id,
            refused.reason,
            refused.error,
            extra={"event": "relay_refused", "queue": self.queue, "message_id": message.id, "reason": refused.reason},
        )
        if message.at_most_once:
            return
        if message.attempts < refused.retries:
            message.retry(2.0**message.attempts, f"{refused.reason}: {refused.error}")
        else:
            message.dead(refused.reason, refused.error)

    def _report_failure(self, error: str, count: int) -> None:
        if self.failure is None:
            log.warning(
                "the relay of queue %s: %s does not confirm %d messages (%s); they are kept and sent again",
                self.queue,
                self.description,
                count,
                error,
                extra={"event": "relay_unconfirmed", "queue": self.queue, "count": count},
            )
        self.failure = error

    def _group_pause(self, group: str | None) -> float:
        """Return how long the messages of a full group are snoozed: all that return meanwhile for as long."""
        now = time.monotonic()
        pause, until = self._pauses.get(group, (0.0, 0.0))
        if now >= until:
            if len(self._pauses) >= FULL_GROUPS_MAX:
                self._pauses.clear()
            pause = min(max(GROUP_PAUSE_SECONDS, 2 * pause), GROUP_PAUSE_SECONDS_MAX)
            self._pauses[group] = pause, now + pause
        return pause

    def _report_full_group(self, error: str, pause: float) -> None:
        now = time.monotonic()
        if now >= self._full_group_until:
            log.warning(
                "the relay of queue %s: %s has no room for a group, whose messages are snoozed and sent again (%s)",
                self.queue, self.description, error, extra={"event": "relay_group_full", "queue": self.queue},
            )  # fmt: skip
        self._full_group, self._full_group_until = error, max(self._full_group_until, now + 2 * pause)

    # ---- a message ---------------------------------------------------------------------------------------

    def _prepare(self, message: Message[Any]) -> RelayRecord | None:
        """Return the record of a message; None if its outcome is already set."""
        try:
            return self._make_record(message)
        except EnvelopeTooNew:
            _decide(message, lambda: message.snooze(TOO_NEW_SNOOZE_MS / 1000))
        except Undecodable as error:
            reason = error_text(error)
            _decide(message, lambda: message.dead("undecodable", reason))
        except Outcome as outcome:
            decided = outcome
            _decide(message, lambda: _apply_outcome(message, decided))
        except Exception as error:
            # The caller's function failed for this message: retry it, up to its attempts.
            log.exception(
                "the relay of queue %s: the record of message %s could not be made",
                self.queue, message.id, extra={"event": "relay_failed", "queue": self.queue, "message_id": message.id},
            )  # fmt: skip
            failure = f"{error_type(error)}: {error_text(error)}"
            _decide(message, lambda: message.retry(reason=failure))
        return None

    def _make_record(self, message: Message[Any]) -> RelayRecord:
        envelope, data = message.open(), message._lease.envelope
        extra = dict(self._headers(message) if callable(self._headers) else self._headers or {})
        body = self._body(message, envelope)
        if extra or body is not None:
            body = body or codec.Encoded(
                codec.CONTENT_TYPES.index(envelope.content_type), envelope.data, envelope.type_name
            )
            head = codec.head_of(envelope, type_name=body.type_name, headers=envelope.headers | extra)
            data = codec.make_envelope(message.id, body, head)
            envelope = codec.open_envelope(data)
        key = self._key(message) if callable(self._key) else self._key
        return RelayRecord(
            message.id, message.queue, envelope.data, envelope.content_type, _headers(message, envelope),
            None if key is None else check_text("key", key, KEY_CHARACTERS_MAX), message.key, message.group,
            message.priority, message._lease.published_ms, data, envelope.type_name, envelope.correlation_id,
            envelope.reply_to, message.token > 1,
        )  # fmt: skip

    def _body(self, message: Message[Any], envelope: Envelope) -> codec.Encoded | None:
        if self._transform is None:
            return None
        made = self._transform(message)
        if isinstance(made, Outcome):
            raise made
        return codec.encode_body(made, faithful=False)


def _headers(message: Message[Any], envelope: Envelope) -> dict[str, str]:
    """Return all headers of a record, with those that describe the message to any system."""
    headers = {
        **envelope.headers,
        **envelope.trace,
        "waypost-id": message.id,
        "waypost-queue": message.queue,
        "content-type": envelope.content_type,
    }
    more = {
        "waypost-type": envelope.type_name,
        "waypost-key": message.key,
        "correlation-id": envelope.correlation_id,
        "reply-to": envelope.reply_to,
    }
    return headers | {name: value for name, value in more.items() if value is not None}


def _decide(message: Message[Any], decide: Callable[[], None]) -> None:
    # A message of an at-most-once claim has left the store: no outcome applies.
    if message.outcome is None and not message.at_most_once:
        decide()


def _apply_outcome(message: Message[Any], outcome: Outcome) -> None:
    match outcome:
        case Snooze():
            message.snooze(outcome.after)
        case Dead():
            message.dead(outcome.reason, outcome.error)
        case Drop():
            message.drop()
        case Retry():
            message.retry(outcome.after, outcome.reason)


class _Connection:
    """A target on one event loop, opened by the first batch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.users = 0
        self.lock = asyncio.Lock()
        self._open = False

    async def send(self, records: Sequence[RelayRecord]) -> Sequence[Refused | Unconfirmed | None]:
        """Open if needed, and send. After an exception the next call opens it again."""
        try:
            if not self._open:
                await self.target.open()
                self._open = True
            return await self.target.send(records)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the target."""
        self._open = False
        try:
            await asyncio.wait_for(self.target.close(), CLOSE_SECONDS)
        except Exception as error:
            log.info("a target could not be closed: %s", error_type(error), extra={"event": "relay_close_failed"})


class _Part:
    """The part of a relay that starts and stops with one worker."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._connection: _Connection | None = None

    def start(self) -> None:
        """Use the connection from now on; the first batch opens it."""
        self._connection = self._relay.connection()
        self._connection.users += 1

    async def stop(self) -> None:
        """Release the connection after the worker's handlers have ended."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._relay.release(connection)
