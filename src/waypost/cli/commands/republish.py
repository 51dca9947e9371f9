"""`waypost pipeline backfill` and `redrive`: rows of a table as messages, and dead letters chosen by SQL."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from waypost.cli.action_log import Entry, logged_action
from waypost.cli.exit_codes import FOUND, INTERRUPTED
from waypost.cli.options import parse_duration
from waypost.cli.output import write, write_json, write_stderr
from waypost.client import Waypost
from waypost.errors import ConfigurationError
from waypost.formatting import format_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waypost.spark.republish.audit import Audit
    from waypost.spark.republish.plan import Preview

#: With a rate, sending slows down while the oldest ready message has been waiting for longer.
MAX_AGE_SECONDS = 10.0


def add_backfill(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `backfill`."""
    parser.add_argument(
        "--from", dest="source", metavar="SOURCE",
        help="SQL (SELECT …), or the path of Parquet, CSV, JSON lines or a Delta table",
    )  # fmt: skip
    parser.add_argument("--queue", help="the queue that rows are compared with and published to")
    parser.add_argument("--id", metavar="a,b", help="the columns that identify a row")
    parser.add_argument("--json-body", action="store_true", help="the column body is JSON text")
    parser.add_argument("--allow-gaps", action="store_true", help="accept that not all of the history is known")
    add_common(parser)


def add_redrive(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `redrive`."""
    parser.add_argument(
        "--where", metavar="SQL",
        help="which dead letters: \"reason = 'rejected' and body:country::string = 'ES'\"",
    )  # fmt: skip
    parser.add_argument("--queue", metavar="a,b", help="only letters of these queues")
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare what both have."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="only print what would be done; so it is without --apply")
    what.add_argument("--apply", action="store_true", help="do it, or continue what was interrupted")
    what.add_argument("--status", metavar="NAME", help="print what became of an earlier one")
    parser.add_argument("--name", help="its name (one by its arguments, so that the same command continues it)")
    parser.add_argument("--to-queue", metavar="QUEUE", help="publish to this queue instead")
    parser.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="the priority of what is published (0, the lowest); a letter that is redriven keeps its own",
    )
    parser.add_argument("--rate", metavar="N/UNIT", help="send at most so many, such as 500/s")
    parser.add_argument(
        "--max-age", type=parse_duration, metavar="S",
        help=f"slow down while the oldest ready message is older; with --rate {MAX_AGE_SECONDS:.0f}s, else never",
    )  # fmt: skip
    parser.add_argument(
        "--redact", metavar="MODULE:FUNCTION", help="the redact hook for the journal, as publishers have it"
    )
    parser.add_argument(
        "--in-doubt", choices=("ask", "send", "skip"), default="ask",
        help="what may have been sent before a kill: ask store and lake, send it, or skip it (ask)",
    )  # fmt: skip


def run_backfill(options: argparse.Namespace) -> int:
    """Publish the new rows of a table and return the exit code."""
    if options.status is not None:
        return print_status(options)
    for name, option in (("source", "--from"), ("queue", "--queue"), ("id", "--id")):
        if getattr(options, name) is None:
            raise ConfigurationError(f"give {option}, or --status NAME to see what became of an earlier backfill")
    from waypost.spark.republish.api import backfill

    ids = [name.strip() for name in options.id.split(",") if name.strip()]

    def act(**common: Any) -> Preview | Audit:
        return backfill(
            rows=options.source, queue=options.queue, id=ids, json=options.json_body, allow_gaps=options.allow_gaps,
            **common,
        )  # fmt: skip

    python = f"waypost.spark.backfill(spark, lake, rows, queue={options.queue!r}, id={ids!r}, dry_run=False)"
    return run_either(options, act, python)


def run_redrive(options: argparse.Namespace) -> int:
    """Redrive the dead letters that a condition chooses and return the exit code."""
    if options.status is not None:
        return print_status(options)
    if options.where is None:
        raise ConfigurationError(
            "give --where with a condition, such as \"reason = 'rejected'\", or --status NAME to see what became of an "
            "earlier redrive"
        )
    from waypost.spark.republish.api import redrive

    queues = [name.strip() for name in (options.queue or "").split(",") if name.strip()]
    python = f"waypost.spark.redrive(spark, lake, {options.where!r}, queues={queues!r}, dry_run=False)"
    return run_either(options, lambda **common: redrive(where=options.where, queues=queues, **common), python)


def run_either(options: argparse.Namespace, act: Callable[..., Preview | Audit], python: str) -> int:
    """Run a backfill or redrive. Spark is started only where something is planned; Ctrl-C is a pause.

    With `--apply` it is an entry in the log of actions.
    """
    from waypost.cli.commands import pipeline
    from waypost.spark.republish.audit import Audit
    from waypost.worker.signals import StopSignals

    place, stop = pipeline.store_of(options), threading.Event()
    max_age = MAX_AGE_SECONDS if options.max_age is None and options.rate is not None else options.max_age
    with ExitStack() as stack:
        started: list[SparkSession] = []

        def start() -> SparkSession:
            if not started:
                interrupt = signal.getsignal(signal.SIGINT)
                started.append(stack.enter_context(pipeline.open_session(options, pipeline.LARGE))[0])
                # Spark replaces it, and raises an error in the middle of whatever runs.
                signal.signal(signal.SIGINT, interrupt)
            return started[0]

        stack.enter_context(StopSignals(lambda name: stop.set()))
        entry = Entry()
        if options.apply:
            queue = options.to_queue or (None if "," in (options.queue or "") else options.queue)
            post = stack.enter_context(Waypost(place.resolve(), namespace=place.namespace))
            entry = stack.enter_context(logged_action(options, post, options.action, queue, python))
        found = act(
            spark=start, lake=options.lake, store=place, dry_run=not options.apply, name=options.name,
            to_queue=options.to_queue, priority=options.priority, rate=options.rate, max_age=max_age,
            in_doubt=options.in_doubt, redact=options.redact, stop=stop, progress=write_stderr,
        )  # fmt: skip
        if isinstance(found, Audit):
            entry.text = f"{found.name}: {'paused, ' if found.phase == 'paused' else ''}{found.text}"
    if not isinstance(found, Audit):
        print_preview(options, found)
        return 0
    print_audit(options, found)
    return INTERRUPTED if found.phase == "paused" else FOUND if found.sent.get("refused") else 0


def print_preview(options: argparse.Namespace, found: Preview) -> None:
    """Print what would be done."""
    if options.json:
        write_json({"dry_run": True, "queue": found.queue, "counts": found.counts, "samples": found.samples})
        return
    write(", ".join(f"{count:,} {name}" for name, count in found.counts.items()))
    for sample in found.samples:
        write("  " + "  ".join(f"{name}={value}" for name, value in sample.items() if value is not None))
    count = found.counts.get("new", found.counts.get("letters", 0))
    what = "would be published to" if "new" in found.counts else "would be redriven in"
    write(f"dry run: {format_count(count, 'message')} {what} queue {found.queue}; --apply does it" if count else
          "dry run: there is nothing to do")  # fmt: skip


def print_audit(options: argparse.Namespace, found: Audit) -> None:
    """Print what became of it."""
    if options.json:
        import msgspec

        write_json(msgspec.to_builtins(found) | {"text": found.text})
        return
    if found.input.get("rows"):
        write("input: " + ", ".join(f"{count:,} {name}" for name, count in found.input.items()))
    for reason in found.reasons:
        write(f"refused: {reason}")
    if found.phase == "paused":
        write(f"paused; the same command continues {found.name}")
    write(f"{found.name}: {found.text}")


def print_status(options: argparse.Namespace) -> int:
    """Print what became of an earlier backfill or redrive, and return the exit code."""
    from waypost.cli.commands import pipeline
    from waypost.spark.lake.lake import Lake
    from waypost.spark.republish.audit import audit
    from waypost.spark.republish.state import find_records

    lake = Lake(options.lake)
    print_audit(options, audit(find_records(lake.files, options.status), lake, pipeline.store_of(options)))
    return 0
