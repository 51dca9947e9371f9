"""Spark as a worker: claim a batch on executors, run a function, commit its output, settle."""
