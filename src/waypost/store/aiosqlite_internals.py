"""What waypost uses of aiosqlite that is private to it. No other module touches such names.

Checked with aiosqlite 0.20 to 0.22. A connection of aiosqlite is a thread with a `sqlite3.Connection`: `_conn` is that,
and `_execute(function, …)` calls a function in the thread. With the public methods each statement of a step would be a
switch of threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from waypost.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")


def is_aiosqlite(connection: object) -> bool:
    """Whether this is a connection of aiosqlite, which need not be installed."""
    module = sys.modules.get("aiosqlite")
    return module is not None and isinstance(connection, module.Connection)


def connection_of(connection: Any) -> sqlite3.Connection:
    """Return the connection of sqlite3 behind one of aiosqlite. Only `run_in_thread` may use it to execute."""
    import sqlite3

    try:
        inner = connection._conn
    except ValueError:
        inner = None
    except AttributeError as error:
        raise _unknown_release(error) from None
    if not isinstance(inner, sqlite3.Connection):
        raise ConfigurationError("this connection of aiosqlite is not open: await it, or use `async with`")
    return inner


async def run_in_thread(connection: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in the thread of a connection."""
    try:
        execute = connection._execute
    except AttributeError as error:
        raise _unknown_release(error) from None
    result: T = await execute(function, *arguments)
    return result


def _unknown_release(error: AttributeError) -> ConfigurationError:
    return ConfigurationError(
        f"this release of aiosqlite is not known to waypost ({error}): install aiosqlite>=0.20,<0.23, or use a sync "
        "connection and Waypost"
    )
