"""The mutation tester: it makes the changes that it lists, and its list of known survivors is current."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts import mutant_tests, mutants
from tests.conformance import conftest as conformance_fixtures

BEFORE = "LIMIT = 3\n\n\ndef is_due(at, now):\n    return at <= now\n\n\ndef other():\n    return 1\n"


def test_a_loaded_function_gets_the_changed_code(tmp_path: Path) -> None:
    path = tmp_path / "changed_module.py"
    path.write_text(BEFORE)
    spec = importlib.util.spec_from_file_location("changed_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    is_due = module.is_due
    assert is_due(1, 1)
    changed = mutant_tests.change_functions(str(path), BEFORE, BEFORE.replace("<=", "<"))
    assert [name for _, name, _ in changed] == ["is_due"]
    assert not is_due(1, 1)


def test_a_change_that_acts_at_import_is_not_tested_in_a_fork(tmp_path: Path) -> None:
    with pytest.raises(mutant_tests.NeedsImport):
        mutant_tests.change_functions(str(tmp_path / "module.py"), BEFORE, BEFORE.replace("LIMIT = 3", "LIMIT = 4"))


def test_a_number_at_the_top_of_a_module_is_changed_wherever_it_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "waypost_limits.py"
    path.write_text("LIMIT = 3\nTABLE = [LIMIT]\n\n\ndef reached(n):\n    return n >= LIMIT\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("waypost_limits")
    user = ModuleType("waypost_user")
    user.__dict__["LIMIT"] = module.__dict__["LIMIT"]
    for each in (module, user):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    before = path.read_text()
    path.write_text(before.replace("LIMIT = 3", "LIMIT = 4"))
    changed = mutant_tests.change_constant(module, before, path.read_text())
    assert [name for _, name, _ in changed] == ["reached"]
    assert user.__dict__["LIMIT"] == 4
    assert not module.__dict__["reached"](3)
    path.write_text(before.replace("TABLE = [LIMIT]", "TABLE = [LIMIT + 1]"))
    with pytest.raises(mutant_tests.NeedsImport):
        mutant_tests.change_constant(module, before, path.read_text())


def test_the_tests_of_a_script_are_those_that_call_it() -> None:
    lua = mutants.ROOT / mutants.SOURCE / "store/valkey/lua"
    text = (lua / "accept.lua").read_text()
    assert mutant_tests.verbs_of(lua / "accept.lua", text, text[:-1]) == {
        "accept", "publish", "fire_schedule", "replace_dead", "trigger_schedule",
    }  # fmt: skip
    callers = mutant_tests.functions_that_name(lua.parent, {"purge"})
    assert callers is not None
    assert "ValkeyStore.purge" in {name for _, name, _ in callers}
    assert "ValkeyStore.publish" not in {name for _, name, _ in callers}
    sql = mutants.ROOT / mutants.SOURCE / "store/postgres/sql"
    text = (sql / "running.sql").read_text()
    place = text.index("{remove_messages}(\n")
    changed = text[: place + 200] + "#" + text[place + 201 :]
    assert mutant_tests.verbs_of(sql / "running.sql", text, changed) == {"remove_messages", "purge"}
    callers = mutant_tests.functions_that_name(sql.parent, {"remove_messages", "purge"})
    assert callers is not None
    assert "PostgresStore.purge" in {name for _, name, _ in callers}


def test_every_test_file_that_is_named_is_there() -> None:
    for paths, pattern in mutants.SUITES.values():
        assert [path for path in paths if not (mutants.ROOT / path).exists()] == []
        for names in re.findall(r"/test_\(([\w|]+)\)", pattern):
            for name in names.split("|"):
                assert [*(mutants.ROOT / paths[2]).glob(f"test_{name}.py")], name


def test_prepared_tables_with_other_functions_are_found() -> None:
    """A changed SQL file is tested in tables that are made anew: the class that keeps them is known by its name."""
    assert hasattr(conformance_fixtures, mutant_tests.NAMESPACES)
    for _, module, name in mutant_tests.CACHES:
        assert hasattr(getattr(importlib.import_module(module), name), "cache_clear")


def test_every_mutant_changes_its_file_and_keeps_its_lines() -> None:
    for path in mutants.all_files("store/memory/queue.py"):
        text = (mutants.ROOT / path).read_text()
        for mutant in mutants.mutants_of(path):
            changed = mutant.changed(text)
            assert changed != text
            assert changed.count("\n") == text.count("\n")


def test_a_larger_sample_of_a_seed_holds_the_smaller_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(count: int) -> set[str]:
        arguments = ["mutants", "--files", "store/memory/*", "--guards", "--sample", str(count), "--list"]
        monkeypatch.setattr(sys, "argv", arguments)
        assert mutants.main() == 0
        return set(capsys.readouterr().out.splitlines())

    assert len(drawn(20)) == 20
    assert drawn(20) < drawn(50)


def test_every_known_survivor_is_a_mutant_of_today_with_a_reason() -> None:
    entries = json.loads(mutants.LEFT.read_text())
    for entry in entries:
        assert entry["kind"] in ("equivalent", "tuning", "gap"), entry
        assert entry["reason"], entry
    possible = {
        mutant.key for name in {entry["file"] for entry in entries} for mutant in mutants.mutants_of(Path(name))
    }
    assert mutants.known_survivors().keys() <= possible
