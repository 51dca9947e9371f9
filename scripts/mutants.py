"""Change the code in one small place at a time and see whether a test fails: a mutant that no test kills shows a gap.

    python scripts/mutants.py [--files PATTERN] [--sample N] [--seed S] [--jobs N] [--list]

A mutant is one changed token (a comparison, a condition, a number, a statement left out) of a store, a script, an
operation or the worker. It is tested in a copy of the tree by the suites that `SUITES` names for its file, quickest
first, until one fails. What survives must stand in `tests/mutants_left.json` with the reason, or the run fails.
A sample is drawn by its seed, so the same call makes the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/waypost")
LEFT = ROOT / "tests" / "mutants_left.json"
#: What a copy of the tree needs.
COPIED = (
    "src", "tests", "benchmarks", "examples", "scripts", "docs", ".gitignore", "pyproject.toml", "constraints.txt",
    "Makefile", "README.md", "CHANGELOG.md", "LICENSE",
)  # fmt: skip
#: A mutant that loops for ever is ended after so long and counts as killed.
SUITE_SECONDS_MAX = 600

CONFORMANCE = "tests/conformance/test_conformance.py"
MEMORY = [CONFORMANCE, "-k", "memory"]
WORKER = ["tests/worker", "-k", "memory or sqlite"]
#: The tests for the files below a folder, quickest first.
SUITES: dict[str, list[list[str]]] = {
    "store/memory": [MEMORY],
    "store/sqlite": [[CONFORMANCE, "-k", "sqlite"], ["tests/unit", "-k", "sqlite"]],
    "store/valkey": [[CONFORMANCE, "-k", "valkey"], ["tests/valkey"]],
    "store/postgres": [[CONFORMANCE, "-k", "postgres and not postgres15"], ["tests/postgres"]],
    "operations": [
        ["tests/unit/test_operations.py"],
        MEMORY,
        ["tests/worker", "-k", "memory or sqlite"],
        ["tests/unit"],
    ],
    "worker": [["tests/worker", "-k", "memory or sqlite"], ["tests/unit"], ["tests/worker", "-k", "valkey"]],
}


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

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r} -> {self.after!r}   {self.text}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.text, self.before, self.after


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
    (r"\b(?:WHERE|AND|OR|IF|WHEN|ON) [^=<>]*?(?<![<>=:])(=)(?![>=])", {"=": "<>"}),
    (r"\b(AND|OR)\b", {"AND": "OR", "OR": "AND"}),
    (r"\b(NOT )(?!NULL|EXISTS \{)", {"NOT ": ""}),
    (r" ([+-]) ", {"+": "-", "-": "+"}),
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
    for offset, before, after in found:
        line = text.count("\n", 0, offset) + 1
        yield Mutant(str(path), line, offset, before, after, lines[line - 1].strip())


def suites_of(path: str) -> list[list[str]]:
    """The tests for a file."""
    inner = str(Path(path).relative_to(SOURCE))
    return next(suites for folder, suites in SUITES.items() if inner.startswith(folder + "/"))


def all_files(pattern: str) -> list[Path]:
    """The files that mutants are made of."""
    return [
        path.relative_to(ROOT)
        for folder in SUITES
        for path in sorted((ROOT / SOURCE / folder).rglob("*"))
        if path.suffix in (".py", ".lua", ".sql")
        and "migrations" not in path.parts
        and fnmatch.fnmatch(str(path.relative_to(ROOT / SOURCE)), pattern)
    ]


# ---- testing mutants -----------------------------------------------------------------------------------------------


class Copies:
    """Copies of the tree, one for each mutant that is tested at the same time."""

    def __init__(self, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="waypost-mutants-"))
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = self._folder / str(number)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif source.exists():
                    shutil.copy(source, copy / name)
            (copy / ".venv").symlink_to(ROOT / ".venv")
            self._free.put(copy)

    def test(self, mutant: Mutant | None, suites: list[list[str]]) -> bool:
        """Whether all suites pass with this mutant in place."""
        copy = self._free.get()
        place, text = None, ""
        try:
            if mutant is not None:
                place = copy / mutant.file
                text = place.read_text()
                end = mutant.offset + len(mutant.before)
                assert text[mutant.offset : end] == mutant.before
                place.write_text(text[: mutant.offset] + mutant.after + text[end:])
            return all(self._passes(copy, suite) for suite in suites)
        finally:
            if place is not None:
                place.write_text(text)
            self._free.put(copy)

    def _passes(self, copy: Path, suite: list[str]) -> bool:
        command = [str(ROOT / ".venv/bin/python"), "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            [*command, *suite], cwd=copy, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return process.wait(SUITE_SECONDS_MAX) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._folder, ignore_errors=True)


def known_survivors() -> dict[tuple[str, str, str, str], str]:
    """The mutants that no test can or need kill, with the reason of each."""
    if not LEFT.exists():
        return {}
    return {
        (entry["file"], entry["text"], entry["before"], entry["after"]): entry["reason"]
        for entry in json.loads(LEFT.read_text())
    }


def run(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Test every mutant; those that survived."""
    copies = Copies(jobs)
    survivors: list[Mutant] = []
    started, done = time.monotonic(), 0

    def test(mutant: Mutant) -> None:
        nonlocal done
        survived = copies.test(mutant, suites_of(mutant.file))
        done += 1
        if survived:
            survivors.append(mutant)
        seconds = time.monotonic() - started
        print(f"{done}/{len(mutants)} {seconds:.0f} s {'LEFT  ' if survived else 'killed'} {mutant}", flush=True)

    suites = {tuple(suite) for mutant in mutants for suite in suites_of(mutant.file)}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            # A suite that fails without a change would kill everything.
            failing = [suite for suite in suites if not copies.test(None, [list(suite)])]
            if failing:
                sys.exit(f"these tests fail without any change: {failing}")
            list(pool.map(test, mutants))
    finally:
        copies.remove()
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", default="*", help="only files below src/waypost that match this pattern")
    parser.add_argument("--sample", type=int, help="test so many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    mutants = [mutant for path in all_files(options.files) for mutant in mutants_of(path)]
    made = len(mutants)
    if options.sample is not None and options.sample < made:
        mutants = sorted(random.Random(options.seed).sample(mutants, options.sample), key=lambda m: (m.file, m.offset))
    if options.list:
        print(*mutants, sep="\n")
        return 0
    survivors = run(mutants, options.jobs)
    known = known_survivors()
    tested = Counter(str(Path(mutant.file).parent) for mutant in mutants)
    left = Counter(str(Path(mutant.file).parent) for mutant in survivors)
    for folder in sorted(tested):
        print(f"{folder}: {tested[folder]} tested, {tested[folder] - left[folder]} killed, {left[folder]} left")
    unexplained = [mutant for mutant in survivors if mutant.key not in known]
    print(f"{made} mutants, {len(mutants)} tested, {len(mutants) - len(survivors)} killed, {len(survivors)} left,")
    print(f"{len(survivors) - len(unexplained)} of them known, {len(unexplained)} to be looked at")
    for mutant in unexplained:
        print(json.dumps({**asdict(mutant), "reason": ""}))
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
