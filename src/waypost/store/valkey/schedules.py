"""The verbs of schedules, leaders and promotion, as scripts with their arguments, and the reading of their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, TypeVar

from waypost.identity import Operation
from waypost.message import (
    Elected,
    Fired,
    FireStatus,
    Promoted,
    Published,
    PublishStatus,
    Saved,
    ScheduleList,
    StoredSchedule,
)
from waypost.store.port import Call, Draft, FireStep, Woken, check_chunk
from waypost.store.valkey import packing
from waypost.store.valkey.command import ValkeyCall, command, evalsha_head, part
from waypost.store.valkey.polling import leader_key
from waypost.store.valkey.scripts import script

T = TypeVar("T")

#: next, due and last instant (0: none), fires, missed, paused, length of the version.
HEAD = Struct(">QQQQQBB")
FIRE_STATUS: dict[bytes, FireStatus] = {b"f": "fired", b"c": "conflict", b"e": "early", b"s": "stale"}


def pack_schedule(schedule: StoredSchedule) -> bytes:
    """A schedule as its hash keeps it, under its key."""
    version = schedule.version.encode()
    head = HEAD.pack(
        schedule.next_ms or 0, schedule.due_ms or 0, schedule.last_ms or 0, schedule.fires, schedule.missed,
        schedule.paused, len(version),
    )  # fmt: skip
    return head + version + schedule.spec


def unpack_schedule(key: str, data: bytes) -> StoredSchedule:
    """The same, back."""
    next_ms, due_ms, last_ms, fires, missed, paused, length = HEAD.unpack_from(data)
    version = data[HEAD.size : HEAD.size + length].decode()
    return StoredSchedule(
        key, version, bytes(data[HEAD.size + length :]), paused == 1, next_ms or None, due_ms or None, fires, missed,
        last_ms or None,
    )  # fmt: skip


def _number(value: int | None) -> bytes:
    return b"" if value is None else b"%d" % value


class ScheduleVerbs:
    """The part of the store that has to do with schedules."""

    namespace: str
    clock: Callable[[], int] | None

    def _call(
        self, verb: str, queue: str, operation: Operation | None, arguments: Sequence[bytes], decode: Callable[[Any], T]
    ) -> Call[T]:
        raise NotImplementedError

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def decode(reply: Any) -> Saved:
            found = unpack_schedule(schedule.key, reply[1]) if reply[1] else None
            return Saved("saved" if reply[0] == b"1" else "conflict", found)

        arguments = [schedule.key.encode(), (version or "").encode(), _number(next_ms), pack_schedule(schedule)]
        return self._call("save_schedule", queue, None, arguments, decode)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        place = f"{{{self.namespace}:{queue}}}:schedules".encode()
        return ValkeyCall("remove_schedule", queue, command(b"HDEL", place, key.encode()), bool, key=place, place=place)

    def schedules(self, queue: str) -> Call[ScheduleList]:
        def decode(reply: Any) -> ScheduleList:
            found = [unpack_schedule(reply[at].decode(), reply[at + 1]) for at in range(1, len(reply), 2)]
            return ScheduleList(reply[0], sorted(found, key=lambda schedule: schedule.key))

        return self._call("schedules", queue, None, [], decode)

    @property
    def _scheduled_key(self) -> bytes:
        return f"{self.namespace}:scheduled".encode()

    def scheduled(self) -> Call[dict[str, int]]:
        def decode(reply: Any) -> dict[str, int]:
            if isinstance(reply, dict):
                return {name.decode(): int(number) for name, number in reply.items()}
            return {reply[at].decode(): int(reply[at + 1]) for at in range(0, len(reply), 2)}

        key = self._scheduled_key
        return ValkeyCall("scheduled", "", command(b"HGETALL", key), decode, key=key, place=key)

    def schedules_changed(self, queue: str) -> Call[None]:
        # The list of queues that have schedules lies in another slot than they do, so it cannot be part of their step.
        key = self._scheduled_key
        return ValkeyCall(
            "schedules_changed", queue, command(b"HINCRBY", key, queue.encode(), b"1"), lambda reply: None, key=key,
            place=key,
        )  # fmt: skip

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def decode(reply: Any) -> Woken[Fired]:
            found = unpack_schedule(step.key, reply[2]) if reply[2] else None
            return Woken(Fired(FIRE_STATUS[reply[0]], int(reply[1]), found), *packing.unpack_woken(queue, reply[3:]))

        check_chunk(drafts)
        arguments = [
            step.key.encode(), step.version.encode(), _number(step.expected_ms), _number(step.last_due_ms),
            _number(step.valid_until_ms), _number(step.last_ms), _number(step.missed), _number(step.next_ms),
            _number(step.due_ms), *(packing.pack_routed(draft) for draft in drafts),
        ]  # fmt: skip
        return self._call("fire_schedule", queue, operation, arguments, decode)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(reply: Any) -> Woken[Published | None]:
            if not reply:
                return Woken(None, {})
            status: PublishStatus = "delayed" if reply[0] == b"d" else "queued"
            return Woken(Published(draft.id, status, queue), *packing.unpack_woken(queue, reply[1:]))

        arguments = [key.encode(), packing.pack_routed(draft)]
        return self._call("trigger_schedule", queue, operation, arguments, decode)

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def decode(reply: Any) -> Woken[Promoted]:
            promoted, depth, lag, next_due = reply[:4]
            due = None if next_due < 0 else next_due
            return Woken(Promoted(promoted, depth, lag, due), *packing.unpack_woken(queue, reply[4:]))

        return self._call("promote", queue, None, [], decode)

    # ---- leaders ---------------------------------------------------------------------------------------------

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        def decode(reply: Any) -> Elected:
            return Elected(reply[0].decode(), reply[1], reply[2])

        return self._elect("elect", role, name, ttl_ms, decode)

    def resign(self, role: str, name: str) -> Call[bool]:
        return self._elect("resign", role, name, 0, lambda reply: reply == b"1")

    def _elect(self, action: str, role: str, name: str, ttl_ms: int, decode: Callable[[Any], T]) -> Call[T]:
        text = script("elect")
        place = leader_key(self.namespace, role)
        number, head = evalsha_head(text, [place])
        given = (_number(self.clock() if self.clock else None), action.encode(), name.encode(), b"%d" % ttl_ms)
        packed = b"*%d\r\n" % (number + len(given)) + head + b"".join([part(value) for value in given])
        return ValkeyCall(action, "", packed, decode, text, place=place)
