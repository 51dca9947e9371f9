"""The code base kept tidy by a test: functions, docstrings, words and assertions, so that no one must remember them."""

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

# Written in pieces, so that this file does not find itself.
UNSAFE = re.compile(
    r"\b(?:import\s+pick" + r"le|pick" + r"le\.|(?<![\w.])ev" + r"al\(|(?<![\w.])ex" + r"ec\(|yaml\.lo" + r"ad\b)"
)
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/")
LICENCE_HEADER = re.compile(r"(?:Copyr" + r"ight|SPDX-Lic" + r"ense|Licensed un" + r"der)")
#: Other systems' words for what has a name of its own here.
FOREIGN_WORDS = frozenset(("job", "jobs", "ack", "nack", "acks", "acknowledge", "unack"))
#: Words that only this project used, for things that have a name in the field.
PRIVATE_WORDS = frozenset(re.findall(r"\w+", """
    word words told telling tells tell teller face faces colour colours door doors visitor visitors knock knocks
    linger cover covers covered echo echoes lane lanes seam seams home homes book books shelf shelves tally
    tallies mill stage stages crew ears ear bell bells pulse pulses look looks looking looked beat beats leave
    leaves taken checked shown whoever somebody nobody everybody hear hears heard ask asks asking asked say says
    said clockwork rooms patience trouble glance company story rig
"""))  # fmt: skip
#: The folders whose names have none of them. Add a folder here once its names are plain.
PLAIN_FOLDERS = (
    "src/waypost/cli", "src/waypost/client", "src/waypost/schedule", "src/waypost/see", "src/waypost/testing",
    "tests/conformance", "tests/fault", "tests/outbox", "tests/servers", "benchmarks", "examples", "scripts",
)  # fmt: skip
#: Names in which such a word has its ordinary sense, and names that are given elsewhere.
ORDINARY_NAMES = {
    "tests/fault/test_proxy.py": {"Echo", "EchoHandler", "echo"},  # an echo server
    "src/waypost/testing/bench.py": {"poll_soon_ms"},  # a parameter of `Store.claim`
}
#: The name of a test is a sentence: there a step "leaves no event".
ORDINARY_IN_SENTENCES = frozenset(("leaves",))
#: Calls that judge, besides `assert`: a test that makes one of them has an assertion.
JUDGES = re.compile(r"^(?:check|expect|must|assert)(?:_|$)|^(?:raises|fail|warns)$|^run_state_machine_as_test$")


def files(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    )


def shown(path: Path) -> str:
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


def names_of_ours(path: Path) -> Iterator[tuple[int, str]]:
    """Names that a file gives: its functions, classes, arguments and variables."""
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
        f"{shown(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def code_only(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a Python file without its comments and texts."""
    lines: dict[int, list[str]] = {}
    with io.StringIO(path.read_text()) as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                lines.setdefault(token.start[0], []).append(token.string)
    for number, words in lines.items():
        yield number, re.sub(r" ?([.(]) ?", r"\1", " ".join(words))


def judges(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            if JUDGES.search(name):
                return True
    return False


def test_there_is_code_to_check() -> None:
    assert len(PYTHON) > 10


def test_no_function_is_too_long_to_see_at_once() -> None:
    long = {
        f"{shown(path)}:{node.name}": lines
        for path in PYTHON
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_every_module_has_a_docstring() -> None:
    silent = [shown(path) for path in PYTHON if path.read_text().strip() and ast.get_docstring(tree(path)) is None]
    assert silent == []


@pytest.mark.parametrize("suffix", [".lua", ".sql"])
def test_every_script_opens_with_a_comment(suffix: str) -> None:
    bare = [shown(path) for path in files(suffix) if not path.read_text().startswith("--")]
    assert bare == []


def test_no_data_is_executed_as_code() -> None:
    hits = [
        f"{shown(path)}:{number}: {line}"
        for path in files(".py", folders=("src", "benchmarks", "examples", "scripts"))
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
        f"{shown(path)}:{line}: {name}"
        for path in files(".py", folders=("src",))
        for line, name in names_of_ours(path)
        if FOREIGN_WORDS & set(re.split(r"_|(?<=[a-z])(?=[A-Z])", name.strip("_").lower()))
    ]
    assert foreign == []


def private_words(name: str) -> set[str]:
    """Return the private words in a name, `snake_case` or `CamelCase`."""
    found = {word.lower() for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)} & PRIVATE_WORDS
    return found - ORDINARY_IN_SENTENCES if name.startswith("test_") else found


def test_names_in_plain_folders_have_no_private_word() -> None:
    hits = [
        f"{shown(path)}:{line}: {name}"
        for path in files(".py", folders=PLAIN_FOLDERS)
        for line, name in [(0, path.stem), *names_of_ours(path)]
        if private_words(name) and name not in ORDINARY_NAMES.get(shown(path), ())
    ]
    assert hits == []


def test_a_private_word_in_a_name_is_found() -> None:
    assert private_words("tell_crew") == {"tell", "crew"}
    assert private_words("WatchedCrew") == {"crew"}
    assert private_words("test_nobody_leaves") == {"nobody"}
    assert private_words("leaves") == {"leaves"}
    assert private_words("MessageIdentity") == set()


def test_every_test_has_an_assertion() -> None:
    tests = [*files(".py", folders=("tests",)), *files(".py", folders=("src/waypost/testing",))]
    idle = [
        f"{shown(path)}:{node.name}"
        for path in tests
        for node in functions(path)
        if node.name.startswith("test_") and not judges(node)
    ]
    assert idle == []


def test_no_test_sleeps_a_fixed_time() -> None:
    """A sleep inside a loop waits for a condition; one that stands alone only hopes."""
    hoping = []
    for path in files(".py", folders=("tests", "src/waypost/testing")):
        loops = [node for node in ast.walk(tree(path)) if isinstance(node, ast.While | ast.For | ast.AsyncFor)]
        waiting = {id(inner) for loop in loops for inner in ast.walk(loop)}
        hoping += [
            f"{shown(path)}:{node.lineno}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep" and id(node) not in waiting
        ]
    assert hoping == []


def kinds_compared(path: Path) -> Iterator[tuple[int, str]]:
    """Where a file decides by the kind of a store: comparisons, `match`, and tests for a concrete class."""
    concrete = frozenset(("MemoryStore", "SqliteStore", "ValkeyStore", "PostgresStore"))
    for node in ast.walk(tree(path)):
        asked: list[ast.expr] = []
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.Match():
                asked = [node.subject]
            case ast.Subscript():
                asked = [node.slice]
            case ast.Assign() | ast.NamedExpr():  # to be compared later
                asked = [node.value]
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
                if {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & concrete:
                    yield node.lineno, ast.unparse(node)
        for part in asked:
            if isinstance(part, ast.Attribute) and part.attr == "kind" and "store" in ast.unparse(part.value).lower():
                yield part.lineno, ast.unparse(part)


def test_nothing_outside_the_stores_depends_on_the_kind_of_a_store() -> None:
    stores = ROOT / "src" / "waypost" / "store"
    paths = [path for path in files(".py", folders=("src",)) if stores not in path.parents]
    assert [f"{shown(path)}:{line}: {code}" for path in paths for line, code in kinds_compared(path)] == []


def test_code_that_depends_on_the_kind_of_a_store_is_found(tmp_path: Path) -> None:
    questions = (
        'store.kind == "valkey"', 'self._store.kind in ("sqlite",)', '"memory" != post.store.kind',
        "match store.kind:\n    case _: pass", "NAMES[store.kind]", "kind = store.kind",
        "isinstance(store, PostgresStore)",
    )  # fmt: skip
    for number, question in enumerate(questions):
        path = tmp_path / f"{number}.py"
        path.write_text(question)
        assert list(kinds_compared(path)), question
    allowed = tmp_path / "allowed.py"
    allowed.write_text('f"a {store.kind} store"\nmetric.kind == "counter"\nisinstance(store, Store)')
    assert list(kinds_compared(allowed)) == []
