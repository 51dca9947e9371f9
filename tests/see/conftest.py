"""Real stores, and worker processes with an HTTP endpoint."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.see.service import Service
from waypost.store.postgres import migrate

ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    served: str = request.getfixturevalue(f"{request.param}_url")
    return served


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    name = f"see-{next(_numbers)}"
    if "url" in request.fixturenames and (url := request.getfixturevalue("url")).startswith("postgresql"):
        migrate(url, namespace=name)
    return name


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `waypost` with these arguments; the process is stopped after the test."""
    services: list[Service] = []

    def started(*arguments: str, **environment: str) -> Service:
        log = tmp_path / f"service-{len(services)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "waypost.cli.main", *arguments],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | environment,
                stdout=subprocess.DEVNULL, stderr=file,
            )  # fmt: skip
        service = Service(process, log)
        services.append(service)
        return service

    yield started
    for service in services:
        if service.process.poll() is None:
            service.process.send_signal(signal.SIGTERM)
            try:
                service.process.wait(30)
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
                # Of several processes the first passes signals on; what it could not end is named in its log.
                for pid in map(int, re.findall(r"^waypost worker \S+?:(\d+):", service.output(), re.MULTILINE)):
                    if pid != service.process.pid:
                        os.kill(pid, signal.SIGKILL)
