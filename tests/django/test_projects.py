"""Django projects on SQLite and PostgreSQL: the tests inside of one, and the example with its processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.django.programs import SHOP, manage, new_database, run_inside
from tests.waiting import until
from waypost import Waypost
from waypost.testing.servers import free_port

SECONDS_MAX = 60


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield ""
        return
    with new_database(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.mark.promise("FACE-4", "BOX-1")
def test_the_tests_inside_of_a_project_pass(database_url: str, tmp_path: Path) -> None:
    done = run_inside(sys.executable, tmp_path, database_url)
    assert done.returncode == 0, done.stdout + done.stderr


def request(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """Return the status of a request and its JSON, None if it has none."""
    wanted = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(wanted, timeout=SECONDS_MAX) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except OSError:
        return 0, None  # it does not listen yet


@pytest.mark.promise("FACE-4")
def test_the_example_ships_what_was_bought(database_url: str, tmp_path: Path) -> None:
    assert manage(tmp_path, database_url, "migrate").wait(SECONDS_MAX) == 0, (tmp_path / "migrate.log").read_text()
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    try:
        server = manage(tmp_path, database_url, "runserver", "--noreload", f"127.0.0.1:{port}")
        worker = manage(tmp_path, database_url, "waypost_worker")
        started += [server, worker]
        status, order = until(lambda: (found := request(port, "/buy/tea", "POST"))[0] and found, "an order")
        assert status == 201
        # What fails is rolled back: the order, its message and its task.
        assert request(port, "/buy/nothing", "POST")[0] == 500
        until(
            lambda: (
                request(port, f"/orders/{order['id']}")
                == (200, {"shipped": True, "receipt": "receipt for tea", "task": "SUCCESSFUL"})
            ),
            "the shipping",
        )
        assert request(port, f"/orders/{order['id'] + 1}")[0] in (404, 500)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(SECONDS_MAX) == 0
        assert "waypost worker stopped: 2 handled" in (tmp_path / "waypost_worker.log").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.promise("FACE-4")
def test_a_worker_starts_again_when_code_changes(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(SHOP, project, ignore=shutil.ignore_patterns("__pycache__"))
    assert manage(tmp_path, "", "migrate", project=project).wait(SECONDS_MAX) == 0
    log, code = tmp_path / "waypost_worker.log", project / "shop" / "waypost_handlers.py"
    with Waypost(f"sqlite:///{tmp_path}/shop.sqlite3") as post:

        def reasons() -> list[str | None]:
            return [letter.reason for letter in post.dead_letters("orders")]

        worker = manage(tmp_path, "", "waypost_worker", "--reload", project=project)
        try:
            post.publish("orders", {"id": 999})
            until(lambda: reasons() == ["no such order"], "the first dead letter")
            code.write_text(code.read_text().replace("no such order", "unknown order"))

            def is_stopped() -> bool:
                # The reloader may not have seen the file as it was: change it until it notices.
                os.utime(code)
                return log.read_text().count("waypost worker stopped") == 1

            until(is_stopped, "the stop of the first worker")
            post.publish("orders", {"id": 999})
            until(lambda: reasons() == ["no such order", "unknown order"], "a dead letter of the changed code")
        finally:
            # The reloader and the worker that it started.
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
