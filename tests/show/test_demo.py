"""`make demo`, with fewer orders: it accounts for every message, two demos do not clash, nothing is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo import __main__ as demo_program
from examples.demo.processes import Environment
from tests.show.marked import carriers, left_behind, new_mark
from waypost import Waypost
from waypost.cli.demo.runner import DemoOutput, wait_until
from waypost.errors import StoreUnavailable

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.demo", "--orders", "2000"]
SECONDS_MAX = 600

pytestmark = [pytest.mark.promise("FACE-5"), pytest.mark.xdist_group("demo")]


class Demo:
    """A demo that runs, with a mark by which everything that it started can be found."""

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

    def read_until(self, text: str) -> None:
        for line in self.lines():
            if text in line:
                return
        raise AssertionError(f"{text!r} was never written:\n{self}")

    def end(self) -> int:
        """Read all that is left; the exit code."""
        for _ in self.lines():
            pass
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(SECONDS_MAX)

    def __str__(self) -> str:
        return "".join(self.output)


@pytest.mark.promise("SPARK-7")
def test_a_demo_accounts_for_every_message_while_another_is_interrupted_beside_it(tmp_path: Path) -> None:
    whole, interrupted = Demo(tmp_path / "whole"), Demo(tmp_path / "interrupted")
    interrupted.read_until("is up, on this machine")
    assert any("java" in command for command in carriers(interrupted.environment).values())
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.end() == 130, interrupted
    assert "Traceback" not in str(interrupted)
    assert left_behind(interrupted.environment) == {}
    assert list((tmp_path / "interrupted").iterdir()) == []

    assert whole.end() == 0, whole
    text = str(whole)
    for part in (
        "cancelled before the commit",
        "clicked twice",
        "undecodable",
        "retries_exhausted",
        "kill -9 of worker 1",
        "Spark imported 2,000 orders of 3,000 rows",
        "leases of the killed worker ended",
        "the rollup was fired",
        "pipeline ingest: revenue",
        "put aside",
        "is equal to the sum of its table in PostgreSQL",
        "pipeline report: file://",
    ):
        assert part in text, f"{part!r} is missing in:\n{text}"
    audited = re.search(r"0 unaccounted of ([\d,]+)", text)
    assert audited, text
    assert int(audited[1].replace(",", "")) > 2_000
    (lake,) = (tmp_path / "whole").glob("run-*/lake")
    assert f"file://{lake / 'report.html'}" in text
    assert f"0 unaccounted of {audited[1]}" in (lake / "report.html").read_text()
    assert [path.name for path in lake.parent.iterdir()] == ["lake"]
    assert left_behind(whole.environment) == {}


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_while_the_shop_is_open_leaves_no_process_behind(
    ended_by: signal.Signals, tmp_path: Path
) -> None:
    demo = Demo(tmp_path / "demo")
    demo.read_until("two workers charge the cards")
    wait_until(lambda: len(carriers(demo.environment)) >= 5, "the start of servers and workers", SECONDS_MAX)
    demo.process.send_signal(ended_by)
    assert demo.end() == (130 if ended_by == signal.SIGTERM else -signal.SIGKILL), demo
    assert left_behind(demo.environment) == {}


def test_a_demo_that_is_interrupted_at_once_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo")
    demo.read_until("A shop on real servers")
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo
    assert left_behind(demo.environment) == {}


def test_kept_servers_stay_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a demo with KEEP=1; the test uses the servers in place of the pause."""
    answered: list[list[str]] = []
    with Environment(tmp_path) as environment:
        environment.start_servers()

        def list_queues() -> None:
            with Waypost(environment.valkey) as post:
                answered.append(post.queues())
            raise KeyboardInterrupt

        monkeypatch.setattr(signal, "pause", list_queues)
        with (tmp_path / "output").open("w+") as stream:
            demo_program.keep_servers(environment, DemoOutput(stream))
            stream.seek(0)
            text = stream.read()
    assert answered == [[]]
    assert f"waypost workers {environment.valkey}" in text
    assert text.rstrip().endswith("ended")
    with pytest.raises(StoreUnavailable):
        Waypost(environment.valkey, start_timeout=0.5, retry_budget=0).open()
