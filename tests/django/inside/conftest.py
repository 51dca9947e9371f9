"""The project is set up and migrated once; queues of the tests are emptied by running a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django.inside.settings")

import django
import pytest
from django.core.management import call_command
from django.db import connection, connections

from waypost import Drained

django.setup()

IS_POSTGRES = connection.vendor == "postgresql"


@pytest.fixture(scope="session", autouse=True)
def migrated() -> Iterator[None]:
    call_command("migrate", verbosity=0)
    yield
    from waypost.django import close

    close()
    connections.close_all()


@pytest.fixture(autouse=True)
def empty(migrated: None) -> Iterator[None]:
    yield
    from tests.django.inside.notes.models import Note
    from waypost.django import client

    Note.objects.all().delete()
    for queue in client().queues():
        for state in ("ready", "delayed", "dead"):
            client().purge(queue, state)


@pytest.fixture
def work() -> Callable[..., Drained]:
    """Run a worker of the project until nothing is ready any more."""
    from waypost.django.workers import worker_client

    def run(queues: list[str] | None = None) -> Any:
        with worker_client(queues) as post:
            return post.worker(queues, scheduler=False).run(until_empty=True, signals=False)

    return run
