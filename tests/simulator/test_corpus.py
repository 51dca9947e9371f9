"""Scenarios that once failed: none of them does any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator.checker import run_and_judge
from tests.simulator.scenario import from_json

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))


@pytest.mark.promise("SEE-7")
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_scenario_that_once_failed_does_not_fail(path: Path) -> None:
    assert [str(finding) for finding in run_and_judge(from_json(path.read_text())).findings] == []


def test_there_is_a_corpus() -> None:
    assert CORPUS
