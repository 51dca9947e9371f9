"""The state machine finds faults: they are planted into the model one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec import structs

from waypost.identity import Operation
from waypost.policy import DEFAULT_GROUP, GROUP_STRIDE
from waypost.store.memory import MemoryStore, groups
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.records import Record
from waypost.store.port import Call, Draft, FireStep, Hold, Store, Woken
from waypost.testing.clock import ManualClock
from waypost.testing.machine import GROUP_STEPS, machine_for
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


# ---- groups --------------------------------------------------------------------------------------------------


class FaultyGroups(QueueModel):
    """A queue whose groups have a fault: other queues of this process, the model's, do not."""


class RejoinsAtTheEnd(QueueModel):
    """Gives a redelivered message of an ordered group a new place."""

    def make_claimable(self, now: int, record: Record, ready_ms: int) -> None:
        record.position = 0
        super().make_claimable(now, record, ready_ms)


class ReturnsExpiredAtTheEnd(QueueModel):
    """The same after its lease has ended."""

    def _to_head(self, record: Record, ready_ms: int, cause: str) -> None:
        self.make_claimable(ready_ms, record, ready_ms)
        record.cause = cause
        if record.position:
            self.sequence += 1
            record.position = self.sequence


class HandsOutLapsedMessagesAgain(QueueModel):
    """Checks the expiry of a message only before it is first handed out."""

    def lapse(self, now: int, operation: Operation | None) -> None:
        for record in self.messages.values():
            if record.token and record.has_lapsed(now):
                record.expires_ms = None
        super().lapse(now, operation)


Right = Callable[..., Any]


def hands_out_a_second_message_of_an_ordered_group(right: Right, model: QueueModel, now: int, group: str) -> bool:
    leased = [record for record in model.messages.values() if record.state == "leased"]
    for record in leased:
        record.state = "waiting"
    able: bool = right(model, now, group)
    for record in leased:
        record.state = "leased"
    return able


def lets_the_next_pass_a_failed_message(right: Right, model: QueueModel, now: int, group: str) -> bool:
    held = [record for record in model.messages.values() if record.holds]
    for record in held:
        record.holds = False
    able: bool = right(model, now, group)
    for record in held:
        record.holds = True
    return able


def hands_out_messages_of_a_paused_group(right: Right, model: QueueModel, now: int, group: str) -> bool:
    own = model.group_settings.get(group)
    if own is not None:
        model.group_settings[group] = structs.replace(own, paused=False)
    able: bool = right(model, now, group)
    if own is not None:
        model.group_settings[group] = own
    return able


def counts_no_redelivered_message_as_running(right: Right, model: QueueModel, now: int, group: str) -> bool:
    again = [record for record in model.messages.values() if record.state == "leased" and record.deliveries > 1]
    for record in again:
        record.state = "waiting"
    able: bool = right(model, now, group)
    for record in again:
        record.state = "leased"
    return able


def begins_with_the_same_group_in_each_claim(right: Right, model: QueueModel, now: int) -> Record | None:
    able = [group for group in sorted(model.line) if groups.can_go_on(model, now, group)]
    found: Record | None = groups.members(model, able[0])[0] if able else right(model, now)
    return found


def gives_all_groups_the_same_weight(right: Right, model: QueueModel, group: str) -> None:
    known = group in model.line
    right(model, group)
    if group in model.line and not known:
        model.line[group] = model.turn + GROUP_STRIDE


def lets_a_group_save_turns_up(right: Right, model: QueueModel, group: str) -> None:
    known = group in model.line
    right(model, group)
    if group in model.line and not known:
        model.line[group] = 0


def keeps_a_group_out_of_line_when_its_lease_ends(right: Right, model: QueueModel, record: Record) -> None:
    line = dict(model.line)
    right(model, record)
    model.line = line


def keeps_a_group_out_of_line_when_its_rate_goes_on(right: Right, model: QueueModel, now: int) -> None:
    line = dict(model.line)
    right(model, now)
    model.line = line


def counts_no_redelivery_for_the_rate(right: Right, model: QueueModel, now: int, record: Record) -> None:
    claims = dict(model.group_claims)
    right(model, now, record)
    if record.deliveries > 1:
        model.group_claims = claims


def checks_the_cap_of_a_group_message_by_message(
    right: Right, model: QueueModel, drafts: Iterable[Draft], concerned: set[str]
) -> list[Record]:
    return [record for draft in drafts for record in right(model, [draft], concerned)]


def drops_from_the_first_group_by_name(
    right: Right, model: QueueModel, count: int, concerned: set[str]
) -> list[Record]:
    found = sorted(right(model, len(model.messages), concerned), key=groups.name_of)
    return found[:count]


def skips_a_message_that_goes_on_to_hold_its_group(
    right: Right, model: QueueModel, now: int, group: str, operation: Operation
) -> str | None:
    held = groups.holding(model, group)
    skipped: str | None = right(model, now, group, operation)
    for record in held:
        record.holds = True
    return skipped


def wakes_no_worker_when_a_group_can_go_on(right: Right, model: QueueModel, now: int) -> int:
    return 0


def keeps_settings_that_are_the_defaults(right: Right, model: QueueModel, now: int, group: str, changes: Any) -> bool:
    changed: bool = right(model, now, group, changes)
    model.group_settings.setdefault(group, DEFAULT_GROUP)
    return changed


#: Faults of groups: a kind of queue, or a function that replaces one of `groups`, by the name of that one.
GROUP_FAULTS: list[tuple[str, Any]] = [
    ("", RejoinsAtTheEnd),
    ("", ReturnsExpiredAtTheEnd),
    ("", HandsOutLapsedMessagesAgain),
    ("can_go_on", hands_out_a_second_message_of_an_ordered_group),
    ("can_go_on", lets_the_next_pass_a_failed_message),
    ("can_go_on", hands_out_messages_of_a_paused_group),
    ("can_go_on", counts_no_redelivered_message_as_running),
    ("next_in_turn", begins_with_the_same_group_in_each_claim),
    ("join", gives_all_groups_the_same_weight),
    ("join", lets_a_group_save_turns_up),
    ("released", keeps_a_group_out_of_line_when_its_lease_ends),
    ("join_again", keeps_a_group_out_of_line_when_its_rate_goes_on),
    ("took", counts_no_redelivery_for_the_rate),
    ("over_caps", checks_the_cap_of_a_group_message_by_message),
    ("longest_first", drops_from_the_first_group_by_name),
    ("skip_held", skips_a_message_that_goes_on_to_hold_its_group),
    ("worth_waking", wakes_no_worker_when_a_group_can_go_on),
    ("configure_group", keeps_settings_that_are_the_defaults),
]


#: Seeds whose programs find a fault soon. Those of seed 0 do for the others.
SEEDS = {
    "RejoinsAtTheEnd": 3, "HandsOutLapsedMessagesAgain": 1, "hands_out_messages_of_a_paused_group": 1,
    "begins_with_the_same_group_in_each_claim": 2, "keeps_a_group_out_of_line_when_its_lease_ends": 1,
    "keeps_a_group_out_of_line_when_its_rate_goes_on": 23, "drops_from_the_first_group_by_name": 13,
    "checks_the_cap_of_a_group_message_by_message": 2,
    "skips_a_message_that_goes_on_to_hold_its_group": 1, "wakes_no_worker_when_a_group_can_go_on": 1,
    "keeps_settings_that_are_the_defaults": 1, "gives_all_groups_the_same_weight": 5,
    "counts_no_redelivery_for_the_rate": 5,
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, place: str, fault: Any) -> type[QueueModel]:
    """Plant a fault of groups; return the kind of queue that has it."""
    if not place:
        kind: type[QueueModel] = fault
        return kind
    right = getattr(groups, place)

    def choose(model: QueueModel, *arguments: Any) -> Any:
        return fault(right, model, *arguments) if isinstance(model, FaultyGroups) else right(model, *arguments)

    monkeypatch.setattr(groups, place, choose)
    return FaultyGroups


@pytest.mark.promise("STORE-4", "QUEUE-5", "QUEUE-6", "QUEUE-7")
@pytest.mark.parametrize(("place", "fault"), GROUP_FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_of_groups_is_found(place: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = plant(monkeypatch, place, fault)
    machine = seed(SEEDS.get(fault.__name__, 0))(machine_for(store_with(kind), GROUP_STEPS))
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=SEARCH)
