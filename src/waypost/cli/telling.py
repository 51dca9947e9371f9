"""How the demos tell their story: steps with their times, a line that moves, and processes that end with the teller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

#: How often a condition is looked at; also how often the moving line moves.
LOOK_SECONDS = 0.1
#: What a process that was asked to end has for it.
END_SECONDS_MAX = 15.0
BAR_WIDTH = 24


class Stuck(Exception):
    """Raised when a step of a story has not come to its end in the time that it has."""


class Teller:
    """Writes each step with the seconds since the start. Colours, and a line that moves, only on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colours = self.terminal and "NO_COLOR" not in os.environ
        self.start = time.monotonic()
        self._moving = False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def coloured(self, text: str, code: str) -> str:
        """The text in a colour, where there are any."""
        return f"\033[{code}m{text}\033[0m" if self.colours else text

    def chapter(self, text: str) -> None:
        """A heading."""
        self._write("\n" + self.coloured(text, "1") + "\n")

    def __call__(self, text: str, code: str = "") -> None:
        told = self.coloured(text, code) if code else text
        self._write(self.coloured(f"  {self.seconds:6.1f} s  ", "2") + told + "\n")

    def good(self, text: str) -> None:
        """Something that came out as it should."""
        self(text, "32")

    def bad(self, text: str) -> None:
        """Something that went wrong, on purpose or not."""
        self(text, "33")

    def move(self, done: int, whole: int, text: str) -> None:
        """Show how far it is, in a line that the next word takes the place of."""
        if self.terminal:
            full = BAR_WIDTH if whole <= 0 else min(BAR_WIDTH, BAR_WIDTH * done // whole)
            bar = self.coloured("━" * full, "36") + self.coloured("━" * (BAR_WIDTH - full), "2")
            self.stream.write(f"\r\033[K  {self.seconds:6.1f} s  {bar} {text}")
            self.stream.flush()
            self._moving = True

    def _write(self, text: str) -> None:
        if self._moving:
            self.stream.write("\r\033[K")
            self._moving = False
        self.stream.write(text)
        self.stream.flush()


def wait_until(reached: Callable[[], bool], what: str, seconds_max: float) -> None:
    """Look until something is so."""
    deadline = time.monotonic() + seconds_max
    while not reached():
        if time.monotonic() > deadline:
            raise Stuck(f"waited {seconds_max:.0f} s for {what}, in vain")
        time.sleep(LOOK_SECONDS)


class Company:
    """The processes of a story. They end with its `with` block; each also ends by itself when its input does, which is
    when the teller is gone, however it went."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: str | os.PathLike[str],
        *,
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start one. A session of its own: Ctrl-C is for the teller, who ends the others in order."""
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, env=os.environ | dict(environment), stdin=subprocess.PIPE, stderr=file,
                stdout=file if output is None else output, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As a power cut would."""
        process.kill()
        self._forget(process)

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """Ask it and all that it started to end, and wait; its exit code."""
        signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS_MAX
        while time.monotonic() < deadline:
            process.poll()
            if not signal_group(process, 0):
                break
            time.sleep(LOOK_SECONDS / 5)
        else:
            signal_group(process, signal.SIGKILL)
        return self._forget(process)

    def _forget(self, process: subprocess.Popen[bytes]) -> int:
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        if process in self.processes:
            self.processes.remove(process)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # All are asked before the first is waited for; whoever presses Ctrl-C once more waits for none.
        processes = list(self.processes)
        for process in processes:
            signal_group(process, signal.SIGTERM)
        try:
            for process in processes:
                self.stop(process)
        finally:
            for process in list(self.processes):
                signal_group(process, signal.SIGKILL)
                self._forget(process)


def signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a process and all that it started; whether there was any of them."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
