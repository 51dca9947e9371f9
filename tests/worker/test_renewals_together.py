"""The leases of several queues are renewed in one turn: together where a store can, otherwise at the same time."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from tests.waiting import WAIT_SECONDS_MAX
from tests.worker.harness import Harness
from waypost import Waypost
from waypost.errors import AccessDenied, OperationTooOld, OutcomeUnknown, StoreUnavailable, WaypostError
from waypost.operations.flow import Sleep, Together
from waypost.worker.renewer import CONNECTIONS_MAX, Renewal, Renewer, extend_together

QUEUES = [f"queue-{number}" for number in range(6)]


@pytest.mark.promise("LEASE-3")
def test_one_turn_renews_the_leases_of_all_queues_at_the_same_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    at_once = harness.post.store.capabilities.runs_together
    groups = 1 if at_once else CONNECTIONS_MAX
    # Calls that are made one after the other break it.
    barrier = threading.Barrier(groups)
    extend = Renewer._extend

    def meet(self: Renewer, renewals: list[Renewal], seconds: float) -> Any:
        barrier.wait(WAIT_SECONDS_MAX)
        calls.append([one.holder.queue for one in renewals])
        return extend(self, renewals, seconds)

    with ExitStack() as stack:
        messages = []
        for queue in QUEUES:
            harness.configure(queue, lease=600)
            harness.publish(queue, queue)
            messages.append(stack.enter_context(harness.receive(queue, wait=5)))
        renewer = harness.post._blocks._renewer
        ends = [message._lease_until for message in messages]
        monkeypatch.setattr(Renewer, "_extend", meet)
        renewer._renew(list(renewer._holders))
        assert len(calls) == groups
        assert sorted(queue for call in calls for queue in call) == QUEUES
        assert all(message._lease_until > end for message, end in zip(messages, ends, strict=True))
        assert not any(message.lease_lost for message in messages)
    for queue in QUEUES:
        assert harness.ledger(queue).done == 1


class FakeHolder:
    """What the leases of one message belong to."""

    lease_seconds = 3.0

    def __init__(self, queue: str) -> None:
        self.queue = queue


def started(post: Waypost, *, budget: float = 30.0, count: int = 2) -> tuple[Any, Together]:
    """The flow of a turn with so many queues, and its first flush."""
    renewals = [Renewal(FakeHolder(queue), []) for queue in QUEUES[:count]]  # type: ignore[arg-type]
    post.publish(QUEUES[0], 1)  # so that the time of the store is known
    flow = extend_together(post._context, renewals, budget)
    return flow, next(flow)  # type: ignore[return-value]


def finish(flow: Any, answers: list[Any]) -> Any:
    """The result of a flow that ends with these answers."""
    with pytest.raises(StopIteration) as stop:
        flow.send(answers)
    return stop.value.value


@pytest.fixture
def post() -> Any:
    with Waypost("memory://renewals") as made:
        yield made


def test_only_what_got_no_answer_is_sent_again(post: Waypost) -> None:
    flow, first = started(post)
    assert len(list(first.calls)) == 2
    assert isinstance(flow.send([["ok"], OutcomeUnknown("no answer")]), Sleep)
    again = flow.send(None)
    assert len(list(again.calls)) == 1
    assert finish(flow, [["cancel"]]) == [["ok"], ["cancel"]]


def test_without_an_answer_in_time_only_its_own_renewal_fails(post: Waypost) -> None:
    flow, _ = started(post, budget=0.0)
    replies = finish(flow, [StoreUnavailable("refused"), ["lost"]])
    assert isinstance(replies[0], StoreUnavailable)
    assert replies[1] == ["lost"]


def test_a_refused_number_is_replaced_at_once(post: Waypost) -> None:
    flow, _ = started(post, count=1)
    again = flow.send([OperationTooOld("too old")])
    assert isinstance(again, Together)
    assert finish(flow, [["ok"]]) == [["ok"]]


def test_an_answer_that_is_an_error_ends_its_renewal(post: Waypost) -> None:
    flow, _ = started(post)
    replies = finish(flow, [AccessDenied("not allowed"), ["ok"]])
    assert isinstance(replies[0], WaypostError)
    assert replies[1] == ["ok"]


def test_a_connection_that_fails_fails_for_all(post: Waypost) -> None:
    flow, _ = started(post, budget=0.0)
    with pytest.raises(StopIteration) as stop:
        flow.throw(StoreUnavailable("no connection"))
    assert [type(reply) for reply in stop.value.value] == [StoreUnavailable, StoreUnavailable]


def test_numbers_are_given_back_whatever_happens(post: Waypost) -> None:
    flow, _ = started(post)
    flow.close()
    windows = post._context.replay_windows._windows
    assert all(not window.under_way for queue in QUEUES[:2] for window in windows[queue])
