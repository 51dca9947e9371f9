"""The tables of a lake as views of a catalog: statements for engines that read Delta tables by their folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from waypost.errors import InvalidInput

Dialect = Literal["spark", "duckdb"]
DIALECTS: Final[tuple[Dialect, ...]] = ("spark", "duckdb")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,2}", re.ASCII)


def view_name(table: str) -> str:
    """Return the name of a table's view: `gold/minutes` is `gold_minutes`, whatever characters a queue has."""
    return re.sub(r"[^A-Za-z0-9_]", "_", table)


def create_views(uris: Iterable[tuple[str, str]], catalog: str | None, dialect: Dialect) -> list[str]:
    """Return a `CREATE VIEW` statement for each table, given with its URI.

    `catalog` is put before the names: a schema, or a catalog and a schema, which must exist.
    """
    if catalog is not None and _NAME.fullmatch(catalog) is None:
        raise InvalidInput(
            f"--catalog is a schema, or a catalog and a schema, such as lake or main.lake, not {catalog!r}"
        )
    prefix = "" if catalog is None else f"{catalog}."
    statements = []
    for table, uri in uris:
        source = f"delta_scan('{uri.replace(chr(39), chr(39) * 2)}')"
        if dialect == "spark":
            source = f"delta.`{uri.replace('`', '``')}`"
        statements.append(f"CREATE OR REPLACE VIEW {prefix}{view_name(table)} AS SELECT * FROM {source};")
    return statements
