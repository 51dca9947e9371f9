"""Faults planted into the code, one at a time: a simulator that does not find them finds nothing.

Each is a small, plausible mistake: a guard that is missing, a step that became two. It names the rules of which one
must be broken by it. `find` runs drawn scenarios until that has happened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from msgspec import structs

from tests.simulator.checker import run_and_judge
from tests.simulator.draw import draw
from tests.simulator.records import Finding
from tests.simulator.scenario import Scenario
from tests.simulator.store_node import StoreNode
from waypost import lease_clock
from waypost.errors import WaypostError
from waypost.identity import Operation
from waypost.message import Message
from waypost.operations import receive
from waypost.operations.flow import drive_async
from waypost.policy import RetryPolicy
from waypost.store.memory import chains
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.records import Record
from waypost.store.memory.store import MemoryStore
from waypost.store.port import Call, Draft, FireStep, Hold, Woken, forwarded_draft
from waypost.values import Claimed, ExtendStatus, Fired, Lease, Settlement, SettleStatus
from waypost.worker.consumer import Consumer
from waypost.worker.renewer import Renewer
from waypost.worker.settler import Settler
from waypost.worker.waiter import Waiter

#: A step that became two leaves so long between them, in milliseconds.
BETWEEN_STEPS_MS = 50
#: Each is to be found within this.
SECONDS_MAX = 60.0
#: How many scenarios a core runs before the others are asked whether one of them has found it.
SEEDS_AT_A_TIME = 5

Plant = Callable[[ExitStack], None]


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A mistake, the rules of which one must find it, and how to make it."""

    name: str
    rules: tuple[str, ...]
    plant: Plant
    #: A seed whose scenario finds it, as scenarios are drawn now: a search that begins there ends soon.
    seed: int = 1


FAULTS: list[PlantedFault] = []


def fault(name: str, *rules: str, seed: int = 1) -> Callable[[Plant], Plant]:
    """Add a planted fault to the list."""

    def add(plant: Plant) -> Plant:
        FAULTS.append(PlantedFault(name, rules, plant, seed))
        return plant

    return add


@contextmanager
def planted(one: PlantedFault) -> Iterator[None]:
    """The code with this fault in it."""
    with ExitStack() as stack:
        one.plant(stack)
        yield


def replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what is made of it, until the stack is closed."""
    stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))


# ---- the twelve of the lease protocol ----------------------------------------------------------------------------


@fault("settle by id", "fence", seed=4)
def settle_by_id(stack: ExitStack) -> None:
    def held(self: QueueModel, id: str, token: int, nonce: bytes) -> Record | None:
        record = self.messages.get(id)
        return record if record is not None and record.state == "leased" else None

    replace(stack, QueueModel, "held", lambda _: held)


@fault("settle by state", "fence", "states", seed=215)
def settle_by_state(stack: ExitStack) -> None:
    """The last holder of a message may settle it as long as it has not been claimed again."""

    def make(original: Any) -> Any:
        def settle(self: QueueModel, now: int, settlement: Settlement, operation: Operation) -> SettleStatus:
            record = self.messages.get(settlement.id)
            if record is not None and record.state == "ready" and record.token == settlement.token:
                record.state, record.nonce = "leased", settlement.nonce
            status: SettleStatus = original(self, now, settlement, operation)
            return status

        return settle

    replace(stack, QueueModel, "settle", make)


@fault("extend without token", "fence", seed=4)
def extend_without_token(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def extend(self: QueueModel, now: int, hold: Hold) -> ExtendStatus:
            record = self.messages.get(hold.id)
            if record is not None and record.state == "leased":
                hold = Hold(record.id, record.token, record.nonce)
            status: ExtendStatus = original(self, now, hold)
            return status

        return extend

    replace(stack, QueueModel, "extend", make)


@fault("a claim that does not grow the token", "tokens grow")
def same_token(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def lease(self: QueueModel, *given: Any) -> tuple[list[Lease], bool]:
            again = [record for record in self._ready() if record.token]
            for record in again:
                record.token -= 1
            leases, more = original(self, *given)
            for record in again:
                if record.state == "ready":
                    record.token += 1
            return leases, more

        return lease

    replace(stack, QueueModel, "_lease", make)


@fault("expiry that counts twice", "ledger")
def expiry_twice(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def reclaim(self: QueueModel, now: int, operation: Operation) -> None:
            before = self.counts["expired"]
            original(self, now, operation)
            self.counts["expired"] += self.counts["expired"] - before

        return reclaim

    replace(stack, QueueModel, "_reclaim", make)


@fault("dedup mark after the enqueue", "keys")
def mark_after_enqueue(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def plan(self: QueueModel, now: int, draft: Draft) -> tuple[str, str]:
            holder = self.keys.get(draft.key or "")
            if holder is not None and not draft.forwarded:
                owner = self.messages[holder.owner]
                if now - owner.published_ms < BETWEEN_STEPS_MS:
                    return "new", draft.id
            planned: tuple[str, str] = original(self, now, draft)
            return planned

        return plan

    replace(stack, QueueModel, "_plan", make)


@fault("delete before the dead-letter insert", "states")
def delete_before_insert(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def bury(self: QueueModel, now: int, record: Record, reason: str, operation: Operation | None) -> None:
            original(self, now, record, reason, operation)
            self.messages.pop(record.id, None)

        return bury

    replace(stack, QueueModel, "bury", make)


@fault("wake-up as the only signal", "poll", "liveness", seed=42)
def only_wakeups(stack: ExitStack) -> None:
    replace(stack, Waiter, "polled", lambda _: lambda self, answer, sent_at, answered_at: None)
    replace(stack, receive, "safety_poll_seconds", lambda _: lambda lease_ms, *, woken: 1e6)


@fault("cancel only by wake-up", "cancel", seed=2)
def cancel_by_wakeup(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def extend(self: QueueModel, now: int, hold: Hold) -> ExtendStatus:
            status: ExtendStatus = original(self, now, hold)
            return "ok" if status == "cancel" else status

        return extend

    replace(stack, QueueModel, "extend", make)


@fault("what a settle sends on is written on another connection", "one step")
def sent_on_apart(stack: ExitStack) -> None:
    """The outbox of the simulator: a message exists if and only if the step that decided it counted."""

    def make(original: Any) -> Any:
        async def send(self: Settler, messages: list[Message[Any]], settlements: list[Settlement]) -> None:
            context = self._context
            for one in [one for settlement in settlements for one in settlement.then]:
                draft = forwarded_draft(one)

                def publish(operation: Operation, queue: str = one.queue, draft: Draft = draft) -> Any:
                    return context.store.publish(queue, [draft], operation)

                with suppress(WaypostError):
                    await drive_async(self._executor, context.operate_and_wake(one.queue, publish))
            await original(self, messages, settlements)

        return send

    replace(stack, Settler, "_send", make)


@fault("cron fire without compare-and-set", "schedules", seed=3)
def fire_without_comparing(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def fire(
            self: MemoryStore, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
        ) -> Call[Woken[Fired]]:
            call = original(self, queue, step, drafts, operation)

            def run(now: int) -> Any:
                found = self._queue(queue).schedules.get(step.key)
                free = step
                if found is not None and found.next_ms is not None:
                    free = structs.replace(step, version=found.version, expected_ms=found.next_ms)
                return original(self, queue, free, drafts, operation).step(now)

            call.step, made = run, call
            return made  # type: ignore[no-any-return]

        return fire

    replace(stack, MemoryStore, "fire_schedule", make)


@fault("drain that drops claimed work", "drain", seed=26)
def drain_drops(stack: ExitStack) -> None:
    def make_give_back(original: Any) -> Any:
        def give_back_ready(self: Consumer) -> None:
            for message in self._ready:
                self._held.discard(message)
            self._ready.clear()

        return give_back_ready

    def make_settle(original: Any) -> Any:
        def settle(self: Consumer, message: Message[Any], error: Any, *, stopped: bool = False) -> None:
            if stopped and self._stopping:
                self._held.discard(message)
                return
            original(self, message, error, stopped=stopped)

        return settle

    replace(stack, Consumer, "_give_back_ready", make_give_back)
    replace(stack, Consumer, "_settle", make_settle)


# ---- five of leases and repeats ----------------------------------------------------------------------------------


@fault("a repeat after the store's memory runs again", "once", seed=9)
def repeat_runs_again(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def replayed(self: QueueModel, now: int, operation: Operation, window_ms: int) -> object | None:
            for session in [one for one, kept in self.replays.items() if kept.until_ms < now]:
                del self.replays[session]
            return original(self, now, operation._replace(stamp=now), window_ms)  # type: ignore[no-any-return]

        return replayed

    replace(stack, QueueModel, "replayed", make)


@fault("a partition longer than the lease stops no handler", "past lease", seed=8)
def no_local_end(stack: ExitStack) -> None:
    replace(stack, Renewer, "_end_leases", lambda _: lambda self: lease_clock.now() + 1.0)


@fault("a late claim answer is taken for a fresh one", "start", "past lease", seed=10)
def late_answers(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def local_lease(claimed: Claimed) -> tuple[float, float]:
            lease: tuple[float, float] = original(structs.replace(claimed, sent_at=lease_clock.now()))
            return lease

        return local_lease

    replace(stack, receive, "local_lease", make)


@fault("poison by exit is free", "outcome")
def exit_is_free(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def settlement(
            self: Message[Any], error: BaseException | None, retry: RetryPolicy, *, stopped: bool = False
        ) -> Settlement:
            strange = error is not None and not isinstance(error, Exception)
            made: Settlement = original(self, error, retry, stopped=stopped or strange)
            return made

        return settlement

    replace(stack, Message, "settlement", make)


@fault("tokens given twice after a crash of the store", "tokens grow")
def tokens_after_crash(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def come_up(self: StoreNode, *, from_snapshot: bool) -> None:
            original(self, from_snapshot=from_snapshot)
            for model in self.store._queues.values():
                for record in model.messages.values():
                    # Claims that had not reached the disk.
                    record.token = max(0, record.token - 1)

        return come_up

    replace(stack, StoreNode, "come_up", make)


# ---- eight more --------------------------------------------------------------------------------------------------


@fault("forgotten wake", "prompt", seed=2)
def forgotten_wake(stack: ExitStack) -> None:
    replace(stack, QueueModel, "wake", lambda _: lambda self, now, count: [])


@fault("lost settle batch", "settle", "renewal")
def lost_batch(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        async def send(self: Settler, messages: list[Message[Any]], settlements: list[Settlement]) -> None:
            if len(messages) > 1:
                for message in messages:
                    self._held.discard(message)
                return
            await original(self, messages, settlements)

        return send

    replace(stack, Settler, "_send", make)


@fault("renewal of the wrong message", "renewal")
def wrong_renewal(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def extend(self: QueueModel, now: int, hold: Hold) -> ExtendStatus:
            record = self.held(hold.id, hold.token, hold.nonce)
            if record is None:
                return "lost"
            other = self._in("leased")[0]
            other.lease_end_ms = now + other.lease_ms
            return "cancel" if record.cancel_requested else "ok"

        return extend

    replace(stack, QueueModel, "extend", make)


@fault("off by one at the lease end", "lease end", seed=10)
def off_by_one(stack: ExitStack) -> None:
    replace(stack, QueueModel, "_reclaim", lambda old: lambda self, now, operation: old(self, now + 1, operation))
    replace(stack, QueueModel, "next_lease", lambda old: lambda self, now: old(self, now + 1))


@fault("successor lost with its key", "states", "keys", "liveness")
def successor_lost(stack: ExitStack) -> None:
    def release_key(
        self: QueueModel, now: int, record: Record, key: str, how: str, operation: Operation | None
    ) -> None:
        holder = self.keys.get(key)
        if holder is not None and holder.owner == record.id:
            del self.keys[key]

    replace(stack, QueueModel, "_release_key", lambda _: release_key)


@fault("cap checked before the step", "cap", seed=2)
def cap_before_the_step(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def make_room(self: QueueModel, now: int, drafts: Any, plans: Any, operation: Any) -> None:
            pending = self._pending
            seen = [one for one in self.messages.values() if one.published_ms < now - BETWEEN_STEPS_MS]
            count = sum(one.state in ("ready", "delayed", "waiting") for one in seen)
            self._pending = lambda: count  # type: ignore[method-assign]
            try:
                original(self, now, drafts, plans, operation)
            finally:
                self._pending = pending  # type: ignore[method-assign]

        return make_room

    replace(stack, QueueModel, "_make_room", make)


@fault("double promotion", "states", "one holder")
def double_promotion(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def promote(self: QueueModel, now: int, operation: Operation | None) -> None:
            due = [record for record in self._in("delayed") if record.ready_ms <= now]
            again = [
                one for one in getattr(self, "promoted_last", []) if one.id in self.messages and one.state != "dead"
            ]
            original(self, now, operation)
            for record in again:
                self.make_claimable(now, record, record.ready_ms)
                self.note(now, "promoted", operation, record, cause="due")
            self.promoted_last = due  # type: ignore[attr-defined]

        return promote

    replace(stack, QueueModel, "promote", make)


@fault("chain notice lost", "chains", "liveness")
def chain_notice_lost(stack: ExitStack) -> None:
    def make(original: Any) -> Any:
        def notify_chain(model: QueueModel, chain: str, id: str, token: int, begun: Any, failed: Any) -> None:
            if failed is None and not begun:
                return
            original(model, chain, id, token, begun, failed)

        return notify_chain

    replace(stack, chains, "notify_chain", make)


# ---- three of expiries -------------------------------------------------------------------------------------------


@fault("a message is handed out after its expiry", "expiry", seed=3)
def handed_out_late(stack: ExitStack) -> None:
    replace(stack, Record, "has_lapsed", lambda _: lambda self, now: False)


@fault("the expiry is not checked at a redelivery", "expiry", seed=3)
def redelivered_late(stack: ExitStack) -> None:
    replace(stack, Record, "has_lapsed", lambda old: lambda self, now: not self.token and old(self, now))


@fault("a message that has lapsed keeps its key", "expiry", seed=4)
def key_not_given_back(stack: ExitStack) -> None:
    replace(stack, QueueModel, "_lapsed_of", lambda _: lambda self, now, keys: [])


# ---- finding them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Which seed found a planted fault, by which finding, and how long it took; no scenario: none did in time."""

    fault: PlantedFault
    seed: int
    seconds: float
    scenarios: int
    finding: Finding | None
    scenario: Scenario | None = None

    def __str__(self) -> str:
        if self.finding is None:
            return f"{self.fault.name}: not found by {self.scenarios} scenarios in {self.seconds:.1f} s"
        return f"{self.fault.name}: seed {self.seed}, {self.seconds:.1f} s, rule {self.finding.rule}"


def find(
    one: PlantedFault, *, first_seed: int = 1, scenarios: int | None = None, seconds: float | None = None
) -> Found:
    """Run drawn scenarios with the fault in the code until one of its rules is broken, so many or so long at most."""
    began, seed = time.monotonic(), first_seed
    with planted(one):
        while True:
            scenario = draw(seed)
            judged = run_and_judge(scenario)
            finding = next((found for found in judged.findings if found.rule in one.rules), None)
            spent, count = time.monotonic() - began, seed - first_seed + 1
            if finding is not None:
                return Found(one, seed, spent, count, finding, scenario)
            if (seconds is not None and spent > seconds) or (scenarios is not None and count >= scenarios):
                return Found(one, seed, spent, count, None)
            seed += 1


def find_on_all_cores(one: PlantedFault, *, first_seed: int = 1, seconds: float = SECONDS_MAX) -> Found:
    """The same on all cores, each with some seeds at a time: the lowest seed that finds it."""
    began, seed, cores = time.monotonic(), first_seed, os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        while True:
            firsts = [seed + core * SEEDS_AT_A_TIME for core in range(cores)]
            seed = firsts[-1] + SEEDS_AT_A_TIME
            for found, finding in pool.map(_find_in_part, [one.name] * cores, firsts):
                if finding is not None:
                    return Found(one, found, time.monotonic() - began, seed - first_seed, finding)
            if time.monotonic() - began > seconds:
                return Found(one, seed - 1, time.monotonic() - began, seed - first_seed, None)


def _find_in_part(name: str, first_seed: int) -> tuple[int, Finding | None]:
    """Called in a process of its own."""
    fault = next(one for one in FAULTS if one.name == name)
    result = find(fault, first_seed=first_seed, scenarios=SEEDS_AT_A_TIME)
    return result.seed, result.finding
