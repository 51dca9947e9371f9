"""One table of all commands: what each does if the SQLite file does not exist, and without the extras it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest

from tests.cli.test_every_command import list_commands
from tests.waiting import WAIT_SECONDS_MAX
from waypost.cli.main import main, make_parser

SOURCE = Path(__file__).parents[2] / "src"
ID = "1m7fra5gs06ap4cfk9b5jsq9"


class Row(NamedTuple):
    """A command: its arguments, how it gets its store, and what it does if the SQLite file does not exist."""

    arguments: str
    #: `reads` creates none, exit code 3; `makes` creates it and reports that; `runs` too, and goes on until stopped;
    #: `none`: it has no store, or does nothing with this one.
    file: Literal["reads", "makes", "runs", "none"] = "reads"
    option: str = "--url"
    #: The extra that it needs with every store.
    extra: str | None = None

    @property
    def takes_a_store(self) -> bool:
        return self.option != ""


TABLE: dict[str, tuple[Row, ...]] = {
    "publish": (Row("publish orders 1", "makes"),),
    "queues": (Row("queues"),),
    "stats": (Row("stats"), Row("stats orders")),
    "peek": (Row("peek orders"),),
    "find": (Row(f"find {ID}"), Row("find --key k")),
    "history": (Row(f"history orders {ID}"),),
    "ledger": (Row("ledger orders"),),
    "journal": (Row("journal orders"), Row("journal orders --follow")),
    "watch": (Row("watch --once"),),
    "pause": (Row("pause orders"),),
    "resume": (Row("resume orders"),),
    "configure": (Row("configure orders"), Row("configure orders lease=30s", "makes")),
    "groups list": (Row("groups list orders"),),
    "groups pause": (Row("groups pause orders acme"),),
    "groups resume": (Row("groups resume orders acme"),),
    "groups configure": (Row("groups configure orders acme weight=3"),),
    "groups skip": (Row("groups skip orders acme"),),
    "cancel": (Row("cancel orders --key k"),),
    "purge": (Row("purge orders --state ready --yes"),),
    "remove": (Row("remove orders --yes"),),
    "dead list": (Row("dead list orders"), Row("dead list orders --by-reason")),
    "dead peek": (Row(f"dead peek orders {ID}"),),
    "dead redrive": (Row("dead redrive orders --all"),),
    "dead purge": (Row("dead purge orders --yes"),),
    "dead edit": (Row(f"dead edit orders {ID} --text x"),),
    "bulk start": (Row("bulk start orders purge --yes"),),
    "bulk list": (Row("bulk list"),),
    "bulk run": (Row(f"bulk run {ID}"),),
    "bulk pause": (Row(f"bulk pause {ID}"),),
    "bulk resume": (Row(f"bulk resume {ID}"),),
    "bulk cancel": (Row(f"bulk cancel {ID}"),),
    "actions": (Row("actions"),),
    "timers list": (Row("timers list orders"),),
    "timers cancel": (Row("timers cancel orders k"),),
    "timers reschedule": (Row("timers reschedule orders k --delay 60"),),
    "schedules preview": (Row("schedules preview @daily", "none", option=""),),
    "schedules list": (Row("schedules list"),),
    "schedules save": (Row("schedules save s --queue q --every 5", "makes"),),
    "schedules pause": (Row("schedules pause s"),),
    "schedules resume": (Row("schedules resume s"),),
    "schedules trigger": (Row("schedules trigger s"),),
    "schedules backfill": (Row("schedules backfill rollup --from 2026-03-01 --to 2026-03-02"),),
    "schedules remove": (Row("schedules remove s"),),
    # Its store is that of the user's own client, which creates the file as in every program.
    "worker": (Row("worker shop:post", "none", option=""),),
    "workers": (Row("workers"),),
    "web": (Row("web --port 0", option="--store", extra="web"),),
    "scheduler": (Row("scheduler", "runs"),),
    "promoter": (Row("promoter", "runs"),),
    "relay": (Row("relay --queue orders --until-empty --to sqlite:///target.db#copies", "makes"),),
    "migrate": (
        Row("migrate", "none"), Row("migrate --check", "none"),
        Row("migrate --sql", "none", option="", extra="postgres"),
    ),
    "init": (Row("init --help", "none", option=""),),
    "doctor": (Row("doctor"), Row("doctor --mend --yes")),
    "bench": (Row("bench --messages 10", "makes"),),
    "completion": (Row("completion bash", "none", option="", extra="cli"),),
    "demo": (Row("demo --help", "none", option=""),),
    "pipeline run": (Row("pipeline run --lake lake", option="--store", extra="spark"),),
    "pipeline ingest": (Row("pipeline ingest --lake lake --queue orders", option="--store", extra="spark"),),
    "pipeline rebuild": (
        Row("pipeline rebuild --lake lake --day 2026-03-01", "none", option="", extra="spark"),
    ),
    "pipeline schedule": (
        Row("pipeline schedule --lake lake --every 5", option="--store", extra="spark"),
        Row("pipeline schedule --lake lake --show", option="--store", extra="spark"),
        Row("pipeline schedule --lake lake --remove", option="--store", extra="spark"),
    ),
    "pipeline worker": (Row("pipeline worker --lake lake", option="--store", extra="spark"),),
    "pipeline tidy": (Row("pipeline tidy --lake lake", "none", option="", extra="spark"),),
    "pipeline upgrade": (Row("pipeline upgrade --lake lake", "none", option="", extra="spark"),),
    "pipeline views": (Row("pipeline views --lake lake", "none", option="", extra="spark"),),
    "pipeline backfill": (
        Row("pipeline backfill --lake lake --from rows.csv --queue orders --id id", option="--store", extra="spark"),
    ),
    "pipeline redrive": (Row("pipeline redrive --lake lake --where true", option="--store", extra="spark"),),
    "pipeline audit": (Row("pipeline audit --lake lake", option="--store", extra="spark"),),
    "pipeline advise": (Row("pipeline advise --lake lake", option="--store", extra="spark"),),
    "pipeline simulate": (Row("pipeline simulate --lake lake --queue orders", option="--store", extra="spark"),),
    "pipeline report": (Row("pipeline report --lake lake", "none", option="", extra="spark"),),
}  # fmt: skip
ROWS = [row for rows in TABLE.values() for row in rows]
named = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arguments)


def given(row: Row, url: str) -> list[str]:
    return [*row.arguments.split(), *([row.option, url] if row.takes_a_store else [])]


@pytest.mark.promise("FACE-2")
def test_the_table_has_every_command() -> None:
    assert sorted(TABLE) == sorted(list_commands(make_parser()))
    assert [name for name, rows in TABLE.items() for row in rows if not row.arguments.startswith(name)] == []


@pytest.mark.promise("FACE-2", "STORE-3")
@pytest.mark.parametrize("how", ["lines", "json"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.file in ("reads", "makes")], ids=lambda row: row.arguments)
def test_a_command_that_only_reads_creates_no_file(
    row: Row, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "typo.db"
    code = main(given(row, f"sqlite:///{path}") + (["--json"] if how == "json" else []))
    printed_text = capsys.readouterr().err
    if row.file == "makes":
        assert (code, path.exists()) == (0, True), printed_text
        assert f"creating {path}" in printed_text
        return
    assert code == 3, printed_text
    assert f"there is no file {path}, and this command creates none" in printed_text
    assert len(printed_text.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("FACE-2", "STORE-3")
@pytest.mark.parametrize("row", [row for row in ROWS if row.file == "runs"], ids=lambda row: row.arguments)
def test_a_command_that_runs_reports_that_it_creates_a_file(row: Row, tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", *given(row, f"sqlite:///{path}")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert f"creating {path}" in process.stderr.readline()
        # Its next line reports that it runs.
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 0, rest
    assert path.exists()


#: Runs commands one after the other in a Python that has nothing but the standard library, msgspec and waypost.
RUNNER = """
import contextlib, io, json, sys, traceback
from waypost.cli.main import main
results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    results.append([code, err.getvalue()])
json.dump(results, sys.stdout)
"""
EXTRAS = {"valkey://127.0.0.1:1": "valkey", "valkey+cluster://127.0.0.1:1": "valkey", "unix:///nowhere.sock": "valkey",
          "valkey+sentinel://127.0.0.1:1/s": "valkey", "postgresql://127.0.0.1:1/d": "postgres"}  # fmt: skip


@pytest.mark.promise("FACE-2", "FACE-5")
def test_a_command_without_its_extra_names_it_in_one_line(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (packages / "shop.py").write_text("from waypost import Waypost\npost = Waypost('valkey://127.0.0.1:1')\n")
    tried: list[tuple[list[str], str | None]] = []
    for row in ROWS:
        if row.takes_a_store:
            tried += [(given(row, url), row.extra or extra) for url, extra in EXTRAS.items()]
        else:
            tried.append((given(row, ""), row.extra or ("valkey" if row.arguments.startswith("worker") else None)))
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUNNER], input=json.dumps([arguments for arguments, _ in tried]),
        capture_output=True, text=True, timeout=WAIT_SECONDS_MAX, check=True, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{SOURCE}:{packages}"},
    )  # fmt: skip
    wrong = []
    for (arguments, extra), (code, printed_text) in zip(tried, json.loads(done.stdout), strict=True):
        if extra is None:
            is_right = code == 0
        else:
            is_right = (
                code == 2
                and f'pip install "waypost[{extra}]"' in printed_text
                and len(printed_text.strip().splitlines()) == 1
            )
        if not is_right:
            wrong.append((arguments, extra, code, printed_text))
    assert wrong == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["packages"]
