"""The contract of a wake-up channel: topics, notifications and listeners.

A notification is a short text: the name of a sleeper, `*` for all, or a value that depends on the topic. Your own
channel needs the four members of `Channel`; those of this package are `waypost.wake.hub.Hub` and its subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

#: `ready`: there is work for the named sleepers, or a message or chain that a client waits for has ended. `held`: a
#: running message is to be cancelled. `poll`: a poll of a worker, sent back to it. `schedules`: a schedule was changed.
Kind: TypeAlias = Literal["ready", "held", "poll", "schedules"]
#: `idle`: there is no listener. `broken`: it will be retried; until then listeners must poll.
State: TypeAlias = Literal["idle", "starting", "working", "broken"]

ALL_SLEEPERS = "*"
#: The queue in the topic of notifications that are about all queues. Of kinds that have no topic of a single queue.
ALL_QUEUES = "all"
#: What listeners get when the channel starts or stops working: poll once, notifications may have been missed.
POLL_NOW = ""

#: Called with each notification, from any thread: it must be quick and must not block.
OnNotification: TypeAlias = Callable[[str], None]


class Topic(NamedTuple):
    """What notifications are about."""

    namespace: str
    kind: Kind
    queue: str


class Listening(Protocol):
    """The subscription of one listener to a topic."""

    @property
    def working(self) -> bool:
        """Whether a notification that is sent now arrives."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """Carries notifications between processes, at most once each. No method waits for a server or raises for one."""

    #: Its name in logs and reports.
    kind: str

    @property
    def state(self) -> State: ...

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        """Send notifications, without waiting."""
        ...

    def listen(self, topic: Topic, name: str | None, on_notification: OnNotification) -> Listening:
        """Call back for notifications that are `name`, `*` or `POLL_NOW`; for all without a name."""
        ...

    def flush(self, timeout: float) -> bool:
        """Wait until what was sent has left this process; whether it has."""
        ...
