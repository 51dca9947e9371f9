"""The sync and the async client have the same names, parameters, properties and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from waypost import AsyncWaypost, Waypost
from waypost.client.async_client import AsyncConsumed, AsyncReception
from waypost.client.sync_client import Consumed, Reception
from waypost.worker.sync_worker import SyncWorker
from waypost.worker.worker import Worker

#: The return types of the async client, and those of the sync client in their place.
SYNC_NAMES = {
    "SyncWorker": "Worker",
    "AsyncReception": "Reception",
    "AsyncConsumed": "Consumed",
    "AsyncIterator": "Iterator",
}
PAIRS = [(Waypost, AsyncWaypost), (Reception, AsyncReception), (Consumed, AsyncConsumed)]
#: The parts of a worker that its own moving parts call.
INNER = {"on_abort", "on_work", "poll_now", "heartbeat"}
#: Loops that end by an event in the sync client, and by cancellation in the async one.
LOOPS = {"run_promoter", "run_scheduler"}


def public(kind: type) -> dict[str, Any]:
    """Everything that a class offers, inherited or not."""
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def parameters(member: Any) -> list[tuple[str, Any, Any, str]]:
    return [
        (one.name, one.kind, one.default, str(one.annotation)) for one in inspect.signature(member).parameters.values()
    ]


def return_type(member: Any) -> str:
    text = str(inspect.signature(member).return_annotation)
    return re.sub("|".join(SYNC_NAMES), lambda found: SYNC_NAMES[found[0]], text)


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize(("blocking", "awaiting"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_clients_have_the_same_names_parameters_and_docstrings(blocking: type, awaiting: type) -> None:
    ours, theirs = public(blocking), public(awaiting)
    assert ours.keys() == theirs.keys()
    for name, member in ours.items():
        other = theirs[name]
        assert type(member) is type(other), name
        if name in LOOPS:
            assert [one for one in parameters(member) if one[0] != "stop"] == parameters(other), name
            continue
        if callable(member):
            assert parameters(member) == parameters(other), name
            assert return_type(member) == return_type(other), name
        assert inspect.getdoc(member) == inspect.getdoc(other), name


@pytest.mark.promise("FACE-1")
def test_every_public_name_of_the_clients_has_a_docstring() -> None:
    assert [name for name, member in public(Waypost).items() if not inspect.getdoc(member)] == []


@pytest.mark.promise("FACE-1")
def test_both_clients_are_built_in_the_same_way() -> None:
    assert parameters(Waypost.__init__) == parameters(AsyncWaypost.__init__)
    wanted = {"url", "client", "store", "namespace", "queues", "strict_queues", "middleware", "state", "on_event"}
    assert wanted <= {name for name, *_ in parameters(Waypost.__init__)}


@pytest.mark.promise("FACE-1")
def test_methods_that_do_io_are_coroutines_and_others_are_not() -> None:
    """Methods that only make something to wait with are plain on both clients."""
    plain = {name for name, member in vars(AsyncWaypost).items() if callable(member) and not _waits(member)}
    assert {name for name in plain if not name.startswith("_")} == {
        "consume", "dead_letters", "messages", "receive", "timers", "worker",
    }  # fmt: skip


def _waits(member: Any) -> bool:
    return inspect.iscoroutinefunction(member)


@pytest.mark.promise("FACE-1")
def test_the_workers_of_both_clients_have_the_same_methods() -> None:
    blocking, awaiting = public(SyncWorker), public(Worker)
    assert awaiting.keys() - blocking.keys() == INNER
    assert blocking.keys() <= awaiting.keys() | {"handlers", "name"}
    for name, member in blocking.items():
        if callable(member):
            theirs = [one for one in parameters(awaiting[name]) if one[0] != "on_started"]
            assert parameters(member) == theirs, name
            assert inspect.getdoc(member), name
