"""SIGINT, SIGTERM and SIGHUP as requests to stop in order.

The first of them asks; after it every one has its old meaning again, so that a second one ends the process. A signal
for which the program has a handler of its own is left to it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """For the length of a `with` block, signals call `on_stop` with their name; in the main thread only."""

    def __init__(self, on_stop: Callable[[str], None]) -> None:
        self._on_stop = on_stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in NAMES:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._on_stop(signal.Signals(number).name)

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._before.clear()
