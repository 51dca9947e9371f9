"""`TestWaypostBroker`: an application's subscribers in a test, on a store in memory and with time that you move.

A message that is due is handled before `publish` returns, and an error of its handler is raised there. Timers and
retries wait in memory: `advance` moves the time and handles what has become due. Everything else is the real broker:
keys, dead letters, `broker.timers(…)` and `broker.client` work as with a server. `transaction=` is not used: a session
of the application's database has nothing to do with a store in memory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

from faststream import AckPolicy

from waypost.checks import check_seconds
from waypost.client import AsyncWaypost
from waypost.client.async_client import AsyncReception
from waypost.errors import WaitTimeout
from waypost.faststream.broker import WaypostBroker
from waypost.faststream.internals import TestBroker, serializer_of
from waypost.faststream.publishing import WaypostProducer, WaypostPublishCommand, WaypostPublisher
from waypost.faststream.subscriber import DEFAULT_RETRY, WaypostSubscriber
from waypost.message import Message, Outcome, Retry
from waypost.store.memory import MemoryStore
from waypost.testing.clock import ManualClock
from waypost.times import Duration
from waypost.values import Published

#: How long a test looks for a reply that was stored before or never will be.
REPLY_SECONDS = 0.001


class TestWaypostBroker(TestBroker[WaypostBroker, WaypostBroker], broker=WaypostBroker):
    """For the length of an `async with` block, brokers work in memory; with `with_real=True`, on their own store.

    test = TestWaypostBroker(broker)
    async with test:
        await broker.publish({"id": 7}, "orders", delay=3600)
        await test.advance(3600)
        charge.mock.assert_called_once_with({"id": 7})
    """

    def __init__(self, *brokers: WaypostBroker, with_real: bool = False, connect_only: bool | None = None) -> None:
        super().__init__(*brokers, with_real=with_real, connect_only=connect_only)
        #: Begins now, so that `at=` means what it says, and moves with `advance` only.
        self.clock = ManualClock(time.time_ns() // 1_000_000)
        #: The client of all brokers in the test, unless they work on their own stores.
        self.client = AsyncWaypost(store=MemoryStore(clock=self.clock))

    async def advance(self, duration: Duration) -> None:
        """Move the time forward by seconds or a timedelta, and handle all messages that are due then, in turn.

        An error of a handler is raised when all have been handled. Not with `with_real=True`: servers have clocks.
        """
        self.clock.advance(check_seconds("duration", duration))
        errors: list[BaseException] = []
        for queue in await self.client.queues():
            try:
                await self.handle(queue)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def handle(self, queue: str) -> None:
        """Handle the messages of a queue that are due now, once each."""
        subscriber = self._subscriber_of(queue)
        if subscriber is None:
            return
        first: BaseException | None = None
        ledger = await self.client.ledger(queue)
        left = ledger.ready + ledger.delayed
        while left > 0:
            receptions = await self._receive(queue, subscriber, min(left, subscriber.config.batch or 1))
            if not receptions:
                break
            left -= len(receptions)
            error = await _handle(subscriber, receptions)
            first = first or error
        if first is not None:
            raise first

    async def _receive(
        self, queue: str, subscriber: WaypostSubscriber, count: int
    ) -> list[tuple[AsyncReception[Any], Message[Any]]]:
        retry = subscriber.config.options.get("retry", DEFAULT_RETRY)
        found: list[tuple[AsyncReception[Any], Message[Any]]] = []
        for _ in range(count):
            reception = self.client.receive(queue, retry=retry, renew=False)
            message = await reception.__aenter__()
            if message is None:
                break
            found.append((reception, message))
        return found

    def _subscriber_of(self, queue: str) -> WaypostSubscriber | None:
        for broker in self.brokers:
            for subscriber in broker.subscribers:
                if isinstance(subscriber, WaypostSubscriber) and subscriber.calls and queue in subscriber.queues:
                    return subscriber
        return None

    # ---- for FastStream ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _create_ctx(self) -> AsyncGenerator[list[WaypostBroker], None]:
        async with self.client, super()._create_ctx() as brokers:
            yield brokers

    @contextmanager
    def _patch_producer(self, broker: WaypostBroker) -> Generator[None, None, None]:
        config = broker.config.broker_config
        producer = InlineProducer(self, config.broker_parser, config.broker_decoder)
        with mock.patch.object(config, "producer", producer), mock.patch.object(config, "client", self.client):
            yield

    async def _fake_connect(self, broker: WaypostBroker, *args: Any, **kwargs: Any) -> None:
        config = broker.config.broker_config
        config.producer.connect(serializer_of(config.fd_config), config.broker_codec)

    def create_publisher_fake_subscriber(
        self, broker: WaypostBroker, publisher: WaypostPublisher
    ) -> tuple[WaypostSubscriber, bool]:
        """Return the subscriber that sees what a publisher publishes, and whether it is the application's own."""
        for one in self.brokers:
            for subscriber in one.subscribers:
                if isinstance(subscriber, WaypostSubscriber) and publisher.queue in subscriber.queues:
                    return subscriber, True
        return broker.subscriber(publisher.queue, persistent=False), False


class InlineProducer(WaypostProducer):
    """Publishes into the memory of a test, and handles at once what is due."""

    uses_transactions = False

    def __init__(self, test: TestWaypostBroker, parser: Any, decoder: Any) -> None:
        super().__init__(test.client, parser, decoder)
        self._test = test

    async def publish(self, cmd: WaypostPublishCommand) -> Published:
        """Publish one message and handle it."""
        cmd.options.pop("transaction", None)
        published = await super().publish(cmd)
        await self._test.handle(published.queue)
        return published

    async def await_reply(self, published: Published, cmd: WaypostPublishCommand) -> Message[Any]:
        """Return the reply, which is there already: in a test nothing but `advance` would bring it later."""
        cmd.timeout = REPLY_SECONDS
        try:
            return await super().await_reply(published, cmd)
        except WaitTimeout:
            raise WaitTimeout(
                f"no subscriber of this test replied to message {published.id} of queue {published.queue}: there is "
                "none, or the message waits for a retry or its due time"
            ) from None

    async def publish_batch(self, cmd: WaypostPublishCommand) -> list[Published]:
        """Publish many messages and handle them."""
        cmd.options.pop("transaction", None)
        published = await super().publish_batch(cmd)
        await self._test.handle(cmd.destination)
        return published


async def _handle(
    subscriber: WaypostSubscriber, receptions: list[tuple[AsyncReception[Any], Message[Any]]]
) -> BaseException | None:
    """Handle received messages as a worker does, settle them, and return the error of the handler."""
    messages = [message for _, message in receptions]
    failure: BaseException | None = None
    outcome: BaseException | None = None
    try:
        if subscriber.config.batch is None:
            outcome = await subscriber._handle_one(messages[0])
        else:
            outcome = await subscriber._handle_batch(messages)
    except BaseException as error:
        failure = error
    for reception, message in receptions:
        ending = failure or outcome
        if ending is None and subscriber.config.ack_policy is AckPolicy.MANUAL and message.outcome is None:
            ending = Retry(reason="left unsettled")
        await reception.__aexit__(None if ending is None else type(ending), ending, None)
    return None if isinstance(failure, Outcome) else failure
