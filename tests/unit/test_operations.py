"""The flows alone: no connection, and a counter as the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any, TypeVar

import pytest

from tests.unit.clients import Fault, ShakyExecutor, ShakyStore
from waypost import Message, NoRetry, codec, errors
from waypost.identity import Session
from waypost.operations import manage, publish, receive
from waypost.operations.flow import ClientContext, Flow, ReplayWindows, Sleep, Together, drive, drive_async
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, POLL_FIRST_SECONDS, REPLAY_MAX
from waypost.store.port import Call, Draft, Woken
from waypost.testing.clock import ClockTime
from waypost.values import Claimed, Continuation

T = TypeVar("T")


class FlowRunner:
    """Runs flows on a clock of its own: a `Sleep` only advances it."""

    def __init__(self, store: Any, *, retry_budget: float = 120.0) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.woken: list[dict[str, list[str]]] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.executor = store.connect(start_timeout=1)
        self.context = ClientContext(
            store,
            session=Session(ClockTime()),
            worker="here",
            retry_budget=retry_budget,
            wake=self.woken.append,
            monotonic=lambda: self.now,
        )

    def run(self, call: Call[T]) -> T:
        result: T = self.executor.run(call)
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = self.executor.run_many(calls)
        return results

    def close(self) -> None:
        self.executor.close()

    def play(self, flow: Flow[T]) -> T:
        return drive(self, self._timed(flow))

    def _timed(self, flow: Flow[T]) -> Flow[T]:
        """The same flow without its pauses."""
        try:
            step = next(flow)
            while True:
                if isinstance(step, Sleep):
                    self.slept.append(step.seconds)
                    self.now += step.seconds
                    self.on_sleep()
                    step = flow.send(None)
                    continue
                try:
                    result = yield step
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


# ---- drivers -------------------------------------------------------------------------------------------------


def test_both_drivers_run_the_same_steps() -> None:
    store = ShakyStore()

    def flow() -> Flow[list[Any]]:
        queues = yield store.queues()
        yield Sleep(0)
        many = yield Together(store.pause(name) for name in ("a", "b"))
        try:
            yield store.publish("a", [None], None)
        except AttributeError as error:
            return [queues, many, type(error)]
        return []

    async def awaited() -> list[Any]:
        return await drive_async(await store.connect_async(start_timeout=1), flow())

    assert drive(store.connect(start_timeout=1), flow()) == [[], [True, True], AttributeError]
    assert asyncio.run(awaited()) == [["a", "b"], [False, False], AttributeError]


class InterruptedFlow(Generator[Any, Any, None]):
    """A flow in a thread that is interrupted when the flow has returned a step, before that is run."""

    def __init__(self, flow: Flow[None]) -> None:
        self.flow = flow

    def send(self, value: Any) -> Any:
        self.flow.send(value)
        raise KeyboardInterrupt

    def throw(self, *error: Any) -> Any:
        return self.flow.throw(*error)


def test_an_interrupt_between_two_steps_ends_the_flow() -> None:
    ended: list[bool] = []

    def flow() -> Flow[None]:
        try:
            yield Sleep(0)
        finally:
            ended.append(True)

    interrupted = InterruptedFlow(flow())
    with pytest.raises(KeyboardInterrupt):
        drive(ShakyStore().connect(start_timeout=1), interrupted)
    assert ended == [True]


# ---- the retry budget ----------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-14")
def test_pauses_grow_from_ten_milliseconds_to_five_seconds_within_the_budget() -> None:
    store = ShakyStore(faults=["refuse"] * 10_000)
    runner = FlowRunner(store)
    with pytest.raises(errors.StoreUnavailable, match="within the retry budget of 120 s"):
        runner.play(runner.context.attempt(store.queues()))
    assert 0 < runner.slept[0] <= BACKOFF_FIRST_SECONDS
    assert max(runner.slept) <= BACKOFF_MAX_SECONDS
    assert max(runner.slept) > BACKOFF_MAX_SECONDS / 2
    assert runner.now == pytest.approx(120)


@pytest.mark.promise("LEASE-14", "SEE-6")
@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (["cut", "refuse"], errors.OutcomeUnknown),
        (["refuse", "cut"], errors.OutcomeUnknown),
        (["refuse", "refuse"], errors.StoreUnavailable),
    ],
)
def test_a_call_that_may_have_arrived_once_stays_unknown(faults: list[Fault], kind: type[Exception]) -> None:
    store = ShakyStore(faults=faults + ["refuse"] * 1000)
    runner = FlowRunner(store, retry_budget=1)
    with pytest.raises(kind) as caught:
        runner.play(runner.context.attempt(store.pause("orders")))
    assert isinstance(caught.value.__cause__, errors.StoreUnavailable | errors.OutcomeUnknown)


def test_an_answer_that_is_an_error_is_not_repeated() -> None:
    store = ShakyStore(faults=[errors.StoreFull("no room")])
    runner = FlowRunner(store)
    with pytest.raises(errors.StoreFull):
        runner.play(runner.context.attempt(store.pause("orders")))
    assert runner.slept == []


# ---- replay windows--------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-3")
def test_an_operation_under_way_never_falls_out_of_the_replay_window() -> None:
    session = Session()
    replay_windows = ReplayWindows(session)
    first = replay_windows.begin("orders")
    others = [replay_windows.begin("orders") for _ in range(2 * REPLAY_MAX)]
    by_session: dict[bytes, list[int]] = {}
    for operation in [first, *others]:
        by_session.setdefault(operation.session, []).append(operation.number)
    assert len(by_session) == 3
    assert all(max(numbers) - min(numbers) < REPLAY_MAX for numbers in by_session.values())
    assert replay_windows.begin("invoices").session == session.id
    for operation in [first, *others]:
        replay_windows.end("orders", operation)
    assert replay_windows.begin("orders").session == session.id


def test_a_publish_that_waits_for_its_connection_is_answered_after_hundreds_of_others() -> None:
    store = ShakyStore(faults=["cut"])
    runner = FlowRunner(store)
    options = publish.PublishOptions()
    slow = publish.publish(runner.context, "orders", "slow", options)
    call = next(slow)
    with pytest.raises(errors.OutcomeUnknown) as lost:
        runner.run(call)  # type: ignore[arg-type]
    assert isinstance(slow.throw(lost.value), Sleep)
    for n in range(3 * REPLAY_MAX):
        runner.play(publish.publish(runner.context, "orders", n, options))
    repeated = slow.send(None)
    with pytest.raises(StopIteration) as ended:
        slow.send(runner.run(repeated))  # type: ignore[arg-type]
    assert ended.value.value.status == "queued"
    assert runner.play(runner.context.attempt(store.stats("orders"))).ledger.published == 3 * REPLAY_MAX + 1


# ---- batches -------------------------------------------------------------------------------------------------


def test_a_batch_is_encoded_while_it_is_sent() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    encoded: list[int] = []
    seen: list[int] = []

    class Watching(ShakyExecutor):
        def run(self, call: Call[T]) -> T:
            seen.append(len(encoded))
            return super().run(call)

    runner.executor = Watching(store)
    bodies = (encoded.append(n) or n for n in range(1500))  # type: ignore[func-returns-value]
    assert len(runner.play(publish.publish_many(runner.context, "orders", bodies, publish.PublishOptions()))) == 1500
    assert seen == [512, 1024, 1500]


@pytest.mark.promise("PUB-2")
@pytest.mark.parametrize("pulls", [0, 3])
def test_an_executor_that_gives_up_as_a_whole_does_not_hide_earlier_waves(pulls: int) -> None:
    store = ShakyStore()
    runner = FlowRunner(store, retry_budget=0)

    class GivesUp(ShakyExecutor):
        waves = 0

        def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
            self.waves += 1
            if self.waves == 1:
                return super().run_many(calls)
            _ = list(islice(calls, pulls))
            raise errors.StoreUnavailable("gone")

    runner.executor = GivesUp(store)
    bodies = range(512 * 70)
    with pytest.raises(errors.PartialPublish) as caught:
        runner.play(publish.publish_many(runner.context, "orders", bodies, publish.PublishOptions()))
    assert isinstance(caught.value.cause, errors.StoreUnavailable)
    known = [published is not None for published in caught.value.results]
    assert known == [True] * 512 * 64 + [False] * 512 * 6


def test_a_publish_names_the_sleepers_to_wake() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    runner.play(publish.publish(runner.context, "orders", 1, publish.PublishOptions()))
    assert runner.woken == [{"orders": ["*"]}]


@pytest.mark.promise("PUB-7")
def test_a_blocked_publisher_finds_the_room_that_a_settle_makes() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    runner.play(manage.configure(runner.context, "orders", {"max_pending": 4, "overload": "block"}))
    options = publish.PublishOptions(timeout=10)

    def work() -> None:
        message = runner.play(receive_now(runner))
        assert message is not None
        runner.play(receive.finish(runner.context, message, None, NoRetry()))

    runner.on_sleep = work
    results = runner.play(publish.publish_many(runner.context, "orders", range(20), options))
    assert len(results) == 20
    assert runner.play(runner.context.attempt(store.stats("orders"))).ledger.balance == 0


def receive_now(runner: FlowRunner) -> Flow[Message[Any] | None]:
    return receive.receive(runner.context, "orders", 0, None)


# ---- waiting -------------------------------------------------------------------------------------------------


@pytest.mark.promise("TIMER-3")
def test_polling_adapts_from_fifty_milliseconds_to_the_safety_poll() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    assert runner.play(receive.receive(runner.context, "orders", 60, None)) is None
    assert runner.now == pytest.approx(60)
    assert runner.slept[0] <= POLL_FIRST_SECONDS < runner.slept[1] <= 2 * POLL_FIRST_SECONDS
    assert all(seconds <= 5 for seconds in runner.slept)
    assert len(runner.slept) < 30


@pytest.mark.promise("WAKE-5")
@pytest.mark.parametrize(
    ("claimed", "least", "most"),
    [
        (Claimed([], 20, None, None, False, 0), 0.02, 0.02),
        (Claimed([], None, 30, None, False, 0), 0.03, 0.03),
        (Claimed([], 30, 20, None, False, 0), 0.02, 0.02),
        (Claimed([], 0, 0, 30, False, 0), 0.03, 0.03),
        # The rate of one group: timers and leases of others come first.
        (Claimed([], 20, None, 9000, False, 0, grouped=True), 0.02, 0.02),
        (Claimed([], 9000, None, 30, False, 0, grouped=True), 0.03, 0.03),
        (Claimed([], 0, None, None, False, 0), 0.001, 0.001),
        (Claimed([], 0, 0, None, True, 0), 0.04, 0.05),
        (Claimed([], 9000, None, None, False, 0), 0.04, 0.05),
    ],
)
def test_a_nap_ends_at_the_next_due_time_of_the_store(claimed: Claimed, least: float, most: float) -> None:
    assert least <= receive.Nap().seconds(claimed, None) <= most
    assert receive.Nap().seconds(claimed, 0.0005) == 0.0005


def test_a_due_time_without_a_message_does_not_make_a_worker_spin() -> None:
    nap = receive.Nap()
    pauses = [nap.seconds(Claimed([], 0, 0, None, False, 0), None) for _ in range(10)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == POLL_FIRST_SECONDS


@pytest.mark.promise("LEASE-6")
def test_an_interrupted_claim_is_found_by_the_next_receive() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    runner.play(publish.publish(runner.context, "orders", 1, publish.PublishOptions()))
    flow = receive_now(runner)
    runner.run(next(flow))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())
    message = runner.play(receive_now(runner))
    assert message is not None
    assert message.deliveries == 1


@pytest.mark.parametrize("later", [0, 10_000])
def test_a_lost_claim_is_forgotten_when_the_store_has_forgotten_it(later: float) -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    operation = runner.context.replay_windows.begin("orders")
    runner.context.add_lost_claim("orders", operation)
    runner.now += later
    assert runner.play(receive_now(runner)) is None
    assert store.ran.count("claim") == (2 if later == 0 else 1)
    assert runner.context.take_lost_claim("orders") is None


# ---- continuations on stores that cannot span queues ---------------------------------------------------------


class OutgoingStore(ShakyStore):
    """Keeps continuations until they are forwarded, as a store with a slot per queue must."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[Continuation] = []

    def outgoing(self, queue: str, limit: int) -> Any:
        return self._call("outgoing", lambda: list(self.kept[:limit]))

    def forwarded(self, queue: str, ids: list[str]) -> Any:
        def forget() -> None:
            self.kept = [next_one for next_one in self.kept if next_one.id not in ids]

        return self._call("forwarded", forget)

    def _call(self, name: str, step: Callable[[], Any]) -> Any:
        from waypost.store.memory.store import ModelCall

        return ModelCall(name, lambda now: step())


def continuation(number: int, queue: str, key: str | None = None) -> Continuation:
    message_id = f"{number:024d}"
    envelope = codec.make_envelope(message_id, codec.encode_body(number))
    return Continuation(message_id, queue, envelope, key)


@pytest.mark.promise("CHAIN-2")
def test_a_continuation_arrives_once_however_often_it_is_sent() -> None:
    store = OutgoingStore()
    runner = FlowRunner(store)
    store.kept = [continuation(1, "a", "k"), continuation(2, "b"), continuation(3, "a", "k"), continuation(4, "a")]
    kept = list(store.kept)
    assert runner.play(deliver_outgoing(runner.context, "orders")) == 4
    assert store.kept == []
    store.kept = kept
    assert runner.play(deliver_outgoing(runner.context, "orders")) == 4
    ledgers = [runner.play(runner.context.attempt(store.stats(queue))).ledger for queue in ("a", "b")]
    assert [(ledger.ready, ledger.published) for ledger in ledgers] == [(2, 2), (1, 1)]


def test_a_continuation_that_cannot_be_forwarded_is_left_for_a_later_claim(caplog: pytest.LogCaptureFixture) -> None:
    store = OutgoingStore(faults=["refuse", None, "cut"])
    runner = FlowRunner(store)
    store.kept = [continuation(1, "a"), continuation(2, "b")]
    with caplog.at_level(logging.WARNING, "waypost"):
        assert runner.play(deliver_outgoing(runner.context, "orders")) == 0
        # Retries of one target are not those of another.
        assert runner.play(deliver_outgoing(runner.context, "orders")) == 1
    assert [vars(record)["event"] for record in caplog.records] == ["outgoing_delayed"] * 2
    assert ([next_one.queue for next_one in store.kept], runner.slept) == (["a"], [])
    assert runner.play(deliver_outgoing(runner.context, "orders")) == 1
    assert runner.play(runner.context.attempt(store.stats("a"))).ledger.published == 1


def test_a_claim_that_reports_leftovers_sends_them() -> None:
    store = OutgoingStore()
    runner = FlowRunner(store)
    store.kept = [continuation(1, "a")]
    flow = receive_now(runner)
    next(flow)
    assert flow.send(Claimed([], None, None, None, False, 1)).name == "outgoing"  # type: ignore[union-attr]
    assert flow.send(store.kept).name == "publish"  # type: ignore[union-attr]
    assert flow.send(Woken([], {})).name == "forwarded"  # type: ignore[union-attr]


# ---- redrive and purge ---------------------------------------------------------------------------------------


@pytest.mark.promise("DEAD-2")
@pytest.mark.parametrize(
    ("rate", "size", "seconds"),
    [(None, 512, 0), ("100/s", 10, 0.1), ("60/m", 1, 1.0), ("1000000/s", 512, 512 / 1_000_000), ("1/h", 1, 3600)],
)
def test_a_rate_becomes_small_steps(rate: str | None, size: int, seconds: float) -> None:
    pace = manage._pace(rate)
    assert pace[0] == size
    assert pace[1] == pytest.approx(seconds)


def test_a_redrive_pauses_between_its_steps() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    drafts = [Draft(id, b"") for id in runner.context.session.message_ids(25)]
    operation = runner.context.replay_windows.begin("orders")
    runner.run(store.publish("orders", drafts, operation))
    runner.play(manage.configure(runner.context, "orders", {"lease": None}))
    bury_all(store)
    redriven = runner.play(manage.redrive(runner.context, "orders", ids=(), reason=None, limit=None, rate="100/s"))
    assert (len(redriven.moved), redriven.more) == (25, False)
    assert runner.slept == pytest.approx([0.1, 0.1])


def bury_all(store: ShakyStore) -> None:
    model = store.inner._queues["orders"]
    for record in model.messages.values():
        record.state, record.reason, record.ended_ms = "dead", "rejected", 1


def test_a_redrive_stops_where_all_that_is_left_stays_dead() -> None:
    store = ShakyStore()
    runner = FlowRunner(store)
    operation = runner.context.replay_windows.begin("orders")
    first, second = runner.context.session.message_ids(2)
    runner.run(store.publish("orders", [Draft(first, b"", "k")], operation))
    bury_all(store)
    store.inner._queues["orders"].keys.clear()
    runner.run(store.publish("orders", [Draft(second, b"", "k")], runner.context.replay_windows.begin("orders")))
    redriven = runner.play(manage.redrive(runner.context, "orders", ids=[first], reason=None, limit=None, rate=None))
    assert (redriven.moved, redriven.duplicates) == ([], [first])
