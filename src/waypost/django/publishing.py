"""Publishing from views, models and commands: a part of the open transaction, or at once if there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, Unpack, overload

from asgiref.sync import sync_to_async
from django.db import connections

from waypost.client.options import PublishKeywords, PublishManyKeywords, QueueName
from waypost.django.clients import configuration, refuse_self_wait, use_client
from waypost.message import Queue, queue_name
from waypost.values import CancelStatus, Published
from waypost.wake.port import ALL_SLEEPERS
from waypost.wake.wakeups import Wakeups

T = TypeVar("T")


@overload
def publish(queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
@overload
def publish(queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
def publish(queue: QueueName, body: object, **options: Unpack[PublishKeywords]) -> Published:
    """Publish a message and return its id and what happened to it, with the options of `Waypost.publish`.

    Inside `transaction.atomic` of WAYPOST['DATABASE'] the message is a part of the transaction: it exists if and only
    if that commits. Outside it is published at once. `transaction=None` publishes at once in any case; SQLite has one
    writer at a time, so it is refused there while the transaction is open.

        with transaction.atomic():
            order.save()
            publish("orders", {"id": order.pk})
    """
    return _publish("publish", queue, body, dict(options))  # type: ignore[no-any-return]


@overload
def publish_many(queue: Queue[T], bodies: Iterable[T], **options: Unpack[PublishManyKeywords]) -> list[Published]: ...
@overload
def publish_many(queue: str, bodies: Iterable[object], **options: Unpack[PublishManyKeywords]) -> list[Published]: ...
def publish_many(queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]) -> list[Published]:
    """Publish a batch as `publish` does one message, with the options of `Waypost.publish_many`."""
    return _publish("publish_many", queue, bodies, dict(options))  # type: ignore[no-any-return]


async def apublish(queue: QueueName, body: object, **options: Unpack[PublishKeywords]) -> Published:
    """`publish` for async views. Transactions of Django are sync: use `publish` in the function that has one."""
    return await sync_to_async(_publish, thread_sensitive=True)("publish", queue, body, dict(options))  # type: ignore[no-any-return]


async def apublish_many(
    queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]
) -> list[Published]:
    """`publish_many` for async views."""
    return await sync_to_async(_publish, thread_sensitive=True)("publish_many", queue, bodies, dict(options))  # type: ignore[no-any-return]


def cancel(queue: QueueName | Published, id: str | None = None, *, key: str | None = None) -> CancelStatus:
    """Cancel a message by what `publish` returned, its id or its key: `cancelled`, `requested`, `finished`, `unknown`.

    Inside `transaction.atomic` of WAYPOST['DATABASE'] it is cancelled if and only if that commits, outside at once.

        with transaction.atomic():
            order.delete()
            cancel("reminders", key=f"order:{order.pk}")
    """
    joined = open_transaction(configuration().database)
    with use_client() as post:
        return post.cancel(queue, id, key=key, transaction=joined)


async def acancel(queue: QueueName | Published, id: str | None = None, *, key: str | None = None) -> CancelStatus:
    """`cancel` for async views. Transactions of Django are sync: use `cancel` in the function that has one."""
    return await sync_to_async(cancel, thread_sensitive=True)(queue, id, key=key)


def _publish(method: str, queue: QueueName, body: Any, options: dict[str, Any]) -> Any:
    joined = None
    if "transaction" not in options:
        joined = open_transaction(configuration().database)
        if joined is not None:
            options["transaction"] = joined
    elif options["transaction"] is None and (alias := configuration().database) is not None:
        refuse_self_wait(alias, "transaction=None", certain=True)
    with use_client() as post:
        published = getattr(post, method)(queue, body, **options)
        # Where the project itself commits (without autocommit), Django has no hook for it.
        if joined is not None and joined.vendor == "sqlite" and joined.in_atomic_block:
            _wake_at_commit(joined, post.wakeups, queue_name(queue))
    return published


def open_transaction(alias: str | None) -> Any:
    """Return Django's connection of an alias if it is in a transaction, otherwise None."""
    if alias is None:
        return None
    connection = connections[alias]
    # Without a connection there is no transaction either, unless each statement begins one.
    autocommit = connection.settings_dict["AUTOCOMMIT"] if connection.connection is None else connection.autocommit
    if not connection.in_atomic_block and autocommit:
        return None
    # An error inside of atomic() leaves a transaction that only can be rolled back.
    connection.validate_no_broken_transaction()
    return connection


def _wake_at_commit(connection: Any, wakeups: Wakeups, queue: str) -> None:
    """Wake workers when the caller commits: SQLite itself sends no notification."""
    connection.on_commit(lambda: wakeups.wake({queue: [ALL_SLEEPERS]}), robust=True)
