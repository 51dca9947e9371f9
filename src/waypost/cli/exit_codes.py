"""The exit codes of all commands, and the code of each error.

The same table is in docs/reference/command-line.md; a test compares the two.
"""

from __future__ import annotations

from waypost.errors import (
    AccessDenied,
    ConfigurationError,
    InvalidInput,
    KeyInUse,
    QueueNotEmpty,
    SchemaTooNew,
    SchemaTooOld,
    StoreUnavailable,
    UnknownSchedule,
    WaypostError,
)

DONE = 0
FOUND = 1
USAGE = 2
UNREACHABLE = 3
FAILED = 4
LEFT = 5
BEHIND = 6
AHEAD = 7
INTERRUPTED = 130

#: What each code means, for `waypost --help` and the reference.
CODES = {
    DONE: "done, and all is well",
    FOUND: "done, and something is not as it should be, or is not there",
    USAGE: "wrong arguments, an unreadable URL, or an extra that is not installed; nothing was done",
    UNREACHABLE: "the store cannot be reached, or denies access to this user",
    FAILED: "the store refused, is full, or its reply was lost; the message says what is known",
    LEFT: "a worker or relay stopped and left something unsettled; it is delivered again",
    BEHIND: "the tables are missing or older: run waypost migrate; or different: undo the change that --check names",
    AHEAD: "the tables belong to a newer release: update waypost",
    INTERRUPTED: "ended by Ctrl-C",
}


class CommandError(WaypostError):
    """Raised by a command to print one sentence and exit with a given code."""

    def __init__(self, text: str, code: int = FOUND) -> None:
        super().__init__(text)
        self.code = code


def exit_code_of(error: WaypostError) -> int:
    """Return the exit code of an error."""
    match error:
        case CommandError():
            return error.code
        case SchemaTooOld():
            return BEHIND
        case SchemaTooNew():
            return AHEAD
        case StoreUnavailable() | AccessDenied():
            return UNREACHABLE
        case InvalidInput() | ConfigurationError():
            return USAGE
        case KeyInUse() | QueueNotEmpty() | UnknownSchedule():
            return FOUND
    return FAILED
