"""Seeded random programs for a store next to its model: larger batches than the state machine draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import structs

from waypost.errors import WaypostError
from waypost.identity import Operation, continuation_id
from waypost.store.memory import MemoryStore
from waypost.store.port import Call, Draft, Executor, Hold, Idle, Store, Target
from waypost.store.sqlite.executor import SqliteExecutor
from waypost.testing.clock import ManualClock
from waypost.values import CheckPage, Continuation, Lease, OutcomeName, Settlement

T = TypeVar("T")

QUEUES = ("orders", "orders", "orders", "billing")
KEYS = (None, None, None, *(f"key-{n}" for n in range(8)))
STATES: tuple[Any, ...] = ("ready", "delayed", "waiting", "leased", "dead", "done")
OUTCOMES: tuple[OutcomeName, ...] = ("done", "done", "done", "retry", "snooze", "dead", "drop", "release")
CHANGES: tuple[dict[str, Any], ...] = (
    {"lease_ms": 1_000}, {"lease_ms": 60_000}, {"lease_ms": None}, {"max_deliveries": 2}, {"max_deliveries": None},
    {"max_pending": 40, "overload": "drop_oldest"}, {"max_pending": 40, "overload": "raise"}, {"max_pending": None},
    {"max_running": 20}, {"max_running": None}, {"rate_count": 30, "rate_per_ms": 5_000},
    {"rate_count": None, "rate_per_ms": None}, {"journal": "off"}, {"journal": "failures"}, {"journal": "full"},
    {"journal": "all"}, {"journal_max": 20}, {"journal_max": 1_000_000}, {"dead_max": 3}, {"dead_max": None},
    {"dead_keep_ms": 9_000}, {"dead_keep_ms": None}, {"completed_max": 5}, {"completed_max": 0},
)  # fmt: skip
#: How a queue treats groups; only in programs with groups.
GROUP_CHANGES: tuple[dict[str, Any], ...] = (
    {"fair": True}, {"order": "group"}, {"order": "group", "on_failure": "pass"}, {"on_failure": "hold"},
    {"order": None}, {"fair": False}, {"group_max_running": 3}, {"group_max_running": None},
    {"group_rate_count": 4, "group_rate_per_ms": 2_000}, {"group_rate_count": None, "group_rate_per_ms": None},
    {"group_max_pending": 15}, {"group_max_pending": None},
    {"order": None, "fair": False, "group_max_running": None, "group_rate_count": None, "group_rate_per_ms": None,
     "group_max_pending": None},
)  # fmt: skip
OWN_CHANGES: tuple[dict[str, Any], ...] = (
    {"weight": 3}, {"weight": 1}, {"paused": True}, {"paused": False}, {"paused": False}, {"max_running": 2},
    {"max_running": None}, {"rate_count": 2, "rate_per_ms": 3_000}, {"rate_count": None, "rate_per_ms": None},
    {"max_pending": 5}, {"max_pending": None},
)  # fmt: skip


def _comparable(answer: Any) -> Any:
    """Return an answer without what a store would have to search all groups for."""
    if isinstance(answer, CheckPage):
        return answer.damages
    return answer


class Pair:
    """A store and the model behind one clock: every call goes to both, and their answers must be the same."""

    def __init__(
        self, make: Callable[[ManualClock], Store], seed: int = 0, *, groups: tuple[str, ...] = ("g",)
    ) -> None:
        self.groups = groups
        self.clock = ManualClock()
        self.random = random.Random(seed)
        self.stores: tuple[Store, Store] = (MemoryStore(clock=self.clock), make(self.clock))
        self.executors: tuple[Executor, ...] = tuple(store.connect(start_timeout=3) for store in self.stores)
        self.numbers: dict[str, int] = {}
        self.made = 0
        self.leases: dict[str, list[Lease]] = {"orders": [], "billing": []}
        self.repeats: list[Callable[[Store], Call[Any]]] = []

    def close(self) -> None:
        for executor in self.executors:
            if isinstance(executor, SqliteExecutor):
                # The writer leaves these checks out: its steps must keep them by themselves.
                with executor._writer.use() as connection:
                    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            executor.close()

    def operation(self, queue: str) -> Operation:
        self.numbers[queue] = self.numbers.get(queue, 0) + 1
        return Operation(b"session1", self.numbers[queue], self.clock(), self.numbers[queue].to_bytes(8))

    def both(self, verb: Callable[[Store], Call[T]]) -> T | None:
        """Return the answer of both stores; None if both refused in the same way."""
        answers: list[T | str] = []
        for store, executor in zip(self.stores, self.executors, strict=True):
            try:
                answers.append(executor.run(verb(store)))
            except WaypostError as error:
                answers.append(f"{type(error).__name__}: {error}")
        model, mine = map(_comparable, answers)
        assert mine == model
        return None if isinstance(model, str) else model

    def once(self, queue: str, verb: Callable[[Store, Operation], Call[T]]) -> T | None:
        """Run a verb with a new operation, and remember it so that it can be repeated."""
        operation = self.operation(queue)
        self.repeats.append(lambda store: verb(store, operation))
        return self.both(lambda store: verb(store, operation))

    def check(self, queue: str) -> None:
        """Check that everything visible of a queue is the same in both stores."""
        self.both_stats(queue)
        self.both(lambda store: store.journal(queue, 0, 100_000))
        for state in STATES:
            pages = [
                executor.run(store.peek(queue, state, 500)).messages
                for store, executor in zip(self.stores, self.executors, strict=True)
            ]
            if state == "ready" and len(self.groups) > 1:
                # In what order groups are listed is left to each store.
                for page in pages:
                    page.sort(key=lambda message: message.group or "")
            assert pages[0] == pages[1]
        policy = self.both(lambda store: store.policy(queue))
        if policy is not None and policy.grouped:
            self.both(lambda store: store.groups(queue, 100))
            self.both(lambda store: store.check(queue, None))
            self.both_polls(queue)

    def both_stats(self, queue: str) -> None:
        """Check that the figures are the same; the oldest message of a queue with groups is not searched."""
        stats: list[Any] = []
        for store, executor in zip(self.stores, self.executors, strict=True):
            found = executor.run(store.stats(queue, minutes=60))
            grouped = executor.run(store.policy(queue)).grouped
            stats.append(structs.replace(found, oldest_ready_ms=None) if grouped else found)
        assert stats[0] == stats[1]

    def both_polls(self, queue: str) -> None:
        """Check that both stores would claim again, or that both would not."""
        polls = [
            executor.run(store.poll([Idle(queue)])[0])
            for store, executor in zip(self.stores, self.executors, strict=True)
        ]
        assert polls[0].queues == polls[1].queues

    # ---- the steps of a random program -------------------------------------------------------------------

    def step(self) -> str:
        """Run one random step, and return its queue."""
        queue = self.random.choice(QUEUES)
        verbs = [self.publish] * 4 + [self.claim] * 4 + [self.settle] * 4
        verbs += [self.extend, self.cancel, self.redrive, self.purge, self.configure, self.pause, self.read, self.again]
        if len(self.groups) > 1:
            verbs += [self.configure_groups, self.configure_group, self.skip_held]
        self.random.choice(verbs)(queue)
        self.clock.advance_ms(self.random.choice((0, 0, 1, 50, 700, 2_500)))
        return queue

    def plain_drafts(self, count: int) -> list[Draft]:
        """Return drafts that stores may write all at once: alike, ready now, with no key."""
        chance = self.random
        group, first = chance.choice((None, None, "g")), self.made + 1
        self.made += count
        return [
            Draft(
                f"{chance.randrange(1000):03}-{number:020}",
                chance.randbytes(chance.choice((0, 30, 300))),
                group=group if len(self.groups) == 1 else chance.choice((None, *self.groups)),
            )
            for number in range(first, first + count)
        ]

    def drafts(self, count: int) -> list[Draft]:
        chance, drafts, keys = self.random, [], set()
        for _ in range(count):
            self.made += 1
            key = chance.choice(KEYS)
            if key in keys:
                key = None
            keys.add(key)
            drafts.append(
                Draft(
                    f"{chance.randrange(1000):03}-{self.made:020}",
                    chance.randbytes(chance.choice((1, 30, 6_000))),
                    key=key,
                    window_ms=chance.choice((0, 0, 3_000)) if key else 0,
                    on_conflict=chance.choice(("keep", "replace", "extend", "error")),
                    delay_ms=chance.choice((0, 0, 0, 400, 9_000)),
                    at_ms=chance.choice((None, None, None, self.clock() + 100, self.clock() - 100)),
                    priority=chance.choice((5, 5, 0, 9)),
                    group=chance.choice((None, *self.groups)),
                    journal_copy=chance.choice((None, b"", b"copy")),
                    forwarded=chance.random() < 0.1,
                )
            )
        return drafts

    def publish(self, queue: str) -> None:
        make = self.random.choice((self.drafts, self.plain_drafts))
        drafts = make(self.random.choice((1, 1, 3, 60)))
        self.once(queue, lambda store, operation: store.publish(queue, drafts, operation))

    def claim(self, queue: str) -> None:
        limit = self.random.choice((1, 5, 100))
        sleeper = self.random.choice((None, "anna", "bert"))
        claimed = self.once(
            queue,
            lambda store, operation: store.claim(
                queue, limit, operation, worker="w", sleeper=sleeper, nonce=operation.mark + b"once"
            ),
        )
        self.leases[queue] += claimed.leases if claimed else []

    def settlement(self, lease: Lease) -> Settlement:
        chance = self.random
        outcome = chance.choice(OUTCOMES)
        then = tuple(
            Continuation(
                continuation_id(lease.id.ljust(24, "0"), lease.token, index), chance.choice(QUEUES), b"next",
                key=chance.choice(KEYS), delay_ms=chance.choice((0, 300)),
            )
            for index in range(chance.choice((0, 0, 0, 2)))
        )  # fmt: skip
        return Settlement(
            lease.id, lease.token, lease.nonce, outcome,
            after_ms=chance.choice((0, 800)), reason=chance.choice((None, "rejected", "undecodable")),
            error_type="ValueError", error="no", result=chance.choice((None, b"kept")), result_ttl_ms=2_000, then=then,
        )  # fmt: skip

    def settle(self, queue: str) -> None:
        leases = self.leases[queue]
        if self.random.random() < 0.6:
            self.random.shuffle(leases)
        count = self.random.choice((1, 10, 80))
        # A settle that comes twice, or too late, must be lost: some leases stay in the list.
        chosen, self.leases[queue] = leases[:count], leases[count:] + leases[: self.random.choice((0, 0, 2))]
        settlements = [self.settlement(lease) for lease in chosen]
        if self.random.random() < 0.4:
            settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in chosen]
        self.once(queue, lambda store, operation: store.settle(queue, settlements, operation))
        for lease in chosen[:3]:
            self.both(lambda store, id=lease.id: store.result(queue, id))  # type: ignore[misc]

    def extend(self, queue: str) -> None:
        holds = [Hold(lease.id, lease.token, lease.nonce) for lease in self.leases[queue][:30]]
        self.once(queue, lambda store, operation: store.extend(queue, holds, operation))

    def cancel(self, queue: str) -> None:
        targets = [Target(key=self.random.choice(KEYS) or "none")]
        targets += [Target(id=lease.id) for lease in self.leases[queue][:2]]
        self.once(queue, lambda store, operation: store.cancel(queue, targets, operation))

    def redrive(self, queue: str) -> None:
        reason = self.random.choice((None, "rejected", "duplicate"))
        ids = [lease.id for lease in self.leases[queue]] if self.random.random() < 0.2 else []
        self.once(queue, lambda store, operation: store.redrive(queue, 5, operation, ids=ids, reason=reason))

    def purge(self, queue: str) -> None:
        state = self.random.choice(STATES)
        self.once(queue, lambda store, operation: store.purge(queue, state, 4, operation))

    def configure(self, queue: str) -> None:
        changes = self.random.choice(CHANGES)
        self.both(lambda store: store.configure(queue, changes))
        self.both(lambda store: store.policy(queue))

    def configure_groups(self, queue: str) -> None:
        changes = self.random.choice(GROUP_CHANGES)
        self.both(lambda store: store.configure(queue, changes))

    def configure_group(self, queue: str) -> None:
        group, changes = self.random.choice(self.groups), self.random.choice(OWN_CHANGES)
        self.both(lambda store: store.configure_group(queue, group, changes))

    def skip_held(self, queue: str) -> None:
        group = self.random.choice(self.groups)
        self.once(queue, lambda store, operation: store.skip_held(queue, group, operation))

    def pause(self, queue: str) -> None:
        self.both(lambda store: store.pause(queue))
        self.both(lambda store: store.resume(queue))

    def read(self, queue: str) -> None:
        name = self.random.choice(("lake", "audit"))
        read_to = self.random.choice((None, self.random.randrange(3_000)))
        self.both(lambda store: store.journal_reader(queue, name, read_to))
        if self.random.random() < 0.3:
            self.both(lambda store: store.journal_forget(queue, name))
        up_to = self.random.randrange(2_000)
        self.both(lambda store: store.journal_trim(queue, up_to))
        for lease in self.leases[queue][:2]:
            self.both(lambda store, id=lease.id: store.trace(queue, id))  # type: ignore[misc]

    def again(self, queue: str) -> None:
        """Repeat a recent or an old operation: the result is the first one, or the operation is too old."""
        if self.repeats:
            self.both(self.random.choice(self.repeats[-40:] + self.repeats[:1]))
