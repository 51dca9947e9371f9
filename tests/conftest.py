"""What holds for every test run: a test that could not run is reported, and under REQUIRE_ALL=1 it is a failure.

A test that uses a program of the machine is marked with `@pytest.mark.needs("pgbouncer")`; `scripts/system_parts.py`
lists what there is. One that needs another part which is not there skips with a reason that begins with `needs `:
`pytest.skip("needs a Valkey server")`. There is no other reason to skip.

No test can hang the run. After `timeout` seconds (pyproject.toml) pytest-timeout interrupts it. If that does not help,
for example because C code does not return, faulthandler prints the stacks of all threads after `faulthandler_timeout`
and ends the process; under xdist the test is then reported as a crash and a new process runs the others (see
tests/xdist_groups.py). A failed test is named at once, so that the output of a run that was interrupted has the names.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from scripts import system_parts
from tests.xdist_groups import Groups
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

pytest_plugins = ["waypost.testing.plugin", "pytest_waypost"]

#: How many tests were not run, by what they need.
NOT_RUN = pytest.StashKey[Counter[str]]()
#: The standard error of the process itself, which no test captures.
STDERR = pytest.StashKey[int]()
#: How long the process may take to end after the last test.
EXIT_SECONDS_MAX = int(os.environ.get("TESTS_EXIT_SECONDS_MAX", "120"))


# Properties are judged, not the speed of the machine, and the same code draws the same examples in every run.
settings.register_profile("waypost", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("waypost")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a shell; the programs that tests start and interrupt would ignore it as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Commands remember there of what they have warned today.
    state = tempfile.TemporaryDirectory(prefix="waypost-state-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)
    config.stash[NOT_RUN] = Counter()
    config.stash[STDERR] = os.dup(2)
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    # When a test fails, pytest-timeout and faulthandler stop watching it, but its fixtures can still hang.
    limit = float(item.config.getini("faulthandler_timeout") or 0)
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # A thread that a test did not end would keep the process alive. A worker of xdist waits here for the others,
    # and is ended by the controller.
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(EXIT_SECONDS_MAX, exit=True, file=config.stash[STDERR])


class Watcher:
    """Receives every report, in the process that collects them from all workers."""

    def __init__(self, missing: Counter[str], terminal: pytest.TerminalReporter | None) -> None:
        self.missing = missing
        self.terminal = terminal

    def count_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self.missing[reason.removeprefix("needs ") if reason.startswith("needs ") else f"no skip: {reason}"] += 1

    def name_failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Write the name of a failed test at once: the summary never comes if the run is interrupted."""
        if report.failed and self.terminal is not None:
            self.terminal.write_line(f"FAILED ({report.when}) {report.nodeid}", red=True)
            self.terminal.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count_skip(report)
        self.name_failed(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.count_skip(report)
        self.name_failed(report)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Workers of xdist send their reports to the controller, which judges.
    if not hasattr(session.config, "workerinput"):
        plugins = session.config.pluginmanager
        watcher = Watcher(session.config.stash[NOT_RUN], plugins.get_plugin("terminalreporter"))
        plugins.register(watcher, "report-watcher")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[NOT_RUN] and os.environ.get("REQUIRE_ALL") == "1" and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash[NOT_RUN]
    if missing:
        demanded = os.environ.get("REQUIRE_ALL") == "1"
        line = f"NOT RUN: {missing.total()} tests, need {'; '.join(sorted(missing))}"
        terminalreporter.write_line(line, red=demanded, yellow=not demanded)
        packages = sorted(set(missing) & set(system_parts.PARTS))
        if packages:
            terminalreporter.write_line(f"as root: {system_parts.line_for(packages)}")


# ---- servers that tests of several folders share: each test has a namespace of its own ---------------------------


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    before = (logging.root.manager.disable, logging.getLogger("waypost").level)
    yield
    assert (logging.root.manager.disable, logging.getLogger("waypost").level) == before


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with ValkeyServer(appendonly=True, appendfsync="no") as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.url
