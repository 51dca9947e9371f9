"""`waypost pipeline`: its output, its exit codes, and the tables after it is killed."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.spark.drivers import QUICK, run_killed
from tests.spark.lakes import live, plant, rows, tables, totals
from tests.spark.readers import Killed, kill_at, read_by_others, read_by_spark, read_lake, texts
from tests.spark.shop import Shop
from waypost import Waypost
from waypost.cli.main import main
from waypost.spark.delta import vacuum as vacuums
from waypost.spark.delta.parquet import FileWriter
from waypost.spark.delta.table import DeltaFolder
from waypost.spark.files import LocalFiles
from waypost.spark.lake import compaction, gold
from waypost.spark.lake import pipeline as pipelines
from waypost.spark.lake.compaction import remove_old_rows
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL, SILVER_MESSAGES
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.xdist_group("spark")
ROOT = Path(__file__).parents[2]


@pytest.mark.promise("SPARK-4")
def test_after_a_kill_at_any_commit_all_readers_see_committed_rows_and_the_next_opening_completes_them(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, ended before or after each of its eleven commits: to the steps, and to the ten tables that follow."""
    live(orders, 20)
    made = pipeline(orders, "lake")
    made.run()
    before = texts(read_lake(made.lake))
    live(orders, 20)
    step: list[Any] = []

    def record(lake: Lake, *arguments: Any) -> None:
        step.append(arguments)
        raise Killed

    with monkeypatch.context() as recording:
        recording.setattr(Lake, "commit", record)
        with pytest.raises(Killed):
            made.run()
    shutil.copytree(tmp_path / "lake", tmp_path / "whole")
    whole = Lake(str(tmp_path / "whole"))
    whole.commit(*step[0])
    after = texts(read_lake(whole))
    assert all(before[name] != after[name] for name in before)
    for number, when in itertools.product(range(1, 12), ("before", "after")):
        path = tmp_path / f"{when}-{number}"
        shutil.copytree(tmp_path / "lake", path)
        lake = Lake(str(path))
        with monkeypatch.context() as dying:
            kill_at(dying, number, when)
            with pytest.raises(Killed):
                lake.commit(*step[0])
        seen = texts(read_by_others(str(path)))
        assert all(seen[name] in (before[name], after[name]) for name in seen), (number, when)
        opened = texts(read_lake(Lake(str(path))))
        assert opened == (before if (number, when) == (1, "before") else after)
        assert texts(read_by_others(str(path))) == opened
        shutil.rmtree(path)


class DyingAt:
    """Ends a run when a function is called for the nth time, before or after it has done its work."""

    def __init__(self, owner: Any, name: str, number: int, when: str) -> None:
        self.owner, self.name, self.number, self.when = owner, name, number, when

    def __str__(self) -> str:
        return f"{self.when} call {self.number} of {self.name}"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls, lock = getattr(self.owner, self.name), itertools.count(1), threading.Lock()
        dead: list[bool] = []

        def called(*arguments: Any, **options: Any) -> Any:
            with lock:
                is_point = next(calls) == self.number
            if is_point and self.when == "before":
                dead.append(True)
                raise Killed
            result = real(*arguments, **options)
            # Another thread that is in this function meanwhile finishes its file, so that it is closed, and ends too.
            if is_point or dead:
                dead.append(True)
                raise Killed
            return result

        monkeypatch.setattr(self.owner, self.name, called)


#: Where a run ends beside the commits of its tables: while the lake is made, while data files are written, before and
#: after its step, while files are merged, and while they are deleted.
POINTS = (
    DyingAt(DeltaFolder, "create", 1, "after"),
    DyingAt(DeltaFolder, "create", 6, "before"),
    DyingAt(DeltaFolder, "create", 10, "before"),
    DyingAt(Lake, "commit", 1, "after"),
    DyingAt(FileWriter, "close", 1, "after"),
    DyingAt(LocalFiles, "close_output", 3, "after"),
    DyingAt(LocalFiles, "close_output", 5, "after"),
    DyingAt(gold, "write_days", 2, "after"),
    DyingAt(Lake, "commit", 1, "before"),
    DyingAt(Lake, "commit", 1, "after"),
    DyingAt(compaction, "concatenate", 2, "after"),
    DyingAt(Lake, "commit", 2, "before"),
    DyingAt(Lake, "commit", 2, "after"),
    DyingAt(Lake, "vacuum", 1, "before"),
    DyingAt(Lake, "commit", 3, "after"),
    DyingAt(LocalFiles, "remove_file", 2, "after"),
)


@pytest.mark.promise("SPARK-4")
def test_a_run_killed_anywhere_else_shows_committed_rows_and_the_next_one_loses_and_doubles_nothing(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lake, killed at one point after another, with new events each time."""
    made = pipeline(orders, "lake", reader="lake")
    # Files are merged and deleted in every run, so that it can be killed there too.
    monkeypatch.setattr(pipelines, "FILES_MAX", 2)
    monkeypatch.setattr(vacuums, "FILES_KEPT_MS", -1)
    for point in POINTS:
        orders.post.publish_many("orders", range(2))
        orders.work("orders", 1)
        monkeypatch.setattr(pipelines, "VACUUM_EVERY_MS", -1)
        with monkeypatch.context() as dying:
            point.install(dying)
            with pytest.raises(Killed):
                pipeline(orders, "lake", reader="lake").run()
        if not (tmp_path / "lake" / "_steps" / "_delta_log").exists():
            continue
        dead = texts(read_by_others(str(tmp_path / "lake")))
        lake = Lake(str(tmp_path / "lake"))
        # Opening it has completed a step at most; here each kill was before or after a whole one.
        assert dead == texts(read_lake(lake)), str(point)
    lake = Lake(str(tmp_path / "lake"))
    assert texts(read_by_spark(lake, made.spark)) == texts(read_by_others(str(tmp_path / "lake")))
    pipeline(orders, "lake", reader="lake").run()
    whole = pipeline(orders, "whole")
    whole.run()
    assert tables(made) == tables(whole)
    assert made.lake.state.seen == whole.lake.state.seen


@pytest.mark.promise("SPARK-4")
def test_a_run_that_a_signal_killed_is_completed_by_the_next(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    live(orders, 20)
    killed = run_killed("after:3", "run", "--store", orders.url, "--lake", str(tmp_path / "a lake"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    live(orders, 10)
    made = pipeline(orders)
    made.run()
    whole = pipeline(orders, "whole")
    whole.run()
    assert tables(made) == tables(whole)


@pytest.mark.promise("SPARK-4")
def test_two_runs_at_once_load_everything_once(orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    live(orders, 30)
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(pipeline(orders, batch_rows=50).run) for _ in range(2)]
        for one in runs:
            one.result()
    whole = pipeline(orders, "whole")
    whole.run()
    assert tables(pipeline(orders)) == tables(whole)


@pytest.mark.promise("SPARK-5")
def test_the_audit_command_prints_its_verdict_and_no_log_of_spark(orders: Shop, tmp_path: Path) -> None:
    live(orders, 20)
    done = run_killed("nowhere", "audit", "--store", orders.url, "--lake", str(tmp_path / "a lake"))
    published = orders.post.ledger("orders").published
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"0 unaccounted of {published}"
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["bronze, silver, gold", "audit"]


@pytest.mark.usefixtures("running_session")
def test_commands_answer_with_lines_and_exit_codes(
    orders: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = str(tmp_path / "a lake")
    orders.post.configure("orders", journal="full")
    orders.post.publish_many("orders", [{"id": n} for n in range(3)])
    assert main(["pipeline", "run", "--lake", lake]) == 2
    assert "is new: give its store" in capsys.readouterr().err
    assert main(["pipeline", "run", "--store", "mysql://x", "--lake", lake]) == 2
    assert main(["pipeline", "run", "--store", orders.url, "--lake", lake]) == 0
    assert "4 events of 1 queues in the lake" in capsys.readouterr().out
    schema = ["--schema", "id BIGINT"]
    assert main(["pipeline", "ingest", "--store", orders.url, "--lake", lake, "--queue", "orders", *schema]) == 0
    assert capsys.readouterr().out == "3 messages of queue orders in the lake\n"
    assert main(["pipeline", "ingest", "--lake", lake, "--queue", "orders", "--schema", "id NUMBERS"]) == 2
    assert "is no schema" in capsys.readouterr().err
    plant(orders, "DELETE FROM wp_message WHERE id = ?", orders.stored("ready")[0].id)
    assert main(["pipeline", "audit", "--lake", lake, "--json"]) == 1
    assert '"unaccounted_count": 1' in capsys.readouterr().out


@pytest.mark.promise("SPARK-4", "SPARK-5", "FACE-2")
@pytest.mark.usefixtures("running_session")
def test_commands_answer_on_every_store(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = str(tmp_path / "a lake")
    shop.post.publish_many("orders", [{"id": n} for n in range(5)])
    shop.work("orders", 3)
    place = ["--store", shop.url, "--namespace", shop.namespace, "--lake", lake]
    metrics = tmp_path / "lake.prom"
    assert main(["pipeline", "run", *place, "--json", "--metrics", str(metrics)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["queues"] == ["orders"]
    assert report["events_added"] == report["rows_added"]["bronze/journal"] == report["events"]
    assert report["offsets"]["orders"]["lag_events"] == 0
    assert report["seconds"].keys() == {"start", "run", "total"}
    assert 'waypost_lake_lag_events{queue="orders"} 0' in metrics.read_text()
    assert main(["pipeline", "audit", *place]) == 0
    assert capsys.readouterr().out.endswith("0 unaccounted of 5\n")
    assert main(["pipeline", "report", "--lake", lake]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text().startswith("<!doctype html>")


def test_rows_older_than_keep_days_are_removed_and_gold_stays(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    orders.post.publish_many("orders", range(6))
    orders.work("orders", 3)
    plant(orders, "UPDATE wp_journal SET at_ms = at_ms - ?", 40 * 86_400_000)
    made = pipeline(orders)
    made.run()
    orders.post.publish_many("orders", range(2))
    made.run()
    before = totals(made)
    removed = remove_old_rows(made.lake, 30, datetime.now(UTC).date())
    # Events, and ended deliveries and messages; rows that may still change are kept, however old.
    assert removed == 12 + 6
    assert len(rows(made, BRONZE_JOURNAL)) == 2
    assert {row["state"] for row in rows(made, SILVER_MESSAGES)} == {"ready"}
    assert totals(made) == before
    with pytest.raises(ValueError, match="from 1 to 365,000"):
        remove_old_rows(made.lake, 0, datetime.now(UTC).date())


@pytest.mark.promise("SPARK-4", "SPARK-7", "SEE-6")
def test_the_password_of_a_store_is_not_in_its_lake_nor_in_the_report(tmp_path: Path) -> None:
    canary, output = "Canary7Secret", ""
    place = ["--lake", str(tmp_path / "a lake")]
    with ValkeyServer(requirepass=canary) as server:
        url = f"valkey://:{canary}@127.0.0.1:{server.port}"
        with Waypost(url) as post:
            post.configure("orders", journal="full")
            post.publish_many("orders", list(range(20)))
            post.handler("orders")(lambda body: None)
            post.worker().run(until_empty=True, signals=False)
        log = ["--log", str(tmp_path / "log")]
        for command in (
            ["run", "--store", url, *place, *log, *QUICK],
            ["ingest", "--store", url, "--queue", "orders", *place, *log, *QUICK],
            ["audit", "--store", url, *place, *log, *QUICK],
            ["report", *place, "--output", str(tmp_path / "report.html")],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "waypost.cli.main", "pipeline", *command], capture_output=True, text=True,
                cwd=ROOT, timeout=300, check=False,
            )  # fmt: skip
            output += done.stdout + done.stderr
            assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {tmp_path / "report.html", tmp_path / "log"} <= set(written)
    assert len(written) > 10
    assert [path for path in written if canary.encode() in path.read_bytes()] == []
    assert canary not in output


@pytest.mark.promise("SPARK-5")
def test_an_audit_of_one_queue_ignores_the_others_and_keeps_the_queues_of_the_lake(
    running_session: None,
    orders: Shop,
    pipeline: Callable[..., Pipeline],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for queue, count in (("a", 3), ("b", 5)):
        orders.post.publish_many(queue, range(count))
    pipeline(orders, "lake").run()
    lake = str(tmp_path / "lake")
    for queue, last in (("a", "0 unaccounted of 3"), ("b", "0 unaccounted of 5"), ("a,b", "0 unaccounted of 8")):
        assert main(["pipeline", "audit", "--lake", lake, "--queue", queue, *QUICK]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last
        source = Lake(lake).state.source
        assert source is not None
        assert source.queues is None
    # A lake that loads one queue only since some time still has the rows of the others.
    pipeline(orders, "lake", queues=("a",)).run()
    assert main(["pipeline", "audit", "--lake", lake, *QUICK]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 unaccounted of 3"
    assert main(["pipeline", "audit", "--lake", lake, "--queue", "b", *QUICK]) == 2
    assert "is made from the queues a, not from b" in capsys.readouterr().err
