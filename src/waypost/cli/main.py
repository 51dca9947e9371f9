"""`waypost`: reads the arguments and calls the command. Each command has a module, with `add` for its arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from waypost import __version__
from waypost.cli import (
    bench,
    clockwork,
    completion,
    dead,
    demo,
    doctor,
    journal,
    looking,
    migrate,
    output,
    pipeline,
    publish,
    relay,
    running,
    schedules,
    timers,
    watch,
    worker,
    workers,
)
from waypost.cli.ending import CODES, INTERRUPTED, code_of
from waypost.cli.output import safe_lines, say, without_secrets
from waypost.errors import InvalidName, MissingExtra, WaypostError

#: Each adds its arguments with `add(commands)`, and what runs it as `run`. One line for each module.
COMMANDS: tuple[Any, ...] = (
    publish,
    looking,
    journal,
    watch,
    running,
    dead,
    timers,
    schedules,
    worker,
    workers,
    clockwork,
    relay,
    migrate,
    doctor,
    bench,
    completion,
    demo,
    pipeline,
)

#: The order of `waypost --help`. A test fails when a command is in none of these.
GROUPS: dict[str, tuple[str, ...]] = {
    "publish and look": ("publish", "queues", "stats", "watch", "peek", "history", "ledger", "journal"),
    "act on a queue": ("pause", "resume", "configure", "cancel", "purge", "remove", "dead", "timers", "schedules"),
    "run": ("worker", "workers", "relay", "scheduler", "promoter"),
    "set up and check": ("migrate", "doctor", "bench", "completion"),
    "see it all": ("demo", "pipeline"),
}
EXAMPLES = (
    "waypost publish orders '{\"id\": 7}' --url sqlite:///orders.db",
    "waypost worker shop.queues:post",
    "WAYPOST_URL=valkey://127.0.0.1:6379 waypost watch",
    "waypost dead redrive orders --reason retries_exhausted --rate 50/s",
    "waypost doctor --json",
)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints repeat no password, also of a URL that stands where none is expected."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with 2."""
        super().error(safe_lines(without_secrets(message)))


class TopParser(Parser):
    """The parser of `waypost` itself, whose help lists the commands by what they are for."""

    def format_help(self) -> str:
        """The list of all commands, with examples and exit codes."""
        listed = {action.dest: action.help or "" for action in self.listing._choices_actions}
        lines = [f"usage: {self.prog} command …", "", f"{self.description} `waypost COMMAND --help` tells more.", ""]
        for title, names in GROUPS.items():
            shown = [f"  {name:12} {listed[name]}" for name in names if name in listed]
            lines += [f"{title}:", *shown, ""] if shown else []
        lines += ["options:", "  -h, --help   this list", "  --version    the release", ""]
        lines += [
            "Most commands take --url (else WAYPOST_URL), --namespace (WAYPOST_NAMESPACE) and",
            "--json. Colours are for terminals; NO_COLOR ends them.",
            "",
            "examples:",
            *(f"  {example}" for example in EXAMPLES),
            "",
            "exit codes:",
            *(f"  {code:<4} {text.partition(';')[0]}" for code, text in CODES.items()),
        ]
        return "\n".join(lines) + "\n"

    #: The subparsers: set by `parser`.
    listing: Any


def parser() -> TopParser:
    """The arguments of all commands."""
    top = TopParser(prog="waypost", description="Messages that must arrive.")
    top.add_argument("--version", action="version", version=f"waypost {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    top.listing = commands
    for command in COMMANDS:
        command.add(commands)
    return top


#: Packages that come with an extra of ours, for imports that nothing else turned into a sentence.
EXTRAS = {
    "psycopg": "postgres", "psycopg_pool": "postgres", "redis": "valkey", "pyspark": "spark", "pyarrow": "spark",
    "numpy": "spark", "plotly": "spark", "adbc_driver_postgresql": "spark", "textual": "cli", "rich": "cli",
    "shtab": "cli", "nats": "nats", "prometheus_client": "metrics", "opentelemetry": "traces",
}  # fmt: skip


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The extra that is not installed, None if it was not waypost that asked for the module."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    asked_by = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    if extra is None or asked_by.partition(".")[0] not in ("waypost", *EXTRAS):
        return None
    return MissingExtra(f'this command needs {error.name}, which is not installed: pip install "waypost[{extra}]"')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Whatever was wrong with the call or the store is told in one sentence."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    output.arguments[:] = given
    options = parser().parse_args(given or ["--help"])
    options.arguments = given
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()  # here, where somebody who reads no more is no failure
        return code
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        say(f"waypost: {missing}")
        return code_of(missing)
    except WaypostError as error:
        text = without_secrets(str(error))
        if isinstance(error, InvalidName) and "://" in text:
            text += "; a URL is given with --url"
        say(f"waypost: {text}")
        return code_of(error)
    except KeyboardInterrupt:
        sys.stderr.write("waypost: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`). Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
