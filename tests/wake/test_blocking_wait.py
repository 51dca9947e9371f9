"""Blocking waits of idle workers: when they begin, what ends them, and where there are none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests import waiting
from tests.servers.valkey_setups import client_of
from tests.worker.harness import Harness
from waypost import Waypost
from waypost.operations import receive
from waypost.testing.servers import EmbeddedServer, RedisServer
from waypost.values import Claimed
from waypost.views import Observed
from waypost.wake.wakeups import BLOCKING_WAITS_MAX, Wakeups

#: Less than the safety poll of these tests, which would otherwise find what no notification announced.
WAIT_SECONDS_MAX = 20.0
until = partial(waiting.until, seconds=WAIT_SECONDS_MAX)


@pytest.fixture(autouse=True)
def _no_poll_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later than a test waits for anything, and sooner than a lease that began in it ends: a lease that would end
    # before the next poll keeps a worker from its blocking wait.
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", 1.5 * WAIT_SECONDS_MAX)
    # The copies of its own polls that a worker receives are none of the notifications counted here.
    monkeypatch.setattr(Wakeups, "listen_to_own_polls", lambda self, name: None)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["valkey", "redis_server"])
def server(request: pytest.FixtureRequest) -> EmbeddedServer:
    found: EmbeddedServer = request.getfixturevalue(request.param)
    return found


class Waits:
    """A worker's client, a publisher, and what the server reports about its blocked clients."""

    def __init__(self, harness: Harness, other: Waypost, raw: Any, namespace: str) -> None:
        self.harness = harness
        self.other = other
        self.raw = raw
        self.namespace = namespace
        self.started: list[Any] = []
        self.polls: list[Observed] = []

    def handled(self, queue: str = "orders", **options: Any) -> None:
        @self.harness.handler(queue, **options)
        async def handle(body: Any) -> None:
            self.started.append(body)

    def blocked(self) -> list[dict[str, str]]:
        """The clients that are in a blocking read."""
        return [client for client in self.raw.client_list() if "b" in client["flags"]]

    def until_blocked(self, count: int = 1) -> None:
        """Wait until `count` loops are in a blocking wait."""
        assert until(lambda: len(self.blocked()) == count, f"{count} blocking waits")

    def notifications(self) -> int:
        """Return how many notifications the server has published."""
        return int(self.raw.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"])

    def unread(self) -> list[str]:
        """Lists with unblocks that no blocking read has returned yet."""
        return list(self.raw.scan_iter(match=f"{{{self.namespace}:*}}:unblock:*", count=1000))


@pytest.fixture(params=["sync", "async"])
def waits(request: pytest.FixtureRequest, server: EmbeddedServer, namespace: str) -> Iterator[Waits]:
    polls: list[Observed] = []

    def on_event(event: Observed) -> None:
        if event.event == "polled":
            polls.append(event)

    with (
        client_of(server) as raw,
        Harness(request.param, server.url, namespace=namespace, on_event=on_event) as harness,
        Waypost(server.url, namespace=namespace) as other,
    ):
        made = Waits(harness, other, raw, namespace)
        made.polls = polls
        yield made
        assert until(lambda: not made.blocked(), "an end of all waits")
        assert not made.unread()
        for queue in other.queues():
            assert other.ledger(queue).balance == 0


@pytest.mark.promise("WAKE-1", "WAKE-2")
def test_an_idle_worker_waits_in_the_server_and_needs_no_notification(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        waits.until_blocked()
        before = waits.notifications()
        for number in range(5):
            waits.until_blocked()
            assert waits.other.stats("orders").sleepers == 1
            waits.other.publish("orders", number)
            assert until(lambda n=number: n in waits.started, "the start")  # type: ignore[misc]
        assert waits.notifications() == before
    assert waits.started == list(range(5))


@pytest.mark.promise("LEASE-11", "WAKE-2")
def test_a_stop_unblocks_it_and_nothing_is_left_behind(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        waits.until_blocked()
    assert waits.other.stats("orders").sleepers == 0
    assert waits.other.publish("orders", 1).status == "queued"
    assert waits.other.ledger("orders").ready == 1
    assert waits.harness.run().handled == 1


@pytest.mark.promise("WAKE-2")
def test_a_worker_with_messages_under_way_is_notified(waits: Waits) -> None:
    may_end = threading.Event()

    @waits.harness.handler("orders", concurrency=4)
    def handle(body: int) -> None:
        waits.started.append(body)
        may_end.wait(20)

    with waits.harness.working():
        waits.until_blocked()
        waits.other.publish("orders", 1)
        assert until(lambda: waits.started == [1], "the start")
        assert until(lambda: waits.other.stats("orders").sleepers == 1, "room for more")
        assert not waits.blocked()
        before = waits.notifications()
        waits.other.publish("orders", 2)
        assert until(lambda: waits.started == [1, 2], "the second start")
        assert waits.notifications() > before
        may_end.set()
        waits.until_blocked()


@pytest.mark.promise("TIMER-2", "WAKE-5")
def test_a_worker_sleeps_until_a_timer_on_its_loop_and_not_in_a_blocking_wait(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        waits.until_blocked()
        waits.other.publish("orders", "timer", delay=0.5)
        assert until(lambda: not waits.blocked(), "the end of the wait")
        assert until(lambda: waits.started == ["timer"], "the start of the timer")
        waits.until_blocked()


@pytest.mark.promise("LEASE-7", "WAKE-5")
@pytest.mark.parametrize("lease", [None, 1.4])
def test_there_is_no_blocking_wait_for_what_would_be_lost_or_late(waits: Waits, lease: float | None) -> None:
    waits.other.configure("orders", lease=lease)
    waits.handled()
    with waits.harness.working():
        assert until(lambda: waits.other.stats("orders").sleepers == 1, "a sleeper")
        assert not waits.blocked()
        waits.other.publish("orders", 1)
        assert until(lambda: waits.started == [1], "the start")
        before = len(waits.polls)
        waits.other.publish("elsewhere", 1, delay=0.6)
        assert until(lambda: waits.other.stats("elsewhere").next_due_in == timedelta(0), "the time")
        assert len(waits.polls) <= before + 2


@pytest.mark.promise("WAKE-3")
def test_a_client_has_a_few_blocking_waits_and_the_others_share_the_subscription(waits: Waits) -> None:
    queues = [f"orders-{number}" for number in range(BLOCKING_WAITS_MAX + 2)]
    for queue in queues:
        waits.handled(queue)
    with waits.harness.working():
        waits.until_blocked(BLOCKING_WAITS_MAX)
        for queue in queues:
            assert until(lambda q=queue: waits.other.stats(q).sleepers == 1, "a sleeper")  # type: ignore[misc]
            waits.other.publish(queue, queue)
        assert until(lambda: sorted(waits.started) == sorted(queues), "all starts")
        waits.until_blocked(BLOCKING_WAITS_MAX)


@pytest.mark.promise("WAKE-2")
def test_when_the_memory_of_sleepers_is_gone_the_worker_unblocks_itself(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        waits.until_blocked()
        waits.raw.delete(f"{{{waits.namespace}:orders}}:sleepers")
        waits.other.publish("orders", 1)
        assert until(lambda: waits.started == [1], "the start")
        waits.until_blocked()


@pytest.mark.promise("LEASE-14")
def test_scripts_that_the_server_forgot_are_loaded_again(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        for number in range(3):
            waits.until_blocked()
            waits.raw.script_flush()
            waits.other.publish("orders", number)
            assert until(lambda n=number: n in waits.started, "the start")  # type: ignore[misc]
        waits.until_blocked()


@pytest.mark.promise("LEASE-14", "STORE-4")
def test_a_connection_that_is_cut_in_a_blocking_wait_costs_nothing(waits: Waits) -> None:
    waits.handled()
    with waits.harness.working():
        for number in range(3):
            waits.until_blocked()
            waits.raw.client_kill_filter(_id=waits.blocked()[0]["id"])
            waits.other.publish("orders", number)
            assert until(lambda n=number: n in waits.started, "the start")  # type: ignore[misc]
    assert waits.other.ledger("orders").done == 3


@pytest.mark.promise("WAKE-1")
def test_a_user_without_the_right_to_block_is_notified(server: EmbeddedServer, namespace: str) -> None:
    polls: list[Observed] = []
    started: list[int] = []
    with client_of(server) as raw:
        raw.execute_command("ACL", "SETUSER", "hasty", "on", "nopass", "~*", "&*", "+@all", "-blpop")
        url = f"{server.scheme}://hasty:any@127.0.0.1:{server.port}"
        with Waypost(url, namespace=namespace, on_event=polls.append) as post:

            @post.handler("orders")
            async def handle(body: int) -> None:
                started.append(body)

            with post.worker():
                for number in range(5):
                    assert until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
                    post.publish("orders", number)
                    assert until(lambda n=number: n in started, "the start")  # type: ignore[misc]
                assert not [client for client in raw.client_list() if "b" in client["flags"]]
    assert len([event for event in polls if event.event == "polled"]) < 30


def test_there_are_no_blocking_waits_where_the_store_does_not_wake_sleepers() -> None:
    assert not Wakeups(None, "shop").reserve_blocking_wait()
    own = Wakeups(None, "shop", by_store=True)
    assert [own.reserve_blocking_wait() for _ in range(BLOCKING_WAITS_MAX + 1)] == [True] * BLOCKING_WAITS_MAX + [False]
    own.release_blocking_wait()
    assert own.reserve_blocking_wait()


@pytest.mark.promise("LEASE-2")
@pytest.mark.parametrize(
    ("leased", "lease_ms", "seconds", "late"),
    [(True, 30_000, 19.0, False), (True, 30_000, 21.0, True), (False, 30_000, 99.0, False), (True, None, 99.0, False)],
)
def test_an_answer_after_two_thirds_of_a_lease_is_late(
    leased: bool, lease_ms: int | None, seconds: float, late: bool
) -> None:
    claimed = Claimed([object()] if leased else [], None, None, None, False, 0, lease_ms)  # type: ignore[list-item]
    assert receive.is_late(claimed, seconds) is late
