"""The scenario language: which queues, processes and schedules there are, and what happens when.

A scenario is plain data, in JSON both ways, so that a failing one can be kept, shortened and run again: by the
simulator in virtual time, or against a real store in real time. Times are seconds from the start of the run.

Steps of a process (its name in `who`):
    publish       queue, label; key, window, on_conflict, delay, expires, priority, group, chain, after (labels), runs,
                  size
    publish_many  queue, messages: a list of {label, runs, size}; expires
    wait_result   label, timeout
    wait_chain    label, timeout
    receive       queue, wait, seconds: a `receive` block that works for so long
    stop          timeout: its worker stops in order
    start         its worker starts again after `stop`
    any verb of the operator
Steps of "operator", a client of its own whose link has no faults:
    pause, resume          queue
    configure              queue, settings
    purge                  queue, state
    cancel                 queue; label or key
    redrive                queue; reason
    trigger_schedule, pause_schedule, resume_schedule, remove_schedule    name
    save_schedule          name, queue, every; missed, grace, expires
Faults of a process: begin at `at`, last for `seconds`, then end by themselves.
    crash                  it is gone; `restart` with `after` seconds makes a new process of the same plan
    freeze                 seconds: no code of it runs, clocks go on
    stall                  seconds: its event loop is busy, its threads run
    suspend                seconds: its machine sleeps, monotonic clocks stop
    wall_clock_step        by: seconds, forwards or back: the wall clock of its machine, not of the store
    clone                  a copy of it goes on beside it, with the same sessions and random numbers; `name` with a `+`
    partition              seconds; way: both, to_store, from_store, refused
    slow_link              seconds; delay, bytes_per_second
    lose_requests, lose_replies, double_requests, lose_notifications      seconds, share
    late_replies, reorder  seconds, share, delay: by up to so long
A fault of a process with `point` begins as one of its next requests or answers passes, number `count` from `at` on:
`before_request`, `after_request` or `before_reply`.
Faults of "store":
    store_restart          down: seconds without answers; lose: the writes of so many last seconds are gone
    clock_step             by: seconds, forwards or back
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

#: Faults of a process, and of the store: what must be over before everything can be expected to end.
PROCESS_FAULTS = (
    "crash",
    "freeze",
    "stall",
    "suspend",
    "wall_clock_step",
    "clone",
    "partition",
    "slow_link",
    "lose_requests",
    "lose_replies",
    "late_replies",
    "double_requests",
    "reorder",
    "lose_notifications",
)
STORE_FAULTS = ("store_restart", "clock_step")
FAULTS = frozenset((*PROCESS_FAULTS, *STORE_FAULTS))
OPERATOR_VERBS = frozenset(
    (
        "pause",
        "resume",
        "configure",
        "purge",
        "cancel",
        "redrive",
        "save_schedule",
        "trigger_schedule",
        "pause_schedule",
        "resume_schedule",
        "remove_schedule",
    )
)
CLIENT_VERBS = frozenset(("publish", "publish_many", "wait_result", "wait_chain", "receive", "stop", "start"))
STORE, OPERATOR = "store", "operator"

RunKind = Literal[
    "ok",
    "fail",
    "retry",
    "snooze",
    "dead",
    "drop",
    "hang",
    "exit",
    "base_exception",
    "cancel_self",
    "ignore_cancel",
    "publish",
    "reschedule",
    "then",
]


@dataclass(frozen=True, slots=True)
class Run:
    """What the handler does in one run of a message: works for `seconds`, then ends as `kind` says."""

    kind: RunKind = "ok"
    seconds: float = 0.0
    #: Of retry, snooze and reschedule: after how long.
    after: float = 0.0
    #: Of publish and then: where to, and the label of the new message; that one runs as `next_runs` say.
    queue: str = ""
    label: str = ""
    next_runs: tuple[Run, ...] = ()
    #: Of publish, then and reschedule: how long until the new message lapses; 0: never.
    expires: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueSetting:
    """A queue and what `configure` is given for it at the start."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """A handler of a process."""

    queue: str
    concurrency: int = 2
    kind: Literal["async", "thread"] = "async"
    attempts: int = 5
    retry_seconds: float = 1.0
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """A queue of which a process sends everything on to another queue, by a relay."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process: a client, and a worker if it has handlers or relays."""

    name: str
    machine: str
    handlers: tuple[HandlerPlan, ...] = ()
    relays: tuple[RelayPlan, ...] = ()
    #: Whether its worker fires schedules, and promotes timers.
    scheduler: bool = True
    promoter: bool = False
    #: How long calls of its client are repeated.
    retry_budget: float = 30.0


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A schedule that is saved at the start."""

    name: str
    queue: str
    every: float
    missed: str = "skip"
    grace: float = 60.0
    #: How long after its fire a message lapses.
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens: `who` is a process, the operator or the store."""

    at: float
    who: str
    action: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_fault(self) -> bool:
        return self.action in FAULTS

    @property
    def ends_at(self) -> float:
        """When a fault is over by itself."""
        lasts = self.arguments.get("seconds", 0.0) if self.is_fault else 0.0
        if self.action == "store_restart":
            lasts = self.arguments.get("down", 0.0)
        elif self.action == "crash":
            lasts = self.arguments.get("after", 0.0)
        return float(self.at + lasts)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole run. After its last step nothing goes wrong any more; `quiet_seconds` later everything must be over."""

    seed: int
    queues: tuple[QueueSetting, ...]
    processes: tuple[ProcessPlan, ...]
    steps: tuple[Step, ...]
    schedules: tuple[SchedulePlan, ...] = ()
    quiet_seconds: float = 600.0
    #: Round trips of a healthy link take between these, in seconds.
    delay_range: tuple[float, float] = (0.0005, 0.005)
    #: Whether the store notifies sleepers by itself and idle workers wait in it, as with Valkey.
    blocking_waits: bool = False

    @property
    def faults_end(self) -> float:
        """When the last step has happened and the last fault is over."""
        return max((max(step.at, step.ends_at) for step in self.steps), default=0.0)

    @property
    def length_seconds(self) -> float:
        return self.faults_end + self.quiet_seconds

    @property
    def length_hours(self) -> float:
        return self.length_seconds / 3600

    def is_served(self, queue: str) -> bool:
        """Whether a process handles the messages of a queue or sends them on."""
        return any(
            any(one.queue == queue for one in plan.handlers) or any(one.source == queue for one in plan.relays)
            for plan in self.processes
        )

    def process(self, name: str) -> ProcessPlan:
        """The plan of a process, also of its clones, whose names go on with a `+`."""
        return next(plan for plan in self.processes if plan.name == name.partition("+")[0])

    def with_steps(self, steps: tuple[Step, ...]) -> Scenario:
        return replace(self, steps=steps)


def to_json(scenario: Scenario) -> str:
    """A scenario as text, one step a line, so that two of them can be compared."""
    data = _without_defaults(asdict(scenario))
    steps = data.pop("steps", [])
    head = json.dumps(data, indent=1, sort_keys=True)
    lines = ",\n  ".join(json.dumps(step, sort_keys=True) for step in steps)
    return f'{head[:-2]},\n "steps": [\n  {lines}\n ]\n}}\n'


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: item if key in ("settings", "arguments") else _without_defaults(item)
            for key, item in value.items()
            if item not in (None, (), [], {}, "")
        }
    if isinstance(value, list | tuple):
        return [_without_defaults(item) for item in value]
    return value


def from_json(text: str) -> Scenario:
    """Read a scenario."""
    data = json.loads(text)
    return Scenario(
        seed=data["seed"],
        queues=tuple(QueueSetting(**one) for one in data.get("queues", ())),
        processes=tuple(_process(one) for one in data.get("processes", ())),
        steps=tuple(Step(**one) for one in data.get("steps", ())),
        schedules=tuple(SchedulePlan(**one) for one in data.get("schedules", ())),
        quiet_seconds=data["quiet_seconds"],
        delay_range=tuple(data["delay_range"]),
        blocking_waits=data.get("blocking_waits", False),
    )


def _process(data: dict[str, Any]) -> ProcessPlan:
    handlers = tuple(HandlerPlan(**one) for one in data.pop("handlers", ()))
    relays = tuple(RelayPlan(**one) for one in data.pop("relays", ()))
    return ProcessPlan(**data, handlers=handlers, relays=relays)


# ---- what a message's body says ------------------------------------------------------------------------------


def body_of(label: str, runs: tuple[Run, ...] | list[Any] = (), size: int = 0) -> dict[str, Any]:
    """The body of a message: its label, what its handler does in each run, and padding."""
    packed = [one if isinstance(one, list) else pack_run(one) for one in runs]
    return {"label": label, "runs": packed} | ({"padding": "x" * size} if size else {})


def pack_run(run: Run) -> list[Any]:
    """A run as it stands in bodies and steps."""
    next_runs = [pack_run(one) for one in run.next_runs]
    packed = [run.kind, run.seconds, run.after, run.queue, run.label, next_runs, run.expires]
    while packed and not packed[-1] and len(packed) > 1:
        packed.pop()
    return packed


def unpack_run(packed: list[Any]) -> Run:
    """The reverse."""
    defaults: list[Any] = ["ok", 0.0, 0.0, "", "", [], 0.0]
    kind, seconds, after, queue, label, next_runs, expires = packed + defaults[len(packed) :]
    return Run(kind, seconds, after, queue, label, tuple(unpack_run(one) for one in next_runs), expires)


def run_number(body: dict[str, Any], number: int) -> Run:
    """What the handler does in its run number `number`, from 1; the last one is repeated."""
    runs = body["runs"]
    return unpack_run(runs[min(number, len(runs)) - 1]) if runs else Run()


def labels_of(step: Step) -> Iterator[str]:
    """The labels of the messages that a step publishes."""
    if step.action == "publish":
        yield step.arguments["label"]
    elif step.action == "publish_many":
        for one in step.arguments["messages"]:
            yield one["label"]
