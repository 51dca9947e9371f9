"""Map errors of the server and of connections to our own, each with the way out."""

from __future__ import annotations

import re

from waypost.errors import (
    AccessDenied,
    InvalidPolicy,
    OutcomeUnknown,
    SchemaTooOld,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreUnavailable,
    WaypostError,
)
from waypost.policy import LEASE_NEEDED
from waypost.store.port import queue_full, too_many_groups
from waypost.store.repeats import id_in_use, removed_since, session_in_use, too_old
from waypost.urls import redact_text

#: Nothing was done, and the same call may succeed at once: a deadlock, a serialization failure, two steps that
#: conflict in a unique index, an operation that finished on another connection.
AT_ONCE = frozenset(("40001", "40P01", "23505", "WPAGN"))
#: Nothing was done, and a later call may succeed: the server starts or stops, has no free connection, or is
#: read-only.
PASSING = frozenset(("57P03", "53300", "25006", "55P03", "57014"))
#: The server stops, or has a time limit for sessions or transactions, and closes connections at any time: the step may
#: have been committed just before.
CUT_OFF = frozenset(("57P01", "57P02", "57P05", "25P04"))
#: Our own code: a message with this id exists. Repeated once: a repeat on another connection may have stored it.
KNOWN_ID = "WPKNW"
FULL = frozenset(("53100", "53200", "53000"))
DENIED = frozenset(("42501", "28000", "28P01"))
MISSING = frozenset(("42883", "42P01", "3F000", "42703"))


def map_error(state: str, text: str, queue: str, verb: str) -> WaypostError:
    """Map an error reply of the server: nothing was written."""
    if state == "WPFUL":
        waiting, cap, *group = text.split(" ", 2)
        return queue_full(queue, int(waiting), int(cap), *group)
    if state == "WPLSN":
        return InvalidPolicy(LEASE_NEEDED)
    if state == "WPCNV":
        return InvalidPolicy(
            f"order of queue {queue} cannot be set again yet: its messages still have places of the "
            "order that it had before; each claim removes some, so let workers claim from the queue, then try again"
        )
    if state == "WPGRP":
        return too_many_groups(queue)
    if state == "WPOLD":
        return too_old(queue, int(text) if text.isdigit() else None)
    if state == "WPGON":
        return removed_since(queue, int(text))
    if state == "WPSES":
        return session_in_use(queue)
    if state == KNOWN_ID:
        return id_in_use(queue, text)
    if state in CUT_OFF:
        return OutcomeUnknown(f"the server closed the connection during {verb} ({state} {text[:120]})")
    if state in AT_ONCE or state in PASSING or state.startswith("08"):
        return StoreUnavailable(f"the server could not serve {verb} right now ({state} {text[:120]}); nothing was done")
    if state in FULL:
        return StoreFull(
            f"the server has no room ({text[:120]}), so {verb} on queue {queue} was refused and nothing was written; "
            "make room on its disk, then try again"
        )
    if state in DENIED:
        return AccessDenied(
            f"the server does not allow this user to {verb} ({text[:160]}); grant it the tables, the sequence and the "
            "functions of waypost's namespace"
        )
    if state in MISSING:
        return SchemaTooOld(
            f"a table or function that {verb} needs is missing ({text[:160]}); `waypost migrate URL --check` "
            "lists what, and `waypost migrate URL` makes it; if an upgrade to a newer release was finished, update "
            "waypost here"
        )
    return StoreFailed(f"the server answered {verb} on queue {queue} with an error: {state} {text[:300]}")


#: The text of a server that refuses a connection: it has too many, or is starting or stopping.
REFUSAL = re.compile(r"FATAL: +([^\n]+)")


def map_connection_error(error: BaseException, display_name: str, *, sent: bool) -> StoreError:
    """Map a failure of the connection, before or after the request was sent."""
    text = redact_text(str(error))
    if "authentication failed" in text or "no pg_hba.conf entry" in text or "no password supplied" in text:
        return AccessDenied(f"{display_name} refused this user; check the name and password in the URL")
    if "does not exist" in text and "database" in text:
        return StoreUnavailable(f"{display_name} has no such database; create it, or correct the name in the URL")
    name = type(error).__name__
    refusal = REFUSAL.search(text)
    if refusal is not None and not sent:
        return StoreUnavailable(f"{display_name} takes no connection right now: {refusal[1][:160]}")
    if sent:
        return OutcomeUnknown(f"the connection to {display_name} was lost before its reply came ({name}); it is not "
                              "known whether the request was carried out")  # fmt: skip
    return StoreUnavailable(
        f"no connection to {display_name} ({name}); is the server running, and are host, port and TLS right?"
    )
