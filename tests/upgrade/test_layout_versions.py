"""What Valkey and SQLite keep does not change unnoticed: processes of the release before read it, too.

A layout is what a client must know to read a record: key names, packed formats, lists whose places are codes, columns.
A change that the release before passes on (an added column, a longer list, an extension) needs no new version; one that
it would misread does. See docs/operations/upgrading.md, "What may change when".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from struct import Struct
from typing import Any

import pytest

from waypost import codec
from waypost.policy import PolicyRecord
from waypost.release import DATA_VERSION
from waypost.store.sqlite import entries, schema
from waypost.store.valkey import packing, scripts

#: The layout of each version. That of a released version never changes. While a version is not released, its entry is
#: replaced: `python -m tests.upgrade.test_layout_versions` writes it.
KNOWN = Path(__file__).parent / "layout_versions.json"
#: The parts of Lua scripts that say how something is packed, and where it lies.
PACKED = re.compile(r"""
    struct[._](?:un)?pack\(\s*('[^']*'|[A-Z_]+) | cmsgpack\.(?:un)?pack\((?:[^()]|\([^()]*\))*\)
    | (?:BASE|OWN|base|own)\s\.\.\s'[^']*' | '(?:HSET|HMGET|HGET)',\s(?:QUEUE|key),\s'\w+'(?:,\s'\w+')*
    | _FORMAT\s=\s'[^']*'
""", re.VERBOSE)  # fmt: skip
#: Lists whose places are codes in records: a later release appends to them.
LISTS: dict[str, tuple[str, ...]] = {
    "valkey keys": scripts.KEY_NAMES, "valkey counters": scripts.COUNTERS, "valkey events": scripts.EVENTS,
    "valkey causes": scripts.CAUSES, "sqlite states": schema.STATES, "sqlite journal": entries.COLUMNS,
    "content types": codec.CONTENT_TYPES, "settings": PolicyRecord.__struct_fields__,
}  # fmt: skip


def valkey_layout() -> str:
    folder = resources.files(scripts.__package__ or "") / "lua"
    files = sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".lua"))
    parts = sorted({match[0] for _, text in files for match in PACKED.finditer(text)})
    formats = sorted(f"{name} {value.format}" for name, value in vars(packing).items() if isinstance(value, Struct))
    return "\n".join(parts + formats)


def sqlite_layout() -> str:
    columns = [f"{table} {', '.join(names)}" for table, names in schema.TABLES.items()]
    return "\n".join([str(schema.SCHEMA_VERSION), *sorted(columns)])


LAYOUTS: dict[str, Callable[[], str]] = {"valkey": valkey_layout, "sqlite": sqlite_layout}


def layout() -> dict[str, Any]:
    hashes = {name: hashlib.sha256(read().encode()).hexdigest() for name, read in LAYOUTS.items()}
    return hashes | {name: list(values) for name, values in LISTS.items()}


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("name", [*LAYOUTS, *LISTS])
def test_a_changed_layout_is_noticed(name: str) -> None:
    known = json.loads(KNOWN.read_text())[str(DATA_VERSION)]
    assert known[name] == layout()[name], (
        f"the layout {name!r} is not that of version {DATA_VERSION}. If that version is released: can the release "
        "before pass the change on? If not, raise release.DATA_VERSION, and write the old form until `migrate "
        "--finish`. Then run python -m tests.upgrade.test_layout_versions"
    )


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("name", LISTS)
def test_lists_whose_places_are_codes_only_grow(name: str) -> None:
    for version, known in json.loads(KNOWN.read_text()).items():
        assert list(LISTS[name][: len(known[name])]) == known[name], f"not as in version {version}"


if __name__ == "__main__":
    found = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    KNOWN.write_text(json.dumps(found | {str(DATA_VERSION): layout()}, indent=1) + "\n")
