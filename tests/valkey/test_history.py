"""The history of one message, found in a stream that has no index of messages; a key, found in many queues."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.valkey.inspector import Inside
from waypost import Waypost
from waypost.identity import CLOCK_DIFFERENCE_MS, id_time_ms
from waypost.store.valkey.requests import Batch
from waypost.testing.bench import QUEUE, Bench

pytestmark = pytest.mark.promise("SEE-5")

DAY = 86_400
WHOLE = ["published", "claimed", "done"]


def id_made_at(bench: Bench, seconds_off: float) -> str:
    """Return the id of a client whose clock differs from the store's by `seconds_off`."""
    wrong_ms = bench.now_ms + round(seconds_off * 1000)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: wrong_ms * 1_000_000)
        return bench.session.message_ids(1)[0]


def trace(bench: Bench, message_id: str) -> list[str]:
    return [event.event for event in bench.trace(message_id)]


def pages(bench: Bench, message_id: str) -> int:
    """Return how many calls a history takes."""
    count, cursor = 0, None
    while count == 0 or cursor is not None:
        cursor = bench.run(bench.store.trace(QUEUE, message_id, cursor)).cursor
        count += 1
    return count


def noise(bench: Bench, times: int) -> None:
    """Publish other messages, so that the journal holds more than the one in question."""
    for _ in range(times):
        bench.publish_count(50)
        bench.settle_batch([bench.settlement(lease) for lease in bench.claim(500)])
        bench.after(10)


@pytest.mark.parametrize("off", [-DAY, -CLOCK_DIFFERENCE_MS / 2000, 0, CLOCK_DIFFERENCE_MS / 2000, DAY, 400 * DAY])
def test_a_publisher_whose_clock_is_wrong_does_not_hide_a_history(plain_bench: Bench, off: float) -> None:
    noise(plain_bench, 20)
    id = id_made_at(plain_bench, off)
    assert abs(id_time_ms(id) - plain_bench.now_ms - off * 1000) < 1
    plain_bench.publish(id=id)
    plain_bench.settle(plain_bench.claim_one())
    noise(plain_bench, 20)
    assert trace(plain_bench, id) == WHOLE


def test_a_wrong_clock_is_not_mistaken_for_a_beginning(plain_bench: Bench) -> None:
    """The id points between its publish and its end: the events from there on are not all."""
    id = id_made_at(plain_bench, DAY / 2)
    plain_bench.publish(id=id, delay=DAY)
    noise(plain_bench, 3)
    plain_bench.after(DAY)
    plain_bench.settle(plain_bench.claim_one(), "retry")
    plain_bench.settle(plain_bench.claim_one())
    assert trace(plain_bench, id) == ["published", "promoted", "claimed", "retried", "claimed", "done"]


def test_a_message_that_lives_for_days_has_its_whole_history(plain_bench: Bench) -> None:
    id = id_made_at(plain_bench, 0)
    plain_bench.publish(id=id, delay=3 * DAY, priority=9)
    noise(plain_bench, 10)
    plain_bench.after(3 * DAY)
    lease = plain_bench.claim_one()
    noise(plain_bench, 2)
    plain_bench.extend(lease)
    assert trace(plain_bench, id) == ["published", "promoted", "claimed"]
    assert plain_bench.settle(lease, "dead") == "dead"
    plain_bench.after(DAY)
    plain_bench.redrive(id)
    plain_bench.settle(plain_bench.claim_one())
    assert trace(plain_bench, id) == ["published", "promoted", "claimed", "dead", "redriven", "claimed", "done"]


def test_a_journal_of_megabytes_is_read_page_by_page(plain_bench: Bench, inside: Inside) -> None:
    id = id_made_at(plain_bench, 0)
    plain_bench.configure(journal="full")
    plain_bench.publish(id=id, delay=60, priority=9)
    for _ in range(16):
        plain_bench.publish_count(40, body=b"x" * 8_000)
    plain_bench.after(60)
    plain_bench.settle(plain_bench.claim_one())
    assert inside.bytes_of(inside.key("journal")) > 5_000_000
    assert trace(plain_bench, id) == ["published", "promoted", "claimed", "done"]
    # No call may read more than about a megabyte: it would delay all other clients.
    assert 5 <= pages(plain_bench, id) <= 8
    assert trace(plain_bench, id_made_at(plain_bench, 0)) == []


def test_a_history_is_searched_no_further_than_the_last_event_of_its_message(
    plain_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_bench.configure(journal="full")
    done, dead, again, waiting = (id_made_at(plain_bench, 0) for _ in range(4))
    for id in (done, dead, again):
        plain_bench.publish(id=id)
        plain_bench.settle(plain_bench.claim_one(), "done" if id == done else "dead")
    plain_bench.publish(id=waiting, priority=9)
    for _ in range(16):
        plain_bench.publish_count(40, body=b"x" * 8_000)
    plain_bench.redrive(again)
    calls, trace_one = [], plain_bench.store.trace

    def counted(*given: Any) -> Any:
        calls.append(given)
        return trace_one(*given)

    monkeypatch.setattr(plain_bench.store, "trace", counted)

    def read(id: str) -> tuple[list[str], int]:
        calls.clear()
        return [event.event for event in post.history(QUEUE, id)], len(calls)

    with Waypost(store=plain_bench.store) as post:
        assert read(done) == (WHOLE, 1)
        assert read(dead) == (["published", "claimed", "dead"], 1)
        # What may go on is searched to the end of the journal.
        events, searched = read(again)
        assert (events, searched >= 5) == (["published", "claimed", "dead", "redriven"], True)
        assert read(waiting) == (["published"], 1)


def test_the_rest_of_a_trimmed_journal_is_found(plain_bench: Bench) -> None:
    id = id_made_at(plain_bench, 0)
    plain_bench.publish(id=id, priority=9)
    lease = plain_bench.claim_one()
    trimmed = plain_bench.stats().journal_last
    noise(plain_bench, 5)
    plain_bench.settle(lease)
    plain_bench.run(plain_bench.store.journal_trim(QUEUE, trimmed))
    # The stream drops whole nodes, so that more may be left than was asked for, but never less.
    assert trace(plain_bench, id)[-1:] == ["done"]
    noise(plain_bench, 5)
    assert trace(plain_bench, id)[-1:] == ["done"]


def test_a_journal_at_its_cap_forgets_the_oldest_and_returns_the_rest(plain_bench: Bench) -> None:
    plain_bench.configure(journal_max=1_000)
    old = id_made_at(plain_bench, 0)
    plain_bench.publish(id=old, priority=9)
    plain_bench.settle(plain_bench.claim_one())
    noise(plain_bench, 40)
    new = id_made_at(plain_bench, 0)
    plain_bench.publish(id=new)
    plain_bench.settle(plain_bench.claim_one())
    assert trace(plain_bench, old) == []
    assert trace(plain_bench, new) == WHOLE
    assert trace(plain_bench, id_made_at(plain_bench, -DAY)) == []


def test_a_name_that_is_no_id_has_no_history(plain_bench: Bench) -> None:
    noise(plain_bench, 1)
    assert trace(plain_bench, "order:7") == []
    assert trace(plain_bench, "z" * 24) == []


def test_a_key_is_searched_in_many_queues_with_few_writes(plain_bench: Bench) -> None:
    calls = plain_bench.store.holders([f"queue-{number}" for number in range(200)], "order:7")
    assert len(calls) == 200
    assert len(list(Batch(iter(calls), set()).requests())) == 4
