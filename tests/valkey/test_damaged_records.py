"""Damaged records: a verb skips them or changes nothing, other messages go on, and `check` finds and repairs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.valkey.inspector import Inside
from tests.valkey.test_foreign_data import BEFORE, CASES, VERBS, Scene
from waypost.errors import StoreFailed
from waypost.testing.bench import QUEUE, Bench
from waypost.values import Damage

pytestmark = pytest.mark.promise("STORE-1", "SEE-5")

#: The ways in which a value can be damaged.
GARBAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda value: None,
    "empty": lambda value: b"",
    "cut": lambda value: value[: len(value) // 2],
    "long": lambda value: value + b"more",
    "strange": lambda value: bytes(byte ^ 0x5A for byte in value),
}


def check(bench: Bench, *, mend: bool = False, queue: str = QUEUE) -> list[Damage]:
    """Run a whole check, step by step."""
    damages, cursor = [], None
    while True:
        page = bench.run(bench.store.check(queue, cursor, mend=mend))
        damages += page.damages
        cursor = page.cursor
        if cursor is None:
            return damages


def records(inside: Inside) -> Iterator[tuple[str, str, bytes]]:
    """Return every value of a record: key, field and value."""
    for name in ("state", "messages", "errors", "keys", "outgoing", "readers", "queue"):
        for field, value in sorted(inside.client.hgetall(inside.key(name)).items()):
            yield name, field.decode(), value


@pytest.fixture
def scene(request: pytest.FixtureRequest, plain_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(plain_bench)
    if request.param in BEFORE:
        BEFORE[request.param](made)
    fixed = plain_bench.operation()
    monkeypatch.setattr(plain_bench, "operation", lambda queue=QUEUE: fixed)
    return made


def failure_of(act: Callable[[Scene], object], scene: Scene) -> Exception | None:
    try:
        act(scene)
    except Exception as error:
        return error
    return None


def placed_twice_or_nowhere(inside: Inside) -> set[str]:
    """Return the messages that are not in exactly one index."""
    placed = [id for id, _ in inside.where()]
    bodies = {id.decode() for id in inside.client.hkeys(inside.key("messages"))}
    return {id for id in {*placed, *bodies} if placed.count(id) != 1 or id not in bodies}


@pytest.mark.parametrize(("scene", "verb"), CASES, indirect=["scene"])
def test_a_verb_skips_a_damaged_record_or_changes_nothing_and_a_repair_restores_everything(
    scene: Scene, verb: str, inside: Inside
) -> None:
    """For each record, and each way in which it can be damaged."""
    act = VERBS[verb]
    intact = inside.dumps()
    everything = list(records(inside))
    # The records take turns between the verbs: all of them with all verbs take minutes.
    everything = everything[list(VERBS).index(verb) % 5 :: 5 if len(everything) < 200 else 50]
    for number, (name, field, value) in enumerate(everything):
        kinds = list(GARBAGE) if name in ("state", "messages") else ["gone", "strange"]
        # The ways take turns between the records: each verb meets each of them, with one record or another.
        for kind in kinds[number % 2 :: 2]:
            inside.restore(intact)
            damaged = GARBAGE[kind](value)
            key = inside.key(name)
            inside.client.hdel(key, field) if damaged is None else inside.client.hset(key, field, damaged)
            before = inside.snapshot()
            what = f"{verb}: {name} {field} {kind}"
            refused = failure_of(act, scene)
            if refused is not None:
                assert name == "queue", f"{what}: {refused!r}"
                assert inside.snapshot() == before, what
            if name == "queue" and field in ("counts", "version", "policy"):
                continue
            assert placed_twice_or_nowhere(inside) <= {field, value[:24].decode(errors="replace")}, what
            check(scene.bench, mend=True)
            again = check(scene.bench)
            assert again == [], what
            assert scene.bench.ledger().balance == 0, what
            inside.check()  # each message in one index, with its body, state and key


def test_199_of_200_messages_are_handed_out_beside_a_damaged_one(plain_bench: Bench, inside: Inside) -> None:
    ids = plain_bench.publish_count(200)
    inside.client.hdel(inside.key("messages"), ids[77])
    claimed = plain_bench.claimed(500)
    assert [lease.id for lease in claimed.leases] == ids[:77] + ids[78:]
    assert claimed.damaged == (ids[77],)
    assert plain_bench.claimed(500).damaged == ()
    assert plain_bench.stats().damaged == 1
    # What was set aside is all that the ledger misses.
    assert plain_bench.ledger().balance == 1
    assert [(one.kind, one.id, one.mended) for one in check(plain_bench)] == [
        ("missing", ids[77], None),
        ("counters", None, None),
    ]
    assert check(plain_bench, mend=True)[0].mended == "dropped"
    assert (plain_bench.ledger().balance, plain_bench.ledger().dropped, plain_bench.stats().damaged) == (0, 1, 0)


def test_199_of_200_leases_are_reclaimed_beside_a_damaged_one_and_a_repair_restores_it(
    plain_bench: Bench, inside: Inside
) -> None:
    plain_bench.configure(lease=10)
    plain_bench.publish_count(200)
    leases = plain_bench.claim(500)
    tokens = {lease.id: lease.token for lease in leases}
    broken = leases[50].id
    inside.client.hset(inside.key("state"), broken, b"L\0")
    plain_bench.after(10)
    claimed = plain_bench.claim_all()
    assert {lease.id for lease in claimed} == set(tokens) - {broken}
    assert plain_bench.settle(leases[50]) == "lost"
    [mended] = check(plain_bench, mend=True)
    assert (mended.kind, mended.id, mended.mended) == ("unreadable", broken, "ready at the head of its priority")
    again = plain_bench.claim_one()
    assert again.id == broken
    assert again.token > tokens[broken]
    for lease in (*claimed, again):
        assert plain_bench.settle(lease) == "done"
    assert (plain_bench.ledger().balance, plain_bench.ledger().unexplained) == (0, 0)
    inside.check()


def test_a_message_in_no_index_is_found_and_put_before_the_others_of_its_priority(
    plain_bench: Bench, inside: Inside
) -> None:
    ids = plain_bench.publish_count(5)
    urgent = plain_bench.publish(priority=9).id
    inside.client.zrem(inside.key("ready"), ids[3])
    assert plain_bench.ledger().balance == 1
    found = check(plain_bench)
    assert [(one.kind, one.id) for one in found] == [("stranded", ids[3]), ("counters", None)]
    check(plain_bench, mend=True)
    assert [lease.id for lease in plain_bench.claim(10)] == [urgent, ids[3], *ids[:3], ids[4]]
    assert plain_bench.ledger().balance == 0
    mends = [event.cause for event in plain_bench.events() if event.event == "configured"]
    assert mends == [f"mended stranded {ids[3]}: ready at the head of its priority"]


def test_a_ready_message_with_a_state_is_handed_out_though_leases_and_states_are_as_many(
    plain_bench: Bench, inside: Inside
) -> None:
    """The fast path of a claim compares numbers only, and those of a damaged queue can be equal by chance."""
    retried, held = plain_bench.publish_count(2)
    first = plain_bench.claim_one()
    plain_bench.claim_one()
    plain_bench.settle(first, "retry")
    inside.client.hdel(inside.key("state"), held)
    assert inside.client.hlen(inside.key("state")) == inside.client.zcard(inside.key("leases"))
    assert plain_bench.claimed(5).damaged == ()
    assert plain_bench.claim_one().id == retried


def test_unreadable_counters_refuse_all_verbs_until_they_are_repaired(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.publish_count(5)
    plain_bench.claim(2)
    inside.client.hset(inside.key("queue"), "counts", b"\xc1")
    before = inside.snapshot()
    with pytest.raises(StoreFailed, match="waypost doctor --mend"):
        plain_bench.publish()
    assert inside.snapshot() == before
    assert [one.kind for one in check(plain_bench)] == ["unreadable"]
    check(plain_bench, mend=True)
    assert check(plain_bench) == []
    assert plain_bench.publish().status == "queued"
    assert plain_bench.ledger().balance == 0
    assert len(plain_bench.claim(10)) == 4


def test_a_journal_that_is_ahead_of_its_counters_is_continued(plain_bench: Bench, inside: Inside) -> None:
    """As after a restore of some of the keys."""
    plain_bench.publish_count(3)
    older = inside.client.hget(inside.key("queue"), "counts")
    plain_bench.publish_count(3)
    inside.client.hset(inside.key("queue"), "counts", older)
    assert plain_bench.publish().status == "queued"
    assert [event.number for event in plain_bench.events()][-1] > 6
    check(plain_bench, mend=True)
    assert plain_bench.ledger().balance == 0


def test_a_check_of_a_queue_in_use_finds_nothing(plain_bench: Bench) -> None:
    plain_bench.publish_count(600)
    damages, cursor, pages = [], None, 0
    while True:
        page: Any = plain_bench.run(plain_bench.store.check(QUEUE, cursor, mend=True))
        damages += page.damages
        cursor, pages = page.cursor, pages + 1
        if cursor is None:
            break
        for lease in plain_bench.claim(20):
            plain_bench.settle(lease, "retry" if pages % 2 else "done", after=pages % 3)
    assert damages == []
    assert pages > 3
