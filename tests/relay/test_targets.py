"""Every target system: nothing is lost, and a message is settled only after the target has confirmed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from tests.fault.proxy import Proxy
from tests.relay.target_systems import Nats, Store, Streams, TargetSystem
from tests.waiting import until
from waypost import Message, Waypost
from waypost.outbox.relay import nats
from waypost.outbox.relay.kafka import _Batch
from waypost.outbox.relay.rabbitmq import RabbitTarget
from waypost.outbox.relay.target import Refused, Unconfirmed

COUNT = 1_500


@pytest.fixture
def post(tmp_path: Path) -> Waypost:
    return Waypost(f"sqlite:///{tmp_path}/source.db")


def relayed(post: Waypost) -> None:
    """Relay until the queue is empty."""
    post.worker().run(until_empty=True, signals=False)
    ledger = post.ledger("orders")
    assert ledger.balance == 0
    assert ledger.unexplained == 0


@pytest.mark.promise("BOX-4")
def test_a_queue_arrives_whole_with_its_headers(post: Waypost, system: TargetSystem, name: str) -> None:
    with post:
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(700)])]
        odd = {"origin": "shop", "a name": "two\r\nlines", "ö": "ü"}
        last = post.publish("orders", "text", headers=odd, correlation_id="c1", key="order:7")
        post.relay("orders", to=system.url(name), headers={"via": "relay"})
        relayed(post)
        assert post.ledger("orders").done == 701
    arrivals = system.arrivals(name)
    assert sorted(arrival.id for arrival in arrivals) == sorted([*ids, last.id])
    bodies = {arrival.id: arrival.body for arrival in arrivals}
    assert bodies[ids[41]] == b'{"n":41}'
    assert bodies[last.id] == b"text"
    headers = {arrival.id: arrival.headers for arrival in arrivals}
    assert headers[last.id]["origin"] == "shop"
    assert {one["via"] for one in headers.values()} == {"relay"}


@pytest.mark.promise("BOX-4")
def test_the_order_of_the_queue_is_kept(post: Waypost, system: TargetSystem, name: str) -> None:
    with post:
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(COUNT)])]
        # One key: on Kafka one partition.
        key = "same" if name and "kafka" in system.url(name) else None
        post.relay("orders", to=system.url(name), batch=100, key=key)
        relayed(post)
    assert [arrival.id for arrival in system.arrivals(name)] == ids


@pytest.mark.promise("BOX-4")
def test_every_message_arrives_though_the_target_is_down_for_a_while(
    post: Waypost, system: TargetSystem, name: str, record_property: Callable[[str, object], None]
) -> None:
    url = system.url(name)
    with post:
        post.configure("orders", max_deliveries=2)
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(COUNT)])]
        relay = post.relay("orders", to=url, batch=50)
        with post.worker():
            until(lambda: post.ledger("orders").done > 0, "a first batch")
            system.take_down()
            ids += [published.id for published in post.publish_many("orders", [{"n": n} for n in range(COUNT)])]
            until(lambda: relay.failure is not None or post.ledger("orders").leased > 0, "a batch held")
            system.bring_back()
            until(lambda: post.ledger("orders").done == 2 * COUNT, "the end")
        ledger = post.ledger("orders")
    assert ledger.dead == 0
    assert ledger.balance == 0
    arrived = [arrival.id for arrival in system.arrivals(name)]
    record_property("duplicates", len(arrived) - len(set(arrived)))
    assert set(arrived) == set(ids)


@pytest.mark.promise("BOX-4")
@pytest.mark.parametrize("kind", ["kafka", "nats"])
def test_a_message_too_large_for_the_target_is_a_dead_letter(
    post: Waypost, systems: dict[str, TargetSystem], kind: str, name: str
) -> None:
    system = systems[kind]
    with post:
        post.publish("orders", "before")
        large = post.publish("orders", b"x" * 1024 * 1024)
        post.publish("orders", "after")
        post.relay("orders", to=system.url(name))
        relayed(post)
        assert post.ledger("orders").done == 2
        (dead,) = post.dead_letters("orders")
        assert (dead.id, dead.reason) == (large.id, "too_large")
        assert len(dead.body) == 1024 * 1024
    assert sorted(arrival.body for arrival in system.arrivals(name)) == [b"after", b"before"]


@pytest.mark.promise("BOX-4")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (KafkaError.INVALID_RECORD, "rejected"),
        (KafkaError.INVALID_TIMESTAMP, "rejected"),
        (KafkaError.MSG_SIZE_TOO_LARGE, "too_large"),
        (KafkaError._INVALID_DIFFERENT_RECORD, None),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, None),
    ],
)
def test_what_kafka_refuses_for_good_is_a_dead_letter_and_all_else_is_sent_again(code: int, reason: str | None) -> None:
    batch = _Batch(1)
    batch.record_delivery(0, KafkaError(code))
    (confirmation,) = batch.confirmations
    assert getattr(confirmation, "reason", None) == reason
    assert isinstance(confirmation, Unconfirmed if reason is None else Refused)
    assert batch.waiting == 0


@pytest.mark.promise("BOX-4")
@pytest.mark.needs("rabbitmq-server")
def test_a_message_that_rabbitmq_cannot_route_is_a_dead_letter(
    post: Waypost, systems: dict[str, TargetSystem], name: str
) -> None:
    system = systems["rabbitmq"]
    url = system.url(name)
    with post:
        lost = post.publish("orders", "lost", headers={"to": "nowhere"})
        post.publish("orders", "found", headers={"to": name})
        assert url
        target = RabbitTarget(system.server.url, unroutable_retries=0)
        post.relay("orders", to=target, key=lambda message: message.headers["to"])
        relayed(post)
        (dead,) = post.dead_letters("orders")
        assert (dead.id, dead.reason) == (lost.id, "unroutable")
    assert [arrival.body for arrival in system.arrivals(name)] == [b"found"]


@pytest.mark.promise("BOX-4")
@pytest.mark.needs("rabbitmq-server")
def test_headers_that_rabbitmq_does_not_take_stop_no_other_message(
    post: Waypost, systems: dict[str, TargetSystem], name: str
) -> None:
    system = systems["rabbitmq"]
    with post:
        post.publish("orders", "before")
        refused = [post.publish("orders", "copied", headers={header: "archive"}).id for header in ("CC", "BCC")]
        post.publish("orders", "asked", reply_to="amq.rabbitmq.reply-to")
        post.publish("orders", "after")
        post.relay("orders", to=system.url(name))
        relayed(post)
        assert {(dead.id, dead.reason) for dead in post.dead_letters("orders")} == {(id, "rejected") for id in refused}
    assert [arrival.body for arrival in system.arrivals(name)] == [b"before", b"asked", b"after"]


@pytest.mark.promise("BOX-4")
def test_what_a_jetstream_stream_refuses_is_a_dead_letter_and_stops_no_other_message(
    post: Waypost, systems: dict[str, TargetSystem], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "HEADER_RETRIES", 0)
    system = systems["nats"]
    assert isinstance(system, Nats)
    url = system.url(name, max_msg_size=1_000)
    with post:
        post.publish("orders", "before")
        large = post.publish("orders", "x" * 1_000)
        other = post.publish("orders", "other", headers={"Nats-Expected-Stream": "another"})
        post.publish("orders", "after")
        post.relay("orders", to=url)
        relayed(post)
        reasons = {dead.id: dead.reason for dead in post.dead_letters("orders")}
        assert reasons == {large.id: "too_large", other.id: "rejected"}
    assert [arrival.body for arrival in system.arrivals(name)] == [b"before", b"after"]


@pytest.mark.promise("BOX-4")
def test_another_store_gets_each_message_once_whatever_replies_are_lost(
    post: Waypost, systems: dict[str, TargetSystem], name: str
) -> None:
    system = systems["store"]
    assert isinstance(system, Store)
    with Proxy(system.server.port) as proxy, post:
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(COUNT)], priority=7)]
        post.relay("orders", to=f"{system.server.url_at(proxy.port)}#{name}", batch=20)
        proxy.drop_some(0.2, seed=7, to=b"EVALSHA")
        relayed(post)
        assert proxy.dropped > 5
    assert [arrival.id for arrival in system.arrivals(name)] == ids


@pytest.mark.promise("BOX-4")
@pytest.mark.parametrize("kind", ["store", "lake"])
def test_a_batch_sent_twice_is_there_once_in_another_store_and_in_the_lake(
    post: Waypost, systems: dict[str, TargetSystem], name: str, kind: str
) -> None:
    """The relay dies after the target's confirmation and before its settle: the batch comes again."""
    system = systems[kind]
    with post:
        post.configure("orders", lease=0.2)
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(30)])]
        relay = post.relay("orders", to=system.url(name))

        async def die(messages: Sequence[Message[Any]]) -> None:
            await carry(messages)
            for message in messages:
                message.outcome = None
            raise ConnectionError("as if it had never been confirmed")

        carry = relay._relay_batch
        relay._relay_batch = die  # type: ignore[method-assign]
        with post.worker():
            until(lambda: post.ledger("orders").retried >= 30, "a first try of all")
            relay._relay_batch = carry  # type: ignore[method-assign]
            until(lambda: post.ledger("orders").done == 30, "the end")
    assert [arrival.id for arrival in system.arrivals(name)] == ids


@pytest.mark.promise("BOX-4")
def test_nats_drops_messages_that_it_already_has(post: Waypost, systems: dict[str, TargetSystem], name: str) -> None:
    system = systems["nats"]
    url = system.url(name)
    with post:
        first = post.publish("orders", "one")
        post.relay("orders", to=url)
        relayed(post)
    (arrival,) = system.arrivals(name)
    assert (arrival.id, arrival.headers["Nats-Msg-Id"]) == (first.id, first.id)


@pytest.mark.promise("BOX-4")
def test_a_stream_can_be_kept_short(post: Waypost, systems: dict[str, TargetSystem], name: str) -> None:
    system = systems["stream"]
    assert isinstance(system, Streams)
    with post:
        post.publish_many("orders", [{"n": n} for n in range(3_000)])
        post.relay("orders", to=f"{system.url(name)}?maxlen=500")
        relayed(post)
    assert 500 <= len(system.arrivals(name)) < 1_000


@pytest.mark.promise("BOX-4")
def test_a_key_decides_the_partition(post: Waypost, systems: dict[str, TargetSystem], name: str) -> None:
    system = systems["kafka"]
    with post:
        ids = [published.id for published in post.publish_many("orders", [{"n": n} for n in range(400)])]
        post.relay("orders", to=system.url(name), key=lambda message: f"customer-{message.body['n'] % 4}")
        relayed(post)
    arrivals = system.arrivals(name)
    for number in range(4):
        mine = [arrival.id for arrival in arrivals if arrival.key == f"customer-{number}"]
        assert mine == ids[number::4]
