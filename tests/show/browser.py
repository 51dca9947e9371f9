"""A real browser without a window: the document of a page after its scripts ran, and its console messages."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "chromium-headless-shell"
#: Scripts and drawing get this much of the browser's own time, which passes as fast as the machine can.
VIRTUAL_MS = 20_000
SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Page:
    """A page after its scripts ran: the document, and what was written to the console."""

    document: str
    console: tuple[str, ...]


def open_page(path: Path, profile: Path, *, width: int = 1280, dark: bool = False) -> Page:
    """Open a file in the browser without network, and return the page."""
    command = [
        PROGRAM, "--dump-dom", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", f"--window-size={width},1600",
        f"--virtual-time-budget={VIRTUAL_MS}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # root cannot use it
    ran = subprocess.run(
        [*command, path.resolve().as_uri()], capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    return Page(ran.stdout, tuple(line for line in ran.stderr.splitlines() if "CONSOLE" in line))
