"""HTTP requests to a worker's endpoint, and parsed metrics."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import WAIT_SECONDS_MAX, until

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Return the status, content type and body of a reply."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def get_json(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status of a reply, and its JSON body."""
    status, _, body = get(url)
    return status, json.loads(body)


def figures(text: str) -> Figures:
    """Parse the metrics of a scrape, by name and labels. Fails on a duplicate series."""
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = sample.name, frozenset(sample.labels.items())
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def value(found: Figures, name: str, **labels: str) -> float | None:
    """Return one figure; None if it is missing."""
    return found.get((name, frozenset(labels.items())))


class Service:
    """A process of `waypost`, and the URL of its endpoint."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def output(self) -> str:
        """Return its log so far."""
        return self.log.read_text()

    @property
    def url(self) -> str:
        """Wait for its URL in the log."""

        def found() -> str | None:
            assert self.process.poll() is None, self.output()
            match = re.search(r"metrics at (http://\S+)/metrics", self.output())
            return None if match is None else match.group(1)

        url: str = until(found, "an address")
        return url

    def scrape(self) -> Figures:
        """Return what Prometheus would read now."""
        status, _, text = get(f"{self.url}/metrics")
        assert status == 200
        return figures(text)
