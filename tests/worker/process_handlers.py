"""Handlers for processes: imported by name, so they are functions of a module."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waypost import Dead, Drop, Message, Outcome, Retry, Snooze


@dataclass
class Order:
    id: int
    item: str = "lamp"


@dataclass
class Exiting:
    """A body whose own code may end in any way."""

    id: int

    def __post_init__(self) -> None:
        if self.id == 1:
            raise SystemExit
        if self.id == 2:
            undefined  # type: ignore[name-defined] # noqa: B018, F821


def exiting(body: Exiting, message: Message[Exiting]) -> None:
    message.keep_result(body.id)


def exiting_batch(bodies: list[Exiting]) -> None: ...


class Jammed(Exception):
    """An error whose constructor needs more than its text."""

    def __init__(self, wheel: int, *, why: object) -> None:
        super().__init__(wheel, why)
        self.wheel = wheel

    def __str__(self) -> str:
        return f"wheel {self.args[0]} is jammed"


def note(path: str, line: object) -> None:
    with Path(path).open("a") as file:
        file.write(f"{line}\n")


def square(number: int, message: Message[int]) -> None:
    message.keep_result({"square": number * number, "process": os.getpid()})


def order(order: Order, headers: Mapping[str, str], message: Message[Order]) -> None:
    assert isinstance(order, Order)
    message.keep_result([order.id, order.item, headers["from"], message.deliveries, message.token, message.key])
    message.then("next", {"id": order.id})


def sends_on(queue: str, message: Message[str]) -> None:
    message.then(queue, {"from": "process"})


def sends_all_on(queues: list[str], messages: list[Message[str]]) -> None:
    for queue, message in zip(queues, messages, strict=True):
        message.then(queue, {"from": "process"})


def untyped(order, message):  # type: ignore[no-untyped-def]
    message.keep_result(type(order).__name__)


def reads_itself(message: Message[Any]) -> None:
    message.decode(Order)


def reads_all_themselves(messages: list[Message[Any]]) -> None:
    for message in messages:
        message.decode(Order)


def end(name: str, message: Message[Any]) -> Outcome | str | None:
    outcomes: dict[str, Outcome | None] = {
        "retry": Retry(60, "later"), "snooze": Snooze(60), "dead": Dead("bad address", "no such street"),
        "drop": Drop(), "done": None,
    }  # fmt: skip
    how, _, name = name.partition(" ")
    if how == "hand":
        match name:
            case "retry" | "snooze":
                getattr(message, name)(60)
            case "dead":
                message.dead("bad address", "no such street")
            case _:
                getattr(message, name)()
        return "a value that is no outcome"
    outcome = outcomes[name]
    if how == "raise" and outcome is not None:
        raise outcome
    return outcome


async def _awaits(body: str) -> None:
    raise AssertionError("it is never awaited")


def forgets_to_await(body: str) -> Any:
    return _awaits(body)


def end_by_class(how: str) -> Any:
    how, _, name = how.partition(" ")
    outcome = {"Retry": Retry, "Dead": Dead, "Drop": Drop, "Snooze": Snooze}[name]
    if how == "raised":
        raise outcome
    return outcome


class Postponed(Outcome):
    """An outcome of the application, which waypost does not know."""


class Limited(Retry):
    """One whose constructor does not call that of its base."""

    def __init__(self) -> None:
        self.limit = 10


def end_by_own_class(how: str) -> Any:
    how, _, name = how.partition(" ")
    outcome = {"Postponed": Postponed, "Limited": Limited}[name]()
    if how == "raised":
        raise outcome
    return outcome


def fail(name: str) -> None:
    class Local(Exception):
        pass

    match name:
        case "key":
            raise KeyError("no such order")
        case "file":
            raise FileNotFoundError(2, "No such file or directory", "order.txt")
        case "jammed":
            raise Jammed(7, why=object())
        case "local":
            raise Local("only here")
        case "unicode":
            raise ValueError("lone \ud800 surrogate", 2**80)
        case "exit":
            raise SystemExit("enough")
        case "interrupt":
            raise KeyboardInterrupt


def die(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)


def hang(path: str, message: Message[str]) -> None:
    """Hang on the first delivery, after noting the pids of this process and its worker."""
    note(path, f"{os.getpid()} {os.getppid()} {message.deliveries}")
    if message.deliveries == 1 and message.attempts == 0:
        threading.Event().wait()


def hold(seconds: float) -> None:
    """Run in C without releasing the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


def hold_for_long(path: str) -> None:
    note(path, os.getpid())
    ctypes.PyDLL(None).sleep(600)


def many(orders: list[Order], messages: list[Message[Order]]) -> None:
    for one, message in zip(orders, messages, strict=True):
        if one.id % 10 == 0:
            message.dead("round")
        else:
            message.keep_result(one.id)


def talk(text: str) -> None:
    sys.stdout.write(f"{text} {os.getpid()}\n")
    time.monotonic()


def unkeepable(number: int) -> object:
    return object()


def cube(number: int) -> int:
    """Return the result."""
    return number**3


def sends_canary_on(body: Any, message: Message[Any]) -> None:
    message.then("next", {"card": "Canary7Secret"})


def repeats_on(body: Any, message: Message[Any]) -> None:
    """Send its own body on."""
    message.then("next", body, headers={"own": "1"})
