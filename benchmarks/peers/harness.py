"""Contenders by turns: starts their programs, watches what their handlers write, ends them, and counts.

A turn is one contender in a clean place. Peers are ended by SIGKILL, since how they stop is not measured; waypost by
SIGTERM, and a worker of ours that does not stop in order is an error.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from benchmarks.peers import protocol
from benchmarks.peers.hosts import Host
from benchmarks.peers.registry import ROOT, Peer, environment

WATCH_SECONDS = 0.01
#: Bytes of a slot file in which the first time is expected: no contender begins with a later message.
BEGINNING = 4096
STOP_SECONDS = 10.0
#: Messages of the first seconds warm connections and caches: they are not counted in a latency.
WARM_SECONDS = 1.0


class TurnFailed(Exception):
    """Raised when a contender's program ends or hangs; holds what it wrote."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A peer, or waypost, with its task."""

    name: str
    count: int = 0
    peer: Peer | None = None
    variant: str = ""
    #: A turn that takes longer has failed.
    seconds_max: float = 90.0

    def with_timeout(self, seconds: float) -> Contestant:
        """Return the same contestant with another time limit."""
        return replace(self, seconds_max=seconds)

    def command(self) -> list[str]:
        """Return the command line of its program."""
        if self.peer is not None:
            return self.peer.command()
        return [sys.executable, "-m", "benchmarks.peers.waypost_peer"]

    def environment(self) -> dict[str, str]:
        """Return its environment variables."""
        return dict(os.environ) if self.peer is None else environment(self.peer)


class Times:
    """A slot file: when each message was sent, due or started."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(count * 8)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._seen = 0
        self.count = count

    def are_complete(self) -> bool:
        """Return whether each message has its time. Parts known to be complete are not read again."""
        with memoryview(self._map) as raw, raw.cast("q") as slots:
            while self._seen < self.count and slots[self._seen]:
                self._seen += 1
        return self._seen == self.count

    def have_begun(self) -> bool:
        """Return whether any message has its time."""
        return self._map[:BEGINNING].count(0) < min(BEGINNING, len(self._map))

    def filled(self) -> int:
        """Return how many messages have their time."""
        return sum(1 for time_ns in self.read() if time_ns)

    def read(self) -> list[int]:
        """Return all times, in nanoseconds."""
        with memoryview(self._map) as raw, raw.cast("q") as slots:
            return slots.tolist()

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self.path.unlink()


@contextmanager
def slot_file(count: int) -> Iterator[Times]:
    """Make a slot file for one turn, in shared memory where possible, so that no disk is waited for."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    handle, name = tempfile.mkstemp(prefix="wp-slots-", dir=folder)
    os.close(handle)
    times = Times(Path(name), count)
    try:
        yield times
    finally:
        times.close()


class Running:
    """A running program, in its own process group."""

    def __init__(self, contestant: Contestant, *given: str, output: IO[bytes], errors: IO[bytes]) -> None:
        # Files, not pipes: a program with much output must not wait for a reader.
        self._output = output
        self._errors = errors
        self.contestant = contestant
        self.process = subprocess.Popen(
            [*contestant.command(), *given], cwd=ROOT, env=contestant.environment(), stdin=subprocess.DEVNULL,
            stdout=output, stderr=errors, start_new_session=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait until it reports that it accepts messages."""
        self._watch(lambda: b'"ready"' in os.pread(self._output.fileno(), 4096, 0), lambda: "was not ready")

    def wait_for_first(self, times: Times) -> None:
        """Wait until a handler has started."""
        self._watch(times.have_begun, lambda: "began nothing")

    def wait_for(self, times: Times) -> None:
        """Until every slot has its time."""
        self._watch(times.are_complete, lambda: f"handled {times.filled()} of {times.count}")

    def _watch(self, holds: Callable[[], bool], describe: Callable[[], str]) -> None:
        limit = self.contestant.seconds_max
        deadline = time.monotonic() + limit
        while not holds():
            if self.process.poll() is not None:
                raise self.failed(f"ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.failed(f"{describe()} in {limit:g} s")
            time.sleep(WATCH_SECONDS)

    def wait(self) -> int:
        """Wait until it ends by itself, and return its exit code."""
        limit = self.contestant.seconds_max
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise self.failed(f"took more than {limit:g} s") from None

    def end(self) -> None:
        """Stop it, cleanly if it is waypost, then all its processes."""
        if self.contestant.peer is None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                raise self.failed("did not stop") from None
            if code != 0:
                raise self.failed(f"stopped with {code}")
        self.kill()

    def kill(self) -> None:
        """Kill it and all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failed(self, what: str) -> TurnFailed:
        """Return the error to raise, with the last output of the program."""
        self._errors.seek(0)
        output = self._errors.read()[-600:].decode(errors="replace").strip()
        return TurnFailed(f"{self.contestant.name} {what}: {output}" if output else f"{self.contestant.name} {what}")


@contextmanager
def running(contestant: Contestant, *given: str) -> Iterator[Running]:
    """Run a program for the length of a block."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        program = Running(contestant, *given, output=output, errors=errors)
        try:
            yield program
        except BaseException:
            program.kill()
            raise
        program.end()


def run(contestant: Contestant, *given: str) -> int:
    """Run a program that ends by itself; return its exit code, which is 0 or one of the protocol."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        program = Running(contestant, *given, output=output, errors=errors)
        try:
            code = program.wait()
            if code not in (0, protocol.LEAD_TOO_SHORT):
                raise program.failed(f"ended with {code}")
        finally:
            program.kill()
        return code


@dataclass(frozen=True, slots=True)
class Together:
    """Publishes at the same time: messages per second, and microseconds of processor time per message."""

    rate: float
    cpu_us: float
    server_cpu_us: float


def together(contestant: Contestant, host: Host, kind: str) -> Together:
    """Measure how fast many tasks or threads of one program publish, one message per call."""
    count = contestant.count
    with host.place() as url, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given = ["together", "--url", url, "--count", str(count), "--kind", kind, "--server", str(host.pid)]
        program = Running(contestant, *given, output=output, errors=errors)
        try:
            if program.wait() != 0:
                raise program.failed("ended with an error")
        finally:
            program.kill()
        output.seek(0)
        found = json.loads(output.read().splitlines()[-1])
    return Together(count / found["seconds"], found["cpu"] / count * 1e6, found["server"] / count * 1e6)


def work(contestant: Contestant, url: str, times: Times, clock: str = "monotonic") -> list[str]:
    """Return the contestant with the task of a worker."""
    return ["work", "--url", url, "--slots", str(times.path), "--clock", clock, "--variant", contestant.variant]


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain: messages per second from the first start of a handler to the last, and the worker's processor time."""

    rate: float
    #: Microseconds of processor time per message in the worker process: what the machine's load does not stretch much.
    cpu_us: float


def drain(contestant: Contestant, host: Host) -> Drain:
    """Measure how fast a queue that was filled before is emptied."""
    count = contestant.count
    with host.place() as url, slot_file(count) as times:
        run(contestant, "publish", "--url", url, "--count", str(count), "--variant", contestant.variant)
        with running(contestant, *work(contestant, url, times)) as worker:
            worker.wait_for_first(times)
            cpu, done = cpu_seconds(worker.process.pid), times.filled()
            worker.wait_for(times)
            cpu = cpu_seconds(worker.process.pid) - cpu
        began = times.read()
    rate = (count - 1) / (max(began) - min(began)) * protocol.NANOSECONDS
    return Drain(rate, cpu / max(1, count - done) * 1e6)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            spent += int((thread / "schedstat").read_text().split()[0])
    return spent / protocol.NANOSECONDS


def latencies(contestant: Contestant, host: Host, rate: float, seconds: float) -> list[float]:
    """Return the milliseconds from the call of publish to the start of the handler, for each message."""
    count = round(rate * (seconds + WARM_SECONDS))
    with host.place() as url, slot_file(count) as begun, slot_file(count) as sent:
        with running(contestant, *work(contestant, url, begun)) as worker:
            worker.wait_until_ready()
            run(contestant, "send", "--url", url, "--slots", str(sent.path), "--rate", str(rate))
            worker.wait_for(begun)
        pairs = zip(begun.read(), sent.read(), strict=True)
        return [(began - called) / 1e6 for began, called in pairs][round(rate * WARM_SECONDS) :]


def latenesses(contestant: Contestant, host: Host, count: int, span: float, lead: float) -> list[float]:
    """Return the milliseconds from the due time of each timer to the start of its handler: negative if early."""
    while True:
        with host.place() as url, slot_file(count) as begun, slot_file(count) as due:
            with running(contestant, *work(contestant, url, begun, "wall")) as worker:
                worker.wait_until_ready()
                given = ["--slots", str(due.path), "--span", str(span), "--lead", str(lead)]
                code = run(contestant, "timers", "--url", url, *given)
                if code == 0:
                    worker.wait_for(begun)
            if code == 0:
                pairs = zip(begun.read(), due.read(), strict=True)
                return [(began - wanted) / 1e6 for began, wanted in pairs]
        lead *= 2
        if lead > contestant.seconds_max:
            raise TurnFailed(f"{contestant.name}: {count} timers could not be published in {lead / 2:g} s")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
