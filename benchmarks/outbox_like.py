"""Transactions that publish: eight at once, each with other work, with waypost's insert and without.

    python -m benchmarks.outbox_like --quick --json

Each transaction writes into a table of the user's, publishes on the same connection by the statement of the store,
works for 5 ms with the transaction open, and commits. If any step updated a row that all of them share, they would take
turns and the rate would fall to that of one of them. The peer `raw` is the same transaction without the publish. On a
busy machine the ratio shows how long one more round trip waits for a core; `outbox-like-waits` does not depend on that:
how often, of many samples at the server, a transaction waited for another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import ExecStatus

from benchmarks.core import BODY
from benchmarks.measure import Contender, Report, arguments
from waypost import codec
from waypost.identity import Session
from waypost.store.port import Draft
from waypost.store.postgres import PostgresStore, migrate
from waypost.store.postgres.statement import PostgresCall, number
from waypost.testing.clock import ClockTime
from waypost.testing.postgres import PostgresServer

CONNECTIONS = 8
WORK_SECONDS = 0.005
QUEUE = "orders"
#: The place of the result's time to live among the parameters of a publish. Without one it is a part of the caller's
#: transaction.
TTL_PLACE = 4


#: Transactions that wait for another one. The extension of a file is short and not held until the commit.
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype <> 'extend'"


class Outbox:
    """Eight connections of a service, and a thread for each."""

    def __init__(self, url: str) -> None:
        self._store = PostgresStore.from_url(url)
        self._session = Session(ClockTime())
        self._envelope_of = partial(codec.make_envelope, encoded=codec.encode_body(BODY))
        self._connections = [psycopg.connect(url) for _ in range(CONNECTIONS)]
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE shop_order (id bigserial PRIMARY KEY, customer text, total bigint)")

    def publish(self, connection: psycopg.Connection[Any]) -> None:
        """Send the store's publish on the caller's connection."""
        message_id = self._session.message_ids(1)[0]
        draft = Draft(message_id, self._envelope_of(message_id))
        call = self._store.publish(QUEUE, [draft], self._session.operation(QUEUE))
        assert isinstance(call, PostgresCall)
        parameters = [*call.parameters]
        parameters[TTL_PLACE] = number(None)
        result = connection.pgconn.exec_params(
            call.command,
            [value for _, value in parameters],
            [kind for kind, _ in parameters],
            [1] * len(parameters),
            1,
        )
        if result.status != ExecStatus.TUPLES_OK:
            raise RuntimeError(result.error_message.decode())

    def transactions(self, count: int, publish: Callable[[psycopg.Connection[Any]], None] | None) -> None:
        """Run `count` on each connection, all connections at once."""
        failures: list[BaseException] = []

        def work(connection: psycopg.Connection[Any]) -> None:
            try:
                for _ in range(count):
                    with connection.transaction():
                        connection.execute("INSERT INTO shop_order (customer, total) VALUES (%s, %s)", ("c-0042", 1999))
                        if publish is not None:
                            publish(connection)
                        time.sleep(WORK_SECONDS)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(connection,)) for connection in self._connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def waits(self, url: str, count: int) -> tuple[int, int]:
        """Return how often a transaction waited for another one, and the number of samples."""
        seen = samples = 0
        running = threading.Thread(target=self.transactions, args=(count, self.publish))
        running.start()
        with psycopg.connect(url, autocommit=True) as connection:
            while running.is_alive():
                found = connection.execute(WAITING).fetchone()
                seen += found is not None and found[0] > 0
                samples += 1
                time.sleep(0.002)
        running.join()
        return seen, samples

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def main() -> None:
    """Run it, and print the figures."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    count, rounds = (60, 5) if options.quick else (200, 9)
    with PostgresServer(durable=True, autovacuum="on", shared_buffers="256MB", max_wal_size="4GB") as server:
        migrate(server.url)
        outbox = Outbox(server.url)
        try:
            report.rates(
                "outbox-like",
                "postgres",
                [
                    Contender("waypost", partial(outbox.transactions, count, outbox.publish), count * CONNECTIONS),
                    Contender("raw", partial(outbox.transactions, count, None), count * CONNECTIONS),
                ],
                rounds,
            )
            seen, samples = outbox.waits(server.url, count)
            report.add("outbox-like-waits", "postgres", "waypost", seen, f"of {samples} samples")
        finally:
            outbox.close()


if __name__ == "__main__":
    main()
