"""`waypost.spark.backfill` and `waypost.spark.redrive`: one call from the rows to the audit.

    waypost.spark.backfill(spark, "lake", frame, queue="orders", id=["order_id"], dry_run=True)
    waypost.spark.redrive(spark, "lake", "reason = 'rejected'", dry_run=False)

A call that is interrupted, or a process that is killed, is continued by the same call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from waypost.checks import check_queue
from waypost.errors import ConfigurationError, InvalidInput
from waypost.policy import check_priority, parse_rate
from waypost.redaction import find_redact
from waypost.spark.lake.keys import fill_keys
from waypost.spark.lake.lake import Lake
from waypost.spark.republish.audit import Audit, audit
from waypost.spark.republish.carry_out import carry_out
from waypost.spark.republish.inputs import read_source
from waypost.spark.republish.letters import choose_letters, plan_letters, preview_letters
from waypost.spark.republish.plan import (
    Preview,
    Request,
    check_request,
    check_target,
    default_name,
    make_plan,
    preview,
)
from waypost.spark.republish.run import InDoubt, Options
from waypost.spark.republish.state import Input, Records
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The priority of messages that say nothing else: behind all live traffic.
PRIORITY = 0


def backfill(
    spark: SparkSession | Callable[[], SparkSession],
    lake: str | Lake,
    rows: DataFrame | str,
    *,
    queue: str,
    id: str | Sequence[str],
    dry_run: bool = True,
    name: str | None = None,
    to_queue: str | None = None,
    store: Place | None = None,
    priority: int = PRIORITY,
    json: bool = False,
    rate: str | None = None,
    max_age: float | None = None,
    allow_gaps: bool = False,
    in_doubt: InDoubt = "ask",
    redact: str | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Preview | Audit:
    """Publish those rows whose ids no message of the queue ever had. By default only says what it would do.

    `rows` is a DataFrame, SQL, or the path of Parquet, CSV, JSON lines or a Delta table. A DataFrame has no text that
    it could be known by, so it needs a `name`. With `json=True` a column `body` of text is JSON text.
    """
    opened = lake if isinstance(lake, Lake) else Lake(lake)
    ids = (id,) if isinstance(id, str) else tuple(id)
    if not isinstance(rows, str) and name is None:
        raise InvalidInput("a backfill of a DataFrame needs name=: by it the same call continues it")
    given = Input("backfill", rows if isinstance(rows, str) else f"name:{name}", (check_queue(queue),), ids, to_queue)
    options = make_options(rate, max_age, in_doubt, redact, allow_gaps=allow_gaps)
    check_priority(priority)
    place = find_store(opened, store)
    prepare_lake(opened, dry_run=dry_run)
    records = Records(opened.files, name or default_name(given))

    def request() -> Request:
        frame = read_source(open_session(spark), opened, rows) if isinstance(rows, str) else rows
        made = Request(given, frame, priority, json, allow_gaps)
        check_request(made)
        return made

    if dry_run:
        return preview(open_session(spark), opened, place, request())
    if is_new(records, given):
        make_plan(open_session(spark), opened, place, request(), records)
    carry_out(records, opened, place, options, stop, progress)
    return audit(records, opened, place)


def redrive(
    spark: SparkSession | Callable[[], SparkSession],
    lake: str | Lake,
    where: str,
    *,
    queues: Sequence[str] = (),
    dry_run: bool = True,
    name: str | None = None,
    to_queue: str | None = None,
    store: Place | None = None,
    priority: int = PRIORITY,
    rate: str | None = None,
    max_age: float | None = None,
    in_doubt: InDoubt = "ask",
    redact: str | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Preview | Audit:
    """Redrive the dead letters that a condition of SQL chooses. By default only says what it would do.

    The condition sees the columns of dead letters, `body` as the parsed text, and in subqueries tables of the lake.
    With `to_queue` copies are published there, and the letters stay dead; `priority` is that of the copies.
    """
    opened = lake if isinstance(lake, Lake) else Lake(lake)
    given = Input("redrive", where, tuple(check_queue(queue) for queue in queues), (), to_queue)
    options = make_options(rate, max_age, in_doubt, redact)
    check_priority(priority)
    if priority != PRIORITY and to_queue is None:
        raise InvalidInput(
            "a letter that is redriven keeps its priority; priority is that of copies: leave it out, or publish copies "
            "with --to-queue"
        )
    place = find_store(opened, store)
    prepare_lake(opened, dry_run=dry_run)
    records = Records(opened.files, name or default_name(given))
    if dry_run or is_new(records, given):
        with open_bulk(place) as bulk:
            check_target(bulk, given)
            running = open_session(spark)
            chosen = choose_letters(running, opened, place, given)
            if dry_run:
                return preview_letters(running, opened, bulk, chosen, given)
            plan_letters(running, opened, bulk, chosen, given, priority, records)
    carry_out(records, opened, place, options, stop, progress)
    return audit(records, opened, place)


def make_options(
    rate: str | None, max_age: float | None, in_doubt: InDoubt, redact: str | None, *, allow_gaps: bool = False
) -> Options:
    """Return how a plan is carried out; refuse what cannot be."""
    if rate is not None:
        parse_rate(rate)
    if max_age is not None and max_age <= 0:
        raise InvalidInput(f"max_age is a number of seconds above 0, not {max_age:g}")
    if in_doubt not in ("ask", "send", "skip"):
        raise InvalidInput(f"in_doubt is ask, send or skip, not {in_doubt!r}")
    if redact is not None:
        find_redact(redact)
    return Options(rate, max_age, in_doubt, redact=redact, allow_gaps=allow_gaps)


def open_session(spark: SparkSession | Callable[[], SparkSession]) -> SparkSession:
    """Return a session; one that is given as a function is started only where a plan is made."""
    return spark() if callable(spark) else spark


def find_store(lake: Lake, given: Place | None) -> Place:
    """Return the store of a lake; refuse another one, of which the lake has no history."""
    source = lake.state.source
    if source is None:
        if given is None:
            raise ConfigurationError(f"the lake {lake.files.address} is new: give its store with --store")
        return given
    known = Place(url=source.url, url_env=source.url_env, namespace=source.namespace)
    if given is not None and given != known:
        raise ConfigurationError(
            f"the lake {lake.files.address} was made from {source.url or source.url_env} (namespace "
            f"{source.namespace}), not from this store: its history says nothing about it"
        )
    return known


def prepare_lake(lake: Lake, *, dry_run: bool) -> None:
    """Create the tables of a new lake, and the table of keys of an older one."""
    if dry_run and not lake.step:
        return
    lake.create()
    lake.refresh(to_write=True)
    if lake.state.offsets or lake.state.unmerged:
        fill_keys(lake)


def is_new(records: Records, given: Input) -> bool:
    """Return whether a plan is to be made; refuse a name whose unfinished plan is another one."""
    state = records.state
    if state is None or state.is_finished:
        return True
    if state.plan.input != given:
        raise InvalidInput(
            f"{records.name} is not finished, and was made from something else ({state.plan.input.source!r}, queues "
            f"{', '.join(state.plan.input.queues) or 'all'}): continue that one first, or choose another name"
        )
    return False
