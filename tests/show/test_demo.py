"""`make demo`, with fewer orders: it accounts for every message, prints no password, and no process is left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pyarrow.parquet as parquet
import pytest

from examples.demo.processes import PASSWORD_VARIABLE
from tests.show.marked_processes import carriers, left_behind, new_mark
from waypost import Waypost
from waypost.cli.demo.runner import wait_until
from waypost.errors import StoreUnavailable, WaypostError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.demo", "--orders", "2000"]
SECONDS_MAX = 600
#: The password of every URL that the demo uses.
CANARY = "Canary7Secret"

pytestmark = [pytest.mark.promise("FACE-5"), pytest.mark.xdist_group("demo")]


class Demo:
    """A running demo, with a mark by which its processes can be found."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.environment = new_mark() | {"TMPDIR": str(directory.parent)} | environment
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [*COMMAND, "--directory", str(directory)],
            cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # Everything that it started ends with it.
        self.process.kill()
        self.process.wait(SECONDS_MAX)

    def read_until(self, text: str) -> None:
        for line in self.lines():
            if text in line:
                return
        raise AssertionError(f"{text!r} was never written:\n{self}")

    def end(self) -> int:
        """Read the rest of the output, and return the exit code."""
        for _ in self.lines():
            pass
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(SECONDS_MAX)

    def __str__(self) -> str:
        return "".join(self.output)


def contents(directory: Path) -> Iterator[tuple[str, str]]:
    """Every file below a directory with its text. The columns of a Parquet file are compressed, so they are read."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes().decode(errors="replace")
        if path.suffix == ".parquet":
            yield f"{path} (rows)", str(parquet.ParquetFile(path).read().to_pylist())


def journals(url: str) -> Iterator[tuple[str, str]]:
    """Every queue of a store with its whole journal, which has bodies and headers at level `full`."""
    with Waypost(url) as post:
        for queue in post.queues():
            after = 0
            while (page := post.journal(queue, after)).events:
                yield f"journal of {queue} after {after}", repr(page.events)
                after = page.last


@pytest.mark.promise("SPARK-7", "SEE-6")
def test_a_demo_accounts_for_every_message_and_shows_no_password_while_another_is_interrupted(tmp_path: Path) -> None:
    with Demo(tmp_path / "whole", KEEP="1", **{PASSWORD_VARIABLE: CANARY}) as whole:
        interrupted = Demo(tmp_path / "interrupted")
        interrupted.read_until("is up, on this machine")
        assert any("java" in command for command in carriers(interrupted.environment).values())
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.end() == 130, interrupted
        assert "Traceback" not in str(interrupted)
        assert left_behind(interrupted.environment) == {}
        assert list((tmp_path / "interrupted").iterdir()) == []

        whole.read_until("The servers stay up")
        whole.read_until("postgres.url")
        (directory,) = (tmp_path / "whole").glob("run-*")
        urls = {name: (directory / f"{name}.url").read_text() for name in ("valkey", "postgres")}
        places = {name: text for name, text in contents(directory) if not name.endswith(".url")}
        for name, url in urls.items():
            # The password is a real one: it is in the URL, and without it the server admits no client.
            assert CANARY in url
            with pytest.raises(WaypostError):
                Waypost(url.replace(CANARY, "wrong"), start_timeout=5, retry_budget=0).open()
            places |= {f"{name}: {page}": text for page, text in journals(url)}
        assert sum("journal of" in name for name in places) >= 4
        assert sum(name.endswith(".log") for name in places) >= 6
        assert any(name.endswith("(rows)") and "order:" in text for name, text in places.items())

        whole.process.send_signal(signal.SIGINT)
        assert whole.end() == 0, whole
        places["output"] = text = str(whole)
        assert [name for name, content in places.items() if CANARY in content] == []
        for part in (
            "cancelled before the commit",
            "clicked twice",
            "undecodable",
            "retries_exhausted",
            "kill -9 of worker 1",
            "Spark imported 2,000 orders of 3,000 rows",
            "leases of the killed worker ended",
            "the rollup was fired",
            "0 redeliveries without a cause",
            "pipeline ingest: revenue",
            "put aside",
            "is equal to the sum of its table in PostgreSQL",
            "pipeline report: file://",
        ):
            assert part in text, f"{part!r} is missing in:\n{text}"
        audited = re.search(r"pipeline audit: .* 0 unaccounted of ([\d,]+)", text)
        assert audited, text
        assert int(audited[1].replace(",", "")) > 2_000
        lake = directory / "lake"
        assert f"file://{lake / 'report.html'}" in text
        assert f"0 unaccounted of {audited[1]}" in (lake / "report.html").read_text()
        # The servers have ended, and only the lake is left.
        assert [path.name for path in directory.iterdir()] == ["lake"]
        assert left_behind(whole.environment) == {}
        for url in urls.values():
            with pytest.raises(StoreUnavailable):
                Waypost(url, start_timeout=0.5, retry_budget=0).open()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_of_a_demo_that_is_ended_while_it_runs(ended_by: signal.Signals, tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo")
    demo.read_until("two workers charge the cards")
    wait_until(lambda: len(carriers(demo.environment)) >= 5, "the start of servers and workers", SECONDS_MAX)
    demo.process.send_signal(ended_by)
    assert demo.end() == (130 if ended_by == signal.SIGTERM else -signal.SIGKILL), demo
    assert left_behind(demo.environment) == {}


def test_no_process_is_left_of_a_demo_that_is_interrupted_at_once(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo")
    demo.read_until("A shop on real servers")
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo
    assert left_behind(demo.environment) == {}
