"""Messages that only a lake knows."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.show.lakes import CLEAN, make_lake
from tests.web.conftest import Site
from waypost.errors import ConfigurationError
from waypost.percentiles import bucket_of
from waypost.web import lake
from waypost.web.lake_threads import THREADS_MAX, WAITING_MAX, LakeThreads

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
    assert (unread.status, unread.json()["lake_searched"]) == (200, False)
    assert unread.json()["lake_problem"].startswith("the lake cannot be read")
    assert "The lake was not searched" in client.get("/s/main/search", q="0" * 24).text
    detail = client.get(f"/api/v1/stores/main/queues/orders/messages/{'0' * 24}")
    assert (detail.status, detail.problem) == (502, "lake-unreadable")
    assert str(tmp_path) not in unread.text + detail.text


@pytest.mark.parametrize(
    "lake", ["", {"other": "lake"}, "s3://key:secret@bucket/lake", "s3://b/lake?region=x", {"main": ""}]
)
def test_a_lake_that_cannot_be_is_refused(memory: Site, lake: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        memory.client(lake=lake)
    assert "secret@" not in str(refused.value)


# ---- percentiles, audit, report ----------------------------------------------------------------------------------


def histogram(queue: str, at: datetime, measure: str, values: list[int]) -> list[dict[str, Any]]:
    """The rows of a minute with these durations in milliseconds."""
    return [
        {"queue": queue, "minute": at, "measure": measure, "bucket": bucket_of(value), "count": 1} for value in values
    ]


def test_charts_have_percentiles_where_there_is_a_lake(memory: Site, tmp_path: Path) -> None:
    memory.post.publish("orders", 1)
    now = memory.post.stats("orders").at.replace(second=0, microsecond=0)
    rows = histogram("orders", now - timedelta(minutes=3), "wait", list(range(1, 101)))
    rows += histogram("orders", now - timedelta(minutes=3), "run", [2_000])
    rows += histogram("orders", now - timedelta(days=3), "wait", [900_000])
    rows += histogram("mails", now, "wait", [900_000])
    client = memory.client(lake=str(make_lake(tmp_path / "lake", histograms=rows)))
    (charts,) = client.api("/charts", queues="orders", minutes=60)["queues"]
    (spread,) = charts["percentiles"]
    assert spread["at"] == (now - timedelta(minutes=3)).isoformat().replace("+00:00", "Z")
    assert spread["wait"]["count"] == 100
    # A percentile of the lake is within half a percent of the value that it stands for.
    measured = [spread["wait"][f"{name}_seconds"] for name in ("p50", "p95", "p99")]
    assert measured == pytest.approx([0.05, 0.095, 0.099], rel=0.006)
    assert spread["run"]["p50_seconds"] == pytest.approx(2.0, rel=0.006)
    page = client.get("/s/main/charts", queue="orders", minutes="60").text
    assert "Waits, percentiles" in page
    assert "p99" in page
    # Several minutes of one point are one percentile of all their durations.
    (day,) = client.api("/charts", queues="orders", minutes=1_440)["queues"][0]["percentiles"]
    assert (day["minutes"], day["wait"]["count"]) == (20, 100)
    without = memory.client()
    assert without.api("/charts", queues="orders", minutes=60)["queues"][0]["percentiles"] == []
    assert "percentiles" not in without.get("/s/main/charts", queue="orders").text.lower()


def test_a_lake_that_cannot_be_read_is_a_sentence_below_the_charts(memory: Site, tmp_path: Path) -> None:
    memory.post.publish("orders", 1)
    log = tmp_path / "bad" / "gold" / "histograms" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("no JSON")
    client = memory.client(lake=str(tmp_path / "bad"))
    (charts,) = client.api("/charts", queues="orders", minutes=60)["queues"]
    assert charts["percentiles"] == []
    assert "the lake cannot be read" in charts["lake_problem"]
    assert "There are no percentiles" in client.get("/s/main/charts", queue="orders", minutes="60").text


def test_the_page_of_the_lake_has_its_audit_and_its_report(memory: Site, tmp_path: Path) -> None:
    finding = {"queue": "orders", "message_id": "1m7fra5gs06ap4cfk9b5jsq9", "fault": "lost <b>"}
    audit = CLEAN | {"accounted": 204_132, "unaccounted_count": 1, "unaccounted": [finding]}
    lake = make_lake(tmp_path / "lake", audit)
    client = memory.client(lake=str(lake))
    found = client.api("/lake")
    assert (found["configured"], found["has_report"], found["audit"]["clean"]) == (True, False, False)
    assert "204,132 of 204,133 published messages are accounted for; 1 not accounted for" in found["audit"]["text"]
    page = client.get("/s/main/lake").text
    assert "lost &lt;b&gt;" in page
    assert "waypost pipeline report" in page
    assert client.get("/s/main/lake/report").status == 404
    (lake / "audit.json").write_text(json.dumps(CLEAN))
    (lake / "report.html").write_text("<script>report()</script>")
    assert client.api("/lake")["audit"]["text"].endswith("are accounted for, and nothing is unexplained.")
    assert "There is none" in client.get("/s/main/lake").text
    assert "/s/main/lake/report" in client.get("/s/main/lake").text
    report = client.get("/s/main/lake/report")
    assert (report.status, report.text) == (200, "<script>report()</script>")
    # Its own scripts run without an origin: they have no cookies, and no other page allows them.
    policy = report.header("content-security-policy")
    assert policy.startswith("sandbox allow-scripts; ")
    assert "allow-same-origin" not in policy
    assert "unsafe-inline" not in client.get("/s/main/lake").header("content-security-policy")


def test_the_page_of_the_lake_has_advice_and_what_became_of_it(memory: Site, tmp_path: Path) -> None:
    place = make_lake(tmp_path / "lake")
    longer = {"id": "lease/orders", "queue": "orders", "title": "The lease is too short <b>", "call": "lease=60"}
    fewer = {"id": "retry/mails", "queue": "mails", "title": "Retries never helped", "call": "one()\ntwo()"}
    write_advice(
        place,
        [
            longer | {"recorded_ms": 1, "record": "advised", "advice": '{"effect": "fewer redeliveries"}'},
            longer | {"recorded_ms": 1, "record": "applied", "undo": "lease=30", "advice": '{"effect": "fewer"}'},
            fewer | {"recorded_ms": 2, "record": "advised", "advice": "{}"},
            fewer | {"recorded_ms": 3, "record": "judged", "verdict": "solved", "advice": "no JSON"},
        ],
    )
    client = memory.client(lake=str(place))
    advice = client.api("/lake")["advice"]
    assert [(one["queue"], one["applied"], one["verdict"], one["effect"]) for one in advice] == [
        ("orders", True, None, "fewer"),
        ("mails", False, "solved", ""),
    ]
    page = client.get("/s/main/lake").text
    assert "The lease is too short &lt;b&gt;" in page
    assert "lease=30" in page
    assert "<div><code>one()</code></div><div><code>two()</code></div>" in page


def write_advice(place: Path, rows: list[dict[str, Any]]) -> None:
    """Write records as `waypost pipeline advise` does."""
    import pyarrow as pa
    from deltalake import write_deltalake

    from waypost.spark.insight.advise import ADVICE

    empty = dict.fromkeys(ADVICE.columns) | {"at_ms": 1_772_366_400_000}
    schema = ADVICE.arrow(ADVICE.columns)
    write_deltalake(place / "insight" / "advice", pa.Table.from_pylist([empty | row for row in rows], schema=schema))


def test_without_a_lake_there_is_no_page_of_it(memory: Site, tmp_path: Path) -> None:
    memory.post.publish("orders", 1)
    client = memory.client()
    assert client.api("/lake") == {
        "configured": False, "audit": None, "advice": [], "has_report": False, "problem": None,
    }  # fmt: skip
    assert client.get("/s/main/lake").status == 404
    assert "/s/main/lake" not in client.get("/s/main").text
    (tmp_path / "audit.json").write_text("{}")
    damaged = memory.client(lake=str(tmp_path))
    assert "audit.json of the lake is not what an audit writes" in damaged.api("/lake")["problem"]
    assert "Nothing is known of the lake now" in damaged.get("/s/main/lake").text


def test_a_lake_that_hangs_delays_nothing_else_and_the_pages_have_a_sentence_about_it(
    memory: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.post.publish("orders", 1)
    client = memory.client(lake=str(make_lake(tmp_path / "lake", CLEAN)))
    hung, read = threading.Event(), lake._read_file

    def hang(*given: Any, **options: Any) -> Any:
        assert hung.wait(60)
        return read(*given, **options)

    monkeypatch.setattr(lake, "_threads", LakeThreads())
    monkeypatch.setattr(lake, "_read_file", hang)
    monkeypatch.setattr(lake, "_read", hang)
    monkeypatch.setattr(lake, "_percentiles", hang)
    for name in ("ANSWER_SECONDS", "LAKE_SECONDS", "PERCENTILES_SECONDS"):
        monkeypatch.setattr(lake, name, 0.01)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("waypost-lake")}
    try:
        for _ in range(10):
            page = client.get("/s/main/lake")
            assert (page.status, "has not answered for" in page.text) == (200, True)
        monkeypatch.setattr(lake, "LAKE_SECONDS", -0.99)
        assert "has not answered" in client.api("/search", id="0" * 24)["lake_problem"]
        (charts,) = client.api("/charts", queues="orders", minutes=60)["queues"]
        assert "has not answered" in charts["lake_problem"]
        assert client.get("/s/main/lake/report").status == 504
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("waypost-lake")} - before
        assert len(threads) == 2
        assert all(thread.daemon for thread in threads), "the process would wait for them"
        assert client.run(asyncio.to_thread(lambda: "free")) == "free"
    finally:
        hung.set()
    monkeypatch.setattr(lake, "ANSWER_SECONDS", 60.0)
    assert client.api("/lake")["audit"]["clean"] is True


def test_reads_of_a_lake_that_hangs_do_not_pile_up() -> None:
    threads, hung = LakeThreads(), threading.Event()
    try:
        futures: list[Future[Any]] = [threads.submit(hung.wait, 60) for _ in range(THREADS_MAX)]
        for _ in range(3 * WAITING_MAX):
            futures.append(threads.submit(int))
        refused = [one for one in futures if one.done()]
        assert all(isinstance(one.exception(), TimeoutError) for one in refused)
        assert len(futures) - len(refused) <= THREADS_MAX + WAITING_MAX
    finally:
        hung.set()
    for future in futures:
        if future not in refused:
            future.result(60)
    assert threads.submit(int).result(60) == 0
