"""The log of actions for commands: each command that changes something appends one entry, however much it changes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from waypost.cli.exit_codes import AHEAD, BEHIND, UNREACHABLE, USAGE, exit_code_of
from waypost.cli.output import redact_secrets, write_stderr
from waypost.client import Waypost
from waypost.client.base import process_user
from waypost.errors import WaypostError
from waypost.views import ActionUndo, LoggedAction

#: Errors with these exit codes are in no log: nothing was tried, or the store that has the log cannot be used.
NOT_LOGGED = (USAGE, UNREACHABLE, BEHIND, AHEAD)
#: Options whose values must not be in the log, and what stands for them.
HIDDEN = {"--body": "BODY", "--text": "TEXT", "--header": "HEADER"}
#: Options that say where and how, not what: with their values, and without.
LEFT_OUT_WITH_VALUE = ("--url", "--store", "--store-env", "--namespace", "--schema")
LEFT_OUT = ("--json", "--yes")


@dataclass
class Entry:
    """What a command does; it fills in what became of it."""

    text: str = ""
    queue: str | None = None
    undo: ActionUndo | None = None
    bulk: str | None = None


@contextmanager
def logged_action(
    options: argparse.Namespace, post: Waypost, action: str, queue: str | None, python: str
) -> Iterator[Entry]:
    """Append what a `with` block does to the log of actions, also if it fails in the middle."""
    entry, ok = Entry(queue=queue), False
    try:
        yield entry
        ok = True
    except WaypostError as error:
        entry.text = "" if exit_code_of(error) in NOT_LOGGED else str(error)
        raise
    except KeyboardInterrupt:
        entry.text = "interrupted; what was done until then stays done"
        raise
    finally:
        if entry.text:
            append(post, LoggedAction(
                user=process_user(), via="command line", action=action, queue=entry.queue, ok=ok,
                text=redact_secrets(entry.text), command=command_line(options.arguments), python=python,
                undo=entry.undo if ok else None, bulk=entry.bulk,
            ))  # fmt: skip


def append(post: Waypost, action: LoggedAction) -> None:
    """Append an entry. The command has done its work: a log that cannot be written does not fail it."""
    try:
        post.log_action(action)
    except WaypostError as error:
        write_stderr(f"waypost: the log of actions has no entry of this command: {redact_secrets(str(error))}")


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as it was given, without its store, its bodies and headers."""
    kept: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, separator, _ = argument.partition("=")
        if is_option(name, LEFT_OUT):
            continue
        if is_option(name, LEFT_OUT_WITH_VALUE):
            if not separator:
                next(left, None)
        elif is_option(name, tuple(HIDDEN)):
            option = next(one for one in HIDDEN if one.startswith(name))
            if not separator:
                next(left, None)
            kept += [option, HIDDEN[option]]
        elif "://" not in argument:
            kept.append(argument)
    return shlex.join(["waypost", *kept])


def is_option(name: str, options: Sequence[str]) -> bool:
    """Whether an argument is one of these options, or their beginning, as the parser allows."""
    return len(name) > 2 and name.startswith("--") and any(option.startswith(name) for option in options)
