"""`waypost worker`: import the client, run its handlers, and report how they ended.

With `--processes N` it starts N worker processes and supervises them: it passes signals on and replaces a process
that dies.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from waypost.cli import metrics
from waypost.cli.exit_codes import INTERRUPTED, LEFT, USAGE, CommandError
from waypost.cli.options import add_command, add_log_options, integer_between
from waypost.cli.output import log_to_stderr, report_progress, write_json, write_stderr
from waypost.cli.reload import Reloader
from waypost.client import AsyncWaypost, Waypost
from waypost.client.base import BaseClient
from waypost.errors import ConfigurationError
from waypost.policy import CONCURRENCY_MAX, HEALTH_WINDOW_SECONDS
from waypost.values import Drained
from waypost.worker.signals import NAMES

if TYPE_CHECKING:
    from waypost.worker.sync_worker import SyncWorker
    from waypost.worker.worker import Worker

#: The shortest time between two restarts, or processes that die at once would keep the machine busy.
RESTART_SECONDS = 1.0
WATCH_SECONDS = 0.05
#: Longer than a stop may take, before a process that is to be started anew is killed.
RELOAD_SECONDS = 5.0
#: What the command itself writes in the first and the last lines, and which of several workers fires the schedules.
WORKER_EVENTS = ("worker_started", "worker_stopped", "scheduler_elected")


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "worker", run, "run the handlers of a client", store=False,
        json_text="at the end, a report as one JSON document (of each process)",
        more="It stops in order at SIGINT, SIGTERM or SIGHUP. Exit code 5: something was left running or unsettled.",
        examples=(
            "waypost worker shop", "waypost worker shop.queues:post --queues orders --processes 4",
            "waypost worker shop --reload --log-done info",
        ),
    )  # fmt: skip
    parser.add_argument(
        "target", metavar="module[:post]",
        help="where the client is: shop.queues:post, or shop.queues if it has one client only",
    )  # fmt: skip
    parser.add_argument("--queues", metavar="a,b", help="only these queues")
    parser.add_argument(
        "--concurrency",
        type=integer_between(1, CONCURRENCY_MAX),
        metavar="N",
        help="N messages of each queue at once",
    )
    parser.add_argument(
        "--max-handlers",
        type=integer_between(1, CONCURRENCY_MAX),
        metavar="N",
        help="N handlers at once over all queues, which take turns",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="N worker processes (1)")
    parser.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that handlers may run on after a signal (25)"
    )
    parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
    parser.add_argument(
        "--health-window", type=float, default=HEALTH_WINDOW_SECONDS, metavar="S",
        help="seconds without a possible claim after which its health is red (30)",
    )  # fmt: skip
    parser.add_argument("--no-scheduler", action="store_true", help="do not fire schedules")
    parser.add_argument("--promoter", action="store_true", help="also make timers of all queues ready")
    metrics.add_arguments(parser)
    add_log_options(parser, "info")
    parser.add_argument(
        "--log-done", default="debug", choices=("debug", "info"), help="how each message that is done is logged (debug)"
    )
    parser.add_argument("--reload", action="store_true", help="start anew when a Python file in this folder changes")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    log_to_stderr(options.log_level, options.log_format, without=WORKER_EVENTS)
    if options.log_done == "info":
        logging.getLogger("waypost.done").setLevel(logging.INFO)
    if options.processes < 1:
        raise CommandError("--processes is a whole number from 1", USAGE)
    if options.reload:
        return Reloader(
            options.arguments, Path.cwd(), stop_seconds=options.timeout + RELOAD_SECONDS, log_format=options.log_format
        ).run()
    if options.processes > 1:
        return Supervisor(
            options.arguments, options.processes, metrics_port=options.metrics_port, log_format=options.log_format
        ).run()
    client = import_client(options.target)
    if options.concurrency is not None:
        for handler in client.handlers:
            handler.concurrency = options.concurrency
    prometheus = metrics.install(client, options)
    queues = None if options.queues is None else options.queues.split(",")
    worker = client.worker(
        queues, max_handlers=options.max_handlers, health_window=options.health_window,
        scheduler=not options.no_scheduler, promoter=options.promoter,
    )  # fmt: skip
    if options.log_format == "text":
        write_stderr(describe_start(client, worker))
    try:
        with metrics.serve(worker, prometheus, options):
            report = run_worker(worker, options)
    except KeyboardInterrupt:
        write_stderr(
            "waypost worker ended without waiting; what it was handling is delivered again when the leases end"
        )
        return INTERRUPTED
    print_end(options, report, worker.reports())
    return 0 if report.complete else LEFT


def import_client(target: str) -> Waypost | AsyncWaypost:
    """Import the client that `module:name` names, or the only client of a `module`."""
    module_name, separator, path = target.partition(":")
    if not module_name or (separator and not path):
        raise ConfigurationError(f"the client is given as module:name, as in shop.queues:post, not {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        client: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"there is no module {error.name!r} here; run this where it can be imported") from None
    if not path:
        return find_client(client)
    for name in path.split("."):
        client = getattr(client, name, None)
    if not isinstance(client, Waypost | AsyncWaypost):
        raise ConfigurationError(f"{target} is {type(client).__name__}, not a Waypost or an AsyncWaypost")
    return client


def find_client(module: ModuleType) -> Waypost | AsyncWaypost:
    """Return the only client of a module."""
    clients = {name: one for name, one in vars(module).items() if isinstance(one, Waypost | AsyncWaypost)}
    if not clients:
        raise ConfigurationError(f"module {module.__name__} has no client: it has a line such as post = Waypost(url)")
    if len({id(one) for one in clients.values()}) > 1:
        names = ", ".join(f"{module.__name__}:{name}" for name in clients)
        raise ConfigurationError(f"module {module.__name__} has several clients: name one of {names}")
    return next(iter(clients.values()))


#: The default thresholds of the youngest generation in Python versions, and the one for a worker process.
GC_DEFAULTS, GC_WORKER = (700, 2_000), 20_000


def run_worker(worker: SyncWorker | Worker, options: argparse.Namespace) -> Drained:
    """Run the worker on a new event loop until it ends."""
    # Imported here: asyncio is most of what a process loads, and other commands do not need it.
    import asyncio

    from waypost.worker.sync_worker import SyncWorker, close_loop

    # A claim brings hundreds of objects that live for milliseconds; with the default threshold the collector
    # runs several times a claim, a fifth of a busy worker's time. A program that set its own threshold keeps it.
    if gc.get_threshold()[0] in GC_DEFAULTS:
        gc.set_threshold(GC_WORKER, *gc.get_threshold()[1:])
    if isinstance(worker, SyncWorker):
        return worker.run(until_empty=options.until_empty, timeout=options.timeout)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(worker.run(until_empty=options.until_empty, timeout=options.timeout))
    finally:
        close_loop(loop)


def describe_start(client: BaseClient, worker: SyncWorker | Worker) -> str:
    """Return the lines that describe the handlers, the store and its durability."""
    width = _width(handler.queue for handler in worker.handlers)
    store = client.store
    lines = [
        f"waypost worker {worker.name}",
        f"  {'store':{width}} {store.kind}, namespace {store.namespace}: {store.capabilities.durability}",
    ]
    for handler in worker.handlers:
        text = f"{handler.name}: {handler.concurrency} at once {handler.where}"
        if handler.batch is not None:
            text += f", batches of {handler.batch}"
        if handler.timeout is not None:
            text += f", at most {handler.timeout:g} s each"
        if handler.types:
            text += f", of type {' or '.join(sorted(handler.types))}"
        if handler.pool is not None:
            text += f", shared by its queues, weight {handler.weight}"
        lines.append(f"  {handler.queue:{width}} {text}")
    lines.append("  stop with SIGINT, SIGTERM or SIGHUP; a second one does not wait")
    return "\n".join(lines)


def print_end(options: argparse.Namespace, report: Drained, by_queue: dict[str, Drained] | None = None) -> None:
    """Write the report to stderr, and to stdout as JSON if requested."""
    if options.log_format == "text":
        write_stderr(describe_end(report, by_queue))
    if options.json:
        write_json({"complete": report.complete, "total": report, "queues": by_queue or {}})


def describe_end(report: Drained, by_queue: dict[str, Drained] | None = None) -> str:
    """Return the lines of the report: the total, and each queue where there are several."""
    lines = []
    if by_queue is not None and len(by_queue) > 1:
        width = _width(by_queue)
        lines = [f"  {queue:{width}} {one}" for queue, one in by_queue.items()]
    return "\n".join([*lines, f"waypost worker stopped: {report}"])


def _width(names: Iterable[str]) -> int:
    return max(10, *map(len, names))


@dataclass(slots=True)
class Child:
    """A worker process, its slot, and how many of the supervisor's signals were sent to it."""

    process: subprocess.Popen[bytes]
    slot: int
    signals_sent: int = 0


class Supervisor:
    """Supervises worker processes. They share nothing, so nothing has to survive a fork."""

    def __init__(
        self, arguments: list[str], count: int, *, metrics_port: int | None = None, log_format: str = "text"
    ) -> None:
        self._report = partial(report_progress, form=log_format)
        #: The port of the first process; the others get the ports after it. None or 0: all use the given option.
        self._metrics_port = metrics_port
        self._command = [sys.executable, "-m", "waypost.cli.main", *arguments, "--processes", "1"]
        self._children: list[Child] = []
        #: Slots without a process, and from when on each may get one.
        self._vacant = dict.fromkeys(range(count), 0.0)
        self._restart_due = 0.0
        #: The signals received, in order. The first requests a stop.
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until all processes have ended; return the highest of their exit codes."""
        for name in NAMES:
            # A signal can come between any two lines, also while a process is being started: it is only recorded
            # here, and the loop sends it to every process, also to one started meanwhile.
            signal.signal(getattr(signal, name), lambda number, frame: self._signals.append(number))
        count = len(self._vacant)
        self._report(f"{count} worker processes; a signal to this one ({os.getpid()}) is passed on to them")
        worst = 0
        while True:
            self._fill_slots()
            self._pass_on()
            worst = max([worst, *(self._handle_end(child) for child in self._remove_ended())])
            if not self._children and (self._signals or not self._vacant):
                return worst
            time.sleep(WATCH_SECONDS)

    def _fill_slots(self) -> None:
        for slot, due in list(self._vacant.items()):
            if self._signals or due > time.monotonic():
                continue
            try:
                process = self._start(slot)
            except OSError as error:
                if not self._children:
                    raise
                # As after the machine ran out of memory: the other processes must not be left without this one.
                self._report(f"a worker process could not be started ({error}); trying again")
                self._vacant[slot] = time.monotonic() + RESTART_SECONDS
                continue
            self._children.append(Child(process, slot))
            del self._vacant[slot]

    def _pass_on(self) -> None:
        """Send each process its next signal, one at a time: two at once could arrive as one."""
        for child in self._children:
            if child.signals_sent < len(self._signals):
                child.process.send_signal(self._signals[child.signals_sent])
                child.signals_sent += 1

    def _remove_ended(self) -> list[Child]:
        ended = [child for child in self._children if child.process.poll() is not None]
        self._children = [child for child in self._children if child not in ended]
        return ended

    def _handle_end(self, child: Child) -> int:
        """Return the exit code that counts for a process; schedule the restart of one that died, unless stopping."""
        code: int = child.process.returncode
        if child.signals_sent == 1 and code == -self._signals[0]:
            # A running worker handles the first signal. A process that it kills was still starting and held nothing,
            # or had already stopped.
            return 0
        if code == 0 or self._signals:
            return abs(code)
        self._report(f"worker process {child.process.pid} ended with {code}; starting another")
        now = time.monotonic()
        self._vacant[child.slot] = max(now, self._restart_due)
        self._restart_due = self._vacant[child.slot] + RESTART_SECONDS
        return 0

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        command = self._command
        if self._metrics_port:
            # A restarted process gets the port of the one that died.
            command = [*command, "--metrics-port", str(self._metrics_port + slot)]
        # A session of its own, so that Ctrl-C in a terminal reaches it once, through this process.
        return subprocess.Popen(command, start_new_session=True)
