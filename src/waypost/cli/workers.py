"""`waypost workers`: who works on a store, on what, and which queues nobody serves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from waypost.cli.ending import FOUND
from waypost.cli.options import add_command, open_post
from waypost.cli.output import width, write, write_json
from waypost.values import RegisteredWorker


def add(commands: Any) -> None:
    """The arguments of the command."""
    add_command(
        commands, "workers", run, "list the workers of a store", positional_url=True,
        more="Those that told the store of themselves lately. Exit code 1: one of them is red.",
        examples=("waypost workers", "waypost workers --json"),
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    with open_post(options) as post:
        found, queues = post.workers(), post.queues()
    unserved = unserved_of(found, queues)
    if options.json:
        write_json({"workers": found, "unserved": unserved})
    else:
        for line in lines(found, unserved):
            write(line)
    return FOUND if any(worker.status == "red" for worker in found) else 0


def unserved_of(found: Sequence[RegisteredWorker], queues: Sequence[str]) -> list[str]:
    """The queues that none of these workers serves. One that could not name all of its queues may serve any."""
    served = {queue.name for worker in found for queue in worker.queues}
    return [] if any(worker.unlisted for worker in found) else [name for name in queues if name not in served]


def lines(found: Sequence[RegisteredWorker], unserved: Sequence[str]) -> list[str]:
    """The list as people read it. Ages are as of each worker's last beat, by the store's clock."""
    told = []
    for worker in found:
        age = (worker.seen_ms - worker.started_ms) / 1000
        told.append(f"{worker.name}  {worker.state}, {worker.status}")
        told.append(f"    pid {worker.pid} on {worker.host}, waypost {worker.version}, up {age:.0f} s")
        told += [f"    {reason}" for reason in worker.reasons]
        for queue in worker.queues:
            claimed = "no claim yet"
            if queue.last_claim_ms is not None:
                claimed = f"claimed {(worker.seen_ms - queue.last_claim_ms) / 1000:.1f} s before"
            told.append(
                f"    {queue.name:14} {queue.in_flight} of {queue.concurrency} in flight, "
                f"{queue.handled} handled, {claimed}"
            )
        if worker.unlisted:
            told.append(f"    and {worker.unlisted} more queues")
    told.append({0: "no workers", 1: "1 worker"}.get(len(found), f"{len(found)} workers"))
    if unserved:
        told.append(f"served by nobody: {', '.join(unserved)}")
    return [cut_end(line) for line in told]


def cut_end(line: str) -> str:
    """A line no wider than the terminal."""
    return line if len(line) <= width() else line[: width() - 1] + "…"
