"""The checks of `waypost doctor` that are the same on every store."""
