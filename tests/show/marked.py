"""Finds what a program left behind: every process that carries a mark in its environment, whatever its parent is."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

VARIABLE = "WAYPOST_TEST_MARK"
PATIENCE_SECONDS = 60.0


def new_mark() -> dict[str, str]:
    """An environment that everything started with it inherits."""
    return os.environ | {VARIABLE: uuid.uuid4().hex}


def carriers(environment: dict[str, str]) -> dict[int, str]:
    """The processes that have the mark, with their command lines. What has ended is none."""
    wanted = f"{VARIABLE}={environment[VARIABLE]}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:
                    found[int(entry.name)] = command
        except OSError:
            continue  # it ended while we looked
    return found


def left_behind(environment: dict[str, str]) -> dict[int, str]:
    """What is still there after all had time to end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := carriers(environment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
