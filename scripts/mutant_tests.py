"""The pytest plugin that tests mutants for `scripts/mutants.py`: modules, tests and servers are loaded once.

The process collects the tests, starts the servers, and forks for each mutant. The fork gets the changed code and runs
the tests that call the changed functions until one fails twice. Programs that a test starts read the changed file.

    in:   {"file": …, "text": the file without the change}       the changed file is in its place already
    out:  {"result": "killed" | "left" | "reload", "by": the test that failed, "tests": how many ran}

"reload" means that the change acts when the module is imported, so a fork cannot test it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import IO, Any

import pytest
from _pytest.runner import runtestprotocol

#: A test that takes this many times as long as without a change hangs.
HANGS_TIMES = 8
HANGS_SECONDS_MIN = 20.0
#: A test that takes longer than this is left out: it would be run for every mutant that is left.
TEST_SECONDS_MAX = 6.0
STORES = ("memory", "sqlite", "valkey", "postgres")
CO_OPTIMIZED = 1
#: What keeps the text of a script: file name ending, module, function with a cache.
CACHES = (
    (".lua", "waypost.store.valkey.scripts", "script"),
    (".sql", "waypost.store.postgres.schema", "function_text"),
)

#: A function as a traced call shows it: file, qualified name, first line.
Function = tuple[str, str, int]


# ---- changing code -------------------------------------------------------------------------------------------------


def functions_of(code: CodeType) -> Iterator[tuple[Function, CodeType]]:
    """A code object and all inside it."""
    yield (code.co_filename, code.co_qualname, code.co_firstlineno), code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from functions_of(constant)


def _shallow(code: CodeType) -> tuple[Any, ...]:
    constants = tuple((type(value), value) for value in code.co_consts if not isinstance(value, CodeType))
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


class NeedsImport(Exception):
    """Raised when a change acts only on a fresh import of its module."""


def change_functions(path: str, before: str, after: str) -> set[Function]:
    """Give the living functions of a module their changed code; those that changed."""
    old = dict(functions_of(compile(before, path, "exec")))
    new = dict(functions_of(compile(after, path, "exec")))
    changed = {key for key in old.keys() & new.keys() if _shallow(old[key]) != _shallow(new[key])}
    if not changed or any(not old[key].co_flags & CO_OPTIMIZED for key in changed):
        raise NeedsImport
    for function in [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]:
        code = function.__code__
        key = (code.co_filename, code.co_qualname, code.co_firstlineno)
        if code.co_filename == path and key in new and old.get(key) != new[key]:
            try:
                function.__code__ = new[key]
            except ValueError:  # another number of free variables
                raise NeedsImport from None
    return changed


def forget_scripts(suffix: str) -> None:
    """Have the texts of scripts read anew, and made anew where a server keeps them."""
    for ending, module, name in CACHES:
        if suffix == ending and module in sys.modules:
            getattr(importlib.import_module(module), name).cache_clear()
    if suffix == ".sql":
        for thing in gc.get_objects():
            if type(thing).__name__ == "PostgresRooms":
                thing._free.clear()


# ---- running tests -------------------------------------------------------------------------------------------------


class Calls:
    """Which functions of the package a test calls, in all its threads."""

    def __init__(self, below: str) -> None:
        self._below = below
        self.seen: set[CodeType] = set()

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(self._below):
            self.seen.add(frame.f_code)

    def start(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def stop(self) -> list[Function]:
        sys.settrace(None)
        threading.settrace(None)
        found = [(code.co_filename, code.co_qualname, code.co_firstlineno) for code in self.seen]
        self.seen = set()
        return found


class Following(pytest.Item):
    """Stands for the next test: what lasts for the session stays, all else is torn down."""

    def runtest(self) -> None:
        """It is never run."""


def passes(item: pytest.Item) -> bool:
    """Run a test."""
    reports = runtestprotocol(item, log=False, nextitem=Following.from_parent(item.session, name="following"))
    for report in reports:
        if report.failed:
            print(report.nodeid, report.when, report.longreprtext, flush=True)
            return False
    return True


class Known:
    """What a run without a change showed of each test: how long it takes, which functions it calls."""

    def __init__(self, path: Path, root: str) -> None:
        self.path = path
        self.root = root
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, set[Function]] = {}

    def load(self) -> bool:
        if not self.path.exists():
            return False
        for line in self.path.read_text().splitlines():
            self.add(line)
        return True

    def add(self, line: str) -> None:
        name, passed, seconds, calls = json.loads(line)
        if passed:
            self.seconds[name] = seconds
            self.calls[name] = {(file.replace("$", self.root, 1), qualified, first) for file, qualified, first in calls}

    def line(self, item: pytest.Item, passed: bool, seconds: float, calls: list[Function]) -> str:
        short = [(file.replace(self.root, "$", 1), qualified, first) for file, qualified, first in calls]
        return json.dumps([item.nodeid, passed, seconds, short])


class Runner:
    """Tests mutants, one after the other, each in a fork."""

    def __init__(self, session: pytest.Session, known: Known) -> None:
        self.items = {item.nodeid: item for item in session.items}
        self.known = known
        #: The tests that killed mutants of a file, the latest last.
        self.killers: dict[str, list[str]] = defaultdict(list)

    def warm_up(self) -> None:
        """Run a test of each folder and store: its servers stay for all forks."""
        first: dict[tuple[str, str], pytest.Item] = {}
        for item in self.items.values():
            store = next((name for name in STORES if f"[{name}" in item.nodeid or f"-{name}" in item.nodeid), "")
            first.setdefault((item.nodeid.split("/")[1], store), item)
        for item in first.values():
            passes(item)

    def measure(self) -> None:
        """Run every test without a change, in a fork."""
        out = self.known.path.with_suffix(".new")
        child = os.fork()
        if not child:
            with out.open("w") as file:
                calls = Calls(str(Path(self.known.root) / "src" / "waypost"))
                for item in self.items.values():
                    started = time.monotonic()
                    calls.start()
                    passed = passes(item)
                    found = calls.stop()
                    file.write(self.known.line(item, passed, time.monotonic() - started, found) + "\n")
            os._exit(0)
        os.waitpid(child, 0)
        out.rename(self.known.path)
        self.known.load()

    def chosen(self, file: str, changed: set[Function] | None) -> list[pytest.Item]:
        """The tests for a change, those first that killed others of its file, then the quickest."""
        names = [
            name
            for name, seconds in self.known.seconds.items()
            if name in self.items
            and seconds <= TEST_SECONDS_MAX
            and (changed is None or changed & self.known.calls[name] or "process" in name)
        ]
        killers = {name: place for place, name in enumerate(self.killers[file], 1)}
        for other in self.killers:
            for name in self.killers[other]:
                killers.setdefault(name, 0)

        def order(name: str) -> tuple[Any, ...]:
            return (name not in killers, -killers.get(name, 0), "async" in name, self.known.seconds[name])

        return [self.items[name] for name in sorted(names, key=order)]

    def test(self, file: str, text: str) -> dict[str, Any]:
        """Test the change that stands in a file."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as out:
                try:
                    self._in_fork(file, text, out)
                except BaseException as error:
                    out.write(json.dumps({"result": "killed", "by": f"{type(error).__name__} before any test"}) + "\n")
            os._exit(0)
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        answer = self._follow(reader)
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        if answer["result"] == "killed" and answer["by"] in self.items:
            killers = self.killers[file]
            if answer["by"] in killers:
                killers.remove(answer["by"])
            killers.append(answer["by"])
        return answer

    def _follow(self, reader: int) -> dict[str, Any]:
        """Read what the fork reports: the test that begins, and at the end its answer."""
        running, limit, count, rest = "", 60.0, 0, b""
        while True:
            if not select.select([reader], [], [], limit)[0]:
                return {"result": "killed", "by": running, "tests": count, "hangs": True}
            got = os.read(reader, 65536)
            if not got:
                return {"result": "killed", "by": running, "tests": count, "crashed": True}
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                report = json.loads(line)
                if "result" in report:
                    return {"by": "", "tests": count, **report}
                running, count = report["test"], count + 1
                limit = max(HANGS_SECONDS_MIN, HANGS_TIMES * self.known.seconds[running])

    def _in_fork(self, file: str, text: str, out: IO[str]) -> None:
        path = Path(self.known.root) / file
        changed: set[Function] | None = None
        if path.suffix == ".py":
            try:
                changed = change_functions(str(path), text, path.read_text())
            except NeedsImport:
                out.write(json.dumps({"result": "reload"}) + "\n")
                return
        elif "sqlite" in path.parts:  # the schema is read when its module is imported
            out.write(json.dumps({"result": "reload"}) + "\n")
            return
        else:
            forget_scripts(path.suffix)
        for item in self.chosen(file, changed):
            out.write(json.dumps({"test": item.nodeid}) + "\n")
            # Twice: a test that fails by chance kills nothing.
            if not passes(item) and not passes(item):
                out.write(json.dumps({"result": "killed", "by": item.nodeid}) + "\n")
                return
        out.write(json.dumps({"result": "left"}) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests whose names match."""
    items[:] = [item for item in items if re.search(os.environ["MUTANT_CHOICE"], item.nodeid)]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Test mutants instead of running the tests once, unless none are sent."""
    if "MUTANT_JOBS" not in os.environ:
        return None
    known = Known(Path(os.environ["MUTANT_TESTS"]), os.getcwd())
    runner = Runner(session, known)
    runner.warm_up()
    if not known.load():
        runner.measure()
    failing = [name for name in runner.items if name not in known.seconds]
    jobs, answers = int(os.environ["MUTANT_JOBS"]), int(os.environ["MUTANT_ANSWERS"])
    with os.fdopen(jobs) as lines, os.fdopen(answers, "w", buffering=1) as out:
        out.write(json.dumps({"tests": len(runner.items), "failing": failing}) + "\n")
        for line in lines:
            job = json.loads(line)
            out.write(json.dumps(runner.test(job["file"], job["text"])) + "\n")
    return True
