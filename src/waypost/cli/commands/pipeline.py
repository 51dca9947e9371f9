"""`waypost pipeline`: the history of a store as tables of a lake, built with Spark."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waypost.cli.commands import insight, pipeline_schedule, republish
from waypost.cli.commands.pipeline_schedule import parse_batch_rows
from waypost.cli.exit_codes import FOUND
from waypost.cli.options import Run, add_command, check_sqlite_file, integer_between, parse_day, parse_time_or_day
from waypost.cli.output import write, write_json, write_stderr
from waypost.errors import ConfigurationError, MissingExtra, WaypostError
from waypost.formatting import format_count
from waypost.policy import LAKE_KEEP_DAYS_MAX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waypost.spark.lake.audit import Audit, FindingEvent
    from waypost.spark.lake.freshness import RunReport
    from waypost.spark.lake.pipeline import NoSession, Pipeline
    from waypost.spark.source.credentials import Place

#: The variable that passes a URL with a password to the tasks on this machine, which inherit it.
STORE_VARIABLE = "WAYPOST_PIPELINE_STORE"
#: The store of a new lake, as for all other commands.
URL_VARIABLE = "WAYPOST_URL"
#: How many findings of each kind are printed with their events.
FINDINGS_MAX = 20
#: From this many events on, the full optimization of Java's compiler pays off.
LARGE = 500_000
QUEUES_COUNTED_MAX = 1_000


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "pipeline", None, "tables of the history, built with Spark", store=False, json_text=None,
        examples=("waypost pipeline run --store valkey://127.0.0.1:6379 --lake lake",
                  "waypost pipeline ingest --lake lake --queue orders --schema 'id BIGINT, total DOUBLE'",
                  "waypost pipeline audit --lake lake", "waypost pipeline report --lake lake"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    run = _add_action(actions, "run", run_pipeline, "load the journal into the lake: bronze, silver, gold")
    _add_store(run)
    run.add_argument("--queue", metavar="a,b", help="only these queues")
    run.add_argument(
        "--from", dest="since", type=parse_time_or_day, metavar="TIME",
        help="queues that the lake does not have begin here: a day, or a time with its zone",
    )  # fmt: skip
    run.add_argument(
        "--to", dest="until", type=parse_time_or_day, metavar="TIME", help="load only events before this time"
    )
    run.add_argument("--follow", action="store_true", help="keep running, and load new events")
    run.add_argument("--every", type=float, default=10.0, metavar="S", help="with --follow: every S seconds (10)")
    run.add_argument("--batch-rows", type=parse_batch_rows, metavar="N", help="most events in one batch (1,000,000)")
    run.add_argument("--reader", metavar="NAME", help="register as a reader of the journal, so that trimming waits")
    run.add_argument("--format", help="of the files of the tables: parquet, no other")
    run.add_argument("--moved", action="store_true", help="it is the same store under a new URL")
    run.add_argument(
        "--backfills", choices=("count", "exclude"),
        help="whether gold counts messages of backfills from now on; the lake remembers it (count)",
    )  # fmt: skip
    run.add_argument("--metrics", metavar="FILE", help="write how fresh the lake is to a file, for Prometheus")
    ingest = _add_action(actions, "ingest", run_ingest, "load the messages of a queue into the lake, with their bodies")
    _add_store(ingest)
    ingest.add_argument("--queue", required=True, help="the queue; its journal must be at level full")
    ingest.add_argument(
        "--schema", metavar="DDL", help='columns of the bodies: "id BIGINT, name STRING", or a .json file'
    )
    ingest.add_argument("--batch-rows", type=parse_batch_rows, metavar="N", help="most messages in one batch (100,000)")
    ingest.add_argument(
        "--allow-gaps",
        action="store_true",
        help="continue where messages were trimmed, or journalled without their bodies",
    )
    rebuild = _add_action(
        actions, "rebuild", run_rebuild, "make days of silver and gold anew from the events in bronze",
        more="Each day is replaced in one step. The store is not read.",
    )  # fmt: skip
    rebuild.add_argument(
        "--day", action="append", required=True, type=parse_day, metavar="DAY",
        help="a day in UTC, such as 2026-03-01; may be repeated",
    )  # fmt: skip
    _add_scheduled(actions)
    tidy = _add_action(actions, "tidy", run_tidy, "merge small files, and delete old rows")
    tidy.add_argument(
        "--keep-days", type=integer_between(1, LAKE_KEEP_DAYS_MAX), metavar="N",
        help="delete rows of bronze and silver older than N days",
    )  # fmt: skip
    views = add_command(
        actions, "views", run_views, "print CREATE VIEW statements for the tables of a lake", store=False,
        json_text="the statements as one JSON object", more="This command does not need Spark.",
        examples=("waypost pipeline views --lake lake --catalog main.waypost",
                  "waypost pipeline views --lake lake --dialect duckdb"),
    )  # fmt: skip
    views.add_argument("--lake", required=True, metavar="DIR", help="the lake that `waypost pipeline run` fills")
    views.add_argument("--catalog", metavar="NAME", help="the schema, or catalog and schema, of the views")
    views.add_argument(
        "--dialect", choices=("spark", "duckdb"), default="spark", help="spark with Delta, or duckdb (spark)"
    )
    upgrade = add_command(
        actions, "upgrade", run_upgrade, "convert a lake or an output of release 0.1 to Delta tables, once",
        store=False, json_text="its path as one JSON object", more="This command does not need Spark.",
        examples=("waypost pipeline upgrade --lake lake", "waypost pipeline upgrade --output lake/orders"),
    )  # fmt: skip
    what = upgrade.add_mutually_exclusive_group(required=True)
    what.add_argument("--lake", metavar="DIR", help="the lake: a folder, or a URI as s3://bucket/lake")
    what.add_argument("--output", metavar="DIR", help="the output of waypost.spark.consume")
    _add_republishing(actions)
    _add_answers(actions)


def _add_republishing(actions: Any) -> None:
    """Declare the actions that publish."""
    backfill = _add_action(
        actions, "backfill", map_spark_errors(republish.run_backfill),
        "publish the rows of a table that no message of a queue ever was",
        more="Without --apply it only prints counts and samples. It can be killed or interrupted at any time: the same "
        "command continues it, and publishes nothing twice.",
    )  # fmt: skip
    _add_store(backfill)
    republish.add_backfill(backfill)
    redrive = _add_action(
        actions, "redrive", map_spark_errors(republish.run_redrive), "redrive the dead letters that SQL chooses",
        more="Without --apply it only prints counts and samples. Conditions may name tables of the lake in subqueries.",
    )  # fmt: skip
    _add_store(redrive)
    republish.add_redrive(redrive)


def _add_scheduled(actions: Any) -> None:
    """Declare the actions that run the pipeline as messages."""
    schedule = add_command(
        actions, "schedule", pipeline_schedule.run_schedule, "run the pipeline regularly, as messages of a queue",
        store=False, more="Runs do not overlap; one that fails is retried, and then a dead letter. `waypost pipeline "
        "worker` runs them. This command does not need Spark.",
        examples=('waypost pipeline schedule --lake lake --cron "*/5 * * * *"',
                  "waypost pipeline schedule --lake lake --show", "waypost pipeline schedule --lake lake --remove"),
    )  # fmt: skip
    schedule.add_argument(
        "--lake", required=True, metavar="DIR", help="the lake: a folder, or a URI as s3://bucket/lake"
    )
    # Where Spark runs is decided by the worker.
    schedule.set_defaults(master="local[*]")
    _add_store(schedule)
    pipeline_schedule.add_schedule(schedule)
    worker = _add_action(
        actions, "worker", map_spark_errors(pipeline_schedule.run_worker),
        "run the pipeline for each message of a queue",
        more="It also fires the schedule. It stops in order at SIGINT, SIGTERM or SIGHUP.",
    )  # fmt: skip
    _add_store(worker)
    pipeline_schedule.add_worker(worker)


def _add_answers(actions: Any) -> None:
    """Declare the actions that answer from a lake."""
    audit = _add_action(
        actions, "audit", run_audit, "compare the whole history with what the store holds",
        more="The last line is `0 unaccounted of N` when all is well; otherwise the exit code is 1.",
    )  # fmt: skip
    _add_store(audit)
    audit.add_argument("--queue", metavar="a,b", help="only these queues")
    simulate = _add_action(
        actions, "simulate", map_spark_errors(insight.run_simulate),
        "serve the recorded history under other settings",
        more="First the present settings are compared with what was observed; where they do not fit, no number is "
        "given and the exit code is 1.",
    )  # fmt: skip
    _add_store(simulate)
    insight.add_simulate(simulate)
    advise = _add_action(
        actions, "advise", map_spark_errors(insight.run_advise), "advise other settings, by what was recorded",
        more="With --apply settings are changed and the undo is printed; what was advised before is judged. The exit "
        "code is 1 if there is advice that was not applied.",
    )  # fmt: skip
    _add_store(advise)
    insight.add_advise(advise)
    report = add_command(
        actions, "report", run_report, "write one HTML page with charts of the pipeline's tables", store=False,
        json_text="its path as one JSON object", more="The page works offline. This command does not need Spark.",
        examples=("waypost pipeline report --lake lake --output report.html",),
    )  # fmt: skip
    report.add_argument("--lake", required=True, metavar="DIR", help="the lake that `waypost pipeline run` fills")
    report.add_argument("--output", metavar="FILE", help="where to write it (report.html in the lake)")


def _add_action(actions: Any, name: str, run: Run, text: str, more: str = "") -> argparse.ArgumentParser:
    """Add an action that runs Spark on a lake."""
    parser = add_command(actions, name, run, text, store=False, more=more)
    parser.add_argument("--lake", required=True, metavar="DIR", help="the lake: a folder, or a URI as s3://bucket/lake")
    parser.add_argument(
        "--master", default="local[*]", help="the Spark master, or sc://HOST for Spark Connect (local[*])"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of Spark; may be repeated"
    )
    parser.add_argument("--log", metavar="FILE", help="Spark's own log (a temporary file, kept if it fails)")
    return parser


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", "--url", metavar="URL", help="the store; a lake remembers its own, a new one takes WAYPOST_URL"
    )
    parser.add_argument("--store-env", metavar="NAME", help="the environment variable that holds the URL instead")
    parser.add_argument("--namespace", default=os.environ.get("WAYPOST_NAMESPACE") or "wp", help="the namespace (wp)")


def choose_store(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the URL of the store, or the variable that holds it. A URL with a password always goes into a variable."""
    from waypost.urls import holds_secret

    if options.store is not None and options.store_env is not None:
        raise ConfigurationError("give one of --store and --store-env, not both")
    if options.store is not None and holds_secret(options.store):
        if not options.master.startswith("local"):
            raise ConfigurationError(
                f"the URL of the store holds a password, which executors of {options.master} would not get: put it "
                "into an environment variable that they have, and give its name with --store-env"
            )
        os.environ[STORE_VARIABLE] = options.store
        return None, STORE_VARIABLE
    if options.store is None and options.store_env is None and os.environ.get(URL_VARIABLE):
        from waypost.spark.lake.lake import Lake

        if Lake(options.lake).state.source is None:
            return None, URL_VARIABLE
    return options.store, options.store_env


def _parse_settings(options: argparse.Namespace) -> dict[str, str]:
    settings = {}
    for given in options.config:
        key, separator, value = given.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"--config is KEY=VALUE, such as spark.driver.memory=4g, not {given!r}")
        settings[key] = value
    return settings


def store_of(options: argparse.Namespace) -> Place:
    """Return the store that the options name, or that the lake remembers. A SQLite file must exist.

    The store of a lake is known, and another one is refused: the history of the lake says nothing about it.
    """
    from waypost.spark.lake.lake import Lake
    from waypost.spark.source.credentials import Place

    store, store_env = choose_store(options)
    source = Lake(options.lake).state.source
    if store is not None or store_env is not None:
        place = Place(url=store, url_env=store_env, namespace=options.namespace)
        if source is not None and not getattr(options, "moved", False):
            known = (source.url, source.url_env, source.namespace)
            if known != (place.url, place.url_env, place.namespace):
                raise ConfigurationError(
                    f"the lake {options.lake} was made from {source.url or source.url_env} (namespace "
                    f"{source.namespace}), not from this store (namespace {place.namespace}): leave out --store, or "
                    "name the lake of this store; if the store has only moved, use `waypost pipeline run --moved` once"
                )
    elif source is not None:
        place = Place(url=source.url, url_env=source.url_env, namespace=source.namespace)
    else:
        raise ConfigurationError(f"the lake {options.lake} is new: give its store with --store")
    check_sqlite_file(place.resolve(), place.namespace)
    return place


def estimate_events(options: argparse.Namespace) -> int:
    """Return about how many events a run will load. Fails at once if the store cannot be reached."""
    from waypost.spark.lake.lake import Lake
    from waypost.spark.source.bulk import open_bulk

    state = Lake(options.lake).state
    with open_bulk(store_of(options)) as bulk:
        known = None if state.source is None else state.source.queues
        queues = _parse_queues(options) or known or bulk.run(bulk.store.queues())
        if len(queues) > QUEUES_COUNTED_MAX:
            return LARGE
        return sum(max(0, bulk.bounds(queue)[1] - state.offsets.get(queue, 0)) for queue in queues)


def make_settings(options: argparse.Namespace, events: int) -> tuple[dict[str, str], Path]:
    """Return the settings of Spark for a run of about so many events, and the file for its log."""
    from waypost.spark.lake.pipeline import SETTINGS, local_settings
    from waypost.spark.private_directory import private_directory
    from waypost.spark.session import JAVA_OPTIONS

    # An error in a callback is raised to the caller, and reported once, in a sentence.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    is_local = options.master.startswith("local")
    given, ours = _parse_settings(options), local_settings() if is_local else SETTINGS
    settings = {**ours, **given}
    if is_local and JAVA_OPTIONS in given:
        settings[JAVA_OPTIONS] = f"{ours[JAVA_OPTIONS]} {given[JAVA_OPTIONS]}"
    if events < LARGE and is_local:
        # In a short run Java's compiler costs more than it gains.
        settings[JAVA_OPTIONS] = f"-XX:TieredStopAtLevel=1 {settings.get(JAVA_OPTIONS, '')}".strip()
    return settings, Path(options.log) if options.log else private_directory() / "log"


def session_maker(options: argparse.Namespace) -> Callable[[], SparkSession]:
    """Return a function that opens a session for many runs, whose Java writes into a file.

    Raises `MissingExtra` if Spark cannot start here: each run would fail by it.
    """
    from waypost.spark import terminal
    from waypost.spark.jobs import CANCEL_SETTINGS, check_can_start

    check_can_start(options.master)
    settings, log = make_settings(options, LARGE)
    if not options.master.startswith("sc://"):
        settings = {**CANCEL_SETTINGS, **settings}
    return lambda: terminal.start_quietly(options.master, settings, log)


@contextmanager
def open_session(options: argparse.Namespace, events: int) -> Iterator[tuple[SparkSession, Callable[[str], None]]]:
    """Yield a Spark session and a function that reports progress."""
    from waypost.spark.terminal import Progress, quiet_session

    settings, log = make_settings(options, events)
    with quiet_session(options.master, settings, log) as spark, Progress(spark, sys.stderr) as progress:
        yield spark, progress.write_line


def map_spark_errors(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command so that every error of Spark becomes one sentence."""

    def run(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except (WaypostError, KeyboardInterrupt, ImportError):
            raise
        except Exception as error:
            from waypost.spark.private_directory import keep_directory, private_directory
            from waypost.spark.spark_errors import add_reason, map_spark_error

            log = Path(options.log) if options.log else private_directory() / "log"
            if not options.log:
                keep_directory(private_directory())
                write_stderr(f"waypost: Spark's own log is {log}")
            raise add_reason(map_spark_error(error), log) from error

    return run


def _parse_queues(options: argparse.Namespace) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in options.queue.split(",") if name.strip()) if options.queue else None


def make_pipeline(
    options: argparse.Namespace,
    spark: SparkSession | NoSession,
    report_progress: Callable[[str], None],
    queues: tuple[str, ...] | None,
    partitions: int | None = None,
) -> Pipeline:
    """Return the pipeline that the options describe."""
    from waypost.spark.lake.journal import BATCH_ROWS
    from waypost.spark.lake.pipeline import Pipeline

    store, store_env = choose_store(options)
    return Pipeline(
        spark,
        options.lake,
        store=store,
        store_env=store_env,
        namespace=options.namespace,
        queues=queues,
        batch_rows=getattr(options, "batch_rows", None) or BATCH_ROWS,
        partitions=partitions,
        format=getattr(options, "format", None),
        reader=getattr(options, "reader", None),
        moved=getattr(options, "moved", False),
        gold_without_backfills=_excludes_backfills(options),
        progress=report_progress,
    )


def _excludes_backfills(options: argparse.Namespace) -> bool | None:
    chosen = getattr(options, "backfills", None)
    return None if chosen is None else chosen == "exclude"


@map_spark_errors
def run_pipeline(options: argparse.Namespace) -> int:
    """Load the journal into the lake and return the exit code. Spark is started only if there is something to load."""
    if options.follow and options.until is not None:
        raise ConfigurationError("--to ends a run, and --follow keeps it running: give one of them")
    if options.since is not None and options.until is not None and options.since >= options.until:
        raise ConfigurationError(f"--from {options.since} must be before --to {options.until}")
    from waypost.spark.lake.pipeline import NoSession, SparkNeeded, check_every
    from waypost.worker.signals import StopSignals

    check_every(options.every)
    began = time.monotonic()
    events = LARGE if options.follow else estimate_events(options)
    if not events:
        # If an event comes meanwhile, or files are to be merged, Spark is started after all.
        with suppress(SparkNeeded):
            pipeline = make_pipeline(options, NoSession(), write_stderr, _parse_queues(options), partitions=1)
            _load_once(pipeline, options, began, time.monotonic())
            return 0
    with open_session(options, events) as (spark, report_progress):
        started = time.monotonic()
        pipeline = make_pipeline(options, spark, report_progress, _parse_queues(options))
        if options.follow:
            stop, before = threading.Event(), pipeline.lake.count_rows()
            with StopSignals(lambda name: stop.set()):
                after_turn = MetricsFile(pipeline, options.metrics, started - began)
                pipeline.follow(options.every, stop, after_turn, since=options.since)
            _report_end(pipeline, options, before, began, started)
        else:
            _load_once(pipeline, options, began, started)
    return 0


def _load_once(pipeline: Pipeline, options: argparse.Namespace, began: float, started: float) -> None:
    before = pipeline.lake.count_rows()
    pipeline.run(since=options.since, until=options.until)
    _report_end(pipeline, options, before, began, started)


def _report_end(
    pipeline: Pipeline, options: argparse.Namespace, before: dict[str, int], began: float, started: float
) -> None:
    from waypost.spark.lake.freshness import report_run

    ended = time.monotonic()
    seconds = {"start": started - began, "run": ended - started, "total": ended - began}
    _print_end(pipeline, options, report_run(pipeline, before, seconds))


class MetricsFile:
    """Writes the metrics after each turn of a run that follows the journal: what is new since the turn before."""

    def __init__(self, pipeline: Pipeline, path: str | None, start_seconds: float) -> None:
        self._pipeline, self._path = pipeline, path
        self._before, self._start_seconds = pipeline.lake.count_rows(), start_seconds
        self._ended = time.monotonic()

    def __call__(self) -> None:
        """Write the file, if one was given. One that cannot be written does not end the run."""
        if self._path is None:
            return
        from waypost.spark.lake.freshness import report_run, write_metrics

        now = time.monotonic()
        seconds = {"start": self._start_seconds, "run": now - self._ended, "total": now - self._ended}
        try:
            write_metrics(report_run(self._pipeline, self._before, seconds), self._path)
        except OSError as error:
            write_stderr(f"waypost: the metrics cannot be written to {self._path}: {error}")
        self._before, self._ended = self._pipeline.lake.count_rows(), now


def _print_end(pipeline: Pipeline, options: argparse.Namespace, report: RunReport) -> None:
    state, lake = pipeline.lake.state, pipeline.lake.files.address
    events = sum(seen.events for seen in state.seen.values())
    not_seen = {queue: seen.not_seen for queue, seen in sorted(state.seen.items()) if seen.not_seen}
    if options.metrics:
        from waypost.spark.lake.freshness import write_metrics

        write_metrics(report, options.metrics)
    if options.json:
        import msgspec

        found: dict[str, Any] = {"lake": lake, "events": events, "queues": sorted(state.seen), "not_seen": not_seen}
        write_json(found | msgspec.to_builtins(report))
        return
    write(f"{events:,} events of {len(state.seen)} queues in the lake {lake}")
    for queue, number in not_seen.items():
        left_out = state.left_out.get(queue, 0)
        why = "left out by --from" if number == left_out else "the journal was trimmed before them"
        if 0 < left_out < number:
            why = "left out by --from, or trimmed from the journal before"
        write(f"{queue}: {number:,} events not seen, {why}")


def run_views(options: argparse.Namespace) -> int:
    """Print the statements and return the exit code."""
    from waypost.spark.lake.lake import Lake
    from waypost.spark.lake.views import create_views

    lake = Lake(options.lake)
    statements = create_views(
        [(name, lake.files.uri(name)) for name in lake.table_names()], options.catalog, options.dialect
    )
    if options.json:
        write_json({"lake": lake.files.address, "statements": statements})
    else:
        write("\n".join(statements))
    return 0


@map_spark_errors
def run_audit(options: argparse.Namespace) -> int:
    """Compare the history with the store and return the exit code."""
    from waypost.spark.lake.audit import audit
    from waypost.spark.lake.lake import Lake

    queues = _parse_queues(options)
    with open_session(options, estimate_events(options)) as (spark, report_progress):
        # A lake that exists keeps the queues that it is made from.
        loaded = queues if Lake(options.lake).state.source is None else None
        found = audit(make_pipeline(options, spark, report_progress, loaded), queues)
    if options.json:
        write_json(found, indent=2)
    else:
        write(format_audit(found))
    return 0 if found.is_clean else FOUND


def format_audit(audit: Audit) -> str:
    """Return the result as lines, the verdict last."""
    lines = []
    for name, queue in sorted(audit.queues.items()):
        where = ", ".join(f"{count:,} {state}" for state, count in queue.accounted.items())
        lines.append(f"{name}: {queue.published:,} published{': ' if where else ''}{where}")
        if queue.not_seen:
            lines.append(f"{name}: {queue.not_seen:,} events not seen")
        if queue.undecided:
            lines.append(f"{name}: {queue.undecided:,} messages whose end may be among the events not seen")
        for counter, count in queue.overcounted.items():
            lines.append(f"{name}: the journal has {count:,} more {counter} than the store has counted")
    kinds = (audit.unaccounted, audit.duplicates_unexplained, audit.unrecorded, audit.out_of_order)
    counts = (
        audit.unaccounted_count,
        audit.duplicates_unexplained_count,
        audit.unrecorded_count,
        audit.out_of_order_count,
    )
    for finding in (finding for findings in kinds for finding in findings[:FINDINGS_MAX]):
        lines.append(f"{finding.queue}: {finding.message_id}: {finding.fault}")
        lines += [f"    {_format_event(event)}" for event in finding.events]
    if max(counts) > FINDINGS_MAX:
        lines.append("more of them are in audit.json in the lake")
    if audit.duplicates_unexplained_count:
        lines.append(f"{audit.duplicates_unexplained_count:,} unexplained duplicates")
    if audit.unrecorded_count:
        lines.append(f"{audit.unrecorded_count:,} unrecorded: the store has them, and the journal does not say why")
    if audit.out_of_order_count:
        lines.append(f"{audit.out_of_order_count:,} out of order: claimed before their ordered group allowed it")
    at_least = "at least " if audit.has_more else ""
    lines.append(f"{at_least}{audit.unaccounted_count:,} unaccounted of {audit.published:,}")
    return "\n".join(lines)


def _format_event(event: FindingEvent) -> str:
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    parts = {"token": event.token, "worker": event.worker, "cause": event.cause, "reason": event.reason}
    rest = "".join(f"  {name} {value}" for name, value in parts.items() if value is not None)
    return f"{at}  {event.number}  {event.event}{rest}"


@map_spark_errors
def run_ingest(options: argparse.Namespace) -> int:
    """Load messages into the lake and return the exit code."""
    from waypost.spark.lake.ingest import BATCH_ROWS, Ingest, count_messages, read_schema
    from waypost.spark.source.credentials import Place

    # Before Java starts: tasks inherit Java's environment, which passes the password.
    store, store_env = choose_store(options)
    if store is not None or store_env is not None:
        check_sqlite_file(Place(url=store, url_env=store_env).resolve(), options.namespace)
    with open_session(options, LARGE) as (spark, report_progress):
        ingest = Ingest(
            spark,
            options.lake,
            options.queue,
            store=store,
            store_env=store_env,
            namespace=options.namespace,
            schema=None if options.schema is None else read_schema(options.schema),
            batch_rows=options.batch_rows or BATCH_ROWS,
            allow_gaps=options.allow_gaps,
            progress=report_progress,
        )
        ingest.run()
        found = count_messages(ingest)
    if options.json:
        write_json({"queue": options.queue, **found})
        return 0
    aside = f", {found['corrupt']:,} put aside that the schema does not fit" if found["corrupt"] else ""
    write(f"{found['rows']:,} messages of queue {options.queue} in the lake{aside}")
    return 0


@map_spark_errors
def run_rebuild(options: argparse.Namespace) -> int:
    """Make days anew and return the exit code."""
    import msgspec

    from waypost.spark.lake.pipeline import Pipeline

    began = time.monotonic()
    with open_session(options, LARGE) as (spark, report_progress):
        pipeline = Pipeline(spark, options.lake, progress=report_progress)
        days = [pipeline.rebuild(day) for day in sorted(set(options.day))]
    if options.json:
        seconds = round(time.monotonic() - began, 3)
        write_json({"lake": pipeline.lake.files.address, "seconds": seconds, "days": msgspec.to_builtins(days)})
        return 0
    for day in days:
        rows = sum(day.rows.values())
        write(f"{day.day}: {format_count(rows, 'row')} of silver and gold from {format_count(day.events, 'event')}")
    return 0


@map_spark_errors
def run_tidy(options: argparse.Namespace) -> int:
    """Merge small files and return the exit code."""
    from waypost.spark.lake.ingest import has_ingested, tidy_messages
    from waypost.spark.lake.lake import Lake
    from waypost.spark.lake.pipeline import Pipeline

    lake = Lake(options.lake)
    with open_session(options, LARGE) as (spark, report_progress):
        # A lake may have ingested messages only.
        if lake.state.source is not None or not has_ingested(options.lake):
            Pipeline(spark, options.lake, progress=report_progress).tidy(options.keep_days)
        tidy_messages(options.lake, report_progress)
    if options.json:
        write_json({"lake": lake.files.address})
    return 0


def run_upgrade(options: argparse.Namespace) -> int:
    """Convert a lake or an output of release 0.1 and return the exit code."""
    try:
        from waypost.spark.consumer.upgrade import upgrade_output
        from waypost.spark.lake.upgrade import upgrade
    except ImportError:
        raise MissingExtra('a lake is read with pyarrow and deltalake: pip install "waypost[spark]"') from None
    if options.output is not None:
        what, root = "output", upgrade_output(options.output, write_stderr).files.address
    else:
        what, root = "lake", upgrade(options.lake, write_stderr).files.address
    if options.json:
        write_json({what: root})
    else:
        write(f"the {what} {root} consists of Delta tables")
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write the report and return the exit code."""
    from waypost.spark.lake.report import write_report

    path = str(write_report(options.lake, options.output))
    if options.json:
        write_json({"report": path})
    else:
        write(path)
    return 0
