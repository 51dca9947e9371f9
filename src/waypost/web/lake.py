"""What a lake knows: the events of messages that the store has forgotten, percentiles, the audit, the report.

`waypost pipeline run` keeps journals as Delta tables in a folder or a bucket. Reading them needs `deltalake` and
`pyarrow` (the extra `spark`), but no Spark.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from waypost.errors import ConfigurationError, MissingExtra
from waypost.identity import id_time_ms
from waypost.percentiles import percentile
from waypost.times import to_datetime
from waypost.urls import parameter_names
from waypost.web import documents
from waypost.web.figures import HistoryEvent
from waypost.web.lake_threads import LakeThreads
from waypost.web.problems import Problem

T = TypeVar("T")

#: The table of the journal in a lake.
JOURNAL = "bronze/journal"
COLUMNS = (
    "queue", "number", "at_ms", "event", "token", "deliveries", "worker", "due_ms", "cause", "reason", "error_type",
    "chain_id",
)  # fmt: skip
HISTOGRAMS = "gold/histograms"
MEASURES = ("wait", "run")
AUDIT, REPORT = "audit.json", "report.html"
ADVICE = "insight/advice"
ADVICE_COLUMNS = ("at_ms", "recorded_ms", "record", "id", "queue", "title", "call", "undo", "verdict", "advice")
#: Advice is recorded in this order if the times are the same.
RECORDS = {"judged": 0, "advised": 1, "applied": 2}
#: Advice that is listed.
ADVICE_MAX = 50
#: The largest file of a lake that is read whole.
FILE_BYTES_MAX = 32 * 1024 * 1024
#: A page waits so long for percentiles; they are read again after so long, and those of so many pages are kept.
PERCENTILES_SECONDS, KEPT_SECONDS, KEPT_MAX = 3.0, 30.0, 64
#: Findings of the audit that are listed.
FINDINGS_MAX = 20
#: How long one search may read; a lake may have very many files.
LAKE_SECONDS = 5.0
#: How long a page waits for any other answer of a lake.
ANSWER_SECONDS = 5.0
#: An id has the time of the publisher's clock: events may be earlier by the store's clock.
CLOCKS_DIFFER_MS = 86_400_000


_threads = LakeThreads()


async def within(seconds: float, read: Callable[..., T], *given: Any) -> T:
    """Read in a thread for lakes. Raises a `Problem` if there is no answer within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(_threads.submit(read, *given))
    except TimeoutError:
        raise Problem(504, "lake-slow", f"the lake has not answered for {seconds:.0f} seconds") from None


async def read_history(lake: str, id: str) -> dict[str, list[HistoryEvent]]:
    """The events of a message by queue, in order; empty if the lake has none, or there is no lake yet.

    Raises a `Problem` if the lake cannot be read, or not in time.
    """
    # A read ends by itself in this time if its files answer.
    return await within(LAKE_SECONDS + 1, _read, lake, id)


def check_lake(lake: str) -> str:
    """Return the place of a lake, or raise `ConfigurationError`, `MissingExtra`."""
    if not isinstance(lake, str) or not lake:
        raise ConfigurationError(f"a lake is a folder or a URI, as in s3://bucket/lake, not {lake!r}")
    if "@" in lake.partition("://")[2].partition("/")[0]:
        raise ConfigurationError("the URI of a lake must not hold keys: set them in the environment")
    if "://" in lake and ("?" in lake or "#" in lake):
        names = ", ".join(parameter_names(lake)) or "after ? or #"
        raise ConfigurationError(f"the URI of a lake must not have parameters ({names}): set them in the environment")
    try:
        import deltalake  # noqa: F401
        import pyarrow.dataset  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(f'a lake needs {error.name}, which is not installed: pip install "waypost[spark]"') from None
    return lake


def _read(lake: str, id: str) -> dict[str, list[HistoryEvent]]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError
    from pyarrow import ArrowException, dataset

    until = time.monotonic() + LAKE_SECONDS
    wanted = (dataset.field("message_id") == id) & (dataset.field("at_ms") >= id_time_ms(id) - CLOCKS_DIFFER_MS)
    rows: list[dict[str, Any]] = []
    try:
        table = DeltaTable(f"{lake.rstrip('/')}/{JOURNAL}").to_pyarrow_dataset()
        columns = [name for name in COLUMNS if name in table.schema.names]
        for fragment in table.get_fragments(filter=wanted):
            if time.monotonic() > until:
                raise Problem(504, "lake-slow", f"the lake was searched for {LAKE_SECONDS:.0f} seconds, and has more")
            rows += fragment.to_table(schema=table.schema, columns=columns, filter=wanted).to_pylist()
    except TableNotFoundError:
        return {}
    except (DeltaError, ArrowException, OSError) as error:
        # The error of a library may name the place with its keys.
        raise Problem(502, "lake-unreadable", f"the lake cannot be read ({type(error).__name__})") from None
    found: dict[str, list[HistoryEvent]] = {}
    for row in sorted(rows, key=lambda row: (row["queue"], row["number"])):
        found.setdefault(row["queue"], []).append(_event(row))
    return found


def _event(row: dict[str, Any]) -> HistoryEvent:
    return HistoryEvent(
        to_datetime(row["at_ms"]), row["event"], to_datetime(row["due_ms"]), row["cause"], row["reason"],
        row["error_type"], row["worker"], row["token"], row["deliveries"], None, row["chain_id"],
    )  # fmt: skip


# ---- percentiles -----------------------------------------------------------------------------------------------


class Spreads(Struct, frozen=True):
    """The percentiles of some queues from the lake, or why there are none."""

    queues: dict[str, list[documents.Percentiles]]
    problem: str | None = None


_kept: OrderedDict[tuple[Any, ...], tuple[float, Spreads]] = OrderedDict()


async def read_percentiles(lake: str, queues: Sequence[str], start: datetime, step: int, count: int) -> Spreads:
    """Percentiles of waits and run times in `count` spans of `step` minutes. A lake that cannot be read is no error."""
    key = (lake, tuple(queues), start, step, count)
    known = _kept.get(key)
    if known is not None and time.monotonic() - known[0] < KEPT_SECONDS:
        return known[1]
    try:
        found = Spreads(await within(PERCENTILES_SECONDS, _percentiles, lake, queues, start, step, count))
    except Problem as problem:
        found = Spreads({}, problem.detail)
    _kept[key] = (time.monotonic(), found)
    while len(_kept) > KEPT_MAX:
        _kept.popitem(last=False)
    return found


def _percentiles(
    lake: str, queues: Sequence[str], start: datetime, step: int, count: int
) -> dict[str, list[documents.Percentiles]]:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError
    from pyarrow import ArrowException, dataset

    end = start + timedelta(minutes=step * count)
    wanted = (
        dataset.field("queue").isin(list(queues))
        & dataset.field("measure").isin(MEASURES)
        & (dataset.field("date") >= start.astimezone(UTC).date())
        & (dataset.field("minute") >= start)
        & (dataset.field("minute") < end)
    )
    try:
        table = DeltaTable(f"{lake.rstrip('/')}/{HISTOGRAMS}").to_pyarrow_dataset()
        rows = table.to_table(columns=["queue", "minute", "measure", "bucket", "count"], filter=wanted)
        added = _by_span(rows, start, step)
    except TableNotFoundError:
        return {}
    except (DeltaError, ArrowException, OSError) as error:
        raise Problem(502, "lake-unreadable", f"the lake cannot be read ({type(error).__name__})") from None
    counts: dict[tuple[str, int], dict[str, dict[int, int]]] = {}
    for row in added:
        measures = counts.setdefault((row["queue"], row["span"]), {})
        measures.setdefault(row["measure"], {})[row["bucket"]] = row["count_sum"]
    found: dict[str, list[documents.Percentiles]] = {}
    for (queue, span), measures in sorted(counts.items()):
        at = start + timedelta(minutes=step * span)
        spreads = {measure: make_spread(measures.get(measure, {})) for measure in MEASURES}
        found.setdefault(queue, []).append(documents.Percentiles(at=at, minutes=step, **spreads))
    return found


def _by_span(rows: Any, start: datetime, step: int) -> list[dict[str, Any]]:
    """Counts added up by queue, span, measure and bucket: the rows of a day are many."""
    import pyarrow as pa
    import pyarrow.compute as compute

    at = compute.cast(compute.cast(rows["minute"], pa.timestamp("ms", "UTC")), pa.int64())
    since = compute.subtract(at, pa.scalar(round(start.timestamp() * 1000), pa.int64()))
    span = compute.divide(since, pa.scalar(step * 60_000, pa.int64()))
    grouped = rows.drop_columns(["minute"]).append_column("span", span)
    keys = ["queue", "span", "measure", "bucket"]
    found: list[dict[str, Any]] = grouped.group_by(keys, use_threads=False).aggregate([("count", "sum")]).to_pylist()
    return found


def make_spread(counts: dict[int, int]) -> documents.Spread | None:
    """Percentiles of a histogram of milliseconds, in seconds; None if it is empty."""
    p50, p95, p99 = (percentile(counts, share) for share in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    return documents.Spread(
        count=sum(counts.values()), p50_seconds=p50 / 1000, p95_seconds=p95 / 1000, p99_seconds=p99 / 1000
    )  # fmt: skip


# ---- the audit and the report ----------------------------------------------------------------------------------


async def read_file(lake: str, name: str) -> bytes | None:
    """A file of the lake; None if it has none. Raises a `Problem` if it cannot be read."""
    return await within(ANSWER_SECONDS, _read_file, lake, name)


def _read_file(lake: str, name: str, *, only_size: bool = False) -> bytes | None:
    """Return a file; with `only_size` nothing of what is in it."""
    from pyarrow import ArrowException, fs

    try:
        if "://" in lake:
            system, root = fs.FileSystem.from_uri(lake)
        else:
            system, root = fs.LocalFileSystem(), lake
        path = f"{root.rstrip('/')}/{name}"
        info = system.get_file_info(path)
        if info.type != fs.FileType.File:
            return None
        if info.size > FILE_BYTES_MAX:
            raise Problem(502, "lake-unreadable", f"{name} of the lake has more than {FILE_BYTES_MAX:,} bytes")
        if only_size:
            return b""
        with system.open_input_stream(path) as stream:
            return bytes(stream.read())
    except (ArrowException, OSError) as error:
        raise Problem(502, "lake-unreadable", f"the lake cannot be read ({type(error).__name__})") from None


class _Finding(Struct, frozen=True):
    queue: str
    message_id: str
    fault: str


class _Queue(Struct, frozen=True):
    overcounted: dict[str, int] = {}


class _Audit(Struct, frozen=True):
    """The file of `waypost pipeline audit`, as far as it is shown."""

    at_ms: int
    published: int
    accounted: int
    unaccounted_count: int
    duplicates_unexplained_count: int
    undecided: int
    not_seen: int
    unaccounted: list[_Finding] = []
    duplicates_unexplained: list[_Finding] = []
    queues: dict[str, _Queue] = {}
    has_more: bool = False
    unrecorded_count: int = 0
    unrecorded: list[_Finding] = []
    out_of_order_count: int = 0
    out_of_order: list[_Finding] = []


async def describe_lake(lake: str | None) -> documents.Lake:
    """What the lake of a store has besides its tables: the last audit, and whether there is a report.

    A lake that cannot be read, or not in time, is no error.
    """
    if lake is None:
        return documents.Lake(configured=False)
    try:
        audit, has_report, advice = await within(ANSWER_SECONDS, _describe, lake)
        found = None if audit is None else audit_document(audit)
    except Problem as problem:
        return documents.Lake(configured=True, problem=problem.detail)
    return documents.Lake(configured=True, audit=found, has_report=has_report, advice=advice)


def _describe(lake: str) -> tuple[bytes | None, bool, list[documents.LakeAdvice]]:
    has_report = _read_file(lake, REPORT, only_size=True) is not None
    return _read_file(lake, AUDIT), has_report, _read_advice(lake)


class _Effect(Struct, frozen=True):
    effect: str = ""


def _read_advice(lake: str) -> list[documents.LakeAdvice]:
    """The newest record of each piece of advice: what is open first, then what was judged."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError
    from pyarrow import ArrowException

    try:
        rows = DeltaTable(f"{lake.rstrip('/')}/{ADVICE}").to_pyarrow_table(columns=list(ADVICE_COLUMNS)).to_pylist()
    except TableNotFoundError:
        return []
    except (DeltaError, ArrowException, OSError) as error:
        raise Problem(502, "lake-unreadable", f"the lake cannot be read ({type(error).__name__})") from None
    rows.sort(key=lambda row: (row["recorded_ms"], row["at_ms"], RECORDS.get(row["record"], 0)))
    newest = {row["id"]: row for row in rows}
    applied = {row["id"] for row in rows if row["record"] == "applied"}
    ordered = sorted(newest.values(), key=lambda row: (row["record"] == "judged", -row["recorded_ms"]))
    return [
        documents.LakeAdvice(
            at=to_datetime(row["at_ms"]), queue=row["queue"], title=row["title"], effect=_effect(row["advice"]),
            call=row["call"] or "", undo=row["undo"] or "", applied=row["id"] in applied,
            verdict=row["verdict"] if row["record"] == "judged" else None,
        )
        for row in ordered[:ADVICE_MAX]
    ]  # fmt: skip


def _effect(advice: str | None) -> str:
    try:
        return msgspec.json.decode(advice or "{}", type=_Effect).effect
    except msgspec.DecodeError:
        return ""


def audit_document(content: bytes) -> documents.LakeAudit:
    """The result of an audit, in a sentence and with its findings."""
    try:
        audit = msgspec.json.decode(content, type=_Audit)
    except msgspec.DecodeError as error:
        raise Problem(502, "lake-unreadable", f"{AUDIT} of the lake is not what an audit writes: {error}") from None
    overcounted = sum(sum(queue.overcounted.values()) for queue in audit.queues.values())
    wrong = {
        "not accounted for": audit.unaccounted_count,
        "with a delivery or an end that nothing explains": audit.duplicates_unexplained_count,
        "that no event records": audit.unrecorded_count,
        "claimed out of the order of their group": audit.out_of_order_count,
    }
    parts = [f"{count:,} {text}" for text, count in wrong.items() if count]
    parts += [f"{overcounted:,} events more than the store has counted"] if overcounted else []
    text = f"{audit.accounted:,} of {audit.published:,} published messages are accounted for"
    text += f"; {'at least ' if audit.has_more else ''}{', '.join(parts)}" if parts else ", and nothing is unexplained"
    if audit.not_seen:
        text += f"; {audit.not_seen:,} events were trimmed before they were read"
    kinds = (audit.unaccounted, audit.duplicates_unexplained, audit.unrecorded, audit.out_of_order)
    findings = [one for kind in kinds for one in kind][:FINDINGS_MAX]
    return documents.LakeAudit(
        at=to_datetime(audit.at_ms), clean=not parts, text=text + ".", undecided=audit.undecided,
        not_seen=audit.not_seen,
        findings=[documents.LakeFinding(queue=one.queue, id=one.message_id, fault=one.fault) for one in findings],
    )  # fmt: skip
