"""The dashboard, the alert rules and the reference name exactly the exported metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from waypost.see.counters import SETTLED
from waypost.see.metrics import METRICS, PROCESS, STORE, WORKER

pytestmark = pytest.mark.promise("SEE-2")
DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\bwaypost_[a-z_]+")
LABELS = re.compile(r"(\w+)=~?\"")
WITH_LABELS = re.compile(r"(waypost_[a-z_]+)\{([^}]*)\}")


def exported() -> set[str]:
    """Return every name that a query can use."""
    names = {metric.exported_name for metric in METRICS.values()}
    for metric in METRICS.values():
        if metric.kind == "histogram":
            names |= {f"{metric.name}_bucket", f"{metric.name}_sum", f"{metric.name}_count"}
    return names


def labels_of(name: str) -> set[str]:
    """Return the labels of a series."""
    stem = name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    return {*METRICS[stem].labels, *(("le",) if name.endswith("_bucket") else ())}


def check(query: str) -> set[str]:
    """Return the names of a query; fail unless each is exported and has the labels that the query uses."""
    names = set(NAME.findall(query))
    assert names <= exported(), query
    for name, labels in WITH_LABELS.findall(query):
        assert set(LABELS.findall(labels)) <= labels_of(name), query
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing), query
    return names


# ---- a small part of YAML, all that the rules use: maps, lists of maps, and text in quotes ---------------------------


def parsed(text: str) -> Any:
    """Parse the part of YAML that the rules use. Everything else is refused."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    value, rest = _block(lines, 0)
    assert rest == []
    return value


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _block(lines: list[str], indent: int) -> tuple[Any, list[str]]:
    if lines[0].lstrip().startswith("- "):
        items = []
        while lines and _indent(lines[0]) == indent and lines[0].lstrip().startswith("- "):
            # What follows the dash is a map that is indented by two more.
            item, lines = _block([" " * (indent + 2) + lines[0].lstrip()[2:], *lines[1:]], indent + 2)
            items.append(item)
        return items, lines
    found: dict[str, Any] = {}
    while lines and _indent(lines[0]) == indent:
        match = re.fullmatch(r"(\w+):(?: (.+))?", lines[0].strip())
        assert match is not None, lines[0]
        name, scalar = match.groups()
        assert name not in found, f"{name} is there twice"
        lines = lines[1:]
        if scalar is None:
            assert _indent(lines[0]) > indent, name
            found[name], lines = _block(lines, _indent(lines[0]))
        else:
            found[name] = _scalar(scalar)
    return found, lines


def _scalar(text: str) -> str:
    if text.startswith("'"):
        # A quote inside would have to be doubled, which nothing here needs.
        assert text.endswith("'"), text
        assert "'" not in text[1:-1], text
        return text[1:-1]
    assert re.fullmatch(r"\w+", text), f"text with signs in it needs quotes: {text}"
    return text


def rules() -> list[dict[str, Any]]:
    [group] = parsed((DOCS / "operations" / "alerts.yaml").read_text())["groups"]
    assert group["name"] == "waypost"
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_every_alert_queries_exported_metrics_and_has_a_remedy() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 8
    used: set[str] = set()
    for rule in found:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        used |= check(rule["expr"])
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        requested = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert requested <= {"queue", "instance"}
        # A label in the summary must be one that the query keeps.
        assert "queue" not in requested or "by (queue)" in rule["expr"]
    # Age, not only length; and the figures that mean harm.
    assert used >= {
        "waypost_queue_oldest_ready_seconds", "waypost_queue_ended_total", "waypost_worker_health", "waypost_store_up",
        "waypost_queue_timer_late_seconds", "waypost_journal_lag_events", "waypost_queue_redelivered_total",
    }  # fmt: skip


def test_every_panel_of_the_dashboard_queries_exported_metrics() -> None:
    board = json.loads((DOCS / "operations" / "grafana.json").read_text())
    panels = board["panels"]
    assert len(panels) > 10
    assert len({panel["id"] for panel in panels}) == len(panels)
    used: set[str] = set()
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = check(target["expr"])
            assert names, panel["title"]
            used |= names
    assert used >= {"waypost_queue_oldest_ready_seconds", "waypost_wait_seconds_bucket", "waypost_run_seconds_bucket"}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            check(variable["definition"])
    positions = [(panel["gridPos"]["y"], panel["gridPos"]["x"], panel["gridPos"]["w"]) for panel in panels]
    for (y, x, width), (next_y, next_x, _) in zip(sorted(positions), sorted(positions)[1:], strict=False):
        assert x + width <= 24
        assert y != next_y or x + width <= next_x


def test_the_reference_lists_every_metric_with_its_labels_and_no_other() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(waypost_\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", page, re.MULTILINE)
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows]
    assert listed == [
        (metric.exported_name, metric.kind, metric.labels, metric.help) for metric in (*PROCESS, *WORKER, *STORE)
    ]
    assert [outcome for outcome in SETTLED if f"`{outcome}`" not in page] == []


def test_labels_are_queues_and_fixed_values() -> None:
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert labels == {"queue", "result", "outcome", "state", "end", "cause", "status"}


@pytest.mark.parametrize("wrong", ["a: b c", "a: 'b", "a: 'b'c'", "- a", "a:\nb: c", "a: b\n   c: d", "a: b\na: c"])
def test_unknown_yaml_is_refused(wrong: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        parsed(wrong)
