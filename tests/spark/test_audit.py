"""The audit: clean where nothing is wrong, and every planted fault is found with its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

from tests.spark.lakes import live, plant
from tests.spark.shop import Shop
from waypost.cli.commands.pipeline import format_audit
from waypost.spark.lake import audit as audit_module
from waypost.spark.lake.audit import (
    AFTER_ITS_END,
    CLAIMED_TWICE,
    DEAD_LETTER_LOST,
    DEATH_NOT_JOURNALLED,
    ENDED_TWICE,
    HELD_AFTER_END,
    LOST,
    NEVER_PUBLISHED,
    NO_EVENT,
    NOT_IN_LAKE,
    UNEXPLAINED,
    audit,
    read_held,
)
from waypost.spark.lake.pipeline import Pipeline
from waypost.store.valkey.scripts import KEY_NAMES
from waypost.store.valkey.store import ValkeyStore

pytestmark = pytest.mark.xdist_group("spark")


@pytest.mark.promise("SPARK-5")
def test_every_message_is_accounted_for_whichever_way_it_went(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    live(orders, 30)
    orders.post.publish("mails", "held")
    found = audit(pipeline(orders))
    ledger = orders.post.ledger("orders")
    assert found.is_clean
    assert found.published == found.accounted == ledger.published + 1
    assert found.queues["orders"].accounted == {
        state: count
        for state, count in {
            "cancelled": ledger.cancelled, "dead": ledger.dead - ledger.redriven, "delayed": ledger.delayed,
            "done": ledger.done, "dropped": ledger.dropped, "leased": ledger.leased, "ready": ledger.ready,
            "replaced": ledger.replaced,
        }.items()
        if count
    }  # fmt: skip
    assert found.not_seen == 0
    assert format_audit(found).endswith(f"\n0 unaccounted of {found.published}")


@pytest.mark.promise("SPARK-5")
def test_planted_faults_are_found_with_their_events(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    """Journal and messages are changed directly in the store: each fault concerns another message."""
    orders.post.publish_many("orders", range(60))
    orders.work("orders", 40)
    orders.claim("orders", 4)
    audit(pipeline(orders))
    ends = [event for event in orders.events() if event.event in ("done", "dead", "retried", "claimed")]
    done = [event for event in ends if event.event == "done"]
    dead = [event for event in ends if event.event == "dead"]
    held = [event for event in ends if event.event == "claimed"][-4:]
    ready = orders.stored("ready")
    faults: dict[str | None, str] = {}

    # A settle without its event.
    without = "UPDATE wp_journal SET event = 'configured', message_id = NULL WHERE number = ?"
    plant(orders, without, done[0].number)
    faults[done[0].message_id] = LOST
    # A claim that is journalled twice, a claim that nothing explains, an end that came twice.
    plant(
        orders, "UPDATE wp_journal SET event = 'claimed', run_ms = NULL, wait_ms = 1 WHERE number = ?", dead[0].number
    )
    faults[dead[0].message_id] = CLAIMED_TWICE
    again = "UPDATE wp_journal SET message_id = ?, event = ?, token = 2, claims = 2, run_ms = NULL WHERE number = ?"
    published = {event.message_id: event.number for event in orders.events() if event.event == "published"}
    plant(orders, again, done[1].message_id, "claimed", published[ready[-1].id])
    faults[done[1].message_id] = UNEXPLAINED
    plant(orders, again, done[2].message_id, "done", published[ready[-2].id])
    faults[done[2].message_id] = ENDED_TWICE
    # An end of a message that the store holds, and messages without any event of theirs: those whose rows were used.
    plant(orders, again, ready[2].id, "done", published[ready[-3].id])
    faults[ready[2].id] = HELD_AFTER_END
    faults |= {ready[-number].id: NO_EVENT for number in (1, 2, 3)}
    # A message that was handled, and whose publication is not journalled.
    plant(orders, without, published[done[3].message_id])
    faults[done[3].message_id] = NEVER_PUBLISHED
    # Messages that were deleted: a ready one, a held one, a dead letter. And one that died without an event.
    for message_id in (ready[0].id, held[0].message_id, dead[1].message_id):
        assert plant(orders, "DELETE FROM wp_message WHERE id = ?", message_id) == 1
        faults[message_id] = DEAD_LETTER_LOST if message_id == dead[1].message_id else LOST
    assert plant(orders, "UPDATE wp_message SET state = 4, ended_ms = 1 WHERE id = ?", ready[1].id) == 1
    faults[ready[1].id] = DEATH_NOT_JOURNALLED

    found = audit(pipeline(orders, "second"))
    kinds = (found.unaccounted, found.duplicates_unexplained, found.unrecorded)
    by_id = {finding.message_id: finding.fault for findings in kinds for finding in findings}
    # The dead letter whose event was changed to a claim is in the store, and no event records it any more.
    del by_id[dead[0].message_id or ""]
    del faults[dead[0].message_id]
    assert by_id == faults
    assert not found.is_clean
    assert any(finding.fault == CLAIMED_TWICE for finding in found.duplicates_unexplained)
    lost = next(finding for finding in found.unaccounted if finding.message_id == done[0].message_id)
    assert [event.event for event in lost.events] == ["published", "claimed"]
    kept = json.loads((tmp_path / "second" / "audit.json").read_text())
    assert kept["unaccounted_count"] == found.unaccounted_count == len(found.unaccounted)
    assert kept["unrecorded_count"] == found.unrecorded_count == found.queues["orders"].unrecorded == 5
    text = format_audit(found)
    assert f"{done[0].message_id}: {LOST}" in text
    assert f"{ready[-1].id}: {NO_EVENT}" in text
    assert "5 unrecorded: " in text
    assert text.splitlines()[-1] == f"{found.unaccounted_count} unaccounted of {found.published}"


@pytest.mark.promise("SPARK-5")
def test_faults_of_messages_that_the_lake_knows_already_are_named(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    """What a restored backup does: events that were read are others now, and ended messages are there again."""
    orders.post.publish_many("orders", range(10))
    orders.work("orders", 6)
    made = pipeline(orders)
    assert audit(made).is_clean
    done = [event.message_id for event in orders.events() if event.event == "done"]
    new = [one.id for one in orders.post.publish_many("orders", range(3))]
    change = "UPDATE wp_journal SET message_id = ?, event = ?, token = 1, claims = 1 WHERE message_id = ?"
    # A second end of a message whose first is in the lake, and another event after an end.
    plant(orders, change, done[0], "done", new[0])
    plant(orders, change, done[1], "released", new[1])
    # A message whose event has a number that the lake has read with another event.
    plant(orders, change, None, "configured", new[2])
    plant(orders, "UPDATE wp_journal SET message_id = ? WHERE number = 1", new[2])
    found = audit(made)
    assert {finding.message_id: finding.fault for finding in found.duplicates_unexplained} == {
        done[0]: ENDED_TWICE, done[1]: AFTER_ITS_END,
    }  # fmt: skip
    assert {finding.message_id: finding.fault for finding in found.unrecorded} == {
        new[0]: NO_EVENT, new[1]: NO_EVENT, new[2]: NOT_IN_LAKE,
    }  # fmt: skip
    assert found.unaccounted == ()
    (twice,) = [finding for finding in found.duplicates_unexplained if finding.fault == ENDED_TWICE]
    assert [event.event for event in twice.events] == ["published", "claimed", "done", "done"]


class Planter:
    """Changes a store behind its back: ids of events that stand alone in their step, and messages."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def relabel(self, event: str, message_id: str, other: str) -> None:
        """Let the event of a message be that of another one."""
        (number,) = [one.number for one in self.shop.events() if (one.event, one.message_id) == (event, message_id)]
        if self.shop.url.startswith("sqlite"):
            assert (
                plant(
                    self.shop,
                    f'UPDATE "{self.shop.namespace}_journal" SET message_id = ? WHERE number = ?',
                    other,
                    number,
                )
                == 1
            )
        elif self.shop.url.startswith("postgresql"):
            text = f'UPDATE "{self.shop.namespace}_entry" SET ids = %s WHERE event = %s AND ids = %s'
            assert self._run(text, [other], event, [message_id]) == 1
        else:
            self._rewrite(number, message_id.encode(), other.encode())

    def _rewrite(self, number: int, old: bytes, new: bytes) -> None:
        """A stream cannot be changed: it is written anew, with the same numbers."""
        with self._valkey() as (server, keys):
            entries = server.xrange(keys["journal"])
            server.delete(keys["journal"])
            for name, fields in entries:
                text = fields[b"e"]
                if name == b"%d-0" % number:
                    assert text.count(old) == 1
                    text = text.replace(old, new)
                server.xadd(keys["journal"], {b"e": text}, id=name)

    def delete(self, message_id: str) -> None:
        """Delete a message that is ready."""
        if self.shop.url.startswith("sqlite"):
            assert plant(self.shop, f'DELETE FROM "{self.shop.namespace}_message" WHERE id = ?', message_id) == 1
        elif self.shop.url.startswith("postgresql"):
            assert self._run(f'DELETE FROM "{self.shop.namespace}_message" WHERE id = %s', message_id) == 1
        else:
            with self._valkey() as (server, keys):
                assert server.zrem(keys["ready"], message_id) == 1
                assert server.hdel(keys["messages"], message_id) == 1

    def _run(self, statement: str, *values: object) -> int:
        with psycopg.connect(self.shop.url, autocommit=True) as server:
            return server.execute(statement.encode(), values).rowcount

    @contextmanager
    def _valkey(self) -> Iterator[tuple[Any, dict[str, bytes]]]:
        with self.shop.bulk() as bulk, redis.Redis(unix_socket_path=urlsplit(self.shop.url).path) as server:
            assert isinstance(bulk.store, ValkeyStore)
            yield server, dict(zip(KEY_NAMES, bulk.store.keys_of("orders"), strict=True))


@pytest.mark.promise("SPARK-5")
def test_faults_in_both_directions_are_named_on_every_store(shop: Shop, pipeline: Callable[..., Pipeline]) -> None:
    ids = [shop.post.publish("orders", number).id for number in range(9)]
    for _ in range(5):
        with shop.post.receive("orders", wait=20) as message:
            assert message is not None
    done, held, planter = ids[:5], ids[5:], Planter(shop)
    assert audit(pipeline(shop)).is_clean
    # Ids that no store has given: their length is that of others.
    made_up = ["0" * len(ids[0]), "1" * len(ids[0])]
    # A settle without its event, and an end of a message that the store holds.
    planter.relabel("done", done[0], held[0])
    # A message that is held without any event, and an event of a message that is nowhere; the same of one that ended.
    planter.relabel("published", held[1], made_up[0])
    planter.relabel("published", done[1], made_up[1])
    # An end that came twice, and one that is missing.
    planter.relabel("done", done[2], done[3])
    planter.delete(held[2])
    found = audit(pipeline(shop, "second"))
    assert {one.message_id: one.fault for one in found.unaccounted} == dict.fromkeys(
        (done[0], *made_up, done[2], held[2]), LOST
    )
    assert {one.message_id: one.fault for one in found.duplicates_unexplained} == {done[3]: ENDED_TWICE}
    assert {one.message_id: one.fault for one in found.unrecorded} == {
        held[0]: HELD_AFTER_END, held[1]: NO_EVENT, done[1]: NEVER_PUBLISHED,
    }  # fmt: skip
    assert found.queues["orders"].accounted == {"done": 2, "ready": 1}


@pytest.mark.promise("SPARK-5")
def test_traffic_during_an_audit_is_no_fault_although_its_events_have_no_number_yet(
    postgres_shop: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that is open delays the numbers of all events behind it; the messages change at once."""
    shop = postgres_shop
    shop.post.publish_many("orders", range(40))
    shop.work("orders", 10)
    made = pipeline(shop)
    with psycopg.connect(shop.url) as open_transaction:

        def read_later(*arguments: Any) -> Any:
            open_transaction.execute("SELECT pg_current_xact_id()")
            shop.post.publish_many("orders", range(20))
            shop.work("orders", 15)
            held = read_held(*arguments)
            shop.work("orders", 15)
            return held

        monkeypatch.setattr(audit_module, "read_held", read_later)
        found = audit(made)
        with shop.bulk() as bulk:
            assert len(bulk.unnumbered("orders")) > 20
        open_transaction.rollback()
    assert found.is_clean, found
    assert found.published == 40
    monkeypatch.undo()
    found = audit(made)
    assert found.is_clean
    assert found.published == 60


@pytest.mark.promise("SPARK-5")
def test_events_that_were_trimmed_are_reported_as_not_seen_and_nothing_is_called_lost(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    orders.post.publish_many("orders", range(20))
    made = pipeline(orders)
    made.run()
    # All of them end in events that are trimmed before the lake has read them.
    orders.work("orders", 20)
    with orders.bulk() as bulk:
        newest = bulk.bounds("orders")[1]
        bulk.run(bulk.store.journal_trim("orders", newest))
    orders.post.publish_many("orders", range(3))
    found = audit(made)
    queue = found.queues["orders"]
    assert found.is_clean
    assert found.not_seen == queue.not_seen == newest - 20
    assert queue.undecided > 0
    ledger = orders.post.ledger("orders")
    assert sum(queue.accounted.values()) == 3 + ledger.retried == found.published - queue.undecided
    assert f"orders: {newest - 20} events not seen" in format_audit(found)
    # A deleted message whose events were all read is still found.
    gone = orders.stored("ready")[0].id
    plant(orders, "DELETE FROM wp_message WHERE id = ?", gone)
    assert [finding.message_id for finding in audit(made).unaccounted] == [gone]


@pytest.mark.promise("SPARK-5")
def test_events_from_the_time_without_a_journal_are_reported_as_not_seen(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    orders.post.publish_many("orders", range(10))
    orders.post.configure("orders", journal="off")
    orders.work("orders", 5)
    orders.post.configure("orders", journal="all")
    orders.post.publish("orders", "seen")
    found = audit(pipeline(orders))
    assert found.is_clean
    assert found.queues["orders"].not_seen == 10
    assert found.queues["orders"].undecided > 0


def test_an_audit_of_nothing_is_clean(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    found = audit(pipeline(orders))
    assert found.is_clean
    assert format_audit(found) == "0 unaccounted of 0"
