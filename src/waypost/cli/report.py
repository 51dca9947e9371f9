"""`waypost pipeline report`: the page with the charts, made of a lake's gold tables."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.options import add_command
from waypost.cli.output import write, write_json


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "report", run, "write one HTML page with charts of what the pipeline found", store=False,
        json_text="tell its path as one JSON object", more="It works offline, and Spark is not needed.",
        examples=("waypost pipeline report --lake lake --output report.html",),
    )  # fmt: skip
    parser.add_argument("--lake", required=True, metavar="DIR", help="the lake that `waypost pipeline run` fills")
    parser.add_argument("--output", metavar="FILE", help="where to write it (report.html in the lake)")


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from waypost.spark.lake.report import write_report

    path = str(write_report(options.lake, options.output))
    if options.json:
        write_json({"report": path})
    else:
        write(path)
    return 0
