"""The state machine finds faults: they are planted into the model one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec import structs

from waypost.identity import Operation
from waypost.store.memory import MemoryStore
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.records import Record
from waypost.store.port import Call, Draft, FireStep, Hold, Store, Woken
from waypost.testing.clock import ManualClock
from waypost.testing.machine import machine_for
from waypost.values import Claimed, Fired, Published, Settlement, SettleStatus

SEARCH = settings(
    max_examples=3_000,  # it ends with the first that fails
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)


class SettlesById(QueueModel):
    def held(self, id: str, token: int, nonce: bytes) -> Record | None:
        record = self.messages.get(id)
        return record if record is not None and record.state == "leased" else None


class SettlesByState(QueueModel):
    def settle(self, now: int, settlement: Settlement, operation: Operation) -> SettleStatus:
        record = self.messages.get(settlement.id)
        if settlement.outcome == "done" and record is not None and record.state == "ready" and record.token:
            self._end(now, record, "done", operation)
            return "done"
        return super().settle(now, settlement, operation)


class ExtendsWithoutToken(QueueModel):
    def extend(self, now: int, hold: Hold):  # type: ignore[no-untyped-def]
        record = self.messages.get(hold.id)
        if record is not None and record.state == "leased":
            hold = Hold(record.id, record.token, record.nonce)
        return super().extend(now, hold)


class CountsExpiryTwice(QueueModel):
    def _reclaim(self, now: int, operation: Operation) -> None:
        before = self.counts["expired"]
        super()._reclaim(now, operation)
        self.counts["expired"] += self.counts["expired"] - before


class KeepsDeliveries(QueueModel):
    def settle(self, now: int, settlement: Settlement, operation: Operation) -> SettleStatus:
        status = super().settle(now, settlement, operation)
        if status == "snoozed":
            self.messages[settlement.id].deliveries += 1
        return status


class ForgetsTheHeir(QueueModel):
    def _release_key(self, now: int, record: Record, key: str, how: str, operation: Operation | None) -> None:
        holder = self.keys.get(key)
        if holder is not None and holder.owner == record.id:
            del self.keys[key]


class RunsRepeatsAgain(QueueModel):
    def replayed(self, now: int, operation: Operation, window_ms: int) -> object | None:
        return None


class ForgetsByTheCallsAndNotByTheClock(QueueModel):
    def replayed(self, now: int, operation: Operation, window_ms: int) -> object | None:
        return super().replayed(now, operation._replace(stamp=now), window_ms)


class TakesAClonesCallForARepeat(QueueModel):
    def replayed(self, now: int, operation: Operation, window_ms: int) -> object | None:
        replays = self.replays.get(operation.session)
        if replays is not None and operation.number in replays.results:
            operation = operation._replace(mark=replays.results[operation.number][0])
        return super().replayed(now, operation, window_ms)


class KeepsTheNonceOfTheFirstAnswer(QueueModel):
    def claim_again(self, now: int, ids: Iterable[str], held: bytes, nonce: bytes) -> Claimed:
        return super().claim_again(now, ids, held, held)


class OverwritesKnownIds(QueueModel):
    def publish(
        self, now: int, drafts: Sequence[Draft], operation: Operation | None, *, schedule: str | None = None
    ) -> list[Published]:
        known = {draft.id: self.messages.pop(draft.id) for draft in drafts if draft.id in self.messages}
        if any(draft.forwarded for draft in drafts):
            self.messages |= known
        return super().publish(now, drafts, operation, schedule=schedule)


class PromotesEarly(QueueModel):
    def promote(self, now: int, operation: Operation | None) -> None:
        super().promote(now + 400, operation)


class WakesNoSleeper(QueueModel):
    def wake(self, now: int, count: int) -> list[str]:
        return []


class ForgetsBodiesOfTheDead(QueueModel):
    def bury(self, now: int, record: Record, reason: str, operation: Operation | None) -> None:
        super().bury(now, record, reason, operation)
        record.envelope = b""


FAULTS: list[type[QueueModel]] = [
    SettlesById,
    SettlesByState,
    ExtendsWithoutToken,
    CountsExpiryTwice,
    KeepsDeliveries,
    ForgetsTheHeir,
    RunsRepeatsAgain,
    ForgetsByTheCallsAndNotByTheClock,
    TakesAClonesCallForARepeat,
    KeepsTheNonceOfTheFirstAnswer,
    OverwritesKnownIds,
    PromotesEarly,
    WakesNoSleeper,
    ForgetsBodiesOfTheDead,
]


def store_with(fault: type[QueueModel]) -> Callable[[ManualClock, str], Store]:
    class Faulty(MemoryStore):
        def _queue_for_writing(self, name: str) -> QueueModel:
            return self._queues.setdefault(name, fault(name))

    return lambda clock, namespace: Faulty(namespace=namespace, clock=clock)


@pytest.mark.promise("STORE-4")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: type[QueueModel]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine_for(store_with(fault)), settings=SEARCH)


class FiresWithoutComparing(MemoryStore):
    """Fires the schedule without comparing it with what the scheduler read."""

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        found = self._queue(queue).schedules.get(step.key)
        if found is not None and found.next_ms is not None:
            step = structs.replace(step, version=found.version, expected_ms=found.next_ms)
        return super().fire_schedule(queue, step, drafts, operation)


@pytest.mark.promise("STORE-4", "CRON-6")
def test_a_fire_without_compare_and_set_is_found() -> None:
    machine = machine_for(lambda clock, namespace: FiresWithoutComparing(namespace=namespace, clock=clock))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=SEARCH)
