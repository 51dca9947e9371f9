"""Everything that waypost raises, as one tree.

    WaypostError
    ├── InvalidInput (ValueError)            the call is wrong; nothing was sent
    │   ├── InvalidName                      a queue, key, group, namespace or reader name
    │   │   └── UnknownQueue                 a queue that a client with strict_queues was not told of
    │   ├── UnknownOption (TypeError too)    a keyword that the call does not have
    │   ├── InvalidTime                      a naive datetime, a negative delay, both delay and at
    │   ├── InvalidBody (TypeError too)      a body that has no faithful form
    │   ├── BodyTooLarge
    │   ├── BodyTooDeep
    │   ├── InvalidHeaders
    │   ├── InvalidPolicy                    a queue setting that makes no sense
    │   └── InvalidSchedule                  a cron pattern, interval, zone or rule that makes no sense
    ├── ConfigurationError (ValueError)      the client was built wrongly
    │   ├── InvalidUrl
    │   ├── UnusableClient (TypeError too)   a Sentinel manager, a pipeline, a single-connection client
    │   ├── MissingExtra (ImportError too)   the store's driver is not installed
    │   └── ForkedClient (RuntimeError too)  a client made before a fork, used after it
    ├── StoreError
    │   ├── StoreUnavailable (ConnectionError)  no connection could be made; nothing was done
    │   ├── OutcomeUnknown (ConnectionError)    the reply was lost for longer than the retry budget
    │   ├── AccessDenied (PermissionError)      the server does not let this user in, or not do this
    │   ├── StoreFull (MemoryError too)         the store has no room; nothing was written
    │   ├── ForeignData                         the key, file or table is not ours; nothing was touched
    │   ├── SchemaTooNew / SchemaTooOld         the data belongs to another release
    │   ├── JournalTrimmed (LookupError)        events that a reader needs are no longer in the journal
    │   ├── OperationTooOld                     a repeat that arrived too late to be answered; it did not run
    │   ├── SessionTaken                        another process has this client's session; nothing was done
    │   ├── MessageIdTaken                      the store has a message of this id; nothing was written
    │   └── StoreFailed                         the store answered with an error that has no better name
    ├── QueueFull                            `max_pending` is reached; nothing of the call was written
    ├── QueueNotEmpty (RuntimeError)         a queue that still holds something is not removed
    ├── KeyTaken (KeyError)                  `on_conflict="error"` and the key is in use
    ├── UnknownSchedule (KeyError)           there is no schedule of that name or key
    ├── PartialPublish                       a later part of a batch failed; carries what is known
    ├── QueueDrained (RuntimeError)          this object was drained and publishes no more
    ├── ProcessFailed (RuntimeError)         the process of a handler died, or its error is of no class known here
    ├── LeaseLost (RuntimeError)             the lease ended before the settle; the settle changed nothing
    ├── Undecodable (ValueError)             an envelope or a body that cannot be read
    │   └── EnvelopeTooNew                   written by a newer release: leave it for a newer worker
    ├── ResultNotKept (LookupError)          the message is done, but what its handler returned could not be kept
    ├── WaitTimeout (TimeoutError)           a wait ended without what it waited for
    └── Unfinished (RuntimeError)            what was waited for will not come
        ├── MessageDead                      the message is a dead letter; carries its reason
        ├── MessageRemoved                   it was cancelled, dropped, replaced or purged
        ├── ChainFailed                      a message of the chain ended in one of these ways
        └── EndUnknown (LookupError)         no trace of the message or chain is left

Each class says in `outcome` whether what was asked for was `done`, `not done` or is `unknown`, so that a caller
can decide about a repeat without knowing the class. Messages say what to do next; none holds a secret or a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from waypost.values import Published

Outcome = Literal["done", "not done", "unknown"]


class WaypostError(Exception):
    """The root: catch this to catch everything that waypost raises on purpose."""

    outcome: ClassVar[Outcome] = "not done"


class InvalidInput(WaypostError, ValueError):
    """Raised when an argument cannot be right, before anything is sent."""


class InvalidName(InvalidInput):
    """Raised when a queue, key, group, namespace or reader name breaks the syntax of names."""


class UnknownQueue(InvalidName):
    """Raised when a client with `strict_queues=True` is given a queue that was not declared."""


class UnknownOption(InvalidInput, TypeError):
    """Raised when a call is given a keyword that it does not have."""


class InvalidTime(InvalidInput):
    """Raised when a due time is naive, negative, or given twice."""


class InvalidBody(InvalidInput, TypeError):
    """Raised when a body has no faithful form as bytes, text or JSON."""


class BodyTooLarge(InvalidInput):
    """Raised when a body is larger than the limit."""


class BodyTooDeep(InvalidInput):
    """Raised when a JSON body is nested deeper than the limit."""


class InvalidHeaders(InvalidInput):
    """Raised when headers are too many, too large, or not text."""


class InvalidPolicy(InvalidInput):
    """Raised when a queue setting is unknown or makes no sense."""


class InvalidSchedule(InvalidInput):
    """Raised when a cron pattern, an interval, a time zone or another part of a schedule makes no sense."""


class ConfigurationError(WaypostError, ValueError):
    """Raised when a client is built in a way that cannot work."""


class InvalidUrl(ConfigurationError):
    """Raised when a store URL cannot be understood."""


class UnusableClient(ConfigurationError, TypeError):
    """Raised when the caller's own client is of a kind that cannot be shared safely."""


class MissingExtra(ConfigurationError, ImportError):
    """Raised when a store's driver is not installed."""


class ForkedClient(ConfigurationError, RuntimeError):
    """Raised when an object made in a parent process is used after a fork."""


class StoreError(WaypostError):
    """Raised when the store did not do what it was asked to."""


class StoreUnavailable(StoreError, ConnectionError):
    """Raised when no connection could be made: nothing was sent, nothing was done."""


class OutcomeUnknown(StoreError, ConnectionError):
    """Raised when the request was sent, its reply was lost, and the retry budget is used up."""

    outcome: ClassVar[Outcome] = "unknown"


class AccessDenied(StoreError, ConfigurationError, PermissionError):
    """Raised when the server does not let this user in, or not do this. Nothing was done."""


class StoreFull(StoreError, MemoryError):
    """Raised when the store refuses a write for want of memory or disk. Claims and settles still work."""


class ForeignData(StoreError):
    """Raised when a key, file or table in our place was not made by waypost. Nothing was touched."""


class SchemaTooNew(StoreError):
    """Raised when the data was written by a newer release than this one."""


class SchemaTooOld(StoreError):
    """Raised when the data must be migrated before this release can use it."""


class JournalTrimmed(StoreError, LookupError):
    """Raised when events that a read needs are no longer in the journal."""


class OperationTooOld(StoreError):
    """Raised when a repeated call comes so late that the store may have forgotten its result. It did not run again.

    Whether it ran the first time is not known: look before you call again.
    """

    outcome: ClassVar[Outcome] = "unknown"

    def __init__(self, message: str, *, store_ms: int | None = None) -> None:
        super().__init__(message)
        #: The store's time in milliseconds when it refused; None if too many other calls of the session came after it.
        self.store_ms = store_ms


class SessionTaken(StoreError):
    """Raised when another process has this client's session, as a cloned machine does. Nothing was done.

    Clients take a new session and call again; it is seen only by callers of a store.
    """


class MessageIdTaken(StoreError):
    """Raised when a publish bears the id of a message that the store has. Nothing of the call was written."""


class StoreFailed(StoreError):
    """Raised when the store answers with an error that has no better name here."""

    outcome: ClassVar[Outcome] = "unknown"


class QueueFull(WaypostError):
    """Raised when a publish would pass `max_pending`. Nothing of the call was written."""


class QueueNotEmpty(WaypostError, RuntimeError):
    """Raised when a queue is to be removed that still holds something. Nothing was removed."""

    def __init__(self, message: str, *, left: Mapping[str, int]) -> None:
        super().__init__(message)
        #: How many there are of each: ready, delayed, waiting, leased, dead, schedules, outgoing, chains, readers,
        #: damaged, transactions. What there is none of is not named.
        self.left = dict(left)


class KeyTaken(WaypostError, KeyError):
    """Raised when `on_conflict="error"` finds the key in use."""

    def __init__(self, message: str, *, id: str) -> None:
        super().__init__(message)
        #: The message that holds the key.
        self.id = id

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class UnknownSchedule(WaypostError, KeyError):
    """Raised when a schedule that is to be changed is not there, or a name fits several."""

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
    """Raised when a publish is tried through an object that was drained."""


class ProcessFailed(WaypostError, RuntimeError):
    """Raised for a handler whose process died, or whose error is of a class that the worker's process cannot find."""

    outcome = "unknown"


class LeaseLost(WaypostError, RuntimeError):
    """Raised when a settle or renewal comes after its lease was lost. It changed nothing."""


class Undecodable(WaypostError, ValueError):
    """Raised when an envelope or body cannot be read."""


class EnvelopeTooNew(Undecodable):
    """Raised when an envelope was written by a newer release. It is left for newer workers."""


class ResultNotKept(WaypostError, LookupError):
    """Raised when a message is done, but what its handler returned was too large or has no faithful form."""

    outcome = "done"


class WaitTimeout(WaypostError, TimeoutError):
    """Raised when a wait with a deadline ends empty-handed."""


class Unfinished(WaypostError, RuntimeError):
    """Raised when a wait ends because what it waits for will not come."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        #: A reason of dead letters, or how else the message ended: cancelled, dropped, replaced.
        self.reason = reason


class MessageDead(Unfinished):
    """Raised when the message that is waited for became a dead letter."""


class MessageRemoved(Unfinished):
    """Raised when the message that is waited for was cancelled, dropped, replaced or purged."""


class ChainFailed(Unfinished):
    """Raised when a message of the chain that is waited for did not end well. `member` names it as `queue/id`."""

    def __init__(self, message: str, *, reason: str | None = None, member: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.member = member


class EndUnknown(Unfinished, LookupError):
    """Raised when the store has no trace of the message or chain that is waited for."""
