"""Lost replies on a real server: the proxy lets each request through, swallows its reply and cuts the connection.

Each call must take effect exactly once, and the caller must get the result of the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fault.proxy import Proxy
from tests.unit.clients import MODES, open_client
from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

QUEUE = "orders"
#: What requests that change something contain; replies to the handshake of a new connection always pass.
VERBS = {"valkey": b"EVALSHA", "postgresql": b'"($1|waypost_'}
KINDS: tuple[type[EmbeddedServer], ...] = (ValkeyServer, PostgresServer)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.scheme)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with request.param() as one:
        yield one


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(server.port) as one:
        yield one


@pytest.fixture
def verb(server: EmbeddedServer) -> bytes:
    return VERBS[server.scheme]


@pytest.fixture
def place(server: EmbeddedServer, proxy: Proxy) -> tuple[str, str]:
    """The URL through the proxy, and a namespace to use there."""
    namespace = fresh_namespace()
    if server.scheme == "postgresql":
        migrate(server.url, namespace=namespace)
    return server.url.replace(f":{server.port}", f":{proxy.port}"), namespace


@pytest.fixture(params=MODES)
def post(request: pytest.FixtureRequest, place: tuple[str, str]) -> Iterator[Any]:
    """A client behind the proxy, warmed up: the server knows the scripts, so that a lost reply is that of a script."""
    url, namespace = place
    with open_client(request.param, url, namespace=namespace, retry_budget=30) as one:
        one.publish("warm", b"", key="k")
        with one.receive("warm", wait=1) as message:
            one.extend(message)
            one.cancel("warm", key="k")
        yield one


@pytest.mark.promise("PUB-3")
@pytest.mark.parametrize("times", [1, 3])
def test_a_publish_whose_reply_is_lost_stores_once(post: Any, proxy: Proxy, verb: bytes, times: int) -> None:
    proxy.drop_replies(times, to=verb)
    published = post.publish(QUEUE, b"once", key="order:7", on_conflict="error")
    assert proxy.dropped == times
    assert published.status == "queued"
    assert [message.id for message in post.peek(QUEUE)] == [published.id]
    ledger = post.ledger(QUEUE)
    assert (ledger.published, ledger.duplicates) == (1, 0)


@pytest.mark.promise("PUB-3", "PUB-2")
def test_a_batch_whose_replies_are_lost_stores_each_once(post: Any, proxy: Proxy, verb: bytes) -> None:
    proxy.drop_replies(2, to=verb)
    published = post.publish_many(QUEUE, [b"%d" % number for number in range(1_500)])
    assert proxy.dropped >= 1
    assert {one.status for one in published} == {"queued"}
    assert len({one.id for one in published}) == 1_500
    assert post.ledger(QUEUE).published == 1_500


@pytest.mark.promise("LEASE-6")
def test_a_claim_whose_reply_is_lost_is_recovered_and_counts_once(post: Any, proxy: Proxy, verb: bytes) -> None:
    published = post.publish_many(QUEUE, [b"first", b"second"])
    proxy.drop_replies(2, to=verb)
    with post.receive(QUEUE, wait=10) as message:
        assert message.id == published[0].id
        assert message.deliveries == 1
        ledger = post.ledger(QUEUE)
        assert (ledger.claims, ledger.leased, ledger.ready) == (1, 1, 1)
    assert proxy.dropped == 2


@pytest.mark.promise("LEASE-6")
def test_a_settle_whose_reply_is_lost_answers_as_the_first_time(post: Any, proxy: Proxy, verb: bytes) -> None:
    post.publish(QUEUE, b"once")
    with post.receive(QUEUE, wait=10) as message:
        proxy.drop_replies(1, to=verb)
    assert proxy.dropped == 1
    assert message.settled == "done"
    assert post.ledger(QUEUE).done == 1


@pytest.mark.promise("LEASE-6")
def test_a_retry_whose_reply_is_lost_is_one_attempt(post: Any, proxy: Proxy, verb: bytes) -> None:
    post.publish(QUEUE, b"once")
    with post.receive(QUEUE, wait=10) as message:
        message.retry(after=0)
        proxy.drop_replies(2, to=verb)
    assert message.settled == "retried"
    with post.receive(QUEUE, wait=10) as message:
        assert (message.attempts, message.deliveries) == (1, 2)
    assert post.ledger(QUEUE).retried == 1


@pytest.mark.promise("LEASE-6")
def test_an_extend_whose_reply_is_lost_answers_as_the_first_time(post: Any, proxy: Proxy, verb: bytes) -> None:
    post.publish(QUEUE, b"once")
    with post.receive(QUEUE, wait=10) as message:
        proxy.drop_replies(1, to=verb)
        assert post.extend(message) == "ok"
    assert proxy.dropped == 1
    assert message.settled == "done"


@pytest.mark.promise("LEASE-6", "LEASE-12")
def test_a_cancel_whose_reply_is_lost_answers_as_the_first_time(post: Any, proxy: Proxy, verb: bytes) -> None:
    post.publish(QUEUE, b"once", key="k")
    proxy.drop_replies(1, to=verb)
    assert post.cancel(QUEUE, key="k") == "cancelled"
    assert proxy.dropped == 1
    assert post.ledger(QUEUE).cancelled == 1


@pytest.mark.promise("LEASE-6", "DEAD-2")
def test_a_redrive_whose_reply_is_lost_moves_once(post: Any, proxy: Proxy, verb: bytes) -> None:
    published = post.publish(QUEUE, b"once")
    with post.receive(QUEUE, wait=10) as message:
        message.dead("rejected")
    proxy.drop_replies(1, to=verb)
    assert post.redrive(QUEUE, ids=[published.id]).moved == [published.id]
    assert proxy.dropped == 1
    assert post.ledger(QUEUE).redriven == 1


@pytest.mark.promise("PUB-3", "LEASE-6", "SEE-5")
def test_with_a_tenth_of_all_replies_lost_everything_happens_once(post: Any, proxy: Proxy, verb: bytes) -> None:
    count = 200
    proxy.drop_some(0.1, seed=11, to=verb)
    ids = [post.publish(QUEUE, number).id for number in range(count)]
    received: list[tuple[str, int, int]] = []
    while len(received) < count:
        with post.receive(QUEUE, wait=10) as message:
            received.append((message.id, message.body, message.deliveries))
    proxy.heal()
    assert proxy.dropped > 20
    assert received == [(id, number, 1) for number, id in enumerate(ids)]
    ledger = post.ledger(QUEUE)
    assert (ledger.published, ledger.claims, ledger.done) == (count, count, count)
    assert (ledger.balance, ledger.unexplained) == (0, 0)


@pytest.mark.promise("LEASE-6", "SEE-6")
@pytest.mark.parametrize("mode", MODES)
def test_without_a_retry_budget_the_outcome_is_unknown_and_the_next_receive_recovers_it(
    proxy: Proxy, place: tuple[str, str], verb: bytes, mode: str
) -> None:
    url, namespace = place
    with open_client(mode, url, namespace=namespace, retry_budget=0) as post:
        published = post.publish(QUEUE, b"once")
        with post.receive("other", wait=0) as nothing:
            assert nothing is None
        proxy.drop_replies(1, to=verb)
        with pytest.raises(OutcomeUnknown), post.receive(QUEUE, wait=0):
            pass
        with post.receive(QUEUE, wait=0) as message:
            assert (message.id, message.deliveries) == (published.id, 1)
        assert post.ledger(QUEUE).claims == 1


@pytest.mark.promise("LEASE-14", "SEE-6")
@pytest.mark.parametrize("mode", MODES)
def test_an_unreachable_store_and_one_that_does_not_answer_raise_different_errors(
    proxy: Proxy, place: tuple[str, str], mode: str
) -> None:
    url, namespace = place
    with open_client(mode, url, namespace=namespace, retry_budget=0) as post:
        post.publish(QUEUE, b"before")
        proxy.refuse()
        proxy.cut()
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            post.publish(QUEUE, b"first, on a connection that broke")
        with pytest.raises(StoreUnavailable) as refusal:
            post.publish(QUEUE, b"second, on no connection at all")
        assert refusal.value.outcome == "not done"
        proxy.heal()
        assert post.publish(QUEUE, b"after").status == "queued"
        assert post.ledger(QUEUE).published == 2


@pytest.mark.promise("LEASE-14")
def test_a_client_survives_every_cut(post: Any, proxy: Proxy) -> None:
    for number in range(10):
        proxy.cut()
        post.publish(QUEUE, number)
        proxy.cut()
        with post.receive(QUEUE, wait=10) as message:
            assert message.body == number
            proxy.cut()
    ledger = post.ledger(QUEUE)
    assert (ledger.done, ledger.claims) == (10, 10)
