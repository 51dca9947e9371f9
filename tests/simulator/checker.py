"""The judge: rules over the whole history of a run, besides the rules of single steps.

It knows what was asked for, what was answered, what the store did, what handlers did, and when what was wrong. From
these alone it decides whether something happened that no fault explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulator.history import (
    Answered,
    Called,
    HandlerEnded,
    HandlerNotified,
    HandlerStarted,
    History,
    RunEnded,
    StoreStep,
    WorkerStopped,
)
from tests.simulator.records import LIVE, Claim, Entry, Finding, QueueRecords
from tests.simulator.scenario import Scenario
from tests.simulator.step_rules import StepChecker, show
from tests.simulator.timeline import FOREVER, HandlerRun, Timeline
from tests.simulator.world import World

#: A handler may go on so long after its lease has ended in the store: for the moment that it takes to stop it.
PAST_LEASE_SECONDS = 0.1
#: After a sleep of the machine the clock that saw it is read within this.
CLOCK_CHECK_SECONDS = 1.1
#: Without faults an outcome reaches the store within this.
SETTLE_SECONDS = 5.0
#: A message that can be claimed while a worker is idle, and nothing was wrong for longer than a sleeper is remembered,
#: is claimed within this. Queues with shorter leases are polled about as often.
PROMPT_SECONDS = 2.0
#: If only wake-ups were lost, a poll finds it within this.
POLL_SECONDS = 25.0
PROMPT_LEASE_MS = 10_000
CALM_BEFORE_SECONDS = 75.0
#: A message to which nothing has happened for so long, once nothing is wrong any more, is stuck.
STUCK_SECONDS = 200.0
#: A call that waits for an end learns of it within this, by polling at the latest.
WAITER_SECONDS = 40.0
#: How a run must be settled, by how it ended.
OUTCOMES: dict[str, tuple[str, ...]] = {
    "ok": ("done",), "publish": ("done",), "then": ("done",), "reschedule": ("done",), "ignore_cancel": ("done",),
    "hang": ("done",), "fail": ("retry", "dead"), "exit": ("retry", "dead"), "base_exception": ("retry", "dead"),
    "cancel_self": ("retry", "dead"), "retry": ("retry", "dead"), "snooze": ("snooze",), "dead": ("dead",),
    "drop": ("drop",),
}  # fmt: skip


class Checker:
    """Watches a run while it happens, and judges it at the end."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.steps = StepChecker()
        self._store: Any = None
        self._history: History | None = None
        self._seen = 0

    def follow(self, history: History) -> None:
        """Read what happens from this history, which grows."""
        self._history = history

    def observe_store(self, step: StoreStep, store: Any) -> None:
        """The store has run a step, and is as it is after it."""
        self._store = store
        self._catch_up()

    def _catch_up(self) -> None:
        assert self._history is not None
        happenings = self._history.happenings
        while self._seen < len(happenings):
            happening = happenings[self._seen]
            self._seen += 1
            if isinstance(happening, StoreStep):
                self.steps.observe_store(happening, self._store if self._seen == len(happenings) else None)
            else:
                self.steps.observe(happening)

    def judge(self, history: History, unhandled: Sequence[object] = ()) -> list[Finding]:
        """All that is wrong with a run, in the order in which it happened."""
        self._history = history
        self._catch_up()
        if self._store is not None:
            self.steps.compare_all(self._store)
        findings = [*self.steps.findings, *HistoryChecker(self.scenario, history, self.steps).judge()]
        end = history.happenings[-1].at if len(history) else 0.0
        findings += [Finding("unhandled", end, None, f"an error that nothing caught: {one}") for one in unhandled]
        return sorted(findings, key=lambda one: one.at)


@dataclass(slots=True)
class Judged:
    """A run and what is wrong with it."""

    scenario: Scenario
    history: History
    findings: list[Finding]


def run_and_judge(scenario: Scenario) -> Judged:
    """Run a scenario in virtual time and judge it."""
    checker = Checker(scenario)
    world = World(scenario, observe_store=checker.observe_store)
    checker.follow(world.recorder.history)
    history = world.run()
    return Judged(scenario, history, checker.judge(history, world.loop.unhandled))


class HistoryChecker:
    """The rules that need the whole history."""

    def __init__(self, scenario: Scenario, history: History, steps: StepChecker) -> None:
        self.scenario = scenario
        self.history = history
        self.steps = steps
        self.timeline = Timeline(scenario, history)
        self.findings: list[Finding] = []
        self.runs: dict[tuple[str, str, int, int], HandlerRun] = {}
        #: Runs of a message under a token.
        self.runs_of: dict[tuple[str, str, int], list[HandlerRun]] = defaultdict(list)
        #: Settlements that reached the store, by message and token: when, from where, which outcome.
        self.settles: dict[tuple[str, str, int], list[tuple[float, str, Any, int]]] = defaultdict(list)
        self.last_event: dict[tuple[str, str], float] = {}
        self.published_in: dict[tuple[str, str], list[StoreStep]] = defaultdict(list)
        self.cancels: list[tuple[float, str, str, int]] = []
        self.end: RunEnded | None = None
        self._read()

    def _find(self, rule: str, at: float, message_id: str | None, sentence: str) -> None:
        self.findings.append(Finding(rule, at, message_id, sentence))

    def _read(self) -> None:
        for one in self.history:
            match one:
                case HandlerStarted():
                    run = HandlerRun(one)
                    self.runs[one.who, one.message_id, one.token, one.run] = run
                    self.runs_of[one.queue, one.message_id, one.token].append(run)
                case HandlerEnded():
                    self.runs[one.who, one.message_id, one.token, one.run].end = one
                case HandlerNotified():
                    self._notified(one)
                case StoreStep():
                    self._read_step(one)
                case RunEnded():
                    self.end = one

    def _notified(self, one: HandlerNotified) -> None:
        run = self.runs.get((one.who, one.message_id, one.token, one.run))
        if run is not None and one.what == "lost" and run.notified_at is None:
            run.notified_at = one.at
        elif run is not None and one.what == "cancel" and run.cancel_notified_at is None:
            run.cancel_notified_at = one.at

    def _read_step(self, step: StoreStep) -> None:
        if step.verb == "settle" and step.error is None:
            for settlement in step.arguments["settlements"]:
                place = (step.arguments["queue"], settlement.id, settlement.token)
                self.settles[place].append((step.at, step.who, settlement, step.step))
        for event in step.events:
            if event.message_id is None or event.event == "duplicate":
                continue
            self.last_event[event.queue, event.message_id] = step.at
            if event.event == "published":
                self.published_in[event.queue, event.message_id].append(step)
            elif event.event == "cancel_requested":
                self.cancels.append((step.at, event.queue, event.message_id, event.token or 0))

    def judge(self) -> list[Finding]:
        self._check_acknowledged()
        self._check_published_once()
        for runs in list(self.runs_of.values()):
            for run in runs:
                self._check_start(run)
                self._check_past_lease(run)
                self._check_outcome(run)
        self._check_expiries()
        self._check_one_step()
        self._check_waiters()
        self._check_cancels()
        self._check_prompt()
        self._check_schedules()
        self._check_relays()
        self._check_liveness()
        return self.findings

    # ---- publishing ------------------------------------------------------------------------------------

    def _check_acknowledged(self) -> None:
        """Nothing that was acknowledged is lost, unless a restart of the store lost it."""
        calls = {one.call: one for one in self.history.of(Called)}
        for answer in self.history.of(Answered):
            call = calls[answer.call]
            if answer.error is not None or call.action not in ("publish", "publish_many"):
                continue
            queue = self.steps.queue(call.arguments["queue"])
            for result in answer.result if isinstance(answer.result, list) else [answer.result]:
                entry = queue.entries.get(result["id"])
                if (queue.name, result["id"]) in self.steps.lost_ids:
                    continue
                if entry is None:
                    self._find(
                        "lost", answer.at, result["id"],
                        f"the publish of {result['label']} by {answer.who} was acknowledged as {result['status']} "
                        f"under {result['id']}, and {queue.name} never had it",
                    )  # fmt: skip
                elif result["status"] in ("queued", "delayed", "replaced") and entry.label != result["label"]:
                    self._find(
                        "lost", answer.at, entry.id,
                        f"the publish of {result['label']} by {answer.who} was answered with {show(entry)}",
                    )  # fmt: skip

    def _check_published_once(self) -> None:
        """A publish stores one message, however often it was sent."""
        seen: dict[tuple[str, str], Entry] = {}
        for entry in self.steps.entries():
            if entry.origin != "publish":
                continue
            first = seen.setdefault((entry.queue, entry.label), entry)
            if first is not entry:
                self._find(
                    "once", entry.published_at, entry.id, f"one publish made two messages: {show(first)}, {entry.id}"
                )

    # ---- runs ------------------------------------------------------------------------------------------

    def _claim_of(self, run: HandlerRun) -> Claim | None:
        claims = self.steps.claims.get(run.place, [])
        return next((claim for claim in claims if run.start.nonce in claim.nonces), None)

    def _without_lease(self, claim: Claim) -> Iterator[tuple[float, float]]:
        """The stretches of true time in which a lease was over in the store: until it was renewed, or for good."""
        for index, (since, end_ms) in enumerate(claim.ends):
            until = claim.ends[index + 1][0] if index + 1 < len(claim.ends) else claim.ended_at
            end = self.timeline.reaches(end_ms, since)
            if index + 1 == len(claim.ends) and (until is None or claim.ended_how == "expired"):
                until = FOREVER
            if until is not None and end < until:
                yield end, until

    def _check_start(self, run: HandlerRun) -> None:
        """No handler starts without a lease."""
        start = run.start
        claim = self._claim_of(run)
        if claim is None:
            if start.nonce not in self.steps.lost_nonces:
                self._find(
                    "start", start.at, start.message_id,
                    f"{start.who} started {start.label} under token {start.token}, which no claim gave to it",
                )  # fmt: skip
            return
        others = [one for one in self.runs_of[run.place] if one is not run]
        if any(one.start.nonce == start.nonce and one.start.at <= start.at for one in others):
            self._find(
                "one holder", start.at, start.message_id,
                f"{start.label} was started twice under token {start.token}, the second time by {start.who}",
            )  # fmt: skip
        if not claim.ends or self._excused(claim, start.at):
            return
        known = [self.timeline.reaches(end_ms, since) for since, end_ms in claim.ends if since <= start.at]
        if known and known[-1] + PAST_LEASE_SECONDS < start.at:
            self._find(
                "start", start.at, start.message_id,
                f"{start.who} started {start.label} {start.at - known[-1]:.3f} s after its lease had ended",
            )  # fmt: skip

    def _excused(self, claim: Claim, until: float) -> bool:
        """Whether the store forgot the claim, or its clock was set: then its holder cannot know when the lease ends."""
        return self.timeline.clock_stepped(claim.at - 1.0, until) or self.timeline.lost_writes(claim.at, until)

    def _check_past_lease(self, run: HandlerRun) -> None:
        """A handler whose lease has ended is told, and stops, before another worker can have the message."""
        claim = self._claim_of(run)
        if claim is None or not claim.ends:
            return
        stopped = min(
            FOREVER if run.end is None else run.end.at,
            FOREVER if run.notified_at is None else run.notified_at,
            self.timeline.end,
        )
        if self._excused(claim, stopped) or self.timeline.is_gone(run.who, run.start.at, stopped):
            return
        slept = any(one.fault == "suspend" for one in self.timeline.faults(run.who, run.start.at, stopped))
        for lease_end, until in self._without_lease(claim):
            begin, end = max(lease_end, run.start.at), min(until, stopped)
            over = end - begin - self.timeline.standstill(run.who, begin, end)
            if over > (CLOCK_CHECK_SECONDS if slept else PAST_LEASE_SECONDS):
                self._find(
                    "past lease", begin, run.start.message_id,
                    f"the handler of {run.start.label} in {run.who} ran {over:.3f} s past the end of its lease "
                    f"({run.start.kind}, token {run.start.token})",
                )  # fmt: skip

    def _check_outcome(self, run: HandlerRun) -> None:
        """A run is settled, and as its handler ended."""
        if run.end is None or run.start.kind == "block":
            return
        claim = self._claim_of(run)
        if claim is None or claim.lease_ms is None:
            return
        # A restart that loses the claim may give the same token again, but not the same nonce.
        settles = [(at, who, one) for at, who, one, _ in self.settles[run.place] if one.nonce in claim.nonces]
        sent = [one for at, who, one in settles if who == run.who and at >= run.end.at]
        allowed = OUTCOMES.get(run.end.how)
        for one in sent:
            if (
                allowed is not None
                and one.outcome not in allowed
                and run.notified_at is None
                and not self._stopped(run)
            ):
                self._find(
                    "outcome", run.end.at, run.start.message_id,
                    f"the handler of {run.start.label} in {run.who} ended by {run.end.how}, and was settled as "
                    f"{one.outcome}",
                )  # fmt: skip
                return
        late = run.end.at + SETTLE_SECONDS
        if sent or run.notified_at is not None or late > self.timeline.end:
            return
        if self.timeline.is_calm(run.who, claim.at, late) and not self._stops(run.who, claim.at, late):
            self._find(
                "settle", run.end.at, run.start.message_id,
                f"the handler of {run.start.label} in {run.who} ended by {run.end.how}, and no settle reached "
                f"the store within {SETTLE_SECONDS:g} s although nothing was wrong",
            )  # fmt: skip

    def _stopped(self, run: HandlerRun) -> bool:
        """Whether its worker was asked to stop while it ran."""
        end = FOREVER if run.end is None else run.end.at
        return self._stops(run.who, run.start.at, end)

    def _stops(self, who: str, begin: float, end: float) -> bool:
        return any(
            name == who and kind != "started" and begin <= at <= end for at, name, kind in self.timeline.worker_changes
        )

    # ---- leases ----------------------------------------------------------------------------------------

    def _check_expiries(self) -> None:
        """A lease ends for want of a renewal only if something was wrong with its holder."""
        stops = list(self.history.of(WorkerStopped))
        for claims in self.steps.claims.values():
            for claim in claims:
                if claim.ended_how != "expired" or claim.ended_at is None:
                    continue
                begin = claim.at - 2.0
                if not self.timeline.is_calm(claim.who, begin, claim.ended_at):
                    continue
                if any(one.who == claim.who and one.at >= claim.at and one.report["running"] for one in stops):
                    continue
                runs = self.runs_of.get((claim.queue, claim.message_id, claim.token), [])
                rule, why = "renewal", "nothing was wrong with its holder"
                if self._stops(claim.who, claim.at, claim.ended_at) and all(run.end is not None for run in runs):
                    rule, why = "drain", "its worker stopped in order and did not give it back"
                entry = self.steps.queue(claim.queue).entries[claim.message_id]
                self._find(
                    rule, claim.ended_at, claim.message_id,
                    f"the lease of {show(entry)} that {claim.who} claimed at {claim.at:.3f} s expired: {why}",
                )  # fmt: skip

    def _check_cancels(self) -> None:
        """A handler is told of a cancel at its next renewal, whatever became of the wake-up."""
        for at, queue, message_id, token in self.cancels:
            for run in self.runs_of.get((queue, message_id, token), []):
                claim = self._claim_of(run)
                if claim is None or claim.lease_ms is None or run.start.kind != "async" or run.start.at > at:
                    continue
                bound = at + claim.lease_ms / 2000 + 1.0
                ended = FOREVER if run.end is None else run.end.at
                notified = FOREVER if run.cancel_notified_at is None else run.cancel_notified_at
                if min(ended, notified) <= bound or bound > self.timeline.end:
                    continue
                only_wakeups = all(
                    one.fault == "lose_notifications" for one in self.timeline.faults(run.who, claim.at, bound)
                )
                if only_wakeups and not self._stopped(run):
                    self._find(
                        "cancel", bound, message_id,
                        f"a cancel of {run.start.label} was requested at {at:.3f} s, and its handler in {run.who} was "
                        f"not told by {bound:.3f} s",
                    )  # fmt: skip

    # ---- promptness and ends -----------------------------------------------------------------------------

    def _check_prompt(self) -> None:
        """While nothing is wrong an idle worker is woken for a message; it does not wait for its next poll."""
        busy: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for runs in self.runs_of.values():
            for run in runs:
                ended = FOREVER if run.end is None else run.end.at
                busy[run.who, run.start.queue].append((run.start.at, ended))
        for step in self.history.of(StoreStep):
            for event in step.events:
                # One that replaces another may wait as that one did.
                ready = (
                    event.event == "published"
                    and event.due_ms is None
                    and event.cause not in ("parked", "blocked", "replace")
                )
                if (
                    ready
                    and event.message_id is not None
                    and (event.queue, event.message_id) not in self.steps.lost_ids
                ):
                    self._check_prompt_claim(step, event.queue, event.message_id, busy)

    def _check_prompt_claim(
        self, step: StoreStep, name: str, message_id: str, busy: dict[tuple[str, str], list[tuple[float, float]]]
    ) -> None:
        queue, at, late = self.steps.queue(name), step.at, step.at + PROMPT_SECONDS
        policy = queue.policy
        if policy.max_running is not None or policy.rate_count is not None or late > self.timeline.end:
            return
        if policy.lease_ms is None:
            return
        rule = "prompt"
        # Set back, the clock keeps the names of sleepers that are gone: a wake-up for one of them is lost.
        set_back = any(by < 0 and moment < late for moment, by in self.timeline.clock_steps)
        if set_back or not self.timeline.is_calm(None, at - CALM_BEFORE_SECONDS, late):
            rule, late = "poll", at + POLL_SECONDS
            faults = self.timeline.faults(None, at - CALM_BEFORE_SECONDS, late)
            if any(one.fault != "lose_notifications" for one in faults) or late > self.timeline.end:
                return
        if self._operated(name, 0.0, late) or (rule == "prompt" and policy.lease_ms < PROMPT_LEASE_MS):
            return
        if not self.timeline.workers_steady(at - CALM_BEFORE_SECONDS, late):
            return
        claims = self.steps.claims.get((name, message_id, 1), [])
        entry = queue.entries.get(message_id)
        if (
            entry is None
            or (claims and claims[0].at <= late)
            or (entry.ended_at is not None and entry.ended_at <= late)
        ):
            return
        for plan in self.scenario.processes:
            for handler in plan.handlers:
                if handler.queue != name or self.timeline.is_stopped(plan.name, at):
                    continue
                running = sum(begin <= late and end >= at for begin, end in busy[plan.name, name])
                if running < handler.concurrency:
                    self._find(
                        rule, late, message_id,
                        f"{show(entry)} could be claimed from {at:.3f} s on and was not by {late:.3f} s, although "
                        f"{plan.name} was idle and at most wake-ups were lost",
                    )  # fmt: skip
                    return

    def _operated(self, queue: str, begin: float, end: float) -> bool:
        """Whether an operator paused the queue or changed a setting of it between two moments."""
        return any(
            one.action in ("pause", "resume", "configure") and one.arguments["queue"] == queue and begin < one.at <= end
            for one in self.history.of(Called)
            if one.at > 1.0
        )

    def _check_waiters(self) -> None:
        """A call that waits for a message or chain ends soon after what it waits for."""
        calls = {one.call: one for one in self.history.of(Called)}
        answers = {one.call: one for one in self.history.of(Answered)}
        for number, call in calls.items():
            if call.action not in ("wait_result", "wait_chain"):
                continue
            answer = answers.get(number)
            ended = self.timeline.end if answer is None else answer.at
            if answer is not None and answer.error != "WaitTimeout":
                continue
            finished = self._finished_at(call)
            if finished is None or max(finished, call.at) + WAITER_SECONDS > ended:
                continue
            if self.timeline.is_gone(call.who, call.at, ended):
                continue
            if self.timeline.is_calm(call.who, max(finished, call.at) - 1.0, ended):
                what = "never ended" if answer is None else "ended without it"
                self._find(
                    "chains" if call.action == "wait_chain" else "results", ended, None,
                    f"{call.who} waited for {call.arguments['label']} ({call.action}), which was over at "
                    f"{finished:.3f} s, and its call {what} at {ended:.3f} s",
                )  # fmt: skip

    def _finished_at(self, call: Called) -> float | None:
        """When what a call waits for was over; None if it was not, or is not known."""
        entries = [entry for entry in self.steps.entries() if entry.label == call.arguments["label"]]
        first = next((entry for entry in entries if entry.origin == "publish"), None)
        if first is None or first.ended_at is None:
            return None
        if call.action == "wait_result":
            return first.ended_at
        chain = f"{first.queue}/{first.id}"
        members = [entry for entry in self.steps.entries() if entry.chain == chain] or [first]
        ends = [entry.ended_at for entry in members]
        return None if None in ends else max(end for end in ends if end is not None)

    def _check_one_step(self) -> None:
        """What a handler sends on exists if and only if its settle counted, and once."""
        for place, runs in self.runs_of.items():
            for run in runs:
                if run.end is not None and run.end.sent_on:
                    self._check_sent_on(run, self.settles.get(place, []))

    def _check_sent_on(self, run: HandlerRun, settles: list[tuple[float, str, Any, int]]) -> None:
        assert run.end is not None
        done = {step for _, _, one, step in settles if one.outcome == "done"}
        claim = self._claim_of(run)
        ended = claim is not None and claim.ended_how == "done"
        for next_id in run.end.sent_on:
            # By whatever but a relay, which keeps the ids of what it sends on.
            steps = [step for (_, id), found in self.published_in.items() if id == next_id for step in found]
            stored = [
                step for step in steps if step.step not in self.steps.lost_steps and not is_relayed(step, next_id)
            ]
            for step in stored:
                if step.step not in done or not ended:
                    self._find(
                        "one step", step.at, next_id,
                        f"{next_id}, sent on by {run.start.label}, was stored by a {step.verb} of {step.who}, and not "
                        "by a settle of that message as done",
                    )  # fmt: skip
            if len(stored) > 1:
                self._find(
                    "one step", stored[1].at, next_id, f"{next_id}, sent on by {run.start.label}, was stored twice"
                )
            if ended and not steps and not self._has_duplicate(next_id, done):
                self._find(
                    "one step", run.end.at, next_id, f"{run.start.label} is done, and what it sent on was not stored"
                )

    def _has_duplicate(self, next_id: str, steps: set[int]) -> bool:
        """Whether what was sent on met a message that has its key."""
        return any(
            event.event == "duplicate"
            for step in self.history.of(StoreStep)
            if step.step in steps
            for event in step.events
        )

    # ---- schedules, relays, the end ----------------------------------------------------------------------

    def _check_schedules(self) -> None:
        """Instants that were not fired are counted as missed, and a schedule goes on."""
        if self.end is None:
            return
        touched = {
            one.arguments.get("name") for one in self.history.of(Called) if "schedule" in one.action and one.at > 1
        }
        for plan in self.scenario.schedules:
            state = self.end.states.get(plan.queue)
            found = None if state is None else state.schedules.get(plan.name)
            if found is None or plan.name in touched or self.timeline.clock_steps:
                continue
            next_ms, fires, _ = found
            instants = self.steps.queue(plan.queue).instants.get(plan.name, set())
            if len(instants) != fires:
                self._find(
                    "schedules",
                    self.end.at,
                    None,
                    f"schedule {plan.name} counts {fires} fires, {len(instants)} happened",
                )
            late = self.end.store_ms - (next_ms or 0)
            if next_ms is not None and not self._stays_full(plan.queue) and late > 60_000 + plan.every * 1000:
                self._find(
                    "liveness", self.end.at, None,
                    f"schedule {plan.name} has not fired for {late / 1000:.0f} s after its next instant",
                )  # fmt: skip

    def _stays_full(self, name: str) -> bool:
        """Whether a queue is full, and paused: it takes no fire until an operator acts."""
        queue = self.steps.queue(name)
        most = queue.policy.max_pending
        return queue.paused and most is not None and queue.pending >= most

    def _check_relays(self) -> None:
        """What a relay has settled is in its target."""
        for source, target in {(one.source, one.target) for plan in self.scenario.processes for one in plan.relays}:
            arrived = {entry.label for entry in self.steps.queue(target).entries.values()}
            for entry in self.steps.queue(source).entries.values():
                if entry.state == "done" and entry.label not in arrived and not self.timeline.lost_writes(0.0, FOREVER):
                    self._find(
                        "relay", entry.ended_at or 0.0, entry.id,
                        f"{show(entry)} was relayed to {target} and settled, and {target} never had it",
                    )  # fmt: skip

    def _check_liveness(self) -> None:
        """Once nothing is wrong any more, everything comes to an end: nothing is stuck."""
        if self.end is None:
            return
        at = self.end.at
        for name, queue in self.steps.queues.items():
            if queue.paused or not self._is_served(name):
                continue
            active = self._active_until(name)
            for entry in queue.entries.values():
                if entry.state not in LIVE:
                    continue
                since = max(self.last_event.get((entry.queue, entry.id), entry.published_at), self.timeline.calm_since)
                lapses_at = self.timeline.last_reaches(entry.expires_ms) if entry.expires_ms else FOREVER
                if entry.state == "delayed" and lapses_at > at:
                    # A due time is a moment of the store's clock: set back, it comes again later.
                    since = max(since, self.timeline.last_reaches(entry.due_ms))
                if entry.state != "waiting":
                    # While others are handled it may be behind them, also where it has been claimed.
                    since = max(since, active)
                waits = self._waits(queue, entry) and lapses_at > at
                if (entry.state == "leased" and self._is_running(entry)) or waits:
                    continue
                if entry.state != "leased" and lapses_at <= at:
                    # It ends at its expiry at the latest, whatever it waits for.
                    since = max(since, lapses_at)
                if since + STUCK_SECONDS < at:
                    self._find(
                        "liveness", since + STUCK_SECONDS, entry.id,
                        f"{show(entry)} is {entry.state}, and nothing has happened to it since {since:.3f} s",
                    )  # fmt: skip
            state = self.end.states.get(name)
            for first, count in (state.open_chains if state is not None else {}).items():
                self._check_open_chain(name, first, count)

    def _waits(self, queue: QueueRecords, entry: Entry) -> bool:
        """Whether what a waiting message waits for has not ended: chains, or the message that has its key."""
        if entry.state != "waiting":
            return False
        if entry.key is not None and len(queue.keys[entry.key]) > 1:
            return True
        return any(one.state in LIVE for one in self.steps.entries() if one.chain in entry.after)

    def _active_until(self, queue: str) -> float:
        """When a message of a queue was last claimed, or its handler at work."""
        last = 0.0
        for (name, _, _), runs in self.runs_of.items():
            if name == queue:
                last = max(last, *(self.timeline.end if run.end is None else run.end.at for run in runs))
        claimed = [claim.at for (name, _, _), claims in self.steps.claims.items() if name == queue for claim in claims]
        return max([last, *claimed])

    def _check_open_chain(self, name: str, first: str, count: int) -> None:
        chain = f"{name}/{first}"
        members = [entry for entry in self.steps.entries() if entry.chain == chain or entry.id == first]
        open_members = [entry for entry in members if entry.state in LIVE]
        if members and not open_members and self.end is not None:
            last = max(entry.ended_at or 0.0 for entry in members)
            if last + STUCK_SECONDS < self.end.at:
                self._find("chains", last, first, f"chain {chain} counts {count} open messages, and all have ended")

    def _is_running(self, entry: Entry) -> bool:
        """Whether the handler that holds it is still at work."""
        return any(run.end is None for run in self.runs_of.get((entry.queue, entry.id, entry.token), []))

    def _is_served(self, queue: str) -> bool:
        """Whether a worker for the queue is at work at the end."""
        for plan in self.scenario.processes:
            serves = any(one.queue == queue for one in plan.handlers) or any(one.source == queue for one in plan.relays)
            changes = [kind for _, who, kind in self.timeline.worker_changes if who == plan.name]
            gone = any(
                one.fault == "crash" and one.who == plan.name and one.end == FOREVER for one in self.timeline.stretches
            )
            if serves and changes and changes[-1] == "started" and not gone:
                return True
        return False


def is_relayed(step: StoreStep, message_id: str) -> bool:
    """Whether a step stored a message for a relay."""
    return any(
        draft.id == message_id and draft.forwarded and draft.capped for draft in step.arguments.get("drafts", ())
    )
