"""Publishing the rows of a backfill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from waypost.errors import InvalidInput
from waypost.spark.republish.ids import HEADER
from waypost.spark.republish.known import Tail, find_loss_by_level
from waypost.spark.republish.run import Sent
from waypost.spark.republish.sending import Link, Sender
from waypost.spark.republish.state import REASONS_MAX, Intent
from waypost.spark.source.credentials import Place
from waypost.spark.source.diverting import Refused
from waypost.spark.source.options import WriteOptions
from waypost.spark.source.publishing import Rows

#: Rows of about this size are sent at a time.
SLICE_BYTES: Final = 16 * 1024 * 1024


class Refusals:
    """Rows that cannot be published: how many, and the first reasons."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: list[str] = []

    def add(self, batch: Any, refused: Sequence[Refused]) -> None:
        """Count rows of a batch."""
        keys = batch.column("key")
        self.count += len(refused)
        for one in refused[: REASONS_MAX - len(self.reasons)]:
            self.reasons.append(f"key {keys[one.place].as_py()!r}: {one.reason}")


class Publisher:
    """Publishes the rows of a plan, but not those whose keys are known by now."""

    def __init__(self, link: Link, place: Place) -> None:
        plan = link.plan
        queue = plan.input.to_queue or plan.input.queues[0]
        self._link, self._sender = link, Sender(link, queue)
        queues = sorted({queue, *plan.input.queues})
        made = (link.name, plan.made_ms)
        self._tails = [Tail(link.lake, link.bulk, one, plan.journal.get(one, 0), made) for one in queues]
        self._pace = link.pace(queue)
        self._write = WriteOptions(place, queue, None, "keep", 0, 0.0, is_json=plan.is_json, redact=link.options.redact)
        self._body_type = StructType.fromJson(json.loads(plan.body_type or "{}"))["body"].dataType

    def intend(self, rows: pa.Table, first: int, at_ms: int) -> Intent:
        """Check that all keys are known that were published since the plan was made."""
        newest = self._sender.journal_newest()
        self._read_on()
        self._check_history()
        return Intent(first, rows.num_rows, at_ms, newest)

    def resume(self, intent: Intent) -> Intent:
        """Return the same: the messages of a chunk are known by their ids."""
        return intent

    def settle(self, rows: pa.Table, intent: Intent, is_in_doubt: bool) -> Sent:
        """Publish the rows of a chunk; part of them if a stop is asked for."""
        keys = rows.column("key").combine_chunks()
        was_sent = self._sender.find_sent(keys.to_pylist(), intent) if is_in_doubt else set[str]()
        self._read_on()
        known = {key for tail in self._tails for key in keys.filter(tail.are_known(keys)).to_pylist()}
        if is_in_doubt and len(was_sent) < rows.num_rows:
            self._check_history()
        sent, published = Sent(), list[str]()

        def read_known() -> set[str]:
            for late in self._read_on():
                known.update(late.filter(pc.is_in(late, value_set=keys)).to_pylist())
            self._check_tails()
            return known

        while sent.rows < rows.num_rows and not self._link.stop.is_set():
            self._pace.wait()
            part = cut_rows(rows.slice(sent.rows, self._pace.slice_rows))
            if len(was_sent) < rows.num_rows:
                read_known()
            if not self._publish(part, read_known, known, was_sent, sent, published):
                break
            sent.rows += part.num_rows
            self._pace.sent(part.num_rows)
        self._sender.add_keys(published, intent.first + intent.rows - rows.num_rows + sent.rows)
        return sent

    def _read_on(self) -> list[Any]:
        return [tail.read_on() for tail in self._tails]

    def _check_history(self) -> None:
        """Refuse to go on if keys that were published since the plan was made may be unknown."""
        for tail in () if self._link.options.allow_gaps else self._tails:
            tail.missing = tail.missing or find_loss_by_level(self._link.bulk, tail.queue)
        self._check_tails()

    def _check_tails(self) -> None:
        for tail in () if self._link.options.allow_gaps else self._tails:
            if tail.missing is not None:
                raise InvalidInput(
                    f"queue {tail.queue}: of the keys that were published since the plan was made, some are not known: "
                    f"{tail.missing}. Rows with such keys may be published again; pass --allow-gaps to accept that"
                )

    def _publish(
        self, rows: pa.Table, read_known: Callable[[], Set[str]], known: Set[str], was_sent: Set[str], sent: Sent,
        published: list[str],
    ) -> bool:  # fmt: skip
        """Publish a part of a chunk; False if a stop was asked for before the queue had room for all of it."""
        refusals = Refusals()
        source = Rows(self._write, self._sender.ids, self._body_type, refusals)
        drafts = [draft for batch in self._complete(rows).to_batches() for draft in source.drafts(batch)]
        fresh = [draft for draft in drafts if draft.id not in was_sent and draft.key not in known]
        # While they wait for room, programs publish on.
        counts, is_whole = self._sender.send(fresh, read_known)
        if not is_whole:
            sent.is_in_doubt = bool(counts)
            return False
        again = sum(draft.id in was_sent for draft in drafts)
        counts.update(queued=again, known=len(drafts) - len(fresh) - again, refused=refusals.count)
        sent.counts.update(counts)
        sent.reasons += refusals.reasons
        published += [draft.key for draft in drafts if draft.key is not None]
        return True

    def _complete(self, rows: pa.Table) -> pa.Table:
        """Return rows with the header that names the backfill, and with its priority where they have none."""
        mine = (HEADER, self._link.name)
        if "headers" in rows.column_names:
            given = rows.column("headers").to_pylist()
            headers = [[*(pair for pair in one or () if pair[0] != HEADER), mine] for one in given]
            rows = rows.drop_columns(["headers"])
        else:
            headers = [[mine]] * rows.num_rows
        rows = rows.append_column("headers", pa.array(headers, pa.map_(pa.string(), pa.string())))
        priority = pa.scalar(self._link.plan.priority, pa.int64())
        if "priority" in rows.column_names:
            place = rows.column_names.index("priority")
            return rows.set_column(place, "priority", pc.fill_null(rows.column("priority").cast(pa.int64()), priority))
        return rows.append_column("priority", pa.repeat(priority, rows.num_rows))


def cut_rows(rows: pa.Table) -> pa.Table:
    """Return the first of some rows: as many as are sent at a time, at least one."""
    while rows.nbytes > SLICE_BYTES and rows.num_rows > 1:
        rows = rows.slice(0, rows.num_rows // 2)
    return rows
