"""A lake: folders of tables, and one small file that lists the folders of each table.

Every step writes its rows into folders with new names and then replaces the state, which is one file, in one move.
Until then no reader sees what it wrote; the folders of a step that was killed are in no table, and the next run removes
them. So a step is atomic and happens once, however often it is killed and started again.

    DIR/_state/…                                              the state, the stream's checkpoint
    DIR/bronze/journal/batch=00000012-1f3a/date=2026-03-01/   events as they were journalled
    DIR/silver/messages/batch=00000012-77b0/part=closed/…     rows that cannot change any more
    DIR/silver/messages/batch=00000012-77b0/part=open/…       rows that can, written anew by every step
    DIR/gold/minutes/date=2026-03-01/rows.parquet             one file a day, replaced in one move
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waypost.errors import ConfigurationError, StoreError
from waypost.spark.files import ExclusiveLock, open_lake_files
from waypost.store.bulk.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LAYOUT = 1
#: What bronze and silver may be written as. Gold is Parquet, to be read without Spark.
FORMATS = ("parquet", "orc")
STATE = "_state/pipeline.json"
CHECKPOINT = "_state/checkpoint"
#: The columns by which files lie in folders.
DATE, PART = "date", "part"


class Folder(msgspec.Struct, frozen=True):
    """A folder of a table: its path below the table, the batches that are in it, and the newest day of its rows."""

    path: str
    first: int
    last: int
    newest: str = ""


class Seen(msgspec.Struct, frozen=True):
    """What the lake has of one queue's journal. Numbers begin with 1, so every one that is missing was not seen."""

    events: int = 0
    newest: int = 0
    #: The number of the newest event that was missing, and of the newest that changed how much is journalled.
    gap_end: int = 0
    level_end: int = 0
    #: How many events of each kind.
    counts: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def not_seen(self) -> int:
        """How many events were trimmed from the journal before they were read."""
        return self.newest - self.events


class Source(msgspec.Struct, frozen=True):
    """Where the events come from; secrets are named here, never written."""

    url: str | None = None
    url_env: str | None = None
    namespace: str = "wp"
    queues: tuple[str, ...] | None = None


class State(msgspec.Struct, frozen=True):
    """What the lake is made of, and how far each step has come."""

    layout: int = LAYOUT
    format: str = "parquet"
    source: Source | None = None
    #: What bodies are parsed by, in a table of messages.
    schema: str | None = None
    #: The newest batch of the stream that is in bronze, and the newest that is in silver.
    bronze_batch: int = -1
    silver_batch: int = -1
    #: By table, the folders whose rows are final, and those that the next step replaces.
    tables: dict[str, tuple[Folder, ...]] = msgspec.field(default_factory=dict)
    open: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    seen: dict[str, Seen] = msgspec.field(default_factory=dict)
    #: Days whose sums have changed since gold was made of them.
    stale_days: tuple[str, ...] = ()

    def folders(self, table: Table) -> tuple[Folder, ...]:
        """The folders of a table with rows that are final."""
        return self.tables.get(table.name, ())

    def paths(self, table: Table) -> set[str]:
        """Every folder, or part of one, that a table is made of."""
        return {folder.path for folder in self.folders(table)} | set(self.open.get(table.name, ()))


class Lake:
    """A lake at one place."""

    def __init__(self, root: str, *, format: str | None = None, state_file: str = STATE) -> None:
        self.files = open_lake_files(root)
        self._state_file = state_file
        content = self.files.read(state_file)
        self.state = State(format=format or "parquet") if content is None else self._decode_state(content)
        if self.state.format not in FORMATS:
            raise ConfigurationError(f"tables of a lake are {' or '.join(FORMATS)}, not {self.state.format}")
        if format is not None and format != self.state.format:
            raise ConfigurationError(f"the lake {root} has its tables as {self.state.format}, not as {format}")

    def _decode_state(self, content: bytes) -> State:
        try:
            state = msgspec.json.decode(content, type=State)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{self.files.path(self._state_file)} is not the state of a lake: {error}") from None
        if state.layout > LAYOUT:
            raise StoreError(f"the lake {self.files.root} was made by a newer release of waypost: update this one")
        return state

    def lock(self) -> ExclusiveLock:
        """A context in which no other process changes this lake."""
        return ExclusiveLock(self.files, self._state_file.removesuffix(".json") + ".lock")

    def commit(self, state: State) -> None:
        """Make what was written part of the lake."""
        self.files.replace(self._state_file, msgspec.json.format(msgspec.json.encode(state), indent=1))
        self.state = state

    # ---- tables that Spark writes ------------------------------------------------------------------------------

    def frame(self, spark: SparkSession, table: Table, paths: Iterable[str] | None = None) -> DataFrame:
        """A table as it stands: its final rows and those that may change; or only some of its folders."""
        if paths is None:
            paths = [folder.path for folder in self.state.folders(table)] + list(self.state.open.get(table.name, ()))
        places = [self.files.uri(f"{table.name}/{path}") for path in paths]
        if not places:
            return spark.createDataFrame([], table.ddl)
        reader = spark.read.format(self.state.format).schema(table.ddl)
        return reader.option("recursiveFileLookup", "true").load(places)

    def write(self, frame: DataFrame, table: Table, name: str, by: Sequence[str] = (DATE,)) -> str:
        """Write rows into a new folder, which is in no table yet; return its name."""
        folder = f"batch={name}-{os.urandom(4).hex()}"
        writer = frame.write.format(self.state.format).mode("errorifexists")
        if self.state.format == "parquet":
            writer = writer.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1")
        writer.partitionBy(*by).save(self.files.uri(f"{table.name}/{folder}"))
        return folder

    def remove_unreferenced(self, tables: Iterable[Table]) -> int:
        """Remove folders that are in no table, of killed steps and replaced ones; return how many."""
        removed = 0
        for table in tables:
            named = self.state.paths(table)
            of_parts = {path.partition("/")[0] for path in named if "/" in path}
            for folder in self.files.folders(table.name):
                if not folder.startswith("batch=") or folder in named:
                    continue
                parts = [folder]
                if folder in of_parts:
                    parts = [f"{folder}/{part}" for part in self.files.folders(f"{table.name}/{folder}")]
                for path in parts:
                    if path not in named:
                        self.files.remove(f"{table.name}/{path}")
                        removed += 1
        return removed

    # ---- tables of gold ----------------------------------------------------------------------------------------

    def replace_days(self, table: Table, rows: Any, days: Iterable[str]) -> None:
        """Replace the files of some days; `rows` is an Arrow table with a timestamp `minute`."""
        of_rows = pc.strftime(rows.column("minute"), "%Y-%m-%d")
        for day in days:
            sink = pa.BufferOutputStream()
            pq.write_table(rows.filter(pc.equal(of_rows, day)), sink, compression="zstd")
            self.files.replace(f"{table.name}/{DATE}={day}/rows.parquet", sink.getvalue().to_pybytes())

    def rows(self, table: Table) -> Any:
        """A table of gold as an Arrow table, in no order; Spark is not needed for it."""
        schema = table.arrow(table.columns)
        found = []
        for day in self.files.folders(table.name):
            # Read whole at once: a run beside this one replaces files, and makes a folder before the file in it.
            content = self.files.read(f"{table.name}/{day}/rows.parquet")
            if content is not None:
                found.append(pq.read_table(pa.BufferReader(content)).cast(schema))
        return pa.concat_tables(found) if found else schema.empty_table()
