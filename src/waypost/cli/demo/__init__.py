"""The demos' one shop and the steps that they share. `waypost demo` runs on SQLite, `make demo` on real servers."""
