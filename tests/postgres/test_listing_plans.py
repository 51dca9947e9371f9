"""A page of a listing reads about what it returns, also of a queue of whose size the planner has no idea."""

from __future__ import annotations

from typing import Any, get_args

import psycopg
import pytest

from waypost.store.port import Call
from waypost.store.postgres.statement import PostgresCall
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.postgres import PostgresServer
from waypost.values import MessageState, Page

Database = psycopg.Connection[Any]

READY, OTHERS, PAGE = 20_000, 500, 50
#: Rows of a page, one more, and the row of the queue; messages of one publish have the same due time.
ROWS_MAX = PAGE + OTHERS + 60


def read_page(reader: Database, namespace: str, call: Call[Page]) -> tuple[Page, int]:
    """Return a page, and how many messages the server has read for it."""
    assert isinstance(call, PostgresCall)

    def read_so_far() -> int:
        found = reader.execute(
            "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables "
            "WHERE relname = ANY (%s)",
            ([f"{namespace}_message", f"{namespace}_completed"],),
        ).fetchone()
        assert found is not None
        return int(found[0])

    with reader.transaction():
        before = read_so_far()
        values, kinds = [value for _, value in call.parameters], [kind for kind, _ in call.parameters]
        result = reader.pgconn.exec_params(call.command, values, kinds, [1] * len(values), 1)
        assert not result.error_message, result.error_message
        return call.decode(result), read_so_far() - before


@pytest.mark.promise("QUEUE-8", "FACE-3")
@pytest.mark.parametrize("known", ["nothing", "another queue", "other states"])
def test_a_page_reads_what_it_returns_whatever_the_planner_knows(
    server: PostgresServer, bench: Bench, database: Database, namespace: str, known: str
) -> None:
    if known == "another queue":
        bench.publish_count(OTHERS, queue="mails")
    elif known == "other states":
        bench.publish_count(OTHERS, delay=600)
    if known != "nothing":
        database.execute(f'ANALYZE "{namespace}_message"')
    bench.publish_count(READY)
    bench.publish_count(OTHERS, delay=1_200)
    for state in get_args(MessageState):
        cursor, listed = None, list[str]()
        for _ in range(3):
            call = bench.store.peek(QUEUE, state, PAGE, cursor=cursor)
            page, read = read_page(database, namespace, call)
            assert read <= ROWS_MAX, (state, cursor)
            listed += [stored.id for stored in page.messages]
            cursor = page.cursor
            if cursor is None:
                break
        assert len(listed) == len(set(listed)) == (3 * PAGE if state in ("ready", "delayed") else 0)
