"""Carrying out plans: kills, pauses, rates, and what store and lake know. No Spark session is started."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace

from tests.spark.shop import Shop
from waypost import Waypost
from waypost.client.internals import context_of
from waypost.errors import InvalidInput
from waypost.identity import Session
from waypost.policy import CHUNK_MESSAGES_MAX, HEADERS_MAX
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.lake.lake import Lake, Seen, Source
from waypost.spark.lake.tables import KEYS
from waypost.spark.republish import known
from waypost.spark.republish.api import redrive
from waypost.spark.republish.audit import audit
from waypost.spark.republish.carry_out import carry_out
from waypost.spark.republish.ids import HEADER, BackfillIds
from waypost.spark.republish.inputs import SQL
from waypost.spark.republish.known import Earlier, find_redriven
from waypost.spark.republish.pace import CHECK_SECONDS, SLOWER_MAX, Pace
from waypost.spark.republish.publish import SLICE_BYTES, cut_rows
from waypost.spark.republish.redriving import CHOSEN
from waypost.spark.republish.run import BATCH_BYTES, Options, PlanRows
from waypost.spark.republish.sending import FULL_SECONDS, Sender, next_number
from waypost.spark.republish.state import Input, Plan, Records, State, find_records
from waypost.spark.source.tables import BACKFILL_PREFIX
from waypost.testing.clock import ClockTime
from waypost.values import Settlement

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-8")]
ROOT = Path(__file__).parents[2]
BODY = '{"type":"struct","fields":[{"name":"body","type":"string","nullable":true,"metadata":{}}]}'


def new_lake(shop: Shop, path: Path, history: int = 0) -> Lake:
    """Return a lake of the shop's store, with keys of an older history."""
    lake = Lake(str(path))
    lake.create()
    rows = pa.table(
        {
            "queue": ["orders"] * history, "key": [f"old-{number}" for number in range(history)],
            "message_id": [f"{number:024}" for number in range(history)], "number": [0] * history,
            "at_ms": [1] * history, "backfill": [None] * history,
        },
        schema=KEYS.arrow(KEYS.columns),
    )  # fmt: skip
    state = lake.state.__class__(source=Source(shop.url, None, shop.namespace, None), has_keys=True)
    lake.commit("history", {KEYS.name: Change(tuple(write_rows(lake.files, KEYS.name, rows, KEYS.statistics)))}, state)
    return lake


def plan_rows(shop: Shop, lake: Lake, keys: list[str], name: str = "import", **columns: Any) -> Records:
    """Record a plan of rows, as a plan is made with Spark."""
    records = Records(lake.files, name)
    with shop.bulk() as bulk:
        newest = bulk.bounds("orders")[1]
    rows = pa.table({"key": keys, "body": [f"body of {key}" for key in keys], **columns})
    files = write_rows(lake.files, records.rows, rows)
    given = Input("backfill", "rows.parquet", ("orders",), ("id",))
    counts, made_ms = {"rows": len(keys)}, time.time_ns() // 1_000_000
    plan = Plan(next_number(records), given, made_ms, tuple(files), counts, {"orders": newest}, BODY)
    records.commit("plan", State(plan))
    return records


def plan_copies(shop: Shop, lake: Lake, to_queue: str) -> Records:
    """Record a plan of copies of all dead letters, as a plan is made with Spark."""
    records = Records(lake.files, "import")
    letters = [("orders", one.id, one.token) for one in shop.stored("dead")]
    with shop.bulk() as bulk:
        newest = {to_queue: bulk.bounds(to_queue)[1]}
    files = write_rows(lake.files, records.rows, pa.table(dict(zip(CHOSEN, zip(*letters, strict=True), strict=True))))
    given = Input("redrive", "true", ("orders",), (), to_queue)
    records.commit("plan", State(Plan(next_number(records), given, 0, tuple(files), {}, newest)))
    return records


def plan_redrive(shop: Shop, lake: Lake) -> Records:
    """Record a plan to redrive all dead letters, as a plan is made with Spark."""
    records = Records(lake.files, "import")
    letters = sorted(("orders", one.id, one.token) for one in shop.stored("dead"))
    files = write_rows(lake.files, records.rows, pa.table(dict(zip(CHOSEN, zip(*letters, strict=True), strict=True))))
    given = Input("redrive", "true", ("orders",))
    records.commit("plan", State(Plan(next_number(records), given, 0, tuple(files), {}, {})))
    return records


def added_keys(lake: Lake) -> list[str]:
    """Return the keys that backfills have added to the lake."""
    lake.refresh()
    return sorted(lake.arrow(KEYS, ["key"], pc.field("backfill").is_valid()).column("key").to_pylist())


#: Several calls of the store for each chunk.
CHUNK_ROWS = 1_300


def run_killed(point: str, lake: Lake, days: int = 0, chunk_rows: int = CHUNK_ROWS) -> subprocess.CompletedProcess[str]:
    """Carry out the plan in a process that kills itself at a point."""
    arguments = [point, lake.files.address, "import", str(days), str(chunk_rows)]
    command = [sys.executable, "-m", "tests.spark.killed_backfill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)


def work_off(shop: Shop, dead: int = 0, queue: str = "orders") -> int:
    """Claim and settle all messages of a queue: some dead, the others done; return how many."""
    caller, count = Session(ClockTime()), 0
    with shop.bulk() as bulk:
        while leases := bulk.run(bulk.store.claim(queue, 500, caller.operation(queue), worker="w")).leases:
            ends = []
            for lease in leases:
                outcome: dict[str, Any] = {"outcome": "dead", "reason": "rejected"} if count < dead else {}
                ends.append(Settlement(lease.id, lease.token, lease.nonce, **outcome))
                count += 1
            bulk.run(bulk.store.settle(queue, ends, caller.operation(queue)))
    return count


def published(shop: Shop) -> Counter[str | None]:
    """Return how often each key was published by a backfill, by the journal."""
    return Counter(
        one.key
        for one in shop.events()
        if one.event == "published" and one.message_id and one.message_id.startswith(BACKFILL_PREFIX)
    )


def test_killed_at_any_point_and_continued_a_week_later_nothing_is_published_twice_and_nothing_is_missing(
    orders: Shop, tmp_path: Path
) -> None:
    orders.post.configure("orders", lease=60)
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(8_000)]
    plan_rows(orders, lake, keys)
    points = (
        "after-intent:1",
        "after-publish:1",
        "after-publish:5",
        "before-keys:2",
        "after-keys:1",
        "before-intent:2",
    )
    for number, point in enumerate(points):
        killed = run_killed(point, lake)
        assert killed.returncode == -9, (point, killed.stderr)
        assert all(count == 1 for count in published(orders).values()), point
        if number % 2:
            work_off(orders)  # what was published is known to the journal alone
    # The store has forgotten by then what has arrived.
    done = run_killed("none:0", lake, days=7)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert published(orders) == Counter(keys)
    assert audit(Records(lake.files, "import"), lake, orders.place).settled == len(keys)


def test_a_chunk_in_doubt_is_found_in_the_table_of_keys_when_the_journal_has_lost_it(
    orders: Shop, tmp_path: Path
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    plan_rows(orders, lake, [f"new-{number}" for number in range(100)])
    assert run_killed("after-keys:1", lake).returncode == -9
    assert set(published(orders).values()) == {1}
    work_off(orders)
    with orders.bulk() as bulk:
        bulk.run(bulk.store.journal_trim("orders", bulk.bounds("orders")[1]))
    done = run_killed("none:0", lake, days=7)
    assert done.returncode == 0, done.stderr
    assert orders.post.stats("orders").ledger.published == 100


def test_without_any_trace_a_chunk_in_doubt_is_left_to_the_user(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    assert run_killed("after-publish:1", lake).returncode == -9
    work_off(orders)
    with orders.bulk() as bulk:
        bulk.run(bulk.store.journal_trim("orders", bulk.bounds("orders")[1]))
    orders.post.publish("orders", 1)
    records.refresh()
    with pytest.raises(known.Undecided, match=r"is not known which .* trimmed.*--in-doubt send .*--in-doubt skip"):
        carry_out(records, lake, orders.place, Options())
    carry_out(records, lake, orders.place, Options(in_doubt="skip"))
    assert records.state is not None
    assert records.state.phase == "finished"
    assert orders.post.stats("orders").ledger.ready == 1


def test_messages_have_ids_by_their_keys_a_header_and_a_low_priority(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    headers = pa.array([[("tenant", "acme")], None], pa.map_(pa.string(), pa.string()))
    records = plan_rows(orders, lake, ["a", "b"], headers=headers, priority=pa.array([7, None], pa.int64()))
    state = carry_out(records, lake, orders.place, Options())
    assert state.counts["queued"] == 2
    a, b = sorted(orders.post.messages("orders", "ready"), key=lambda one: str(one.key))
    assert (a.id, b.id) == tuple(BackfillIds("orders").of_key(key) for key in "ab")
    assert a.headers == {"tenant": "acme", HEADER: "import"}
    assert b.headers == {HEADER: "import"}
    assert (a.priority, b.priority) == (7, 0)
    assert a.body == "body of a"
    added = lake.steps.folder(KEYS.name)
    rows = added.arrow(added.snapshot()).to_pylist()
    assert sorted((row["key"], row["message_id"], row["backfill"]) for row in rows) == [
        ("a", a.id, "import"), ("b", b.id, "import"),
    ]  # fmt: skip


def test_keys_that_programs_publish_after_the_plan_are_left_out(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b", "c"])
    orders.post.publish("orders", "live", key="b")
    work_off(orders)  # its key is free again in the store
    state = carry_out(records, lake, orders.place, Options())
    assert state.counts == {"queued": 2, "known": 1, "refused": 0}
    assert published(orders) == Counter("ac")


def test_after_a_pause_in_the_middle_of_a_chunk_nothing_is_in_doubt(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(50)]
    records = plan_rows(orders, lake, keys)
    stop, sends, send = threading.Event(), itertools.count(1), Sender.send

    def send_and_stop(sender: Sender, *arguments: Any) -> Any:
        counts = send(sender, *arguments)
        if next(sends) == 3:
            stop.set()
        return counts

    monkeypatch.setattr(Sender, "send", send_and_stop)
    # Ten rows at a time.
    state = carry_out(records, lake, orders.place, Options(rate="40/s", chunk_rows=20), stop)
    assert (state.phase, state.next_row, state.intent) == ("paused", 30, None)
    assert published(orders) == Counter(keys[:30])
    assert carry_out(records, lake, orders.place, Options()).phase == "finished"
    assert published(orders) == Counter(keys)


def test_a_full_queue_is_waited_for(orders: Shop, tmp_path: Path) -> None:
    orders.post.configure("orders", max_pending=30)
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(100)]
    records = plan_rows(orders, lake, keys)
    ended = threading.Event()

    def consume() -> None:
        while not ended.is_set() or work_off(orders):
            work_off(orders)
            ended.wait(0.05)

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        state = carry_out(records, lake, orders.place, Options())
    finally:
        ended.set()
        consumer.join(60)
    assert state.counts["queued"] == 100
    assert published(orders) == Counter(keys)


def test_after_a_pause_while_the_queue_is_full_the_chunk_is_in_doubt_and_is_continued(
    orders: Shop, tmp_path: Path
) -> None:
    orders.post.configure("orders", max_pending=30)
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(100)]
    records = plan_rows(orders, lake, keys)
    stop = threading.Event()

    def stop_when_full() -> None:
        deadline = time.monotonic() + 60
        while orders.post.stats("orders").ledger.ready < 30 and time.monotonic() < deadline:
            stop.wait(0.02)
        stop.set()

    watcher = threading.Thread(target=stop_when_full)
    watcher.start()
    state = carry_out(records, lake, orders.place, Options(), stop)
    watcher.join(60)
    assert (state.phase, state.next_row) == ("paused", 0)
    assert state.intent is not None
    assert published(orders) == Counter(keys[:30])
    work_off(orders)
    orders.post.configure("orders", max_pending=None)
    assert carry_out(records, lake, orders.place, Options()).counts["queued"] == 100
    assert published(orders) == Counter(keys)


@pytest.mark.promise("QUEUE-7")
def test_a_full_group_is_waited_for_the_others_go_on_and_a_stop_is_noticed(shop: Shop, tmp_path: Path) -> None:
    shop.post.configure("orders", group_max_pending=10)
    shop.post.configure_group("orders", "other", max_pending=1000)
    lake = new_lake(shop, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(600)]
    groups = pa.array(["full" if number % 2 else "other" for number in range(600)])
    records = plan_rows(shop, lake, keys, group=groups)
    waits: list[float | None] = []

    class Stop(threading.Event):
        """A request to stop that comes while the backfill waits for a group."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            if timeout:
                self.set()
            return self.is_set()

    state = carry_out(records, lake, shop.place, Options(), Stop())
    assert (state.phase, state.next_row) == ("paused", 0)
    assert waits[-1] == FULL_SECONDS
    assert Counter(message.group for message in shop.stored("ready")) == {"other": 300, "full": 10}

    class Consume(threading.Event):
        """A request to stop that never comes. While it is waited for, workers make room."""

        def wait(self, timeout: float | None = None) -> bool:
            work_off(shop)
            return False

    state = carry_out(records, lake, shop.place, Options(), Consume())
    assert (state.phase, state.counts["queued"]) == ("finished", 600)
    assert published(shop) == Counter(keys)


def test_rows_that_cannot_be_published_are_counted_with_their_reasons(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b", "c"], delay=pa.array([1.0, -1.0, None]))
    state = carry_out(records, lake, orders.place, Options())
    assert (state.counts["queued"], state.counts["delayed"], state.counts["refused"]) == (1, 1, 1)
    assert state.reasons[0].startswith("key 'b': a delay is a number of seconds from 0 on")
    found = audit(records, lake, orders.place)
    assert found.text == "3 asked, 1 refused, 2 not ended"


def test_the_audit_counts_what_became_of_the_messages(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, [f"new-{number}" for number in range(20)])
    assert audit(records, lake, orders.place).text == "20 asked, 20 not sent yet"
    carry_out(records, lake, orders.place, Options())
    assert audit(records, lake, orders.place).text == "20 asked, 20 not ended"
    work_off(orders, dead=2)
    assert audit(records, lake, orders.place).text == "20 asked, 18 done, 2 dead"
    letters = [one.id for one in orders.stored("dead")]
    orders.post.redrive("orders", ids=letters[:1])
    assert audit(records, lake, orders.place).text == "20 asked, 18 done, 1 dead, 1 not ended"


def test_of_two_processes_that_carry_out_one_plan_the_slower_stops(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    slow = plan_rows(orders, lake, ["a", "b"])
    fast = find_records(lake.files, "import")
    carry_out(fast, lake, orders.place, Options())
    with pytest.raises(StepConflict, match="another process carries out import"):
        carry_out(slow, lake, orders.place, Options())
    assert published(orders) == Counter("ab")


def test_a_history_that_begins_later_is_refused_with_its_beginning(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(10), key=str)
    with orders.bulk() as bulk:
        known.check_history(lake, bulk, "orders", allow_gaps=False)
        bulk.run(bulk.store.journal_trim("orders", 4))
        with pytest.raises(InvalidInput, match=r"known from event 5 of the journal on, 20\d\d-.*1 to 4 were trimmed"):
            known.check_history(lake, bulk, "orders", allow_gaps=False)
        known.check_history(lake, bulk, "orders", allow_gaps=True)
        seen = {"orders": Seen(events=6, newest=10, gap_end=4)}
        state = lake.state.__class__(source=lake.state.source, offsets={"orders": 10}, seen=seen, has_keys=True)
        lake.commit("loaded", {}, state)
        with pytest.raises(InvalidInput, match=r"from event 5 of the journal on.* 4 older events are not in the lake"):
            known.check_history(lake, bulk, "orders", allow_gaps=False)
        whole = {"orders": Seen(events=10, newest=10)}
        begun = lake.state.__class__(
            source=state.source, offsets={"orders": 10}, seen=whole, has_keys=True, keys_begin_ms=1_700_000_000_000
        )
        lake.commit("loaded", {}, begun)
        with pytest.raises(InvalidInput, match=r"known from 2023-11-14.* deleted from the lake"):
            known.check_history(lake, bulk, "orders", allow_gaps=False)
    orders.post.configure("new", journal="failures")
    with orders.bulk() as bulk, pytest.raises(InvalidInput, match=r"level failures.* not known from the beginning"):
        known.check_history(new_lake(orders, tmp_path / "other"), bulk, "new", allow_gaps=False)


def test_a_lake_that_began_later_is_refused_although_nothing_was_loaded_since(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(10), key=str)
    begun = replace(lake.state, offsets={"orders": 10}, left_out={"orders": 10})
    lake.commit("begin", {}, begun)
    with orders.bulk() as bulk, pytest.raises(InvalidInput, match=r"known from event 11 .* left out .*\(--from\)"):
        known.check_history(lake, bulk, "orders", allow_gaps=False)


def test_messages_of_a_time_without_a_journal_are_a_gap(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish("orders", 0, key="before")
    orders.post.configure("orders", journal="off")
    orders.post.publish_many("orders", range(3), key=str)
    orders.post.configure("orders", journal="all")
    orders.post.publish("orders", 0, key="after")
    with orders.bulk() as bulk:
        with pytest.raises(InvalidInput, match=r"counted 3 published messages of which its journal has no event"):
            known.check_history(lake, bulk, "orders", allow_gaps=False)
        newest = bulk.bounds("orders")[1]
        seen = {"orders": Seen(newest, newest, counts={"published": 2})}
        lake.commit("loaded", {}, replace(lake.state, offsets={"orders": newest}, seen=seen))
        with pytest.raises(InvalidInput, match=r"counted 3 published messages"):
            known.check_history(lake, bulk, "orders", allow_gaps=False)


def test_a_plan_is_not_continued_without_the_events_since_it_was_made(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    orders.post.publish("orders", "live", key="b")
    work_off(orders)
    with orders.bulk() as bulk:
        bulk.run(bulk.store.journal_trim("orders", bulk.bounds("orders")[1]))
    with pytest.raises(InvalidInput, match=r"since the plan was made.* were trimmed.*--allow-gaps"):
        carry_out(records, lake, orders.place, Options())
    assert records.state is not None
    assert records.state.intent is None
    state = carry_out(records, lake, orders.place, Options(allow_gaps=True))
    assert (state.phase, state.counts["queued"]) == ("finished", 2)


def test_a_plan_is_not_continued_after_a_time_without_a_journal(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    orders.post.configure("orders", journal="off")
    with pytest.raises(InvalidInput, match=r"does not record what is published.*--allow-gaps"):
        carry_out(records, lake, orders.place, Options())
    orders.post.publish("orders", "live", key="b")
    orders.post.configure("orders", journal="all")
    with pytest.raises(InvalidInput, match=r"level of its journal was changed.*--allow-gaps"):
        carry_out(records, lake, orders.place, Options())
    assert not published(orders)


def test_keys_that_another_backfill_has_added_since_the_plan_are_left_out(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    other = plan_rows(orders, lake, ["b", "c"], name="other")
    carry_out(other, lake, orders.place, Options())
    work_off(orders)
    with orders.bulk() as bulk:
        newest = bulk.bounds("orders")[1]
    # Loaded, but the pipeline has no row of the key: the other backfill has.
    lake.refresh()
    seen = {"orders": Seen(newest, newest, counts={"published": 2})}
    lake.commit("loaded", {}, replace(lake.state, offsets={"orders": newest}, seen=seen))
    state = carry_out(records, lake, orders.place, Options())
    assert (state.counts["queued"], state.counts["known"]) == (1, 1)
    assert published(orders) == Counter("abc")


def test_keys_of_the_other_queue_that_are_published_after_the_plan_are_left_out(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    assert records.state is not None
    plan = records.state.plan
    orders.post.configure("shadow", journal="all")
    with orders.bulk() as bulk:
        newest = {**plan.journal, "shadow": bulk.bounds("shadow")[1]}
    given = replace(plan.input, to_queue="shadow")
    records.commit("plan", State(replace(plan, input=given, journal=newest)))
    orders.post.publish("orders", "live", key="b")
    state = carry_out(records, lake, orders.place, Options())
    assert (state.counts["queued"], state.counts["known"]) == (1, 1)
    assert [one.key for one in orders.post.messages("shadow", "ready")] == ["a"]


def test_keys_that_programs_publish_while_a_chunk_is_sent_are_left_out(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(30)]
    records = plan_rows(orders, lake, keys)
    sends, send = itertools.count(1), Sender.send

    def send_beside_a_program(sender: Sender, *arguments: Any) -> Any:
        if next(sends) == 1:
            orders.post.publish("orders", "live", key="new-25")
            work_off(orders)  # its key is free again in the store
        return send(sender, *arguments)

    monkeypatch.setattr(Sender, "send", send_beside_a_program)
    # Ten rows at a time.
    state = carry_out(records, lake, orders.place, Options(rate="40/s"))
    assert (state.counts["queued"], state.counts["known"]) == (29, 1)
    assert published(orders) == Counter(key for key in keys if key != "new-25")


def test_events_that_were_read_may_be_trimmed_while_a_plan_is_carried_out(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    keys = [f"new-{number}" for number in range(30)]
    records = plan_rows(orders, lake, keys)
    send = Sender.send

    def send_after_a_trim(sender: Sender, *arguments: Any) -> Any:
        with orders.bulk() as bulk:
            bulk.run(bulk.store.journal_trim("orders", bulk.bounds("orders")[1]))
        return send(sender, *arguments)

    monkeypatch.setattr(Sender, "send", send_after_a_trim)
    state = carry_out(records, lake, orders.place, Options(chunk_rows=10))
    assert (state.phase, state.counts["queued"]) == ("finished", 30)


def test_keys_that_programs_publish_while_the_queue_is_full_are_left_out(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish("orders", "first")
    orders.post.configure("orders", max_pending=1)
    records = plan_rows(orders, lake, ["a", "b"])
    waits = itertools.count(1)

    class Stop(threading.Event):
        """A request to stop that never comes. While it is waited for, a program publishes a key."""

        def wait(self, timeout: float | None = None) -> bool:
            work_off(orders)
            if next(waits) == 1:
                orders.post.publish("orders", "live", key="a")
                work_off(orders)
            return False

    state = carry_out(records, lake, orders.place, Options(), Stop())
    assert (state.counts["queued"], state.counts["known"]) == (1, 1)
    assert published(orders) == Counter("b")


def test_after_its_records_were_removed_a_backfill_adds_its_keys_to_the_lake_again(
    orders: Shop, tmp_path: Path
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    for keys in (["a", "b"], ["c"]):
        records = plan_rows(orders, lake, keys)
        carry_out(records, lake, orders.place, Options())
        lake.files.remove(records.folder)
    assert added_keys(lake) == ["a", "b", "c"]


def redriven(shop: Shop) -> Counter[str | None]:
    """Return how often each message was redriven, by the journal."""
    return Counter(one.message_id for one in shop.events() if one.event == "redriven")


def test_a_redrive_that_is_killed_at_any_point_redrives_each_letter_once_and_counts_it(
    orders: Shop, tmp_path: Path
) -> None:
    orders.post.configure("orders", lease=60)
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(2_000))
    work_off(orders, dead=2_000)
    letters = [one.id for one in orders.stored("dead")]
    records = plan_redrive(orders, lake)
    # Another user redrives one that is chosen already.
    orders.post.redrive("orders", ids=[letters[-1]])
    points = ("after-intent:1", "after-redrive:1", "after-redrive:2", "after-redrive:1", "before-intent:2")
    for number, point in enumerate(points):
        killed = run_killed(point, lake, chunk_rows=1_100)
        assert killed.returncode == -9, (point, killed.stderr)
        assert all(count == 1 for count in redriven(orders).values()), point
        if number % 2:
            work_off(orders)  # the letters are gone from the store
    done = run_killed("none:0", lake, days=7, chunk_rows=1_100)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert redriven(orders) == Counter(letters)
    work_off(orders)
    records.refresh()
    assert records.state is not None
    assert {name: count for name, count in records.state.counts.items() if count} == {"redriven": 1_999, "gone": 1}
    assert audit(records, lake, orders.place).text == "2,000 asked, 2,000 done, of them 1 not by this redrive"


def test_the_journal_of_every_store_has_the_letters_that_a_session_redrove(shop: Shop, tmp_path: Path) -> None:
    lake = new_lake(shop, tmp_path / "lake")
    shop.post.publish_many("orders", range(6))
    work_off(shop, dead=6)
    letters = [one.id for one in shop.stored("dead")]
    with shop.bulk() as bulk, Waypost(shop.url, namespace=shop.namespace) as other:
        before = bulk.bounds("orders")[1]
        shop.post.redrive("orders", ids=letters[:2])
        other.redrive("orders", ids=letters[2:5])
        for post, found in ((shop.post, letters[:2]), (other, letters[2:5])):
            sessions = [context_of(post).session.id.hex()]
            assert find_redriven(lake, bulk, "orders", letters, before, sessions) == Earlier(set(found))
            later = bulk.bounds("orders")[1]
            assert find_redriven(lake, bulk, "orders", letters, later, sessions) == Earlier(set())


def test_letters_of_a_killed_redrive_are_unsure_if_its_events_are_gone(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(10))
    work_off(orders, dead=10)
    records = plan_redrive(orders, lake)
    assert run_killed("after-redrive:1", lake).returncode == -9
    orders.post.configure("orders", journal="failures")
    records.refresh()
    state = carry_out(records, lake, orders.place, Options())
    assert {name: count for name, count in state.counts.items() if count} == {"redriven": 10}
    # The second half: the journal was off when they were redriven.
    work_off(orders, dead=10)
    records = plan_redrive(orders, lake)
    orders.post.configure("orders", journal="off")
    assert run_killed("after-redrive:1", lake).returncode == -9
    records.refresh()
    state = carry_out(records, lake, orders.place, Options())
    assert {name: count for name, count in state.counts.items() if count} == {"unsure": 10}
    assert "of them 10 perhaps not by this redrive" in audit(records, lake, orders.place).text


def test_copies_that_are_killed_at_any_point_are_published_once_and_counted(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(2_000))
    work_off(orders, dead=2_000)
    orders.post.configure("shadow", journal="all")
    records = plan_copies(orders, lake, "shadow")
    points = (
        "after-intent:1",
        "after-publish:1",
        "after-publish:1",
        "before-keys:1",
        "after-keys:1",
        "before-intent:2",
    )
    for number, point in enumerate(points):
        killed = run_killed(point, lake, chunk_rows=700)
        assert killed.returncode == -9, (point, killed.stderr)
        if number % 2:
            work_off(orders, queue="shadow")
    done = run_killed("none:0", lake, days=7, chunk_rows=700)
    assert (done.returncode, done.stderr) == (0, ""), done
    records.refresh()
    assert records.state is not None
    assert {name: count for name, count in records.state.counts.items() if count} == {"queued": 2_000}
    copies = Counter(one.message_id for one in orders.events("shadow") if one.event == "published")
    assert (len(copies), set(copies.values())) == (2_000, {1})
    work_off(orders, queue="shadow")
    assert audit(records, lake, orders.place).text == "2,000 asked, 2,000 done"
    assert orders.post.stats("orders").ledger.dead_kept == 2_000


def test_keys_of_copies_that_a_killed_process_has_sent_are_added_to_the_lake(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish_many("orders", range(3))
    work_off(orders, dead=3)
    orders.post.configure("shadow", journal="all")
    records = plan_copies(orders, lake, "shadow")
    assert run_killed("after-publish:1", lake).returncode == -9
    records.refresh()
    state = carry_out(records, lake, orders.place, Options())
    assert (state.phase, state.counts["queued"]) == ("finished", 3)
    assert added_keys(lake) == sorted(f"orders:{one.id}:{one.token}" for one in orders.stored("dead"))


def test_a_letter_that_has_no_room_for_a_header_is_refused_and_the_plan_ends(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish("orders", 1, headers={f"h{number}": "x" for number in range(HEADERS_MAX)})
    orders.post.publish("orders", 2)
    work_off(orders, dead=2)
    orders.post.configure("shadow", journal="all")
    state = carry_out(plan_copies(orders, lake, "shadow"), lake, orders.place, Options())
    assert (state.phase, state.counts["queued"], state.counts["refused"]) == ("finished", 1, 1)
    assert "headers" in state.reasons[0]


def test_a_priority_beyond_32_bits_is_refused_and_the_plan_ends(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"], priority=pa.array([1 << 40, 3], pa.int64()))
    state = carry_out(records, lake, orders.place, Options())
    assert (state.phase, state.counts["queued"], state.counts["refused"]) == ("finished", 1, 1)
    assert state.reasons[0].startswith("key 'a': priority")


def test_a_chunk_in_doubt_is_undecided_after_a_time_without_a_journal(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a", "b"])
    assert run_killed("after-intent:1", lake).returncode == -9
    orders.post.configure("orders", journal="off")
    orders.post.configure("orders", journal="all")
    records.refresh()
    with pytest.raises(known.Undecided, match=r"level of its journal was changed by event \d"):
        carry_out(records, lake, orders.place, Options())


def test_large_rows_are_read_and_sent_a_few_at_a_time(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    text, count = "x" * (BATCH_BYTES // 4), 10
    rows = pa.table(
        {"key": [str(number) for number in range(count)], "body": [f"{number}{text}" for number in range(count)]}
    )
    sent = cut_rows(rows)
    assert 1 <= sent.num_rows < count
    assert sent.nbytes <= SLICE_BYTES
    files = write_rows(lake.files, "rows", rows)
    read = PlanRows(lake.files, "rows", files, 1)
    first = read.take(count, BATCH_BYTES)
    assert first is not None
    assert first.column("key")[0].as_py() == "1"
    assert first.num_rows < count - 1
    rest = read.take(count)
    assert rest is not None
    assert first.num_rows + rest.num_rows == count - 1


def test_a_path_is_no_sql_although_it_begins_like_it() -> None:
    for path in ("values.csv", "table.parquet", "with-x.csv", "from/rows.csv", "select"):
        assert SQL.match(path) is None, path
    for text in ("SELECT 1", "select\n1", "VALUES(1)", " with a as (select 1) select * from a", "SELECT* FROM a"):
        assert SQL.match(text) is not None, text


def test_a_priority_of_letters_that_are_redriven_in_place_is_refused(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")

    def start() -> Any:
        raise AssertionError("no session is needed")

    with pytest.raises(InvalidInput, match=r"keeps its priority.*--to-queue"):
        redrive(start, lake, "true", priority=3)


def test_an_unknown_name_is_refused_with_those_that_there_are(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    plan_rows(orders, lake, ["a"], name="import-1")
    with pytest.raises(InvalidInput, match="no backfill or redrive 'import-2'; it has import-1"):
        find_records(lake.files, "import-2")
    with pytest.raises(InvalidInput, match="named with letters, digits"):
        find_records(lake.files, "../x")


class Queue:
    """A queue for a pace: its oldest message, and time that passes only by waiting and sending."""

    def __init__(self) -> None:
        self.now, self.age, self.waits = 0.0, 0.0, list[float]()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def rate_over(self, pace: Pace, seconds: float) -> float:
        """Return how many messages a second are sent during a time."""
        begin, count = self.now, 0
        while self.now < begin + seconds:
            pace.wait()
            pace.sent(pace.slice_rows)
            count += pace.slice_rows
            self.now += 0.001
        return count / (self.now - begin)


def test_a_rate_is_kept_and_gives_way_while_the_queue_is_behind() -> None:
    queue = Queue()
    pace = Pace("1000/s", 5.0, lambda: queue.age, queue.wait, lambda: queue.now)
    assert 900 < queue.rate_over(pace, 20) <= 1050
    queue.age = 60.0
    queue.rate_over(pace, 10 * CHECK_SECONDS)
    assert pace.slower == SLOWER_MAX
    assert queue.rate_over(pace, 20) < 1010 / SLOWER_MAX * 2
    queue.age = 0.0
    queue.rate_over(pace, 60)
    assert pace.slower == 1
    assert 900 < queue.rate_over(pace, 20) <= 1050


def test_without_a_rate_and_an_age_nothing_waits() -> None:
    queue = Queue()
    pace = Pace(None, None, lambda: 1e9, queue.wait, lambda: queue.now)
    queue.rate_over(pace, 1)
    assert queue.waits == []
    assert pace.slice_rows > CHUNK_MESSAGES_MAX
    behind = Pace(None, 5.0, lambda: 60.0, queue.wait, lambda: queue.now)
    assert queue.rate_over(behind, 20) < queue.rate_over(pace, 20) / 10


def test_a_plan_is_json_that_a_person_can_read(orders: Shop, tmp_path: Path) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    records = plan_rows(orders, lake, ["a"])
    carry_out(records, lake, orders.place, Options())
    folder = lake.steps.__class__(lake.files, f"{records.folder}/steps").table
    kinds = folder.arrow(folder.snapshot()).sort_by("step").to_pylist()
    assert [row["kind"] for row in kinds] == ["plan", "intent", "finished"]
    assert json.loads(kinds[-1]["state"])["counts"]["queued"] == 1
