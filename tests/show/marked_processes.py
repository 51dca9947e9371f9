"""Find the processes that a program left: those with a mark in their environment, whatever their parent is.

A Valkey server overwrites its environment. One without a parent that began after the mark was made counts as left.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

VARIABLE = "WAYPOST_TEST_MARK"
SECONDS_MAX = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def new_mark() -> dict[str, str]:
    """Return an environment with a mark that child processes inherit."""
    return os.environ | {VARIABLE: f"{uuid.uuid4().hex} {time.clock_gettime(time.CLOCK_BOOTTIME):.2f}"}


def carriers(environment: dict[str, str]) -> dict[int, str]:
    """Return the running processes that have the mark, with their command lines."""
    wanted = f"{VARIABLE}={environment[VARIABLE]}".encode()
    began = float(environment[VARIABLE].split()[1])
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") or _is_lost_server(entry, began):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:
                    found[int(entry.name)] = command
        except OSError:
            continue  # it ended meanwhile
    return found


def _is_lost_server(entry: Path, began: float) -> bool:
    name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(") ")
    parent, started = int(fields.split()[1]), int(fields.split()[19]) / TICKS
    return name in ("valkey-server", "redis-server") and parent == 1 and started >= began


def left_behind(environment: dict[str, str]) -> dict[int, str]:
    """Return the processes that are still there after all had time to end."""
    deadline = time.monotonic() + SECONDS_MAX
    while (found := carriers(environment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
