"""A queue in the lake: files are complete or absent, named by their content, in a folder for each day."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as parquet
import pytest

from tests.waiting import until
from waypost import Waypost
from waypost.errors import ConfigurationError, InvalidUrl
from waypost.outbox.relay.lake import LakeTarget, file_name
from waypost.outbox.relay.target import RelayRecord, Unconfirmed
from waypost.outbox.relay.target_urls import open_target

DAY_MS = 86_400_000


def record(number: int, published_ms: int) -> RelayRecord:
    return RelayRecord(
        f"id{number:04}", "orders", b'{"n":1}', "application/json", {"b": "2", "a": "1"}, None, "k", None, 5,
        published_ms, b"", "Order", None, "replies",
    )  # fmt: skip


def send(target: LakeTarget, records: list[RelayRecord]) -> list[Any]:
    async def once() -> list[Any]:
        await target.open()
        return await target.send(records)

    return asyncio.run(once())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*/*.parquet")) for row in parquet.ParquetFile(file).read().to_pylist()]


@pytest.mark.promise("BOX-4")
def test_a_batch_is_a_file_for_each_day_and_sent_again_the_same_ones(tmp_path: Path) -> None:
    target = LakeTarget(tmp_path)
    batch = [record(number, 20_000 * DAY_MS + number * DAY_MS // 10) for number in range(15)]
    assert send(target, batch) == [None] * 15
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.parquet"))
    assert [name.split("/")[0] for name in names] == ["date=2024-10-04", "date=2024-10-05"]
    assert names[0].split("/")[1].startswith("id0000-id0009-10-")
    assert send(target, batch) == [None] * 15
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()) == names
    found = rows(tmp_path)
    assert [row["id"] for row in found] == [one.id for one in batch]
    assert (found[0]["key"], found[0]["headers"], found[0]["reply_to"]) == ("k", [("a", "1"), ("b", "2")], "replies")
    assert found[0]["published_at"].timestamp() * 1000 == found[0]["published_ms"] == 20_000 * DAY_MS


@pytest.mark.promise("BOX-4")
def test_a_message_repeated_in_another_batch_is_not_written_twice(tmp_path: Path) -> None:
    target = LakeTarget(tmp_path)
    send(target, [record(number, 0) for number in range(10)])
    (tmp_path / "date=1970-01-01" / "foreign.parquet").write_bytes(next(tmp_path.rglob("*.parquet")).read_bytes())
    again = [msgspec.structs.replace(record(number, 0), again=True) for number in (3, 12, 5)]
    assert send(target, [*again, record(11, 0)]) == [None] * 4
    next(tmp_path.rglob("foreign.parquet")).unlink()
    (tmp_path / "date=1970-01-01" / "no-table.parquet").write_bytes(b"that is no Parquet")
    assert send(target, again[:1]) == [None]
    (tmp_path / "date=1970-01-01" / "no-table.parquet").unlink()
    assert sorted(row["id"] for row in rows(tmp_path)) == [f"id{number:04}" for number in (*range(10), 11, 12)]
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


@pytest.mark.promise("BOX-4")
def test_files_of_other_messages_or_queues_have_other_names() -> None:
    one, two = record(1, 0), record(2, 0)
    assert file_name([one, two]) == file_name([one, two])
    elsewhere = msgspec.structs.replace(one, queue="refunds")
    assert len({file_name([one]), file_name([two]), file_name([one, two]), file_name([elsewhere])}) == 4


@pytest.mark.promise("BOX-4")
def test_a_day_that_cannot_be_written_is_not_confirmed_and_the_others_are(tmp_path: Path) -> None:
    target = LakeTarget(tmp_path)
    (tmp_path / "date=1970-01-01").write_text("a file is in the way of the folder")
    confirmations = send(target, [record(1, 0), record(2, DAY_MS), record(3, 0)])
    assert confirmations[1] is None
    assert [isinstance(one, Unconfirmed) for one in confirmations] == [True, False, True]
    assert [row["id"] for row in rows(tmp_path)] == ["id0002"]


@pytest.mark.promise("BOX-4")
def test_unfinished_files_of_a_dead_worker_are_skipped_by_readers_and_removed_later(tmp_path: Path) -> None:
    folder = tmp_path / "date=1970-01-01"
    folder.mkdir()
    old, young = folder / ".waypost-7-0a", folder / ".waypost-8-0b"
    for file in (old, young):
        file.write_bytes(b"half of a file")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert send(LakeTarget(tmp_path), [record(1, 0)]) == [None]
    assert (old.exists(), young.exists()) == (False, True)
    assert [row["id"] for row in rows(tmp_path)] == ["id0001"]
    assert parquet.read_table(tmp_path).num_rows == 1


@pytest.mark.promise("BOX-4")
def test_a_missing_folder_is_waited_for_and_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "mounted" / "orders"
    with Waypost("memory://") as post:
        relay = post.relay("orders", to=f"lake://{folder}?compression=snappy")
        post.publish_many("orders", [{"n": n} for n in range(30)])
        with post.worker():
            until(lambda: relay.failure is not None, "the failure")
            assert "there is no folder" in (relay.failure or "")
            assert not folder.exists()
            folder.mkdir(parents=True)
            until(lambda: post.ledger("orders").done == 30, "the end")
    assert len(rows(folder)) == 30


@pytest.mark.promise("BOX-4")
@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("lake://host/folder", "three slashes"),
        ("lake:///", "three slashes"),
        ("lake:///data?flavor=red", "'flavor' is not an option"),
        ("lake:///data?compression=rar", "compression is one of"),
    ],
)
def test_an_invalid_lake_target_is_refused_at_once(url: str, match: str) -> None:
    with pytest.raises((InvalidUrl, ConfigurationError), match=match):
        open_target(url, "orders")
    with pytest.raises(ConfigurationError, match="absolute path"):
        LakeTarget("data")
