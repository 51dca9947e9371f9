"""Handlers that end by an exit, for the figure of poison; `waypost worker --processes` runs them."""

from __future__ import annotations

import asyncio
import os
import signal

from waypost import Constant, Waypost

DELIVERIES = 3
AGAIN = Constant(pause=0.02, jitter=0, attempts=DELIVERIES)
post = Waypost(os.environ.get("APP_URL", "memory://"), namespace=os.environ.get("APP_NAMESPACE", "wp"))


class Strange(BaseException):
    """An error that is not an `Exception`."""


def end(body: str) -> None:
    """End by the exception that the body names; other bodies are fine."""
    match body:
        case "exit":
            raise SystemExit(1)
        case "strange":
            raise Strange
        case "generator-exit":
            raise GeneratorExit
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled-error":
            raise asyncio.CancelledError


#: The poison messages of each queue, beside ordinary ones.
POISONS = {
    "loop": ("exit", "strange", "generator-exit", "interrupt", "cancelled-error", "cancels-itself"),
    "threads": ("exit", "strange", "generator-exit", "interrupt", "cancelled-error"),
    "processes": ("exit", "strange", "interrupt", "kills-its-process", "exits-its-process"),
    "worker": ("kills-its-worker",),
}


@post.handler("loop", retry=AGAIN)
async def on_the_loop(body: str) -> None:
    task = asyncio.current_task()
    if body == "cancels-itself" and task is not None:
        task.cancel()
        await asyncio.sleep(10)
    end(body)


@post.handler("threads", retry=AGAIN)
def in_threads(body: str) -> None:
    end(body)


@post.handler("processes", process=True, concurrency=2, retry=AGAIN)
def in_processes(body: str) -> None:
    match body:
        case "kills-its-process":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits-its-process":
            os._exit(0)
    end(body)


@post.handler("worker", concurrency=1, retry=AGAIN)
async def of_the_worker(body: str) -> None:
    if body == "kills-its-worker":
        os.kill(os.getpid(), signal.SIGKILL)
