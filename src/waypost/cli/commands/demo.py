"""`waypost demo`: twenty seconds on SQLite in which a worker is killed and no message is lost."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from waypost.cli.exit_codes import FOUND, INTERRUPTED, USAGE, CommandError
from waypost.cli.options import add_command


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "demo", run, "show in twenty seconds that a killed worker loses no message", store=False,
        json_text="the result as one JSON object; the steps go to stderr",
        more="On SQLite: orders, a duplicate, a timer, a worker that is killed, a dead letter, a schedule; "
        "then where every message went. No server and no other package is needed.",
        examples=("waypost demo", "waypost demo --directory shop && waypost stats --url sqlite:///shop/demo.db"),
    )  # fmt: skip
    parser.add_argument("--directory", metavar="DIR", help="keep the store here (else it is temporary)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from waypost.cli.demo.runner import DemoOutput, DemoTimeout
    from waypost.cli.demo.sqlite_demo import run_demo

    output = DemoOutput(sys.stderr if options.json else sys.stdout)
    try:
        if options.directory is None:
            with tempfile.TemporaryDirectory(prefix="waypost-demo-") as temporary:
                result = run_demo(Path(temporary), output)
        else:
            directory = Path(options.directory)
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "demo.db").exists():
                raise CommandError(f"{directory} already contains a demo.db; choose another directory", USAGE)
            result = run_demo(directory, output)
            output.line(f"kept: sqlite:///{directory / 'demo.db'}")
    except KeyboardInterrupt:
        output.bad("interrupted; the workers have ended")
        return INTERRUPTED
    except (DemoTimeout, OSError) as error:
        raise CommandError(str(error)) from error
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["unaccounted"] == result["unexplained"] == 0 else FOUND
