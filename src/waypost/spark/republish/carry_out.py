"""Carrying out a plan from where it was left. Spark is not needed for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from waypost.client import Waypost
from waypost.policy import parse_rate
from waypost.spark.lake.lake import Lake
from waypost.spark.republish.publish import Publisher
from waypost.spark.republish.redriving import Redriver
from waypost.spark.republish.run import Options, Runner
from waypost.spark.republish.sending import Link
from waypost.spark.republish.state import Records, State
from waypost.spark.source.bulk import RETRY_SECONDS, open_bulk
from waypost.spark.source.credentials import Place

#: With a rate, a chunk is at most what is sent in this time.
CHUNK_MS: Final = 30_000


def carry_out(
    records: Records,
    lake: Lake,
    place: Place,
    options: Options,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> State:
    """Send what is left of a plan; return the state after it: finished, or paused if `stop` was set."""
    assert records.state is not None
    plan, stop = records.state.plan, stop or threading.Event()
    if options.rate is not None:
        count, per_ms = parse_rate(options.rate)
        rows = count * CHUNK_MS // per_ms
        options = replace(options, chunk_rows=max(1, min(options.chunk_rows, rows)))
    lake.refresh(to_write=True)
    with open_bulk(place) as bulk, Waypost(store=place.open(), retry_budget=RETRY_SECONDS) as post:
        link = Link(records.name, plan, lake, bulk, post, options, stop)
        verb = Publisher(link, place) if plan.input.kind == "backfill" else Redriver(link)
        return Runner(records, verb, options, stop, progress).run()
