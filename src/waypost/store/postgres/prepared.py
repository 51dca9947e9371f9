"""The prepared statements of a connection: the server parses and plans such a statement once, not at each call.

A pooler that assigns a server process to several clients may send the next call to a server process that does not know
the statement. That process refuses it before anything runs, so the call is sent again in full, and this client prepares
no more statements. The name of a statement is made from its text and the types of its values: clients that share a
server process use the same name for the same statement.
"""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

#: A statement is prepared when a connection runs it for this time: to prepare is a round trip of its own.
USES = 5
#: The server process does not know the statement, or its result has changed since: nothing was run.
NOT_PREPARED = ("26000", "0A000")
#: Another client has prepared it on the same server process.
ALREADY_PREPARED = "42P05"


#: A verb, its text, and the types of its values.
Statement = tuple[str, bytes, tuple[int, ...]]


class Prepared:
    """The statements of one connection."""

    __slots__ = ("_names", "_owner", "_uses")

    def __init__(self, owner: PreparedByConnection) -> None:
        self._owner = owner
        self._names: dict[Statement, bytes] = {}
        self._uses: dict[Statement, int] = {}

    def name(self, statement: Statement) -> bytes | None:
        """Return the name of a statement that is prepared, or None."""
        return None if self._owner.refused else self._names.get(statement)

    def is_due(self, statement: Statement) -> bool:
        """Count one more use of a statement that is not prepared; return whether to prepare it now."""
        if self._owner.refused:
            return False
        uses = self._uses[statement] = self._uses.get(statement, 0) + 1
        return uses >= USES

    def add(self, statement: Statement) -> None:
        """Record that the server has prepared this statement."""
        self._names[statement] = name_of(statement)

    def refuse(self) -> None:
        """Prepare nothing from now on, here and on the other connections of this client."""
        self._owner.refused = True


class PreparedByConnection:
    """The prepared statements of all connections of a client."""

    __slots__ = ("_are_ours", "_known", "refused")

    def __init__(self, *, are_ours: bool) -> None:
        #: Whether we make the connections. Connections of a caller's pool may have preparing switched off.
        self._are_ours = are_ours
        self._known: WeakKeyDictionary[Any, Prepared] = WeakKeyDictionary()
        #: A server process did not know a statement, or the caller has preparing switched off.
        self.refused = False

    def of(self, connection: Any) -> Prepared:
        """Return the statements of a connection."""
        known = self._known.get(connection)
        if known is None:
            if not self._are_ours and connection.prepare_threshold is None:
                self.refused = True
            known = self._known[connection] = Prepared(self)
        return known


def name_of(statement: Statement) -> bytes:
    """Return the name under which a statement is prepared."""
    verb, command, kinds = statement
    digest = hashlib.sha256(command + str(kinds).encode()).hexdigest()[:32]
    return f"waypost_{verb}_{digest}".encode()
