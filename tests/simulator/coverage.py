"""Which operations met which faults: a simulator that never reaches a state must show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.simulator.history import Called, FaultBegan, FaultEnded, HandlerEnded, HandlerStarted, History, StoreStep
from tests.simulator.scenario import PROCESS_FAULTS, STORE, STORE_FAULTS

#: What a process does: calls of the store, calls of a client that wait, and handlers at work.
OPERATIONS = (
    "publish", "claim", "settle", "extend", "fire_schedule", "promote", "wait_result", "wait_chain", "receive",
    "handler", "stop",
)  # fmt: skip
#: What only the operator does: it has no faults of its own, so only those of the store meet it.
OPERATOR_OPERATIONS = (
    "cancel",
    "configure",
    "pause",
    "resume",
    "purge",
    "redrive",
    "trigger_schedule",
    "save_schedule",
)
#: A fault that has no length meets what happens so long before and after it.
MOMENT_SECONDS = 2.0
#: Faults that have no length.
MOMENTS = frozenset(("crash", "clone", "clock_step", "wall_clock_step", "store_restart"))


def pairs_of(history: History) -> Counter[tuple[str, str]]:
    """How often each operation of a run met each fault."""
    stretches: list[tuple[str, str, float, float]] = []
    under_way: dict[int, FaultBegan] = {}
    for one in history:
        if isinstance(one, FaultBegan):
            under_way[one.number] = one
            if one.fault in MOMENTS:
                stretches.append((one.who, one.fault, one.at - MOMENT_SECONDS, one.at + MOMENT_SECONDS))
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
            if begin <= until and at <= end and (name in (STORE, who)):
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
    columns = (*OPERATIONS, *OPERATOR_OPERATIONS)
    lines = [" " * width + "  " + " ".join(f"{name[:9]:>9}" for name in columns)]
    for fault in faults:
        counts = [found[fault, name] for name in columns]
        cells = [
            f"{count:>9,}" if count or is_reachable(fault, name) else f"{'·':>9}"
            for count, name in zip(counts, columns, strict=True)
        ]
        lines.append(f"{fault:<{width}}  " + " ".join(cells))
    never = missing(found)
    reached = sum(is_reachable(fault, name) for fault in faults for name in columns) - len(never)
    lines.append(f"pairs reached: {reached} of {reached + len(never)}")
    if never:
        lines.append("never reached: " + ", ".join(f"{fault} × {name}" for fault, name in never))
    return lines


def is_reachable(fault: str, operation: str) -> bool:
    """Whether a fault can meet an operation: those of the operator only meet faults of the store."""
    return operation in OPERATIONS or fault in STORE_FAULTS


def missing(found: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs that can be reached and were not."""
    return [
        (fault, operation)
        for fault in (*PROCESS_FAULTS, *STORE_FAULTS)
        for operation in (*OPERATIONS, *OPERATOR_OPERATIONS)
        if is_reachable(fault, operation) and not found[fault, operation]
    ]
