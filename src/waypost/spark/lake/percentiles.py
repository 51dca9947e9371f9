"""Percentiles of the histograms of a lake."""

from waypost.percentiles import BUCKET_OF_ZERO, GROWTH, bucket_of, merged, percentile, value_of

__all__ = ["BUCKET_OF_ZERO", "GROWTH", "bucket_of", "merged", "percentile", "value_of"]
