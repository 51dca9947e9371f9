"""The plan of a backfill: rows of a DataFrame with their keys, without those that the history has, as files.

The key of a row is the text of its id column, or a JSON list of several. It is the key of the message, so it meets keys
that programs publish with, and the message's id is made from it and the queue.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from waypost.checks import check_queue
from waypost.errors import InvalidInput
from waypost.policy import KEY_CHARACTERS_MAX, check_priority
from waypost.spark.delta.data_source import Target, write_frame
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.tables import KEYS
from waypost.spark.republish.known import Tail, check_history
from waypost.spark.republish.sending import next_number
from waypost.spark.republish.state import Input, Plan, Records
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.tables import WRITTEN
from waypost.spark.source.writer import check_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: The column of a row's key until it is published.
KEY: Final = "key"
#: Columns beside the body that a row may bring.
GIVEN: Final = tuple(name for name in WRITTEN if name not in ("body", KEY))
SAMPLES: Final = 5
TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: the rows, the queue, and what names a row."""

    input: Input
    frame: DataFrame
    priority: int
    is_json: bool
    allow_gaps: bool

    @property
    def queue(self) -> str:
        """The queue that messages are published to."""
        return self.input.to_queue or self.input.queues[0]

    @property
    def all_queues(self) -> list[str]:
        """The queues whose history counts."""
        return sorted({self.queue, *self.input.queues})


class Preview(msgspec.Struct, frozen=True):
    """What a plan would send: counts, and some of the rows."""

    queue: str
    counts: dict[str, int]
    samples: list[dict[str, Any]]


def default_name(given: Input) -> str:
    """Return the name of a backfill by what it is made from: the same for the same command."""
    digest = hashlib.blake2b(msgspec.json.encode(given), digest_size=5).hexdigest()
    queue = (given.to_queue or (given.queues[0] if given.queues else given.kind)).replace(":", "-")
    return f"{queue[:80].lstrip('._-')}-{digest}"


def check_request(request: Request) -> None:
    """Refuse a request that cannot be carried out, before anything is read."""
    for queue in (*request.input.queues, *filter(None, [request.input.to_queue])):
        check_queue(queue)
    check_priority(request.priority)
    if not request.input.ids:
        raise InvalidInput("name the columns that identify a row with --id, such as --id order_id")
    names = request.frame.columns
    for name in request.input.ids:
        if name not in names:
            raise InvalidInput(f"there is no id column {name!r}; the columns are {', '.join(names)}")
        kind = request.frame.schema[name].dataType
        if isinstance(kind, StructType | ArrayType | MapType | VariantType):
            raise InvalidInput(f"id column {name!r} is {kind.simpleString()}: an id is a number, a text or a time")
        if isinstance(kind, FloatType | DoubleType):
            raise InvalidInput(
                f"id column {name!r} is {kind.simpleString()}, whose text is not the same everywhere: cast it to a "
                f'whole number or text, with --from "SELECT CAST({name} AS BIGINT) AS {name}, …"'
            )
    check_columns(rows_of(request).schema)


def key_column(frame: DataFrame, ids: Sequence[str]) -> Column:
    """Return the key of each row: the text of its id, a JSON list of several; null if an id is null."""
    texts = [_text(f.col(_quoted(name)), frame.schema[name].dataType) for name in ids]
    whole = texts[0]
    if len(texts) > 1:
        is_whole = texts[0].isNotNull()
        for text in texts[1:]:
            is_whole = is_whole & text.isNotNull()
        whole = f.when(is_whole, f.to_json(f.array(*texts)))
    long = f.concat(f.lit("sha256:"), f.sha2(whole, 256))
    return f.when(f.length(whole) > KEY_CHARACTERS_MAX, long).otherwise(whole)


def _text(column: Column, kind: DataType) -> Column:
    if isinstance(kind, TimestampType):
        # The same in every time zone of a session.
        return f.unix_micros(column).cast("string")
    return f.hex(column) if isinstance(kind, BinaryType) else column.cast("string")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def rows_of(request: Request) -> DataFrame:
    """Return the rows as a writer takes them: their key, their body, and how each is published.

    A frame with a column `body` has the columns of a written DataFrame; otherwise all columns together are the body.
    """
    frame = request.frame
    key = key_column(frame, request.input.ids).alias(KEY)
    if "body" not in frame.columns:
        return frame.select(key, f.struct(*(f.col(_quoted(name)) for name in frame.columns)).alias("body"))
    given = [f.col(name) for name in GIVEN if name in frame.columns]
    return frame.select(key, f.col("body"), *given)


def count_rows(rows: DataFrame, ids: Sequence[str]) -> tuple[int, int]:
    """Return how many rows there are, and how many keys; refuse rows without a key."""
    found = rows.agg(f.count(f.lit(1)), f.count(KEY), f.count_distinct(KEY)).first()
    assert found is not None
    total, with_key, distinct = int(found[0]), int(found[1]), int(found[2])
    if with_key < total:
        columns = f"id column {ids[0]!r} is" if len(ids) == 1 else f"one of the id columns {', '.join(ids)} is"
        raise InvalidInput(
            f"{total - with_key:,} of {total:,} rows have no id: {columns} null. Leave such rows out, with "
            '--from "SELECT … WHERE … IS NOT NULL", or choose other columns'
        )
    return total, distinct


def known_keys(spark: SparkSession, lake: Lake, bulk: Bulk, queues: Iterable[str]) -> DataFrame:
    """Return the keys that were ever published in some queues, as the column `key`."""
    names = sorted(set(queues))
    known = lake.frame(spark, KEYS).where(f.col("queue").isin(names)).select(KEY)
    for queue in names:
        tail = Tail(lake, bulk, queue, lake.state.offsets.get(queue, 0))
        tail.read_on()
        late = pa.table([tail.whole()], names=[KEY])
        if late.num_rows:
            known = known.unionByName(spark.createDataFrame(late))
    return known


def new_rows(spark: SparkSession, lake: Lake, bulk: Bulk, request: Request, rows: DataFrame) -> DataFrame:
    """Return one row for each key that no message of the history has."""
    known = known_keys(spark, lake, bulk, request.all_queues)
    return rows.where(f.col(KEY).isNotNull()).dropDuplicates([KEY]).join(known, KEY, "left_anti")


def preview(spark: SparkSession, lake: Lake, place: Place, request: Request) -> Preview:
    """Return what a plan would send; nothing is written."""
    rows = rows_of(request)
    with open_bulk(place) as bulk:
        check_target(bulk, request.input)
        for queue in request.all_queues:
            check_history(lake, bulk, queue, allow_gaps=request.allow_gaps)
        total, distinct = count_rows(rows, request.input.ids)
        fresh = new_rows(spark, lake, bulk, request, rows)
        count = fresh.count()
        samples = [_sample(row.asDict()) for row in fresh.select(KEY, _body_text(rows)).limit(SAMPLES).collect()]
    counts = {"rows": total, "collapsed": total - distinct, "known": distinct - count, "new": count}
    return Preview(request.queue, counts, samples)


def _body_text(rows: DataFrame) -> Column:
    kind = rows.schema["body"].dataType
    is_nested = isinstance(kind, StructType | ArrayType | MapType | VariantType)
    body = f.to_json("body") if is_nested else f.col("body").cast("string")
    return body.alias("body")


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    body = row["body"]
    if body is not None and len(body) > TEXT_MAX:
        row["body"] = f"{body[:TEXT_MAX]}…"
    return row


def check_target(bulk: Bulk, given: Input) -> None:
    """Refuse queues that the store does not have: a typing error must not create one."""
    from difflib import get_close_matches

    known = bulk.run(bulk.store.queues())
    for queue in (*given.queues, *filter(None, [given.to_queue])):
        if queue not in known:
            close = get_close_matches(queue, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(known)[:20]) or 'none'}"
            raise InvalidInput(
                f"there is no queue {queue!r} in the store; {hint} (`waypost configure {queue} journal=all` creates it)"
            )


def make_plan(spark: SparkSession, lake: Lake, place: Place, request: Request, records: Records) -> None:
    """Write the new rows to files, and record them as the plan."""
    rows = rows_of(request)
    with open_bulk(place) as bulk:
        check_target(bulk, request.input)
        for queue in request.all_queues:
            check_history(lake, bulk, queue, allow_gaps=request.allow_gaps)
        total, distinct = count_rows(rows, request.input.ids)
        # Before the keys are read: what is published since is asked again when a chunk is sent.
        newest = {queue: bulk.bounds(queue)[1] for queue in request.all_queues}
        fresh = new_rows(spark, lake, bulk, request, rows)
        target = Target(records.rows, tuple(fresh.columns))
        files = write_frame(fresh, lake.files, {"": target}).get("", [])
    count = sum(file.rows for file in files)
    plan = Plan(
        next_number(records), request.input, time.time_ns() // 1_000_000, tuple(files),
        {"rows": total, "collapsed": total - distinct, "known": distinct - count, "new": count},
        newest,
        StructType([StructField("body", rows.schema["body"].dataType)]).json(), request.is_json, request.priority,
    )  # fmt: skip
    records.begin(plan)
