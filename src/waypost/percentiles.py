"""Percentiles from histograms with logarithmic buckets: each is within half a percent of the value that it stands for.

Histograms of minutes, queues and days merge by adding counts, so a percentile of any span is read from their sum. This
module needs nothing but Python: what Spark wrote can be read without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from waypost.errors import InvalidInput

#: Each bucket ends one percent above its beginning.
GROWTH = 1.01
#: Where 0 goes, which has no logarithm.
BUCKET_OF_ZERO = -1


def bucket_of(value: int) -> int:
    """The bucket of a number of milliseconds."""
    return BUCKET_OF_ZERO if value < 1 else math.floor(math.log(value) / math.log(GROWTH))


def value_of(bucket: int) -> float:
    """What a bucket stands for: the middle of it."""
    return 0.0 if bucket == BUCKET_OF_ZERO else GROWTH ** (bucket + 0.5)


def merged(histograms: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Counts by bucket, from any number of (bucket, count)."""
    counts: dict[int, int] = {}
    for bucket, count in histograms:
        counts[bucket] = counts.get(bucket, 0) + count
    return counts


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """The value that this share of all values (0.99) does not exceed; None if there are none."""
    if not 0 <= share <= 1:
        raise InvalidInput(f"a percentile is asked for as a share from 0 to 1, such as 0.99, not {share!r}")
    total = sum(counts.values())
    if total == 0:
        return None
    rank = max(1, math.ceil(share * total))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return value_of(bucket)
    raise AssertionError("counts are not negative")
