"""`waypost pipeline report`: the page with the charts, made of a lake's gold tables."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write one HTML page with charts of what the pipeline found",
        description="Write one HTML page with charts of a lake's gold tables. It works offline; Spark is not needed.",
        epilog="example: waypost pipeline report --lake lake --output report.html",
    )
    parser.add_argument("--lake", required=True, metavar="DIR", help="the lake that `waypost pipeline run` fills")
    parser.add_argument("--output", metavar="FILE", help="where to write it (report.html in the lake)")
    parser.add_argument("--json", action="store_true", help="tell its path as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from waypost.errors import WaypostError
    from waypost.spark.report import write_report

    try:
        path = write_report(options.lake, options.output)
    except WaypostError as error:
        sys.stderr.write(f"waypost: {error}\n")
        return 1
    sys.stdout.write((json.dumps({"report": str(path)}) if options.json else str(path)) + "\n")
    return 0
