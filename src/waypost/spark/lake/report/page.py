"""The page: one HTML file that needs nothing else, not even a network, and can be read without scripts.

Charts are drawn here, by `waypost.charts`. The only script filters and sorts the table of queues. A content security
policy names it and the style by their hashes and forbids everything else, requests included, so that a queue or a
reason with markup in its name stays a text even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib import resources

from waypost.charts import (
    ColorNames,
    Series,
    Span,
    TimeChart,
    TimeRange,
    color_of,
    figure,
    format_duration,
    format_moment,
    histogram,
    spans,
    sparkline,
    styles,
)
from waypost.charts.axes import DAY, MINUTE
from waypost.charts.time_chart import BARS_MAX, STEPS_MAX, Kind
from waypost.formatting import format_count, printable
from waypost.release import VERSION
from waypost.spark.lake.report.findings import Finding, act_on, find
from waypost.spark.lake.report.gold import AdviceRow, Gold, Verdict, WorkerStep
from waypost.spark.lake.report.series import (
    FAILURES,
    LETTERS_MAX,
    SHARES,
    WORKERS_MAX,
    ReportData,
    View,
    build_data,
    even_out,
)

#: A page with the charts of more queues would be larger than this; the table has all of them.
BYTES_MAX = 470_000
FINDINGS_MAX = 8
#: Commands of one piece of advice that are shown.
COMMANDS_MAX = 3
#: An argument of a command, with its quotes.
ARGUMENT = re.compile(r"(?:[^\s']|'[^']*')+|\S+")
SMALL_HEIGHT = 120
#: Longer figures are written smaller.
TILE_CHARACTERS = 8
MEASURE_TITLES = {"wait": "Wait", "run": "Run time", "late": "Lateness of timers"}
MEASURE_NOTES = {
    "wait": "from ready to claimed", "run": "from claimed to settled", "late": "from due to claimed",
}  # fmt: skip
#: Counts that the row of a queue has already, or that say nothing about it.
NOT_LISTED = ("published", "done", "dead", "woken", "promoted")
#: Rows of the figures as a table.
TABLE_ROWS = 24
LEVEL_TEXTS = {"alarm": "alarm", "warning": "warning", "note": "note", "calm": "well"}
PLAIN_CAUSES = {"expired": "lease expired", "retried": "failed and retried", "released": "given back by a worker"}


def text_of(value: str) -> str:
    """A text of others as HTML: nothing in it is markup or controls the direction of text."""
    return escape(printable(value))


def page(gold: Gold, *, made_ms: int) -> str:
    """The whole page."""
    data = build_data(gold)
    findings = find(data, gold.verdict, gold.advice, gold.source)
    before = [
        _head(gold, data),
        _findings(findings, data),
        _tiles(data),
        _charts(data),
        _workers(data),
        _letters(data),
    ]
    after = [_advice(gold), _audit(gold.verdict), _figures(data), _foot(made_ms)]
    style, script = _style(), _part("page.js")
    size = sum(len(one.encode()) for one in (*before, *after, style, script))
    body = "".join([*before, _queues(data, findings, BYTES_MAX - size), *after])
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>waypost report</title><style>{style}</style></head><body><main>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


# ---- head and findings -----------------------------------------------------------------------------------------------


def describe_period(time: TimeRange) -> str:
    """The period and the steps of a report."""
    if not time.count:
        return "nothing yet"
    seconds, one_day = time.step_ms < MINUTE, time.start_ms // DAY == (time.end_ms - 1) // DAY
    start = format_moment(time.start_ms, seconds=seconds)
    end = format_moment(time.end_ms, seconds=seconds, date=not one_day)
    return f"{start} to {end} UTC, in steps of {format_duration(time.step_ms)}"


def _head(gold: Gold, data: ReportData) -> str:
    source = gold.source
    store = f"{text_of(source.store)}{f', namespace {text_of(source.namespace)}' if source.namespace != 'wp' else ''}"
    facts = [("Period", escape(describe_period(data.time)))]
    if source.store:
        facts.insert(0, ("Store", store))
    if source.lake:
        facts.append(("Lake", text_of(source.lake)))
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<header><h1>waypost <span class="muted">report</span></h1><dl class="head">{listed}</dl></header>'


def _findings(findings: Sequence[Finding], data: ReportData) -> str:
    if not findings:
        text = "Nothing needs attention" if data.time.count else "Nothing has happened yet"
        figures = (
            f"{format_count(data.all.totals['published'], 'message was', 'messages were')} published in "
            f"{format_count(len(data.queues) + data.unlisted, 'queue')}."
        )
        if not data.time.count:
            figures = "The lake has no events: <code>waypost pipeline run</code> loads them from the store."
        kind = "calm" if data.time.count else "none"
        return f'<section class="card findings {kind}" aria-label="Findings"><h2>{text}</h2><p>{figures}</p></section>'
    rows = "".join(_finding(one) for one in findings[:FINDINGS_MAX])
    rest = findings[FINDINGS_MAX:]
    more = ""
    if rest:
        rows_more = "".join(_finding(one) for one in rest[: 4 * FINDINGS_MAX])
        left = len(rest) - 4 * FINDINGS_MAX
        after = f'<p class="muted">and {left:,} more, in the table of queues</p>' if left > 0 else ""
        more = f"<details><summary>{len(rest):,} more</summary><ul>{rows_more}</ul>{after}</details>"
    title = format_count(len(findings), "thing needs attention", "things need attention")
    return (
        f'<section class="card findings {findings[0].level}" aria-label="Findings"><h2>{title}</h2>'
        f"<ul>{rows}</ul>{more}"
        '<p class="muted">Commands take the store from <code>WAYPOST_URL</code>, or from <code>--url</code>.</p>'
        "</section>"
    )


def command_of(text: str) -> str:
    """A command as HTML: lines are broken between its arguments, not inside of them."""
    return f"<code>{' '.join(f'<span>{text_of(part)}</span>' for part in ARGUMENT.findall(text))}</code>"


def commands_of(text: str) -> str:
    """Several commands as HTML, each in a line of its own; the first of many."""
    lines = text.splitlines()
    first = "".join(f"<div>{command_of(line)}</div>" for line in lines[:COMMANDS_MAX])
    left = len(lines) - COMMANDS_MAX
    return first + (f'<div class="muted">and {left:,} more like these</div>' if left > 0 else "")


def _finding(one: Finding) -> str:
    command = f'<div class="command">{command_of(one.command)}</div>' if one.command else ""
    return f"<li>{_level(one.level)}<div>{text_of(one.text)}{command}</div></li>"


def _level(level: str) -> str:
    return f'<span class="level {level}"><span class="hidden">{LEVEL_TEXTS[level]}:</span></span>'


def _tiles(data: ReportData) -> str:
    whole = data.all
    if not data.time.count:
        return ""
    oldest = whole.oldest[-1] if whole.oldest else None
    figures = [
        ("published", f"{whole.totals['published']:,}", ""),
        ("done", f"{whole.totals['done']:,}", ""),
        ("dead letters", f"{whole.totals['dead']:,}", "bad" if whole.totals["dead"] else ""),
        ("redelivered", f"{whole.redelivered:,}", ""),
        ("backlog", f"{'' if data.is_whole else '≥ '}{whole.backlog[-1]:,.0f}", ""),
        ("oldest ready", format_duration(oldest) if oldest else "–", ""),
        ("wait, p99", format_duration(whole.overall.get("wait", {}).get("p99")), ""),
        ("run time, p99", format_duration(whole.overall.get("run", {}).get("p99")), ""),
    ]
    tiles = "".join(
        f'<div class="card"><dt class="muted">{name}</dt>'
        f'<dd class="{kind}{" long" if len(value) > TILE_CHARACTERS else ""}">{value}</dd></div>'
        for name, value, kind in figures
    )
    return f'<dl class="tiles">{tiles}</dl>'


# ---- charts of all queues --------------------------------------------------------------------------------------------


def is_counted(time: TimeRange) -> bool:
    """Return whether a chart has so few steps that it shows what happened in each."""
    return time.count <= BARS_MAX


def per_time(time: TimeRange, total: float) -> tuple[float, str]:
    """Return by what counts are multiplied, and how they are read: per step, second or minute.

    Few steps show what happened in each; more of them show a rate, of which `total` decides about the unit.
    """
    if is_counted(time):
        return 1.0, f"messages in {format_duration(time.step_ms)}"
    per_second = total / max(1, time.count) * 1000 / time.step_ms >= 1
    return (1_000 if per_second else MINUTE) / time.step_ms, f"messages per {'second' if per_second else 'minute'}"


def _flow(view: View, time: TimeRange, data: ReportData) -> TimeChart:
    factor, note = per_time(time, sum(view.counts["published"]) or sum(view.counts["done"]))
    published, done = (
        [value * factor for value in (counts if is_counted(time) else even_out(data, time, counts))]
        for counts in (view.counts["published"], view.counts["done"])
    )
    series = [
        Series("published", color_of("published"), published, f"{sum(view.counts['published']):,.0f}"),
        Series("done", color_of("done"), done, f"{sum(view.counts['done']):,.0f}", is_filled=True),
    ]
    return TimeChart("Published and done", time, series, unit="messages" if is_counted(time) else "rate", note=note)


def _backlog(view: View, time: TimeRange, *, at_least: bool) -> TimeChart:
    series = [
        Series("backlog", color_of("backlog"), view.backlog, f"{view.backlog[-1]:,.0f} at the end", is_filled=True)
    ]
    note = "at least: the history begins later" if at_least else "ready, running, waiting and not yet due"
    return TimeChart("Backlog", time, series, note=note, kind=_stepped(time))


def _stepped(time: TimeRange) -> Kind:
    """Levels are never bars: they are there between two points too."""
    return "steps" if time.count <= STEPS_MAX else "lines"


def _small(chart: TimeChart) -> TimeChart:
    """The chart of one queue."""
    return replace(chart, height=SMALL_HEIGHT, is_detailed=False)


def _oldest(view: View, time: TimeRange) -> TimeChart:
    most = max((value for value in view.oldest if value is not None), default=0.0)
    series = [Series("oldest", color_of("oldest"), view.oldest, f"{format_duration(most)} at most", is_filled=True)]
    note = "how long it was ready"
    return TimeChart("Oldest message", time, series, unit="duration", note=note, kind=_stepped(time))


def _measure(view: View, measure: str, time: TimeRange) -> TimeChart:
    lines, overall = view.percentiles[measure], view.overall[measure]
    series = [Series(mark, color_of(mark), lines[mark], format_duration(overall[mark])) for mark in SHARES]
    note = MEASURE_NOTES[measure]
    return TimeChart(MEASURE_TITLES[measure], time, series, unit="duration", kind="band", note=note)


def _stacks(title: str, note: str, stacks: dict[str, list[float]], colors: ColorNames, time: TimeRange) -> TimeChart:
    series = [
        Series(PLAIN_CAUSES.get(name, printable(name)), colors[name], values, f"{sum(values):,.0f}")
        for name, values in stacks.items()
    ]
    return TimeChart(title, time, series, kind="stacked", note=note)


def _charts(data: ReportData) -> str:
    time, whole = data.time, data.all
    if not time.count:
        return ""
    found, none = [(_flow(whole, time, data), "")], []
    if any(whole.backlog):
        found.append((_backlog(whole, time, at_least=not data.is_whole), ""))
    else:
        none.append("backlog")
    if any(whole.oldest):
        found.append((_oldest(whole, time), ""))
    for measure, title in MEASURE_TITLES.items():
        if measure in whole.percentiles:
            found.append((_measure(whole, measure, time), _distribution(whole, measure)))
        else:
            none.append(title.lower())
    if whole.redeliveries:
        note = f"messages in {format_duration(time.step_ms)}, by cause"
        colors = ColorNames(whole.redeliveries)
        found.append((_stacks("Redeliveries", note, whole.redeliveries, colors, time), ""))
    else:
        none.append("redeliveries")
    if not whole.dead_letters:
        none.append("dead letters")
    cards = "".join(figure(chart, extra=extra, kind="chart card") for chart, extra in found)
    left_out = f'<p class="muted">There were none of: {", ".join(none)}.</p>' if none else ""
    return f'<section aria-label="All queues"><h2>All queues</h2><div class="charts">{cards}</div>{left_out}</section>'


def _distribution(view: View, measure: str) -> str:
    shares = view.distribution[measure]
    drawn = histogram(shares["from"], shares["share"], color_of(measure), f"{MEASURE_TITLES[measure]}: distribution")
    text = f"Distribution of {format_count(view.samples[measure], 'delivery', 'deliveries')}"
    return f"<details><summary>{text}</summary>{drawn}</details>" if drawn else ""


# ---- workers ---------------------------------------------------------------------------------------------------------


def _workers(data: ReportData) -> str:
    if not data.workers:
        return ""
    rows: dict[str, list[WorkerStep]] = {}
    for one in data.workers:
        rows.setdefault(one.worker, []).append(one)
    start = min(one.first_ms for one in data.workers)
    end = max(one.last_ms for one in data.workers) + 1
    names = sorted(rows, key=lambda name: (-sum(one.expired for one in rows[name]), rows[name][0].first_ms, name))
    body = "".join(_worker(name, rows[name], start, end, data.worker_step_ms) for name in names[:WORKERS_MAX])
    more = f'<p class="muted">and {len(names) - WORKERS_MAX:,} more workers</p>' if len(names) > WORKERS_MAX else ""
    seconds, date = end - start < 60 * MINUTE, end - start > DAY // 2
    ends = "".join(f"<span>{format_moment(at, seconds=seconds, date=date)}</span>" for at in (start, end))
    keys = "".join(
        f'<span class="key {color_of(name)}">{text}</span>'
        for name, text in (("running", "at work"), ("retried", "some failed"), ("expired", "leases expired"))
    )
    return (
        f'<section class="card" aria-label="Workers"><h2>Workers</h2><p class="keys-of muted">{keys}</p>'
        '<table class="workers"><thead><tr><th scope="col">Worker</th><th scope="col"><span class="hidden">Time</span>'
        f'<span class="ends" aria-hidden="true">{ends}</span></th><th scope="col" class="n">Deliveries</th>'
        '<th scope="col" class="n">Failed</th><th scope="col" class="n">Expired</th></tr></thead>'
        f"<tbody>{body}</tbody></table>{more}</section>"
    )


def _worker(name: str, steps: Sequence[WorkerStep], start: int, end: int, step_ms: int) -> str:
    """A row of the timeline. Steps of the same kind that follow each other are one span."""
    found: list[Span] = []
    length, before = end - start, None
    for one in steps:
        kind = "expired" if one.expired else "retried" if one.failed else "running"
        left, right = (max(0.0, min(1.0, (at - start) / length)) for at in (one.first_ms, one.last_ms))
        left = max(left, (one.at_ms - step_ms - start) / length, found[-1].end if found else 0.0)
        near = before is not None and one.at_ms - before <= 2 * step_ms
        text = f"{format_moment(one.first_ms, seconds=True, date=False)}: {kind}"
        if found and near and found[-1].color == color_of(kind):
            found[-1] = Span(found[-1].start, max(right, found[-1].end), color_of(kind), found[-1].text)
        else:
            found.append(Span(min(left, right), right, color_of(kind), text))
        before = one.at_ms
    deliveries, failed, expired = (
        sum(getattr(one, field) for one in steps) for field in ("deliveries", "failed", "expired")
    )
    drawn = spans(found, f"{printable(name)}: {deliveries:,} deliveries", height=14)
    figures = "".join(
        f'<td class="n{" bad" if bad and value else ""}" data-label="{label}">{value:,}</td>'
        for label, value, bad in (
            ("Deliveries", deliveries, False),
            ("Failed", failed, False),
            ("Expired", expired, True),
        )
    )
    return f'<tr><th scope="row" title="{text_of(name)}">{text_of(name)}</th><td class="row">{drawn}</td>{figures}</tr>'


# ---- dead letters ----------------------------------------------------------------------------------------------------


def _letters(data: ReportData) -> str:
    if not data.letters:
        return ""
    colors = ColorNames(data.all.dead_letters)
    note = f"messages in {format_duration(data.time.step_ms)}, by reason"
    chart = figure(_stacks("Deaths", note, data.all.dead_letters, colors, data.time))
    rows = "".join(
        f'<tr><th scope="row">{text_of(one.queue)}</th>'
        f'<td data-label="Reason"><span class="key {colors[one.reason]}">{text_of(one.reason)}</span></td>'
        f'<td data-label="Error">{text_of(one.error_type) if one.error_type else "–"}</td>'
        f'<td class="n" data-label="Died">{one.count:,}</td>'
        f'<td class="n" data-label="Last">{format_moment(one.last_ms)}</td>'
        f'<td data-label="To send them again">{command_of(act_on(one))}</td></tr>'
        for one in data.letters[:LETTERS_MAX]
    )
    left = len(data.letters) - LETTERS_MAX
    more = f'<p class="muted">and {left:,} more combinations</p>' if left > 0 else ""
    return (
        f'<section class="card" aria-label="Dead letters"><h2>Dead letters</h2>{chart}'
        '<table class="letters"><thead><tr><th scope="col">Queue</th><th scope="col">Reason</th>'
        '<th scope="col">Error</th><th scope="col" class="n">Died</th><th scope="col" class="n">Last</th>'
        '<th scope="col">To send them again</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>{more}</section>"
    )


# ---- queues ----------------------------------------------------------------------------------------------------------


def _queues(data: ReportData, findings: Sequence[Finding], room: int) -> str:
    """The table of queues; a row opens the charts of its queue, as far as there is room for them."""
    if not data.queues:
        return ""
    order = {one.queue: place for place, one in reversed(list(enumerate(findings)))}
    views = sorted(data.queues, key=lambda view: (order.get(view.name, len(findings)), -view.size, view.name))
    own = {view.name: [one for one in findings if one.queue == view.name] for view in views}
    rows = [_row(number, view, own[view.name], data) for number, view in enumerate(views)]
    details = [_detail(number, view, own[view.name], data, charts=False) for number, view in enumerate(views)]
    room -= sum(len(text.encode()) for text in (*rows, *details))
    for number, view in enumerate(views):
        text = _detail(number, view, own[view.name], data)
        more_bytes = len(text.encode()) - len(details[number].encode())
        if more_bytes > room:
            break
        room -= more_bytes
        details[number] = text
    body = "".join(row + detail for row, detail in zip(rows, details, strict=True))
    heads = (
        ("Published", "published"), ("Done", "done"), ("Dead", "dead"), ("Redelivered", "redelivered"),
        ("Backlog", "backlog"), ("Wait p99", "wait"), ("Run p99", "run"),
    )  # fmt: skip
    head = "".join(f'<th scope="col" class="n">{text}</th>' for text, _ in heads)
    choices = "".join(
        f'<option value="{value}">{text}</option>'
        for value, text in (("order", "attention first"), ("name", "by name"), *((key, text) for text, key in heads))
    )
    failures = f", {data.unlisted_failed:,} of them with failures" if data.unlisted_failed else ""
    more = f'<p class="muted">and {data.unlisted:,} more queues{failures}</p>' if data.unlisted else ""
    tools = (
        '<form class="tools" hidden><label>Filter <input id="filter" type="search" autocomplete="off"></label>'
        f'<label>Order <select id="order" autocomplete="off">{choices}</select></label>'
        '<span class="muted" id="shown" role="status"></span></form>'
    )
    return (
        f'<section class="card" aria-label="Queues" id="queues"><h2>Queues</h2>{tools if len(views) > 1 else ""}'
        f'<table class="queues"><thead><tr><th scope="col">Queue</th><th scope="col">Over time</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{more}</section>"
    )


def _row(number: int, view: View, findings: Sequence[Finding], data: ReportData) -> str:
    level = findings[0].level if findings else "calm"
    backlog = view.backlog[-1] if view.backlog else 0.0
    wait, run = (view.overall.get(measure, {}).get("p99") for measure in ("wait", "run"))
    cells = (
        ("Published", view.totals["published"], f"{view.totals['published']:,}"),
        ("Done", view.totals["done"], f"{view.totals['done']:,}"),
        ("Dead", view.totals["dead"], f"{view.totals['dead']:,}"),
        ("Redelivered", view.redelivered, f"{view.redelivered:,}"),
        ("Backlog", backlog, f"{backlog:,.0f}"),
        ("Wait p99", wait or 0.0, format_duration(wait)),
        ("Run p99", run or 0.0, format_duration(run)),
    )
    text = f"{view.totals['published']:,} published, {view.totals['done']:,} done, {view.totals['dead']:,} died"
    done, published = (even_out(data, data.queue_time, view.counts[name]) for name in ("done", "published"))
    bars = {color_of("done"): done, color_of("dead"): view.counts["dead"]}
    drawn = sparkline(bars, text, line=published, line_color=color_of("published"), width=128)
    figures = "".join(f"<td{_attributes(label, value)}>{written}</td>" for label, value, written in cells)
    return (
        f'<tr class="queue"><th scope="row">{_level(level)}<a href="#q{number}">{text_of(view.name)}</a></th>'
        f"<td>{drawn}</td>{figures}</tr>"
    )


def _attributes(label: str, value: float) -> str:
    """What a cell of the table has besides its text: the order of a duration is by its milliseconds."""
    kind = "bad" if label == "Dead" and value else "" if value else "zero"
    return (f' class="{kind}"' if kind else "") + (f' data-ms="{value:.0f}"' if "p99" in label else "")


def _detail(number: int, view: View, findings: Sequence[Finding], data: ReportData, *, charts: bool = True) -> str:
    """What a row of the table opens."""
    listed = "".join(_finding(one) for one in findings)
    drawn = "".join(figure(_small(chart)) for chart in _queue_charts(view, data)) if charts else ""
    facts = {name: count for name, count in view.totals.items() if count and name not in NOT_LISTED}
    figures = "".join(f"<div><dt>{name}</dt><dd>{value:,}</dd></div>" for name, value in facts.items())
    marks = "".join(
        f"<div><dt>{MEASURE_TITLES[measure].lower()} p50, p95</dt><dd>{format_duration(found['p50'])}, "
        f"{format_duration(found['p95'])}</dd></div>"
        for measure, found in view.overall.items()
    )
    return (
        f'<tr class="detail" id="q{number}"><td colspan="9"><a class="close" href="#queues">Close</a>'
        f'{f"""<ul class="list">{listed}</ul>""" if listed else ""}'
        f'{f"""<div class="charts">{drawn}</div>""" if drawn else ""}'
        f'{f"""<dl class="facts">{figures}{marks}</dl>""" if figures or marks else ""}</td></tr>'
    )


def _queue_charts(view: View, data: ReportData) -> list[TimeChart]:
    """The charts of one queue, without those that would be empty."""
    time = data.queue_time
    found = [_flow(view, time, data)]
    failed = [
        Series(name, color_of(name), view.counts[name], f"{view.totals[name]:,}")
        for name in FAILURES
        if view.totals[name]
    ]
    if failed:
        note = f"messages in {format_duration(time.step_ms)}"
        found.append(TimeChart("Failures", time, failed, kind="stacked", note=note))
    if any(view.backlog):
        found.append(_backlog(view, time, at_least=not data.is_whole))
    return found + [_measure(view, measure, time) for measure in MEASURE_TITLES if measure in view.percentiles]


# ---- advice, audit, figures ------------------------------------------------------------------------------------------


def _advice(gold: Gold) -> str:
    if not gold.advice:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{text_of(one.queue)}</th><td data-label="Advice">{text_of(one.title)}</td>'
        f'<td data-label="What to do">{commands_of(one.call)}</td>'
        f'<td data-label="State">{_advice_state(one)}</td></tr>'
        for one in gold.advice[:LETTERS_MAX]
    )
    return (
        '<section class="card" aria-label="Advice"><h2>Advice</h2><table class="letters advice"><thead><tr>'
        '<th scope="col">Queue</th><th scope="col">Advice</th><th scope="col">What to do</th><th scope="col">State</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _advice_state(one: AdviceRow) -> str:
    if not one.is_applied:
        return "open"
    undo = f'<div class="muted">to undo</div>{commands_of(one.undo)}' if one.undo else ""
    return f"applied{undo}"


def _audit(verdict: Verdict | None) -> str:
    """The result of the audit."""
    if verdict is None:
        text = "No audit yet: <code>waypost pipeline audit</code> compares what was published with what became of it."
        return f'<section class="card audit" aria-label="Audit"><h2>Audit</h2><p>{text}</p></section>'
    of = f"{'at least ' if verdict.at_least else ''}{verdict.unaccounted:,} unaccounted of {verdict.published:,}"
    kind, listed = "calm", ""
    text = "Every message ended, or is still there, and every redelivery has its cause."
    if not verdict.clean:
        kind, text = "alarm", "Not everything can be explained."
        if verdict.unexplained:
            text += f" {verdict.unexplained:,} messages have a claim or an end too many."
        if verdict.unrecorded:
            text += f" The store has {verdict.unrecorded:,} messages that no event of the journal explains."
        if verdict.out_of_order:
            text += f" {verdict.out_of_order:,} messages of ordered groups were claimed too early."
        if verdict.overcounted:
            text += f" The journal has {verdict.overcounted:,} more changes than the store has counted."
        listed = "".join(f"<li>{text_of(one)}</li>" for one in verdict.listed)
    elif not verdict.whole:
        kind, text = "warning", "What was seen is accounted for."
        text += f" {verdict.not_seen:,} events were not seen: they were trimmed before they were read."
        if verdict.undecided:
            text += f" The end of {verdict.undecided:,} messages may be among them."
    items = f'<ul class="ids">{listed}</ul>' if listed else ""
    return (
        f'<section class="card audit {kind}" aria-label="Audit"><h2>{_level(kind)}Audit: {escape(of)}</h2>'
        f"<p>{escape(text)} Audited {format_moment(verdict.at_ms)} UTC.</p>{items}</section>"
    )


def _figures(data: ReportData) -> str:
    """The charts of all queues as a table, for readers who do not see them."""
    time, whole = data.time, data.all
    if not time.count:
        return ""
    step = -(-time.count // TABLE_ROWS)
    rows = []
    for place in range(0, time.count, step):
        part = slice(place, place + step)
        at = time.start_ms + place * time.step_ms
        names = ("published", "done", "retried", "expired", "dead")
        counts = "".join(f'<td class="n">{sum(whole.counts[name][part]):,.0f}</td>' for name in names)
        oldest = max((value for value in whole.oldest[part] if value is not None), default=0.0)
        measured = "".join(
            f'<td class="n">{format_duration(_largest_of(whole, measure, part))}</td>' for measure in ("wait", "run")
        )
        levels = f'<td class="n">{whole.backlog[part][-1]:,.0f}</td><td class="n">{format_duration(oldest)}</td>'
        moment = format_moment(at, seconds=time.step_ms < MINUTE)
        rows.append(f'<tr><th scope="row">{moment}</th>{counts}{levels}{measured}</tr>')
    heads = ("Published", "Done", "Retried", "Expired", "Dead", "Backlog", "Oldest", "Wait p99", "Run p99")
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in heads)
    return (
        '<details class="card"><summary>The charts of all queues as a table</summary><div class="scroll" tabindex="0" '
        f'role="region" aria-label="Figures"><table class="plain"><thead><tr><th scope="col">From</th>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _largest_of(view: View, measure: str, part: slice) -> float | None:
    values = view.percentiles.get(measure, {}).get("p99", [])[part]
    return max((value for value in values if value is not None), default=None)


def _foot(made_ms: int) -> str:
    return (
        f"<footer>waypost {VERSION}, made {format_moment(made_ms)} UTC. Times are by the store's clock, in UTC. "
        "Percentiles come from buckets one per cent wide.</footer>"
    )


# ---- style and script ------------------------------------------------------------------------------------------------


@cache
def _style() -> str:
    return f"{styles()}{_part('page.css')}@media (prefers-color-scheme: dark) {{{styles(dark=True)}}}"


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _part(name: str) -> str:
    return resources.files("waypost.spark.lake.report").joinpath(name).read_text(encoding="utf-8")
