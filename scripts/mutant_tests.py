"""The pytest plugin that tests mutants for `scripts/mutants.py`: modules, tests and servers are loaded once.

The process collects the tests, starts the servers, and forks for each mutant. The fork gets the changed code and runs
the tests that use it until one fails twice. Programs that a test starts read the changed file.

    in:   {"file": …, "text": the file without the change}       the changed file is in its place already
    out:  {"result": "killed" | "left" | "reload", "by": the test that failed, "tests": how many ran}

A test that hangs, ends its process or fails only after a long wait may do so because the machine is busy. It kills the
mutant if it also passes without the change and fails once more with it: the answer then has `waited` and `confirmed`.
Otherwise the mutant is tested without it.

"reload" means that the change acts when the module is imported, so a fork cannot test it. A process that is started
with `MUTANT_FILE` instead of `MUTANT_JOBS` tests the change that it has imported.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import IO, Any

import pytest
from _pytest.runner import runtestprotocol

#: A test that takes this many times as long as without a change hangs.
HANGS_TIMES = 8
HANGS_SECONDS_MIN = 20.0
#: A test that takes longer than this is left out: it would be run for every mutant that is left.
TEST_SECONDS_MAX = 6.0
#: A test that fails after so long, and several times its usual time, has waited for what did not happen in time.
WAITED_SECONDS_MIN = 5.0
WAITED_TIMES = 4
STORES = ("memory", "sqlite", "valkey", "postgres", "stream", "store", "nats")
#: The class of tests/conformance/conftest.py that keeps tables with the functions of the SQL files.
NAMESPACES = "PostgresNamespaces"
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


def _simple_constants(text: str) -> dict[str, str]:
    """The names that a module gives a number or a text at its top level, with the source of each."""
    return {
        target.id: ast.unparse(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _rest(text: str) -> str:
    """A module without the values of its top-level names."""
    tree = ast.parse(text)
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            statement.value = ast.Constant(None)
    return ast.dump(tree)


def _fresh(module: ModuleType) -> ModuleType:
    """The module as its file is now, imported beside the one that all others use."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    # A compiled file of the same second and size would be taken for that of the changed text.
    Path(importlib.util.cache_from_source(module.__file__)).unlink(missing_ok=True)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def change_constant(module: ModuleType, before: str, after: str) -> set[Function]:
    """Give a number at the top of a module its changed value wherever it was imported; the functions that use it."""
    old, new = _simple_constants(before), _simple_constants(after)
    names = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    if len(names) != 1 or _rest(before) != _rest(after):
        raise NeedsImport
    name = names[0]
    was = getattr(module, name, None)
    value = getattr(_fresh(module), name)
    if type(was) not in (int, float, bool) or type(value) is not type(was):
        raise NeedsImport
    users = [
        other for key, other in list(sys.modules.items()) if key.startswith("waypost") and vars(other).get(name) is was
    ]  # fmt: skip
    for other in users:
        setattr(other, name, value)
    files = {file for other in users if (file := getattr(other, "__file__", None)) is not None}
    return {
        key for file in files for key, code in functions_of(compile(Path(file).read_text(), file, "exec"))
        if name in code.co_names and code.co_flags & CO_OPTIMIZED
    }  # fmt: skip


LUA_INCLUDE = re.compile(r"^ *-- include (\w+)", re.MULTILINE)
SQL_FUNCTION = re.compile(r"^CREATE OR REPLACE FUNCTION \{(\w+)\}", re.MULTILINE)


def _users(names: set[str], uses: dict[str, set[str]]) -> set[str]:
    """The names, and all that use one of them, directly or through others."""
    found: set[str] = set()
    while found != names:
        found = set(names)
        names = found | {name for name, used in uses.items() if used & found}
    return found


def verbs_of(path: Path, before: str, after: str) -> set[str]:
    """The scripts or functions, as Python calls them, in which a change of a Lua or an SQL file can act."""
    texts = {other.stem: other.read_text() for other in path.parent.glob(f"*{path.suffix}")} | {path.stem: before}
    if path.suffix == ".lua":
        return _users({path.stem}, {name: set(LUA_INCLUDE.findall(text)) for name, text in texts.items()})
    place = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before) - 1)
    uses: dict[str, set[str]] = {}
    changed = ""
    for stem, text in texts.items():
        starts = [*SQL_FUNCTION.finditer(text)]
        ends = [*(each.start() for each in starts[1:]), len(text)]
        for start, end in zip(starts, ends[: len(starts)], strict=True):
            uses[start[1]] = set(re.findall(r"\{(\w+)\}", text[start.end() : end]))
            if stem == path.stem and start.start() <= place < end:
                changed = start[1]
    return _users({changed}, uses) if changed else set()


def functions_that_name(folder: Path, verbs: set[str]) -> set[Function] | None:
    """The Python functions below a folder that name one of the scripts, or None if a change may act in any."""
    found = {
        key
        for file in folder.glob("*.py")
        for key, code in functions_of(compile(file.read_text(), str(file), "exec"))
        if code.co_flags & CO_OPTIMIZED
        and any(
            isinstance(text, str) and (text in verbs or any(f"{{{verb}}}" in text for verb in verbs))
            for text in code.co_consts
        )
    }
    return found or None


def forget_scripts(suffix: str) -> None:
    """Have the texts of scripts read anew, and made anew where a server keeps them."""
    for ending, module, name in CACHES:
        if suffix == ending and module in sys.modules:
            getattr(importlib.import_module(module), name).cache_clear()
    if suffix == ".sql":
        for thing in gc.get_objects():
            if type(thing).__name__ == NAMESPACES:
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
        self.measured: set[str] = set()
        self.seconds: dict[str, float] = {}
        #: By file and name: lines move between two runs.
        self.calls: dict[str, set[tuple[str, str]]] = {}

    def load(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            self.add(line)

    def add(self, line: str) -> None:
        name, passed, seconds, calls = json.loads(line)
        self.measured.add(name)
        if passed:
            self.seconds[name] = seconds
            self.calls[name] = {(file.replace("$", self.root, 1), qualified) for file, qualified, *_ in calls}

    def line(self, item: pytest.Item, passed: bool, seconds: float, calls: list[Function]) -> str:
        short = sorted({(file.replace(self.root, "$", 1), qualified) for file, qualified, _ in calls})
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
        """Run every test of which nothing is known yet without a change, in a fork."""
        new = [item for name, item in self.items.items() if name not in self.known.measured]
        child = os.fork() if new else 0
        if new and not child:
            with self.known.path.open("a", buffering=1) as file:
                calls = Calls(str(Path(self.known.root) / "src" / "waypost"))
                for item in new:
                    started = time.monotonic()
                    calls.start()
                    passed = passes(item)
                    found = calls.stop()
                    file.write(self.known.line(item, passed, time.monotonic() - started, found) + "\n")
            os._exit(0)
        if child:
            os.waitpid(child, 0)
        self.known.load()

    def chosen(self, file: str, changed: set[Function] | None) -> list[pytest.Item]:
        """The tests for a change, those first that killed others of its file, then the quickest."""
        slowest = float(os.environ.get("MUTANT_SLOWEST") or TEST_SECONDS_MAX)
        wanted = {(path, qualified) for path, qualified, _ in changed or ()}
        # A function that no test called was renamed since, or is called by none.
        everywhere = not any(wanted & calls for calls in self.known.calls.values())
        names = [
            name
            for name, seconds in self.known.seconds.items()
            if name in self.items
            and seconds <= slowest
            and (everywhere or wanted & self.known.calls[name] or "process" in name)
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
        left_out: set[str] = set()
        while True:
            answer = self._in_a_fork(file, text, left_out=left_out)
            name = answer["by"]
            if answer["result"] != "killed" or not answer.get("waited") or name not in self.items:
                break
            if self._confirmed(file, text, name):
                answer["confirmed"] = True
                break
            left_out.add(name)
        if left_out:
            answer["left_out"] = sorted(left_out)
        if answer["result"] == "killed" and name in self.items:
            killers = self.killers[file]
            if name in killers:
                killers.remove(name)
            killers.append(name)
        return answer

    def _confirmed(self, file: str, text: str, name: str) -> bool:
        """Whether a test passes without the change, and fails once more with it."""
        path = Path(self.known.root) / file
        changed = path.read_text()
        path.write_text(text)
        try:
            if self._in_a_fork(file, None, only=name)["result"] != "left":
                return False
        finally:
            path.write_text(changed)
        return bool(self._in_a_fork(file, text, only=name)["result"] == "killed")

    def _in_a_fork(
        self, file: str, text: str | None, *, only: str | None = None, left_out: Collection[str] = ()
    ) -> dict[str, Any]:
        """Run the tests of a change in a fork; one test if it is named, and without the change if there is no text."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as out:
                try:
                    self._run_tests(file, text, out, only, left_out)
                except BaseException as error:
                    out.write(json.dumps({"result": "killed", "by": f"{type(error).__name__} before any test"}) + "\n")
            os._exit(0)
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        answer = self._follow(reader, times=1 if only is None else 3)
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        return answer

    def _follow(self, reader: int, times: int) -> dict[str, Any]:
        """Read what the fork reports: the test that begins, and at the end its answer."""
        running, limit, count, rest = "", 120.0, 0, b""
        while True:
            if not select.select([reader], [], [], limit * times)[0]:
                return {"result": "killed", "by": running, "tests": count, "waited": "hangs"}
            got = os.read(reader, 65536)
            if not got:
                return {"result": "killed", "by": running, "tests": count, "waited": "crashed"}
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                report = json.loads(line)
                if "result" in report:
                    return {"by": "", "tests": count, **report}
                running, count = report["test"], count + 1
                # It may run twice.
                limit = max(HANGS_SECONDS_MIN, HANGS_TIMES * self.known.seconds[running])

    def _run_tests(
        self, file: str, text: str | None, out: IO[str], only: str | None, left_out: Collection[str]
    ) -> None:
        path = Path(self.known.root) / file
        changed: set[Function] | None = None
        if path.suffix == ".py" and text is not None:
            try:
                changed = self._change(path, text)
            except NeedsImport:
                out.write(json.dumps({"result": "reload"}) + "\n")
                return
        elif "sqlite" in path.parts and text is not None:  # the schema is read when its module is imported
            out.write(json.dumps({"result": "reload"}) + "\n")
            return
        elif path.suffix != ".py":
            forget_scripts(path.suffix)
            if text is not None:
                changed = functions_that_name(path.parents[1], verbs_of(path, text, path.read_text()))
        chosen = self.chosen(file, changed) if only is None else [self.items[only]]
        self.run_until_one_fails([item for item in chosen if item.nodeid not in left_out], out)

    def _change(self, path: Path, before: str) -> set[Function]:
        try:
            return change_functions(str(path), before, path.read_text())
        except NeedsImport:
            for module in list(sys.modules.values()):
                if getattr(module, "__file__", None) == str(path):
                    return change_constant(module, before, path.read_text())
            raise

    def run_until_one_fails(self, items: Sequence[pytest.Item], out: IO[str]) -> None:
        """Run tests and report: each that begins, then the result."""
        for item in items:
            name = item.nodeid
            out.write(json.dumps({"test": name}) + "\n")
            started = time.monotonic()
            if passes(item):
                continue
            seconds = time.monotonic() - started
            # Twice: a test that fails by chance kills nothing.
            if not passes(item):
                waited = seconds > max(WAITED_SECONDS_MIN, WAITED_TIMES * self.known.seconds[name])
                out.write(json.dumps({"result": "killed", "by": name, "waited": "failed" if waited else ""}) + "\n")
                return
        out.write(json.dumps({"result": "left"}) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests whose names match."""
    items[:] = [item for item in items if re.search(os.environ["MUTANT_CHOICE"], item.nodeid)]


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Test mutants instead of running the tests once."""
    known = Known(Path(os.environ["MUTANT_TESTS"]), os.getcwd())
    runner = Runner(session, known)
    answers = int(os.environ["MUTANT_ANSWERS"])
    if "MUTANT_FILE" in os.environ:
        known.load()
        with os.fdopen(answers, "w", buffering=1) as out:
            runner.run_until_one_fails(runner.chosen(os.environ["MUTANT_FILE"], None), out)
        return True
    runner.warm_up()
    known.load()
    runner.measure()
    failing = [name for name in runner.items if name not in known.seconds]
    with os.fdopen(int(os.environ["MUTANT_JOBS"])) as lines, os.fdopen(answers, "w", buffering=1) as out:
        out.write(json.dumps({"tests": len(runner.items), "failing": failing}) + "\n")
        for line in lines:
            job = json.loads(line)
            out.write(json.dumps(runner.test(job["file"], job["text"])) + "\n")
    return True
