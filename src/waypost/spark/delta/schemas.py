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


def format_type(kind: Any) -> str:
    """Return a type of Spark as DDL. Names of fields are quoted: Spark itself does not quote them."""
    from pyspark.sql.types import ArrayType as SparkArray
    from pyspark.sql.types import MapType as SparkMap
    from pyspark.sql.types import StructType as SparkStruct

    if isinstance(kind, SparkStruct):
        return f"STRUCT<{format_fields(kind, ': ')}>"
    if isinstance(kind, SparkArray):
        return f"ARRAY<{format_type(kind.elementType)}>"
    if isinstance(kind, SparkMap):
        return f"MAP<{format_type(kind.keyType)}, {format_type(kind.valueType)}>"
    return str(kind.simpleString()).upper()


def format_fields(struct: Any, between: str = " ") -> str:
    """Return the fields of a struct of Spark as DDL, as a user gives the columns of a schema."""
    if not all(field.name for field in struct.fields):
        raise InvalidInput("a field of the schema has no name: give it one, or leave it out")
    return ", ".join(
        f"`{field.name.replace('`', '``')}`{between}{format_type(field.dataType)}" for field in struct.fields
    )


def make_delta_schema(schema: Any) -> Schema:
    """Return a schema of Spark as one of Delta, in which every column may be null."""
    made = {"type": "struct", "fields": _nullable_fields(schema.jsonValue()["fields"], "")}
    return Schema.from_json(json.dumps(made))


def _nullable_fields(fields: list[dict[str, Any]], parent: str) -> list[dict[str, Any]]:
    seen: dict[str, str] = {}
    for field in fields:
        path = f"{parent}{field['name']}"
        other = seen.setdefault(path.lower(), path)
        if other is not path:
            raise InvalidInput(
                f"two columns are named {other} and {path}, which differ in no more than case: rename one"
            )
    return [_nullable_field(field, parent) for field in fields]


def _nullable_field(field: dict[str, Any], parent: str) -> dict[str, Any]:
    path = f"{parent}{field['name']}"
    return {"name": field["name"], "type": _nullable_type(field["type"], path), "nullable": True, "metadata": {}}


def _nullable_type(kind: Any, path: str) -> Any:
    """Return a type as JSON with every part nullable; one that Delta does not have is refused by its path."""
    if isinstance(kind, str) and TYPES.fullmatch(kind):
        return kind
    match kind:
        case {"type": "struct", "fields": fields}:
            return {"type": "struct", "fields": _nullable_fields(fields, f"{path}.")}
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
    """Return the names of columns that are new or have new fields in structs, and the paths of what is missing.

    A column that has another type than before is refused, and a new one whose name differs from a known one in case.
    """
    new: dict[str, None] = {}
    missing: list[str] = []
    for what, names, before, after in _compare(known, given, ()):
        path = ".".join(names)
        if what == "new":
            # A name may have a dot itself, so it cannot be taken from the path.
            new[names[0]] = None
        elif what == "missing":
            missing.append(path)
        elif what == "case":
            raise InvalidInput(
                f"column {path} of the rows and column {before} of the table {table} differ in no more than case: "
                f"rename it to {before}"
            )
        else:
            raise InvalidInput(
                f"column {path} of the table {table} is {describe_type(before)}, and the rows have "
                f"{describe_type(after)} there: cast it, or write another table"
            )
    return list(new), missing


def _compare(known: Any, given: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any, Any]]:
    if isinstance(known, StructType) and isinstance(given, StructType):
        before = {field.name: field.type for field in known.fields}
        after = {field.name: field.type for field in given.fields}
        same = {name.lower(): name for name in before}
        for name in {**before, **after}:
            below = (*path, name)
            if name not in before and name.lower() in same:
                yield "case", below, ".".join((*path, same[name.lower()])), None
            elif name not in before:
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
