"""Waves of drafts: what is sent together, what waits for an answer, and what a full group does to the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from waypost import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.errors import OutcomeUnknown
from waypost.operations.flow import Together
from waypost.operations.waves import SEND_CHUNKS_MAX, Wave, split_drafts
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.store.port import Draft


@pytest.fixture
def post() -> Iterator[Waypost]:
    with Waypost("memory://") as made:
        yield made


def drafts_of(post: Waypost, groups: str) -> list[Draft]:
    ids = context_of(post).session.message_ids(len(groups))
    return [
        Draft(id, b"\1" + id.encode() + b"\0" * 5, group=g, forwarded=True, capped=True)
        for id, g in zip(ids, groups, strict=True)
    ]


def stored(post: Waypost) -> list[str | None]:
    return [event.message_id for event in post.journal("out").events if event.event == "published"]


@pytest.mark.promise("QUEUE-5")
@pytest.mark.parametrize(("order", "sizes"), [("group", [1, 1, 1, 1, 1]), (None, [4, 2])])
def test_a_chunk_follows_the_answer_to_the_one_before_into_an_ordered_queue(
    post: Waypost, order: Any, sizes: list[int]
) -> None:
    """The answers to the first flush are lost; the messages are stored in their order all the same."""
    post.configure("out", order=order)
    drafts = drafts_of(post, "abab")
    flow = Wave("out", [[draft] for draft in drafts]).send(context_of(post), None)
    step, flushes = next(flow), list[int]()
    while True:
        try:
            if not isinstance(step, Together):
                step = flow.send(run_flow(post, iter_step(step)))
                continue
            calls = list(step.calls)
            flushes.append(len(calls))
            answers: list[Any] = [run_flow(post, iter_step(call)) for call in calls]
            if len(flushes) == 1:
                answers[:2] = [OutcomeUnknown("lost")] * len(answers[:2])
            step = flow.send(answers)
        except StopIteration:
            break
    assert flushes == sizes
    assert stored(post) == [draft.id for draft in drafts]


def iter_step(step: Any) -> Any:
    return (yield step)


@pytest.mark.promise("QUEUE-7")
def test_very_many_full_groups_are_tried_a_few_at_a_time_and_each_has_its_turn(post: Waypost) -> None:
    post.configure("out", group_max_pending=1)
    groups = "".join(map(chr, range(1000, 1300)))
    wave = Wave("out", split_drafts(drafts_of(post, groups * 2)))
    context = context_of(post)
    assert sum(len(chunk) for chunk, _ in run_flow(post, wave.send(context, None))) == 300
    assert len(wave) == 300
    post.purge("out", "ready")
    while wave:
        before = len(wave)
        assert len(run_flow(post, wave.send(context, None))) <= SEND_CHUNKS_MAX
        assert len(wave) < before
    assert post.ledger("out").published == 600


@pytest.mark.promise("QUEUE-7")
@given(
    groups=some.text("abcd", min_size=1, max_size=60),
    sizes=some.integers(1, 20),
    caps=some.fixed_dictionaries({group: some.integers(1, 12) for group in "abc"}),
    room=some.one_of(some.none(), some.integers(1, 30)),
    order=some.sampled_from([None, "group"]),
)
def test_each_group_gets_as_many_as_it_has_room_for_in_order(
    groups: str, sizes: int, caps: dict[str, int], room: int | None, order: Any
) -> None:
    with Waypost("memory://") as post:
        post.configure("out", fair=True, order=order)
        for group, cap in caps.items():
            post.configure_group("out", group, max_pending=cap)
        drafts = drafts_of(post, groups)
        wave = Wave("out", [drafts[at : at + sizes] for at in range(0, len(drafts), sizes)])
        limits = {group: caps.get(group, 1000) for group in "abcd"}
        while wave:
            run_flow(post, wave.send(context_of(post), room))
            pending = [message.group for message in post.messages("out", "ready")]
            for full in wave.refusals:
                assert full is not None
                assert pending.count(full) == limits[full]
            post.purge("out", "ready")
        for group in "abcd" if order else "":
            ids = [draft.id for draft in drafts if draft.group == group]
            assert [id for id in stored(post) if id in ids] == ids
        assert Counter(stored(post)) == Counter(draft.id for draft in drafts)


def test_drafts_are_split_by_number_size_and_equal_keys() -> None:
    def draft(number: int, key: str | None = None, size: int = 1) -> Draft:
        return Draft(f"{number:024}", b"x" * size, key=key)

    many = list(split_drafts(draft(n) for n in range(CHUNK_MESSAGES_MAX + 1)))
    assert list(map(len, many)) == [CHUNK_MESSAGES_MAX, 1]
    large = list(split_drafts(draft(n, size=CHUNK_BYTES_MAX // 2) for n in range(3)))
    assert list(map(len, large)) == [2, 1]
    keys = list(split_drafts([draft(1, "a"), draft(2, "b"), draft(3, "a"), draft(3), draft(4)]))
    assert [[one.id[-1] for one in chunk] for chunk in keys] == [["1", "2"], ["3"], ["3", "4"]]
