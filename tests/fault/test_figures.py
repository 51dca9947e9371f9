"""The fault figures in their quick size: none may be short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.figures import NAMES, TIMED_NAMES

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
