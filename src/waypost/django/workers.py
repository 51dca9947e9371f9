"""The worker of a Django project: its client, with the handlers and tasks of all applications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.db import close_old_connections, connections, reset_queries
from django.utils.module_loading import autodiscover_modules

from waypost.client import Waypost
from waypost.django.clients import make_client
from waypost.django.configuration import Configuration, read_configuration
from waypost.django.handlers import register_declared
from waypost.message import Message
from waypost.middleware import Middleware


class DatabaseConnections(Middleware):
    """Around each handler, what Django does around each request: connections that are old or broken are closed."""

    def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
        """Wrap a handler in a thread."""
        refresh_connections()
        try:
            return call_next()
        finally:
            close_old_connections()

    async def handle_async(self, messages: Sequence[Message[Any]], call_next: Callable[[], Awaitable[Any]]) -> Any:
        """Wrap an async handler: its queries run in a thread of its own, whose connections end with it."""
        async with ThreadSensitiveContext():
            await sync_to_async(reset_queries, thread_sensitive=True)()
            try:
                return await call_next()
            finally:
                await sync_to_async(connections.close_all, thread_sensitive=True)()


def refresh_connections() -> None:
    """Close connections that are old or broken, and forget the queries that DEBUG records."""
    reset_queries()
    close_old_connections()


def worker_client(queues: Iterable[str] | None = None) -> Waypost:
    """Return a client with the handlers of all applications, and their tasks; of `queues` only, if given."""
    chosen = read_configuration()
    autodiscover_modules(chosen.handlers)
    given = chosen.options.get("middleware", ())
    post = make_client(chosen, middleware=[DatabaseConnections(), *given])
    register_declared(post)
    if hasattr(settings, "TASKS"):
        register_tasks(post, queues)
    return post


def register_tasks(post: Waypost, queues: Iterable[str] | None) -> None:
    """Register a handler for the tasks of each queue, also of `queues` that only the caller knows."""
    from waypost.django.task_api import task_backends
    from waypost.django.task_runs import TaskRetry, task_handler
    from waypost.django.tasks import WaypostBackend, task_queues

    found = task_queues()
    backends = [task_backends[alias] for alias in task_backends.settings]
    for queue in queues or ():
        for backend in backends:
            # A backend without QUEUES takes any queue.
            if isinstance(backend, WaypostBackend) and not backend.queues and queue.startswith(backend.queue_prefix):
                found.setdefault(queue, backend)
    for queue, backend in found.items():
        retry = TaskRetry(backend.retry)
        options: Any = {"concurrency": backend.concurrency, "retry": retry}
        post._register_handler(queue, None, options, None)(task_handler(post, backend, retry))


def configure_queues(post: Waypost, chosen: Configuration) -> None:
    """Apply the settings of WAYPOST['QUEUES']."""
    for queue, policy in chosen.queues.items():
        if policy:
            post.configure(queue, **policy)
