"""`waypost pause` and `waypost resume`."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from waypost.cli.action_log import logged_action
from waypost.cli.options import add_command, open_client
from waypost.cli.output import write, write_json
from waypost.formatting import format_call
from waypost.views import ActionUndo


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
    return change(options, "pause", f"{options.queue} is paused", f"{options.queue} was paused already")


def run_resume(options: argparse.Namespace) -> int:
    """Resume a queue and return the exit code. A queue that is not paused is no failure."""
    return change(options, "resume", f"{options.queue} is resumed", f"{options.queue} was not paused")


def change(options: argparse.Namespace, action: Literal["pause", "resume"], done: str, unchanged: str) -> int:
    """Pause or resume a queue, print what was done and return the exit code."""
    python = format_call(action, options.queue)
    with open_client(options) as post, logged_action(options, post, action, options.queue, python) as entry:
        changed = post.pause(options.queue) if action == "pause" else post.resume(options.queue)
        entry.text = done if changed else f"nothing to change: {unchanged}"
        entry.undo = ActionUndo.of(action, changed=changed)
    if options.json:
        write_json({"queue": options.queue, "changed": changed, "paused": action == "pause"})
    else:
        write(entry.text)
    return 0
