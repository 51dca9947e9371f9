"""For tests of a Django project: a `TestPost` in place of the client of the process.

    class OrderTests(TestCase):
        def test_an_order_is_charged(self):
            with use_test_post() as test:
                with self.captureOnCommitCallbacks(execute=True):
                    place_order(7)
                test.assert_published("orders", {"id": 7})
                test.run_all()

A publish inside of `transaction.atomic` is there after the commit, as with a store in the database. The transaction of
a `TestCase` never commits: `captureOnCommitCallbacks(execute=True)`, or a `TransactionTestCase`, does what a commit
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from waypost.django.clients import configuration, replace_client
from waypost.django.handlers import register_declared
from waypost.django.workers import configure_queues, register_tasks
from waypost.testing import TestPost

#: What a `TestPost` takes of WAYPOST['OPTIONS']: the others are about connections.
OPTIONS = ("queues", "strict_queues", "middleware", "state", "on_event", "redact")


@contextmanager
def use_test_post(*, start: datetime | None = None, eager: bool = False) -> Iterator[TestPost]:
    """Let the project publish to a new `TestPost`, which has its handlers, schedules and tasks, for a `with` block.

    `start` and `eager` are those of `TestPost`. Handlers run in the thread of the test, and so in its transaction.
    """
    chosen = configuration()
    autodiscover_modules(chosen.handlers)
    options: dict[str, Any] = {name: chosen.options[name] for name in OPTIONS if name in chosen.options}
    with TestPost(start=start, eager=eager, **options) as test:
        register_declared(test)
        if hasattr(settings, "TASKS"):
            register_tasks(test, None)
        configure_queues(test, chosen)
        replace_client(test)
        try:
            yield test
        finally:
            replace_client(None)
