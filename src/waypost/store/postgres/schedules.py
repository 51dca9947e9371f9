"""The verbs of schedules, leaders and promotion, as functions of the database, and the reading of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from waypost.identity import Operation
from waypost.message import Elected, Fired, Promoted, Published, Saved, ScheduleList, StoredSchedule
from waypost.policy import PRIORITY_DEFAULT
from waypost.store.port import Call, Draft, FireStep, Woken
from waypost.store.postgres.migrating import Names
from waypost.store.postgres.statement import (
    BYTES,
    INT2,
    TEXT,
    Also,
    Parameter,
    PostgresCall,
    array_of_data,
    array_of_smalls,
    array_of_text,
    data,
    flag,
    nothing,
    number,
    one,
    read_published,
    rows_of,
    text,
)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

T = TypeVar("T")

COLUMNS = (
    "status, at_ms, wake, (s).key, (s).version, (s).spec, (s).paused, (s).next_ms, (s).due_ms, (s).fires, (s).missed, "
    "(s).last_ms"
)
_promoted_reply = msgspec.json.Decoder(tuple[int, int, int, int | None, list[str], Also | None]).decode
_elected_reply = msgspec.json.Decoder(tuple[str, int, int]).decode


def _schedule(row: tuple[Any, ...]) -> StoredSchedule | None:
    key, version, spec, paused, next_ms, due_ms, fires, missed, last_ms = row[3:]
    if key is None:
        return None
    return StoredSchedule(key, version, bytes(spec), paused, next_ms, due_ms, fires, missed, last_ms)


def _drafts(drafts: Sequence[Draft]) -> list[Parameter]:
    """Envelopes, priorities, groups and journal copies: fires have no keys and are never for later."""
    usual = all(draft.priority == PRIORITY_DEFAULT for draft in drafts)
    alone = all(draft.group is None for draft in drafts)
    plain = all(draft.journal_copy is None for draft in drafts)
    return [
        array_of_data([draft.envelope for draft in drafts]),
        nothing(INT2) if usual else array_of_smalls([draft.priority for draft in drafts]),
        nothing(TEXT) if alone else array_of_text([draft.group for draft in drafts]),
        nothing(BYTES) if plain else array_of_data([draft.journal_copy for draft in drafts]),
    ]


class ScheduleVerbs:
    """The part of the store that has to do with schedules."""

    names: Names

    def _now(self) -> Parameter:
        raise NotImplementedError

    def _command(self, verb: str, count: int, columns: str = "") -> bytes:
        raise NotImplementedError

    def _call(self, verb: str, queue: str, parameters: Sequence[Parameter], decode: Callable[[PGresult], T]) -> Call[T]:
        raise NotImplementedError

    def _once(
        self,
        verb: str,
        queue: str,
        operation: Operation,
        parameters: Sequence[Parameter],
        decode: Callable[[PGresult], T],
        *,
        columns: str = "",
    ) -> Call[T]:
        raise NotImplementedError

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def decode(result: PGresult) -> Saved:
            (row,) = rows_of(result)
            return Saved(row[0], _schedule(row))

        parameters = [
            text(queue), text(schedule.key), text(version), number(next_ms), text(schedule.version),
            data(schedule.spec), flag(schedule.paused), number(schedule.next_ms), number(schedule.due_ms),
        ]  # fmt: skip
        command = self._command("save_schedule", len(parameters), COLUMNS)
        return PostgresCall("save_schedule", queue, command, parameters, decode)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        return self._call("remove_schedule", queue, [text(queue), text(key)], lambda result: one(result) == b"\1")

    def schedules(self, queue: str) -> Call[ScheduleList]:
        def decode(result: PGresult) -> ScheduleList:
            head, *rows = rows_of(result)
            found = [_schedule(row) for row in rows]
            return ScheduleList(head[1], [schedule for schedule in found if schedule is not None])

        parameters = [text(queue), self._now()]
        command = self._command("schedules", len(parameters), COLUMNS)
        return PostgresCall("schedules", queue, command, parameters, decode)

    def scheduled(self) -> Call[dict[str, int]]:
        statement = self.names.fill(
            "SELECT q.name, max(s.change) FROM {schedule} s JOIN {queue} q ON q.number = s.queue GROUP BY q.name"
        )
        return PostgresCall("scheduled", "", statement.encode(), (), lambda result: dict(rows_of(result)))

    def schedules_changed(self, queue: str) -> Call[None]:
        return PostgresCall("schedules_changed", queue, b"SELECT NULL WHERE false", (), lambda result: None)

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def decode(result: PGresult) -> Woken[Fired]:
            (row,) = rows_of(result)
            reply = read_published(row[2])
            return Woken(Fired(row[0], row[1], _schedule(row)), reply.wake(queue), reply.also or ())

        parameters = [
            text(step.key), text(step.version), number(step.expected_ms), number(step.last_due_ms),
            number(step.valid_until_ms), number(step.last_ms), number(step.missed), number(step.next_ms),
            number(step.due_ms), *_drafts(drafts),
        ]  # fmt: skip
        return self._once("fire_schedule", queue, operation, parameters, decode, columns=COLUMNS)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(result: PGresult) -> Woken[Published | None]:
            found = one(result)
            if found is None:
                return Woken(None, {})
            reply = read_published(found)
            return Woken(Published(draft.id, "queued", queue), reply.wake(queue), reply.also or ())

        return self._once("trigger_schedule", queue, operation, [text(key), *_drafts([draft])], decode)

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def decode(result: PGresult) -> Woken[Promoted]:
            promoted, depth, lag, next_due, names, also = _promoted_reply(one(result) or b"")
            return Woken(Promoted(promoted, depth, lag, next_due), {queue: names} if names else {}, also or ())

        return self._call("promote", queue, [text(queue), self._now()], decode)

    # ---- leaders ---------------------------------------------------------------------------------------------

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        parameters = [text(role), self._now(), text(name), number(ttl_ms)]
        return self._call("elect", "", parameters, lambda result: Elected(*_elected_reply(one(result) or b"")))

    def resign(self, role: str, name: str) -> Call[bool]:
        return self._call("resign", "", [text(role), self._now(), text(name)], lambda result: one(result) == b"\1")
