"""A build of this release with planted changes: what the next release could be, to run beside this one."""

from __future__ import annotations

import shutil
from pathlib import Path

from waypost.release import VERSION as RELEASE
from waypost.store.postgres.schema import MIGRATIONS, VERSION

ROOT = Path(__file__).parents[2]
NEXT_RELEASE = "99.0.0"
MIGRATION = """-- step: a column
ALTER TABLE {message} ADD COLUMN IF NOT EXISTS planted text;
-- step: concurrently an index
CREATE INDEX CONCURRENTLY IF NOT EXISTS {#message_planted} ON {message} (planted) WHERE planted IS NOT NULL;
"""
NEWEST = f'({MIGRATIONS[-1][0]}, "{MIGRATIONS[-1][1]}"),'
#: A file, what is in it, and what the next release has in its place.
CHANGES = (
    ("release.py", f'VERSION = "{RELEASE}"', f'VERSION = "{NEXT_RELEASE}"'),
    ("store/postgres/schema.py", f"\nVERSION = {VERSION}\n", f"\nVERSION = {VERSION + 1}\n"),
    ("store/postgres/schema.py", NEWEST, f'{NEWEST} ({VERSION + 1}, "9999_planted"),'),
    ("store/postgres/sql/claim.sql", "p_poll_soon bigint, p_bytes bigint\n",
     "p_poll_soon bigint, p_bytes bigint, p_planted text\n"),
    ("store/postgres/store.py", "number(poll_soon_ms), number(bytes_max),",
     'number(poll_soon_ms), number(bytes_max), text("planted"),'),
)  # fmt: skip


def build(folder: Path) -> Path:
    """Write the next release into a folder and return what its processes need as PYTHONPATH."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    package = folder / "src" / "waypost"
    for name, old, new in CHANGES:
        text = (package / name).read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        (package / name).write_text(text.replace(old, new))
    (package / "store/postgres/migrations/9999_planted.sql").write_text(MIGRATION)
    return folder / "src"
