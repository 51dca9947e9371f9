"""A store with messages in every state, and helpers that read it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from waypost import Waypost
from waypost.identity import Session
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.store.bulk.columns import events_batch, stored_batch
from waypost.store.bulk.tables import JOURNAL, MESSAGES
from waypost.testing.clock import ClockTime
from waypost.values import EventRecord, MessageState, Settlement, Stored


class Shop:
    """One namespace of a store, and its client."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url = url
        self.namespace = namespace
        self.place = Place(url, namespace=namespace)
        self.post = Waypost(url, namespace=namespace)
        self._session = Session(ClockTime())

    @property
    def options(self) -> dict[str, str]:
        """The options of a query."""
        return {"url": self.url, "namespace": self.namespace}

    def bulk(self) -> Bulk:
        return open_bulk(self.place)

    def fill(self, count: int = 300) -> None:
        """Publish messages of every kind: some done, dead, leased or redelivered, some with journalled bodies."""
        post = self.post
        post.publish_many("orders", [{"number": number} for number in range(count)])
        post.publish_many("orders", [{"é": n} for n in range(40)], key=lambda body: f"schlüssel-{body['é']}", group="g")
        post.publish_many("orders", [{"é": n} for n in range(10)], key=lambda body: f"schlüssel-{body['é']}")
        post.publish_many("orders", [{"later": n} for n in range(20)], delay=3600, expires=7200)
        post.publish("orders", "text", priority=9, expires=3600)
        self.work("orders", count // 2)
        self.claim("orders", 7)
        post.configure("orders", journal="full")
        post.publish("orders", {"seen": "ja — 見た"}, headers={"a": "ä"}, correlation_id="c")
        post.publish("orders", b"\xff\x00\xfe")
        post.publish("orders", "x" * (1 << 20), priority=0)

    def claim(self, queue: str, limit: int) -> Any:
        with self.bulk() as bulk:
            return bulk.run(bulk.store.claim(queue, limit, self._session.operation(queue), worker="w"))

    def work(self, queue: str, count: int) -> None:
        """Claim and settle: most messages are done, some are dead, some are retried."""
        with self.bulk() as bulk:
            handled = 0
            while handled < count:
                claimed = bulk.run(
                    bulk.store.claim(queue, min(100, count - handled), self._session.operation(queue), worker="w")
                )
                settlements = [
                    Settlement(lease.id, lease.token, lease.nonce, **_ends(handled + index))
                    for index, lease in enumerate(claimed.leases)
                ]
                bulk.run(bulk.store.settle(queue, settlements, self._session.operation(queue)))
                handled += len(claimed.leases)

    def events(self, queue: str = "orders") -> list[EventRecord]:
        """Read the journal event by event: a bulk read is compared with it."""
        events: list[EventRecord] = []
        with self.bulk() as bulk:
            while True:
                page = bulk.run(bulk.store.journal(queue, events[-1].number if events else 0, 1000))
                if not page.events:
                    return events
                events += page.events

    def stored(self, state: MessageState, queue: str = "orders") -> list[Stored]:
        """Read the messages of a state, page by page."""
        messages: list[Stored] = []
        cursor = None
        with self.bulk() as bulk:
            while True:
                page = bulk.run(bulk.store.peek(queue, state, 100, cursor=cursor))
                messages += page.messages
                cursor = page.cursor
                if cursor is None:
                    return messages

    def __enter__(self) -> Self:
        self.post.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.post.close()


def _ends(number: int) -> dict[str, Any]:
    if number % 11 == 3:
        return {"outcome": "dead", "reason": "rejected", "error_type": "ValueError", "error": "kaputt"}
    if number % 11 == 5:
        return {"outcome": "retry", "after_ms": 3_600_000, "error_type": "OSError"}
    return {}


def rows_of(events: list[EventRecord]) -> list[dict[str, Any]]:
    """Return events as rows, in the order of their numbers."""
    return as_rows([events_batch(events, list(JOURNAL.columns))], "number")


def stored_rows(queue: str, messages: list[Stored]) -> list[dict[str, Any]]:
    """Return messages as rows, in the order of their ids."""
    return as_rows([stored_batch(queue, messages, list(MESSAGES.columns))], "id")


def as_rows(batches: list[Any], order: str) -> list[dict[str, Any]]:
    if not batches:
        return []
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches).to_pylist()
    return sorted(rows, key=lambda row: row[order])
