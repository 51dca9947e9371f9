"""Checks of clocks, ledgers, workers, queues without a worker, and readers that lag."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from waypost.cli.commands.workers import list_unserved
from waypost.client import Waypost
from waypost.formatting import format_age, format_count
from waypost.store.checkup import Findings, note, ok, wrong
from waypost.views import Policy, RegisteredWorker, Stats

#: The queue whose stats are read to get the time of the store. It is never created.
CLOCK_QUEUE = "waypost-doctor"
#: Clocks that differ by more get a note; waypost works all the same.
CLOCK_DIFFERENCE_MAX = timedelta(seconds=1)
#: A reader further behind than the first share of the journal's cap gets a note; past the second share it is wrong.
LAG_NOTED, LAG_WRONG = 0.1, 0.5
#: The most names in one line.
NAMES_MAX = 5


def join_names(queues: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(queues) - NAMES_MAX
    return ", ".join(queues[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def check_clock(post: Waypost) -> Findings:
    """Compare the store's clock with that of this machine."""
    before = datetime.now(UTC)
    at = post.stats(CLOCK_QUEUE).at
    after = datetime.now(UTC)
    # The store read its clock between the two: a time outside of them is a real difference.
    difference = at - after if at > after else min(timedelta(0), at - before)
    seconds = round(difference.total_seconds(), 3)
    text = f"the store's clock and this machine's differ by {format_age(abs(difference))}"
    if abs(difference) > CLOCK_DIFFERENCE_MAX:
        yield note("clock", text, "harmless to messages, whose times are all the store's; keep both on NTP, or times "
                   "that you give with `at` are not the ones you mean", difference_seconds=seconds)  # fmt: skip
    else:
        yield ok("clock", text, difference_seconds=seconds)


def check_ledgers(found: Sequence[Stats]) -> Findings:
    """Check that every message is accounted for."""
    broken = [stats.queue for stats in found if stats.ledger.balance or stats.ledger.unexplained]
    if broken:
        yield wrong("ledger", f"the ledger of {join_names(broken)} does not balance", "if damaged records are listed "
                    "above, `waypost doctor --mend` corrects it; otherwise this is a defect in waypost: please report "
                    "it with the output of `waypost ledger --json`", queues=broken)  # fmt: skip
    else:
        yield ok("ledger", f"{format_count(len(found), 'queue')}, every message accounted for", queues=len(found))


def check_workers(workers: Sequence[RegisteredWorker]) -> Findings:
    """Check the health of registered workers."""
    red = [worker for worker in workers if worker.status == "red"]
    for worker in red:
        yield wrong("workers", f"worker {worker.name} is red: {'; '.join(worker.reasons)}", "restart it if the store "
                    "is well; its log has the details", worker=worker.name)  # fmt: skip
    if not red:
        yield ok("workers", f"{format_count(len(workers), 'worker')} registered", workers=len(workers))


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


def check_readers(found: Sequence[Stats], policies: dict[str, Policy]) -> Findings:
    """Check that journal readers keep up."""
    behind = 0
    for stats in found:
        cap = policies[stats.queue].journal_max
        for name, read_to in stats.journal_readers.items():
            lag = stats.journal_last - read_to
            if lag <= LAG_NOTED * cap:
                continue
            behind += 1
            text = f"reader {name} of queue {stats.queue} is {lag:,} events behind, and the journal keeps {cap:,}"
            advice = (
                f"let it continue, remove it with journal_forget({stats.queue!r}, {name!r}), or raise journal_max: "
                "past twice the cap events are deleted unread"
            )
            figures = {"queue": stats.queue, "reader": name, "lag": lag, "journal_max": cap}
            yield (wrong if lag > LAG_WRONG * cap else note)("readers", text, advice, **figures)
    if not behind:
        readers = sum(len(stats.journal_readers) for stats in found)
        yield ok("readers", f"{format_count(readers, 'journal reader')}, none far behind", readers=readers)


def check_dead(found: Sequence[Stats]) -> Findings:
    """List dead letters and paused queues, which are easily forgotten."""
    dead = [stats for stats in found if stats.ledger.dead_kept]
    if dead:
        total = sum(stats.ledger.dead_kept for stats in dead)
        where = join_names([stats.queue for stats in dead])
        yield note("dead letters", f"{format_count(total, 'dead letter')} in {where}",
                   "list them with `waypost dead list QUEUE --by-reason`", dead=total)  # fmt: skip
    paused = [stats.queue for stats in found if stats.paused]
    if paused:
        yield note("paused", f"paused: {join_names(paused)}", "`waypost resume QUEUE` resumes one", queues=paused)
