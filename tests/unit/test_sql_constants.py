"""A constant that Python and SQL share is defined once, in Python, and injected into the SQL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from waypost.store.postgres.constants import CONSTANTS, STATES, inject
from waypost.store.postgres.schema import FUNCTIONS, function_text
from waypost.store.sqlite import schema

SOURCE = Path(__file__).parents[2] / "src" / "waypost" / "store"
POSTGRES = sorted((SOURCE / "postgres" / "sql").glob("*.sql"))
SQLITE = [SOURCE / "sqlite" / "schema.sql", *sorted((SOURCE / "sqlite").glob("*.py"))]
#: A minute in milliseconds is a unit, not a setting; smaller numbers may mean anything.
UNITS = frozenset((60_000,))
DISTINCT_FROM = 1_000
STATE_LITERAL = re.compile(r"\bstate\b(?: \+ 0)? ?(?:=|<>|<=?|>=?|:=) ?\d|\bstate (?:NOT )?(?:BETWEEN|IN) \(?\d")


def code(path: Path) -> str:
    return re.sub(r"--[^\n]*", "", path.read_text())


def test_there_are_sql_files_to_check() -> None:
    assert {path.stem for path in POSTGRES} == set(FUNCTIONS)


@pytest.mark.parametrize("path", POSTGRES, ids=lambda path: path.stem)
def test_no_sql_function_repeats_a_constant_of_python(path: Path) -> None:
    numbers = {name: value for name, value in CONSTANTS.items() if isinstance(value, int)}
    known = {value: name for name, value in numbers.items() if value >= DISTINCT_FROM and value not in UNITS}
    repeated = {
        int(number): known[int(number)] for number in re.findall(r"\b\d+\b", code(path)) if int(number) in known
    }
    assert repeated == {}


@pytest.mark.parametrize("path", [*POSTGRES, *SQLITE], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_states_are_named_and_not_numbered(path: Path) -> None:
    assert STATE_LITERAL.findall(code(path)) == []


def test_every_constant_is_used_and_every_name_is_known() -> None:
    text = "\n".join(map(code, POSTGRES))
    used = set(re.findall(r"\{([A-Z][A-Z_]*)\}", text))
    assert used - {"DONE"} == CONSTANTS.keys() - {"DONE"}
    with pytest.raises(KeyError):
        inject("SELECT {NO_SUCH_NUMBER}")


def test_no_placeholder_is_left_in_the_sql_that_the_server_gets() -> None:
    assert re.findall(r"\{[A-Z_]+\}", "\n".join(map(function_text, FUNCTIONS))) == []


def test_both_sql_stores_use_the_same_numbers_for_states() -> None:
    # Not required, but a person who reads both should not have to learn two lists.
    assert [name.lower() for name in schema.STATES] == list(STATES)[: len(schema.STATES)]
    assert schema.Spelling("wp")["state < {WAITING} AND state = {LEASED}"] == "state < 3 AND state = 2"
