"""What a relay does whatever its target is: a target written here says what it likes of each message."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.relay.target_systems import until
from waypost import AsyncWaypost, Drop, Message, Waypost, codec
from waypost.cli.main import main
from waypost.errors import ConfigurationError, InvalidUrl, MissingExtra
from waypost.operations import publish
from waypost.operations.publish import PublishOptions
from waypost.outbox.relay import Confirmation, Parcel, Refused, Unconfirmed, open_target
from waypost.testing.servers import free_port

pytestmark = pytest.mark.promise("BOX-4")
Answer = Callable[[Sequence[Parcel]], Sequence[Confirmation]]


class Shelf:
    """A target that keeps what it confirms."""

    shown = "a shelf"

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or (lambda parcels: [None] * len(parcels))
        self.kept: list[Parcel] = []
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def send(self, parcels: Sequence[Parcel]) -> Sequence[Confirmation]:
        self.calls.append("send")
        answer = self.answer(parcels)
        self.kept += [parcel for parcel, one in zip(parcels, answer, strict=False) if one is None]
        return answer

    async def close(self) -> None:
        self.calls.append("close")


def relayed(post: Waypost) -> None:
    post.worker().run(until_empty=True, signals=False)
    assert post.ledger("orders").balance == 0


def test_a_message_is_settled_only_after_the_target_has_it() -> None:
    asked, may_answer = threading.Event(), threading.Event()

    class Slow(Shelf):
        async def send(self, parcels: Sequence[Parcel]) -> Sequence[Confirmation]:
            import asyncio

            asked.set()
            await asyncio.to_thread(may_answer.wait)
            return await super().send(parcels)

    with Waypost("memory://") as post:
        post.publish("orders", "one")
        post.relay("orders", to=Slow())
        with post.worker():
            assert asked.wait(20)
            assert post.ledger("orders").leased == 1
            may_answer.set()
            until(lambda: post.ledger("orders").done == 1)


def test_headers_key_and_trace_travel_along() -> None:
    with Waypost("memory://") as post:
        options = PublishOptions(key="order:7", group="g", priority=8)
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        options.heads = codec.Heads(
            correlation_id="c1", reply_to="answers", trace=trace, headers={"origin": "shop", "via": "nobody"}
        )
        told = post._run(publish.publish(post._context, "orders", {"n": 1}, options))
        shelf = Shelf()
        post.relay("orders", to=shelf, headers=lambda message: {"via": message.queue}, key=lambda message: "k")
        relayed(post)
    (parcel,) = shelf.kept
    assert (parcel.id, parcel.body, parcel.content_type) == (told.id, b'{"n":1}', "application/json")
    assert (parcel.key, parcel.own_key, parcel.group, parcel.priority) == ("k", "order:7", "g", 8)
    assert (parcel.correlation_id, parcel.reply_to) == ("c1", "answers")
    assert parcel.headers == trace | {
        "origin": "shop", "via": "orders", "waypost-id": told.id, "waypost-queue": "orders",
        "content-type": "application/json", "waypost-key": "order:7", "correlation-id": "c1", "reply-to": "answers",
    }  # fmt: skip
    envelope = codec.open_envelope(parcel.envelope)
    assert (envelope.id, envelope.trace, envelope.headers) == (told.id, trace, {"origin": "shop", "via": "orders"})


def test_what_the_target_refuses_is_a_dead_letter_with_its_reason() -> None:
    def answer(parcels: Sequence[Parcel]) -> list[Confirmation]:
        return [Refused("too_large", "so many bytes") if parcel.body == b"two" else None for parcel in parcels]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        shelf = Shelf(answer)
        post.relay("orders", to=shelf)
        relayed(post)
        (dead,) = post.dead_letters("orders")
        assert (dead.reason, dead.error, dead.body) == ("too_large", "so many bytes", "two")
    assert [parcel.body for parcel in shelf.kept] == [b"one", b"three"]


def test_what_may_heal_is_retried_while_others_go_on() -> None:
    tries: list[bytes] = []

    def answer(parcels: Sequence[Parcel]) -> list[Confirmation]:
        tries.extend(parcel.body for parcel in parcels)
        return [Refused("unroutable", "no queue", 1) if parcel.body == b"two" else None for parcel in parcels]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        post.relay("orders", to=Shelf(answer))
        with post.worker():
            until(lambda: post.ledger("orders").dead == 1)
        (dead,) = post.dead_letters("orders")
        assert (dead.reason, dead.body) == ("unroutable", "two")
    assert tries == [b"one", b"two", b"three", b"two"]


@pytest.mark.parametrize("hold", [0.0, 30.0])
def test_a_target_that_is_down_costs_a_message_nothing(hold: float, caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails: neither deliveries nor attempts are used up, and nothing is buried."""
    failures = iter(range(6))

    def answer(parcels: Sequence[Parcel]) -> list[Confirmation]:
        number = next(failures, None)
        if number is None:
            return [None] * len(parcels)
        if number % 2:
            raise ConnectionError("nobody there")
        return [Unconfirmed("not yet")] * len(parcels)

    with Waypost("memory://") as post, caplog.at_level(logging.WARNING, "waypost"):
        post.configure("orders", max_deliveries=2)
        post.publish_many("orders", [{"n": n} for n in range(20)])
        shelf = Shelf(answer)
        post.relay("orders", to=shelf, hold=hold)
        with post.worker():
            until(lambda: post.ledger("orders").done == 20)
        ledger = post.ledger("orders")
        assert (ledger.dead, ledger.retried, ledger.expired) == (0, 0, 0)
        assert (ledger.snoozed > 0) == (hold == 0.0)
    assert sorted(parcel.body for parcel in shelf.kept) == sorted(b'{"n":%d}' % n for n in range(20))
    told = [record.getMessage() for record in caplog.records]
    assert sum("does not confirm" in text for text in told) == 1
    assert sum("takes messages again" in text for text in told) == 1


def test_a_worker_that_stops_gives_back_what_is_not_confirmed_and_settles_what_is() -> None:
    def answer(parcels: Sequence[Parcel]) -> list[Confirmation]:
        return [None if parcel.body == b"one" else Unconfirmed("not yet") for parcel in parcels]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two"])
        relay = post.relay("orders", to=Shelf(answer))
        worker = post.worker()
        with worker:
            until(lambda: relay.trouble)
            assert any("a shelf" in reason for reason in worker.health().reasons)
            worker.stop(0.0)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.ready, ledger.released) == (1, 1, 1)


def test_too_few_confirmations_confirm_nothing() -> None:
    answers = iter([[None]])

    def answer(parcels: Sequence[Parcel]) -> Sequence[Confirmation]:
        return next(answers, [None] * len(parcels))

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two"])
        shelf = Shelf(answer)
        post.relay("orders", to=shelf)
        relayed(post)
        assert post.ledger("orders").done == 2
    assert shelf.calls.count("send") == 2


def test_a_target_is_opened_once_and_closed_with_the_worker() -> None:
    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        shelf = Shelf()
        post.relay("orders", to=shelf, batch=1)
        relayed(post)
        assert shelf.calls == ["open", "send", "send", "send", "close"]
        post.publish("orders", "four")
        relayed(post)
    assert shelf.calls[5:] == ["open", "send", "close"]


def test_a_target_that_was_handed_in_serves_one_worker_at_a_time() -> None:
    with Waypost("memory://") as post:
        post.relay("orders", to=Shelf())
        with post.worker(), pytest.raises(ConfigurationError, match="one worker at a time"), post.worker():
            pass  # it does not get here


def test_the_async_face_relays_too() -> None:
    import asyncio

    shelf = Shelf()

    async def story() -> None:
        async with AsyncWaypost("memory://") as post:
            await post.publish_many("orders", ["one", "two"])
            post.relay("orders", to=shelf)
            await post.worker().run(until_empty=True, signals=False)
            assert (await post.ledger("orders")).done == 2

    asyncio.run(story())
    assert [parcel.body for parcel in shelf.kept] == [b"one", b"two"]


def test_as_a_decorator_it_sends_what_the_function_makes() -> None:
    with Waypost("memory://") as post:
        post.publish_many("orders", [{"n": 1, "secret": "x"}, {"n": 2}, {"n": 3}])
        shelf = Shelf()

        @post.relay("orders", to=shelf)
        def public(message: Message[Any]) -> Any:
            return Drop() if message.body["n"] == 2 else {"number": message.body["n"]}

        relayed(post)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.dropped) == (2, 1)
    assert [parcel.body for parcel in shelf.kept] == [b'{"number":1}', b'{"number":3}']
    assert codec.open_envelope(shelf.kept[0].envelope).data == b'{"number":1}'


def test_a_function_that_fails_harms_its_own_message_only(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post, caplog.at_level(logging.ERROR, "waypost"):
        post.publish_many("orders", [{"n": 1}, {}])
        shelf = Shelf()
        post.relay("orders", to=shelf, key=lambda message: str(message.body["n"]))
        relayed(post)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.retried) == (1, 1)
    assert len(shelf.kept) == 1
    assert "could not be made" in caplog.text


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("orders", "starts with a scheme"),
        ("ftp://somewhere/orders", "nothing can be sent to ftp"),
        ("kafka:///orders", "names no host"),
        ("kafka://me:secret@host:9092/orders", "holds no password"),
        ("nats://host:port/orders", "cannot be read"),
        ("nats://host:4222/orders.*", "no wildcard"),
        ("nats://host:4222/orders?x=1", "no option"),
        ("valkey+stream://host:6379/orders?maxlen=many", "whole number"),
        ("valkey+stream://host:6379/orders?length=1", "no option"),
        ("kafka://host:9092/orders?acks=0", "acks"),
        ("kafka://host:9092/orders?no.such.setting=1", "no.such.setting"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(to: str, said: str) -> None:
    with pytest.raises((InvalidUrl, ConfigurationError), match=said) as refused:
        open_target(to, "orders")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("to", "module", "extra"),
    [
        ("kafka://host:9092/orders", "confluent_kafka", "relay-kafka"),
        ("amqp://host/", "aio_pika", "relay-rabbitmq"),
        ("nats://host/orders", "nats.js", "relay-nats"),
        ("redis+stream://host/orders", "redis.asyncio", "relay-streams"),
    ],
)
def test_a_driver_that_is_missing_is_named(to: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=extra):
        open_target(to, "orders")


def test_a_queue_is_not_sent_on_to_itself() -> None:
    with Waypost("memory://same") as post:
        with pytest.raises(ConfigurationError, match="to itself"):
            post.relay("orders", to="memory://same")
        post.relay("orders", to="memory://same#others")


def test_a_full_queue_of_another_store_is_waited_for() -> None:
    with Waypost("memory://full-source") as post, Waypost("memory://full-target") as other:
        other.configure("orders", max_pending=5)
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(12)])]
        relay = post.relay("orders", to="memory://full-target#orders")
        found: list[str] = []
        with post.worker():
            until(lambda: relay.trouble)
            while len(found) < 12:
                with other.receive("orders", wait=20) as message:
                    assert message is not None
                    found.append(message.id)
            until(lambda: post.ledger("orders").done == 12)
    assert found == ids


def test_the_command_line_relays_until_the_queue_is_empty(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    with Waypost(source) as post:
        post.publish_many("orders", [{"n": n} for n in range(1_000)])
    assert main(["relay", source, "--queue", "orders", "--to", f"{target}#copies", "--until-empty"]) == 0
    assert "relay to queue copies of a sqlite store" in capsys.readouterr().err
    with Waypost(target) as other, Waypost(source) as post:
        assert other.ledger("copies").ready == 1_000
        assert post.ledger("orders").done == 1_000


def test_the_command_line_says_what_is_wrong(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", f"sqlite:///{tmp_path}/a.db", "--queue", "orders", "--to", "ftp://x"]) == 2
    assert "nothing can be sent to ftp" in capsys.readouterr().err


def test_the_command_line_says_what_waits_for_a_target_that_is_away(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"sqlite:///{tmp_path}/a.db"
    with Waypost(source) as post:
        post.publish("orders", "one")
        to = f"valkey+stream://127.0.0.1:{free_port()}/orders"
        assert main(["relay", source, "--queue", "orders", "--to", to, "--hold", "0", "--until-empty"]) == 1
        assert post.ledger("orders").balance == 0
        assert post.ledger("orders").dead == 0
    assert "does not take messages" in capsys.readouterr().err
