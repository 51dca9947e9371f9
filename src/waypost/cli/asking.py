"""Asking before something cannot be undone."""

from __future__ import annotations

import argparse
import sys

from waypost.cli.ending import FOUND, USAGE, Trouble
from waypost.cli.output import say


def add_yes(parser: argparse.ArgumentParser) -> None:
    """The option that answers beforehand."""
    parser.add_argument("--yes", action="store_true", help="do not ask")


def confirm(options: argparse.Namespace, question: str) -> None:
    """Ask on a terminal; elsewhere nobody could answer, and --yes must have been given."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise Trouble(f"{question} Say --yes to do it without being asked; nothing was done", USAGE)
    say(f"{question} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Trouble("nothing was done", FOUND)
