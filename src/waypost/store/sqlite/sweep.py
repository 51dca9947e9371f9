"""What lives for a while is swept a little with every addition: faster than it grows, never a long stop."""

from __future__ import annotations

from waypost.store.sqlite.book import QueueBook

_SWEEPS = {
    table: f"""
    DELETE FROM {{{table}}} WHERE rowid IN (
        SELECT rowid FROM {{{table}}} INDEXED BY {{{table}:until}} WHERE until_ms <= ? ORDER BY until_ms LIMIT ?)"""
    for table in ("window", "result", "arrival", "waiter", "ending")
}


def sweep(book: QueueBook, table: str, added: int) -> None:
    """Remove what has run out from a table that gains so many rows."""
    book.step.execute(_SWEEPS[table], (book.now, 2 * added + 8))
