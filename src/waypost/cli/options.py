"""Arguments that many commands share, their types, and the client that they open."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from textwrap import fill
from typing import Any, cast
from urllib.parse import quote

from waypost.checks import check_namespace
from waypost.cli.exit_codes import UNREACHABLE, USAGE, CommandError
from waypost.cli.output import LOG_FORMATS, write_stderr
from waypost.client import Waypost
from waypost.client.options import DeadFilters
from waypost.errors import InvalidPolicy
from waypost.message import queue_name
from waypost.operations.flow import OnEvent
from waypost.policy import LEADER_TTL_MS, RetryPolicy, parse_retry
from waypost.redaction import Redact, find_redact
from waypost.store.opening import open_store
from waypost.urls import resolve_url

URLS = "sqlite:///orders.db, valkey://127.0.0.1:6379, postgresql://user@host/database"
#: argparse must not wrap the examples, so it wraps nothing, and the description is wrapped here.
HELP_WIDTH = 78
#: How long a command retries when the store goes away while it runs; the first connection fails much sooner.
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
    """Add a command with the common options. `positional_url`: the URL may also be its first argument."""
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


def add_leader_command(commands: Any, name: str, run: Run, text: str) -> None:
    """Add a command that runs a loop of which one process at a time is the leader."""
    parser = add_command(
        commands, name, run, text, positional_url=True,
        json_text="each tick that did something, one JSON document a line",
        more="Of all such processes, one is the leader at a time.",
        examples=(f"waypost {name} valkey://127.0.0.1:6379",),
    )  # fmt: skip
    parser.add_argument(
        "--ttl", type=float, default=LEADER_TTL_MS / 1000, metavar="S",
        help=f"replace a leader that has not renewed its leadership for S seconds ({LEADER_TTL_MS // 1000})",
    )  # fmt: skip
    add_log_options(parser, "info")


def add_log_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--log-level` and `--log-format`."""
    parser.add_argument("--log-level", default=default, choices=("debug", "info", "warning", "error"),
                        help=f"what is logged on stderr ({default})")  # fmt: skip
    parser.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="log lines of text or of JSON (text)")


def add_message_filters(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose messages of a listing."""
    parser.add_argument("-n", type=integer_between(1, 1_000_000), default=10, metavar="N", help="at most N (10)")
    parser.add_argument("--id", help="the message with this id")
    parser.add_argument("--key", help="messages with this key")
    parser.add_argument("--group", help="messages of this group")


def dead_filters(options: argparse.Namespace) -> DeadFilters:
    """Return the filters that were given."""
    given = {name: getattr(options, name, None) for name in DeadFilters.__annotations__}
    return cast("DeadFilters", {name: value for name, value in given.items() if value is not None})


def add_store(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add the options that choose a store; `positional`: the first argument may be the URL."""
    if positional:
        parser.add_argument("url", nargs="?", metavar="URL", help=f"the store: {URLS}; else WAYPOST_URL")
    parser.add_argument(
        "--url",
        dest="url_option",
        metavar="URL",
        help="the same" if positional else f"the store, also without --url before it: {URLS}; else WAYPOST_URL",
    )
    parser.add_argument("--namespace", metavar="NAME", help="the namespace in it; else WAYPOST_NAMESPACE, else wp")
    parser.add_argument("--schema", metavar="NAME", help="PostgreSQL: the schema of the tables, if not public")


def get_url(options: argparse.Namespace) -> str:
    """Return the URL of the store, from the arguments or the environment."""
    given: str | None = getattr(options, "url", None)
    option: str | None = options.url_option
    if given and option and given != option:
        raise CommandError(f"two stores are given, {given} and {option}: give one", USAGE)
    url = given or option or os.environ.get("WAYPOST_URL")
    if not url:
        raise CommandError(f"no store was given: give its URL ({URLS}), or set WAYPOST_URL", USAGE)
    return resolve_url(url)


def get_namespace(options: argparse.Namespace) -> str:
    """Return the namespace that was given, or the default."""
    return str(options.namespace or os.environ.get("WAYPOST_NAMESPACE") or "wp")


@contextmanager
def open_client(
    options: argparse.Namespace,
    *,
    retry_budget: float = RETRY_SECONDS,
    on_event: OnEvent | None = None,
    creates: bool = False,
) -> Iterator[Waypost]:
    """The client of a command for the length of a `with` block. A queue that does not exist is reported."""
    with make_client(options, retry_budget=retry_budget, on_event=on_event, creates=creates) as post:
        named = getattr(options, "queue", None) or ()
        if named and not creates:
            note_unknown_queues(post, [named] if isinstance(named, str) else named)
        yield post


def note_unknown_queues(post: Waypost, queues: Iterable[str]) -> None:
    """Write to stderr which of these queues do not exist, and which others are called alike."""
    names = post.queues()
    for queue in map(queue_name, queues):
        if queue not in names:
            write_stderr(f"waypost: there is no queue {queue} in this store{did_you_mean(queue, names)}")


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the names that are nearly the given one."""
    from difflib import get_close_matches

    # Dashes are the same in all options, and say nothing.
    plain = {name.lstrip("-"): name for name in names}
    alike = [plain[name] for name in get_close_matches(given.lstrip("-"), plain, n=3, cutoff=0.75)]
    return f"; did you mean {' or '.join(alike)}?" if alike else ""


def make_client(
    options: argparse.Namespace,
    *,
    retry_budget: float = RETRY_SECONDS,
    on_event: OnEvent | None = None,
    creates: bool = False,
) -> Waypost:
    """Return the client for a command, not connected yet, to be used in a `with` block.

    `creates`: a SQLite file that does not exist is created. Otherwise that is an error: the path is probably mistyped.
    """
    url, namespace = get_url(options), get_namespace(options)
    check_sqlite_file(url, namespace, creates=creates)
    if options.schema and not url.startswith(("postgresql://", "postgres://")):
        raise CommandError("--schema is for PostgreSQL; other stores have none", USAGE)
    if options.schema:
        from waypost.checks import check_namespace
        from waypost.store.opening import postgres_store

        replay_ttl_ms = int((2 * retry_budget + 60) * 1000)
        store = postgres_store().from_url(
            url, schema=options.schema, namespace=check_namespace(namespace), replay_ttl_ms=replay_ttl_ms
        )
        return Waypost(store=store, retry_budget=retry_budget, on_event=on_event, redact=load_redact_hook())
    return Waypost(url, namespace=namespace, retry_budget=retry_budget, on_event=on_event, redact=load_redact_hook())


def check_sqlite_file(url: str, namespace: str, *, creates: bool = False) -> None:
    """Check that a SQLite file exists and has tables of this namespace, without changing anything.

    Raises `CommandError` (exit code 3) if not, unless the command `creates` it, which is then reported.
    """
    if not url.startswith("sqlite://"):
        return
    store = open_store(url, namespace=check_namespace(namespace), clock=None, replay_ttl_ms=0, durability="server")
    path = str(getattr(store, "path", ""))
    if not os.path.exists(path):
        if not creates:
            raise CommandError(f"there is no file {path}, and this command creates none: check the path", UNREACHABLE)
        write_stderr(f"waypost: creating {path}, which did not exist")
        return
    if not creates and not _has_tables(path, namespace):
        raise CommandError(
            f"{path} has no tables of namespace {namespace}, and this command creates none: check the path and the "
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
        return True  # opening the store reports what is wrong with it


def load_redact_hook() -> Redact | None:
    """Return the redact hook that WAYPOST_REDACT names, for the commands that publish."""
    name = os.environ.get("WAYPOST_REDACT")
    if not name:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return find_redact(name)


#: The units of durations, in seconds.
DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_time(text: str) -> datetime:
    """Parse a time with its zone, as 2026-03-06T00:00:00Z."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a time looks like 2026-03-06T00:00:00Z, not {text!r}") from None
    if at.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs its zone: end it with Z, or an offset as +01:00")
    return at


def parse_moment(text: str) -> datetime:
    """Parse a time with its zone, or an age with its unit, as 2h or 7d: so long ago."""
    if text[-1:] in DURATION_UNITS:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    return parse_time(text)


#: The options that choose messages: those of a filter, and how `argparse` knows each.
FILTER_OPTIONS: dict[str, dict[str, Any]] = {
    "--reason": {"help": "those with this reason"},
    "--error-type": {"metavar": "CLASS", "help": "those with this class of error; '': none"},
    "--error": {"metavar": "TEXT", "help": "those whose error is this line; '': none"},
    "--group": {"help": "those of this group"},
    "--key-prefix": {"metavar": "TEXT", "help": "those whose key begins so"},
    "--type": {"dest": "type_name", "metavar": "NAME", "help": "those whose body is of this type"},
    "--died-before": {"type": parse_moment, "metavar": "TIME", "help": "those that died before; 2h: two hours ago"},
    "--died-after": {"type": parse_moment, "metavar": "TIME", "help": "those that did not die before"},
    "--header": {"metavar": "NAME[=VALUE]", "help": "those with this header"},
    "--published-before": {"type": parse_moment, "metavar": "TIME", "help": "those published before; 7d: a week ago"},
    "--published-after": {"type": parse_moment, "metavar": "TIME", "help": "those not published before"},
}


def add_dead_filters(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add the options that choose messages, but for some. All that are given must fit."""
    for name, declared in FILTER_OPTIONS.items():
        if name not in without:
            parser.add_argument(name, **declared)


def parse_time_or_day(text: str) -> datetime:
    """Parse a time with its zone, or a day, which is its beginning in UTC."""
    if len(text) > len("2026-03-06"):
        return parse_time(text)
    return datetime.combine(parse_day(text), datetime.min.time(), UTC)


def parse_day(text: str) -> date:
    """Parse a day, as 2026-03-06."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a day looks like 2026-03-06, not {text!r}") from None


def parse_duration(text: str) -> float:
    """Parse a duration into seconds: 90, 1.5, 30s, 5m, 2h, 7d."""
    number, unit = (text[:-1], DURATION_UNITS[text[-1]]) if text[-1:] in DURATION_UNITS else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e10:
        raise argparse.ArgumentTypeError(f"a duration looks like 90, 1.5, 30s, 5m, 2h or 7d, not {text!r}")
    return value


def parse_retry_argument(text: str) -> RetryPolicy:
    """Parse a retry policy."""
    try:
        return parse_retry(text)
    except InvalidPolicy as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def integer_between(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers between two bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"a whole number from {least} to {most}, not {text!r}")
        return value

    return read
