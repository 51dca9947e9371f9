"""The workers that run a broker's subscribers: one for all that start together, so that one poll serves them all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from waypost.client import AsyncWaypost
from waypost.client.internals import check_handled, worker_of
from waypost.errors import ConfigurationError

if TYPE_CHECKING:
    from waypost.faststream.subscriber import WaypostSubscriber
    from waypost.worker.worker import Worker


class SubscriberWorkers:
    """Starts and stops subscribers, all together or one by one."""

    def __init__(self) -> None:
        self._workers: dict[WaypostSubscriber, Worker] = {}
        #: The stops of single subscribers that are under way.
        self._stops: dict[WaypostSubscriber, asyncio.Task[None]] = {}
        #: Those that a broker which is being started has started: their worker follows.
        self._together: list[WaypostSubscriber] | None = None

    @contextmanager
    def together(self) -> Iterator[list[WaypostSubscriber]]:
        """Collect the subscribers that are added in this block."""
        collected: list[WaypostSubscriber] = []
        self._together = collected
        try:
            yield collected
        finally:
            self._together = None

    async def add(self, subscriber: WaypostSubscriber, client: AsyncWaypost) -> None:
        """Run a subscriber: now, or with the others that start together."""
        if subscriber in self._workers:
            return
        if self._together is not None:
            self._together.append(subscriber)
        else:
            await self.start([subscriber], client)

    async def start(self, subscribers: list[WaypostSubscriber], client: AsyncWaypost) -> None:
        """Run these subscribers in one worker."""
        if not subscribers:
            return
        self._check_queues(subscribers)
        for subscriber in subscribers:
            for queue in subscriber.queues:
                check_handled(client, queue)
                await _configure(client, queue, subscriber.config.settings)
        worker = worker_of(client, [handler for subscriber in subscribers for handler in subscriber.handlers()])
        # First, so that a stop of the broker meanwhile stops this worker too.
        self._workers.update(dict.fromkeys(subscribers, worker))
        try:
            await worker.start()
        except BaseException:
            for subscriber in subscribers:
                if self._workers.get(subscriber) is worker:
                    del self._workers[subscriber]
            with suppress(Exception):  # the error of the start is the one to raise
                await worker.stop(0.0)
            raise

    async def stop(self, subscriber: WaypostSubscriber, timeout: float) -> None:
        """Stop one subscriber; the others of its worker go on."""
        stop = self._stops.get(subscriber)
        if stop is None:
            worker = self._workers.pop(subscriber, None)
            if worker is None:
                return
            stop = asyncio.get_running_loop().create_task(self._stop(subscriber, worker, timeout))
            self._stops[subscriber] = stop
            stop.add_done_callback(lambda _: self._stops.pop(subscriber))
        await asyncio.shield(stop)

    async def _stop(self, subscriber: WaypostSubscriber, worker: Worker, timeout: float) -> None:
        if worker in self._workers.values():
            await worker.stop_queues(subscriber.queues, timeout)
        else:
            await worker.stop(timeout)

    async def stop_all(self, timeout: float) -> None:
        """Stop all workers, and wait for those that are being stopped: a handler may have requested that."""
        workers = set(self._workers.values())
        self._workers.clear()
        await asyncio.gather(*self._stops.values(), *(worker.stop(timeout) for worker in workers))

    @property
    def are_healthy(self) -> bool:
        """Whether all workers consume."""
        return all(worker.health().status != "red" for worker in set(self._workers.values()))

    def _check_queues(self, subscribers: list[WaypostSubscriber]) -> None:
        used = {queue for subscriber in self._workers for queue in subscriber.queues}
        for subscriber in subscribers:
            for queue in subscriber.queues:
                if queue in used:
                    raise ConfigurationError(
                        f"queue {queue} has two subscribers in this broker: give one subscriber several handlers, "
                        "each with filter=, or raise its concurrency="
                    )
                used.add(queue)


async def _configure(client: AsyncWaypost, queue: str, settings: Mapping[str, Any]) -> None:
    """Configure a queue, unless it has these settings already."""
    if not settings:
        return
    policy = await client.policy(queue)
    if policy.changed(settings) != policy:
        await client.configure(queue, **settings)
