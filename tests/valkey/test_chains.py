"""Chains on Valkey, where a step cannot span queues: what one client did not deliver, another does, once.

Also the limits: how long a notice is kept, how much one step does, and which keys are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

import pytest

from tests.servers.valkey_setups import ClusterSetup
from tests.unit.clients import MODES, open_client
from tests.valkey.inspector import Inside
from waypost.errors import ForeignData
from waypost.identity import Session
from waypost.operations.flow import ClientContext, drive
from waypost.policy import (
    ARRIVAL_TTL_MS,
    BLOCKER_CHECK_MS,
    CHUNK_MESSAGES_MAX,
    COMPLETION_TTL_MS,
    ENDED_TTL_MS,
    OUTGOING_TTL_MS,
    WAITER_TTL_MS,
)
from waypost.schedule.promoter import Promoter
from waypost.store.port import AsyncExecutor, Call, Executor, Store
from waypost.store.valkey import ValkeyStore
from waypost.testing.bench import QUEUE, Bench, Mode, fresh_namespace
from waypost.testing.clock import ClockTime
from waypost.testing.servers import ValkeyServer
from waypost.values import Continuation, Lease, Notice, Watched, chain_id

T = TypeVar("T")
INVOICES = "invoices"
MAILS = "mails"


# ---- a client that dies half-way -----------------------------------------------------------------------------


class Killed(BaseException):
    """The process ended here. No error handler catches it."""


class MortalStore:
    """A store whose client dies right after a call of this name."""

    def __init__(self, inner: Store, last_call: str) -> None:
        self.inner = inner
        self.last_call = last_call
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self) -> None:
        if self.dead:
            raise Killed

    def note(self, call: Call[Any]) -> None:
        self.dead = self.dead or call.name == self.last_call

    def connect(self, *, start_timeout: float) -> MortalExecutor:
        return MortalExecutor(self, self.inner.connect(start_timeout=start_timeout))

    async def connect_async(self, *, start_timeout: float) -> AsyncMortalExecutor:
        return AsyncMortalExecutor(self, await self.inner.connect_async(start_timeout=start_timeout))


class MortalExecutor:
    def __init__(self, store: MortalStore, inner: Executor) -> None:
        self.store = store
        self.inner = inner

    def run(self, call: Call[T]) -> T:
        self.store.check()
        result = self.inner.run(call)
        self.store.note(call)
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return [self.run(call) for call in calls]

    def close(self) -> None:
        self.inner.close()


class AsyncMortalExecutor:
    def __init__(self, store: MortalStore, inner: AsyncExecutor) -> None:
        self.store = store
        self.inner = inner

    async def run(self, call: Call[T]) -> T:
        self.store.check()
        result = await self.inner.run(call)
        self.store.note(call)
        return result

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            result = await self.run(call)
            results.append(result)
        return results

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSetup]:
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture(params=["valkey", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "valkey":
        server: ValkeyServer = request.getfixturevalue("server")
        return server.url
    setup: ClusterSetup = request.getfixturevalue("cluster")
    return setup.url


def steps_of(url: str, namespace: str, request: pytest.FixtureRequest) -> list[str]:
    """Return the queues of five steps; on a Cluster each of the three is on another node."""
    if "cluster" not in url:
        names = ["orders", "billing", "mails"]
    else:
        setup: ClusterSetup = request.getfixturevalue("cluster")
        by_node = {setup.owner(setup.slot_of(f"{{{namespace}:queue-{n}}}")).port: f"queue-{n}" for n in range(40)}
        names = list(by_node.values())
    first, second, third = names
    return [first, second, third, first, second]


@pytest.mark.promise("CHAIN-2", "STORE-1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last_call", ["settle", "outgoing", "publish", "arrive", "forwarded"])
def test_a_chain_ends_once_though_its_client_dies_at_every_step(
    url: str, mode: Mode, last_call: str, request: pytest.FixtureRequest
) -> None:
    namespace = fresh_namespace()
    queues = steps_of(url, namespace, request)
    handled: list[int] = []
    deaths: list[int] = []

    def one_step(number: int) -> None:
        store = MortalStore(cast(Store, ValkeyStore.from_url(url, namespace=namespace)), last_call)
        with (
            suppress(Killed),
            open_client(mode, store=store) as doomed,
            doomed.receive(queues[number], wait=20) as message,
        ):
            assert message.body == number
            handled.append(number)
            if number == len(queues) - 1:
                message.keep_result("all is well")
            else:
                message.then(queues[number + 1], number + 1)
        if store.dead:
            deaths.append(number)

    def another_claims(post: Any, queue: str) -> None:
        with post.receive(queue, wait=0) as message:
            assert message is None, "a message was delivered twice"

    with open_client(mode, url, namespace=namespace) as post:
        first = post.publish(queues[0], 0, chain=True)
        report = post.publish("reports", "the report", after=first)
        another_claims(post, "reports")
        for number in range(len(queues)):
            one_step(number)
            # Another client claims there, and delivers what was left.
            another_claims(post, queues[number])
        another_claims(post, queues[0])
        assert post.wait_chain(first, timeout=20) == "all is well"
        with post.receive("reports", wait=20) as message:
            assert message.id == report.id
        assert handled == list(range(len(queues)))
        # In the first queue of the chain nothing has to arrive; the last message sends nothing on.
        assert deaths == {"publish": [0, 1, 2, 3], "arrive": [1, 2, 4]}.get(last_call, handled)
        for queue in set(queues):
            another_claims(post, queue)
            ledger = post.ledger(queue)
            assert (ledger.published, ledger.done) == (queues.count(queue),) * 2
            assert (ledger.balance, ledger.unexplained) == (0, 0)


# ---- notices that cannot be delivered ---------------------------------------------------------------------------


def begun_elsewhere(bench: Bench) -> tuple[str, Lease]:
    """Begin a chain whose second message is leased in another queue than its first."""
    chain = bench.begin_chain()
    lease = bench.claim_one()
    bench.settle(lease, then=[bench.continuation(lease, INVOICES)])
    bench.deliver_all()
    return chain, bench.claim_one(queue=INVOICES)


def outgoing(bench: Bench, queue: str) -> list[Continuation | Notice]:
    return bench.run(bench.store.outgoing(queue, 100))


@pytest.mark.promise("CHAIN-2")
def test_a_notice_delivered_days_later_ends_the_wait(plain_bench: Bench) -> None:
    chain, lease = begun_elsewhere(plain_bench)
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    plain_bench.settle(lease, queue=INVOICES)
    plain_bench.after(5 * 86_400)
    plain_bench.claim(queue=MAILS)
    plain_bench.deliver_all()
    assert plain_bench.claim_one(queue=MAILS).id == report.id


@pytest.mark.promise("CHAIN-2")
def test_a_notice_that_no_client_delivers_is_dropped_after_its_ttl(plain_bench: Bench, inside: Inside) -> None:
    chain, lease = begun_elsewhere(plain_bench)
    plain_bench.settle(lease, queue=INVOICES)
    plain_bench.after(COMPLETION_TTL_MS / 1000 - 0.001)
    [notice] = outgoing(plain_bench, INVOICES)
    assert isinstance(notice, Notice)
    assert (notice.kind, notice.queue, notice.chain, notice.failed) == ("ended", QUEUE, chain, None)
    plain_bench.after(0.001)
    assert outgoing(plain_bench, INVOICES) == []
    assert plain_bench.claimed(queue=INVOICES).outgoing == 0
    assert "outgoing" not in inside.names(INVOICES)
    # No message was made of it, and the chain is as if its message were still under way.
    assert plain_bench.ledger(queue=INVOICES).dead == 0
    assert plain_bench.chain_state(chain).open == 1


@pytest.mark.promise("CHAIN-2", "DEAD-1")
def test_a_message_that_waits_for_a_chain_of_an_unreachable_queue_is_dead(plain_bench: Bench) -> None:
    chain = plain_bench.begin_chain()
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.after(OUTGOING_TTL_MS / 1000)
    assert outgoing(plain_bench, MAILS) == []
    letter = plain_bench.stored(report.id, queue=MAILS)
    assert (letter.state, letter.reason, letter.error) == ("dead", "blocker_failed", f"chain {chain}: undeliverable")
    plain_bench.check_invariants()


@pytest.mark.promise("CHAIN-2")
def test_a_complete_chain_is_known_for_as_long_as_a_message_can_wait_for_it(plain_bench: Bench) -> None:
    chain = plain_bench.begin_chain()
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    plain_bench.settle(plain_bench.claim_one())
    plain_bench.after(10 * ARRIVAL_TTL_MS / 1000)
    [notice] = outgoing(plain_bench, QUEUE)
    assert isinstance(notice, Notice)
    assert notice.kind == "completed"
    plain_bench.deliver_all()
    assert plain_bench.claim_one(queue=MAILS).id == report.id

    chain = plain_bench.begin_chain()
    plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    plain_bench.settle(plain_bench.claim_one())
    plain_bench.after(COMPLETION_TTL_MS / 1000)
    assert outgoing(plain_bench, QUEUE) == []


@pytest.mark.promise("CHAIN-2", "DEAD-1")
@pytest.mark.parametrize("first_queue", [QUEUE, INVOICES])
def test_a_continuation_that_cannot_be_delivered_breaks_its_chain(plain_bench: Bench, first_queue: str) -> None:
    if first_queue == QUEUE:
        chain = plain_bench.begin_chain()
        lease = plain_bench.claim_one()
    else:
        chain = plain_bench.begin_chain(queue=INVOICES)
        first = plain_bench.claim_one(queue=INVOICES)
        plain_bench.settle(first, queue=INVOICES, then=[plain_bench.continuation(first, QUEUE)])
        plain_bench.deliver_all()
        lease = plain_bench.claim_one()
    lost = plain_bench.continuation(lease, "unreachable")
    plain_bench.settle(lease, then=[lost])
    if first_queue != QUEUE:
        # The notice of its own end arrives, its continuation does not.
        for one in outgoing(plain_bench, QUEUE):
            if isinstance(one, Notice):
                plain_bench.carry(one)
                plain_bench.run(plain_bench.store.forwarded(QUEUE, [one.id]))
    plain_bench.after(OUTGOING_TTL_MS / 1000)
    plain_bench.deliver_all()
    assert plain_bench.stored(lost.id).reason == "undeliverable"
    assert plain_bench.chain_state(chain).failed == (chain_id(QUEUE, lost.id), "undeliverable")
    assert {event.chain_id for event in plain_bench.events("dead")} == {chain}


@pytest.mark.promise("CHAIN-2")
def test_undeliverable_entries_do_not_block_deliverable_ones(plain_bench: Bench) -> None:
    for _ in range(9):
        plain_bench.publish()
        lease = plain_bench.claim_one()
        plain_bench.settle(lease, then=[plain_bench.continuation(lease, "unreachable", index=n) for n in range(250)])
    plain_bench.publish()
    lease = plain_bench.claim_one()
    wanted = plain_bench.continuation(lease, INVOICES)
    plain_bench.settle(lease, then=[wanted])
    assert plain_bench.claimed().outgoing > 4 * CHUNK_MESSAGES_MAX
    listed: set[str] = set()
    for _ in range(200):
        listed |= {one.id for one in plain_bench.run(plain_bench.store.outgoing(QUEUE, CHUNK_MESSAGES_MAX))}
        if wanted.id in listed:
            break
        plain_bench.after(0.001)
    assert wanted.id in listed


# ---- how much one step does --------------------------------------------------------------------------------------


@pytest.mark.promise("CHAIN-2", "STORE-1")
@pytest.mark.parametrize("queue", [QUEUE, MAILS], ids=["its own queue", "another queue"])
def test_the_end_of_a_chain_wakes_a_bounded_number_of_waiters_in_one_step(plain_bench: Bench, queue: str) -> None:
    chain = plain_bench.begin_chain(priority=9)
    waiting = [
        published.id
        for _ in range(3)
        for published in plain_bench.publish_drafts(
            [plain_bench.draft(after_chains=[chain]) for _ in range(500)], queue=queue
        )
    ]
    deliver(plain_bench)
    assert plain_bench.ledger(queue=queue).waiting == len(waiting)
    plain_bench.settle(plain_bench.claim_one())
    reported = plain_bench.ledger(queue=QUEUE).ready if queue == QUEUE else len(outgoing(plain_bench, QUEUE)) - 1
    assert 0 < reported <= CHUNK_MESSAGES_MAX
    deliver(plain_bench)
    assert plain_bench.ledger(queue=queue).ready == len(waiting)
    assert sorted(plain_bench.ids("ready", queue=queue)) == sorted(waiting)
    plain_bench.check_invariants()


def deliver(bench: Bench) -> None:
    """Deliver everything that queues send to each other, many at a time as clients do."""
    while waiting := [
        (queue, one) for queue in (QUEUE, MAILS) for one in bench.run(bench.store.outgoing(queue, CHUNK_MESSAGES_MAX))
    ]:
        for source in {queue for queue, _ in waiting}:
            notices = [cast(Notice, one) for queue, one in waiting if queue == source]
            for target in {notice.queue for notice in notices}:
                news = [notice for notice in notices if notice.queue == target]
                for at in range(0, len(news), CHUNK_MESSAGES_MAX):
                    bench.run(bench.store.arrive(target, news[at : at + CHUNK_MESSAGES_MAX]))
            bench.run(bench.store.forwarded(source, [notice.id for notice in notices]))


@pytest.mark.promise("CHAIN-2", "STORE-1")
def test_chains_that_wait_for_each_other_fail_one_after_the_other(plain_bench: Bench) -> None:
    """Each waits for the one before and begins the next: more than one step may do."""
    count = 3 * CHUNK_MESSAGES_MAX
    chains = [plain_bench.begin_chain(priority=9)]
    for _ in range(count):
        chains.append(plain_bench.begin_chain(after_chains=[chains[-1]]))
    plain_bench.settle(plain_bench.claim_one(), "dead")
    assert 0 < plain_bench.ledger().dead < count
    deliver(plain_bench)
    assert plain_bench.ledger().dead == count + 1
    assert plain_bench.chain_state(chains[-1]).failed == (chains[-1], "blocker_failed")
    plain_bench.check_invariants()


# ---- keys that are left -----------------------------------------------------------------------------------------


@pytest.mark.promise("CHAIN-2", "STORE-1")
def test_all_keys_of_chains_and_waits_expire(plain_bench: Bench, inside: Inside) -> None:
    chain = plain_bench.begin_chain(priority=9)
    awaited = plain_bench.publish()
    blocked = plain_bench.publish(after_chains=[chain])
    plain_bench.chain_state(chain, "anna")
    plain_bench.watch(awaited.id, "bert")
    base = inside.key("")
    found = set()
    for key in inside.all_keys():
        kind = key.removeprefix(base).partition(":")[0]
        found.add(kind)
        if kind == "waiters":
            assert 0 < inside.client.pttl(key) <= WAITER_TTL_MS
        elif kind in ("chain", "watchers", "blockers", "blocked"):
            assert inside.client.pttl(key) == -1, "an unfinished chain does not end by itself"
    assert found >= {"chain", "watchers", "waiters", "blockers", "blocked"}
    inside.check()

    for lease in plain_bench.claim_all():
        plain_bench.settle(lease)
    assert plain_bench.claim_one().id == blocked.id
    plain_bench.purge("ready")
    inside.check()
    kinds = inside.names()
    assert kinds & {"watchers", "waiters", "blockers", "blocked", "outgoing", "waiting"} == set()
    for kind in ("chain", "end"):
        [key] = [key for key in inside.all_keys() if key.startswith(f"{base}{kind}:")]
        assert 0 < inside.client.pttl(key) <= ENDED_TTL_MS


@pytest.mark.promise("CHAIN-2", "STORE-1")
@pytest.mark.parametrize("how", ["cancel", "purge", "blocker"])
def test_the_list_of_chains_is_removed_with_its_waiting_message(plain_bench: Bench, inside: Inside, how: str) -> None:
    first, second = plain_bench.begin_chain(priority=9), plain_bench.begin_chain()
    waiting = plain_bench.publish(after_chains=[first, second])
    assert "blockers" in inside.names()
    if how == "cancel":
        plain_bench.cancel(waiting.id)
    elif how == "purge":
        plain_bench.purge("waiting")
    else:
        plain_bench.settle(plain_bench.claim_one(), "dead")
    assert inside.names() & {"blockers", "blocked"} == set()
    inside.check()


# ---- lost keys -----------------------------------------------------------------------------------------------


@pytest.mark.promise("CHAIN-2")
@pytest.mark.parametrize("queue", [QUEUE, MAILS])
def test_a_message_that_waits_for_a_chain_that_was_lost_ends(plain_bench: Bench, inside: Inside, queue: str) -> None:
    chain = plain_bench.begin_chain(delay=86_400)
    report = plain_bench.publish(queue=queue, after_chains=[chain])
    plain_bench.deliver_all()
    first = chain.rpartition("/")[2]
    assert inside.client.delete(inside.key(f"chain:{first}"), inside.key(f"watchers:{first}")) == 2
    plain_bench.claim(queue=queue)
    plain_bench.deliver_all()
    assert plain_bench.state_of(report.id, queue=queue) == "waiting"
    plain_bench.after(BLOCKER_CHECK_MS / 1000)
    plain_bench.claim(queue=queue)
    plain_bench.deliver_all()
    letter = plain_bench.stored(report.id, queue=queue)
    assert (letter.state, letter.reason) == ("dead", "blocker_failed")
    assert letter.error == f"chain {chain}: unknown chain"


@pytest.mark.promise("CHAIN-2")
def test_a_wait_whose_registration_was_lost_is_registered_again(plain_bench: Bench, inside: Inside) -> None:
    chain = plain_bench.begin_chain()
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    assert inside.client.delete(inside.key(f"watchers:{chain.rpartition('/')[2]}")) == 1
    plain_bench.after(BLOCKER_CHECK_MS / 1000)
    assert plain_bench.claim(queue=MAILS) == []
    plain_bench.deliver_all()
    plain_bench.settle(plain_bench.claim_one())
    plain_bench.deliver_all()
    assert plain_bench.claim_one(queue=MAILS).id == report.id


@pytest.mark.promise("CHAIN-2", "TIMER-4")
def test_a_promoter_sends_on_what_a_client_left(plain_bench: Bench) -> None:
    plain_bench.publish()
    lease = plain_bench.claim_one()
    sent = plain_bench.continuation(lease, MAILS)
    plain_bench.settle(lease, then=[sent])
    context = ClientContext(
        plain_bench.store, session=Session(ClockTime(plain_bench.clock)), worker="promoter", retry_budget=0
    )
    executor = plain_bench.store.connect(start_timeout=5)
    drive(executor, Promoter(context).tick())
    executor.close()
    assert plain_bench.claim_one(queue=MAILS).id == sent.id


@pytest.mark.promise("CHAIN-2")
def test_a_wait_checks_its_chain_once_in_each_interval(plain_bench: Bench) -> None:
    chain = plain_bench.begin_chain(delay=86_400)
    plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    for _ in range(2):
        plain_bench.after(BLOCKER_CHECK_MS / 1000)
        for checks in (1, 0, 0):
            plain_bench.claim(queue=MAILS)
            assert len(plain_bench.run(plain_bench.store.outgoing(MAILS, 10))) == checks
            plain_bench.deliver_all()


@pytest.mark.promise("CHAIN-2")
def test_an_undelivered_notice_of_an_end_counts_although_its_chain_is_forgotten(plain_bench: Bench) -> None:
    """The wait checks again and finds no chain, but the notice of its end is there and only has to be delivered."""
    chain = plain_bench.begin_chain()
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    plain_bench.deliver_all()
    plain_bench.settle(plain_bench.claim_one())
    plain_bench.after((BLOCKER_CHECK_MS + ENDED_TTL_MS) / 1000)
    assert not plain_bench.chain_state(chain).known
    assert plain_bench.claim(queue=MAILS) == []
    plain_bench.deliver_all()
    assert plain_bench.claim_one(queue=MAILS).id == report.id


@pytest.mark.promise("CHAIN-2")
def test_a_wait_that_cannot_reach_its_chain_ends_however_often_it_tries(plain_bench: Bench) -> None:
    chain = plain_bench.begin_chain()
    report = plain_bench.publish(queue=MAILS, after_chains=[chain])
    for _ in range(12):
        plain_bench.claim(queue=MAILS)
        plain_bench.after(OUTGOING_TTL_MS / 12_000)
    plain_bench.claim(queue=MAILS)
    plain_bench.deliver_outgoing(MAILS)
    assert plain_bench.stored(report.id, queue=MAILS).reason == "blocker_failed"


@pytest.mark.promise("CHAIN-1", "STORE-1")
def test_names_of_clients_that_stopped_waiting_are_removed(plain_bench: Bench, inside: Inside) -> None:
    published = plain_bench.publish()
    for number in range(50):
        plain_bench.watch(published.id, f"waiter-{number}")
        plain_bench.after(WAITER_TTL_MS / 1000 / 10)
    assert inside.client.zcard(inside.key(f"waiters:{published.id}")) <= 10


@pytest.mark.promise("CHAIN-1", "STORE-1")
def test_a_plain_message_has_a_state_only_if_a_client_waits_for_it(plain_bench: Bench, inside: Inside) -> None:
    awaited, other = plain_bench.publish(), plain_bench.publish()
    plain_bench.watch(other.id)
    assert "state" not in inside.names()
    plain_bench.watch(awaited.id, "anna")
    assert inside.client.hkeys(inside.key("state")) == [awaited.id.encode()]
    inside.check()
    lease = plain_bench.claim_one()
    assert (lease.id, lease.token, lease.chain) == (awaited.id, 1, None)
    assert plain_bench.settle_batch([plain_bench.settlement(one) for one in (lease, plain_bench.claim_one())]) == [
        "done",
        "done",
    ]
    assert plain_bench.woken[QUEUE] == ["anna"]
    assert plain_bench.watch(awaited.id) == Watched(None, "done")
    assert plain_bench.watch(other.id) == Watched(None)


# ---- foreign keys --------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-1")
@pytest.mark.parametrize("kind", ["chain", "watchers", "blockers"])
def test_a_publish_does_not_write_to_foreign_keys(plain_bench: Bench, inside: Inside, kind: str) -> None:
    chain = plain_bench.begin_chain()
    draft = plain_bench.draft(after_chains=[chain])
    owner = draft.id if kind == "blockers" else chain.rpartition("/")[2]
    key = inside.key(f"{kind}:{owner}")
    inside.client.set(key, "not ours")
    before = inside.snapshot()
    with pytest.raises(ForeignData, match=f"{kind}:{owner}"):
        plain_bench.publish_drafts([draft])
    assert inside.snapshot() == before


@pytest.mark.promise("STORE-1")
def test_messages_of_a_chain_with_a_foreign_key_still_end(plain_bench: Bench, inside: Inside) -> None:
    chain = plain_bench.begin_chain(priority=9)
    awaited = plain_bench.publish()
    blocked = plain_bench.publish(after_chains=[chain])
    plain_bench.watch(awaited.id, "anna")
    first = chain.rpartition("/")[2]
    foreign = [f"{kind}:{first}" for kind in ("chain", "watchers", "waiters:chain")]
    foreign += [f"waiters:{awaited.id}", f"end:{awaited.id}", f"blockers:{blocked.id}"]
    for name in foreign:
        inside.client.delete(inside.key(name))
        inside.client.rpush(inside.key(name), "not ours")
    with pytest.raises(ForeignData, match="chain:"):
        plain_bench.chain_state(chain, "anna")
    with pytest.raises(ForeignData, match="waiters:"):
        plain_bench.watch(awaited.id, "anna")
    notice = Notice("n", "ended", QUEUE, chain, chain)
    with pytest.raises(ForeignData, match="chain:"):
        plain_bench.run(plain_bench.store.arrive(QUEUE, [notice]))
    completed = Notice("n", "completed", QUEUE, chain, blocked.chain_id)
    with pytest.raises(ForeignData, match="blockers:"):
        plain_bench.run(plain_bench.store.arrive(QUEUE, [completed]))
    for lease in plain_bench.claim_all():
        assert plain_bench.settle(lease) == "done"
    assert plain_bench.cancel(blocked.id) == "cancelled"
    for name in foreign:
        assert inside.client.lrange(inside.key(name), 0, -1) == [b"not ours"]
    inside.check()
    plain_bench.check_invariants()
