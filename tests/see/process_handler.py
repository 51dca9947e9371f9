"""A handler for processes, which find it by its name."""

from __future__ import annotations

from waypost import Message


def square(number: int, message: Message[int]) -> None:
    message.then("squares", number * number)
