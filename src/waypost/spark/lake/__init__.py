"""The lake: the history of a store as bronze, silver and gold tables, with an audit and a report.

Importing this package loads neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypost.spark.lake.ingest import Ingest
    from waypost.spark.lake.lake import Lake
    from waypost.spark.lake.pipeline import Pipeline

__all__ = ["Ingest", "Lake", "Pipeline"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(f"{__name__}.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
