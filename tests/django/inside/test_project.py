"""Commands, migrations and the admin of the project."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.migrations.exceptions import IrreversibleError
from django.test import Client, override_settings

from tests.django.inside.conftest import IS_POSTGRES
from tests.django.inside.notes.models import Note
from waypost import Drained, Waypost
from waypost.django import client, close, publish
from waypost.errors import InvalidInput

Work = Callable[..., Drained]
LETTERS = "/admin/waypost/deadletter/"
SCRIPT = "<script>alert(1)</script>"


def bury(count: int = 1, queue: str = "box", reason: str = "rejected") -> list[str]:
    ids = []
    for _ in range(count):
        ids.append(publish(queue, {"text": SCRIPT}, headers={"name": SCRIPT}).id)
        with client().receive(queue) as message:
            assert message is not None
            raise_dead(message, reason)
    return ids


def raise_dead(message: object, reason: str) -> None:
    message.dead(reason, SCRIPT)  # type: ignore[attr-defined]


@pytest.fixture
def boss() -> Client:
    User.objects.filter(username="boss").delete()
    User.objects.create_superuser("boss", password="secret")
    browser = Client()
    assert browser.login(username="boss", password="secret")
    return browser


def test_the_command_runs_handlers_and_configures_queues() -> None:
    publish("orders", {"id": 9})
    errors = io.StringIO()
    call_command("waypost_worker", "--until-empty", "--no-scheduler", stderr=errors)
    assert Note.objects.get().text == "order 9"
    assert client().policy("orders").max_deliveries == 7
    assert "orders" in errors.getvalue()
    assert "1 handled" in errors.getvalue()


def test_the_command_names_what_it_cannot_run() -> None:
    with pytest.raises(CommandError, match="no handler is registered for nonsense"):
        call_command("waypost_worker", "--queues", "nonsense", "--until-empty")
    with override_settings(WAYPOST={"URI": "x"}), pytest.raises(CommandError, match="did you mean"):
        call_command("waypost_worker", "--until-empty")


def test_models_have_their_migrations() -> None:
    # Both end with an error if something is wrong.
    assert call_command("makemigrations", "--check", "--dry-run", verbosity=0) is None
    assert call_command("check", fail_level="WARNING") is None


def test_commands_that_read_every_model_find_no_letters() -> None:
    found = io.StringIO()
    for more in ((), ("--all",)):
        call_command("dumpdata", "waypost", *more, stdout=found)
    assert found.getvalue().replace("\n", "") == "[][]"


def test_other_databases_get_no_tables_of_the_store() -> None:
    call_command("migrate", database="other", verbosity=0)
    tables = connections["other"].introspection.table_names()
    assert "notes_note" in tables
    assert [name for name in tables if name.startswith("wp_")] == []


@pytest.mark.skipif(not IS_POSTGRES, reason="a SQLite file keeps the tables")
def test_the_migration_is_reversed_only_without_messages() -> None:
    publish("box", 1)
    with pytest.raises(IrreversibleError, match="1 messages"):
        call_command("migrate", "waypost", "zero", verbosity=0)
    client().purge("box")
    close()
    call_command("migrate", "waypost", "zero", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'wp!_%' ESCAPE '!'")
        assert cursor.fetchone() == (0,)
        cursor.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'wp!_%' ESCAPE '!'")
        assert cursor.fetchone() == (0,)
    call_command("migrate", verbosity=0)
    assert publish("box", 1).status == "queued"


def test_the_admin_lists_dead_letters_and_escapes_them(boss: Client) -> None:
    (id,) = bury()
    page = boss.get(LETTERS)
    assert page.status_code == 200
    assert id in page.text if hasattr(page, "text") else id in page.content.decode()
    letter = boss.get(f"{LETTERS}box/{id}/").content.decode()
    assert "alert(1)" in letter
    assert SCRIPT not in letter
    assert boss.get(f"{LETTERS}box/{id[::-1]}/").status_code == 404
    assert boss.get(f"{LETTERS}?queue=box&reason=other").content.decode().count(id) == 0
    assert boss.get(f"{LETTERS}?queue=not a queue").status_code == 200


def test_a_hidden_body_is_not_on_the_page(boss: Client) -> None:
    (id,) = bury()
    client().configure("box", hide_bodies=True)
    try:
        page = boss.get(f"{LETTERS}box/{id}/").content.decode()
    finally:
        client().configure("box", hide_bodies=False)
    assert "hides its bodies" in page
    assert "text" not in page.split("<h2>Body</h2>")[1].split("<h2>History</h2>")[0]


def test_the_admin_redrives_and_logs_it(boss: Client) -> None:
    first, second = bury(2)
    done = boss.post(f"{LETTERS}act/", {"action": "redrive", "queue": "box", "id": first}, follow=True)
    assert "1 of box redriven" in done.content.decode()
    assert [one.id for one in client().dead_letters("box")] == [second]
    assert client().ledger("box").ready == 1
    action = client().actions().actions[0]
    assert (action.user, action.via, action.action, action.queue) == ("boss", "django admin", "redrive", "box")
    boss.post(f"{LETTERS}act/", {"action": "redrive", "queue": "box"})
    assert client().ledger("box").ready == 2


def test_the_admin_purges_after_a_confirmation(boss: Client) -> None:
    bury(2)
    (kept,) = bury(reason="other")
    page = boss.post(f"{LETTERS}act/", {"action": "purge", "queue": "box", "reason": "rejected"})
    assert "cannot be undone" in page.content.decode()
    assert len(list(client().dead_letters("box"))) == 3
    given = {"action": "purge", "queue": "box", "reason": "rejected", "confirmed": "yes"}
    done = boss.post(f"{LETTERS}act/", given, follow=True)
    assert "2 of box purged" in done.content.decode()
    assert [one.id for one in client().dead_letters("box")] == [kept]


def test_the_admin_purges_the_selected_letters_only(boss: Client) -> None:
    first, second, third = bury(3)
    given = {"action": "purge", "queue": "box", "id": [first, third]}
    page = boss.post(f"{LETTERS}act/", given).content.decode()
    assert "2 selected dead letters of box" in page
    assert page.count('name="id"') == 2
    done = boss.post(f"{LETTERS}act/", {**given, "confirmed": "yes"}, follow=True).content.decode()
    assert "2 of box purged" in done
    assert [one.id for one in client().dead_letters("box")] == [second]
    page = boss.post(f"{LETTERS}act/", {"action": "purge", "queue": "box"}).content.decode()
    assert "Purge 1 dead letter of box" in page


def test_the_admin_reports_how_many_it_searched_for_a_class_of_error(boss: Client) -> None:
    bury(2)
    page = boss.get(f"{LETTERS}?queue=box&error_type=builtins.ValueError").content.decode()
    assert "None of the 2 dead letters of this page" in page
    assert 'value="redrive"' in page


def test_what_could_not_be_logged_is_an_error_on_the_page(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InvalidInput("No log today")

    bury()
    monkeypatch.setattr(Waypost, "log_action", refuse)
    page = boss.post(f"{LETTERS}act/", {"action": "redrive", "queue": "box"}, follow=True).content.decode()
    assert "No log today" in page
    assert "1 of box redriven" in page


def test_a_redrive_by_class_has_the_name_of_the_user(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    users: list[object] = []
    start = Waypost.start_bulk

    def start_bulk(post: Waypost, *given: Any, **options: Any) -> Any:
        users.append(options["user"])
        return start(post, *given, **options)

    monkeypatch.setattr(Waypost, "start_bulk", start_bulk)
    bury()
    boss.post(f"{LETTERS}act/", {"action": "redrive", "queue": "box", "error_type": "builtins.ValueError"})
    assert users == ["boss"]


def test_each_step_in_the_admin_has_its_permission() -> None:
    bury()
    User.objects.filter(username="clerk").delete()
    clerk = User.objects.create_user("clerk", password="secret", is_staff=True)
    browser = Client()
    browser.login(username="clerk", password="secret")
    assert browser.get(LETTERS).status_code == 403
    clerk.user_permissions.add(Permission.objects.get(codename="view_deadletter"))
    assert browser.get(LETTERS).status_code == 200
    for action in ("redrive", "purge"):
        given = {"action": action, "queue": "box", "confirmed": "yes"}
        assert browser.post(f"{LETTERS}act/", given).status_code == 403
    assert browser.get(f"{LETTERS}act/").status_code == 403
    assert client().ledger("box").dead_kept == 1
    strict = Client(enforce_csrf_checks=True)
    strict.login(username="clerk", password="secret")
    assert strict.post(f"{LETTERS}act/", {"action": "redrive", "queue": "box"}).status_code == 403
