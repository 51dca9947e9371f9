"""Random programs on two stores at once: the memory model, and a store that must behave the same.

A Hypothesis state machine draws the program; both stores run it with the same clock, ids and operations. After each
step their replies, listings, ledgers and journals are compared, and the invariants must hold. A difference is a defect
of the one or of the other; the shrunken program shows of which.

    machine = machine_for(lambda clock, namespace: MyStore(…))
    run_state_machine_as_test(machine, settings=…)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from waypost.codec import encode_body, make_envelope
from waypost.identity import Operation, Session, continuation_id, new_mark, new_nonce
from waypost.policy import (
    CLAIM_BYTES_MAX,
    DEFAULT_GROUP,
    REPLAY_TTL_MS,
    STAMP_AHEAD_MS,
    PolicyRecord,
    Unique,
    policy_changes,
)
from waypost.store.memory import MemoryStore
from waypost.store.port import AfterRun, Call, Draft, FireStep, Hold, Store, Target, Woken, forwarded_draft
from waypost.testing.bench import STATES, StoreMaker, fresh_namespace, ms, strand
from waypost.testing.clock import ClockTime, ManualClock
from waypost.times import to_ms
from waypost.values import (
    Claimed,
    Continuation,
    EventRecord,
    Lease,
    Notice,
    OutcomeName,
    Page,
    Redriven,
    Removal,
    Settlement,
    StatsRecord,
    StoredSchedule,
)
from waypost.views import Stats

T = TypeVar("T")

QUEUES = ("orders", "billing")
#: How many of the last operations may be repeated late.
LATE_MAX = 12
KEYS = (None, None, "a", "b", "ü")
SLEEPERS = (None, "anna", "bert", "carl")
OUTCOMES: tuple[OutcomeName, ...] = ("done", "retry", "dead", "snooze", "drop", "release")
DELAYS = (0, 0, 0, 0.5, 5, 30)
#: Changes of a policy on a live queue.
CHANGES: tuple[dict[str, Any], ...] = (
    {"lease": 10},
    {"lease": 10},
    {"lease": 1},
    {"lease": 60},
    {"lease": None},
    {"max_deliveries": 1},
    {"max_deliveries": 3},
    {"max_deliveries": None},
    {"max_pending": 2, "overload": "raise"},
    {"max_pending": 3, "overload": "drop_oldest"},
    {"max_pending": None},
    {"max_running": 1},
    {"max_running": 3},
    {"max_running": None},
    {"rate": "2/s"},
    {"rate": "5/m"},
    {"rate": None},
    {"journal": "failures"},
    {"journal": "off"},
    {"journal": "full"},
    {"journal": "all"},
    {"dead_max": 1},
    {"dead_max": None, "dead_keep": 20},
    {"dead_keep": None},
    {"completed": 2},
    {"completed": False},
    {"hide_bodies": True},
    {"hide_bodies": False},
    {"tracebacks": False},
    {"tracebacks": True},
)

#: How a queue may treat groups from the start, and changes of that.
GROUPED: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"fair": True},
    {"order": "group"},
    {"order": "group", "on_failure": "pass"},
    {"fair": True, "group_max_running": 1},
    {"group_rate": "2/s"},
    {"group_max_pending": 2},
    {"order": "group", "max_pending": 4, "overload": "drop_oldest"},
)
GROUP_CHANGES: tuple[dict[str, Any], ...] = (
    {"fair": True},
    {"fair": False},
    {"order": "group"},
    {"order": None},
    {"on_failure": "pass"},
    {"on_failure": "hold"},
    {"group_max_running": 1},
    {"group_max_running": 2},
    {"group_max_running": None},
    {"group_rate": "1/s"},
    {"group_rate": "3/m"},
    {"group_rate": None},
    {"group_max_pending": 2},
    {"group_max_pending": 3, "overload": "drop_oldest"},
    {"group_max_pending": None},
    {"order": None, "fair": False, "group_max_running": None, "group_rate": None, "group_max_pending": None},
)
#: Changes of the settings of a single group.
OWN_CHANGES: tuple[dict[str, Any], ...] = (
    {"weight": 3},
    {"weight": 1},
    {"paused": True},
    {"paused": False},
    {"paused": False},
    {"max_running": 2},
    {"max_running": None},
    {"rate_count": 2, "rate_per_ms": 5_000},
    {"rate_count": None, "rate_per_ms": None},
    {"max_pending": 1},
    {"max_pending": None},
)
GROUPS = ("g1", "g2", "ü")
#: The steps of programs about groups, with their weights there. Programs of all steps seldom come to a held group.
GROUP_STEPS = {
    "publish": 10, "claim": 16, "settle": 6, "hold_group": 4, "skip_held": 3, "crash": 3, "advance": 6,
    "configure_group": 4, "configure_groups": 1, "change_priority": 1, "cancel": 1, "reschedule": 1, "redrive": 1,
    "purge": 1, "repeat": 1, "pause_or_resume": 1,
}  # fmt: skip
UNIQUE: tuple[Unique, ...] = ("live", "until_claimed", "live", "live_or_dead")

queues = st.sampled_from(("orders", "orders", "orders", "billing"))
picks = st.integers(0, 20)
wishes = st.fixed_dictionaries(
    {
        "body": st.binary(max_size=6),
        "key": st.sampled_from(KEYS),
        "window": st.sampled_from((0, 0, 20, 3600)),
        "on_conflict": st.sampled_from(("keep", "replace", "extend", "error")),
        "delay": st.sampled_from(DELAYS),
        "absolute": st.booleans(),
        "priority": st.sampled_from((5, 5, 0, 9)),
        "group": st.sampled_from((None, *GROUPS)),
        "copy": st.sampled_from((None, None, b"redacted")),
        "expires": st.sampled_from((0, 0, 0, 0.5, 5, 30)),
        # Whether its arrival is remembered, and whether it still respects the cap.
        "arrival": st.sampled_from(((False, False), (False, False), (True, False), (True, True))),
    }
)
endings = st.fixed_dictionaries(
    {
        "pick": picks,
        "outcome": st.sampled_from(OUTCOMES),
        "after": st.sampled_from(DELAYS),
        "error": st.sampled_from((None, "ValueError")),
        "reason": st.sampled_from((None, "rejected", "undecodable")),
        "result": st.sampled_from((None, None, b"", b"result")),
    }
)


class Step(NamedTuple):
    """One kind of step: how likely it is, when it is possible, and its arguments."""

    weight: int
    when: Callable[[StoreMachine], object] | None
    arguments: st.SearchStrategy[dict[str, Any]]


STEPS: dict[str, Step] = {}
Method = TypeVar("Method", bound=Callable[..., None])


def step(
    weight: int, when: Callable[[StoreMachine], object] | None = None, **arguments: st.SearchStrategy[Any]
) -> Callable[[Method], Method]:
    """Make a method a step of the program.

    Not a rule of its own: Hypothesis switches rules off at random, and a program without claims explores little.
    """

    def note(method: Method) -> Method:
        STEPS[method.__name__] = Step(weight, when, st.fixed_dictionaries(arguments))
        return method

    return note


class StoreMachine(RuleBasedStateMachine):
    """The program. Subclasses define the subject."""

    make_subject: StoreMaker
    #: The weights of steps, if not all are drawn.
    weights: Mapping[str, int] | None = None
    #: What has happened in the programs so far: a run that reaches little proves little.
    reached: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        namespace = fresh_namespace()
        self.stores: tuple[Store, Store] = (
            cast(Store, MemoryStore(namespace=namespace, clock=self.clock)),
            type(self).make_subject(self.clock, namespace),
        )
        self.executors = [store.connect(start_timeout=5) for store in self.stores]
        self.session = Session(ClockTime(self.clock))
        self.carrier = Session(ClockTime(self.clock))
        #: What the next sending of a claim is fenced with; the same on both stores.
        self.nonce = new_nonce()
        self.held: dict[str, list[Lease]] = {queue: [] for queue in QUEUES}
        self.past: dict[str, list[Lease]] = {queue: [] for queue in QUEUES}
        self.seen: dict[str, list[StoredSchedule]] = {queue: [] for queue in QUEUES}
        self.ids: dict[str, list[str]] = {queue: [] for queue in QUEUES}
        self.sent_on: list[Continuation] = []
        self.paused: set[str] = set()
        #: Queue and id of dead letters; some may be redriven already.
        self.dead: list[tuple[str, str]] = []
        self.tokens: dict[str, int] = {}
        self.journal_read = dict.fromkeys(QUEUES, 0)
        #: The last operation and those before it: how to repeat each, and when it was first sent.
        self.last: tuple[Callable[[Store], Call[Any]], bool] | None = None
        self.sent: list[tuple[Operation, Callable[[Store, Operation], Call[Any]], bool]] = []
        #: Continuations reach their queue in another step on some stores: then the operation is another one, too.
        self.carried = False

        #: How many messages of each group were leased after the last step.
        self.leased: dict[tuple[str, str], int] = {}
        #: The backlog of each queue when a minute ended, as far back as it is known.
        self.backlogs: dict[str, dict[int, int]] = {queue: {} for queue in QUEUES}

    def teardown(self) -> None:
        """Close both stores."""
        for executor in self.executors:
            executor.close()

    def pass_time(self, seconds: float) -> None:
        """Advance the clock of both stores, and note the backlog with which the current minute may end."""
        model = cast(MemoryStore, self.stores[0])
        for queue in QUEUES:
            messages = model._queues[queue].messages.values() if queue in model._queues else ()
            self.backlogs[queue][self.clock() // 60_000] = sum(one.state != "dead" for one in messages)
        self.clock.advance(seconds)

    # ---- both stores at once -----------------------------------------------------------------------------

    def run_on(self, index: int, call: Callable[[Store], Call[T]]) -> T | str:
        """Return the answer of one store, or the name of its error."""
        try:
            return self.executors[index].run(call(self.stores[index]))
        except Exception as error:
            if type(error).__module__ != "waypost.errors":
                raise
            return type(error).__name__

    def both(self, call: Callable[[Store], Call[T]], *, compare_wakes: bool = True, by_group: bool = False) -> T | None:
        """Run on both stores and compare; None if both refused in the same way."""
        self.nonce = new_nonce()
        expected, actual = (comparable(self.run_on(index, call), by_group=by_group) for index in (0, 1))
        if not compare_wakes and isinstance(expected, Woken) and isinstance(actual, Woken):
            assert (actual.result, actual.also) == (expected.result, expected.also)
        else:
            assert actual == expected, f"the model answers {expected}, the store {actual}"
        return None if isinstance(expected, str) else expected

    def operate(
        self, queue: str, call: Callable[[Store, Operation], Call[T]], *, compare_wakes: bool = True
    ) -> T | None:
        """The same with a fresh operation, which `repeat` may send again."""
        operation = self.session.operation(queue)

        def again(store: Store) -> Call[T]:
            return call(store, operation)

        self.last = (again, compare_wakes)
        self.sent = [*self.sent[-LATE_MAX:], (operation, call, compare_wakes)]
        return self.both(again, compare_wakes=compare_wakes)

    # ---- publish, claim and settle ----------------------------------------------------------------------------

    @initialize(
        lease=st.sampled_from((1, 10, 60)), deliveries=st.sampled_from((2, 10)), grouped=st.sampled_from(GROUPED)
    )
    def begin(self, lease: float, deliveries: int, grouped: dict[str, Any]) -> None:
        """Begin with short leases, so that crashes matter; often with groups."""
        if self.weights is GROUP_STEPS:
            grouped = grouped or {"order": "group"}
        settings = {"lease": lease, "max_deliveries": deliveries} | grouped
        self.both(lambda store: store.configure("orders", policy_changes(settings)))

    def policy(self, queue: str) -> PolicyRecord:
        """Return the policy of a queue, by the model."""
        return self.executors[0].run(self.stores[0].policy(queue))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Run one step that is possible now."""
        weights = self.weights or {name: kind.weight for name, kind in STEPS.items()}
        possible = {name: STEPS[name].when for name in weights}
        likely = [name for name, when in possible.items() if when is None or when(self) for _ in range(weights[name])]
        name = data.draw(st.sampled_from(likely), label="step")
        getattr(self, name)(**data.draw(STEPS[name].arguments, label=name))

    @step(7, queue=queues, batch=st.lists(wishes, min_size=1, max_size=4))
    def publish(self, queue: str, batch: list[dict[str, Any]]) -> None:
        """Publish a batch; no key is in it twice, as the contract demands."""
        drafts: list[Draft] = []
        keys: set[str] = set()
        for wish in batch:
            key = wish["key"] if wish["key"] not in keys else None
            if key is not None:
                keys.add(key)
            id = self.session.message_ids(1)[0]
            delay_ms, expires, window = ms(wish["delay"]), wish["expires"], ms(wish["window"])
            unique = UNIQUE[len(wish["body"]) % len(UNIQUE)]
            drafts.append(
                Draft(
                    id,
                    make_envelope(id, encode_body(wish["body"])),
                    key,
                    window,
                    wish["on_conflict"],
                    delay_ms,
                    self.clock() + delay_ms - 1 if wish["absolute"] else None,
                    wish["priority"],
                    wish["group"],
                    wish["copy"],
                    forwarded=wish["arrival"][0],
                    capped=wish["arrival"][1],
                    expires_ms=self.clock() + ms(expires) if wish["absolute"] and expires else -ms(expires),
                    unique="live_or_dead" if window and unique == "until_claimed" else unique,
                )
            )
            self.ids[queue].append(id)
        self.operate(queue, lambda store, operation: store.publish(queue, drafts, operation))

    @step(
        14,
        queue=queues,
        limit=st.integers(0, 5),
        sleeper=st.sampled_from(SLEEPERS),
        poll_soon=st.sampled_from((None, None, None, 0, 20, 500)),
        replay=st.sampled_from((False,) * 7 + (True,)),
        bytes_max=st.sampled_from((CLAIM_BYTES_MAX, CLAIM_BYTES_MAX, CLAIM_BYTES_MAX, 0, 80, 160, 240)),
    )
    def claim(
        self, queue: str, limit: int, sleeper: str | None, poll_soon: int | None, replay: bool, bytes_max: int
    ) -> None:
        """Claim; sometimes only to replay a lost reply, or with a small limit of bytes."""
        options: dict[str, Any] = {
            "sleeper": sleeper, "poll_soon_ms": poll_soon, "replay": replay, "bytes_max": bytes_max,
        }  # fmt: skip
        claimed = self.operate(
            queue,
            lambda store, operation: store.claim(queue, limit, operation, worker="w", nonce=self.nonce, **options),
        )
        assert claimed is not None
        for lease in claimed.leases:
            assert lease.token > self.tokens.get(lease.id, 0), "a token did not grow"
            assert lease.ready_ms <= self.clock(), "a message came early"
            self.tokens[lease.id] = lease.token
            (self.past if lease.lease_end_ms is None else self.held)[queue].append(lease)

    def give_up(self, queue: str, pick: int) -> Lease:
        """Remove one of the held leases, and return it."""
        lease = self.held[queue].pop(pick % len(self.held[queue]))
        self.past[queue].append(lease)
        return lease

    @step(7, when=lambda self: self.holding(), queue=queues, batch=st.lists(endings, min_size=1, max_size=3))
    def settle(self, queue: str, batch: list[dict[str, Any]]) -> None:
        """Settle held leases, some of which another worker may have by now."""
        queue = self.holding(queue)
        settlements = [ended(self.give_up(queue, ending["pick"]), ending) for ending in batch[: len(self.held[queue])]]
        self.operate(queue, lambda store, operation: store.settle(queue, settlements, operation))

    def holding(self, wanted: str = "orders") -> str:
        """Return a queue with held leases, the wanted one if possible; empty if there is none."""
        return next((queue for queue in (wanted, *QUEUES) if self.held[queue]), "")

    @step(
        2,
        when=lambda self: self.holding(),
        queue=queues,
        destination=queues,
        pick=picks,
        key=st.sampled_from(KEYS),
        delay=st.sampled_from(DELAYS),
        expires=st.sampled_from((0, 0, 0, 0.5, 5)),
    )
    def send_on(self, queue: str, destination: str, pick: int, key: str | None, delay: float, expires: float) -> None:
        """Settle as done with a continuation to another queue."""
        queue = self.holding(queue)
        lease = self.give_up(queue, pick)
        id = continuation_id(lease.id, lease.token, 0)
        following = Continuation(
            id, destination, make_envelope(id, encode_body(b"next")), key, ms(delay), expires_ms=-ms(expires)
        )
        self.sent_on.append(following)
        self.ids[destination].append(id)
        settlement = structs.replace(ended(lease, {"outcome": "done"}), then=(following,))
        operation = self.session.operation(queue)
        self.last = (lambda store: store.settle(queue, [settlement], operation), False)
        self.carried = True
        replies: list[tuple[object, dict[str, list[str]]]] = []
        for index, store in enumerate(self.stores):
            woken = self.executors[index].run(store.settle(queue, [settlement], operation))
            wake = {name: sorted(names) for name, names in woken.wake.items()}
            self.carry(index, queue, wake)
            replies.append((woken.result, wake))
        assert replies[1] == replies[0]

    def carry(self, index: int, queue: str, wake: dict[str, list[str]]) -> None:
        """Deliver outgoing entries, as clients do where a step of the store cannot span queues."""
        store, executor = self.stores[index], self.executors[index]
        for one in executor.run(store.outgoing(queue, 100)):
            woken: Woken[Any]
            if isinstance(one, Notice):
                woken = executor.run(store.arrive(one.queue, [one]))
            else:
                operation = self.carrier.operation(one.queue)
                woken = executor.run(store.publish(one.queue, [forwarded_draft(one)], operation))
            for name, names in woken.wake.items():
                wake[name] = sorted(wake.get(name, []) + names)
            executor.run(store.forwarded(queue, [one.id]))
            if isinstance(one, Notice):
                self.carry(index, one.queue, wake)

    @step(1, when=lambda self: self.sent_on, pick=picks)
    def send_again(self, pick: int) -> None:
        """Deliver a continuation again."""
        one = self.sent_on[pick % len(self.sent_on)]
        self.operate(one.queue, lambda store, operation: store.publish(one.queue, [forwarded_draft(one)], operation))

    @step(
        1,
        when=lambda self: self.tokens,
        queue=queues,
        pick=picks,
        ending=endings,
        how=st.sampled_from(("past", "token", "nonce", "id")),
    )
    def settle_wrongly(self, queue: str, pick: int, ending: dict[str, Any], how: str) -> None:
        """Settle with a fence that is stale or another client's."""
        leases = (self.past[queue] if how == "past" else self.held[queue]) or self.past[queue] or self.held[queue]
        if not leases:
            return
        how = "token" if leases is self.held[queue] and how == "past" else how
        lease = leases[pick % len(leases)]
        match how:
            case "token":
                lease = structs.replace(lease, token=lease.token + 1)
            case "nonce":
                lease = structs.replace(lease, nonce=bytes(12))
            case "id":
                lease = structs.replace(lease, id="0" * 24)
        statuses = self.operate(queue, lambda store, operation: store.settle(queue, [ended(lease, ending)], operation))
        assert statuses is not None
        # A worker that crashed may settle after all, if its message was not reclaimed meanwhile.
        assert how == "past" or statuses.result == ["lost"]

    @step(
        2,
        when=lambda self: self.tokens,
        queue=queues,
        chosen=st.lists(picks, min_size=1, max_size=3),
        stale=st.sampled_from((False, False, True)),
    )
    def extend(self, queue: str, chosen: list[int], stale: bool) -> None:
        """Renew leases, also some that are no longer held."""
        queue = self.holding(queue) or queue
        leases = self.past[queue] if stale else self.held[queue]
        holds = [
            Hold(one.id, one.token, one.nonce) for pick in chosen if leases for one in [leases[pick % len(leases)]]
        ]
        if holds:
            self.operate(queue, lambda store, operation: store.extend(queue, holds, operation))

    @step(
        2,
        when=lambda self: any(self.ids.values()),
        queue=queues,
        chosen=st.lists(st.one_of(picks, st.sampled_from(("a", "b", "ü"))), min_size=1, max_size=2),
    )
    def cancel(self, queue: str, chosen: list[int | str]) -> None:
        """Cancel by id or key."""
        targets = []
        for choice in chosen:
            if isinstance(choice, str):
                targets.append(Target(key=choice))
            elif self.ids[queue]:
                targets.append(Target(id=self.ids[queue][-1 - choice % len(self.ids[queue])]))
        if targets:
            self.operate(queue, lambda store, operation: store.cancel(queue, targets, operation))

    @step(2, queue=queues, choice=st.one_of(picks, st.sampled_from(("a", "b"))), seconds=st.sampled_from(DELAYS))
    def reschedule(self, queue: str, choice: int | str, seconds: float) -> None:
        """Give a timer another due time, by id or key."""
        if isinstance(choice, int) and not self.ids[queue]:
            return
        target = (
            Target(key=choice)
            if isinstance(choice, str)
            else Target(self.ids[queue][-1 - choice % len(self.ids[queue])])
        )
        answer = self.operate(
            queue, lambda store, operation: store.reschedule(queue, [target], operation, delay_ms=ms(seconds))
        )
        if answer is not None:
            self.reached[f"reschedule {answer.result[0]}"] += 1

    @step(2, when=lambda self: any(self.ids.values()), queue=queues, pick=picks, priority=st.sampled_from((0, 4, 9)))
    def change_priority(self, queue: str, pick: int, priority: int) -> None:
        """Give a message another priority."""
        if not self.ids[queue]:
            return
        id = self.ids[queue][-1 - pick % len(self.ids[queue])]
        answer = self.operate(queue, lambda store, operation: store.change_priority(queue, [id], priority, operation))
        if answer is not None:
            self.reached[f"change_priority {answer.result[0]}"] += 1

    # ---- running a queue ---------------------------------------------------------------------------------

    @step(
        5,
        when=lambda self: self.dead,
        limit=st.integers(1, 4),
        by=st.sampled_from(("all", "reason", "ids", "duplicate")),
        pick=picks,
    )
    def redrive(self, limit: int, by: str, pick: int) -> None:
        """Redrive all dead letters, those of one reason, or a chosen one."""
        queue, id = self.dead[-1 - pick % len(self.dead)]
        ids = [id] if by == "ids" else []
        reason = {"reason": "rejected", "duplicate": "duplicate"}.get(by)
        self.operate(queue, lambda store, operation: store.redrive(queue, limit, operation, ids=ids, reason=reason))

    @step(
        2,
        when=lambda self: self.tokens,
        queue=queues,
        state=st.sampled_from(("dead", "ready", "delayed", "waiting", "done")),
        limit=st.integers(1, 3),
    )
    def purge(self, queue: str, state: Any, limit: int) -> None:
        """Purge some messages of one state."""
        if self.policy(queue).grouped and state == "ready":
            limit = 500  # in what order groups are listed is left to each store
        self.operate(queue, lambda store, operation: store.purge(queue, state, limit, operation))

    @step(2, queue=queues, change=st.sampled_from(CHANGES))
    def configure(self, queue: str, change: dict[str, Any]) -> None:
        """Change the policy of a live queue."""
        changes = policy_changes(change)
        self.both(lambda store: store.configure(queue, changes))

    @step(2, queue=queues, change=st.sampled_from(GROUP_CHANGES))
    def configure_groups(self, queue: str, change: dict[str, Any]) -> None:
        """Change how a live queue treats groups."""
        if "order" in change and change["order"] is None and self.policy(queue).order and self.mixes_groups(queue):
            return  # where messages with a group are then placed among those without one is left to each store
        self.both(lambda store: store.configure(queue, policy_changes(change)))

    def mixes_groups(self, queue: str) -> bool:
        """Return whether a queue has unfinished messages with a group and without one, by the model."""
        model = cast(MemoryStore, self.stores[0])._queues[queue]
        return len({one.group is None for one in model.messages.values() if one.state != "dead"}) == 2

    @step(
        2,
        when=lambda self: any(self.policy(queue).grouped for queue in QUEUES),
        queue=queues,
        group=st.sampled_from(GROUPS),
        change=st.sampled_from(OWN_CHANGES),
    )
    def configure_group(self, queue: str, group: str, change: dict[str, Any]) -> None:
        """Change the settings of a single group, pause it or resume it."""
        self.both(lambda store: store.configure_group(queue, group, change))

    @step(
        3,
        when=lambda self: self.ordered_leases(),
        pick=picks,
        outcome=st.sampled_from(("retry", "retry", "snooze")),
        after=st.sampled_from((0.5, 5, 30)),
    )
    def hold_group(self, pick: int, outcome: OutcomeName, after: float) -> None:
        """Settle a message of an ordered group so that it holds the group while it is delayed."""
        queue, lease = (leases := self.ordered_leases())[pick % len(leases)]
        self.held[queue].remove(lease)
        self.past[queue].append(lease)
        settlement = ended(lease, {"outcome": outcome, "after": after})
        self.operate(queue, lambda store, operation: store.settle(queue, [settlement], operation))

    def ordered_leases(self) -> list[tuple[str, Lease]]:
        """Return the held leases of ordered groups."""
        ordered = [queue for queue in QUEUES if self.policy(queue).order]
        return [(queue, lease) for queue in ordered for lease in self.held[queue] if lease.group is not None]

    @step(2, when=lambda self: self.held_groups(), pick=picks, other=st.sampled_from((None, None, *GROUPS)))
    def skip_held(self, pick: int, other: str | None) -> None:
        """Let the next message pass one that holds its group; sometimes where none does."""
        queue, group = (held := self.held_groups())[pick % len(held)]
        self.operate(queue, lambda store, operation: store.skip_held(queue, other or group, operation))

    def held_groups(self) -> list[tuple[str, str]]:
        """Return the groups that a delayed message holds, by the model."""
        queues = [queue for queue in QUEUES if self.policy(queue).order]
        pages = [(queue, self.executors[0].run(self.stores[0].groups(queue, 100))) for queue in queues]
        return [
            (queue, one.group)
            for queue, page in pages
            for one in page.groups
            if one.group and one.held_state == "delayed"
        ]

    @step(2, queue=queues, again=st.booleans())
    def pause_or_resume(self, queue: str, again: bool) -> None:
        """Pause or resume the queue, sometimes twice."""
        if (queue in self.paused) is again:
            self.paused.add(queue)
            self.both(lambda store: store.pause(queue))
        else:
            self.paused.discard(queue)
            self.both(lambda store: store.resume(queue))

    @step(1, queue=st.sampled_from(QUEUES), purged=st.sampled_from((False, False, False, True)))
    def remove(self, queue: str, purged: bool) -> None:
        """Remove a queue, sometimes after it was emptied. Its name is used again."""
        if purged:
            for state in ("ready", "delayed", "waiting", "dead"):
                self.purge(queue, state, 100)
            for key in "xy":
                self.both(lambda store, k=key: store.remove_schedule(queue, k))  # type: ignore[misc]
        removal = self.operate(queue, lambda store, operation: store.remove(queue, operation))
        if removal is not None and removal.existed and not removal.left:
            self.reached["removed"] += 1
            # Its counters went with it.
            self.backlogs[queue].clear()
            for index, store in enumerate(self.stores):
                for call in store.unlist(queue):
                    self.executors[index].run(call)
                assert queue not in self.executors[index].run(store.queues())
            self.journal_read[queue] = self.executors[0].run(self.stores[0].stats(queue)).journal_last
            self.paused.discard(queue)
            self.past[queue] += self.held[queue]
            self.held[queue] = []
            # A call first sent in the millisecond of a removal is refused, and clients repeat it.
            self.pass_time(0.001)

    @step(5, seconds=st.sampled_from((0.001, 0.5, 1, 5, 10, 30, 61, 3600)))
    def advance(self, seconds: float) -> None:
        """Advance the clock of both stores."""
        self.pass_time(seconds)

    # ---- schedules ---------------------------------------------------------------------------------------

    def a_schedule(self, queue: str, pick: int) -> StoredSchedule | None:
        """Return a schedule as a client read it, now or some time ago."""
        self.seen[queue] += self.executors[0].run(self.stores[0].schedules(queue)).schedules
        self.seen[queue] = self.seen[queue][-6:]
        return self.seen[queue][-1 - pick % len(self.seen[queue])] if self.seen[queue] else None

    @step(2, queue=queues, key=st.sampled_from("xy"), seconds=st.sampled_from(DELAYS), paused=st.booleans(), pick=picks)
    def save_schedule(self, queue: str, key: str, seconds: float, paused: bool, pick: int) -> None:
        """Save a schedule over none, over the current version, or over an old one."""
        over = self.a_schedule(queue, pick)
        version, next_ms = (None, None) if over is None or over.key != key else (over.version, over.next_ms)
        due_ms = self.clock() + ms(seconds)
        schedule = StoredSchedule(
            key, f"v{self.clock()}.{pick}", b"spec", paused and pick % 3 == 0, due_ms - 1, due_ms,
            state=b"saved" if pick % 2 else b"",
        )  # fmt: skip
        self.both(lambda store: store.save_schedule(queue, schedule, version=version, next_ms=next_ms))

    @step(3, when=lambda self: any(self.seen.values()), queue=queues, pick=picks, count=st.integers(0, 2))
    def fire_schedule(self, queue: str, pick: int, count: int) -> None:
        """Fire a schedule as it is now, or as a frozen client read it."""
        seen = self.a_schedule(queue, pick)
        if seen is None or seen.next_ms is None:
            return
        ids = self.session.message_ids(count)
        drafts = [Draft(id, make_envelope(id, encode_body(b"fired")), priority=4) for id in ids]
        self.ids[queue] += ids
        due_ms = seen.due_ms or 0
        next_ms = None if pick % 7 == 6 else due_ms + 1_000
        fire = FireStep(
            seen.key, seen.version, seen.next_ms, due_ms, due_ms + 30_000, seen.next_ms if count else None, pick,
            next_ms, next_ms, state=(None, b"", b"fired")[pick % 3], after_run=self.after_run(queue, pick),
        )  # fmt: skip
        answer = self.operate(queue, lambda store, operation: store.fire_schedule(queue, fire, drafts, operation))
        if answer is not None:
            self.reached[f"fire {answer.result.status}"] += 1

    def after_run(self, queue: str, pick: int) -> AfterRun | None:
        """Return now and then a message that must be final before a fire."""
        if pick % 2 or not self.ids[queue]:
            return None
        run = self.ids[queue][-1 - pick % len(self.ids[queue])]
        return AfterRun(run, b"skipped" if pick % 4 else None, pick % 3, self.clock())

    @step(1, when=lambda self: any(self.seen.values()), queue=queues, pick=picks)
    def backfill_schedule(self, queue: str, pick: int) -> None:
        """Publish for a schedule by hand: its next fire stays, its version does not."""
        seen = self.a_schedule(queue, pick)
        if seen is None:
            return
        ids = self.session.message_ids(1)
        drafts = [Draft(id, make_envelope(id, encode_body(b"past")), priority=4) for id in ids]
        self.ids[queue] += ids
        fire = FireStep(
            seen.key, seen.version, seen.next_ms, 0, 2**50, None, 0, seen.next_ms, seen.due_ms, b"filled",
            f"b{self.clock()}.{pick}", by_hand=True,
        )  # fmt: skip
        self.operate(queue, lambda store, operation: store.fire_schedule(queue, fire, drafts, operation))

    @step(1, when=lambda self: any(self.seen.values()), queue=queues, key=st.sampled_from("xy"))
    def remove_schedule(self, queue: str, key: str) -> None:
        """Remove a schedule that may exist."""
        self.both(lambda store: store.remove_schedule(queue, key))

    @step(1, queue=queues)
    def promote(self, queue: str) -> None:
        """Promote timers that no claim has made ready."""
        self.both(lambda store: store.promote(queue))

    # ---- faults ------------------------------------------------------------------------------------------

    @step(2, when=lambda self: self.last is not None)
    def repeat(self) -> None:
        """Repeat the last operation, as after a lost reply."""
        assert self.last is not None
        call, compare_wakes = self.last
        self.hold_again(self.both(call, compare_wakes=compare_wakes, by_group=True))

    def hold_again(self, answer: Any) -> None:
        """Record the reply of a repeated claim: its leases are known already, and have a new nonce now."""
        if isinstance(answer, Claimed):
            fresh = {(lease.id, lease.token): lease for lease in answer.leases}
            for leases in (*self.held.values(), *self.past.values()):
                leases[:] = [fresh.get((lease.id, lease.token), lease) for lease in leases]
        if isinstance(answer, Removal) and answer.existed and not answer.left:
            # The first one found no queue, which nothing remembers. Calls of this millisecond are refused, as above.
            self.pass_time(0.001)

    @step(2, when=lambda self: self.sent, pick=picks)
    def repeat_late(self, pick: int) -> None:
        """Repeat one of the last operations late, like a client that froze."""
        operation, call, compare_wakes = self.sent[-1 - pick % len(self.sent)]
        answer = self.both(lambda store: call(store, operation), compare_wakes=compare_wakes, by_group=True)
        forgotten = operation.stamp < self.clock() - REPLAY_TTL_MS
        assert answer is None or not forgotten, "an operation that may be forgotten ran or was answered"
        self.reached["forgotten"] += forgotten
        self.hold_again(answer)

    @step(1, queue=queues, ahead=st.sampled_from((1, 5_000, 5_001, 3_600_000)))
    def publish_from_before_the_clock_was_set_back(self, queue: str, ahead: int) -> None:
        """Publish with a stamp from before the store's clock was set back."""
        id = self.session.message_ids(1)[0]
        draft = Draft(id, make_envelope(id, encode_body(b"ahead")))
        operation = self.session.operation(queue)._replace(stamp=self.clock() + ahead)
        self.ids[queue].append(id)
        answer = self.both(lambda store: store.publish(queue, [draft], operation))
        assert answer is None or ahead <= STAMP_AHEAD_MS

    @step(1, when=lambda self: any(self.ids.values()), queue=queues, pick=picks, key=st.sampled_from(KEYS))
    def publish_a_known_id(self, queue: str, pick: int, key: str | None) -> None:
        """Publish an id that the store has, like a cloned process."""
        for state in ("ready", "delayed", "leased", "dead"):
            page = self.executors[0].run(self.stores[0].peek(queue, state, 50))
            if page.messages:
                id = page.messages[pick % len(page.messages)].id
                draft = Draft(id, make_envelope(id, encode_body(b"cloned")), key)
                answer = self.operate(queue, lambda store, operation, d=draft: store.publish(queue, [d], operation))  # type: ignore[misc]
                if answer is not None and answer.result[0].status in ("queued", "delayed"):
                    self.tokens[id] = 0  # the one that had it has lapsed: this is another message
                return

    @step(2, when=lambda self: self.sent, pick=picks)
    def clone(self, pick: int) -> None:
        """Use an operation number that another process with the same session has used."""
        operation, call, compare_wakes = self.sent[-1 - pick % len(self.sent)]
        if operation.stamp < self.clock() - REPLAY_TTL_MS:
            return
        copied = operation._replace(mark=new_mark(), stamp=self.clock())
        answer = self.both(lambda store: call(store, copied), compare_wakes=compare_wakes)
        self.reached["cloned"] += answer is None
        self.hold_again(answer)

    @step(3, when=lambda self: self.holding(), seconds=st.sampled_from((0, 1, 10, 61)))
    def crash(self, seconds: float) -> None:
        """Let the workers crash: their leases stay in the store."""
        for queue in QUEUES:
            self.past[queue] += self.held[queue]
            self.held[queue] = []
        self.pass_time(seconds)

    @step(1, when=lambda self: any(self.ids.values()), queue=queues, pick=picks)
    def inspect_message(self, queue: str, pick: int) -> None:
        """Compare the result and history of one message."""
        if self.ids[queue]:
            id = self.ids[queue][pick % len(self.ids[queue])]
            self.both(lambda store: store.result(queue, id))
            for expected, actual in zip(*(self.trace(index, queue, id) for index in (0, 1)), strict=True):
                # On some stores a continuation arrives in a step of its own: what that step did has its operation.
                carried = (actual.operation_id or "").startswith(self.carrier.id.hex())
                assert without_number(actual, whole=carried) == without_number(expected, whole=carried)

    def trace(self, index: int, queue: str, id: str) -> list[EventRecord]:
        """Return the whole history of one message on one store."""
        events: list[EventRecord] = []
        cursor: str | None = None
        while True:
            page = self.executors[index].run(self.stores[index].trace(queue, id, cursor))
            events += page.events
            cursor = page.cursor
            if cursor is None:
                return events

    # ---- after every step --------------------------------------------------------------------------------

    @step(1, lambda machine: machine.ready_ids(), queue=queues, pick=picks)
    def damage(self, queue: str, pick: int) -> None:
        """Make a message unreachable directly in both stores: others go on, and a repair restores it."""
        ids = self.ready_ids(queue) or self.ready_ids(queue := next(one for one in QUEUES if self.ready_ids(one)))
        id = ids[pick % len(ids)]
        for index in (0, 1):
            self.executors[index].run(strand(self.stores[index], queue, id))
        self.claim(queue, 1, None, None, False, CLAIM_BYTES_MAX)
        found = []
        for index in (0, 1):
            page = self.executors[index].run(self.stores[index].check(queue, None, mend=True))
            while page.cursor is not None:
                more = self.executors[index].run(self.stores[index].check(queue, page.cursor, mend=True))
                page = structs.replace(more, damages=[*page.damages, *more.damages])
            found.append([(damage.kind, damage.id, damage.mended) for damage in page.damages])
        assert found[0] == found[1] == [("stranded", id, "ready at the head of its priority")]
        self.reached["damaged records mended"] += 1

    def ready_ids(self, *names: str) -> list[str]:
        """Return the ready messages of these queues, or of all, by the model."""
        model = cast(MemoryStore, self.stores[0])
        # A message that was out of reach has lost its place in an ordered group.
        known = (model._queues.get(name) for name in names or QUEUES if not self.policy(name).order)
        # Of one that lapses while it is out of reach, some stores find the expiry.
        return sorted(
            one.id
            for queue in known
            if queue is not None
            for one in queue.messages.values()
            if one.state == "ready" and one.expires_ms is None
        )

    @invariant()
    def both_stores_hold_the_same(self) -> None:
        """Compare every listing and the ledgers, and check the invariants."""
        for queue in QUEUES:
            waiting: Counter[str] = Counter()
            leased: Counter[str] = Counter()
            grouped = self.policy(queue).grouped
            for state in STATES:
                page = self.both(
                    lambda store, q=queue, s=state: store.peek(q, s, 1_000),  # type: ignore[misc]
                    by_group=grouped and state == "ready",
                )
                assert page is not None
                model = cast(MemoryStore, self.stores[0])._queues.get(queue)
                keys = [
                    message.key
                    for message in page.messages
                    if message.key is not None and model is not None and state not in ("dead", "done")
                    # Others gave their key up when they were claimed.
                    if model.has_key(model.messages[message.id])
                ]
                if state == "leased":
                    leased.update(keys)
                    self.check_leases(queue, page)
                elif state not in ("dead", "done"):
                    waiting.update(keys)
            assert max(waiting.values(), default=0) <= 1, "two of one key wait"
            assert max(leased.values(), default=0) <= 1, "two of one key are leased"
            if grouped:
                self.check_groups(queue)
            stats = self.both(lambda store, q=queue: store.stats(q, minutes=3), by_group=grouped)  # type: ignore[misc]
            assert stats is not None
            assert stats.ledger.balance == 0
            assert stats.ledger.unexplained == 0
            for backlog in Stats.from_record(stats).backlog[:-1]:
                ended = [minute for minute in self.backlogs[queue] if minute < to_ms(backlog.at) // 60_000]
                if ended:
                    assert backlog.messages == self.backlogs[queue][max(ended)], "the backlog was another"
                    self.reached["backlogs computed"] += 1
            self.both(lambda store, q=queue: store.schedules(q))  # type: ignore[misc]

    def check_groups(self, queue: str) -> None:
        """Compare the listings of groups, and note what holds or limits them."""
        page = self.both(lambda store: store.groups(queue, 100))
        assert page is not None
        for one in page.groups:
            facts = {
                "paused": one.paused, "full": one.full, f"limited by {one.limited_by}": one.limited_by,
                f"held by a {one.held_state} message": one.held_state,
            }  # fmt: skip
            self.reached.update(f"groups {fact}" for fact, holds in facts.items() if holds and one.ready + one.later)

    def check_leases(self, queue: str, page: Page) -> None:
        """Note how many messages of a group are leased: never more than before, once it is at its limit.

        A queue that takes no turns keeps the limits of single groups, without effect.
        """
        policy = self.policy(queue)
        for group, count in Counter(message.group for message in page.messages if message.group is not None).items():
            own = cast(MemoryStore, self.stores[0])._queues[queue].group_settings.get(group, DEFAULT_GROUP)
            set_limits = (own.max_running or policy.group_max_running, policy.order and 1) if policy.grouped else ()
            limits = [limit for limit in set_limits if limit]
            most = max(min(limits, default=count), self.leased.get((queue, group), 0))
            assert count <= most, f"{count} of group {group} are leased"
            self.reached["groups at their limit"] += bool(limits) and count == min(limits)
        counts = Counter(message.group for message in page.messages)
        # A limit that is lowered ends no lease: those above it go on.
        self.leased |= {(queue, group): counts[group] for group in GROUPS}

    @invariant()
    def both_stores_journalled_the_same(self) -> None:
        """Compare the events of the step, in any order."""
        for queue in QUEUES:
            after = self.journal_read[queue]
            pages = [
                executor.run(store.journal(queue, after, 10_000))
                for executor, store in zip(self.executors, self.stores, strict=True)
            ]
            expected, actual = (
                sorted(repr(without_number(event, whole=self.carried)) for event in page.events) for page in pages
            )
            assert actual == expected
            numbers = [event.number for event in pages[1].events]
            assert numbers == list(range(after + 1, after + 1 + len(numbers))), "a number is missing"
            self.journal_read[queue] = after + len(numbers)
            self.reached.update(event.event for event in pages[0].events)
            self.reached["lapsed"] += sum(event.cause == "lapsed" for event in pages[0].events)
            self.dead += [(queue, event.message_id or "") for event in pages[0].events if event.event == "dead"]
        self.carried = False


def comparable(answer: Any, *, by_group: bool = False) -> Any:
    """Return an answer without what may differ: where a redrive stopped, and the order of the side effects.

    Of a queue that takes turns between groups also the order in which groups are listed or a repeated claim returns its
    leases, and what a store would have to search all of them for.
    """
    if by_group and isinstance(answer, Claimed) and answer.grouped:
        answer = structs.replace(answer, leases=sorted(answer.leases, key=lambda lease: lease.id))
    if by_group and isinstance(answer, Page):
        answer = structs.replace(answer, messages=sorted(answer.messages, key=lambda message: message.group or ""))
    if by_group and isinstance(answer, StatsRecord):
        answer = structs.replace(answer, oldest_ready_ms=None)
    if isinstance(answer, Claimed) and answer.grouped:
        answer = structs.replace(answer, next_rate_ms=None)
    if isinstance(answer, Woken) and isinstance(answer.result, Redriven):
        answer = structs.replace(answer, result=structs.replace(answer.result, cursor=None))
    if isinstance(answer, Woken | Claimed) and answer.also:
        answer = structs.replace(answer, also=tuple(sorted(answer.also, key=lambda change: (change.id, change.event))))
    return answer


def ended(lease: Lease, ending: dict[str, Any]) -> Settlement:
    """Return the drawn settlement."""
    outcome: OutcomeName = ending["outcome"]
    result = ending.get("result") if outcome == "done" else None
    return Settlement(
        lease.id, lease.token, lease.nonce, outcome, ms(ending.get("after", 0)), ending.get("reason"),
        ending.get("error"), ending.get("error"), result, 20_000 if result is not None else 0,
    )  # fmt: skip


def without_number(event: EventRecord, *, whole: bool = False) -> EventRecord:
    """Return an event without its position in the step, and without its operation where a store may need two steps."""
    return structs.replace(event, number=0, operation_id=None) if whole else structs.replace(event, number=0)


def machine_for(make_subject: StoreMaker, weights: Mapping[str, int] | None = None) -> type[StoreMachine]:
    """Return the state machine for one store: of all steps, or of some (`GROUP_STEPS`)."""
    members = {"make_subject": staticmethod(make_subject), "weights": weights, "reached": Counter[str]()}
    return type("StoreMachine", (StoreMachine,), members)
