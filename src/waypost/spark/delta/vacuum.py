"""Deletion of files that no table needs any more, safe whatever a clock says.

A file is needed by the newest version of its table, by a reader of an older version, or by a writer that has not
committed it yet. A vacuum lists what is in no newest version, commits a step of its own, and deletes after that:

- A step that was computed before conflicts with the step of the vacuum, so its files are not committed; it is computed
  again. A writer that wants to keep its files asks `are_deleted` first, which decides as the vacuum does.
- Ages are by the clock of the storage, never by that of a process: the times at which the storage changed the files and
  received the log entry of the vacuum's step.
- The files of the newest versions stay, whatever their age.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from waypost.errors import StoreError
from waypost.spark.delta.parquet import MANIFESTS, DataFile
from waypost.spark.files import LakeFiles, join_path

if TYPE_CHECKING:
    from waypost.spark.delta.steps import Steps
    from waypost.spark.delta.table import Change

#: How long files stay that are in no version, or in no version that is newer.
FILES_KEPT_MS: Final = 86_400_000
#: Versions of each table whose files stay, however old: a clock that was set forward makes every file old.
VERSIONS_KEPT: Final = 16
#: Files that are read or deleted at the same time.
THREADS: Final = 8
LOG_ENTRY: Final = re.compile(r"([0-9]{20})\.json")


class _Remove(msgspec.Struct, frozen=True):
    path: str


class _Action(msgspec.Struct, frozen=True):
    """One line of a log entry; only removed files matter here."""

    remove: _Remove | None = None


def vacuum(
    steps: Steps, tables: Iterable[str], commit: Callable[[], int], kept: Mapping[str, Sequence[DataFile]] | None = None
) -> int:
    """Delete files that none of these tables needs, and forgotten manifests; return how many.

    `commit` commits the step of the vacuum, which changes no table, and returns its number; if it raises, nothing is
    deleted. `kept` are files that are in no version of a table and stay.
    """
    files, unused = steps.files, dict[str, dict[str, int]]()
    for name in (steps.table.name, *tables):
        found = {path: at for path, at in files.modified(name).items() if _is_data(path)}
        # After the list: what is committed since is in it or not listed.
        used = {file.path for file in (*steps.folder(name).snapshot().files, *(kept or {}).get(name, ()))}
        unused[name] = {path: at for path, at in found.items() if path not in used}
    manifests = files.modified(MANIFESTS)
    oldest = vacuum_time(steps, commit()) - FILES_KEPT_MS
    gone = [join_path(MANIFESTS, name) for name, at in manifests.items() if at < oldest]
    for name, found in unused.items():
        old = [path for path, at in found.items() if at < oldest]
        if old:
            needed = _removed_since(steps, name, oldest)
            gone += [join_path(name, path) for path in old if path not in needed]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(files.remove_file, gone))
    return len(gone)


def vacuum_time(steps: Steps, step: int) -> int:
    """Return when the storage received the step of a vacuum, in milliseconds. A step has the number of its version."""
    entry = f"{steps.table.name}/_delta_log/{step:020}.json"
    found = steps.files.modified_ms(entry)
    if found is None:
        raise StoreError(f"{steps.files.path(entry)} is gone, which says when files were deleted: start again")
    return found


def are_deleted(steps: Steps, vacuum_step: int, changes: Mapping[str, Change]) -> bool:
    """Return whether a vacuum deletes files that these changes add, and that were written before its step."""
    oldest = vacuum_time(steps, vacuum_step) - FILES_KEPT_MS
    for name, change in changes.items():
        for file in change.add:
            at = steps.files.modified_ms(join_path(name, file.path))
            if at is None or at < oldest:
                return True
    return False


def _is_data(path: str) -> bool:
    """Return whether a file below a table is one of its data files. Readers skip names that begin with _ or a dot."""
    *folders, name = path.split("/")
    is_hidden = any(folder.startswith(("_", ".")) and "=" not in folder for folder in folders)
    return name.endswith(".parquet") and not name.startswith(("_", ".")) and not is_hidden


def _removed_since(steps: Steps, table: str, oldest: int) -> set[str]:
    """Return the files that were removed from a table since a time, or in one of its newest versions."""
    log = join_path(table, "_delta_log")
    entries = {
        int(found[1]): (name, at)
        for name, at in steps.files.modified(log).items()
        if (found := LOG_ENTRY.fullmatch(name)) is not None
    }
    newest = max(entries, default=0)
    young = [
        f"{log}/{name}" for version, (name, at) in entries.items() if at >= oldest or version > newest - VERSIONS_KEPT
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        return {path for removed in pool.map(lambda name: _read_removed(steps.files, name), young) for path in removed}


def _read_removed(files: LakeFiles, entry: str) -> list[str]:
    content = files.read(entry)
    if content is None:
        raise StoreError(f"{files.path(entry)} was deleted while the files of its table were: nothing was deleted")
    actions = msgspec.json.Decoder(_Action).decode_lines(content)
    # The library writes paths as a URL has them.
    return [unquote(action.remove.path) for action in actions if action.remove is not None]
