"""`waypost pipeline schedule` and `waypost pipeline worker`: runs of the pipeline as messages."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from waypost.cli import metrics
from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import FOUND, LEFT
from waypost.cli.options import add_log_options, integer_between
from waypost.cli.output import log_to_stderr, write, write_json, write_stderr
from waypost.client import Waypost
from waypost.formatting import format_call, format_count
from waypost.policy import LAKE_BATCH_ROWS_MAX
from waypost.times import format_datetime
from waypost.views import ActionUndo, to_json

if TYPE_CHECKING:
    from waypost.spark.lake.freshness import QueueLag
    from waypost.spark.lake.scheduled import LagMonitor
    from waypost.spark.source.credentials import Place

QUEUE = "waypost-pipeline"
#: Parser of the option `--batch-rows`.
parse_batch_rows = integer_between(1, LAKE_BATCH_ROWS_MAX)


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Declare the queue of the runs."""
    parser.add_argument("--queue", default=QUEUE, metavar="NAME", help=f"the queue of the runs ({QUEUE})")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `schedule`."""
    add_queue(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cron", metavar="PATTERN", help='run by a cron pattern: "*/5 * * * *"')
    what.add_argument("--every", type=float, metavar="S", help="or at an interval in seconds")
    what.add_argument("--show", action="store_true", help="show the schedule, its runs and how far the lake is behind")
    what.add_argument("--remove", action="store_true", help="remove the schedule; a run that has begun goes on")
    parser.add_argument("--tz", default="UTC", help="time zone of the pattern (UTC)")


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `worker`."""
    add_queue(parser)
    parser.add_argument("--batch-rows", type=parse_batch_rows, metavar="N", help="most events in one batch (1,000,000)")
    parser.add_argument("--reader", metavar="NAME", help="register as a reader of the journal, so that trimming waits")
    parser.add_argument("--metrics", metavar="FILE", help="write how fresh the lake is to a file, for Prometheus")
    metrics.add_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that a run may go on after a signal (25)"
    )
    parser.add_argument("--until-empty", action="store_true", help="end when no run is ready any more")
    parser.add_argument("--no-scheduler", action="store_true", help="do not fire schedules")
    add_log_options(parser, "info")


def run_schedule(options: argparse.Namespace) -> int:
    """Save, show or remove the schedule and return the exit code."""
    from waypost.cli.commands import pipeline

    place = pipeline.store_of(options)
    with Waypost(place.resolve(), namespace=place.namespace) as post:
        if options.show:
            return show_schedule(options, post, place)
        if options.remove:
            return remove_schedule(options, post)
        return save_schedule(options, post)


def save_schedule(options: argparse.Namespace, post: Waypost) -> int:
    """Save the schedule and return the exit code."""
    from waypost.spark.lake.scheduled import QUEUE_POLICY, SCHEDULE, lake_name, schedule_pipeline

    rule = {"every": options.every} if options.cron is None else {"cron": options.cron, "tz": options.tz}
    saving = {"queue": options.queue, "overlap": "skip", "missed": "once", "body": {"lake": lake_name(options.lake)}}
    configure = format_call("configure", options.queue, **QUEUE_POLICY)
    python = f"{configure}; {format_call('save_schedule', SCHEDULE, key=SCHEDULE, **saving, **rule)}"
    with logged_action(options, post, "save_schedule", options.queue, python) as entry:
        saved = schedule_pipeline(post, options.lake, queue=options.queue, **rule)
        next_fire = format_datetime(saved.next_fires[0]) if saved.next_fires else "never"
        entry.text, entry.undo = f"saved {saved.key}, next {next_fire}", ActionUndo.of("save_schedule")
    if options.json:
        write_json({"queue": options.queue, "schedule": saved.key, "next": next_fire})
        return 0
    write(f"{entry.text}; run it with: {worker_command(options)}")
    if not any(options.queue in one.queues for one in post.workers()):
        write_stderr(f"waypost: no worker serves queue {options.queue} now")
    return 0


def worker_command(options: argparse.Namespace) -> str:
    """Return the command that runs what the schedule publishes. A URL with a password is not printed."""
    from waypost.cli.commands import pipeline

    store, store_env = pipeline.choose_store(options)
    command = ["waypost", "pipeline", "worker", "--lake", options.lake]
    for option, value in (("--store", store), ("--store-env", store_env)):
        command += [option, value] if value is not None else []
    command += ["--namespace", options.namespace] if options.namespace != "wp" else []
    command += ["--queue", options.queue] if options.queue != QUEUE else []
    is_hidden = options.store is not None and store is None
    return shlex.join(command) + (f" (put the URL of the store into {store_env})" if is_hidden else "")


def remove_schedule(options: argparse.Namespace, post: Waypost) -> int:
    """Remove the schedule and return the exit code."""
    from waypost.spark.lake.scheduled import SCHEDULE

    python = format_call("remove_schedule", SCHEDULE, queue=options.queue)
    with logged_action(options, post, "remove_schedule", options.queue, python) as entry:
        changed = post.remove_schedule(SCHEDULE, queue=options.queue)
        entry.text = f"schedule {SCHEDULE}: {'removed' if changed else 'it was not there'}"
        entry.undo = ActionUndo.of("remove_schedule", {"queue": options.queue, "key": SCHEDULE}, changed=changed)
    write_json({"queue": options.queue, "changed": changed}) if options.json else write(entry.text)
    return 0 if changed else FOUND


def read_lag(options: argparse.Namespace, place: Place) -> dict[str, QueueLag]:
    """Return how far each queue of the lake is behind the journal."""
    from waypost.spark.lake.freshness import measure_lag
    from waypost.spark.lake.lake import Lake
    from waypost.spark.source.bulk import open_bulk

    state = Lake(options.lake).state
    with open_bulk(place) as bulk:
        return measure_lag(bulk, state)


def show_schedule(options: argparse.Namespace, post: Waypost, place: Place) -> int:
    """Print the schedule, its runs and the lag, and return the exit code."""
    from waypost.spark.lake.scheduled import find_schedule

    known = find_schedule(post, options.queue)
    ledger, lag = post.ledger(options.queue), read_lag(options, place)
    behind = sum(one.lag_events for one in lag.values())
    oldest = max((one.lag_seconds for one in lag.values()), default=0.0)
    if options.json:
        found: dict[str, Any] = {"queue": options.queue, "schedule": None, "lag": to_json(lag)}
        if known is not None:
            fields = to_json(known)
            found["schedule"] = {
                name: fields.get(name) for name in ("key", "cron", "every", "tz", "paused", "fires", "missed_fires")
            } | {"next": [format_datetime(at) for at in known.next_fires]}
        runs = {name: getattr(ledger, name) for name in ("ready", "delayed", "leased", "done", "dead", "retried")}
        write_json({**found, "runs": runs, "lag_events": behind, "lag_seconds": oldest}, indent=2)
        return 0 if known is not None else FOUND
    if known is None:
        write(f"no schedule in queue {options.queue}")
    else:
        rule = f"every {known.every.total_seconds():g} s" if known.every is not None else f"{known.cron} {known.tz}"
        state = (
            "paused" if known.paused else f"next {format_datetime(known.next_fires[0])}" if known.next_fires else "over"
        )
        write(f"{known.key}: {rule}, {state}; fired {known.fires:,}, missed {known.missed_fires:,}")
    write(
        f"runs: {ledger.leased:,} under way, {ledger.ready + ledger.delayed:,} waiting, {ledger.done:,} done, "
        f"{ledger.retried:,} retried, {format_count(ledger.dead, 'dead letter')}"
    )
    write(
        f"lag: {format_count(behind, 'event')} not in the lake" + (f", the oldest {oldest:.0f} s old" if behind else "")
    )
    return 0 if known is not None else FOUND


def run_worker(options: argparse.Namespace) -> int:
    """Run the pipeline for each message until a signal, and return the exit code."""
    from waypost.cli.commands import pipeline, worker
    from waypost.spark.lake.journal import BATCH_ROWS
    from waypost.spark.lake.scheduled import LagMonitor, handle_pipeline_runs

    log_to_stderr(options.log_level, options.log_format, without=worker.WORKER_EVENTS)
    place = pipeline.store_of(options)
    store, store_env = pipeline.choose_store(options)
    monitor = LagMonitor(options.lake, place, path=options.metrics)
    with Waypost(place.resolve(), namespace=place.namespace) as post:
        handle_pipeline_runs(
            post, options.lake, queue=options.queue, on_run=monitor.on_run,
            session=pipeline.session_maker(options), store=store, store_env=store_env, namespace=options.namespace,
            batch_rows=options.batch_rows or BATCH_ROWS, reader=options.reader,
        )  # fmt: skip
        prometheus = install_metrics(post, options, monitor)
        running = post.worker(scheduler=not options.no_scheduler)
        if options.log_format == "text":
            write_stderr(worker.describe_start(post, running))
        with monitor, metrics.serve(running, prometheus, options):
            report = worker.run_worker(running, options)
    worker.print_end(options, report, running.reports())
    return 0 if report.complete else LEFT


def install_metrics(post: Waypost, options: argparse.Namespace, monitor: LagMonitor) -> Any:
    """Return the middleware with the metrics of the worker, to whose registry the lag is added; None without a port."""
    prometheus = metrics.install(post, options)
    if prometheus is not None:
        prometheus.registry.register(monitor)
    return prometheus
