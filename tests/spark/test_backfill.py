"""`waypost pipeline backfill` and `redrive`: what is chosen, what is known, and errors in sentences."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

import waypost.spark
from tests.spark.shop import Shop
from tests.spark.test_backfill_runs import new_lake, published, run_killed, work_off
from waypost.cli.main import main
from waypost.errors import ConfigurationError, InvalidInput
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.republish.api import find_store
from waypost.spark.republish.audit import Audit
from waypost.spark.republish.ids import HEADER, BackfillIds
from waypost.spark.republish.plan import Preview

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-8")]


def stopped() -> threading.Event:
    """Return a request to stop that is there from the beginning: a plan is made, and nothing is sent."""
    stop = threading.Event()
    stop.set()
    return stop


def test_an_import_against_a_large_history_that_is_killed_again_and_again_publishes_each_new_key_once(
    orders: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    """10,000 rows, half of them in a history of 100,000 keys, some in the journal that the lake has not loaded."""
    lake = new_lake(orders, tmp_path / "lake", history=100_000)
    orders.post.publish_many("orders", range(100), key=lambda number: f"live-{number}")
    work_off(orders)
    frame = spark.sql(
        "SELECT CASE WHEN id % 2 = 0 THEN concat('old-', id * 9) WHEN id < 200 THEN concat('live-', (id - 1) / 2 % 100)"
        " ELSE concat('new-', id) END AS key, id AS amount FROM range(10000)"
    ).selectExpr("replace(key, '.0', '') AS order_id", "amount")
    frame.write.parquet(str(tmp_path / "rows.parquet"))
    given: dict[str, Any] = {"queue": "orders", "id": "order_id", "name": "import"}
    seen = waypost.spark.backfill(spark, lake.files.address, str(tmp_path / "rows.parquet"), **given)
    assert isinstance(seen, Preview)
    assert seen.counts == {"rows": 10_000, "collapsed": 0, "known": 5_100, "new": 4_900}
    assert {sample["key"][:4] for sample in seen.samples} == {"new-"}
    assert not published(orders)
    waypost.spark.backfill(
        spark, lake.files.address, str(tmp_path / "rows.parquet"), **given, dry_run=False, stop=stopped()
    )
    for point in ("after-publish:2", "before-keys:1"):
        assert run_killed(point, lake).returncode == -9
        work_off(orders)
    done = run_killed("none:0", lake, days=7)
    assert done.returncode == 0, done.stderr
    new = Counter(f"new-{number}" for number in range(201, 10_000, 2))
    assert published(orders) == new
    # The same rows once more, a week later: nothing is new.
    again = waypost.spark.backfill(spark, lake.files.address, str(tmp_path / "rows.parquet"), **given, dry_run=False)
    assert isinstance(again, Audit)
    assert (again.requested, again.input["known"]) == (0, 10_000)
    assert published(orders) == new


def test_rows_come_from_csv_json_delta_and_sql_and_ids_from_several_columns(
    orders: Shop, spark: SparkSession, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    orders.post.publish("orders", 1, key="007")
    made = pipeline(orders, "lake")
    made.run()
    address = made.lake.files.address
    (tmp_path / "rows.csv").write_text("id,name\n007,known\n008,new\n008,again\n")
    (tmp_path / "values.csv").write_text('id,name\n"a,1","two\nlines, and ""quotes"" with \\"\n')
    (tmp_path / "rows.jsonl").write_text('{"id": "009", "name": "json"}\n')
    table = pa.table({"id": ["010", "011"], "day": ["a", "b"]})
    write_deltalake(str(tmp_path / "table"), table, partition_by=["day"])
    found = {}
    for source in (
        f"{tmp_path}/rows.csv", f"{tmp_path}/values.csv", f"{tmp_path}/rows.jsonl", f"{tmp_path}/table",
        "SELECT key AS id, 1 AS one FROM keys",
    ):  # fmt: skip
        seen = waypost.spark.backfill(spark, address, source, queue="orders", id=["id"], dry_run=False)
        assert isinstance(seen, Audit)
        found[Path(source).name] = seen.input
    assert found == {
        "rows.csv": {"rows": 3, "collapsed": 1, "known": 1, "new": 1},
        "values.csv": {"rows": 1, "collapsed": 0, "known": 0, "new": 1},
        "rows.jsonl": {"rows": 1, "collapsed": 0, "known": 0, "new": 1},
        "table": {"rows": 2, "collapsed": 0, "known": 0, "new": 2},
        "SELECT key AS id, 1 AS one FROM keys": {"rows": 6, "collapsed": 0, "known": 6, "new": 0},
    }
    assert {(one.key, json.dumps(one.body)) for one in orders.post.messages("orders", "ready") if one.headers} >= {
        ("009", '{"id": "009", "name": "json"}'), ("011", '{"id": "011", "day": "b"}'),
    }  # fmt: skip
    quoted = next(one for one in orders.post.messages("orders", "ready") if one.key == "a,1")
    assert quoted.body == {"id": "a,1", "name": 'two\nlines, and "quotes" with \\'}
    (tmp_path / "broken.csv").write_text("id,name\n1,2\n3,4,5\n")
    with pytest.raises(Exception, match="MALFORMED_RECORD"):
        waypost.spark.backfill(spark, address, f"{tmp_path}/broken.csv", queue="orders", id=["id"], dry_run=False)
    frame = spark.createDataFrame([(1, "x", "text"), (2, "y", "more")], "a INT, b STRING, body STRING")
    with pytest.raises(InvalidInput, match="needs name="):
        waypost.spark.backfill(spark, address, frame, queue="orders", id=["a", "b"])
    waypost.spark.backfill(
        spark, address, frame, queue="orders", id=["a", "b"], name="pairs", dry_run=False, priority=3
    )
    pair = next(one for one in orders.post.messages("orders", "ready") if one.key == '["1","x"]')
    assert (pair.body, pair.priority, pair.headers[HEADER]) == ("text", 3, "pairs")


def test_a_shadow_queue_gets_the_rows_and_the_history_of_both_queues_counts(
    orders: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.publish("orders", 1, key="a")
    orders.post.publish("shadow", 1, key="b")
    frame = spark.createDataFrame([("a",), ("b",), ("c",)], "id STRING")
    found = waypost.spark.backfill(
        spark, lake, frame, queue="orders", id="id", to_queue="shadow", name="try", dry_run=False
    )
    assert isinstance(found, Audit)
    assert found.text == "1 asked, 1 not ended"
    assert [one.id for one in orders.post.messages("shadow", "ready") if one.key == "c"] == [
        BackfillIds("shadow").of_key("c")
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--from", "SELECT x FROM keys", "--id", "key"], "--from 'SELECT x FROM keys' is not understood: A column"),
        (["--from", "SELEC 1", "--id", "key"], "neither SQL"),
        (["--from", "SELECT 1 AS one", "--id", "two"], "there is no id column 'two'; the columns are one"),
        (["--from", "SELECT array(1) AS one", "--id", "one"], "id column 'one' is array<int>"),
        (["--from", "SELECT 1.5D AS one", "--id", "one"], "id column 'one' is double, whose text is not the same"),
        (["--from", "SELECT null AS one", "--id", "one"], "1 of 1 rows have no id: id column 'one' is null"),
        (["--from", "SELECT 1 AS one", "--id", "one", "--queue", "ordres"], "did you mean orders?"),
        (["--from", "SELECT 1 AS one", "--id", "one", "--to-queue", "else"], "there is no queue 'else' in the store"),
        (["--from", "SELECT 1 AS one"], "give --id, or --status NAME"),
        (["--from", "SELECT 1 AS one", "--id", "one", "--rate", "fast"], 'rate must look like "100/m"'),
        (["--status", "import"], "has no backfill or redrive 'import'; it has none"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_sentence(
    orders: Shop,
    running_session: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    orders.post.publish("orders", 1)
    lake = new_lake(orders, tmp_path / "lake")
    base = ["pipeline", "backfill", "--lake", lake.files.address]
    queue = [] if "--queue" in arguments or "--status" in arguments else ["--queue", "orders"]
    assert main([*base, *queue, *arguments]) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert "SQLSTATE" not in printed
    assert "\n" not in printed.strip().removeprefix("waypost: ")


def bury(shop: Shop, count: int) -> None:
    """Publish messages of two countries, and let them die, some for another reason."""
    shop.post.publish_many("orders", [{"number": n, "country": "ES" if n % 2 else "PT"} for n in range(count)])
    shop.work("orders", 0)
    with shop.bulk() as bulk:
        from waypost.identity import Session
        from waypost.testing.clock import ClockTime
        from waypost.values import Settlement

        caller = Session(ClockTime())
        leases = bulk.run(bulk.store.claim("orders", count, caller.operation("orders"), worker="w")).leases
        ends = [
            Settlement(lease.id, lease.token, lease.nonce, "dead", reason="rejected" if n < count - 2 else "other")
            for n, lease in enumerate(leases)
        ]
        bulk.run(bulk.store.settle("orders", ends, caller.operation("orders")))


def test_dead_letters_are_chosen_by_their_bodies_and_by_tables_of_the_lake_and_redriven_once(
    shop: Shop, running_session: None, pipeline: Callable[..., Pipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    bury(shop, 20)
    made = pipeline(shop, "lake")
    made.run()
    where = (
        "reason = 'rejected' and body:country::string = 'ES' and id in (select message_id from messages where dead = 1)"
    )
    command = ["pipeline", "redrive", "--lake", made.lake.files.address, "--where", where]
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "9 letters, 9 orders: rejected" in printed
    assert "dry run: 9 messages would be redriven in queue orders; --apply does it" in printed
    assert shop.post.stats("orders").ledger.ready == 0
    assert main([*command, "--apply", "--name", "spain"]) == 0
    assert "spain: 9 asked, 9 not ended" in capsys.readouterr().out
    assert {one.body["country"] for one in shop.post.messages("orders", "ready")} == {"ES"}
    work_off(shop, dead=1)
    assert main(["pipeline", "redrive", "--lake", made.lake.files.address, "--status", "spain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "9 asked, 8 done, 1 dead"
    # It died again, of the same reason: the same command chooses it anew, and no other.
    assert main([*command, "--apply", "--name", "spain"]) == 0
    assert "spain: 1 asked, 1 not ended" in capsys.readouterr().out


def test_copies_of_dead_letters_go_to_another_queue_once_for_each_death(
    orders: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    bury(orders, 6)
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.configure("shadow", journal="all")
    given: dict[str, Any] = {"queues": ["orders"], "to_queue": "shadow"}
    for count in (4, 0):
        seen = waypost.spark.redrive(spark, lake, "reason = 'rejected'", **given)
        assert isinstance(seen, Preview)
        assert (seen.queue, seen.counts["known"], seen.counts["new"]) == ("shadow", 4 - count, count)
        found = waypost.spark.redrive(spark, lake, "reason = 'rejected'", **given, dry_run=False)
        assert isinstance(found, Audit)
        assert found.requested == count
        lake.refresh()
    assert orders.post.stats("orders").ledger.dead_kept == 6
    copies = list(orders.post.messages("shadow", "ready"))
    assert len(copies) == 4
    assert {one.body["number"] for one in copies} == {0, 1, 2, 3}
    assert all(HEADER in one.headers for one in copies)


def test_a_condition_that_is_wrong_names_the_columns(orders: Shop, spark: SparkSession, tmp_path: Path) -> None:
    orders.post.publish("orders", 1)
    lake = new_lake(orders, tmp_path / "lake")
    with pytest.raises(
        InvalidInput, match=r"--where 'raeson = 1' is not understood: .*raeson.*columns are queue, id, state"
    ):
        waypost.spark.redrive(spark, lake, "raeson = 1")
    with pytest.raises(InvalidInput, match="--where 'reason =' is not understood: Syntax error"):
        waypost.spark.redrive(spark, lake, "reason =")
    with pytest.raises(ConfigurationError, match="not from this store"):
        find_store(lake, orders.place.__class__(url="sqlite:///other.db"))


def test_an_unfinished_plan_is_continued_without_spark_and_not_mistaken_for_another(
    orders: Shop, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = new_lake(orders, tmp_path / "lake")
    orders.post.configure("orders", journal="all")
    source, given = "SELECT id FROM range(30)", {"queue": "orders", "id": "id", "name": "import"}
    paused = waypost.spark.backfill(spark, lake, source, **given, dry_run=False, stop=stopped())  # type: ignore[arg-type]
    assert isinstance(paused, Audit)
    assert (paused.phase, paused.text) == ("paused", "30 asked, 30 not sent yet")
    with pytest.raises(InvalidInput, match="import is not finished, and was made from something else"):
        waypost.spark.backfill(spark, lake, "SELECT 1 AS id", **given, dry_run=False)  # type: ignore[arg-type]
    base = ["pipeline", "backfill", "--lake", lake.files.address]
    # No session is started: the master does not exist.
    options = ["--from", source, "--queue", "orders", "--id", "id", "--name", "import", "--apply", "--master", "none"]
    assert main([*base, *options]) == 0
    assert "import: 30 asked, 30 not ended" in capsys.readouterr().out
    logged = orders.post.actions().actions
    assert [(one.action, one.queue, one.ok, one.text) for one in logged] == [
        ("backfill", "orders", True, "import: 30 asked, 30 not ended")
    ]
    assert "--queue orders --id id --apply" in logged[0].command
    assert main([*base, "--status", "import", "--master", "none"]) == 0
    assert "import: 30 asked, 30 not ended" in capsys.readouterr().out
