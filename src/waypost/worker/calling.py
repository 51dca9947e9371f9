"""Where handlers run: on the event loop, in threads or in processes, with the client's middleware around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from waypost.errors import Undecodable
from waypost.message import Message, Outcome
from waypost.operations.flow import ClientContext, drive_async
from waypost.operations.publish_middleware import pass_sent_on
from waypost.store.port import AsyncExecutor
from waypost.worker.handler import Handler
from waypost.worker.processes import Processes
from waypost.worker.running import Slot, suspended
from waypost.worker.threads import Threads


class Caller:
    """Calls one handler. Lives on one event loop."""

    def __init__(
        self,
        handler: Handler,
        on_unreadable: Callable[[Message[Any], Undecodable], None],
        context: ClientContext,
        executor: AsyncExecutor,
    ) -> None:
        self._handler = handler
        self._context = context
        self._executor = executor
        #: Call the handler for some messages. Where no middleware stands around publishes there is nothing to pay for.
        self.call = self._call if context.around is None else self._call_and_pass
        #: Called for each message of a batch that its process could not read; it is not a part of the call any more.
        self._on_unreadable = on_unreadable
        self._loop = asyncio.get_running_loop()
        self._threads: Threads | None = None
        self.processes: Processes | None = None
        if handler.process:
            self.processes = Processes(handler)
        elif not handler.is_async:
            self._threads = Threads(f"waypost-{handler.queue}", handler.concurrency)
        #: The handler with its middleware around it, None if it has none: then there is nothing to pay for.
        self._around = handler.through_middleware(self._plainly) if handler.middleware else None

    async def _call_and_pass(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        """The same, and the publish middleware for what is sent on."""
        returned = await self._call(slot, messages)
        if any(message._then for message in messages) and not isinstance(returned, Outcome):
            for message in messages:
                if message.settled is None:
                    await drive_async(self._executor, pass_sent_on(self._context, message))
        return returned

    async def _call(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        """Call the handler for these messages; what it returns."""
        handler = self._handler
        if self.processes is not None:
            return await self._in_process(slot, messages)
        function, given = handler.function, (messages,) if self._around is not None else handler.given(messages)
        if self._around is not None:
            function = self._around
        # A context of its own for each call: what a handler sets in it must not reach the next one.
        context = copy_context()
        if self._threads is not None:
            return await self._threads.run(partial(context.run, function, *given))
        coroutine = context.run(function, *given)
        try:
            waits_for = context.run(coroutine.send, None)
        except StopIteration as stop:
            return stop.value
        alarm = self._loop.call_later(handler.time_limit, slot.cancel, "timeout")
        try:
            return await suspended(coroutine, context, waits_for)
        finally:
            alarm.cancel()

    def _plainly(self, messages: Sequence[Message[Any]]) -> Any:
        return self._handler.function(*self._handler.given(messages))

    async def _in_process(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        handler, processes = self._handler, self.processes
        assert processes is not None

        def begun() -> asyncio.TimerHandle:
            return self._loop.call_later(handler.time_limit, slot.cancel, "timeout")

        def unreadable(message: Message[Any], error: Undecodable) -> None:
            message.undecodable = error
            if handler.batch is None:
                raise error
            messages.remove(message)
            self._on_unreadable(message, error)

        def call(given: Sequence[Message[Any]]) -> Any:
            return processes.run(list(given), begun, unreadable)

        return await (handler.through_middleware(call) if handler.middleware else call)(messages)

    def kill_lost(self) -> None:
        """End processes whose messages are all lost, whatever the event loop is doing. Called from a thread."""
        if self.processes is not None:
            self.processes.kill_lost()

    async def stop(self) -> None:
        """Let threads and processes end that have nothing left to do."""
        if self._threads is not None:
            self._threads.stop()
        if self.processes is not None:
            await self.processes.stop()

    def close(self) -> None:
        """Whatever happened before: leave no process behind."""
        if self.processes is not None:
            self.processes.kill()
