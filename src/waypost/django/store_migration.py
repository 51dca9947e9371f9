"""Operations of Django migrations: create the store's tables in a database of the project, and remove them."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.migrations.exceptions import IrreversibleError

from waypost.django.clients import make_client
from waypost.django.configuration import Configuration, read_configuration
from waypost.errors import ConfigurationError


def create_store(apps: Any, schema_editor: Any) -> None:
    """Create waypost's tables in the database that WAYPOST['DATABASE'] names, or bring them up to this release."""
    connection = schema_editor.connection
    chosen = _configuration_for(connection)
    if chosen is None:
        return
    if connection.vendor == "postgresql":
        from waypost.store.postgres.migrating import migrate_in
        from waypost.store.postgres.schema import Names

        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            migrate_in(cursor, Names("public", chosen.namespace))
    elif not connection.is_in_memory_db():
        with make_client(chosen) as post:
            post.queues()


def remove_store(apps: Any, schema_editor: Any) -> None:
    """Remove waypost's tables from a PostgreSQL database that has no messages left. A SQLite file keeps them."""
    connection = schema_editor.connection
    chosen = _configuration_for(connection)
    if chosen is None or connection.vendor != "postgresql":
        return
    from waypost.store.postgres.schema import Names, drop_sql, version_in

    names = Names("public", chosen.namespace)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if version_in(cursor, names) is None:
            return
        cursor.execute(names.fill("SELECT count(*) FROM {message}"))
        (left,) = cursor.fetchone()
        if left:
            raise IrreversibleError(
                f"waypost still has {left:,} messages here, dead letters among them; handle, cancel or purge them first"
            )
        cursor.execute(drop_sql(names))


def _configuration_for(connection: Any) -> Configuration | None:
    """Return the configuration if its store is in the database that is migrated now."""
    try:
        chosen = read_configuration()
    except ConfigurationError:
        return None  # `manage.py check` reports it
    return chosen if chosen.database == connection.alias else None
