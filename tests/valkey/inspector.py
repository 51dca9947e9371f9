"""Reads the keys of a namespace as the server has them, and checks that they are consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import redis

from waypost.store.valkey.packing import STATE
from waypost.testing.bench import QUEUE

#: The indexes that hold messages, with the letter of the state there.
PLACES = {"ready": b"R", "due": b"D", "waiting": b"W", "leases": b"L", "dead": b"X"}
ID_BYTES = 24
#: Added to a score of `ready` in the lines of groups: those are compared as bytes, so none is negative.
RANK_OFFSET = 2**50
#: The flag of a message that waits for chains.
BLOCKED = 8

#: Values by key, as Python objects.
Snapshot = dict[str, Any]

_READ: dict[bytes, Callable[[Any, str], Any]] = {
    b"string": lambda pipe, key: pipe.get(key),
    b"hash": lambda pipe, key: pipe.hgetall(key),
    b"zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
    b"set": lambda pipe, key: pipe.smembers(key),
    b"stream": lambda pipe, key: pipe.xrange(key),
}


def _plain(value: Any) -> Any:
    """Return a value with its packed counters as numbers: MessagePack has several forms of a number."""
    if isinstance(value, dict) and b"counts" in value:
        try:
            return {**value, b"counts": msgspec.msgpack.decode(value[b"counts"])}
        except msgspec.DecodeError:
            return value
    return value


class Inside:
    """The keys of one namespace. `client` is any redis-py client of the same server."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        # The stubs of redis-py do not distinguish sync and async clients.
        self.client: Any = client
        self.namespace = namespace

    def key(self, name: str, queue: str = QUEUE) -> str:
        """Return a key of a queue: one of the 17, or a derived one such as `window:<key>`."""
        return f"{{{self.namespace}:{queue}}}:{name}"

    def all_keys(self) -> set[str]:
        """Return every key of the namespace."""
        found = {
            key.decode() for pattern in (f"{{{self.namespace}:*", f"{self.namespace}:*")
            for key in self.client.scan_iter(match=pattern, count=10_000)
        }  # fmt: skip
        return {key for key in found if key.startswith((f"{{{self.namespace}:", f"{self.namespace}:"))}

    def names(self, queue: str = QUEUE) -> set[str]:
        """Return the keys of a queue without its name, derived ones by their kind alone."""
        base = self.key("", queue)
        kinds = (key.removeprefix(base) for key in self.all_keys() if key.startswith(base))
        return {kind.partition(":")[0] for kind in kinds}

    def snapshot(self) -> Snapshot:
        """Return every value except the memory of replies, which is written by calls that change nothing else."""
        keys = sorted(key for key in self.all_keys() if ":operations:" not in key)
        kinds = self._each(keys, lambda pipe, key: pipe.type(key))
        values = self._each(keys, lambda pipe, key: _READ[kinds[key]](pipe, key))
        return {key: sorted(value) if kinds[key] == b"set" else _plain(value) for key, value in values.items()}

    def dumps(self) -> dict[str, bytes]:
        """Return every value in the server's own form, for `restore`."""
        dumped: dict[str, bytes] = self._each(sorted(self.all_keys()), lambda pipe, key: pipe.dump(key))
        return dumped

    def restore(self, dumps: dict[str, bytes]) -> None:
        """Reset the namespace to exactly these values."""
        with self.client.pipeline(transaction=True) as pipe:
            for key in self.all_keys():
                pipe.delete(key)
            for key, value in dumps.items():
                if ":operations:" not in key:
                    pipe.restore(key, 0, value)
            pipe.execute()

    def _each(self, keys: list[str], command: Callable[[Any, str], Any]) -> dict[str, Any]:
        with self.client.pipeline(transaction=False) as pipe:
            for key in keys:
                command(pipe, key)
            return dict(zip(keys, pipe.execute(), strict=True))

    # ---- memory ------------------------------------------------------------------------------------------

    def bytes_of(self, key: str) -> int:
        """Return the bytes of one key with all its members."""
        size: int | None = self.client.memory_usage(key, samples=0)
        return size or 0

    def bytes_used(self, queue: str = QUEUE, *, without: tuple[str, ...] = ()) -> int:
        """Return the bytes of a queue with its derived keys."""
        base = self.key("", queue)
        return sum(
            self.bytes_of(key)
            for key in self.all_keys()
            if key.startswith(base) and key.removeprefix(base).partition(":")[0] not in without
        )

    # ---- consistency of the keys -----------------------------------------------------------------------

    def where(self, queue: str = QUEUE) -> Iterator[tuple[str, str]]:
        """Return the id of every message in every index, with the index."""
        for place in PLACES:
            for member in self.client.zrange(self.key(place, queue), 0, -1):
                yield member.decode(), place

    def check(self, queue: str = QUEUE) -> None:
        """Check that each message is in one index, has its body and its state, and that nothing else is there."""
        placed = dict(self.where(queue))
        assert len(list(self.where(queue))) == len(placed), "a message is in two indexes"
        bodies = {id.decode() for id in self.client.hkeys(self.key("messages", queue))}
        assert set(placed) == bodies
        states = {id.decode(): raw for id, raw in self.client.hgetall(self.key("state", queue)).items()}
        assert set(states) <= bodies
        failed, keyed = set(), {}
        for id, raw in states.items():
            fields = STATE.unpack_from(raw)
            assert fields[0] == PLACES[placed[id]], f"{id} is in {placed[id]} with state {fields[0]!r}"
            if fields[6] > 0 or placed[id] == "dead":
                failed.add(id)
            if fields[13] and placed[id] != "dead":
                keyed[id] = raw[STATE.size : STATE.size + fields[13]].decode()
        # A message that was never claimed and has neither key nor delay has no state beside its body.
        assert {placed[id] for id in bodies - set(states)} <= {"ready"}
        assert {id.decode() for id in self.client.hkeys(self.key("errors", queue))} <= failed
        blocked = {id for id, raw in states.items() if STATE.unpack_from(raw)[7] & BLOCKED}
        base = self.key("blockers:", queue)
        listed = {key for key in self.all_keys() if key.startswith(base) and self.client.type(key) == b"set"}
        assert {f"{base}{id}" for id in blocked} == listed
        assert {placed[id] for id in blocked} <= {"waiting"}
        holders = self.client.hgetall(self.key("keys", queue))
        held = {
            value[at : at + ID_BYTES].decode(): key.decode()
            for key, value in holders.items()
            for at in range(0, len(value), ID_BYTES)
        }
        assert held == keyed
        if self.client.hget(self.key("queue", queue), "groups") == b"T":
            self.check_groups(queue, placed, states)

    def check_groups(self, queue: str, placed: dict[str, str], states: dict[str, bytes]) -> None:
        """Check that what a grouped queue keeps of its groups is what its messages say."""

        def group_of(id: str) -> bytes:
            raw = states.get(id)
            if raw is None:
                return b""
            key_length, group_length = STATE.unpack_from(raw)[13:15]
            return raw[STATE.size + key_length :][:group_length]

        scores = {
            id.decode(): score for id, score in self.client.zrange(self.key("ready", queue), 0, -1, withscores=True)
        }
        line = {
            group_of(id) + b"\0" + (int(score) + RANK_OFFSET).to_bytes(8, "big") + id.encode()
            for id, score in scores.items()
        }
        assert set(self.client.zrange(self.key("group_line", queue), 0, -1)) == line
        depths = Counter(group_of(id) for id in scores)
        assert dict(self.client.zrange(self.key("group_depths", queue), 0, -1, withscores=True)) == depths
        running = Counter(group_of(id) for id, place in placed.items() if place == "leases")
        later = Counter(group_of(id) for id, place in placed.items() if place in ("due", "waiting"))
        records = {
            name: (int.from_bytes(record[:4], "big"), int.from_bytes(record[4:], "big"))
            for name, record in self.client.hgetall(self.key("groups", queue)).items()
        }
        assert records == {name: (running[name], later[name]) for name in running.keys() | later.keys()}
        settings = set(self.client.hkeys(self.key("group_settings", queue)))
        assert set(self.client.zrange(self.key("group_names", queue), 0, -1)) == {*records, *depths, *settings}
        positions = {id.decode() for id in self.client.hkeys(self.key("positions", queue))}
        assert {placed.get(id) for id in positions} <= {"leases", "due"}
        held = {member[-ID_BYTES:].decode() for member in self.client.zrange(self.key("group_held", queue), 0, -1)}
        assert held <= positions
        assert {placed[id] for id in held} <= {"due"}
