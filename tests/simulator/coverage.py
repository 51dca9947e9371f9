"""Which operations met which faults: a simulator that never reaches a state must show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.simulator.history import Called, FaultBegan, FaultEnded, HandlerEnded, HandlerStarted, History, StoreStep
from tests.simulator.scenario import PROCESS_FAULTS, STORE, STORE_FAULTS

#: What a process does: calls of the store, calls of a client that wait, handlers at work, and what operators do. The
#: operator itself has no faults of its own, but any process may do the same.
OPERATIONS = (
    "publish", "claim", "settle", "extend", "fire_schedule", "promote", "wait_result", "wait_chain", "receive",
    "handler", "stop", "cancel", "configure", "pause", "resume", "purge", "redrive", "save_schedule",
    "trigger_schedule", "remove_schedule",
)  # fmt: skip
#: A fault that has no length meets what happens so long before and after it.
MOMENT_SECONDS = 2.0
#: Faults that have no length.
MOMENTS = frozenset(("crash", "clone", "clock_step", "wall_clock_step", "store_restart"))
#: Faults of a process that its copies meet too: that they were copied, and those of their machine.
SHARED_WITH_COPIES = frozenset(("clone", "suspend", "wall_clock_step"))
#: So long after it was copied, what a process and its copy do counts as met by that: by then both use the same session.
CLONED_SECONDS = 30.0


def all_pairs() -> list[tuple[str, str]]:
    """All pairs of a fault and an operation."""
    return [(fault, operation) for fault in (*PROCESS_FAULTS, *STORE_FAULTS) for operation in OPERATIONS]


def pairs_of(history: History) -> Counter[tuple[str, str]]:
    """How often each operation of a run met each fault."""
    stretches: list[tuple[str, str, float, float]] = []
    under_way: dict[int, FaultBegan] = {}
    for one in history:
        if isinstance(one, FaultBegan):
            under_way[one.number] = one
            if one.fault in MOMENTS:
                after = CLONED_SECONDS if one.fault == "clone" else MOMENT_SECONDS
                stretches.append((one.who, one.fault, one.at - MOMENT_SECONDS, one.at + after))
        elif isinstance(one, FaultEnded) and one.fault not in MOMENTS:
            # What follows its end belongs to it too: a frozen process sends nothing until then.
            stretches.append((one.who, one.fault, under_way.pop(one.number).at, one.at + MOMENT_SECONDS))
        elif isinstance(one, FaultEnded):
            # What follows the return of a process or of the store belongs to the fault too.
            stretches.append((one.who, one.fault, one.at, one.at + MOMENT_SECONDS))
    found: Counter[tuple[str, str]] = Counter()
    if not stretches:
        return found
    for at, until, who, operation in operations_of(history):
        for name, fault, begin, end in stretches:
            # A copy of a process is on the same machine, but what happens to the process itself does not reach it.
            original = who.partition("+")[0] if fault in SHARED_WITH_COPIES else who
            if begin <= until and at <= end and name in (STORE, who, original):
                found[fault, operation] += 1
    return found


def operations_of(history: History) -> Iterable[tuple[float, float, str, str]]:
    """What was done, from when to when and by which process."""
    began: dict[tuple[str, str, int, int], float] = {}
    for one in history:
        match one:
            case StoreStep():
                yield one.at, one.at, one.who, one.verb
            case Called(action="wait_result" | "wait_chain" | "receive"):
                yield one.at, one.at + one.arguments.get("timeout", one.arguments.get("wait", 0.0)), one.who, one.action
            case HandlerStarted():
                began[one.who, one.message_id, one.token, one.run] = one.at
            case HandlerEnded():
                start = began.get((one.who, one.message_id, one.token, one.run), one.at)
                yield start, one.at, one.who, "handler"
        if type(one).__name__ == "WorkerStopping":
            yield one.at, one.at + getattr(one, "timeout", 0.0), one.who, "stop"


def table(found: Counter[tuple[str, str]]) -> list[str]:
    """The pairs as a table, and those that were never reached."""
    faults = (*PROCESS_FAULTS, *STORE_FAULTS)
    width = max(map(len, faults))
    lines = [" " * width + "  " + " ".join(f"{name[:9]:>9}" for name in OPERATIONS)]
    for fault in faults:
        lines.append(f"{fault:<{width}}  " + " ".join(f"{found[fault, name]:>9,}" for name in OPERATIONS))
    never, count = missing(found), len(all_pairs())
    lines.append(f"pairs reached: {count - len(never)} of {count} ({1 - len(never) / count:.1%})")
    if never:
        lines.append("never reached: " + ", ".join(f"{fault} × {name}" for fault, name in never))
    return lines


def missing(found: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs that were not reached."""
    return [pair for pair in all_pairs() if not found[pair]]
