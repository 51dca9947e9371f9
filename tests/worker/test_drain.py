"""Stopping: nothing is lost, messages that did not run use no delivery, and the report lists what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import AsyncWaypost, Message, Waypost
from waypost.errors import ConfigurationError, ForkedClient, QueueDrained
from waypost.operations.flow import ClientContext, Flow, Sleep
from waypost.views import Observed
from waypost.worker.consumer import Consumer
from waypost.worker.signals import StopSignals


@pytest.mark.promise("LEASE-11", "LEASE-5")
def test_messages_that_have_not_started_are_released_at_once_without_using_a_delivery(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As much is claimed ahead as by a worker whose handlers are fast.
    monkeypatch.setattr(Consumer, "_room", lambda self: 6 - self.in_flight)
    go_on = threading.Event()
    started: list[int] = []

    @harness.handler("orders", concurrency=1)
    def handle(number: int) -> None:
        started.append(number)
        assert go_on.wait(20)

    harness.publish_many("orders", range(10))
    worker = harness.post.worker()
    harness.done(worker.start())
    until(lambda: started and harness.ledger("orders").leased == 6)
    reports: list[Any] = []
    stopping = threading.Thread(target=lambda: reports.append(harness.done(worker.stop(20))))
    stopping.start()
    # While the first one still runs.
    until(lambda: harness.ledger("orders").leased == 1)
    ledger = harness.ledger("orders")
    assert (ledger.ready, ledger.released) == (9, 5)
    assert [stored.deliveries for stored in harness.peek("orders", 10)] == [0] * 9
    go_on.set()
    stopping.join(20)
    assert (reports[0].complete, reports[0].handled, reports[0].released) == (True, 1, 5)
    assert started == [0]
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("LEASE-11")
def test_an_async_handler_past_the_deadline_is_cancelled_and_its_message_released(harness: Harness) -> None:
    inside = threading.Event()

    @harness.handler("orders")
    async def handle(body: str) -> None:
        inside.set()
        await asyncio.Event().wait()

    harness.publish("orders", "one")
    worker = harness.post.worker()
    harness.done(worker.start())
    assert inside.wait(20)
    report = harness.done(worker.stop(0.05))
    assert (report.cancelled, report.released, report.running) == (1, 1, 0)
    (stored,) = harness.peek("orders")
    assert stored.deliveries == 0


@pytest.mark.promise("LEASE-11")
def test_a_thread_past_the_deadline_keeps_its_lease_and_is_settled_when_it_ends(harness: Harness) -> None:
    harness.configure("orders", lease=1)
    inside, go_on = threading.Event(), threading.Event()

    @harness.handler("orders")
    def handle(body: str) -> None:
        inside.set()
        assert go_on.wait(20)

    harness.publish("orders", "one")
    worker = harness.post.worker()
    harness.done(worker.start())
    assert inside.wait(20)
    report = harness.done(worker.stop(0.05))
    assert (report.running, report.complete) == (1, False)
    # Its lease is renewed, so no other worker can claim it.
    with harness.receive("orders", wait=1.5) as message:
        assert message is None
    go_on.set()
    until(lambda: harness.ledger("orders").done == 1)
    assert worker.report().complete


@pytest.mark.promise("LEASE-11")
def test_a_drained_client_publishes_and_receives_no_more(harness: Harness) -> None:
    @harness.handler("orders")
    async def handle(body: int) -> None: ...

    early = harness.post.worker()
    harness.publish("orders", 1)
    assert harness.drain(timeout=0).complete
    harness.publish("orders", 2)
    assert harness.drain(timeout=5).complete
    with pytest.raises(QueueDrained):
        harness.publish("orders", 3)
    with pytest.raises(QueueDrained):
        harness.publish_many("orders", [3])
    with pytest.raises(QueueDrained):
        harness.post.worker()
    with pytest.raises(QueueDrained):
        harness.done(early.run(until_empty=True, signals=False))
    assert list(harness.consume("orders")) == []
    assert harness.drain(timeout=5).complete
    assert harness.ledger("orders").ready == 2


@pytest.mark.promise("LEASE-11")
def test_a_handler_that_still_runs_may_publish_while_its_client_drains(harness: Harness) -> None:
    inside, go_on = threading.Event(), threading.Event()
    results: list[Any] = []

    if harness.mode == "sync":

        @harness.handler("orders")
        def blocks(body: str) -> None:
            inside.set()
            assert go_on.wait(20)
            results.append(harness.post.publish("mails", body).status)
    else:

        @harness.handler("orders")
        async def awaits(body: str) -> None:
            inside.set()
            assert await asyncio.to_thread(go_on.wait, 20)
            results.append((await harness.post.publish("mails", body)).status)

    harness.publish("orders", "one")
    harness.done(harness.post.worker().start())
    assert inside.wait(20)
    reports: list[Any] = []
    draining = threading.Thread(target=lambda: reports.append(harness.drain(timeout=10)))
    draining.start()
    until(lambda: harness.post._gate.drained)
    with pytest.raises(QueueDrained):
        harness.publish("mails", "from outside")
    go_on.set()
    draining.join(20)
    assert results == ["queued"]
    assert (reports[0].handled, reports[0].complete) == (1, True)
    assert harness.ledger("mails").ready == 1


@pytest.mark.promise("LEASE-11")
def test_a_drain_waits_for_a_block_that_has_a_message_and_ends_one_that_waits(harness: Harness) -> None:
    got, reports = threading.Event(), []
    go_on = threading.Event()

    def block() -> None:
        with harness.receive("orders", wait=None) as message:
            assert message is not None
            got.set()
            assert go_on.wait(20)
        with harness.receive("orders", wait=None) as message:
            assert message is None

    harness.publish("orders", 1)
    thread = threading.Thread(target=block)
    thread.start()
    assert got.wait(20)
    draining = threading.Thread(target=lambda: reports.append(harness.drain(timeout=20)))
    draining.start()
    until(lambda: harness.drain(timeout=0).running == 1)
    go_on.set()
    thread.join(20)
    draining.join(20)
    assert reports[0].complete
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("LEASE-11")
def test_a_quiet_worker_finishes_its_claimed_messages_and_claims_no_more(harness: Harness) -> None:
    go_on, inside = threading.Event(), threading.Event()

    @harness.handler("orders", concurrency=1)
    def handle(body: int) -> None:
        inside.set()
        assert go_on.wait(20)

    harness.publish("orders", 1)
    with harness.working() as worker:
        assert inside.wait(20)
        worker.quiet()
        harness.publish("orders", 2)
        go_on.set()
        until(lambda: harness.ledger("orders").done == 1)
        assert worker.is_running
        assert harness.ledger("orders").ready == 1


def test_a_worker_runs_once_at_a_time_and_may_run_again(harness: Harness) -> None:
    @harness.handler("orders")
    async def handle(body: int) -> None: ...

    worker = harness.post.worker()
    for number in range(2):
        harness.publish("orders", number)
        harness.done(worker.start())
        with pytest.raises(ConfigurationError, match="already running"):
            harness.done(worker.start())
        until(lambda: harness.ledger("orders").done > number)  # noqa: B023 - it is called within this turn
        harness.done(worker.stop())
        assert not worker.is_running


def test_stopping_a_background_worker_raises_the_error_that_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Consumer) -> None:
        raise RuntimeError("enough")

    monkeypatch.setattr(Consumer, "_claim_loop", broken)
    with Waypost("memory://") as post:

        @post.handler("orders")
        async def handle(body: int) -> None: ...

        worker = post.worker().start()
        until(lambda: not worker.is_running)
        with pytest.raises(RuntimeError, match="enough"):
            worker.stop()


# ---- signals and forks ---------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-11")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_stops_the_worker_and_the_second_has_its_default_action(name: str) -> None:
    number = getattr(signal, name)
    untouched = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    # The process that runs the tests may ignore it (nohup, a shell's background).
    before = signal.signal(number, untouched)
    stops: list[str] = []
    try:
        with StopSignals(stops.append):
            signal.raise_signal(number)
            assert signal.getsignal(number) == untouched
    finally:
        signal.signal(number, before)
    assert stops == [name]


@pytest.mark.promise("LEASE-11")
def test_a_signal_that_has_a_handler_is_left_to_it() -> None:
    mine: list[int] = []
    stops: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    try:
        with StopSignals(stops.append):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert mine == [signal.SIGTERM]
    assert stops == []


@pytest.mark.promise("LEASE-13")
def test_a_client_and_a_worker_of_the_parent_refuse_to_work_in_a_child(url: str, namespace: str) -> None:
    post = Waypost(url, namespace=namespace)

    @post.handler("orders")
    async def handle(message: Message[Any]) -> None: ...

    with post:
        post.publish("orders", 1)
        worker = post.worker()
        child = os.fork()
        if child == 0:
            refusals = 0
            try:
                for refused in (worker.run, post.worker, lambda: post.publish("orders", 2)):
                    try:
                        refused()
                    except ForkedClient:
                        refusals += 1
            finally:
                os._exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert worker.run(until_empty=True, signals=False).handled == 1


@pytest.mark.promise("LEASE-11", "LEASE-16", "LEASE-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_drain_waits_for_a_claim_in_progress_whose_message_goes_back_without_using_a_delivery(mode: str) -> None:
    draining: list[threading.Thread] = []
    reports: list[tuple[Any, int]] = []

    def drain() -> None:
        report = other.drain(timeout=20)
        reports.append((report, watching.ledger("orders").leased))

    def on_event(event: Observed) -> None:
        if event.event == "claimed" and not draining:
            # The drain begins while the claim has its message, and has not returned it.
            draining.append(threading.Thread(target=drain))
            draining[0].start()
            until(lambda: other._gate.drained)
            draining[0].join(0.2)  # it does not end

    with Waypost(f"memory://drained-claim-{mode}") as watching:
        watching.publish("orders", 1)
        with Harness(mode, None, store=watching.store, on_event=on_event) as harness:
            # The drain of an async client may run on any event loop: here the loop of the claim is held up.
            other = harness.post if mode == "sync" else SimpleNamespace(
                drain=lambda timeout: asyncio.run(harness.post.drain(timeout)), _gate=harness.post._gate
            )  # fmt: skip
            with harness.receive("orders") as message:
                assert message is None
            draining[0].join(20)
        ((report, leased),) = reports
        assert (report.complete, leased) == (True, 0)
        ledger = watching.ledger("orders")
        assert (ledger.ready, ledger.released) == (1, 1)
        (stored,) = watching.peek("orders")
        assert stored.deliveries == 0


@pytest.mark.promise("LEASE-11")
def test_a_signal_stops_the_worker_although_its_line_cannot_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise RuntimeError("reentrant call")

    with Waypost("memory://") as post:

        @post.handler("orders")
        def handle(number: int) -> None: ...

        worker = post._make_worker(None, 30.0)
        requests: list[bool] = []
        monkeypatch.setattr(worker, "request_stop", lambda: requests.append(True))
        monkeypatch.setattr("waypost.worker.worker.log", SimpleNamespace(info=fail))
        with pytest.raises(RuntimeError, match="reentrant"):
            worker._on_signal("SIGTERM")
        assert requests


@pytest.mark.promise("LEASE-11")
@pytest.mark.parametrize("request_made", ["quiet", "stop"])
def test_what_is_requested_while_a_worker_connects_counts_also_in_its_second_run(request_made: str) -> None:
    async def run() -> None:
        async with AsyncWaypost("memory://") as post:

            @post.handler("orders")
            async def handle(body: int) -> None: ...

            worker = post.worker()
            await post.publish("orders", 1)
            assert (await worker.run(until_empty=True, signals=False)).handled == 1
            await post.publish("orders", 2)
            stops: list[asyncio.Task[Any]] = []

            def prepare(context: ClientContext) -> Flow[None]:
                if request_made == "quiet":
                    worker.quiet()
                else:
                    stops.append(asyncio.create_task(worker.stop()))
                yield Sleep(0.01)

            worker._prepare = prepare
            if request_made == "stop":
                assert (await worker.run(signals=False)).handled == 0
                assert (await stops[0]).handled == 0
            else:
                await worker.start()
                assert not worker.is_ready
                claiming = worker._consumers[0]._claiming
                assert claiming is not None
                await asyncio.wait_for(claiming, 20)
                assert (await worker.stop()).handled == 0
            assert (await post.ledger("orders")).ready == 1

    asyncio.run(run())


@pytest.mark.promise("LEASE-14")
def test_a_worker_that_cannot_start_stops_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise ConfigurationError("no part")

    def threads() -> set[int | None]:
        return {one.ident for one in threading.enumerate() if one.name in ("waypost-renewals", "waypost-lease-ends")}

    before = threads()
    with Waypost("memory://") as post:

        @post.handler("orders")
        def handle(number: int) -> None: ...

        worker = post._make_worker(None, 30.0)
        monkeypatch.setattr(worker, "_embed", fail)
        with pytest.raises(ConfigurationError, match="no part"):
            asyncio.run(worker.run(signals=False))
        until(lambda: threads() <= before)
        assert not worker.is_running
