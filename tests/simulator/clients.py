"""How the real client and its parts are started inside a simulated process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulator.network import Link, SimulatedTransport
from tests.simulator.scenario import ProcessPlan
from tests.simulator.store_node import RemoteStore, StoreNode
from waypost import AsyncWaypost
from waypost.identity import Session
from waypost.outbox.relay.waypost import WaypostTarget
from waypost.wake.hub import ThreadHub
from waypost.wake.wakeups import Wakeups

if TYPE_CHECKING:
    from tests.simulator.threads import Threads
    from waypost.worker.worker import Worker


def open_client(node: StoreNode, link: Link, threads: Threads, *, retry_budget: float) -> AsyncWaypost:
    """A client of the process that runs, with its connections to the store and to the notification server."""
    store: Any = RemoteStore(node, link, threads)
    hub = ThreadHub("simulated", lambda: SimulatedTransport(link, threads))
    post = AsyncWaypost(store=store, wake=hub, retry_budget=retry_budget)
    if node.has_blocking_waits:
        # The store notifies sleepers by itself, as a server does whose own channel is used.
        post._wakeups = post._context.wakeups = Wakeups(hub, store.namespace, by_store=True)
        post._context.wake = post._wakeups.wake
    return post


def add_relays(post: AsyncWaypost, plan: ProcessPlan, node: StoreNode, link: Link, threads: Threads) -> None:
    """Let a client send queues on, as its plan says."""
    for relay in plan.relays:
        post.relay(relay.source, to=SimulatedTarget(RemoteStore(node, link, threads), relay.target, post))


class SimulatedTarget(WaypostTarget):
    """The relay's own target, over the link of its process."""

    def __init__(self, store: Any, queue: str, post: AsyncWaypost) -> None:
        self._redact = None
        self.queue = queue
        self.store = store
        self.description = f"queue {queue} of the simulated store"
        self._start_timeout = 3.0
        self._wakeups: Wakeups = post.wakeups
        self._executor = None
        self._context = None


def copy_session(source: Session, target: Session) -> None:
    """Make a session what a copy of its process has: the same identity and the same numbers."""
    target.id, target._mark, target._counter = source.id, source._mark, source._counter
    target._numbers = dict(source._numbers)
    target.time._seen = source.time._seen
    target.pid = source.pid


def copy_worker(source: Worker, target: Worker) -> None:
    """Make a worker that has not started what a copy of another's process has."""
    copy_session(source._session, target._session)
    target.name = target._options["worker"] = source.name
