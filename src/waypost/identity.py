"""Ids of messages and of operations.

A message id is 24 characters of lower-case base 32: 9 for the publisher's clock in milliseconds, 10 random ones per
session, 5 for a counter. Text order is time order. The clock is only a convenience for users and indexes:
no decision of a store depends on it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from waypost.store_time import StoreTime

#: Ids contain the publisher's clock; journals are searched from this much earlier, because clocks differ.
CLOCK_DIFFERENCE_MS = 120_000
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_CHARACTERS = 24
SESSION_BYTES = 8
MARK_BYTES = 8
NONCE_BYTES = 12
#: A session ends with this number. Stores pack numbers into four bytes and keep them in signed columns.
OPERATIONS_MAX = 2**31 - 1

PAIRS = [a + b for a in ALPHABET for b in ALPHABET]
#: 32,768 texts: made with the first session, since many programs import this and make none.
TRIPLES: list[str] = []


def make_triples() -> list[str]:
    """Return `TRIPLES`, complete."""
    if not TRIPLES:
        # Another thread may do the same: all at once, so that no part of it can be seen.
        TRIPLES[:] = [a + b for a in ALPHABET for b in PAIRS]
    return TRIPLES


class Operation(NamedTuple):
    """One call of one session on one queue. A repeat has the same operation and gets the first answer."""

    session: bytes
    number: int
    #: A lower bound of the store's time in milliseconds when the call was first sent: from it the store decides whether
    #: it still remembers the call. Every repeat has the same.
    stamp: int
    #: Random bytes of this call alone. A cloned process has the same session and numbers, but not the same marks.
    mark: bytes

    def __str__(self) -> str:
        return operation_id(self.session, self.number)


def operation_id(session: bytes, number: int) -> str:
    """The name of the operation in the journal."""
    return f"{session.hex()}.{number}"


def new_mark() -> bytes:
    """Return the random mark of a new call, from the system each time: buffered bytes could be cloned."""
    return os.urandom(MARK_BYTES)


def new_nonce() -> bytes:
    """Return the nonce that fences the leases of one attempt of a claim."""
    return os.urandom(NONCE_BYTES)


class Session:
    """The identity of one client object: numbers its operations per queue and makes message ids."""

    __slots__ = ("_counter", "_lock", "_mark", "_numbers", "id", "pid", "time")

    def __init__(self, time: StoreTime | None = None) -> None:
        #: Checked by clients: a forked child must not share numbers, sockets or leases with its parent.
        self.pid = os.getpid()
        self.time = time or StoreTime()
        self._lock = threading.Lock()
        make_triples()
        self._begin()

    def _begin(self) -> None:
        self.id = os.urandom(SESSION_BYTES)
        self._mark = encode(int.from_bytes(os.urandom(7), "big") >> 6, 10)
        self._counter = int.from_bytes(os.urandom(3), "big")
        self._numbers: dict[str, int] = {}

    def renew(self, id: bytes) -> None:
        """Take a new session with new message ids, because another process uses this one. Once per session id."""
        with self._lock:
            if self.id == id:
                self._begin()

    def operation(self, queue: str) -> Operation:
        """Return the next operation on a queue; numbers have no gaps, so a store can forget old ones exactly."""
        stamp, mark = self.time.now_ms(), os.urandom(MARK_BYTES)
        with self._lock:
            number = self._numbers.get(queue, 0) + 1
            if number > OPERATIONS_MAX:
                self._begin()
                number = 1
            self._numbers[queue] = number
            return Operation(self.id, number, stamp, mark)

    def message_ids(self, count: int) -> list[str]:
        """Return `count` new ids in order."""
        with self._lock:
            start = self._counter
            self._counter = start + count
        pairs, triples, prefix = PAIRS, TRIPLES, self._prefix()
        return [prefix + pairs[(n >> 15) & 1023] + triples[n & 32767] for n in range(start, start + count)]

    def message_id(self) -> str:
        """Return one new id."""
        with self._lock:
            n = self._counter
            self._counter = n + 1
        return self._prefix() + PAIRS[(n >> 15) & 1023] + TRIPLES[n & 32767]

    def _prefix(self) -> str:
        now = time.time_ns() // 1_000_000
        return TRIPLES[now >> 30 & 32767] + TRIPLES[now >> 15 & 32767] + TRIPLES[now & 32767] + self._mark


def encode(number: int, characters: int) -> str:
    """Return a number in base 32 with this many characters, high digits first."""
    digits = []
    for _ in range(characters):
        digits.append(ALPHABET[number & 31])
        number >>= 5
    return "".join(reversed(digits))


def id_time_ms(message_id: str) -> int:
    """Return the publisher's clock when an id was created."""
    value = 0
    for character in message_id[:9]:
        value = value << 5 | ALPHABET.index(character)
    return value


def journal_start_ms(message_id: str) -> int:
    """Return the store time from which on a journal is searched for the events of a message."""
    return max(0, id_time_ms(message_id) - CLOCK_DIFFERENCE_MS) if is_message_id(message_id) else 0


def is_message_id(text: str) -> bool:
    """Return whether a text has the form of a message id."""
    return len(text) == ID_CHARACTERS and all(character in ALPHABET for character in text)


def continuation_id(source_id: str, token: int, index: int) -> str:
    """Return the id of a continuation, the same however often its settle is repeated."""
    from hashlib import blake2b  # few programs need it

    digest = blake2b(f"{source_id}:{token}:{index}".encode(), digest_size=16).digest()
    return source_id[:9] + encode(int.from_bytes(digest, "big"), 15)
