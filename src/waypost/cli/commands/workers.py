"""`waypost workers`: the registered workers, their queues, and the queues that no worker serves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from waypost.cli.exit_codes import FOUND
from waypost.cli.options import add_command, open_client
from waypost.cli.output import terminal_width, write, write_json
from waypost.views import RegisteredWorker


def add(commands: Any) -> None:
    """Declare the arguments."""
    add_command(
        commands, "workers", run, "list the workers of a store", positional_url=True,
        more="The workers with a recent heartbeat. Exit code 1: one of them is red.",
        examples=("waypost workers", "waypost workers --json"),
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    with open_client(options) as post:
        found, queues = post.workers(), post.queues()
    unserved = list_unserved(found, queues)
    if options.json:
        write_json({"workers": found, "unserved": unserved})
    else:
        for line in format_workers(found, unserved):
            write(line)
    return FOUND if any(worker.status == "red" for worker in found) else 0


def list_unserved(found: Sequence[RegisteredWorker], queues: Sequence[str]) -> list[str]:
    """Return the queues that no worker serves; none if a worker did not list all of its queues."""
    served = {queue.name for worker in found for queue in worker.queues}
    return [] if any(worker.unlisted for worker in found) else [name for name in queues if name not in served]


def format_workers(found: Sequence[RegisteredWorker], unserved: Sequence[str]) -> list[str]:
    """Return the list of workers as lines. Ages are as of each worker's last heartbeat, by the store's clock."""
    lines = []
    for worker in found:
        age = (worker.seen_at - worker.started_at).total_seconds()
        lines.append(f"{worker.name}  {worker.state}, {worker.status}")
        lines.append(f"    pid {worker.pid} on {worker.host}, waypost {worker.version}, up {age:.0f} s")
        lines += [f"    {reason}" for reason in worker.reasons]
        for queue in worker.queues:
            claimed = "no claim yet"
            if queue.last_claim_at is not None:
                claimed = f"claimed {(worker.seen_at - queue.last_claim_at).total_seconds():.1f} s before"
            lines.append(
                f"    {queue.name:14} {queue.in_flight} of {queue.concurrency} in flight, "
                f"{queue.handled} handled, {claimed}"
            )
        if worker.unlisted:
            lines.append(f"    and {worker.unlisted} more queues")
    lines.append({0: "no workers", 1: "1 worker"}.get(len(found), f"{len(found)} workers"))
    if unserved:
        lines.append(f"served by no worker: {', '.join(unserved)}")
    return [cut_to_width(line) for line in lines]


def cut_to_width(line: str) -> str:
    """Shorten a line to the width of the terminal."""
    return line if len(line) <= terminal_width() else line[: terminal_width() - 1] + "…"
