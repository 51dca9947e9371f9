"""The migrations of the Django application follow the tables of the store."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import waypost.django
from waypost.store.postgres.schema import VERSION


@pytest.mark.promise("FACE-4")
def test_the_last_migration_of_django_makes_the_tables_of_this_release() -> None:
    pytest.importorskip("django")
    folder = Path(waypost.django.__file__).parent / "migrations"
    last = max(path.stem for path in folder.glob("[0-9]*.py"))
    made = import_module(f"waypost.django.migrations.{last}").SCHEMA_VERSION
    assert made == VERSION, f"add a migration after {last} that runs create_store, with SCHEMA_VERSION = {VERSION}"
