"""`--reload`: run a command as a process, and start it anew when a Python file below this folder changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from waypost.cli.output import report_progress
from waypost.worker.signals import NAMES

#: How often the files are checked.
CHECK_SECONDS = 0.5
#: Folders that hold no code of the application.
SKIPPED = ("node_modules", "__pycache__", "site-packages")


class Reloader:
    """Runs one process of a command after the other, until a signal ends it."""

    def __init__(self, arguments: list[str], folder: Path, *, stop_seconds: float, log_format: str = "text") -> None:
        self._report = partial(report_progress, form=log_format)
        self._command = [sys.executable, "-m", "waypost.cli.main", *(one for one in arguments if not is_reload(one))]
        self._folder = folder
        self._stop_seconds = stop_seconds
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until a signal comes; return the exit code of the last process."""
        for name in NAMES:
            signal.signal(getattr(signal, name), self._on_signal)
        self._report(f"starts anew when a Python file below {self._folder} changes")
        while True:
            seen = read_times(self._folder)
            process = subprocess.Popen(self._command, start_new_session=True)
            changed = self._wait(process, seen)
            if not changed:
                return self._stop(process, self._signals[0])
            self._report(f"{changed} has changed")
            self._stop(process, signal.SIGTERM)
            if self._signals:
                return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _wait(self, process: subprocess.Popen[bytes], seen: dict[Path, int]) -> Path | None:
        """Wait for a change or a signal; return the file that changed, or None."""
        ended = False
        while not self._signals:
            now = read_times(self._folder)
            if now != seen:
                changed = {path for path in now.keys() | seen.keys() if now.get(path) != seen.get(path)}
                return min(changed).relative_to(self._folder)
            if not ended and process.poll() is not None:
                ended = True
                self._report(f"it ended with {process.returncode}; waiting for a change")
            time.sleep(CHECK_SECONDS)
        return None

    def _stop(self, process: subprocess.Popen[bytes], number: int) -> int:
        """Stop a process in order; pass further signals on, and kill it if it does not end in time."""
        if process.poll() is None:
            process.send_signal(number)
        sent, deadline = len(self._signals), time.monotonic() + self._stop_seconds
        while process.poll() is None:
            if len(self._signals) > max(1, sent):
                sent = len(self._signals)
                process.send_signal(self._signals[-1])  # a second one ends a worker at once
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
            time.sleep(0.02)
        return process.returncode


def is_reload(argument: str) -> bool:
    """Whether an argument is `--reload`, or a beginning of it, as the parser allows."""
    return len(argument) > 2 and "--reload".startswith(argument)


def read_times(folder: Path) -> dict[Path, int]:
    """Return when each Python file below a folder was last changed."""
    return dict(_find_times(folder))


def _find_times(folder: Path) -> Iterator[tuple[Path, int]]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED]
        if "pyvenv.cfg" in files:
            folders[:] = []
            continue
        for name in files:
            if name.endswith(".py"):
                path = Path(place, name)
                try:
                    yield path, path.stat().st_mtime_ns
                except FileNotFoundError:
                    continue  # removed meanwhile
