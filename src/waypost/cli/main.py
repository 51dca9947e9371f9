"""The entry point of `waypost`: parse the arguments, run the command, map errors to exit codes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from waypost import __version__
from waypost.cli import output
from waypost.cli.commands import (
    actions,
    bench,
    bulk,
    cancel,
    completion,
    configure,
    dead,
    demo,
    doctor,
    find,
    groups,
    history,
    init,
    journal,
    ledger,
    migrate,
    pause,
    peek,
    pipeline,
    promoter,
    publish,
    purge,
    queues,
    relay,
    remove,
    scheduler,
    schedules,
    stats,
    timers,
    watch,
    web,
    worker,
    workers,
)
from waypost.cli.exit_codes import CODES, INTERRUPTED, exit_code_of
from waypost.cli.options import URLS, did_you_mean
from waypost.cli.output import discard_output, escape_lines, prepare_streams, redact_secrets, write_stderr
from waypost.cli.positional_urls import set_url, split_urls
from waypost.cli.warning_days import warnings_once_per_day
from waypost.errors import InvalidName, MissingExtra, WaypostError

#: Each module declares the arguments of its command in `add(commands)`, with the function that runs it.
COMMANDS: tuple[Any, ...] = (
    publish,
    queues,
    stats,
    watch,
    peek,
    find,
    history,
    ledger,
    journal,
    pause,
    configure,
    groups,
    cancel,
    purge,
    remove,
    dead,
    bulk,
    timers,
    schedules,
    actions,
    worker,
    workers,
    web,
    relay,
    scheduler,
    promoter,
    init,
    migrate,
    doctor,
    bench,
    completion,
    demo,
    pipeline,
)

#: The order of `waypost --help`. A test fails when a command is in no group.
GROUPS: dict[str, tuple[str, ...]] = {
    "publish and inspect": (
        "publish",
        "queues",
        "stats",
        "watch",
        "peek",
        "find",
        "history",
        "ledger",
        "journal",
        "actions",
    ),
    "act on a queue": (
        "pause",
        "resume",
        "configure",
        "groups",
        "cancel",
        "purge",
        "remove",
        "dead",
        "bulk",
        "timers",
        "schedules",
    ),
    "run": ("worker", "workers", "web", "relay", "scheduler", "promoter"),
    "set up and check": ("init", "migrate", "doctor", "bench", "completion"),
    "demo and pipeline": ("demo", "pipeline"),
}
EXAMPLES = (
    "waypost publish orders '{\"id\": 7}' --url sqlite:///orders.db",
    "waypost worker shop.queues:post",
    "waypost watch valkey://127.0.0.1:6379",
    "waypost dead redrive orders --reason retries_exhausted --rate 50/s",
    "waypost doctor --json",
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors contain no password, even of a URL given as another argument."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2, with what was probably meant."""
        chosen = chosen_parser(self, output.arguments)
        if chosen is not self and message.startswith("unrecognized arguments"):
            # argparse reports these from the first parser, whose usage has none of the command's options.
            chosen.error(message)
        super().error(escape_lines(redact_secrets(message + self._suggest(message))))

    def _suggest(self, message: str) -> str:
        """Return the commands or options that are nearly the refused one, as the end of a sentence."""
        wrong = re.search(r"(?:invalid choice: '|unrecognized arguments: )([^' ]+)", message)
        if wrong is None:
            return ""
        known = chosen_parser(self, output.arguments)._option_string_actions if wrong[1].startswith("-") else {}
        choices = message.partition("(choose from ")[2].rstrip(")").replace("'", "").split(", ")
        return did_you_mean(wrong[1].partition("=")[0], known or choices)


def chosen_parser(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that the arguments choose, as far as they do."""
    for argument in arguments:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and argument in action.choices:
                parser = action.choices[argument]
                break
    return parser


class TopParser(Parser):
    """The parser of `waypost` itself; its help lists the commands in groups."""

    def format_help(self) -> str:
        """Return the list of all commands, with examples and exit codes."""
        listed = {action.dest: action.help or "" for action in self.listing._choices_actions}
        lines = [
            f"usage: {self.prog} command …",
            "",
            f"{self.description} `waypost COMMAND --help` shows its options.",
            "",
        ]
        for title, names in GROUPS.items():
            entries = [f"  {name:12} {listed[name]}" for name in names if name in listed]
            lines += [f"{title}:", *entries, ""] if entries else []
        lines += ["options:", "  -h, --help   this list", "  --version    the release", ""]
        lines += [
            "Most commands take the URL of a store among their arguments, or --url, else",
            "WAYPOST_URL; --namespace (WAYPOST_NAMESPACE) and --json. Output has colors on a",
            "terminal only; NO_COLOR turns them off.",
            "",
            "examples:",
            *(f"  {example}" for example in EXAMPLES),
            "",
            "exit codes:",
            *(f"  {code:<4} {text.partition(';')[0]}" for code, text in CODES.items()),
        ]
        return "\n".join(lines) + "\n"

    #: The subparsers: set by `make_parser`.
    listing: Any


def make_parser() -> TopParser:
    """Return the parser of all commands."""
    top = TopParser(prog="waypost", description="Messages that must arrive.")
    top.add_argument("--version", action="version", version=f"waypost {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    top.listing = commands
    for command in COMMANDS:
        command.add(commands)
    return top


#: Packages that an extra of waypost installs, for import errors that no command has handled.
EXTRAS = {
    "psycopg": "postgres", "psycopg_pool": "postgres", "redis": "valkey", "pyspark": "spark", "pyarrow": "spark",
    "numpy": "spark", "adbc_driver_postgresql": "spark", "textual": "cli", "rich": "cli",
    "shtab": "cli", "nats": "nats", "prometheus_client": "metrics", "starlette": "web", "uvicorn": "web",
    "jinja2": "web", "opentelemetry": "traces",
}  # fmt: skip


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the error that names the missing extra, or None if another package than waypost imported the module."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    importer = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    if extra is None or importer.partition(".")[0] not in ("waypost", *EXTRAS):
        return None
    return MissingExtra(f'this command needs {error.name}, which is not installed: pip install "waypost[{extra}]"')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. An error of the arguments or the store is printed in one sentence."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    output.arguments[:] = given
    prepare_streams()
    parser = make_parser()
    kept, urls = split_urls(chosen_parser(parser, given), given)
    options = parser.parse_args(kept or ["--help"])
    options.arguments = given
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        if urls:
            set_url(options, urls)
        # What runs until it is stopped warns at each start.
        with nullcontext() if hasattr(options, "log_level") else warnings_once_per_day():
            code = run(options)
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        write_stderr(f"waypost: {missing}")
        return exit_code_of(missing)
    except WaypostError as error:
        text = redact_secrets(str(error))
        if isinstance(error, InvalidName) and "://" in text:
            text += f"; the URL of a store is {URLS}"
        write_stderr(f"waypost: {text}")
        return exit_code_of(error)
    except KeyboardInterrupt:
        sys.stderr.write("waypost: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`).
        discard_output()
        return 0


if __name__ == "__main__":
    sys.exit(main())
