"""`waypost worker`: finds the client, says what it will do, runs its handlers, and says how it ended.

With `--processes N` it starts N of itself and looks after them: signals are passed on, and one that dies is replaced.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waypost.cli import metrics
from waypost.cli.ending import LEFT, USAGE, Trouble
from waypost.cli.options import add_command
from waypost.cli.output import log_to_stderr, say, write_json
from waypost.client import AsyncWaypost, Waypost
from waypost.client.base import BaseClient
from waypost.errors import ConfigurationError
from waypost.policy import HEALTH_WINDOW_SECONDS
from waypost.values import Drained
from waypost.worker.signals import NAMES

if TYPE_CHECKING:
    from waypost.worker.sync_worker import SyncWorker
    from waypost.worker.worker import Worker

#: A process that dies at once is not started again at once, or the machine would do nothing else.
RESTART_SECONDS = 1.0
WATCH_SECONDS = 0.05


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "worker", run, "run the handlers of a client", store=False,
        json_text="at the end, how it went as one JSON document (of each process)",
        more="It stops in order at SIGINT, SIGTERM or SIGHUP. Exit code 5: something was left running or unsettled.",
        examples=("waypost worker shop.queues:post", "waypost worker shop.queues:post --queues orders --processes 4"),
    )  # fmt: skip
    parser.add_argument("target", metavar="module:post", help="where the client is: shop.queues:post")
    parser.add_argument("--queues", metavar="a,b", help="only these queues")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="so many worker processes (1)")
    parser.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that handlers have to end after a signal (25)"
    )
    parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
    parser.add_argument(
        "--health-window", type=float, default=HEALTH_WINDOW_SECONDS, metavar="S",
        help="seconds without a claim that could have been made after which its health is red (30)",
    )  # fmt: skip
    parser.add_argument("--no-scheduler", action="store_true", help="leave schedules to others")
    parser.add_argument("--promoter", action="store_true", help="make timers of all queues ready, too")
    metrics.add_arguments(parser)
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"),
                        help="what is logged on stderr (warning)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    log_to_stderr(options.log_level)
    if options.processes < 1:
        raise Trouble("--processes is a whole number from 1", USAGE)
    if options.processes > 1:
        return Processes(options.arguments, options.processes, metrics_port=options.metrics_port).run()
    client = find(options.target)
    prometheus = metrics.switched_on(client, options)
    queues = None if options.queues is None else options.queues.split(",")
    worker = client.worker(
        queues, health_window=options.health_window, scheduler=not options.no_scheduler, promoter=options.promoter
    )
    say(told_start(client, worker))
    with metrics.served(worker, prometheus, options):
        report = run_worker(worker, options)
    tell_end(options, report, worker.reports())
    return 0 if report.complete else LEFT


def find(target: str) -> Waypost | AsyncWaypost:
    """The client that `module:name` names."""
    module_name, separator, path = target.partition(":")
    if not separator or not module_name or not path:
        raise ConfigurationError(f"say where the client is, as in shop.queues:post, not {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"there is no module {error.name!r} here; run this where it can be imported") from None
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Waypost | AsyncWaypost):
        raise ConfigurationError(f"{target} is {type(found).__name__}, not a Waypost or an AsyncWaypost")
    return found


#: The thresholds of the youngest generation that interpreters begin with, and ours for a process that only works.
GC_USUAL, GC_BUSY = (700, 2_000), 20_000


def run_worker(worker: SyncWorker | Worker, options: argparse.Namespace) -> Drained:
    """Until it ends, on an event loop of its own."""
    # Only now: an event loop is most of what a process loads, and other commands have no use for one.
    import asyncio

    from waypost.worker.sync_worker import SyncWorker, close_loop

    # A claim brings hundreds of objects that live for milliseconds; the usual threshold makes the collector look
    # for cycles among them several times a claim, a fifth of a busy worker's time. A program that set its own keeps it.
    if gc.get_threshold()[0] in GC_USUAL:
        gc.set_threshold(GC_BUSY, *gc.get_threshold()[1:])
    if isinstance(worker, SyncWorker):
        return worker.run(until_empty=options.until_empty, timeout=options.timeout)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(worker.run(until_empty=options.until_empty, timeout=options.timeout))
    finally:
        close_loop(loop)


def told_start(client: BaseClient, worker: SyncWorker | Worker) -> str:
    """What will be run, where, and how safe it is there."""
    width = _width(handler.queue for handler in worker.handlers)
    store = client.store
    lines = [
        f"waypost worker {worker.name}",
        f"  {'store':{width}} {store.kind}, namespace {store.namespace}: {store.capabilities.durability}",
    ]
    for handler in worker.handlers:
        where = "on the event loop" if handler.is_async else "in processes" if handler.process else "in threads"
        told = f"{handler.name}: {handler.concurrency} at once {where}"
        if handler.batch is not None:
            told += f", batches of {handler.batch}"
        if handler.timeout is not None:
            told += f", at most {handler.timeout:g} s each"
        lines.append(f"  {handler.queue:{width}} {told}")
    lines.append("  stop with SIGINT, SIGTERM or SIGHUP; a second one does not wait")
    return "\n".join(lines)


def tell_end(options: argparse.Namespace, report: Drained, by_queue: dict[str, Drained] | None = None) -> None:
    """How it went, to people, and to a program that asked for it."""
    say(told_end(report, by_queue))
    if options.json:
        write_json({"complete": report.complete, "total": report, "queues": by_queue or {}})


def told_end(report: Drained, by_queue: dict[str, Drained] | None = None) -> str:
    """How it went, in all and for each queue where there are several."""
    lines = []
    if by_queue is not None and len(by_queue) > 1:
        width = _width(by_queue)
        lines = [f"  {queue:{width}} {_counts(one)}" for queue, one in by_queue.items()]
    return "\n".join([*lines, f"waypost worker stopped: {_counts(report)}"])


def _counts(report: Drained) -> str:
    parts = [f"{report.handled} handled", f"{report.released} given back"]
    if report.cancelled:
        parts.append(f"{report.cancelled} cancelled")
    if report.running:
        parts.append(f"{report.running} still running: delivered again when their leases end")
    if report.unsettled:
        parts.append(f"{report.unsettled} not settled: delivered again when their leases end")
    return ", ".join(parts)


def _width(names: Iterable[str]) -> int:
    return max(10, *map(len, names))


@dataclass(slots=True)
class Child:
    """A worker process, the place that it fills, and how many of the supervisor's signals it was sent."""

    process: subprocess.Popen[bytes]
    place: int
    signals_sent: int = 0


class Processes:
    """Several workers, each a process of its own: nothing is shared, so nothing has to survive a fork."""

    def __init__(self, arguments: list[str], count: int, *, metrics_port: int | None = None) -> None:
        #: The port of the first; the others have those behind it. None or 0: no metrics are served.
        self._metrics_port = metrics_port
        self._command = [sys.executable, "-m", "waypost.cli.main", *arguments, "--processes", "1"]
        self._children: list[Child] = []
        #: Places without a process, and from when on each may have one.
        self._vacant = dict.fromkeys(range(count), 0.0)
        self._restart_due = 0.0
        #: The signals that came, in their order. The first asks all to stop.
        self._signals: list[int] = []

    def run(self) -> int:
        """Until all have ended; the worst of their exit codes."""
        for name in NAMES:
            # A signal can come between any two lines, also while a process is being started: it is only noted here, and
            # the loop sends it to every process, to one that was started meanwhile too.
            signal.signal(getattr(signal, name), lambda number, frame: self._signals.append(number))
        count = len(self._vacant)
        say(f"waypost: {count} worker processes; a signal to this one ({os.getpid()}) is passed on to them")
        worst = 0
        while True:
            self._fill_places()
            self._pass_on()
            worst = max([worst, *(self._ended(child) for child in self._take_ended())])
            if not self._children and (self._signals or not self._vacant):
                return worst
            time.sleep(WATCH_SECONDS)

    def _fill_places(self) -> None:
        for place, due in list(self._vacant.items()):
            if not self._signals and due <= time.monotonic():
                self._children.append(Child(self._start(place), place))
                del self._vacant[place]

    def _pass_on(self) -> None:
        """Send each process the next signal that it has not had: two at once could arrive as one."""
        for child in self._children:
            if child.signals_sent < len(self._signals):
                child.process.send_signal(self._signals[child.signals_sent])
                child.signals_sent += 1

    def _take_ended(self) -> list[Child]:
        ended = [child for child in self._children if child.process.poll() is not None]
        self._children = [child for child in self._children if child not in ended]
        return ended

    def _ended(self, child: Child) -> int:
        """The exit code that a process adds; one that died gets a successor, unless all are to stop."""
        code: int = child.process.returncode
        if child.signals_sent == 1 and code == -self._signals[0]:
            # A worker takes the first signal as a request. One that dies of it was still being started and held
            # nothing, or had already stopped.
            return 0
        if code == 0 or self._signals:
            return abs(code)
        say(f"waypost worker process {child.process.pid} ended with {code}; starting another")
        now = time.monotonic()
        self._vacant[child.place] = max(now, self._restart_due)
        self._restart_due = self._vacant[child.place] + RESTART_SECONDS
        return 0

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        command = self._command
        if self._metrics_port:
            # A successor has the port of the one that died.
            command = [*command, "--metrics-port", str(self._metrics_port + place)]
        # A session of its own: Ctrl-C in a terminal reaches it once, through this process.
        return subprocess.Popen(command, start_new_session=True)
