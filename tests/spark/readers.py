"""The tables of a lake as other programs read them, and runs that end where a signal would end them."""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime
from typing import Any

import duckdb
import polars
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from waypost.spark.delta.table import DeltaFolder
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.tables import TABLES


def read_by_others(lake: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables as polars and as duckdb read them, without opening the lake; they must agree."""
    found = {}
    for table in TABLES:
        path = f"{lake}/{table.name}"
        rows = polars.read_delta(path).select(list(table.columns)).to_arrow().to_pylist()
        with duckdb.connect() as connection:
            connection.register("rows", DeltaTable(path).to_pyarrow_dataset())
            names = ", ".join(f'"{name}"' for name in table.columns)
            again = connection.sql(f"SELECT {names} FROM rows").to_arrow_table()
        found[table.name] = ordered(rows)
        assert again is not None
        assert [text(row) for row in found[table.name]] == [text(row) for row in ordered(again.to_pylist())]
    return found


def text(row: dict[str, Any]) -> list[str]:
    """Return the values of a row; readers name the zone of a time differently."""
    return [str(value.astimezone(UTC) if isinstance(value, datetime) else value) for value in row.values()]


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=text)


def texts(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[list[str]]]:
    return {name: [text(row) for row in rows] for name, rows in found.items()}


def read_lake(lake: Lake) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables as the lake reads them."""
    return {table.name: ordered(lake.rows(table).to_pylist()) for table in lake.tables}


def read_by_spark(lake: Lake, spark: SparkSession) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables as Spark reads them through the lake."""
    return {table.name: ordered([row.asDict() for row in lake.frame(spark, table).collect()]) for table in lake.tables}


class Killed(BaseException):
    """Ends a run where a signal would: nothing is cleaned up."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int, when: str) -> None:
    """End the process, as far as the lake sees it, before or after a commit."""
    commits, real, lock = itertools.count(1), DeltaFolder.try_commit, threading.Lock()
    dead = threading.Event()

    def commit(*arguments: Any) -> bool:
        with lock:
            if dead.is_set():
                raise Killed
            is_point = next(commits) == number
            if is_point and when == "before":
                dead.set()
                raise Killed
            done = real(*arguments)
            if is_point:
                dead.set()
                raise Killed
            return done

    monkeypatch.setattr(DeltaFolder, "try_commit", commit)
