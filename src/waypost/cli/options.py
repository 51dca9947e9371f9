"""Arguments that many commands share: which store, in which form to answer; and the client they lead to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from textwrap import fill
from typing import Any
from urllib.parse import quote

from waypost.checks import check_namespace
from waypost.cli.ending import UNREACHABLE, USAGE, Trouble
from waypost.cli.output import say
from waypost.client import Waypost
from waypost.operations.flow import OnEvent
from waypost.redaction import Redact, find_redact
from waypost.store.opening import open_store

URLS = "sqlite:///orders.db, valkey://127.0.0.1:6379, postgresql://user@host/database"
#: Examples stand as they are, so argparse is told to wrap nothing: the description is wrapped here.
HELP_WIDTH = 78
#: A command waits so long for a store that went away in the middle; its first connection fails much sooner.
RETRY_SECONDS = 10.0

Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any,
    name: str,
    run: Run | None,
    text: str,
    *,
    examples: Sequence[str] = (),
    more: str = "",
    store: bool = True,
    positional_url: bool = False,
    json_text: str | None = "one JSON document instead of lines for people",
) -> argparse.ArgumentParser:
    """A command with what all commands have. `positional_url`: the URL may also be its first argument."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=fill(f"{text[0].upper()}{text[1:]}.{' ' + more if more else ''}", HELP_WIDTH),
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if store:
        add_store(parser, positional=positional_url)
    if json_text is not None:
        parser.add_argument("--json", action="store_true", help=json_text)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def add_store(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Which store: `--url`, or the first argument where nothing else could be meant, or the environment."""
    if positional:
        parser.add_argument("url", nargs="?", metavar="URL", help=f"the store: {URLS}; else WAYPOST_URL")
    parser.add_argument(
        "--url",
        dest="url_option",
        metavar="URL",
        help="the same" if positional else f"the store: {URLS}; else WAYPOST_URL",
    )
    parser.add_argument("--namespace", metavar="NAME", help="the namespace in it; else WAYPOST_NAMESPACE, else wp")
    parser.add_argument("--schema", metavar="NAME", help="PostgreSQL: the schema of the tables, if not public")


def url_of(options: argparse.Namespace) -> str:
    """The URL that was given, one way or another."""
    given: str | None = getattr(options, "url", None)
    option: str | None = options.url_option
    if given and option and given != option:
        raise Trouble("two URLs were given", USAGE)
    url = given or option or os.environ.get("WAYPOST_URL")
    if not url:
        raise Trouble("say which store with --url or WAYPOST_URL, as in --url sqlite:///orders.db", USAGE)
    return url


def namespace_of(options: argparse.Namespace) -> str:
    """The namespace that was given, or the usual one."""
    return str(options.namespace or os.environ.get("WAYPOST_NAMESPACE") or "wp")


def open_post(
    options: argparse.Namespace,
    *,
    retry_budget: float = RETRY_SECONDS,
    on_event: OnEvent | None = None,
    creates: bool = False,
) -> Waypost:
    """The client for a command, not connected yet; to be used in a `with` block.

    `creates`: a SQLite file that is not there is made. Otherwise it is an error: the path is probably mistyped.
    """
    url, namespace = url_of(options), namespace_of(options)
    check_file(url, namespace, creates=creates)
    if options.schema and not url.startswith(("postgresql://", "postgres://")):
        raise Trouble("--schema is for PostgreSQL; other stores have none", USAGE)
    if options.schema:
        from waypost.checks import check_namespace
        from waypost.store.opening import postgres_store

        replay_ttl_ms = int((2 * retry_budget + 60) * 1000)
        store = postgres_store().from_url(
            url, schema=options.schema, namespace=check_namespace(namespace), replay_ttl_ms=replay_ttl_ms
        )
        return Waypost(store=store, retry_budget=retry_budget, on_event=on_event, redact=redact_of())
    return Waypost(url, namespace=namespace, retry_budget=retry_budget, on_event=on_event, redact=redact_of())


def check_file(url: str, namespace: str, *, creates: bool = False) -> None:
    """Look whether a SQLite file is there and has tables of this namespace, without changing anything.

    Raises `Trouble` (exit code 3) if it does not, unless the command `creates` it, which is said then.
    """
    if not url.startswith("sqlite://"):
        return
    store = open_store(url, namespace=check_namespace(namespace), clock=None, replay_ttl_ms=0, durability="server")
    path = str(getattr(store, "path", ""))
    if not os.path.exists(path):
        if not creates:
            raise Trouble(f"there is no file {path}, and this command makes none: check the path", UNREACHABLE)
        say(f"waypost: making {path}, which was not there")
        return
    if not creates and not _has_tables(path, namespace):
        raise Trouble(
            f"{path} has no tables of namespace {namespace}, and this command makes none: check the path and the "
            "namespace",
            UNREACHABLE,
        )


def _has_tables(path: str, namespace: str) -> bool:
    import sqlite3
    from contextlib import closing

    from waypost.store.sqlite.schema import Spelling, check_schema

    try:
        with closing(sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)) as connection:
            return check_schema(connection, Spelling(namespace), path)
    except sqlite3.Error:
        return True  # what is wrong with it is told when it is opened


def redact_of() -> Redact | None:
    """The redact hook that WAYPOST_REDACT names, for commands that publish: publish, schedules, scheduler, relay."""
    name = os.environ.get("WAYPOST_REDACT")
    if not name:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return find_redact(name)


def moment(text: str) -> datetime:
    """A time with its zone, as 2026-03-06T00:00:00Z."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a time looks like 2026-03-06T00:00:00Z, not {text!r}") from None
    if at.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs its zone: end it with Z, or an offset as +01:00")
    return at


def seconds(text: str) -> float:
    """A duration: 90, 1.5, 30s, 5m, 2h, 7d."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e10:
        raise argparse.ArgumentTypeError(f"a duration looks like 90, 1.5, 30s, 5m, 2h or 7d, not {text!r}")
    return value


def count_from(least: int, most: int) -> Callable[[str], int]:
    """A whole number between two bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"a whole number from {least} to {most}, not {text!r}")
        return value

    return read
