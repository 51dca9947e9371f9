"""`waypost completion`: a completion script for a shell."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.options import add_command
from waypost.cli.output import write
from waypost.errors import MissingExtra


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "completion", run, "print a completion script for a shell", store=False, json_text=None,
        examples=("waypost completion bash > ~/.local/share/bash-completion/completions/waypost",
                  "waypost completion zsh > ~/.zfunc/_waypost"),
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh"), help="which shell")


def run(options: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    try:
        import shtab
    except ImportError:
        raise MissingExtra('completion needs shtab, which is not installed: pip install "waypost[cli]"') from None
    from waypost.cli.main import make_parser

    write(shtab.complete(make_parser(), options.shell))
    return 0
