"""Errors of Spark as errors of waypost, with one sentence instead of pages of Java."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Final

from waypost import errors
from waypost.errors import StoreError, WaypostError

#: The last line of a traceback of Python's, as Spark quotes it among pages of Java: `module.Name: what happened`.
RAISED: Final = re.compile(r"^(?:[\w.]+Return Message: )?([A-Za-z_][\w.]*): (\S.*)$")
#: An error of waypost, wherever Spark quotes it, and what Spark adds to the end of a line.
OURS: Final = re.compile(r"\bwaypost\.errors\.([A-Za-z]+): (\S.*?)\s*(?:SQLSTATE: \w+)?$", re.MULTILINE)
#: Spark's error when Java ended before anything ran. The reason is in what Java wrote.
NOT_STARTED: Final = "JAVA_GATEWAY_EXITED"
JAVA_PREFIXES: Final = ("org.", "java.", "javax.", "scala.", "py4j.", "jdk.", "Caused by", "JVM stacktrace")


def map_spark_error(error: Exception) -> WaypostError:
    """Return the waypost error that caused it, or the Python error, or its first line, as a WaypostError."""
    if isinstance(error, WaypostError):
        return error
    ours = OURS.search(str(error))
    if ours is not None:
        return _make_error(ours[1], ours[2])
    return StoreError(f"Spark could not go on: {describe_spark_error(error)}")


def is_spark_error(error: BaseException) -> bool:
    """Return whether it is an error of PySpark, or of its connection to Java. PySpark is not imported."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j")


def describe_spark_error(error: Exception) -> str:
    """Return an error of Spark as one line: the Python error that it quotes, or else its first line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    raised = []
    for before, line in itertools.pairwise(lines):
        found = RAISED.match(line)
        # Before it stands the line of code, or of the marks below it, which are indented.
        if found and before.startswith(" ") and not line.startswith(JAVA_PREFIXES):
            raised.append((found[1], found[2]))
    if raised:
        name, text = raised[0]
        return f"{name}: {text}"
    return lines[0] if lines else type(error).__name__


def _make_error(name: str, text: str) -> WaypostError:
    """Return an error by the name of its class, so that it has the same exit code as where it was raised."""
    kind = getattr(errors, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, WaypostError)
    try:
        return kind(text) if is_known and kind is not None else StoreError(text)
    except TypeError:
        return StoreError(text)  # it is made from more than a text


def add_reason(error: WaypostError, log: Path) -> WaypostError:
    """Return the error with the reason from Spark's log, if Java could not start and the error does not have it."""
    if NOT_STARTED not in str(error):
        return error
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return error
    texts = (line.strip() for line in lines)
    reason = next(
        (line for line in texts if line and not line.startswith(("WARN", "Using ", "Picked up", "at "))), None
    )
    return error if reason is None else StoreError(f"Java could not start: {reason}")
