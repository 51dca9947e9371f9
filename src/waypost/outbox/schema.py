"""waypost's tables as SQLAlchemy metadata, so that Alembic's autogenerate does not propose to drop them.

    target_metadata = [Base.metadata, waypost.outbox.metadata()]
    context.configure(..., target_metadata=target_metadata, include_object=waypost.outbox.include_object())

They are parsed from the migrations, so that there is no second definition. To create or change them, run the script of
`waypost migrate --sql` in a revision of yours: it also has functions and partitions, which metadata cannot describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from waypost.errors import MissingExtra

if TYPE_CHECKING:
    from sqlalchemy import MetaData

#: The list of columns ends on a line of its own, or on the first line.
_TABLE = re.compile(r"^CREATE (?:UNLOGGED )?TABLE \{([a-z_]+)\} \((.*?)(?:^\)|\);$)", re.MULTILINE | re.DOTALL)
_PARTITION = re.compile(r"^CREATE TABLE \{([a-z_]+)\} PARTITION OF", re.MULTILINE)
_ADDED = re.compile(r"^ALTER TABLE \{([a-z_]+)\} ADD COLUMN (.*?);", re.MULTILINE | re.DOTALL)
_COLUMN = re.compile(
    r'"?([a-z_]+)"? (text|bytea|boolean|smallint|integer|bigint|timestamptz|oid|jsonb)(\[\])?(.*)', re.DOTALL
)


def _migration_texts() -> list[str]:
    # Imported here because it imports the driver.
    from waypost.store.postgres.schema import MIGRATIONS, migration_text

    return [migration_text(name) for _, name in MIGRATIONS]


def _check_names(schema: str | None, namespace: str) -> None:
    from waypost.store.postgres.schema import Names

    Names(schema or "public", namespace)


def _columns(body: str) -> list[tuple[str, str, bool, str]]:
    """Return the columns of a table: name, type, whether it is an array, and the rest of its definition."""
    body = re.sub(r"--[^\n]*", "", body)
    found: list[tuple[str, str, bool, str]] = []
    for part in re.split(r",(?![^(]*\))", body):
        match = _COLUMN.fullmatch(part.strip())
        if match is not None and not part.strip().startswith("CONSTRAINT"):
            found.append((match[1], match[2], match[3] is not None, match[4]))
    return found


def _primary(body: str) -> list[str]:
    """Return the columns of a primary key that is a table constraint."""
    match = re.search(r"PRIMARY KEY \(([^)]*)\)", body)
    return [] if match is None else [name.strip() for name in match[1].split(",")]


def _read_tables() -> dict[str, tuple[list[tuple[str, str, bool, str]], list[str]]]:
    tables: dict[str, tuple[list[tuple[str, str, bool, str]], list[str]]] = {
        "schema": ([("version", "integer", False, " NOT NULL")], [])
    }
    for text in _migration_texts():
        for table, body in _TABLE.findall(text):
            tables[table] = (_columns(body), _primary(body))
        for table, column in _ADDED.findall(text):
            tables[table][0].extend(_columns(column))
    return tables


def _partitions() -> set[str]:
    """Return the tables that are partitions, which are not in the metadata."""
    return {table for text in _migration_texts() for table in _PARTITION.findall(text)}


def metadata(*, namespace: str = "wp", schema: str | None = None, into: MetaData | None = None) -> MetaData:
    """Return the tables of a namespace as a SQLAlchemy MetaData; `schema=None` is the default schema."""
    try:
        import sqlalchemy as sa
        from sqlalchemy.dialects import postgresql as pg
    except ImportError as error:
        raise MissingExtra('metadata for Alembic needs SQLAlchemy: pip install "waypost[sqlalchemy]"') from error
    _check_names(schema, namespace)
    kinds: dict[str, Any] = {
        "text": sa.Text, "bytea": sa.LargeBinary, "boolean": sa.Boolean, "smallint": sa.SmallInteger,
        "integer": sa.Integer, "bigint": sa.BigInteger,
        "timestamptz": lambda: sa.DateTime(timezone=True), "oid": pg.OID, "jsonb": pg.JSONB,
    }  # fmt: skip
    made = sa.MetaData() if into is None else into
    for table, (columns, primary) in _read_tables().items():
        made_columns = []
        for name, kind, is_list, rest in columns:
            of: Any = kinds[kind]()
            default = re.search(r"DEFAULT (.+?)$", rest.strip(), re.DOTALL)
            generated: list[Any] = [sa.Identity(always=True)] if "AS IDENTITY" in rest else []
            is_primary = name in primary or "PRIMARY KEY" in rest
            # A default with a name of the namespace is left out: Alembic compares defaults only on request.
            text = None if default is None or generated or "{" in default[1] else sa.text(default[1])
            made_columns.append(
                sa.Column(
                    name,
                    pg.ARRAY(of) if is_list else of,
                    *generated,
                    primary_key=is_primary,
                    nullable=not (is_primary or "NOT NULL" in rest),
                    server_default=text,
                    autoincrement=bool(generated),
                )
            )
        sa.Table(f"{namespace}_{table}", made, *made_columns, schema=schema)
    return made


def include_object(
    *, namespace: str = "wp", schema: str | None = None, then: Callable[..., bool] | None = None
) -> Callable[[Any, str | None, str, bool, Any], bool]:
    """Return a function for Alembic's `include_object` that excludes our indexes, constraints and partitions.

    `then`, an `include_object` of yours, decides about all other objects.
    """
    _check_names(schema, namespace)
    mine = {f"{namespace}_{table}" for table in _read_tables()}
    parts = {f"{namespace}_{table}" for table in _partitions()}

    def include(object: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
        table = name if type_ == "table" else getattr(getattr(object, "table", None), "name", None)
        place = getattr(object if type_ == "table" else getattr(object, "table", None), "schema", None)
        if place == schema and (table in mine or table in parts):
            return table in mine and type_ in ("table", "column")
        return True if then is None else then(object, name, type_, reflected, compare_to)

    return include
