"""`waypost pipeline …` in a process that kills itself at a chosen commit, like a machine that loses power.

python -m tests.spark.killed_pipeline before:4 pipeline run --store … --lake …
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from waypost.cli.main import main
from waypost.spark.delta.table import DeltaFolder

COMMIT = DeltaFolder.try_commit
COUNT = itertools.count(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    when, _, number = sys.argv[1].partition(":")

    def commit(*arguments: Any, **options: Any) -> bool:
        is_point = number == str(next(COUNT))
        if is_point and when == "before":
            die()
        done = COMMIT(*arguments, **options)
        if is_point:
            die()
        return done

    DeltaFolder.try_commit = commit  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
