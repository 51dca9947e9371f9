"""What is kept does not change unnoticed: processes of the release before read it, too.

A layout is what a client must know to read a record: key names, packed formats, lists whose places are codes, columns,
fields. A change that the release before passes on (an added column, a longer list, an extension) needs no new version;
one that it would misread does. See docs/operations/upgrading.md, "What may change when".
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from importlib import resources
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.upgrade.test_older_data import folder_of, read_gzip
from waypost import Waypost, codec, release
from waypost.policy import GroupSettings, PolicyRecord
from waypost.release import DATA_VERSION
from waypost.schedule.rule import Spec
from waypost.schedule.state import PastRule, State
from waypost.spark.lake import tables
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.sqlite import entries, schema
from waypost.store.valkey import packing, scripts

#: The layout of each release. That of a released one never changes; `python -m tests.upgrade.test_layout_versions`
#: writes the one of the release that is being made.
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
    "heartbeat": Heartbeat.__struct_fields__, "queue of a heartbeat": ServedQueue.__struct_fields__,
    "past rule of a schedule": PastRule.__struct_fields__,
}  # fmt: skip


def valkey_layout() -> str:
    folder = resources.files(scripts.__package__ or "") / "lua"
    files = sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".lua"))
    parts = sorted({match[0] for _, text in files for match in PACKED.finditer(text)})
    formats = sorted(f"{name} {value.format}" for name, value in vars(packing).items() if isinstance(value, Struct))
    return "\n".join(parts + formats)


def fields_of(record: type) -> Callable[[], list[str]]:
    """Return a function that lists the fields of a record that is kept with their names."""
    return lambda: [f"{name}: {kind}" for name, kind in record.__annotations__.items()]


def envelope_layout() -> list[str]:
    lengths = f"version {codec.VERSION}, {codec._FIXED} bytes before the head"
    return [lengths, *fields_of(codec._Head)()]


def sqlite_layout() -> list[str]:
    """The columns and indexes of a new file. Indexes are named in statements, so none may be missing."""
    with TemporaryDirectory() as folder:
        return layout_of_file(Path(folder) / "store.db")


def layout_of_file(path: Path) -> list[str]:
    """The columns and indexes of a file after a client of this release opened it."""
    with Waypost(f"sqlite:///{path}") as post:
        post.queues()
    with closing(sqlite3.connect(path)) as connection:
        columns = connection.execute(
            "SELECT m.name || '.' || c.name, c.type, c.\"notnull\", c.dflt_value, c.pk "
            "FROM sqlite_master m JOIN pragma_table_info(m.name) c WHERE m.type = 'table'"
        ).fetchall()
        indexes = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        lines = [" ".join(map(str, column)) for column in columns] + [sql for (sql,) in indexes]
    return [f"schema {schema.SCHEMA_VERSION}", *sorted(" ".join(line.split()) for line in lines)]


def lake_layout() -> list[str]:
    lakes = [value for value in vars(tables).values() if isinstance(value, tables.LakeTable)]
    return sorted(
        f"{table.name}.{field['name']} {json.dumps(field['type'])}"
        for table in lakes
        for field in json.loads(table.delta_schema().to_json())["fields"]
    )


#: Packed formats and key names, as a hash.
LAYOUTS: dict[str, Callable[[], str]] = {"valkey": valkey_layout}
#: What is found by its name: a later release of the same data version adds to it.
FIELDS: dict[str, Callable[[], list[str]]] = {
    "envelope": envelope_layout, "schedule": fields_of(Spec), "state of a schedule": fields_of(State),
    "settings of a group": fields_of(GroupSettings), "sqlite": sqlite_layout, "lake": lake_layout,
}  # fmt: skip


def layout_of(name: str) -> Any:
    if name in LAYOUTS:
        return hashlib.sha256(LAYOUTS[name]().encode()).hexdigest()
    return FIELDS[name]() if name in FIELDS else list(LISTS[name])


def known_layouts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    return found


def write_layout() -> None:
    """Record the layout of the release that is being made."""
    known, (name, _, is_in_work) = known_layouts(), release.VERSION.partition(".dev")
    if name in known and not is_in_work:
        sys.exit(f"{name} is released, so its layout stays as it is: set the version of the next release first")
    known[name] = {"data version": DATA_VERSION} | {one: layout_of(one) for one in (*LAYOUTS, *LISTS, *FIELDS)}
    KNOWN.write_text(json.dumps(known, indent=1) + "\n")


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("name", [*LAYOUTS, *LISTS, *FIELDS])
def test_a_changed_layout_is_noticed(name: str) -> None:
    known = known_layouts().get(release.VERSION.partition(".dev")[0], {})
    assert (known.get("data version"), known.get(name)) == (DATA_VERSION, layout_of(name)), (
        f"the layout {name!r} is not the recorded one. If the release before is in use: can it pass the change on? If "
        "not, raise release.DATA_VERSION, and write the old form until `migrate --finish`. Then run "
        "python -m tests.upgrade.test_layout_versions"
    )


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("name", LISTS)
def test_lists_whose_places_are_codes_only_grow(name: str) -> None:
    for version, known in known_layouts().items():
        assert list(LISTS[name][: len(known[name])]) == known[name], f"not as in release {version}"


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("name", FIELDS)
def test_fields_columns_and_indexes_are_only_added(name: str) -> None:
    for version, known in known_layouts().items():
        if known["data version"] == DATA_VERSION:
            assert set(known[name]) <= set(layout_of(name)), f"something of release {version} is not there any more"


@pytest.mark.promise("STORE-7")
def test_a_file_of_the_first_release_becomes_like_a_new_one(tmp_path: Path) -> None:
    """So a column that the release before does not write has a default or may be null in new files too."""
    path = tmp_path / "store.db"
    path.write_bytes(read_gzip(folder_of("0.1.0") / "sqlite.db.gz"))
    assert layout_of_file(path) == sqlite_layout()


@pytest.mark.promise("STORE-7")
def test_the_layout_of_a_released_version_is_never_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "KNOWN", tmp_path / "known.json")
    monkeypatch.setattr(release, "VERSION", "8.0.0")
    write_layout()
    released = known_layouts()
    monkeypatch.setitem(LISTS, "settings", (*LISTS["settings"], "planted"))
    with pytest.raises(SystemExit, match=r"8\.0\.0 is released"):
        write_layout()
    assert known_layouts() == released
    monkeypatch.setattr(release, "VERSION", "8.1.0.dev0")
    write_layout()
    assert known_layouts()["8.0.0"] == released["8.0.0"]
    assert known_layouts()["8.1.0"]["settings"][-1] == "planted"


if __name__ == "__main__":
    write_layout()
