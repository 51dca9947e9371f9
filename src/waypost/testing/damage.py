"""Damage on purpose: take a message out of all places in which a store could find it, behind the store's back."""

from __future__ import annotations

from typing import Any

from waypost.store.port import Call

#: A state that no message has.
NO_STATE = 7


def strand(store: Any, queue: str, message_id: str) -> Call[Any]:
    """The call that makes a message unreachable: its body stays, and no claim, listing or end can find it."""
    match store.kind:
        case "memory":
            return _strand_in_memory(store, queue, message_id)
        case "sqlite":
            return _strand_in_sqlite(queue, message_id)
        case "valkey":
            return _strand_in_valkey(store, queue, message_id)
        case _:
            return _strand_in_postgres(store, queue, message_id)


def _strand_in_memory(store: Any, queue: str, message_id: str) -> Call[Any]:
    from waypost.store.memory.store import ModelCall

    def step(now: int) -> None:
        store._queues[queue].messages[message_id].state = NO_STATE

    return ModelCall("damage", step)


def _strand_in_sqlite(queue: str, message_id: str) -> Call[Any]:
    from waypost.store.sqlite.step import SqliteCall, Step

    def step(step: Step) -> None:
        number = step.book(queue).number
        step.execute("UPDATE {message} SET state = ? WHERE queue = ? AND id = ?", (NO_STATE, number, message_id))

    return SqliteCall("damage", step)


def _strand_in_valkey(store: Any, queue: str, message_id: str) -> Call[Any]:
    from waypost.store.valkey.command import ValkeyCall, command
    from waypost.store.valkey.scripts import Script

    keys = store.keys_of(queue)
    places = [keys[place] for place in (3, 4, 5, 7, 8)]
    script = Script("damage", "for i = 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[1]) end")
    packed = command(b"EVALSHA", script.sha, b"%d" % len(places), *places, message_id.encode())
    return ValkeyCall("damage", queue, packed, lambda reply: None, script, place=places[0])


def _strand_in_postgres(store: Any, queue: str, message_id: str) -> Call[Any]:
    from waypost.store.postgres.statement import PostgresCall, text

    statement = store.names.fill(
        f"UPDATE {{message}} SET state = {NO_STATE} "
        "WHERE queue = (SELECT q.number FROM {queue} q WHERE q.name = $1) AND id = $2"
    )
    return PostgresCall("damage", queue, statement.encode(), [text(queue), text(message_id)], lambda result: None)
