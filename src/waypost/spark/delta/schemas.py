"""Columns of Delta tables: which types of Spark they may have, and what may change.

A table keeps its columns and their types. New columns, and new fields of structs, are added; older rows are null there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from deltalake import Schema
from deltalake.schema import ArrayType, MapType, StructType

from waypost.errors import InvalidInput

#: Types that a table of reader version 1 has. Others raise the version, or only some readers know them.
TYPES: Final = re.compile(
    r"string|long|integer|short|byte|float|double|boolean|binary|date|timestamp|decimal\(\d+, ?-?\d+\)"
)
#: Types of a column that a table may be partitioned by: their values are in the names of folders.
PARTITION_TYPES: Final = ("date", "long", "integer", "short", "byte")


def make_delta_schema(schema: Any) -> Schema:
    """Return a schema of Spark as one of Delta, in which every column may be null."""
    fields = schema.jsonValue()["fields"]
    seen: dict[str, str] = {}
    for field in fields:
        other = seen.setdefault(field["name"].lower(), field["name"])
        if other is not field["name"]:
            raise InvalidInput(
                f"two columns are named {other} and {field['name']}, which differ in no more than case: rename one"
            )
    made = {"type": "struct", "fields": [_nullable_field(field, "") for field in fields]}
    return Schema.from_json(json.dumps(made))


def _nullable_field(field: dict[str, Any], parent: str) -> dict[str, Any]:
    path = f"{parent}{field['name']}"
    return {"name": field["name"], "type": _nullable_type(field["type"], path), "nullable": True, "metadata": {}}


def _nullable_type(kind: Any, path: str) -> Any:
    """Return a type as JSON with every part nullable; one that Delta does not have is refused by its path."""
    if isinstance(kind, str) and TYPES.fullmatch(kind):
        return kind
    match kind:
        case {"type": "struct", "fields": fields}:
            return {"type": "struct", "fields": [_nullable_field(field, f"{path}.") for field in fields]}
        case {"type": "array", "elementType": element}:
            return {"type": "array", "elementType": _nullable_type(element, path), "containsNull": True}
        case {"type": "map", "keyType": key, "valueType": value}:
            return {
                "type": "map", "keyType": _nullable_type(key, path), "valueType": _nullable_type(value, path),
                "valueContainsNull": True,
            }  # fmt: skip
    name = kind if isinstance(kind, str) else kind["type"]
    raise InvalidInput(
        f"column {path} has the type {name}, which a Delta table that every reader can read does not have: cast it "
        "to another type"
    )


def compare_schemas(known: Schema, given: Schema, table: str) -> tuple[list[str], list[str]]:
    """Return the names of columns and of fields in structs that are new, and of those that are missing.

    A column that has another type than before is refused.
    """
    new: list[str] = []
    missing: list[str] = []
    for what, path, before, after in _compare(known, given, ""):
        if what == "new":
            new.append(path)
        elif what == "missing":
            missing.append(path)
        else:
            raise InvalidInput(
                f"column {path} of the table {table} is {describe_type(before)}, and the rows have "
                f"{describe_type(after)} there: cast it, or write another table"
            )
    return new, missing


def _compare(known: Any, given: Any, path: str) -> Iterator[tuple[str, str, Any, Any]]:
    if isinstance(known, StructType) and isinstance(given, StructType):
        before = {field.name: field.type for field in known.fields}
        after = {field.name: field.type for field in given.fields}
        for name in {**before, **after}:
            below = f"{path}.{name}" if path else name
            if name not in before:
                yield "new", below, None, after[name]
            elif name not in after:
                yield "missing", below, before[name], None
            else:
                yield from _compare(before[name], after[name], below)
    elif isinstance(known, ArrayType) and isinstance(given, ArrayType):
        yield from _compare(known.element_type, given.element_type, path)
    elif isinstance(known, MapType) and isinstance(given, MapType):
        yield from _compare(known.key_type, given.key_type, path)
        yield from _compare(known.value_type, given.value_type, path)
    elif known != given:
        yield "changed", path, known, given


def describe_type(kind: Any) -> str:
    """Return the name of a type."""
    found = json.loads(kind.to_json())
    return str(found if isinstance(found, str) else found["type"])
