"""The sync and the async client have the same names, parameters, properties and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from typing import Any

import pytest

import waypost
from waypost import AsyncWaypost, Waypost, errors
from waypost.client import options
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
INNER = {"on_abort", "on_work", "poll_now", "heartbeat", "stop_queues"}
#: The keywords of methods that take them as a typed dictionary.
KEYWORDS = {name: kind for name, kind in vars(options).items() if typing.is_typeddict(kind)}
#: Methods whose other arguments are those of another one, which they name.
SAME_AS = {"publish_many": "publish"}
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


def named_arguments(member: Any) -> list[str]:
    """The arguments of a method; in place of `**options` the keywords that it takes."""
    found: list[str] = []
    for one in list(inspect.signature(member).parameters.values())[1:]:
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            found += KEYWORDS[re.sub(r"Unpack\[(\w+)\]", r"\1", str(one.annotation))].__annotations__
        else:
            found.append(one.name)
    return found


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost], ids=lambda kind: kind.__name__)
def test_every_public_method_has_a_docstring_that_names_its_arguments(kind: type) -> None:
    missing: dict[str, list[str]] = {}
    for name, member in [*public(kind).items(), ("__init__", kind)]:
        text = inspect.getdoc(member) or ""
        summary = text.partition("\n")[0]
        assert re.fullmatch(r"[A-Z].*\.", summary), name
        if callable(member):
            given = named_arguments(kind.__init__ if name == "__init__" else member)  # type: ignore[misc]
            left = [one for one in given if f"`{one}`" not in text and f"`{one}=" not in text]
            if left and name not in SAME_AS:
                missing[name] = left
    assert missing == {}


@pytest.mark.promise("SEE-6")
def test_errors_and_examples_in_docstrings_are_real() -> None:
    examples = 0
    for name, member in [*public(Waypost).items(), ("Waypost", Waypost)]:
        text = inspect.getdoc(member) or ""
        raised = re.findall(r"`(\w+)`", " ".join(re.findall(r"[Rr]aises? .*?(?:\.\s|$)", text, re.DOTALL)))
        unknown = [one for one in raised if one[0].isupper() and not hasattr(errors, one) and not hasattr(waypost, one)]
        assert unknown == [], name
        for block in re.findall(r"(?:\n\n|^)((?:    .*(?:\n|$)|\n(?=    ))+)", text):
            ast.parse(textwrap.dedent(block))
            examples += 1
    assert examples >= 12


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
        "consume", "dead_letters", "handler", "messages", "receive", "spark_job", "timers", "worker",
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
