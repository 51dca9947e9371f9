"""Commands that change something are in the log of actions: one entry each, with who, the outcome and its undo."""

from __future__ import annotations

import getpass
import re
import socket

import pytest

from tests.cli.conftest import CommandRunner
from tests.cli.test_every_command import list_commands
from waypost.cli.action_log import command_line
from waypost.cli.main import make_parser
from waypost.errors import StoreUnavailable
from waypost.views import LoggedAction

pytestmark = pytest.mark.promise("FACE-2", "FACE-3")

#: Commands that change what an operator decides, and the actions that the log has of them.
LOGGED = {
    "pause": "pause", "resume": "resume", "configure": "configure", "cancel": "cancel", "purge": "purge",
    "remove": "remove", "dead redrive": "redrive", "dead purge": "purge", "dead edit": "edit_dead",
    "bulk start": "bulk_redrive", "bulk pause": "change_bulk", "bulk resume": "change_bulk",
    "bulk cancel": "change_bulk", "timers cancel": "cancel", "timers reschedule": "reschedule",
    "schedules save": "save_schedule", "schedules pause": "pause_schedule", "schedules resume": "resume_schedule",
    "schedules trigger": "trigger_schedule", "schedules backfill": "backfill_schedule",
    "schedules remove": "remove_schedule", "workers": "stop_worker", "doctor": "mend",
}  # fmt: skip
#: The same of groups.
LOGGED_OF_GROUPS = {
    "groups pause": "pause_group", "groups resume": "resume_group", "groups configure": "configure_group",
    "groups skip": "skip_held",
}  # fmt: skip
#: Commands that read, publish, run something, or work on tables, lakes and bulk actions that are logged already.
NOT_LOGGED = {
    "publish", "queues", "stats", "peek", "find", "history", "ledger", "journal", "watch", "dead list", "dead peek",
    "groups list", "bulk list", "bulk run", "actions",
    "timers list", "schedules preview", "schedules list", "worker", "web",
    "scheduler", "promoter", "relay", "migrate", "bench", "completion", "demo", "init",
}  # fmt: skip


def entries(cli: CommandRunner) -> list[LoggedAction]:
    """The log of actions, the oldest first."""
    return cli.post.actions(limit=100).actions[::-1]


def test_every_command_is_logged_or_known_not_to_be() -> None:
    known = {path for path in list_commands(make_parser()) if not path.startswith("pipeline")}
    assert known - set(LOGGED) - set(LOGGED_OF_GROUPS) == NOT_LOGGED


def test_each_command_that_changes_something_is_one_entry(sqlite_cli: CommandRunner) -> None:
    cli = sqlite_cli
    dead = cli.bury("orders", 1, 2, 3)
    cli.post.publish("orders", 4, key="later", delay=600)
    cli.post.publish("orders", 5, key="never", delay=600)
    first = cli.post.publish("orders", 6).id
    ran: list[str] = []

    def run(*arguments: str, code: int = 0) -> str:
        ran.append(next(name for name in LOGGED if " ".join(arguments).startswith(f"{name} ")))
        printed = cli.run(*arguments, code=code)
        assert [one.action for one in entries(cli)] == [
            "stop_worker" if name == "workers" else LOGGED[name] for name in ran
        ]
        return printed

    run("pause", "orders")
    run("resume", "orders")
    run("configure", "orders", "max_running=5", "lease=30s")
    run("cancel", "orders", first)
    run("purge", "orders", "--state", "ready", "--yes")
    run("dead", "redrive", "orders", dead[0])
    run("dead", "edit", "orders", dead[1], "--body", '{"secret": 7}')
    run("dead", "purge", "orders", "--reason", "rejected", "--yes")
    bulk = run("bulk", "start", "orders", "redrive", "--rate", "1/s").strip()
    for change in ("pause", "resume", "cancel"):
        run("bulk", change, bulk)
    run("timers", "reschedule", "orders", "later", "--delay", "2h")
    run("timers", "cancel", "orders", "--key", "never")
    run("schedules", "save", "rollup", "--queue", "reports", "--every", "60", "--body", '"secret"')
    for change in ("pause", "resume", "trigger"):
        run("schedules", change, "rollup")
    run("schedules", "backfill", "rollup", "--from", "2026-03-01", "--to", "2026-03-01T01:00:00Z")
    run("schedules", "remove", "rollup")
    run("remove", "nothing", "--yes", code=1)
    run("workers", "stop", "shop-1", code=1)
    run("doctor", "--mend", "--yes", "--quiet", code=1)
    assert set(ran) == set(LOGGED)
    # Reading commands leave no trace.
    cli.run("configure", "orders")
    cli.run("doctor", "--quiet", code=1)
    cli.run("schedules", "list")
    assert len(entries(cli)) == len(ran)
    found = {one.command: one for one in entries(cli)}
    assert {one.user for one in found.values()} == {f"{getpass.getuser()}@{socket.gethostname()}"}
    assert {one.via for one in found.values()} == {"command line"}
    assert all(one.ok and one.text for one in found.values())
    assert not [one for one in found.values() if "secret" in f"{one}" or cli.url in f"{one}"]
    assert found[f"waypost dead edit orders {dead[1]} --body BODY"].python == (
        f"post.replace_dead('orders', '{dead[1]}', body=body)"
    )
    assert found["waypost pause orders"].python == "post.pause('orders')"
    assert found[f"waypost bulk pause {bulk}"].bulk == bulk


@pytest.mark.promise("FACE-3")
def test_what_a_command_did_has_the_undo_that_the_page_offers(sqlite_cli: CommandRunner) -> None:
    cli = sqlite_cli
    cli.post.publish("orders", 1)
    cli.run("pause", "orders")
    cli.run("pause", "orders")
    cli.run("configure", "orders", "lease=30s", "max_running=5", "rate=none")
    cli.run("schedules", "save", "rollup", "--queue", "reports", "--every", "60", "--key", "k")
    cli.run("schedules", "pause", "rollup")
    published = re.findall(r"[0-9a-z]{24}", cli.run("schedules", "trigger", "rollup"))[0]
    cli.run("schedules", "remove", "rollup")
    undo = [one.undo for one in entries(cli)]
    assert all(one is not None for one in undo)
    assert [(one.action, one.options) for one in undo if one is not None] == [
        ("resume", {}),
        (None, {}),
        ("configure", {"lease": 60.0, "max_running": None}),
        (None, {}),
        ("resume_schedule", {"queue": "reports", "key": "k"}),
        ("cancel", {"queue": "reports", "id": published}),
        (None, {}),
    ]
    assert [one.queue for one in entries(cli)][-3:] == ["reports"] * 3


def test_a_command_that_fails_is_logged_unless_nothing_was_tried(sqlite_cli: CommandRunner) -> None:
    cli = sqlite_cli
    cli.post.publish("orders", 1)
    cli.refused("remove", "orders", "--yes", code=1)
    cli.refused("timers", "reschedule", "orders", "none", "--delay", "5", code=1)
    cli.refused("configure", "orders", "lease=-5", code=2)
    cli.refused("remove", "orders")
    removed, moved = entries(cli)
    assert (removed.action, removed.ok, removed.undo) == ("remove", False, None)
    assert "not empty" in removed.text
    assert (moved.action, moved.ok) == ("reschedule", False)


def test_a_log_that_cannot_be_written_does_not_fail_the_command(
    sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waypost import Waypost

    def refuse(self: Waypost, action: LoggedAction) -> LoggedAction:
        raise StoreUnavailable("away")

    sqlite_cli.post.publish("orders", 1)
    monkeypatch.setattr(Waypost, "log_action", refuse)
    assert sqlite_cli.run("pause", "orders") == "orders is paused\n"
    assert "the log of actions has no entry of this command: away" in sqlite_cli.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("pause orders --url sqlite:///a.db", "pause orders"),
        ("pause --url=valkey://u:secret@h orders --namespace n --json", "pause orders"),
        ("schedules pause s valkey://u:secret@h", "schedules pause s"),
        ("dead edit q i --bod secret", "dead edit q i --body BODY"),
        ("dead edit q i --text=secret --header a=secret --head b=secret",
         "dead edit q i --text TEXT --header HEADER --header HEADER"),
        ("purge q --state dead --yes", "purge q --state dead"),
        ("bulk start q cancel --state ready --header a=secret", "bulk start q cancel --state ready --header HEADER"),
        ("purge q --state dead --header=a=secret", "purge q --state dead --header HEADER"),
        ("configure q rate=5/s", "configure q rate=5/s"),
    ],
)  # fmt: skip
def test_the_logged_command_has_no_store_no_body_and_no_header(given: str, expected: str) -> None:
    assert command_line(given.split()) == f"waypost {expected}"
