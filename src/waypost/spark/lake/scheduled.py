"""Runs of the pipeline as messages: a schedule publishes them, and a worker with this job runs them.

    from waypost import Waypost
    from waypost.spark.lake.scheduled import handle_pipeline_runs, schedule_pipeline

    post = Waypost("valkey://127.0.0.1:6379")
    handle_pipeline_runs(post, "lake", store_env="WAYPOST_URL")    # then: waypost worker shop:post
    schedule_pipeline(post, "lake", cron="*/5 * * * *")        # once

One run at a time: an instant does not fire while the last run has not ended, and the queue hands out one message. A run
that fails is retried, and then a dead letter; one whose worker dies is run again when its lease has ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from waypost.errors import ConfigurationError
from waypost.message import Dead, Message
from waypost.policy import Exponential
from waypost.spark.lake.freshness import GAUGES, RunReport, measure_lag, metric_values, write_metrics
from waypost.spark.lake.lake import Lake, State
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily
    from pyspark.sql import SparkSession

    from waypost import AsyncWaypost, Waypost
    from waypost.client.options import QueueSettings
    from waypost.schedule.schedule import Schedule
    from waypost.times import Duration

log = logging.getLogger("waypost")

#: The queue of the runs, and the name of their schedule.
QUEUE: Final = "waypost-pipeline"
SCHEDULE: Final = "pipeline"
#: A first run may load the history of years. It can be killed at any time, so the limit is only for one that hangs.
RUN_MAX: Final = timedelta(hours=24)
#: If the runs themselves were journalled, each would find the events of the one before, and a quiet store would never
#: be without new events.
QUEUE_POLICY: Final[QueueSettings] = {"max_running": 1, "journal": "failures"}
RETRY: Final = Exponential(first=5, attempts=5)
#: How often the lag is measured between runs.
MEASURE_SECONDS: Final = 15.0


def lake_name(lake: str) -> str:
    """Return how a message names a lake: a folder by its absolute path, a URI as it is."""
    return lake if "://" in lake else os.path.abspath(lake)


def schedule_pipeline(
    post: Waypost,
    lake: str,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    tz: str = "UTC",
    queue: str = QUEUE,
) -> Schedule:
    """Save the schedule of a lake's runs, or change it, and set up their queue.

    The queue hands out one run at a time, and journals only failures. Raises `ConfigurationError` if it has the
    schedule of another lake.
    """
    known = find_schedule(post, queue)
    if known is not None and known.body != {"lake": lake_name(lake)}:
        raise ConfigurationError(
            f"queue {queue} has the schedule of another lake ({_describe(known.body)}): give this one another queue"
        )
    post.configure(queue, **QUEUE_POLICY)
    return post.save_schedule(
        SCHEDULE, queue=queue, key=SCHEDULE, cron=cron, every=every, tz=tz, overlap="skip", missed="once",
        body={"lake": lake_name(lake)},
    )  # fmt: skip


def find_schedule(post: Waypost, queue: str = QUEUE) -> Schedule | None:
    """Return the schedule of the runs in a queue."""
    return next((one for one in post.schedules(queue) if one.key == SCHEDULE), None)


def _describe(body: object) -> str:
    return str(body["lake"]) if isinstance(body, dict) and "lake" in body else "none is named"


def handle_pipeline_runs(
    post: Waypost | AsyncWaypost,
    lake: str,
    *,
    queue: str = QUEUE,
    on_run: Callable[[RunReport], None] | None = None,
    master: str | None = None,
    config: Mapping[str, str] | None = None,
    session: Callable[[], SparkSession] | None = None,
    **options: Any,
) -> None:
    """Let workers of a client run the pipeline for the messages of a queue.

    `options` are those of `Pipeline`: `store` or `store_env` of a lake that does not exist yet, `namespace`, `queues`,
    `batch_rows`, `reader`. `on_run` is called after each run with what it did.
    """
    name = lake_name(lake)

    def run_pipeline(body: Any, spark: SparkSession, message: Message[Any]) -> Dead | None:
        if isinstance(body, dict) and body.get("lake", name) != name:
            return Dead("other_lake", f"the message is for the lake {body['lake']}, and this worker fills {name}")
        from waypost.spark.lake.freshness import report_run
        from waypost.spark.lake.pipeline import Pipeline

        began = time.monotonic()
        pipeline = Pipeline(spark, lake, **options)
        before = pipeline.lake.count_rows()
        pipeline.run()
        seconds = time.monotonic() - began
        report = report_run(pipeline, before, {"run": seconds, "total": seconds})
        log.info(
            "the lake %s has %s events more, after %.1f s", name, f"{report.events_added:,}", seconds,
            extra={"event": "pipeline_run", "queue": message.queue, "message_id": message.id},
        )  # fmt: skip
        if on_run is not None:
            on_run(report)
        return None

    # It is named in logs.
    run_pipeline.__qualname__ = "run_pipeline"
    post.spark_job(queue, retry=RETRY, max_run=RUN_MAX, master=master, config=config, session=session)(run_pipeline)


class LagMonitor:
    """Measures how far a lake is behind the journal, in a thread: also while runs fail, or none is made.

    The newest measure is written to a file, if one is given, and is what a scrape of Prometheus gets.
    """

    def __init__(
        self, lake: str, place: Place, *, path: str | None = None, every_seconds: float = MEASURE_SECONDS
    ) -> None:
        self._lake, self._place, self._path, self._every = lake, place, path, every_seconds
        self._lock = threading.Lock()
        #: How far the lake had come when it was last read.
        self._state: State | None = None
        self._report = RunReport(lake_name(lake), 0, 0, {}, 0, {}, {})
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on_run(self, report: RunReport) -> None:
        """Take over what a run did; called after each run."""
        with self._lock:
            self._report = report
        self._write()

    def measure(self) -> None:
        """Measure the lag now: of a lake that is away by what it had before. A store that is away changes nothing."""
        try:
            self._state = Lake(self._lake).state
        except Exception as error:
            # Of any library that reads it. The thread must go on: the lag grows meanwhile.
            log.warning("the lake cannot be read: %s", error, extra={"event": "lake_not_read"})
            if self._state is None:
                return
        try:
            with open_bulk(self._place) as bulk:
                lag = measure_lag(bulk, self._state)
        except Exception as error:
            log.warning("the lag of the lake cannot be measured: %s", error, extra={"event": "lag_not_measured"})
            return
        with self._lock:
            self._report = structs.replace(self._report, offsets=lag)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_metrics(self._report, self._path)
        except OSError as error:
            log.warning(
                "the metrics cannot be written to %s: %s", self._path, error, extra={"event": "metrics_not_written"}
            )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges of the lake, for a registry of prometheus_client."""
        from prometheus_client.core import GaugeMetricFamily

        for name, text in GAUGES:
            values = metric_values(self._report, name)
            family = GaugeMetricFamily(name, text, labels=["queue"] if None not in values else [])
            for queue, value in values.items():
                family.add_metric([] if queue is None else [queue], value)
            yield family

    def __enter__(self) -> LagMonitor:
        self._thread = threading.Thread(target=self._loop, name="waypost-lag", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        if self._thread is not None:
            # It may hang in a call to a store that does not answer.
            self._thread.join(1.0)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.measure()
            self._stop.wait(self._every)
