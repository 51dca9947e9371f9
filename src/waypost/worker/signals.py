"""SIGINT, SIGTERM and SIGHUP as requests for an orderly stop.

The first signal requests a stop; then each signal has its previous effect again, so that a second one ends the process.
A signal for which the program has its own handler keeps that handler.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def is_stop_request(error: BaseException) -> bool:
    """Return whether an error is a request to stop from outside, made by a signal.

    Python runs signal handlers in the main thread, in the middle of whatever runs there. `KeyboardInterrupt` counts
    unless `StopSignals` has taken SIGINT, which never raises it. An error other than an `Exception` counts if one of
    the program's own signal handlers raised it, as with `signal.signal(SIGTERM, lambda *_: sys.exit())`.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return not isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), StopSignals)
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


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
