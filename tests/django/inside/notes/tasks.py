"""Tasks, with the decorator of Django 6 or of its backport."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from waypost import Dead
from waypost.django.task_api import PACKAGE

task = import_module(PACKAGE).task


@task()
def add(a: int, b: int = 0) -> int:
    return a + b


@task(queue_name="mails", priority=-100)
async def send(to: str) -> str:
    return f"sent to {to}"


@task(takes_context=True)
def third_time(context: Any, name: str) -> dict[str, Any]:
    if context.attempt < 3:
        raise ConnectionError(f"{name} is away")
    return {"attempt": context.attempt, "id": context.task_result.id}


@task(backend="once", queue_name="once")
def divide(by: int) -> float:
    return 1 / by


@task(backend="once", queue_name="once")
def no_json() -> object:
    return object()


@task(backend="once", queue_name="once")
def refuse() -> None:
    raise Dead("refused by the task")


@task(backend="brief", queue_name="brief")
def brief() -> int:
    return 1


@task(backend="any", queue_name="made-up")
def anywhere() -> int:
    return 2
