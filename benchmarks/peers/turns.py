"""Contenders by turns: each round runs every one of them once, so that all see the same machine.

What counts is the median of the rounds. A contender that fails is named with its output, and left out; peers without
an environment are left out from the start. `close` prints at the end which were not measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.peers.harness import Contestant, TurnFailed
from benchmarks.peers.hosts import Host, host
from benchmarks.peers.registry import Peer, peer

T = TypeVar("T")
#: A quick run ends within two minutes, also on a machine that does other things.
QUICK_SECONDS = 100.0
QUICK_TURN_SECONDS = 25.0


def print_note(text: str) -> None:
    """Print a line for people, separate from the figures."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender on a store."""

    store: str
    contestant: Contestant


@dataclass
class Turns:
    """The hosts of a run, and the contenders."""

    quick: bool
    only: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    _hosts: dict[str, Host] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _begin: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Self:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores / 2:
            print_note(
                f"the machine is busy (load {load:.1f} on {cores} cores): only ratios within this run mean something"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.left_out:
            print_note("not measured: " + ", ".join(f"{name} ({why})" for name, why in self.left_out.items()))

    def ours(self, stores: Iterable[str], count: int = 0, variant: str = "") -> list[Entry]:
        """Return waypost on these stores, limited to the requested ones."""
        timeout = QUICK_TURN_SECONDS if self.quick else None
        mine = Contestant("waypost", count, variant=variant)
        mine = mine if timeout is None else mine.with_timeout(timeout)
        return [Entry(store, mine) for store in stores if self.only in (None, store)]

    def theirs(self, *names: str, share: float = 1.0) -> list[Entry]:
        """Return the named peers that are set up, with a share of the messages that each is measured with."""
        found = []
        for name in names:
            known: Peer = peer(name)
            if self.only not in (None, known.store):
                continue
            if not known.is_ready:
                if name not in self.left_out:
                    print_note(f"{name} is left out: it has no environment; `make bench-setup` makes it")
                self.left_out[name] = "not set up"
                continue
            one = Contestant(name, round(known.drain_count * share), known)
            found.append(Entry(known.store, one.with_timeout(QUICK_TURN_SECONDS) if self.quick else one))
        return found

    def take(self, entries: list[Entry], rounds: int, measure: Callable[[Contestant, Host], T]) -> dict[Entry, list[T]]:
        """Measure each entry, round by round. A quick run makes fewer rounds on a machine that is too busy."""
        results_by_entry: dict[Entry, list[T]] = {entry: [] for entry in entries}
        begin = time.monotonic()
        for turn in range(rounds):
            passed = time.monotonic() - begin
            if self.quick and turn and time.monotonic() - self._begin + passed / turn > QUICK_SECONDS:
                print_note(f"the machine is busy: {turn} of {rounds} rounds")
                break
            # Every other round backwards, so that no contender always comes first.
            for entry in [one for one in entries[:: -1 if turn % 2 else 1] if one in results_by_entry]:
                try:
                    results_by_entry[entry].append(measure(entry.contestant, self._host(entry.store)))
                except TurnFailed as failure:
                    print_note(str(failure))
                    self.left_out[entry.contestant.name] = "failed"
                    del results_by_entry[entry]
        return {entry: results for entry, results in results_by_entry.items() if results}

    def _host(self, store: str) -> Host:
        if store not in self._hosts:
            self._hosts[store] = self._stack.enter_context(host(store))
        return self._hosts[store]
