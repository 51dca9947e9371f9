"""Runs the part of the set-up that brings Spark, and ends it with all that it started when the input ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_venv.py"


def end_with_the_teller() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_teller, daemon=True).start()
    sys.exit(subprocess.run([sys.executable, str(SCRIPT), "spark"], stdin=subprocess.DEVNULL, check=False).returncode)
