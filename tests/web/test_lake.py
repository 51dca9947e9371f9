"""Messages that only a lake knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import Site
from waypost.errors import ConfigurationError

pytestmark = pytest.mark.promise("FACE-3")


def write_lake(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Make a lake with these events."""
    import pyarrow as pa
    from deltalake import write_deltalake

    from waypost.spark.lake.tables import BRONZE_JOURNAL

    schema = BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns)
    empty = dict.fromkeys(BRONZE_JOURNAL.columns)
    write_deltalake(folder / "bronze" / "journal", pa.Table.from_pylist([empty | row for row in rows], schema=schema))
    return str(folder)


def history(site: Site, queue: str, id: str) -> list[dict[str, Any]]:
    """The events of a message as a pipeline writes them."""
    return [
        {
            "queue": queue, "number": event.number, "at_ms": int(event.at.timestamp() * 1000), "event": event.event,
            "message_id": id, "token": event.token, "worker": event.worker, "cause": event.cause,
            "deliveries": event.deliveries, "error_type": event.error_type, "reason": event.reason,
        }
        for event in site.post.history(queue, id)
    ]  # fmt: skip


def test_a_forgotten_message_is_found_in_the_lake_with_its_timeline(memory: Site, tmp_path: Path) -> None:
    message = memory.post.publish("gone", 1)
    with memory.post.receive("gone") as received:
        assert received is not None
        received.retry(after=0, reason="<b>busy</b>")
    with memory.post.receive("gone"):
        pass
    lake = write_lake(tmp_path, history(memory, "gone", message.id))
    assert memory.post.remove_queue("gone")
    memory.post.publish("orders", 2)
    client = memory.client(lake=lake)
    answer = client.api("/search", id=message.id)
    (found,) = answer["found"]
    assert (found["queue"], found["condition"], answer["lake_searched"]) == ("gone", "done (in the lake)", True)
    detail = client.api(f"/queues/gone/messages/{message.id}")
    assert (detail["condition"], detail["from_lake"], detail["message"]) == ("done", True, None)
    events = [step["event"] for step in detail["timeline"]["steps"]]
    assert events == ["published", "claimed", "retried", "claimed", "done"]
    page = client.get(client.get("/s/main/search", q=message.id).header("location"))
    assert (page.status, "From the lake" in page.text) == (200, True)
    assert client.get(f"/api/v1/stores/main/queues/orders/messages/{'0' * 24}").problem == "unknown-message"
    assert "and the lake" in client.get("/s/main/search", q="0" * 24).text


def test_a_lake_that_is_not_there_yet_or_is_damaged_is_no_obstacle(memory: Site, tmp_path: Path) -> None:
    message = memory.post.publish("orders", 1)
    client = memory.client(lake=str(tmp_path / "none"))
    assert client.api("/search", id="0" * 24)["found"] == []
    log = tmp_path / "bad" / "bronze" / "journal" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("no JSON")
    client = memory.client(lake=str(tmp_path / "bad"))
    assert len(client.api("/search", id=message.id)["found"]) == 1
    unread = client.get("/api/v1/stores/main/search", id="0" * 24)
    assert (unread.status, unread.problem) == (502, "lake-unreadable")
    assert str(tmp_path) not in unread.text


@pytest.mark.parametrize("lake", ["", {"other": "lake"}, "s3://key:secret@bucket/lake", {"main": ""}])
def test_a_lake_that_cannot_be_is_refused(memory: Site, lake: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        memory.client(lake=lake)
    assert "secret@" not in str(refused.value)
