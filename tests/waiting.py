"""Waiting for a condition, with a limit that a test on a busy machine does not reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_SECONDS_MAX = 90.0
PAUSE_SECONDS = 0.01


def until(condition: Callable[[], Any], what: str = "the condition", *, seconds: float = WAIT_SECONDS_MAX) -> Any:
    """Call `condition` until its result is true, and return that result; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(PAUSE_SECONDS)
    return result
