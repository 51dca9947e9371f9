"""`manage.py waypost_worker`: run the handlers and tasks of the project."""

from __future__ import annotations

import atexit
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import autoreload

from waypost.client import Waypost
from waypost.django.configuration import read_configuration
from waypost.django.workers import configure_queues, worker_client
from waypost.errors import WaypostError
from waypost.worker.sync_worker import SyncWorker

#: The exit code of a worker that left messages running or unsettled, as `waypost worker` has it.
LEFT = 5


class Command(BaseCommand):
    """Runs until SIGINT, SIGTERM or SIGHUP, then lets running handlers end."""

    help = "Run the handlers and tasks of this project. SIGINT, SIGTERM and SIGHUP stop it in order."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the arguments."""
        parser.add_argument("--queues", metavar="a,b", help="only these queues of waypost, as in tasks.default,orders")
        parser.add_argument(
            "--max-handlers", type=int, metavar="N", help="N handlers at once over all queues, which take turns"
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=25.0,
            metavar="S",
            help="seconds that handlers may run on after a signal (25)",
        )
        parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
        parser.add_argument("--no-scheduler", action="store_true", help="do not fire schedules")
        parser.add_argument("--promoter", action="store_true", help="also make timers of all queues ready")
        parser.add_argument(
            "--reload", action="store_true", default=None, help="start again when code changes (default with DEBUG)"
        )
        parser.add_argument("--no-reload", action="store_false", dest="reload", help="do not start again")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        wanted = options["reload"]
        if (settings.DEBUG if wanted is None else wanted) and not options["until_empty"]:
            autoreload.run_with_reloader(self._run_in_thread, options)
        else:
            post, worker = self._make(options)
            with post:
                self._finish(worker, options)

    def _make(self, options: dict[str, Any]) -> tuple[Waypost, SyncWorker]:
        queues = None if options["queues"] is None else [name.strip() for name in options["queues"].split(",")]
        try:
            post = worker_client(queues)
            try:
                configure_queues(post, read_configuration())
                worker = post.worker(
                    queues, max_handlers=options["max_handlers"], scheduler=not options["no_scheduler"],
                    promoter=options["promoter"],
                )  # fmt: skip
            except BaseException:
                post.close()
                raise
        except WaypostError as error:
            raise CommandError(str(error)) from error
        if options["verbosity"]:
            self.stderr.write(
                f"waypost worker {worker.name}: {', '.join(dict.fromkeys(one.queue for one in worker.handlers))}"
            )
        return post, worker

    def _finish(self, worker: SyncWorker, options: dict[str, Any], *, signals: bool = True) -> None:
        try:
            report = worker.run(until_empty=options["until_empty"], signals=signals, timeout=options["timeout"])
        except WaypostError as error:
            raise CommandError(str(error)) from error
        if options["verbosity"]:
            left = "" if report.complete else f", {report.running + report.unsettled} left: delivered again later"
            self.stderr.write(f"waypost worker stopped: {report.handled} handled, {report.released} released{left}")
        if not report.complete and signals:
            sys.exit(LEFT)

    def _run_in_thread(self, options: dict[str, Any]) -> None:
        """Run beside Django's reloader, which has the main thread and the signals."""
        post, worker = self._make(options)

        def stop(**_: Any) -> None:
            worker.stop(options["timeout"])

        def on_change(file_path: Path, **_: Any) -> None:
            # The reloader ends the process next: what runs may finish, what has not begun is given back.
            if file_path.suffix == ".py":
                stop()

        autoreload.file_changed.connect(on_change, weak=False)
        atexit.register(stop)
        with post:
            self._finish(worker, options, signals=False)
