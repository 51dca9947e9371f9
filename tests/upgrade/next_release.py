"""A build of this release with planted changes: what the next release could be, to run beside this one.

One change in every layer, each made as docs/operations/upgrading.md demands: on PostgreSQL an argument of a function,
columns, one of them filled in batches, indexes, also one of each part of the journal, and a field of the journal; on
Valkey an extension of packed states and a field behind the events of a journal entry; on SQLite a column and a field of
journal entries; a setting; and an envelope of a newer version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from waypost.release import DATA_VERSION
from waypost.release import VERSION as RELEASE
from waypost.store.postgres.schema import MIGRATIONS, VERSION

ROOT = Path(__file__).parents[2]
NEXT_RELEASE = "99.0.0"
#: The parts of the journal, whose indexes are built one by one.
PARTS = (*(f"entry_{letter}" for letter in "abcdefgh"), "rest")
#: Fills a bounded number of rows of a column, found by an index over the rows that are left. It notes where it is in a
#: setting of its session: the index keeps an entry of each filled row until a vacuum, and to pass all of them in every
#: batch would take longer and longer.
FILL = """\
WITH chosen AS MATERIALIZED (
    SELECT m.ctid AS place, m.seq FROM {message} m WHERE m.planted IS NULL
        AND m.seq > coalesce(nullif(current_setting('waypost.filled', true), ''), '0')::bigint
    ORDER BY m.seq LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED),
noted AS MATERIALIZED (SELECT set_config('waypost.filled', max(c.seq)::text, false) FROM chosen c)
UPDATE {message} SET planted = 'filled' WHERE ctid = ANY (ARRAY(SELECT c.place FROM chosen c CROSS JOIN noted));"""
#: Fills what was locked then.
FILL_REST = """\
UPDATE {message} SET planted = 'filled' WHERE ctid = ANY (ARRAY(
    SELECT m.ctid FROM {message} m WHERE m.planted IS NULL ORDER BY m.seq LIMIT 500 FOR NO KEY UPDATE));"""
MIGRATION = "\n".join(
    [
        "-- step: a column",
        "ALTER TABLE {message} ADD COLUMN IF NOT EXISTS planted text;",
        "-- step: what the release before does not write",
        "ALTER TABLE {message} ALTER COLUMN planted SET DEFAULT 'later';",
        "-- step: concurrently an index of what is not filled",
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS {#message_planted} ON {message} (seq) WHERE planted IS NULL;",
        "-- step: in batches what was there before",
        FILL,
        "-- step: in batches what was locked then",
        FILL_REST,
        "-- step: a setting",
        "ALTER TABLE {queue} ADD COLUMN IF NOT EXISTS planted bigint;",
        "-- step: a field of the journal",
        "ALTER TABLE {entry} ADD COLUMN IF NOT EXISTS planted text DEFAULT 'planted';",
        "-- step: an index of the journal",
        "CREATE INDEX IF NOT EXISTS {#entry_planted} ON ONLY {entry} (planted);",
        *(
            f"-- step: concurrently an index of {part}\n"
            f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {{#{part}_planted}} ON {{{part}}} (planted);"
            for part in PARTS
        ),
        "-- step: the index of the journal is complete",
        *(f"ALTER INDEX {{entry_planted}} ATTACH PARTITION {{{part}_planted}};" for part in PARTS),
        "",
    ]
)
#: What only the release before needs.
FINISH = "DROP INDEX IF EXISTS {used_at};\n"
NEWEST = f'({MIGRATIONS[-1][0]}, "{MIGRATIONS[-1][1]}"),'
#: A file, what is in it, and what the next release has in its place.
CHANGES = (
    ("release.py", f'VERSION = "{RELEASE}"', f'VERSION = "{NEXT_RELEASE}"'),
    ("release.py", f"\nDATA_VERSION = {DATA_VERSION}\n", f"\nDATA_VERSION = {DATA_VERSION + 1}\n"),
    # A function's arguments, tables and the version of their interface.
    ("store/postgres/schema.py", f"\nVERSION = {VERSION}\n", f"\nVERSION = {VERSION + 1}\n"),
    ("store/postgres/schema.py", NEWEST, f'{NEWEST} ({VERSION + 1}, "9999_planted"),'),
    ("store/postgres/sql/claim.sql", "p_poll_soon bigint, p_bytes bigint\n",
     "p_poll_soon bigint, p_bytes bigint, p_planted text\n"),
    ("store/postgres/store.py", "number(poll_soon_ms), number(bytes_max),",
     'number(poll_soon_ms), number(bytes_max), text("planted"),'),
    ("store/postgres/sql/running.sql", "made = true,\n        changes = CASE WHEN n",
     "planted = n.planted, made = true,\n        changes = CASE WHEN n"),
    # A trigger calls another function, and there is one more.
    ("store/postgres/sql/wake.sql", "FUNCTION {wake_at_commit}()", "FUNCTION {wake_planted}()"),
    ("store/postgres/sql/triggers.sql", "EXECUTE FUNCTION {wake_at_commit}();\n",
     "EXECUTE FUNCTION {wake_planted}();\n"
     "DROP TRIGGER IF EXISTS {#queue_planted} ON {queue};\n"
     "CREATE TRIGGER {#queue_planted} AFTER INSERT ON {queue} FOR EACH ROW WHEN (false)\n"
     "    EXECUTE FUNCTION {wake_planted}();\n"),
    # A packed record, and a field behind the events of an entry.
    ("store/valkey/lua/moves.lua", "local function pack_state(s)\n",
     "local function pack_state(s)\n"
     "  if s.flags < 128 and s.key ~= '' then s.flags, s.extension = s.flags + 128, '\\0\\7planted' end\n"),
    ("store/valkey/lua/base.lua", "concat(items, '', 1, item_count)\n",
     "concat(items, '', 1, item_count) .. 'planted'\n"),
    # A column, and a field of the journal.
    ("store/sqlite/schema.sql", "\n);\nCREATE UNIQUE INDEX {message:id}",
     ",\n    planted TEXT\n);\nCREATE UNIQUE INDEX {message:id}"),
    ("store/sqlite/schema.py", '    ("queue", "changes"): "BLOB",\n',
     '    ("queue", "changes"): "BLOB",\n    ("message", "planted"): "TEXT",\n'),
    ("store/sqlite/entries.py", "_encode((self.at_ms, *columns))", '_encode((self.at_ms, *columns, "planted"))'),
    # A setting.
    ("policy.py", "\n    def changed(self,", "\n    planted: int | None = None\n\n    def changed(self,"),
    ("policy.py", '"max_deliveries" | "max_pending"', '"planted" | "max_deliveries" | "max_pending"'),
    ("policy.py", "NEW_SETTINGS: frozenset[str] = frozenset()",
     'NEW_SETTINGS: frozenset[str] = frozenset({"planted"})'),
    ("store/sqlite/queue_records.py", '("hide_bodies", "no_tracebacks",',
     '("hide_bodies", "no_tracebacks", "planted",'),
    # An envelope of a newer version, where there are headers.
    ("codec.py", "\nVERSION = 1\n", "\nVERSION = 2\n"),
    ("codec.py", "_VERSION_BYTE = bytes([VERSION])", "_VERSION_BYTE = bytes([1])"),
    ("codec.py", 'return b"".join((_VERSION_BYTE, message_id.encode(),',
     'return b"".join((_VERSION_BYTE if head == _NO_HEAD else bytes([VERSION]), message_id.encode(),'),
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
    (package / "store/postgres/migrations/9999_planted.finish.sql").write_text(FINISH)
    return folder / "src"
