"""Ingest: the messages of a queue as a table, parsed by a schema. Nothing is consumed: they are read from the journal.

    DIR/messages/orders/batch=00000012-1f3a/part=rows/date=2026-03-01/     parsed, in the column `value`
    DIR/messages/orders/batch=00000012-1f3a/part=corrupt/date=2026-03-01/  what the schema does not fit, as it came

The queue must journal bodies (`journal="full"`). A batch is written under a new name and then made part of the table in
one move, so it is in the table once however often Spark runs it; each message id is in the table once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from waypost.checks import check_queue
from waypost.errors import ConfigurationError, StoreError
from waypost.spark.lake.bronze import batch_name
from waypost.spark.lake.lake import DATE, PART, Folder, Lake, State
from waypost.spark.lake.pipeline import ignore_progress, make_source, run_stream
from waypost.spark.lake.silver import day_of
from waypost.spark.source.tables import PUBLISHED
from waypost.store.bulk.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Messages of one batch: bodies may be large.
BATCH_ROWS: Final = 100_000
#: Where Spark puts what it cannot parse; no field of a schema should have this name.
CORRUPT: Final = "_waypost_corrupt"
PARSED: Final = "_waypost_parsed"
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
    return f"messages/{check_queue(queue).replace(':', '+')}"


def rows_table(queue: str, schema: StructType | None) -> Table:
    """The table of messages: with their value, or as they came if there is no schema."""
    if schema is None:
        return Table(folder_of(queue), {**ABOUT, "body": "BINARY", "text": "STRING"})
    return Table(folder_of(queue), {**ABOUT, "value": schema.simpleString()})


def corrupt_table(queue: str) -> Table:
    """The table of messages that the schema does not fit."""
    return Table(folder_of(queue), {**ABOUT, "body": "BINARY", "text": "STRING"})


def parse_messages(messages: DataFrame, schema: StructType | None) -> DataFrame:
    """Messages with their value and with the part of the table that they belong to. One row for each id."""
    messages = messages.dropDuplicates(["queue", "id"])
    day = day_of(f.col("published_ms"))
    if schema is None:
        return messages.withColumn(PART, f.lit("rows")).withColumn(DATE, day)
    whole = StructType([*schema.fields, StructField(CORRUPT, StringType())])
    value: Column = f.from_json("text", whole, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT})
    is_row = f.col(PART) == "rows"
    fits = f.col(PARSED).isNotNull() & f.col(f"{PARSED}.{CORRUPT}").isNull()
    return (
        messages.withColumn(PARSED, value)
        .withColumn(PART, f.when(fits, "rows").otherwise("corrupt"))
        .withColumn("value", f.when(is_row, f.col(PARSED).dropFields(CORRUPT)))
        # A message is kept in one form: as its value, or as it came.
        .withColumn("body", f.when(~is_row, f.col("body")))
        .withColumn("text", f.when(~is_row, f.col("text")))
        .withColumn(DATE, day)
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
        name = folder_of(queue).rpartition("/")[2]
        self.spark, self.queue, self.schema = spark, queue, schema
        self.lake = Lake(lake, state_file=f"_state/ingest-{name}.json")
        self.checkpoint = f"_state/ingest-{name}"
        self.batch_rows, self.allow_gaps, self.progress = batch_rows, allow_gaps, progress
        self.table = rows_table(queue, schema)
        known = self.lake.state.source
        if store is None and store_env is None and known is None:
            raise ConfigurationError(f"nothing of queue {queue} is in the lake {lake}: give its store with --store")
        self.source = known if store is None and store_env is None else None
        self.source = self.source or make_source(store, store_env, namespace, (queue,))
        schema_text = None if schema is None else schema.simpleString()
        if known is not None and self.lake.state.schema != schema_text:
            raise ConfigurationError(
                f"messages of {queue} are in the lake with the schema {self.lake.state.schema}, not {schema_text}: "
                "give the same one, or take them into a new lake"
            )
        self._start: State = msgspec.structs.replace(self.lake.state, source=self.source, schema=schema_text)

    def options(self) -> dict[str, str]:
        """The options of the source."""
        assert self.source is not None
        place = {"url": self.source.url} if self.source.url is not None else {"urlEnv": self.source.url_env or ""}
        return {
            **place,
            "namespace": self.source.namespace,
            "queue": self.queue,
            "kind": "messages",
            "maxRowsPerBatch": str(self.batch_rows),
            "failOnDataLoss": "false" if self.allow_gaps else "true",
        }

    def run(self) -> int:
        """Add the messages of the journal to the table; return the number of rows in it."""
        with self.lake.lock():
            if self.lake.state != self._start:
                self.lake.commit(self._start)
            self.lake.remove_unreferenced([self.table])
            if self.lake.state.bronze_batch >= 0 and not self.lake.files.exists(self.checkpoint):
                raise StoreError(
                    f"the checkpoint {self.checkpoint} of the lake is gone: restore it, or begin a new lake"
                )
            stream = self.spark.readStream.format("waypost").options(**self.options()).load()
            writer = stream.writeStream.foreachBatch(self.write_batch)
            writer = writer.option("checkpointLocation", self.lake.files.uri(self.checkpoint))
            run_stream(lambda: writer.trigger(availableNow=True).start())
        return self.rows().count()

    def write_batch(self, messages: DataFrame, batch: int) -> None:
        """One batch of the stream."""
        lake = self.lake
        if batch <= lake.state.bronze_batch:
            return
        spark = messages.sparkSession
        fresh = parse_messages(messages, self.schema)
        paths = [folder.path for folder in lake.state.folders(self.table)]
        if paths:
            # Few ids if any: those of messages that were sent again long after their first arrival.
            ids = messages.select("queue", "id").distinct()
            there = lake.frame(spark, self.table, paths).select("queue", "id").join(f.broadcast(ids), ["queue", "id"])
            fresh = fresh.join(f.broadcast(there.distinct()), ["queue", "id"], "left_anti")
        wanted = dict.fromkeys((*self.table.columns, "body", "text", PART, DATE))
        folder = lake.write(fresh.select(*wanted), self.table, batch_name(batch), (PART, DATE))
        made = []
        for part in ("rows", "corrupt"):
            path = f"{folder}/{PART}={part}"
            if lake.files.has_rows(f"{self.table.name}/{path}"):
                newest = max(lake.files.folders(f"{self.table.name}/{path}")).removeprefix(f"{DATE}=")
                made.append(Folder(path, batch, batch, newest))
        tables = {self.table.name: (*lake.state.folders(self.table), *made)}
        lake.commit(msgspec.structs.replace(lake.state, bronze_batch=batch, tables=tables))
        self.progress(f"batch {batch} of queue {self.queue} is in the lake")

    def _part(self, table: Table, part: str) -> DataFrame:
        folders = self.lake.state.folders(table)
        paths = [folder.path for folder in folders if folder.path.endswith(f"{PART}={part}")]
        return self.lake.frame(self.spark, table, paths)

    def rows(self) -> DataFrame:
        """The messages."""
        return self._part(self.table, "rows")

    def corrupt(self) -> DataFrame:
        """The messages that the schema does not fit, with their bodies."""
        return self._part(corrupt_table(self.queue), "corrupt")


def count_messages(ingest: Ingest) -> dict[str, Any]:
    """How many messages of a queue are in the lake, and how many were put aside."""
    return {"queue": ingest.queue, "rows": ingest.rows().count(), "corrupt": ingest.corrupt().count()}
