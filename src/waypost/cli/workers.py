"""`waypost workers`: who works on a store, on what, and which queues nobody serves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypost.message import RegisteredWorker


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "workers",
        help="list the workers of a store",
        description="List the workers that told the store of themselves lately. Exit code 4: one of them is red.",
    )
    parser.add_argument("url", help="the store: sqlite:///orders.db, valkey://127.0.0.1:6379, postgresql://…")
    parser.add_argument("--namespace", default="wp", help="the namespace in it (wp)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines for people")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    import msgspec

    from waypost.client import Waypost
    from waypost.errors import WaypostError

    try:
        with Waypost(options.url, namespace=options.namespace, retry_budget=0) as post:
            found, queues = post.workers(), post.queues()
    except WaypostError as error:
        sys.stderr.write(f"waypost: {error}\n")
        return 1
    # A worker that could not name all of its queues may serve any of them.
    served = {queue.name for worker in found for queue in worker.queues}
    unserved = [] if any(worker.unlisted for worker in found) else [name for name in queues if name not in served]
    if options.json:
        sys.stdout.write(msgspec.json.encode({"workers": found, "unserved": unserved}).decode() + "\n")
    else:
        sys.stdout.write("\n".join(lines(found, unserved)) + "\n")
    return 4 if any(worker.status == "red" for worker in found) else 0


def lines(found: Sequence[RegisteredWorker], unserved: Sequence[str]) -> list[str]:
    """The list as people read it. Ages are as of each worker's last beat, by the store's clock."""
    told = []
    for worker in found:
        age = (worker.seen_ms - worker.started_ms) / 1000
        told.append(
            f"{worker.name}  {worker.state}, {worker.status}, pid {worker.pid} on {worker.host}, "
            f"waypost {worker.version}, up {age:.0f} s"
        )
        told += [f"    {reason}" for reason in worker.reasons]
        for queue in worker.queues:
            claimed = "no claim yet"
            if queue.last_claim_ms is not None:
                claimed = f"claimed {(worker.seen_ms - queue.last_claim_ms) / 1000:.1f} s before its last beat"
            told.append(
                f"    {queue.name:20} {queue.in_flight} in flight, {queue.concurrency} at once, "
                f"{queue.handled} handled, {claimed}"
            )
        if worker.unlisted:
            told.append(f"    and {worker.unlisted} more queues")
    told.append({0: "no workers", 1: "1 worker"}.get(len(found), f"{len(found)} workers"))
    if unserved:
        told.append(f"served by nobody: {', '.join(unserved)}")
    return told
