"""The example application on real servers: as a program, and as a service, as `faststream run` runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faststream.running import Place
from tests.waiting import until
from waypost import Waypost

pytestmark = pytest.mark.promise("FACE-4")

ROOT = Path(__file__).parents[2]


def environment(place: Place) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])
    return {**os.environ, "PYTHONPATH": paths, "SHOP_URL": place.url, "SHOP_NAMESPACE": place.namespace}


def test_the_example_runs_as_a_program(place: Place, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "faststream_app.py")
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "sum: 6"


def test_the_example_runs_as_a_service_and_stops_on_a_signal(place: Place, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import asyncio, faststream_app; asyncio.run(faststream_app.app.run())"]
    with Waypost(place.url, namespace=place.namespace) as post:
        service = subprocess.Popen(command, cwd=tmp_path, env=environment(place))
        try:
            until(lambda: post.ledger("receipts").done == 2, "the receipts")
            assert len(post.workers()) == 1
        finally:
            service.send_signal(signal.SIGINT)
            code = service.wait(60)
        assert code == 0
        assert post.workers() == []
        assert post.ledger("orders").leased == 0
