"""Stores: one contract (`port`), one reference model (`memory`), and its translations."""
