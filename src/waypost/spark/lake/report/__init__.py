"""The report: a page with charts, made of a lake's gold tables. Needs pyarrow and deltalake, no Spark and no Java.

from waypost.spark.lake.report import write_report

write_report("lake", "report.html")
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from waypost.errors import InvalidInput

REPORT_NAME = "report.html"


def write_report(lake: str | Path, output: str | Path | None = None) -> Path:
    """Write the page, by default beside the tables; return its path."""
    from waypost.spark.lake.report.gold import open_lake, read
    from waypost.spark.lake.report.page import page

    place = open_lake(str(lake))
    if output is None and not place.files.is_local:
        raise InvalidInput(f"the report of {lake} needs a file on this machine: give it with --output")
    gold = read(place, str(lake))
    path = Path(place.files.path(REPORT_NAME)) if output is None else Path(output)
    text = page(gold, made_ms=time.time_ns() // 1_000_000)
    # Written beside and moved: a reader of the page sees the old one or the new one, never a half.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8", newline="\n")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise InvalidInput(f"the report cannot be written to {path}: {error.strerror or error}") from error
    return path
