"""Checks of what queues contain: the ledgers, dead letters, and queues that are paused."""

from __future__ import annotations

from collections.abc import Sequence

from waypost.formatting import format_count
from waypost.store.checkup import Findings, note, ok, wrong
from waypost.views import Stats

#: The most names in one line.
NAMES_MAX = 5


def join_names(queues: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(queues) - NAMES_MAX
    return ", ".join(queues[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def check_ledgers(found: Sequence[Stats]) -> Findings:
    """Check that every message is accounted for."""
    broken = [stats.queue for stats in found if stats.ledger.balance or stats.ledger.unexplained]
    if broken:
        yield wrong("ledger", f"the ledger of {join_names(broken)} does not balance", "if damaged records are listed "
                    "above, `waypost doctor --mend` corrects it; otherwise this is a defect in waypost: please report "
                    "it with the output of `waypost ledger --json`", queues=broken)  # fmt: skip
    else:
        yield ok("ledger", f"{format_count(len(found), 'queue')}, every message accounted for", queues=len(found))


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
