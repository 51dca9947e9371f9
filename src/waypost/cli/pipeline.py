"""`waypost pipeline`: the history of a store as tables of a lake, made with Spark."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waypost.cli import report
from waypost.cli.ending import FOUND
from waypost.cli.options import Run, add_command, check_file
from waypost.cli.output import say, write, write_json
from waypost.errors import ConfigurationError, WaypostError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waypost.spark.lake.audit import Audit, Told
    from waypost.spark.lake.pipeline import Pipeline

#: Where a URL with a password is put for the tasks on this machine, which inherit it.
STORE_VARIABLE = "WAYPOST_PIPELINE_STORE"
#: The store, for a lake that does not know one yet, as for all other commands.
USUAL_VARIABLE = "WAYPOST_URL"
#: Findings of each sort that are printed with their events.
SHOWN_MAX = 20
#: From so many events on it pays that Java makes its code as fast as it can.
LARGE = 500_000
QUEUES_LOOKED_AT = 1_000


def add(commands: Any) -> None:
    """The arguments of this command."""
    top = add_command(
        commands, "pipeline", None, "tables of the history, made with Spark", store=False, json_text=None,
        examples=("waypost pipeline run --store valkey://127.0.0.1:6379 --lake lake",
                  "waypost pipeline ingest --lake lake --queue orders --schema 'id BIGINT, total DOUBLE'",
                  "waypost pipeline audit --lake lake", "waypost pipeline report --lake lake"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    run = _add(actions, "run", run_pipeline, "take the journal into the lake: bronze, silver, gold")
    _add_store(run)
    run.add_argument("--queue", metavar="a,b", help="only these queues")
    run.add_argument("--follow", action="store_true", help="stay, and take in what comes")
    run.add_argument("--every", type=float, default=10.0, metavar="S", help="with --follow: every so many seconds (10)")
    run.add_argument("--batch-rows", type=int, metavar="N", help="most events in one batch (1,000,000)")
    run.add_argument("--reader", metavar="NAME", help="register as a reader of the journal, so that trimming waits")
    run.add_argument("--format", choices=("parquet", "orc"), help="of a new lake's bronze and silver (parquet)")
    run.add_argument("--moved", action="store_true", help="the store has another URL than before, but is the same")
    ingest = _add(actions, "ingest", run_ingest, "take the messages of a queue into the lake, with their bodies")
    _add_store(ingest)
    ingest.add_argument("--queue", required=True, help="the queue; its journal must be at level full")
    ingest.add_argument(
        "--schema", metavar="DDL", help='columns of the bodies: "id BIGINT, name STRING", or a .json file'
    )
    ingest.add_argument("--batch-rows", type=int, metavar="N", help="most messages in one batch (100,000)")
    ingest.add_argument(
        "--allow-gaps",
        action="store_true",
        help="go on where messages were trimmed, or journalled without their bodies",
    )
    tidy = _add(actions, "tidy", run_tidy, "put small files together, and let go of old rows")
    tidy.add_argument("--keep-days", type=int, metavar="N", help="rows of bronze and silver that are older go")
    audit = _add(
        actions, "audit", run_audit, "compare the whole history with what the store holds",
        more="The last line is `0 unaccounted of N` when all is well; otherwise the exit code is 1.",
    )  # fmt: skip
    _add_store(audit)
    audit.add_argument("--queue", metavar="a,b", help="only these queues")
    report.add(actions)


def _add(actions: Any, name: str, run: Run, text: str, more: str = "") -> argparse.ArgumentParser:
    """An action that Spark does, on a lake."""
    parser = add_command(actions, name, run, text, store=False, more=more)
    parser.add_argument("--lake", required=True, metavar="DIR", help="the lake: a folder, or a URI as s3://bucket/lake")
    parser.add_argument("--master", default="local[*]", help="where Spark runs (local[*])")
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of Spark's; may be repeated"
    )
    parser.add_argument("--log", metavar="FILE", help="Spark's own log (a temporary file, kept if it fails)")
    return parser


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", "--url", metavar="URL", help="the store; a lake remembers its own, a new one takes WAYPOST_URL"
    )
    parser.add_argument("--store-env", metavar="NAME", help="the environment variable that holds the URL instead")
    parser.add_argument("--namespace", default=os.environ.get("WAYPOST_NAMESPACE") or "wp", help="the namespace (wp)")


def _place(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The store by its URL, or by the variable that holds it. A password is put where no plan shows it."""
    from waypost.urls import holds_secret

    if options.store is not None and options.store_env is not None:
        raise ConfigurationError("give one of --store and --store-env, not both")
    if options.store is not None and holds_secret(options.store):
        os.environ[STORE_VARIABLE] = options.store
        return None, STORE_VARIABLE
    if options.store is None and options.store_env is None and os.environ.get(USUAL_VARIABLE):
        from waypost.spark.lake.lake import Lake

        if Lake(options.lake).state.source is None:
            return None, USUAL_VARIABLE
    return options.store, options.store_env


def _settings(options: argparse.Namespace) -> dict[str, str]:
    settings = {}
    for given in options.config:
        key, separator, value = given.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"--config is KEY=VALUE, such as spark.driver.memory=4g, not {given!r}")
        settings[key] = value
    return settings


def events_ahead(options: argparse.Namespace) -> int:
    """About how many events a run will take in. It also says within a second that the store cannot be reached."""
    from waypost.spark.lake.lake import Lake, Seen
    from waypost.spark.source.bulk import open_bulk
    from waypost.spark.source.credentials import Place

    store, store_env = _place(options)
    state = Lake(options.lake).state
    if store is not None or store_env is not None:
        place = Place(url=store, url_env=store_env, namespace=options.namespace)
    elif state.source is not None:
        place = Place(url=state.source.url, url_env=state.source.url_env, namespace=state.source.namespace)
    else:
        raise ConfigurationError(f"the lake {options.lake} is new: say with --store where its events come from")
    check_file(place.resolve(), place.namespace)
    with open_bulk(place) as bulk:
        queues = bulk.run(bulk.store.queues())
        if len(queues) > QUEUES_LOOKED_AT:
            return LARGE
        return sum(max(0, bulk.bounds(queue)[1] - state.seen.get(queue, Seen()).newest) for queue in queues)


@contextmanager
def working(options: argparse.Namespace, events: int) -> Iterator[tuple[SparkSession, Callable[[str], None]]]:
    """A session for the command, and where to tell how far it is."""
    from waypost.spark.lake.pipeline import SETTINGS, local_settings
    from waypost.spark.private_directory import private_directory
    from waypost.spark.session import JAVA_OPTIONS
    from waypost.spark.terminal import Progress, quiet_session

    if options.master.startswith("sc://"):
        raise ConfigurationError("the pipeline needs a master (local[*], spark://…, yarn), not Spark Connect")
    log = Path(options.log) if options.log else private_directory() / "log"
    # What goes wrong in a callback of Spark's comes back as an error, and is told once, in a sentence.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    is_local = options.master.startswith("local")
    given, ours = _settings(options), local_settings() if is_local else SETTINGS
    settings = {**ours, **given}
    if is_local and JAVA_OPTIONS in given:
        settings[JAVA_OPTIONS] = f"{ours[JAVA_OPTIONS]} {given[JAVA_OPTIONS]}"
    if events < LARGE and is_local:
        # Java spends more on making its code fast than a short run ever gets back.
        settings[JAVA_OPTIONS] = f"-XX:TieredStopAtLevel=1 {settings.get(JAVA_OPTIONS, '')}".strip()
    with quiet_session(options.master, settings, log) as spark, Progress(spark, sys.stderr) as progress:
        yield spark, progress.tell


def failing(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The command, with every error told in a sentence."""

    def run(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except (WaypostError, KeyboardInterrupt, ImportError):
            raise
        except Exception as error:
            from waypost.spark.spark_errors import told

            if not options.log:
                from waypost.spark.private_directory import keep, private_directory

                keep(private_directory())
                say(f"waypost: Spark's own log is {private_directory() / 'log'}")
            raise told(error) from error

    return run


def make_pipeline(options: argparse.Namespace, spark: SparkSession, tell: Callable[[str], None]) -> Pipeline:
    """The pipeline that the options describe."""
    from waypost.spark.lake.bronze import BATCH_ROWS
    from waypost.spark.lake.pipeline import Pipeline

    store, store_env = _place(options)
    queues = tuple(name.strip() for name in options.queue.split(",") if name.strip()) if options.queue else None
    return Pipeline(
        spark,
        options.lake,
        store=store,
        store_env=store_env,
        namespace=options.namespace,
        queues=queues,
        batch_rows=getattr(options, "batch_rows", None) or BATCH_ROWS,
        format=getattr(options, "format", None),
        reader=getattr(options, "reader", None),
        moved=getattr(options, "moved", False),
        tell=tell,
    )


@failing
def run_pipeline(options: argparse.Namespace) -> int:
    """Take the journal into the lake; the exit code."""
    from waypost.worker.signals import StopSignals

    with working(options, LARGE if options.follow else events_ahead(options)) as (spark, tell):
        pipeline = make_pipeline(options, spark, tell)
        if options.follow:
            stop = threading.Event()
            with StopSignals(lambda name: stop.set()):
                pipeline.follow(options.every, stop)
        else:
            pipeline.run()
        _tell_end(pipeline, options.json)
    return 0


def _tell_end(pipeline: Pipeline, as_json: bool) -> None:
    state, lake = pipeline.lake.state, pipeline.lake.files.root
    events = sum(seen.events for seen in state.seen.values())
    not_seen = {queue: seen.not_seen for queue, seen in sorted(state.seen.items()) if seen.not_seen}
    if as_json:
        write_json({"lake": lake, "events": events, "queues": sorted(state.seen), "not_seen": not_seen})
        return
    write(f"{events:,} events of {len(state.seen)} queues in the lake {lake}")
    for queue, number in not_seen.items():
        write(f"{queue}: {number:,} events not seen, the journal was trimmed before them")


@failing
def run_audit(options: argparse.Namespace) -> int:
    """Compare the history with the store; the exit code."""
    from waypost.spark.lake.audit import audit

    with working(options, events_ahead(options)) as (spark, tell):
        found = audit(make_pipeline(options, spark, tell))
    if options.json:
        write_json(found, indent=2)
    else:
        write(told_audit(found))
    return 0 if found.is_clean else FOUND


def told_audit(audit: Audit) -> str:
    """The result in lines, the verdict last."""
    lines = []
    for name, queue in sorted(audit.queues.items()):
        where = ", ".join(f"{count:,} {state}" for state, count in queue.accounted.items())
        lines.append(f"{name}: {queue.published:,} published{': ' if where else ''}{where}")
        if queue.not_seen:
            lines.append(f"{name}: {queue.not_seen:,} events not seen")
        if queue.undecided:
            lines.append(f"{name}: {queue.undecided:,} messages whose end may be among the events not seen")
        for counter, count in queue.overcounted.items():
            lines.append(f"{name}: the journal tells of {count:,} more {counter} than the store has counted")
    for finding in (*audit.unaccounted[:SHOWN_MAX], *audit.duplicates_unexplained[:SHOWN_MAX]):
        lines.append(f"{finding.queue}: {finding.message_id}: {finding.fault}")
        lines += [f"    {_told_event(event)}" for event in finding.events]
    more = audit.unaccounted_count + audit.duplicates_unexplained_count
    if more > SHOWN_MAX:
        lines.append("more of them are in audit.json in the lake")
    if audit.duplicates_unexplained_count:
        lines.append(f"{audit.duplicates_unexplained_count:,} unexplained duplicates")
    at_least = "at least " if audit.has_more else ""
    lines.append(f"{at_least}{audit.unaccounted_count:,} unaccounted of {audit.published:,}")
    return "\n".join(lines)


def _told_event(event: Told) -> str:
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    parts = {"token": event.token, "worker": event.worker, "cause": event.cause, "reason": event.reason}
    rest = "".join(f"  {name} {value}" for name, value in parts.items() if value is not None)
    return f"{at}  {event.number}  {event.event}{rest}"


@failing
def run_ingest(options: argparse.Namespace) -> int:
    """Take messages into the lake; the exit code."""
    from waypost.spark.lake.ingest import BATCH_ROWS, Ingest, counts, read_schema
    from waypost.spark.source.credentials import Place

    # Before Java starts: a password is handed on in the environment, and tasks have that of Java.
    store, store_env = _place(options)
    if store is not None or store_env is not None:
        check_file(Place(url=store, url_env=store_env).resolve(), options.namespace)
    with working(options, LARGE) as (spark, tell):
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
            tell=tell,
        )
        ingest.run()
        found = counts(ingest)
    if options.json:
        write_json({"queue": options.queue, **found})
        return 0
    aside = f", {found['corrupt']:,} put aside that the schema does not fit" if found["corrupt"] else ""
    write(f"{found['rows']:,} messages of queue {options.queue} in the lake{aside}")
    return 0


@failing
def run_tidy(options: argparse.Namespace) -> int:
    """Put small files together; the exit code."""
    from waypost.spark.lake.pipeline import Pipeline

    with working(options, LARGE) as (spark, tell):
        pipeline = Pipeline(spark, options.lake, tell=tell)
        pipeline.tidy(options.keep_days)
    if options.json:
        write_json({"lake": pipeline.lake.files.root})
    return 0
