"""The command line of the worker: what it finds, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from waypost import Drained, Waypost, __version__
from waypost.cli import output
from waypost.cli.commands.worker import describe_end, describe_start
from waypost.cli.main import main
from waypost.cli.reload import is_reload

ROOT = Path(__file__).parents[2]
SHOP = """
from waypost import AsyncWaypost, Waypost

post = Waypost("sqlite:///shop.db")
async_post = AsyncWaypost("sqlite:///shop.db")
nothing = 7


@post.handler("orders", concurrency=3)
@async_post.handler("orders")
async def charge(body: int) -> None:
    print("charged", body, flush=True)


@post.handler("mails", batch=20)
def send(bodies: list[str]) -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "empty.py").write_text("nothing = 7")
    (tmp_path / "small.py").write_text("from shop import async_post as post\nagain = post\n")
    with Waypost(f"sqlite:///{tmp_path / 'shop.db'}") as post:
        post.publish_many("orders", [1, 2, 3])
    return tmp_path


def command(shop: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", *arguments],
        cwd=shop, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["post", "async_post"])
def test_a_worker_prints_what_it_runs_and_how_it_ended(shop: Path, name: str) -> None:
    done = command(shop, "worker", f"shop:{name}", "--until-empty", "--queues", "orders")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["1", "2", "3", "charged", "charged", "charged"]
    assert "sqlite, namespace wp: each commit is on the disk" in done.stderr
    assert f"orders     charge: {3 if name == 'post' else 10} at once on the event loop" in done.stderr
    assert done.stderr.endswith("waypost worker stopped: 3 done\n")


def test_all_handlers_run_unless_some_are_chosen(shop: Path) -> None:
    done = command(shop, "worker", "shop:post", "--until-empty")
    assert "mails      send: 10 at once in threads, batches of 20" in done.stderr
    assert "  orders     3 done\n  mails      0 done\n" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("url", "options", "printed"),
    [
        ("memory://", {}, "everything is gone when it ends"),
        ("valkey://127.0.0.1:1", {}, "as durable as the server's append-only file"),
        ("valkey://127.0.0.1:1", {"durability": "fsync"}, "on the server's disk (durability fsync)"),
        ("postgresql://127.0.0.1:1/x", {}, "as the server's synchronous_commit setting"),
    ],
)
def test_the_first_line_names_the_store_and_its_durability(url: str, options: dict[str, Any], printed: str) -> None:
    post = Waypost(url, **options)

    @post.handler("a-queue-with-a-long-name", timeout=30)
    async def charge(body: int) -> None: ...

    start = describe_start(post, post.worker())
    assert printed in start
    assert f"  {'store':24} {post.store.kind}, namespace wp: " in start
    assert "a-queue-with-a-long-name test_the_first_line_names" in start
    assert "charge: 10 at once on the event loop, at most 30 s each" in start


def test_the_final_line_reports_what_is_left() -> None:
    report = Drained(handled=5, released=2, cancelled=1, running=1, unsettled=3, done=1_200, dead=2, retried=3)
    assert describe_end(report) == (
        "waypost worker stopped: 1,200 done, 2 dead, 3 retried, 2 released, 1 cancelled, 1 still running: delivered "
        "again when their leases end, 3 not settled: delivered again when their leases end"
    )


@pytest.mark.parametrize(
    ("target", "printed"),
    [
        (":post", "the client is given as module:name"),
        ("shop:", "the client is given as module:name"),
        ("shop", "module shop has several clients: name one of shop:post, shop:async_post"),
        ("empty", "module empty has no client"),
        ("nowhere:post", "there is no module 'nowhere' here"),
        ("shop:nothing", "shop:nothing is int, not a Waypost"),
        ("shop:missing", "shop:missing is NoneType"),
    ],
)
def test_a_client_that_cannot_be_found_is_reported_in_one_line(shop: Path, target: str, printed: str) -> None:
    done = command(shop, "worker", target)
    assert done.returncode == 2
    assert printed in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.promise("FACE-6")
def test_a_module_with_one_client_is_enough_and_a_concurrency_is_for_all_queues(shop: Path) -> None:
    done = command(shop, "worker", "small", "--until-empty", "--concurrency", "2")
    assert done.returncode == 0, done.stderr
    assert "  orders     charge: 2 at once on the event loop\n" in done.stderr
    assert done.stderr.endswith("waypost worker stopped: 3 done\n")


@pytest.mark.promise("FACE-6")
def test_json_logs_are_all_that_a_worker_writes_to_stderr(shop: Path) -> None:
    done = command(shop, "worker", "small", "--until-empty", "--log-format", "json", "--log-done", "info")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    events = [line.get("event") for line in lines]
    # The line of another thread, such as its scheduler's, may come after the last one of the worker.
    assert (events.count("worker_started"), events.count("worker_stopped")) == (1, 1)
    successes = [line for line in lines if line.get("event") == "handler_done"]
    assert [(line["level"], line["logger"], line["queue"]) for line in successes] == 3 * [
        ("info", "waypost.done", "orders")
    ]
    assert all(line["seconds"] >= 0 and line["message_id"] in line["message"] for line in successes)


@pytest.mark.promise("FACE-6")
def test_a_worker_starts_anew_when_a_file_changes_and_ends_at_a_signal(shop: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", "worker", "small", "--reload"],
        cwd=shop, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # noqa: PLW1509
    ) as reloader, Waypost(f"sqlite:///{shop / 'shop.db'}") as post:  # fmt: skip
        try:
            until(lambda: post.ledger("orders").done == 3, "three handled messages")
            until(post.workers, "the first heartbeat")
            (first,) = post.workers()
            (shop / "shop.py").write_text(SHOP.replace("concurrency=3", "concurrency=4"))
            until(lambda: [one.pid for one in post.workers() if one.pid != first.pid], "another process")
            post.publish("orders", 4)
            until(lambda: post.ledger("orders").done == 4, "its first message")
            reloader.send_signal(signal.SIGTERM)
            _, printed_text = reloader.communicate(timeout=60)
        finally:
            reloader.kill()
    assert reloader.returncode == 0, printed_text
    assert "waypost: shop.py has changed\n" in printed_text
    assert printed_text.count("waypost worker stopped: ") == 2


@pytest.mark.promise("SEE-4")
def test_an_invalid_health_window_is_reported_in_one_line(shop: Path) -> None:
    done = command(shop, "worker", "shop:post", "--health-window", "0")
    assert done.returncode == 2
    assert done.stderr == "waypost: health_window must be seconds from 0.001 to 1e+09 or a timedelta, not 0.0\n"


@pytest.mark.promise("LEASE-11")
@pytest.mark.parametrize("name", ["post", "async_post"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_worker_in_order(shop: Path, name: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", f"shop:{name}"],
        cwd=shop, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # The process that runs the tests may ignore it (nohup, a shell's background), and then a worker ignores it too.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    ) as worker, Waypost(f"sqlite:///{shop / 'shop.db'}") as post:  # fmt: skip
        try:
            until(lambda: post.ledger("orders").done == 3, "three handled messages")
            worker.send_signal(number)
            _, printed_text = worker.communicate(timeout=30)
        finally:
            worker.kill()
    assert worker.returncode == 0, printed_text
    assert f"{number.name}: stopping, " in printed_text
    assert printed_text.endswith("waypost worker stopped: 3 done\n")


@pytest.mark.promise("LEASE-11")
def test_a_second_interrupt_ends_a_worker_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nfrom waypost import Waypost\n"
        f"post = Waypost('sqlite:///{tmp_path / 'slow.db'}')\n"
        "@post.handler('orders')\n"
        "async def charge(body: int) -> None:\n    await asyncio.sleep(600)\n"
    )
    with Waypost(f"sqlite:///{tmp_path / 'slow.db'}") as post:
        post.publish("orders", 1)
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "slow"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, text=True, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        ) as worker:  # fmt: skip
            try:
                until(lambda: post.ledger("orders").leased == 1, "a running handler")
                worker.send_signal(signal.SIGINT)
                assert worker.stderr is not None
                while "Ctrl-C again to quit now" not in (line := worker.stderr.readline()):
                    assert line, "it ended at the first signal"
                worker.send_signal(signal.SIGINT)
                _, printed_text = worker.communicate(timeout=60)
            finally:
                worker.kill()
    assert worker.returncode == 130, printed_text
    assert printed_text.endswith("what it was handling is delivered again when the leases end\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"waypost {__version__}\n"


@pytest.mark.promise("FACE-6", "SEE-6")
def test_a_json_log_line_is_one_document_without_secrets_however_long_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "arguments", ["worker", "valkey://user:Canary7Secret@127.0.0.1:1"])
    try:
        raise ValueError("x" * 20_000 + ' "Canary7Secret" password=abc')
    except ValueError:
        text = "valkey://user:Canary7Secret@127.0.0.1:1 does not answer, password=abc"
        record = logging.LogRecord("waypost", logging.WARNING, "a file", 1, text, (), sys.exc_info())
    record.queue = "orders@home"
    line = output.JsonFormatter().format(record)
    assert "Canary7Secret" not in line
    assert "\n" not in line
    document = json.loads(line)
    assert document["message"].startswith("valkey://127.0.0.1:1 does not answer, password=")
    assert (document["level"], document["queue"]) == ("warning", "orders@home")
    assert "Traceback" in document["traceback"]


@pytest.mark.promise("FACE-6")
def test_a_json_log_line_is_one_document_in_every_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("waypost", logging.WARNING, "a file", 1, "caf\u00e9", (), None)
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        stderr.write(output.JsonFormatter().format(record))
        stderr.seek(0)
        assert json.loads(stderr.read())["message"] == "caf\u00e9"
        monkeypatch.undo()


@pytest.mark.parametrize(("argument", "is_one"), [("--reload", True), ("--rel", True), ("--", False), ("shop", False)])
def test_a_process_that_is_started_anew_does_not_reload_itself(argument: str, is_one: bool) -> None:
    assert is_reload(argument) == is_one
