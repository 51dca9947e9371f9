"""Errors of a data source as one sentence: Spark quotes the whole traceback of a Python process otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from waypost.errors import OutcomeUnknown, StoreFailed, StoreFull, StoreUnavailable, WaypostError

#: Spark's own variable for `spark.sql.execution.pyspark.udf.hideTraceback.enabled`.
HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
#: Errors after which another attempt of the task may succeed.
TRANSIENT: Final = (StoreUnavailable, OutcomeUnknown, StoreFull, StoreFailed)


def is_permanent(error: BaseException) -> bool:
    """Return whether a repetition would end with the same error: the rows, the options or the queue are in the way."""
    return isinstance(error, WaypostError) and not isinstance(error, TRANSIENT)


def is_spark_process() -> bool:
    """Return whether Spark started this process to plan, read or write. It ends after an error."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


@contextmanager
def short_errors() -> Iterator[None]:
    """Let Spark show an error of waypost without the traceback of its process."""
    try:
        yield
    except WaypostError:
        if is_spark_process():
            os.environ[HIDE_TRACEBACK] = "1"
        raise
