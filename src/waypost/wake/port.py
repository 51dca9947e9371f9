"""The contract of a wake-up channel: topics, notifications and listeners.

A notification is a short text: the name of a sleeper, `*` for everybody, or what the topic is about. A channel of your
own needs the four members of `Channel`; the others of this package are `waypost.wake.hub.Hub` and its kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

#: `ready`: there is work for the sleepers that are named, or the end that a client waits for has come. `held`: the
#: worker that holds a message is asked to stop. `echo`: a poll of a worker, sent back to it.
Kind: TypeAlias = Literal["ready", "held", "echo"]
#: `idle`: there is no listener. `broken`: it was or will be tried again; until then listeners must poll.
State: TypeAlias = Literal["idle", "starting", "working", "broken"]

EVERYBODY = "*"
#: What listeners get when the channel begins or ceases to work: poll once, something may have been missed.
POLL_NOW = ""

#: Called with each notification, from any thread: it must be quick and must not block.
OnNotification: TypeAlias = Callable[[str], None]


class Topic(NamedTuple):
    """What notifications are about."""

    namespace: str
    kind: Kind
    queue: str


class Listening(Protocol):
    """One listener's hold on a topic."""

    @property
    def working(self) -> bool:
        """Whether a notification that is sent now will arrive."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """Carries notifications between processes, at most once each. No method waits for a server or raises for one."""

    #: How it is called in logs and reports.
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
