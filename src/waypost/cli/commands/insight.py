"""`waypost pipeline simulate` and `advise`: answers from the history of a lake."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from waypost.cli.exit_codes import FOUND
from waypost.cli.options import parse_duration, parse_time_or_day
from waypost.cli.output import format_table, terminal_width, write, write_json, write_stderr
from waypost.errors import ConfigurationError, InvalidInput
from waypost.formatting import format_count
from waypost.times import to_datetime, to_ms

if TYPE_CHECKING:
    from waypost.spark.insight.advise import Advised, Judgement
    from waypost.spark.insight.whatif import Answer, Outcome

T = TypeVar("T")
#: The part of the history that is read by default.
DAYS = 14
DAY_MS = 86_400_000


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `simulate`."""
    parser.add_argument("--queue", required=True, help="the queue")
    parser.add_argument("--workers", type=list_of(int), default=[], metavar="a,b", help="numbers of workers to try")
    parser.add_argument(
        "--concurrency", type=list_of(int), default=[], metavar="a,b", help="messages that a worker runs at once"
    )
    parser.add_argument("--lease", type=list_of(parse_duration), default=[], metavar="a,b", help="leases (30s, 5m)")
    parser.add_argument(
        "--retry", action="append", default=[], metavar="POLICY",
        help="exponential, linear, constant or none, as in exponential:attempts=5,first=2; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--traffic", action="append", default=[], metavar="FACTOR",
        help="more messages: 2x, on a day of the week friday=2x, or of a type type:shop.Order=2x; may be repeated",
    )  # fmt: skip
    parser.add_argument("--max-running", type=list_of(int), default=[], metavar="a,b", help="limits of the queue")
    parser.add_argument("--rate", type=list_of(str), default=[], metavar="a,b", help="rates of the queue (100/m)")
    parser.add_argument("--target", metavar="TEXT", help="find the fewest workers for it: 'p95 wait < 5s'")
    parser.add_argument("--by", choices=["type"], help="also by the types of messages, of a queue that was ingested")
    add_window(parser)
    parser.add_argument("--chart", metavar="FILE", help="write a chart to an SVG file")


def add_window(parser: argparse.ArgumentParser) -> None:
    """Declare which part of the history is read."""
    parser.add_argument("--days", type=float, default=DAYS, metavar="N", help=f"read the last N days ({DAYS})")
    parser.add_argument("--from", dest="since", type=parse_time_or_day, metavar="TIME", help="read from this time on")
    parser.add_argument("--to", dest="until", type=parse_time_or_day, metavar="TIME", help="read up to this time")


def list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of values with commas between them."""

    def read_all(text: str) -> list[T]:
        try:
            return [read(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"values with commas between them, as in 4,8,16, not {text!r}") from None

    return read_all


def read_window(options: argparse.Namespace) -> tuple[int, int]:
    """Return from when to when the history is read, in milliseconds."""
    until = 2**53 if options.until is None else to_ms(options.until)
    if not 0 < options.days < math.inf:
        raise ConfigurationError(f"--days must be a number of days more than 0, not {options.days:g}")
    if options.since is not None:
        since = to_ms(options.since)
    else:
        since = max(0, min(until, time.time_ns() // 1_000_000) - round(options.days * DAY_MS))
    if since >= until:
        raise ConfigurationError(f"--from {options.since} must be before --to {options.until}")
    return since, until


def run_simulate(options: argparse.Namespace) -> int:
    """Serve the history under other settings and return the exit code."""
    from waypost.cli.commands import pipeline
    from waypost.spark.insight.simulate import combine, read_policy, simulate
    from waypost.spark.lake.lake import Lake

    given = {
        name: getattr(options, name)
        for name in ("workers", "concurrency", "lease", "retry", "traffic", "max_running", "rate", "target")
    }
    scenarios = combine(**given)
    since, until = read_window(options)
    lake = Lake(options.lake)
    policy = read_policy(lake, options.queue, pipeline.store_of(options))

    def run(spark: Any) -> Answer:
        return simulate(lake, options.queue, **given, policy=policy, since_ms=since, until_ms=until, spark=spark)

    if len(scenarios) == 1:
        found = run(None)  # one scenario needs no tasks
    else:
        with pipeline.open_session(options, 0) as (spark, _):
            found = run(spark)
    if options.chart and found.outcomes:
        write_chart(found, options.chart, options.target)
    if options.json:
        write_json(found, indent=2)
    else:
        write(format_answer(found, by_type=options.by == "type"))
    return 0 if found.fit.is_good else FOUND


def bars_of(found: Answer) -> list[Any]:
    """Return the bars of a chart: what was recorded, and each outcome."""
    from waypost.spark.insight.chart import Bar
    from waypost.spark.insight.simulate import describe

    observed = found.fit.observed_ms or 0.0
    bars = [Bar("observed", observed, observed, observed, is_present=True)]
    for one in found.outcomes:
        label = describe(one.scenario)
        if one.scenario.target is not None:
            label = ", ".join(filter(None, (f"{one.workers} workers", label if label != "as it is" else "")))
        bars.append(Bar(label, one.p95_ms, one.p95_low_ms, one.p95_high_ms))
    return bars


def write_chart(found: Answer, path: str, target: str | None) -> None:
    """Write a chart of the outcomes to a file."""
    from waypost.spark.insight.chart import draw_svg
    from waypost.spark.insight.whatif import parse_target

    limit = None if target is None else parse_target(target)[1]
    text = draw_svg(f"p95 wait of {found.queue}", f"{found.fit.text} · {_format_span(found)}", bars_of(found), limit)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"the chart cannot be written to {path}: {error.strerror or error}") from None
    write_stderr(f"waypost: the chart is in {path}")


def format_types(found: Answer) -> list[str]:
    """Return what was recorded by the types of messages, and the waits of each outcome."""
    from waypost.spark.insight.simulate import describe
    from waypost.spark.insight.whatif import TYPES_NEEDED, format_ms

    if not found.types:
        return ["", f"no type of a message is known. {TYPES_NEEDED}"]
    rows: list[tuple[Any, ...]] = [
        (one.type_name or "(not known)", one.messages, one.deliveries, one.failed, format_ms(one.run_p50_ms),
         format_ms(one.run_p95_ms), format_ms(one.run_p999_ms), format_ms(one.wait_p95_ms))
        for one in found.types
    ]  # fmt: skip
    heads = ("type", "messages", "deliveries", "failed", "run p50", "run p95", "run p99.9", "p95 wait")
    lines = ["", "as recorded", *format_table(heads, rows, flexible=(0,))]
    rows = [
        (describe(one.scenario), kind.type_name or "(not known)", kind.claims, format_ms(kind.p50_ms),
         format_ms(kind.p95_ms))
        for one in found.outcomes
        for kind in one.types
    ]  # fmt: skip
    if rows:
        lines += ["", *format_table(("settings", "type", "claims", "p50 wait", "p95 wait"), rows, flexible=(0, 1))]
    return lines


def format_answer(found: Answer, *, by_type: bool = False) -> str:
    """Return an answer as lines."""
    from waypost.spark.insight.chart import draw_text
    from waypost.spark.insight.simulate import describe
    from waypost.spark.insight.whatif import format_ms

    lines = [f"{found.queue}: {found.fit.text}", f"{found.queue}: {_format_span(found)}"]
    types = format_types(found) if by_type else []
    if not found.fit.is_good:
        return "\n".join([*lines, "no outcomes: a model that does not repeat what was recorded cannot predict", *types])
    if not found.outcomes:
        return "\n".join([*lines, *types])

    def drained(one: Outcome) -> str:
        if not found.backlog:
            return "–"
        # What comes after as long a time as the history has is not known.
        longest = f"> {format_ms(found.to_ms - found.from_ms)}"
        return longest if one.backlog_gone_ms is None else format_ms(one.backlog_gone_ms)

    rows = [
        (describe(one.scenario), one.workers, one.slots, format_ms(one.p50_ms), format_ms(one.p95_ms),
         f"{format_ms(one.p95_low_ms)} to {format_ms(one.p95_high_ms)}", format_ms(one.p99_ms), one.done, one.dead,
         f"{one.busy:.0%}", drained(one))
        for one in found.outcomes
    ]  # fmt: skip
    heads = (
        "settings",
        "workers",
        "at once",
        "p50",
        "p95",
        "of 9 in 10",
        "p99",
        "done",
        "dead",
        "busy",
        "backlog gone",
    )
    lines += ["", *format_table(heads, rows, flexible=(0,)), "", "p95 wait"]
    lines += draw_text(bars_of(found), terminal_width() or 80)
    for one in found.outcomes:
        if one.reached is False:
            lines.append(f"{describe(one.scenario)}: {one.scenario.target} is not reached with {one.workers:,} workers")
        elif one.reached:
            lines.append(f"{one.scenario.target}: {format_count(one.workers, 'worker')} at least")
    return "\n".join([*lines, *found.notes, *types])


def _format_span(found: Answer) -> str:
    def moment(at_ms: int) -> str:
        at: datetime = to_datetime(at_ms)
        return at.strftime("%Y-%m-%d %H:%M")

    waiting = f", {format_count(found.backlog, 'message')} waiting now" if found.backlog else ""
    return (
        f"{moment(found.from_ms)} to {moment(found.to_ms)} UTC, {found.fit.claims:,} claims, "
        f"{format_count(found.workers, 'worker')} with {found.concurrency} at once{waiting}"
    )


# ---- advice -------------------------------------------------------------------------------------------------


def add_advise(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `advise`."""
    parser.add_argument("--queue", metavar="a,b", help="only these queues")
    parser.add_argument("--apply", action="store_true", help="change the settings that are advised")
    parser.add_argument("--target", metavar="TEXT", help="a wait to find the number of workers for: 'p95 wait < 5s'")
    add_window(parser)


def run_advise(options: argparse.Namespace) -> int:
    """Print advice, apply it if that is wished, and return the exit code."""
    from waypost.cli.commands import pipeline
    from waypost.client import Waypost
    from waypost.spark.insight.advise import advise
    from waypost.spark.insight.whatif import parse_target
    from waypost.spark.lake.ingest import has_ingested
    from waypost.spark.lake.lake import Lake

    if options.target is not None:
        parse_target(options.target)
    since, until = read_window(options)
    place, lake = pipeline.store_of(options), Lake(options.lake)
    queues = [name.strip() for name in options.queue.split(",") if name.strip()] if options.queue else None

    def run(spark: Any) -> Advised:
        with Waypost(place.resolve(), namespace=place.namespace) as post:
            return advise(
                lake, post, queues=queues, since_ms=since, until_ms=until, target=options.target, apply=options.apply,
                spark=spark, place=place,
            )  # fmt: skip

    if has_ingested(options.lake):
        with pipeline.open_session(options, 0) as (spark, _):
            found = run(spark)
    else:
        found = run(None)  # only bodies need Spark
    if options.json:
        write_json(_with_calls(found), indent=2)
    else:
        write(format_advised(found, applies=options.apply))
    return FOUND if len(found.advice) > len(found.applied) else 0


def _with_calls(found: Advised) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(found)
    for field, one in zip(fields["advice"], found.advice, strict=True):
        field |= {"id": one.id, "call": one.call, "undo": one.undo}
    return fields


def format_advised(found: Advised, *, applies: bool) -> str:
    """Return advice as lines, what became of past advice first."""
    lines = [format_judgement(one) for one in found.judged]
    lines += [""] if lines else []
    for one in found.advice:
        lines.append(f"{one.queue}: {one.title}")
        lines.append(f"    expected  {one.effect}")
        for name, text in (("do", one.call), ("undo", one.undo)):
            for number, line in enumerate(text.splitlines()):
                lines.append(f"    {name if number == 0 else '':8}  {line}")
        if one.can_be_applied and one.code:
            lines.append(f"    and then  {one.code}")
        lines.append(f"    evidence  {one.evidence}")
        if one.id in found.applied:
            lines.append("    applied")
        elif one.id in found.refused:
            lines.append(f"    not applied: {found.refused[one.id]}")
        elif applies:
            lines.append("    not applied: change it yourself")
    count = len(found.advice)
    lines.append(f"{format_count(count, 'piece', 'pieces')} of advice for {format_count(len(found.queues), 'queue')}")
    return "\n".join(lines)


def format_judgement(one: Judgement) -> str:
    """Return what became of past advice as a line."""
    at = to_datetime(one.at_ms).strftime("%Y-%m-%d %H:%M")
    done = "applied" if one.was_applied else "advised"
    after = "" if one.after is None else f": {one.before:.4g} then, {one.after:.4g} since, {one.expected:.4g} expected"
    return f"{done} {at}, {one.id}: {one.verdict}{after}"
