"""Runs the part of the set-up that installs Spark, and ends with all that it started when the demo is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waypost.cli.demo.runner import end_with_parent

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_venv.py"

if __name__ == "__main__":
    end_with_parent(group=True)
    sys.exit(subprocess.run([sys.executable, str(SCRIPT), "spark"], stdin=subprocess.DEVNULL, check=False).returncode)
