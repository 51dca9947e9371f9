"""The client of a Django process: made at the first use, anew after a fork, and when tests change settings."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import connections

from waypost.client import Waypost
from waypost.django.configuration import Configuration, database_name, read_configuration
from waypost.errors import InvalidInput

Identity = tuple[int, str | None]


class _Process:
    """What this process has open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.configuration: Configuration | None = None
        self.identity: Identity | None = None
        self.client: Waypost | None = None
        #: Calls that use the client at this moment.
        self.calls = 0
        #: The client of a test, in place of the process's own.
        self.replaced: Waypost | None = None


_process = _Process()


def configuration() -> Configuration:
    """Return the setting WAYPOST, read once."""
    if _process.configuration is None:
        _process.configuration = read_configuration()
    return _process.configuration


def client() -> Waypost:
    """Return the client of this process, for all that needs no transaction: `stats`, `redrive`, `wait_result`, …"""
    chosen = configuration()
    with _process.lock:
        return _current_client(chosen)


def _current_client(chosen: Configuration) -> Waypost:
    """Return the open client of this process; the caller holds the lock."""
    process = _process
    if process.replaced is not None:
        return process.replaced
    # A forked child has to have its own, and tests change the name of the database.
    identity = (os.getpid(), database_name(chosen.database) if chosen.url is None else None)
    if process.client is None or process.identity != identity:
        if process.client is not None:
            process.client.close()
        process.client, process.identity = make_client(chosen), identity
    elif process.client._closed:
        process.client.open()
    return process.client


def make_client(chosen: Configuration, **more: Any) -> Waypost:
    """Return a new client by the setting WAYPOST."""
    post = Waypost(chosen.store_url, namespace=chosen.namespace, **{**chosen.options, **more})
    if post.store.transactions is not None and chosen.database is not None:
        post.store.transactions.on_busy = partial(refuse_self_wait, chosen.database, "this call")
    return post


def refuse_self_wait(alias: str, call: str, *, certain: bool = False) -> None:
    """Raise `InvalidInput` where a write over a connection of its own would wait for the caller's transaction."""
    connection = connections[alias]
    if connection.vendor != "sqlite" or not connection.in_atomic_block:
        return
    # Without a statement so far there is no transaction that could have the file.
    if certain or (connection.connection is not None and connection.connection.in_transaction):
        raise InvalidInput(
            f"{call} inside of atomic() of {alias!r}: SQLite has one writer at a time, so it would wait for your "
            "transaction, which waits for it; use publish and cancel of waypost.django, which join the transaction, or "
            "do it after the block"
        )


def close() -> None:
    """Close the client of this process; the next use opens it again."""
    with _process.lock:
        if _process.client is not None:
            _process.client.close()


@contextmanager
def use_client() -> Iterator[Waypost]:
    """Lend the client for one call. In tests it keeps no connection, with which their database could not be removed."""
    chosen = configuration()
    with _process.lock:
        # One step: between the two another call that ends could close it.
        post = _current_client(chosen)
        _process.calls += 1
    try:
        yield post
    finally:
        with _process.lock:
            _process.calls -= 1
            if _process.calls == 0 and is_test_run() and post is not _process.replaced:
                post.close()


def replace_client(post: Waypost | None) -> None:
    """Let all of this process use the client of a test; None: its own again."""
    with _process.lock:
        _process.replaced = post


def is_test_run() -> bool:
    """Whether Django's test environment is set up."""
    # A program that runs no tests has no need to import it.
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


def follow_settings(*, setting: str, **_: object) -> None:
    """Begin anew when a test changes settings."""
    if setting in ("WAYPOST", "DATABASES"):
        close()
        with _process.lock:
            _process.configuration = _process.client = None
