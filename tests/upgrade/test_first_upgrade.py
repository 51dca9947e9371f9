"""The one stop, from release 0.1 to this one, as examples/deploy/upgrade-from-0.1.sh does it: the data is kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.upgrade.next_release import ROOT
from tests.upgrade.test_older_data import folder_of, read_gzip, sqlite_url, valkey_url
from waypost import Waypost
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import program_of

RELEASE = "0.1.0"
SCRIPT = ROOT / "examples" / "deploy" / "upgrade-from-0.1.sh"
#: Handles all that is ready in one queue, as a worker of the new release does after its start.
WORKER = """
import sys
from waypost import Waypost
with Waypost(sys.argv[1]) as post:
    @post.handler("steps")
    def handle(body): ...
    post.worker(["steps"], scheduler=False).run(until_empty=True)
"""


@contextmanager
def postgres_url(release: str, tmp_path: Path) -> Iterator[str]:
    with PostgresServer() as server:
        subprocess.run(
            [program_of(server.wheel, "pginstall18/bin/psql"), "--quiet", "--set", "ON_ERROR_STOP=1", server.url],
            input=read_gzip(folder_of(release) / "postgres.sql.gz"), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        yield server.url


OPEN: dict[str, Callable[[str, Path], Any]] = {"sqlite": sqlite_url, "valkey": valkey_url, "postgres": postgres_url}


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("store", OPEN)
def test_the_scripted_stop_keeps_the_data(store: str, tmp_path: Path) -> None:
    expected = json.loads((folder_of(RELEASE) / "expected.json").read_text())[store]["queues"]
    with tarfile.open(folder_of(RELEASE) / "lake.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    with OPEN[store](RELEASE, tmp_path) as url:
        done = subprocess.run(
            ["sh", SCRIPT, url, str(tmp_path / "lake")],
            env=os.environ | {
                "PYTHONPATH": str(ROOT / "src"), "STOP": "echo stopping",
                "START": f"{shlex.quote(sys.executable)} {shlex.quote(str(worker))} {shlex.quote(url)}",
                "WAYPOST": f"{sys.executable} -m waypost.cli.main",
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert re.search(r"^stopped for \d+ s$", done.stdout, re.MULTILINE), done.stdout
        with Waypost(url) as post:
            assert post.queues() == sorted(expected)
            for queue, known in expected.items():
                ledger = post.ledger(queue)
                assert (ledger.balance, ledger.unexplained) == (0, 0), queue
                if queue != "steps":
                    assert {name: getattr(ledger, name) for name in known["ledger"]} == known["ledger"], queue
            before = expected["steps"]["ledger"]
            after = post.ledger("steps")
            assert (after.ready, after.done > before["done"]) == (0, True)
