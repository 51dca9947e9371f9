"""No script reads more than a bounded number of entries: the client goes on, and others are served in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.valkey.inspector import Inside
from waypost import Waypost
from waypost.policy import ARRIVAL_TTL_MS, ARRIVALS_FORGOTTEN_MAX, CHUNK_MESSAGES_MAX, SCANNED_MAX
from waypost.store.port import Target
from waypost.testing.bench import QUEUE, Bench
from waypost.testing.servers import ValkeyServer

ENTRIES = 5_000
#: How many calls read all of them.
CALLS = -(-ENTRIES // SCANNED_MAX)


@pytest.fixture
def post(server: ValkeyServer, plain_bench: Bench) -> Iterator[Waypost]:
    with Waypost(server.url, namespace=plain_bench.namespace) as client:
        yield client


@pytest.fixture
def calls_of(raw: redis.Redis) -> Callable[[str], int]:
    """Return how often a command has run on the server, also inside scripts (not those that it has to load first)."""

    def count(command: str) -> int:
        info: Any = raw.info("commandstats")
        found = info.get(f"cmdstat_{command}", {"calls": 0, "failed_calls": 0})
        return int(found["calls"]) - int(found["failed_calls"])

    return count


@pytest.fixture
def kept(plain_bench: Bench, inside: Inside) -> list[str]:
    """Return the ids of kept finished messages, oldest first."""
    plain_bench.configure(completed=2 * ENTRIES)
    plain_bench.publish()
    template_id = plain_bench.claim_one()
    plain_bench.settle(template_id)
    [template] = inside.client.lrange(inside.key("completed"), 0, -1)
    ids = plain_bench.session.message_ids(ENTRIES)
    entries = [template.replace(template_id.id.encode(), id.encode()) for id in ids]
    inside.client.delete(inside.key("completed"))
    inside.client.lpush(inside.key("completed"), *entries)
    return ids


@pytest.mark.promise("DEAD-3")
def test_a_listing_of_kept_messages_that_matches_little_takes_several_bounded_calls(
    post: Waypost, kept: list[str], calls_of: Callable[[str], int]
) -> None:
    before = calls_of("evalsha")
    assert list(post.messages(QUEUE, "done", group="none has it")) == []
    assert calls_of("evalsha") - before == CALLS
    assert [stored.id for stored in post.messages(QUEUE, "done")] == kept
    assert [stored.id for stored in post.messages(QUEUE, "done", id=kept[ENTRIES // 2])] == [kept[ENTRIES // 2]]


@pytest.mark.promise("LEASE-12")
def test_a_cancel_searches_the_kept_messages_in_several_bounded_calls(
    post: Waypost, kept: list[str], calls_of: Callable[[str], int], plain_bench: Bench
) -> None:
    unknown = plain_bench.session.message_ids(1)[0]
    before = calls_of("evalsha")
    assert post.cancel(QUEUE, id=unknown) == "unknown"
    assert calls_of("evalsha") - before == 1 + CALLS
    # The newest is found by the cancel itself, the oldest by those that go on.
    before = calls_of("evalsha")
    assert post.cancel(QUEUE, id=kept[-1]) == "finished"
    assert calls_of("evalsha") - before == 1
    assert post.cancel(QUEUE, id=kept[0]) == "finished"


@pytest.mark.promise("LEASE-12")
def test_a_cancel_of_many_reads_the_kept_messages_once(
    plain_bench: Bench, kept: list[str], calls_of: Callable[[str], int]
) -> None:
    targets = [Target(id) for id in plain_bench.session.message_ids(CHUNK_MESSAGES_MAX)]
    before = calls_of("lrange")
    statuses = plain_bench.run(plain_bench.store.cancel(QUEUE, targets, plain_bench.operation(QUEUE))).result
    assert set(statuses) == {"unknown"}
    assert 0 < calls_of("lrange") - before <= SCANNED_MAX // 20


def bury(bench: Bench, count: int, reason: str) -> list[str]:
    bench.publish_count(count)
    ids: list[str] = []
    while len(ids) < count:
        leases = bench.claim(CHUNK_MESSAGES_MAX)
        bench.settle_batch([bench.settlement(lease, "dead", reason=reason) for lease in leases])
        ids += [lease.id for lease in leases]
    return ids


@pytest.mark.promise("DEAD-2")
def test_a_redrive_by_reason_takes_several_bounded_calls(
    post: Waypost, plain_bench: Bench, calls_of: Callable[[str], int]
) -> None:
    others = bury(plain_bench, ENTRIES, "of another kind")
    plain_bench.after(1)
    wanted = bury(plain_bench, 3, "of this kind")
    before = calls_of("evalsha")
    done = post.redrive(QUEUE, reason="of this kind", limit=2)
    assert calls_of("evalsha") - before >= 1 + CALLS  # one for how many there are
    assert len(done.moved) == 2
    assert done.more
    assert done.cursor is None
    # It is searched until it is known whether there is one more.
    last = post.redrive(QUEUE, reason="of this kind", limit=1)
    assert sorted(done.moved + last.moved) == sorted(wanted)
    assert not last.more
    assert post.redrive(QUEUE, reason="of no kind").moved == []
    assert [stored.id for stored in post.messages(QUEUE, "dead")] == others


@pytest.mark.promise("DEAD-2")
def test_a_redrive_does_not_read_letters_again_that_it_has_passed(
    post: Waypost, plain_bench: Bench, calls_of: Callable[[str], int]
) -> None:
    bury(plain_bench, ENTRIES, "of another kind")
    plain_bench.after(1)
    wanted = bury(plain_bench, 3 * CHUNK_MESSAGES_MAX, "of this kind")
    before = calls_of("evalsha")
    done = post.redrive(QUEUE, reason="of this kind")
    assert sorted(done.moved) == sorted(wanted)
    assert not done.more
    assert calls_of("evalsha") - before <= 1 + CALLS + 3 + 1


@pytest.mark.promise("TIMER-1", "QUEUE-8")
def test_a_listing_of_timers_due_together_reads_each_once_when_every_cursor_is_gone(
    plain_bench: Bench, calls_of: Callable[[str], int]
) -> None:
    for _ in range(0, ENTRIES, CHUNK_MESSAGES_MAX):
        plain_bench.publish_count(CHUNK_MESSAGES_MAX, delay=600)
    count = plain_bench.stats().ledger.delayed
    before, listed, cursor, pages = calls_of("hget"), list[str](), None, 0
    ranges = calls_of("zrange")
    while True:
        page = plain_bench.run(plain_bench.store.peek(QUEUE, "delayed", 200, cursor=cursor))
        listed += [stored.id for stored in page.messages]
        cursor, pages = page.cursor, pages + 1
        if cursor is None:
            break
        assert plain_bench.cancel(listed[-1]) == "cancelled"
    assert len(listed) == len(set(listed)) == count
    # Some fields of each message, and of each message that is cancelled.
    assert calls_of("hget") - before <= 6 * count
    # A search in two halves for each page, its parts, and what a cancel reads.
    assert calls_of("zrange") - ranges <= pages * (count.bit_length() + 6)


@pytest.mark.promise("DEAD-2", "QUEUE-8")
def test_a_redrive_goes_on_behind_its_cursor_when_that_letter_has_died_again(plain_bench: Bench) -> None:
    ids = sorted(bury(plain_bench, SCANNED_MAX + 2, "of another kind"))
    wanted = bury(plain_bench, 1, "of this kind")

    def redrive(cursor: str | None) -> Any:
        operation = plain_bench.operation(QUEUE)
        return plain_bench.run(
            plain_bench.store.redrive(QUEUE, 1, operation, reason="of this kind", cursor=cursor)
        ).result

    first = redrive(None)
    assert first.cursor is not None
    last = first.cursor.rpartition(" ")[2]
    assert last in ids
    plain_bench.after(1)
    plain_bench.redrive(last)
    (lease,) = plain_bench.claim(1)
    plain_bench.settle(lease, "dead", reason="of another kind")
    found = redrive(first.cursor)
    assert [*first.moved, *found.moved] == wanted


@pytest.mark.promise("CHAIN-2")
def test_outgoing_entries_that_cannot_be_decoded_are_read_in_bounded_calls(
    plain_bench: Bench, inside: Inside, calls_of: Callable[[str], int]
) -> None:
    plain_bench.configure()
    inside.client.hset(inside.key("outgoing"), mapping={f"{number:024}": "damaged" for number in range(ENTRIES)})
    before = calls_of("hscan")
    assert plain_bench.run(plain_bench.store.outgoing(QUEUE, 100)) == []
    assert calls_of("hscan") - before <= SCANNED_MAX // 100 + 1
    inside.client.delete(inside.key("outgoing"))


@pytest.mark.promise("DEAD-3")
def test_a_lowered_limit_of_kept_messages_is_reached_step_by_step(
    plain_bench: Bench, kept: list[str], inside: Inside
) -> None:
    plain_bench.configure(completed=10)
    lengths = [len(kept)]
    while lengths[-1] > 10:
        plain_bench.publish()
        plain_bench.settle(plain_bench.claim_one())
        lengths.append(inside.client.llen(inside.key("completed")))
        assert lengths[-2] - CHUNK_MESSAGES_MAX <= lengths[-1] < lengths[-2]
    assert lengths[-1] == 10


@pytest.mark.promise("SEE-5")
def test_stats_count_more_sleepers_than_a_script_reads(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.configure()
    ends = plain_bench.now_ms + 60_000
    sleepers = {f"sleeper {number}": ends for number in range(ENTRIES)}
    inside.client.zadd(inside.key("sleepers"), {**sleepers, "": ends + 1, "~worker": plain_bench.now_ms + 50})
    assert plain_bench.stats().sleepers == ENTRIES


def send_on(bench: Bench) -> None:
    """Send continuations like a settle of another queue."""
    bench.publish(forwarded=True, key="key")


def send_in_bulk(bench: Bench) -> None:
    bench.publish_drafts([bench.draft(forwarded=True) for _ in range(CHUNK_MESSAGES_MAX)])


def end_in_chains(bench: Bench) -> None:
    """End a message of a chain in another queue: a notice of it arrives at the first queue of the chain."""
    bench.begin_chain()
    lease = bench.claim_one()
    bench.settle(lease, then=[bench.continuation(lease, "mails")])
    bench.deliver_all()
    bench.settle(bench.claim_one(queue="mails"), queue="mails")
    bench.deliver_all()


@pytest.mark.promise("CHAIN-2", "STORE-1")
@pytest.mark.parametrize("arrive", [send_on, send_in_bulk, end_in_chains])
def test_old_arrivals_are_removed_a_bounded_number_at_a_time_and_the_key_expires_with_the_last(
    arrive: Callable[[Bench], None], plain_bench: Bench, inside: Inside
) -> None:
    key = inside.key("arrivals")
    plain_bench.configure()
    inside.client.zadd(key, {f"{number:024}": 1 + number for number in range(ENTRIES)})
    counts = [ENTRIES]
    while counts[-1]:
        arrive(plain_bench)
        counts.append(inside.client.zcount(key, "-inf", ENTRIES))
        assert counts[-2] - 2 * ARRIVALS_FORGOTTEN_MAX <= counts[-1] < counts[-2]
    assert inside.client.zcard(key) > 0
    assert 0 < inside.client.pttl(key) <= ARRIVAL_TTL_MS
