"""The fault figures in their quick size: none may be short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.figures import NAMES, TIMED_NAMES
from tests.fault.group_figures import Workers, judge

#: The figures in parts of a minute or two, which can run side by side.
PARTS = (
    ("frozen_workers", "poison", "same_keys", "lost_replies", "stopped_server", "worker_memory"),
    ("schedulers", "daylight_saving", "outbox", "effects_once", "relays"),
    ("repeats", "slow_link"),
    ("leases", "exits", "groups", "simulator"),
    ("wakes", "tokens"),
    ("lake",),
)


def test_every_figure_that_counts_is_in_one_part() -> None:
    assert sorted(name for part in PARTS for name in part) == sorted(set(NAMES) - set(TIMED_NAMES))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_no_quick_figure_is_short(part: tuple[str, ...]) -> None:
    only = [argument for name in part for argument in ("--only", name)]
    command = [sys.executable, "-m", "tests.fault.figures", "--quick", "--counts", "--seed", "1", *only]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=840, check=False
    )
    assert "SHORT" not in ran.stdout, ran.stdout
    assert ran.stdout.count(") ok") >= len(part)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.promise("QUEUE-5")
def test_the_figure_of_groups_sees_calls_that_were_killed(tmp_path: Path) -> None:
    workers = Workers("memory://", "wp", tmp_path)
    lines = [
        "began ordered a 1 one 1 7 100", "began limited b 1 two 1 7 110", "began limited b 2 three 1 8 120",
        "began limited b 3 four 1 8 130", "ended limited b 3 four 1 8 140", "began ordered a 2 five 1 8 150",
        "ended ordered a 2 five 1 8 160", "ended limited b 2 three 1 8 170",
    ]  # fmt: skip
    (tmp_path / "notes").write_text("\n".join(lines) + "\n")
    workers.killed[7] = 155
    figures = {figure.name.rpartition(": ")[2]: figure.figure for figure in judge(workers.runs(), 5, "a kill")}
    assert figures == {
        "out of order": "0", "overlaps in an ordered group": "1", "most of a group at once": "3", "handled": "5",
    }  # fmt: skip
