"""Progress of long work: a bar on a terminal if rich is installed, otherwise a line on stderr every two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from waypost.cli.output import write_stderr

#: Plain lines are this far apart, so that a log is not full of them.
LINE_SECONDS = 2.0


class Progress:
    """The progress of one piece of work, for the length of a `with` block. Nothing is shown if `quiet`."""

    def __init__(self, what: str, total: int | None = None, *, quiet: bool = False) -> None:
        self._what = what
        self.total = total
        self._quiet = quiet
        self._bar: Any = None
        self._line: Any = None
        self._next = time.monotonic() + LINE_SECONDS
        self.done = 0

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
        if self._bar is not None:
            self._bar.start()
            self._line = self._bar.add_task(self._what, total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        """Count this many more as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._line, completed=self.done)
        elif not self._quiet and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            of = f" of {self.total:,}" if self.total is not None else ""
            write_stderr(f"{self._what}: {self.done:,}{of}")


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)
