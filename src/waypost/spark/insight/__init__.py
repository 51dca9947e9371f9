"""Answers from the history of a lake: what other settings would do (`simulate`), and what to change (`advice`).

Importing this package loads neither pyspark nor pyarrow.
"""
