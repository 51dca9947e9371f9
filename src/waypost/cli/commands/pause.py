"""`waypost pause` and `waypost resume`."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.options import add_command, open_client
from waypost.cli.output import write, write_json


def add(commands: Any) -> None:
    """Declare the arguments of both commands."""
    for name, run, text in (
        ("pause", run_pause, "hand out nothing of a queue until it is resumed"),
        ("resume", run_resume, "hand out messages of a queue again"),
    ):
        parser = add_command(commands, name, run, text, examples=(f"waypost {name} orders",))
        parser.add_argument("queue", help="the queue")


def run_pause(options: argparse.Namespace) -> int:
    """Pause a queue and return the exit code. A queue that is paused already is no failure."""
    with open_client(options) as post:
        changed = post.pause(options.queue)
    unchanged = f"nothing to change: {options.queue} was paused already"
    return print_result(options, changed, f"{options.queue} is paused" if changed else unchanged, paused=True)


def run_resume(options: argparse.Namespace) -> int:
    """Resume a queue and return the exit code. A queue that is not paused is no failure."""
    with open_client(options) as post:
        changed = post.resume(options.queue)
    unchanged = f"nothing to change: {options.queue} was not paused"
    return print_result(options, changed, f"{options.queue} is resumed" if changed else unchanged, paused=False)


def print_result(options: argparse.Namespace, changed: bool, text: str, *, paused: bool) -> int:
    """Print what was done and return the exit code."""
    if options.json:
        write_json({"queue": options.queue, "changed": changed, "paused": paused})
    else:
        write(text)
    return 0
