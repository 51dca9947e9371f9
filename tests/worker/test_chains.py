"""Results that are waited for, chains over several queues, and messages that wait for chains: with real workers."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Constant, Dead, Message, Published
from waypost.errors import (
    ChainFailed,
    ConfigurationError,
    EndUnknown,
    InvalidInput,
    InvalidTime,
    MessageDead,
    MessageRemoved,
    QueueFull,
    ResultNotKept,
    WaitTimeout,
)


@pytest.mark.promise("CHAIN-1")
def test_a_result_is_there_when_its_message_is_done(harness: Harness) -> None:
    @harness.handler("sums")
    def add(numbers: list[int], message: Message[list[int]]) -> None:
        message.keep_result(sum(numbers))

    with harness.working():
        published = harness.publish("sums", [1, 2, 3])
        assert harness.wait_result(published, timeout=20) == 6
        # It is kept, and can be read again.
        assert harness.wait_result(published, timeout=20) == 6


@pytest.mark.promise("CHAIN-1")
@pytest.mark.parametrize("blocks", [False, True], ids=["async", "thread"])
def test_the_return_value_of_a_handler_can_be_its_result(harness: Harness, blocks: bool) -> None:
    def add(numbers: list[int]) -> int:
        return sum(numbers)

    async def add_on_the_loop(numbers: list[int]) -> int:
        return sum(numbers)

    harness.handler("sums", result_ttl=60)(add if blocks else add_on_the_loop)
    with harness.working():
        published = harness.publish("sums", [4, 5])
        assert harness.wait_result(published, timeout=20) == 9


@pytest.mark.promise("CHAIN-1", "LEASE-8")
@pytest.mark.parametrize(
    ("value", "why"), [(object(), "InvalidBody"), ("x" * 2_000_000, "BodyTooLarge")], ids=["no-form", "too-large"]
)
def test_a_result_that_cannot_be_kept_does_not_run_the_handler_again(
    url: str, namespace: str, value: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    calls: list[Any] = []
    for mode in ("sync", "async"):
        with Harness(mode, url, namespace=namespace, on_event=seen.append) as harness:

            @harness.handler(f"sums-{mode}", result_ttl=60, retry=Constant(pause=0, jitter=0, attempts=3))
            async def answer(body: Any) -> object:
                calls.append(body)
                return value

            with harness.working():
                published = harness.publish(f"sums-{mode}", mode)
                for get in (harness.wait_result, lambda p, timeout: harness.result(p.queue, p.id)):
                    with pytest.raises(ResultNotKept, match=why):
                        get(published, timeout=20)
            assert calls[-1] == mode
            assert harness.ledger(f"sums-{mode}").done == 1
    assert calls == ["sync", "async"]
    reported = [event for event in seen if event.event == "result_not_kept"]
    assert [(event.outcome, event.queue) for event in reported] == [("failure", "sums-sync"), ("failure", "sums-async")]
    logged = [vars(record)["message_id"] for record in caplog.records if vars(record).get("event") == "result_not_kept"]
    assert logged == [event.message_id for event in reported]


def test_a_batch_handler_has_no_single_result() -> None:
    with Harness("sync", "memory://") as harness, pytest.raises(ConfigurationError, match="batch"):
        harness.handler("lists", result_ttl=60, batch=10)(lambda bodies: None)


@pytest.mark.promise("CHAIN-1")
def test_a_message_without_a_result_ends_the_wait_too(harness: Harness) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    @harness.handler("silent")
    def work(body: Any) -> None:
        begun.set()
        go_on.wait(20)

    with harness.working(), ThreadPoolExecutor(1) as pool:
        published = harness.publish("silent", {})
        assert begun.wait(20)
        waiting = pool.submit(lambda: harness.wait_result(published, timeout=20))
        go_on.set()
        assert waiting.result(20) is None


@pytest.mark.promise("CHAIN-1")
def test_a_dead_letter_ends_the_wait_with_its_reason(harness: Harness) -> None:
    @harness.handler("payments")
    def refuse(body: Any) -> Dead:
        return Dead("rejected", "no such card")

    with harness.working():
        published = harness.publish("payments", {})
        with pytest.raises(MessageDead, match=r"rejected.*no such card") as caught:
            harness.wait_result(published, timeout=20)
    assert caught.value.reason == "rejected"


@pytest.mark.promise("CHAIN-1")
def test_a_cancel_ends_the_wait(harness: Harness) -> None:
    published = harness.publish("orders", {}, delay=3600)
    assert harness.cancel("orders", id=published.id) == "cancelled"
    with pytest.raises(MessageRemoved, match="cancelled"):
        harness.wait_result(published, timeout=20)


@pytest.mark.promise("CHAIN-1")
def test_a_wait_always_has_an_end(harness: Harness) -> None:
    published = harness.publish("orders", {}, delay=3600)
    with pytest.raises(WaitTimeout, match="did not end"):
        harness.wait_result(published, timeout=0.05)
    with pytest.raises(InvalidTime):
        harness.wait_result(published, timeout=None)


@pytest.mark.promise("CHAIN-1")
def test_a_message_that_never_existed_cannot_be_waited_for(harness: Harness) -> None:
    unknown = Published("0" * 24, "queued", "orders")
    with pytest.raises(EndUnknown, match="has no record"):
        harness.wait_result(unknown, timeout=20)
    with pytest.raises(EndUnknown, match="chain=True"):
        harness.wait_chain(unknown, timeout=20)
    with pytest.raises(InvalidInput, match="chain"):
        harness.wait_chain("no chain", timeout=20)


@pytest.mark.promise("CHAIN-2")
def test_a_chain_of_five_steps_over_three_queues_ends_with_the_last_result(harness: Harness) -> None:
    steps: list[str] = []

    def step(next_queue: str | None) -> Any:
        def work(body: dict[str, Any], message: Message[dict[str, Any]]) -> None:
            steps.append(message.queue)
            assert message.chain_id == body["chain"]
            if body["left"]:
                message.then(next_queue or "cooking", body | {"left": body["left"] - 1})
            else:
                message.keep_result({"dishes": len(steps)})

        return work

    for queue, following in (("cooking", "serving"), ("serving", "washing"), ("washing", "cooking")):
        harness.handler(queue)(step(following))
    first = harness.publish("prepare", {}, chain=True)

    @harness.handler("prepare")
    def prepare(body: Any, message: Message[Any]) -> None:
        message.then("cooking", {"left": 4, "chain": first.chain_id})

    with harness.working():
        assert harness.wait_chain(first, timeout=20) == {"dishes": 5}
    assert steps == ["cooking", "serving", "washing", "cooking", "serving"]


@pytest.mark.promise("CHAIN-2")
def test_a_failed_chain_names_the_message_that_failed(harness: Harness) -> None:
    @harness.handler("begin")
    def begin(body: Any, message: Message[Any]) -> None:
        message.then("finish", {})

    @harness.handler("finish")
    def finish(body: Any) -> None:
        raise Dead("rejected")

    with harness.working():
        chain = harness.publish("begin", {}, chain=True)
        with pytest.raises(ChainFailed, match="rejected") as caught:
            harness.wait_chain(chain, timeout=20)
    assert caught.value.member is not None
    assert caught.value.member.startswith("finish/")


@pytest.mark.promise("CHAIN-1", "CHAIN-2", "QUEUE-8")
@pytest.mark.parametrize("how", ["cancel", "purge", "purge some", "bulk"])
def test_the_end_of_a_message_in_a_queue_without_workers_ends_its_chain(harness: Harness, how: str) -> None:
    chain = harness.publish("orders", {}, chain=True)
    waiting = harness.publish("reports", {}, after=[chain])
    with harness.receive("orders", wait=20) as message:
        mail = message.then("mails", {})
    if how == "cancel":
        assert harness.cancel("mails", id=mail) == "cancelled"
    elif how == "bulk":
        action = harness.start_bulk("mails", "cancel", state="ready")
        harness.run_bulk(action.id)
    else:
        filters = {"published_after": datetime(2020, 1, 1, tzinfo=UTC)} if how == "purge some" else {}
        assert harness.purge("mails", **filters) == 1
    with pytest.raises(ChainFailed, match="cancelled"):
        harness.wait_chain(chain, timeout=20)
    with pytest.raises(MessageDead, match="blocker_failed"):
        harness.wait_result(waiting, timeout=20)
    assert harness.remove_queue("mails") is True


@pytest.mark.promise("CHAIN-2", "QUEUE-8")
def test_a_queue_is_removed_though_its_last_client_died_before_it_had_sent_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = harness.publish("orders", {}, chain=True)
    with harness.receive("orders", wait=20) as message:
        message.then("mails", {})

    def dead(context: Any, queue: str) -> Any:
        yield from ()

    with monkeypatch.context() as patched:
        patched.setattr("waypost.operations.receive.deliver_outgoing", dead)
        with harness.receive("mails", wait=20) as message:
            assert message is not None
    assert harness.remove_queue("mails") is True
    assert harness.wait_chain(chain, timeout=20) is None


@pytest.mark.promise("CHAIN-2")
def test_a_message_that_waits_for_a_hundred_chains_runs_once(harness: Harness) -> None:
    parts: list[int] = []
    reports: list[int] = []

    @harness.handler("parts")
    def part(number: int) -> None:
        parts.append(number)

    @harness.handler("reports")
    def report(body: Any) -> None:
        reports.append(len(parts))

    begun = harness.publish_many("parts", range(100), chain=True)
    last = harness.publish("reports", {}, after=begun, chain=True)
    with harness.working():
        harness.wait_chain(last, timeout=30)
    assert reports == [100]


@pytest.mark.promise("CHAIN-2")
def test_a_message_whose_chain_failed_is_a_dead_letter(harness: Harness) -> None:
    @harness.handler("parts")
    def part(body: Any) -> None:
        raise Dead("rejected")

    with harness.working():
        chain = harness.publish("parts", {}, chain=True)
        last = harness.publish("reports", {}, after=chain)
        with pytest.raises(MessageDead, match="blocker_failed"):
            harness.wait_result(last, timeout=20)


@pytest.mark.promise("CHAIN-2")
def test_a_message_that_waits_for_chains_cannot_have_a_key(harness: Harness) -> None:
    chain = harness.publish("parts", {}, chain=True)
    with pytest.raises(InvalidInput, match="key"):
        harness.publish("reports", {}, after=chain, key="k")
    with pytest.raises(InvalidInput, match="chain"):
        harness.publish("reports", {}, after=["no chain"])
    until(lambda: harness.stats("reports").ledger.published == 0)


@pytest.mark.promise("CHAIN-2")
def test_a_message_that_began_no_chain_cannot_be_waited_for(harness: Harness) -> None:
    alone = harness.publish("parts", 1)
    chain = harness.publish("parts", 2, chain=True)
    unknown = f"parts/{'0' * 24}"
    for wrong in (alone, alone.chain_id, unknown, [chain, alone]):
        with pytest.raises(InvalidInput, match=r"after: message .* of queue parts has no chain.* chain=True"):
            harness.publish("reports", {}, after=wrong)
        with pytest.raises(InvalidInput, match="has no chain"):
            harness.publish_many("reports", [1, 2], after=wrong)
    assert harness.stats("reports").ledger.published == 0
    assert harness.publish("reports", {}, after=[chain] * 3).status == "queued"
    assert [one.state for one in harness.messages("reports", "waiting")] == ["waiting"]


@pytest.mark.promise("CHAIN-2")
def test_a_chain_begun_in_a_transaction_can_be_waited_for_in_it(harness: Harness, url: str) -> None:
    if not url.startswith("sqlite") or harness.mode == "async":
        with pytest.raises(InvalidInput, match="has no chain"):
            harness.publish("reports", {}, after=harness.publish("parts", 1))
        return
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        chain = harness.publish("parts", 1, chain=True, transaction=connection)
        alone = harness.publish("parts", 1, transaction=connection)
        with pytest.raises(InvalidInput, match="has no chain"):
            harness.publish("reports", {}, after=alone, transaction=connection)
        harness.publish("reports", {}, after=chain, transaction=connection)
        connection.commit()
    assert harness.stats("reports").ledger.waiting == 1


@pytest.mark.promise("PUB-7", "CHAIN-2")
def test_only_continuations_of_a_settle_may_pass_the_cap(harness: Harness) -> None:
    harness.configure("next", max_pending=1)
    harness.publish("next", "full")
    harness.save_schedule("often", queue="next", every=3600)
    with pytest.raises(QueueFull):
        harness.publish("next", "refused")
    with pytest.raises(QueueFull):
        harness.trigger_schedule("often")
    harness.publish("orders", 1)
    with harness.receive("orders") as message:
        message.then("next", "sent on")
    assert sorted(one.body for one in harness.messages("next")) == ["full", "sent on"]
    assert (harness.ledger("orders").transferred, harness.ledger("next").over_cap) == (1, 1)
    causes = [event.cause for event in harness.journal("next").events if event.event == "published"]
    assert causes == [None, "forwarded"]
    with harness.receive("next") as message:
        harness.cancel("next", id=next(iter(harness.messages("next"))).id)
        harness.publish("next", "takes its place")
        message.reschedule(0)
    assert sorted(one.body for one in harness.messages("next")) == ["full", "takes its place"]
    assert harness.ledger("next").over_cap == 2
    with pytest.raises(QueueFull):
        harness.publish("next", "refused")


@pytest.mark.promise("CHAIN-2", "PUB-6")
@pytest.mark.parametrize("key", [None, "k"])
def test_a_chain_goes_on_with_a_message_that_reschedules_itself(harness: Harness, key: str | None) -> None:
    runs: list[str] = []
    waited: list[str] = []

    @harness.handler("polls")
    def poll(body: Any, message: Message[Any]) -> None:
        runs.append(message.id)
        if len(runs) < 3:
            message.reschedule(0)
        else:
            message.keep_result("ready")

    @harness.handler("later")
    def later(body: Any, message: Message[Any]) -> None:
        waited.append(message.id)

    with harness.working():
        first = harness.publish("polls", {}, chain=True, key=key)
        last = harness.publish("later", {}, after=first)
        assert harness.wait_chain(first, timeout=20) == "ready"
        assert harness.wait_result(last, timeout=20) is None
    assert len(set(runs)) == 3
    assert waited == [last.id]
