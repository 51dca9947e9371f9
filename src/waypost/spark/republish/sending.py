"""Sending messages with ids that stay the same, and adding their keys to the lake."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from waypost.client import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.operations.waves import Wave, free_room
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.table import Change, DeltaFolder
from waypost.spark.files import LakeFiles
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.tables import KEYS
from waypost.spark.republish.ids import BackfillIds
from waypost.spark.republish.known import Doubt, find_sent
from waypost.spark.republish.pace import Pace
from waypost.spark.republish.run import Options
from waypost.spark.republish.state import Intent, Plan, Records
from waypost.spark.source.bulk import Bulk
from waypost.spark.source.publishing import chunks
from waypost.store.port import Draft

#: How long a full queue or group is left alone before it is tried again.
FULL_SECONDS: Final = 0.5
#: Numbers of commits leave room for so many rows of a plan.
PLAN_BITS: Final = 40


def keys_folder(files: LakeFiles, name: str) -> DeltaFolder:
    """Return the table of keys, for the numbered commits of one backfill or redrive."""
    return DeltaFolder(files, KEYS.name, f"waypost-backfill-{name}")


def next_number(records: Records) -> int:
    """Return the number of a new plan, above all before it: also above those whose records were removed."""
    before = 0 if records.state is None else records.state.plan.number
    return max(before, keys_folder(records.files, records.name).snapshot().step >> PLAN_BITS) + 1


@dataclass(frozen=True, slots=True)
class Link:
    """What a plan is carried out with: the lake, two connections to the store, and a request to stop."""

    name: str
    plan: Plan
    lake: Lake
    bulk: Bulk
    post: Waypost
    options: Options
    stop: threading.Event

    def pace(self, queue: str) -> Pace:
        """Return the pace of sending to a queue."""

        def oldest_ready() -> float | None:
            age = self.bulk.run(self.bulk.store.stats(queue)).oldest_ready_ms
            return None if age is None else age / 1000

        return Pace(self.options.rate, self.options.max_age, oldest_ready, self.stop.wait)


class Sender:
    """Sends messages to one queue."""

    def __init__(self, link: Link, queue: str) -> None:
        self.queue, self.ids = queue, BackfillIds(queue)
        self._link = link
        self._keys = keys_folder(link.lake.files, link.name)

    def journal_newest(self) -> int:
        """Return the newest event of the journal."""
        return self._link.bulk.bounds(self.queue)[1]

    def find_sent(self, keys: Sequence[str], intent: Intent) -> set[str]:
        """Return the ids of those messages of a chunk in doubt that have been published, or count as such."""
        link, ids = self._link, [self.ids.of_key(key) for key in keys]
        if link.options.in_doubt == "send":
            return set()
        if link.options.in_doubt == "skip":
            return set(ids)
        return find_sent(link.lake, link.bulk, link.post, Doubt(self.queue, ids, intent.journal))

    def send(
        self, drafts: Sequence[Draft], read_known: Callable[[], Set[str]] = frozenset
    ) -> tuple[Counter[str], bool]:
        """Publish drafts as soon as there is room; return what became of them, and whether all were sent.

        They are not if a stop was asked for while the queue or a group was full. After each wait for room, those are
        left out whose keys are known by then.
        """
        post, stop = self._link.post, self._link.stop
        wave, counts, context = Wave(self.queue, chunks(drafts)), Counter[str](), context_of(post)
        while wave:
            answered = run_flow(post, wave.send(context, run_flow(post, free_room(context, self.queue))))
            for _, published in answered:
                counts.update(one.status for one in published)
            if wave and stop.wait(0 if answered else FULL_SECONDS):
                return counts, False
            if not answered and (late := wave.remove_keys(read_known())):
                counts["known"] += late
        return counts, True

    def add_keys(self, keys: Sequence[str], end: int) -> None:
        """Add the keys of a chunk to the lake, once: the commit is numbered by the plan and the row that it ends at."""
        if not keys:
            return
        count, link = len(keys), self._link
        columns = {
            "queue": [self.queue] * count, "key": keys, "message_id": [self.ids.of_key(key) for key in keys],
            "number": [None] * count, "at_ms": [time.time_ns() // 1_000_000] * count, "backfill": [link.name] * count,
        }  # fmt: skip
        rows = pa.table(columns, schema=KEYS.arrow(KEYS.columns)).sort_by("key")
        made = write_rows(link.lake.files, KEYS.name, rows, KEYS.statistics)
        self._keys.commit((link.plan.number << PLAN_BITS) + end, Change(tuple(made)))
