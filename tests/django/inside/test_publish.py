"""Publishing from a project: inside and outside of atomic()."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, override_settings

from tests.django.inside.conftest import IS_POSTGRES
from tests.django.inside.notes.models import Note
from tests.django.inside.notes.waypost_handlers import used_threads, write_note
from waypost import Drained
from waypost.django import acancel, apublish, cancel, client, close, publish, publish_many
from waypost.django.checks import check_configuration
from waypost.django.clients import configuration
from waypost.django.testing import use_test_post
from waypost.errors import ConfigurationError, InvalidInput

Work = Callable[..., Drained]


def ready(queue: str) -> int:
    return client().ledger(queue).ready


def test_a_message_exists_if_and_only_if_the_transaction_commits() -> None:
    with transaction.atomic():
        Note.objects.create(text="a")
        publish("box", 1)
        transaction.set_rollback(True)
    assert (ready("box"), Note.objects.count()) == (0, 0)
    with transaction.atomic():
        Note.objects.create(text="a")
        published = publish("box", 1, key="one")
        assert published.status == "queued"
    assert (ready("box"), Note.objects.count()) == (1, 1)


def test_a_savepoint_that_is_rolled_back_takes_its_messages_along() -> None:
    with transaction.atomic():
        publish_many("box", [1, 2])
        with transaction.atomic():
            publish("box", 3)
            transaction.set_rollback(True)
    assert ready("box") == 2


def test_a_test_post_answers_within_a_transaction_as_the_store_does() -> None:
    with use_test_post() as test:
        with transaction.atomic():
            first = publish("box", 1, key="one")
            assert publish("box", 2, key="one").status == "duplicate"
            with transaction.atomic():
                publish("box", 3, key="two")
                transaction.set_rollback(True)
            assert publish("box", 4, key="two").status == "queued"
            assert cancel("box", first.id) == "cancelled"
            assert test.published() == []
        assert [message.body for message in test.published("box")] == [1, 4]
        with TestCase.captureOnCommitCallbacks(execute=True), transaction.atomic():
            publish("box", 5, key="five")
            test.assert_published("box", 5, count=0)
        assert test.ledger("box").ready == 2


def test_outside_of_atomic_a_message_is_published_at_once() -> None:
    publish("box", 1)
    assert ready("box") == 1
    assert asyncio.run(apublish("box", 2)).status == "queued"
    assert ready("box") == 2


def test_without_autocommit_the_open_transaction_is_joined() -> None:
    transaction.set_autocommit(False)
    try:
        publish("box", 1)
        transaction.rollback()
        publish("box", 2)
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert ready("box") == 1


def test_a_broken_transaction_publishes_nothing() -> None:
    note = Note.objects.create(text="a")
    with transaction.atomic():
        with pytest.raises(IntegrityError), transaction.atomic(savepoint=False):
            Note.objects.create(pk=note.pk, text="b")
        with pytest.raises(TransactionManagementError):
            publish("box", 1)
    assert ready("box") == 0


def test_a_transaction_of_another_database_is_not_joined() -> None:
    with transaction.atomic(using="other"):
        publish("box", 1)
        transaction.set_rollback(True, using="other")
    assert ready("box") == 1


def test_on_sqlite_workers_are_woken_by_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[Any] = []
    monkeypatch.setattr(client().wakeups, "wake", woken.append)
    with transaction.atomic():
        publish("box", 1)
        transaction.set_rollback(True)
    assert woken == []
    with transaction.atomic():
        publish("box", 1)
        assert woken == []
    # PostgreSQL notifies by itself.
    assert woken == ([] if IS_POSTGRES else [{"box": ["*"]}])


def test_handlers_run_with_fresh_connections_and_publish_by_themselves(work: Work) -> None:
    with transaction.atomic():
        write_note.publish({"id": 1, "lose_connection": True})
        write_note.publish({"id": 2})
    assert work(["orders"]).handled == 2
    assert sorted(note.text for note in Note.objects.all()) == ["order 1", "order 2"]
    assert client().ledger("orders").done >= 2


def test_a_handler_settles_in_a_transaction_of_django(work: Work) -> None:
    publish("once", "a")
    done = client().ledger("once").done
    while client().ledger("once").done == done:
        work(["once"])
    assert [note.text for note in Note.objects.all()] == ["a"]


def test_an_async_handler_uses_the_database(work: Work) -> None:
    publish("awaited", "later")
    work(["awaited"])
    assert Note.objects.get().text == "later"


def test_async_handlers_share_no_thread(work: Work) -> None:
    used_threads.clear()
    publish_many("threads", [1, 2])
    assert work(["threads"]).handled == 2
    # Each waited for the other in its own thread.
    assert len(set(used_threads)) == 2


def test_the_client_is_made_anew_when_it_was_closed() -> None:
    before = client()
    close()
    publish("box", 1)
    assert client() is before
    assert ready("box") == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12: there may be threads
def test_a_forked_process_has_a_client_of_its_own() -> None:
    before = client()
    child = os.fork()
    if child == 0:
        try:
            publish("box", 1)
            os._exit(0 if client() is not before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client() is before
    assert ready("box") == 1


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"URI": "memory://"}, "did you mean"),
        ({"DATABASE": "nowhere"}, "alias of DATABASES"),
        ({"DATABASE": None}, "no store"),
        ({"URL": "valkey://127.0.0.1", "DATABASE": "default"}, "outside of your databases"),
        ({"QUEUES": ["orders"]}, "dict of dicts"),
        ("memory://", "is a dict"),
    ],
)
def test_a_setting_that_makes_no_sense_is_reported(setting: Any, text: str) -> None:
    with override_settings(WAYPOST=setting):
        (message,) = check_configuration()
        assert text in message.msg
        with pytest.raises((ConfigurationError, InvalidInput), match=text):
            publish("box", 1)


def test_a_database_in_memory_is_refused_with_a_way_out() -> None:
    with override_settings(WAYPOST={"DATABASE": "memory"}), pytest.raises(ConfigurationError, match="TEST"):
        publish("box", 1)


def test_a_store_outside_of_the_database_is_published_to_at_once() -> None:
    with override_settings(WAYPOST={"URL": "memory://django"}):
        with transaction.atomic():
            publish("box", 1)
            transaction.set_rollback(True)
        assert ready("box") == 1
    assert ready("box") == 0


def test_in_a_test_run_no_connection_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core import mail
    from django.test import utils

    # A mailbox of a project is no test run.
    monkeypatch.setattr(mail, "outbox", [], raising=False)
    post = client()
    publish("box", 0)
    assert post._executor is not None
    client().purge("box")
    monkeypatch.setattr(utils._TestState, "saved_data", object(), raising=False)
    publish("box", 1)
    post = client()
    with transaction.atomic():
        publish("box", 2)
    assert post._executor is None
    assert ready("box") == 2


def test_a_client_that_a_call_uses_is_not_closed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from waypost.django import clients

    held: list[bool] = []
    current = clients._current_client

    def under_lock(chosen: Any) -> Any:
        held.append(clients._process.lock.locked())
        return current(chosen)

    monkeypatch.setattr(clients, "_current_client", under_lock)
    with clients.use_client():
        assert clients._process.calls == 1
    assert held == [True]


def test_a_url_of_a_database_implies_no_alias(tmp_path: Path) -> None:
    with override_settings(WAYPOST={"URL": f"sqlite:///{tmp_path}/own.db"}):
        assert configuration().database is None
        with transaction.atomic():
            publish("box", 1)
            transaction.set_rollback(True)
        assert ready("box") == 1
        close()


@pytest.mark.skipif(IS_POSTGRES, reason="PostgreSQL has many writers")
def test_a_publish_that_would_wait_for_its_own_transaction_is_refused() -> None:
    with transaction.atomic():
        Note.objects.create(text="a")
        with pytest.raises(InvalidInput, match="one writer at a time"):
            publish("box", 1, transaction=None)
        assert client().publish("box", 2, transaction=connection).status == "queued"
    assert publish("box", 3, transaction=None).status == "queued"
    assert ready("box") == 2


def test_a_cancel_is_a_part_of_the_transaction() -> None:
    client().purge("box", "delayed")
    kept, gone = publish("box", 1, delay=60), publish("box", 2, delay=60, key="note:2")
    with transaction.atomic():
        Note.objects.create(text="a")
        assert cancel("box", key="note:2") == "cancelled"
        assert cancel(kept) == "cancelled"
        transaction.set_rollback(True)
    assert [one.id for one in client().timers("box")] == [kept.id, gone.id]
    with transaction.atomic():
        Note.objects.create(text="b")
        assert cancel("box", gone.id) == "cancelled"
    assert [one.id for one in client().timers("box")] == [kept.id]
    assert cancel("box", key="none") == "unknown"
    assert asyncio.run(acancel(kept)) == "cancelled"
    assert list(client().timers("box")) == []


@pytest.mark.skipif(IS_POSTGRES, reason="PostgreSQL has many writers")
def test_a_call_that_would_wait_for_its_own_transaction_is_refused_at_once() -> None:
    published = publish("box", 1, delay=60)
    with transaction.atomic():
        Note.objects.create(text="a")
        for call in (
            lambda: client().cancel(published),
            lambda: client().purge("box", "delayed"),
            lambda: client().pause("box"),
        ):
            with pytest.raises(InvalidInput, match="one writer at a time"):
                call()
        assert client().stats("box").queue == "box", "a call that reads does not wait"
    assert client().cancel(published) == "cancelled"


def test_the_connection_of_the_project_stays_its_own() -> None:
    with transaction.atomic():
        publish("box", 1)
        assert connection.in_atomic_block
    assert not connection.in_atomic_block
