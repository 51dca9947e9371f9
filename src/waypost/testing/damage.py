"""Damage on purpose: take a message out of all places in which a store could find it, behind the store's back."""

from __future__ import annotations

from typing import Any, cast

from waypost.store.port import Call


def strand(store: Any, queue: str, message_id: str) -> Call[Any]:
    """The call that makes a message unreachable: its body stays, and no claim, listing or end can find it.

    It is a method `strand` of the store, which the contract does not ask for: only tests use it.
    """
    return cast("Call[Any]", store.strand(queue, message_id))
