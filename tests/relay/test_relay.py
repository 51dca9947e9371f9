"""What a relay does with any target: the target of these tests chooses its answer to each message."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from waypost import AsyncWaypost, Drop, Message, Waypost, codec
from waypost.cli.main import main
from waypost.errors import ConfigurationError, InvalidUrl, MissingExtra
from waypost.operations import publish
from waypost.operations.publish import PublishOptions
from waypost.outbox.relay import Confirmation, Refused, RelayRecord, Unconfirmed, open_target
from waypost.outbox.relay import relay as relay_module
from waypost.testing.servers import free_port

pytestmark = pytest.mark.promise("BOX-4")
Answer = Callable[[Sequence[RelayRecord]], Sequence[Confirmation]]


class ListTarget:
    """A target that keeps what it confirms."""

    description = "a list"

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or (lambda records: [None] * len(records))
        self.kept: list[RelayRecord] = []
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def send(self, records: Sequence[RelayRecord]) -> Sequence[Confirmation]:
        self.calls.append("send")
        answer = self.answer(records)
        self.kept += [record for record, one in zip(records, answer, strict=False) if one is None]
        return answer

    async def close(self) -> None:
        self.calls.append("close")


def relayed(post: Waypost) -> None:
    post.worker().run(until_empty=True, signals=False)
    assert post.ledger("orders").balance == 0


def test_a_message_is_settled_only_after_the_target_has_it() -> None:
    received, may_answer = threading.Event(), threading.Event()

    class Slow(ListTarget):
        async def send(self, records: Sequence[RelayRecord]) -> Sequence[Confirmation]:
            import asyncio

            received.set()
            await asyncio.to_thread(may_answer.wait)
            return await super().send(records)

    with Waypost("memory://") as post:
        post.publish("orders", "one")
        post.relay("orders", to=Slow())
        with post.worker():
            assert received.wait(20)
            assert post.ledger("orders").leased == 1
            may_answer.set()
            until(lambda: post.ledger("orders").done == 1)


def test_headers_key_and_trace_are_sent_along() -> None:
    with Waypost("memory://") as post:
        options = PublishOptions(key="order:7", group="g", priority=8)
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        options.heads = codec.Heads(
            correlation_id="c1", reply_to="answers", trace=trace, headers={"origin": "shop", "via": "proxy"}
        )
        published = post._run(publish.publish(post._context, "orders", {"n": 1}, options))
        target = ListTarget()
        post.relay("orders", to=target, headers=lambda message: {"via": message.queue}, key=lambda message: "k")
        relayed(post)
    (record,) = target.kept
    assert (record.id, record.body, record.content_type) == (published.id, b'{"n":1}', "application/json")
    assert (record.key, record.own_key, record.group, record.priority) == ("k", "order:7", "g", 8)
    assert (record.correlation_id, record.reply_to) == ("c1", "answers")
    assert record.headers == trace | {
        "origin": "shop", "via": "orders", "waypost-id": published.id, "waypost-queue": "orders",
        "content-type": "application/json", "waypost-key": "order:7", "correlation-id": "c1", "reply-to": "answers",
    }  # fmt: skip
    envelope = codec.open_envelope(record.envelope)
    assert (envelope.id, envelope.trace, envelope.headers) == (published.id, trace, {"origin": "shop", "via": "orders"})


def test_a_message_that_the_target_refuses_is_a_dead_letter_with_its_reason() -> None:
    def answer(records: Sequence[RelayRecord]) -> list[Confirmation]:
        return [Refused("too_large", "so many bytes") if record.body == b"two" else None for record in records]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        target = ListTarget(answer)
        post.relay("orders", to=target)
        relayed(post)
        (dead,) = post.dead_letters("orders")
        assert (dead.reason, dead.error, dead.body) == ("too_large", "so many bytes", "two")
    assert [record.body for record in target.kept] == [b"one", b"three"]


def test_a_temporary_refusal_is_retried_while_others_are_sent() -> None:
    tries: list[bytes] = []

    def answer(records: Sequence[RelayRecord]) -> list[Confirmation]:
        tries.extend(record.body for record in records)
        return [Refused("unroutable", "no queue", 1) if record.body == b"two" else None for record in records]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        post.relay("orders", to=ListTarget(answer))
        with post.worker():
            until(lambda: post.ledger("orders").dead == 1)
        (dead,) = post.dead_letters("orders")
        assert (dead.reason, dead.body) == ("unroutable", "two")
    assert tries == [b"one", b"two", b"three", b"two"]


@pytest.mark.parametrize("hold", [0.0, 30.0])
def test_a_target_that_is_down_costs_a_message_nothing(hold: float, caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails, no delivery or attempt is used, and nothing becomes a dead letter."""
    failures = iter(range(6))

    def answer(records: Sequence[RelayRecord]) -> list[Confirmation]:
        number = next(failures, None)
        if number is None:
            return [None] * len(records)
        if number % 2:
            raise ConnectionError("connection refused")
        return [Unconfirmed("not yet")] * len(records)

    with Waypost("memory://") as post, caplog.at_level(logging.WARNING, "waypost"):
        post.configure("orders", max_deliveries=2)
        post.publish_many("orders", [{"n": n} for n in range(20)])
        target = ListTarget(answer)
        post.relay("orders", to=target, hold=hold)
        with post.worker():
            until(lambda: post.ledger("orders").done == 20)
        ledger = post.ledger("orders")
        assert (ledger.dead, ledger.retried, ledger.expired) == (0, 0, 0)
        assert (ledger.snoozed > 0) == (hold == 0.0)
    assert sorted(record.body for record in target.kept) == sorted(b'{"n":%d}' % n for n in range(20))
    texts = [record.getMessage() for record in caplog.records]
    assert sum("does not confirm" in text for text in texts) == 1
    assert sum("confirms messages again" in text for text in texts) == 1


def test_a_worker_that_stops_settles_confirmed_messages_and_releases_the_others() -> None:
    def answer(records: Sequence[RelayRecord]) -> list[Confirmation]:
        return [None if record.body == b"one" else Unconfirmed("not yet") for record in records]

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two"])
        relay = post.relay("orders", to=ListTarget(answer))
        worker = post.worker()
        with worker:
            until(lambda: relay.failure)
            assert any("a list" in reason for reason in worker.health().reasons)
            worker.stop(0.0)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.ready, ledger.released) == (1, 1, 1)


def test_too_few_confirmations_confirm_nothing() -> None:
    answers = iter([[None]])

    def answer(records: Sequence[RelayRecord]) -> Sequence[Confirmation]:
        return next(answers, [None] * len(records))

    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two"])
        target = ListTarget(answer)
        post.relay("orders", to=target)
        relayed(post)
        assert post.ledger("orders").done == 2
    assert target.calls.count("send") == 2


def test_a_target_is_opened_once_and_closed_with_the_worker() -> None:
    with Waypost("memory://") as post:
        post.publish_many("orders", ["one", "two", "three"])
        target = ListTarget()
        post.relay("orders", to=target, batch=1)
        relayed(post)
        assert target.calls == ["open", "send", "send", "send", "close"]
        post.publish("orders", "four")
        relayed(post)
    assert target.calls[5:] == ["open", "send", "close"]


def test_a_target_given_as_an_object_serves_one_worker_at_a_time() -> None:
    with Waypost("memory://") as post:
        post.relay("orders", to=ListTarget())
        with post.worker(), pytest.raises(ConfigurationError, match="one worker at a time"), post.worker():
            pass  # it does not get here


def test_the_async_client_relays_too() -> None:
    import asyncio

    target = ListTarget()

    async def main() -> None:
        async with AsyncWaypost("memory://") as post:
            await post.publish_many("orders", ["one", "two"])
            post.relay("orders", to=target)
            await post.worker().run(until_empty=True, signals=False)
            assert (await post.ledger("orders")).done == 2

    asyncio.run(main())
    assert [record.body for record in target.kept] == [b"one", b"two"]


def test_a_relay_decorator_sends_what_its_function_returns() -> None:
    with Waypost("memory://") as post:
        post.publish_many("orders", [{"n": 1, "secret": "x"}, {"n": 2}, {"n": 3}])
        target = ListTarget()

        @post.relay("orders", to=target)
        def public(message: Message[Any]) -> Any:
            return Drop() if message.body["n"] == 2 else {"number": message.body["n"]}

        relayed(post)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.dropped) == (2, 1)
    assert [record.body for record in target.kept] == [b'{"number":1}', b'{"number":3}']
    assert codec.open_envelope(target.kept[0].envelope).data == b'{"number":1}'


def test_a_function_that_fails_harms_its_own_message_only(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post, caplog.at_level(logging.ERROR, "waypost"):
        post.publish_many("orders", [{"n": 1}, {}])
        target = ListTarget()
        post.relay("orders", to=target, key=lambda message: str(message.body["n"]))
        relayed(post)
        ledger = post.ledger("orders")
        assert (ledger.done, ledger.retried) == (1, 1)
    assert len(target.kept) == 1
    assert "could not be made" in caplog.text


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("orders", "starts with a scheme"),
        ("ftp://somewhere/orders", "a relay cannot send to ftp"),
        ("kafka:///orders", "names no host"),
        ("kafka://me:secret@host:9092/orders", "has no password"),
        ("nats://host:port/orders", "cannot be read"),
        ("nats://host:4222/orders.*", "no wildcard"),
        ("nats://host:4222/orders?x=1", "not an option"),
        ("valkey+stream://host:6379/orders?maxlen=many", "whole number"),
        ("valkey+stream://host:6379/orders?maxlen=0", "whole number of at least 1"),
        ("valkey+stream://host:6379/orders?length=1", "not an option"),
        ("lake:///data/orders?compresion=zstd", "not an option"),
        ("kafka://host:9092/orders?acks=0", "acks"),
        ("kafka://host:9092/orders?no.such.setting=1", "no.such.setting"),
    ],
)
def test_an_invalid_target_url_is_refused_at_once(to: str, text: str) -> None:
    with pytest.raises((InvalidUrl, ConfigurationError), match=text) as refused:
        open_target(to, "orders")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("to", "module", "extra"),
    [
        ("kafka://host:9092/orders", "confluent_kafka", "relay-kafka"),
        ("amqp://host/", "aio_pika", "relay-rabbitmq"),
        ("nats://host/orders", "nats.js", "nats"),
        ("redis+stream://host/orders", "redis.asyncio", "valkey"),
    ],
)
def test_a_driver_that_is_missing_is_named(to: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"waypost\[{extra}\]"):
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
            until(lambda: relay.failure)
            while len(found) < 12:
                with other.receive("orders", wait=20) as message:
                    assert message is not None
                    found.append(message.id)
            until(lambda: post.ledger("orders").done == 12)
    assert found == ids


@pytest.mark.promise("QUEUE-7")
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_full_group_of_another_store_does_not_hold_up_the_others(
    kind: str, ordered: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (
        f"memory://{name}-{ordered}" if kind == "memory" else f"sqlite:///{tmp_path}/{name}.db"
        for name in ("groups", "target")
    )
    monkeypatch.setattr(relay_module, "GROUP_PAUSE_SECONDS", 0.05)
    with Waypost(source) as post, Waypost(target) as other:
        other.configure("orders", group_max_pending=5)
        post.configure("orders", order="group" if ordered else None)
        ids: dict[str, list[str]] = {"full": [], "a": [], "b": []}
        for number in range(36):
            group = "full" if number < 12 else "ab"[number % 2]
            other.configure_group("orders", group, max_pending=5 if group == "full" else 100)
            ids[group].append(post.publish("orders", number, group=group).id)
        relay = post.relay("orders", to=f"{target}#orders")
        with post.worker() as worker:
            until(lambda: other.ledger("orders").published == 29)
            until(relay.note)
            assert "group full of queue orders" in (relay.note() or "")
            assert relay.failure is None
            assert worker.health().status == "degraded"
            found: dict[str, list[str]] = {group: [] for group in ids}
            while sum(map(len, found.values())) < 36:
                with other.receive("orders", wait=20) as message:
                    assert message is not None
                    found[message.group or ""].append(message.id)
            until(lambda: post.ledger("orders").done == 36)
            until(lambda: relay.note() is None)
        assert post.ledger("orders").dead == 0
    assert {group: sorted(given) for group, given in found.items()} == {k: sorted(v) for k, v in ids.items()}
    if ordered:
        assert found == ids
    assert sum(getattr(one, "event", None) == "relay_group_full" for one in caplog.records) >= 1


@pytest.mark.promise("QUEUE-7")
def test_messages_of_a_group_that_stays_full_return_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(relay_module, "time", SimpleNamespace(monotonic=lambda: now))
    with Waypost("memory://pauses") as post:
        relay = post.relay("orders", to="memory://pauses-target#orders")
        pauses = []
        for _ in range(6):
            # What is refused before the first ones return is snoozed for as long as these.
            pauses.append({relay._group_pause("g") for _ in range(3)})
            now += pauses[-1].copy().pop()
        assert pauses == [{5.0}, {10.0}, {20.0}, {40.0}, {60.0}, {60.0}]
        assert relay._group_pause("h") == 5.0


@pytest.mark.promise("QUEUE-7")
def test_the_command_line_reports_what_waits_because_a_group_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    with Waypost(source) as post, Waypost(target) as other:
        other.configure("copies", group_max_pending=1)
        post.publish_many("orders", [1, 2, 3], group="g")
        assert main(["relay", source, "--queue", "orders", "--to", f"{target}#copies", "--until-empty"]) == 1
        assert (other.ledger("copies").ready, post.ledger("orders").delayed) == (1, 2)
    assert "group g of queue copies holds 0 messages that wait and its max_pending is 1" in capsys.readouterr().err


def test_a_batch_whose_keys_repeat_is_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Each repeated key begins a new chunk, and these are more than one sending takes."""
    with Waypost("memory://keys-source") as post, Waypost("memory://keys-target") as other:
        post.publish_many("orders", range(300))
        post.relay("orders", to="memory://keys-target#orders", key=lambda message: f"{message.body % 2}", batch=300)
        relayed(post)
        assert (post.ledger("orders").done, other.ledger("orders").published) == (300, 2)
    assert [one for one in caplog.records if getattr(one, "event", None) == "relay_unconfirmed"] == []


def test_a_full_group_among_many_chunks_holds_up_no_others(caplog: pytest.LogCaptureFixture) -> None:
    """Each repeated key begins a new chunk: the full group is found in the first of several sendings."""

    def key_of(message: Message[Any]) -> str:
        return f"full {message.id}" if message.group == "full" else "a"

    with Waypost("memory://chunks-source") as post, Waypost("memory://chunks-target") as other:
        other.configure("orders", group_max_pending=300)
        other.configure_group("orders", "full", max_pending=1)
        other.publish("orders", "first", group="full")
        for number in range(300):
            post.publish("orders", number, group="full" if number in (3, 290) else "a")
        post.relay("orders", to="memory://chunks-target#orders", key=key_of, batch=300)
        with post.worker():
            until(lambda: post.ledger("orders").done == 298)
        assert post.ledger("orders").delayed == 2
    assert [one for one in caplog.records if getattr(one, "event", None) == "relay_unconfirmed"] == []


def test_a_full_group_does_not_use_the_room_of_a_nearly_full_queue(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://room-source") as post, Waypost("memory://room-target") as other:
        other.configure("orders", max_pending=11, group_max_pending=100)
        other.configure_group("orders", "full", max_pending=1)
        other.publish("orders", "first", group="full")
        post.publish_many("orders", range(12), group="full")
        post.publish_many("orders", range(10), group="a")
        post.relay("orders", to="memory://room-target#orders")
        with post.worker():
            until(lambda: post.ledger("orders").done == 10)
        assert (post.ledger("orders").delayed, other.ledger("orders").ready) == (12, 11)
    assert [one for one in caplog.records if getattr(one, "event", None) == "relay_unconfirmed"] == []


def test_a_batch_larger_than_a_queue_that_drops_its_oldest_arrives() -> None:
    with Waypost("memory://drops-all-source") as post, Waypost("memory://drops-all-target") as other:
        other.configure("orders", max_pending=100, overload="drop_oldest")
        post.publish_many("orders", list(range(1000)))
        post.relay("orders", to="memory://drops-all-target#orders", batch=500)
        relayed(post)
        assert (post.ledger("orders").done, other.ledger("orders").dropped, other.ledger("orders").ready) == (
            1000,
            900,
            100,
        )
        with other.receive("orders") as message:
            assert message is not None
            assert message.body == 900


def test_a_target_is_not_reported_as_back_before_it_confirms(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://not-back") as post:
        relay = post.relay("orders", to=ListTarget(lambda records: [Unconfirmed("refused")] * len(records)), hold=0.0)

        @relay
        def body(message: Message[Any]) -> object:
            if message.body == "two":
                raise Drop
            return message.body

        post.publish("orders", "one")
        with post.worker():
            until(lambda: relay.failure == "refused")
            post.publish("orders", "two")
            until(lambda: post.ledger("orders").dropped == 1)
            # Nothing of the batch with the second one was sent.
            assert relay.failure == "refused"
    assert [one for one in caplog.records if getattr(one, "event", None) == "relay_recovered"] == []


def test_a_batch_larger_than_a_group_that_drops_its_oldest_arrives() -> None:
    with Waypost("memory://drops-source") as post, Waypost("memory://drops-target") as other:
        other.configure("orders", group_max_pending=5, overload="drop_oldest")
        post.publish_many("orders", list(range(60)), group="g")
        post.relay("orders", to="memory://drops-target#orders")
        relayed(post)
        assert post.ledger("orders").done == 60
        ledger = other.ledger("orders")
        assert (ledger.ready, ledger.dropped, ledger.balance) == (5, 55, 0)
        with other.receive("orders") as message:
            assert message is not None
            assert message.body == 55


def test_the_command_line_relays_until_the_queue_is_empty(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    with Waypost(source) as post:
        post.publish_many("orders", [{"n": n} for n in range(1_000)])
    assert main(["relay", source, "--queue", "orders", "--to", f"{target}#copies", "--until-empty"]) == 0
    assert "relay to queue copies of a sqlite store" in capsys.readouterr().err
    with Waypost(target) as other, Waypost(source) as post:
        assert other.ledger("copies").ready == 1_000
        assert post.ledger("orders").done == 1_000


def test_the_command_line_names_the_error(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", f"sqlite:///{tmp_path}/a.db", "--queue", "orders", "--to", "ftp://x"]) == 2
    assert "a relay cannot send to ftp" in capsys.readouterr().err


def test_the_command_line_reports_messages_that_wait_for_an_unreachable_target(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"sqlite:///{tmp_path}/a.db"
    with Waypost(source) as post:
        post.publish("orders", "one")
        to = f"valkey+stream://127.0.0.1:{free_port()}/orders"
        assert main(["relay", source, "--queue", "orders", "--to", to, "--hold", "0", "--until-empty"]) == 1
        assert post.ledger("orders").balance == 0
        assert post.ledger("orders").dead == 0
    assert "does not accept messages" in capsys.readouterr().err
