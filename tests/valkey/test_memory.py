"""What a queue costs the server: a body is stored once, and nothing grows with the messages that are done."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.valkey.inspector import Inside
from waypost.policy import REPLAY_MAX
from waypost.testing.bench import QUEUE, Bench

pytestmark = pytest.mark.promise("STORE-1")

LARGE = 100_000
#: Keys that stay when all messages are gone: counters and policy, history, sleepers, and those with a TTL.
KEPT = {"queue", "journal", "sleepers", "operations"}
EXPIRING = ("operations", "window", "result", "sleepers", "chain", "end", "watchers", "waiters")
#: Messages of each kind in one round.
ROUND = 250


# ---- a body is stored once -----------------------------------------------------------------------------------


def test_a_large_body_costs_less_than_a_fifth_more_than_its_size(plain_bench: Bench, inside: Inside) -> None:
    count = 50
    before = inside.client.info("memory")["used_memory"]
    for _ in range(count):
        plain_bench.publish(os.urandom(LARGE))
    assert inside.bytes_used() < 1.2 * LARGE * count
    assert inside.client.info("memory")["used_memory"] - before < 1.2 * LARGE * count

    assert len(plain_bench.claim_all()) == count
    assert inside.bytes_used() < 1.2 * LARGE * count
    assert inside.client.info("memory")["used_memory"] - before < 1.2 * LARGE * count


def test_a_large_body_is_not_copied_by_keys_timers_retries_or_death(plain_bench: Bench, inside: Inside) -> None:
    count = 10
    for number in range(count):
        plain_bench.publish(os.urandom(LARGE), key=f"key:{number}", window=3600, delay=60)
    plain_bench.after(60)
    for lease in plain_bench.claim_all():
        plain_bench.settle(lease, "retry", error_type="ValueError", error="no " * 100)
    for lease in plain_bench.claim_all():
        plain_bench.settle(lease, "dead", error_type="ValueError", error="no " * 100)
    assert plain_bench.ledger().dead_kept == count
    assert inside.bytes_used() < 1.2 * LARGE * count


# ---- nothing grows with the messages done --------------------------------------------------------------------


def one_round(bench: Bench, number: int) -> None:
    """Publish messages of every kind, and end them all."""
    bench.publish_count(ROUND)
    bench.publish_drafts([bench.draft(key=f"{number}:{n}") for n in range(ROUND)])
    bench.publish_drafts([bench.draft(key=f"{number}:window:{n}", window=30) for n in range(ROUND)])
    bench.publish_drafts([bench.draft(key=f"{number}:{n}", on_conflict="replace", delay=5) for n in range(ROUND)])
    bench.publish_count(ROUND, delay=30, group="a group")
    bench.publish_count(ROUND, priority=9)
    leases = bench.claim_all(sleeper="asleep")
    bench.settle_batch([bench.settlement(lease, result=b"a result", result_ttl=30) for lease in leases[:ROUND]])
    outcomes = ("retry", "snooze", "release", "drop", "dead", "retry")
    for at in range(ROUND, len(leases), ROUND):
        outcome = outcomes[at // ROUND % len(outcomes)]
        bench.settle_batch([bench.settlement(lease, outcome, after=1) for lease in leases[at : at + ROUND]])  # type: ignore[arg-type]
    bench.after(60)
    for lease in bench.claim_all():
        assert bench.settle(lease) == "done"
    chains = [bench.begin_chain() for _ in range(20)]
    for published in bench.publish_drafts([bench.draft(after_chains=chains) for _ in range(20)]):
        bench.watch(published.id, f"waiter:{number}")
    for chain in chains:
        bench.chain_state(chain, f"waiter:{number}")
    for _ in range(2):
        for lease in bench.claim_all():
            assert bench.settle(lease) == "done"
    bench.publish_count(ROUND, delay=3600)
    for state in ("ready", "delayed", "dead"):
        while bench.purge(state, limit=500).more:
            continue
    bench.claim(sleeper="asleep")


def sizes(inside: Inside) -> dict[str, int]:
    return {name: inside.bytes_of(inside.key(name)) for name in ("queue", "sleepers", "journal")}


def test_when_all_messages_are_gone_only_counters_history_and_expiring_keys_are_left(
    plain_bench: Bench, inside: Inside
) -> None:
    plain_bench.configure(journal_max=2_000)
    one_round(plain_bench, 1)
    assert inside.names() - {"window", "result", "chain", "end"} == KEPT
    base = inside.key("")
    for key in inside.all_keys():
        kind = key.removeprefix(base).partition(":")[0]
        if kind in EXPIRING:
            assert inside.client.pttl(key) > 0, f"{key} stays for ever"
    others = {key for key in inside.all_keys() if not key.startswith(base)}
    assert others == {f"{plain_bench.namespace}:queues"}
    first = sizes(inside)

    for number in range(2, 5):
        one_round(plain_bench, number)
    assert inside.names() - {"window", "result", "chain", "end"} == KEPT
    then = sizes(inside)
    ledger = plain_bench.ledger()
    assert ledger.published > 4 * 7 * ROUND - ROUND
    assert (ledger.ready, ledger.delayed, ledger.waiting, ledger.leased, ledger.dead_kept) == (0, 0, 0, 0, 0)
    # Another minute's counters, larger numbers; 1,440 minutes are kept.
    assert then["queue"] - first["queue"] < 3 * 1_024
    assert then["sleepers"] < 512
    # The journal was at its cap after the first round already, give or take what is cut at a time.
    assert then["journal"] < 1.5 * first["journal"]
    [operations] = [key for key in inside.all_keys() if ":operations:" in key]
    assert inside.client.hlen(operations) <= REPLAY_MAX + 32 + 1


def test_minute_counters_stop_growing_after_a_day(plain_bench: Bench, inside: Inside) -> None:
    for _ in range(3):
        for _ in range(1_440 // 2):
            plain_bench.publish()
            plain_bench.after(60)
        plain_bench.purge("ready", limit=500)
        plain_bench.purge("ready", limit=500)
    assert inside.client.hlen(inside.key("queue")) <= 1_440 + 4


def test_a_journal_at_its_cap_stops_growing(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.configure(journal_max=1_000)
    lengths = []
    for _ in range(12):
        plain_bench.publish_count(500)
        plain_bench.settle_batch([plain_bench.settlement(lease) for lease in plain_bench.claim_all()])
        lengths.append(inside.bytes_of(inside.key("journal")))
    assert max(lengths[6:]) <= 1.2 * max(lengths[:6])
    stats = plain_bench.stats()
    assert stats.journal_last - stats.journal_first + 1 <= 1_000 + 512


# ---- figures -------------------------------------------------------------------------------------------------


def measured(bench: Bench, inside: Inside) -> Iterator[tuple[str, float]]:
    """Return the bytes of one item of each kind. The journal is measured separately: it has a limit of its own."""
    count, body = 2_000, b"x" * 100
    fixed = 0

    def each(*, without: tuple[str, ...] = ("journal", "operations", "queue", "sleepers")) -> float:
        return (inside.bytes_used(without=without) - fixed) / count

    bench.publish_count(count, body=body)
    yield "message of 100 bytes, ready", each()
    leases = bench.claim_all()
    yield "the same, leased", each()
    bench.settle_batch([bench.settlement(lease) for lease in leases[:500]])
    for at in range(500, count, 500):
        bench.settle_batch([bench.settlement(lease) for lease in leases[at : at + 500]])
    assert each() == 0
    yield "history of a message: published, claimed, done", inside.bytes_of(inside.key("journal")) / count

    bench.publish_count(count, body=body, delay=60)
    yield "the same, delayed", each()
    for _ in range(4):
        bench.purge("delayed", limit=500)
    for at in range(0, count, 500):
        bench.publish_drafts([bench.draft(body, key=f"order:{at + n:06}", window=3600) for n in range(500)])
    keyed = each(without=("journal", "operations", "queue", "sleepers", "window"))
    yield "the same, ready, with a key of 12 bytes", keyed
    yield "window of a key of 12 bytes", each() - keyed
    fixed += round((each() - keyed) * count)
    leases = bench.claim_all()
    for at in range(0, count, 500):
        bench.settle_batch([bench.settlement(lease, result=b"y" * 100) for lease in leases[at : at + 500]])
    yield "result of 100 bytes", each()


#: No figure may be worse than this, as measured by the server. Allocators differ, so the bounds are loose.
BYTES_MAX = {
    "message of 100 bytes, ready": 600,
    "the same, leased": 900,
    "history of a message: published, claimed, done": 600,
    "the same, delayed": 900,
    "the same, ready, with a key of 12 bytes": 1_100,
    "window of a key of 12 bytes": 400,
    "result of 100 bytes": 500,
}


def test_bytes_for_each_message_key_and_result_are_as_documented(plain_bench: Bench, inside: Inside) -> None:
    figures = dict(measured(plain_bench, inside))
    for name, figure in figures.items():
        print(f"{name}: {figure:.0f} bytes")
    assert list(figures) == list(BYTES_MAX)
    assert {name: figure for name, figure in figures.items() if not 20 < figure < BYTES_MAX[name]} == {}
    assert plain_bench.ledger(queue=QUEUE).balance == 0
