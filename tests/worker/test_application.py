"""What an application passes to its client: state for handlers, middleware, the list of its queues."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from tests.unit.clients import MODES, open_client
from tests.waiting import until
from tests.worker import process_handlers
from tests.worker.harness import Harness
from waypost import AsyncWaypost, Dead, Message, Middleware, NoRetry, Outgoing, Published, Queue, Waypost
from waypost.errors import ConfigurationError, InvalidInput, UnknownQueue


@dataclass
class Order:
    id: int


class App:
    """The state of an application."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class AppInTests(App):
    """The replacement of the state in tests."""


# ---- the arguments of a handler ---------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_handlers_get_headers_and_state_where_a_parameter_is_annotated_so(
    url: str, namespace: str, is_async: bool
) -> None:
    app = AppInTests()
    with Harness("async" if is_async else "sync", url, namespace=namespace, state=app) as harness:
        assert harness.post.state is app

        async def awaits(state: App, order: Order, headers: Mapping[str, str], message: Message[Order]) -> None:
            state.seen.append((order.id, dict(headers), message.deliveries))

        def blocks(order: Order, application: App, message: Message[Order], headers: dict[str, str]) -> None:
            application.seen.append((order.id, dict(headers), message.deliveries))

        harness.handler("orders")(awaits if is_async else blocks)
        harness.publish("orders", {"id": 7}, headers={"from": "shop"})
        harness.publish("orders", {"id": 8})
        harness.run()
    assert sorted(app.seen) == [(7, {"from": "shop"}, 1), (8, {}, 1)]


@pytest.mark.promise("FACE-1")
def test_parameters_without_annotation_are_chosen_by_name_and_batches_get_lists() -> None:
    app = App()
    with Harness("sync", "memory://application-names", state=app) as harness:

        @harness.handler("orders", batch=10, concurrency=1)
        def handle(bodies, headers, messages, state) -> None:  # type: ignore[no-untyped-def]
            state.seen.append((bodies, headers, [message.id for message in messages]))

        published = [harness.publish("orders", number, headers={"n": str(number)}) for number in range(2)]
        harness.run()
    assert app.seen == [([0, 1], [{"n": "0"}, {"n": "1"}], [one.id for one in published])]


def test_an_annotation_wins_over_a_parameter_name() -> None:
    seen: list[Any] = []
    with Harness("sync", "memory://application-annotations", state={"a": "dict"}) as harness:

        @harness.handler("orders")
        def first(headers: Order) -> None:
            seen.append(headers)

        @harness.handler("states")
        def second(body: dict[str, int], state: dict[str, str]) -> None:
            seen.append((body, state))

        harness.publish("orders", {"id": 7})
        harness.publish("states", {"one": 1})
        harness.run()
    assert Order(7) in seen
    assert ({"one": 1}, {"a": "dict"}) in seen


def test_a_parameter_without_a_value_is_named_when_the_handler_is_registered() -> None:
    def wants_app(body: str, app: App) -> None: ...
    def wants_two(body: str, other: int) -> None: ...
    def keyword(body: str, *, message: Message[str]) -> None: ...
    def fine(body: str, message: Message[str], repeat: int = 3) -> None: ...

    without = Waypost("memory://")
    cases: list[tuple[Any, str]] = [(wants_app, "app"), (wants_two, "other"), (keyword, "message")]
    for function, name in cases:
        with pytest.raises(ConfigurationError, match=f"there is no value for the parameter '{name}'"):
            without.handler("orders")(function)
    with pytest.raises(ConfigurationError, match="give it one with state="):
        without.handler("orders")(wants_app)
    without.handler("orders")(fine)
    assert Waypost("memory://", state=AppInTests()).handler("orders")(wants_app) is wants_app


# ---- middleware ----------------------------------------------------------------------------------------------

entered: contextvars.ContextVar[str] = contextvars.ContextVar("entered", default="nothing")


@dataclass
class Noting(Middleware):
    """Notes when it is entered and left, in each of the four methods."""

    name: str
    notes: list[str] = field(default_factory=list)

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        self.notes.append(f"{self.name} publishes to {outgoing.queue}")
        return call_next(outgoing.with_headers({self.name: "was here"}))

    async def publish_async(
        self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
    ) -> list[Published]:
        self.notes.append(f"{self.name} publishes to {outgoing.queue}")
        return await call_next(outgoing.with_headers({self.name: "was here"}))

    def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
        self.notes.append(f"{self.name} in")
        entered.set(self.name)
        try:
            return call_next()
        finally:
            self.notes.append(f"{self.name} out")

    async def handle_async(self, messages: Sequence[Message[Any]], call_next: Callable[[], Awaitable[Any]]) -> Any:
        self.notes.append(f"{self.name} in")
        entered.set(self.name)
        await asyncio.sleep(0)
        try:
            return await call_next()
        finally:
            self.notes.append(f"{self.name} out")


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("is_async", [True, False], ids=["async-handler", "sync-handler"])
def test_middleware_wraps_publishes_and_handlers_the_first_outermost(
    harness: Harness, url: str, namespace: str, is_async: bool
) -> None:
    notes: list[str] = []
    middleware = [Noting("first", notes), Noting("second", notes)]
    with Harness(harness.mode, url, namespace=namespace, middleware=middleware) as noted:

        def note(message: Message[str]) -> None:
            notes.append(f"handled {message.body} {sorted(message.headers)} {entered.get()}")

        async def awaits(message: Message[str]) -> None:
            await asyncio.sleep(0)
            note(message)

        noted.handler("orders")(awaits if is_async else note)
        noted.publish("orders", "a", headers={"own": "1"})
        noted.run()
        assert notes == [
            "first publishes to orders", "second publishes to orders", "first in", "second in",
            "handled a ['first', 'own', 'second'] second", "second out", "first out",
        ]  # fmt: skip
        notes.clear()
        assert len(noted.publish_many("orders", (str(number) for number in range(3)))) == 3
        assert notes == ["first publishes to orders", "second publishes to orders"]
        noted.run()
        assert sum(note.startswith("handled") for note in notes) == 3


@pytest.mark.promise("LEASE-8", "LEASE-9")
def test_an_error_or_an_outcome_of_middleware_is_like_one_of_the_handler(
    harness: Harness, url: str, namespace: str
) -> None:
    calls: list[str] = []

    class Guard(Middleware):
        def decide(self, body: str) -> Dead | None:
            if body == "raise":
                raise KeyError("no entry")
            return Dead("turned away") if body == "dead" else None

        def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
            return self.decide(messages[0].body) or call_next()

        async def handle_async(self, messages: Sequence[Message[Any]], call_next: Callable[[], Awaitable[Any]]) -> Any:
            return self.decide(messages[0].body) or await call_next()

        def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
            if "never" in outgoing.bodies:
                raise PermissionError("not this")
            return call_next(outgoing)

        async def publish_async(
            self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
        ) -> list[Published]:
            return await call_next(outgoing) if "never" not in outgoing.bodies else self.publish(outgoing, list)  # type: ignore[arg-type]

    with Harness(harness.mode, url, namespace=namespace, middleware=[Guard()]) as guarded:

        @guarded.handler("orders", retry=NoRetry())
        def blocks(body: str) -> None:
            calls.append(body)

        @guarded.handler("mails", retry=NoRetry())
        async def awaits(body: str) -> None:
            calls.append(body)

        for queue in ("orders", "mails"):
            guarded.publish_many(queue, ["raise", "dead", "fine"])
        guarded.run()
        for queue in ("orders", "mails"):
            dead = {letter.body: (letter.reason, letter.error) for letter in guarded.dead_letters(queue)}
            assert dead == {"raise": ("retries_exhausted", "'no entry'"), "dead": ("turned away", None)}
        with pytest.raises(PermissionError, match="not this"):
            guarded.publish("orders", "never")
        assert guarded.ledger("orders").published == 3
    assert calls == ["fine", "fine"]


@pytest.mark.promise("FACE-1", "DEAD-1")
def test_a_body_that_cannot_be_read_is_undecodable_behind_middleware_too() -> None:
    with Harness("sync", "memory://application-undecodable", middleware=[Noting("first")]) as harness:

        @harness.handler("orders")
        async def awaits(order: Order) -> None: ...

        @harness.handler("mails")
        def blocks(order: Order) -> None: ...

        harness.publish("orders", {"id": "x"})
        harness.publish("mails", {"id": "x"})
        harness.run()
        for queue in ("orders", "mails"):
            assert [letter.reason for letter in harness.dead_letters(queue)] == ["undecodable"]


def test_sync_middleware_for_an_async_call_and_the_reverse_is_refused() -> None:
    class Blocks(Middleware):
        def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
            return call_next(outgoing)

    class Awaits(Middleware):
        async def handle_async(self, messages: Any, call_next: Any) -> Any:
            return await call_next()

    def blocks(body: str) -> None: ...
    async def awaits(body: str) -> None: ...

    with pytest.raises(ConfigurationError, match="Blocks has publish but not publish_async"):
        AsyncWaypost("memory://", middleware=[Blocks()])
    with pytest.raises(ConfigurationError, match="an instance of"):
        Waypost("memory://", middleware=[Blocks])  # type: ignore[list-item]
    post = Waypost("memory://", middleware=[Awaits(), Blocks()])
    post.handler("mails")(awaits)
    with pytest.raises(ConfigurationError, match=r"Awaits has handle_async but not handle, .* blocks"):
        post.handler("orders")(blocks)


def test_middleware_runs_in_the_thread_or_task_of_its_handler() -> None:
    places: list[str] = []

    class Places(Middleware):
        def handle(self, messages: Any, call_next: Any) -> Any:
            places.append(threading.current_thread().name)
            return call_next()

    with Waypost("memory://application-places", middleware=[Places()]) as post:

        @post.handler("orders")
        def handle(body: str) -> None:
            places.append(threading.current_thread().name)

        post.publish("orders", "one")
        post.worker().run(until_empty=True, signals=False)
    assert places[0] == places[1]
    assert places[0].startswith("waypost-orders")


# ---- strict queues -------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("mode", MODES)
def test_a_strict_client_refuses_queues_that_were_not_declared_and_names_close_ones(mode: str) -> None:
    orders = Queue("orders", Order)
    with open_client(mode, f"memory://strict-{mode}", queues=[orders, "mails"], strict_queues=True) as client:
        client.publish("orders", {"id": 1})
        client.publish(orders, Order(2))
        wrong = "ordres"
        refusals: list[Callable[[], Any]] = [
            lambda: client.publish(wrong, 1),
            lambda: client.publish_many(wrong, [1]),
            lambda: list(client.consume(wrong, wait=0)),
            lambda: client.configure(wrong, lease=5),
            lambda: client.pause(wrong),
            lambda: client.resume(wrong),
            lambda: client.cancel(wrong, key="a"),
            lambda: client.redrive(wrong),
            lambda: client.purge(wrong),
            lambda: client.handler(wrong)(lambda body: None),
            lambda: client.relay(wrong, to="memory://#elsewhere"),
            lambda: client.save_schedule("nightly", queue=wrong, every=60),
            lambda: client.trigger_schedule("theirs"),
            lambda: client.trigger_schedule("theirs", queue=wrong),
            lambda: client.pause_schedule("theirs"),
            lambda: client.resume_schedule("theirs"),
            lambda: client.remove_schedule("theirs"),
            lambda: client.journal_reader(wrong, "reader"),
            lambda: client.journal_forget(wrong, "reader"),
            lambda: client.journal_trim(wrong, 0),
        ]
        with open_client(mode, f"memory://strict-{mode}") as other:
            other.save_schedule("theirs", queue=wrong, every=60)
        for refusal in refusals:
            with pytest.raises(UnknownQueue, match=r"queue ordres was not declared.*Did you mean orders\?"):
                refusal()
        with pytest.raises(UnknownQueue, match="Declare it with queues="), client.receive("zebra"):
            pass
        assert client.stats(wrong).ledger.published == 0
        assert [(one.name, one.paused) for one in client.schedules()] == [("theirs", False)]
        assert client.save_schedule("nightly", queue="orders", every=60).queue == "orders"
        assert client.trigger_schedule("nightly").status == "queued"


@pytest.mark.promise("PUB-8")
def test_handlers_declare_their_queues_and_a_client_that_is_not_strict_accepts_any_name() -> None:
    post = Waypost("memory://strict-handlers", strict_queues=True)
    post.handler("orders")(lambda body: None)
    assert post.publish("orders", 1).status == "queued"
    with pytest.raises(UnknownQueue, match="Did you mean orders"):
        post.publish("order", 1)
    listed = Waypost("memory://strict-handlers", strict_queues=True, queues=["mails"])
    listed.handler(Queue("orders", Order))(lambda order: None)
    assert listed.publish("orders", {"id": 1}).status == "queued"
    with pytest.raises(UnknownQueue):
        listed.handler("mials")(lambda body: None)
    with pytest.raises(ConfigurationError, match="queues must be a list"):
        Waypost("memory://", queues="orders")
    assert Waypost("memory://strict-handlers", queues=["mails"]).publish("anything", 1).status == "queued"


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("mode", MODES)
def test_a_strict_client_refuses_to_send_on_to_a_queue_that_was_not_declared(mode: str) -> None:
    refused: list[str] = []
    url = f"memory://strict-then-{mode}"
    with Harness(mode, url, queues=["orders", "mails"], strict_queues=True) as client:

        @client.handler("orders", retry=NoRetry())
        def charge(body: int, message: Message[int]) -> None:
            message.then("mails", body)
            try:
                message.then("mials", body)
            except UnknownQueue as error:
                refused.append(str(error))
                raise

        client.publish("orders", 1)
        client.run()
        [dead] = client.dead_letters("orders")
        assert (dead.reason, dead.error_type) == ("retries_exhausted", "waypost.errors.UnknownQueue")
        client.publish("mails", 1)
        with client.receive("mails", wait=0) as message:
            with pytest.raises(UnknownQueue, match="Did you mean orders"):
                message.then("order", 1)
            message.then(Queue("orders", int), 2)
        assert client.queues() == ["mails", "orders"]
        assert client.stats("orders").ledger.ready == 1
    assert ["Did you mean mails?" in text for text in refused] == [True]


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("batch", [None, 2])
def test_a_continuation_to_an_unknown_queue_from_a_process_fails_its_handler(batch: int | None) -> None:
    with Harness("sync", f"memory://strict-process-{batch}", queues=["orders", "next"], strict_queues=True) as client:
        sends = process_handlers.sends_on if batch is None else process_handlers.sends_all_on
        client.handler("orders", process=True, concurrency=1, retry=NoRetry(), batch=batch)(sends)
        client.publish_many("orders", ["next", "nxet"])
        client.run()
        dead = list(client.dead_letters("orders"))
        # A batch fails as a whole, as it does if its handler raises.
        assert [letter.body for letter in dead] == (["nxet"] if batch is None else ["next", "nxet"])
        assert {letter.error_type for letter in dead} == {"waypost.errors.UnknownQueue"}
        assert client.queues() == (["next", "orders"] if batch is None else ["orders"])


# ---- middleware around what is sent on and fired -------------------------------------------------------------


@dataclass
class Marking(Middleware):
    """Marks every published message, however it is published; drops or refuses it if its body demands that."""

    seen: list[tuple[str, str, Any]] = field(default_factory=list)

    def _marked(self, outgoing: Outgoing) -> Outgoing:
        (body,) = outgoing.bodies
        self.seen.append((outgoing.via, outgoing.queue, body))
        if body == "refuse":
            raise ValueError("not this one")
        if body == "change":
            outgoing = structs.replace(outgoing, bodies=["changed"], options={**outgoing.options, "priority": 9})
        return outgoing.with_headers({"mark": outgoing.via})

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        return [] if outgoing.bodies == ["drop"] else call_next(self._marked(outgoing))

    async def publish_async(
        self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
    ) -> list[Published]:
        await asyncio.sleep(0)
        return [] if outgoing.bodies == ["drop"] else await call_next(self._marked(outgoing))


def marked_harness(harness: Harness) -> Marking:
    marking = Marking()
    harness.use(marking)
    return marking


def marks(harness: Harness, queue: str) -> list[tuple[Any, str | None, int]]:
    return [(one.body, one.headers.get("mark"), one.priority) for one in harness.messages(queue)]


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("kind", ["async", "thread", "process", "block"])
def test_middleware_wraps_continuations_of_a_message(harness: Harness, kind: str) -> None:
    harness.publish_many("orders", ["keep", "change"])
    marking = marked_harness(harness)
    if kind == "async":

        @harness.handler("orders")
        async def send_on_async(body: Any, message: Message[Any]) -> None:
            message.then("next", body, headers={"own": "1"})

    elif kind == "thread":

        @harness.handler("orders")
        def send_on(body: Any, message: Message[Any]) -> None:
            message.then("next", body, headers={"own": "1"})

    elif kind == "process":
        harness.handler("orders", process=True, concurrency=1)(process_handlers.repeats_on)
    if kind == "block":
        for _ in range(2):
            with harness.receive("orders") as message:
                message.then("next", message.body, headers={"own": "1"})
    else:
        harness.run()
    assert sorted(marks(harness, "next")) == [("changed", "then", 9), ("keep", "then", 5)]
    assert {one.headers.get("own") for one in harness.messages("next")} == {"1"}
    assert sorted(one for one in marking.seen if one[0] == "then") == [
        ("then", "next", "change"), ("then", "next", "keep"),
    ]  # fmt: skip
    assert harness.ledger("orders").done == 2


@pytest.mark.promise("FACE-1", "PUB-6")
def test_a_redelivered_message_passes_publish_middleware_only_once(harness: Harness) -> None:
    harness.publish("orders", "change", headers={"mark": "first"})
    marking = marked_harness(harness)
    with harness.receive("orders") as message:
        message.then("next", "keep")
        message.reschedule(0)
    assert marks(harness, "orders") == [("change", "first", 5)]
    assert marking.seen == [("then", "next", "keep")]


@pytest.mark.promise("FACE-1")
def test_middleware_may_drop_or_refuse_a_continuation(harness: Harness) -> None:
    harness.publish_many("orders", [{"then": "drop"}, {"then": "refuse"}])
    marked_harness(harness)

    @harness.handler("orders", retry=NoRetry())
    def send_on(body: Any, message: Message[Any]) -> None:
        message.then("next", body["then"])

    harness.run()
    assert marks(harness, "next") == []
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.dead) == (1, 1)
    assert [one.error for one in harness.dead_letters("orders")] == ["not this one"]
    harness.publish("blocks", 1)
    with pytest.raises(ValueError, match="not this one"), harness.receive("blocks", retry=NoRetry()) as message:
        message.then("next", "refuse")
    assert [one.error for one in harness.dead_letters("blocks")] == ["not this one"]


@pytest.mark.promise("FACE-1", "CRON-7")
def test_middleware_wraps_schedules_that_fire_or_are_triggered(harness: Harness) -> None:
    marking = marked_harness(harness)
    harness.save_schedule("often", queue="ticks", every=0.05, max_fires=2, body="keep", headers={"own": "1"})
    harness.save_schedule("never", queue="ticks", every=3600, body="change")
    harness.save_schedule("kept-back", queue="ticks", every=3600, body="drop")
    harness.handler("other")(lambda body: None)
    triggered = harness.trigger_schedule("never")
    assert triggered.status == "queued"
    with pytest.raises(InvalidInput, match="did not pass on"):
        harness.trigger_schedule("kept-back")
    with harness.working():
        until(lambda: harness.ledger("ticks").ready == 3, "two fires")
    assert sorted(marks(harness, "ticks")) == [
        ("changed", "schedule", 9),
        ("keep", "schedule", 5),
        ("keep", "schedule", 5),
    ]
    assert {via for via, _, _ in marking.seen} == {"schedule"}
    fired = [one for one in harness.messages("ticks") if one.body == "keep"]
    assert {one.headers["own"] for one in fired} == {"1"}
    assert all(one.instant is not None for one in fired)
