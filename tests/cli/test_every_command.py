"""Every command on every store, judged by its output. The first test fails if a command has no check."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import STORES, CommandRunner
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import NoRetry
from waypost.cli.main import GROUPS, make_parser
from waypost.store.port import Heartbeat
from waypost.views import LoggedAction

pytestmark = pytest.mark.promise("FACE-2")

ROOT = Path(__file__).parents[2]
ID = re.compile(r"[0-9a-z]{24}")
#: Commands with tests of their own, because they are more than a call of the store.
ELSEWHERE = {"demo", "pipeline", "web"}
CHECKS: dict[str, Callable[[CommandRunner], None]] = {}
Check = Callable[[CommandRunner], None]


def check_of(*names: str) -> Callable[[Check], Check]:
    """Register a function as the check of these commands."""

    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def list_commands(found: argparse.ArgumentParser, path: str = "") -> Iterator[str]:
    """List the commands of a parser; subcommands as `dead list`."""
    inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path
    for action in inner:
        for name, one in action.choices.items():
            yield from list_commands(one, f"{path} {name}".strip())


def test_every_command_has_a_check_and_a_group() -> None:
    known = [path for path in list_commands(make_parser()) if path.split()[0] not in ELSEWHERE]
    assert sorted(set(known) - set(CHECKS)) == []
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted({name.split()[0] for name in known} - set(grouped)) == []
    assert len(grouped) == len(set(grouped))


def test_every_command_with_output_has_json() -> None:
    without = []

    def visit(found: argparse.ArgumentParser, path: str) -> None:
        inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner and "--json" not in found._option_string_actions:
            without.append(path)
        for action in inner:
            for name, one in action.choices.items():
                visit(one, f"{path} {name}".strip())

    visit(make_parser(), "")
    assert sorted(without) == ["completion"]


# ---- publish and list ----------------------------------------------------------------------------------------------


@check_of("publish")
def publishing(cli: CommandRunner) -> None:
    assert re.fullmatch(r"queued [0-9a-z]{24}\n", cli.run("publish", "orders", '{"id": 7}', "--key", "a"))
    assert cli.json("publish", "orders", "8", "--key", "a")["status"] == "duplicate"
    cli.run("publish", "totals", "1", "--key", "a", "--unique", "until_claimed")
    with cli.post.receive("totals"):
        assert cli.json("publish", "totals", "2", "--key", "a")["status"] == "queued"
    assert cli.run("publish", "orders", "later", "--text", "--delay", "1h").startswith("delayed ")
    body = cli.folder / "body.bin"
    body.write_bytes(b"\x00\xff")
    cli.run("publish", "orders", "--file", str(body), "--bytes", "--priority", "9", "--header", "a=b")
    lines = cli.folder / "many.ndjson"
    lines.write_text("".join(f'{{"id": {number % 40}}}\n' for number in range(50)))
    printed_text = cli.run("publish", "imports", "--many", str(lines), "--key-field", "id", "--window", "1d")
    assert printed_text == "imports: 40 queued, 10 duplicate\n"
    assert cli.json("publish", "others", "--many", str(lines))["statuses"] == {"queued": 50}
    assert [message.body for message in cli.post.peek("orders")] == [b"\x00\xff", {"id": 7}]
    assert [timer.body for timer in cli.post.timers("orders")] == ["later"]
    assert cli.post.peek("orders")[0].headers == {"a": "b"}


@check_of("queues", "stats")
def queues_and_stats(cli: CommandRunner) -> None:
    assert cli.run("queues") == "no queues\n"
    cli.post.publish("orders", 1)
    cli.post.publish("mails", 1, delay=60)
    cli.post.pause("mails")
    lines = cli.run("queues").splitlines()
    assert lines[0].split()[:3] == ["queue", "ready", "delayed"]
    assert lines[1].split()[:3] == ["mails", "0", "1"]
    assert lines[1].endswith("paused")
    assert cli.run("queues", "--names") == "mails\norders\n"
    assert cli.json("queues", "--names") == ["mails", "orders"]
    assert [one["ready"] for one in cli.json("queues")] == [0, 1]
    printed_text = cli.run("stats", "orders", "--minutes", "5")
    assert re.search(r"^ready +1, the oldest for \d", printed_text, re.MULTILINE)
    assert re.search(r"^minute +published", printed_text, re.MULTILINE)
    assert "orders" in cli.run("stats")
    (stats,) = cli.json("stats", "orders")
    assert (stats["queue"], stats["ledger"]["ready"], stats["ledger"]["balance"]) == ("orders", 1, 0)


@check_of("peek")
def peeking(cli: CommandRunner) -> None:
    assert cli.run("peek", "orders") == "no messages\n"
    id = cli.post.publish("orders", {"text": "é"}, key="a", group="g").id
    cli.post.publish("orders", b"\x00\xff")
    lines = cli.run("peek", "orders").splitlines()
    assert (lines[1].split()[0], '{"text":"é"}' in lines[1], len(lines)) == (id, True, 3)
    displayed = cli.json("peek", "orders")
    assert [one["body"] for one in displayed] == [{"text": "é"}, {"base64": "AP8="}]
    assert [one["key"] for one in cli.json("peek", "orders", "--group", "g")] == ["a"]
    printed_text = cli.run("peek", "orders", "--id", id)
    assert re.search(rf"^id +{id}$", printed_text, re.MULTILINE)
    assert '"text": "é"' in printed_text
    assert cli.run("peek", "orders", "--id", "0" * 24, code=1) == "no messages\n"


@check_of("groups list", "groups pause", "groups resume", "groups configure", "groups skip")
def groups_of_a_queue(cli: CommandRunner) -> None:
    cli.post.publish("orders", 1, group="acme")
    assert cli.run("groups", "list", "orders", code=2) == ""
    cli.post.configure("orders", order="group")
    assert cli.run("groups", "pause", "orders", "acme") == "group acme of orders is paused\n"
    assert cli.json("groups", "pause", "orders", "acme")["changed"] is False
    assert cli.json("groups", "configure", "orders", "acme", "weight=3", "rate=100/m")["changed"] is True
    cells = cli.run("groups", "list", "orders").splitlines()[1].split()
    assert (cells[:3], cells[-3:]) == (["acme", "1", "0"], ["3", "rate=100/m", "paused"])
    assert cli.run("groups", "resume", "orders", "acme") == "group acme of orders is resumed\n"
    with cli.post.receive("orders") as message:
        assert message is not None
        message.retry(after=600)
        held = message.id
    (listed,) = cli.json("groups", "list", "orders")["groups"]
    assert (listed["group"], listed["held_by"], listed["weight"]) == ("acme", held, 3)
    assert cli.run("groups", "skip", "orders", "acme") == f"others may pass {held}\n"
    assert cli.json("groups", "skip", "orders", "acme")["skipped"] is None


@check_of("find")
def searches(cli: CommandRunner) -> None:
    id = cli.post.publish("orders", 1, key="order-7").id
    for arguments in ((id,), ("--key", "order-7")):
        assert cli.run("find", *arguments).splitlines()[1].split() == ["orders", id, "ready"]
        assert cli.json("find", *arguments) == [{"queue": "orders", "id": id, "state": "ready", "ended": None}]
    with cli.post.receive("orders"):
        pass
    assert cli.run("find", id).splitlines()[1].split() == ["orders", id, "done"]
    cli.run("find", "--key", "order-7", code=1)
    assert "no queue has it" in cli.stderr
    cli.run("find", "0" * 24, code=1)
    assert "no queue and no journal has it" in cli.stderr


@check_of("history", "journal", "ledger")
def histories(cli: CommandRunner) -> None:
    id = cli.post.publish("orders", 1).id
    with cli.post.receive("orders"):
        pass
    lines = cli.run("history", "orders", id).splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["published", "claimed", "done"]
    assert [event["event"] for event in cli.json("history", "orders", id)] == ["published", "claimed", "done"]
    cli.run("history", "orders", "0" * 24, code=1)
    assert "has no events" in cli.stderr
    assert len(cli.run("journal", "orders").splitlines()) == 4
    assert cli.run("journal", "nothing") == "no events\n"
    lines = cli.run("journal", "orders", "--json", "--event", "done").splitlines()
    assert [json.loads(line)["message_id"] for line in lines] == [id]
    assert len(cli.run("journal", "orders", "--after", "1", "-n", "1", "--json").splitlines()) == 1
    assert len(cli.run("journal", "orders", "--follow", "-n", "0", "--after", "0", "--limit", "3").splitlines()) == 3
    printed_text = cli.run("ledger", "orders")
    assert re.search(r"^  \+ published +1$", printed_text, re.MULTILINE)
    assert re.search(r"^  = balance +0$", printed_text, re.MULTILINE)
    assert cli.json("ledger")["orders"]["done"] == 1


@check_of("watch")
def watching(cli: CommandRunner) -> None:
    cli.post.publish("orders", 1)
    cli.bury("mails", 1)
    lines = cli.run("watch", "--once").splitlines()
    assert [re.split(" {2,}", line)[0] for line in lines[:3]] == ["queue", "mails", "! orders"]
    assert lines[3] == "2 queues, 1 ready, 0 leased, 1 dead, 0 workers, 1 unserved"
    displayed = cli.json("watch")
    assert [(one["queue"], one["ready"], one["dead"]) for one in displayed["queues"]] == [
        ("mails", 0, 1),
        ("orders", 1, 0),
    ]
    assert "needs a terminal" in cli.refused("watch")


# ---- act on a queue --------------------------------------------------------------------------------------------------


@check_of("pause", "resume", "configure")
def pausing(cli: CommandRunner) -> None:
    assert cli.run("pause", "orders") == "orders is paused\n"
    assert cli.run("pause", "orders").startswith("nothing to change")
    assert cli.post.stats("orders").paused
    assert cli.json("resume", "orders") == {"queue": "orders", "changed": True, "paused": False}
    assert cli.run("resume", "orders").startswith("nothing to change")
    printed_text = cli.run("configure", "orders", "lease=90s", "rate=100/m", "max_pending=5", "completed=true")
    assert re.search(r"^lease +90.0 s$", printed_text, re.MULTILINE)
    assert re.search(r"^rate +100/m$", printed_text, re.MULTILINE)
    assert cli.run("configure", "orders") == printed_text
    policy = cli.json("configure", "orders", "max_pending=none", "lease=none")["policy"]
    assert (policy["max_pending"], policy["lease_seconds"], policy["completed"]) == (None, None, 1000)


@check_of("cancel", "purge")
def cancelling(cli: CommandRunner) -> None:
    id = cli.post.publish("orders", 1).id
    cli.post.publish("orders", 2, key="a")
    cli.post.publish_many("orders", [3, 4])
    assert cli.run("cancel", "orders", id) == "cancelled\n"
    assert cli.json("cancel", "orders", "--key", "a")["status"] == "cancelled"
    assert "no such message" in cli.run("cancel", "orders", "0" * 24, code=1)
    assert "--yes" in cli.refused("purge", "orders", "--state", "ready")
    assert cli.post.ledger("orders").ready == 2
    assert cli.run("purge", "orders", "--state", "ready", "--yes") == "removed 2 ready messages of orders\n"
    assert cli.json("purge", "orders", "--state", "ready", "--yes")["removed"] == 0
    first = cli.post.publish("orders", 5, chain=True, delay=3600)
    cli.post.publish("orders", 6, after=[first])
    assert cli.json("purge", "orders", "--state", "waiting", "--yes")["removed"] == 1


@check_of("remove")
def removing(cli: CommandRunner) -> None:
    cli.post.publish("orders", 1)
    refused = cli.refused("remove", "orders", "--yes", code=1)
    assert "queue orders is not empty" in refused
    assert "1 ready message" in refused
    cli.post.purge("orders")
    assert "--yes" in cli.refused("remove", "orders")
    assert cli.post.queues() == ["orders"]
    assert cli.run("remove", "orders", "--yes") == "removed orders\n"
    assert cli.post.queues() == []
    assert cli.run("remove", "orders", "--yes", code=1) == "there is no queue orders\n"
    cli.post.configure("orders", lease=10)
    assert cli.json("remove", "orders", "--yes") == {"queue": "orders", "removed": True}


@check_of("actions")
def actions(cli: CommandRunner) -> None:
    assert cli.run("actions") == "no actions\n"
    cli.post.log_action(LoggedAction("mara", "web", "pause", "orders", True, "orders is paused"))
    assert "orders is paused" in cli.run("actions", "--queue", "orders")
    assert cli.run("actions", "--user", "other") == "no actions like that\n"
    assert cli.json("actions")[0]["user"] == "mara"


@check_of("dead edit")
def edited(cli: CommandRunner) -> None:
    (letter,) = cli.bury("orders", {"amount": "ten"})
    assert "nothing was edited" in cli.refused("dead", "edit", "orders", letter)
    assert "is no JSON" in cli.refused("dead", "edit", "orders", letter, "--body", "{")
    done = cli.run("dead", "edit", "orders", letter, "--body", '{"amount": 10}', "--header", "by=me")
    (stored,) = cli.post.peek("orders")
    assert done == f"{stored.id} is queued in place of {letter}\n"
    assert stored.body == {"amount": 10}
    assert stored.headers == {"by": "me", "waypost-edited-from": letter}
    assert "no dead letter" in cli.refused("dead", "edit", "orders", letter, "--text", "x", code=1)


@check_of("bulk start", "bulk list", "bulk run", "bulk pause", "bulk resume", "bulk cancel")
def bulk_actions(cli: CommandRunner) -> None:
    assert cli.run("bulk", "list") == "no bulk actions\n"
    cli.bury("orders", *range(3), reason="too big")
    cli.bury("orders", 9)
    id = cli.run("bulk", "start", "orders", "redrive", "--reason", "too big", "--rate", "1000/s").strip()
    assert cli.json("bulk", "pause", id)["state"] == "paused"
    assert "paused, 0 dead letters done" in cli.run("bulk", "run", id, code=1)
    assert cli.json("bulk", "resume", id)["state"] == "running"
    assert cli.run("bulk", "run", id) == "redrive of orders: done, 3 dead letters done\n"
    assert cli.post.ledger("orders").dead_kept == 1
    assert "has ended" in cli.refused("bulk", "cancel", id)
    assert "--yes" in cli.refused("bulk", "start", "orders", "purge")
    second = cli.json("bulk", "start", "orders", "purge", "--yes")["id"]
    assert cli.json("bulk", "cancel", second)["state"] == "cancelled"
    assert [one["id"] for one in cli.json("bulk", "list")] == [second, id]
    assert "cancelled" in cli.run("bulk", "list").splitlines()[1]
    assert "there is no bulk action" in cli.refused("bulk", "run", "0" * 24)
    cli.post.publish_many("mails", range(3), key=lambda body: f"k{body}")
    third = cli.run("bulk", "start", "mails", "prioritize", "--state", "ready", "--priority", "9", "--key-prefix", "k2")
    assert cli.run("bulk", "run", third.strip()) == "prioritize of mails: done, 1 message done\n"
    assert [one["priority"] for one in cli.json("peek", "mails")] == [9, 5, 5]
    assert [one["key"] for one in cli.json("peek", "mails", "--key-prefix", "k2")] == ["k2"]


@check_of("dead list", "dead peek", "dead redrive", "dead purge")
def dead_letters(cli: CommandRunner) -> None:
    assert cli.run("dead", "list", "orders") == "no dead letters\n"
    first, second = cli.bury("orders", 1, 2, reason="too big", error="a\x1b[31m long\nstory")
    (third,) = cli.bury("orders", 3)
    lines = cli.run("dead", "list", "orders", "-n", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["id", first, second, "2"]
    assert "too big" in lines[1]
    assert "\x1b" not in "".join(lines)
    assert [one["id"] for one in cli.json("dead", "list", "orders", "--reason", "rejected")] == [third]
    assert cli.json("dead", "list", "orders", "--died-before", "2020-01-01T00:00:00Z") == []
    assert cli.json("dead", "list", "orders", "--died-before", "1h") == []
    assert len(cli.json("dead", "list", "orders", "--died-after", "1.5h", "--published-after", "2d")) == 3
    assert "a duration looks like" in cli.refused("dead", "list", "orders", "--died-before", "twoh")
    assert cli.json("dead", "list", "orders", "--by-reason")[0] | {"error_type": ""} == {
        "reason": "too big", "error_type": "", "count": 2,
    }  # fmt: skip
    assert re.search(r"^reason +too big$", cli.run("dead", "peek", "orders", first), re.MULTILINE)
    assert cli.json("dead", "peek", "orders", first)["body"] == 1
    assert cli.json("dead", "peek", "orders", first)["traceback"] is None
    failed = cli.post.publish("failing", 1).id
    with pytest.raises(LookupError), cli.post.receive("failing", retry=NoRetry()):
        raise LookupError("no such order")
    assert '    raise LookupError("no such order")\n' in cli.run("dead", "peek", "failing", failed)
    assert "LookupError: no such order" in cli.json("dead", "peek", "failing", failed)["traceback"]
    assert "no dead letter" in cli.refused("dead", "peek", "orders", "0" * 24, code=1)
    assert "no dead letters were chosen" in cli.refused("dead", "redrive", "orders")
    assert cli.run("dead", "redrive", "orders", first) == "1 dead letter of orders made ready again\n"
    assert cli.json("dead", "redrive", "orders", "--reason", "too big", "--rate", "100/s")["moved"] == [second]
    assert "1 not found" in cli.run("dead", "redrive", "orders", "0" * 24, code=1)
    assert "--yes" in cli.refused("dead", "purge", "orders")
    cli.bury("orders", 4, reason="kept")
    assert (
        cli.json("dead", "purge", "orders", "--reason", "kept", "--died-after", "2001-01-01T00:00:00Z", "--yes")[
            "removed"
        ]
        == 1
    )
    assert cli.run("dead", "purge", "orders", "--yes") == "removed 1 dead letter of orders\n"
    assert cli.json("dead", "redrive", "orders", "--all")["moved"] == []
    ledger = cli.post.ledger("orders")
    assert (ledger.ready, ledger.dead_kept, ledger.balance) == (2, 0, 0)
    assert re.search(r"^  - dead +4  \(0 kept now\)$", cli.run("ledger", "orders"), re.MULTILINE)


@check_of("timers list", "timers cancel", "timers reschedule")
def timers(cli: CommandRunner) -> None:
    assert cli.run("timers", "list", "mails") == "no timers\n"
    id = cli.post.publish("mails", "hello", key="a", delay=600).id
    cli.post.publish("mails", "later", delay=86_400)
    lines = cli.run("timers", "list", "mails").splitlines()
    assert ("10.0 min" in lines[1] or "9." in lines[1], lines[1].split()[0]) == (True, id)
    assert len(cli.json("timers", "list", "mails", "--before", "2999-01-01T00:00:00Z")) == 2
    assert [one["body"] for one in cli.json("timers", "list", "mails", "--key", "a")] == ["hello"]
    assert cli.run("timers", "reschedule", "mails", "a", "--at", "2999-01-01T00:00:00Z") == (
        "a is due 2999-01-01T00:00:00Z\n"
    )
    assert cli.json("timers", "reschedule", "mails", "a", "--delay", "2h")["status"] == "moved"
    assert cli.json("timers", "reschedule", "mails", "--id", id, "--delay", "3h")["status"] == "moved"
    ready = cli.post.publish("mails", "now", key="ready").id
    assert "is due already" in cli.refused("timers", "reschedule", "mails", "ready", "--delay", "2h", code=1)
    cli.post.cancel("mails", ready)
    assert "no timer with the key" in cli.refused("timers", "reschedule", "mails", "b", "--delay", "2h", code=1)
    assert cli.post.ledger("mails").published == 3
    assert cli.run("timers", "cancel", "mails", "--key", "a") == "cancelled\n"
    assert "no such timer" in cli.run("timers", "cancel", "mails", "--key", "a", code=1)
    assert cli.json("timers", "cancel", "mails", "0" * 24, code=1)["status"] == "unknown"


@check_of("schedules preview", "schedules list", "schedules save", "schedules pause", "schedules resume",
       "schedules trigger", "schedules backfill", "schedules remove")  # fmt: skip
def schedules(cli: CommandRunner) -> None:
    preview = cli.run_bare("schedules", "preview", "0 9 * * *", "--start", "2026-03-06T00:00:00Z", "--count", "1")
    assert preview.startswith("2026-03-06T09:00:00Z")
    assert cli.run("schedules", "list") == "no schedules\n"
    printed_text = cli.run(
        "schedules", "save", "rollup", "--queue", "reports", "--cron", "0 9 * * *", "--body", '{"a": 1}'
    )
    assert printed_text.startswith("saved rollup::cron:0 9 * * *:UTC, next 2")
    assert cli.json("schedules", "save", "ping", "--queue", "pings", "--every", "5")["every_seconds"] == 5.0
    assert [line.split()[:2] for line in cli.run("schedules", "list").splitlines()] == [
        ["queue", "name"], ["pings", "ping"], ["reports", "rollup"],
    ]  # fmt: skip
    assert len(cli.json("schedules", "list", "--queue", "reports", "--count", "3")[0]["next_fires"]) == 3
    assert cli.run("schedules", "pause", "rollup") == "paused\n"
    assert cli.json("schedules", "resume", "rollup") == {"name": "rollup", "changed": True}
    assert cli.run("schedules", "trigger", "rollup").startswith("published ")
    assert [message.body for message in cli.post.peek("reports")] == [{"a": 1}]
    interval = ("--from", "2026-03-01", "--to", "2026-03-03T12:00:00Z")
    assert cli.run("schedules", "backfill", "rollup", *interval, "--dry-run").startswith("would publish 3 messages, ")
    assert cli.json("schedules", "backfill", "rollup", *interval)["published"] == 3
    assert "in the future" in cli.refused("schedules", "backfill", "rollup", *interval[:3], "2999-01-01", code=2)
    assert cli.run("schedules", "remove", "rollup") == "removed\n"
    cli.run("schedules", "remove", "rollup", code=1)
    assert "no schedule" in cli.refused("schedules", "trigger", "rollup", code=1)


# ---- run -------------------------------------------------------------------------------------------------------------


def started(cli: CommandRunner, *arguments: str) -> subprocess.Popen[str]:
    """Start a command as a process."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", *arguments],
        cwd=cli.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT / 'src'}", "WAYPOST_URL": cli.url, "WAYPOST_NAMESPACE": cli.namespace},
    )  # fmt: skip


def stopped(process: subprocess.Popen[str], condition: Callable[[], Any], what: str) -> tuple[str, str]:
    """Stop a process once a condition holds, and return its standard output and error."""
    try:
        until(condition, what)
        process.send_signal(signal.SIGTERM)
        printed, printed_text = process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        process.kill()
    assert process.returncode == 0, printed_text
    return printed, printed_text


@check_of("worker", "workers")
def working(cli: CommandRunner) -> None:
    assert cli.run("workers") == "no workers\n"
    (cli.folder / "shop.py").write_text(
        "from waypost import Waypost\n"
        f"post = Waypost({cli.url!r}, namespace={cli.namespace!r})\n"
        "@post.handler('orders')\n"
        "async def charge(body: int) -> None: ...\n"
    )
    cli.post.publish("orders", 1)
    cli.post.publish("mails", 1)
    process = started(cli, "worker", "shop:post", "--json")
    found: dict[str, Any] = {}

    def listed() -> bool:
        found.update(cli.json("workers"))
        return bool(found["workers"]) and cli.post.ledger("orders").done == 1

    printed, printed_text = stopped(process, listed, "a worker")
    assert json.loads(printed)["total"]["handled"] == 1
    assert found["workers"][0]["queues"][0]["name"] == "orders"
    assert found["unserved"] == ["mails"]
    assert "1 done" in printed_text
    assert cli.run("workers") == "no workers\nserved by no worker: mails, orders\n"
    assert cli.run("workers", "stop", "absent", code=1) == "there is no worker absent\n"
    executor = cli.post.store.connect(start_timeout=5)
    try:
        executor.run(cli.post.store.heartbeat(Heartbeat("here"), 60_000))
    finally:
        executor.close()
    assert "stops after its next heartbeat" in cli.run("workers", "stop", "here")
    assert "requested to stop" in cli.run("workers")
    assert cli.json("workers", "quiet", "here") == {"worker": "here", "request": "quiet", "requested": True}
    assert "which worker?" in cli.refused("workers", "stop", code=2)


@check_of("relay")
def relaying(cli: CommandRunner) -> None:
    cli.post.publish_many("orders", [1, 2, 3])
    to = f"sqlite:///{cli.folder / 'target.db'}#copies"
    assert cli.json("relay", "--queue", "orders", "--to", to, "--until-empty")["queues"]["orders"]["handled"] == 1
    assert "waypost worker stopped: 3 done" in cli.stderr
    assert cli.post.ledger("orders").done == 3
    assert "a relay cannot send to ftp://" in cli.refused("relay", "--queue", "orders", "--to", "ftp://x")


@check_of("scheduler", "promoter")
def schedulers(cli: CommandRunner) -> None:
    cli.post.save_schedule("ping", queue="pings", every=0.05)
    scheduler = started(cli, "scheduler", "--ttl", "2", "--json")
    printed, _ = stopped(scheduler, lambda: cli.post.ledger("pings").published, "a fire")
    assert any(json.loads(line)["fires"] for line in printed.splitlines())
    cli.post.publish("mails", 1, delay=0.2)
    promoter = started(cli, "promoter", "--ttl", "2")
    _, printed_text = stopped(promoter, lambda: cli.post.ledger("mails").ready, "a promotion")
    assert "promoted 1, 0 timers left" in printed_text


# ---- set up and check ------------------------------------------------------------------------------------------------


@check_of("init")
def initializing(cli: CommandRunner) -> None:
    folder = cli.folder / "shop"
    assert "waypost worker app --reload" in cli.run_bare("init", str(folder))
    assert (folder / "app.py").exists()
    cli.run_bare("init", str(folder), code=2)


@check_of("migrate")
def migrating(cli: CommandRunner) -> None:
    if cli.post.store.kind != "postgres":
        assert cli.run("migrate").startswith("nothing to do: only PostgreSQL has tables to migrate\n")
        cli.run("migrate", "--finish")
        assert cli.json("migrate", "--check")["finished"] is True
        cli.run("migrate", "--undo", code=2)
        return
    assert "already" in cli.run("migrate")
    assert cli.json("migrate", "--check")["current"] is True
    assert "CREATE TABLE" in cli.run_bare("migrate", "--sql")


@check_of("doctor")
def doctor(cli: CommandRunner) -> None:
    printed = cli.json("doctor", code=1 if cli.post.store.kind in ("valkey", "postgres") else 0)
    checks = {finding["check"] for finding in printed["findings"]}
    assert {"server", "clock", "ledger", "workers", "handlers", "readers"} <= checks
    cli.post.publish("orders", 1)
    printed_text = cli.run("doctor", code=1)
    assert "WRONG handlers: queue orders has 1 ready and 0 delayed messages" in printed_text
    assert re.search(r"^\d+ findings, \d wrong$", printed_text, re.MULTILINE)


@check_of("bench")
def bench(cli: CommandRunner) -> None:
    printed_text = cli.run("bench", "--messages", "50", "--pings", "10")
    assert re.search(r"^claim, handle, settle +[\d,]+ messages/s$", printed_text, re.MULTILINE)
    assert re.search(r"^publish to handler +p50 [\d.]+ ms, p99 [\d.]+ ms, max [\d.]+ ms$", printed_text, re.MULTILINE)
    figures = cli.json("bench", "--messages", "50", "--pings", "10")
    assert (figures["store"], figures["messages"]) == (cli.post.store.kind, 50)
    assert figures["latency_seconds"]["p50"] > 0
    ledger = cli.post.ledger("waypost-bench")
    assert (ledger.ready, ledger.leased, ledger.balance, ledger.done) == (0, 0, 0, 222)
    cli.post.publish("waypost-bench", 1)
    assert "is in use" in cli.refused("bench", "--messages", "50")


@check_of("completion")
def completion(cli: CommandRunner) -> None:
    assert "complete -" in cli.run_bare("completion", "bash")
    assert "#compdef waypost" in cli.run_bare("completion", "zsh")
    assert "invalid choice" in cli.run_bare("completion", "fish", code=2) + cli.stderr


#: Checks that start processes, which cannot see a memory store of this one.
OUTSIDE: tuple[Check, ...] = (working, schedulers)


PROMISES = {
    dead_letters: pytest.mark.promise("DEAD-2"),
    timers: pytest.mark.promise("TIMER-1"),
    schedules: pytest.mark.promise("CRON-7"),
    histories: pytest.mark.promise("SEE-5"),
}
CHECKS_BY_STORE = [
    pytest.param(check, store, id=f"{check.__name__}-{store}", marks=PROMISES.get(check, ()))
    for check in dict.fromkeys(CHECKS.values())
    for store in STORES
    if store != "memory" or check not in OUTSIDE
]


@pytest.mark.parametrize(("check", "cli"), CHECKS_BY_STORE, indirect=["cli"])
def test_a_command_works_on_every_store(check: Check, cli: CommandRunner) -> None:
    check(cli)
    for queue in cli.post.queues():
        assert cli.post.ledger(queue).balance == 0
