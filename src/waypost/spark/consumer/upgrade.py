"""Conversion of an output that release 0.1 made, as folders of Parquet files: it becomes Delta tables. Without Spark.

    output/_waypost/log/000000000012.json      a batch that was committed: its tables and its messages
    output/_waypost/log/000000000012.settled   which of its messages may come again
    output/_waypost/staging/BATCH/TABLE/       files of a batch that were not moved yet
    output[/TABLE]/waypost_batch=BATCH/        files of a batch

Rows are copied into fewer files that have the column `waypost_batch`. The conversion is one step: killed before it, the
output is one of 0.1 still; killed after it, the next call deletes the old files. The step names the batches that were
converted, and only these are deleted: what a consumer of 0.1 writes later is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
import pyarrow as pa
from deltalake import Schema

from waypost.errors import InvalidInput, StoreError
from waypost.spark.consumer.output import BATCH_COLUMN, Fence, Output
from waypost.spark.delta.conversion import copy_files, unify_schemas
from waypost.spark.delta.parquet import DataFile
from waypost.spark.files import LakeFiles, open_lake_files

OLD_FOLDER: Final = "_waypost"
LOG: Final = f"{OLD_FOLDER}/log"
_MOVED: Final = re.compile(rf"(?:(?P<table>.+)/)?{BATCH_COLUMN}=(?P<batch>[^/]+)/(?P<name>.+)")
_STAGED: Final = re.compile(rf"{OLD_FOLDER}/staging/(?P<batch>[^/]+)/(?P<table>.+?)/(?P<name>(?:[^/]+=[^/]+/)*[^/]+)")


class OldFence(msgspec.Struct, frozen=True, array_like=True):
    """A message of a batch."""

    id: str
    token: int
    nonce: bytes
    chain: str | None = None


class OldCommit(msgspec.Struct, frozen=True):
    """A batch that was committed."""

    batch: str
    queue: str
    namespace: str
    tables: tuple[str, ...]
    messages: tuple[OldFence, ...]


class OldSettled(msgspec.Struct, frozen=True):
    """Messages of a commit that may come again."""

    open: tuple[str, ...] = ()


def upgrade_output(root: str, progress: Callable[[str], None] = lambda text: None) -> Output:
    """Convert an output of release 0.1; one that is converted already stays as it is."""
    files = open_lake_files(root, "output")
    output = Output(root, converting=True)
    commits, unsettled = _read_log(files)
    if commits:
        newest = commits[max(commits)]
        output.open_for(newest.queue, newest.namespace)
        if not output.step:
            _convert(output, commits, unsettled, progress)
        _remove_old(output)
    elif not output.steps.exists():
        raise InvalidInput(f"there is no output of a consumer at {root}")
    else:
        progress("the output is converted already")
        output.refresh()
        # Of the log, which is deleted last, a kill may have left files other than its entries.
        _remove_old(output)
    return output


def _read_log(files: LakeFiles) -> tuple[dict[int, OldCommit], dict[str, set[str]]]:
    """Return the commits by number, and of each batch the messages that may come again."""
    names = set(files.walk(LOG)) if files.exists(LOG) else set()
    commits: dict[int, OldCommit] = {}
    unsettled: dict[str, set[str]] = {}
    for name in sorted(name for name in names if re.fullmatch(r"\d{12}\.json", name)):
        try:
            commit = msgspec.json.decode(files.read(f"{LOG}/{name}") or b"", type=OldCommit)
            settled = files.read(f"{LOG}/{name.removesuffix('.json')}.settled")
            ids = {message.id for message in commit.messages}
            if settled is not None:
                ids = set(msgspec.json.decode(settled, type=OldSettled).open)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{files.path(LOG)}/{name} is no commit of an output: {error}") from None
        commits[int(name.removesuffix(".json"))] = commit
        if ids:
            unsettled[commit.batch] = ids
    return commits, unsettled


def _convert(
    output: Output,
    commits: Mapping[int, OldCommit],
    unsettled: Mapping[str, set[str]],
    progress: Callable[[str], None],
) -> None:
    committed = {commit.batch for commit in commits.values()}
    found = _find_files(output.files, committed)
    tables = {}
    for table in found:
        output.check_table_name(table, found)
    for table, data in found.items():
        tables[table] = _copy(output, table, data)
        progress(f"{table or 'the output'}: {sum(file.rows for file in tables[table]):,} rows")
    messages = {
        commit.batch: [
            Fence(one.id, one.token, one.nonce, one.chain)
            for one in commit.messages
            if one.id in unsettled[commit.batch]
        ]
        for commit in commits.values()
        if commit.batch in unsettled
    }
    batches = committed | {batch for data in found.values() for batch, _ in data}
    _find_folders(output.files, batches, "convert the output again: nothing has changed yet")
    output.commit_converted(tables, messages, batches)


def _find_files(files: LakeFiles, committed: set[str]) -> dict[str, dict[tuple[str, str], str]]:
    """Return the files of each table: where each is, by its batch and its name in it."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    sizes = files.walk("")
    for path in sorted(sizes):
        staged = _STAGED.fullmatch(path)
        moved = None if path.startswith(f"{OLD_FOLDER}/") else _MOVED.fullmatch(path)
        match = staged if staged is not None and staged["batch"] in committed else moved
        if match is None or match["name"].rpartition("/")[2].startswith(("_", ".")):
            continue
        name = match["name"]
        if "/" in name or not name.endswith(".parquet"):
            what = "is partitioned by a column of yours" if "/" in name else "is not Parquet"
            raise InvalidInput(
                f"the output {files.address} cannot be converted: {path} {what}. Give another folder as the output, "
                "and read this one with Spark, after release 0.1 has consumed it to its end"
            )
        table = "" if match["table"] in (None, OLD_FOLDER) else match["table"]
        known = found.setdefault(table, {})
        # A move that was interrupted leaves a file in both places; the moved one is whole if it has the same size.
        other = known.get((match["batch"], name))
        if other is None or (sizes[other] != sizes[path] and staged is not None):
            known[match["batch"], name] = path
    return found


def _copy(output: Output, table: str, data: Mapping[tuple[str, str], str]) -> list[DataFile]:
    """Copy the rows of old files into new ones of a table."""
    files = output.files
    try:
        schema = unify_schemas(files, data.values()).append(pa.field(BATCH_COLUMN, pa.string()))
    except pa.ArrowException as error:
        raise InvalidInput(
            f"the output {files.address} cannot be converted: files of its table {table or '(the output itself)'} have "
            f"columns of different types ({error})"
        ) from None
    output.prepare_table(table, Schema.from_arrow(schema), ())
    return copy_files(files, table, [(path, {BATCH_COLUMN: batch}) for (batch, _), path in data.items()], schema)


def _find_folders(files: LakeFiles, converted: Collection[str], way_out: str) -> set[str]:
    """Return the folders of batches; refuse batches that were not converted: a consumer of 0.1 wrote them meanwhile."""
    batches = {commit.batch for commit in _read_log(files)[0].values()}
    folders = set()
    for path in files.walk(""):
        match = None if path.startswith(f"{OLD_FOLDER}/") else _MOVED.fullmatch(path)
        if match is not None:
            folders.add(path[: match.start("name")].rstrip("/"))
            if not match["name"].rpartition("/")[2].startswith(("_", ".")):
                batches.add(match["batch"])
    others = sorted(batches - set(converted))
    if others:
        names = ", ".join(others[:10]) + (", …" if len(others) > 10 else "")
        raise StoreError(
            f"a consumer of release 0.1 of waypost wrote to the output {files.address} while it was converted or "
            f"later: batch {names}. Stop every consumer of release 0.1, and {way_out}"
        )
    return folders


def _remove_old(output: Output) -> None:
    """Delete what was converted, the log last."""
    files = output.files
    if output.state.converted or files.exists(OLD_FOLDER):
        way_out = (
            f"move the folder {BATCH_COLUMN}=… of each of these batches, and {OLD_FOLDER}, to another place: their "
            "rows are in no table, and Spark can read them there"
        )
        for folder in sorted(_find_folders(files, output.state.converted, way_out)):
            files.remove(folder)
        files.remove(OLD_FOLDER)
    output.record_upgraded()
