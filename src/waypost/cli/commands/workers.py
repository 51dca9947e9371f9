"""`waypost workers`: the registered workers, their queues, the queues that no worker serves; stop or quiet a worker."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import add_command, open_client
from waypost.cli.output import INDENT, wrap_indented, write, write_json
from waypost.formatting import format_call, format_count
from waypost.views import ActionUndo, RegisteredWorker

REQUESTS = {
    "stop": "stops after its next heartbeat, within 15 seconds",
    "quiet": "claims no more after its next heartbeat, within 15 seconds",
}  # fmt: skip


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "workers", run, "list the workers of a store, or request one to stop",
        more="The workers with a recent heartbeat. Exit code 1: one of them is red. `stop NAME` and `quiet NAME` "
             "request a worker to stop, or to claim no more: it does so after its next heartbeat, within 15 seconds. "
             "Exit code 1: there is no such worker.",
        examples=("waypost workers", "waypost workers --json", "waypost workers stop shop-1:4711:9f3a"),
    )  # fmt: skip
    parser.add_argument(
        "url", nargs="?", metavar="URL | stop | quiet", help="the store; or what to request of a worker"
    )
    parser.add_argument("worker", nargs="?", metavar="NAME", help="after stop or quiet: the name of the worker")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.url in REQUESTS:
        return run_request(options, options.url)
    if options.worker is not None:
        raise CommandError(f"workers takes URL, stop NAME or quiet NAME, not {options.url!r}", USAGE)
    with open_client(options) as post:
        found, queues = post.workers(), post.queues()
    unserved = list_unserved(found, queues)
    if options.json:
        write_json({"workers": found, "unserved": unserved})
    else:
        for line in format_workers(found, unserved):
            write(line)
    return FOUND if any(worker.status == "red" for worker in found) else 0


def run_request(options: argparse.Namespace, request: str) -> int:
    """Request a worker to stop or to claim no more, and return the exit code."""
    if options.worker is None:
        raise CommandError(f"which worker? waypost workers {request} NAME; `waypost workers` lists the names", USAGE)
    options.url = None
    action = f"{request}_worker"
    python = format_call(action, options.worker)
    with open_client(options) as post, logged_action(options, post, action, None, python) as entry:
        found = post.stop_worker(options.worker) if request == "stop" else post.quiet_worker(options.worker)
        entry.text = f"{options.worker} {REQUESTS[request]}" if found else f"there is no worker {options.worker}"
        entry.undo = ActionUndo.of(action, changed=found)
    if options.json:
        write_json({"worker": options.worker, "request": request, "requested": found})
    else:
        write(entry.text)
    return 0 if found else FOUND


def list_unserved(found: Sequence[RegisteredWorker], queues: Sequence[str]) -> list[str]:
    """Return the queues that no worker serves; none if a worker did not list all of its queues."""
    served = {queue.name for worker in found for queue in worker.queues}
    return [] if any(worker.unlisted for worker in found) else [name for name in queues if name not in served]


def count_releases(found: Sequence[RegisteredWorker]) -> dict[str, int]:
    """Return how many workers each release of waypost has."""
    return dict(Counter(worker.version for worker in found if worker.version))


def describe_releases(releases: dict[str, int]) -> str:
    """Return the releases with their numbers of workers, as a list in words."""
    return ", ".join(f"{format_count(number, 'worker')} of {release}" for release, number in sorted(releases.items()))


def format_workers(found: Sequence[RegisteredWorker], unserved: Sequence[str]) -> list[str]:
    """Return the list of workers as lines. Ages are as of each worker's last heartbeat, by the store's clock."""
    lines = []
    for worker in found:
        age = (worker.seen_at - worker.started_at).total_seconds()
        requested = f", requested to {worker.requested}" if worker.requested else ""
        lines.append(f"{worker.name}  {worker.state}, {worker.status}{requested}")
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
    releases = count_releases(found)
    if len(releases) > 1:
        lines.append(f"of several releases: {describe_releases(releases)}")
    if unserved:
        lines.append(f"served by no worker: {', '.join(unserved)}")
    return [part for line in lines for part in wrap_indented(line, 2 * INDENT)]
