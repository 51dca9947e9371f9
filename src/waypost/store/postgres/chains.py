"""The verbs of chains and of waiting: a step here spans queues, so nothing is ever on its way between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from waypost.message import ChainState, Continuation, Notice, Watched
from waypost.policy import WAITER_TTL_MS
from waypost.store.port import Call, Woken
from waypost.store.postgres.constants import STATES
from waypost.store.postgres.migrating import Names
from waypost.store.postgres.statement import Parameter, PostgresCall, number, one, rows_of, text

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

_NOTHING = b"SELECT NULL WHERE false"
_STATE_OF = {number: state for state, number in STATES.items()}


class ChainVerbs:
    """The part of the store that has to do with chains, and with those who wait for an end."""

    names: Names

    def _now(self) -> Parameter:
        raise NotImplementedError

    def _command(self, verb: str, count: int, columns: str = "") -> bytes:
        raise NotImplementedError

    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]:
        return PostgresCall("outgoing", queue, _NOTHING, (), lambda result: [])

    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]:
        return PostgresCall("forwarded", queue, _NOTHING, (), lambda result: None)

    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]:
        return PostgresCall("arrive", queue, _NOTHING, (), lambda result: Woken(None, {}))

    def result(self, queue: str, message_id: str) -> Call[bytes | None]:
        statement = self.names.fill(
            "SELECT r.data FROM {result} r JOIN {queue} q ON q.number = r.queue "
            "WHERE q.name = $1 AND r.id = $2 AND r.until_ms > {clock}($3)"
        )
        return PostgresCall("result", queue, statement.encode(), (text(queue), text(message_id), self._now()), one)

    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]:
        def decode(result: PGresult) -> Watched:
            for state, how, reason, error_type, error, data in rows_of(result):
                return Watched(
                    None if state is None else _STATE_OF[state], how, reason, error_type, error,
                    None if data is None else bytes(data),
                )  # fmt: skip
            return Watched(None)

        parameters = self._watching(queue, message_id, waiter)
        return PostgresCall("watch", queue, self._command("watch", len(parameters), "*"), parameters, decode)

    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]:
        def decode(result: PGresult) -> ChainState:
            for still_open, member, failed, last in rows_of(result):
                return ChainState(True, still_open, None if failed is None else (member, failed), last)
            return ChainState(False)

        parameters = self._watching(queue, message_id, waiter)
        return PostgresCall(
            "watch_chain", queue, self._command("watch_chain", len(parameters), "*"), parameters, decode
        )

    def _watching(self, queue: str, message_id: str, waiter: str | None) -> list[Parameter]:
        return [text(queue), self._now(), text(message_id), text(waiter), number(WAITER_TTL_MS)]
