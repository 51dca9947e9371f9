"""Groups through both clients, the worker and the command line, on the memory store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.clients import MODES, open_client
from tests.waiting import WAIT_SECONDS_MAX
from waypost import Waypost
from waypost.errors import InvalidInput, InvalidPolicy
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.memory import MemoryStore
from waypost.store.memory.store import MemoryExecutor
from waypost.testing.clock import ManualClock


@pytest.fixture(params=MODES)
def post(request: pytest.FixtureRequest) -> Iterator[Any]:
    with open_client(str(request.param), store=MemoryStore(clock=ManualClock()), wake="poll") as client:
        yield client


@pytest.mark.promise("QUEUE-6", "QUEUE-7")
def test_groups_are_configured_paused_and_listed(post: Any) -> None:
    policy = post.configure("orders", fair=True, group_rate="5/m")
    assert (policy.fair, policy.group_rate, policy.order) == (True, "5/m", None)
    post.publish_many("orders", range(3), group="acme")
    assert post.configure_group("orders", "acme", weight=3, max_running=1)
    assert not post.configure_group("orders", "acme", weight=3)
    assert (post.pause_group("orders", "other"), post.pause_group("orders", "other")) == (True, False)
    with post.receive("orders"):
        acme, other = post.groups("orders").groups
        assert (acme.ready, acme.running, acme.weight, acme.limited_by) == (2, 1, 3, ["max_running"])
        assert acme.oldest == timedelta(0)
        assert (other.group, other.paused, other.ready) == ("other", True, 0)
    page = post.groups("orders", limit=1)
    assert [one.group for one in page.groups] == ["acme"]
    assert [one.group for one in post.groups("orders", limit=1, cursor=page.cursor).groups] == ["other"]
    assert post.resume_group("orders", "other")
    assert [one.group for one in post.groups("orders", group="acme").groups] == ["acme"]


@pytest.mark.promise("QUEUE-5")
def test_a_message_that_holds_its_group_can_be_skipped(post: Any) -> None:
    post.configure("orders", order="group")
    first = post.publish("orders", 1, group="acme")
    post.publish("orders", 2, group="acme")
    with post.receive("orders") as message:
        message.retry(after=60)
    with post.receive("orders") as message:
        assert message is None
    acme = post.groups("orders").groups[0]
    assert (acme.held_by, acme.held_state, acme.ready, acme.later) == (first.id, "delayed", 1, 1)
    assert (post.skip_held("orders", "acme"), post.skip_held("orders", "acme")) == (first.id, None)
    with post.receive("orders") as message:
        assert message.body == 2


@pytest.mark.promise("QUEUE-6", "QUEUE-7")
def test_the_listing_has_all_limits_that_a_group_is_at_and_the_running_message_that_holds_it(post: Any) -> None:
    post.configure("orders", order="group", group_max_pending=1, group_rate="1/m")
    first = post.publish("orders", 1, group="acme")
    with post.receive("orders"):
        post.publish("orders", 2, group="acme", delay=3600)
        (acme,) = post.groups("orders").groups
        assert (acme.held_by, acme.held_state) == (first.id, "leased")
        assert (acme.ready, acme.later, acme.limited_by) == (0, 1, ["rate", "max_pending"])
        assert acme.limited_until is not None


@pytest.mark.promise("QUEUE-6", "SEE-6")
def test_wrong_uses_of_groups_are_refused_with_the_way_out(post: Any) -> None:
    with pytest.raises(InvalidInput, match="fair=True"):
        post.groups("orders")
    post.configure("orders", fair=True)
    with pytest.raises(InvalidPolicy, match="needs a setting"):
        post.configure_group("orders", "acme")
    with pytest.raises(InvalidPolicy, match="weight"):
        post.configure_group("orders", "acme", weight=0)
    with pytest.raises(InvalidInput, match="limit"):
        post.groups("orders", limit=0)


@pytest.mark.promise("QUEUE-5")
@pytest.mark.parametrize("order", ["group", None])
def test_a_batch_for_an_ordered_queue_is_sent_chunk_by_chunk(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = list[int]()
    plain = MemoryExecutor.run_many

    def run_many(self: MemoryExecutor, calls: Any) -> Any:
        given = list(calls)
        flushes.append(sum(call.name == "publish" for call in given))
        return plain(self, given)

    monkeypatch.setattr(MemoryExecutor, "run_many", run_many)
    with Waypost(store=MemoryStore(), wake="poll") as post:
        post.configure("orders", order=order)
        post.publish_many("orders", range(2 * CHUNK_MESSAGES_MAX + 1), group="acme")
    assert max(flushes) == (1 if order else 3)


@pytest.mark.promise("QUEUE-6", "QUEUE-7")
def test_a_worker_claims_nothing_ahead_of_turns() -> None:
    handled, done = list[str](), threading.Event()
    with Waypost(store=MemoryStore()) as post:
        post.configure("orders", fair=True)

        @post.handler("orders", concurrency=2)
        def handle(body: str) -> None:
            handled.append(body)
            if len(handled) == 300:
                post.publish("orders", "quiet", group="quiet")
            if body == "quiet":
                done.set()

        post.publish_many("orders", ["noisy"] * 600, group="noisy")
        with post.worker():
            assert done.wait(WAIT_SECONDS_MAX)
    # Only what was claimed before it was published may come before it, and one of the other group.
    assert handled.index("quiet") <= 310


@pytest.mark.promise("QUEUE-6")
@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 3), (2, 5, 1), (7, 100)])
def test_no_group_gets_further_ahead_of_another_than_its_weight_and_one_message(weights: tuple[int, ...]) -> None:
    names = "abc"[: len(weights)]
    with Waypost(store=MemoryStore(), wake="poll") as post:
        post.configure("orders", fair=True, journal="off")
        for name, weight in zip(names, weights, strict=True):
            post.configure_group("orders", name, weight=weight)
            post.publish_many("orders", range(60), group=name)
        order = ""
        # Until the first of them has no more: as long as all of them can go on.
        while max((order.count(name) for name in names), default=0) < 60:
            with post.receive("orders") as message:
                assert message is not None
                order += message.group or ""
    for start in range(0, len(order), 7):
        for end in range(start + 1, len(order) + 1, 5):
            counts = [order.count(name, start, end) for name in names]
            for one, weight in zip(counts, weights, strict=True):
                for other, its_weight in zip(counts, weights, strict=True):
                    # A step is a whole number: a weight that does not divide it has up to a fiftieth more.
                    assert one / weight - other / its_weight <= (1 / weight + 1 / its_weight) * 1.03
