"""Colors by what they stand for: a cause has the same color in every chart. Green is only for what went well."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

#: What has a color of its own, which the style sheets define as `--NAME`. The classes in drawings are `c-NAME`.
NAMED = frozenset((
    "published", "done", "retried", "expired", "dead", "released", "snoozed", "redriven", "backlog", "oldest", "mean",
    "longest", "p50", "p95", "p99", "ready", "delayed", "running", "rejected", "retries_exhausted", "max_deliveries",
    "undecodable", "retry_policy_failed", "undeliverable", "blocker_failed", "wait", "run", "late",
))  # fmt: skip
#: Colors for names that others chose.
FREE_COLORS = 6
OTHER = "c-other"


def color_of(name: str) -> str:
    """Return the class that gives a drawing the color of a cause."""
    return f"c-{name}" if name in NAMED else OTHER


class ColorNames:
    """The classes of the causes of one page: those that have no color of their own share the free ones, in order."""

    def __init__(self, names: Iterable[str]) -> None:
        unknown = [name for name in dict.fromkeys(names) if name not in NAMED]
        self._given = {name: f"c-free{number}" for number, name in enumerate(unknown[:FREE_COLORS], 1)}

    def __getitem__(self, name: str) -> str:
        return self._given.get(name) or color_of(name)


@cache
def styles(*, dark: bool = False) -> str:
    """Return the style sheet of charts, or the one that changes their colors on dark pages."""
    name = "charts-dark.css" if dark else "charts.css"
    return resources.files("waypost.charts").joinpath("static", name).read_text(encoding="utf-8")
