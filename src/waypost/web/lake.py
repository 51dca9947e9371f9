"""What a lake knows of a message that its store has forgotten: its events, read from the table of the journal.

`waypost pipeline run` keeps journals as Delta tables in a folder or a bucket. Reading them needs `deltalake` and
`pyarrow` (the extra `spark`), but no Spark.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from waypost.errors import ConfigurationError, MissingExtra
from waypost.identity import id_time_ms
from waypost.times import to_datetime
from waypost.web.figures import HistoryEvent
from waypost.web.problems import Problem

#: The table of the journal in a lake.
JOURNAL = "bronze/journal"
COLUMNS = (
    "queue", "number", "at_ms", "event", "token", "deliveries", "worker", "due_ms", "cause", "reason", "error_type",
    "chain_id",
)  # fmt: skip
#: How long one search may read; a lake may have very many files.
LAKE_SECONDS = 5.0
#: An id has the time of the publisher's clock: events may be earlier by the store's clock.
CLOCKS_DIFFER_MS = 86_400_000


async def read_history(lake: str, id: str) -> dict[str, list[HistoryEvent]]:
    """The events of a message by queue, in order; empty if the lake has none, or there is no lake yet.

    Raises a `Problem` if the lake cannot be read, or not in time.
    """
    return await asyncio.to_thread(_read, lake, id)


def check_lake(lake: str) -> str:
    """Return the place of a lake, or raise `ConfigurationError`, `MissingExtra`."""
    if not isinstance(lake, str) or not lake:
        raise ConfigurationError(f"a lake is a folder or a URI, as in s3://bucket/lake, not {lake!r}")
    if "@" in lake.partition("://")[2].partition("/")[0]:
        raise ConfigurationError("the URI of a lake must not hold keys: set them in the environment")
    try:
        import deltalake  # noqa: F401
        import pyarrow.dataset  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(f'a lake needs {error.name}, which is not installed: pip install "waypost[spark]"') from None
    return lake


def _read(lake: str, id: str) -> dict[str, list[HistoryEvent]]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError
    from pyarrow import ArrowException, dataset

    until = time.monotonic() + LAKE_SECONDS
    wanted = (dataset.field("message_id") == id) & (dataset.field("at_ms") >= id_time_ms(id) - CLOCKS_DIFFER_MS)
    rows: list[dict[str, Any]] = []
    try:
        table = DeltaTable(f"{lake.rstrip('/')}/{JOURNAL}").to_pyarrow_dataset()
        columns = [name for name in COLUMNS if name in table.schema.names]
        for fragment in table.get_fragments(filter=wanted):
            if time.monotonic() > until:
                raise Problem(504, "lake-slow", f"the lake was searched for {LAKE_SECONDS:.0f} seconds, and has more")
            rows += fragment.to_table(schema=table.schema, columns=columns, filter=wanted).to_pylist()
    except TableNotFoundError:
        return {}
    except (DeltaError, ArrowException, OSError) as error:
        # The error of a library may name the place with its keys.
        raise Problem(502, "lake-unreadable", f"the lake cannot be read ({type(error).__name__})") from None
    found: dict[str, list[HistoryEvent]] = {}
    for row in sorted(rows, key=lambda row: (row["queue"], row["number"])):
        found.setdefault(row["queue"], []).append(_event(row))
    return found


def _event(row: dict[str, Any]) -> HistoryEvent:
    return HistoryEvent(
        to_datetime(row["at_ms"]), row["event"], to_datetime(row["due_ms"]), row["cause"], row["reason"],
        row["error_type"], row["worker"], row["token"], row["deliveries"], None, row["chain_id"],
    )  # fmt: skip
