"""Importing waypost costs little: drivers and the event loop are imported on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import waypost

HEAVY = (
    "asyncio", "concurrent.futures", "multiprocessing", "ssl", "http.client", "email", "sqlite3", "redis", "valkey",
    "hiredis", "psycopg", "asyncpg", "sqlalchemy", "pyarrow", "pyspark", "pydantic", "numpy", "pandas", "uvicorn",
    "starlette", "rich", "pytest", "prometheus_client", "opentelemetry", "http.server", "socket", "selectors",
    "hashlib", "getpass", "zoneinfo", "sysconfig", "unicodedata", "urllib.parse", "ipaddress", "importlib.metadata",
    "waypost.see", "waypost.client.async_client", "waypost.wake.hub", "waypost.wake.opening", "waypost.outbox.inbox",
    "waypost.outbox.message_transaction", "waypost.outbox.schema", "waypost.schedule.scheduler",
    "waypost.worker.worker",
)  # fmt: skip
LOADED = """
import sys
import waypost
print(*(name for name in sys.modules))
"""


@pytest.mark.promise("FACE-5")
def test_importing_waypost_loads_no_driver_and_no_event_loop() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(waypost.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stdout.split())
    assert "waypost.client" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("waypost.store.")} == {"waypost.store.port"}
    assert len([name for name in loaded if name.startswith("waypost.")]) < 60


ALONE = """
import sys
sys.modules["typing_extensions"] = None
import waypost
print(*(name for name in sys.modules))
"""


@pytest.mark.promise("FACE-5")
def test_importing_waypost_does_not_load_inspect() -> None:
    # msgspec imports typing_extensions where it is installed, which imports inspect: a fifth of the whole import.
    environment = {**os.environ, "PYTHONPATH": str(Path(waypost.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stdout.split())
    assert "waypost.client" in loaded
    assert loaded.isdisjoint({"inspect", "dataclasses", "dis", "calendar"})


LATER = """
import sys
from waypost import AsyncWaypost
from waypost.client.async_client import AsyncWaypost as itself
import waypost, waypost.client, waypost.outbox
print(AsyncWaypost is itself is waypost.AsyncWaypost is waypost.client.AsyncWaypost, waypost.outbox.Inbox.__name__)
for module in (waypost, waypost.client, waypost.outbox):
    try:
        module.Elsewhere
    except AttributeError as error:
        print(error)
"""


@pytest.mark.promise("FACE-5")
def test_the_async_client_is_imported_on_first_use() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(waypost.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == ["True Inbox"] + [
        f"module '{name}' has no attribute 'Elsewhere'" for name in ("waypost", "waypost.client", "waypost.outbox")
    ]


def test_every_public_name_is_there_and_listed_in_order() -> None:
    assert all(hasattr(waypost, name) for name in waypost.__all__)
    assert len(set(waypost.__all__)) == len(waypost.__all__)
    public = {
        name for name, value in vars(waypost).items() if not name.startswith("_") and hasattr(value, "__module__")
    }
    assert public - {"annotations"} <= set(waypost.__all__)


def test_the_package_exports_few_names_and_of_the_errors_only_their_base() -> None:
    tree = {
        name
        for name, value in vars(waypost.errors).items()
        if isinstance(value, type) and issubclass(value, waypost.WaypostError)
    }
    assert len(tree) > 40
    assert tree & set(waypost.__all__) == {"WaypostError"}
    assert len(waypost.__all__) <= 35


SEEING = """
import sys
sys.modules["prometheus_client"] = None
import waypost.see
from waypost.errors import MissingExtra
from waypost.see import Endpoint
try:
    waypost.see.Prometheus
except MissingExtra as error:
    print(error)
print("opentelemetry" in sys.modules, hasattr(waypost.see, "Elsewhere"))
"""


@pytest.mark.promise("SEE-2")
def test_metrics_and_traces_are_imported_on_first_use_and_name_a_missing_extra() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(waypost.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", SEEING], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        'Prometheus needs the package prometheus_client: pip install "waypost[metrics]"',
        "False False",
    ]
