"""A session for a command: its log in a file, its progress in the terminal, its errors in sentences."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from waypost.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How often the progress bar is drawn.
UPDATE_SECONDS = 0.3
#: How long the end waits for the thread that draws it.
JOIN_SECONDS_MAX = 5.0
BAR_WIDTH = 30


@contextmanager
def quiet_session(master: str, config: Mapping[str, str], log: Path) -> Iterator[SparkSession]:
    """A session whose Java writes into a file instead of the terminal; stopped at the end."""
    spark = start_quietly(master, config, log)
    try:
        yield spark
    finally:
        spark.stop()


def start_quietly(master: str, config: Mapping[str, str], log: Path) -> SparkSession:
    """Return a session whose Java writes into a file instead of the terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with _errors_into(log):
        return session(master, config, name="waypost pipeline", progress=False)


@contextmanager
def _errors_into(log: Path) -> Iterator[None]:
    """While Java is started, let the error stream that it inherits be a file. This process keeps its own."""
    sys.stderr.flush()
    kept = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)


class Progress:
    """Lines about what is done, and in a terminal a bar for the stages that run."""

    def __init__(self, spark: SparkSession, out: TextIO) -> None:
        self._out = out
        self._tracker: Any = None
        if out.isatty() and hasattr(spark, "sparkContext"):
            self._tracker = spark.sparkContext.statusTracker()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._has_bar = False
        self._thread: threading.Thread | None = None

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        with self._lock:
            self._clear()
            self._out.write(text + "\n")
            self._out.flush()

    def _clear(self) -> None:
        if self._has_bar:
            self._out.write("\r\x1b[K")
            self._has_bar = False

    def _update_bar(self) -> None:
        while not self._stop.wait(UPDATE_SECONDS):
            done = total = 0
            for number in self._tracker.getActiveStageIds():
                info = self._tracker.getStageInfo(number)
                if info is not None:
                    done += info.numCompletedTasks
                    total += info.numTasks
            with self._lock:
                self._clear()
                if total:
                    filled = BAR_WIDTH * done // total
                    self._out.write(f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done} of {total} tasks")
                    self._has_bar = True
                self._out.flush()

    def __enter__(self) -> Self:
        if self._tracker is not None:
            self._thread = threading.Thread(target=self._update_bar, name="waypost-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            # It calls Spark, which may not answer any more.
            self._thread.join(JOIN_SECONDS_MAX)
        with self._lock:
            self._clear()
