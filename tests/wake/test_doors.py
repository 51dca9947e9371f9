"""Idle workers that wait at the server: how they get there, what calls them away, and who stays outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.wake.conftest import until
from tests.worker.harness import Harness
from waypost import Waypost
from waypost.message import Claimed, Observed
from waypost.operations import receive
from waypost.testing.servers import EmbeddedServer, RedisServer
from waypost.testing.setups import client_of
from waypost.wake.wakeups import DOORS_MAX, Wakeups


@pytest.fixture(autouse=True)
def _no_poll_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", 600.0)
    # With its echo, a poll of the worker is carried by the server too, and is none of the notifications counted here.
    monkeypatch.setattr(Wakeups, "listen_to_echo", lambda self, name: None)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["valkey", "redis_server"])
def server(request: pytest.FixtureRequest) -> EmbeddedServer:
    found: EmbeddedServer = request.getfixturevalue(request.param)
    return found


class Doors:
    """A worker's client, a publisher, and the server's own words about who waits."""

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

    def waiting(self) -> list[dict[str, str]]:
        """The clients that the server holds back."""
        return [client for client in self.raw.client_list() if "b" in client["flags"]]

    def stands(self, count: int = 1) -> None:
        """Wait until so many loops stand at their doors."""
        assert until(lambda: len(self.waiting()) == count, f"{count} at the door")

    def words(self) -> int:
        """How many words the server has carried."""
        return int(self.raw.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"])

    def keys(self) -> list[str]:
        """The doors at which somebody has knocked, and nobody stands yet."""
        return list(self.raw.scan_iter(match=f"{{{self.namespace}:*}}:door:*", count=1000))


@pytest.fixture(params=["sync", "async"])
def doors(request: pytest.FixtureRequest, server: EmbeddedServer, namespace: str) -> Iterator[Doors]:
    polls: list[Observed] = []

    def on_event(event: Observed) -> None:
        if event.event == "polled":
            polls.append(event)

    with (
        client_of(server) as raw,
        Harness(request.param, server.url, namespace=namespace, on_event=on_event) as harness,
        Waypost(server.url, namespace=namespace) as other,
    ):
        made = Doors(harness, other, raw, namespace)
        made.polls = polls
        yield made
        assert until(lambda: not made.waiting(), "an empty doorstep")
        assert not made.keys()
        for queue in other.queues():
            assert other.ledger(queue).balance == 0


@pytest.mark.promise("WAKE-1", "WAKE-2")
def test_an_idle_worker_waits_at_the_server_and_no_word_is_needed(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        doors.stands()
        before = doors.words()
        for number in range(5):
            doors.stands()
            assert doors.other.stats("orders").sleepers == 1
            doors.other.publish("orders", number)
            assert until(lambda n=number: n in doors.started, "the start")  # type: ignore[misc]
        assert doors.words() == before
    assert doors.started == list(range(5))


@pytest.mark.promise("LEASE-11", "WAKE-2")
def test_a_stop_calls_it_away_and_nothing_is_left_behind(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        doors.stands()
    assert doors.other.stats("orders").sleepers == 0
    assert doors.other.publish("orders", 1).status == "queued"
    assert doors.other.ledger("orders").ready == 1
    assert doors.harness.run().handled == 1


@pytest.mark.promise("WAKE-2")
def test_who_has_messages_under_way_is_told_by_a_word(doors: Doors) -> None:
    may_end = threading.Event()

    @doors.harness.handler("orders", concurrency=4)
    def handle(body: int) -> None:
        doors.started.append(body)
        may_end.wait(20)

    with doors.harness.working():
        doors.stands()
        doors.other.publish("orders", 1)
        assert until(lambda: doors.started == [1], "the start")
        assert until(lambda: doors.other.stats("orders").sleepers == 1, "room for more")
        assert not doors.waiting()
        before = doors.words()
        doors.other.publish("orders", 2)
        assert until(lambda: doors.started == [1, 2], "the second start")
        assert doors.words() > before
        may_end.set()
        doors.stands()


@pytest.mark.promise("TIMER-2", "WAKE-5")
def test_a_timer_is_slept_for_on_the_loop_and_not_at_the_door(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        doors.stands()
        doors.other.publish("orders", "timer", delay=0.5)
        assert until(lambda: not doors.waiting(), "the way back")
        assert until(lambda: doors.started == ["timer"], "the start of the timer")
        doors.stands()


@pytest.mark.promise("LEASE-7", "WAKE-5")
@pytest.mark.parametrize("lease", [None, 1.4])
def test_nobody_waits_at_the_door_for_what_would_be_lost_or_late_there(doors: Doors, lease: float | None) -> None:
    doors.other.configure("orders", lease=lease)
    doors.handled()
    with doors.harness.working():
        assert until(lambda: doors.other.stats("orders").sleepers == 1, "a sleeper")
        assert not doors.waiting()
        doors.other.publish("orders", 1)
        assert until(lambda: doors.started == [1], "the start")
        before = len(doors.polls)
        doors.other.publish("elsewhere", 1, delay=0.6)
        assert until(lambda: doors.other.stats("elsewhere").next_due_ms == 0, "the time")
        assert len(doors.polls) <= before + 2


@pytest.mark.promise("WAKE-3")
def test_a_client_has_a_few_doors_and_the_others_share_the_subscription(doors: Doors) -> None:
    queues = [f"orders-{number}" for number in range(DOORS_MAX + 2)]
    for queue in queues:
        doors.handled(queue)
    with doors.harness.working():
        doors.stands(DOORS_MAX)
        for queue in queues:
            assert until(lambda q=queue: doors.other.stats(q).sleepers == 1, "a sleeper")  # type: ignore[misc]
            doors.other.publish(queue, queue)
        assert until(lambda: sorted(doors.started) == sorted(queues), "all starts")
        doors.stands(DOORS_MAX)


@pytest.mark.promise("WAKE-2")
def test_when_the_memory_of_sleepers_is_gone_the_door_is_opened_from_inside(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        doors.stands()
        doors.raw.delete(f"{{{doors.namespace}:orders}}:sleepers")
        doors.other.publish("orders", 1)
        assert until(lambda: doors.started == [1], "the start")
        doors.stands()


@pytest.mark.promise("LEASE-14")
def test_a_server_that_forgot_its_scripts_is_told_them_again(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        for number in range(3):
            doors.stands()
            doors.raw.script_flush()
            doors.other.publish("orders", number)
            assert until(lambda n=number: n in doors.started, "the start")  # type: ignore[misc]
        doors.stands()


@pytest.mark.promise("LEASE-14", "STORE-4")
def test_a_connection_that_is_cut_at_the_door_costs_nothing(doors: Doors) -> None:
    doors.handled()
    with doors.harness.working():
        for number in range(3):
            doors.stands()
            doors.raw.client_kill_filter(_id=doors.waiting()[0]["id"])
            doors.other.publish("orders", number)
            assert until(lambda n=number: n in doors.started, "the start")  # type: ignore[misc]
    assert doors.other.ledger("orders").done == 3


@pytest.mark.promise("WAKE-1")
def test_a_user_who_may_not_block_is_told_by_words(server: EmbeddedServer, namespace: str) -> None:
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


def test_there_are_no_doors_where_the_store_tells_nobody() -> None:
    assert not Wakeups(None, "shop").take_door()
    own = Wakeups(None, "shop", by_store=True)
    assert [own.take_door() for _ in range(DOORS_MAX + 1)] == [True] * DOORS_MAX + [False]
    own.give_door()
    assert own.take_door()


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
