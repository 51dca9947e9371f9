"""Several schedulers at once on a real store: each instant is decided once, by the store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from waypost import Waypost
from waypost.codec import encode_body, make_envelope
from waypost.identity import Session
from waypost.store.port import Draft, FireStep
from waypost.testing.clock import ClockTime
from waypost.values import ScheduleList, StoredSchedule

THREADS, ROUNDS, QUEUE = 6, 8, "ticks"


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    start, results = threading.Barrier(len(works), timeout=30), [None] * len(works)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def due(list_schedules: Callable[[], ScheduleList]) -> Iterator[StoredSchedule]:
    """Wait until the only schedule is due, and return it: a time ahead would be early for some of the schedulers."""
    while True:
        listed = list_schedules()
        (seen,) = listed.schedules
        if seen.due_ms is not None and listed.at_ms >= seen.due_ms:
            yield seen


@pytest.mark.promise("CRON-6")
def test_of_many_schedulers_that_fire_the_same_instant_at_once_one_does(url: str, namespace: str) -> None:
    with Waypost(url, namespace=namespace) as post:
        post.save_schedule("tick", queue=QUEUE, every=0.001)
        store = post.store
        executors = [store.connect(start_timeout=10) for _ in range(THREADS)]
        sessions = [Session(ClockTime()) for _ in executors]

        def fire(index: int, seen: Any) -> Callable[[], str]:
            id = sessions[index].message_ids(1)[0]
            draft = Draft(id, make_envelope(id, encode_body(index)))
            step = FireStep(
                seen.key, seen.version, seen.next_ms, seen.due_ms, seen.due_ms + 600_000, seen.next_ms, 0,
                seen.next_ms + 1, seen.due_ms + 1,
            )  # fmt: skip
            call = store.fire_schedule(QUEUE, step, [draft], sessions[index].operation(QUEUE))
            return lambda: executors[index].run(call).result.status

        for number in range(1, ROUNDS + 1):
            seen = next(due(lambda: executors[0].run(store.schedules(QUEUE))))
            results = at_once([fire(index, seen) for index in range(THREADS)])
            assert Counter(results) == {"fired": 1, "conflict": THREADS - 1}
            assert post.ledger(QUEUE).published == number
        for executor in executors:
            executor.close()


@pytest.mark.promise("CRON-5")
def test_many_clients_that_save_the_same_schedule_at_once_save_one(url: str, namespace: str) -> None:
    clients = [Waypost(url, namespace=namespace) for _ in range(THREADS)]
    works: list[Callable[[], Any]] = [
        lambda client=client: client.save_schedule("tick", queue=QUEUE, every=3600) for client in clients  # type: ignore[misc]
    ]  # fmt: skip
    results = at_once(works)
    assert len({(result.key, result.next_fire) for result in results}) == 1
    assert len(clients[0].schedules()) == 1
    for client in clients:
        client.close()


@pytest.mark.promise("TIMER-4")
def test_of_many_candidates_one_leads(url: str, namespace: str) -> None:
    with Waypost(url, namespace=namespace) as post:
        executors = [post.store.connect(start_timeout=10) for _ in range(THREADS)]
        works: list[Callable[[], Any]] = [
            lambda e=executor, n=number: e.run(post.store.elect("scheduler", f"s{n}", 60_000))  # type: ignore[misc]
            for number, executor in enumerate(executors)
        ]
        results = at_once(works)
        assert len({(result.leader, result.token) for result in results}) == 1
        for executor in executors:
            executor.close()
