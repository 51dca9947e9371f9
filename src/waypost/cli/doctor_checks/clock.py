"""The check of the store's clock against this machine's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from waypost.client import Waypost
from waypost.formatting import format_age
from waypost.store.checkup import Findings, note, ok

#: The queue whose stats are read to get the time of the store. It is never created.
CLOCK_QUEUE = "waypost-doctor"
#: Clocks that differ by more get a note; waypost works all the same.
CLOCK_DIFFERENCE_MAX = timedelta(seconds=1)


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
