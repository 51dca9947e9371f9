"""A handler for processes, which import it by name."""

from __future__ import annotations

from waypost import Message


def square(number: int, message: Message[int]) -> None:
    message.then("squares", number * number)
