"""The rules of single steps: after every step of the store its journal, its answer and its records must agree.

`StepChecker` keeps records of its own. It follows the journal event by event, asks of each whether it may happen to
that message now, and compares what results with the answer that the store gives and with the records it keeps.
Nothing of the store's code is used: only its events, answers and records are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulator.history import FaultBegan, Happening, StoreRestarted, StoreStep
from tests.simulator.records import AT_HEAD, FINAL, LIVE, Claim, Entry, Finding, QueueRecords
from waypost.codec import open_envelope
from waypost.values import EventRecord

#: The store's records are compared in full after so many steps; in between, those of the messages that changed.
COMPARE_ALL_EVERY = 100
#: After so many findings the first ones have been repeated often enough.
FINDINGS_MAX = 40
#: A store may have forgotten a call after this.
REMEMBERED_MS = 300_000
#: Counters that must be the same in the store and here.
COUNTED = (
    "published", "redriven", "done", "dead", "dropped", "cancelled", "replaced", "claims", "first_claims", "expired",
    "released", "retried", "snoozed", "duplicates",
)  # fmt: skip
ENDS = {"done": "done", "dropped": "dropped", "cancelled": "cancelled", "replaced": "replaced"}
COMES_BACK = frozenset(("expired", "released", "retried", "snoozed"))


class StepChecker:
    """Follows the steps of one store."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._reset()
        #: All steps so far: what is left of them after a restart that lost some is followed again from the start.
        self._steps: list[StoreStep] = []
        #: Ids that were published in steps which a restart lost, and since when.
        self.lost_ids: set[tuple[str, str]] = set()
        self.lost_steps: set[int] = set()
        #: What leases were fenced with that a restart lost.
        self.lost_nonces: set[bytes] = set()
        self._quiet = False

    def _reset(self) -> None:
        self.queues: dict[str, QueueRecords] = {}
        self.claims: dict[tuple[str, str, int], list[Claim]] = {}
        #: Operations that ran, by queue and operation: the first step in which they did.
        self._ran: dict[tuple[str, str], StoreStep] = {}
        #: The latest time of the store's clock: what it forgot then stays forgotten if the clock is set back.
        self._newest_ms = 0
        self._count = 0
        self._step: StoreStep | None = None
        self._touched: dict[str, dict[str, None]] = {}

    # ---- what is called --------------------------------------------------------------------------------

    def observe(self, happening: Happening) -> None:
        """Restarts and clock steps, in the order in which they happen."""
        if isinstance(happening, StoreRestarted):
            self._forget_after(happening.kept_step)
        elif isinstance(happening, FaultBegan) and happening.fault == "clock_step":
            for queue in self.queues.values():
                queue.claimed_ms.clear()
                # A window that has ended does not live again because the clock is set back.
                if self._step is not None:
                    now = self._step.store_ms + (happening.at - self._step.at) * 1000
                    queue.windows = {key: window for key, window in queue.windows.items() if window[1] > now}

    def observe_store(self, step: StoreStep, store: Any = None) -> None:
        """One step, and the store as it is after it; None: only the journal and the answers are checked."""
        self._steps.append(step)
        self._follow(step)
        if store is not None:
            self._count += 1
            self._compare(store, everything=self._count % COMPARE_ALL_EVERY == 0)

    def compare_all(self, store: Any) -> None:
        """Compare all records with those of the store: at the end of a run."""
        self._touched = {}
        self._compare(store, everything=True)

    def entries(self) -> Iterable[Entry]:
        return (entry for queue in self.queues.values() for entry in queue.entries.values())

    def queue(self, name: str) -> QueueRecords:
        return self.queues.setdefault(name, QueueRecords(name))

    # ---- following -------------------------------------------------------------------------------------

    def _forget_after(self, kept_step: int) -> None:
        lost = [step for step in self._steps if step.step > kept_step]
        self.lost_steps.update(step.step for step in lost)
        for step in lost:
            self.lost_nonces.update(lease.nonce for lease in leases_of(step))
        for step in lost:
            self.lost_ids.update(
                (e.queue, e.message_id) for e in step.events if e.event == "published" and e.message_id
            )
        self._steps = [step for step in self._steps if step.step <= kept_step]
        self._reset()
        self._quiet = True
        for step in self._steps:
            self._follow(step)
        self._quiet = False

    def _find(self, rule: str, entry: Entry | str | None, sentence: str) -> None:
        if self._quiet or len(self.findings) >= FINDINGS_MAX:
            return
        message_id = entry.id if isinstance(entry, Entry) else entry
        at = 0.0 if self._step is None else self._step.at
        self.findings.append(Finding(rule, at, message_id, sentence))

    def _follow(self, step: StoreStep) -> None:
        if self._step is not None and step.store_ms < self._step.store_ms:
            for queue in self.queues.values():
                ended = [key for key, window in queue.windows.items() if window[1] <= self._step.store_ms]
                for key in ended:
                    del queue.windows[key]
        self._step, self._touched = step, {}
        self._newest_ms = max(self._newest_ms, step.store_ms)
        queue_name = step.arguments.get("queue")
        repeated = False
        if step.operation is not None and isinstance(queue_name, str):
            place = (queue_name, step.operation)
            first = self._ran.get(place)
            if first is not None and first.who != step.who and self._newest_ms - first.store_ms > REMEMBERED_MS:
                # A process and its copy number their calls alike: what the store has forgotten is another call.
                del self._ran[place]
                first = None
            repeated = first is not None
            own = [e for e in step.events if e.operation_id == step.operation]
            if repeated and own:
                self._find(
                    "once", own[0].message_id,
                    f"the {step.verb} of {step.who} on {queue_name} ran twice under one number: in step "
                    f"{self._ran[place].step}, and again now ({own[0].event} of {own[0].message_id})",
                )  # fmt: skip
            if step.error is None:
                self._ran.setdefault(place, step)
        if step.error is None and isinstance(queue_name, str):
            before = BEFORE.get(step.verb)
            if before is not None:
                before(self, step, self.queue(queue_name), repeated)
        for event in step.events:
            self._event(step, event)
        if step.error is None and isinstance(queue_name, str):
            after = AFTER.get(step.verb)
            if after is not None:
                after(self, step, self.queue(queue_name), repeated)
        for name, ids in self._touched.items():
            self._check_keys(self.queue(name), ids)
            self.queue(name).replaced.clear()

    def _event(self, step: StoreStep, event: EventRecord) -> None:
        queue = self.queue(event.queue)
        if event.message_id is None:
            if event.event in ("paused", "resumed"):
                queue.paused = event.event == "paused"
            return
        self._touched.setdefault(event.queue, {})[event.message_id] = None
        if event.event == "duplicate":
            queue.counts["duplicates"] += 1
            return
        if event.event == "published":
            self._published(step, event, queue)
            return
        entry = queue.entries.get(event.message_id)
        if entry is None:
            self._find(
                "journal", event.message_id, f"{event.event} of {event.message_id}, which was never published there"
            )
            return
        if entry.state in FINAL:
            self._find("no revival", entry, f"{event.event} of {show(entry)}, which had ended as {entry.state} before")
        EVENTS[event.event](self, step, event, queue, entry)

    # ---- events ----------------------------------------------------------------------------------------

    def _published(self, step: StoreStep, event: EventRecord, queue: QueueRecords) -> None:
        id = event.message_id or ""
        if id in queue.entries:
            self._find("once", id, f"{show(queue.entries[id])} was stored a second time under the same id")
        label, instant = read_body(event.body)
        waits = event.cause in ("parked", "blocked")
        if event.cause == "replace" and event.key is not None:
            waits = queue.replaced.get(event.key) == "waiting"
        due = event.due_ms or 0
        origin = "schedule" if event.schedule is not None else event.cause if event.cause == "forwarded" else "publish"
        entry = Entry(
            id, event.queue, label, event.key, event.priority or 0, "none", due, event.body or b"", origin or "publish",
            step.at, chain=event.chain_id,
        )  # fmt: skip
        entry.expires_ms = expiry_of(step, id)
        if event.cause == "blocked":
            entry.after = next((draft.after for draft in drafts_of(step) if draft.id == id), ())
        queue.entries[id] = entry
        queue.counts["published"] += 1
        if waits:
            queue.move(entry, "waiting")
        else:
            self._make_claimable(step, queue, entry)
        # Triggers by hand are no fires: two of the same millisecond are two messages.
        if event.schedule is not None and instant is not None and step.verb != "trigger_schedule":
            fired = queue.instants.setdefault(event.schedule, set())
            if instant in fired:
                self._find("schedules", entry, f"schedule {event.schedule} fired twice for the instant {instant}")
            fired.add(instant)

    def _make_claimable(self, step: StoreStep, queue: QueueRecords, entry: Entry) -> None:
        if entry.due_ms > step.store_ms:
            queue.move(entry, "delayed")
            return
        queue.sequence += 1
        entry.position, entry.ready_at = queue.sequence, step.at
        queue.move(entry, "ready")

    def _postponed(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        if entry.state not in ("ready", "delayed", "waiting"):
            self._find("states", entry, f"{show(entry)} was postponed while it was {entry.state}")
        due = event.due_ms or 0
        entry.due_ms = due if due > step.store_ms else 0
        if entry.state != "waiting":
            self._make_claimable(step, queue, entry)

    def _promoted(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        expected = "delayed" if event.cause == "due" else "waiting"
        if entry.state != expected:
            self._find("states", entry, f"{show(entry)} was promoted ({event.cause}) while it was {entry.state}")
        if event.cause == "due" and entry.due_ms > step.store_ms:
            self._find("not early", entry, f"{show(entry)} was promoted {entry.due_ms - step.store_ms} ms too early")
        self._make_claimable(step, queue, entry)

    def _claimed(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        if queue.paused:
            self._find("paused", entry, f"{show(entry)} was claimed although its queue is paused")
        if entry.state == "leased":
            self._find("one holder", entry, f"{show(entry)} was claimed by {step.who} while {holder(entry)} held it")
        elif entry.state != "ready":
            # What is ready was due when it became so, though the clock may have been set back since.
            rule = "not early" if entry.state == "delayed" else "states"
            self._find(rule, entry, f"{show(entry)} was claimed by {step.who} while it was {entry.state}")
        if entry.has_lapsed(step.store_ms):
            late = step.store_ms - (entry.expires_ms or 0)
            self._find("expiry", entry, f"{show(entry)} was claimed by {step.who} {late} ms after its expiry")
        token = event.token or 0
        if token <= entry.token:
            self._find(
                "tokens grow", entry, f"{show(entry)} was claimed under token {token}, after token {entry.token}"
            )
        if event.cause != entry.cause:
            self._find(
                "explained", entry,
                f"a claim of {show(entry)} says {event.cause or 'first claim'}, but it was {entry.cause or 'new'}",
            )  # fmt: skip
        queue.counts["claims"] += 1
        queue.counts["first_claims" if entry.token == 0 else f"again_{entry.cause}"] += 1
        entry.deliveries += 1
        most = queue.policy.max_deliveries
        if event.deliveries != entry.deliveries:
            self._find(
                "deliveries", entry, f"{show(entry)} has {event.deliveries} deliveries, but {entry.deliveries} count"
            )
        elif most is not None and entry.deliveries > most:
            self._find(
                "deliveries", entry, f"{show(entry)} was handed out {entry.deliveries} times; max_deliveries is {most}"
            )
        entry.token = max(entry.token, token)
        lease = next((one for one in leases_of(step) if one.id == entry.id), None)
        entry.lease_end_ms = None if lease is None else lease.lease_end_ms
        entry.nonce = b"" if lease is None else lease.nonce
        entry.lease_ms = None if entry.lease_end_ms is None else entry.lease_end_ms - step.store_ms
        claim = Claim(queue.name, entry.id, token, step.who, step.at, step.step, entry.lease_ms)
        claim.nonces.add(entry.nonce)
        if entry.lease_end_ms is not None:
            claim.ends.append((step.at, entry.lease_end_ms))
        self.claims.setdefault((queue.name, entry.id, token), []).append(claim)
        entry.claim = claim
        queue.claimed_ms.append(step.store_ms)
        queue.move(entry, "leased")

    def _back(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        """Expired, released, retried or snoozed: it goes back."""
        what = event.event
        if entry.state != "leased":
            self._find("states", entry, f"{show(entry)} was {what} while it was {entry.state}")
        if what == "expired" and (entry.lease_end_ms or 0) > step.store_ms:
            early = (entry.lease_end_ms or 0) - step.store_ms
            self._find("lease end", entry, f"the lease of {show(entry)} was ended {early} ms too early")
        if what == "retried":
            entry.attempts += 1
            if event.attempts != entry.attempts:
                self._find(
                    "attempts", entry, f"{show(entry)} has {event.attempts} attempts, but {entry.attempts} count"
                )
        if what in ("released", "snoozed"):
            entry.deliveries -= 1
        queue.counts[what] += 1
        entry.cause = what
        self._end_claim(step, entry, what)
        if what in ("retried", "snoozed"):
            entry.due_ms = event.due_ms or step.store_ms
            self._make_claimable(step, queue, entry)
        else:
            entry.due_ms = step.store_ms
            entry.position, entry.ready_at = AT_HEAD, step.at
            queue.move(entry, "ready")

    def _ended(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        how = event.event
        if entry.state == "dead":
            self._find("no revival", entry, f"{how} of {show(entry)}, which is a dead letter")
        if how == "done" and entry.state != "leased":
            self._find("states", entry, f"{show(entry)} was done while it was {entry.state}")
        if how == "dropped" and event.cause == "lapsed":
            self._check_lapse(step, entry)
        queue.counts[how] += 1
        if how == "replaced" and entry.key is not None:
            queue.replaced[entry.key] = entry.state
        self._end_claim(step, entry, how)
        entry.ended_at = step.at
        queue.move(entry, ENDS[how])
        self._free_window(queue, entry, how)

    def _check_lapse(self, step: StoreStep, entry: Entry) -> None:
        if entry.state == "leased":
            self._find("expiry", entry, f"{show(entry)} lapsed while {holder(entry)} held it")
        elif entry.expires_ms is None:
            self._find("expiry", entry, f"{show(entry)} lapsed, and has no expiry")
        elif entry.expires_ms > step.store_ms:
            early = entry.expires_ms - step.store_ms
            self._find("expiry", entry, f"{show(entry)} lapsed {early} ms before its expiry")

    def _dead(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        most = queue.policy.max_deliveries
        if event.reason == "max_deliveries" and (most is None or entry.deliveries < most):
            self._find(
                "deliveries", entry, f"{show(entry)} was buried after {entry.deliveries} of {most or 'any'} deliveries"
            )
        if event.reason in ("retries_exhausted", "retry_policy_failed"):
            entry.attempts += 1
        queue.counts["dead"] += 1
        self._end_claim(step, entry, "dead")
        entry.ended_at, entry.reason = step.at, event.reason
        if entry.expires_ms:
            entry.expires_ms = None  # a redriven letter does not lapse
        queue.move(entry, "dead")
        self._free_window(queue, entry, "dead")

    def _free_window(self, queue: QueueRecords, entry: Entry, how: str) -> None:
        if how != "done" and entry.key is not None and queue.windows.get(entry.key, ("", 0))[0] == entry.id:
            del queue.windows[entry.key]

    def _cancel_requested(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        if entry.state != "leased":
            self._find("states", entry, f"a cancel of {show(entry)} was requested while it was {entry.state}")
        entry.cancel_requested = True

    def _redriven(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        if entry.state != "dead":
            self._find("states", entry, f"{show(entry)} was redriven while it was {entry.state}")
        entry.deliveries = entry.attempts = 0
        entry.cause, entry.cancel_requested, entry.reason, entry.ended_at = "redriven", False, None, None
        entry.due_ms = step.store_ms
        queue.counts["redriven"] += 1
        self._make_claimable(step, queue, entry)

    def _trimmed(self, step: StoreStep, event: EventRecord, queue: QueueRecords, entry: Entry) -> None:
        if entry.state != "dead":
            self._find("states", entry, f"{show(entry)} was removed from the dead letters, but was {entry.state}")
        queue.move(entry, "trimmed")

    def _end_claim(self, step: StoreStep, entry: Entry, how: str) -> None:
        if entry.claim is not None and entry.state == "leased":
            entry.claim.ended_at, entry.claim.ended_how = step.at, how
        entry.claim = None

    # ---- answers ---------------------------------------------------------------------------------------

    def _holds(self, queue: QueueRecords, id: str, token: int, nonce: bytes) -> Entry | None:
        entry = queue.entries.get(id)
        if entry is None or entry.state != "leased" or entry.token != token or entry.nonce != nonce:
            return None
        return entry

    def _before_settle(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        if repeated:
            return
        for one, status in zip(step.arguments["settlements"], step.result.result, strict=True):
            self._check_fence(step, queue, one, f"a settle ({one.outcome})", status)

    def _check_fence(self, step: StoreStep, queue: QueueRecords, one: Any, what: str, status: str) -> None:
        held = self._holds(queue, one.id, one.token, one.nonce)
        entry = queue.entries.get(one.id)
        name = one.id if entry is None else show(entry)
        if status == "lost" and held is not None:
            self._find("fence", one.id, f"{what} of {name} by its holder {step.who} was refused as lost")
        elif status != "lost" and held is None:
            now = "it was never published" if entry is None else f"it was {entry.state} with token {entry.token}"
            self._find(
                "fence", one.id,
                f"{what} of {name} under token {one.token} by {step.who} was taken ({status}), although {now}",
            )  # fmt: skip

    def _before_extend(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        if repeated:
            return
        for hold, status in zip(step.arguments["holds"], step.result, strict=True):
            self._check_fence(step, queue, hold, "a renewal", status)
            entry = self._holds(queue, hold.id, hold.token, hold.nonce)
            if entry is None or status == "lost" or entry.lease_ms is None:
                continue
            if (status == "cancel") != entry.cancel_requested:
                verb = "was" if entry.cancel_requested else "was not"
                self._find(
                    "cancel", entry, f"a renewal of {show(entry)} answered {status}, but a cancel {verb} requested"
                )
            entry.lease_end_ms = step.store_ms + entry.lease_ms
            if entry.claim is not None:
                entry.claim.ends.append((step.at, entry.lease_end_ms))
            self._touched.setdefault(queue.name, {})[entry.id] = None

    def _before_claim(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        """A claim brings leases to their length that were given before the clock was set back."""
        if repeated or queue.paused:
            return
        for entry in queue.by_state["leased"].values():
            if entry.lease_ms is not None and entry.lease_end_ms is not None:
                capped = min(entry.lease_end_ms, step.store_ms + entry.lease_ms)
                if capped != entry.lease_end_ms:
                    entry.lease_end_ms = capped
                    if entry.claim is not None:
                        entry.claim.ends.append((step.at, capped))

    def _after_claim(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        leases = leases_of(step)
        claimed = {e.message_id for e in step.events if e.event == "claimed" and e.queue == queue.name}
        for lease in leases:
            entry = queue.entries.get(lease.id)
            if entry is None or (not repeated and lease.id not in claimed):
                self._find(
                    "journal", lease.id, f"a claim of {step.who} handed out {lease.id}, and the journal has none"
                )
            elif repeated and (entry.state != "leased" or entry.token != lease.token):
                self._find(
                    "fence", entry,
                    f"a repeated claim of {step.who} gave back {show(entry)} under token {lease.token}, although it is "
                    f"{entry.state} with token {entry.token}",
                )  # fmt: skip
            elif repeated:
                entry.nonce, entry.lease_end_ms = lease.nonce, lease.lease_end_ms
                if entry.claim is not None:
                    entry.claim.nonces.add(lease.nonce)
                    entry.claim.who = step.who
                    if lease.lease_end_ms is not None:
                        entry.claim.ends.append((step.at, lease.lease_end_ms))
                self._touched.setdefault(queue.name, {})[entry.id] = None
        for id in claimed - {lease.id for lease in leases}:
            self._find("journal", id, f"the journal says that {step.who} claimed {id}, but the answer does not have it")
        if claimed:
            self._check_limits(step, queue, len(claimed))
            self._check_order(step, queue, claimed)

    def _check_limits(self, step: StoreStep, queue: QueueRecords, claimed: int) -> None:
        policy = queue.policy
        leased = len(queue.by_state["leased"])
        if policy.max_running is not None and leased > policy.max_running:
            self._find(
                "max running", None,
                f"{leased} messages of {queue.name} are leased; max_running is {policy.max_running}",
            )  # fmt: skip
        if policy.rate_count is not None and policy.rate_per_ms is not None:
            # Later than now: claimed before the clock was set back, in steps that are followed again after a restart.
            recent = [ms for ms in queue.claimed_ms if step.store_ms - policy.rate_per_ms < ms <= step.store_ms]
            queue.claimed_ms = recent
            if len(recent) > policy.rate_count:
                self._find(
                    "rate", None,
                    f"{len(recent)} messages of {queue.name} were claimed within {policy.rate_per_ms} ms; its rate "
                    f"allows {policy.rate_count}",
                )  # fmt: skip
        else:
            queue.claimed_ms.clear()

    def _check_order(self, step: StoreStep, queue: QueueRecords, claimed: set[str | None]) -> None:
        """What was left is of a lower priority than what was claimed, or came later."""
        given = [queue.entries[id] for id in claimed if id in queue.entries]
        if not given:
            return
        last = max((-entry.priority, entry.position) for entry in given)
        # At most once, a claim ends its messages: what waited for one of them becomes ready after it.
        after = {e.message_id for e in step.events if e.event == "promoted" and e.cause in ("unblocked", "unparked")}
        for entry in queue.by_state["ready"].values():
            if entry.id not in after and (-entry.priority, entry.position) < last:
                self._find("order", entry, f"{show(entry)} was left, while a message that comes after it was claimed")
                return

    def _before_publish(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        if repeated:
            return
        drafts = drafts_of(step)
        new = {e.message_id for e in step.events if e.event == "published"}
        for draft in drafts:
            if draft.key is None or draft.id not in new:
                continue
            standing, until = queue.windows.get(draft.key, ("", 0))
            if until > step.store_ms and draft.on_conflict == "keep" and not draft.forwarded:
                self._find(
                    "keys", draft.id,
                    f"{draft.id} was stored under key {draft.key}, whose window of {standing} has not ended",
                )  # fmt: skip
            if draft.window_ms:
                queue.windows[draft.key] = (draft.id, step.store_ms + draft.window_ms)

    def _after_publish(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        new = {e.message_id for e in step.events if e.event == "published" and e.queue == queue.name}
        added = [draft for draft in drafts_of(step) if draft.id in new and (draft.capped or not draft.forwarded)]
        added = [draft for draft in added if queue.entries[draft.id].state in LIVE]
        most = queue.policy.max_pending
        replaces = sum(e.event == "replaced" for e in step.events)
        if most is not None and len(added) > replaces and queue.pending > most:
            self._find("cap", added[0].id, f"{queue.pending} messages wait in {queue.name}; its max_pending is {most}")
        if repeated or step.verb != "publish":
            return
        # Each answer names a message that stands for the draft.
        for draft, published in zip(drafts_of(step), step.result.result, strict=True):
            if published.id not in queue.entries:
                self._find("lost", published.id, f"the publish of {draft.id} was answered with an id that is unknown")
            elif published.status in ("duplicate", "conflict"):
                standing = queue.entries[published.id]
                # After its end a window may keep the key.
                if standing.state in LIVE and standing.has_lapsed(step.store_ms):
                    sentence = f"{show(standing)} had lapsed, and its key was not free for {draft.id}"
                    self._find("expiry", standing, sentence)
            elif published.status in ("queued", "delayed") and published.id not in new:
                self._find(
                    "lost", published.id, f"the publish of {draft.id} was answered as {published.status}, not stored"
                )

    def _after_configure(self, step: StoreStep, queue: QueueRecords, repeated: bool) -> None:
        queue.policy.change(dict(step.arguments["changes"]))
        if "rate_count" in step.arguments["changes"]:
            queue.claimed_ms.clear()

    # ---- keys and records ------------------------------------------------------------------------------

    def _check_keys(self, queue: QueueRecords, ids: Iterable[str]) -> None:
        for key in {entry.key for id in ids if (entry := queue.entries.get(id)) is not None and entry.key is not None}:
            live = [queue.entries[id] for id in queue.keys.get(key, ())]
            leased = sum(entry.state == "leased" for entry in live)
            if leased > 1 or len(live) - leased > 1:
                states = ", ".join(f"{entry.id} {entry.state}" for entry in live)
                self._find("keys", live[0], f"key {key} of {queue.name} has {len(live)} messages at once: {states}")

    def _compare(self, store: Any, *, everything: bool) -> None:
        if everything:
            for queue in self.queues.values():
                kept = [id for entries in queue.by_state.values() for id in entries]
                model = store._queues.get(queue.name)
                found = () if model is None else (id for id in model.messages if id in queue.entries)
                self._compare_queue(store, queue, dict.fromkeys((*kept, *found)))
            return
        for name, ids in self._touched.items():
            self._compare_queue(store, self.queue(name), ids)

    def _compare_queue(self, store: Any, queue: QueueRecords, ids: Iterable[str]) -> None:
        model = store._queues.get(queue.name)
        if model is None:
            return
        for id in ids:
            entry, record = queue.entries.get(id), model.messages.get(id)
            if entry is None:
                continue
            expected = entry.state if entry.state in LIVE or entry.state == "dead" else None
            found = None if record is None else record.state
            if expected != found:
                self._find(
                    "states", entry,
                    f"{show(entry)} is {found or 'gone'} in the store, but by its history it is {expected or 'gone'}",
                )  # fmt: skip
            elif record is not None:
                self._compare_record(entry, record)
        self._compare_counts(queue, model)

    def _compare_record(self, entry: Entry, record: Any) -> None:
        pairs = [
            ("token", entry.token, record.token),
            ("deliveries", entry.deliveries, record.deliveries),
            ("attempts", entry.attempts, record.attempts),
            ("body", entry.body, record.envelope),
        ]
        if entry.state == "leased":
            pairs.append(("lease end", entry.lease_end_ms, record.lease_end_ms))
        if entry.expires_ms != 0 and entry.state != "dead":
            pairs.append(("expiry", entry.expires_ms, record.expires_ms))
        for name, expected, found in pairs:
            if expected != found:
                values = "" if name == "body" else f": {found} in the store, {expected} by its history"
                self._find(RECORD_RULES[name], entry, f"the {name} of {show(entry)} is wrong{values}")

    def _compare_counts(self, queue: QueueRecords, model: Any) -> None:
        for name in COUNTED:
            if queue.counts[name] != model.counts[name]:
                self._find(
                    "ledger", None,
                    f"queue {queue.name} counts {model.counts[name]} {name}, but {queue.counts[name]} happened",
                )  # fmt: skip
        ledger = model.ledger()
        if ledger.balance or ledger.unexplained:
            self._find(
                "ledger", None,
                f"the ledger of {queue.name} is off by {ledger.balance}, with {ledger.unexplained} unexplained claims",
            )  # fmt: skip


RECORD_RULES = {
    "token": "tokens grow", "deliveries": "deliveries", "attempts": "attempts", "body": "bodies",
    "lease end": "renewal", "expiry": "expiry",
}  # fmt: skip

Rule = Callable[[StepChecker, StoreStep, QueueRecords, bool], None]
BEFORE: dict[str, Rule] = {
    "settle": StepChecker._before_settle,
    "extend": StepChecker._before_extend,
    "claim": StepChecker._before_claim,
    "publish": StepChecker._before_publish,
}
AFTER: dict[str, Rule] = {
    "claim": StepChecker._after_claim,
    "publish": StepChecker._after_publish,
    "fire_schedule": StepChecker._after_publish,
    "trigger_schedule": StepChecker._after_publish,
    "configure": StepChecker._after_configure,
}
EVENTS: dict[str, Callable[[StepChecker, StoreStep, EventRecord, QueueRecords, Entry], None]] = {
    "postponed": StepChecker._postponed,
    "promoted": StepChecker._promoted,
    "claimed": StepChecker._claimed,
    "done": StepChecker._ended,
    "dropped": StepChecker._ended,
    "cancelled": StepChecker._ended,
    "replaced": StepChecker._ended,
    "retried": StepChecker._back,
    "snoozed": StepChecker._back,
    "released": StepChecker._back,
    "expired": StepChecker._back,
    "dead": StepChecker._dead,
    "cancel_requested": StepChecker._cancel_requested,
    "redriven": StepChecker._redriven,
    "dead_trimmed": StepChecker._trimmed,
}


def show(entry: Entry) -> str:
    """A message for people: its label and its id."""
    return f"{entry.label} ({entry.id} of {entry.queue})"


def holder(entry: Entry) -> str:
    return "another worker" if entry.claim is None else entry.claim.who


def leases_of(step: StoreStep) -> list[Any]:
    """The leases that a claim handed out."""
    return list(step.result.leases) if step.verb == "claim" and step.error is None else []


def drafts_of(step: StoreStep) -> list[Any]:
    """The messages that a step was to publish."""
    return [step.arguments["draft"]] if "draft" in step.arguments else list(step.arguments.get("drafts", ()))


def expiry_of(step: StoreStep, id: str) -> int | None:
    """When a message lapses that a step stored; 0 if the step does not say what it stored."""
    sent_on = [one for settlement in step.arguments.get("settlements", ()) for one in settlement.then]
    for one in (*drafts_of(step), *sent_on):
        if one.id == id:
            expires: int = one.expires_ms
            return None if not expires else expires if expires > 0 else step.store_ms - expires
    return 0


def read_body(body: bytes | None) -> tuple[str, str | None]:
    """The label in a stored envelope, and the instant if a schedule published it."""
    if body is None:
        return "?", None
    envelope = open_envelope(body)
    return json.loads(envelope.data)["label"], envelope.headers.get("waypost-instant")
