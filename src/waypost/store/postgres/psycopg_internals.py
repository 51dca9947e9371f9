"""The parts of psycopg that waypost uses and that are private or undocumented. No other module uses such names.

Checked with psycopg 3.2.1 and 3.3.8, which bound the extras in pyproject.toml. `make oldest` runs the tests with the
oldest version, `make test` with the one of constraints.txt. When a new version comes:

- `psycopg/generators.py`: `send(pgconn)` yields until everything is written, `fetch_many(pgconn)` until all results
  have arrived, and returns them. Both yield a `Wait` (`psycopg/waiting.py`) and are sent what is ready, or 0 after a
  while.
- `psycopg/connection.py`: `connection.wait(generator)` drives such a generator, `connection.lock` excludes others.
- `psycopg/_connection_base.py`: `_num_transactions` counts the open `transaction()` blocks.

`pgconn` (`psycopg.pq`) is described in psycopg's manual.
"""

from __future__ import annotations

from typing import Any

from psycopg.generators import fetch_many, send
from psycopg.waiting import Wait

__all__ = ["Wait", "count_transaction_blocks", "fetch_many", "send"]


def count_transaction_blocks(connection: Any) -> int | None:
    """Return how many `with connection.transaction()` blocks are open; None if psycopg does not count them."""
    count: int | None = getattr(connection, "_num_transactions", None)
    return count
