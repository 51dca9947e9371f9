"""Damaged records: messages that no claim can reach, index entries without a message, wrong counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waypost.cli.progress import Progress
from waypost.client import Waypost
from waypost.errors import AccessDenied, StoreFailed
from waypost.formatting import format_count
from waypost.store.checkup import Findings, note, ok, wrong
from waypost.values import Damage
from waypost.views import Stats

#: How many damaged records of a queue are listed one by one; of the others, only the number.
NAMED_MAX = 20


def check(post: Waypost, names: Sequence[str], *, mend: bool, quiet: bool) -> Findings:
    """Check all records of all queues."""
    record_count = damaged = 0
    with Progress("records", quiet=quiet) as progress:
        for name in names:
            try:
                result = post.check(name, mend=mend, progress=_make_callback(progress))
            except AccessDenied:
                yield note("records", f"this user may not read the records of queue {name}", queue=name)
                continue
            except StoreFailed as error:
                yield wrong("records", str(error), "run `waypost doctor --mend`", queue=name)
                damaged += 1
                continue
            record_count += result.examined
            damaged += len(result.damages)
            yield from _list_damages(name, result.damages, mend=mend)
    if not damaged:
        yield ok(
            "records",
            f"{format_count(record_count, 'record')} in {format_count(len(names), 'queue')}, none damaged",
            examined=record_count,
        )


def _make_callback(progress: Progress) -> Callable[[int], None]:
    """Return a callback that adds the progress of one queue to that of the queues before."""
    before = progress.done
    return lambda done: progress.advance(before + done - progress.done)


def _list_damages(queue: str, damages: Sequence[Damage], *, mend: bool) -> Findings:
    for damage in damages[:NAMED_MAX]:
        what = f"{damage.kind} {damage.id or ''}".strip()
        figures = {"queue": queue, "kind": damage.kind, "id": damage.id, "mended": damage.mended}
        if mend and damage.mended:
            yield note("records", f"queue {queue}, {what}: {damage.found}; now: {damage.mended}", **figures)
        else:
            yield wrong("records", f"queue {queue}, {what}: {damage.found}", "`waypost doctor --mend` repairs it",
                        **figures)  # fmt: skip
    if len(damages) > NAMED_MAX:
        more = f"queue {queue}: {format_count(len(damages) - NAMED_MAX, 'damaged record')} more"
        if mend:
            yield note("records", more, queue=queue, more=len(damages) - NAMED_MAX)
        else:
            yield wrong(
                "records", more, "`waypost doctor --mend` repairs them", queue=queue, more=len(damages) - NAMED_MAX
            )


def readable_stats(post: Waypost, names: Sequence[str]) -> list[Stats]:
    """Return the stats of the queues whose counters can be read; the others are among the damaged records."""
    found = []
    for name in names:
        try:
            found.append(post.stats(name))
        except StoreFailed:
            continue
    return found
