"""Wrong values for every argument of every public method: only our own errors are raised, and nothing is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import waypost
from tests.conformance.wrong_values import (
    CALLS,
    DECORATORS,
    SCHEDULED,
    WAITS,
    HostileError,
    calls,
    public_methods,
    wrong,
)
from tests.unit.clients import MODES, open_client
from waypost import AsyncWaypost, Message, Queue, Waypost, WaypostError, errors
from waypost.testing.bench import StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock

#: How many calls with several wrong values at once; a deeper run sets more.
DRAWS = int(os.environ.get("WAYPOST_FUZZ_DRAWS", "300"))


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def post(mode: str, make_store: StoreMaker) -> Iterator[Any]:
    store = make_store(ManualClock(), fresh_namespace())
    with open_client(mode, store=store, wake="poll") as client:
        client.save_schedule(**SCHEDULED, every=3600)
        client.configure("grouped", fair=True)
        yield client


def used(post: Any, method: str, given: dict[str, Any]) -> None:
    """Make a call and use its result: a listing is read, a block is entered."""
    if method == "use":
        post.use(*given.values())
    elif method == "receive":
        with post.receive(**given):
            pass
    else:
        answer = getattr(post, method)(**given)
        if hasattr(answer, "__next__"):
            for one in answer:
                if method == "consume":
                    one.done()


def check_works(post: Any) -> None:
    """Check that the ledgers balance, and that a message can be handled."""
    for queue in post.queues():
        ledger = post.ledger(queue)
        assert (ledger.balance, ledger.unexplained) == (0, 0), queue
    post.purge("fuzzed")
    published = post.publish("fuzzed", {"still": "works"})
    with post.receive("fuzzed") as message:
        assert (message.id, message.body) == (published.id, {"still": "works"})


@pytest.mark.promise("PUB-8")
def test_every_public_method_is_in_the_table() -> None:
    assert public_methods() == CALLS.keys() | DECORATORS.keys()


@pytest.mark.promise("PUB-8", "SEE-6")
def test_one_wrong_value_gives_one_of_our_errors(post: Any) -> None:
    foreign: list[str] = []
    for method, name, value, given in calls(CALLS):
        if name in WAITS and isinstance(value, int | float) and value is not True and 0 < value < 1:
            continue
        try:
            used(post, method, given)
        except HostileError:
            # The caller's own iterators and functions are run, and what they raise is the caller's.
            if name not in ("after", "bodies", "group", "ids", "key", "middleware", "names", "progress", "queues"):
                foreign.append(f"{method}({name}=a {type(value).__name__}): asked the value")
        except WaypostError as error:
            if len(str(error)) < 10:
                foreign.append(f"{method}({name}=a {type(value).__name__}): no text")
        except Exception as error:
            foreign.append(f"{method}({name}=a {type(value).__name__}): {type(error).__name__}: {error}"[:200])
    assert not foreign, "\n".join(foreign)
    check_works(post)


@pytest.mark.promise("PUB-8", "SEE-6")
def test_many_wrong_values_at_once_give_one_of_our_errors(post: Any) -> None:
    draw = random.Random(7)
    foreign: list[str] = []
    for _ in range(DRAWS):
        method = draw.choice(sorted(CALLS))
        required, others = CALLS[method]
        given = dict(required)
        for name in (*required, *draw.sample(sorted(others), draw.randint(0, min(3, len(others))))):
            if name not in WAITS and (name not in required or draw.random() < 0.2):
                given[name] = draw.choice(wrong())
        try:
            used(post, method, given)
        except (WaypostError, HostileError):
            continue
        except Exception as error:
            foreign.append(f"{method}({', '.join(given)}): {type(error).__name__}: {error}"[:200])
    assert not foreign, "\n".join(foreign)
    check_works(post)


@pytest.mark.promise("PUB-8", "SEE-6")
@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
def test_a_decorator_with_a_wrong_value_gives_one_of_our_errors(kind: Any) -> None:
    def work(body: Any) -> None:
        return None

    foreign: list[str] = []
    for method, name, value, given in calls(DECORATORS):
        try:
            getattr(kind("memory://"), method)(**given)(work)
        except (WaypostError, HostileError):
            continue
        except Exception as error:
            foreign.append(f"{method}({name}=a {type(value).__name__}): {type(error).__name__}: {error}"[:200])
    assert not foreign, "\n".join(foreign)


def _made() -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """Yield the objects and methods that an application calls directly, with their arguments."""
    with Waypost("memory://") as post:
        post.publish("fuzzed", "a body")
        with post.receive("fuzzed") as message:
            assert message is not None
            held = message
    return {
        "Queue": (lambda **given: Queue(**{"name": "q", "type": dict, **given}), ("name", "type")),
        "Retry": (waypost.Retry, ("after", "reason")),
        "Snooze": (lambda **given: waypost.Snooze(**{"after": 1, **given}), ("after",)),
        "Dead": (waypost.Dead, ("reason", "error")),
        "CatchUp": (waypost.CatchUp, ("max_catchup",)),
        "Exponential": (waypost.Exponential, ("attempts", "jitter", "total_cap", "first", "factor", "cap")),
        "Linear": (waypost.Linear, ("attempts", "jitter", "total_cap", "step", "cap")),
        "Constant": (waypost.Constant, ("attempts", "jitter", "total_cap", "pause")),
        "ByException": (lambda rule: waypost.ByException(rule, otherwise=waypost.NoRetry()), ("rule",)),
        "otherwise": (waypost.ByException, ("otherwise",)),
        "then": (
            lambda **given: Message("fuzzed", held._lease).then(**{"queue": "next", "body": 1, **given}),
            ("queue", "body", "key", "delay", "priority", "group", "headers", "correlation_id", "reply_to"),
        ),
        "reschedule": (lambda **given: Message("fuzzed", held._lease).reschedule(**given), ("delay",)),
        "keep_result": (
            lambda **given: Message("fuzzed", held._lease).keep_result(**{"value": 1, **given}), ("value", "ttl"),
        ),
        "retry": (lambda **given: Message("fuzzed", held._lease).retry(**given), ("after", "reason")),
        "snooze": (lambda **given: Message("fuzzed", held._lease).snooze(**given), ("after",)),
        "dead": (lambda **given: Message("fuzzed", held._lease).dead(**given), ("reason", "error")),
        "run": (lambda **given: Waypost("memory://").worker().run(**{"until_empty": True, "signals": False, **given}),
                ("until_empty", "signals", "timeout")),
        "stop": (lambda **given: Waypost("memory://").worker().stop(**given), ("timeout",)),
        "request_stop": (lambda **given: Waypost("memory://").worker().request_stop(**given), ("timeout",)),
    }  # fmt: skip


@pytest.mark.promise("PUB-8", "SEE-6")
@pytest.mark.parametrize("what", _made())
def test_what_is_made_or_decided_with_a_wrong_value_gives_one_of_our_errors(what: str) -> None:
    make, names = _made()[what]
    foreign: list[str] = []
    for name in names:
        for value in wrong():
            if (what, name) == ("run", "until_empty") and value is False:
                continue
            try:
                make(**{name: value})
            except WaypostError:
                continue
            except Exception as error:
                foreign.append(f"{what}({name}=a {type(value).__name__}): {type(error).__name__}: {error}"[:200])
    assert not foreign, "\n".join(foreign)


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
@pytest.mark.parametrize("decorator", ["handler", "cron", "every"])
def test_a_decorator_without_its_call_is_refused(kind: Any, decorator: str) -> None:
    post = kind("memory://")

    def work(body: Any) -> None:
        return None

    with pytest.raises(errors.ConfigurationError, match=f"@post.{decorator}.* above work"):
        getattr(post, decorator)(work)
    assert post.handlers == []


CONSTRUCTED = (
    "url", "client", "store", "namespace", "retry_budget", "start_timeout", "durability", "redact", "on_event", "clock",
    "queues", "strict_queues", "middleware", "wake",
)  # fmt: skip


@pytest.mark.promise("PUB-8", "SEE-6")
@pytest.mark.parametrize("kind", [Waypost, AsyncWaypost])
def test_a_client_is_built_or_refused_with_one_of_our_errors(kind: Any) -> None:
    foreign: list[str] = []
    for name in CONSTRUCTED:
        for value in wrong():
            given = {name: value} if name in ("url", "client", "store") else {"url": "memory://", name: value}
            try:
                kind(**given)
            except (WaypostError, HostileError):
                continue
            except Exception as error:
                foreign.append(f"{name}=a {type(value).__name__}: {type(error).__name__}: {error}"[:200])
    assert not foreign, "\n".join(foreign)


@pytest.mark.promise("PUB-8")
def test_an_unknown_option_is_named_with_those_that_are_close(post: Any) -> None:
    with pytest.raises(errors.UnknownOption, match="publish has no option 'dealy'; did you mean delay"):
        post.publish("fuzzed", 1, dealy=5)
    with pytest.raises(errors.UnknownOption, match="'prioritty'"):
        post.publish_many("fuzzed", [1], prioritty=5)
    with pytest.raises(errors.UnknownOption, match="save_schedule has no option 'crn'"):
        post.save_schedule("nightly", queue="fuzzed", crn="0 9 * * *")
    assert post.ledger("fuzzed").published == 0
