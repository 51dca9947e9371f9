"""Ids of messages and operations."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypost.identity import (
    ALPHABET,
    ID_CHARACTERS,
    Operation,
    Session,
    continuation_id,
    encode,
    id_time_ms,
    is_message_id,
)


@pytest.mark.promise("PUB-1")
def test_ids_are_unique_ordered_and_carry_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_800_000_000_000 * 1_000_000
    monkeypatch.setattr("time.time_ns", lambda: now_ns)
    session = Session()
    ids = session.message_ids(1000)
    assert len(set(ids)) == 1000
    assert all(len(id) == ID_CHARACTERS and is_message_id(id) for id in ids)
    assert {id_time_ms(id) for id in ids} == {1_800_000_000_000}
    monkeypatch.setattr("time.time_ns", lambda: now_ns + 1_000_000)
    assert all(id < later for id, later in zip(ids, session.message_ids(1000), strict=True))


def test_two_sessions_never_make_the_same_id() -> None:
    ids = [id for _ in range(20) for id in Session().message_ids(100)]
    assert len(set(ids)) == 2000


def test_threads_share_a_session_without_sharing_numbers() -> None:
    session = Session()
    made: list[tuple[Operation, str]] = []

    def make() -> None:
        for _ in range(500):
            made.append((session.operation("orders"), session.message_ids(1)[0]))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(operation.number for operation, _ in made) == list(range(1, 2001))
    assert len({id for _, id in made}) == 2000


def test_operations_are_numbered_for_each_queue() -> None:
    session = Session()
    numbers = [session.operation(queue).number for queue in ("a", "a", "b", "a")]
    assert numbers == [1, 2, 1, 3]


def test_an_operation_has_a_text() -> None:
    assert str(Operation(b"\1" * 8, 258, 0, b"")) == "0101010101010101.258"


@given(st.integers(0, 32**9 - 1), st.integers(0, 32**9 - 1))
def test_text_order_is_number_order(one: int, other: int) -> None:
    assert (encode(one, 9) < encode(other, 9)) == (one < other)
    assert id_time_ms(encode(one, 9)) == one


@pytest.mark.parametrize("text", ["", "x", "0" * 23, "0" * 25, "i" * 24, "A" * 24, " " * 24])
def test_a_text_that_is_no_id_is_recognised(text: str) -> None:
    assert not is_message_id(text)


@pytest.mark.promise("CHAIN-2")
def test_a_continuation_has_the_same_id_however_often_it_is_made() -> None:
    (source,) = Session().message_ids(1)
    first = continuation_id(source, 1, 0)
    assert first == continuation_id(source, 1, 0)
    assert is_message_id(first)
    assert id_time_ms(first) == id_time_ms(source)
    others = {continuation_id(source, token, index) for token in range(1, 5) for index in range(5)}
    assert len(others) == 20
    assert len(ALPHABET) == 32
