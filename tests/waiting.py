"""Waiting for a condition, with a limit that a test on a busy machine does not reach."""

from __future__ import annotations

import asyncio
import inspect
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


async def until_async(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """The same on an event loop: the result of `condition` is awaited if need be."""

    async def poll() -> Any:
        while True:
            result = condition()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(PAUSE_SECONDS)

    try:
        return await asyncio.wait_for(poll(), WAIT_SECONDS_MAX)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {WAIT_SECONDS_MAX:g} s") from None
