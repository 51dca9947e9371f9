"""Random programs of chains on Valkey and on the memory model give the same results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
from msgspec import structs

from tests.valkey.inspector import Inside
from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.testing.bench import QUEUE, Bench
from waypost.values import ChainState, Lease, chain_id

T = TypeVar("T")
INVOICES = "invoices"
MAILS = "mails"


class Twins:
    """The memory model and Valkey under one program: the same ids, the same steps, compared after all deliveries."""

    QUEUES = (QUEUE, INVOICES, MAILS)

    def __init__(self, model: Bench, subject: Bench, seed: int) -> None:
        self.benches = (model, subject)
        self.chance = random.Random(seed)
        self.chains: list[str] = []
        self.ids: list[tuple[str, str]] = []
        self.held: dict[str, list[tuple[Lease, Lease]]] = {queue: [] for queue in self.QUEUES}

    def both(self, act: Callable[[Bench], T]) -> T:
        first, second = (act(bench) for bench in self.benches)
        assert first == second
        return first

    def publish(self) -> None:
        queue, id = self.chance.choice(self.QUEUES), self.benches[0].session.message_ids(1)[0]
        options: dict[str, Any] = {"delay": self.chance.choice((0, 0, 0, 5))}
        if self.chance.random() < 0.6:
            options["chain"] = chain_id(queue, id)
        if self.chains and self.chance.random() < 0.5:
            options["after_chains"] = self.chance.sample(self.chains, min(len(self.chains), self.chance.randint(1, 3)))
        elif self.chance.random() < 0.3:
            options |= {"key": "k", "on_conflict": self.chance.choice(("keep", "replace"))}
        published = self.both(lambda bench: bench.publish(queue=queue, id=id, **options))
        self.ids.append((queue, published.id))
        self.chains.append(chain_id(queue, id))

    def claim(self) -> None:
        for queue in self.QUEUES:
            model, subject = (sorted(bench.claim_all(queue=queue), key=lambda one: one.id) for bench in self.benches)
            assert [(one.id, one.chain, one.token) for one in model] == [
                (one.id, one.chain, one.token) for one in subject
            ]
            self.held[queue] += zip(model, subject, strict=True)

    def settle(self) -> None:
        held = [(queue, pair) for queue in self.QUEUES for pair in self.held[queue]]
        for queue, pair in self.chance.sample(held, min(len(held), self.chance.randint(1, 4))):
            self.held[queue].remove(pair)
            outcome = self.chance.choice(("done", "done", "done", "done", "retry", "dead", "drop", "release"))
            targets = [self.chance.choice(self.QUEUES) for _ in range(self.chance.randint(0, 2))]
            key = self.chance.choice((None, None, "k"))
            statuses = [
                bench.settle(
                    lease,
                    outcome,  # type: ignore[arg-type]
                    queue=queue,
                    then=[
                        bench.continuation(lease, target, index=index, key=key if index == 0 else None)
                        for index, target in enumerate(targets)
                    ]
                    if outcome == "done"
                    else (),
                )
                for bench, lease in zip(self.benches, pair, strict=True)
            ]
            assert statuses[0] == statuses[1]
            self.benches[1].deliver_all()

    def cancel(self) -> None:
        if self.ids:
            queue, id = self.chance.choice(self.ids)
            self.both(lambda bench: bench.cancel(id, queue=queue))

    def watch(self) -> None:
        if self.ids:
            queue, id = self.chance.choice(self.ids)
            self.both(lambda bench: structs.replace(bench.watch(id, "anna", queue=queue), error=None))

    def redrive(self) -> None:
        for queue in self.QUEUES:
            self.both(lambda bench, queue=queue: sorted(bench.redrive(queue=queue).moved))  # type: ignore[misc]

    def purge(self) -> None:
        queue, state = self.chance.choice(self.QUEUES), self.chance.choice(("ready", "waiting"))
        self.both(lambda bench: bench.purge(state, limit=500, queue=queue))  # type: ignore[arg-type]

    def wait(self) -> None:
        self.benches[0].after(self.chance.choice((1, 5, 20)))

    def run(self, steps: int) -> None:
        acts = (self.publish,) * 4 + (self.claim, self.settle) * 4 + (self.cancel, self.watch, self.wait)
        for _ in range(steps):
            act = (
                self.chance.choice(acts)
                if self.chance.random() < 0.97
                else self.chance.choice((self.redrive, self.purge))
            )
            act()
            self.benches[1].deliver_all()
            self.compare()

    @staticmethod
    def standing(state: ChainState) -> object:
        """Return what must be equal: a failed chain counts no more, and its first end depends on the deliveries."""
        return "broken" if state.failed is not None else state

    def compare(self) -> None:
        for chain in self.chains:
            self.both(lambda bench, chain=chain: self.standing(bench.chain_state(chain)))  # type: ignore[misc]
        for queue in self.QUEUES:
            self.both(lambda bench, queue=queue: bench.ledger(queue=queue))  # type: ignore[misc]
            for state in ("ready", "delayed", "waiting", "leased", "dead"):
                # Not by its error: of two chains that failed, either may be reported first.
                self.both(
                    lambda bench, queue=queue, state=state: sorted(  # type: ignore[misc]
                        (one.id, one.token, one.reason) for one in bench.listing(state, queue=queue)
                    )
                )
        for queue, id in self.ids:
            self.both(lambda bench, queue=queue, id=id: structs.replace(bench.watch(id, queue=queue), error=None))  # type: ignore[misc]


@pytest.mark.promise("CHAIN-1", "CHAIN-2", "STORE-4")
@pytest.mark.parametrize("seed", range(12))
def test_chains_match_the_model_for_any_program(plain_bench: Bench, inside: Inside, seed: int) -> None:
    store = MemoryStore(clock=plain_bench.clock)
    with Bench(lambda clock, namespace: cast(Store, store), "sync", clock=plain_bench.clock) as model:
        Twins(model, plain_bench, seed).run(60)
        for queue in Twins.QUEUES:
            inside.check(queue)
            reported = [
                sorted([(e.event, e.message_id or "", e.chain_id or "", e.cause or "", e.reason or "") for e in found])
                for found in (model.events(queue=queue), plain_bench.events(queue=queue))
            ]
            assert reported[0] == reported[1]
        model.check_invariants()
        plain_bench.check_invariants()
