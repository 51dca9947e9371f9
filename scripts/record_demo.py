"""Records `waypost demo` in a terminal and writes its output as a picture: docs/recording.svg.

    python scripts/record_demo.py [output.svg]

The demo really runs, in a pseudo-terminal; each line appears in the picture when it appeared there, long pauses
shortened. Nothing in the file refers to anything outside of it: no font and no style is fetched. Without animation all
lines are there at once.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "recording.svg"
COLUMNS = 118
#: A pause that is longer is shortened to this; the seconds in the lines stay as they were.
PAUSE_SECONDS_MAX = 2.5
#: How long the whole stands before it begins anew.
HOLD_SECONDS = 8.0
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207)],
)
PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{{label}}">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
{{motion}}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record(command: list[str]) -> list[tuple[float, str]]:
    """What a command writes to a terminal, line by line, each with the second in which it was complete."""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment, cwd=ROOT)
    os.close(child)
    lines: list[tuple[float, str]] = []
    rest = ""
    while True:
        try:
            data = os.read(parent, 65_536)
        except OSError:  # the other end is closed: Linux raises this then
            break
        if not data:
            break
        *whole, rest = (rest + data.decode(errors="replace")).split("\n")
        lines += [(time.monotonic() - start, settled(line)) for line in whole]
    os.close(parent)
    if process.wait() != 0:
        sys.exit(f"record: {' '.join(command)} ended with {process.returncode}")
    return lines


def settled(line: str) -> str:
    """What is left of a line after what was overwritten in it."""
    return line.rstrip("\r").rpartition("\r")[2].replace("\033[K", "")


def shortened(moments: list[float]) -> list[float]:
    """The same moments with no long pause between them."""
    kept: list[float] = []
    last = 0.0
    for at in moments:
        kept.append((kept[-1] if kept else 0.0) + min(at - last, PAUSE_SECONDS_MAX))
        last = at
    return kept


def render(lines: list[tuple[float, str]], title: str) -> str:
    """The lines as a picture that plays them again."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for _, line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    picture = console.export_svg(title=title, theme=THEME, code_format=PAGE, unique_id="waypost")
    moments = shortened([at for at, _ in lines])
    whole = moments[-1] + HOLD_SECONDS
    motion = ["@media (prefers-reduced-motion: no-preference) {"]
    for number, at in enumerate(moments):
        share = 100 * at / whole
        motion.append(f".w{number} {{ animation: w{number} {whole:.1f}s infinite; }}")
        motion.append(
            f"@keyframes w{number} {{ 0%, {share:.2f}% {{ opacity: 0; }} {share + 0.01:.2f}%, 100% {{ opacity: 1; }} }}"
        )
    motion.append("}")
    marked = re.sub(
        r'<text class="(waypost-r\d+)"([^>]*clip-path="url\(#waypost-line-(\d+)\)")', r'<text class="\1 w\3"\2', picture
    )
    return marked.replace("{motion}", "\n".join(motion)).replace("{label}", title)


def main() -> None:
    """Record, and write the picture."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    command = [sys.executable, "-m", "waypost.cli.main", "demo"]
    lines = [(0.0, "\033[1m$ waypost demo\033[0m"), *record(command)]
    output.write_text(render(lines, "waypost demo: a worker is killed and nothing is lost"), encoding="utf-8")
    print(f"{output}: {len(lines)} lines, {lines[-1][0]:.0f} seconds, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
