"""A table or function does not change without a new version: other processes would call it as it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from waypost.store.postgres import schema
from waypost.store.postgres.schema import Names, steps

#: The version of each script, by a hash of it. That of a released version never changes. While a version is not
#: released, its line is replaced: `python -m tests.postgres.test_schema_versions` writes it.
KNOWN = Path(__file__).parent / "schema_versions.json"


def script_hash() -> str:
    text = "\n".join(step.script for step in steps(Names("public", "wp"), 0))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.promise("STORE-7")
def test_a_change_of_the_schema_has_a_new_version() -> None:
    known = json.loads(KNOWN.read_text())
    assert known.get(str(schema.VERSION)) == script_hash(), (
        f"tables, functions or constants in them are not those of version {schema.VERSION}: raise schema.VERSION if it "
        "was released, then run python -m tests.postgres.test_schema_versions"
    )
    assert max(map(int, known)) == schema.VERSION


if __name__ == "__main__":
    found = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    KNOWN.write_text(json.dumps(found | {str(schema.VERSION): script_hash()}, indent=1) + "\n")
