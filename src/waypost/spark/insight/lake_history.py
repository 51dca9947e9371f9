"""The history of a queue, read from a lake with pyarrow: by the driver, or by a task of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from msgspec import Struct

from waypost.errors import InvalidInput
from waypost.policy import GROUP_FIELDS, PolicyRecord
from waypost.spark.insight.history import RECORDED, Delivery, History, build_history
from waypost.spark.lake.lake import Lake, State
from waypost.spark.lake.tables import BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_OPEN_MESSAGES, LakeTable
from waypost.values import FINAL_EVENTS

#: Deliveries of a history at most, the newest: more of them say the same, and take a minute to serve.
DELIVERIES_MAX: Final = 1_000_000
#: Settings of a queue that its waits depend on.
SERVING: Final = ("lease_ms", "max_deliveries", "max_running", "rate_count", "rate_per_ms", *sorted(GROUP_FIELDS))


class Rows(Protocol):
    """What rows are read from: a lake, or the rows of one queue that were read with others."""

    @property
    def state(self) -> State: ...
    def arrow(self, table: LakeTable, columns: list[str], filter: Any) -> Any: ...


class Change(Struct, frozen=True):
    """A change of a queue's settings, as the journal has it: fields of `PolicyRecord` as texts."""

    at_ms: int
    fields: dict[str, str]


class Window(Struct, frozen=True):
    """A part of the history of a queue: events from a time up to, and without, another one."""

    queue: str
    since_ms: int = 0
    until_ms: int = 2**53


def read_deliveries(lake: Rows, window: Window, columns: Iterable[str] = RECORDED) -> Any:
    """Return the ended deliveries of a window as an Arrow table; those whose claim was not seen are left out."""
    chosen = (
        (ds.field("queue") == window.queue)
        & (ds.field("claimed_ms") >= window.since_ms)
        & (ds.field("claimed_ms") < window.until_ms)
        & ds.field("wait_ms").is_valid()
        & ds.field("run_ms").is_valid()
    )
    rows = lake.arrow(SILVER_DELIVERIES, list(columns), chosen)
    if rows.num_rows > DELIVERIES_MAX and "claimed_ms" in rows.column_names:
        rows = rows.sort_by("claimed_ms").slice(rows.num_rows - DELIVERIES_MAX)
    return rows


def read_never_claimed(lake: Rows, queue: str, now_ms: int) -> list[int]:
    """Return when messages became claimable that no worker has claimed yet."""
    columns = ["message_id", "published_ms", "due_ms", "claimed", "last_event", "last_number", "last_ms", "state"]
    rows = lake.arrow(SILVER_OPEN_MESSAGES, columns, ds.field("queue") == queue)
    gone = pc.or_(
        pc.greater(pc.fill_null(rows.column("claimed"), 0), 0),
        pc.fill_null(pc.is_in(rows.column("last_event"), pa.array(sorted(FINAL_EVENTS))), False),
    )
    ids = rows.column("message_id")
    rows = rows.filter(pc.invert(pc.is_in(ids, pc.unique(ids.filter(gone)))))
    return find_never_claimed(rows.sort_by("last_number").to_pylist(), now_ms)


def find_never_claimed(rows: Iterable[Mapping[str, Any]], now_ms: int) -> list[int]:
    """The same from partial rows, the oldest first. The newest row of a message has its state.

    A message that is parked, blocked or dead does not wait for a worker.
    """
    newest: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = newest.setdefault(row["message_id"], {"published_ms": None, "due_ms": None, "claimed": 0})
        known = {name: one[name] for name in ("published_ms", "due_ms") if row[name] is None}
        one |= {**row, **known, "claimed": one["claimed"] + (row["claimed"] or 0)}
    found = []
    for row in newest.values():
        if row["claimed"] or row["published_ms"] is None or row["last_event"] in FINAL_EVENTS:
            continue
        if row["last_event"] == "published" and row["state"] in ("ready", "delayed"):
            ready = row["published_ms"] if row["due_ms"] is None else row["due_ms"]
        elif row["state"] == "ready":
            ready = row["last_ms"]
        else:
            continue  # when a message is due that was postponed is not known
        if ready <= now_ms:
            found.append(ready)
    return found


def read_changes(lake: Rows, queue: str) -> list[Change]:
    """Return the changes of a queue's settings that the lake has, the oldest first."""
    rows = lake.arrow(
        BRONZE_JOURNAL, ["at_ms", "number", "cause"], (ds.field("queue") == queue) & (ds.field("event") == "configured")
    )
    found = []
    for row in sorted(rows.to_pylist(), key=lambda row: row["number"]):
        parts = (part.partition("=") for part in (row["cause"] or "").split(" "))
        fields = {
            name: value for name, separator, value in parts if separator and name in PolicyRecord.__struct_fields__
        }
        if fields:
            found.append(Change(row["at_ms"], fields))
    return found


def changed_ms(changes: Iterable[Change], fields: Iterable[str]) -> int:
    """Return when one of these settings was last given another value; 0 if the lake has no such change."""
    wanted, now, found = set(fields), dict[str, str](), 0
    for change in changes:
        for name in wanted & change.fields.keys():
            if now.get(name) != change.fields[name]:
                now[name], found = change.fields[name], change.at_ms
    return found


def read_pauses(lake: Rows, window: Window) -> list[tuple[int, int]]:
    """Return the times in which the queue was paused."""
    chosen = (ds.field("queue") == window.queue) & ds.field("event").isin(["paused", "resumed"])
    rows = lake.arrow(BRONZE_JOURNAL, ["at_ms", "number", "event"], chosen)
    found: list[tuple[int, int]] = []
    begin: int | None = None
    for row in sorted(rows.to_pylist(), key=lambda row: row["number"]):
        if row["event"] == "paused":
            begin = row["at_ms"] if begin is None else begin
        elif begin is not None:
            found.append((begin, row["at_ms"]))
            begin = None
    if begin is not None:
        found.append((begin, window.until_ms))
    return [(begin, end) for begin, end in found if end >= window.since_ms]


def read_types(lake: Lake, queue: str) -> Any:
    """Return the types of messages that were ingested into a lake, as an Arrow table; None if there are none."""
    from waypost.spark.lake.ingest import STEPS, folder_of

    name = folder_of(queue)
    if name not in lake.files.folders(STEPS):
        return None
    table = LakeTable(f"messages/{name}", {"id": "STRING", "type_name": "STRING"})
    ingested = Lake(lake.files.address, steps=f"{STEPS}/{name}", tables=(table,))
    rows = ingested.arrow(table, ["id", "type_name"], ds.field("type_name").is_valid())
    return rows if rows.num_rows else None


def to_deliveries(rows: Any, types: Any = None) -> list[Delivery]:
    """Return rows of an Arrow table as deliveries, with the types of their messages from `read_types`."""
    columns = [rows.column(name).to_pylist() for name in RECORDED]
    if types is not None:
        places = pc.index_in(rows.column("message_id"), value_set=types.column("id").combine_chunks())
        columns.append(types.column("type_name").take(places).to_pylist())
    return [Delivery(*row) for row in zip(*columns, strict=True)]


def read_history(lake: Lake, window: Window, policy: PolicyRecord) -> History:
    """Return the history of a queue in a window."""
    known = lake.state.seen
    if window.queue not in known:
        raise InvalidInput(
            f"the lake {lake.files.address} has no queue {window.queue}; it has {_names(known)}: run "
            "`waypost pipeline run` first"
        )
    deliveries = to_deliveries(read_deliveries(lake, window), read_types(lake, window.queue))
    now = max((row.ended_ms for row in deliveries), default=0)
    return build_history(
        window.queue, deliveries, policy=policy, pauses=read_pauses(lake, window),
        never_claimed_ms=read_never_claimed(lake, window.queue, now),
    )  # fmt: skip


def _names(known: Mapping[str, object]) -> str:
    names = sorted(known)
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none"
