"""The manual clock: it stands still until it is moved, and never goes back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from waypost.testing.clock import START_MS, ManualClock


def test_the_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock()
    assert clock() == clock() == START_MS
    assert clock.advance(1.5) == clock() == START_MS + 1_500
    assert clock.advance(timedelta(minutes=1)) == START_MS + 61_500
    assert clock.advance_ms(1) == START_MS + 61_501


def test_the_manual_clock_does_not_go_back() -> None:
    clock = ManualClock(5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    assert clock() == 5
