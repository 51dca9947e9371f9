"""The reference store as a server: its clock, its restarts, and the notification server beside it."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import structs

from tests.simulator.history import MessageView, QueueState, Recorder, StoreRestarted, StoreStep
from tests.simulator.network import (
    BlockedClaim,
    BlockingWait,
    Link,
    SimulatedAsyncExecutor,
    SimulatedExecutor,
    SimulatedTransport,
)
from tests.simulator.process import WALL_START
from waypost import codec
from waypost.identity import Operation
from waypost.store.checkup import Checkup
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.store import MemoryCheckup, MemoryStore, ModelCall
from waypost.store.port import BlockingWaiter, Call, Capabilities, NaturalChannel, Store
from waypost.values import Claimed, EventRecord
from waypost.wake.port import ALL_SLEEPERS, Topic
from waypost.wake.wakeups import BY_STORE

if TYPE_CHECKING:
    from tests.simulator.loop import VirtualTimeLoop
    from tests.simulator.process import SimulatedProcess
    from tests.simulator.threads import Threads

T = TypeVar("T")
STORE_NAME = "store"
#: Verbs that are not recorded unless they changed something: an idle hour has thousands of them.
READS = frozenset((
    "poll", "time", "policy", "elect", "scheduled", "schedules", "queues", "promote", "heartbeat", "stats", "outgoing",
    "stats_many", "watch", "watch_chain", "result", "peek", "trace", "locate", "journal", "workers", "unblock",
))  # fmt: skip
#: What a store keeps over a restart, as attributes of `MemoryStore`.
KEPT = ("_queues", "_register", "_scheduled", "_leaders")


class RemoteCall(Call[Any]):
    """A call on its way to the store: the step itself, and what the history says of it."""

    __slots__ = ("arguments", "name", "operation", "size", "step", "wait")

    def __init__(self, name: str, call: ModelCall[Any], arguments: dict[str, Any]) -> None:
        self.name = name
        self.step = call.step
        self.operation: Operation | None = arguments.pop("operation", None)
        self.arguments = arguments
        drafts = arguments.get("drafts")
        self.size = sum(len(draft.envelope) for draft in drafts) if drafts else 0
        #: Of a claim that begins when its sleeper is woken.
        self.wait: BlockingWait | None = None


class StoreNode:
    """The server. `run` is one request; requests are run one after the other."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        recorder: Recorder,
        observe_store: Callable[[StoreStep, MemoryStore], None] | None,
        *,
        has_blocking_waits: bool = False,
    ) -> None:
        self.loop = loop
        self.store = MemoryStore(clock=self.now_ms)
        #: Called after each recorded step.
        self.observe_store = observe_store
        self.is_down = False
        self.steps = 0
        #: The error of its clock, in seconds.
        self.clock_error = 0.0
        self._recorder = recorder
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        self._journals: dict[str, int] = {}
        #: Whether it notifies sleepers by itself and lets them wait in it, as Valkey does.
        self.has_blocking_waits = has_blocking_waits
        #: Claims that wait, by queue and sleeper, oldest first; and values that were pushed for one that did not wait.
        self._waits: dict[tuple[str, str], list[BlockedClaim]] = {}
        self._unblocks: dict[tuple[str, str], list[str]] = {}
        #: Notification connections, each with the link of its process and its topics.
        self._connections: dict[SimulatedTransport, tuple[Link, dict[Topic, None]]] = {}

    def now_ms(self) -> int:
        return int((WALL_START + self.loop.now + self.clock_error) * 1000)

    # ---- requests ----------------------------------------------------------------------------------------

    def run(self, calls: Sequence[RemoteCall], who: str) -> tuple[list[Any], list[int]]:
        """Run calls in order; return their results or errors, and the numbers of the steps that are recorded."""
        results: list[Any] = []
        steps: list[int] = []
        store = self.store
        for call in calls:
            now = self.now_ms()
            self.steps += 1
            result, error = None, None
            store.take_also()  # as `MemoryExecutor` does
            try:
                result = call.step(now)
                store.deliver_notices(now)
                store.cut_journals(now)
            except Exception as failure:
                error = failure
            results.append(result if error is None else error)
            events = self._new_events()
            if events or call.name not in READS:
                steps.append(self.steps)
                step = self._recorder.add(
                    StoreStep, who, self.steps, now, call.name, None if call.operation is None else str(call.operation),
                    call.arguments, result, None if error is None else type(error).__name__, events,
                )  # fmt: skip
                if self.observe_store is not None:
                    self.observe_store(step, store)
            if self.has_blocking_waits and error is None:
                results[-1] = self._after_step(call, result)
        return results, steps

    # ---- blocking waits ------------------------------------------------------------------------------------

    def _after_step(self, call: RemoteCall, result: Any) -> Any:
        """Wake the sleepers that a step names, and let a poll say which of them wait here."""
        for queue, names in (getattr(result, "wake", None) or {}).items():
            for name in names:
                if name.startswith(BY_STORE) and self._waits.get((queue, name)):
                    self.push(queue, name, "")
                elif name.startswith((BY_STORE, ALL_SLEEPERS)):
                    self.notify(Topic(self.store.namespace, "ready", queue), [name])
        if call.name != "poll":
            return result
        queues = [
            structs.replace(answer, blocked=bool(self._waits.get((idle.queue, idle.sleeper))))
            for idle, answer in zip(call.arguments["idle"], result.queues, strict=True)
        ]
        return structs.replace(result, queues=queues)

    def start_wait(self, claim: BlockedClaim) -> None:
        """Let a claim wait until its sleeper is woken. One that was woken since its last claim begins at once."""
        place = (claim.wait.queue, claim.wait.sleeper)
        model = self.store._queues.get(claim.wait.queue)
        if model is not None and claim.wait.sleeper in model.sleepers:
            self._unblocks.pop(place, None)
            self._waits.setdefault(place, []).append(claim)
            claim.started(waits=True)
            self.loop.at(self.loop.now + claim.wait.seconds, self._end_wait, claim)
            return
        claim.started(waits=False)
        claim.release([*self._unblocks.pop(place, []), ""][0])

    def push(self, queue: str, sleeper: str, value: str) -> None:
        """End the oldest wait of a sleeper with a value; without one the value is kept for the next."""
        waits = self._waits.get((queue, sleeper))
        if waits:
            self.loop.at(self.loop.now, waits.pop(0).release, value)
        else:
            self._unblocks.setdefault((queue, sleeper), []).append(value)

    def _end_wait(self, claim: BlockedClaim) -> None:
        if self.forget_wait(claim) and not self.is_down:
            claim.release("")

    def forget_wait(self, claim: BlockedClaim) -> bool:
        """Its connection is closed, or its time is up; whether it waited."""
        waits = self._waits.get((claim.wait.queue, claim.wait.sleeper), [])
        waited = claim in waits
        if waited:
            waits.remove(claim)
        return waited

    def forget_process(self, process: SimulatedProcess) -> None:
        """A process is gone: its connections are closed."""
        for waits in self._waits.values():
            waits[:] = [claim for claim in waits if claim.link.process is not process]

    def _new_events(self) -> tuple[EventRecord, ...]:
        events: tuple[EventRecord, ...] = ()
        journals = self._journals
        for name, model in self.store._queues.items():
            seen = journals.get(name, 0)
            last = model.journal_last
            if last > seen:
                journals[name] = last
                count = min(last - seen, len(model.journal))
                events += tuple(model.journal[at] for at in range(-count, 0))
        return events

    # ---- faults --------------------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep the state of now, for a restart that loses what is written from here on."""
        self._snapshot = (self.steps, {name: copy.deepcopy(getattr(self.store, name)) for name in KEPT})

    def go_down(self) -> None:
        """No request is answered, and all notification connections are closed."""
        self.is_down = True
        for transport, (link, _) in list(self._connections.items()):
            self.loop.soon(link.process, transport.break_off)
        self._connections.clear()
        waiting = [claim for waits in self._waits.values() for claim in waits]
        self._waits.clear()
        self._unblocks.clear()
        for claim in waiting:
            self.loop.soon(claim.link.process, claim.give_up)

    def come_up(self, *, from_snapshot: bool) -> None:
        """Answer again, with the state of the last snapshot or with all that was written."""
        self.is_down = False
        kept = self.steps
        if from_snapshot and self._snapshot is not None:
            kept, state = self._snapshot
            for name, value in state.items():
                setattr(self.store, name, value)
            self._journals = {name: model.journal_last for name, model in self.store._queues.items()}
        self._snapshot = None
        self._recorder.add(StoreRestarted, STORE_NAME, kept)

    # ---- notifications -------------------------------------------------------------------------------------

    def connect(self, transport: SimulatedTransport, link: Link) -> None:
        self._connections[transport] = (link, {})

    def check_connected(self, transport: SimulatedTransport) -> object:
        """A probe: a connection that the server does not know was closed."""
        return None if transport in self._connections else ConnectionError("the server does not know this connection")

    def disconnect(self, transport: SimulatedTransport) -> None:
        self._connections.pop(transport, None)

    def subscribe(self, transport: SimulatedTransport, topics: Sequence[Topic]) -> object:
        if transport not in self._connections:
            return self.check_connected(transport)
        self._connections[transport][1].update(dict.fromkeys(topics))
        return None

    def unsubscribe(self, transport: SimulatedTransport, topics: Sequence[Topic]) -> object:
        if transport not in self._connections:
            return self.check_connected(transport)
        for topic in topics:
            self._connections[transport][1].pop(topic, None)
        return None

    def notify(self, topic: Topic, notifications: list[str]) -> None:
        """Pass notifications on to all that listen."""
        if self.is_down:
            return
        for transport, (link, topics) in list(self._connections.items()):
            if topic in topics and not link.process.dead:
                link.deliver_notification(transport, topic, notifications)

    # ---- what the checker sees -----------------------------------------------------------------------------

    def states(self) -> dict[str, QueueState]:
        """What each queue holds."""
        return {name: queue_state(model) for name, model in sorted(self.store._queues.items()) if model.made}


def queue_state(model: QueueModel) -> QueueState:
    """What a queue holds, as plain data."""
    messages = {
        record.id: MessageView(
            record.state, record.token, record.deliveries, record.attempts, record.key, record.ready_ms,
            record.lease_end_ms if record.state == "leased" else None, label_of(record.envelope), record.reason,
        )
        for record in model.messages.values()
    }  # fmt: skip
    ledger = model.ledger()
    terms = {name: value for name in ledger.__struct_fields__ if isinstance(value := getattr(ledger, name), int)}
    return QueueState(
        messages,
        terms | {"balance": ledger.balance},
        model.paused,
        {key: (one.next_ms, one.fires, one.missed) for key, one in sorted(model.schedules.items())},
        {
            name: len(chain.open) for name, chain in sorted(model.chains.items()) if not chain.state().is_finished
        },
    )  # fmt: skip


def label_of(envelope: bytes) -> str:
    """The label in the body of a message of a scenario; empty for what is none of these."""
    opened = codec.open_envelope(envelope)
    body: Any = codec.decode_body(opened.content_type, opened.data)
    return body.get("label", "") if isinstance(body, dict) else ""


def _parameters(verb: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(MemoryStore, verb)).parameters)[1:]


NOT_VERBS = frozenset(("connect", "connect_async", "checkup", "bulk_reader", "blocking_waits", "poll", "unlist"))
VERBS = {
    name: _parameters(name)
    for name in sorted(vars(Store))
    if not name.startswith("_") and name not in NOT_VERBS and inspect.isfunction(getattr(MemoryStore, name, None))
}


class RemoteStore:
    """The store as a process sees it: verbs become calls that travel over its link."""

    kind = "simulated"
    namespace = "wp"
    transactions = None

    def __init__(self, node: StoreNode, link: Link, threads: Threads) -> None:
        # Without blocking waits it is as PostgreSQL: renewals of several queues go over several connections.
        self.capabilities = Capabilities(
            reach="network",
            durability="simulated",
            spans_queues=True,
            runs_together=node.has_blocking_waits,
        )
        self.blocking_waits = SimulatedBlockingWaits(node) if node.has_blocking_waits else None
        self._node = node
        self._link = link
        self._threads = threads
        self._memory = node.store

    @property
    def place(self) -> object:
        return STORE_NAME

    @property
    def channel(self) -> NaturalChannel:
        return NaturalChannel("process", self)

    def bulk_reader(self, connection: object) -> None:
        """None: other processes cannot read it."""

    def checkup(self, executor: object) -> Checkup:
        return MemoryCheckup()

    def connect(self, *, start_timeout: float) -> SimulatedExecutor:
        answer = self._threads.blocking("a connection").block(None, self._link.connect)
        if isinstance(answer, Exception):
            raise answer
        return SimulatedExecutor(self._link, self._threads)

    async def connect_async(self, *, start_timeout: float) -> SimulatedAsyncExecutor:
        connected = asyncio.get_running_loop().create_future()
        self._link.connect(lambda answer: None if connected.done() else connected.set_result(answer))
        answer = await connected
        if answer is not None:
            raise answer
        return SimulatedAsyncExecutor(self._link)

    def poll(self, idle: Any, **given: Any) -> list[RemoteCall]:
        arguments = {"idle": idle, **given}
        return [RemoteCall("poll", call, dict(arguments)) for call in self._memory.poll(idle, **given)]  # type: ignore[arg-type]

    def unlist(self, queue: str) -> list[RemoteCall]:
        return []


class SimulatedBlockingWaits:
    """Blocking waits as Valkey has them."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    def claim_after_wait(
        self, claim: Call[Claimed], sleeper: str, seconds: float, waiter: BlockingWaiter
    ) -> Call[Claimed]:
        call = cast("RemoteCall", claim)
        call.wait = BlockingWait(call.arguments["queue"], sleeper, seconds, waiter)
        return call

    def unblock(self, queue: str, sleeper: str, value: str) -> Call[None]:
        step = ModelCall("unblock", lambda now: self._node.push(queue, sleeper, value))
        return RemoteCall("unblock", step, {"queue": queue, "sleeper": sleeper, "value": value})


def _verb(name: str, parameters: tuple[str, ...]) -> Callable[..., RemoteCall]:
    def verb(self: RemoteStore, *given: Any, **named: Any) -> RemoteCall:
        call = getattr(self._memory, name)(*given, **named)
        return RemoteCall(name, call, {**dict(zip(parameters, given, strict=False)), **named})

    verb.__name__ = name
    return verb


for _name, _names in VERBS.items():
    setattr(RemoteStore, _name, _verb(_name, _names))
