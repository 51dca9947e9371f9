"""Groups as the server has them: the records follow the messages, in bounded steps, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.valkey.inspector import Inside
from waypost.errors import ForeignData
from waypost.policy import CHUNK_MESSAGES_MAX, GROUPS_SKIPPED_MAX
from waypost.testing.bench import QUEUE, Bench, strand
from waypost.testing.conformance.damage import check

#: The keys of a grouped queue, by their types.
KEYS = {
    "groups": "hash", "group_names": "zset", "group_line": "zset", "group_depths": "zset", "group_turns": "zset",
    "group_limited": "zset", "group_rates": "hash", "group_rate_ends": "zset", "group_settings": "hash",
    "positions": "hash", "group_held": "zset", "group_counted": "set",
}  # fmt: skip


def keys_of_groups(inside: Inside) -> set[str]:
    return inside.names() & set(KEYS)


def fill(bench: Bench, count: int, groups: int = 7, **options: Any) -> list[str]:
    """Publish messages of several groups; return their ids."""
    ids: list[str] = []
    for at in range(0, count, CHUNK_MESSAGES_MAX):
        numbers = range(at, min(count, at + CHUNK_MESSAGES_MAX))
        drafts = [bench.draft(b"%d" % number, group=f"g{number % groups}", **options) for number in numbers]
        ids += [one.id for one in bench.publish_drafts(drafts)]
    return ids


def drain(bench: Bench, limit: int = 100) -> list[list[str]]:
    """Claim and finish all messages; return the ids of each claim."""
    claims = []
    while leases := bench.claim(limit):
        claims.append([lease.id for lease in leases])
        bench.settle_batch([bench.settlement(lease) for lease in leases])
    return claims


def is_built(inside: Inside) -> bool:
    fields = inside.client.hmget(inside.key("queue"), "groups", "groups_at")
    return fields in ([b"T", None], [None, None])


@pytest.mark.promise("QUEUE-7", "PUB-7")
def test_a_publish_may_drop_more_messages_than_a_command_takes(plain_bench: Bench) -> None:
    groups = 36
    plain_bench.configure(fair=True)
    fill(plain_bench, groups * 300, groups)
    # The first publish after both limits drops so many of each group that it publishes into, and of the longest ones.
    plain_bench.configure(max_pending=100, group_max_pending=2, overload="drop_oldest")
    for _ in range(4):
        fill(plain_bench, groups, groups)
    ledger = plain_bench.ledger()
    assert (ledger.balance, ledger.ready <= 100) == (0, True)


@pytest.mark.promise("QUEUE-6", "STORE-1")
def test_a_queue_that_is_not_grouped_has_no_key_of_groups(plain_bench: Bench, inside: Inside) -> None:
    fill(plain_bench, 20)
    drain(plain_bench)
    assert keys_of_groups(inside) == set()
    assert not {b"groups", b"groups_at", b"group_turn"} & set(inside.client.hkeys(inside.key("queue")))


@pytest.mark.promise("QUEUE-6", "QUEUE-7", "STORE-1")
@pytest.mark.parametrize(
    "settings", [{"fair": True}, {"order": "group"}, {"group_max_running": 2}], ids=["fair", "order", "limit"]
)
def test_no_key_is_left_of_groups_without_messages(
    plain_bench: Bench, inside: Inside, settings: dict[str, Any]
) -> None:
    plain_bench.configure(**settings)
    fill(plain_bench, 50)
    inside.check()
    for lease in plain_bench.claim(5):
        plain_bench.settle(lease, "retry", after=3)
    inside.check()
    plain_bench.after(3)
    drain(plain_bench, 3)
    inside.check()
    assert keys_of_groups(inside) == set()


@pytest.mark.promise("QUEUE-7", "STORE-1")
def test_the_rate_of_a_group_is_forgotten_when_its_window_is_over(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.configure(group_rate="1/s", lease=60)
    fill(plain_bench, 14)
    for _ in range(2):
        plain_bench.settle_batch([plain_bench.settlement(lease) for lease in plain_bench.claim(100)])
        assert inside.client.hlen(inside.key("group_rates")) == 7
        plain_bench.after(1.1)
    assert plain_bench.claim(100) == []
    assert keys_of_groups(inside) == set()


@pytest.mark.promise("QUEUE-5", "QUEUE-6", "QUEUE-7", "SEE-5")
@pytest.mark.parametrize(
    "settings",
    [{"fair": True}, {"order": "group"}, {"order": "group", "on_failure": "pass"}, {"group_max_running": 2}],
    ids=["fair", "order", "pass", "limit"],
)
def test_the_records_follow_the_messages_whatever_becomes_of_them(
    plain_bench: Bench, inside: Inside, settings: dict[str, Any]
) -> None:
    bench, chance = plain_bench, random.Random(7)
    bench.configure(lease=5, max_pending=60, overload="drop_oldest", max_deliveries=3, **settings)
    for step in range(60):
        keys = [chance.choice([None, f"k{n}"]) for n in range(3)]
        for key in keys:
            bench.publish(
                group=chance.choice([None, "a", "b", "c"]), key=key, delay=chance.choice([0, 0, 2]),
                priority=chance.randrange(10), on_conflict=chance.choice(["keep", "replace", "extend"]),
            )  # fmt: skip
        for lease in bench.claim(chance.randrange(5)):
            outcome: Any = chance.choice(["done", "retry", "snooze", "dead", "drop", "release", None])
            if outcome is not None:
                bench.settle(lease, outcome, after=chance.choice([0, 3]))
        match step % 6:
            case 1:
                bench.redrive()
            case 2:
                for id in bench.ids("delayed")[:2]:
                    bench.cancel(id)
            case 3:
                bench.skip_held("a")
            case 4:
                bench.purge("ready", limit=1)
            case 5:
                bench.after(chance.choice([1, 6]))
        inside.check()
    assert check(bench) == []
    bench.check_invariants()


@pytest.mark.promise("QUEUE-2", "QUEUE-7")
def test_a_live_queue_is_converted_step_by_step_with_all_that_is_in_it(plain_bench: Bench, inside: Inside) -> None:
    bench = plain_bench
    bench.configure(lease=600)
    ids = fill(bench, 3 * CHUNK_MESSAGES_MAX)
    leases = bench.claim(300)
    timers = fill(bench, 700, delay=50)
    bench.configure(group_max_running=60)
    assert not is_built(inside)
    steps = 0
    more: list[Any] = []
    while not is_built(inside):
        steps += 1
        match steps % 4:
            case 0:
                ids += fill(bench, 10)
            case 1:
                # Claims go on in the order of a queue without groups.
                more += bench.claim(5)
            case 2:
                bench.settle(more.pop())
                bench.settle(leases.pop(), "retry", after=20)
            case 3:
                bench.cancel(timers.pop())
    # A part of a chunk in each step.
    assert steps >= 3
    inside.check()
    assert check(bench) == []
    # 420 may run at once, and some do.
    running = len(leases) + len(more)
    assert len(bench.claim(CHUNK_MESSAGES_MAX)) == 420 - running
    assert bench.claim(5) == []
    inside.check()
    assert all(record.running == 60 for record in bench.groups())


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
def test_messages_that_fail_while_a_queue_gets_an_order_keep_their_places(plain_bench: Bench, inside: Inside) -> None:
    bench, count = plain_bench, 3 * CHUNK_MESSAGES_MAX
    bench.configure(lease=600)
    fill(bench, 2 * count, groups=count)
    leases = [lease for _ in range(3) for lease in bench.claim(CHUNK_MESSAGES_MAX)]
    bench.configure(order="group")
    assert not is_built(inside)
    for at in range(0, count, CHUNK_MESSAGES_MAX):
        part = leases[at : at + CHUNK_MESSAGES_MAX]
        bench.settle_batch([bench.settlement(lease, "retry", after=30) for lease in part])
    while not is_built(inside):
        bench.claim(0)
    # Each holds its group.
    assert bench.claim(5) == []
    bench.after(30)
    assert {lease.id for lease in bench.claim(5)} < {lease.id for lease in leases}
    inside.check()


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
def test_an_order_that_is_switched_off_gives_priorities_back_step_by_step(plain_bench: Bench, inside: Inside) -> None:
    bench = plain_bench
    bench.configure(order="group")
    low, high = (fill(bench, 2 * CHUNK_MESSAGES_MAX, priority=priority) for priority in (1, 9))
    bench.configure(order=None)
    assert not is_built(inside)
    while not is_built(inside):
        bench.claim(0)
    assert keys_of_groups(inside) == set()
    inside.check()
    assert [id for claim in drain(bench, 200) for id in claim] == [*high, *low]


@pytest.mark.promise("QUEUE-2", "PUB-9")
@pytest.mark.parametrize("after", [{"order": None}, {"order": None, "fair": True}], ids=["plain", "fair"])
def test_messages_published_while_an_order_is_switched_off_have_their_priority(
    plain_bench: Bench, inside: Inside, after: dict[str, Any]
) -> None:
    bench = plain_bench
    bench.configure(order="group")
    ids = fill(bench, 2 * CHUNK_MESSAGES_MAX, groups=1)
    bench.configure(**after)
    while not is_built(inside):
        ids.append(bench.publish(group="g0").id)
    low = bench.publish(group="g0", priority=1).id
    assert [id for claim in drain(bench, 200) for id in claim] == [*ids, low]


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.parametrize("after", [{"order": None}, {"order": None, "fair": True}], ids=["plain", "fair"])
def test_messages_are_settled_while_an_order_is_switched_off(
    plain_bench: Bench, inside: Inside, after: dict[str, Any]
) -> None:
    bench = plain_bench
    bench.configure(order="group", lease=600)
    count = 4 * CHUNK_MESSAGES_MAX
    fill(bench, count, groups=200)
    leases = bench.claim(200)
    bench.configure(**after)
    assert not is_built(inside)
    # Each settle carries the change on.
    assert [bench.settle(lease) for lease in leases] == ["done"] * len(leases)
    assert is_built(inside)
    inside.check()
    assert len(drain(bench)) >= (count - len(leases)) / 100
    assert bench.ledger().done == count


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.parametrize("first", [{"order": "group"}, {"fair": True}], ids=["order", "fair"])
def test_settings_that_change_before_the_last_change_was_carried_out_lose_nothing(
    plain_bench: Bench, inside: Inside, first: dict[str, Any]
) -> None:
    bench, chance = plain_bench, random.Random(3)
    bench.configure(lease=600)
    ids = fill(bench, 1_300)
    changes: list[dict[str, Any]] = [
        first, {"order": None, "fair": False}, {"fair": True}, {"order": "group"}, {"fair": False, "order": None},
    ]  # fmt: skip
    for change in changes * 2:
        bench.configure(**change)
        for _ in range(chance.randrange(3)):
            ids += fill(bench, 7)
    bench.configure(order="group")
    while not is_built(inside):
        bench.claim(0)
    inside.check()
    assert check(bench) == []
    assert sorted(id for claim in drain(bench, CHUNK_MESSAGES_MAX) for id in claim) == sorted(ids)
    assert keys_of_groups(inside) == set()


@pytest.mark.promise("QUEUE-2", "QUEUE-5")
@pytest.mark.parametrize("between", [{"order": None}, {"order": None, "fair": True}], ids=["plain", "fair"])
def test_an_order_that_is_set_again_before_the_last_one_was_converted_back_is_kept(
    plain_bench: Bench, inside: Inside, between: dict[str, Any]
) -> None:
    bench = plain_bench
    bench.configure(order="group", lease=600)
    ids = fill(bench, 4 * CHUNK_MESSAGES_MAX, groups=300)
    bench.configure(**between)
    ids += fill(bench, 100, groups=100)
    assert not is_built(inside)
    bench.configure(order="group")
    ids += fill(bench, 100, groups=100)
    while not is_built(inside):
        bench.claim(0)
    inside.check()
    numbers = {id: number for number, id in enumerate(ids)}
    handed: dict[str, list[int]] = {}
    while leases := bench.claim(300):
        for lease in leases:
            handed.setdefault(lease.group or "", []).append(numbers[lease.id])
        bench.settle_batch([bench.settlement(lease) for lease in leases])
    assert sum(map(len, handed.values())) == len(ids)
    assert [order for order in handed.values() if order != sorted(order)] == []


@pytest.mark.promise("QUEUE-6")
def test_a_claim_skips_a_bounded_number_of_groups_that_cannot_go_on(plain_bench: Bench, inside: Inside) -> None:
    bench = plain_bench
    bench.configure(order="group", lease=600)
    count = GROUPS_SKIPPED_MAX + 300
    # Two of each: one that is leased, and one behind it for which its group is in turn.
    fill(bench, count, groups=count)
    while bench.claim(CHUNK_MESSAGES_MAX):
        pass
    fill(bench, count, groups=count)
    last = bench.publish(group="the last").id
    first = bench.claimed(5)
    # The next claim goes on at once.
    assert (first.leases, first.next_rate_ms) == ([], 0)
    second = bench.claimed(5)
    assert ([lease.id for lease in second.leases], second.next_rate_ms) == ([last], None)
    assert inside.client.zcard(inside.key("group_turns")) == 0


@pytest.mark.promise("STORE-1", "QUEUE-6")
def test_a_line_that_names_a_message_that_is_not_ready_is_cleared_by_the_claim(
    plain_bench: Bench, inside: Inside
) -> None:
    bench = plain_bench
    bench.configure(fair=True)
    ids = fill(bench, 6, groups=2)
    bench.run(strand(bench.store, QUEUE, ids[0]))
    assert [lease.id for lease in bench.claim(3)] == [ids[2], ids[1], ids[4]]
    assert [damage.id for damage in check(bench, mend=True)] == [ids[0]]
    inside.check()
    assert sorted(lease.id for lease in bench.claim(10)) == sorted([ids[0], ids[3], ids[5]])


@pytest.mark.promise("STORE-1", "QUEUE-7")
def test_a_check_counts_the_leases_of_a_group_anew(plain_bench: Bench, inside: Inside) -> None:
    bench = plain_bench
    bench.configure(group_max_running=1)
    fill(bench, 4, groups=2)
    bench.claim(2)
    inside.client.hset(inside.key("groups"), "g0", (5).to_bytes(4, "big") + bytes(4))
    assert [(damage.kind, damage.id) for damage in check(bench)] == [("group", "g0")]
    check(bench, mend=True)
    assert check(bench) == []
    inside.check()


@pytest.mark.promise("STORE-1")
@pytest.mark.parametrize("name", KEYS)
def test_a_foreign_value_at_a_key_of_groups_is_named_and_nothing_is_touched(
    plain_bench: Bench, inside: Inside, name: str
) -> None:
    bench = plain_bench
    bench.publish(group="a")
    lease = bench.claim_one()
    acts: list[Any] = [lambda: bench.configure(fair=True)]
    if name != "group_counted":
        bench.configure(order="group", group_rate="100/s")
        bench.publish(group="a")
        acts = [
            lambda: bench.publish(group="a"), lambda: bench.claim(1), lambda: bench.settle(lease, "retry"),
            lambda: bench.cancel(bench.ids("ready")[0]), lambda: bench.configure_group("a", weight=2), bench.groups,
        ]  # fmt: skip
    inside.client.delete(inside.key(name))
    inside.client.set(inside.key(name), b"not ours")
    before = inside.snapshot()
    for act in acts:
        with pytest.raises(ForeignData, match=name):
            act()
    assert inside.snapshot() == before


@pytest.mark.promise("STORE-1", "QUEUE-7")
@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_a_lost_message_is_found_and_its_group_counts_it_right_again(
    plain_bench: Bench, inside: Inside, state: str
) -> None:
    bench = plain_bench
    bench.configure(group_max_running=1, lease=60)
    ids = fill(bench, 4, groups=2)
    lost = {"ready": ids[0], "delayed": bench.publish(group="g0", delay=5).id, "leased": ids[0]}[state]
    if state == "leased":
        bench.claim(1)
    bench.run(strand(bench.store, QUEUE, lost))
    assert ("stranded", lost) in [(damage.kind, damage.id) for damage in check(bench)]
    assert [(damage.kind, damage.id) for damage in check(bench, mend=True)] == [("stranded", lost)]
    assert check(bench) == []
    inside.check()
