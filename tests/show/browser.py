"""A real browser without a window: what it made of a page, and what it complained of."""

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
class Looked:
    """A page after its scripts ran: the document, and what was written to the console."""

    document: str
    console: tuple[str, ...]


def look_at(path: Path, home: Path, *, width: int = 1280, dark: bool = False) -> Looked:
    """Open a file in the browser, with no network, and read it back."""
    command = [
        PROGRAM, "--dump-dom", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}", f"--window-size={width},1600",
        f"--virtual-time-budget={VIRTUAL_MS}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # it refuses to have one as root
    ran = subprocess.run(
        [*command, path.resolve().as_uri()], capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    return Looked(ran.stdout, tuple(line for line in ran.stderr.splitlines() if "CONSOLE" in line))
