"""What holds for every test run: a test that could not run is said aloud, and under REQUIRE_ALL=1 it is a failure.

A test that uses a program of the machine says so with `@pytest.mark.needs("pgbouncer")`; `scripts/system_parts.py`
lists what there is. One that needs another part which is not there skips with a reason that begins with `needs `:
`pytest.skip("needs a Valkey server")`. There is no other reason to skip.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from scripts import system_parts
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

pytest_plugins = ["waypost.testing.plugin"]

#: How many tests were not run, by what they need.
NOT_RUN = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a shell; the programs that tests start and interrupt would be deaf to it as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[NOT_RUN] = Counter()
    config.addinivalue_line("markers", "needs(*parts): the programs of scripts/system_parts.py that this test starts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        unknown = {name for mark in item.iter_markers("needs") for name in mark.args} - set(system_parts.PARTS)
        if unknown:
            raise pytest.UsageError(f"{item.nodeid} needs {unknown}, which scripts/system_parts.py does not know")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if not system_parts.is_there(name):
                pytest.skip(f"needs {name}")


class Watcher:
    """Hears every report, in the process that collects them from all workers."""

    def __init__(self, missing: Counter[str]) -> None:
        self.missing = missing

    def hear(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self.missing[reason.removeprefix("needs ") if reason.startswith("needs ") else f"no skip: {reason}"] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.hear(report)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Workers of xdist send their reports to the controller, which judges.
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Watcher(session.config.stash[NOT_RUN]), "not-run-watcher")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[NOT_RUN] and os.environ.get("REQUIRE_ALL") == "1" and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash[NOT_RUN]
    if missing:
        demanded = os.environ.get("REQUIRE_ALL") == "1"
        told = f"NOT RUN: {missing.total()} tests, need {'; '.join(sorted(missing))}"
        terminalreporter.write_line(told, red=demanded, yellow=not demanded)
        packages = sorted(set(missing) & set(system_parts.PARTS))
        if packages:
            terminalreporter.write_line(f"as root: {system_parts.line_for(packages)}")


# ---- servers that tests of several folders share: each test has a namespace of its own ---------------------------


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with ValkeyServer(appendonly=True, appendfsync="no") as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.url
