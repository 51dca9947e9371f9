"""What happened in a run, in order, by true time: the clock of the simulation, which no process can see.

Clients, handlers, the network and the store report here through a `Recorder`. Nothing is interpreted: that is the
checker's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from waypost.values import EventRecord

T = TypeVar("T", bound="Happening")


@dataclass(frozen=True, slots=True)
class Happening:
    """Anything that is recorded: when by true time, and in which process, the operator or the store."""

    at: float
    who: str


@dataclass(frozen=True, slots=True)
class Called(Happening):
    """A client began a call, as a step of the scenario or a handler asked for it."""

    call: int
    action: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answered(Happening):
    """A call ended. `error` is the name of the error class; `result` what it returned, as plain data."""

    call: int
    result: Any = None
    error: str | None = None
    #: What the error says about the call: done, not done or unknown.
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class HandlerStarted(Happening):
    """A handler, or a `receive` block, began with a message."""

    queue: str
    message_id: str
    token: int
    nonce: bytes
    label: str
    #: Which run of this label it is, over all processes, from 1: a message that is published again goes on counting.
    run: int
    kind: Literal["async", "thread", "block"]
    #: How many deliveries and attempts the claim said.
    deliveries: int
    attempts: int


@dataclass(frozen=True, slots=True)
class HandlerNotified(Happening):
    """A handler learned that its lease is over (`lost`) or that its message is to be cancelled (`cancel`)."""

    message_id: str
    token: int
    run: int
    what: Literal["lost", "cancel"]


@dataclass(frozen=True, slots=True)
class HandlerEnded(Happening):
    """A handler ended: the kind of its run, or `cancelled` if it was cancelled from outside."""

    message_id: str
    token: int
    run: int
    how: str
    #: The ids of messages that it sends on, if its settle counts.
    sent_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStarted(Happening):
    """The worker of a process claims from now on."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerStopping(Happening):
    """The worker of a process was asked to stop in order."""

    timeout: float


@dataclass(frozen=True, slots=True)
class WorkerStopped(Happening):
    """The worker of a process has stopped in order, and reports."""

    report: dict[str, int]


@dataclass(frozen=True, slots=True)
class FaultBegan(Happening):
    """A fault began; `number` is the same at its end."""

    number: int
    fault: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FaultEnded(Happening):
    """A fault is over."""

    number: int
    fault: str


@dataclass(frozen=True, slots=True)
class StoreStep(Happening):
    """The store ran a request of process `who`: one atomic step.

    `arguments` are those of the store's verb without the operation; `events` is what the step appended to the
    journals. A request that raised has an `error`.
    """

    #: Numbered from 1, in the order in which the store ran them.
    step: int
    store_ms: int
    verb: str
    #: The operation id as the journal shows it, None for verbs that have none; and whether the process sent it before.
    operation: str | None
    arguments: dict[str, Any]
    result: Any
    error: str | None
    events: tuple[EventRecord, ...]


@dataclass(frozen=True, slots=True)
class ReplyArrived(Happening):
    """The answer of a step reached its process."""

    step: int


@dataclass(frozen=True, slots=True)
class StoreRestarted(Happening):
    """The store is back after a restart. Steps after `kept_step` are lost."""

    kept_step: int


@dataclass(frozen=True, slots=True)
class RunEnded(Happening):
    """The run is over. `states` is what each queue holds, by a look into the store: see `QueueState`."""

    store_ms: int
    states: dict[str, QueueState]


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message in the store."""

    state: str
    token: int
    deliveries: int
    attempts: int
    key: str | None
    ready_ms: int
    lease_end_ms: int | None
    label: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a queue holds."""

    messages: dict[str, MessageView]
    #: The terms of the store's own ledger.
    ledger: dict[str, int]
    paused: bool = False
    #: By key: next instant, fires, missed.
    schedules: dict[str, tuple[int | None, int, int]] = field(default_factory=dict)
    #: Chains that began here and are not finished, by the id of their first message, with how many are open.
    open_chains: dict[str, int] = field(default_factory=dict)


#: What a process by itself can record.
OF_PROCESSES = {
    kind.__name__: kind
    for kind in (
        Called, Answered, HandlerStarted, HandlerNotified, HandlerEnded, WorkerStarted, WorkerStopping, WorkerStopped
    )
}  # fmt: skip


def to_line(happening: Happening) -> bytes:
    """What a process recorded, as a line of a file."""
    return msgspec.json.encode((type(happening).__name__, happening)) + b"\n"


def from_line(line: bytes) -> Happening:
    """Read such a line."""
    name, fields = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
    return msgspec.json.decode(fields, type=OF_PROCESSES[name])


@dataclass(slots=True)
class History:
    """All that happened."""

    happenings: list[Happening] = field(default_factory=list)

    def __iter__(self) -> Iterator[Happening]:
        return iter(self.happenings)

    def __len__(self) -> int:
        return len(self.happenings)

    def of(self, kind: type[T]) -> Iterator[T]:
        return (one for one in self.happenings if isinstance(one, kind))

    def lines(self) -> list[str]:
        """One line for each, the same for the same run."""
        return [repr(one) for one in self.happenings]


class Recorder:
    """Takes down what happens. `clock` is true time in seconds from the start of the run.

    Where several recorders make one history, each numbers its calls from another number on.
    """

    def __init__(
        self, clock: Callable[[], float], *, observe: Callable[[Happening], None] | None = None, first_call: int = 0
    ) -> None:
        self.history = History()
        self._clock = clock
        self._observe = observe
        self._calls = first_call
        self._runs: dict[tuple[str, str], int] = {}

    @property
    def now(self) -> float:
        return self._clock()

    def add(self, kind: type[T], who: str, *fields: Any, **named: Any) -> T:
        """Record something that happens now."""
        happening = kind(self._clock(), who, *fields, **named)
        self.history.happenings.append(happening)
        if self._observe is not None:
            self._observe(happening)
        return happening

    def begin_call(self, who: str, action: str, arguments: dict[str, Any]) -> int:
        """Record that a call begins; its number."""
        self._calls += 1
        self.add(Called, who, self._calls, action, arguments)
        return self._calls

    def next_run(self, queue: str, label: str) -> int:
        """The number of a run that begins now: of a message, or of one that was published again as itself."""
        self._runs[queue, label] = self._runs.get((queue, label), 0) + 1
        return self._runs[queue, label]
