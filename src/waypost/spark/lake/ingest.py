"""Ingest: the messages of a queue as a table, parsed by a schema. Nothing is consumed: they are read from the journal.

    DIR/messages/orders/            parsed, in the column `value`
    DIR/messages_corrupt/orders/    what the schema does not fit, as it came

The queue must journal bodies (`journal="full"`). A batch is one step (see `lake`), so it is in the tables once however
often it is run; each message id is in the tables once. A schema may gain fields, which are null in older rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from waypost.checks import check_queue
from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.spark.delta.compaction import FILES_MAX, merge_small_files
from waypost.spark.delta.data_source import TO, Target, write_frame
from waypost.spark.delta.schemas import compare_schemas, format_fields, format_type, make_delta_schema
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.files import join_path, open_lake_files
from waypost.spark.lake.journal import check_batch_rows, check_offsets, plan_ranges
from waypost.spark.lake.lake import OLD_FOLDER, Lake, Source, retry_conflicts
from waypost.spark.lake.pipeline import VACUUM_EVERY_MS, ignore_progress, make_source
from waypost.spark.lake.tables import LakeTable
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.stream import admit
from waypost.spark.source.tables import PUBLISHED
from waypost.spark.spark_errors import map_spark_error

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Where the steps of each queue are.
STEPS: Final = "_ingest"
#: Messages of one batch: bodies may be large.
BATCH_ROWS: Final = 100_000
#: Where Spark puts what it cannot parse; no field of a schema should have this name.
CORRUPT: Final = "_waypost_corrupt"
PARSED: Final = "_waypost_parsed"
STATISTICS: Final = ("number", "id", "published_ms")
#: What every row has beside its value.
ABOUT: Final = {name: kind for name, kind in PUBLISHED.columns.items() if name not in ("body", "text")}


def read_schema(text: str) -> StructType:
    """A schema from a DDL string (`id BIGINT, name STRING`) or from a file that holds one as JSON."""
    try:
        if text.endswith(".json"):
            return StructType.fromJson(json.loads(Path(text).read_text(encoding="utf-8")))
        found = StructType.fromDDL(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the schema file {text} cannot be used: {error}") from None
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"{text!r} is no schema: give columns as id BIGINT, name STRING, or the name of a .json file. {first}"
        ) from None
    if not isinstance(found, StructType):
        raise ConfigurationError(f"{text!r} is one type, not columns: give them as id BIGINT, name STRING")
    return found


def folder_of(queue: str) -> str:
    """Return the folder of a queue's messages. A queue name may have a colon, which Spark's paths may not."""
    return check_queue(queue).replace(":", "+")


def rows_table(queue: str, schema: StructType | None) -> LakeTable:
    """The table of messages: with their value, or as they came if there is no schema."""
    if schema is None:
        return _table(f"messages/{folder_of(queue)}", {**ABOUT, "body": "BINARY", "text": "STRING"})
    return _table(f"messages/{folder_of(queue)}", {**ABOUT, "value": format_type(schema)})


def corrupt_table(queue: str) -> LakeTable:
    """The table of messages that the schema does not fit."""
    return _table(f"messages_corrupt/{folder_of(queue)}", {**ABOUT, "body": "BINARY", "text": "STRING"})


def refuse_old_messages(root: str, queue: str) -> None:
    """Refuse messages that release 0.1 loaded and that are not converted."""
    files, name = open_lake_files(root), folder_of(queue)
    if files.exists(f"{OLD_FOLDER}/ingest-{name}.json"):
        raise StoreError(
            f"messages of queue {queue} were loaded into the lake {files.address} by release 0.1 of waypost: convert "
            f"them once, with `waypost pipeline upgrade --lake {files.address}`"
        )


def _table(name: str, columns: dict[str, str]) -> LakeTable:
    ddl = ", ".join(f"`{column}` {kind}" for column, kind in columns.items())
    schema = make_delta_schema(StructType.fromDDL(ddl))
    return LakeTable(name, columns, statistics=STATISTICS, schema_json=schema.to_json())


def parse_messages(messages: DataFrame, schema: StructType | None) -> DataFrame:
    """Messages with their value and with the table that they belong to. One row for each id."""
    messages = messages.dropDuplicates(["queue", "id"])
    if schema is None:
        return messages.withColumn(TO, f.lit("rows"))
    whole = StructType([*schema.fields, StructField(CORRUPT, StringType())])
    value: Column = f.from_json("text", whole, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT})
    is_row = f.col(TO) == "rows"
    fits = f.col(PARSED).isNotNull() & f.col(f"{PARSED}.{CORRUPT}").isNull()
    return (
        messages.withColumn(PARSED, value)
        .withColumn(TO, f.when(fits, "rows").otherwise("corrupt"))
        .withColumn("value", f.when(is_row, f.col(PARSED).dropFields(CORRUPT)))
        .drop(PARSED)
    )


class Ingest:
    """The messages of one queue, and the lake that they go into."""

    def __init__(
        self,
        spark: SparkSession,
        lake: str,
        queue: str,
        *,
        store: str | None = None,
        store_env: str | None = None,
        namespace: str = "wp",
        schema: StructType | None = None,
        batch_rows: int = BATCH_ROWS,
        allow_gaps: bool = False,
        progress: Callable[[str], None] = ignore_progress,
    ) -> None:
        self.spark, self.queue, self.schema = spark, queue, schema
        refuse_old_messages(lake, queue)
        self.table, self.aside = rows_table(queue, schema), corrupt_table(queue)
        self.lake = Lake(lake, steps=f"{STEPS}/{folder_of(queue)}", tables=(self.table, self.aside))
        self.batch_rows, self.allow_gaps, self.progress = check_batch_rows(batch_rows), allow_gaps, progress
        known = self.lake.state.source
        if store is None and store_env is None:
            if known is None:
                raise ConfigurationError(f"nothing of queue {queue} is in the lake {lake}: give its store with --store")
            self.source: Source = known
        else:
            self.source = make_source(store, store_env, namespace, (queue,))
        self._schema_text = None if schema is None else format_fields(schema)
        if known is not None and (self.lake.state.schema is None) != (schema is None):
            raise ConfigurationError(
                f"messages of {queue} are in the lake {'with' if schema is None else 'without'} a schema: give "
                f"{self.lake.state.schema or 'none'}, or load them into a new lake"
            )
        if self.lake.step:
            self._new_columns()

    def _new_columns(self) -> list[str]:
        """Return the columns that the table lacks, or that have fields it lacks; refuse a schema that does not fit."""
        folder = self.lake.steps.folder(self.table.name)
        if not folder.exists():
            return []
        try:
            new, missing = compare_schemas(folder.open().schema(), self.table.delta_schema(), self.table.name)
        except InvalidInput as error:
            raise ConfigurationError(
                f"the schema does not fit the messages of {self.queue} in the lake: {error}"
            ) from None
        if missing:
            raise ConfigurationError(
                f"the schema lacks {', '.join(missing)}, which messages of {self.queue} in the lake have: a schema may "
                f"gain fields, not lose them. It was {self.lake.state.schema}"
            )
        return new

    def _create(self) -> None:
        """Create the tables, or add the fields that are new in the schema."""
        folder = self.lake.steps.folder(self.table.name)
        try:
            self.lake.create()
            self._add_columns()
        except ConfigurationError:
            # A first run that failed created the table and loaded nothing.
            self.lake.refresh(to_write=True)
            if self.lake.step or not folder.remove_unused():
                raise
            folder.create(self.table.delta_schema(), statistics=self.table.statistics)

    def _add_columns(self) -> None:
        """Add the fields that the table lacks."""
        names = set(self._new_columns())
        if names:
            given = pa.schema(self.table.delta_schema().to_arrow())
            columns = {name: given.field(name).type for name in given.names if name in names}
            self.lake.steps.folder(self.table.name).add_columns(columns)

    @property
    def place(self) -> Place:
        """Where the store is."""
        return Place(url=self.source.url, url_env=self.source.url_env, namespace=self.source.namespace)

    def options(self) -> dict[str, str]:
        """The options of the source."""
        place = {"url": self.source.url} if self.source.url is not None else {"urlEnv": self.source.url_env or ""}
        return {
            **place,
            "namespace": self.source.namespace,
            "queue": self.queue,
            "kind": "messages",
            "failOnDataLoss": "false" if self.allow_gaps else "true",
        }

    def run(self) -> int:
        """Add the messages of the journal to the table; return the number of rows in it."""
        with open_bulk(self.place) as bulk:
            self._create()
            self.lake.refresh(to_write=True)
            ends = {self.queue: bulk.bounds(self.queue)[1]}
            check_offsets(self.lake.state.offsets, ends)
            while True:
                offsets = self.lake.state.offsets
                to = admit(offsets, ends, self.batch_rows)
                if to[self.queue] <= offsets.get(self.queue, 0):
                    break
                try:
                    self._step(bulk, to)
                except StepConflict:
                    self.lake.refresh(to_write=True)
                except Exception as error:
                    raise map_spark_error(error) from error
        self._maintain()
        return self.rows().count()

    def _maintain(self) -> None:
        """Keep the number of files within bounds, and once a day delete those that are in no table."""
        now = time.time_ns() // 1_000_000
        # In the future if the clock was ahead then.
        is_late = abs(now - self.lake.state.vacuumed_ms) > VACUUM_EVERY_MS
        try:
            merge_messages(self.lake)
            if is_late:
                self.lake.vacuum()
        except StepConflict:
            # Another process loads messages of this queue; its own run, or the next one, does it.
            self.lake.refresh(to_write=True)

    def _step(self, bulk: Bulk, to: dict[str, int]) -> None:
        """Load the messages up to an offset, as one step."""
        lake = self.lake
        ranges = plan_ranges(bulk, lake.state.offsets, to, fail=not self.allow_gaps)
        changes = {}
        if ranges:
            offsets = {one.queue: (one.after, one.to) for one in ranges}
            read = self.spark.read.format("waypost").options(**self.options())
            messages = read.option("offsets", msgspec.json.encode(offsets).decode()).load()
            targets = {
                "rows": Target(self.table.name, tuple(self.table.columns), self.table.statistics),
                "corrupt": Target(self.aside.name, tuple(self.aside.columns), self.aside.statistics),
            }
            made = write_frame(self._without_known(messages), lake.files, targets)
            changes = {targets[name].table: Change(tuple(files)) for name, files in made.items()}
        try:
            # Another process may have created the table anew, or loaded messages with another schema.
            self._add_columns()
        except ConfigurationError:
            for name, change in changes.items():
                for file in change.add:
                    lake.files.remove_file(join_path(name, file.path))
            raise
        state = msgspec.structs.replace(
            lake.state, source=self.source, schema=self._schema_text, offsets={**lake.state.offsets, **to}
        )
        lake.commit("ingest", changes, state)
        self.progress(f"messages of queue {self.queue} up to event {to[self.queue]:,} are in the lake")

    def _without_known(self, messages: DataFrame) -> DataFrame:
        """Return parsed messages without those that are in the tables already: sent again after their first arrival."""
        fresh = parse_messages(messages, self.schema)
        bounds = messages.agg(f.min("id"), f.max("id")).first()
        if bounds is None or bounds[0] is None:
            return fresh
        for table in (self.table, self.aside):
            # Ids grow with time, so few files can have one of these.
            files = [file for file in self.lake.data_files(table) if file.may_hold("id", bounds[0], bounds[1])]
            if files:
                known = self.lake.frame(self.spark, table, files).select("queue", "id")
                there = known.join(f.broadcast(messages.select("queue", "id").distinct()), ["queue", "id"])
                fresh = fresh.join(f.broadcast(there.distinct()), ["queue", "id"], "left_anti")
        return fresh

    def rows(self) -> DataFrame:
        """The messages."""
        return self.lake.frame(self.spark, self.table)

    def corrupt(self) -> DataFrame:
        """The messages that the schema does not fit, with their bodies."""
        return self.lake.frame(self.spark, self.aside)


def merge_messages(lake: Lake, more_than: int = FILES_MAX) -> int:
    """Merge small files of ingested messages, as one step; return by how many files there are fewer."""
    changes: dict[str, Change] = {}
    for table in lake.tables:
        if data := lake.data_files(table):
            change = merge_small_files(lake.files, table.name, data, lake.schema(table), STATISTICS, more_than)
            if change:
                changes[table.name] = change
    if changes:
        lake.commit_beside_others("compact", changes, lambda state: state)
    return sum(len(change.remove) - len(change.add) for change in changes.values())


def has_ingested(root: str) -> bool:
    """Return whether messages were ingested into a lake."""
    return bool(open_lake_files(root).folders(STEPS))


def open_ingested(root: str) -> Iterator[Lake]:
    """Yield the messages of each queue that was ingested into a lake."""
    for name in open_lake_files(root).folders(STEPS):
        tables = [LakeTable(f"{folder}/{name}", {}, STATISTICS) for folder in ("messages", "messages_corrupt")]
        lake = Lake(root, steps=f"{STEPS}/{name}", tables=tables)
        lake.refresh(to_write=True)
        yield lake


def tidy_messages(root: str, progress: Callable[[str], None]) -> None:
    """Merge all small files of ingested messages, and delete files that are in no table since a day."""
    for lake in open_ingested(root):
        fewer = retry_conflicts(lake, partial(merge_messages, lake, 1))
        deleted = retry_conflicts(lake, lake.vacuum)
        name = lake.tables[0].name
        progress(f"{name}: {fewer} files fewer, deleted {deleted:,} files that are in no table since a day")


def count_messages(ingest: Ingest) -> dict[str, Any]:
    """How many messages of a queue are in the lake, and how many were put aside."""
    return {"queue": ingest.queue, "rows": ingest.rows().count(), "corrupt": ingest.corrupt().count()}
