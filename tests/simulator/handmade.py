"""Histories written by hand: the smallest ones in which a rule of the checker is kept, or broken."""

from __future__ import annotations

from typing import Any

from tests.simulator.checker import Checker
from tests.simulator.history import (
    Answered,
    Called,
    FaultBegan,
    FaultEnded,
    HandlerEnded,
    HandlerNotified,
    HandlerStarted,
    Happening,
    History,
    QueueState,
    RunEnded,
    StoreRestarted,
    StoreStep,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from tests.simulator.records import Finding
from tests.simulator.scenario import HandlerPlan, ProcessPlan, QueueSetting, RelayPlan, Scenario, SchedulePlan, body_of
from waypost.codec import encode_body, encode_head, make_envelope
from waypost.store.port import Draft, Hold, Woken
from waypost.values import Claimed, EventRecord, Lease, Published, Settlement

QUEUE = "orders"
WORKER, PUBLISHER = "worker", "publisher"
#: What the store's clock shows at the beginning, and how long leases are.
START_MS = 1_000_000_000_000
LEASE = 10.0


def id_of(name: str) -> str:
    """An id for a message; names are short."""
    return name.ljust(24, "-")


def envelope(name: str, instant: str | None = None) -> bytes:
    """A message as the store has it."""
    head = encode_head(headers={"waypost-instant": instant}) if instant is not None else encode_head()
    return make_envelope(id_of(name), encode_body(body_of(name)), head)


class Handmade:
    """Writes a history step by step. What is not given is as it should be: tokens, deliveries, causes, nonces."""

    def __init__(self, *, relays: bool = False, schedules: tuple[SchedulePlan, ...] = ()) -> None:
        relay = (RelayPlan(QUEUE, "mails"),) if relays else ()
        self.scenario = Scenario(
            seed=1,
            queues=(QueueSetting(QUEUE, {"lease": LEASE}),),
            processes=(
                ProcessPlan(WORKER, "machine-1", (HandlerPlan(QUEUE),), relay),
                ProcessPlan(PUBLISHER, "machine-2"),
            ),
            steps=(),
            schedules=schedules,
        )
        self.history = History()
        self.at = 1.0
        #: By how much the store's clock was set.
        self.clock_ms = 0
        self._steps = self._events = self._calls = self._faults = 0
        self._tokens: dict[str, int] = {}
        self._deliveries: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._causes: dict[str, str] = {}

    def findings(self) -> list[Finding]:
        """What the checker finds."""
        return Checker(self.scenario).judge(self.history)

    def wait(self, seconds: float) -> None:
        self.at += seconds

    @property
    def store_ms(self) -> int:
        return START_MS + round(self.at * 1000) + self.clock_ms

    def add(self, kind: type[Happening], who: str, *given: Any) -> None:
        self.history.happenings.append(kind(self.at, who, *given))

    # ---- the store ---------------------------------------------------------------------------------------

    def event(self, event: Any, name: str | None, *, queue: str = QUEUE, **more: Any) -> EventRecord:
        self._events += 1
        id = None if name is None else id_of(name)
        return EventRecord(queue, self._events, self.store_ms, event, id, **more)

    def step(
        self,
        verb: str,
        *events: EventRecord,
        who: str = WORKER,
        operation: str | None = None,
        result: Any = None,
        error: str | None = None,
        queue: str = QUEUE,
        **arguments: Any,
    ) -> StoreStep:
        """A step of the store."""
        self._steps += 1
        given = {"queue": queue, **arguments}
        step = StoreStep(
            self.at, who, self._steps, self.store_ms, verb, operation, given, result, error, tuple(events)
        )  # fmt: skip
        self.history.happenings.append(step)
        return step

    def publish(
        self,
        *names: str,
        due: float | None = None,
        cause: str | None = None,
        before: tuple[EventRecord, ...] = (),
        status: Any = "queued",
        queue: str = QUEUE,
        who: str = PUBLISHER,
        stored: bool = True,
        verb: str = "publish",
        operation: str | None = None,
        instant: str | None = None,
        schedule: str | None = None,
        chain: str | None = None,
        **draft: Any,
    ) -> StoreStep:
        """Messages that are stored; `due` in seconds from now."""
        due_ms = None if due is None else self.store_ms + round(due * 1000)
        events = [
            self.event(
                "published", name, queue=queue, key=draft.get("key"), priority=draft.get("priority", 5), due_ms=due_ms,
                cause=cause, body=envelope(name, instant), operation_id=operation, schedule=schedule, chain_id=chain,
            )
            for name in names
        ]  # fmt: skip
        drafts = [Draft(id_of(name), envelope(name, instant), chain=chain, **draft) for name in names]
        result = Woken([Published(id_of(name), status, queue) for name in names], {})
        return self.step(
            verb, *before, *(events if stored else ()), who=who, queue=queue, drafts=drafts, result=result,
            operation=operation,
        )  # fmt: skip

    def claim(
        self,
        *names: str,
        who: str = WORKER,
        token: int | None = None,
        deliveries: int | None = None,
        cause: str | None = None,
        before: tuple[EventRecord, ...] = (),
        answered: tuple[str, ...] | None = None,
        journalled: bool = True,
        operation: str | None = None,
        lease: float | None = LEASE,
    ) -> StoreStep:
        """A claim of these messages, or of none."""
        events, leases = list(before), []
        end_ms = None if lease is None else self.store_ms + round(lease * 1000)
        for name in names:
            self._tokens[name] = self._tokens.get(name, 0) + 1 if token is None else token
            self._deliveries[name] = self._deliveries.get(name, 0) + 1
            counted = self._deliveries[name] if deliveries is None else deliveries
            why = cause or self._causes.get(name)
            events.append(
                self.event(
                    "claimed", name, token=self._tokens[name], deliveries=counted, cause=why, operation_id=operation
                )
            )
        for name in names if answered is None else answered:
            leases.append(
                Lease(
                    id_of(name), self._tokens.get(name, 1), self.nonce(name), 1, 0, 5, None, None, 0, 0, 0, end_ms,
                    envelope(name),
                )
            )  # fmt: skip
        result = Claimed(leases, None, None, None, False, 0)
        return self.step(
            "claim", *(events if journalled else before), who=who, result=result, limit=10, operation=operation
        )

    def nonce(self, name: str, token: int | None = None) -> bytes:
        return b"%s/%d" % (name.encode(), self._tokens.get(name, 1) if token is None else token)

    def returns(self, name: str, how: Any, **more: Any) -> EventRecord:
        """The event of a delivery that comes back."""
        self._causes[name] = how
        if how == "retried":
            self._attempts[name] = self._attempts.get(name, 0) + 1
            more.setdefault("attempts", self._attempts[name])
            more.setdefault("due_ms", self.store_ms)
        elif how in ("released", "snoozed"):
            self._deliveries[name] -= 1
        return self.event(how, name, **more)

    def settle(
        self,
        name: str,
        outcome: Any = "done",
        *,
        status: str | None = None,
        event: EventRecord | None = None,
        token: int | None = None,
        who: str = WORKER,
        operation: str | None = None,
        more: tuple[EventRecord, ...] = (),
    ) -> StoreStep:
        """A settle, taken or refused (`status="lost"`)."""
        settlement = Settlement(
            id_of(name), self._tokens[name] if token is None else token, self.nonce(name, token), outcome
        )
        status = outcome if status is None else status
        if event is None and status != "lost":
            event = self.event(status, name, operation_id=operation)
        events = () if event is None else (event,)
        return self.step(
            "settle", *events, *more, who=who, settlements=[settlement], result=Woken([status], {}), operation=operation
        )

    def extend(self, name: str, status: str = "ok", *, token: int | None = None, who: str = WORKER) -> StoreStep:
        """A renewal."""
        hold = Hold(id_of(name), self._tokens[name] if token is None else token, self.nonce(name, token))
        return self.step("extend", who=who, holds=[hold], result=[status])

    def configure(self, **changes: Any) -> StoreStep:
        """Settings of the queue."""
        return self.step("configure", changes=changes)

    # ---- clients, handlers, faults -------------------------------------------------------------------------

    def call(self, action: str, who: str = PUBLISHER, **arguments: Any) -> int:
        self._calls += 1
        self.add(Called, who, self._calls, action, arguments)
        return self._calls

    def answer(self, call: int, result: Any = None, error: str | None = None, who: str = PUBLISHER) -> None:
        self.add(Answered, who, call, result, error)

    def start(self, name: str, *, who: str = WORKER, kind: Any = "async", token: int | None = None) -> None:
        """A handler begins."""
        token = self._tokens.get(name, 1) if token is None else token
        self.add(HandlerStarted, who, QUEUE, id_of(name), token, self.nonce(name, token), name, token, kind, 1, 0)

    def end(self, name: str, how: str = "ok", *, who: str = WORKER, sent_on: tuple[str, ...] = ()) -> None:
        """A handler ends."""
        token = self._tokens.get(name, 1)
        self.add(HandlerEnded, who, id_of(name), token, token, how, tuple(map(id_of, sent_on)))

    def notify(self, name: str, what: Any = "lost", *, who: str = WORKER) -> None:
        """A handler learns that its lease is over, or that its message is to be cancelled."""
        token = self._tokens.get(name, 1)
        self.add(HandlerNotified, who, id_of(name), token, token, what)

    def begin_worker(self) -> None:
        self.add(WorkerStarted, WORKER, "worker")

    def stop_worker(self, running: int = 0) -> None:
        self.add(WorkerStopping, WORKER, 5.0)
        self.add(WorkerStopped, WORKER, {"running": running})

    def fault(self, fault: str, who: str = WORKER, *, seconds: float = 0.0, **arguments: Any) -> None:
        """A fault that lasts for so long; the history goes on at its end."""
        self._faults += 1
        self.add(FaultBegan, who, self._faults, fault, arguments)
        if fault == "clock_step":
            self.clock_ms += round(arguments["by"] * 1000)
        self.wait(seconds)
        self.add(FaultEnded, who, self._faults, fault)

    def restart(self, kept_step: int) -> None:
        """The store comes back without the steps after this one."""
        self.fault("store_restart", "store", seconds=1.0, lose=1.0)
        self.add(StoreRestarted, "store", kept_step)

    def finish(self, states: dict[str, QueueState] | None = None) -> None:
        """The run is over."""
        self.add(RunEnded, "store", self.store_ms, states or {})
