"""Errors of Spark as one sentence, whatever Spark quotes around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from waypost.errors import InvalidBody, JournalTrimmed, StoreError, WaypostError
from waypost.spark.spark_errors import add_reason, map_spark_error

STOPPED = "Spark could not go on: "
TRACEBACK = """\
[PYTHON_DATA_SOURCE_ERROR] Failed to commit: Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/pyspark/worker.py", line 4325, in main
    process()
  File "/usr/lib/python3/site-packages/waypost/spark/source/reader.py", line 120, in read_events
    raise JournalTrimmed(
waypost.errors.JournalTrimmed: queue orders: the journal was trimmed past this read: events 1 to 7 are gone

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:600)
org.apache.spark.SparkException: task failed
"""


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (TRACEBACK, JournalTrimmed, "queue orders: the journal was trimmed past this read: events 1 to 7 are gone"),
        (
            "[PYTHON_DATA_SOURCE_ERROR] Failed to commit: waypost.errors.InvalidBody: partition 0, row 1: no body. "
            "SQLSTATE: 38000",
            InvalidBody,
            "partition 0, row 1: no body.",
        ),
        ("waypost.errors.PartialPublish: half of it", StoreError, "half of it"),
        ("waypost.errors.NotOfThisRelease: what it was", StoreError, "what it was"),
        ('Traceback:\n  File "a.py"\nValueError: wrong\norg.apache.X: y', StoreError, f"{STOPPED}ValueError: wrong"),
        ("[UNRESOLVED_COLUMN] no column a\n== SQL ==", StoreError, f"{STOPPED}[UNRESOLVED_COLUMN] no column a"),
    ],
)
def test_an_error_of_spark_is_one_sentence_and_keeps_its_class(text: str, kind: type[Exception], sentence: str) -> None:
    found = map_spark_error(RuntimeError(text))
    assert isinstance(found, kind | WaypostError)
    assert (type(found), str(found)) == (kind, sentence)


def test_an_error_of_waypost_stays_as_it_is() -> None:
    error = JournalTrimmed("gone")
    assert map_spark_error(error) is error


def test_an_error_of_a_java_that_does_not_start_has_the_reason_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    error = StoreError("Spark could not go on: [JAVA_GATEWAY_EXITED] Java gateway process exited")
    assert add_reason(error, log) is error
    log.write_text("WARNING: a module\n\nInvalid maximum heap size: -Xmx1x\nError: Could not create it\n")
    assert str(add_reason(error, log)) == "Java could not start: Invalid maximum heap size: -Xmx1x"
    other = StoreError("the lake is full")
    assert add_reason(other, log) is other
