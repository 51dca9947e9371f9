"""Consumers that share: several queues a handler, several handlers a queue, or all queues a limit of handler calls.

A worker makes a plain `Consumer` for a queue that shares nothing, which has no overhead for sharing. Otherwise there is
one `SharingConsumer` for each pair of a queue and a handler. The first one of a queue claims for all handlers of the
queue and gives each the messages of its types; the others only run handlers.

A limit of handler calls that several queues share is a `SharedConcurrency`. A consumer claims only messages that can
start at once, and none ahead: a message that waits here for a handler of another queue could be handled by another
worker. If a limit leaves no capacity, the consumer waits for its turn. Turns follow the weights: a queue that has had
`n` calls with weight `w` has the position `n / w`, and the queue with the lowest position is next. A queue that was
idle starts at the position of the others, so it neither starves nor claims back the turns that it did not use.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from waypost.message import Message
from waypost.operations import receive
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.values import Claimed, Lease
from waypost.worker.consumer import UNSETTLED_MAX, Consumer
from waypost.worker.handler import Handler, choose_handler
from waypost.worker.handler_calls import Slot
from waypost.worker.health import Served
from waypost.worker.poller import Liveness
from waypost.worker.wait_machine import WaitState
from waypost.worker.waiter import WaitPlan

log = logging.getLogger("waypost")

#: How many unknown types of a queue are logged, each once: the names come from publishers.
LOGGED_TYPES_MAX = 100

C = TypeVar("C", bound=Consumer)


class SharedConcurrency:
    """A limit of the running handler calls of several consumers, which they use in turns. Lives on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: The consumers whose calls count.
        self._runners: list[SharingConsumer] = []
        #: The consumers among them that claim, with their weights, and the position of each: its calls divided by its
        #: weight.
        self._weights: dict[SharingConsumer, int] = {}
        self._stands: dict[SharingConsumer, float] = {}
        #: The position of the consumer that had the last turn.
        self._now = 0.0
        self._waiting: set[SharingConsumer] = set()

    def add(self, runner: SharingConsumer, claimer: SharingConsumer) -> None:
        """Count the calls of a consumer, whose messages another consumer claims, or itself."""
        self._runners.append(runner)
        self._weights[claimer] = max(runner.handler.weight, self._weights.get(claimer, 0))
        self._stands.setdefault(claimer, 0.0)

    @property
    def free(self) -> int:
        """How many more calls can start: the calls of claims in progress count as started."""
        started = sum(runner.calls_held for runner in self._runners)
        return self._limit - started - sum(claimer.calls_claimed for claimer in self._weights)

    def share(self, claimer: SharingConsumer, wanted: int) -> int:
        """Return for how many calls a consumer may claim now."""
        self.wait(claimer)
        self._waiting.discard(claimer)
        free = min(self.free, CHUNK_MESSAGES_MAX)
        others = self._can_claim()
        return min(wanted, self._turns_of(claimer, others, free) if others else free)

    def _can_claim(self) -> list[SharingConsumer]:
        """Return the consumers that wait, without those whose own handlers have no capacity."""
        return [one for one in self._waiting if one.own_room() > 0]

    def _turns_of(self, claimer: SharingConsumer, others: list[SharingConsumer], free: int) -> int:
        """Return how many of the next `free` turns are this consumer's, if all that wait have messages for theirs."""
        line = [(self._stands[one], number, one) for number, one in enumerate([claimer, *others])]
        heapq.heapify(line)
        turns = 0
        for _ in range(free):
            stands, number, one = line[0]
            turns += one is claimer
            heapq.heapreplace(line, (stands + 1 / self._weights[one], number, one))
        return turns

    def wait(self, claimer: SharingConsumer) -> None:
        """Wake this consumer when there is capacity and it is its turn."""
        if claimer not in self._waiting:
            self._stands[claimer] = max(self._stands[claimer], self._now)
            self._waiting.add(claimer)

    def stop_waiting(self, claimer: SharingConsumer) -> None:
        """Stop waiting for a turn."""
        self._waiting.discard(claimer)

    def charge(self, claimer: SharingConsumer, calls: int) -> None:
        """Count the calls for the messages that a claim has returned."""
        self._now = max(self._now, self._stands[claimer])
        self._stands[claimer] += calls / self._weights[claimer]

    def wake_next(self) -> None:
        """Wake the consumer whose turn it is, if there is capacity."""
        if self._waiting and self.free > 0 and (able := self._can_claim()):
            min(able, key=self._stands.__getitem__).end_sleep_for_room()


class SharingConsumer(Consumer):
    """The messages of a queue that one handler handles. One of the consumers of a queue claims for all of them."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        #: The consumer that claims: itself, until it joins another.
        self._claimer: SharingConsumer = self
        #: All consumers of the queue; used on the consumer that claims.
        self._runners: list[SharingConsumer] = [self]
        self._of_handler: dict[Handler, SharingConsumer] = {self.handler: self}
        self._bounds: list[SharedConcurrency] = []
        #: The maximum number of messages that the claim in progress can return.
        self._granted = 0
        self._logged_types: set[str | None] = set()

    def join(self, claimer: SharingConsumer) -> None:
        """Let another consumer of the same queue claim for this one."""
        self._claimer = claimer
        # The runners here end the waits of the claiming consumer, and the health of the queue is that of its claims.
        self._waiter, self.liveness = claimer._waiter, claimer.liveness
        claimer._runners.append(self)
        claimer._of_handler[self.handler] = self

    def bound_by(self, bound: SharedConcurrency) -> None:
        """Count the calls of this consumer against a shared limit."""
        bound.add(self, self._claimer)
        self._bounds.append(bound)
        if self._claimer is not self and bound not in self._claimer._bounds:
            self._claimer._bounds.append(bound)

    @property
    def claims(self) -> bool:
        """Whether it claims for the consumers of its queue."""
        return self._claimer is self

    @property
    def runners_of_queue(self) -> Sequence[SharingConsumer]:
        """All consumers of the queue."""
        return self._runners

    # ---- how much it holds -------------------------------------------------------------------------------

    @property
    def _per_call(self) -> int:
        """The number of messages in a call, the smallest if handlers of the queue differ."""
        return min(one.handler.batch or 1 for one in self._runners)

    @property
    def calls_held(self) -> int:
        """The number of calls that run, or that the messages held here will start."""
        return self._busy - (-len(self._ready) // (self.handler.batch or 1))

    @property
    def calls_claimed(self) -> int:
        """The number of calls that the claim in progress may cause."""
        return -(-self._granted // self._per_call)

    @property
    def _own_in_flight(self) -> int:
        return len(self._ready) + self._busy + len(self.settler)

    @property
    def in_flight(self) -> int:
        """The number of messages that were claimed here and are not settled yet, for all consumers of the queue."""
        return sum(one._own_in_flight for one in self._runners) if self.claims else self._own_in_flight

    @property
    def empty_at(self) -> int:
        """The worker's counter of work when the claiming consumer last found the queue empty."""
        return self._claimer._empty_at

    @empty_at.setter
    def empty_at(self, work: int) -> None:
        self._empty_at = work

    def _is_idle(self) -> bool:
        return all(Consumer._is_idle(one) for one in self._runners)

    def own_room(self) -> int:
        """Return how many messages the handlers of the queue can start now, whatever the shared limits are."""
        if any(len(one.settler) >= UNSETTLED_MAX for one in self._runners):
            return 0
        room = sum((one.concurrency - one._busy) * (one.handler.batch or 1) - len(one._ready) for one in self._runners)
        return min(room, CHUNK_MESSAGES_MAX)

    def _room(self) -> int:
        """Return how many messages can start now, by the handlers of the queue and by turns in the shared limits."""
        self._granted = 0
        per_call, room = self._per_call, self.own_room()
        calls = max(0, -(-room // per_call))
        full: list[SharedConcurrency] = []
        for bound in self._bounds:
            share = bound.share(self, calls)
            if share <= 0:
                full.append(bound)
            else:
                calls = min(calls, share)
        if full:
            # Also if its own handlers are busy: when one of them ends, its turn counts like that of others.
            for bound in full:
                bound.wait(self)
        elif room > 0:
            self._granted = min(room, calls * per_call)
        for bound in self._bounds:
            # There may be capacity that is not for this consumer: it is the turn of another, or more than it needs.
            bound.wake_next()
        return self._granted

    def end_sleep_for_room(self) -> None:
        """Let the claim loop check again for capacity, if it waits for that."""
        if self._waiter.machine.state is WaitState.SLEEPING_FOR_ROOM:
            self._end_sleep_for_room()

    def _end_sleep_for_room(self) -> None:
        if self.claims:
            super()._end_sleep_for_room()
        else:
            self._claimer._end_sleep_for_room()

    def _stop_waiting(self) -> None:
        for bound in self._bounds:
            bound.stop_waiting(self)
            bound.wake_next()

    def _freed(self) -> None:
        """Let another consumer claim, because a call has ended or messages were released."""
        if len(self._claimer._runners) > 1:
            self._claimer.end_sleep_for_room()
        for bound in self._bounds:
            bound.wake_next()

    # ---- claims ------------------------------------------------------------------------------------------

    async def _claim(self, limit: int, sleeper: str | None, wait: WaitPlan | None) -> Claimed | None:
        claimed: Claimed | None = None
        try:
            claimed = await super()._claim(limit, sleeper, wait)
        finally:
            if claimed is None or not claimed.leases:
                self._granted = 0
                self._freed()
        return claimed

    def _accept(self, claimed: Claimed) -> None:
        granted, self._granted = self._granted, 0
        leases = claimed.leases
        if len(leases) > granted and leases[0].lease_end_ms is not None:
            # They are of a claim whose reply was lost: meanwhile others have used the capacity.
            for message in self._hold(claimed, leases[granted:]):
                self._give_back(message)
            leases = leases[:granted]
        for runner, mine in self._split(claimed, leases).items():
            messages = runner._hold(claimed, mine)
            if messages:
                runner._begin(messages)
        for bound in self._bounds:
            bound.charge(self, -(-len(leases) // self._per_call))
        self._freed()

    def _split(self, claimed: Claimed, leases: Sequence[Lease]) -> dict[SharingConsumer, list[Lease]]:
        """Return the messages for each handler, by their types; delay those that no handler handles."""
        if len(self._runners) == 1 and not self.handler.types:
            return {self: list(leases)} if leases else {}
        chosen: dict[SharingConsumer, list[Lease]] = {}
        left: list[Lease] = []
        for lease in leases:
            handler = choose_handler(self._of_handler, lease)
            if handler is None:
                left.append(lease)
            else:
                chosen.setdefault(self._of_handler[handler], []).append(lease)
        for message in self._hold(claimed, left) if left else ():
            self._put_off(message)
        return chosen

    def _put_off(self, message: Message[Any]) -> None:
        """Delay a message whose type no handler here handles, for another worker. It uses no delivery."""
        type_name = message.type_name
        if type_name not in self._logged_types and len(self._logged_types) < LOGGED_TYPES_MAX:
            self._logged_types.add(type_name)
            log.warning(
                "no handler of this worker takes messages of type %s in queue %s, as message %s: they are left for "
                "other workers, and put off for %g s each time; register a handler for the type, or one without types=",
                type_name or "(none)", self.queue, message.id, receive.OTHER_WORKER_SNOOZE_MS / 1000,
                extra={
                    "event": "type_not_handled", "queue": self.queue, "message_id": message.id, "type": type_name
                },
            )  # fmt: skip
        settlement = receive.put_off(message._lease)
        if message.at_most_once:
            # The queue was changed to lease=None after the start, at which this is refused.
            log.error(
                "message %s of queue %s is lost: no handler takes its type, and the queue has lease=None",
                message.id, self.queue,
                extra={"event": "message_lost", "queue": self.queue, "message_id": message.id},
            )  # fmt: skip
            self._close_lost(message, settlement)
        else:
            self.settler.add(message, settlement)

    # ---- the ends of calls -------------------------------------------------------------------------------

    def _end(
        self,
        slot: Slot,
        messages: list[Message[Any]],
        result: Any,
        error: BaseException | None,
        *,
        given_up: bool = False,
    ) -> None:
        super()._end(slot, messages, result, error, given_up=given_up)
        self._freed()

    def _take(self, now: float) -> list[Message[Any]]:
        messages = super()._take(now)
        if not messages:
            self._freed()
        return messages

    def _on_cancel_request(self, notification: str) -> None:
        for one in self._runners:
            Consumer._on_cancel_request(one, notification)

    # ---- start, stop -------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.claims:
            # Without blocking waits: a claim that waits in the store would occupy the capacity of other queues.
            self._start_claiming()
        else:
            self.settler.start()
            # A stop waits for the claim in progress, which may still return messages for this consumer.
            self._claiming = self._claimer._claiming

    async def stop(self, deadline: float) -> None:
        await super().stop(deadline)
        self._granted = 0
        self._stop_waiting()

    def stop_claiming(self) -> None:
        super().stop_claiming()
        self._stop_waiting()


class SharedQueue:
    """The consumers of one queue, for health and heartbeats."""

    def __init__(self, runners: Sequence[Consumer]) -> None:
        self._runners = runners
        self.queue = runners[0].queue
        self.liveness: Liveness = runners[0].liveness

    @property
    def handled(self) -> int:
        return sum(one.handled for one in self._runners)

    @property
    def concurrency(self) -> int:
        return sum(one.concurrency for one in self._runners)

    @property
    def running(self) -> int:
        return sum(one.running for one in self._runners)

    @property
    def in_flight(self) -> int:
        return self._runners[0].in_flight


def served_queues(consumers: Iterable[Consumer]) -> list[Served]:
    """Return the consumer of each queue, or its consumers together."""
    served: list[Served] = []
    for consumer in list(consumers):
        if not isinstance(consumer, SharingConsumer):
            served.append(consumer)
        elif consumer.claims:
            served.append(SharedQueue(consumer.runners_of_queue))
    return served


def make_consumers(
    handlers: Sequence[Handler], max_handlers: int | None, make: Callable[[type[Any], Handler], Any]
) -> list[Consumer]:
    """Make the consumers of a worker, which share as their handlers say; `make` is called with class and handler."""
    of_queue: dict[str, list[Handler]] = {}
    of_pool: dict[object, list[Handler]] = {}
    for handler in handlers:
        of_queue.setdefault(handler.queue, []).append(handler)
        if handler.pool is not None:
            of_pool.setdefault(handler.pool, []).append(handler)
    pools = {pool: SharedConcurrency(members[0].concurrency) for pool, members in of_pool.items() if len(members) > 1}
    everything = None if max_handlers is None else SharedConcurrency(max_handlers)
    consumers: list[Consumer] = []
    claimers: dict[str, SharingConsumer] = {}
    for handler in handlers:
        pool = pools.get(handler.pool)
        alone = len(of_queue[handler.queue]) == 1 and not handler.types and pool is None and everything is None
        consumer: Consumer = make(Consumer if alone else SharingConsumer, handler)
        consumers.append(consumer)
        if not isinstance(consumer, SharingConsumer):
            continue
        claimer = claimers.setdefault(handler.queue, consumer)
        if claimer is not consumer:
            consumer.join(claimer)
        for bound in (pool, everything):
            if bound is not None:
                consumer.bound_by(bound)
    return consumers
