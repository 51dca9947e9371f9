"""Every command on every store, by what it prints. A command that no scene tries fails the first test."""

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

from tests.cli.conftest import STORES, Desk
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost.cli.main import GROUPS, make_parser

pytestmark = pytest.mark.promise("FACE-2")

ROOT = Path(__file__).parents[2]
ID = re.compile(r"[0-9a-z]{24}")
#: Commands that have tests of their own, because they are more than a call of the store.
ELSEWHERE = {"demo", "pipeline", "web"}
SCENES: dict[str, Callable[[Desk], None]] = {}
Scene = Callable[[Desk], None]


def scene(*names: str) -> Callable[[Scene], Scene]:
    """What follows tries these commands."""

    def keep(function: Scene) -> Scene:
        SCENES.update(dict.fromkeys(names, function))
        return function

    return keep


def list_commands(found: argparse.ArgumentParser, path: str = "") -> Iterator[str]:
    """The commands of a parser, those inside others as `dead list`."""
    inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path
    for action in inner:
        for name, one in action.choices.items():
            yield from list_commands(one, f"{path} {name}".strip())


def test_every_command_has_a_scene_and_a_group() -> None:
    known = [path for path in list_commands(make_parser()) if path.split()[0] not in ELSEWHERE]
    assert sorted(set(known) - set(SCENES)) == []
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted({name.split()[0] for name in known} - set(grouped)) == []
    assert len(grouped) == len(set(grouped))


def test_every_command_that_answers_knows_json() -> None:
    without = []

    def look(found: argparse.ArgumentParser, path: str) -> None:
        inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner and "--json" not in found._option_string_actions:
            without.append(path)
        for action in inner:
            for name, one in action.choices.items():
                look(one, f"{path} {name}".strip())

    look(make_parser(), "")
    assert sorted(without) == ["completion"]


# ---- publish and look -----------------------------------------------------------------------------------------------


@scene("publish")
def publishing(desk: Desk) -> None:
    assert re.fullmatch(r"queued [0-9a-z]{24}\n", desk.run("publish", "orders", '{"id": 7}', "--key", "a"))
    assert desk.json("publish", "orders", "8", "--key", "a")["status"] == "duplicate"
    assert desk.run("publish", "orders", "later", "--text", "--delay", "1h").startswith("delayed ")
    body = desk.folder / "body.bin"
    body.write_bytes(b"\x00\xff")
    desk.run("publish", "orders", "--file", str(body), "--bytes", "--priority", "9", "--header", "a=b")
    lines = desk.folder / "many.ndjson"
    lines.write_text("".join(f'{{"id": {number % 40}}}\n' for number in range(50)))
    printed_text = desk.run("publish", "imports", "--many", str(lines), "--key-field", "id", "--window", "1d")
    assert printed_text == "imports: 40 queued, 10 duplicate\n"
    assert desk.json("publish", "others", "--many", str(lines))["statuses"] == {"queued": 50}
    assert [message.body for message in desk.post.peek("orders")] == [b"\x00\xff", {"id": 7}]
    assert [timer.body for timer in desk.post.timers("orders")] == ["later"]
    assert desk.post.peek("orders")[0].headers == {"a": "b"}


@scene("queues", "stats")
def queues_and_stats(desk: Desk) -> None:
    assert desk.run("queues") == "no queues\n"
    desk.post.publish("orders", 1)
    desk.post.publish("mails", 1, delay=60)
    desk.post.pause("mails")
    lines = desk.run("queues").splitlines()
    assert lines[0].split()[:3] == ["queue", "ready", "delayed"]
    assert lines[1].split()[:3] == ["mails", "0", "1"]
    assert lines[1].endswith("paused")
    assert desk.run("queues", "--names") == "mails\norders\n"
    assert desk.json("queues", "--names") == ["mails", "orders"]
    assert [one["ready"] for one in desk.json("queues")] == [0, 1]
    printed_text = desk.run("stats", "orders", "--minutes", "5")
    assert re.search(r"^ready +1, the oldest for \d", printed_text, re.MULTILINE)
    assert re.search(r"^minute +published", printed_text, re.MULTILINE)
    assert "orders" in desk.run("stats")
    (stats,) = desk.json("stats", "orders")
    assert (stats["queue"], stats["ledger"]["ready"], stats["ledger"]["balance"]) == ("orders", 1, 0)


@scene("peek")
def peeking(desk: Desk) -> None:
    assert desk.run("peek", "orders") == "no messages\n"
    id = desk.post.publish("orders", {"text": "é"}, key="a", group="g").id
    desk.post.publish("orders", b"\x00\xff")
    lines = desk.run("peek", "orders").splitlines()
    assert (lines[1].split()[0], '{"text":"é"}' in lines[1], len(lines)) == (id, True, 3)
    displayed = desk.json("peek", "orders")
    assert [one["body"] for one in displayed] == [{"text": "é"}, {"base64": "AP8="}]
    assert [one["key"] for one in desk.json("peek", "orders", "--group", "g")] == ["a"]
    printed_text = desk.run("peek", "orders", "--id", id)
    assert re.search(rf"^id +{id}$", printed_text, re.MULTILINE)
    assert '"text": "é"' in printed_text
    assert desk.run("peek", "orders", "--id", "0" * 24, code=1) == "no messages\n"


@scene("history", "journal", "ledger")
def histories(desk: Desk) -> None:
    id = desk.post.publish("orders", 1).id
    with desk.post.receive("orders"):
        pass
    lines = desk.run("history", "orders", id).splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["published", "claimed", "done"]
    assert [event["event"] for event in desk.json("history", "orders", id)] == ["published", "claimed", "done"]
    desk.run("history", "orders", "0" * 24, code=1)
    assert "has no events" in desk.stderr
    assert len(desk.run("journal", "orders").splitlines()) == 4
    assert desk.run("journal", "nothing") == "no events\n"
    lines = desk.run("journal", "orders", "--json", "--event", "done").splitlines()
    assert [json.loads(line)["message_id"] for line in lines] == [id]
    assert len(desk.run("journal", "orders", "--after", "1", "-n", "1", "--json").splitlines()) == 1
    assert len(desk.run("journal", "orders", "--follow", "-n", "0", "--after", "0", "--limit", "3").splitlines()) == 3
    printed_text = desk.run("ledger", "orders")
    assert re.search(r"^  \+ published +1$", printed_text, re.MULTILINE)
    assert re.search(r"^  = balance +0$", printed_text, re.MULTILINE)
    assert desk.json("ledger")["orders"]["done"] == 1


@scene("watch")
def watching(desk: Desk) -> None:
    desk.post.publish("orders", 1)
    desk.bury("mails", 1)
    lines = desk.run("watch", "--once").splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["queue", "mails", "orders"]
    assert lines[3] == "2 queues, 1 ready, 0 leased, 1 dead, 0 workers"
    displayed = desk.json("watch")
    assert [(one["queue"], one["ready"], one["dead"]) for one in displayed["queues"]] == [
        ("mails", 0, 1),
        ("orders", 1, 0),
    ]
    assert "needs a terminal" in desk.refused("watch")


# ---- act on a queue --------------------------------------------------------------------------------------------------


@scene("pause", "resume", "configure")
def pausing(desk: Desk) -> None:
    assert desk.run("pause", "orders") == "orders is paused\n"
    assert desk.run("pause", "orders").startswith("nothing to change")
    assert desk.post.stats("orders").paused
    assert desk.json("resume", "orders") == {"queue": "orders", "changed": True, "paused": False}
    assert desk.run("resume", "orders").startswith("nothing to change")
    printed_text = desk.run("configure", "orders", "lease=90s", "rate=100/m", "max_pending=5", "completed=true")
    assert re.search(r"^lease +90.0 s$", printed_text, re.MULTILINE)
    assert re.search(r"^rate +100/60000ms$", printed_text, re.MULTILINE)
    assert desk.run("configure", "orders") == printed_text
    policy = desk.json("configure", "orders", "max_pending=none", "lease=none")["policy"]
    assert (policy["max_pending"], policy["lease_ms"], policy["completed_max"]) == (None, None, 1000)


@scene("cancel", "purge")
def cancelling(desk: Desk) -> None:
    id = desk.post.publish("orders", 1).id
    desk.post.publish("orders", 2, key="a")
    desk.post.publish_many("orders", [3, 4])
    assert desk.run("cancel", "orders", id) == "cancelled\n"
    assert desk.json("cancel", "orders", "--key", "a")["status"] == "cancelled"
    assert "no such message" in desk.run("cancel", "orders", "0" * 24, code=1)
    assert "--yes" in desk.refused("purge", "orders", "--state", "ready")
    assert desk.post.ledger("orders").ready == 2
    assert desk.run("purge", "orders", "--state", "ready", "--yes") == "removed 2 ready messages of orders\n"
    assert desk.json("purge", "orders", "--state", "ready", "--yes")["removed"] == 0
    first = desk.post.publish("orders", 5, chain=True, delay=3600)
    desk.post.publish("orders", 6, after=[first])
    assert desk.json("purge", "orders", "--state", "waiting", "--yes")["removed"] == 1


@scene("remove")
def removing(desk: Desk) -> None:
    desk.post.publish("orders", 1)
    refused = desk.refused("remove", "orders", "--yes", code=1)
    assert "queue orders is not empty" in refused
    assert "1 ready message" in refused
    desk.post.purge("orders")
    assert "--yes" in desk.refused("remove", "orders")
    assert desk.post.queues() == ["orders"]
    assert desk.run("remove", "orders", "--yes") == "removed orders\n"
    assert desk.post.queues() == []
    assert desk.run("remove", "orders", "--yes", code=1) == "there is no queue orders\n"
    desk.post.configure("orders", lease=10)
    assert desk.json("remove", "orders", "--yes") == {"queue": "orders", "removed": True}


@scene("dead list", "dead peek", "dead redrive", "dead purge")
def dead_letters(desk: Desk) -> None:
    assert desk.run("dead", "list", "orders") == "no dead letters\n"
    first, second = desk.bury("orders", 1, 2, reason="too big", error="a\x1b[31m long\nstory")
    (third,) = desk.bury("orders", 3)
    lines = desk.run("dead", "list", "orders", "-n", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["id", first, second, "2"]
    assert "too big" in lines[1]
    assert "\x1b" not in "".join(lines)
    assert [one["id"] for one in desk.json("dead", "list", "orders", "--reason", "rejected")] == [third]
    assert desk.json("dead", "list", "orders", "--by-reason")[0] | {"error_type": ""} == {
        "reason": "too big", "error_type": "", "count": 2,
    }  # fmt: skip
    assert re.search(r"^reason +too big$", desk.run("dead", "peek", "orders", first), re.MULTILINE)
    assert desk.json("dead", "peek", "orders", first)["body"] == 1
    assert "no dead letter" in desk.refused("dead", "peek", "orders", "0" * 24, code=1)
    assert "no dead letters were chosen" in desk.refused("dead", "redrive", "orders")
    assert desk.run("dead", "redrive", "orders", first) == "1 dead letter of orders made ready again\n"
    assert desk.json("dead", "redrive", "orders", "--reason", "too big", "--rate", "100/s")["moved"] == [second]
    assert "1 not found" in desk.run("dead", "redrive", "orders", "0" * 24, code=1)
    assert "--yes" in desk.refused("dead", "purge", "orders")
    assert desk.run("dead", "purge", "orders", "--yes") == "removed 1 dead letter of orders\n"
    assert desk.json("dead", "redrive", "orders", "--all")["moved"] == []
    ledger = desk.post.ledger("orders")
    assert (ledger.ready, ledger.dead_kept, ledger.balance) == (2, 0, 0)


@scene("timers list", "timers cancel", "timers reschedule")
def timers(desk: Desk) -> None:
    assert desk.run("timers", "list", "mails") == "no timers\n"
    id = desk.post.publish("mails", "hello", key="a", delay=600).id
    desk.post.publish("mails", "later", delay=86_400)
    lines = desk.run("timers", "list", "mails").splitlines()
    assert ("10.0 min" in lines[1] or "9." in lines[1], lines[1].split()[0]) == (True, id)
    assert len(desk.json("timers", "list", "mails", "--before", "2999-01-01T00:00:00Z")) == 2
    assert [one["body"] for one in desk.json("timers", "list", "mails", "--key", "a")] == ["hello"]
    assert desk.run("timers", "reschedule", "mails", "a", "--at", "2999-01-01T00:00:00Z") == (
        "a is due 2999-01-01T00:00:00Z\n"
    )
    assert desk.json("timers", "reschedule", "mails", "a", "--delay", "2h")["id"] == id
    assert "no timer with the key" in desk.refused("timers", "reschedule", "mails", "b", "--delay", "2h", code=1)
    assert desk.post.ledger("mails").published == 2
    assert desk.run("timers", "cancel", "mails", "--key", "a") == "cancelled\n"
    assert "no such timer" in desk.run("timers", "cancel", "mails", "--key", "a", code=1)
    assert desk.json("timers", "cancel", "mails", "0" * 24, code=1)["status"] == "unknown"


@scene("schedules preview", "schedules list", "schedules save", "schedules pause", "schedules resume",
       "schedules trigger", "schedules remove")  # fmt: skip
def schedules(desk: Desk) -> None:
    preview = desk.run_bare("schedules", "preview", "0 9 * * *", "--start", "2026-03-06T00:00:00Z", "--count", "1")
    assert preview.startswith("2026-03-06T09:00:00Z")
    assert desk.run("schedules", "list") == "no schedules\n"
    printed_text = desk.run(
        "schedules", "save", "rollup", "--queue", "reports", "--cron", "0 9 * * *", "--body", '{"a": 1}'
    )
    assert printed_text.startswith("saved rollup::cron:0 9 * * *:UTC, next 2")
    assert desk.json("schedules", "save", "ping", "--queue", "pings", "--every", "5")["every"] == 5.0
    assert [line.split()[:2] for line in desk.run("schedules", "list").splitlines()] == [
        ["queue", "name"], ["pings", "ping"], ["reports", "rollup"],
    ]  # fmt: skip
    assert len(desk.json("schedules", "list", "--queue", "reports", "--count", "3")[0]["next_fires"]) == 3
    assert desk.run("schedules", "pause", "rollup") == "paused\n"
    assert desk.json("schedules", "resume", "rollup") == {"name": "rollup", "changed": True}
    assert desk.run("schedules", "trigger", "rollup").startswith("published ")
    assert [message.body for message in desk.post.peek("reports")] == [{"a": 1}]
    assert desk.run("schedules", "remove", "rollup") == "removed\n"
    desk.run("schedules", "remove", "rollup", code=1)
    assert "no schedule" in desk.refused("schedules", "trigger", "rollup", code=1)


# ---- run -------------------------------------------------------------------------------------------------------------


def started(desk: Desk, *arguments: str) -> subprocess.Popen[str]:
    """A command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", *arguments],
        cwd=desk.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT / 'src'}", "WAYPOST_URL": desk.url, "WAYPOST_NAMESPACE": desk.namespace},
    )  # fmt: skip


def stopped(process: subprocess.Popen[str], condition: Callable[[], Any], what: str) -> tuple[str, str]:
    """End a process in order as soon as something has happened; what it wrote and what it said."""
    try:
        until(condition, what)
        process.send_signal(signal.SIGTERM)
        printed, printed_text = process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        process.kill()
    assert process.returncode == 0, printed_text
    return printed, printed_text


@scene("worker", "workers")
def working(desk: Desk) -> None:
    assert desk.run("workers") == "no workers\n"
    (desk.folder / "shop.py").write_text(
        "from waypost import Waypost\n"
        f"post = Waypost({desk.url!r}, namespace={desk.namespace!r})\n"
        "@post.handler('orders')\n"
        "async def charge(body: int) -> None: ...\n"
    )
    desk.post.publish("orders", 1)
    desk.post.publish("mails", 1)
    process = started(desk, "worker", "shop:post", "--json")
    found: dict[str, Any] = {}

    def listed() -> bool:
        found.update(desk.json("workers"))
        return bool(found["workers"]) and desk.post.ledger("orders").done == 1

    printed, printed_text = stopped(process, listed, "a worker")
    assert json.loads(printed)["total"]["handled"] == 1
    assert found["workers"][0]["queues"][0]["name"] == "orders"
    assert found["unserved"] == ["mails"]
    assert "1 handled" in printed_text
    assert desk.run("workers") == "no workers\nserved by no worker: mails, orders\n"


@scene("relay")
def relaying(desk: Desk) -> None:
    desk.post.publish_many("orders", [1, 2, 3])
    to = f"sqlite:///{desk.folder / 'target.db'}#copies"
    assert desk.json("relay", "--queue", "orders", "--to", to, "--until-empty")["queues"]["orders"]["handled"] == 1
    assert "waypost worker stopped: 1 handled" in desk.stderr  # the three of them were one batch
    assert desk.post.ledger("orders").done == 3
    assert "a relay cannot send to ftp://" in desk.refused("relay", "--queue", "orders", "--to", "ftp://x")


@scene("scheduler", "promoter")
def clockwork(desk: Desk) -> None:
    desk.post.save_schedule("ping", queue="pings", every=0.05)
    scheduler = started(desk, "scheduler", "--ttl", "2", "--json")
    printed, _ = stopped(scheduler, lambda: desk.post.ledger("pings").published, "a fire")
    assert any(json.loads(line)["fires"] for line in printed.splitlines())
    desk.post.publish("mails", 1, delay=0.2)
    promoter = started(desk, "promoter", "--ttl", "2")
    _, printed_text = stopped(promoter, lambda: desk.post.ledger("mails").ready, "a promotion")
    assert "promoted 1, 0 timers left" in printed_text


# ---- set up and check ------------------------------------------------------------------------------------------------


@scene("migrate")
def migrating(desk: Desk) -> None:
    if desk.post.store.kind != "postgres":
        assert desk.run("migrate") == "nothing to do: only PostgreSQL has tables to migrate\n"
        return
    assert "already" in desk.run("migrate")
    assert desk.json("migrate", "--check")["current"] is True
    assert "CREATE TABLE" in desk.run_bare("migrate", "--sql")


@scene("doctor")
def doctor(desk: Desk) -> None:
    printed = desk.json("doctor", code=1 if desk.post.store.kind in ("valkey", "postgres") else 0)
    checks = {finding["check"] for finding in printed["findings"]}
    assert {"server", "clock", "ledger", "workers", "handlers", "readers"} <= checks
    desk.post.publish("orders", 1)
    printed_text = desk.run("doctor", code=1)
    assert "WRONG handlers: queue orders has 1 ready and 0 delayed messages" in printed_text
    assert max(map(len, printed_text.splitlines())) <= 80
    assert re.search(r"^\d+ findings, \d wrong$", printed_text, re.MULTILINE)


@scene("bench")
def bench(desk: Desk) -> None:
    printed_text = desk.run("bench", "--messages", "50", "--pings", "10")
    assert re.search(r"^claim, handle, settle +[\d,]+ messages/s$", printed_text, re.MULTILINE)
    figures = desk.json("bench", "--messages", "50", "--pings", "10")
    assert (figures["store"], figures["messages"]) == (desk.post.store.kind, 50)
    assert figures["latency_ms"]["p50"] > 0
    ledger = desk.post.ledger("waypost-bench")
    assert (ledger.ready, ledger.leased, ledger.balance, ledger.done) == (0, 0, 0, 222)
    desk.post.publish("waypost-bench", 1)
    assert "is in use" in desk.refused("bench", "--messages", "50")


@scene("completion")
def completion(desk: Desk) -> None:
    assert "complete -" in desk.run_bare("completion", "bash")
    assert "#compdef waypost" in desk.run_bare("completion", "zsh")
    assert "invalid choice" in desk.run_bare("completion", "fish", code=2) + desk.stderr


#: Those that start processes of their own, which cannot see a store inside this one.
OUTSIDE: tuple[Scene, ...] = (working, clockwork)


CARRIED = {
    dead_letters: pytest.mark.promise("DEAD-2"),
    timers: pytest.mark.promise("TIMER-1"),
    schedules: pytest.mark.promise("CRON-7"),
    histories: pytest.mark.promise("SEE-5"),
}
PLAYS = [
    pytest.param(play, store, id=f"{play.__name__}-{store}", marks=CARRIED.get(play, ()))
    for play in dict.fromkeys(SCENES.values())
    for store in STORES
    if store != "memory" or play not in OUTSIDE
]


@pytest.mark.parametrize(("play", "desk"), PLAYS, indirect=["desk"])
def test_a_command_does_what_it_says_on_every_store(play: Scene, desk: Desk) -> None:
    play(desk)
    for queue in desk.post.queues():
        assert desk.post.ledger(queue).balance == 0
