"""`waypost demo`: it works on any machine, ends by itself, and no process is left however it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.show.marked_processes import carriers, left_behind, new_mark
from waypost import Waypost
from waypost.cli.demo import shop
from waypost.cli.demo.runner import WORKER_VARIABLE, DemoOutput, DemoTimeout, wait_until
from waypost.cli.demo.sqlite_demo import ORDER_COUNT

COMMAND = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "demo"]
SECONDS_MAX = 240
#: Packages that `pip install waypost` does not install.
OTHER_PACKAGES = (
    "redis",
    "psycopg",
    "psycopg_pool",
    "pyarrow",
    "numpy",
    "pyspark",
    "rich",
    "textual",
    "sqlalchemy",
)


def without(packages: tuple[str, ...], environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which these packages cannot be imported, as if they were not installed."""
    folder.mkdir()
    for name in packages:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.promise("FACE-5")
def test_the_demo_kills_a_worker_and_accounts_for_every_message(tmp_path: Path) -> None:
    environment = without(OTHER_PACKAGES, new_mark(), tmp_path / "absent")
    ran = subprocess.run(
        [*COMMAND, "--json", "--directory", str(tmp_path / "shop")],
        env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["unaccounted"], result["unexplained"]) == (0, 0)
    assert result["retaken"] >= 1
    assert result["done"]["orders"] == result["done"]["mails"] == ORDER_COUNT + 1
    rest = ran.stderr
    for part in (
        "duplicate",
        "delayed",
        "kill -9",
        "leases have ended",
        "dead letter",
        "redrive",
        "history",
        "0 unaccounted of",
    ):
        assert part in rest, f"{part!r} is missing, or too early, in:\n{ran.stderr}"
        rest = rest[rest.index(part) :]
    assert left_behind(environment) == {}
    # The kept directory is a store like any other.
    with Waypost(f"sqlite:///{tmp_path / 'shop' / 'demo.db'}") as post:
        ledger = post.ledger(shop.ORDERS)
        assert (ledger.balance, ledger.unexplained) == (0, 0)
        assert ledger.redelivered["expired"] == result["retaken"]


@pytest.mark.promise("FACE-5")
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_of_a_demo_command_that_is_ended(ended_by: signal.Signals, tmp_path: Path) -> None:
    environment = new_mark() | {"TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "worker 2 starts" in line:
            break
    wait_until(lambda: len(carriers(environment)) >= 2, "the start of a worker", SECONDS_MAX)
    demo.send_signal(ended_by)
    text = demo.stdout.read()
    demo.stdout.close()
    code = demo.wait(SECONDS_MAX)
    assert left_behind(environment) == {}
    if ended_by == signal.SIGINT:
        assert code == 130, text
        assert "Traceback" not in text
        assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_demo_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "demo.db").touch()
    ran = subprocess.run(
        [*COMMAND, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == f"waypost: {tmp_path} already contains a demo.db; choose another directory\n"


def test_a_step_that_takes_too_long_names_what_it_waited_for() -> None:
    with pytest.raises(DemoTimeout, match=r"waited 0 s in vain for a worker"):
        wait_until(lambda: False, "a worker", 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_and_colors_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, is_terminal in ((io.StringIO(), False), (Terminal(), True)):
        output = DemoOutput(stream)
        output.progress(1, 2, "half")
        output.good("all of it")
        text = stream.getvalue()
        assert ("half" in text) is is_terminal
        assert ("\033[32m" in text) is is_terminal
        assert text.endswith("\n")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    DemoOutput(plain).good("all of it")
    assert "\033[32m" not in plain.getvalue()


def test_the_workers_of_a_demo_end_when_the_demo_is_gone(tmp_path: Path) -> None:
    environment = new_mark() | {shop.STORE_VARIABLE: f"sqlite:///{tmp_path / 'demo.db'}", WORKER_VARIABLE: "1"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", "worker", "waypost.cli.demo.shop:post"],
        env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdin is not None
    assert worker.stderr is not None
    assert b"waypost worker" in worker.stderr.readline()
    worker.stdin.close()
    worker.stderr.read()
    worker.stderr.close()
    # Exit code 0, or by the signal if it had not started to work.
    assert worker.wait(SECONDS_MAX) in (0, -signal.SIGTERM)
    assert left_behind(environment) == {}
