"""The check of journal readers that lag."""

from __future__ import annotations

from collections.abc import Sequence

from waypost.formatting import format_count
from waypost.store.checkup import Findings, note, ok, wrong
from waypost.views import Policy, Stats

#: A reader further behind than the first share of the journal's cap gets a note; past the second share it is wrong.
LAG_NOTED, LAG_WRONG = 0.1, 0.5


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
