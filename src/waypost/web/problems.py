"""Errors as problem documents (RFC 9457): every answer that is not a success is one, in JSON or as a page."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from waypost.errors import (
    AccessDenied,
    ConfigurationError,
    InvalidInput,
    KeyInUse,
    OperationTooOld,
    OutcomeUnknown,
    QueueFull,
    QueueNotEmpty,
    SchemaTooNew,
    SchemaTooOld,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownSchedule,
    WaypostError,
)

PROBLEM_TYPE = "application/problem+json"
#: How long a client should wait before it asks a store again that did not answer.
RETRY_SECONDS = 5

TITLES = {
    400: "Bad request", 401: "Not signed in", 403: "Not allowed", 404: "Not found", 405: "Method not allowed",
    408: "Too slow", 409: "Conflict", 413: "Request too large", 415: "Wrong content type", 421: "Wrong host",
    422: "Not possible",
    429: "Too many attempts", 500: "Internal error", 502: "The store failed", 503: "Not available",
    504: "No answer in time", 507: "The store is full",
}  # fmt: skip

#: The status of each error, the most specific class first.
STATUSES: tuple[tuple[type[WaypostError], int], ...] = (
    (UnknownSchedule, 404),
    (InvalidInput, 422),
    (QueueNotEmpty, 409),
    (QueueFull, 409),
    (KeyInUse, 409),
    (OperationTooOld, 409),
    (StoreFull, 507),
    (StoreUnavailable, 503),
    (OutcomeUnknown, 504),
    (AccessDenied, 502),
    (SchemaTooNew, 502),
    (SchemaTooOld, 502),
    (StoreError, 502),
    (ConfigurationError, 500),
)


class Problem(Exception):
    """An answer that is no success. `kind` names it for programs, `detail` is a sentence for people."""

    def __init__(
        self, status: int, kind: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = headers or {}
        self.more = more

    @property
    def title(self) -> str:
        """What every problem of this status is called."""
        return TITLES.get(self.status, "Error")

    def document(self) -> dict[str, Any]:
        """The fields of RFC 9457, and what this problem adds."""
        fields = {
            "type": f"urn:waypost:problem:{self.kind}", "title": self.title, "status": self.status,
            "detail": self.detail,
        }  # fmt: skip
        return fields | self.more

    def encode(self) -> bytes:
        """The document as JSON."""
        return msgspec.json.encode(self.document())


def problem_of(error: WaypostError) -> Problem:
    """Return the problem for an error of the client. Such an error holds no secret and no body."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 409)
    more: dict[str, Any] = {"outcome": error.outcome}
    if isinstance(error, QueueNotEmpty):
        more["left"] = error.left
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (503, 504) else {}
    return Problem(status, kebab_case(type(error).__name__), str(error), headers=headers, **more)


def kebab_case(name: str) -> str:
    """`QueueNotEmpty` as `queue-not-empty`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
