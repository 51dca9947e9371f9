"""Writes the list of commands and exit codes in docs/reference/command-line.md from the parser itself.

    python -m scripts.command_reference

A test fails while the page and the parser differ.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from waypost.cli.exit_codes import CODES
from waypost.cli.main import GROUPS, make_parser

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
BEGIN = "<!-- from here on written by scripts/command_reference.py -->"
#: Described once for all commands.
SHARED = {"--help", "--url", "--namespace", "--schema", "--json"}


def leaf_parsers(found: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return the subcommands of a command, by their full names."""
    inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path, found
    for action in inner:
        for name, one in action.choices.items():
            yield from leaf_parsers(one, f"{path} {name}")


def section(path: str, found: argparse.ArgumentParser) -> Iterator[str]:
    """Return the section of one command."""
    yield f"### `waypost {path}`\n\n{plain((found.description or '').replace(chr(10), ' '))}\n"
    rows = []
    for action in found._actions:
        names = action.option_strings
        if set(names) & SHARED or action.dest == "url":
            continue
        value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ())) or action.dest
        value = value if isinstance(value, str) else " ".join(value)
        text = f"{names[-1]} {value}".strip() if names else value
        rows.append(f"| `{text.replace('|', chr(92) + '|')}` | {plain(action.help or '')} |")
    if rows:
        yield "| argument | what |\n|---|---|\n" + "\n".join(rows) + "\n"
    notes = []
    options = found._option_string_actions
    if "--url" in options:
        notes.append("Takes the URL and the options of a store.")
    if "--json" in options:
        notes.append(f"`--json`: {plain(options['--json'].help or '')}.")
    if notes:
        yield " ".join(notes) + "\n"
    examples = re.sub(r"^examples?:\s*", "", found.epilog or "").strip()
    if examples:
        yield "```sh\n" + "\n".join(line.strip() for line in examples.splitlines()) + "\n```\n"


def plain(text: str) -> str:
    """Return a text without markup characters."""
    return text.replace("|", r"\|").replace("*", r"\*").strip()


def written() -> str:
    """Return the generated part of the page."""
    top = make_parser()
    parts = [BEGIN, "## Exit codes\n\n| code | meaning |\n|---|---|"]
    parts[-1] += "".join(f"\n| {code} | {text} |" for code, text in CODES.items()) + "\n"
    for title, names in GROUPS.items():
        known = [name for name in names if name in top.listing.choices]
        if not known:
            continue
        parts.append(f"## {title.capitalize()}\n")
        for name in known:
            for path, found in leaf_parsers(top.listing.choices[name], name):
                parts += section(path, found)
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    kept = PAGE.read_text().partition(BEGIN)[0]
    PAGE.write_text(kept + written())


if __name__ == "__main__":
    main()
