"""The checks of `waypost doctor`, in order. Here and in this folder are those that are the same on every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from waypost.cli.doctor_checks import damaged_records, queues
from waypost.cli.doctor_checks.clock import check_clock
from waypost.cli.doctor_checks.journal import check_readers
from waypost.cli.doctor_checks.workers import check_served, check_workers
from waypost.client import Waypost
from waypost.client.internals import executor_of
from waypost.errors import AccessDenied
from waypost.store.checkup import Finding
from waypost.views import RegisteredWorker


def check_store(post: Waypost, *, mend: bool = False, quiet: bool = True) -> Iterator[Finding]:
    """Yield the findings in order: the records, the store itself, then its queues and workers."""
    checkup = post.store.checkup(executor_of(post))
    names, findings = checkup.check_list(post.queues(), mend=mend)
    yield from findings
    yield from damaged_records.check(post, names, mend=mend, quiet=quiet)
    found = damaged_records.readable_stats(post, names)
    workers: list[RegisteredWorker] | None = None
    with suppress(AccessDenied):  # the check of permissions below reports it
        workers = post.workers()
    policies = {stats.queue: post.policy(stats.queue) for stats in found}
    yield from checkup.check_server(found)
    yield from check_clock(post)
    yield from queues.check_ledgers(found)
    if workers is not None:
        yield from check_workers(workers)
        yield from check_served(found, workers)
    yield from check_readers(found, policies)
    yield from queues.check_dead(found)
