"""Checks of the registered workers, and of queues with messages that no worker serves."""

from __future__ import annotations

from collections.abc import Sequence

from waypost.cli.commands.workers import count_releases, describe_releases, list_unserved
from waypost.formatting import format_age, format_count
from waypost.release import minor_of
from waypost.store.checkup import Findings, note, ok, wrong
from waypost.views import RegisteredWorker, Stats


def check_workers(workers: Sequence[RegisteredWorker]) -> Findings:
    """Check the health of registered workers."""
    red = [worker for worker in workers if worker.status == "red"]
    for worker in red:
        yield wrong("workers", f"worker {worker.name} is red: {'; '.join(worker.reasons)}", "restart it if the store "
                    "is well; its log has the details", worker=worker.name)  # fmt: skip
    if not red:
        yield ok("workers", f"{format_count(len(workers), 'worker')} registered", workers=len(workers))
    releases = count_releases(workers)
    if len(releases) > 1:
        is_upgrade = len({minor_of(release) for release in releases}) > 1
        yield note("releases", f"workers of several releases are registered: {describe_releases(releases)}",
                   "when the last process of the old release has stopped, end the upgrade with `waypost migrate URL "
                   "--finish`" if is_upgrade else "they differ by their patch only, so nothing waits for one of them",
                   releases=releases)  # fmt: skip


def check_served(found: Sequence[Stats], workers: Sequence[RegisteredWorker]) -> Findings:
    """Check that every queue with messages has a worker."""
    unserved = set(list_unserved(workers, [stats.queue for stats in found]))
    without_worker = []
    for stats in found:
        # Programs that use receive or consume are not registered; they wait on the queue, or hold leases of it.
        attended = stats.sleepers or stats.ledger.leased
        if stats.queue in unserved and (stats.ledger.ready or stats.ledger.delayed) and not attended:
            without_worker.append(stats)
    for stats in without_worker:
        ledger = stats.ledger
        waits = f", the oldest for {format_age(stats.oldest_ready_age)}" if stats.oldest_ready_age is not None else ""
        yield wrong(
            "handlers",
            f"queue {stats.queue} has {ledger.ready:,} ready and {ledger.delayed:,} delayed messages{waits}, and "
            "no worker serves it",
            "start a worker with a handler for it, or purge it if it is no longer used",
            queue=stats.queue, ready=ledger.ready, delayed=ledger.delayed,
        )  # fmt: skip
    if not without_worker:
        yield ok("handlers", "every queue with messages is served")
