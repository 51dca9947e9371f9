"""The oldest drivers are those that pyproject.toml allows, and `make oldest` runs the tests with them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOWER_BOUND = re.compile(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)")


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines)


OLDEST = pins("constraints-oldest.txt")


def numbers(version: str) -> tuple[int, ...]:
    found = [int(number) for number in version.split(".")]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def test_the_lower_bounds_of_the_extras_are_the_oldest_versions_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = {
        (found[1], numbers(found[2]))
        for extra in ("valkey", "postgres", "sqlalchemy")
        for requirement in extras[extra]
        if (found := LOWER_BOUND.match(requirement)) is not None
    }
    assert bounds == {(name, numbers(OLDEST[name])) for name in ("redis", "hiredis", "psycopg", "sqlalchemy")}


def test_this_run_has_the_versions_that_it_is_meant_to_have() -> None:
    """Otherwise `make oldest` would test nothing."""
    expected = OLDEST if os.environ.get("WAYPOST_TESTS_OLDEST") == "1" else pins("constraints.txt")
    found = {name: importlib.metadata.version(name) for name in OLDEST}
    assert found == {name: expected[name] for name in OLDEST}


@pytest.mark.parametrize("package", ["redis", "psycopg"])
def test_a_driver_whose_private_names_are_used_has_an_upper_bound(package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [line for lines in extras.values() for line in lines if re.match(rf"{package}(\[|>)", line)]
    assert named
    assert [line for line in named if "<" not in line] == []
