"""What a report shows, read: the gold tables of a lake and the verdict of its audit. Needs pyarrow only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waypost.errors import InvalidInput, MissingExtra

#: What happened to messages, counted by queue and minute.
COUNTS = (
    "published", "duplicates", "replaced", "extended", "promoted", "claimed", "done", "retried", "snoozed", "released",
    "expired", "dead", "dropped", "cancelled", "redriven", "woken",
)  # fmt: skip
#: What is measured of a delivery: how long it waited, how long it ran, how late a timer was.
MEASURES = ("wait", "run", "late")
TABLES: Mapping[str, tuple[str, ...]] = {
    "minutes": ("queue", "minute", *COUNTS),
    "histograms": ("queue", "minute", "measure", "bucket", "count"),
    "redeliveries": ("queue", "minute", "cause", "count"),
    "dead_letters": ("queue", "minute", "reason", "count"),
}
MINUTE_MS = 60_000
#: A message id that the audit could not account for; a page lists no more of them.
LISTED_MAX = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the audit said. `not_seen` are events that were trimmed before anybody read them: never called lost."""

    published: int
    accounted: int
    unaccounted: int
    listed: tuple[str, ...]
    not_seen: int
    unexplained: int
    at: str

    @property
    def clean(self) -> bool:
        """Whether nothing is missing and nothing is unexplained."""
        return self.unaccounted == 0 and self.unexplained == 0

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


def read(lake: str | Path) -> Gold:
    """The gold tables of a lake."""
    lake = Path(lake)
    if not (lake / "gold" / "minutes").exists():
        raise InvalidInput(f"there is no gold/minutes in {lake}: run `waypost pipeline run` with --lake {lake} first")
    return Gold({name: _table(lake / "gold" / name, columns) for name, columns in TABLES.items()}, _verdict(lake))


def _table(path: Path, columns: Sequence[str]) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.compute as compute
        import pyarrow.dataset as dataset
    except ImportError:
        raise MissingExtra('a report reads Parquet: pip install "waypost[spark]"') from None
    types = {"minute": pa.timestamp("ms", "UTC"), "queue": pa.string(), "measure": pa.string(), "cause": pa.string(),
             "reason": pa.string()}  # fmt: skip
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in columns])
    # A table that nothing was ever written to is empty: a queue without dead letters has no files of them.
    if not path.exists() or not any(path.rglob("*.parquet")):
        table = schema.empty_table()
    else:
        try:
            found = dataset.dataset(path, format="parquet", partitioning="hive")
            missing = [name for name in columns if name not in found.schema.names]
            if missing:
                raise InvalidInput(f"{path} has no column {', '.join(missing)}: is it a table of waypost's pipeline?")
            table = found.to_table(columns=list(columns)).cast(schema)
        except pa.ArrowException as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from error
    at = compute.cast(table["minute"], pa.int64())
    table = table.drop_columns(["minute"]).append_column("at_ms", at)
    return table.filter(compute.and_(compute.is_valid(table["queue"]), compute.is_valid(table["at_ms"])))


def _verdict(lake: Path) -> Verdict | None:
    path = lake / "audit.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        unaccounted, unexplained = told["unaccounted"], told["duplicates_unexplained"]
        return Verdict(
            published=int(told["published"]),
            accounted=int(told["accounted"]),
            unaccounted=_amount(unaccounted),
            listed=tuple(_named(one) for one in unaccounted[:LISTED_MAX]) if isinstance(unaccounted, list) else (),
            not_seen=_amount(told.get("not_seen", 0)),
            unexplained=_amount(unexplained),
            at=str(told.get("at", "")),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is not what `waypost pipeline audit` writes: {error!r}") from error


def _amount(told: Any) -> int:
    """A number that is told as such, or as the list of what is counted."""
    return len(told) if isinstance(told, list | dict) else int(told)


def _named(one: Any) -> str:
    if isinstance(one, dict):
        return " ".join(str(value) for value in one.values() if value is not None)
    return str(one)
