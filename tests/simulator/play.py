"""What clients, handlers and the operator of a scenario do, through the public client, in simulated or real time.

`Player` stands for one process. The world around it decides where its client is connected, and carries out faults.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tests.simulator.history import (
    Answered,
    HandlerEnded,
    HandlerNotified,
    HandlerStarted,
    Recorder,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from tests.simulator.scenario import HandlerPlan, ProcessPlan, Run, Step, body_of, run_number
from waypost import AsyncWaypost, CatchUp, Dead, Drop, Exponential, Message, Retry, Snooze
from waypost.errors import WaypostError
from waypost.values import Published
from waypost.worker.worker import Worker

#: A handler that hangs does so until it is stopped, or its time is up.
HANG_SECONDS = 150.0
PUBLISH_OPTIONS = ("key", "window", "on_conflict", "delay", "expires", "priority", "group", "chain", "timeout")


class HandlerFailure(Exception):
    """What a failing handler raises."""


class StrangeFailure(BaseException):
    """What a handler raises that no `except Exception` catches."""


class Registry:
    """What all processes of a run know of each other's messages: which id a label has."""

    def __init__(self) -> None:
        self.published: dict[str, Published] = {}

    def find(self, label: str) -> Published | None:
        return self.published.get(label)


class Player:
    """One process of a scenario, or the operator: its client, its handlers and its worker."""

    def __init__(
        self, name: str, plan: ProcessPlan | None, post: AsyncWaypost, recorder: Recorder, labels: Registry
    ) -> None:
        self.name = name
        self.plan = plan
        self.post = post
        self.recorder = recorder
        self.labels = labels
        self.worker: Worker | None = None
        #: How a handler in a thread waits: the simulator has its own way.
        self.sleep_in_thread: Callable[[float], None] = time.sleep
        self._running: dict[tuple[str, int], int] = {}
        for handler in plan.handlers if plan is not None else ():
            self._register(handler)

    # ---- the worker --------------------------------------------------------------------------------------

    @property
    def has_worker(self) -> bool:
        return self.plan is not None and bool(self.plan.handlers or self.plan.relays)

    async def start(self) -> None:
        """Start the worker, if the process has one; a store that is away is tried again."""
        if not self.has_worker or self.plan is None or self.worker is not None:
            return
        while True:
            self.worker = worker = self.post.worker(scheduler=self.plan.scheduler, promoter=self.plan.promoter)
            try:
                await worker.start()
            except (WaypostError, OSError):
                await asyncio.sleep(1.0)
                if self.worker is worker:
                    continue
                return
            if self.worker is worker:
                self.recorder.add(WorkerStarted, self.name, worker.name)
            else:
                await worker.stop()  # asked for while it was being started
            return

    async def stop(self, timeout: float) -> None:
        """Stop the worker in order."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        self.recorder.add(WorkerStopping, self.name, timeout)
        try:
            report = await worker.stop(timeout)
        except (WaypostError, OSError):
            return  # it could not start
        self.recorder.add(
            WorkerStopped, self.name,
            {name: getattr(report, name) for name in ("handled", "released", "cancelled", "running", "unsettled")},
        )  # fmt: skip

    # ---- steps -------------------------------------------------------------------------------------------

    async def perform(self, step: Step) -> None:
        """Do what a step asks of this process, and record how it ended."""
        arguments = dict(step.arguments)
        if step.action == "start":
            await self.start()
            return
        if step.action == "stop":
            await self.stop(arguments.get("timeout", 5.0))
            return
        call = self.recorder.begin_call(self.name, step.action, arguments)
        try:
            result = await getattr(self, f"_{step.action}")(**arguments)
        except (WaypostError, OSError) as error:
            outcome = getattr(error, "outcome", "unknown")
            self.recorder.add(Answered, self.name, call, None, type(error).__name__, outcome)
        else:
            self.recorder.add(Answered, self.name, call, result)

    async def _publish(self, queue: str, label: str, runs: Any = (), size: int = 0, **given: Any) -> Any:
        options = {name: given[name] for name in PUBLISH_OPTIONS if name in given}
        after = [self.labels.find(one) for one in given.get("after", ())]
        if after:
            options["after"] = [one for one in after if one is not None]
        published = await self.post.publish(queue, body_of(label, runs, size), **options)
        self.labels.published[label] = published
        return {"id": published.id, "status": published.status, "label": label, "queue": queue}

    async def _publish_many(self, queue: str, messages: list[dict[str, Any]], expires: float | None = None) -> Any:
        bodies = [body_of(one["label"], one.get("runs", []), one.get("size", 0)) for one in messages]
        published = await self.post.publish_many(queue, bodies, expires=expires)
        for one, result in zip(messages, published, strict=True):
            self.labels.published[one["label"]] = result
        return [
            {"id": result.id, "status": result.status, "label": one["label"], "queue": queue}
            for one, result in zip(messages, published, strict=True)
        ]

    async def _wait_result(self, label: str, timeout: float) -> Any:
        published = self.labels.find(label)
        return None if published is None else await self.post.wait_result(published, timeout=timeout)

    async def _wait_chain(self, label: str, timeout: float) -> Any:
        published = self.labels.find(label)
        return None if published is None else await self.post.wait_chain(published, timeout=timeout)

    async def _receive(self, queue: str, wait: float, seconds: float) -> Any:
        async with self.post.receive(queue, wait=wait) as message:
            if message is None:
                return None
            run = self._started(message, "block")
            kind = "cancelled"
            try:
                await asyncio.sleep(seconds)
                kind = "ok"
            finally:
                self._ended(message, run, kind)
            return {"id": message.id, "token": message.token}

    async def _pause(self, queue: str) -> Any:
        return await self.post.pause(queue)

    async def _resume(self, queue: str) -> Any:
        return await self.post.resume(queue)

    async def _configure(self, queue: str, settings: dict[str, Any]) -> None:
        await self.post.configure(queue, **settings)

    async def _purge(self, queue: str, state: Any) -> Any:
        return await self.post.purge(queue, state)

    async def _cancel(self, queue: str, label: str | None = None, key: str | None = None) -> Any:
        if key is not None:
            return await self.post.cancel(queue, key=key)
        published = self.labels.find(label or "")
        return None if published is None else await self.post.cancel(published)

    async def _redrive(self, queue: str, reason: str | None = None) -> Any:
        redriven = await self.post.redrive(queue, reason=reason)
        return {"moved": list(redriven.moved), "duplicates": list(redriven.duplicates)}

    async def _save_schedule(
        self,
        name: str,
        queue: str,
        every: float,
        missed: str = "skip",
        grace: float = 60.0,
        expires: float | None = None,
    ) -> None:
        rule: Any = CatchUp(int(missed)) if missed.isdigit() else missed
        await self.post.save_schedule(
            name, queue=queue, key=name, every=every, missed=rule, grace=grace, expires=expires,
            body=body_of(f"schedule {name}"),
        )  # fmt: skip

    async def _trigger_schedule(self, name: str) -> Any:
        return (await self.post.trigger_schedule(name)).id

    async def _pause_schedule(self, name: str) -> Any:
        return await self.post.pause_schedule(name)

    async def _resume_schedule(self, name: str) -> Any:
        return await self.post.resume_schedule(name)

    async def _remove_schedule(self, name: str) -> Any:
        return await self.post.remove_schedule(name)

    # ---- handlers ----------------------------------------------------------------------------------------

    def _register(self, plan: HandlerPlan) -> None:
        async def handle(body: dict[str, Any], message: Message[Any]) -> Any:
            return await self._handle(body, message)

        def handle_in_thread(body: dict[str, Any], message: Message[Any]) -> Any:
            return self._handle_in_thread(body, message)

        self.post.handler(
            plan.queue,
            concurrency=plan.concurrency,
            retry=Exponential(attempts=plan.attempts, first=plan.retry_seconds),
            timeout=plan.timeout,
            on_lease_lost=self._lost,
        )(handle if plan.kind == "async" else handle_in_thread)

    def _started(self, message: Message[Any], kind: Any) -> int:
        label = message.body["label"]
        run = self.recorder.next_run(message.queue, label)
        self._running[message.id, message.token] = run
        self.recorder.add(
            HandlerStarted, self.name, message.queue, message.id, message.token, message._lease.nonce,
            label, run, kind, message.deliveries, message.attempts,
        )  # fmt: skip
        return run

    def _lost(self, message: Message[Any]) -> None:
        """`on_lease_lost`: called on the event loop, for handlers of both kinds."""
        run = self._running.get((message.id, message.token))
        if run is not None:
            self.recorder.add(HandlerNotified, self.name, message.id, message.token, run, "lost")

    def _cancelled(self, message: Message[Any], run: int) -> None:
        if message.cancel_requested:
            self.recorder.add(HandlerNotified, self.name, message.id, message.token, run, "cancel")

    def _ended(self, message: Message[Any], run: int, how: str, sent_on: tuple[str, ...] = ()) -> None:
        self._running.pop((message.id, message.token), None)
        self.recorder.add(HandlerEnded, self.name, message.id, message.token, run, how, sent_on)

    async def _handle(self, body: dict[str, Any], message: Message[Any]) -> Any:
        run = self._started(message, "async")
        plan = run_number(body, run)
        how: str = plan.kind
        sent_on: tuple[str, ...] = ()
        try:
            if plan.kind == "ignore_cancel":
                await self._work_on_regardless(plan.seconds, message, run)
            else:
                await asyncio.sleep(HANG_SECONDS if plan.kind == "hang" else plan.seconds)
            if plan.kind == "cancel_self":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1.0)
            sent_on = self._send_on(plan, message, run)
            if plan.kind == "publish":
                await self._publish_from_handler(plan, run)
            return end_of(plan)
        except asyncio.CancelledError:
            if plan.kind != "cancel_self" or message.lease_lost or message.cancel_requested:
                how = "cancelled"
                self._cancelled(message, run)
            raise
        except WaypostError:
            how = "fail"
            raise
        finally:
            self._ended(message, run, how, sent_on)

    def _handle_in_thread(self, body: dict[str, Any], message: Message[Any]) -> Any:
        run = self._started(message, "thread")
        plan = run_number(body, run)
        sent_on: tuple[str, ...] = ()
        try:
            self.sleep_in_thread(HANG_SECONDS if plan.kind == "hang" else plan.seconds)
            sent_on = self._send_on(plan, message, run)
            return end_of(plan)
        finally:
            self._ended(message, run, "ok" if plan.kind in ("publish", "cancel_self") else plan.kind, sent_on)

    async def _work_on_regardless(self, seconds: float, message: Message[Any], run: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                self._cancelled(message, run)

    def _send_on(self, plan: Run, message: Message[Any], run: int) -> tuple[str, ...]:
        if plan.kind == "then":
            body = body_of(f"{plan.label}.{run}", plan.next_runs)
            return (message.then(plan.queue, body, expires=plan.expires or None),)
        if plan.kind == "reschedule":
            return (message.reschedule(plan.after, expires=plan.expires or None),)
        return ()

    async def _publish_from_handler(self, plan: Run, run: int) -> None:
        arguments: dict[str, Any] = {"queue": plan.queue, "label": f"{plan.label}.{run}", "runs": list(plan.next_runs)}
        if plan.expires:
            arguments["expires"] = plan.expires
        call = self.recorder.begin_call(self.name, "publish", arguments)
        try:
            result = await self._publish(**arguments)
        except (WaypostError, OSError) as error:
            outcome = getattr(error, "outcome", "unknown")
            self.recorder.add(Answered, self.name, call, None, type(error).__name__, outcome)
            raise
        self.recorder.add(Answered, self.name, call, result)


def end_of(plan: Run) -> Any:
    """How a handler ends after its work: what it returns, or raises."""
    match plan.kind:
        case "fail":
            raise HandlerFailure("this run fails")
        case "exit":
            raise SystemExit(3)
        case "base_exception":
            raise StrangeFailure("no `except Exception` catches this")
        case "retry":
            return Retry(plan.after)
        case "snooze":
            return Snooze(plan.after)
        case "dead":
            return Dead("rejected", "this run gives up")
        case "drop":
            return Drop()
    return None
