"""Benchmarks, beside the ceiling of each store: each module prints one JSON object per figure."""
