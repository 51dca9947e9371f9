"""A run in plain words, for a person who wants to know what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.simulator.checker import Judged
from tests.simulator.history import (
    Answered,
    Called,
    FaultBegan,
    FaultEnded,
    HandlerEnded,
    HandlerNotified,
    HandlerStarted,
    Happening,
    StoreRestarted,
    StoreStep,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from tests.simulator.records import Finding
from tests.simulator.scenario import ProcessPlan, QueueSetting
from tests.simulator.step_rules import read_body
from waypost.values import EventRecord

#: A story of more lines is cut to what concerns the messages that something is wrong with.
LINES_MAX = 60
FINDINGS_PRINTED = 3
LINE_CHARACTERS = 150
#: What a step of the store does to a message, in words.
EVENTS = {
    "published": "is stored",
    "duplicate": "has the key already: nothing is stored",
    "postponed": "is postponed",
    "promoted": "becomes ready",
    "claimed": "is claimed",
    "done": "is done",
    "retried": "is to be tried again",
    "snoozed": "is snoozed",
    "released": "is given back",
    "expired": "comes back: its lease has expired",
    "dead": "becomes a dead letter",
    "dropped": "is dropped",
    "cancel_requested": "is to be cancelled",
    "cancelled": "is cancelled",
    "replaced": "is replaced",
    "redriven": "is redriven",
    "dead_trimmed": "is removed from the dead letters",
}
FAULTS = {
    "crash": "crashes",
    "freeze": "is frozen",
    "stall": "has a busy event loop",
    "suspend": "sleeps with its machine",
    "wall_clock_step": "has the clock of its machine set",
    "clone": "is cloned",
    "partition": "is cut off from the store",
    "slow_link": "has a slow link",
    "lose_requests": "loses requests",
    "lose_replies": "loses answers",
    "late_replies": "gets answers late",
    "double_requests": "sends requests twice",
    "reorder": "sends and gets in another order",
    "lose_notifications": "loses wake-ups",
    "store_restart": "is restarted",
    "clock_step": "has its clock set",
}


def write_story(judged: Judged) -> str:
    """The story of a run: what is wrong with it, who takes part, and what happened."""
    return "\n".join(Story(judged).lines())


class Story:
    """Writes the lines of a story."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.labels: dict[str, str] = {}
        for step in judged.history.of(StoreStep):
            for event in step.events:
                if event.event == "published" and event.message_id is not None:
                    self.labels[event.message_id] = read_body(event.body)[0]
        #: The scenario's own names of the messages that something is wrong with.
        self.concerned = {self._name(one.message_id) for one in self._findings() if one.message_id is not None}

    def _findings(self) -> list[Finding]:
        return self.judged.findings[:FINDINGS_PRINTED]

    def _name(self, message_id: str | None) -> str:
        return self.labels.get(message_id or "", message_id or "?")

    def lines(self) -> Iterator[str]:
        scenario = self.judged.scenario
        wrong = len(self.judged.findings)
        yield f"Seed {scenario.seed}, {scenario.length_hours:.2f} simulated hours: " + (
            "nothing is wrong." if not wrong else f"{wrong} finding{'s' if wrong > 1 else ''}."
        )
        for finding in self._findings():
            yield f"  {finding}"
        yield ""
        yield "There are"
        yield from (f"  {describe_queue(queue)}" for queue in scenario.queues)
        yield from (f"  {describe_process(plan)}" for plan in scenario.processes)
        yield from (f"  schedule {one.name}: every {one.every:g} s into {one.queue}" for one in scenario.schedules)
        yield ""
        yield "What happened, by true time"
        lines = list(self._happenings(everything=True))
        if len(lines) > LINES_MAX and self.concerned:
            lines = list(self._happenings(everything=False))
        left_out = len(lines) - 4 * LINES_MAX
        if left_out > 0:
            lines = [*lines[: 4 * LINES_MAX], f"  (and {left_out} more lines)"]
        yield from lines

    def _happenings(self, *, everything: bool) -> Iterator[str]:
        """What happened line by line: all of it, or what concerns the messages of the findings, and the faults."""
        for one in self.judged.history:
            for names, text in self._describe(one):
                if everything or not names or names & self.concerned:
                    line = f"{one.at:10.3f} s  {text}"
                    yield line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"

    def _describe(self, one: Happening) -> Iterator[tuple[set[str], str]]:
        """What to say of a happening: sentences, each with the messages that it concerns; with none: always."""
        match one:
            case Called():
                yield self._called(one)
            case Answered(error=str()):
                yield set(), f"{one.who}: its call ends with {one.error} ({one.outcome})"
            case HandlerStarted():
                kind = "a block" if one.kind == "block" else f"the {one.kind} handler"
                yield {one.label}, f"{one.who}: {kind} begins with {one.label}, run {one.run}, token {one.token}"
            case HandlerNotified():
                what = "its lease is over" if one.what == "lost" else "to cancel"
                yield (
                    {self._name(one.message_id)},
                    f"{one.who}: the handler of {self._name(one.message_id)} learns: {what}",
                )
            case HandlerEnded():
                yield (
                    {self._name(one.message_id)},
                    f"{one.who}: the handler of {self._name(one.message_id)} ends: {one.how}",
                )
            case StoreStep():
                yield from self._step(one)
            case FaultBegan():
                details = ", ".join(f"{name} {value}" for name, value in one.arguments.items())
                yield set(), f"{one.who} {FAULTS[one.fault]}" + (f" ({details})" if details else "")
            case FaultEnded() if one.fault not in ("clone", "clock_step", "wall_clock_step"):
                yield set(), f"{one.who}: over ({one.fault.replace('_', ' ')})"
            case StoreRestarted():
                yield set(), f"the store answers again; it has all steps up to number {one.kept_step}"
            case WorkerStarted():
                yield set(), f"{one.who}: its worker claims"
            case WorkerStopping():
                yield set(), f"{one.who}: its worker is asked to stop within {one.timeout:g} s"
            case WorkerStopped():
                report = ", ".join(f"{count} {name}" for name, count in one.report.items() if count)
                yield set(), f"{one.who}: its worker has stopped ({report or 'nothing was under way'})"

    def _called(self, one: Called) -> tuple[set[str], str]:
        given = dict(one.arguments)
        queue, label = given.pop("queue", None), given.pop("label", None)
        given.pop("runs", None)
        if "messages" in given:
            label = ", ".join(message["label"] for message in given.pop("messages"))
        parts = [one.action.replace("_", " "), label or "", f"into {queue}" if one.action == "publish" else queue or ""]
        more = ", ".join(f"{name} {value}" for name, value in given.items())
        text = " ".join(part for part in parts if part) + (f" ({more})" if more else "")
        names = set(label.split(", ")) if label else set()
        return names, f"{one.who}: {text}"

    def _step(self, step: StoreStep) -> Iterator[tuple[set[str], str]]:
        for event in step.events:
            if event.message_id is None:
                yield set(), f"the store: {event.queue} is {event.event} (by {step.who})"
                continue
            name = self._name(event.message_id)
            yield {name}, f"the store: {name} {EVENTS[event.event]}{details_of(step, event)}"
        if step.error is not None:
            yield set(), f"the store refuses a {step.verb} of {step.who}: {step.error}"
        if step.verb == "settle" and step.error is None:
            for one, status in zip(step.arguments["settlements"], step.result.result, strict=True):
                if status == "lost":
                    name = self._name(one.id)
                    yield {name}, f"the store refuses to settle {name} for {step.who}: token {one.token} is not current"


def details_of(step: StoreStep, event: EventRecord) -> str:
    """What else is worth saying of an event."""
    match event.event:
        case "claimed":
            again = f", again because it was {event.cause}" if event.cause else ""
            return f" by {step.who} (token {event.token}, delivery {event.deliveries}{again})"
        case "published":
            cause = {"parked": ", behind the one that runs", "blocked": ", waiting for chains"}.get(
                event.cause or "", ""
            )
            due = f", due at {event.due_ms} by the store's clock" if event.due_ms is not None else ""
            return f" in {event.queue} for {step.who}{cause}{due}"
        case "dead":
            return f" ({event.reason})"
        case "expired":
            return f", found by {step.who}"
        case "retried":
            return f" (attempt {event.attempts})"
    return f" ({event.cause})" if event.cause else f" by {step.who}"


def describe_queue(queue: QueueSetting) -> str:
    settings = {name: value for name, value in queue.settings.items() if name != "journal"}
    return f"queue {queue.name}: " + ", ".join(f"{name} {value}" for name, value in settings.items())


def describe_process(plan: ProcessPlan) -> str:
    parts = [f"{one.queue} ({one.concurrency} at once, {one.kind}, {one.attempts} attempts)" for one in plan.handlers]
    parts += [f"relays {one.source} to {one.target}" for one in plan.relays]
    works = "a publisher" if not parts else "handles " + ", ".join(parts)
    return f"{plan.name} on {plan.machine}: {works}"


def summarise(judged: Judged) -> dict[str, Any]:
    """How often each rule was broken."""
    rules: dict[str, int] = {}
    for finding in judged.findings:
        rules[finding.rule] = rules.get(finding.rule, 0) + 1
    return rules
