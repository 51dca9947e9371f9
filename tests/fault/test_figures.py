"""The fault figures in their quick size: none may be short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_quick_figure_is_short() -> None:
    command = [sys.executable, "-m", "tests.fault.figures", "--quick", "--counts", "--seed", "1"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert "SHORT" not in ran.stdout, ran.stdout
    assert ran.stdout.count(") ok") >= 10
    assert ran.returncode == 0, ran.stderr
