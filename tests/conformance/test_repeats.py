"""Clients whose calls come late or twice: after a freeze, a suspended machine, a clone, a clock that was set back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from tests.unit.clients import MODES, open_client
from waypost.errors import OperationTooOld, OutcomeUnknown, PartialPublish
from waypost.identity import OPERATIONS_MAX
from waypost.policy import REPLAY_TTL_MS
from waypost.store.port import Call
from waypost.testing.bench import StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock

T = TypeVar("T")
LATE_SECONDS = REPLAY_TTL_MS / 1000 + 1
CHUNK = 512


class SteppedClock(ManualClock):
    """A store's clock that can be set back."""

    back_ms = 0

    def __call__(self) -> int:
        return super().__call__() - self.back_ms


class LossyStore:
    """A store whose replies to chosen verbs are lost, each once; `on_loss` is called before the client goes on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.lost: list[str] = []
        self.on_loss: Callable[[], object] = lambda: None
        self.sent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *, start_timeout: float) -> Any:
        return LossyExecutor(self, self.inner.connect(start_timeout=start_timeout))

    async def connect_async(self, *, start_timeout: float) -> Any:
        return AsyncLossyExecutor(self, await self.inner.connect_async(start_timeout=start_timeout))

    def lose(self, call: Call[Any]) -> None:
        """Raise if the reply to this call is to be lost."""
        if call.name in self.lost:
            self.lost.remove(call.name)
            self.on_loss()
            raise OutcomeUnknown("the reply was lost")


class LossyExecutor:
    def __init__(self, store: LossyStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    def run(self, call: Call[T]) -> T:
        self.store.sent.append(call.name)
        result: T = self.inner.run(call)
        self.store.lose(call)
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            try:
                results.append(self.run(call))
            except Exception as error:
                results.append(error)
        return results

    def close(self) -> None:
        self.inner.close()


class AsyncLossyExecutor(LossyExecutor):
    async def run(self, call: Call[T]) -> T:  # type: ignore[override]
        self.store.sent.append(call.name)
        result: T = await self.inner.run(call)
        self.store.lose(call)
        return result

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:  # type: ignore[override]
        results: list[T | Exception] = []
        for call in calls:
            try:
                results.append(await self.run(call))  # type: ignore[arg-type]
            except Exception as error:
                results.append(error)
        return results

    async def close(self) -> None:  # type: ignore[override]
        await self.inner.close()


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
def store(make_store: StoreMaker, clock: SteppedClock, namespace: str) -> LossyStore:
    return LossyStore(make_store(clock, namespace))


@pytest.fixture(params=MODES)
def post(request: pytest.FixtureRequest, store: LossyStore) -> Any:
    with open_client(request.param, store=store) as client:
        yield client


def session_of(post: Any) -> Any:
    return getattr(post, "post", post)._session


def clone(post: Any, copy: Any) -> None:
    """Copy the session of one client to another, like a snapshot of its machine."""
    session, copied = session_of(post), session_of(copy)
    copied.id, copied._mark, copied._counter = session.id, session._mark, session._counter
    copied._numbers = dict(session._numbers)


# ---- late ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-18", "PUB-3")
def test_a_publisher_that_froze_does_not_publish_again(post: Any, store: LossyStore, clock: SteppedClock) -> None:
    post.publish("orders", "before")
    store.lost, store.on_loss = ["publish"], lambda: clock.advance(LATE_SECONDS)
    with pytest.raises(OperationTooOld, match="check the queue") as refusal:
        post.publish("orders", "frozen")
    assert refusal.value.outcome == "unknown"
    ledger = post.ledger("orders")
    assert (ledger.published, ledger.balance) == (2, 0)
    post.publish("orders", "after")
    assert post.ledger("orders").published == 3


@pytest.mark.promise("LEASE-18", "PUB-2")
def test_a_batch_that_froze_names_the_part_with_unknown_outcome(
    post: Any, store: LossyStore, clock: SteppedClock
) -> None:
    store.lost, store.on_loss = ["publish"], lambda: clock.advance(LATE_SECONDS)
    with pytest.raises(PartialPublish) as partial:
        post.publish_many("orders", range(2 * CHUNK))
    assert isinstance(partial.value.cause, OperationTooOld)
    assert [published is None for published in partial.value.results] == [True] * CHUNK + [False] * CHUNK
    assert post.ledger("orders").published == 2 * CHUNK


@pytest.mark.promise("LEASE-18", "LEASE-6")
def test_a_settle_that_froze_settles_once(post: Any, store: LossyStore, clock: SteppedClock) -> None:
    post.publish("orders", 1)
    with post.receive("orders") as message:
        store.lost, store.on_loss = ["settle"], lambda: clock.advance(LATE_SECONDS)
    assert message.settled == "lost"
    ledger = post.ledger("orders")
    assert (ledger.done, ledger.balance) == (1, 0)


@pytest.mark.promise("LEASE-18", "LEASE-6")
def test_a_claim_that_froze_claims_anew_when_its_leases_have_ended(
    post: Any, store: LossyStore, clock: SteppedClock
) -> None:
    post.publish("orders", 1)
    store.lost, store.on_loss = ["claim"], lambda: clock.advance(LATE_SECONDS)
    with post.receive("orders", wait=30) as message:
        assert message.deliveries == 2
    ledger = post.ledger("orders")
    assert (ledger.done, ledger.expired, ledger.unexplained) == (1, 1, 0)


@pytest.mark.promise("LEASE-18")
def test_the_first_call_after_a_long_sleep_costs_one_round_trip_more(
    post: Any, store: LossyStore, clock: SteppedClock
) -> None:
    post.publish("orders", 1)
    # The machine was suspended: a day has passed at the store, and none by the client's monotonic clock.
    clock.advance(86_400)
    store.sent.clear()
    post.publish("orders", 2)
    post.publish("orders", 3)
    assert store.sent == ["publish", "publish", "publish"]
    assert post.ledger("orders").published == 3


@pytest.mark.promise("LEASE-18")
def test_a_store_whose_clock_was_set_back_costs_one_round_trip_more(
    post: Any, store: LossyStore, clock: SteppedClock
) -> None:
    post.publish("orders", 1)
    clock.back_ms = 3_600_000
    store.sent.clear()
    post.publish("orders", 2)
    post.publish_many("orders", [3, 4])
    assert store.sent == ["publish", "publish", "publish"]
    assert post.ledger("orders").published == 4


# ---- cloned ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-18", "PUB-3")
@pytest.mark.parametrize("mode", MODES)
def test_clones_publish_all_that_they_confirm(mode: str, store: LossyStore, caplog: pytest.LogCaptureFixture) -> None:
    with open_client(mode, store=store) as post, open_client(mode, store=store) as copy:
        post.publish("orders", "warm")
        clone(post, copy)
        published = [one for n in range(5) for one in (post.publish("orders", n), copy.publish("orders", n))]
        assert {one.status for one in published} == {"queued"}
        assert len({one.id for one in published}) == 10
        assert session_of(post).id != session_of(copy).id
        assert post.ledger("orders").published == 11
        clone(post, copy)
        both = post.publish_many("orders", range(700)) + copy.publish_many("orders", range(700))
        assert len({one.id for one in both}) == 1400
        ledger = post.ledger("orders")
        assert (ledger.published, ledger.balance) == (1411, 0)
    # Behind pgbouncer the client also reports that nothing can wake it, and the first one of a Valkey server its risks.
    events = {getattr(record, "event", "") for record in caplog.records}
    assert events - {"wake_broken", "durability"} == {"session_renewed"}


@pytest.mark.promise("LEASE-18")
@pytest.mark.parametrize("mode", MODES)
def test_a_clone_that_makes_the_same_message_ids_overwrites_nothing(
    mode: str, store: LossyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_client(mode, store=store) as post, open_client(mode, store=store) as copy:
        post.publish("orders", "warm")
        clone(post, copy)
        # The other queue has no numbers yet, so only the ids of the messages can show that there are two.
        monkeypatch.setattr("time.time_ns", lambda: 1_800_000_000_000_000_000)
        session_of(copy).id = bytes(8)
        first = post.publish("bills", "first", chain=True)
        second = copy.publish("bills", "second", chain=True)
        assert first.id != second.id
        assert second.chain_id.endswith(second.id)
        assert {message.body for message in post.messages("bills")} == {"first", "second"}


@pytest.mark.promise("LEASE-18")
@pytest.mark.parametrize("mode", MODES)
def test_clones_receive_different_messages(mode: str, store: LossyStore) -> None:
    with open_client(mode, store=store) as post, open_client(mode, store=store) as copy:
        post.publish_many("orders", range(4))
        clone(post, copy)
        seen = []
        for client in (post, copy, post, copy):
            with client.receive("orders") as message:
                seen.append(message.body)
        assert sorted(seen) == [0, 1, 2, 3]
        assert post.ledger("orders").done == 4


# ---- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-18")
def test_a_session_ends_with_its_last_number_and_the_client_goes_on(post: Any) -> None:
    session = session_of(post)
    before = session.id
    post.publish("bills", 0)
    session._numbers["orders"] = OPERATIONS_MAX - 2
    for n in range(5):
        post.publish("orders", n)
    assert session.id != before
    with post.receive("orders") as message:
        assert message.body == 0
    post.publish("bills", 1)
    assert post.ledger("orders").published == 5
    assert post.ledger("bills").published == 2
