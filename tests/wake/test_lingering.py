"""When a worker lingers instead of falling asleep, told by a clock of its own."""

from __future__ import annotations

import pytest

from waypost.policy import COVER_MS_MAX
from waypost.worker.lingering import ECHO_SECONDS, LINGER_SECONDS_MAX, Linger


class Story:
    """Claims one after the other, each as long as told."""

    def __init__(self, *, echo: bool = False) -> None:
        self.now = 100.0
        self.linger = Linger(lambda: self.now, echo=echo)

    def claim(self, found: int, *, took: float = 0.001, after: float = 0.0, may_sleep: bool = True) -> bool:
        self.now += after
        lingers = self.linger.begin(may_sleep)
        self.now += took
        self.linger.end(found)
        return lingers


@pytest.mark.promise("WAKE-2")
def test_a_message_now_and_then_is_slept_for() -> None:
    story = Story()
    assert not any(story.claim(1, after=0.005) for _ in range(100))
    assert story.linger.cover_ms is None


@pytest.mark.promise("WAKE-2")
def test_who_finds_much_looks_again_soon_and_tells_the_store_when() -> None:
    story = Story()
    lingered = [story.claim(2, after=0.002) for _ in range(100)]
    assert not lingered[0]
    assert all(lingered[50:])
    assert 0 < story.linger.seconds <= LINGER_SECONDS_MAX
    assert story.linger.cover_ms is not None
    assert story.linger.seconds * 1000 < story.linger.cover_ms <= COVER_MS_MAX


@pytest.mark.promise("WAKE-2")
def test_who_finds_nothing_falls_asleep_and_takes_its_promise_back() -> None:
    story = Story()
    for _ in range(100):
        story.claim(2, after=0.002)
    assert story.claim(0)
    assert not story.claim(0)
    assert story.linger.cover_ms == 0
    assert not story.claim(0)
    assert story.linger.cover_ms is None


@pytest.mark.promise("WAKE-5")
def test_after_lingering_the_first_sleeps_are_short() -> None:
    story = Story()
    for _ in range(100):
        story.claim(2, after=0.002)
    story.claim(0)
    story.claim(0)
    assert [story.linger.nap(5.0) for _ in range(4)] == [*ECHO_SECONDS, 5.0, 5.0]
    assert [Story().linger.nap(5.0) for _ in range(2)] == [5.0, 5.0]


@pytest.mark.promise("WAKE-5")
def test_where_words_can_come_too_early_every_piece_of_work_has_its_echo() -> None:
    story = Story(echo=True)
    assert story.linger.nap(5.0) == 5.0
    story.claim(1, after=1.0)
    assert [story.linger.nap(5.0) for _ in range(3)] == [*ECHO_SECONDS, 5.0]


@pytest.mark.promise("TIMER-3")
def test_nobody_lingers_who_cannot_be_woken() -> None:
    story = Story()
    assert not any(story.claim(5, after=0.001, may_sleep=False) for _ in range(100))
