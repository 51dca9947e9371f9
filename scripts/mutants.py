"""Change the code in one small place at a time and see whether a test fails: a mutant that no test kills shows a gap.

    python scripts/mutants.py [--files PATTERN] [--guards] [--sample N] [--seed S] [--jobs N] [--minutes M] [--list]

A mutant is one changed token (a comparison, a condition, a number, a statement left out) of a store, a script, an
operation, the worker, schedules or the outbox. It is tested in a copy of the tree by the tests that `SUITES` names for
its folder, in a fork of a process that has loaded them (`scripts/mutant_tests.py`): those that use the changed function
or script, until one fails. `--sample N` draws N mutants of each folder by the seed, so the same call makes the same
mutants, and a change of the code elsewhere does not change the draw; `--guards` draws only from lines that compare
tokens, times, counts or limits. With `--results FILE` every answer is kept, and the next call goes on from there.
What survives must stand in `tests/mutants_left.json` with the reason, or the run fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/waypost")
LEFT = ROOT / "tests" / "mutants_left.json"
#: What a copy of the tree needs.
COPIED = (
    "src", "tests", "benchmarks", "examples", "scripts", "docs", ".gitignore", "pyproject.toml", "constraints.txt",
    "Makefile", "README.md", "CHANGELOG.md", "LICENSE",
)  # fmt: skip
#: A fresh process that neither begins nor ends a test for so long hangs.
SILENCE_SECONDS_MAX = 180

CONFORMANCE = ["tests/conformance/test_conformance.py", "tests/conformance/test_removal.py"]
#: Tests of bulk reads, and of what the doctor command reads, on each store.
READERS = ["tests/spark/test_bulk.py", "tests/cli/test_doctor.py"]
#: On the memory store alone, and not what compares every instant of every zone.
WORKER = r"^(?!.*(sqlite|valkey|redis|cluster|postgres|bouncer|nats|several_schedulers|no_instant_differs|every_zone))"
#: The tests for the files below a folder: paths, and a pattern of the names of those to run.
SUITES: dict[str, tuple[list[str], str]] = {
    "store/memory": (CONFORMANCE, r"\[memory(\]|-(?!async))"),
    "store/sqlite": (
        [*CONFORMANCE, *(f"tests/unit/test_sqlite_{name}.py" for name in ("file", "damage", "processes")), *READERS],
        r"\[sqlite(\]|-(?!async))|test_sqlite_|test_doctor|pages_hold",
    ),
    "store/valkey": (
        [*CONFORMANCE, "tests/valkey", *READERS],
        r"\[valkey(\]|-(?!async))|test_doctor|pages_hold"
        r"|/test_(scripts|bounded_scripts|chains|history|damaged_records|connection_limit|workers)\.py",
    ),
    "store/postgres": (
        [*CONFORMANCE, "tests/postgres", *READERS],
        r"\[postgres(\]|-(?!async))|test_doctor|pages_hold"
        r"|/test_(bounds|chains|concurrency|batches|tokens|damage|embedded_server|workers|journal_slices)\.py",
    ),
    "operations": (
        [
            *(f"tests/unit/test_{name}.py" for name in ("operations", "client", "client_receive", "body_types")),
            *(f"tests/conformance/test_{name}.py" for name in ("removal", "repeats")),
            "tests/wake/test_sleepers.py", "tests/schedule", "tests/worker",
        ],
        WORKER,
    ),
    "worker": (
        ["tests/worker", "tests/unit/test_health.py", "tests/unit/test_wait_machine.py", "tests/wake/test_sleepers.py"],
        WORKER,
    ),
    "schedule": (["tests/schedule", "tests/valkey/test_chains.py"], WORKER + "|a_promoter_sends_on"),
    "outbox": (["tests/outbox", "tests/relay"], r"^(?!.*(test_kills|/test_lake|\[(rabbitmq|kafka|lake)\]))"),
}  # fmt: skip
#: Their servers take longer to start than all other tests of the folder together.
LEFT_OUT = ("outbox/relay/kafka.py", "outbox/relay/rabbitmq.py", "outbox/relay/lake.py")
#: Lines that decide: who holds a message, whether it is due, how often, how many.
GUARDS = re.compile(
    r"token|nonce|deliver|attempt|window|dedup|expire|lease|ends?_ms|\bdue|\bat_ms|now|\bcap|max_|_max|MAX|rate|limit"
    r"|repeat|too_old|stamp|floor|tomb|removed|owner|owns|held|hold|chain|block|parked|generation|paused|leader|version"
    r"|expected|next_ms|until|\bstate\b|status|cancel|count|taken|operation|number|lost",
    re.IGNORECASE,
)


#: What a mutant is known by though lines move: file, line, change, and which one it is of those otherwise equal.
Key = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Mutant:
    """One change: `before` at `offset` of a file becomes `after`."""

    file: str
    line: int
    offset: int
    before: str
    after: str
    #: The changed line as it is, by which a known survivor is found when lines have moved.
    text: str
    #: Which one it is among those of its file that are otherwise equal.
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r} -> {self.after!r}   {self.text}"

    @property
    def key(self) -> Key:
        return self.file, self.text, self.before, self.after, self.nth

    def changed(self, text: str) -> str:
        """The file's text with the change."""
        end = self.offset + len(self.before)
        assert text[self.offset : end] == self.before
        # Lines below keep their numbers.
        return text[: self.offset] + self.after + "\n" * self.before.count("\n") + text[end:]


# ---- making mutants ------------------------------------------------------------------------------------------------

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip


class _Python(ast.NodeVisitor):
    """Finds what can be changed in a Python file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, str, str]] = []

    def _place(self, line: int, column: int) -> int:
        start = self.starts[line - 1]
        encoded = self.text[start : self.starts[line]].encode()
        return start + len(encoded[:column].decode())

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _between(self, left: ast.expr, right: ast.expr, choices: dict[str, str]) -> None:
        start, stop = self._end(left), self._place(right.lineno, right.col_offset)
        gap = self.text[start:stop]
        for before in sorted(choices, key=len, reverse=True):
            match = re.search(rf"(?<![\w=<>!]){re.escape(before)}(?![\w=<>])", gap)
            if match is not None:
                self.found.append((start + match.start(), before, choices[before]))
                return

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self._between(left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node.values[0], node.values[1], {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node.left, node.right, {"+": "-", "-": "+"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.found.append((self._place(node.lineno, node.col_offset), "not ", ""))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            start = self._place(node.lineno, node.col_offset)
            self.found.append((start, self.text[start : self._end(node)], f"({node.value} + 1)"))
        elif type(node.value) is bool:
            self.found.append((self._place(node.lineno, node.col_offset), str(node.value), str(not node.value)))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts stay as they are: their numbers are for readers."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: it raises where the code would be wrong anyway
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            start = self._place(node.lineno, node.col_offset)
            call = self.text[start : self._end(node)]
            if not call.startswith("log."):
                self.found.append((start, call, "pass"))
        self.generic_visit(node)


#: In scripts: a pattern whose first group is changed, and into what.
LUA_RULES = (
    (r"(?<![<>=~])(<=?|>=?|==|~=)(?!=)", {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "~=", "~=": "=="}),
    (r"\b(and|or)\b", {"and": "or", "or": "and"}),
    (r"\b(not )", {"not ": ""}),
    (r" ([+-]) ", {"+": "-", "-": "+"}),
    (r"^ *(call\(.*\))$", None),
)
SQL_RULES = (
    # An equals sign elsewhere than in a condition assigns: to change it only breaks the syntax.
    (r"(?<![<>=:])(<=?|>=?|<>)(?![>=])", {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "<>": "="}),
    (r"\b(?:WHERE|AND|OR|IF|WHEN|ON) (?:(?! SET )[^=<>])*?(?<![<>=:])(=)(?![>=])", {"=": "<>"}),
    (r"(?<!CREATE )\b(AND|OR)\b", {"AND": "OR", "OR": "AND"}),
    (r"\b(NOT )(?!NULL|EXISTS \{)", {"NOT ": ""}),
    # Adding 0 keeps the planner from an index.
    (r" ([+-]) (?!0\b)", {"+": "-", "-": "+"}),
    (r"^ *(PERFORM .*);$", None),
)
NOTHING = {".lua": "", ".sql": "NULL"}


def _in_script(text: str, suffix: str) -> Iterator[tuple[int, str, str]]:
    offset = 0
    for line in text.splitlines(keepends=True):
        code = line.rstrip("\n")
        comment = code.find("--")
        code = code if comment < 0 else code[:comment]
        for pattern, choices in LUA_RULES if suffix == ".lua" else SQL_RULES:
            for match in re.finditer(pattern, code):
                if code[: match.start(1)].count("'") % 2:
                    continue  # inside a text
                before = match[1]
                yield offset + match.start(1), before, NOTHING[suffix] if choices is None else choices[before]
        offset += len(line)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of the text."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        finder = _Python(text)
        finder.visit(ast.parse(text))
        found: Iterator[tuple[int, str, str]] = iter(sorted(finder.found))
    else:
        found = _in_script(text, path.suffix)
    lines = text.splitlines()
    equal: Counter[Key] = Counter()
    for offset, before, after in found:
        line = text.count("\n", 0, offset) + 1
        mutant = Mutant(str(path), line, offset, before, after, lines[line - 1].strip())
        yield replace(mutant, nth=equal[mutant.key])
        equal[mutant.key] += 1


def folder_of(path: str) -> str:
    """The folder by which a file's tests are chosen."""
    inner = str(Path(path).relative_to(SOURCE))
    return next(folder for folder in SUITES if inner.startswith(folder + "/"))


def all_files(pattern: str) -> list[Path]:
    """The files that mutants are made of."""
    return [
        path.relative_to(ROOT)
        for folder in SUITES
        for path in sorted((ROOT / SOURCE / folder).rglob("*"))
        if path.suffix in (".py", ".lua", ".sql")
        and "migrations" not in path.parts
        and str(path.relative_to(ROOT / SOURCE)) not in LEFT_OUT
        and fnmatch.fnmatch(str(path.relative_to(ROOT / SOURCE)), pattern)
    ]


# ---- testing mutants -----------------------------------------------------------------------------------------------


class Tests:
    """A copy of the tree and a process in it that has loaded the tests of one folder."""

    def __init__(self, folder: str, results: Path) -> None:
        self._paths, self._choice = SUITES[folder]
        self._workspace = Path(tempfile.mkdtemp(prefix="waypost-mutants-"))
        self._copy = self._workspace / "tree"
        self._copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self._copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, self._copy / name)
        (self._copy / ".venv").symlink_to(ROOT / ".venv")
        self._known = results.with_suffix(f".{folder.replace('/', '-')}.tests")
        self._log = results.with_suffix(f".{folder.replace('/', '-')}.log")
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> list[str]:
        return [
            str(ROOT / ".venv/bin/python"), "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
            "-p", "scripts.mutant_tests", *self._paths,
        ]  # fmt: skip

    def _start(self, **variables: str) -> tuple[subprocess.Popen[bytes], IO[str]]:
        """Start a process in the copy; return it and what it answers."""
        memory = Path("/dev/shm")
        answers, answers_end = os.pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self._copy / 'src'}{os.pathsep}{self._copy}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(memory) if memory.is_dir() else tempfile.gettempdir(),
            "MUTANT_CHOICE": self._choice,
            "MUTANT_TESTS": str(self._known),
            "MUTANT_ANSWERS": str(answers_end),
            **variables,
        }
        passed = [answers_end, *(int(value) for name, value in variables.items() if name == "MUTANT_JOBS")]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command(), cwd=self._copy, env=environment, start_new_session=True, pass_fds=passed,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(answers_end)
        return process, os.fdopen(answers)

    def start(self) -> None:
        """Load the tests, start the servers, and run all once without a change."""
        jobs, self._jobs = os.pipe()
        self._process, self._reader = self._start(MUTANT_JOBS=str(jobs))
        os.close(jobs)
        self._writer = os.fdopen(self._jobs, "w", buffering=1)
        first = self._answer()
        print(f"{first['tests']} tests loaded, left out because they fail: {first['failing'][:9]}", flush=True)

    def _answer(self) -> dict[str, Any]:
        line = self._reader.readline()
        if not line:
            raise RuntimeError(f"the process that tests mutants has ended: see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def test(self, mutant: Mutant) -> dict[str, Any]:
        """Return the result of the tests for a mutant."""
        place = self._copy / mutant.file
        text = place.read_text()
        place.write_text(mutant.changed(text))
        try:
            self._writer.write(json.dumps({"file": mutant.file, "text": text}) + "\n")
            answer = self._answer()
            if answer["result"] == "reload":
                answer = self._in_a_fresh_process(mutant.file)
                if answer.get("waited"):
                    # It hung or it crashed, which a busy machine can do too.
                    again = self._in_a_fresh_process(mutant.file)
                    answer = {**again, "confirmed": again["result"] == "killed"}
            return answer
        finally:
            place.write_text(text)

    def _in_a_fresh_process(self, file: str) -> dict[str, Any]:
        """Import the change and run the tests of its folder until one fails."""
        process, answers = self._start(MUTANT_FILE=file)
        running, count = "the import", 0
        try:
            with answers:
                while select.select([answers], [], [], SILENCE_SECONDS_MAX)[0]:
                    line = answers.readline()
                    if not line:
                        return {"result": "killed", "by": running, "tests": count, "waited": "crashed"}
                    report = json.loads(line)
                    if "result" in report:
                        return {"by": "", "tests": count, **report}
                    running, count = report["test"], count + 1
            return {"result": "killed", "by": running, "tests": count, "waited": "hangs"}
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Remove everything that was created."""
        if self._process is not None:
            self._writer.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._reader.close()
        shutil.rmtree(self._workspace, ignore_errors=True)


def known_survivors() -> dict[Key, dict[str, Any]]:
    """The mutants that no test can or need kill, with the kind and the reason of each."""
    if not LEFT.exists():
        return {}
    return {
        (entry["file"], entry["text"], entry["before"], entry["after"], entry.get("nth", 0)): entry
        for entry in json.loads(LEFT.read_text())
    }


class Results:
    """The answers so far, one a line, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.answers: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._note(json.loads(line))

    def _note(self, answer: dict[str, Any]) -> None:
        key = tuple(answer[name] for name in ("file", "text", "before", "after", "nth"))
        self.answers[key] = answer

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        return self.answers.get(mutant.key)

    def add(self, mutant: Mutant, answer: dict[str, Any], seconds: float) -> None:
        with self._lock, self.path.open("a") as file:
            whole = {**asdict(mutant), **answer, "seconds": round(seconds, 1)}
            file.write(json.dumps(whole) + "\n")
            self._note(whole)
            print(f"{len(self.answers)} {seconds:.0f} s {answer['result']:6} {mutant}", flush=True)


def run(mutants: list[Mutant], results: Results, jobs: int, until: float) -> None:
    """Test the mutants that have no answer yet, a folder at a time in each of the jobs."""
    folders: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        if results.of(mutant) is None:
            folders.setdefault(folder_of(mutant.file), []).append(mutant)

    def test(folder: str) -> None:
        if time.monotonic() > until:
            return
        tests = Tests(folder, results.path)
        try:
            tests.start()
            for mutant in folders[folder]:
                started = time.monotonic()
                if started > until:
                    break
                answer = tests.test(mutant)
                results.add(mutant, answer, time.monotonic() - started)
        finally:
            tests.close()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(test, folders))


def report(made: int, mutants: list[Mutant], results: Results) -> int:
    """Print the figures, and what is left without a reason."""
    known = known_survivors()
    tested = [mutant for mutant in mutants if results.of(mutant) is not None]
    left = [mutant for mutant in tested if (results.of(mutant) or {})["result"] == "left"]
    by_folder = Counter(folder_of(mutant.file) for mutant in tested)
    left_by_folder = Counter(folder_of(mutant.file) for mutant in left)
    for folder, count in sorted(by_folder.items()):
        print(f"{folder}: made {count}, killed {count - left_by_folder[folder]}, left {left_by_folder[folder]}")
    unexplained = [mutant for mutant in left if mutant.key not in known]
    kinds = Counter(known[mutant.key]["kind"] for mutant in left if mutant.key in known)
    reasons = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none explained"
    for mutant in unexplained:
        print(json.dumps({**asdict(mutant), "kind": "", "reason": ""}))
    print(f"{made} possible, {len(mutants)} drawn, {len(tested)} tested, {len(unexplained)} left without a reason")
    print(
        f"mutants: made {len(tested)}, killed {len(tested) - len(left)}, left {len(left)} ({reasons or 'no reasons'})"
    )
    return 1 if unexplained or len(tested) < len(mutants) else 0


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many mutants of each folder. A larger sample of the same seed holds the smaller one."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(json.dumps([seed, *mutant.key]).encode()).digest()

    folders: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=place):
        folders.setdefault(folder_of(mutant.file), []).append(mutant)
    return [mutant for folder in folders.values() for mutant in folder[:count]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", default="*", help="only files below src/waypost that match this pattern")
    parser.add_argument("--folder", action="append", choices=SUITES, help="of the sample, only mutants of this folder")
    parser.add_argument("--guards", action="store_true", help="only lines that compare tokens, times, counts or limits")
    parser.add_argument("--left", action="store_true", help="only those that tests/mutants_left.json lists")
    parser.add_argument("--sample", type=int, help="how many mutants of each folder to test, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="how many folders at a time")
    parser.add_argument("--slowest", help="leave out tests that take longer than so many seconds: 6 unless told")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after so long")
    parser.add_argument("--results", type=Path, help="keep the answers in this file, and go on from those in it")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    os.environ["MUTANT_SLOWEST"] = options.slowest or ""
    mutants = [mutant for path in all_files(options.files) for mutant in mutants_of(path)]
    if options.guards:
        mutants = [mutant for mutant in mutants if GUARDS.search(mutant.text)]
    if options.left:
        mutants = [mutant for mutant in mutants if mutant.key in known_survivors()]
    made = len(mutants)
    if options.sample is not None:
        mutants = sample(mutants, options.sample, options.seed)
    if options.folder is not None:
        mutants = [mutant for mutant in mutants if folder_of(mutant.file) in options.folder]
    if options.list:
        print(*sorted(mutants, key=lambda m: (m.file, m.offset)), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="waypost-mutants-") as scratch:
        results = Results(options.results or Path(scratch) / "results.jsonl")
        run(mutants, results, options.jobs, time.monotonic() + 60 * options.minutes)
        return report(made, mutants, results)


if __name__ == "__main__":
    sys.exit(main())
