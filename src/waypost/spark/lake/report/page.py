"""The page: one HTML file that needs nothing else, not even a network, and runs no script but its own two.

The charts are drawn by plotly's library, which is written into the page once. A content security policy names the two
scripts by their hashes and forbids everything else, requests included, so that a queue or a reason with markup in its
name stays a text even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any

from waypost.errors import MissingExtra
from waypost.release import VERSION
from waypost.spark.lake.report.gold import Verdict
from waypost.spark.lake.report.series import ALL, CHARTED_MAX, ReportData, View

CHARTS = (
    ("rates", "Rates", "messages per second, by what happened to them", "wide"),
    ("wait", "Wait", "from ready to claimed", ""),
    ("run", "Run time", "from claimed to settled", ""),
    ("late", "Lateness", "timers: from due to claimed", ""),
    ("distribution", "Distribution", "share of deliveries over the whole time", ""),
    ("redeliveries", "Redeliveries", "by cause", ""),
    ("dead", "Dead letters", "by reason", ""),
)
TILES = {
    "published": "published", "done": "done", "dead": "dead letters", "redelivered": "redelivered",
    "duplicates": "duplicates", "wait": "wait, p99", "run": "run time, p99", "late": "lateness, p99",
}  # fmt: skip
COLUMNS = (
    "queue", "published", "done", "dead", "retried", "expired", "redelivered", "duplicates", "wait p50", "wait p99",
    "run p50", "run p99", "late p99",
)  # fmt: skip


def duration(milliseconds: float | None) -> str:
    """A duration as people read it; the page's script has the same."""
    if milliseconds is None:
        return "–"
    if milliseconds < 1:
        return "< 1 ms"
    for below, unit, name in ((1000, 1, "ms"), (120_000, 1000, "s"), (7_200_000, 60_000, "min")):
        if milliseconds < below:
            value = milliseconds / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{float(f'{value:.2g}'):g} {name}"
    return f"{milliseconds / 3_600_000:.1f} h"


def moment(at_ms: int) -> str:
    """A time as people read it."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def tiles(view: View) -> dict[str, str]:
    """The figures on top, as texts."""
    fields = {name: f"{view.totals[name]:,}" for name in ("published", "done", "dead", "duplicates")}
    fields["redelivered"] = f"{view.redelivered:,}"
    return fields | {name: duration(view.overall.get(name, {}).get("p99")) for name in ("wait", "run", "late")}


def verdict_card(verdict: Verdict | None) -> str:
    """Return the card with the result of the audit, the first of the page."""
    if verdict is None:
        return _card("", "No audit yet", "`waypost pipeline audit` compares what was published with what became of it.")
    of = f"{'at least ' if verdict.at_least else ''}{verdict.unaccounted:,} unaccounted of {verdict.published:,}"
    at = f" Audited {moment(verdict.at_ms)} UTC."
    if not verdict.clean:
        more = f" {verdict.unexplained:,} messages have a claim or an end too many." if verdict.unexplained else ""
        if verdict.unrecorded:
            more += f" The store has {verdict.unrecorded:,} messages that no event of the journal explains."
        if verdict.overcounted:
            more += f" The journal has {verdict.overcounted:,} more changes than the store has counted."
        return _card("bad", of, f"Not everything can be explained.{more}{at}", verdict.listed)
    if not verdict.whole:
        seen = f"{verdict.not_seen:,} events were not seen: they were trimmed before they were read."
        open_ends = f" The end of {verdict.undecided:,} messages may be among them." if verdict.undecided else ""
        return _card("warn", of, f"What was seen is accounted for. {seen}{open_ends}{at}")
    return _card("good", of, f"Every message ended, or is still there, and every redelivery has its cause.{at}")


def _card(kind: str, headline: str, text: str, listed: tuple[str, ...] = ()) -> str:
    items = "".join(f"<li>{html.escape(one)}</li>" for one in listed)
    return (
        f'<section class="card verdict {kind}"><strong>{html.escape(headline)}</strong>'
        f"<p>{html.escape(text)}</p>{f'<ul>{items}</ul>' if items else ''}</section>"
    )


def table(data: ReportData) -> str:
    """The queues, one row each."""
    rows = []
    for view in data.views:
        if view.name == ALL:
            continue
        overall = view.overall
        cells = [f"{view.totals[name]:,}" for name in ("published", "done", "dead", "retried", "expired")]
        cells += [f"{view.redelivered:,}", f"{view.totals['duplicates']:,}"]
        cells += [
            duration(overall.get(measure, {}).get(mark))
            for measure, mark in (("wait", "p50"), ("wait", "p99"), ("run", "p50"), ("run", "p99"), ("late", "p99"))
        ]
        marked = "".join(
            f'<td class="bad">{cell}</td>' if column == "dead" and cell != "0" else f"<td>{html.escape(cell)}</td>"
            for column, cell in zip(COLUMNS[1:], cells, strict=True)
        )
        name = html.escape(view.name)
        rows.append(f'<tr><td title="{name}">{name}</td>{marked}</tr>')
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    more = f'<p class="quiet">and {data.unlisted:,} more queues</p>' if data.unlisted else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<section class="card"><h2>Queues</h2><div class="scroll"><table>{body}</table></div>{more}</section>'


def page(data: ReportData, verdict: Verdict | None, *, made_ms: int, library: str | None = None) -> str:
    """The whole page."""
    library = plotly_library() if library is None else library
    script = _part("page.js")
    charted = data.views[: CHARTED_MAX + 1]
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    span = "nothing yet"
    if data.times:
        span = f"{moment(data.times[0])} to {moment(data.times[-1] + data.step_ms)} UTC"
        minutes = data.step_ms // 60_000
        span += f", in steps of {'a minute' if minutes == 1 else f'{minutes:,} minutes'}"
    options = "".join(f"<option>{html.escape(view.name) or 'all queues'}</option>" for view in charted)
    figures = tiles(data.views[0])
    cards = "".join(
        f'<div class="card"><span class="quiet">{label}</span>'
        f'<b id="tile-{name}">{html.escape(figures[name])}</b></div>'
        for name, label in TILES.items()
    )
    charts = "".join(
        f'<section class="card {kind}"><h2>{title}</h2><p class="quiet">{text}</p>'
        f'<div class="chart" id="{name}"></div></section>'
        for name, title, text, kind in CHARTS
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>waypost report</title><style>{_part('page.css')}</style></head><body><main>"
        f'<header><div><h1>waypost <span>report</span></h1><p class="quiet">{span}</p></div>'
        f'<label>Show <select id="queue" autocomplete="off">{options}</select></label></header>'
        f'{verdict_card(verdict)}<div class="tiles">{cards}</div>'
        f'<noscript><p class="card">The charts need JavaScript, which is part of this file.</p></noscript>'
        f'<div class="charts">{charts}</div>{table(data)}'
        f"<footer>waypost {VERSION}, made {moment(made_ms)} UTC. Times are by the stores' clocks. Percentiles come "
        f"from buckets one per cent wide.</footer></main>"
        f'<script type="application/json" id="data">{_encode_data(data, charted)}</script>'
        f"<script>{library}</script><script>{script}</script></body></html>\n"
    )


def _encode_data(data: ReportData, views: tuple[View, ...]) -> str:
    """What the script draws. No text in it can end the element that holds it."""
    fields: dict[str, Any] = {
        "times": data.times,
        "step_ms": data.step_ms,
        "views": [
            {
                "tiles": tiles(view),
                "rates": {name: [round(value, 4) for value in values] for name, values in view.rates.items()},
                "percentiles": view.percentiles,
                "distribution": view.distribution,
                "redeliveries": view.redeliveries,
                "dead_letters": view.dead_letters,
            }
            for view in views
        ],
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _part(name: str) -> str:
    return resources.files("waypost.spark.lake.report").joinpath(name).read_text(encoding="utf-8")


def plotly_library() -> str:
    """Plotly's script as its wheel has it."""
    try:
        library = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    except ModuleNotFoundError:
        raise MissingExtra('a report draws with plotly: pip install "waypost[spark]"') from None
    return library.read_text(encoding="utf-8")
