"""Ids of messages and of operations: who made them, when, and in what order.

A message id is 24 characters of lower-case base 32: 9 for the publisher's clock in milliseconds, 10 that are random
for each session, 5 that count. Text order is time order. The clock is only a convenience for people and indexes:
no decision of a store depends on it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import NamedTuple

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_CHARACTERS = 24
SESSION_BYTES = 8

_PAIRS = [a + b for a in ALPHABET for b in ALPHABET]
_TRIPLES = [a + b for a in ALPHABET for b in _PAIRS]


class Operation(NamedTuple):
    """One call of one session on one queue. A repeat carries the same operation and gets the first answer."""

    session: bytes
    number: int

    @property
    def nonce(self) -> bytes:
        """Twelve bytes that no other call has: the mark that a claim leaves on its leases."""
        return self.session + self.number.to_bytes(4, "big")

    def __str__(self) -> str:
        return f"{self.session.hex()}.{self.number}"


class Session:
    """The identity of one client object: numbers its operations per queue and makes message ids."""

    __slots__ = ("_counter", "_lock", "_mark", "_numbers", "id", "pid")

    def __init__(self) -> None:
        self.id = os.urandom(SESSION_BYTES)
        #: Noticed by the faces: a forked child must not share numbers, sockets or leases with its parent.
        self.pid = os.getpid()
        self._mark = encode(int.from_bytes(os.urandom(7), "big") >> 6, 10)
        self._counter = int.from_bytes(os.urandom(3), "big")
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def operation(self, queue: str) -> Operation:
        """The next operation on a queue; numbers are dense per queue, so a store can forget old ones exactly."""
        with self._lock:
            number = self._numbers.get(queue, 0) + 1
            self._numbers[queue] = number
        return Operation(self.id, number)

    def message_ids(self, count: int) -> list[str]:
        """`count` new ids in order."""
        with self._lock:
            start = self._counter
            self._counter = start + count
        pairs, triples = _PAIRS, _TRIPLES
        now = time.time_ns() // 1_000_000
        prefix = triples[now >> 30 & 32767] + triples[now >> 15 & 32767] + triples[now & 32767] + self._mark
        return [prefix + pairs[(n >> 15) & 1023] + triples[n & 32767] for n in range(start, start + count)]


def encode(number: int, characters: int) -> str:
    """A number as so many base 32 characters, high digits first."""
    digits = []
    for _ in range(characters):
        digits.append(ALPHABET[number & 31])
        number >>= 5
    return "".join(reversed(digits))


def id_time_ms(message_id: str) -> int:
    """The publisher's clock when an id was made."""
    value = 0
    for character in message_id[:9]:
        value = value << 5 | ALPHABET.index(character)
    return value


def is_message_id(text: str) -> bool:
    """Whether a text has the form of a message id."""
    return len(text) == ID_CHARACTERS and all(character in ALPHABET for character in text)


def continuation_id(source_id: str, token: int, index: int) -> str:
    """The id of a continuation, the same however often its settle is repeated."""
    digest = hashlib.blake2b(f"{source_id}:{token}:{index}".encode(), digest_size=16).digest()
    return source_id[:9] + encode(int.from_bytes(digest, "big"), 15)
