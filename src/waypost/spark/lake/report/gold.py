"""What a report shows, read: the gold tables of a lake and the verdict of its audit. Needs pyarrow only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waypost.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from waypost.spark.lake.lake import Lake

MINUTE_MS = 60_000
#: Messages that the audit could not account for; a page lists no more of them.
LISTED_MAX = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the audit. `not_seen` are events that were trimmed before they were read: never called lost."""

    published: int
    unaccounted: int
    #: Claims or ends that nothing explains.
    unexplained: int
    #: Changes that the journal has beyond what the store has counted.
    overcounted: int
    #: Messages whose end may be among the events not seen.
    undecided: int
    not_seen: int
    listed: tuple[str, ...]
    at_ms: int
    #: There were too many findings to count them all.
    at_least: bool
    #: Messages in the store that no event explains.
    unrecorded: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is missing, unexplained or unrecorded."""
        return self.unaccounted == self.unexplained == self.overcounted == self.unrecorded == 0

    @property
    def whole(self) -> bool:
        """Whether the audit could see everything."""
        return self.not_seen == 0


@dataclass(frozen=True, slots=True)
class Gold:
    """The tables as Arrow has them, each with its minute as `at_ms`, and the audit if there was one."""

    tables: Mapping[str, Any]
    verdict: Verdict | None

    @property
    def span_ms(self) -> tuple[int, int] | None:
        """The first and the last minute that anything is known of."""
        import pyarrow.compute as compute

        found = [compute.min_max(table["at_ms"]).as_py() for table in self.tables.values() if table.num_rows]
        if not found:
            return None
        return min(pair["min"] for pair in found), max(pair["max"] for pair in found)

    def grouped(self, name: str, step_ms: int, by: Sequence[str], counts: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of a table added up by queue, step of time and more columns, in their order."""
        import pyarrow as pa
        import pyarrow.compute as compute

        table = self.tables[name]
        if table.num_rows == 0:
            return []
        step = pa.scalar(step_ms, pa.int64())
        at = compute.multiply(compute.divide(table["at_ms"], step), step)
        keys = ["queue", "at_ms", *by]
        table = table.set_column(table.schema.get_field_index("at_ms"), "at_ms", at)
        added = table.group_by(keys, use_threads=False).aggregate([(count, "sum") for count in counts])
        rows: list[dict[str, Any]] = added.sort_by([(key, "ascending") for key in keys]).to_pylist()
        return [{key: row[key] for key in keys} | {count: row[f"{count}_sum"] or 0 for count in counts} for row in rows]


def open_lake(place: str) -> Lake:
    """The lake at a place."""
    try:
        from waypost.spark.lake.lake import Lake
    except ImportError:
        raise MissingExtra('a report reads Parquet: pip install "waypost[spark]"') from None
    lake = Lake(place)
    if not lake.files.exists("gold/minutes"):
        raise InvalidInput(f"there is no gold/minutes in {place}: run `waypost pipeline run` with --lake {place} first")
    return lake


def read(lake: Lake) -> Gold:
    """The gold tables of a lake."""
    import pyarrow as pa
    import pyarrow.compute as compute

    from waypost.spark.lake.tables import GOLD

    tables = {}
    for table in GOLD:
        try:
            rows = lake.rows(table)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise InvalidInput(f"{lake.files.path(table.name)} is not what the pipeline writes: {error}") from error
        at = compute.cast(compute.cast(rows["minute"], pa.timestamp("ms", "UTC")), pa.int64())
        name = table.name.removeprefix("gold/")
        tables[name] = rows.drop_columns(["minute"]).append_column("at_ms", at)
    return Gold(tables, _verdict(lake))


def _verdict(lake: Lake) -> Verdict | None:
    content = lake.files.read("audit.json")
    if content is None:
        return None
    try:
        result = json.loads(content)
        return Verdict(
            published=int(result["published"]),
            unaccounted=int(result["unaccounted_count"]),
            unexplained=int(result["duplicates_unexplained_count"]),
            overcounted=sum(sum(queue["overcounted"].values()) for queue in result["queues"].values()),
            undecided=int(result["undecided"]),
            not_seen=int(result["not_seen"]),
            listed=tuple(
                f"{one['queue']} {one['message_id']}: {one['fault']}"
                for kind in ("unaccounted", "duplicates_unexplained", "unrecorded")
                for one in result.get(kind, ())[:LISTED_MAX]
            ),
            at_ms=int(result["at_ms"]),
            at_least=bool(result["has_more"]),
            # An audit of an older release did not look for these.
            unrecorded=int(result.get("unrecorded_count", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = lake.files.path("audit.json")
        raise InvalidInput(f"{place} is not what `waypost pipeline audit` writes: {error!r}") from error
