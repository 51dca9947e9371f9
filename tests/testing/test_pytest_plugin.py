"""The fixtures of `pytest_waypost`: for users' tests, with a client for tests and with real servers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from waypost import Waypost
from waypost.testing import TestPost

pytestmark = pytest.mark.promise("FACE-7")

ROOT = Path(__file__).parents[2]


def test_a_client_for_tests(waypost_post: TestPost) -> None:
    waypost_post.publish("orders", 1, delay=60)
    waypost_post.assert_published("orders", 1, delay=60)


def test_the_client_of_a_program(waypost_replacing: Callable[..., TestPost]) -> None:
    post = Waypost("sqlite:////no/such/folder/waypost.db")
    test = waypost_replacing(post, eager=True)
    done: list[object] = []
    post.handler("orders")(done.append)
    post.publish("orders", 1)
    assert done == [1]
    test.assert_published("orders", 1)


def check_store(url: str) -> None:
    with Waypost(url) as post:
        assert post.queues() == []
        post.publish("orders", {"id": 1})
        with post.receive("orders") as message:
            assert message is not None
            assert message.body == {"id": 1}


def test_a_file(waypost_sqlite_url: str) -> None:
    check_store(waypost_sqlite_url)


@pytest.mark.parametrize("time", [1, 2])
def test_a_valkey_that_is_empty_in_each_test(waypost_valkey_url: str, time: int) -> None:
    check_store(waypost_valkey_url)


@pytest.mark.parametrize("time", [1, 2])
def test_a_postgresql_that_is_empty_in_each_test(waypost_postgres_url: str, time: int) -> None:
    check_store(waypost_postgres_url)


def test_pytest_loads_the_plugin_and_the_plugin_loads_nothing_of_waypost() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"pytest_waypost": "pytest_waypost"}
    program = "import sys, pytest_waypost; print([name for name in sys.modules if name.partition('.')[0] == 'waypost'])"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == "[]"
