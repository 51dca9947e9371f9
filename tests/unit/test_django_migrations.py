"""The migrations of the Django application follow the tables of the store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import waypost
from waypost.store.postgres.schema import VERSION


@pytest.mark.promise("FACE-4")
def test_the_last_migration_of_django_makes_the_tables_of_this_release() -> None:
    # Read, not imported: Django in this process would be without settings.
    folder = Path(waypost.__file__).parent / "django" / "migrations"
    last = max(folder.glob("[0-9]*.py"))
    found = re.search(r"^SCHEMA_VERSION = (\d+)$", last.read_text(), re.MULTILINE)
    wanted = f"add a migration after {last.stem} that runs create_store, with SCHEMA_VERSION = {VERSION}"
    assert found is not None, wanted
    assert int(found[1]) == VERSION, wanted
