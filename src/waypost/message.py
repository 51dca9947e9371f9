"""A message as people meet it: in a handler, in a listing, and the outcomes by which a delivery ends.

Nothing here does I/O. A `Message` records what its handler decided; the client or worker that handed it out settles.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from traceback import StackSummary, TracebackException
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from waypost import codec
from waypost.checks import (
    check_delay,
    check_message_timeout,
    check_queue,
    check_text,
    check_texts,
    expiry_ms,
    show,
)
from waypost.errors import ConfigurationError, InvalidInput, Undecodable
from waypost.identity import continuation_id
from waypost.policy import (
    ERROR_CHARACTERS_MAX,
    GROUP_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    PRIORITY_DEFAULT,
    REASON_CHARACTERS_MAX,
    RESULT_TTL_SECONDS,
    TRACEBACK_CHARACTERS_MAX,
    TRACEBACK_LINE_CHARACTERS_MAX,
    RetryPolicy,
    check_message_retry,
    check_priority,
)
from waypost.times import Duration, to_datetime, to_timedelta
from waypost.values import (
    TRACEBACK_MARK,
    Continuation,
    Lease,
    MessageState,
    Settlement,
    SettleStatus,
    Stored,
    split_error,
)

if TYPE_CHECKING:
    from waypost.codec import ContentType, Envelope

T = TypeVar("T")
S = TypeVar("S")

#: A continuation is part of its settle, which is one atomic step: so many of them may hang on one message.
THEN_MAX = 128
#: The error text of a dead letter whose error cannot be converted to text.
_NO_TEXT = "(the error has no text)"
_PACKAGE = os.path.dirname(__file__) + os.sep


class Queue(Generic[T]):
    """A queue's name with the type of its bodies. Accepted wherever a name is; what is received is a `T`."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: type[T]) -> None:
        self.name = check_queue(name)
        codec.check_type("type", type)
        self.type = type

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {getattr(self.type, '__name__', self.type)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Queue) and (self.name, self.type) == (other.name, other.type)

    def __hash__(self) -> int:
        return hash((Queue, self.name))


def queue_name(queue: str | Queue[Any]) -> str:
    """Return the validated name of a queue given as a name or a handle."""
    return queue.name if isinstance(queue, Queue) else check_queue(queue)


def queue_type(queue: str | Queue[T]) -> type[T] | None:
    """The type of a queue's bodies, None for a plain name."""
    return queue.type if isinstance(queue, Queue) else None


# ---- outcomes ------------------------------------------------------------------------------------------------


class Outcome(Exception):
    """How a handler ends other than by being done: return it or raise it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # For process pools of the application: the arguments of an error are not those of our constructors.
        return _copy_outcome, (type(self), self.args), self.__dict__


def _copy_outcome(kind: type[Outcome], arguments: tuple[Any, ...]) -> Outcome:
    return kind.__new__(kind, *arguments)


class Retry(Outcome):
    """It failed: try again after this time, or when the retry policy decides. Counts as an attempt, so it ends."""

    # Here and below: what a class of the application has whose constructor does not call this one.
    _after_ms: int | None = None
    reason: str | None = None

    def __init__(self, after: Duration | None = None, reason: str | None = None) -> None:
        self._after_ms = None if after is None else after_ms(after)
        self.reason = None if reason is None else check_text("reason", reason, ERROR_CHARACTERS_MAX)
        super().__init__(reason or "retry")

    @property
    def after(self) -> timedelta | None:
        """The pause before the next try; None: the retry policy decides."""
        return to_timedelta(self._after_ms)


class Snooze(Outcome):
    """Not now: deliver it again after this time. Uses neither a delivery nor an attempt."""

    _after_ms: int = 0

    def __init__(self, after: Duration) -> None:
        super().__init__("snooze")
        self._after_ms = after_ms(after)

    @property
    def after(self) -> timedelta:
        """The pause before the next delivery."""
        return to_timedelta(self._after_ms)


class Dead(Outcome):
    """Hopeless: to the dead letters. `reason` is short and groups them; `error` explains this one."""

    reason: str = "rejected"
    error: str | None = None

    def __init__(self, reason: str = "rejected", error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = check_text("reason", reason, REASON_CHARACTERS_MAX)
        if not (error is None or isinstance(error, str)):
            raise InvalidInput(f"error must be text, not {show(error)}")
        self.error = None if error is None else cut_text(error)


class Drop(Outcome):
    """Forget it: counted and journalled as dropped, kept nowhere."""

    def __init__(self) -> None:
        super().__init__("drop")


#: The outcomes that there are; a class of the application beside them is an error as any other.
CHOICES = (Retry, Snooze, Dead, Drop)


def check_returned(returned: object) -> object:
    """Return what a handler returned; a class of outcomes as an outcome, as `raise` takes it.

    Raises `ConfigurationError` for a coroutine: the handler's code has not run.
    """
    if isinstance(returned, type) and issubclass(returned, Outcome):
        return returned()
    if isinstance(returned, CoroutineType):
        returned.close()
        raise ConfigurationError(
            f"the handler returned the coroutine {returned.__qualname__} without awaiting it, so it has not run: make "
            "the function that is registered, or the decorator around it, an async def"
        )
    return returned


def after_ms(after: Duration) -> int:
    """A pause before the next delivery in milliseconds; `InvalidTime` if it is none."""
    return check_delay("after", after)


def cut_text(text: str) -> str:
    """An error's text as a store may keep it: cut, without NUL and lone surrogates."""
    return _storable(text[:ERROR_CHARACTERS_MAX])


def _storable(text: str) -> str:
    plain = text.replace("\0", "\\0").replace(TRACEBACK_MARK, "\\x1e")
    return plain.encode("utf-8", "backslashreplace").decode()


#: Where an error keeps a text that is shorter than its own.
_TEXT = "__waypost_text__"


def set_error_text(error: BaseException, text: str) -> None:
    """Let an error be kept and logged with this text instead of its own, which may have pages."""
    with suppress(Exception):
        vars(error)[_TEXT] = text


def error_text(error: BaseException) -> str:
    """Return the text of an error; its `__str__` is user code and may fail."""
    try:
        return cut_text(str(vars(error).get(_TEXT, error)))
    except Exception:
        return _NO_TEXT


#: Where an error keeps how it was formatted.
_FAILURE = "__waypost_failure__"


def format_failure(error: BaseException) -> str:
    """Return an error as it is kept with its message: its text, and behind it the end of its traceback."""
    # The messages of a batch fail with the same error, and formatting reads source files. Attributes of an error are
    # user code, but for its dictionary.
    try:
        kept: object = vars(error).get(_FAILURE)
    except Exception:
        kept = None
    if isinstance(kept, str):
        return kept
    traceback = traceback_text(error)
    formatted = error_text(error) + (TRACEBACK_MARK + traceback if traceback else "")
    with suppress(Exception):
        vars(error)[_FAILURE] = formatted
    return formatted


def traceback_text(error: BaseException, characters_max: int = TRACEBACK_CHARACTERS_MAX) -> str | None:
    """Return the end of an error's traceback without the frames of waypost; None if there are no others."""
    try:
        described = TracebackException.from_exception(error, compact=True)
        if not _drop_frames(described):
            return None
        lines = "".join(described.format()).splitlines()
    except Exception:
        return None  # the texts of errors are made by user code
    text = "\n".join(line[:TRACEBACK_LINE_CHARACTERS_MAX] for line in lines)
    if len(text) > characters_max:
        text = "…" + text[1 - characters_max :]
    return _storable(text)


def _drop_frames(described: TracebackException) -> bool:
    """Drop the frames of waypost from a traceback and those of its causes; whether it has others, or notes."""
    described.stack = StackSummary.from_list([one for one in described.stack if not is_own_file(one.filename)])
    others = [described.__cause__, described.__context__, *(described.exceptions or ())]
    found = [_drop_frames(one) for one in others if one is not None]
    return bool(described.stack) or bool(getattr(described, "__notes__", None)) or any(found)


def is_own_file(name: str) -> bool:
    """Whether a frame with this file is a part of waypost."""
    return name.startswith(_PACKAGE)


def error_type(error: BaseException) -> str:
    """The full name of an error's class."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name[:KEY_CHARACTERS_MAX]


# ---- what a message shows ------------------------------------------------------------------------------------


class _Readable(Generic[T]):
    """The envelope and the body, decoded on first access."""

    __slots__ = ("_as_type", "_body", "_data", "_envelope", "undecodable")

    def __init__(self, data: bytes, as_type: type[T] | None) -> None:
        self._data = data
        self._as_type = as_type
        self._envelope: Envelope | None = None
        self._body: Any = _UNREAD
        #: The error by which reading it failed, None if it was not read or could be.
        self.undecodable: Undecodable | None = None

    def open(self) -> Envelope:
        """Return the parsed envelope; raises `Undecodable`, or `EnvelopeTooNew` if a newer release wrote it."""
        if self._envelope is None:
            try:
                self._envelope = codec.open_envelope(self._data)
            except Undecodable as error:
                self.undecodable = error
                raise
        return self._envelope

    @property
    def body(self) -> T:
        """The body, as the queue's type if it has one. Raises `Undecodable` if it is not of that type."""
        if self._body is _UNREAD:
            self._body = self._decode(self._as_type)
        return self._body  # type: ignore[no-any-return]

    def decode(self, type: type[S]) -> S:
        """The body as a value of this type; raises `Undecodable` if it is not one."""
        return self._decode(type)  # type: ignore[no-any-return]

    def _decode(self, as_type: Any) -> Any:
        plain = None
        if self._envelope is None:
            body = codec.decode_plain(self._data, as_type)
            if body is not codec.NOT_PLAIN:
                return body
            plain = codec.plain_body(self._data)
        content_type, data = plain or (self.open().content_type, self.open().data)
        try:
            return codec.decode_body(content_type, data, as_type)
        except Undecodable as error:
            self.undecodable = error
            raise

    @property
    def content_type(self) -> ContentType:
        """`application/json`, `text/plain` or `application/octet-stream`."""
        return self.open().content_type

    @property
    def type_name(self) -> str | None:
        """The name of the type that the publisher's body had, if it had one of its own."""
        return self.open().type_name

    @property
    def headers(self) -> dict[str, str]:
        """The publisher's headers."""
        return self.open().headers

    @property
    def instant(self) -> datetime | None:
        """The instant that a schedule published it for; None if no schedule did."""
        text = self.open().headers.get("waypost-instant")
        return None if text is None else datetime.fromisoformat(text)

    @property
    def correlation_id(self) -> str | None:
        """What the publisher relates this message to."""
        return self.open().correlation_id

    @property
    def reply_to(self) -> str | None:
        """Where the publisher wants a reply."""
        return self.open().reply_to

    @property
    def trace(self) -> dict[str, str]:
        """The W3C trace context that travelled with it."""
        return self.open().trace

    @property
    def retry_policy(self) -> RetryPolicy | None:
        """Its own retry policy, which wins over the handler's; None: it was published without one."""
        return self.open().retry if codec.has_head(self._data) else None

    @property
    def timeout(self) -> timedelta | None:
        """Its own time limit, which wins over the handler's; None: it was published without one."""
        seconds = self.own_timeout()
        return None if seconds is None else timedelta(seconds=seconds)

    def own_timeout(self) -> float | None:
        """Return its own time limit in seconds; None also if it cannot be read."""
        if not codec.has_head(self._data):
            return None
        try:
            return self.open().timeout
        except Undecodable:
            return None

    def own_retry(self, otherwise: RetryPolicy) -> RetryPolicy:
        """Return its own retry policy, or this one if it has none or cannot be read."""
        try:
            return self.retry_policy or otherwise
        except Undecodable:
            return otherwise


_UNREAD: Any = object()


class StoredMessage(_Readable[T]):
    """A message as it is in the store, for listings. Times are by the store's clock."""

    __slots__ = ("_stored", "queue")

    def __init__(self, queue: str, stored: Stored, as_type: type[T] | None = None) -> None:
        super().__init__(stored.envelope, as_type)
        self.queue = queue
        self._stored = stored

    @property
    def id(self) -> str:
        """Its id."""
        return self._stored.id

    @property
    def state(self) -> MessageState:
        """`ready`, `delayed`, `waiting`, `leased`, `dead` or `done`."""
        return self._stored.state

    @property
    def key(self) -> str | None:
        """Its key, if it has one."""
        return self._stored.key

    @property
    def group(self) -> str | None:
        """Its group, if it has one."""
        return self._stored.group

    @property
    def priority(self) -> int:
        """0 to 9; higher goes first."""
        return self._stored.priority

    @property
    def token(self) -> int:
        """The fencing token of its last claim; 0 if it was never claimed."""
        return self._stored.token

    @property
    def deliveries(self) -> int:
        """How often it was handed out, less what was given back."""
        return self._stored.deliveries

    @property
    def attempts(self) -> int:
        """How often its handler failed."""
        return self._stored.attempts

    @property
    def worker(self) -> str | None:
        """The worker that holds its lease."""
        return self._stored.worker

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel was requested while it is handled."""
        return self._stored.cancel_requested

    @property
    def size(self) -> int:
        """Bytes of the body and the rest of its envelope."""
        return len(self._stored.envelope)

    @property
    def reason(self) -> str | None:
        """Why it is dead."""
        return self._stored.reason

    @property
    def error_type(self) -> str | None:
        """The class of its last error."""
        return self._stored.error_type

    @property
    def error(self) -> str | None:
        """The text of its last error."""
        return split_error(self._stored.error)[0]

    @property
    def traceback(self) -> str | None:
        """The end of the traceback of its last error, without the frames of waypost; None if it has none."""
        return split_error(self._stored.error)[1]

    @property
    def note(self) -> str | None:
        """What the reason leaves open: that `max_deliveries` ended it though its retry policy allowed more."""
        # A failure that the policy had given up on would have buried it as `retries_exhausted`.
        if self._stored.reason != "max_deliveries" or self._stored.attempts == 0:
            return None
        return (
            f"max_deliveries ended it after {self.deliveries} deliveries, {self.attempts} of them failures after which "
            "the retry policy allowed another try: raise max_deliveries, or lower the attempts of the policy"
        )

    @property
    def published_at(self) -> datetime:
        """When the store took it in."""
        return to_datetime(self._stored.published_ms)

    @property
    def ready_at(self) -> datetime:
        """When it may be claimed, or could have been when it was."""
        return to_datetime(self._stored.ready_ms)

    @property
    def expires_at(self) -> datetime | None:
        """When it lapses unless it is claimed before; None: it does not, or has ended."""
        return to_datetime(self._stored.expires_ms)

    @property
    def claimed_at(self) -> datetime | None:
        """When it was claimed last; None if it is not leased."""
        return to_datetime(self._stored.claimed_ms)

    @property
    def lease_end_at(self) -> datetime | None:
        """When its lease ends unless it is renewed; None if it is not leased."""
        return to_datetime(self._stored.lease_end_ms)

    @property
    def ended_at(self) -> datetime | None:
        """When it died or finished."""
        return to_datetime(self._stored.ended_ms)

    def __repr__(self) -> str:
        return f"StoredMessage(queue={self.queue!r}, id={self.id!r}, state={self.state!r})"


class MessagePage(Generic[T]):
    """A part of a listing: some messages, and the cursor of the next part; None: this is the last one."""

    __slots__ = ("cursor", "messages")

    def __init__(self, messages: list[StoredMessage[T]], cursor: str | None) -> None:
        self.messages = messages
        #: Give it with the same queue, state and filters to read on. A part may be short or empty and have one all the
        #: same: a filter that few messages match is searched for in bounded steps.
        self.cursor = cursor


class Message(_Readable[T]):
    """A message under a lease, as a handler sees it. `done`, `retry`, … decide its outcome; once is enough."""

    __slots__ = (
        "_lease", "_lease_seconds", "_lease_until", "_result", "_result_ttl_ms", "_then", "cancel_requested", "fenced",
        "lease_lost", "outcome", "queue", "settle_target", "settled",
    )  # fmt: skip

    def __init__(
        self,
        queue: str,
        lease: Lease,
        as_type: type[T] | None = None,
        settle_target: Any = None,
        lease_seconds: float = 0.0,
        lease_until: float = float("inf"),
    ) -> None:
        # Written out instead of calling the base: this runs for every delivery.
        self._data = lease.envelope
        self._as_type = as_type
        self._envelope = None
        self._body = _UNREAD
        self.undecodable = None
        self.queue = queue
        #: What the claim handed out: the fence (token and nonce), counts and times.
        self._lease = lease
        #: True once the lease was lost, or could not be renewed before its end: another worker may have the message.
        self.lease_lost = False
        #: True once the store has refused it: then a settle could only be refused.
        self.fenced = False
        #: How long the lease is, and the moment by `lease_clock` at which it ends unless it is renewed.
        self._lease_seconds = lease_seconds
        self._lease_until = lease_until
        #: True once it is known that a cancel of this message was requested.
        self.cancel_requested = False
        #: What the handler decided by hand: None until it does.
        self.outcome: Outcome | Literal["done"] | None = None
        #: What the store made of it, once it is settled.
        self.settled: SettleStatus | None = None
        #: The client or worker that claimed it, None in the process of a handler.
        self.settle_target = settle_target
        self._then: tuple[Continuation, ...] = ()
        self._result: bytes | None = None
        self._result_ttl_ms = 0

    @property
    def id(self) -> str:
        """Its id."""
        return self._lease.id

    @property
    def token(self) -> int:
        """The fencing token: it only grows for this message. Show it to other systems so that they can refuse older."""
        return self._lease.token

    @property
    def key(self) -> str | None:
        """Its key, if it has one."""
        return self._lease.key

    @property
    def group(self) -> str | None:
        """Its group, if it has one."""
        return self._lease.group

    @property
    def priority(self) -> int:
        """0 to 9; higher goes first."""
        return self._lease.priority

    @property
    def deliveries(self) -> int:
        """Which delivery this is: 1 for the first, less what was given back."""
        return self._lease.deliveries

    @property
    def attempts(self) -> int:
        """How often a handler failed before."""
        return self._lease.attempts

    @property
    def chain_id(self) -> str | None:
        """The chain that it belongs to: begun by a publish with `chain=True`, gone on with by `then`."""
        return self._lease.chain

    @property
    def published_at(self) -> datetime:
        """When the store took it in, by the store's clock."""
        return to_datetime(self._lease.published_ms)

    @property
    def ready_at(self) -> datetime:
        """When it could be claimed."""
        return to_datetime(self._lease.ready_ms)

    @property
    def claimed_at(self) -> datetime:
        """When it was claimed."""
        return to_datetime(self._lease.claimed_ms)

    @property
    def at_most_once(self) -> bool:
        """Whether it left the store with its claim (`lease=None`): then there is nothing to settle."""
        return self._lease.lease_end_ms is None

    def __repr__(self) -> str:
        return f"Message(queue={self.queue!r}, id={self.id!r}, deliveries={self.deliveries})"

    # ---- deciding ----------------------------------------------------------------------------------------

    def _decide(self, outcome: Outcome | Literal["done"]) -> None:
        if self.outcome is not None or self.settled is not None:
            raise InvalidInput(f"message {self.id} already has its outcome: {self.outcome or self.settled}")
        if outcome != "done" and self.at_most_once:
            raise InvalidInput(
                f"message {self.id} left the store when it was claimed (lease=None), so it cannot go back or be buried"
            )
        self.outcome = outcome

    def done(self) -> None:
        """It is done. The same as ending without an outcome."""
        self._decide("done")

    def retry(self, after: Duration | None = None, reason: str | None = None) -> None:
        """It failed: try again after this time, or when the retry policy decides."""
        self._decide(Retry(after, reason))

    def snooze(self, after: Duration) -> None:
        """Not now: deliver it again after this time, at no cost."""
        self._decide(Snooze(after))

    def dead(self, reason: str = "rejected", error: str | None = None) -> None:
        """Hopeless: to the dead letters."""
        self._decide(Dead(reason, error))

    def drop(self) -> None:
        """Forget it."""
        self._decide(Drop())

    def then(
        self,
        queue: str | Queue[Any],
        body: object,
        *,
        key: str | None = None,
        delay: Duration | None = None,
        priority: int = PRIORITY_DEFAULT,
        group: str | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
    ) -> str:
        """Send a message on when this one is done: decided in the same atomic step, arriving exactly once.

        Returns the id that it will have. Nothing is sent if this message ends in any other way. The seconds of
        `expires` count from that step.
        """
        self._check_kept("then")
        delay_ms = 0 if delay is None else check_delay("delay", delay)
        expires_ms = expiry_ms(expires, delay_ms, None)
        # In the process of a handler it is checked when the message comes back from there.
        name = queue_name(queue) if self.settle_target is None else self.settle_target.context.name_of(queue)
        if len(self._then) == THEN_MAX:
            raise InvalidInput(f"at most {THEN_MAX} messages can be sent on by one; publish_many the rest")
        encoded = codec.encode_body(body, queue_type(queue))
        head = codec.encode_head(
            type_name=encoded.type_name,
            correlation_id=correlation_id if correlation_id is not None else self.correlation_id,
            reply_to=reply_to,
            trace=self.trace,
            headers=check_texts("headers", headers),
            retry=None if retry is None else check_message_retry(retry),
            timeout=None if timeout is None else check_message_timeout(timeout),
        )
        next_id = continuation_id(self.id, self.token, len(self._then))
        next_one = Continuation(
            next_id,
            name,
            codec.make_envelope(next_id, encoded, head),
            None if key is None else check_text("key", key, KEY_CHARACTERS_MAX),
            delay_ms,
            check_priority(priority),
            None if group is None else check_text("group", group, GROUP_CHARACTERS_MAX),
            self._lease.chain,
            expires_ms=expires_ms,
        )
        self._then = (*self._then, next_one)
        return next_id

    def reschedule(self, delay: Duration, *, expires: Duration | datetime | None = None) -> str:
        """Settle this message as done and publish it again after `delay` under the same key. Return the new id.

        Both happen in the atomic step of the settle: nothing is published if this delivery fails or is lost. If
        another message was published under the key meanwhile, that one is kept and this one is not published again.
        A chain goes on with the new message. That one has no expiry unless `expires` gives it one.
        """
        self._check_kept("reschedule")
        delay_ms = check_delay("delay", delay)
        expires_ms = expiry_ms(expires, delay_ms, None)
        envelope = self.open()
        next_id = continuation_id(self.id, self.token, len(self._then))
        head = codec.head_of(envelope)
        encoded = codec.Encoded(codec.CONTENT_TYPES.index(envelope.content_type), envelope.data, envelope.type_name)
        again = Continuation(
            next_id, self.queue, codec.make_envelope(next_id, encoded, head), self.key, delay_ms,
            self.priority, self.group, self._lease.chain, again=True, expires_ms=expires_ms,
        )  # fmt: skip
        self._decide("done")
        self._then = (*self._then, again)
        return next_id

    def keep_result(self, value: object, ttl: Duration = RESULT_TTL_SECONDS) -> None:
        """Keep a value as this message's result for so long, once it is done. The last call counts."""
        self._check_kept("keep_result")
        self._result = codec.encode_result(value)
        self._result_ttl_ms = max(1, after_ms(ttl))

    def refuse_result(self, error: Exception, ttl: Duration) -> str:
        """Keep in place of a result that could not be encoded why there is none; that reason."""
        refusal = codec.refused_result(error)
        if self.settled is None and not self.at_most_once:
            self._result = refusal
            self._result_ttl_ms = max(1, after_ms(ttl))
        return codec.refusal_of(refusal) or ""

    def transaction(self, transaction: object = None) -> Any:
        """A transaction of the store's own database for a `with` or `async with` block, whose end settles this message.

        The block is given a connection of psycopg or sqlite3, or a session if the client has a SQLAlchemy engine. What
        it writes there and the settle are committed together; if the lease was lost, all is rolled back (`LeaseLost`).
        A `transaction` of your own is settled in too, and left to you to commit.
        """
        if self.settle_target is None:
            raise InvalidInput("a message has transactions where it was claimed, not in a process of its handler's")
        return self.settle_target.transaction(self, transaction)

    def _check_kept(self, what: str) -> None:
        if self.settled is not None:
            raise InvalidInput(f"{what} belongs to the settle of message {self.id}, which is over: {self.settled}")
        if self.at_most_once:
            raise InvalidInput(f"{what} belongs to a settle, and a message claimed with lease=None has none")

    # ---- settling ----------------------------------------------------------------------------------------

    def settlement(self, error: BaseException | None, retry: RetryPolicy, *, stopped: bool = False) -> Settlement:
        """How this delivery ends, from what was decided by hand, or else from the error that ended the handler.

        With `stopped` the handler ended because its process or task was asked to stop from outside. That says nothing
        about the message, so it is released: the delivery is given back and no attempt is used.
        """
        outcome = self.outcome
        if outcome is None and stopped:
            return self._ending("release")
        if isinstance(error, Outcome):
            outcome, error = outcome or error, None
        if outcome is None and error is not None:
            return self._failed(error, retry)
        match outcome:
            case Retry():
                return self._retried(outcome, retry)
            case Snooze():
                return self._ending("snooze", after_ms=outcome._after_ms)
            case Dead():
                kind = None if outcome.error is None else error_type(outcome)
                return self._ending("dead", reason=outcome.reason, error_type=kind, error=outcome.error)
            case Drop():
                return self._ending("drop")
            case Outcome():
                # None of `CHOICES`.
                return self._failed(outcome, retry)
        return Settlement(
            self._lease.id,
            self._lease.token,
            self._lease.nonce,
            result=self._result,
            result_ttl_ms=self._result_ttl_ms,
            then=self._then,
        )

    def plain_done(self) -> Settlement | None:
        """The settlement of a delivery without outcome, result or continuation: the common case, cheap."""
        if self.outcome is not None or self._then or self._result is not None or self.lease_lost:
            return None
        lease = self._lease
        return None if lease.lease_end_ms is None else Settlement(lease.id, lease.token, lease.nonce)

    def _ending(self, outcome: Literal["retry", "snooze", "dead", "drop", "release"], **more: Any) -> Settlement:
        return Settlement(self._lease.id, self._lease.token, self._lease.nonce, outcome, **more)

    def _failed(self, error: BaseException, retry: RetryPolicy) -> Settlement:
        error_fields = {"error_type": error_type(error), "error": format_failure(error)}
        if error is self.undecodable:
            # Another try would read the same bytes.
            return self._ending("dead", reason="undecodable", **error_fields)
        return self._again(error, retry, None, error_fields)

    def _retried(self, outcome: Retry, retry: RetryPolicy) -> Settlement:
        error_fields = (
            {} if outcome.reason is None else {"error_type": error_type(outcome), "error": _storable(outcome.reason)}
        )
        return self._again(outcome, retry, outcome._after_ms, error_fields)

    def _again(
        self, error: BaseException, retry: RetryPolicy, wanted_ms: int | None, error_fields: dict[str, str]
    ) -> Settlement:
        """Another try if the retry policy allows one, after `wanted_ms` if the handler asked for that."""
        try:
            seconds = self.own_retry(retry).delay(self._lease.attempts + 1, error)
            pause_ms = None if seconds is None else after_ms(seconds)
        except Exception as failure:
            return self._policy_failed(failure)
        if pause_ms is None:
            return self._ending("dead", reason="retries_exhausted", **error_fields)
        return self._ending("retry", after_ms=pause_ms if wanted_ms is None else wanted_ms, **error_fields)

    def _policy_failed(self, failure: Exception) -> Settlement:
        return self._ending(
            "dead", reason="retry_policy_failed", error_type=error_type(failure), error=format_failure(failure)
        )
