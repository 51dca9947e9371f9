"""Map errors of the server and of connections to our own, each with the way out."""

from __future__ import annotations

import re

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from waypost.errors import (
    AccessDenied,
    ConfigurationError,
    ForeignData,
    InvalidPolicy,
    OutcomeUnknown,
    SchemaTooNew,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreUnavailable,
    WaypostError,
)
from waypost.policy import LEASE_NEEDED
from waypost.store.port import not_grouped, queue_full, too_many_groups
from waypost.store.repeats import id_in_use, removed_since, session_in_use, too_old

OURS = re.compile(r"WP-([A-Z]+) ?(.*?)(?: script: |, on @|$)", re.DOTALL)
#: The server is up but cannot serve yet, or not here: nothing was done, and a repeat may succeed.
PASSING = ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "NOREPLICAS", "UNBLOCKED")
#: The same as classes, where the driver removes the code. (MASTERDOWN is a kind of CLUSTERDOWN there.)
PASSING_CLASSES = (BusyLoadingError, ReadOnlyError, ClusterDownError, TryAgainError, NoScriptError)
#: This server is not, or no longer, the primary: a connection to it is of no use.
WRONG_SERVER = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY")
WRONG_SERVER_CLASSES = (BusyLoadingError, ReadOnlyError, ClusterDownError)


#: A command inside of a script, as Valkey and Redis from 7 on put it, and Redis 6.2.
DENIED_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't run")

#: Redis 6.2 puts the place in the script before the error itself.
INSIDE_SCRIPT = re.compile(r"@user_script: \d+: -([A-Z]+ .*)", re.DOTALL)


def server_text(error: ResponseError) -> str:
    """Return the server's error text, without the place in a script."""
    found = INSIDE_SCRIPT.search(str(error))
    return found[1] if found is not None else str(error)


def is_wrong_server(error: ResponseError) -> bool:
    """Whether the error means that this server is a replica or not ready, so that another one should be used."""
    return isinstance(error, WRONG_SERVER_CLASSES) or server_text(error).startswith(WRONG_SERVER)


def map_error(error: ResponseError, queue: str, verb: str, key: bytes = b"") -> WaypostError:
    """The server answered with an error: nothing was written."""
    text = server_text(error)
    ours = OURS.search(text)
    if ours is not None:
        return _ours(ours[1], ours[2], queue, verb)
    if key and text.startswith("WRONGTYPE"):
        return _foreign(key.decode())
    # Redis 6.2 puts where in the script it happened before it.
    if isinstance(error, OutOfMemoryError) or "command not allowed when used memory" in text:
        return StoreFull(
            f"the server's memory is full, so {verb} on queue {queue} was refused and nothing was written; claims and "
            "settles still work: drain the queue, raise maxmemory, or purge dead letters"
        )
    if text.startswith("MISCONF"):
        return StoreFull("the server cannot write to its disk and refuses writes (MISCONF); make room, then try again")
    if isinstance(error, AskError):  # and MOVED, which is a kind of it there
        return Redirected(error, verb, queue)
    if isinstance(error, TryAgainError) or text.startswith("TRYAGAIN"):
        return SlotMoving(
            f"{verb} on queue {queue} has to wait: its slot is being moved to another node of the Cluster"
        )
    if isinstance(error, PASSING_CLASSES) or text.startswith(PASSING):
        return StoreUnavailable(f"the server cannot serve {verb} right now ({text[:120]})")
    if isinstance(error, AuthenticationError | NoPermissionError) or text.startswith(("NOPERM", "NOAUTH", "WRONGPASS")):
        return _denied(verb, text)
    if any(part in text for part in DENIED_IN_SCRIPT):
        return _denied(verb, text)
    return StoreFailed(f"the server answered {verb} on queue {queue} with an error: {text[:300]}")


class Redirected(StoreError, ConfigurationError):
    """Raised when a key lies on another node of a Cluster. Nothing was done. Followed where a Cluster is expected."""

    def __init__(self, error: AskError, verb: str, queue: str) -> None:
        super().__init__(
            f"{verb} on queue {queue}: this is one node of a Cluster, and the queue lies on another; name the Cluster "
            "with valkey+cluster://, or pass a RedisCluster"
        )
        self.host: str = error.host
        self.port: int = error.port
        self.slot: int = error.slot_id
        #: For this one request, while its keys are on their way; otherwise from now on.
        self.asking = not isinstance(error, MovedError)


class SlotMoving(StoreUnavailable):
    """Raised while a slot is moved key by key: nothing was done, and a repeat succeeds when it has moved."""


def _ours(code: str, details: str, queue: str, verb: str) -> WaypostError:
    if code == "FULL":
        waiting, cap, *group = details.split(" ", 2)
        return queue_full(queue, int(waiting), int(cap), *(bytes.fromhex(name).decode() for name in group))
    if code == "FOREIGN":
        return _foreign(details.partition(" ")[2])
    if code == "DENIED":
        return _denied(verb, details)
    if code == "DAMAGED":
        return StoreFailed(
            f"the counters or the policy of queue {queue} cannot be read, at the key {details}; nothing was touched: "
            "restore the key, or let `waypost doctor --mend` count anew"
        )
    if code == "NEWER":
        return too_new(queue, details)
    if code == "SESSION":
        return session_in_use(queue)
    if code == "LEASE":
        return InvalidPolicy(LEASE_NEEDED)
    if code == "UNGROUPED":
        return not_grouped(queue)
    if code == "GROUPS":
        return too_many_groups(queue)
    if code == "KNOWN":
        return id_in_use(queue, details)
    if code == "GONE":
        return removed_since(queue, int(details))
    return too_old(queue, int(details) if details.isdigit() else None)


def _denied(verb: str, text: str) -> AccessDenied:
    return AccessDenied(
        f"the server does not allow this user to {verb} ({text[:160]}); check the password and the ACL of the user"
    )


def _foreign(key: str) -> ForeignData:
    return ForeignData(
        f"what lies at the key {key} was not put there by waypost; nothing was touched: remove that key, or give "
        "waypost another namespace"
    )


def too_new(queue: str, layout: str) -> SchemaTooNew:
    """The queue's keys are laid out in a way that this release does not know."""
    return SchemaTooNew(
        f"queue {queue} was written by a newer release (layout {layout}); update waypost here, nothing was touched"
    )


def map_connection_error(error: BaseException, display_name: str, *, sent: bool) -> StoreError:
    """The connection failed: before the request was sent, or after."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return AccessDenied(f"{display_name} refused this user; check the name and password in the URL")
    name = type(error).__name__
    if sent:
        return OutcomeUnknown(f"the connection to {display_name} was lost before its reply came ({name}); it is not "
                              "known whether the request was carried out")  # fmt: skip
    return StoreUnavailable(
        f"no connection to {display_name} ({name}); is the server running, and are host, port and TLS right?"
    )


CONNECTION_FAILURES = (RedisError, OSError, EOFError)
