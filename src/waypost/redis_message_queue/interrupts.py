"""A flag that signals set, so that a consumer finishes its message before it stops."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BaseGracefulInterruptHandler(ABC):
    """What `interrupt=` takes: `is_interrupted` is called while a queue waits."""

    @abstractmethod
    def is_interrupted(self) -> bool:
        """Whether consumers are to stop."""


class GracefulInterruptHandler(BaseGracefulInterruptHandler):
    """Set by the first of its signals; a second one has its default effect.

    Raises `ValueError` outside of the main thread, and for a signal that has a handler already.
    """

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        chosen = tuple(signals)
        if not chosen:
            raise ValueError("signals must contain at least one signal")
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("GracefulInterruptHandler must be created in the main thread")
        for number in chosen:
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
                raise ValueError(f"{signal.Signals(number).name} has a handler already: use one, and fan out in it")
        self._interrupted = threading.Event()
        self._before: dict[int, Any] = {number: signal.signal(number, self._receive) for number in chosen}

    def is_interrupted(self) -> bool:
        """Whether one of the signals came."""
        return self._interrupted.is_set()

    def reset(self) -> None:
        """Give the signals back, and begin anew."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._before = {}
        self._interrupted.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupted.set()
        signal.signal(number, self._before.get(number, signal.SIG_DFL))
