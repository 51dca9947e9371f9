"""Settling: sends the outcomes of many messages in one call, and a single outcome without delay.

While a call is in progress, further outcomes are collected, and sent together after its reply. On an idle queue no call
is in progress, so an outcome is sent as soon as the event loop has run the tasks that were ready.

In a queue with turns between groups, the next message of a group may wait for the settle of the previous one. For such
a queue the claim loop takes the outcomes and sends them with its next claim (`settle_and_claim`), if it can do so at
once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from waypost.errors import OutcomeUnknown, StoreUnavailable, WaypostError
from waypost.identity import Operation
from waypost.message import Message
from waypost.operations import receive
from waypost.operations.flow import ClientContext, Flow, drive_async
from waypost.operations.outgoing import deliver_outgoing
from waypost.operations.settle_target import HeldMessages, SettleTarget
from waypost.outbox.message_transaction import MessageTransaction
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX, RetryPolicy
from waypost.store.port import AsyncExecutor, Woken
from waypost.values import Claimed, Settlement, SettleStatus
from waypost.worker.renewer import Renewer

log = logging.getLogger("waypost")

#: Outcomes after which a message can be claimed again.
COMES_BACK = frozenset(("retry", "snooze", "release"))


class Settler:
    """Collects the outcomes of one queue and sends them. Used on one event loop."""

    def __init__(
        self,
        context: ClientContext,
        executor: AsyncExecutor,
        queue: str,
        held: HeldMessages,
        on_settled: Callable[[int | None, set[str]], None],
        retry: RetryPolicy,
        renewer: Renewer,
    ) -> None:
        self._context = context
        self._executor = executor
        self._queue = queue
        #: Current leases; a settled one is removed.
        self._held = held
        #: Called after each call with the earliest due time of its messages, and the queues of its continuations.
        self._on_settled = on_settled
        self._messages: list[Message[Any]] = []
        self._settlements: list[Settlement] = []
        #: The messages of the current call, and their settlements: its reply contains their results.
        self.sending: list[Message[Any]] = []
        self._sending_as: list[Settlement] = []
        #: The same for the call that the claim loop has sent.
        self.sending_with_claim: list[Message[Any]] = []
        #: Requests the claim loop to send the collected outcomes with its next claim; returns False if it cannot do so
        #: soon. None: the outcomes of this queue are sent separately.
        self.request_claim: Callable[[], bool] | None = None
        #: Whether the claim loop sends the collected outcomes.
        self.waits_for_claim = False
        #: What the claim loop took and got no reply for, to be sent again here; with its operation if it was sent.
        self._unanswered: list[tuple[list[Message[Any]], list[Settlement], Operation | None]] = []
        self._has_outgoing = False
        self._idle: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.unsettled = 0
        #: How many messages were settled, by status.
        self.outcomes: Counter[SettleStatus] = Counter()
        self.target = SettleTarget(
            context,
            retry,
            MessageTransaction,
            executor=lambda: renewer.executor,
            async_executor=self._connected,
            held=held,
        )

    async def _connected(self) -> AsyncExecutor:
        return self._executor

    @property
    def is_given_up(self) -> bool:
        """Whether its task was cancelled, which happens only at the end of the event loop."""
        return self._task is None or self._task.done() or self._task.cancelling() > 0

    def __len__(self) -> int:
        unanswered = sum(len(messages) for messages, *_ in self._unanswered) if self._unanswered else 0
        return len(self._messages) + len(self.sending) + len(self.sending_with_claim) + unanswered

    def add(self, message: Message[Any], settlement: Settlement) -> None:
        """Add an outcome, to be sent soon."""
        if message.settled is not None:
            # Its handler has settled it in its own transaction.
            self._settled([settlement], [message.settled])
            return
        self._messages.append(message)
        self._settlements.append(settlement)
        if self.request_claim is not None:
            self.waits_for_claim = self.request_claim()
        # No function call: every message of every queue passes here.
        if self._idle is not None and not self.waits_for_claim and not self._idle.done():
            self._idle.set_result(None)

    def send_now(self) -> None:
        """Send the collected outcomes without the claim loop."""
        self.waits_for_claim = False
        self._end_idle()

    def _end_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def settle_and_claim(self, limit: int, *, sleeper: str | None, poll_soon_ms: int | None) -> Flow[Claimed]:
        """Send the collected outcomes together with a claim, on the claim loop."""
        messages, settlements = self._take()
        self.sending_with_claim = messages
        self.waits_for_claim = False
        if self._messages:
            # More outcomes than one call can have must not wait for the next claim.
            self._end_idle()

        def answered(answer: Woken[list[SettleStatus]] | BaseException, operation: Operation | None) -> None:
            self.sending_with_claim = []
            if isinstance(answer, BaseException) or operation is None:
                self._unanswered.append((messages, settlements, operation))
                self._end_idle()
                return
            self._context.replay_windows.end(self._queue, operation)
            statuses = self._context.wake_and_report(answer)
            if receive.note_settled(self._context, messages, settlements, statuses):
                # The messages of the claim, in the same reply, do not wait for it.
                self._has_outgoing = True
                self._end_idle()
            self._held.discard_all(messages)
            self._settled(settlements, statuses)

        return receive.settle_and_claim(
            self._context, self._queue, settlements, answered, limit, sleeper=sleeper, poll_soon_ms=poll_soon_ms
        )

    def start(self) -> None:
        """Start sending."""
        self._task = asyncio.get_running_loop().create_task(self._loop(), name=f"waypost settles {self._queue}")

    def start_again(self) -> None:
        """Continue after a stop, for handlers that could not be stopped."""
        self._stopping = False
        self.start()

    async def stop(self, timeout: float) -> None:
        """Send the remaining outcomes, within a time limit. Others are delivered again when their leases expire."""
        if self._task is None:
            return
        self._stopping = True
        self.send_now()
        _, late = await asyncio.wait([self._task], timeout=timeout)
        if late:
            messages, settlements = self._messages + self.sending, self._settlements + self._sending_as
            for unanswered, their_settlements, _ in self._unanswered:
                messages, settlements = messages + unanswered, settlements + their_settlements
            left = [(one, how) for one, how in zip(messages, settlements, strict=True) if one.settled is None]
            if left:
                self._give_up([one for one, _ in left], [how for _, how in left], None)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            operation: Operation | None = None
            if self._has_outgoing:
                self._has_outgoing = False
                await self._deliver_outgoing()
                continue
            if self._unanswered:
                messages, settlements, operation = self._unanswered.pop(0)
            elif self._messages and not self.waits_for_claim:
                messages, settlements = self._take()
            else:
                if self._stopping:
                    return
                self._idle = loop.create_future()
                await self._idle
                continue
            self.sending, self._sending_as = messages, settlements
            try:
                await self._send(messages, settlements, operation)
            finally:
                self.sending, self._sending_as = [], []

    def _take(self) -> tuple[list[Message[Any]], list[Settlement]]:
        """Take the messages and settlements of one call."""
        count = self._chunk()
        messages, self._messages = self._messages[:count], self._messages[count:]
        settlements, self._settlements = self._settlements[:count], self._settlements[count:]
        return messages, settlements

    async def _deliver_outgoing(self) -> None:
        try:
            await drive_async(self._executor, deliver_outgoing(self._context, self._queue))
        except WaypostError as error:
            log.debug("queue %s: continuations are delivered after a later claim: %s", self._queue, error)

    def _chunk(self) -> int:
        """Return how many are sent together: a bounded number, with a bounded number of bytes of continuations."""
        count, weight = 0, 0
        for settlement in self._settlements[:CHUNK_MESSAGES_MAX]:
            if settlement.then or settlement.result is not None:
                weight += len(settlement.result or b"") + sum(len(one.envelope) + 512 for one in settlement.then)
                if weight > CHUNK_BYTES_MAX and count:
                    break
            count += 1
        return count

    async def _send(
        self, messages: list[Message[Any]], settlements: list[Settlement], operation: Operation | None = None
    ) -> None:
        flow = receive.settle(self._context, self._queue, messages, settlements, begun=operation)
        try:
            statuses = await drive_async(self._executor, flow)
        except (StoreUnavailable, OutcomeUnknown) as error:
            self._give_up(messages, settlements, error)
        except Exception as error:
            # Also for unexpected errors: if the settler ended, nothing would be settled any more.
            if len(messages) == 1:
                self._give_up(messages, settlements, error)
                return
            # One settlement is refused, and the whole step with it: sent separately, only that one fails.
            for message, settlement in zip(messages, settlements, strict=True):
                await self._send([message], [settlement])
        else:
            self._held.discard_all(messages)
            self._settled(settlements, statuses)

    def _settled(self, settlements: list[Settlement], statuses: list[SettleStatus]) -> None:
        soonest: int | None = None
        sent_to: set[str] = set()
        for settlement in settlements:
            if settlement.outcome in COMES_BACK:
                soonest = settlement.after_ms if soonest is None else min(soonest, settlement.after_ms)
            elif settlement.then:
                sent_to.update(one.queue for one in settlement.then)
        self.outcomes.update(statuses)
        self._on_settled(soonest, sent_to)

    def _give_up(self, messages: list[Message[Any]], settlements: list[Settlement], error: Exception | None) -> None:
        self._held.discard_all(messages)
        self.unsettled += len(messages)
        log.error(
            "%d messages of queue %s could not be settled (%s): they are delivered again when their leases end",
            len(messages),
            self._queue,
            error or "the worker stops and the store does not answer",
            extra={
                "event": "settle_failed",
                "queue": self._queue,
                "count": len(messages),
                "message_id": messages[0].id if messages else None,
            },
        )
        if self._context.on_event is not None:
            outcome = receive.how(error) if isinstance(error, WaypostError) else ("unknown",)
            for message, settlement in zip(messages, settlements, strict=True):
                receive.emit_settled(self._context, message, settlement, "unsettled", *outcome)
