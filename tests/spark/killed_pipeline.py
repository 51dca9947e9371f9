"""`waypost pipeline …` in a process that kills itself at a chosen point, like a machine that loses power.

python -m tests.spark.killed_pipeline POINT pipeline run --store … --lake …
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from waypost.cli.main import main
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline


def die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_the_write(lake: Lake, *arguments: Any, **options: Any) -> str:
    WRITE(lake, *arguments, **options)
    die()
    return ""


WRITE = Lake.write

if __name__ == "__main__":
    point = sys.argv[1]
    if point == "silver":
        # Everything is in bronze, nothing of it in silver.
        Pipeline.silver = lambda self, spark: die() if self.lake.state.bronze_batch >= 0 else None  # type: ignore[method-assign]
        Pipeline.gold = lambda self, spark: None  # type: ignore[method-assign]
    elif point == "compaction":
        # Files are compacted, and the table does not list the result yet.
        Lake.write = die_after_the_write  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[2:]))
