"""What `waypost demo` and `make demo` share: output with times and a progress line, processes that end with the demo,
and the steps that both of them have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from waypost.client import Waypost
    from waypost.values import Ledger

#: The handlers that workers run, unless a demo names others.
SHOP_TARGET = "waypost.cli.demo.shop:post"
#: Tells the shop that it runs in a worker.
WORKER_VARIABLE = "WAYPOST_DEMO_WORKER"

#: How often a condition is checked and the progress line is updated.
POLL_SECONDS = 0.1
#: How long a process may take to end before it is killed.
END_SECONDS_MAX = 15.0
BAR_WIDTH = 24


class DemoTimeout(Exception):
    """Raised when a step of a demo takes longer than it may."""


class DemoOutput:
    """Writes each step with the seconds since the start. Colors and the progress line are for terminals only."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.uses_color = self.is_terminal and "NO_COLOR" not in os.environ
        self.start = time.monotonic()
        self._has_progress_line = False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def with_color(self, text: str, code: str) -> str:
        """Return the text in a color, or unchanged where colors are not used."""
        return f"\033[{code}m{text}\033[0m" if self.uses_color else text

    def heading(self, text: str) -> None:
        """Write a heading."""
        self._write("\n" + self.with_color(text, "1") + "\n")

    def line(self, text: str, code: str = "") -> None:
        """Write a line with its time."""
        colored = self.with_color(text, code) if code else text
        self._write(self.with_color(f"  {self.seconds:6.1f} s  ", "2") + colored + "\n")

    def good(self, text: str) -> None:
        """Write a line about a success."""
        self.line(text, "32")

    def bad(self, text: str) -> None:
        """Write a line about a failure, intended or not."""
        self.line(text, "33")

    def progress(self, done: int, total: int, text: str) -> None:
        """Show a progress line, which the next line replaces."""
        if self.is_terminal:
            full = BAR_WIDTH if total <= 0 else min(BAR_WIDTH, BAR_WIDTH * done // total)
            bar = self.with_color("━" * full, "36") + self.with_color("━" * (BAR_WIDTH - full), "2")
            self.stream.write(f"\r\033[K  {self.seconds:6.1f} s  {bar} {text}")
            self.stream.flush()
            self._has_progress_line = True

    def _write(self, text: str) -> None:
        if self._has_progress_line:
            self.stream.write("\r\033[K")
            self._has_progress_line = False
        self.stream.write(text)
        self.stream.flush()


def format_ledger(name: str, ledger: Ledger) -> str:
    """Return a ledger in one line: what was published, and where it is."""
    source = f"published {ledger.published:,}" + (f" + redriven {ledger.redriven:,}" if ledger.redriven else "")
    unfinished = ledger.ready + ledger.leased + ledger.delayed + ledger.waiting
    counts = {"done": ledger.done, "dead": ledger.dead, "unfinished": unfinished}
    states = " + ".join(f"{state} {count:,}" for state, count in counts.items() if count or state == "done")
    causes = ", ".join(f"{cause} {count:,}" for cause, count in ledger.redelivered.items() if count)
    return f"{name} {source} = {states}" + (f"; delivered again: {causes}" if causes else "")


def wait_until(condition: Callable[[], bool], what: str, seconds_max: float) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > deadline:
            raise DemoTimeout(f"waited {seconds_max:.0f} s in vain for {what}")
        time.sleep(POLL_SECONDS)


class DemoProcesses:
    """The processes of a demo. They end with its `with` block; each must also call `end_with_parent`, for the case
    that the demo itself is killed."""

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
        """Start a process in a session of its own, so that Ctrl-C reaches only the demo, which ends the others."""
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, env=os.environ | dict(environment), stdin=subprocess.PIPE, stderr=file,
                stdout=file if output is None else output, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, as a power cut would."""
        process.kill()
        self._reap(process)

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """Stop a process and all that it started; return its exit code."""
        signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS_MAX
        while time.monotonic() < deadline:
            process.poll()
            if not signal_group(process, 0):
                break
            time.sleep(POLL_SECONDS / 5)
        else:
            signal_group(process, signal.SIGKILL)
        return self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
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
        # All get the signal before the first is waited for. A second Ctrl-C kills what is left.
        processes = list(self.processes)
        for process in processes:
            signal_group(process, signal.SIGTERM)
        try:
            for process in processes:
                self.stop(process)
        finally:
            for process in list(self.processes):
                signal_group(process, signal.SIGKILL)
                self._reap(process)


class ShopDemo:
    """The steps that the demos share: workers, progress, dead letters, and the account at the end."""

    def __init__(
        self, post: Waypost, processes: DemoProcesses, output: DemoOutput, directory: Path, variables: Mapping[str, str]
    ) -> None:
        self.post = post
        self.processes = processes
        self.output = output
        self.directory = directory
        #: Environment variables of the workers.
        self.variables = variables

    def start_worker(self, name: str, target: str = SHOP_TARGET, **more: str) -> subprocess.Popen[bytes]:
        """Start a process that runs handlers, as `waypost worker shop:post` does."""
        command = [sys.executable, "-m", "waypost.cli.main", "worker", target, "--timeout", "10"]
        variables = {**self.variables, WORKER_VARIABLE: "1", **more}
        return self.processes.start(command, variables, self.directory / f"{name}.log")

    def follow(self, condition: Callable[[Ledger], bool], what: str, seconds_max: float) -> None:
        """Show the progress of the orders until their ledger fulfils a condition."""

        def poll() -> bool:
            ledger = self.post.ledger("orders")
            counts = f"{ledger.done:,} of {ledger.published:,} done, {ledger.leased:,} running, {ledger.ready:,} ready"
            self.output.progress(ledger.done, ledger.published, f"{counts} · {what}")
            return condition(ledger)

        wait_until(poll, what, seconds_max)

    def show_dead_letters(self) -> None:
        """Print each dead letter with its reason."""
        for letter in self.post.dead_letters("orders"):
            deliveries = "1 delivery" if letter.deliveries == 1 else f"{letter.deliveries} deliveries"
            error = letter.error.splitlines()[0].partition(" - at")[0] if letter.error else ""
            self.output.bad(f"a dead letter after {deliveries}: {letter.reason}, {error}")

    def account(self, ledgers: Mapping[str, Ledger]) -> dict[str, int]:
        """Print where every message went, and return how many were published, unaccounted and unexplained."""
        width = max(len(name) for name in ledgers)
        for name, ledger in ledgers.items():
            self.output.line(format_ledger(f"{name:{width}}", ledger))
        published = sum(ledger.published for ledger in ledgers.values())
        unaccounted = sum(abs(ledger.balance) for ledger in ledgers.values())
        unexplained = sum(abs(ledger.unexplained) for ledger in ledgers.values())
        write = self.output.bad if unaccounted or unexplained else self.output.good
        write(f"{unaccounted} unaccounted of {published:,}; {unexplained} redeliveries without a cause")
        return {"published": published, "unaccounted": unaccounted, "unexplained": unexplained}


def signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a process and all that it started; return whether any of them is alive."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_with_parent(*, group: bool = False) -> None:
    """End this process (or its process group) when its stdin ends, that is, when the demo is gone."""

    def wait_for_end() -> None:
        # Not through `sys.stdin`: a thread that waits inside it would keep the interpreter from ending.
        while os.read(0, 1):
            pass
        if group:
            os.killpg(os.getpgid(0), signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="end-with-parent", daemon=True).start()
