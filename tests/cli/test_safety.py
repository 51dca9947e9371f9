"""Commands must not print a secret, let text control a terminal, create files by mistake, end in a traceback."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import CommandRunner
from waypost import CatchUp, Exponential, Linear, Waypost
from waypost.cli.main import main, make_parser
from waypost.policy import NoRetry

CANARY = "Canary7Secret"

# ---- secrets -------------------------------------------------------------------------------------------------------

#: URLs that are unreachable or invalid, with a secret in each place where one can be.
URLS = [
    f"postgresql://u:{CANARY}@127.0.0.1:1/shop",
    f"postgresql://u:{CANARY}%@127.0.0.1:1/shop",
    f"postgresql://u:12/{CANARY}@127.0.0.1:1/shop",
    f"postgresql://u:{CANARY}",
    f"postgresql://u@127.0.0.1:1/shop?password={CANARY}",
    f"postgresql://u@127.0.0.1:1/shop?sslpassword={CANARY}%",
    f"postgresql://u@127.0.0.1:1/shop?passfile=/tmp/{CANARY}@x",
    f"postgresql+psycopg://u:{CANARY}@127.0.0.1/shop",
    f"valkey://:{CANARY}@127.0.0.1:1",
    f"valkey://{CANARY}@127.0.0.1:1",
    f"valkey://u:{CANARY}/x@127.0.0.1:1",
    f"valkey://127.0.0.1:1?password={CANARY}@",
    f"rediss://u:{CANARY}@127.0.0.1:1",
    f"unix://u:{CANARY}@/nowhere.sock",
    f"valkey+cluster://u:{CANARY}@127.0.0.1:1,127.0.0.1:2",
    f"valkey+sentinel://u:{CANARY}@127.0.0.1:1/service?sentinel_password={CANARY}",
    f"nats://{CANARY}@127.0.0.1:1",
    f"kafka://u:{CANARY}@127.0.0.1:1",
    f"host=127.0.0.1 port=1 password={CANARY}",
    f"{CANARY}://x",
]
TARGETS = [
    f"nats://{CANARY}@127.0.0.1:1/subject",
    f"nats://u:12/{CANARY}@127.0.0.1:1/subject",
    f"nats://u:{CANARY}@127.0.0.1:1,127.0.0.1:2/subject",
    f"amqp://u:{CANARY}@127.0.0.1:1/%2F",
    f"amqp://u:{CANARY}%@127.0.0.1:1x/",
    f"kafka://127.0.0.1:1/topic?sasl.password={CANARY}&no.such=1",
    f"kafka://127.0.0.1:1/topic?sasl.mechanism=PLAIN&sasl.password={CANARY}&security.protocol=none",
    f"valkey+stream://:{CANARY}@127.0.0.1:1/stream",
    f"valkey+stream://:{CANARY}@127.0.0.1:1/stream?maxlen={CANARY}",
    f"postgresql://u:{CANARY}%@127.0.0.1:1/shop#queue",
]
#: Every command that has a store, with its other arguments.
COMMANDS = [
    ("publish", "orders", "1"), ("queues",), ("stats",), ("stats", "orders"), ("watch", "--once"), ("peek", "orders"),
    ("history", "orders", "1m7fra5gs06ap4cfk9b5jsq9"), ("find", "1m7fra5gs06ap4cfk9b5jsq9"), ("find", "--key", "k"),
    ("ledger", "orders"), ("journal", "orders"), ("pause", "orders"),
    ("resume", "orders"), ("configure", "orders", "lease=30s"), ("cancel", "orders", "--key", "k"),
    ("purge", "orders", "--state", "ready", "--yes"), ("dead", "list", "orders"),
    ("dead", "redrive", "orders", "--all"),
    ("dead", "purge", "orders", "--yes"), ("remove", "orders", "--yes"), ("actions",), ("bulk", "list"),
    ("timers", "list", "orders"), ("timers", "cancel", "orders", "k"),
    ("schedules", "list"), ("schedules", "save", "s", "--queue", "q", "--every", "5"), ("schedules", "pause", "s"),
    ("schedules", "trigger", "s"), ("workers",), ("migrate",), ("migrate", "--check"), ("doctor",),
    ("bench", "--messages", "10"),
]  # fmt: skip


def given(command: tuple[str, ...], url: str, how: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a command with its URL as an option, or set it in the environment."""
    if how == "environment":
        monkeypatch.setenv("WAYPOST_URL", url)
        return list(command)
    return [*command, "--url", url]


@pytest.mark.promise("SEE-6", "FACE-2")
@pytest.mark.parametrize("how", ["option", "environment", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_a_secret_of_its_url(
    command: tuple[str, ...], how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for url in URLS if command == ("stats",) else URLS[:: 1 + len(command)]:
        arguments = given(command, url, how, monkeypatch) + (["--json"] if how == "json" else [])
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed_text = "".join(capfd.readouterr())
        assert CANARY not in printed_text, (url, printed_text)
        assert "Traceback" not in printed_text
        assert code in (2, 3) or (command[0] == "migrate" and code == 0), (url, code, printed_text)


@pytest.mark.promise("SEE-6", "BOX-4")
@pytest.mark.parametrize("to", TARGETS)
def test_a_relay_shows_no_secret_of_its_target(
    to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    with Waypost(url) as post:
        post.publish("orders", 1)
    code = subprocess.run(
        [sys.executable, "-m", "waypost.cli.main", "relay", url, "--queue", "orders", "--to", to, "--hold", "0",
         "--until-empty", "--timeout", "0.1", "--log-level", "debug"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    printed_text = code.stdout + code.stderr + "".join(capfd.readouterr()) + caplog.text
    assert CANARY not in printed_text, printed_text
    assert "Traceback" not in printed_text
    with Waypost(url) as post:
        for event in post.journal("orders").events:
            assert CANARY.encode() not in msgspec.json.encode(event)


# ---- text from messages ----------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\r\x08\x7fx"
UNSAFE = [chr(code) for code in (*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2066)]


@pytest.mark.promise("FACE-2")
@pytest.mark.parametrize("how", ["lines", "json"])
def test_stored_text_cannot_control_the_terminal(
    cli: CommandRunner, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Waypost(cli.url, namespace=cli.namespace) as post:
        post.configure("orders", journal="full", completed=10)
        post.publish("orders", EVIL, key=EVIL, group=EVIL, headers={"h": EVIL})
        with post.receive("orders", wait=5) as message:
            assert message is not None
            message.dead(EVIL, EVIL)
        post.publish("orders", {"a": EVIL}, key=EVIL, group=EVIL, delay=3600, headers={"h": EVIL})
        ready = post.publish("orders", EVIL, group=EVIL, headers={"h": EVIL}, correlation_id=EVIL)
        post.save_schedule(EVIL, queue="orders", cron="@daily", body=EVIL, key=EVIL)
        post.journal_reader("orders", f"r{EVIL}")
    commands = [
        ("queues",), ("stats",), ("stats", "orders"), ("watch", "--once"), ("peek", "orders"),
        ("peek", "orders", "--id", ready.id), ("peek", "orders", "--state", "delayed"), ("history", "orders", ready.id),
        ("ledger", "orders"), ("journal", "orders"), ("dead", "list", "orders"),
        ("dead", "list", "orders", "--by-reason"),
        ("timers", "list", "orders"), ("schedules", "list"), ("workers",), ("doctor",), ("configure", "orders"),
        ("cancel", "orders", "--key", f"no {EVIL}"), ("peek", f"q{EVIL}"), ("schedules", "pause", f"no {EVIL}"),
        ("dead", "redrive", "orders", "--reason", EVIL),
    ]  # fmt: skip
    for command in commands:
        with suppress(SystemExit):
            main([*command, *cli.options, *(["--json"] if how == "json" else [])])
        printed = capsys.readouterr()
        for text in (printed.out, printed.err):
            assert not [one for one in UNSAFE if one in text], (command, text)
        if how == "json" and printed.out:
            for line in [printed.out] if command[0] in ("schedules", "peek") else printed.out.splitlines():
                json.loads(line)


# ---- files created by mistake ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stats", "doctor", "pause orders", "schedules list"])
def test_a_command_that_reads_creates_no_tables_in_a_foreign_database(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
        connection.commit()
    before = path.read_bytes()
    assert main([*name.split(), "--url", f"sqlite:///{path}"]) == 3
    assert "no tables of namespace wp" in capsys.readouterr().err
    assert path.read_bytes() == before


# ---- without extras ------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-2", "FACE-5")
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("migrate --sql", "postgres"),
        ("migrate postgresql://h/d", "postgres"),
        ("stats --url postgresql://h/d", "postgres"),
        ("doctor postgresql://h/d --schema s", "postgres"),
        ("stats --url valkey://h", "valkey"),
        ("pipeline report --lake lake", "spark"),
        ("pipeline run --lake lake --store sqlite:///orders.db", "spark"),
        ("pipeline run --follow --lake lake --store sqlite:///orders.db", "spark"),
        ("pipeline ingest --lake lake --queue orders --store sqlite:///orders.db", "spark"),
        ("pipeline tidy --lake lake", "spark"),
        ("pipeline audit --lake lake", "spark"),
        ("relay sqlite:///orders.db --queue orders --to kafka://h/t", "relay-kafka"),
        ("relay sqlite:///orders.db --queue orders --to amqp://h/t", "relay-rabbitmq"),
        ("relay sqlite:///orders.db --queue orders --to nats://h/t", "nats"),
        ("relay sqlite:///orders.db --queue orders --to valkey+stream://h/t", "valkey"),
        ("relay sqlite:///orders.db --queue orders --to lake:///lake", "spark"),
        ("completion bash", "cli"),
        ("queues --url sqlite:///orders.db", None),
        ("doctor sqlite:///orders.db", None),
        ("publish orders 1 --url sqlite:///orders.db", None),
        ("watch --once --url sqlite:///orders.db", None),
        ("dead list orders --url sqlite:///orders.db", None),
    ],
)
def test_a_missing_extra_is_named_in_one_sentence(arguments: str, extra: str | None, tmp_path: Path) -> None:
    with Waypost(f"sqlite:///{tmp_path / 'orders.db'}") as post:
        post.publish("orders", 1)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        # -S: only the standard library, waypost and its required packages.
        [sys.executable, "-S", "-m", "waypost.cli.main", *arguments.split()],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{source}:{packages}"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if extra is None:
        assert done.returncode in (0, 1), done.stderr  # 1: doctor finds a queue without workers
    else:
        assert done.returncode == 2, done.stderr
        assert f'pip install "waypost[{extra}]"' in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_every_command_that_takes_a_store_is_tried_here() -> None:
    """A new command has to be added to the lists above."""
    listed = {action.dest for action in make_parser().listing._choices_actions}
    tried = {command[0] for command in COMMANDS}
    without = {"worker", "relay", "scheduler", "promoter", "init", "completion", "demo", "pipeline", "web"}
    refused = {"groups"}  # by the store of these tests, SQLite
    assert listed - tried == without | refused


# ---- saving over a schedule ----------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "cron": "0 9 * * *", "tz": "Europe/Madrid", "missed": CatchUp(7), "grace": 90, "max_fires": 1000,
    "start": datetime(2026, 1, 1, tzinfo=UTC), "end": datetime(2090, 1, 1, tzinfo=UTC), "jitter": 12,
    "body": {"a": 1}, "priority": 3, "group": "tenant", "headers": {"h": "v"}, "expires": 40,
    "retry": Linear(attempts=4), "timeout": 90,
}  # fmt: skip
CHANGES: list[tuple[list[str], dict[str, Any]]] = [
    (["--cron", "0 10 * * *"], {"cron": "0 10 * * *"}),
    (["--every", "5"], {"cron": None, "every": timedelta(seconds=5), "tz": "UTC"}),
    (["--tz", "UTC"], {"tz": "UTC"}),
    (["--body", "[2]"], {"body": [2]}),
    (["--missed", "once"], {"missed": "once"}),
    (["--missed", "9"], {"missed": CatchUp(9)}),
    (["--grace", "5s"], {"grace": timedelta(seconds=5)}),
    (["--start", "2026-02-01T00:00:00Z"], {"start": datetime(2026, 2, 1, tzinfo=UTC)}),
    (["--start", "none"], {"start": None}),
    (["--end", "none"], {"end": None}),
    (["--max-fires", "none"], {"max_fires": None}),
    (["--max-fires", "5"], {"max_fires": 5}),
    (["--jitter", "0"], {"jitter": timedelta(0)}),
    (["--priority", "9"], {"priority": 9}),
    (["--group", "none"], {"group": None}),
    (["--expires", "2m"], {"expires": timedelta(minutes=2)}),
    (["--expires", "none"], {"expires": None}),
    (["--retry", "exponential:attempts=3"], {"retry": Exponential(attempts=3)}),
    (["--retry", "none"], {"retry": NoRetry()}),
    (["--retry", "handler"], {"retry": None}),
    (["--timeout", "5m"], {"timeout": timedelta(minutes=5)}),
    (["--timeout", "none"], {"timeout": None}),
    (["--header", "x=y", "--header", "z="], {"headers": {"x": "y", "z": ""}}),
    (["--header", "none"], {"headers": {}}),
    ([], {}),
]


@pytest.mark.promise("CRON-5", "FACE-2")
def test_saving_an_existing_schedule_changes_only_the_named_settings(cli: CommandRunner) -> None:
    fields = (*FULL, "every", "paused", "key", "declared")
    with Waypost(cli.url, namespace=cli.namespace) as post:
        for arguments, changed in CHANGES:
            post.save_schedule("rollup", queue="reports", key="by-python", **FULL)
            post.pause_schedule("rollup")
            (before,) = post.schedules("reports")
            cli.run("schedules", "save", "rollup", "--queue", "reports", *arguments)
            (after,) = post.schedules("reports")
            wanted = {field: getattr(before, field) for field in fields} | changed
            assert {field: getattr(after, field) for field in fields} == wanted
            post.remove_schedule("rollup")
        post.save_schedule("rollup", queue="reports", key="by-python", **FULL)
        cli.run("schedules", "save", "rollup", "--queue", "reports", "--cron", "0 9 * * *", "--reset")
        (after,) = post.schedules("reports")
        assert (after.tz, after.missed, after.body) == ("UTC", "skip", None)
        assert (after.grace, after.jitter) == (timedelta(seconds=60), timedelta(0))
        assert (after.max_fires, after.end, after.group, after.headers, after.priority) == (None, None, None, {}, 5)
        assert (after.expires, after.retry, after.timeout) == (None, None, None)
        assert after.key == "by-python"
    cli.run("schedules", "save", "rollup", "--queue", "reports", "--reset", code=2)
