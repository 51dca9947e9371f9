"""The URL of a store among the arguments of a command: it may stand anywhere, without `--url` before it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from waypost.cli.exit_codes import USAGE, CommandError
from waypost.store.opening import POSTGRES_SCHEMES, VALKEY_SCHEMES

SCHEMES = ("memory", "sqlite", "file", *VALKEY_SCHEMES, *POSTGRES_SCHEMES)
STORE_URL = re.compile(rf"(?:{'|'.join(SCHEMES)})(?:\+\w+)?://")
#: Options by which the body of `publish`, its second argument, may be a URL itself. JSON never is one.
PLAIN_BODY = ("--text", "--bytes")


def split_urls(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command without the URLs of stores among them, and these URLs.

    A value of an option stays, and so does everything behind `--` and all of a command that has no store.
    """
    if "--url" not in parser._option_string_actions:
        return list(arguments), []
    has_plain_body = "body" in {action.dest for action in parser._actions} and any(
        one in arguments for one in PLAIN_BODY
    )
    kept: list[str] = []
    urls: list[str] = []
    #: The names of the command and its positional arguments so far.
    before = -len(parser.prog.split()) + 1
    for number, argument in enumerate(arguments):
        if argument == "--":
            return [*kept, *arguments[number:]], urls
        is_value = number > 0 and takes_value(parser, arguments[number - 1])
        if not is_value and STORE_URL.match(argument) and not (has_plain_body and before == 1):
            urls.append(argument)
            continue
        kept.append(argument)
        before += not is_value and not argument.startswith("-")
    return kept, urls


def takes_value(parser: argparse.ArgumentParser, argument: str) -> bool:
    """Whether an argument is an option, or the beginning of one, that takes the next argument as its value."""
    if not argument.startswith("-") or "=" in argument:
        return False
    known = parser._option_string_actions
    actions = [action for name, action in known.items() if argument == name] or [
        action for name, action in known.items() if argument.startswith("--") and name.startswith(argument)
    ]
    return any(action.nargs != 0 for action in actions)


def set_url(options: argparse.Namespace, urls: Sequence[str]) -> None:
    """Give a command the URL that was found among its arguments."""
    name = "url_option" if hasattr(options, "url_option") else "store"
    given = list(dict.fromkeys([*urls, *filter(None, [getattr(options, name)])]))
    if len(given) > 1:
        raise CommandError(f"two stores are given, {given[0]} and {given[1]}: give one", USAGE)
    setattr(options, name, given[0])
