"""All errors of waypost, as one tree.

    WaypostError
    ├── InvalidInput (ValueError)            the call is wrong; nothing was sent
    │   ├── InvalidName                      a queue, key, group, namespace or reader name
    │   │   └── UnknownQueue                 a queue that is not declared to a client with strict_queues
    │   ├── UnknownOption (TypeError too)    a keyword that the call does not have
    │   ├── InvalidTime                      a naive datetime, a negative delay, both delay and at
    │   ├── InvalidBody (TypeError too)      a body with a value that cannot be restored
    │   ├── BodyTooLarge
    │   ├── BodyTooDeep
    │   ├── InvalidHeaders
    │   ├── InvalidPolicy                    an unknown or invalid queue setting
    │   └── InvalidSchedule                  an invalid cron pattern, interval, zone or rule
    ├── ConfigurationError (ValueError)      the configuration of the client cannot work
    │   ├── InvalidUrl
    │   ├── UnusableClient (TypeError too)   a Sentinel manager, a pipeline, a single-connection client
    │   ├── MissingExtra (ImportError too)   the store's driver is not installed
    │   └── ForkedClient (RuntimeError too)  a client created before a fork, used in the child
    ├── StoreError
    │   ├── StoreUnavailable (ConnectionError)  no connection could be opened; nothing was done
    │   ├── OutcomeUnknown (ConnectionError)    the reply was lost for longer than the retry budget
    │   ├── AccessDenied (PermissionError)      the server refuses this user, or this command for the user
    │   ├── StoreFull (MemoryError too)         the store has no room; nothing was written
    │   ├── ForeignData                         the key, file or table is not waypost's; nothing was changed
    │   ├── SchemaTooNew / SchemaTooOld         the data belongs to another release
    │   ├── JournalTrimmed (LookupError)        events that a reader needs are no longer in the journal
    │   ├── OperationTooOld                     a repeat that arrived too late; it did not run again
    │   ├── SessionInUse                        another process has this client's session; nothing was done
    │   ├── MessageIdInUse                      the store has a message with this id; nothing was written
    │   └── StoreFailed                         another error of the store
    ├── QueueFull                            `max_pending` is reached; nothing of the call was written
    ├── QueueNotEmpty (RuntimeError)         a queue that is not empty is not removed
    ├── KeyInUse (KeyError)                  `on_conflict="error"` and the key is in use
    ├── UnknownSchedule (KeyError)           there is no schedule with that name or key
    ├── PartialPublish                       a later part of a batch failed; has what is known
    ├── QueueDrained (RuntimeError)          this object was drained and no longer publishes
    ├── ProcessFailed (RuntimeError)         a handler process died, or the class of its error is not importable here
    ├── LeaseLost (RuntimeError)             the lease ended before the settle; the settle changed nothing
    ├── Undecodable (ValueError)             an envelope or a body that cannot be decoded
    │   └── EnvelopeTooNew                   written by a newer release: leave it for a newer worker
    ├── ResultNotKept (LookupError)          the message is done, but its return value could not be kept
    ├── WaitTimeout (TimeoutError)           a wait reached its deadline
    └── Unfinished (RuntimeError)            the message or chain ended without success
        ├── MessageDead                      the message is a dead letter; has its reason
        ├── MessageRemoved                   it was cancelled, dropped, replaced or purged
        ├── ChainFailed                      a message of the chain ended in one of these ways
        └── EndUnknown (LookupError)         nothing about the message or chain is left in the store

The attribute `outcome` is whether the call was `done`, `not done` or is `unknown`, so that a caller can decide whether
to repeat it without knowing the class. The texts describe what to do next; none contains a secret or a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from waypost.values import Published

Outcome = Literal["done", "not done", "unknown"]


class WaypostError(Exception):
    """The base class of all errors of waypost."""

    outcome: ClassVar[Outcome] = "not done"


class InvalidInput(WaypostError, ValueError):
    """Raised when an argument is invalid, before anything is sent."""


class InvalidName(InvalidInput):
    """Raised when a queue, key, group, namespace or reader name breaks the syntax of names."""


class UnknownQueue(InvalidName):
    """Raised when a client with `strict_queues=True` is given a queue that was not declared."""


class UnknownOption(InvalidInput, TypeError):
    """Raised when a call is given a keyword that it does not have."""


class InvalidTime(InvalidInput):
    """Raised when a due time is naive, negative, or given twice."""


class InvalidBody(InvalidInput, TypeError):
    """Raised when a body cannot be encoded as bytes, text or JSON and restored."""


class BodyTooLarge(InvalidInput):
    """Raised when a body is larger than the limit."""


class BodyTooDeep(InvalidInput):
    """Raised when a JSON body is nested deeper than the limit."""


class InvalidHeaders(InvalidInput):
    """Raised when headers are too many, too large, or not text."""


class InvalidPolicy(InvalidInput):
    """Raised when a queue setting is unknown or invalid."""


class InvalidSchedule(InvalidInput):
    """Raised when a cron pattern, an interval, a time zone or another part of a schedule is invalid."""


class ConfigurationError(WaypostError, ValueError):
    """Raised when the configuration of a client cannot work."""


class InvalidUrl(ConfigurationError):
    """Raised when a store URL is invalid."""


class UnusableClient(ConfigurationError, TypeError):
    """Raised when the caller's own client is of a kind that cannot be shared safely."""


class MissingExtra(ConfigurationError, ImportError):
    """Raised when a store's driver is not installed."""


class ForkedClient(ConfigurationError, RuntimeError):
    """Raised when an object created in a parent process is used after a fork."""


class StoreError(WaypostError):
    """Raised when the store did not run a call."""


class StoreUnavailable(StoreError, ConnectionError):
    """Raised when no connection could be opened: nothing was sent, nothing was done."""


class OutcomeUnknown(StoreError, ConnectionError):
    """Raised when the request was sent, its reply was lost, and the retry budget is used up."""

    outcome: ClassVar[Outcome] = "unknown"


class AccessDenied(StoreError, ConfigurationError, PermissionError):
    """Raised when the server refuses this user, or this command for the user. Nothing was done."""


class StoreFull(StoreError, MemoryError):
    """Raised when the store refuses a write because its memory or disk is full. Claims and settles still work."""


class ForeignData(StoreError):
    """Raised when a key, file or table with waypost's name was not created by waypost. Nothing was changed."""


class SchemaTooNew(StoreError):
    """Raised when the data was written by a newer release than this one."""


class SchemaTooOld(StoreError):
    """Raised when the data must be migrated before this release can use it."""


class JournalTrimmed(StoreError, LookupError):
    """Raised when events that a read needs are no longer in the journal."""


class OperationTooOld(StoreError):
    """Raised when a repeated call comes so late that the store may have forgotten its result. It did not run again.

    Whether it ran the first time is unknown: check before you call again.
    """

    outcome: ClassVar[Outcome] = "unknown"

    def __init__(self, message: str, *, store_ms: int | None = None) -> None:
        super().__init__(message)
        #: The store's time in milliseconds when it refused; None if too many other calls of the session came after it.
        self._store_ms = store_ms


class SessionInUse(StoreError):
    """Raised when another process uses this client's session, for example a cloned machine. Nothing was done.

    Clients take a new session and repeat the call; only direct callers of a store get this error.
    """


class MessageIdInUse(StoreError):
    """Raised when a publish has the id of an existing message. Nothing of the call was written."""


class StoreFailed(StoreError):
    """Raised for any other error of the store."""

    outcome: ClassVar[Outcome] = "unknown"


class QueueFull(WaypostError):
    """Raised when a publish would exceed `max_pending`, of the queue or of a group. Nothing of the call was written."""

    def __init__(self, message: str, *, group: str | None = None, room: int = 0) -> None:
        super().__init__(message)
        #: The group that is full; None: the queue is.
        self.group = group
        #: How many more messages it had room for.
        self.room = room


class QueueNotEmpty(WaypostError, RuntimeError):
    """Raised when a queue that is to be removed is not empty. Nothing was removed."""

    def __init__(self, message: str, *, left: Mapping[str, int]) -> None:
        super().__init__(message)
        #: How many there are of each: ready, delayed, waiting, leased, dead, schedules, outgoing, chains, readers,
        #: damaged, transactions. Kinds with a count of 0 are left out.
        self.left = dict(left)


class KeyInUse(WaypostError, KeyError):
    """Raised when `on_conflict="error"` finds the key in use."""

    def __init__(self, message: str, *, id: str) -> None:
        super().__init__(message)
        #: The message that holds the key.
        self.id = id

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class UnknownSchedule(WaypostError, KeyError):
    """Raised when a schedule does not exist, or several have the given name."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class PartialPublish(WaypostError):
    """Raised when a part of a batch failed after others succeeded.

    `results` has an entry for each body in order, None where nothing was stored or it is not known;
    `cause` is the error of the first part that failed.
    """

    outcome: ClassVar[Outcome] = "unknown"

    def __init__(self, message: str, *, results: Sequence[Published | None], cause: BaseException) -> None:
        super().__init__(message)
        self.results = list(results)
        self.cause = cause


class QueueDrained(WaypostError, RuntimeError):
    """Raised when an object publishes after it was drained."""


class ProcessFailed(WaypostError, RuntimeError):
    """Raised for a handler whose process died, or raised an error whose class the worker cannot import."""

    outcome = "unknown"


class LeaseLost(WaypostError, RuntimeError):
    """Raised when a settle or renewal comes after its lease was lost. It changed nothing."""


class Undecodable(WaypostError, ValueError):
    """Raised when an envelope or body cannot be decoded."""


class EnvelopeTooNew(Undecodable):
    """Raised when an envelope was written by a newer release. It stays in the queue for newer workers."""


class ResultNotKept(WaypostError, LookupError):
    """Raised when a message is done, but its return value was too large or cannot be encoded."""

    outcome = "done"


class WaitTimeout(WaypostError, TimeoutError):
    """Raised when a wait reaches its deadline."""


class Unfinished(WaypostError, RuntimeError):
    """Raised when the message or chain that is waited for ended without success."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        #: A reason of dead letters, or how else the message ended: cancelled, dropped, replaced.
        self.reason = reason


class MessageDead(Unfinished):
    """Raised when the message that is waited for became a dead letter."""


class MessageRemoved(Unfinished):
    """Raised when the message that is waited for was cancelled, dropped, replaced or purged."""


class ChainFailed(Unfinished):
    """Raised when a message of the chain that is waited for failed. `member` is its `queue/id`."""

    def __init__(self, message: str, *, reason: str | None = None, member: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.member = member


class EndUnknown(Unfinished, LookupError):
    """Raised when the store has no record of the message or chain that is waited for."""
