"""Handlers of the project."""

from __future__ import annotations

import threading
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from waypost import Message, Retry
from waypost.django import every, handler

from .models import Note

settled: list[str] = []


@handler("orders", concurrency=1)
def write_note(order: dict[str, Any]) -> None:
    Note.objects.create(text=f"order {order['id']}")
    if order.get("lose_connection"):
        connection.connection.close()


@handler("once")
def write_once(text: str, message: Message[str]) -> None:
    with transaction.atomic(), message.transaction(connection):
        Note.objects.create(text=text)
        if message.attempts == 0:
            raise Retry(0.001)


@handler("awaited")
async def write_later(text: str) -> None:
    await Note.objects.acreate(text=text)


used_threads: list[int] = []
together = threading.Barrier(2)


@handler("threads", concurrency=2)
async def meet(number: int) -> None:
    def wait() -> None:
        used_threads.append(threading.get_ident())
        together.wait(60)

    await sync_to_async(wait)()


@every(3600, name="hourly")
def hourly() -> None:
    return
