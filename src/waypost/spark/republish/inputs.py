"""Where rows come from: files, Delta tables and SQL; and errors of SQL in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from waypost.errors import InvalidInput
from waypost.spark.files import open_lake_files
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.views import view_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SQL: Final = re.compile(r"\s*(select|with|from|values|table)[\s(*'\"`]", re.IGNORECASE)
#: What Spark puts around the sentence of an error: its name in brackets, and a code at the end.
_CLASS: Final = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*$", re.DOTALL)
COLUMNS_MAX: Final = 40
#: By session, the views that were made here.
_VIEWS: Final[WeakKeyDictionary[Any, set[str]]] = WeakKeyDictionary()


def read_source(spark: SparkSession, lake: Lake, source: str) -> DataFrame:
    """Return the rows of a source: SQL, or the path of a Delta table, of Parquet, CSV or JSON lines."""
    if SQL.match(source):
        register_views(spark, lake, source)
        return explain_sql("--from", source, (), lambda: spark.sql(source))
    path = source.rstrip("/")
    files = open_lake_files(path, "table")
    if files.exists("_delta_log"):
        return read_delta(spark, path)
    kind = _find_kind(path, list(files.walk("")))
    reader = spark.read
    if kind == "csv":
        # As text: a number that is guessed from 007 is another id. Quotes as spreadsheets and databases write them; a
        # row with fewer or more columns, and a file with others, are errors.
        reader = reader.options(header=True, escape='"', multiLine=True, mode="FAILFAST", enforceSchema=False)
    return explain_sql("--from", source, (), lambda: getattr(reader, kind)(path))


def _find_kind(path: str, names: Sequence[str]) -> str:
    """Return the format of files by the end of their names."""
    for name in (path, *names):
        for kind, ends in (("csv", (".csv", ".csv.gz")), ("json", (".json", ".jsonl", ".json.gz", ".jsonl.gz"))):
            if name.lower().endswith(ends):
                return kind
        if name.lower().endswith(".parquet"):
            return "parquet"
    raise InvalidInput(
        f"--from {path!r} is neither SQL (SELECT …) nor a path of Parquet, CSV, JSON lines or a Delta table that exists"
    )


def read_delta(spark: SparkSession, path: str) -> DataFrame:
    """Return the rows of a Delta table of another program: by the files of its newest version."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError
    from pyspark.sql.types import StructType

    try:
        table = DeltaTable(path)
        protocol = table.protocol()
        if protocol.min_reader_version > 1:
            features = ", ".join(sorted(protocol.reader_features or ()))
            needed = features or f"reader version {protocol.min_reader_version}"
            raise InvalidInput(
                f"the Delta table {path} needs {needed}, which waypost does not read: write its rows as Parquet first"
            )
        files, schema = table.file_uris(), StructType.fromJson(json.loads(table.schema().to_json()))
    except DeltaError as error:
        raise InvalidInput(f"the Delta table {path} cannot be read: {error}") from None
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", path).parquet(*files)


def register_views(spark: SparkSession, lake: Lake, text: str) -> None:
    """Make the tables of a lake that a text of SQL mentions known by their names: `silver_messages`, `keys`, …"""
    terms = set(re.findall(r"\w+", text.lower()))
    known = set(lake.table_names())
    views = {view_name(table.name): partial(lake.frame, spark, table) for table in lake.tables if table.name in known}
    if known:
        views["messages"] = partial(lake.messages, spark)
    ours = _VIEWS.setdefault(spark, set())
    for name in terms & views.keys():
        # A view of the user stays what it is.
        if name in ours or not spark.catalog.tableExists(name):
            views[name]().createOrReplaceTempView(name)
            ours.add(name)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Within this, Spark does not write errors of SQL to the terminal as JSON: they are raised too."""
    from pyspark.logger import PySparkLogger

    loggers = [PySparkLogger.getLogger(name) for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def explain_sql(option: str, text: str, columns: Iterable[str], act: Callable[[], DataFrame]) -> DataFrame:
    """Return what a function returns; an error of SQL in one sentence, with the columns that there are."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        with _without_logs():
            made = act()
            _ = made.schema  # over Spark Connect nothing is analyzed before
        return made
    except (AnalysisException, ParseException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sentence = _STATE.sub("", _CLASS.sub("", lines[0] if lines else type(error).__name__)).rstrip(".; ")
        names = list(columns)
        known = ", ".join(names[:COLUMNS_MAX]) + (", …" if len(names) > COLUMNS_MAX else "")
        raise InvalidInput(
            f"{option} {text!r} is not understood: {sentence}{f'. The columns are {known}' if names else ''}"
        ) from None
