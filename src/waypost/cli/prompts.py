"""Questions before an action that cannot be undone."""

from __future__ import annotations

import argparse
import sys

from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.output import write_stderr


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option that skips the question."""
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def confirm(options: argparse.Namespace, question: str) -> None:
    """Ask for confirmation on a terminal; elsewhere `--yes` is required."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Give --yes to do it without a question; nothing was done", USAGE)
    write_stderr(f"{question} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was done", FOUND)
