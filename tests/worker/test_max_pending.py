"""`max_pending`: which ways into a queue respect it, and that messages which may pass it are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.worker.harness import Harness
from waypost.cli.main import main
from waypost.codec import encode_body, make_envelope
from waypost.identity import Session
from waypost.outbox.relay.target import Confirmation, RelayRecord, Unconfirmed
from waypost.outbox.relay.waypost import WaypostTarget
from waypost.see import Prometheus

pytestmark = pytest.mark.promise("PUB-7")
CAP = 20


@pytest.fixture
def harness(url: str, namespace: str) -> Iterator[Harness]:
    with Harness("sync", url, namespace=namespace) as made:
        yield made


def records(session: Session, count: int) -> list[RelayRecord]:
    body = encode_body("relayed")
    return [
        RelayRecord(id, "source", body.data, "text/plain", {}, None, None, None, 5, 0, make_envelope(id, body))
        for id in session.message_ids(count)
    ]


async def send_at_once(url: str, namespace: str, batches: list[list[RelayRecord]]) -> list[list[Confirmation]]:
    """Independent relays, all of which check for room before any of them sends."""
    targets = [WaypostTarget(url, "next", namespace=namespace) for _ in batches]
    for target in targets:
        await target.open()
    try:
        return await asyncio.gather(*(target.send(batch) for target, batch in zip(targets, batches, strict=True)))
    finally:
        for target in targets:
            await target.close()


@pytest.mark.parametrize("overload", ["raise", "block", "drop_oldest"])
@pytest.mark.promise("BOX-4")
def test_relays_at_once_do_not_pass_the_cap(harness: Harness, url: str, namespace: str, overload: str) -> None:
    harness.configure("next", max_pending=CAP, overload=overload)
    session = Session()
    batches = [records(session, CAP) for _ in range(3)]
    confirmed = asyncio.run(send_at_once(url, namespace, batches))
    ledger = harness.ledger("next")
    assert (ledger.ready, ledger.over_cap, ledger.balance) == (CAP, 0, 0)
    stored = [
        record.id
        for batch, answers in zip(batches, confirmed, strict=True)
        for record, answer in zip(batch, answers, strict=True)
        if answer is None
    ]
    assert all(answer is None or isinstance(answer, Unconfirmed) for answers in confirmed for answer in answers)
    assert len(stored) == ledger.published == CAP + ledger.dropped
    assert {one.id for one in harness.messages("next")} <= set(stored)


@pytest.mark.promise("SEE-2", "FACE-2")
def test_messages_past_the_cap_are_counted_by_commands_and_metrics(
    harness: Harness, url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.configure("next", max_pending=1)
    harness.publish("orders", 1)
    with harness.receive("orders") as message:
        for number in range(3):
            message.then("next", number)
    assert harness.stats("next").ledger.over_cap == 2
    prometheus = Prometheus()
    prometheus.watch(harness.store)
    with closing(prometheus):
        assert 'waypost_queue_over_cap_total{queue="next"} 2' in prometheus.exposition()[0].decode()
    if url.startswith("memory"):
        return
    assert main(["stats", "next", "--url", url, "--namespace", namespace]) == 0
    assert "past max_pending  2, sent on or redriven" in capsys.readouterr().out
    assert main(["stats", "next", "--url", url, "--namespace", namespace, "--json"]) == 0
    assert '"over_cap": 2' in capsys.readouterr().out.replace('":2', '": 2')
