"""Table bloat on PostgreSQL: the size of the tables and the cost of a claim after many messages through one queue.

    python -m benchmarks.bloat --quick --json

Messages are published, claimed and settled in chunks of 512 behind a standing backlog, while the server vacuums by
itself by its own defaults (`--quick`: every second instead of every minute, since the run is shorter than a minute) and
the settings of our tables. A table grows until its first vacuum and has its steady size from then on.
`bloat-size-ratio` is the largest size after the first vacuum over the size at it, for all tables with their indexes;
`bloat-claim-ratio` is the median cost of a claim in the last tenth of the run over that in the first.
"""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field

import psycopg

from benchmarks.core import BODY, WORKER, Subject
from benchmarks.measure import Report, arguments
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.values import Settlement

BATCH = 512
BACKLOG = 8 * BATCH
SIZE = r"""
    SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint,
        (SELECT s.autovacuum_count FROM pg_stat_user_tables s WHERE s.relname = 'wp_message')
    FROM pg_class c WHERE c.relkind = 'r' AND c.relname LIKE 'wp\_%'
"""


@dataclass
class Course:
    """What was measured during the run: the cost of each claim, and sizes with the vacuums before them."""

    claims_ms: list[float] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)


def run(subject: Subject, database: psycopg.Connection[tuple[int, int]], count: int, samples: int) -> Course:
    """Push `count` messages through one queue."""
    store, run_call = subject.store, subject.executor.run
    # The journal keeps its size from a twentieth of the run on: it has three events for each message.
    subject.new_queue(journal_max=count * 3 // 20)
    queue, session = subject.queue, subject.session
    bodies = [BODY] * BATCH
    course = Course()
    for _ in range(BACKLOG // BATCH):
        subject.post.publish_many(queue, bodies)
    rounds = count // BATCH
    for turn in range(rounds):
        subject.post.publish_many(queue, bodies)
        start = time.perf_counter()
        claimed = run_call(store.claim(queue, BATCH, session.operation(queue), worker=WORKER))
        course.claims_ms.append((time.perf_counter() - start) * 1000)
        settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases]
        run_call(store.settle(queue, settlements, session.operation(queue)))
        if turn % max(1, rounds // samples) == 0:
            found = database.execute(SIZE).fetchone()
            assert found is not None
            course.sizes.append(found)
    return course


def main() -> None:
    """Run it, and print the figures."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    count = 100_000 if options.quick else 2_000_000
    naptime = "1s" if options.quick else "1min"
    with PostgresServer(
        durable=True, autovacuum="on", autovacuum_naptime=naptime, shared_buffers="256MB", max_wal_size="4GB"
    ) as server:
        migrate(server.url)
        subject = Subject(server.url)
        try:
            with psycopg.connect(server.url, autocommit=True) as database:
                start = time.perf_counter()
                course = run(subject, database, count, 200)
                seconds = time.perf_counter() - start
        finally:
            subject.close()
    vacuumed = [size for size, vacuums in course.sizes if vacuums]
    if not vacuumed:
        raise SystemExit("the run was over before the first vacuum: there is no steady size to compare with")
    tenth = len(course.claims_ms) // 10
    first, last = (statistics.median(part) for part in (course.claims_ms[:tenth], course.claims_ms[-tenth:]))
    for name, value, unit in (
        ("bloat-rate", count / seconds, "messages/s"),
        ("bloat-vacuums", course.sizes[-1][1], "vacuums"),
        ("bloat-size-steady", vacuumed[0] / 2**20, "MiB"),
        ("bloat-size-end", vacuumed[-1] / 2**20, "MiB"),
        ("bloat-size-ratio", max(vacuumed) / vacuumed[0], "x"),
        ("bloat-claim-start", first, "ms"),
        ("bloat-claim-worst", max(medians(course.claims_ms, 20)), "ms"),
        ("bloat-claim-end", last, "ms"),
        ("bloat-claim-ratio", last / first, "x"),
    ):
        report.add(name, "postgres", "waypost", round(value, 2), unit)


def medians(values: list[float], parts: int) -> list[float]:
    """Return the medians of equal parts of a run."""
    length = max(1, len(values) // parts)
    return [statistics.median(values[start : start + length]) for start in range(0, len(values), length)]


if __name__ == "__main__":
    main()
